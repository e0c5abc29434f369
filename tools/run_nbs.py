"""Run notebooks and store what their cells show: python tools/run_nbs.py [nbs/01_core.ipynb ...] [--slow] [--cuda]

A second run changes nothing. A cell flagged for another machine (`tst_flags` in settings.ini) keeps the output that it
has, unless its flag is named."""
import os, re, sys, time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbdev.clean import nbdev_clean
from nbdev.config import get_config

WIDGET = 'application/vnd.jupyter.widget-'

def skipped(nb, forced):
    "The code cells that don't run here"
    flags = set(get_config().tst_flags.split()) - set(forced)
    rx = re.compile(r'^#\|\s*(?:%s|eval:\s*false)\s*$' % '|'.join(flags), re.M)
    all_ = any('skip_exec: true' in c.source for c in nb.cells if c.cell_type != 'code')
    return [c for c in nb.cells if c.cell_type == 'code' and (all_ or rx.search(c.source))]

def tidy(cell):
    "Drop what varies or is dead in a stored notebook: progress bars and warnings on stderr, live widgets"
    keep = []
    for o in cell.get('outputs', []):
        if o.output_type == 'stream' and o.name == 'stderr':
            print(f'  {cell.id}: not stored: {o.text.strip()[:200]}')
            continue
        data = o.get('data', {})
        views = [k for k in data if k.startswith(WIDGET)]
        for k in views: del data[k]
        if not views or set(data) - {'text/plain'}: keep.append(o)   # a widget's text says nothing without its view
    cell.outputs = keep

def run(path, forced=()):
    "Execute the notebook at `path` and write it back"
    nb, start = nbformat.read(path, 4), time.time()
    skip = skipped(nb, forced)
    for c in skip: c.metadata['tags'] = ['skip-execution']
    NotebookClient(nb, timeout=900, kernel_name='python3', coalesce_streams=True, skip_cells_with_tag='skip-execution',
                   extra_arguments=['--IPKernelApp.log_level=ERROR'],
                   resources={'metadata': {'path': str(path.parent)}}).execute()
    for c in skip: del c.metadata['tags']
    for c in nb.cells:
        if c.cell_type == 'code' and c not in skip: tidy(c)
    nb.metadata.pop('widgets', None)
    nbformat.write(nb, path)
    nbdev_clean.__wrapped__(str(path))
    print(f'{path}: {time.time() - start:.1f} s', flush=True)

def main(*args):
    usual = dict(TRITON_INTERPRET='1', PYTHONHASHSEED='0', SOURCE_DATE_EPOCH='0', PYDEVD_DISABLE_FILE_VALIDATION='1')
    for k, v in usual.items(): os.environ.setdefault(k, v)
    root = get_config().config_path
    paths = [Path(a) for a in args if not a.startswith('--')]
    every = [p for d in ('.', 'nbs', 'kernels') for p in sorted((root/d).glob('*.ipynb'))]
    paths = paths or [p.relative_to(Path.cwd()) for p in every]
    for p in paths:
        try: run(p, [a[2:] for a in args if a.startswith('--')])
        except CellExecutionError as e: sys.exit(f'{p}: left as it was\n{e}')

if __name__ == '__main__': main(*sys.argv[1:])
