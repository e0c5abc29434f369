"Counters and head-of-line time on random schedules"
import random
import pytest
from cbatch.core import CompletionOutput, RequestMetrics, RequestOutput, StepRecord
from cbatch.metrics import EngineCounters, compare, head_of_line_s, itls_s, summarize, tpot_s
from cbatch.trace import Trace
from test_trace import Crowd, act

def counted(policy, seed, **kw):
    rng, c, counters = random.Random(seed), Crowd(policy, **kw), EngineCounters()
    c.on_step = lambda plan, out: counters.count(plan, out, c.cfg.max_num_seqs)
    for _ in range(120): act(rng, c, reuse=False); c.step()
    return c.trace, counters

@pytest.mark.parametrize('policy', ['vllm', 'static', 'dynamic'])
@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('guess', [0, 6])
def test_every_slot_step_is_counted_once(policy, seed, guess):
    trace, c = counted(policy, seed, num_blocks=16, guess=guess)
    shares, tried = [s for rec in trace for s in rec.scheduled], [x for rec in trace for x in rec.guessed.values()]
    assert c.num_sampling + c.num_prefilling + c.num_idle == c.num_slot_steps == 4 * c.num_steps == 4 * len(trace)
    guessed, kept = sum(n for n, _, _ in tried), sum(k for _, k, _ in tried)
    assert (c.num_guessed_tokens, c.num_accepted_tokens) == (guessed, kept) and (kept > 20) == (guess > 0)
    assert c.num_sampled_tokens == c.num_sampling + kept and c.accepted_share == (kept / guessed if guess else None)
    assert sum(c.accepted_at) == kept and c.accepted_at == sorted(c.accepted_at, reverse=True)
    assert c.num_guesses == sum(n > 0 for n, _, _ in tried)
    assert c.num_prompt_tokens + c.num_decode_tokens == sum(s[1] for s in shares) + guessed - kept
    assert c.num_sampled_tokens == sum(s[3] for s in shares)
    assert c.num_padding_tokens == sum(n for rec in trace for n,_ in rec.padding)
    assert policy != 'vllm' or not c.num_padding_tokens
    assert c.num_preemptions == sum(len(rec.preempted) for rec in trace)
    assert 0 < c.slot_utilisation <= 1 and c.as_dict()['slot_utilisation'] == c.slot_utilisation

def test_counters_take_over_what_requests_carry():
    c, counters = Crowd(num_blocks=6, max_num_seqs=3), EngineCounters()
    for _ in range(3): c.add(6, 12)
    requests = list(c.live.values())
    c.abort('r2')
    while c.live: c.step()
    for r in requests: counters.finish(r)
    assert counters.finished == {'length': 2, 'abort': 1}
    assert counters.num_recomputed_tokens == sum(r.num_recomputed_tokens for r in requests) > 0

def test_head_of_line_is_the_closed_batchs_own():
    waits = {}
    for policy in ('vllm', 'static'):
        c = Crowd(policy, max_num_seqs=2, num_blocks=100)
        for n in (2, 20, 2, 2): c.add(3, n)
        while c.live: c.step()
        waits[policy] = [head_of_line_s(c.trace, f'r{i}') for i in range(4)]
    assert waits['vllm'] == [0, 0, 0, 0]           # a slot that is free at the end of a step is taken in the next
    assert waits['static'][:2] == [0, 0] and waits['static'][2] == waits['static'][3] == 18

def test_head_of_line_needs_blocks_and_counts_from_arrival():
    c = Crowd(max_num_seqs=2, num_blocks=7, budget=64)
    c.add(20, 4); c.add(12, 2)                     # 5 of 7 blocks, then 3: a slot is free, memory is not
    while c.live: c.step()
    assert head_of_line_s(c.trace, 'r1') == 0
    c.now += 5
    c.add(3, 2, arrival=c.now - 2)                 # the engine slept while it waited
    c.step()
    assert head_of_line_s(c.trace, 'r2') == 2
    with pytest.raises(ValueError, match='maxlen'): head_of_line_s(c.trace, 'nobody')

def test_head_of_line_knows_how_long_a_request_has_become():
    "Five guesses held: eleven tokens, three blocks of four; there they are, and it waits all the same"
    t = Trace(max_num_seqs=2, max_num_batched_tokens=16, block_size=4, num_blocks=4)
    for rec in (
        StepRecord(0, 0., 1., scheduled=[('a', 4, 0, 1), ('b', 2, 0, 1)], admitted=['a', 'b'],
                   arrived=[('a', 4, 0.), ('b', 2, 0.)], blocks={'a': [1], 'b': [2]}),
        StepRecord(1, 1., 2., scheduled=[('a', 6, 4, 6), ('b', 1, 2, 1)], guessed={'a': (5, 5, 0)},
                   blocks={'a': [3, 4]}),
        StepRecord(2, 2., 4., scheduled=[('b', 1, 3, 1)], preempted=['a'])): t.append(rec)
    assert t.state(2, after=False).num_free_blocks == 3 and head_of_line_s(t, 'a') == 2.

def test_gaps_lie_between_steps_and_guesses_have_rows_where_there_are_any():
    c, counters = Crowd(guess=4, num_blocks=60), EngineCounters()
    c.on_step = lambda plan, out: counters.count(plan, out, 4)
    for _ in range(3): c.add(5, 30)
    rs = list(c.live.values())
    while c.live: c.step()
    for r in rs:
        m = RequestMetrics(r.arrival, r.scheduled_at, r.token_times, r.finished_at)
        assert len(itls_s(m)) < len(r.token_times) - 1 == 29 and set(itls_s(m)) == {1.}
        assert tpot_s(m) == (m.finished_at - m.token_times[0]) / 29
    many = RequestMetrics(0., 0., sorted(t for r in rs for t in r.token_times), c.now)     # the answers to one prompt
    assert set(itls_s(many)) == {1.} and len(itls_s(many)) == len(c.trace) - 1
    plain = summarize([], 1., EngineCounters(num_steps=1, num_slot_steps=4, num_sampling=2))
    shown = {label: cells for label, cells, _ in compare(dict(plain=plain, guessing=summarize([], 1., counters))).rows}
    assert shown['guessed tokens'] == ['-', str(counters.num_guessed_tokens)]
    assert shown['guesses kept'] == ['-', f'{counters.accepted_share:.1%}'] and shown['slot utilisation'][0] == '50.0%'
    assert 'guess' not in repr(compare(dict(plain=plain))) and counters.slot_utilisation < .75

def test_nothing_served_is_not_zero_seconds():
    s = summarize([], 0.)
    assert s['tokens_per_s'] is None and s['ttft_p50_s'] is None and s['num_failed'] == 0
    m = RequestMetrics(0., 1., [2.], 2.)
    s = summarize([RequestOutput('a', None, [1], [CompletionOutput(0, '', [5], 'stop')], True, m)], 2.)
    assert (s['ttft_p50_s'], s['tpot_p50_s'], s['itl_max_s'], s['e2e_p99_s']) == (2., None, None, 2.)
    assert 'TPOT' not in repr(compare({'one': s})) and '<script' not in compare({'<script>': s})._repr_html_()
