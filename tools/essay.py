"""How a notebook becomes a page, for tools/docs.py and for nbdev_docs alike: settings.ini names `page`.

nbdev would hide exported code and run parts of the notebook to describe it. Here the code stays in view, under a
heading for each name that it defines, and the description comes from the exported module: parameters are a table that
opens on a click. A cell that holds a string of C++ and nothing else is shown as C++, its name above it."""
import ast, dataclasses, html, inspect, re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

from execnb.nbio import mk_cell
from fastcore.docments import docments
from nbdev.config import get_config
from nbdev.doclinks import NbdevLookup
from nbdev.process import Processor
from nbdev.showdoc import showdoc_nm

class page(Processor):
    "Lay out a page: Colab's badge, exported cells below their headings, no cell that only imports or names the module"
    def begin(self):
        nb = self.nb
        module = next((c.directives_['default_exp'][0] for c in nb.cells if 'default_exp' in flags(c)), None)
        module = module and import_module(f'{get_config().lib_name}.{module}')
        out = [nb.cells[0], colab(nb.path_)]     # nbdev keeps title and promise of the first cell, not its badge
        for c in nb.cells[1:]:
            if 'default_exp' in flags(c): continue
            if {'export', 'exporti'} & flags(c).keys():
                defs = c.parsed_()
                if all(isinstance(o, (ast.Import, ast.ImportFrom)) for o in defs): continue
                out += [mk_cell(api(module, n), 'markdown') for n in names(defs)]
            out.append(cpp(c) or c)
        nb.cells = out

flags = lambda cell: getattr(cell, 'directives_', None) or {}

def names(defs):
    "Public names that statements define; a patched method has its class before it"
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    found = [showdoc_nm(o) for o in defs if isinstance(o, kinds) and o.name[0] != '_']
    return [n for n in found if isinstance(n, str)]

CPP = re.compile(r'(?:#\|.*\n)*\s*(\w+ \+?=)(?: ([\w.]+) \+)? r("""|\'\'\')\n(.*?)\3\s*', re.S)

def cpp(cell):
    "A cell that only gives a name to C++, or adds some to it, as a block of C++; else None"
    if cell.cell_type != 'code' or not (m := CPP.fullmatch(cell.source)): return None
    name = f'{m[1]} {m[2]} + ...' if m[2] else f'{m[1]} ...'
    return mk_cell(f'```{{.cpp filename="{name}"}}\n{m[4].rstrip()}\n```', 'markdown')

def colab(path):
    "The badge that opens a notebook in Colab, with the site's own picture: a page loads nothing from elsewhere"
    cfg = get_config()
    rel = Path(path).resolve().relative_to(cfg.config_path.resolve()).as_posix()
    there = cfg.git_url.replace('https://github.com', 'https://colab.research.google.com/github')
    url = f'{there}/blob/{cfg.branch}/{rel}'
    return mk_cell(f"[![Open in Colab]({'../' * rel.count('/')}assets/colab.svg)]({url})", 'markdown')

def api(module, name):
    "Heading, docstring, link to the source and table of parameters"
    sym, lookup = attrgetter(name)(module), NbdevLookup()
    sym = getattr(sym, 'fget', sym)
    doc, src = (inspect.getdoc(sym) or '').partition('\n')[0], lookup.code(f'{module.__name__}.{name}')
    said, link = f'*{lookup.link_line(doc)}*' if doc else '', f' [source]({src}){{.source}}' if src else ''
    out = [f'### {name}', said + link]
    if tbl := table(sym): out += ['<details class="api"><summary>parameters</summary>', tbl, '</details>']
    return '\n\n'.join(out)

code = lambda s: f"<code>{html.escape(s, quote=False).replace('|', '&#124;')}</code>" if s else ''
empty = lambda o: o in (None, inspect.Parameter.empty, inspect.Signature.empty)

def anno(o):
    "A type as it was written, without modules"
    if empty(o): return ''
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+|'", '', o if isinstance(o, str) else inspect.formatannotation(o))

def default(o, field):
    if field and field.default_factory is not dataclasses.MISSING: return repr(field.default_factory())
    return '' if isinstance(o, type) and o.__name__ == '_empty' else getattr(o, '__name__', repr(o))

def table(sym):
    "Parameters (or fields) and the result as a Markdown table; nothing where nothing is said about them"
    fields = {f.name: f for f in dataclasses.fields(sym)} if dataclasses.is_dataclass(sym) else {}
    try: said = docments(sym, full=True)
    except (TypeError, ValueError, OSError): return ''
    if fields: said.pop('return', None)
    rows = [('returns' if k == 'return' else f'<code>{k}</code>',
             code(anno(v['anno'])), code(default(v['default'], fields.get(k))),
             (v['docment'] or '').replace('\n', ' ').replace('|', r'\|')) for k, v in said.items() if k != 'self']
    rows = [r for r in rows if r[0] != 'returns' or any(r[1:])]
    if not any(r[3] for r in rows): return ''
    cols = [i for i in range(4) if i == 0 or any(r[i] for r in rows)]
    rows = [('', 'type', 'default', ''), ('--',) * 4, *rows]
    return '\n'.join('| ' + ' | '.join(r[i] for i in cols) + ' |' for r in rows)
