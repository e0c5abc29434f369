"""Does the simulator say what the engine will do? On SmolLM2 in bfloat16: python bench/forecast.py [--quick] [--speed]

Measures what steps cost on a crowd of its own, forecasts two other crowds at three loads each, serves them for real and
writes both beside each other to bench/records/forecast.json. `chat`: lognormal prompts and answers, Poisson arrivals.
`code`: long prompts, short answers, in bursts. A load is a share of what the forecast says the engine can do. The
middle load of each is served twice: so far apart are two runs of the same.

`bias` is what the cost says of the steps that really ran, against what they took: where it is large, the machine was
another one than while costs were measured. `hindsight` is the error of the same simulation with a cost that was fitted
to that very run. --cpu counts CPU seconds of this process, on one thread, for a machine that others use too; waiting
takes no time then. --quick is small, on a random model, and writes no record unless --record names one. --speed
simulates an hour of traffic and nothing else."""
import argparse, os, time, torch
from pathlib import Path
from cbatch import LLM, load_model, tiny_lm
from cbatch.cost import Cost, features, step_seconds
from cbatch.lab import CPUClock
from cbatch.metrics import e2e_s, percentile, tpot_s, ttft_s
from cbatch.results import machine, write_record
from cbatch.simulator import Served, serve_on, simulate
from cbatch.workloads import Workload, arrivals, drawn

OUT = Path(__file__).parent/'records'/'forecast.json'
CONFIG = dict(max_num_seqs=16, max_num_batched_tokens=512, num_blocks=1000, max_model_len=2048)
LOADS, BURSTY = (.4, .7, .95), .3
QUANTILES = 50, 95, 99

def chat(n:int, seed:int, k:int)->Workload:
    return drawn(f'chat{seed}', n, .7, 64 // k, (4 // k + 1, 256 // k), seed, mean_in=128 // k)

def code(n:int, seed:int, k:int)->Workload:
    return drawn(f'code{seed}', n, .6, 16 // k, (2, 48 // k), seed, mean_in=400 // k)

KINDS = dict(chat=(chat, 1.), code=(code, BURSTY))

def both(n:int, seed:int, k:int)->Workload:
    "A crowd of both kinds, in turns"
    some, others = chat(n, seed, k), code(n, seed, k)
    return Workload('both', [x for pair in zip(some, others) for x in pair])

def measure(llm:LLM, a:argparse.Namespace)->tuple[Cost, list[list[float]]]: # and steps: features, seconds
    "What steps cost: a crowd all at once, so that the batch is full and then empties, and one that comes in bursts"
    n, seed = (8 if a.quick else 24), a.seed + 100
    serve_on(llm, both(3, seed + 2, a.short), seed, 'warm')
    first = serve_on(llm, both(n // 2, seed, a.short), seed, 'first')
    later = both(n, seed + 1, a.short)
    rate = .7 * len(first.sent) / first.took_s
    serve_on(llm, later.at(arrivals(len(later), rate, .5, seed)), seed, 'later')
    recs = llm.trace[first.first_step:]
    source = dict(machine=machine(), model=llm.model.name, dtype=str(llm.model.dtype)[6:], seed=seed)
    cost = Cost.fit(recs, source)
    print(cost, flush=True)
    return cost, [[*features(r), t] for r, t in zip(recs, step_seconds(recs)) if r.scheduled]

def summary(s:Served)->dict[str, float]:
    "Quantiles in s, and tokens per second"
    ms, out = [x.metrics for x in s.sent if x.metrics], {}
    for name, f in dict(ttft=ttft_s, tpot=tpot_s, e2e=e2e_s).items():
        xs = [x for m in ms if (x := f(m)) is not None]
        out |= {f'p{q}_{name}_s': percentile(xs, q) for q in QUANTILES}
    return out | dict(tokens_per_s=sum(len(m.token_times) for m in ms) / s.took_s)

def off(said:dict[str, float], was:dict[str, float])->dict[str, float]:
    return {k: said[k] / x - 1 for k, x in was.items()}

def compare(llm:LLM, work:Workload, cost:Cost, a:argparse.Namespace, **facts)->dict:
    "Forecast a run, then make it"
    forecast = simulate(work, cost=cost, seed=a.seed, vocab_size=llm.model.vocab_size, **a.config)
    load = [os.getloadavg()[0]]
    real = serve_on(llm, work, a.seed, f'{facts}')
    load.append(os.getloadavg()[0])
    recs, said, was = real.records, summary(forecast), summary(real)
    timed = [(cost(r), t) for r, t in zip(recs, step_seconds(recs)) if r.scheduled]
    d = dict(**facts, requests=len(work), measured=was, forecast=said, error=off(said, was), loadavg=load,
             steps=dict(measured=len(recs), forecast=forecast.counters.num_steps),
             bias=sum(c for c, _ in timed) / sum(t for _, t in timed) - 1)
    if len(timed) >= 40:
        then = Cost.fit(recs, cost.source)
        again = simulate(work, cost=then, seed=a.seed, vocab_size=llm.model.vocab_size, **a.config)
        d['hindsight'] = off(summary(again), was)
    print(f"{facts} bias {d['bias']:+.1%}  " + '  '.join(f'{k} {x:+.0%}' for k, x in d['error'].items()), flush=True)
    return d

def crowds(cost:Cost, llm:LLM, a:argparse.Namespace):
    "Kind, load, rate, workload"
    for kind, (make, burstiness) in KINDS.items():
        many = make(200, a.seed, a.short)
        rate = len(many) / simulate(many, cost=cost, vocab_size=llm.model.vocab_size, **a.config).took_s
        for load in LOADS:
            n = max(8, round(load * rate * a.seconds))
            yield kind, load, load * rate, make(n, a.seed, a.short).at(arrivals(n, load * rate, burstiness, a.seed))

def hour(a:argparse.Namespace)->dict:
    "An hour of five requests a second, answers of 200 tokens in the mean"
    n = 360 if a.quick else 18_000
    work = drawn('hour', n, mean_out=200, range_out=(4, 1000), seed=a.seed).at(arrivals(n, 5., seed=a.seed))
    wall, cpu = time.perf_counter(), time.process_time()
    s = simulate(work, num_blocks=4000, max_num_seqs=64)
    d = dict(requests=n, output_tokens=work.num_output_tokens, steps=s.counters.num_steps, simulated_s=s.took_s,
             wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu, loadavg=os.getloadavg()[0])
    print(d, flush=True)
    return d

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--quick', action='store_true', help='small, on a random model')
    p.add_argument('--speed', action='store_true', help='only simulate an hour')
    p.add_argument('--cpu', action='store_true', help='CPU seconds on one thread')
    p.add_argument('--seed', type=int, default=0)
    p.add_argument('--seconds', type=float, default=28., help='that people of a run come for')
    p.add_argument('--record', help=f'where to write; {OUT} unless quick')
    a = p.parse_args()
    a.short, a.config = (4, dict(CONFIG, max_num_batched_tokens=64)) if a.quick else (1, CONFIG)
    if a.speed: return hour(a)
    if a.quick: a.seconds = 1.
    lm = tiny_lm(max_position_embeddings=2048) if a.quick else load_model('smollm2', 'bfloat16')
    start = machine()
    with LLM(lm, **a.config) as llm:
        if a.cpu:
            torch.set_num_threads(1)
            CPUClock(llm)
        cost, points = measure(llm, a)
        runs = []
        for kind, load, rate, work in crowds(cost, llm, a):
            for k in range(2 if load == LOADS[1] else 1):
                runs.append(compare(llm, work, cost, a, kind=kind, load=load, rate=rate, run=k))
    facts = dict(machine=start, seed=a.seed, clock='cpu' if a.cpu else 'wall', config=a.config, cost=cost.to_dict(),
                 points=points[::2], runs=runs)
    write_record(a.record or (None if a.quick else OUT), **facts, hour=hour(a))

if __name__ == '__main__': main()
