"""Prove by trying: python bench/invariants.py [million [STEPS]] [faults]  Writes bench/records/invariants.json.

million: random lives of the real scheduler, allocator, prefix cache and preemptors before a toy model, every
invariant checked after every step. faults: plants each fault of tests/memory_faults.py and tests/test_mutations.py
and says which random life or schedule finds it."""
import os; os.environ.setdefault('CBATCH_NATIVE', '0')      # faults are planted in Python, so Python must be what runs
import json, random, sys, time
from contextlib import ExitStack
from pathlib import Path
from traceback import extract_tb
from unittest.mock import patch
from cbatch.results import machine
from cbatch.trace_format import written

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT/'tests'))
OUT = ROOT/'bench/records/invariants.json'

def million(steps=1_000_000):
    from world import run_world
    met, seed, start = dict(steps=0, preempted=0, hits=0, swapped=0, forked=0), 0, time.time()
    while met['steps'] < steps:
        try: w = run_world(seed, events=60)
        except AssertionError: print(f'seed {seed} fails'); raise
        for k in met: met[k] += getattr(w, k)
        seed += 1
        if seed % 2000 == 0: print(f"{met['steps']:,} steps, {seed:,} lives, {time.time() - start:.0f} s", flush=True)
    return dict(met, lives=seed, first_seed=0, violations=0, seconds=round(time.time() - start))

def first_failure(plant, run, seeds):
    "The first seed whose run goes wrong with the fault planted"
    with ExitStack() as stack:
        def put(owner, name, new):
            stack.enter_context(patch(owner, name, new) if isinstance(owner, str) else patch.object(owner, name, new))
        plant(put)
        for seed in range(seeds):
            try: run(seed)
            except Exception as e: return seed, (str(e).splitlines() or [extract_tb(e.__traceback__)[-1].line])[0][:100]

def faults():
    import logging; logging.disable(logging.CRITICAL)
    import memory_faults, test_mutations
    from harness import run_schedule
    from toy import Crowd
    from world import draw_world, live_on
    def life(seed):
        rng = random.Random(seed)
        live_on(draw_world(rng), rng)
    rows = []
    def row(name, by, hit):
        rows.append(dict(fault=name.replace('_', ' '), found_by=by, seed=hit and hit[0], says=hit and hit[1]))
        print(rows[-1], flush=True)
    for name, plant in memory_faults.FAULTS.items(): row(name, 'lives', first_failure(plant, life, 400))
    for name, (plant, policy, by) in test_mutations.FAULTS.items():
        if by == 'toy': row(name, 'toy crowds', first_failure(plant, lambda seed: Crowd(seed, 'vllm').run(), 200))
        else:
            run = lambda seed: run_schedule(seed, test_mutations.POLICY[policy](), 8)
            row(name, 'engine schedules', first_failure(plant, run, 30))
    return rows

def main(*args):
    old = json.loads(OUT.read_text()) if OUT.exists() else {}
    for f in (million, faults):
        if args and f.__name__ not in args: continue
        n = [int(a) for a in args if a.isdigit()] if f is million else []
        res, command = f(*n), ' '.join(['python bench/invariants.py', f.__name__, *map(str, n)])
        old[f.__name__] = dict(command=command, machine=machine(), result=res)
        with written(OUT) as file: file.write(json.dumps(old, indent=1) + '\n')
    return int(any(r['seed'] is None for r in old.get('faults', {}).get('result', [])))

if __name__ == '__main__': sys.exit(main(*sys.argv[1:]))
