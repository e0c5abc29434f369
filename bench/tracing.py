"""What it costs to keep a trace, on and off in turns within one run: python bench/tracing.py [--rounds 3]

Writes bench/records/tracing.json. W64 in 32 slots, thread CPU time a step, on one thread. Once with a model, where a
step is long and tells the share; once without one, where nothing but the engine's own work is left and the difference
can be seen in microseconds. Steps are paired by number: with the trace on or off the same is decided."""
import argparse, gc, time
from pathlib import Path
from statistics import median
import torch
from cbatch import LLM
from cbatch.driving import drive
from cbatch.loading import load_model
from cbatch.results import write_record
from cbatch.simulator import simulate
from cbatch.workloads import w64

OUT = Path(__file__).parent/'records'/'tracing.json'
SIZES = dict(max_num_seqs=32, max_num_batched_tokens=2048)

def steps_s(lm, traced, seed):
    "Thread CPU s of each step of W64 on a model"
    took = []
    with LLM(lm, trace=traced, **SIZES) as llm:
        turn = llm.turn
        def timed():
            start = time.thread_time()
            wait = turn()
            took.append(time.thread_time() - start)
            return wait
        llm.turn = timed
        drive(llm, w64(), seed)
    return took

def bare_s(traced, seed, num_blocks=2000):
    "Thread CPU s of W64 without a model, and its steps"
    gc.collect()
    start = time.thread_time()
    served = simulate(w64(), trace=traced, seed=seed, num_blocks=num_blocks, **SIZES)
    return (time.thread_time() - start) / served.counters.num_steps

def main():
    p = argparse.ArgumentParser()
    p.add_argument('--model', default='smollm2')
    p.add_argument('--dtype', default='bfloat16')
    p.add_argument('--rounds', type=int, default=3, help='runs with the model, on and off each')
    p.add_argument('--bare-rounds', type=int, default=25, help='and without one')
    p.add_argument('--seed', type=int, default=0)
    a = p.parse_args()
    torch.set_num_threads(1)
    bare = {True: [], False: []}
    for _ in range(a.bare_rounds):
        for traced in bare: bare[traced].append(bare_s(traced, a.seed))
    us = 1e6 * (min(bare[True]) - min(bare[False]))
    lm, runs = load_model(a.model, a.dtype, 'auto'), {True: [], False: []}
    for _ in range(a.rounds):
        for traced in runs: runs[traced].append(steps_s(lm, traced, a.seed))
    best = {traced: [min(s) for s in zip(*rs)] for traced, rs in runs.items()}        # of each step
    ms = {('on' if traced else 'off'): 1000 * sum(s) / len(s) for traced, s in best.items()}
    share = median(on / off for on, off in zip(best[True], best[False])) - 1
    print(f"without a model: {1e6 * min(bare[False]):.0f} us a step, and {us:.0f} us more with a trace")
    print(f"{a.model} in {a.dtype}: {ms['off']:.2f} ms a step without, {ms['on']:.2f} ms with a trace, "
          f"{share:+.2%} in the median of {len(best[True])} steps; {us:.0f} us are {us / ms['off'] / 10:.2f} %")
    write_record(OUT, **vars(a), threads=1, steps=len(best[True]), ms_per_step=ms, median_share=share, us_per_step=us,
                 share_by_us=us / 1000 / ms['off'],
                 us_per_step_without_model={'on': 1e6 * min(bare[True]), 'off': 1e6 * min(bare[False])})

if __name__ == '__main__': main()
