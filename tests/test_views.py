"Pages and figures from records: hostile ids, empty and cut traces, the same bytes every time"
import base64, io, json, random, re, shutil, subprocess
from html import unescape
from html.parser import HTMLParser
import matplotlib.pyplot as plt
import pytest
from cbatch.llm import LLM
from cbatch import LLM
from cbatch.metrics import EngineCounters
from cbatch.player import Player, frames, player_html, report_html, timeline_svg
from cbatch.model import tiny_lm
from cbatch.screen import Screen
from cbatch.views import (COLORS, bars, block_map, compare_timelines, guess_bars, kv_occupancy, request_colors,
                          slot_timeline)
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

@pytest.mark.parametrize('by', ['step', 'time'])
def test_guesses_lie_on_the_bars_of_those_who_decode(by):
    trace = crowd(seed=5, steps=120, guess=6)
    made, bs = guess_bars(trace, by), bars(trace, by)
    each = lambda what: sum(round(b.stop - b.start) * what(b) for b in made)
    tried = [x for rec in trace for r, x in rec.guessed.items() if any(s[0] == r for s in rec.scheduled)]
    assert each(lambda b: b.guessed) == sum(n for n, _, _ in tried) > each(lambda b: b.kept) > 50
    assert each(lambda b: b.kept) == sum(k for _, k, _ in tried)
    for g in made:
        under = [b for b in bs if b.slot == g.slot and b.start <= g.start < b.stop]
        assert [(b.kind, b.request_id) for b in under] == [('decode', g.request_id)] and under[0].stop >= g.stop

def test_a_long_trace_has_no_more_guesses_than_a_picture_has_columns():
    c = Crowd(max_num_seqs=3, num_blocks=900, budget=40, guess=6)
    for i in range(3): c.add(3, 900)
    while c.live: c.step()
    made, total = guess_bars(c.trace, columns=50), [x for rec in c.trace for x in rec.guessed.values()]
    assert len(c.trace) > 150 and 100 < len(made) <= 150 < len(guess_bars(c.trace))
    for k in (0, 1): assert sum((b.stop - b.start) * (b.guessed, b.kept)[k] for b in made) == pytest.approx(
        sum(x[k] for x in total))
    assert all(b.stop - b.start <= -(-len(c.trace) // 50) and 0 <= b.kept <= b.guessed <= 6 for b in made)

def test_what_shows_guesses_shows_them_only_where_there_are_any():
    plain, guessing = crowd(seed=5), crowd(seed=5, guess=6)
    for trace in (plain, guessing):
        svg, page = timeline_svg(trace), player_html(trace).partition('</style>')[2]
        made = guess_bars(trace)
        assert svg.count('class="guessed"') == sum(g.kept > 0 for g in made)
        assert svg.count('class="rejected"') == sum(g.kept < g.guessed for g in made)
        assert bool(made) == (trace is guessing) == ('guess kept' in page) == ('cbatch-rejected' in svg)
        ax = slot_timeline(trace)
        assert ('guess rejected' in [t.get_text() for t in ax.get_legend().get_texts()]) == bool(made)
        assert all(0 <= p.get_height() < .861 for p in ax.patches)
        plt.close(ax.figure)

def test_frames_say_what_was_guessed():
    trace = crowd(seed=6, guess=6)
    d = json.loads(json.dumps(frames(trace)))
    for f, rec in zip(d['steps'], trace, strict=True):
        made = {d['ids'][i]: tuple(more) for _, i, _, _, *more in f['run'] if more}
        ran = {s[0] for s in rec.scheduled}
        assert made == {r: x[:2] for r, x in rec.guessed.items() if x[0]}
        said = {(d['ids'][i], d['texts'][k]) for i, k in f['said'] if i >= 0}
        for r, (n, kept) in made.items(): assert (r, f'decode, {n} guessed, {kept} kept') in said and r in ran
        for _, i, before, n, *more in f['run']: assert before + n + (more[0] - more[1] if more else 0) <= d['total'][i]

@pytest.mark.parametrize('color', [True, False])
def test_a_screen_has_a_sign_for_steps_that_kept_guesses(color):
    for guess in (0, 6):
        trace = crowd(seed=5, guess=guess)
        screen = Screen(trace)
        for rec in trace: screen.push(rec)
        lines = screen.lines(120, 30, color=color)
        assert ('guessed' in lines[0]) == bool(guess) and all('»' not in l for l in lines) == (color or not guess)
        rgb = tuple(int(COLORS['guessed'][i:i + 2], 16) for i in (1, 3, 5))
        assert (f'\x1b[38;2;{";".join(map(str, rgb))}m' in '\n'.join(lines)) == (color and guess > 0)
        kinds = [k for did in screen.steps for k in did.values()]
        held = [x for rec in trace for r, x in rec.guessed.items() if x[1]]
        assert kinds.count('guessed') == len(held) and kinds.count('decode') > 20
    rec = next(rec for rec in trace if rec.guessed and rec.scheduled)
    screen = Screen(trace)
    screen.push(rec)
    n, kept, _ = rec.guessed[next(iter(rec.guessed))]
    assert f'decode, {kept} of {n} guesses' in '\n'.join(screen.lines(120))

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

@pytest.mark.parametrize('kv_dtype,vector', [('auto', 4 * 16), ('int8', 16 + 4)])
def test_blocks_say_what_they_take(tiny, kv_dtype, vector):
    with LLM(tiny, num_blocks=8, block_size=4, kv_dtype=kv_dtype) as llm:
        llm.generate([[1, 2, 3], [4, 5, 6, 7, 8]], sp(2), use_tqdm=False)
        one, trace = 4 * 2 * 3 * 2 * vector / 1e3, llm.trace
    assert kv_occupancy(trace).get_ylabel() == f'blocks of {one:.3g} kB'
    assert block_map(trace, 0).get_title('left') == f'step 0: 5 of 8 blocks free, {3 * one:.3g} kB held'
    trace.block_bytes = None
    assert block_map(trace, 0).get_title('left') == 'step 0: 5 of 8 blocks free'
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

SEATS = """<script>setTimeout(() => { const wide = k => [...document.querySelectorAll('.seat .' + k)].map(
  e => Math.round(e.getBoundingClientRect().width / e.parentNode.getBoundingClientRect().width * 1000) / 1000);
  const said = [...document.querySelectorAll('.seat')].map(e => e.lastChild.textContent);
  const all = [...document.querySelectorAll('.seat .bar')].map(b => [...b.children].map(
    e => e.getBoundingClientRect().width / b.getBoundingClientRect().width).reduce((x, y) => x + y, 0));
  document.title = JSON.stringify([wide('guessed'), wide('rejected'), said, all.filter(x => x)]); }, 500)</script>"""

@pytest.mark.skipif(not BROWSER, reason='needs a browser')
def test_in_a_browser_a_step_shows_its_guesses(tmp_path):
    trace = crowd(seed=6, guess=6)
    rec = next(r for r in trace if any(0 < k < n for n, k, _ in r.guessed.values()) and r.scheduled)
    (tmp_path/'p.html').write_text('<meta charset="utf-8">' + player_html(trace, step=rec.step) + SEATS)
    ran = subprocess.run([BROWSER, '--headless=new', '--no-sandbox', '--disable-gpu', '--virtual-time-budget=4000',
                          '--window-size=1200,800', '--dump-dom', f'file://{tmp_path}/p.html'],
                         capture_output=True, text=True)
    kept, failed, said, all_ = json.loads(unescape(re.search('<title>(.*?)</title>', ran.stdout)[1]))
    made, total = rec.guessed.values(), dict(zip(frames(trace)['ids'], frames(trace)['total']))
    assert sorted(kept) == pytest.approx(sorted(k / total[r] for r, (_, k, _) in rec.guessed.items() if k), abs=.02)
    assert len(failed) == sum(k < n for n, k, _ in made)
    state, ran = trace.state(rec.step, after=False), {r: n for r, n, _, _ in rec.scheduled}
    lost = {r: n - k for r, (n, k, _) in rec.guessed.items()}
    ends = {r: n + ran.get(r, 0) + lost.get(r, 0) for r, n in state.computed.items()}
    assert sorted(all_) == pytest.approx(sorted(ends[r] / total[r] for r in state.slots if ends[r]), abs=.03)
    for n, k, _ in made: assert any(s.startswith(f'decode, {n} guessed, {k} kept') for s in said)

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
