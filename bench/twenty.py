"""Where twenty times come from: python bench/twenty.py  Writes bench/records/twenty.json.

First in steps. The heavy-tailed workload on the engine: closed batches or open ones, with few slots or many. Few is
what fits if memory for 8,192 tokens is reserved, 2,048 for each request, since nobody knows how long its answer gets;
many is what fits if memory is given by the block. Closed batches of many slots get ten times the memory, or they
would not fit at all. The model is small and random, in float32.

Then in seconds, SmolLM2 in bfloat16: a loop over transformers' `generate`, the same loop over this engine, and W64
all at once. The loops take the first requests of W64, since they need so long; the best of two runs each."""
import argparse, time
from pathlib import Path
import torch
from cbatch import LLM
from cbatch.driving import drive
from cbatch.loading import load_model
from cbatch.model import tiny_lm
from cbatch.peers import run_generate
from cbatch.results import best_of, write_record
from cbatch.workloads import Workload, heavy, w64

OUT = Path(__file__).parent/'records'/'twenty.json'
TOKENS, RESERVED = 8192, 2048
RUNS = {'closed, reserved': ('static', TOKENS // RESERVED, TOKENS),
        'open, reserved': ('vllm', TOKENS // RESERVED, TOKENS),
        'closed, by the block': ('static', 128, 10 * TOKENS), 'open, by the block': ('vllm', 128, TOKENS)}

def in_steps(a:argparse.Namespace)->dict:
    lm, work, runs, first = tiny_lm(max_position_embeddings=2048), heavy(a.seed)[:a.requests], {}, None
    for name, (policy, slots, room) in RUNS.items():
        with LLM(lm, policy=policy, max_num_seqs=slots, num_blocks=room // 16, max_num_batched_tokens=2048,
                 prefix_caching=False) as llm:
            sent, took = drive(llm, work, a.seed)
            answers, m = [s.output_ids for s in sent], llm.metrics
        first = first or answers
        runs[name] = dict(policy=policy, slots=slots, pool_tokens=room, steps=m['num_steps'], s=round(took, 2),
                          tokens_per_s=round(work.num_output_tokens / took, 1), preemptions=m['num_preemptions'],
                          equal=sum(x == y for x, y in zip(answers, first)))
        print(name, runs[name], flush=True)
    return dict(workload=repr(work), reserved_tokens=RESERVED, runs=runs)

def in_seconds(a:argparse.Namespace)->dict:
    lm, work, out = load_model('smollm2', 'bfloat16'), w64(a.seed), {}
    def loop_s(some:Workload)->float:
        prompts, start = [x.prompt_ids(lm.vocab_size, a.seed) for x in some], time.perf_counter()
        run_generate(lm, some, prompts, 1)
        return time.perf_counter() - start
    def engine_s(some:Workload, slots:int)->float:
        with LLM(lm, max_num_seqs=slots, max_num_batched_tokens=2048, max_model_len=1024, prefix_caching=False) as llm:
            return drive(llm, some, a.seed)[1]
    runs = {'loop over generate, transformers': (work[:a.loop], loop_s),
            'one at a time, cbatch': (work[:a.loop], lambda some: engine_s(some, 1)),
            'all at once, cbatch': (work, lambda some: engine_s(some, 32))}
    for name, (some, seconds) in runs.items():
        seconds(some[:1])                                # warm
        took = best_of(lambda: dict(duration=seconds(some)), a.repeats, float('inf'))['duration']
        out[name] = dict(requests=len(some), s=round(took, 2), tokens_per_s=round(some.num_output_tokens / took, 1))
        print(name, out[name], flush=True)
    return out

def main():
    p = argparse.ArgumentParser()
    for name, default in dict(requests=1024, loop=16, threads=2, repeats=2, seed=0).items():
        p.add_argument(f'--{name}', default=default, type=int)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    write_record(OUT, **vars(a), in_steps=in_steps(a), in_seconds=in_seconds(a))

if __name__ == '__main__': main()
