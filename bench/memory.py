"""What memory costs and what the prefix cache saves, on a real model: python bench/memory.py [prefix|users|bookkeeping ...]

Writes bench/records/memory.json. prefix: 32 requests at once, 500 shared and 16 own prompt tokens. users: 200 people, a pool for 20, by recompute
and by swap, each answer compared with the same request alone. bookkeeping: thread CPU time of schedule and update at 256 running requests."""
import json, random, sys, time
from pathlib import Path
from cbatch import LLM, SamplingParams, load_model
from cbatch.cli import _machine
from cbatch.core import Request, StepOutput
from cbatch.params import EngineConfig
from cbatch.metrics import ttft_s
from cbatch.prefix_caching import PrefixBlocks
from cbatch.scheduler import Scheduler
from cbatch.token_loop import compare_tokens

OUT, SEED = Path(__file__).parent/'records'/'memory.json', 0

def prefix(lm):
    "Mean TTFT with and without the cache"
    rng, res = random.Random(SEED), {}
    shared = [rng.randrange(100, 40_000) for _ in range(500)]
    prompts = [shared + [rng.randrange(100, 40_000) for _ in range(16)] for _ in range(32)]
    for caching in (False, True):
        with LLM(lm, max_num_seqs=32, max_num_batched_tokens=2048, prefix_caching=caching) as llm:
            llm.generate(prompts[0][:64], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)    # warm
            outs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
            res['with' if caching else 'without'] = dict(mean_ttft_s=sum(ttft_s(o.metrics) for o in outs) / 32, hit_rate=llm.metrics['prefix_hit_rate'],
                                                         tokens=[o.outputs[0].token_ids for o in outs])
    same = sum(bool(compare_tokens(lm, p, a, b)) for p, a, b in zip(prompts, res['with'].pop('tokens'), res['without'].pop('tokens')))
    return dict(**res, ratio=res['without']['mean_ttft_s'] / res['with']['mean_ttft_s'], equal=same, requests=32)

def users(lm, n=200, room_for=20, max_tokens=16):
    "Nothing fails, answers equal the solo ones, and what that cost"
    rng, bs = random.Random(SEED), 16
    prompts = [[rng.randrange(100, 40_000) for _ in range(rng.randint(8, 48))] for _ in range(n)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    blocks = room_for * -(-(48 + max_tokens) // bs)
    with LLM(lm, max_num_seqs=1, prefix_caching=False, num_blocks=64) as solo: refs = [solo.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    res = {}
    for mode in ('recompute', 'swap'):
        with LLM(lm, max_num_seqs=n, max_num_batched_tokens=512, num_blocks=blocks, block_size=bs, preemption=mode, prefix_caching=False, watermark=0.) as llm:
            start = llm.clock(); outs = llm.generate(prompts, params, use_tqdm=False)
            m, agree = llm.metrics, [compare_tokens(lm, p, o.outputs[0].token_ids, r) for p, o, r in zip(prompts, outs, refs)]
            computed = sum(len(p) + max_tokens - 1 for p in prompts)
            res[mode] = dict(wall_s=llm.clock() - start, failed=sum(bool(o.error) for o in outs), equal=sum(a.equal for a in agree), ties=sum(a.tie for a in agree), steps=m['num_steps'],
                             preemptions=m['num_preemptions'], recomputed_tokens=m['num_recomputed_tokens'], swapped_blocks=m['num_swapped_blocks'],
                             computed_over_useful=1 + m['num_recomputed_tokens'] / computed, blocks_lost=llm.num_blocks - llm.num_free_blocks)
    return dict(users=n, blocks=blocks, **res)

def bookkeeping(lm=None, running=256, steps=200):
    "Thread CPU time of schedule and update in ms a step, decoding"
    res = {}
    for caching in (False, True):
        s = Scheduler(EngineConfig(max_num_seqs=running, max_num_batched_tokens=8192), PrefixBlocks(20_000, 16, caching)); s.explain = False
        for i in range(1000): s.add(Request(f'r{i}', [i * 7919 % 50_000 + j for j in range(100)], SamplingParams(), 400, seq=i))
        for _ in range(10): p = s.schedule(); s.update(p, StepOutput({x.request.request_id: [1] for x in p.scheduled if x.rows}))
        start = time.thread_time()
        for _ in range(steps): p = s.schedule(); s.update(p, StepOutput({x.request.request_id: [1] for x in p.scheduled}))
        res['caching on' if caching else 'caching off'] = 1000 * (time.thread_time() - start) / steps
    return dict(running=running, ms_per_step=res)

def main(*names):
    facts = dict(command='python bench/memory.py', seed=SEED, machine=_machine())
    old = json.loads(OUT.read_text()) if OUT.exists() else {}
    lm = load_model('smollm2')
    for f in (prefix, users, bookkeeping):
        if names and f.__name__ not in names: continue
        old[f.__name__] = {**facts, **f(lm)}; print(f.__name__, json.dumps(old[f.__name__], indent=1))
        OUT.write_text(json.dumps(old, indent=1) + '\n')

if __name__ == '__main__': main(*sys.argv[1:])
