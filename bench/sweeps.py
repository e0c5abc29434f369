"""What moves the answer to "how many users?": python bench/sweeps.py [--cost FILE|stated] [--quick]

Four sweeps by the simulator, with the cost that comes with the package unless another is named:
budget: tokens a step against TTFT and ITL, where long prompts come beside people who are being answered;
pool: blocks against goodput, by policy;  knee: the rate against p99 latencies;
spread: how unlike the answers are against what an open batch gains over a closed one, and the same as measured on
SmolLM2, from the records of `bench/throughput.py`. Writes bench/records/sweeps.json; --quick is small and writes
none."""
import argparse, json, time
from pathlib import Path
from cbatch.capacity import capacity, try_rate
from cbatch.cost import Cost
from cbatch.lab import measured_cost
from cbatch.metrics import goodput
from cbatch.results import write_record
from cbatch.simulator import simulate
from cbatch.workloads import Workload, arrivals, batch_steps, drawn
from cbatch.traffic import get_workload

RECORDS = Path(__file__).parent/'records'
SLOS = dict(ttft=2000., tpot=150.)
POLICIES = 'vllm', 'sjf', 'mlfq', 'static'

def crowd(n:int, seed:int, **lens)->Workload:
    return drawn('crowd', n, seed=seed, **lens).at(arrivals(n, 1., seed=seed))

def pace(work:Workload, cost:Cost, **config)->float:
    "Requests a second that an engine works off, if all are there"
    return len(work) / simulate(work.at([0.] * len(work)), cost=cost, trace=False, **config).took_s

def budget(cost:Cost, n:int, seed:int)->list[dict]:
    "Every fifth sends a long text"
    work = crowd(n, seed, mean_in=64)
    for x in work.items[::5]: x.parts = [(x.parts[0][0], 1000)]
    rate = .6 * pace(work, cost)
    rows = []
    for tokens in (32, 64, 128, 256, 512, 1024, 2048):
        serve = lambda w: simulate(w, cost=cost, trace=False, max_num_batched_tokens=tokens)
        t = try_rate(work, rate, SLOS, serve)
        rows.append(dict(tokens=tokens, rate=rate, ttft_p99_s=t.ttft_p99_s, itl_p99_s=t.itl_p99_s))
    return rows

def pool(cost:Cost, n:int, seed:int)->dict[str, list[dict]]:
    work = crowd(n, seed)
    work = work.faster(.8 * pace(work, cost))
    def row(policy:str, blocks:int)->dict:
        s = simulate(work, policy, cost, trace=False, num_blocks=blocks)
        got = goodput([x.metrics if x.error is None else None for x in s.sent], SLOS, s.took_s)
        return dict(blocks=blocks, goodput=got['request_goodput'], preemptions=s.counters.num_preemptions)
    return {p: [row(p, b) for b in (48, 96, 128, 192, 256, 384)] for p in POLICIES}

def knee(cost:Cost, n:int, seed:int)->dict:
    work, serve = crowd(n, seed), lambda w: simulate(w, cost=cost, trace=False)
    found = capacity(work, SLOS, cost=cost, seed=seed)
    top = pace(work, cost)
    trials = [try_rate(work, top * k / 12, SLOS, serve) for k in range(1, 16)]
    return dict(capacity=found.rate, crowd_rate=top,
                rows=[dict(rate=t.rate, ttft_p99_s=t.ttft_p99_s, keeps_up=t.keeps_up) for t in trials])

def gain(work:Workload, cost:Cost)->float:
    "How many times as long a closed batch takes, with everybody there from the start"
    took = {p: simulate(work, p, cost, trace=False, prefix_caching=False).took_s for p in ('static', 'vllm')}
    return took['static'] / took['vllm']

def spread(cost:Cost, n:int, seed:int)->list[dict]:
    rows = []
    for sigma in (0., .2, .4, .6, .8, 1., 1.2, 1.4, 1.6):
        work = drawn('W', n, sigma, 96, (1, 1024), seed)
        static, other = batch_steps([x.output_len for x in work], 32)
        rows.append(dict(sigma=sigma, gain=gain(work, cost), gain_in_steps=static / other))
    return rows

def measured(cost:Cost, n:int, seed:int)->list[dict]:
    "What SmolLM2 took for the same, beside a simulation of the same people"
    rows = []
    for name, sigma in dict(throughput=.8, throughput_w256=.8, throughput_heavy=1.6).items():
        rec = json.loads((RECORDS/f'{name}.json').read_text())
        took = {p: rec['runs'][p]['duration'] for p in ('static', 'vllm')}
        work = get_workload(rec['workload'], rec['seed'])
        rows.append(dict(workload=rec['workload'], sigma=sigma, gain=took['static'] / took['vllm'],
                         simulated=gain(work if n > 16 else work[:n], cost), cpu=rec['machine']['cpu']))
    return rows

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--cost', default='measured')
    p.add_argument('--seed', default=0, type=int)
    p.add_argument('--quick', action='store_true')
    a = p.parse_args()
    named = dict(measured=measured_cost, stated=Cost.stated)
    cost, n, start = named[a.cost]() if a.cost in named else Cost.from_json(a.cost), 16 if a.quick else 160, time.time()
    done = {}
    for f in (budget, pool, knee, spread, measured):
        done[f.__name__] = f(cost, n, a.seed)
        print(f'{f.__name__}: {time.time() - start:.0f} s', flush=True)
    path = None if a.quick else RECORDS/'sweeps.json'
    write_record(path, seed=a.seed, num_requests=n, slos=SLOS, cost=cost.to_dict(), **done)

if __name__ == '__main__': main()
