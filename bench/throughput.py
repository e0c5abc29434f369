"""The benchmark, with everything that it is compared with: python bench/throughput.py [--quick | --heavy]

Writes bench/records/throughput.json, throughput_w256.json and scheduler.json; under twenty minutes. W64 in bfloat16:
static and continuous batching on the engine, transformers' `generate` in static batches and its own continuous
batching, each in a process of its own; then W256 on the engine alone; then the scheduler alone. llama.cpp takes part
where llama-cpp-python is installed. --heavy runs the heavy-tailed draw and nothing else (throughput_heavy.json):
static batching alone takes most of ten minutes."""
import sys
from importlib.util import find_spec
from pathlib import Path
from cbatch.cli import main

RECORDS = Path(__file__).parent/'records'

def asked(quick:bool, heavy:bool)->list[list[str]]:
    "The command lines of `cbatch bench`, in order"
    record = lambda name: [] if quick else ['--record', str(RECORDS/name)]
    run = lambda *args: ['throughput', '--dtype', 'bfloat16', *args]
    alone = lambda w: run('--workload', w, '--repeats', '2', '--limit', '120', *record(f'throughput_{w}.json'))
    if heavy: return [alone('heavy')]
    peers = ','.join(['transformers', 'transformers-cb'] + ['llama.cpp'] * bool(find_spec('llama_cpp')))
    return [run('--peer', peers, '--repeats', '3', '--limit', '240', *record('throughput.json')),
            *([] if quick else [alone('w256')]), ['scheduler', *record('scheduler.json')]]

def bench(*args:str)->int:
    "Run them until one fails"
    more = [a for a in args if a != '--heavy']
    runs = asked('--quick' in args, '--heavy' in args)
    return next((code for r in runs if (code := main(['bench', *r, *more]))), 0)

if __name__ == '__main__': sys.exit(bench(*sys.argv[1:]))
