"""Where a decode step's time goes, at 16 requests on SmolLM2: python bench/anatomy.py [--dtype bfloat16]  Writes bench/records/anatomy.json."""
import argparse, json, random
from pathlib import Path
from cbatch import LLM, SamplingParams
from cbatch.cli import _machine

def main():
    p = argparse.ArgumentParser()
    for name, default in dict(model='smollm2', dtype='float32', requests=16, prompt_len=128, warm_up=8, steps=64, seed=0).items():
        p.add_argument(f"--{name.replace('_', '-')}", default=default, type=type(default))
    a = p.parse_args()
    rng = random.Random(a.seed)
    llm = LLM(a.model, dtype=a.dtype, max_num_seqs=a.requests, max_num_batched_tokens=a.requests * a.prompt_len)
    params = SamplingParams(temperature=0, max_tokens=a.warm_up + a.steps + 8, stop='no such text', ignore_eos=True)
    for _ in range(a.requests): llm.add([rng.randrange(100, 40_000) for _ in range(a.prompt_len)], params)
    for _ in range(a.warm_up): llm.step()
    before, start = llm.metrics['spent_s'], llm.clock()
    for _ in range(a.steps): llm.step()
    wall = llm.clock() - start
    ms = {k: 1000 * (v - before[k]) / a.steps for k, v in llm.metrics['spent_s'].items()}
    ms['other'] = 1000 * wall / a.steps - sum(ms.values())
    own = 1 - ms['forward'] / sum(ms.values())
    rec = dict(command='python bench/anatomy.py', **vars(a), machine=_machine(), ms_per_step={k: round(v, 3) for k, v in ms.items()}, share_outside_forward=round(own, 4))
    out = Path(__file__).parent/'records'/'anatomy.json'
    out.write_text(json.dumps(rec, indent=1) + '\n')
    for k, v in sorted(ms.items(), key=lambda kv: -kv[1]): print(f"{k:9} {v:8.3f} ms a step")
    print(f"outside of the forward pass: {own:.1%}   -> {out}")

if __name__ == '__main__': main()
