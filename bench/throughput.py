"""The benchmark, with everything that it is compared with: python bench/throughput.py [--quick] [--heavy]  Writes bench/records/throughput.json, throughput_w256.json and scheduler.json; under twenty minutes.

W64 in bfloat16: static and continuous batching on the engine, transformers' `generate` in static batches and its own continuous batching, each in a process of its own; then W256 on the engine alone; then
the scheduler alone. llama.cpp takes part where llama-cpp-python is installed. --heavy adds the heavy-tailed draw, which takes static batching another ten minutes (throughput_heavy.json)."""
import sys
from importlib.util import find_spec
from pathlib import Path
from cbatch.cli import main

RECORDS = Path(__file__).parent/'records'

def bench(*args):
    quick, heavy, args = '--quick' in args, '--heavy' in args, [a for a in args if a != '--heavy']
    peers = ['transformers', 'transformers-cb'] + ['llama.cpp'] * bool(find_spec('llama_cpp'))
    record = lambda name: [] if quick else ['--record', str(RECORDS/name)]
    runs = [['throughput', '--dtype', 'bfloat16', '--peer', ','.join(peers), '--repeats', '2', '--limit', '200', *record('throughput.json')]]
    if not quick: runs += [['throughput', '--dtype', 'bfloat16', '--workload', w, '--repeats', '1', '--limit', '900', *record(f'throughput_{w}.json')] for w in ['w256', *['heavy'] * heavy]]
    return next((code for r in [*runs, ['scheduler', *record('scheduler.json')]] if (code := main(['bench', *r, *args]))), 0)

if __name__ == '__main__': sys.exit(bench(*sys.argv[1:]))
