"""Build the site into _docs and README.md from index.ipynb, then check links: python tools/docs.py

nbdev processes the notebooks into _proc, smalldocs renders those. Where Quarto is installed,
`PYTHONPATH=tools nbdev_docs` does the same."""
import html, json, os, posixpath, re, shutil, subprocess, sys
from pathlib import Path

from latex2mathml.converter import convert
from nbdev.config import get_config
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs

SKIP = r'^([_.].*|build|dist|tests|tools|bench|cbatch|.*egg-info|node_modules|venv)$'

strip_no = lambda n: re.sub(r'^\d+[a-zA-Z0-9]*_', '', n)
strip_path = lambda p: posixpath.join(posixpath.dirname(p), strip_no(posixpath.basename(p)))

def rename(proc, site):
    "Name pages as nbdev's links do (01_core -> core), links between them relative; says what the sidebar lacks"
    rels = [p.relative_to(proc).as_posix() for p in proc.rglob('*.ipynb')]
    for rel in rels:
        p, here = proc/rel, posixpath.dirname(rel)
        up = '../' * rel.count('/')
        txt = p.read_text(encoding='utf-8').replace('](' + site, '](' + up)
        txt = re.sub(r' *"output-file: [^"]*",?\n', '', txt)
        for other in rels:
            link = posixpath.relpath(other, here or '.')
            txt = txt.replace('](' + link, '](' + strip_path(link))
        p.unlink()
        p.with_name(strip_no(p.name)).write_text(txt, encoding='utf-8')
    missing = rename_sidebar(proc/'_quarto.yml', rels)
    return [f'_quarto.yml names {m}, which does not exist' for m in missing]

def rename_sidebar(yml, rels):
    "The same names in the sidebar, without pages that are not there; returns these"
    page = re.compile(r'\w+/\d+[a-zA-Z0-9]*_\w+\.ipynb')
    lines = yml.read_text(encoding='utf-8').splitlines(keepends=True)
    missing = sorted({m[0] for l in lines if (m := page.search(l)) and m[0] not in rels})
    gone = {'- ' + m for m in missing}
    lines = [page.sub(lambda m: strip_path(m[0]), l) for l in lines if l.strip() not in gone]
    yml.write_text(''.join(lines), encoding='utf-8')
    return missing

def readme(nb, site):
    "README.md from the processed index notebook: its Markdown, its code and the text its cells print"
    out = []
    for c in nb['cells']:
        src = ''.join(c['source']).strip()
        if c['cell_type'] == 'raw':
            front = dict(l.split(': ', 1) for l in src.splitlines() if ': ' in l)
            out += [f"# {front.get('title', '')}", '> ' + front['description'] if 'description' in front else '']
        elif c['cell_type'] == 'markdown':
            out.append(re.sub(r'\]\((?!https?:|#)([^)#]+)\.(?:ipynb|html)', rf']({site}\1.html', src))
        elif src:
            if 'echo: false' not in src: out.append(f'```python\n{src}\n```')
            for o in c['outputs']:
                t = ''.join(o.get('text', '') or o.get('data', {}).get('text/plain', '')).rstrip()
                if t: out.append(f'```\n{t}\n```')
    return '\n\n'.join(o for o in out if o and not o.startswith('<!--')) + '\n'

def mathml(page):
    "Write a page's math as MathML, which a browser shows with no script and no network"
    s = page.read_text(encoding='utf-8')
    def turn(m): return convert(html.unescape(m[2]), display='block' if m[1] == 'display' else 'inline')
    t = re.sub(r'<span class="math (inline|display)">\\[(\[](.*?)\\[)\]]</span>', turn, s, flags=re.S)
    if t != s: page.write_text(re.sub(r'<(script|link)[^>]*katex[^>]*>(</script>)?', '', t), encoding='utf-8')

def remote(docs):
    "What a page would load from another host: the site must work with no network"
    tag = re.compile(r'<(?:(?:script|img|iframe|embed|source|video|audio)\b[^>]*?\ssrc'
                     r'|link rel="(?:stylesheet|icon|preload)"[^>]*?\shref)="((?:https?:)?//[^"]+)')
    inline = re.compile(r'<(?:style|script)\b[^>]*>(.*?)</(?:style|script)>', re.S)
    css = re.compile(r'''(?:@import\s+|url\(|from\s+|import\()["']?((?:https?:)?//[^"')\s]+)''')
    for p in docs.rglob('*'):
        if p.suffix not in ('.html', '.css'): continue
        s = p.read_text(encoding='utf-8')
        code = s if p.suffix == '.css' else '\n'.join(inline.findall(s))
        yield from (f'{p}: loads {u}' for u in (tag.findall(s) if p.suffix == '.html' else []) + css.findall(code))

def main():
    cfg = get_config(); os.chdir(cfg.config_path)
    site = cfg.doc_host + cfg.doc_baseurl + '/'
    refresh_quarto_yml()
    proc = proc_nbs('.', n_workers=0, force=True, skip_folder_re=SKIP)
    faults = rename(proc, site)
    index = json.loads((proc/'index.ipynb').read_text(encoding='utf-8'))
    Path('README.md').write_text(readme(index, site), encoding='utf-8')
    program = [sys.executable, '-m', 'smalldocs.cli']
    def smalldocs(cmd, **kw): return subprocess.run([*program, cmd, str(proc)], **kw).returncode
    if smalldocs('render', stderr=subprocess.DEVNULL): return smalldocs('render')   # its warnings come with the check
    shutil.rmtree(cfg.doc_path, ignore_errors=True)
    shutil.move(proc/cfg.doc_path.name, cfg.doc_path)
    for p in cfg.doc_path.rglob('*.html'): mathml(p)
    faults += remote(cfg.doc_path)
    if faults: print(*faults, sep='\n')
    bad = smalldocs('check') or faults
    said = 'see above' if bad else 'links are good, nothing is loaded from another host'
    print(f'{cfg.doc_path.name}/index.html: {said}')
    return 1 if bad else 0

if __name__ == '__main__': sys.exit(main())
