"""What fewer bits are worth: python bench/bits.py [--threads 2] [--cpu]

Writes bench/records/bits.json: SmolLM2's weights unpacked to bfloat16, kept in the codes of its file, and made 8 bits
by rounding. Decode steps of 1 to 64 requests and the workload W64, in turns within one run; MB of weights, seconds to
load and peak memory, each in a process of its own; and on text of this repository how far each is from the same file
in float32: mean log probability, divergence, and how often the likeliest token is the same. Where llama-cpp-python is
installed, llama.cpp reads the same file beside the kept weights: one answer, 16 and 64 at once, in turns.
On a machine with neighbours: --threads 1 --cpu, which counts CPU time. --quick: few steps and no record."""
import argparse, json, random, subprocess, sys, time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
import torch
import torch.nn.functional as F
from cbatch import LLM, SamplingParams
from cbatch.core import Plan, Request, Scheduled
from cbatch.loading import load_model, smollm2_gguf
from cbatch.peers import run_llama_cpp
from cbatch.quant import quantise, weight_bytes
from cbatch.ragged_batch import pack
from cbatch.results import write_record
from cbatch.workloads import WorkItem, w64

HERE = Path(__file__).resolve().parent
OUT, WAYS = HERE/'records'/'bits.json', ('bfloat16', 'kept', '8 bits')
MEASURE = """
import json, time, torch, transformers
from cbatch.loading import load_model
start = time.perf_counter()
load_model('smollm2', 'bfloat16', weights={weights!r})
loaded, said = time.perf_counter() - start, open('/proc/self/status').read().split()
print(json.dumps(dict(load_s=loaded, peak_mb=int(said[said.index('VmHWM:') + 1]) / 1000)))"""

def made(way:str):
    if way == '8 bits': return quantise(load_model('smollm2', 'bfloat16'), 8)
    return load_model('smollm2', 'bfloat16', weights='kept' if way == 'kept' else 'unpacked')

def loading(way:str)->dict[str, float]:
    "Seconds and MB of a process that loads the model"
    if way == '8 bits': return {}
    code = MEASURE.format(weights='kept' if way == 'kept' else 'unpacked')
    return json.loads(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout)

def decode(models:dict, requests:int, a:argparse.Namespace, clock)->dict[str, float]:
    "Median ms of a step of so many requests, by way"
    rng, took = random.Random(a.seed), {w: [] for w in models}
    asks = [[rng.randrange(100, 40_000) for _ in range(a.context)] for _ in range(requests)]
    sizes = dict(max_num_seqs=requests, max_model_len=a.context + 200, prefix_caching=False)
    llms = {w: LLM(m, **sizes) for w, m in models.items()}
    for llm in llms.values():
        for p in asks: llm.add(p, SamplingParams(temperature=0, max_tokens=199, ignore_eos=True))
        while llm.metrics['num_sampled_tokens'] < 2 * requests: llm.step()
    for _ in range(a.steps):
        for way, llm in llms.items():
            start = clock()
            llm.step()
            took[way].append(1000 * (clock() - start))
    for llm in llms.values(): llm.close()
    return {w: median(ts) for w, ts in took.items()}

def throughput(models:dict, a:argparse.Namespace, clock)->dict[str, float]:
    "Tokens/s over W64 in 32 slots, the best of some rounds, by way"
    crowd, best = w64(a.seed), dict.fromkeys(models, 0.)
    prompts = [x.prompt_ids(49152, a.seed) for x in crowd]
    wishes = [SamplingParams(temperature=0, max_tokens=x.output_len, ignore_eos=True) for x in crowd]
    for i in range(a.rounds):
        for way in (list(models), list(models)[::-1])[i % 2]:
            with LLM(models[way], max_num_seqs=32, prefix_caching=False) as llm:
                start = clock()
                llm.generate(prompts, wishes, use_tqdm=False)
                best[way] = max(best[way], llm.metrics['num_sampled_tokens'] / (clock() - start))
    return best

def beside_llama_cpp(model, a:argparse.Namespace, clock)->dict[int, dict[str, float]]:
    "Tokens/s of some answers at once, the best of some rounds: kept weights, and llama.cpp on the same file"
    def ours(work, prompts, n):
        with LLM(model, max_num_seqs=n, max_model_len=a.context + a.answer, prefix_caching=False) as llm:
            wish, start = SamplingParams(temperature=0, max_tokens=a.answer, ignore_eos=True), clock()
            llm.generate(prompts, wish, use_tqdm=False)
            return clock() - start
    def timed(work, prompts, n):
        start = clock()
        run_llama_cpp(smollm2_gguf(), work, prompts, n, a.context + a.answer + 1)
        return clock() - start
    def theirs(work, prompts, n): return timed(work, prompts, n) - timed([], [], n)     # without the loading
    best, who = {n: {} for n in a.answers}, {'kept': ours, 'llama.cpp': theirs}
    for n in a.answers:
        work = [WorkItem(a.answer, [(f'own {i}', a.context)]) for i in range(n)]
        prompts = [x.prompt_ids(49152, a.seed) for x in work]
        for i in range(max(a.rounds, 1)):
            for way in (list(who), list(who)[::-1])[i % 2]:
                best[n][way] = max(best[n].get(way, 0.), n * a.answer / who[way](work, prompts, n))
    return best

def long_contexts(model, a:argparse.Namespace, clock)->dict[str, dict[str, float]]:
    "Median ms of a step and of its attention, with keys and values of 16 bits and of 8"
    rng, out = random.Random(a.seed), {}
    for n, context in a.contexts:
        asks = [[rng.randrange(100, 40_000) for _ in range(context)] for _ in range(n)]
        sizes = dict(max_num_seqs=n, max_model_len=context + a.steps + 8, prefix_caching=False)
        llms, took = {way: LLM(model, kv_dtype=way, **sizes) for way in ('auto', 'int8')}, {}
        for llm in llms.values():
            for p in asks: llm.add(p, SamplingParams(temperature=0, max_tokens=a.steps + 8, ignore_eos=True))
            while llm.metrics['num_sampled_tokens'] < 2 * n: llm.step()
        for _ in range(a.steps):
            for way, llm in llms.items():
                start, before = clock(), llm.runner.executor.forward_s['attention']
                llm.step()
                took.setdefault((way, 'step'), []).append(1000 * (clock() - start))
                took.setdefault((way, 'attention'), []).append(
                    1000 * (llm.runner.executor.forward_s['attention'] - before))
        for llm in llms.values(): llm.close()
        out[f'{n} x {context}'] = {f'{what}, {way}': median(ts) for (way, what), ts in took.items()}
    return out

def log_probs(llm:LLM, ids:list[int])->torch.Tensor: # [T, V]
    "Of every token of a text, in one step"
    r, size, e = Request('text', ids, SamplingParams(), 1), llm.config.block_size, llm.runner.executor
    r.block_table = list(range(1, 2 + len(ids) // size))
    batch = pack(Plan(0, 0., scheduled=[Scheduled(r, 0, len(ids), rows=1)]), size, 'cpu', llm.model.max_len)
    batch.logit_rows = torch.arange(len(ids))
    return e.forward(batch).float().log_softmax(-1)

def accuracy(models:dict, num_tokens:int)->dict[str, dict[str, float]]:
    "How far each is from float32, over a few texts"
    exact = load_model('smollm2', 'float32')
    files = [HERE.parent/f for f in ('LICENSE', 'README.md', 'CONTRIBUTING.md', 'CHANGELOG.md', 'Makefile', 'setup.py')]
    texts = [exact.tokenizer(f.read_text()[:8000])['input_ids'][:num_tokens] for f in files]
    def scores(m, **kw):
        with LLM(m, num_blocks=64, **kw) as llm: return [log_probs(llm, t) for t in texts]
    def nll(ls): return sum(F.nll_loss(l[:-1], torch.tensor(t[1:]), reduction='sum').item() for l, t in zip(ls, texts))
    base, n, out = scores(exact), sum(map(len, texts)), {}
    for way, m in [*models.items(), ('int8 KV', models['bfloat16'])]:
        ls = scores(m, kv_dtype='int8' if way == 'int8 KV' else 'auto')
        kl = sum((b.exp() * (b - l)).sum().item() for b, l in zip(base, ls)) / n
        same = sum((b.argmax(-1) == l.argmax(-1)).sum().item() for b, l in zip(base, ls)) / n
        out[way] = dict(nll_more=(nll(ls) - nll(base)) / (n - len(texts)), kl=kl, same_top=same, tokens=n)
    return out

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--rows', type=lambda s: [int(x) for x in s.split(',')], default=[1, 4, 8, 16, 32, 64])
    p.add_argument('--answers', type=lambda s: [int(x) for x in s.split(',')], default=[1, 16, 64])
    for name, default in dict(context=128, answer=64, steps=25, rounds=3, tokens=384, threads=2, seed=0).items():
        p.add_argument(f'--{name}', type=int, default=default)
    p.add_argument('--quick', action='store_true', help='does it work?')
    p.add_argument('--cpu', action='store_true', help='CPU time of one thread, not seconds on the wall')
    a = p.parse_args()
    if a.cpu and a.threads != 1: p.error('--cpu counts one thread: --threads 1')
    if a.quick: a.rows, a.answers, a.answer, a.steps, a.rounds, a.tokens = [1, 4], [1, 4], 8, 3, 0, 64
    a.contexts = [(2, 64), (1, 200)] if a.quick else [(32, 1024), (1, 8000)]
    torch.set_num_threads(a.threads)
    clock, models = time.thread_time if a.cpu else time.perf_counter, {w: made(w) for w in WAYS}
    ways = {w: dict(weights_mb=weight_bytes(m) / 1e6) | loading(w) for w, m in models.items()}
    far = accuracy(models, a.tokens)
    small = far.pop('int8 KV')
    for w, d in far.items(): ways[w] |= d
    for w, d in [*ways.items(), ('int8 KV', small)]: print(w, {k: round(x, 4) for k, x in d.items()}, flush=True)
    steps = {n: decode(models, n, a, clock) for n in a.rows}
    for n, d in steps.items(): print(f'{n} requests:', {w: f'{x:.1f} ms' for w, x in d.items()}, flush=True)
    speed = throughput(models, a, clock) if a.rounds else {}
    print('W64:', {w: f'{x:.0f} tokens/s' for w, x in speed.items()})
    long = long_contexts(models['bfloat16'], a, clock)
    for n, d in long.items(): print(n, {w: f'{x:.2f} ms' for w, x in d.items()}, flush=True)
    peer = beside_llama_cpp(models['kept'], a, clock) if find_spec('llama_cpp') else {}
    for n, d in peer.items(): print(f'{n} answers:', {w: f'{x:.0f} tokens/s' for w, x in d.items()}, flush=True)
    told = dict(llama_cpp=version('llama-cpp-python'), llama_cpp_tokens_per_s=peer) if peer else {}
    facts = told | dict(model='smollm2', dtype='bfloat16', ways=ways, step_ms=steps, w64=speed)
    facts |= dict(kv_ms=long, int8_kv=small)
    write_record(None if a.quick else OUT, **vars(a), **facts)

if __name__ == '__main__': main()
