"""The ways to run a step on a CPU, side by side in one run: python bench/paths.py [--threads 2]

Writes bench/records/paths.json. Decode steps of 16 and 64 requests at context 512, one request alone beside
transformers' `generate`, and how far answers in 16 bits agree with those in 32. Each figure is the best of some steps
taken in turns, a busy moment hurts none alone if --rounds is raised."""
import argparse, json, random, time
from pathlib import Path
import torch
from cbatch import LLM, SamplingParams
from cbatch.ceiling import model_facts, rates, step_work
from cbatch.loading import load_model
from cbatch.results import machine, write_record

PATHS = {'transformers modules, attention in torch': dict(backend='torch', lean=False),
         'transformers modules, attention in C++': dict(lean=False),
         'lean model, products by oneDNN': dict(products='onednn'), 'lean model': dict(products='panels')}

def made(name, lm, **kw): return LLM(lm, **PATHS[name], **kw)

def decode(lm, a, requests, dtype):
    "ms a step by path; all requests hold the same number of tokens"
    best, work = dict.fromkeys(PATHS, float('inf')), None
    rng = random.Random(a.seed)
    asks = [[rng.randrange(100, 40_000) for _ in range(a.context)] for _ in range(requests)]
    for _ in range(a.rounds):
        for name in PATHS:
            with made(name, lm, max_num_seqs=requests, max_num_batched_tokens=2048, max_model_len=a.context + 64,
                      prefix_caching=False) as llm:
                sp = SamplingParams(temperature=0, max_tokens=a.steps + 8, ignore_eos=True)
                for p in asks: llm.add(p, sp)
                while llm.metrics['num_sampled_tokens'] < requests * 2: llm.step()
                for _ in range(a.steps):
                    t = time.perf_counter(); llm.step(); best[name] = min(best[name], time.perf_counter() - t)
                if work is None: work = step_work(llm.trace[-1], model_facts(lm))
    return {k: round(1000 * v, 2) for k, v in best.items()}, work

def alone(lm, a):
    "s for one answer of 64 tokens, ours and transformers'"
    ids, n, ours, theirs = list(range(1000, 1032)), 64, float('inf'), float('inf')
    with LLM(lm, max_model_len=512) as llm:
        for _ in range(a.rounds + 1):
            t = time.perf_counter()
            llm.generate([ids], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True), use_tqdm=False)
            ours = min(ours, time.perf_counter() - t)
            t = time.perf_counter()
            with torch.no_grad():
                lm.hf_model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                                     max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
            theirs = min(theirs, time.perf_counter() - t)
    return dict(tokens=n, cbatch_s=round(ours, 3), transformers_s=round(theirs, 3), ratio=round(ours / theirs, 3))

def agreement(exact, half, a):
    "Of answers to 32 real prompts: share of tokens before the first that differs from transformers' modules in float32"
    asks = [f'{what} {thing} is' for what in ('The best thing about', 'My opinion of', 'What nobody knows about',
                                              'A short history of')
            for thing in ('rain', 'bread', 'the sea', 'chess', 'Rome', 'sleep', 'iron', 'music')]
    sp = SamplingParams(temperature=0, max_tokens=a.answer, ignore_eos=True)
    def answers(lm, name):
        with made(name, lm, max_model_len=256) as llm:
            return [o.outputs[0].token_ids for o in llm.generate(asks, sp, use_tqdm=False)]
    def same(x, y): return next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), len(x)) / len(x)
    names = list(PATHS)
    want = answers(exact, names[0])
    out = {}
    for dtype, lm in (('float32', exact), ('bfloat16', half)):
        for name in names[:2] + names[3:]:
            got = answers(lm, name)
            out[f'{dtype}, {name}'] = dict(equal_answers=sum(x == y for x, y in zip(got, want)), of=len(want),
                                           tokens_before_the_first_difference=round(sum(map(same, got,
                                               want)) / len(want), 3))
    return out

def main():
    p = argparse.ArgumentParser()
    for name, default in dict(model='smollm2', threads=2, context=512, steps=16, rounds=2, answer=48, seed=0).items():
        p.add_argument(f'--{name}', default=default, type=type(default))
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    half, exact = load_model(a.model, 'bfloat16'), load_model(a.model, 'float32')
    rec = dict(vars(a), machine=machine(), decode={}, roofline={})
    for dtype, lm in (('bfloat16', half), ('float32', exact)):
        speed = rates(lm.dtype)
        rec['roofline'][dtype] = speed
        for n in (16, 64) if dtype == "bfloat16" else (16,):
            ms, (size, ops) = decode(lm, a, n, dtype)
            floor = max(size / speed['bytes_per_s'], ops / speed['flop_per_s']) * 1000
            rec['decode'][f'{dtype}, {n} requests'] = dict(ms=ms, floor_ms=round(floor, 2),
                                                           share={k: round(floor / v, 3) for k, v in ms.items()})
            print(dtype, n, rec['decode'][f'{dtype}, {n} requests'], flush=True)
    rec['alone'] = {'bfloat16': alone(half, a), 'float32': alone(exact, a)}; print(rec['alone'], flush=True)
    rec['agreement'] = agreement(exact, half, a); print(json.dumps(rec['agreement'], indent=1))
    write_record(Path(__file__).parent/'records'/'paths.json', **rec)

if __name__ == '__main__': main()
