"""The benchmark, with everything that it is compared with: python bench/throughput.py [--quick | --heavy]  Writes bench/records/throughput.json, throughput_w256.json and scheduler.json; under twenty minutes.

W64 in bfloat16: static and continuous batching on the engine, transformers' `generate` in static batches and its own continuous batching, each in a process of its own; then W256 on the engine alone; then
the scheduler alone. llama.cpp takes part where llama-cpp-python is installed. --heavy runs the heavy-tailed draw and nothing else: static batching alone takes most of ten minutes for it (throughput_heavy.json)."""
import sys
from importlib.util import find_spec
from pathlib import Path
from cbatch.cli import main

RECORDS = Path(__file__).parent/'records'

def bench(*args):
    quick, heavy, args = '--quick' in args, '--heavy' in args, [a for a in args if a != '--heavy']
    peers = ['transformers', 'transformers-cb'] + ['llama.cpp'] * bool(find_spec('llama_cpp'))
    record = lambda name: [] if quick else ['--record', str(RECORDS/name)]
    larger = lambda w: ['throughput', '--dtype', 'bfloat16', '--workload', w, '--repeats', '2', '--limit', '120', *record(f'throughput_{w}.json')]
    runs = [larger('heavy')] if heavy else [['throughput', '--dtype', 'bfloat16', '--peer', ','.join(peers), '--repeats', '3', '--limit', '240', *record('throughput.json')],
                                            *[larger('w256')] * (not quick), ['scheduler', *record('scheduler.json')]]
    return next((code for r in runs if (code := main(['bench', *r, *args]))), 0)

if __name__ == '__main__': sys.exit(bench(*sys.argv[1:]))
