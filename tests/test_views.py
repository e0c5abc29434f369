"Pages and figures from records: hostile ids, empty and cut traces, the same bytes every time"
import json, random, re
from html.parser import HTMLParser
import matplotlib.pyplot as plt
import pytest
from cbatch.metrics import EngineCounters
from cbatch.player import frames, player_html, report_html, timeline_svg
from cbatch.views import bars, block_map, compare_timelines, kv_occupancy, request_colors, slot_timeline
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
        self.bad += [(k, v) for k,v in attrs if k.startswith('on') or k in ('src', 'href')]

@pytest.mark.parametrize('policy', ['vllm', 'static'])
def test_hostile_ids_stay_text(policy):
    trace = crowd(evil=True, policy=policy)
    c = EngineCounters()
    page = report_html({EVIL[0]: (trace, c.as_dict()), EVIL[3]: (trace, {})}, EVIL[1] + EVIL[3], [(EVIL[0], EVIL[1])])
    t = Tags(page)
    assert not t.bad and 'img' not in t.tags and t.tags.count('script') == page.count('</script>') == 2
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
