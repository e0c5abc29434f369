"""What memory costs and what the prefix cache saves, on a real model

python bench/memory.py [prefix|users|bookkeeping ...]  Writes bench/records/memory.json.

prefix: 32 requests at once, 500 shared and 16 own prompt tokens. users: 200 people, a pool for 20, by recompute and
by swap, each answer compared with the same request alone. bookkeeping: thread CPU time of schedule and update at 256
running requests."""
import json, random, sys
from pathlib import Path
from cbatch import LLM, load_model
from cbatch.bench import time_scheduler
from cbatch.driving import drive
from cbatch.metrics import ttft_s
from cbatch.results import machine
from cbatch.token_loop import compare_tokens
from cbatch.trace_format import written
from cbatch.workloads import WorkItem, Workload

OUT, SEED = Path(__file__).parent/'records'/'memory.json', 0

def agreed(lm, work:Workload, xs:list, ys:list)->list:
    "The answers of two runs, compared request by request"
    return [compare_tokens(lm, w.prompt_ids(lm.vocab_size, SEED), x.output_ids, y.output_ids)
            for w, x, y in zip(work, xs, ys)]

def prefix(lm)->dict:
    "Mean TTFT with and without the cache"
    work = Workload('shared', [WorkItem(4, [('shared', 500), (f'own {i}', 16)]) for i in range(32)])
    res, sent = {}, {}
    for name in ('without', 'with'):
        with LLM(lm, max_num_seqs=32, max_num_batched_tokens=2048, prefix_caching=name == 'with') as llm:
            drive(llm, Workload('warm', [WorkItem(2, [('warm', 64)])]), SEED)
            sent[name], _ = drive(llm, work, SEED)
            mean = sum(ttft_s(s.metrics) for s in sent[name]) / len(work)
            res[name] = dict(mean_ttft_s=mean, hit_rate=llm.metrics['prefix_hit_rate'])
    return dict(**res, ratio=res['without']['mean_ttft_s'] / res['with']['mean_ttft_s'], requests=len(work),
                equal=sum(map(bool, agreed(lm, work, sent['with'], sent['without']))))

def users(lm, n=200, room_for=20, max_tokens=16)->dict:
    "Nothing fails, answers equal the solo ones, and what that cost"
    rng, bs = random.Random(SEED), 16
    work = Workload('users', [WorkItem(max_tokens, [(f'user {i}', rng.randint(8, 48))]) for i in range(n)])
    blocks, res = room_for * -(-(48 + max_tokens) // bs), {}
    with LLM(lm, max_num_seqs=1, prefix_caching=False, num_blocks=64) as solo: refs, _ = drive(solo, work, SEED)
    for mode in ('recompute', 'swap'):
        with LLM(lm, max_num_seqs=n, max_num_batched_tokens=512, num_blocks=blocks, block_size=bs, preemption=mode,
                 prefix_caching=False, watermark=0.) as llm:
            sent, took = drive(llm, work, SEED)
            m, lost, same = llm.metrics, llm.num_blocks - llm.num_free_blocks, agreed(lm, work, sent, refs)
        computed = work.num_prompt_tokens + n * (max_tokens - 1)
        res[mode] = dict(wall_s=took, failed=sum(bool(s.error) for s in sent), equal=sum(a.equal for a in same),
                         ties=sum(a.tie for a in same), steps=m['num_steps'], preemptions=m['num_preemptions'],
                         recomputed_tokens=m['num_recomputed_tokens'], swapped_blocks=m['num_swapped_blocks'],
                         computed_over_useful=1 + m['num_recomputed_tokens'] / computed, blocks_lost=lost)
    return dict(users=n, blocks=blocks, **res)

def bookkeeping(lm, running=256, waiting=744, steps=200)->dict:
    "Thread CPU time of schedule and update in ms a step, decoding"
    us = {name: time_scheduler(running, waiting, steps=steps, prefix_caching=caching)
          for name, caching in {'caching off': False, 'caching on': True}.items()}
    return dict(running=running, ms_per_step={name: running * x / 1000 for name, x in us.items()})

def main(*names:str):
    facts = dict(command='python bench/memory.py', seed=SEED, machine=machine())
    old = json.loads(OUT.read_text()) if OUT.exists() else {}
    lm = load_model('smollm2')
    for f in (prefix, users, bookkeeping):
        if names and f.__name__ not in names: continue
        old[f.__name__] = {**facts, **f(lm)}
        print(f.__name__, json.dumps(old[f.__name__], indent=1))
        with written(OUT) as file: file.write(json.dumps(old, indent=1) + '\n')

if __name__ == '__main__': main(*sys.argv[1:])
