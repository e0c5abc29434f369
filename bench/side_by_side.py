"""Two checkouts in turns: python bench/side_by_side.py OTHER_CHECKOUT [--runs 3] [--quick]

A is this checkout and B the other; both run in this Python. A shared machine is another machine every hour, so
figures of two records tell little about two versions. Here they take turns, A B A B ..., each in a process of its
own, and the medians are compared: CPU time of the scheduler alone, and W64 on the real model in bfloat16. --quick:
the tiny model, small batches."""
import argparse, json, os, subprocess, sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent.parent
CBATCH = '''import sys, cbatch
assert cbatch.__file__.startswith(root := sys.argv.pop(1)), f"{cbatch.__file__} is not in {root}"
from cbatch.cli import main
sys.exit(main())'''
RUNNING = (64, 256, 1024)

def record(
    root:Path, # a checkout
    *args:str, # of cbatch bench
)->dict:
    "What `cbatch bench` of a checkout writes down"
    with TemporaryDirectory() as folder:
        out = Path(folder, 'record.json')
        cmd = [sys.executable, '-c', CBATCH, str(root), 'bench', *args, '--record', str(out)]
        r = subprocess.run(cmd, cwd=folder, env={**os.environ, 'PYTHONPATH': str(root)}, capture_output=True, text=True)
        if r.returncode or not out.exists(): raise SystemExit(f"{root}: {' '.join(args)} failed:\n{r.stdout}{r.stderr}")
        return json.loads(out.read_text())

def figures(root:Path, quick:bool)->dict[str, float]:
    "One run of everything"
    small = ['--quick'] if quick else []
    us = record(root, 'scheduler', *small)['us_per_request']
    sizes = [n for n in map(str, RUNNING) if n in us] or list(us)
    got = {f'us per request and step, {n} running': us[n]['plain'] for n in sizes}
    full = ['--dtype', 'bfloat16', '--repeats', '1']
    run = record(root, 'throughput', '--policies', 'vllm', *(small or full))['runs']['vllm']
    return got | {'tokens per second, W64': run['output_throughput']}

def main(*args:str)->int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('other', type=Path, help='another checkout of this repository')
    p.add_argument('--runs', type=int, default=3, help='turns of each')
    p.add_argument('--quick', action='store_true', help='does it work?')
    a = p.parse_args(args)
    if not (a.other/'cbatch/cli.py').is_file(): p.error(f'{a.other} is no checkout: it has no cbatch/cli.py')
    roots = dict(A=HERE, B=a.other.resolve())
    runs:dict[str, list[dict[str, float]]] = dict(A=[], B=[])
    for turn in range(a.runs):
        for side, root in roots.items():
            runs[side].append(figures(root, a.quick))
            print(f'{turn + 1} {side}', *(f'{x:.4g}' for x in runs[side][-1].values()), flush=True)
    print('', *(f'{side}: {root}' for side, root in roots.items()), '', sep='\n')
    print(f"{'median of ' + str(a.runs):40}{'A':>10}{'B':>10}{'A / B':>9}")
    for name in runs['A'][0]:
        x, y = (median(r[name] for r in runs[side]) for side in 'AB')
        print(f'{name:40}{x:10.4g}{y:10.4g}{x / y:8.3f}x')
    return 0

if __name__ == '__main__': sys.exit(main(*sys.argv[1:]))
