"""Where a decode step's time goes, at 16 requests on SmolLM2: python bench/anatomy.py [--dtype bfloat16]

Writes bench/records/anatomy.json."""
import argparse, random
from pathlib import Path
from cbatch import LLM, SamplingParams
from cbatch.results import per_step_ms, write_record

OUT = Path(__file__).parent/'records'/'anatomy.json'
OPTIONS = dict(model='smollm2', dtype='float32', requests=16, prompt_len=128, warm_up=8, steps=64, seed=0)

def decode_ms(a:argparse.Namespace)->dict[str, float]:
    "ms of each part of a step, in which everybody decodes"
    rng = random.Random(a.seed)
    # a stop string makes the text of every step be looked at
    params = SamplingParams(temperature=0, max_tokens=a.warm_up + a.steps + 8, stop='no such text', ignore_eos=True)
    with LLM(a.model, dtype=a.dtype, max_num_seqs=a.requests, max_num_batched_tokens=a.requests * a.prompt_len) as llm:
        for _ in range(a.requests): llm.add([rng.randrange(llm.model.vocab_size) for _ in range(a.prompt_len)], params)
        for _ in range(a.warm_up): llm.step()
        before, start = llm.metrics['spent_s'], llm.clock()
        for _ in range(a.steps): llm.step()
        wall_ms = 1000 * (llm.clock() - start) / a.steps
        ms = per_step_ms(before, llm.metrics['spent_s'], a.steps)
    return ms | dict(other=wall_ms - sum(ms.values()))

def main():
    p = argparse.ArgumentParser()
    for name, default in OPTIONS.items():
        p.add_argument(f"--{name.replace('_', '-')}", default=default, type=type(default))
    a = p.parse_args()
    ms = decode_ms(a)
    own = 1 - ms['forward'] / sum(ms.values())
    for k, v in sorted(ms.items(), key=lambda kv: -kv[1]): print(f"{k:9} {v:8.3f} ms a step")
    print(f"outside of the forward pass: {own:.1%}")
    rounded = {k: round(v, 3) for k, v in ms.items()}
    write_record(OUT, **vars(a), ms_per_step=rounded, share_outside_forward=round(own, 4))

if __name__ == '__main__': main()
