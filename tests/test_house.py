"The house: what the layout of the repository promises, in places that no single notebook can see."
import ast, configparser, json, re, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [p for pat in ('index.ipynb', 'nbs/*.ipynb', 'kernels/*.ipynb') for p in sorted(ROOT.glob(pat))]
CHAPTERS = [p for p in NOTEBOOKS if p.name != 'index.ipynb']
MODULES = {'.'.join(p.relative_to(ROOT/'cbatch').with_suffix('').parts): p for p in sorted((ROOT/'cbatch').rglob('*.py'))
           if p.name not in ('__init__.py', '_modidx.py')}
# each module may import those before it
ORDER = '''core model native sampling text token_loop static_batching kv_blocks paged_attention kernels.kv_write kernels.paged_decode kernels.paged_prefill kernels.cpu kernels.lean kernels.triton_backend
ragged_batch scheduler preemption prefix_caching policies trace metrics views engine workloads simulator dashboard async_engine protocol prometheus driving results ceiling peers contest bench people screen demo server cli'''.split()
NO_TENSOR = [m for m in ('core', 'kv_blocks', 'scheduler', 'policies', 'trace', 'metrics') if m in MODULES]
HEAVY = {'torch', 'transformers', 'triton', 'matplotlib'}
NAMES = 'LLM AsyncLLM SamplingParams EngineConfig RequestOutput CapacityError RequestFailed tiny_lm load_model'.split()
EXPORT = re.compile(r'^#\|\s*(export|exports|exporti)\s*$', re.M)

cfg = configparser.ConfigParser(delimiters=['='])
cfg.read(ROOT/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']

def cells(path, kind=None):
    return [c | {'source': ''.join(c['source'])} for c in json.loads(path.read_text(encoding='utf-8'))['cells'] if kind in (None, c['cell_type'])]

def fresh(code):
    "What `code` prints in a new Python, outside the checkout"
    return subprocess.run([sys.executable, '-c', code], cwd='/', capture_output=True, text=True, check=True).stdout.split()

def each(paths): return pytest.mark.parametrize('path', paths, ids=[p.relative_to(ROOT).as_posix() for p in paths])

# --- the package

def test_import_is_lazy_and_quick():
    took, *loaded = fresh('import sys, time; t = time.perf_counter(); import cbatch; print(time.perf_counter() - t, *sys.modules)')
    assert float(took) < .5
    assert not HEAVY & set(loaded)

def test_public_names():
    import cbatch
    assert set(NAMES) <= set(dir(cbatch)) and set(NAMES) == set(cbatch.__all__)
    for n in NAMES: assert getattr(cbatch, n).__name__ == n
    with pytest.raises(AttributeError, match='nonsense'): cbatch.nonsense

@pytest.mark.parametrize('module', NO_TENSOR)
def test_loads_no_torch(module):
    assert not HEAVY - {'matplotlib'} & set(fresh(f'import sys, cbatch.{module}; print(*sys.modules)'))

def imports(path):
    "(module, names) of every import in a file, inside functions too; nbdev has made those of the package relative"
    pkg = path.relative_to(ROOT).parent.parts
    for o in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(o, ast.Import): yield from ((a.name, []) for a in o.names)
        elif isinstance(o, ast.ImportFrom):
            yield '.'.join([*pkg[:len(pkg) + 1 - o.level], o.module or ''] if o.level else [o.module]).rstrip('.'), [a.name for a in o.names]

@pytest.mark.parametrize('module', MODULES)
def test_imports_strictly_downward(module):
    assert module in ORDER, f'{module} has no place in ORDER'
    below = ORDER[:ORDER.index(module)]
    for name, what in imports(MODULES[module]):
        assert '*' not in what, f'{module}: from {name} import *'
        if name.split('.')[0] != 'cbatch': continue
        used = [name[7:]] if name[7:] in MODULES else [f'{name}.{w}'[7:] for w in what]  # from cbatch import core
        assert used and set(used) <= set(below), f'{module} imports {used}'

def test_scheduler_never_sees_a_tensor():
    for m in NO_TENSOR: assert not {n.split('.')[0] for n, _ in imports(MODULES[m])} & {'torch', 'numpy'}, m

def test_every_module_has_its_notebook():
    exp = re.compile(r'^#\|\s*default_exp\s+(\S+)', re.M)
    said = [m[1] for p in CHAPTERS for c in cells(p, 'code') if (m := exp.search(c['source']))]
    assert sorted(said) == sorted(MODULES)

def test_one_version():
    import cbatch
    assert cbatch.__version__ == cfg['version']
    assert f"\n## {cfg['version']}" in (ROOT/'CHANGELOG.md').read_text(encoding='utf-8')

# --- the notebooks

@each(NOTEBOOKS)
def test_stored_as_git_should_see_it(path):
    nb = json.loads(path.read_text(encoding='utf-8'))
    assert (nb['nbformat'], nb['nbformat_minor']) == (4, 5) and set(nb['metadata']) == {'kernelspec'}
    ids = [c.get('id') for c in nb['cells']]
    assert all(ids) and len(set(ids)) == len(ids), 'every cell needs an id of its own'
    for c in cells(path, 'code'):
        assert c['execution_count'] is None
        for o in c['outputs']:
            assert o['output_type'] != 'error' and o.get('name') != 'stderr', f"cell {c['id']}"
            assert not any('widget' in k for k in o.get('data', {})), f"cell {c['id']}"
            assert ' at 0x' not in json.dumps(o), f"cell {c['id']}"

@each(NOTEBOOKS)
def test_outputs_are_stored(path):
    skip = re.compile(r'^#\|\s*(%s|eval:\s*false)' % '|'.join(cfg['tst_flags'].split()), re.M)
    for c in cells(path, 'code'):
        src = re.sub(r'^[%!].*', '', c['source'], flags=re.M)
        if skip.search(src): continue
        prints = any(isinstance(o, ast.Expr) and isinstance(o.value, ast.Call) and getattr(o.value.func, 'id', '') == 'print' for o in ast.parse(src).body)
        assert c['outputs'] or not prints, f"cell {c['id']} prints, and nothing is stored"

@each(CHAPTERS)
def test_opens_with_title_promise_and_badge(path):
    first = cells(path)[0]['source'].split('\n\n')
    repo = cfg['git_url'].removeprefix('https://github.com/')
    assert first[0].startswith('# ') and first[1].startswith('> ')
    assert f"(https://colab.research.google.com/github/{repo}/blob/{cfg['branch']}/{path.relative_to(ROOT).as_posix()})" in first[2]

@each(NOTEBOOKS)
def test_cells_are_short_and_runnable_by_a_user(path):
    for c in cells(path, 'code'):
        lines = len(c['source'].strip().splitlines()) - 1
        assert lines <= 40 or not EXPORT.search(c['source']), f"cell {c['id']} exports {lines} lines"
        assert not re.search(r'^\s*(from|import) nbdev', c['source'], re.M), 'users have no nbdev'

def plumbing(src):
    "Directives, hidden cells and imports"
    if re.search(r'^#\|\s*(hide|default_exp)\b', src, re.M): return True
    try: return all(isinstance(o, (ast.Import, ast.ImportFrom)) for o in ast.parse(src).body)
    except SyntaxError: return False   # a magic

@each(NOTEBOOKS)
def test_prose_at_least_every_three_code_cells(path):
    run = 0
    for c in cells(path):
        run = 0 if c['cell_type'] == 'markdown' else run + (not plumbing(c['source']))
        assert run <= 3, f"cell {c['id']} is code cell {run} in a row"

def test_sidebar_names_every_notebook_once():
    named = re.findall(r'^\s*- (\w+/\w+\.ipynb)\s*$', (ROOT/'_quarto.yml').read_text(encoding='utf-8'), re.M)
    assert named == sorted(set(named), key=named.index)
    assert set(named) >= {p.relative_to(ROOT).as_posix() for p in CHAPTERS}

# --- the repository

def test_nothing_hides_the_package_kernels():
    "transformers imports Hugging Face's `kernels`: an importable folder of that name at the top would be taken for it"
    assert not list((ROOT/'kernels').glob('*.py'))
    where = fresh('import importlib.util as u; s = u.find_spec("kernels"); print(s and s.origin)')
    assert not where[0].startswith(str(ROOT/'kernels'))

SKIP = {'.git', '.venv', '_docs', '_proc', 'build', 'dist', '__pycache__', '.ipynb_checkpoints', '.pytest_cache', '.hypothesis', 'cbatch.egg-info'}

def test_no_file_names_a_place_outside():
    "Nothing depends on one machine's folders, or names a package index"
    words = ['/wo' 'rk/', '../sha' 'red', 'py' 'pi.org', 'python' 'hosted', 'npm' 'js.org']
    walk = lambda d: (q for p in sorted(d.iterdir()) if p.name not in SKIP for q in (walk(p) if p.is_dir() else [p]))
    for p in walk(ROOT):
        try: text = p.read_text(encoding='utf-8')
        except UnicodeDecodeError: continue
        for w in words: assert w not in text, f'{p.relative_to(ROOT)} names {w}'

def test_addresses_come_from_settings():
    for name in ('_quarto.yml', 'setup.py', 'Makefile', 'tools/docs.py', 'tools/essay.py', 'tools/check.py'):
        text = (ROOT/name).read_text(encoding='utf-8')
        assert cfg['git_url'] not in text and cfg['doc_host'] not in text, name
