"""Check everything, in order, and stop at the first thing that is wrong: python tools/check.py [--all] [STEP ...]

Steps: export clean types notebooks tests kernels docs build wheel. --all adds what is slow, and outputs: a re-run of
every notebook must store what is stored."""
import hashlib, os, shutil, subprocess, sys, tempfile, time, venv
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
CORES = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
WORKERS = min(2, CORES)
ALL = '--all' in sys.argv

def sh(*cmd, cwd=ROOT, **env):
    "Run a command in sight of everybody; end here if it fails"
    env = {**os.environ, 'TRITON_INTERPRET': '1', 'HF_HUB_OFFLINE': '1', 'PIP_DISABLE_PIP_VERSION_CHECK': '1',
           'OMP_WAIT_POLICY': 'PASSIVE', **env}   # spinning threads starve each other on few cores
    rc = subprocess.run([str(c) for c in cmd], cwd=cwd, env=env, stdin=subprocess.DEVNULL).returncode
    if rc: sys.exit(f"FAILED ({rc}): {' '.join(map(str, cmd)).partition(chr(10))[0]}")

@contextmanager
def unchanged(patterns, cure):
    "The files that match `patterns` are the same bytes afterwards"
    def digest():
        paths = [p for pat in patterns for p in ROOT.glob(pat) if '.ipynb_checkpoints' not in p.parts]
        return {p.relative_to(ROOT): hashlib.sha256(p.read_bytes()).digest() for p in paths}
    before = digest()
    yield
    after = digest()
    changed = [str(p) for p in sorted({*before, *after}) if before.get(p) != after.get(p)]
    if changed: sys.exit(f"FAILED: changed: {', '.join(changed)}\n{cure}")

NBS = ['index.ipynb', 'nbs/*.ipynb', 'kernels/*.ipynb']

def export():
    "nbdev_export leaves no diff"
    if not version('nbdev').startswith('2.'):
        sys.exit(f"nbdev {version('nbdev')} is here, and settings.ini is for nbdev 2: version 3 wants it moved to "
                 "pyproject.toml, and its migration drops our extras (serve, dev ...). pip install nbdev==2.4.14")
    with unchanged(['cbatch/**/*.py'], 'The modules were not what the notebooks say; they are now.'):
        sh(BIN/'nbdev_export')

def clean():
    "nbdev_clean leaves no diff"
    with unchanged(NBS, 'The notebooks held what git should not see; they are clean now.'): sh(BIN/'nbdev_clean')

def types():
    "mypy over the package, its patched methods in their classes"
    # older ones get other versions of numpy and torch, with other types
    if sys.version_info < (3, 11): return print('skipped: types are checked from Python 3.11 on')
    sh(sys.executable, 'tools/check_types.py')

def notebooks():
    "nbdev_test"
    slow = ['--flags', 'slow'] if ALL else []
    sh(BIN/'nbdev_test', '--n_workers', WORKERS, '--timing', *slow, OMP_NUM_THREADS=str(max(1, CORES // WORKERS)))

def tests():
    "pytest"
    slow = ['-m', ''] if ALL else []
    sh(sys.executable, '-m', 'pytest', '-q', '-n', WORKERS, '--dist', 'loadfile', '--durations=5', *slow, 'tests',
       OMP_NUM_THREADS=str(max(1, CORES // WORKERS)), CBATCH_SOAK_S=os.environ.get('CBATCH_SOAK_S', '60'))

def kernels():
    "every kernel compiles for the GPUs that cbatch names; some of them, --all: all"
    if not find_spec('triton'): return print(f'skipped: there is no Triton for {sys.platform}')
    sh(sys.executable, 'tools/aot.py', *([] if ALL else ['--quick']))

def outputs():
    "a re-run of every notebook stores what is stored"
    with unchanged(NBS, 'Outputs differ from the stored ones.'): sh(sys.executable, 'tools/run_nbs.py')

def docs():
    "the site, its links, and README.md"
    if sys.version_info < (3, 11): return print('skipped: smalldocs needs Python 3.11')
    with unchanged(['README.md'], 'README.md was not what index.ipynb says; it is now.'):
        sh(sys.executable, 'tools/docs.py')

def build():
    "python -m build"
    shutil.rmtree(ROOT/'dist', ignore_errors=True)
    sh(sys.executable, '-m', 'build', '--quiet', '--no-isolation', '--outdir', 'dist', '.')

TRY = '''
import fastcore, cbatch, sys
from importlib.metadata import files
assert fastcore.__version__.split('.')[0] == '2', fastcore.__version__
assert cbatch.__file__.startswith(sys.prefix), cbatch.__file__
top = {f.parts[0] for f in files('cbatch') if f.parts[0] != '..'}   # `kernels` would hide the package of that name
assert top == {'cbatch', f'cbatch-{cbatch.__version__}.dist-info'}, top
from cbatch import LLM, SamplingParams, tiny_lm
with LLM(tiny_lm('llama', 0), max_num_seqs=2, check=True) as llm:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    outs = llm.generate([[1, 2, 3], [4, 5, 6, 7, 8], [9]], params, use_tqdm=False)
print('cbatch', cbatch.__version__, 'with fastcore', fastcore.__version__, [o.outputs[0].token_ids for o in outs])
assert [len(o.outputs[0].token_ids) for o in outs] == [5, 5, 5]
'''

def wheel():
    "the wheel in a fresh environment, with the fastcore that users get"
    whl, = (ROOT/'dist').glob('*.whl')
    with tempfile.TemporaryDirectory(prefix='wheel-') as tmp:
        venv.create(tmp, with_pip=True)
        py = Path(tmp)/'bin'/'python'
        sh(py, '-m', 'pip', 'install', '-qq', '-c', ROOT/'constraints.txt', whl, 'fastcore>=2', cwd=tmp)
        sh(py, '-I', '-c', TRY, cwd=tmp)
        sh(py.parent/'cbatch', '--help', cwd=tmp)

def main():
    named = [a for a in sys.argv[1:] if not a.startswith('-')]
    steps = [export, clean, types, notebooks, tests, kernels, *([outputs] if ALL else []), docs, build, wheel]
    if named: steps = [globals()[n] for n in named]
    start = time.time()
    for i, step in enumerate(steps, 1):
        print(f'\n=== {i}/{len(steps)} {step.__name__}: {step.__doc__}', flush=True)
        t = time.time(); step()
        print(f'--- {step.__name__} is good ({time.time() - t:.0f} s)', flush=True)
    print(f'\nAll good ({time.time() - start:.0f} s).')

if __name__ == '__main__': main()
