"""What a neighbour costs: python bench/busy.py [--quick]  Writes bench/records/busy.json.

A crowd of 240 requests on a tiny model, alone and beside two processes that do nothing but keep a core busy, by three
entries: an `LLM` made in Python where torch was there first, the command line, and a server asked over HTTP. Each in
three ways of waiting: as it is, with OMP_WAIT_POLICY=PASSIVE, and spinning as OpenMP does by itself. Every run is a
process of its own, the ways take turns within a round, and the best of the rounds counts. What should hold: beside
others at most 1.2 times as long as with PASSIVE, and alone no longer than spinning. `load_before` tells who else was
there; spinning beside others may take minutes (--limit ends it)."""
import argparse, json, os, random, subprocess, sys, time
from pathlib import Path

OUT = Path(__file__).parent/'records'/'busy.json'
WAYS = {'as it is': {}, 'passive': dict(OMP_WAIT_POLICY='PASSIVE'), 'spinning': dict(GOMP_SPINCOUNT='300000')}

def crowd(n:int, seed:int)->list[tuple[list[int], int]]:
    "Prompts, and how many tokens each is answered with"
    rng = random.Random(seed)
    return [([rng.randrange(3, 60) for _ in range(rng.randrange(4, 40))], rng.randrange(4, 64)) for _ in range(n)]

def by_python(work:list)->float:
    import torch
    torch.zeros(1 << 17).add_(1)                       # OpenMP is loaded, and has had its first team
    from cbatch import LLM, SamplingParams, tiny_lm
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work]
    with LLM(tiny_lm(), max_num_seqs=32) as llm:
        llm.generate([ids for ids, _ in work[:4]], params[:4], use_tqdm=False)
        start = time.perf_counter()
        llm.generate([ids for ids, _ in work], params, use_tqdm=False)
        return time.perf_counter() - start

def by_command(work:list)->float:
    "`cbatch bench serve` on the same crowd, from a file"
    from tempfile import TemporaryDirectory
    from cbatch.cli import main
    from cbatch.model import tiny_lm
    with TemporaryDirectory() as d:
        rows = ['TIMESTAMP,ContextTokens,GeneratedTokens', *(f'0,{len(ids)},{n}' for ids, n in work)]
        Path(d, 'crowd.csv').write_text('\n'.join(rows) + '\n')
        code = main(['bench', 'serve', '--model', tiny_lm().save(f'{d}/tiny'), '--workload', f'{d}/crowd.csv',
                     '--rate', 'inf', '--record', f'{d}/r.json'])
        if code: sys.exit(code)
        return json.loads(Path(d, 'r.json').read_text())['result']['duration']

def by_server(work:list)->float:
    "`cbatch serve`, with as many askers as slots"
    import socket
    from concurrent.futures import ThreadPoolExecutor
    from tempfile import TemporaryDirectory
    from urllib.request import Request, urlopen
    from cbatch.model import tiny_lm
    with socket.socket() as s: s.bind(('127.0.0.1', 0)); port = s.getsockname()[1]
    base = f'http://127.0.0.1:{port}'
    def ask(one):
        body = dict(model='m', prompt=one[0], max_tokens=one[1], temperature=0, ignore_eos=True)
        with urlopen(Request(f'{base}/v1/completions', json.dumps(body).encode(), {'Content-Type': 'application/json'}),
                     timeout=600) as r: return r.read()
    with TemporaryDirectory() as d, ThreadPoolExecutor(32) as pool:
        code = 'import sys; from cbatch.cli import main; sys.exit(main(sys.argv[1:]))'
        args = ['serve', tiny_lm().save(d), '--port', str(port), '--served-model-name', 'm', '--dtype', 'float32']
        server = subprocess.Popen([sys.executable, '-c', code, *args], stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL)
        try:
            for _ in range(600):
                try: ask(([3, 4], 2)); break
                except OSError: time.sleep(.2)
            start = time.perf_counter()
            list(pool.map(ask, work))
            return time.perf_counter() - start
        finally: server.terminate(); server.wait()

ENTRIES = dict(python=by_python, command=by_command, server=by_server)

def timed(entry:str, way:str, a:argparse.Namespace)->float|None:
    "Seconds of one run in a process of its own; None if it took too long"
    env = {k: v for k, v in os.environ.items() if not k.startswith(('OMP_', 'GOMP_'))} | WAYS[way]
    cmd = [sys.executable, __file__, '--child', entry, '--requests', str(a.requests), '--seed', str(a.seed)]
    try: r = subprocess.run(cmd, env=env, capture_output=True, text=True, timeout=a.limit)
    except subprocess.TimeoutExpired: return None
    if r.returncode: sys.exit(f'{entry}, {way}: {r.stderr[-2000:]}')
    return float(r.stdout.split()[-1])

def measure(neighbours:int, a:argparse.Namespace)->dict:
    "The best of some rounds for each entry and way, so many busy processes beside them"
    took = {e: {w: [] for w in WAYS} for e in a.entries}
    busy = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(neighbours)]
    try:
        for _ in range(a.rounds):
            for e in a.entries:
                for w in WAYS:
                    took[e][w].append(timed(e, w, a))
                    print(f'{neighbours} beside it, {e}, {w}: {took[e][w][-1]} s', flush=True)
    finally:
        for p in busy: p.kill(); p.wait()
    best = lambda xs: min((x for x in xs if x is not None), default=None)
    return {e: {w: dict(best_s=best(xs), all_s=xs) for w, xs in ways.items()} for e, ways in took.items()}

def main():
    p = argparse.ArgumentParser()
    p.add_argument('--quick', action='store_true', help='few requests, one round, no record: does it work?')
    p.add_argument('--child', choices=ENTRIES)
    p.add_argument('--entries', nargs='+', choices=ENTRIES, default=list(ENTRIES))
    for name, default in dict(requests=240, rounds=3, neighbours=2, limit=300, seed=0).items():
        p.add_argument(f'--{name}', type=int, default=default)
    a = p.parse_args()
    if a.child: return print(ENTRIES[a.child](crowd(a.requests, a.seed)))
    if a.quick: a.requests, a.rounds = 12, 1
    from cbatch.results import machine, write_record
    load = os.getloadavg()
    runs = {'alone': measure(0, a), f'beside {a.neighbours}': measure(a.neighbours, a)}
    def ratios(ways):
        "As it is, in multiples of the other two; None if one of them took too long"
        now, *others = (ways[w]['best_s'] for w in WAYS)
        return {f'times {w}': round(now / s, 2) if now and s else None for w, s in zip([*WAYS][1:], others)}
    said = {where: {e: ratios(ways) for e, ways in r.items()} for where, r in runs.items()}
    for where, r in said.items(): print(where, r)
    write_record(None if a.quick else str(OUT), machine=machine(), requests=a.requests, seed=a.seed, load_before=load,
                 runs=runs, ratios=said)

if __name__ == '__main__': main()
