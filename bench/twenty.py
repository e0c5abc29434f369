"""Where twenty times come from: python bench/twenty.py  Writes bench/records/twenty.json.

First in steps. The heavy-tailed workload on the engine: closed batches or open ones, with few slots or many. Few is what fits if memory for 8,192 tokens is reserved, 2,048 for each request, since nobody knows how long its answer gets; many is what fits if memory is given by the block. Closed batches of many
slots get ten times the memory, or they would not fit at all. The model is small and random, in float32.

Then in seconds, SmolLM2 in bfloat16: a loop over transformers' `generate`, the same loop over this engine, and W64 all at once. The loops take the first requests of W64, since they need so long; the best of two runs each."""
import argparse, json, time
from pathlib import Path
import torch
from cbatch import LLM, SamplingParams
from cbatch.bench import machine, run_generate
from cbatch.loading import load_model
from cbatch.model import tiny_lm
from cbatch.workloads import heavy, w64

TOKENS, RESERVED = 8192, 2048
RUNS = {'closed, reserved': ('static', TOKENS // RESERVED, TOKENS), 'open, reserved': ('vllm', TOKENS // RESERVED, TOKENS), 'closed, by the block': ('static', 128, 10 * TOKENS), 'open, by the block': ('vllm', 128, TOKENS)}

def in_steps(a)->dict:
    lm, work, answers, runs = tiny_lm(max_position_embeddings=2048), heavy(a.seed)[:a.requests], {}, {}
    prompts, params = asked(lm, work, a.seed)
    for name, (policy, slots, room) in RUNS.items():
        with LLM(lm, policy=policy, max_num_seqs=slots, num_blocks=room // 16, max_num_batched_tokens=2048, prefix_caching=False) as llm:
            t = time.perf_counter(); outs = llm.generate(prompts, params, use_tqdm=False); took = time.perf_counter() - t
            answers[name] = [o.outputs[0].token_ids for o in outs]
            runs[name] = dict(policy=policy, slots=slots, pool_tokens=room, steps=llm.metrics['num_steps'], s=round(took, 2), tokens_per_s=round(work.num_output_tokens / took, 1),
                              preemptions=llm.metrics['num_preemptions'], equal=sum(x == y for x, y in zip(answers[name], answers['closed, reserved'])))
        print(name, runs[name], flush=True)
    return dict(workload=repr(work), reserved_tokens=RESERVED, runs=runs)

def asked(lm, work, seed): return [x.prompt_ids(lm.vocab_size, seed) for x in work], [SamplingParams(temperature=0, max_tokens=x.output_len, ignore_eos=True) for x in work]

def in_seconds(a)->dict:
    lm, work, out = load_model('smollm2', 'bfloat16'), w64(a.seed), {}
    few = work[:a.loop]
    def timed(run):
        t = time.perf_counter(); run(); return time.perf_counter() - t
    def engine(some, slots):
        with LLM(lm, policy='vllm', max_num_seqs=slots, max_num_batched_tokens=2048, max_model_len=1024, prefix_caching=False) as llm: return timed(lambda: llm.generate(*asked(lm, some, a.seed), use_tqdm=False))
    for name, some, run in (('loop over generate, transformers', few, lambda some: timed(lambda: run_generate(lm, some, asked(lm, some, a.seed)[0], 1))),
                            ('one at a time, cbatch', few, lambda some: engine(some, 1)), ('all at once, cbatch', work, lambda some: engine(some, 32))):
        run(some[:1])                                # warm
        took = min(run(some) for _ in range(a.repeats))
        out[name] = dict(requests=len(some), s=round(took, 2), tokens_per_s=round(some.num_output_tokens / took, 1)); print(name, out[name], flush=True)
    return out

def main():
    p = argparse.ArgumentParser()
    for name, default in dict(requests=1024, loop=16, threads=2, repeats=2, seed=0).items(): p.add_argument(f'--{name}', default=default, type=int)
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    rec = dict(command='python bench/twenty.py', **vars(a), machine=machine(), in_steps=in_steps(a), in_seconds=in_seconds(a))
    out = Path(__file__).parent/'records'/'twenty.json'
    out.write_text(json.dumps(rec, indent=1) + '\n'); print('->', out)

if __name__ == '__main__': main()
