"Crowds: drawn ones are pinned, and a piece of one says what was done to it"
import math
import numpy as np
import pytest
from cbatch.workloads import Workload, WorkItem, arrivals, batch_steps, chat, heavy, w64, w256

def test_w64_is_pinned():
    w = w64()
    assert (len(w), w.num_prompt_tokens, w.num_output_tokens, max(x.output_len for x in w), w.max_num_seqs) == (64,
        8157, 6237, 346, 32)
    assert (min(x.prompt_len for x in w) >= 8, max(x.prompt_len for x in w) <= 512,
            min(x.output_len for x in w) >= 4) == (True,) * 3
    assert [(x.prompt_len, x.output_len) for x in w64(1)] != [(x.prompt_len, x.output_len) for x in w]
    assert len(w256()) == 256 and w256().num_output_tokens == 23033
    assert {x.arrival for x in w} == {0.}

def test_prompts_repeat_and_differ():
    a, b = w64()[0], w64()[1]
    assert a.prompt_ids(100) == w64()[0].prompt_ids(100) and len(a.prompt_ids(100)) == a.prompt_len
    assert a.prompt_ids(100) != a.prompt_ids(100, seed=1) and set(a.prompt_ids(3)) <= {0, 1, 2}
    assert a.prompt_ids(1000)[:8] != b.prompt_ids(1000)[:8]

def test_heavy_pays():
    for w, least in ((w64(), 1.5), (w256(), 2.9), (heavy(), 6.5)):
        static, free = batch_steps([x.output_len for x in w], 32)
        assert static / free > least
        assert free >= max(max(x.output_len for x in w), w.num_output_tokens / 32)

def test_chat_grows():
    w = chat(3, 4)
    turns = [x for x in w if x.session == 's1']
    for a, b in zip(turns, turns[1:]):
        assert b.parts[:len(a.parts)] == a.parts and b.arrival > a.arrival and len(b.parts) == len(a.parts) + 2
    assert ({x.parts[0] for x in w} == {('system', 200)}
            and turns[1].prompt_ids(500)[:turns[0].prompt_len] == turns[0].prompt_ids(500))

@pytest.mark.parametrize('b', [.2, 1., 4., math.inf])
def test_arrivals_take_n_over_rate(b):
    t = arrivals(400, 8., b, seed=3)
    assert t == sorted(t) and t[-1] == pytest.approx(50.) and t[0] >= 0 and t == arrivals(400, 8., b, seed=3)
    if b == math.inf: assert np.diff(t) == pytest.approx([.125] * 399)
    else: assert np.std(np.diff(t)) * 8 == pytest.approx(b ** -.5, rel=.25)

def test_slices_and_speeds_leave_the_original_alone():
    w = Workload('x', [WorkItem(3, [(str(i), 2)], arrival=i * 2.) for i in (2, 0, 1, 3)])
    assert [x.arrival for x in w] == [0., 2., 4., 6.]
    assert [x.arrival for x in w[1:3]] == [0., 2.] and w[1:3].name == 'x[1:3]' and w[-1].arrival == 6.
    assert [x.arrival for x in w.faster(4)] == [0., .5, 1., 1.5] and w.duration_s == 6.
    assert [x.arrival for x in w.at([1, 0, 2, 3])] == [0., 1., 2., 3.]
    assert len(w.shorter(4)) == 0 and len(w.shorter(5)) == 4 and len(w[4:]) == 0
    for bad in (lambda: w.at([1.]), lambda: w.faster(0), lambda: arrivals(2, -1)):
        with pytest.raises(ValueError): bad()

def bus(n=5, gap=10.): return Workload('bus', [WorkItem(3, [(str(i), 2 + i)], arrival=gap * i) for i in range(n)])

def test_a_stretch_of_time_keeps_its_clock():
    w = bus().between(5, 30)
    assert [x.arrival for x in w] == [5., 15.] and [x.prompt_len for x in w] == [3, 4]   # 30 itself is out
    assert len(bus().between(100, 200)) == 0 and len(bus().between(0, math.inf)) == 5
    for bad in ((3, 3), (4, 3), (math.nan, 3)):
        with pytest.raises(ValueError, match='nobody can come'): bus().between(*bad)

def test_a_rate_is_reached_and_bursts_stay():
    w = Workload('x', [WorkItem(1, [('a', 1)], arrival=t) for t in (0., 0., 1., 7.)])
    assert w.requests_per_s == pytest.approx(3 / 7)
    fast = w.at_rate(6)
    assert fast.requests_per_s == pytest.approx(6) and [x.arrival * 14 for x in fast] == pytest.approx([0, 0, 1, 7])
    assert bus(1).requests_per_s == math.inf == bus(0).requests_per_s
    for w in (bus(1), bus(0), bus().at([1.] * 5)):
        with pytest.raises(ValueError, match='all come at once'): w.at_rate(2)
    for bad in (0, -1, math.inf, 'x', None):
        with pytest.raises(ValueError, match='requests_per_s'): bus().at_rate(bad)

def test_the_name_says_what_was_done():
    w = bus().between(0, 35)[1:].faster(3).at_rate(2.5).shorter(7)
    assert w.name == 'bus.between(0, 35)[1:].faster(3).at_rate(2.5).shorter(7)' and w.dropped == {'over 7 tokens': 1}
    assert repr(w).endswith('left out: 1 (over 7 tokens)') and w.shorter(7).dropped == w.dropped
    assert w.shorter(6).dropped == {'over 7 tokens': 1, 'over 6 tokens': 1} and w.shorter(6).num_dropped == 2
    assert bus().at([0.] * 5).name == 'bus.at(...)' and not bus().dropped
