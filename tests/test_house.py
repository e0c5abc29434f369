"The house: what the layout of the repository promises, in places that no single notebook can see."
import ast, configparser, functools, json, re, subprocess, sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = [p for pat in ('index.ipynb', 'nbs/*.ipynb', 'kernels/*.ipynb') for p in sorted(ROOT.glob(pat))]
CHAPTERS = [p for p in NOTEBOOKS if p.name != 'index.ipynb']
MODULES = {'.'.join(p.relative_to(ROOT/'cbatch').with_suffix('').parts): p
           for p in sorted((ROOT/'cbatch').rglob('*.py')) if p.name not in ('__init__.py', '_modidx.py')}
FOLDERS = '*.py', 'tests/**/*.py', 'tools/*.py', 'bench/*.py', 'examples/**/*.py'
SCRIPTS = [p for pat in FOLDERS for p in sorted(ROOT.glob(pat))]
# each module may import those before it
ORDER = '''
params core twin mixers probe model quant kept loading native cpp sampling drawing sampler text
token_loop static_batching kv_blocks paged_attention
kernels.kv_write kernels.paged_decode kernels.paged_prefill kernels.cpu
kernels.coded_product kernels.lean_step kernels.lean kernels.coded_matmul
kernels.triton_backend backends other_attention
ragged_batch states runner roster scheduler preemption prefix_caching policies schemes queues catalog
guesses draft_model
state trace_format trace metrics views player reports door interrupts engine llm workloads traffic
handover worker async_engine wire protocol answers openapi prometheus gate front server
driving cost simulator proof results ceiling peers contest bench people screen demo
measures lab_page lab capacity rewind spans cli
'''.split()
WIDTH = 120   # characters of a line of code: what a column of the site shows
NO_TENSOR = [m for m in ('params', 'core', 'kv_blocks', 'roster', 'scheduler', 'preemption', 'prefix_caching', 'state',
                         'policies', 'trace_format', 'trace', 'metrics') if m in MODULES]
HEAVY = {'torch', 'transformers', 'triton', 'matplotlib'}
NAMES = 'LLM AsyncLLM SamplingParams EngineConfig RequestOutput CapacityError RequestFailed tiny_lm load_model'.split()
EXPORT = re.compile(r'^#\|\s*(export|exports|exporti)\s*$', re.M)
DEFAULT_EXP = re.compile(r'^#\|\s*default_exp\s+(\S+)', re.M)

cfg = configparser.ConfigParser(delimiters=['='])
cfg.read(ROOT/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']

def cells(path, kind=None):
    found = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [c | {'source': ''.join(c['source'])} for c in found if kind in (None, c['cell_type'])]

def fresh(code):
    "What `code` prints in a new Python, outside the checkout"
    ran = subprocess.run([sys.executable, '-c', code], cwd='/', capture_output=True, text=True, check=True)
    return ran.stdout.split()

def name_of(path): return path.relative_to(ROOT).as_posix()

def each(paths): return pytest.mark.parametrize('path', paths, ids=map(name_of, paths))

# --- the package

def test_import_is_lazy_and_quick():
    clock = 'time.perf_counter()'
    took, *loaded = fresh(f'import sys, time; t = {clock}; import cbatch; print({clock} - t, *sys.modules)')
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
            above = pkg[:len(pkg) + 1 - o.level] if o.level else []
            yield '.'.join([*above, o.module or '']).strip('.'), [a.name for a in o.names]

@each([p for p in SCRIPTS if p.parent.name in ('bench', 'tools', 'examples')])
def test_scripts_import_what_there_is(path):
    "A name that has moved to another module would be found by whoever runs the script next"
    for module, names in imports(path):
        if module.split('.')[0] != 'cbatch': continue
        assert all(hasattr(import_module(module), n) for n in names), (module, names)

def by_string(path):
    "Imports that `imports` can't see: calls that import by name, and strings that name a module of ours"
    for o in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(o, ast.Call):
            called = o.func.attr if isinstance(o.func, ast.Attribute) else getattr(o.func, 'id', '')
            if called.strip('_') in ('import', 'import_module'): yield ast.unparse(o)
        elif isinstance(o, ast.Constant) and isinstance(o.value,
                                                        str) and re.fullmatch(r'cbatch(\.\w+)+(:\w+)?|cbatch:\w+',
                                                            o.value):
            yield o.value

@pytest.mark.parametrize('code,found', [("importlib.import_module('json')", 1), ("__import__('cbatch.core')", 2),
                                        ("X = 'cbatch.kernels.cpu:CPUBackend'", 1),
                                        ("import cbatch.core; logging.getLogger('cbatch')", 0)])
def test_an_import_by_string_is_seen(tmp_path, code, found):
    (tmp_path/'x.py').write_text(code)
    assert len(list(by_string(tmp_path/'x.py'))) == found

@pytest.mark.parametrize('module', MODULES)
def test_imports_strictly_downward(module):
    assert module in ORDER, f'{module} has no place in ORDER'
    assert not list(by_string(MODULES[module]))
    below = ORDER[:ORDER.index(module)]
    for name, what in imports(MODULES[module]):
        assert '*' not in what, f'{module}: from {name} import *'
        if name.split('.')[0] != 'cbatch': continue
        used = [name[7:]] if name[7:] in MODULES else [f'{name}.{w}'[7:] for w in what]  # from cbatch import core
        assert used and set(used) <= set(below), f'{module} imports {used}'

@functools.cache
def parsed(module): return ast.parse(MODULES[module].read_text(encoding='utf-8'))

@pytest.mark.parametrize('module', MODULES)
def test_a_module_has_one_thought(module):
    num_lines = MODULES[module].read_text(encoding='utf-8').count('\n')
    assert num_lines <= 400

@functools.cache
def own(module):
    "Names that a module defines or sets: functions, variables, fields"
    names = set()
    for o in ast.walk(parsed(module)):
        if isinstance(o, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): names.add(o.name)
        elif isinstance(o, ast.Name) and isinstance(o.ctx, ast.Store): names.add(o.id)
        elif isinstance(o, ast.Attribute) and isinstance(o.ctx, ast.Store) and of_its_own(o): names.add(o.attr)
    return names

def private(name):
    "One underscore in front; `_cbatch_x` is what the package notes on other libraries' objects"
    return name[:1] == '_' and not name.startswith(('__', '_cbatch')) and name != '_'

def of_its_own(o): return isinstance(o.value, ast.Name) and o.value.id in ('self', 'cls')

# other libraries' names with an underscore, and why there is no way around each
FOREIGN = {
    '_replace': 'a tuple with names, changed; public in spite of its name',
    '_actions': 'argparse lists a parser\'s options nowhere else',
    '_option_string_actions': 'argparse: where a second spelling of an option is entered',
    '_attn_implementation': 'transformers: which attention a model runs',
    '_attn_implementation_internal': 'transformers: the public name walks over all submodules at each step',
    '_experts_implementation': 'transformers: which mixture of experts a model runs; the public setter reads sources',
    '_C': 'torch: the home of the two below',
    '_is_any_autocast_enabled': 'torch: one question for all devices',
    '_len_torch_function_stack': 'torch: whether a default device or another mode is set',
    '_version': 'torch: how often a tensor was written to',
    '_is_hf_initialized': 'transformers: which parameters it must not draw anew when it computes what no file holds',
    '_is_stateful': 'transformers: the one mark of a model with a state beside its KV',
    '_can_set_attn_implementation': 'transformers: the one place that says so',
    '_forward_hooks': 'torch: whether a module does more than its forward',
    '_forward_pre_hooks': 'torch: whether a module does more than its forward',
    '_linear_pointwise': 'oneDNN\'s product of packed weights',
    '_reorder_linear_weight': 'oneDNN\'s packing of weights',
    '_is_mkldnn_bf16_supported': 'oneDNN: does it pack bf16 here?',
    '_is_amx_tile_supported': 'torch: has this processor tiles?',
    '_exit': 'os: the end of a process around a thread that nobody can stop',
}

@pytest.mark.parametrize('module', MODULES)
def test_no_private_name_leaves_its_module(module):
    "Neither imported nor read from an object of another module; of other libraries those in FOREIGN"
    strange = []
    for o in ast.walk(parsed(module)):
        if isinstance(o, ast.ImportFrom): strange += [a.name for a in o.names if private(a.name)]
        elif isinstance(o, ast.Attribute) and private(o.attr):
            if not of_its_own(o) and o.attr not in own(module): strange.append(o.attr)
        elif isinstance(o, ast.Call) and getattr(o.func, 'id', '') in ('getattr', 'setattr', 'hasattr', 'attrgetter'):
            said = [a.value for a in o.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            strange += [n for n in said if private(n) and n not in own(module)]
    home = {n: m for m in reversed(ORDER) if m in MODULES and m != module for n in own(m)}
    found = [f"{n} of {home.get(n, 'another library')}" for n in strange if n not in FOREIGN]
    assert not found

def exports(module):
    "What a module says in `__all__`"
    assigned = [o for o in parsed(module).body if isinstance(o, ast.Assign)]
    said = [o.value for o in assigned if ast.unparse(o.targets[0]) == '__all__']
    return ast.literal_eval(said[0]) if said else []

@pytest.mark.parametrize('module', MODULES)
def test_a_public_name_has_one_home(module):
    mine = exports(module)
    twice = {n: m for m in MODULES if m != module for n in exports(m) if n in mine}
    assert not twice

def test_scheduler_never_sees_a_tensor():
    for m in NO_TENSOR: assert not {n.split('.')[0] for n, _ in imports(MODULES[m])} & {'torch', 'numpy'}, m

def test_every_module_has_its_notebook():
    said = [m[1] for p in CHAPTERS for c in cells(p, 'code') if (m := DEFAULT_EXP.search(c['source']))]
    assert sorted(said) == sorted(MODULES)

def test_every_module_is_on_the_map():
    text = (ROOT/'CONTRIBUTING.md').read_text(encoding='utf-8')
    assert set(MODULES) <= set(re.findall(r'`([\w.]+)`', text.partition('## The modules')[2].partition('\n## ')[0]))

def test_one_version():
    import cbatch
    assert cbatch.__version__ == cfg['version']
    assert f"\n## {cfg['version']}" in (ROOT/'CHANGELOG.md').read_text(encoding='utf-8')

# --- the notebooks

SKIPPED = re.compile(r'^#\|\s*(%s|eval:\s*false)' % '|'.join(cfg['tst_flags'].split()), re.M)

def statements(src):
    "A cell's statements without its magics"
    return ast.parse(re.sub(r'^[%!].*', '', src, flags=re.M)).body

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
    prints = lambda o: isinstance(o, ast.Expr) and ast.unparse(o).startswith('print(')
    for c in cells(path, 'code'):
        if SKIPPED.search(c['source']): continue
        prints_here = any(map(prints, statements(c['source'])))
        assert c['outputs'] or not prints_here, f"cell {c['id']} prints, and nothing is stored"

@each(CHAPTERS)
def test_opens_with_title_promise_and_badge(path):
    first = cells(path)[0]['source'].split('\n\n')
    repo = cfg['git_url'].removeprefix('https://github.com/')
    assert first[0].startswith('# ') and first[1].startswith('> ')
    assert f"(https://colab.research.google.com/github/{repo}/blob/{cfg['branch']}/{name_of(path)})" in first[2]

@each(NOTEBOOKS)
def test_cells_are_short_and_runnable_by_a_user(path):
    for c in cells(path, 'code'):
        lines = len(c['source'].strip().splitlines()) - 1
        assert lines <= 40 or not EXPORT.search(c['source']), f"cell {c['id']} exports {lines} lines"
        assert not re.search(r'^\s*(from|import) nbdev', c['source'], re.M), 'users have no nbdev'

def plumbing(src):
    "Directives, hidden cells and imports"
    if re.search(r'^#\|\s*(hide|default_exp)\b', src, re.M): return True
    if re.search(r'^[%!]', src, re.M): return False
    return all(isinstance(o, (ast.Import, ast.ImportFrom)) for o in statements(src))

@each(NOTEBOOKS)
def test_prose_at_least_every_three_code_cells(path):
    run = 0
    for c in cells(path):
        run = 0 if c['cell_type'] == 'markdown' else run + (not plumbing(c['source']))
        assert run <= 3, f"cell {c['id']} is code cell {run} in a row"

def shows(c):
    "Is this a cell that runs in every check and prints, draws, displays or asserts something?"
    src = c['source']
    if EXPORT.search(src) or SKIPPED.search(src) or plumbing(src): return False
    claims = lambda o: isinstance(o, ast.Assert) or isinstance(o, ast.Call) and ast.unparse(o.func).startswith('test_')
    return bool(c['outputs']) or any(claims(o) for s in statements(src) for o in ast.walk(s))

@each(CHAPTERS)
def test_what_is_exported_soon_runs(path):
    "At most 60 exported lines, then a cell that shows something"
    run, first, long = 0, None, {}
    for c in cells(path, 'code'):
        if shows(c): run, first = 0, None
        if not EXPORT.search(c['source']) or plumbing(c['source']): continue
        first = first or c['id']
        run += len([l for l in c['source'].splitlines() if l.strip() and not l.startswith('#|')])
        if run > 60: long[f'from cell {first}'] = run
    assert not long

@each([*NOTEBOOKS, *MODULES.values(), *SCRIPTS])
def test_lines_fit_the_column(path):
    if path.suffix == '.ipynb': texts = [(c['id'], c['source']) for c in cells(path, 'code')]
    else: texts = [('line', path.read_text(encoding='utf-8'))]
    # of nbdev's making: the module's docstring, which is the notebook's promise, and the names it exports
    made = re.compile(r'\A""".*?"""$|^__all__ = \[.*?\]$', re.M | re.S)
    if path in MODULES.values(): texts = [(where, made.sub('', t, count=2)) for where, t in texts]
    lines = [(f'{where} {n}', l) for where, text in texts for n, l in enumerate(text.splitlines(), 1)]
    wide = [f'{where}: {l.strip()[:60]}...' for where, l in lines if len(l) > WIDTH]
    assert not wide

LONG_STRING = r'''(?P<q>"""|\'\'\')(?P<text>.*?)(?P=q)'''
CPP_CELL = re.compile(r"(#\|.*\n)*\w+ \+?= ((\w+(\.\w+)*|'[^'\n]*') \+ )*r?" + LONG_STRING, re.S)

def cpp(src):
    "The C++ in a cell: what is in its long strings that are raw or include something"
    found = [(m['raw'], m['text']) for m in re.finditer('(?P<raw>r?)' + LONG_STRING, src, re.S)]
    return '\n'.join(s for raw, s in found if '#include' in s or raw and re.search(r'[;{}]\s*$', s, re.M))

def bare(source):
    "C++ without comments and literals"
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(\\.|[^"\\\n])*"|\'(\\.|[^\'\\\n])\'', ' ', source, flags=re.S)

@each(CHAPTERS)
def test_no_function_of_cpp_is_cut(path):
    "C++ comes in whole functions; a cell that exports some is one raw string, given to a name or added to it"
    for c in cells(path, 'code'):
        if not (source := cpp(c['source'])): continue
        alone = CPP_CELL.fullmatch(c['source'].strip())
        assert alone or not EXPORT.search(c['source']), f"cell {c['id']} mixes C++ with Python"
        depth = 0
        for ch in bare(source):
            depth += (ch == '{') - (ch == '}')
            assert depth >= 0, f"cell {c['id']} closes what it did not open"
        assert depth == 0, f"cell {c['id']} opens {depth} more than it closes"

@each(CHAPTERS)
def test_a_name_is_not_linked_twice(path):
    "A public name in backticks is a link on the site by itself; inside another link it is none"
    public = {n for m in MODULES for n in exports(m)}
    for c in cells(path, 'markdown'):
        twice = [n for n in re.findall(r'\[`(\w+)`\]\([^)]+\)', c['source']) if n in public]
        assert not twice, f"cell {c['id']}: write `{twice[0]}` without a link"

@pytest.mark.parametrize('folder', ['nbs', 'kernels'])
def test_notebooks_are_numbered_in_the_order_of_their_imports(folder):
    paths = [p for p in CHAPTERS if p.parent.name == folder]
    numbers = [p.name.partition('_')[0] for p in paths]
    assert numbers == [f'{i:02}' for i in range(len(paths))]
    modules = [DEFAULT_EXP.search(c['source']) for p in paths for c in cells(p, 'code')]
    modules = [m[1] for m in modules if m]
    assert modules == sorted(modules, key=ORDER.index)

def test_sidebar_names_every_notebook_once():
    yml = (ROOT/'_quarto.yml').read_text(encoding='utf-8').partition('  sidebar:')[2]
    named = re.findall(r'^\s*(?:-|href:) (\w+/\w+\.ipynb)\s*$', yml, re.M)
    assert named == sorted(set(named), key=named.index)
    assert set(named) >= {p.relative_to(ROOT).as_posix() for p in CHAPTERS}

def test_each_promise_names_tests_that_there_are():
    "Every line of a table has a promise, its end, and links to tests"
    nb, files = ROOT/'nbs/78_promises.ipynb', f"{cfg['git_url']}/blob/{cfg['branch']}/tests/"
    rows = [l for c in cells(nb, 'markdown') for l in c['source'].splitlines() if l.startswith('| ')]
    rows = [r.strip('| ').split(' | ') for r in rows if not r.startswith('| it promises')]
    assert len(rows) > 30 and all(len(r) == 3 and all(r) for r in rows)
    for promise, _, held in rows:
        links = re.findall(r'\[([\w ]+)\]\(' + re.escape(files) + r'(\w+\.py)\)', held)
        assert len(links) == held.count('](') > 0, promise
        for name, file in links:
            test = 'def test_' + name.replace(' ', '_') + '('
            assert test in (ROOT/'tests'/file).read_text(encoding='utf-8'), f'{file} has no {name}'

# --- the repository

def test_names_in_tests_stand_in_invariants():
    "`# S5`, Row 26, Case 9 and test_fault_26 each have a row in tests/INVARIANTS.md"
    text = (ROOT/'tests/INVARIANTS.md').read_text(encoding='utf-8')
    rows = {part.partition('\n')[0].partition(':')[0]: set(re.findall(r'^\| (\w+) \|', part, re.M))
            for part in text.split('\n## ')}
    for p in (ROOT/'tests').rglob('*.py'):
        src = p.read_text(encoding='utf-8')
        marks = [n for m in re.findall(r'# ([ASOMG]\d(?: [ASOMG]\d)*)$', src, re.M) for n in m.split()]
        faults = [*re.findall(r'def test_fault_0*([1-9]\d*)', src), *re.findall(r'\b[Rr]ows? (\d+)', src)]
        situations = [*re.findall(r'def test_case_0*([1-9]\d*)', src), *re.findall(r'\b[Cc]ases? (\d+)', src)]
        assert set(marks) <= rows['Invariants'], p.name
        assert set(faults) <= rows['Rows'] and set(situations) <= rows['Cases'], p.name
    for name in re.findall(r'`(test_\w+\.py)`', text): assert (ROOT/'tests'/name).exists(), name

def test_nothing_hides_the_package_kernels():
    "transformers imports Hugging Face's `kernels`: an importable folder of that name at the top would be taken for it"
    assert not list((ROOT/'kernels').glob('*.py'))
    where = fresh('import importlib.util as u; s = u.find_spec("kernels"); print(s and s.origin)')
    assert not where[0].startswith(str(ROOT/'kernels'))

SKIP = set('''.git .venv _docs _proc build dist __pycache__ .ipynb_checkpoints .pytest_cache .mypy_cache .hypothesis
           cbatch.egg-info'''.split())

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
