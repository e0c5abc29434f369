"Pages and figures from records: hostile ids, empty and cut traces, the same bytes every time"
import base64, io, json, random, re, shutil, subprocess
from html import unescape
from html.parser import HTMLParser
import matplotlib.pyplot as plt
import pytest
from cbatch.llm import LLM
from cbatch.metrics import EngineCounters
from cbatch.player import Player, frames, player_html, report_html, timeline_svg
from cbatch.model import tiny_lm
from cbatch.views import bars, block_map, compare_timelines, kv_occupancy, request_colors, slot_timeline
from ask import sp
from test_trace import Crowd, act

EVIL = ['</script><script>alert(1)</script>', '"><img src=x onerror=alert(1)>', "'&amp;<!--", 'DATA KEY TRACK AT) BODY',
        '$&', '\u2028']

def crowd(seed=0, steps=60, evil=False, **kw):
    rng, c = random.Random(seed), Crowd(**{'num_blocks': 14, **kw})
    for i, rid in enumerate(EVIL if evil else []): c.add(3 + i, 8, rid)
    for _ in range(steps): act(rng, c); c.step(fail=rng.random() < .03)
    return c.trace

class Tags(HTMLParser):
    "Every tag, and every attribute that could run or load something"
    def __init__(self, page): super().__init__(); self.tags, self.bad = [], []; self.feed(page)
    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.bad += [(k, v) for k,v in attrs if k.startswith('on') or k in ('src', 'href')
                     and not re.fullmatch('data:image/png;base64,[A-Za-z0-9+/=]+', v)]    # pictures within the page

@pytest.mark.parametrize('policy', ['vllm', 'static'])
def test_hostile_ids_stay_text(policy):
    trace = crowd(evil=True, policy=policy)
    c = EngineCounters()
    page = report_html({EVIL[0]: (trace, c.as_dict()), EVIL[3]: (trace, {})}, EVIL[1] + EVIL[3], [(EVIL[0], EVIL[1])])
    t = Tags(page)
    assert not t.bad and t.tags.count('img') == 2 and t.tags.count('script') == page.count('</script>') == 2
    assert page.count('alert') and '<script>alert' not in page
    assert not re.search(r'url\((?!#)|@import|https?:(?!//www\.w3\.org/)', page)

def test_same_run_same_bytes():
    assert player_html(crowd(), 'x') == player_html(crowd(), 'x') != player_html(crowd(), 'y')
    a, b = (re.search('data-cbatch="(.*?)"', player_html(crowd(), 'x', step=s))[1] for s in (3, 4))
    assert a != b

def test_frames_rebuild_every_state():
    trace = crowd(seed=2)
    d = json.loads(json.dumps(frames(trace)))
    owner = {}
    for f, (rec, state) in zip(d['steps'], trace.replay(), strict=True):
        owner.update(f['moved'])
        held = {b: r for r,bs in state.blocks.items() for b in bs}
        assert {b: d['ids'][i] for b,i in owner.items() if i >= 0} == held
        assert {d['ids'][i]: slot for slot,i,*_ in f['run']} == state.slots
        assert f['free'] == trace.facts['num_blocks'] - len(held) and f['w'] == len(state.waiting)

def test_a_cut_or_worn_trace_still_shows():
    trace = crowd(seed=4, steps=100, maxlen=30, keyframe_every=8)
    d = frames(trace, max_steps=10)
    assert len(d['steps']) == 10 and d['steps'][-1]['n'] == trace[-1].step
    held = {b for bs in trace.state(d['steps'][0]['n'], after=False).blocks.values() for b in bs}
    assert {b for b,i in d['steps'][0]['moved'] if i >= 0} == held    # its first frame is whole
    assert set(request_colors(trace)) >= set(trace.live.requests)
    assert 'data-cbatch' in player_html(trace)

def test_bars_are_the_shares_of_the_steps():
    trace = crowd(seed=5, steps=120)
    bs = bars(trace)
    assert sum(b.stop - b.start for b in bs) == sum(len(r.scheduled) for r in trace)
    assert sum(b.kind == 'preempted' for b in bs) == sum(len(r.preempted) for r in trace) > 0
    row = sorted((b.start, b.stop) for b in bs if b.slot == 0)
    assert all(b <= c for (_,b),(c,_) in zip(row, row[1:]))

def test_empty_and_large():
    empty = Crowd().trace
    assert 'empty' in player_html(empty) and timeline_svg(empty).startswith('<svg')
    slot_timeline(empty); kv_occupancy(empty)
    big = Crowd(max_num_seqs=64, num_blocks=5000, budget=512)
    for i in range(200): big.add(1 + i % 7, 1 + i % 30)
    while big.live: big.step()
    slot_timeline(big.trace); block_map(big.trace, 3); compare_timelines(big.trace, big.trace, by='step')
    assert len(player_html(big.trace)) < 500_000
    plt.close('all')

def test_time_starts_with_the_trace():
    c = Crowd()
    c.now = 1e6                                     # a machine's clock counts from somewhere
    c.add(5, 4); c.add(3, 9)
    while c.live: c.step()
    times = [x for b in bars(c.trace, 'time') for x in (b.start, b.stop)]
    assert (min(times), max(times)) == (0, 9) and frames(c.trace)['steps'][0]['t'] == 0
    assert '>1e+06<' not in timeline_svg(c.trace, 'time') and '1000000' not in timeline_svg(c.trace, 'time')

class Plain(HTMLParser):
    "What a reader sees that takes away scripts, styles, SVG and its own idea of tags, and keeps the words between them"
    def __init__(self, html): super().__init__(); self.off, self.text, self.pictures = 0, '', []; self.feed(html)
    def handle_starttag(self, tag, attrs):
        self.off += tag in ('script', 'style')
        if tag == 'img': self.pictures.append(dict(attrs))
    def handle_endtag(self, tag): self.off -= tag in ('script', 'style')
    def handle_data(self, data): self.text += data * (not self.off)

def test_without_scripts_and_styles_a_title_and_a_picture_are_left():
    trace = crowd()
    plain, player = Plain(player_html(trace, 'what <it> shows')), Player(trace)
    assert plain.text == 'what <it> shows'
    picture, = plain.pictures
    head, data = picture['src'].split(',')
    assert head == 'data:image/png;base64' and picture['alt'] == repr(trace) == repr(player)
    assert base64.b64decode(data) == player._repr_png_() and player._repr_png_().startswith(b'\x89PNG')
    assert not Plain(player._repr_html_()).text.strip(trace.facts['policy'])

@pytest.mark.parametrize('name', ['$', '$\\frac{$', 'a$b$c', '<img src=x onerror=1>'])
def test_an_id_is_no_formula_and_no_tag(name):
    rng, c = random.Random(0), Crowd(num_blocks=14)
    c.add(3, 30, name)
    for _ in range(40): act(rng, c); c.step()
    trace = c.trace
    assert Player(trace)._repr_png_().startswith(b'\x89PNG') and '<img src=x' not in player_html(trace)
    step = next(rec.step for rec in trace if name in trace.state(rec.step, after=False).blocks)
    ax = block_map(trace, step)
    ax.figure.savefig(io.BytesIO()); plt.close(ax.figure)

BROWSER = shutil.which('chromium') or shutil.which('google-chrome')
MEASURE = """<script>setTimeout(() => { const d = document.querySelector('iframe').contentDocument;
  const all = [...d.querySelectorAll('*')];
  const wide = all.filter(e => e.getBoundingClientRect().right > 420.5).map(e => e.tagName + '.' + e.className);
  const held = [...d.querySelectorAll('.pool i')].map(e => e.title).filter(t => t);
  document.title = JSON.stringify([wide, held, d.querySelectorAll('.pool i').length]); }, 500)</script>"""

@pytest.mark.skipif(not BROWSER, reason='needs a browser')
def test_in_a_browser_everybody_who_holds_memory_is_seen_and_nothing_is_wider_than_a_phone(tmp_path):
    llm = LLM(tiny_lm(), max_num_seqs=8, num_blocks=5000, block_size=8)
    llm.generate([[i] * (5 + 9 * i) for i in range(8)], sp(12), use_tqdm=False)
    owners = set(llm.trace.state(llm.trace[len(llm.trace) // 3].step, after=False).blocks)
    page = report_html({'a': (llm.trace, llm.metrics)}, 'wide', [('x' * 300, 'y ' * 300)])
    (tmp_path/'p.html').write_text(page)
    frame = '<iframe src="p.html" style="width:420px;height:2000px;border:0"></iframe>'
    (tmp_path/'w.html').write_text(frame + MEASURE)
    ran = subprocess.run([BROWSER, '--headless=new', '--no-sandbox', '--disable-gpu', '--allow-file-access-from-files',
                          '--virtual-time-budget=4000', '--dump-dom', f'file://{tmp_path}/w.html'],
                         capture_output=True, text=True)
    wide, held, squares = json.loads(unescape(re.search('<title>(.*?)</title>', ran.stdout)[1]))
    assert not wide and len(owners) > 3 and squares == 1000
    assert {r for tip in held for r in tip.split(', ')} == owners and any(', ' in tip for tip in held)
