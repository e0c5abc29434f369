"""Where twenty times come from: python bench/twenty.py  Writes bench/records/twenty.json.

The heavy-tailed workload on the engine: closed batches or open ones, with few slots or many. Few is what fits if memory for 8,192 tokens is reserved, 2,048 for each request, since nobody knows how long its answer gets; many is what fits if memory is given by the block. Closed batches of many slots get
ten times the memory, or they would not fit at all. A small random model in float32, whose step costs nearly as much for four rows as for many, as a large model's does on a GPU."""
import argparse, json, time
from pathlib import Path
from cbatch import LLM, SamplingParams
from cbatch.bench import machine
from cbatch.model import tiny_lm
from cbatch.workloads import heavy

TOKENS, RESERVED = 8192, 2048
RUNS = {'closed, reserved': ('static', TOKENS // RESERVED, TOKENS), 'open, reserved': ('vllm', TOKENS // RESERVED, TOKENS), 'closed, by the block': ('static', 128, 10 * TOKENS), 'open, by the block': ('vllm', 128, TOKENS)}

def main():
    p = argparse.ArgumentParser()
    for name, default in dict(requests=1024, seed=0).items(): p.add_argument(f'--{name}', default=default, type=int)
    a = p.parse_args()
    lm, work, answers = tiny_lm(max_position_embeddings=2048), heavy(a.seed)[:a.requests], {}
    prompts, params = [x.prompt_ids(lm.vocab_size, a.seed) for x in work], [SamplingParams(temperature=0, max_tokens=x.output_len, ignore_eos=True) for x in work]
    rec = dict(command='python bench/twenty.py', **vars(a), machine=machine(), workload=repr(work), reserved_tokens=RESERVED, runs={})
    for name, (policy, slots, room) in RUNS.items():
        with LLM(lm, policy=policy, max_num_seqs=slots, num_blocks=room // 16, max_num_batched_tokens=2048, prefix_caching=False) as llm:
            t = time.perf_counter(); outs = llm.generate(prompts, params, use_tqdm=False); took = time.perf_counter() - t
            answers[name] = [o.outputs[0].token_ids for o in outs]
            rec['runs'][name] = dict(policy=policy, slots=slots, pool_tokens=room, steps=llm.metrics['num_steps'], s=round(took, 2), tokens_per_s=round(work.num_output_tokens / took, 1), preemptions=llm.metrics['num_preemptions'],
                                     equal=sum(x == y for x, y in zip(answers[name], answers['closed, reserved'])))
        print(name, rec['runs'][name], flush=True)
    out = Path(__file__).parent/'records'/'twenty.json'
    out.write_text(json.dumps(rec, indent=1) + '\n'); print('->', out)

if __name__ == '__main__': main()
