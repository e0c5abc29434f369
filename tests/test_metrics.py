"Counters and head-of-line time on random schedules"
import random
import pytest
from cbatch.core import CompletionOutput, RequestMetrics, RequestOutput
from cbatch.metrics import EngineCounters, compare, head_of_line_s, summarize
from test_trace import Crowd, act

def counted(policy, seed, **kw):
    rng, c, counters = random.Random(seed), Crowd(policy, **kw), EngineCounters()
    c.on_step = lambda plan, out: counters.count(plan, out, c.cfg.max_num_seqs)
    for _ in range(120): act(rng, c, reuse=False); c.step()
    return c.trace, counters

@pytest.mark.parametrize('policy', ['vllm', 'static', 'dynamic'])
@pytest.mark.parametrize('seed', range(5))
def test_every_slot_step_is_counted_once(policy, seed):
    trace, c = counted(policy, seed, num_blocks=16)
    shares = [s for rec in trace for s in rec.scheduled]
    assert c.num_sampled_tokens + c.num_prefilling + c.num_idle == c.num_slot_steps == 4 * c.num_steps == 4 * len(trace)
    assert c.num_prompt_tokens + c.num_decode_tokens == sum(s[1] for s in shares)
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

def test_nothing_served_is_not_zero_seconds():
    s = summarize([], 0.)
    assert s['tokens_per_s'] is None and s['ttft_p50_s'] is None and s['num_failed'] == 0
    m = RequestMetrics(0., 1., [2.], 2.)
    s = summarize([RequestOutput('a', None, [1], [CompletionOutput(0, '', [5], 'stop')], True, m)], 2.)
    assert (s['ttft_p50_s'], s['tpot_p50_s'], s['itl_max_s'], s['e2e_p99_s']) == (2., None, None, 2.)
    assert 'TPOT' not in repr(compare({'one': s})) and '<script' not in compare({'<script>': s})._repr_html_()
