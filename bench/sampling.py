"""What a step of sampling costs for 64 requests with mixed options: python bench/sampling.py [--threads 2]

Writes bench/records/sampling.json. Both ways to sample, in C++ (native, built here if there is a compiler) and in
torch, beside torch's own softmax, argmax and sort of the same logits. Each figure is the best of many repeats, in
turns, so that a busy moment of the machine hurts none alone; the load average stands beside them."""
import argparse, json, os, platform, random, sys, time
from pathlib import Path
import torch, transformers
from cbatch import SamplingParams
from cbatch.drawing import sample_torch
from cbatch.sampler import FAST, sample_native
from cbatch.sampling import SamplerState
from cbatch.trace_format import written

KINDS = {'greedy': dict(temperature=0), 'temperature': dict(temperature=.8), 'top_k': dict(top_k=40),
         'top_p': dict(temperature=.7, top_p=.9), 'min_p': dict(min_p=.05),
         'top_k, top_p and penalty': dict(temperature=.8, top_k=50, top_p=.95, repetition_penalty=1.1),
         'presence, frequency and bias': dict(presence_penalty=.5, frequency_penalty=.2,
                                              logit_bias={i: -1. for i in range(20)}),
         'logprobs, bad_words and min_tokens': dict(temperature=.7, logprobs=5, min_tokens=500, bad_words=['x'])}

def machine():
    cpu = next((l.split(':')[1].strip() for l in open('/proc/cpuinfo') if l.startswith('model name')),
               '') if os.path.exists('/proc/cpuinfo') else ''
    return dict(cpu=cpu or platform.processor(), cores=os.cpu_count(),
                cpu_capability=torch.backends.cpu.get_cpu_capability(), python=platform.python_version(),
                torch=torch.__version__)

def requests(kinds, a):
    "States of requests that have said 128 tokens after a prompt of 256"
    rng = random.Random(a.seed)
    ids = lambda n: [rng.randrange(a.vocab) for _ in range(n)]
    return [SamplerState(SamplingParams(**k), ids(256), ids(128), i, 0, [0, 2], [[5], [6, 7]] if 'bad_words' in k
                         else ()) for i, k in enumerate((kinds * a.rows)[:a.rows])]

def logits(a):
    "A model's own logits, one row per position of its text; or noise of about their shape"
    if a.model == 'noise': return torch.randn(a.rows, a.vocab, generator=torch.Generator().manual_seed(a.seed)) * 2.5
    from cbatch.loading import load_model
    lm = load_model(a.model)
    text = Path(__file__).resolve().parent.parent.joinpath('README.md').read_text(encoding='utf-8')
    with torch.no_grad():
        x = lm.hf_model(input_ids=torch.tensor([lm.tokenizer.encode(text)[:2 * a.rows]])).logits[0].float()
    a.vocab = x.shape[1]
    return x[-a.rows:].clone()

def main():
    p = argparse.ArgumentParser()
    for name, default in dict(model='smollm2', rows=64, vocab=49_152, threads=2, repeats=200, seed=0).items():
        p.add_argument(f'--{name}', default=default, type=type(default))
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    x = logits(a)
    work = {'softmax (torch)': lambda y: y.softmax(-1), 'argmax (torch)': lambda y: y.argmax(-1),
            'sort (torch)': lambda y: y.sort(-1)}
    os.environ['CBATCH_NATIVE'] = '1'; FAST.build()
    ways = dict(torch=sample_torch) | (dict(native=lambda y, s: sample_native(FAST.lib, y, s)) if FAST.lib else {})
    for name, kinds in {'mixed': list(KINDS.values()), **{k: [v] for k, v in KINDS.items()}}.items():
        for way, f in ways.items(): work[f'{name} ({way})'] = lambda y, f=f, s=requests(kinds, a): f(y, s)
    best = dict.fromkeys(work, float('inf'))
    for i in range(a.repeats):
        for name, f in work.items():
            if name.startswith('sort') and i > 5: continue
            y = x.clone()
            start = time.perf_counter(); f(y); best[name] = min(best[name], time.perf_counter() - start)
    ms = {k: round(1000 * t, 3) for k, t in best.items()}
    rec = dict(command=' '.join(['python bench/sampling.py', *sys.argv[1:]]), **vars(a), **machine(),
               transformers=transformers.__version__, load_average=os.getloadavg()[0], ms_per_step=ms,
               mixed_over_greedy_ms={w: round(ms[f'mixed ({w})'] - ms[f'greedy ({w})'], 3) for w in ways},
               mixed_over_softmax={w: round(ms[f'mixed ({w})'] / ms['softmax (torch)'], 2) for w in ways})
    out = Path(__file__).parent/'records'/'sampling.json'
    out.parent.mkdir(exist_ok=True)
    with written(out) as f: f.write(json.dumps(rec, indent=1) + '\n')
    for k, v in ms.items(): print(f'{k:44} {v:8.3f} ms a step')
    for w in ways:
        print(f"{w}: mixed costs {rec['mixed_over_greedy_ms'][w]} ms over greedy, "
              f"and {rec['mixed_over_softmax'][w]} times torch's softmax")
    print(f'-> {out}')

if __name__ == '__main__': main()
