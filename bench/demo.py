"""Record `cbatch demo` and draw the picture of the home page: python bench/demo.py

Writes bench/records/demo.json and assets/demo.svg."""
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
import matplotlib
from cbatch.cli import main as cbatch
from cbatch.trace import Trace

ROOT = Path(__file__).resolve().parent.parent

def draw(static:Trace, continuous:Trace, path:Path):
    "Both timelines at one scale"
    matplotlib.use('Agg')
    from cbatch.views import compare_timelines
    with matplotlib.rc_context({'svg.hashsalt': 'cbatch', 'font.size': 9}):
        axs = compare_timelines(static, continuous, names=('static batching', 'continuous batching'))
        axs[0].figure.savefig(path, metadata=dict(Date=None), facecolor='white')

def main(*args:str)->int:
    with TemporaryDirectory() as tmp:
        record = ['--record', str(ROOT/'bench/records/demo.json')]
        files = [*record, '--report', f'{tmp}/demo.html', '--trace', f'{tmp}/demo.jsonl']
        code = cbatch(['demo', '--no-live', *files, *args])
        traces = [] if code else [Trace.load(f'{tmp}/demo-{n}.jsonl') for n in ('static', 'continuous')]
    if traces: draw(*traces, ROOT/'assets/demo.svg')
    return code

if __name__ == '__main__': sys.exit(main(*sys.argv[1:]))
