"What a step costs, and a simulation of steps: the same decisions as the engine's, step by step."
import json, math, random
from dataclasses import replace

import pytest

from cbatch import LLM, tiny_lm
from cbatch import simulator
from cbatch.core import Plan, StepOutput, StepRecord
from cbatch.cost import Cost, Features, features, step_seconds
from cbatch.driving import VirtualClock
from cbatch.params import EngineConfig, ParamError
from cbatch.prefix_caching import PrefixBlocks
from cbatch.results import run_results
from cbatch.simulator import serve_on, simulate
from cbatch.workloads import WorkItem, Workload, arrivals, chat, smaller
from heard import Heard

COST = Cost(Features(.02, .0004, .0003, 1e-6, 2e-6))      # no two of them equal
ODD = dict(max_num_seqs=3, max_num_batched_tokens=13, block_size=4, max_model_len=60)

@pytest.fixture(scope='module')
def lm(): return tiny_lm('llama', seed=0)

def crowd(seed, n=14, equal=.3):
    "People who share beginnings, some whole prompts, some too long, who come alone or together"
    rng, items, t = random.Random(seed), [], 0.
    for i in range(n):
        t += rng.choice((0., 0., .03, .2, .9))
        parts = [('shared', rng.choice((5, 8, 12)))] * rng.randrange(2) + [(f'own{i}', rng.randint(1, 19))]
        if items and rng.random() < equal: parts = rng.choice(items).parts
        if rng.random() < .07: parts = [('long', 80)]
        items.append(WorkItem(rng.randint(1, 22), parts, t, user=f'u{rng.randrange(3)}', priority=rng.randrange(2)))
    return Workload(f'crowd {seed}', items)

TWINS = Workload('twins', [WorkItem(20 - i % 3, [(f'q{i // 3}', 9)], .04 * i) for i in range(12)])

def both(lm, work, **config):
    "A run of the engine and one of the simulator, on clocks that the same cost moves"
    with LLM(lm, **config) as llm:
        VirtualClock(llm, cost=COST)
        real = serve_on(llm, work, seed=1)
    return real, simulate(work, cost=COST, seed=1, vocab_size=lm.vocab_size, **config)

def agree(real, said):
    "Every step and every sender, to the last bit"
    for r, s in zip(real.trace, said.trace): assert r == s
    assert len(real.trace) == len(said.trace) and real.counters == said.counters and real.took_s == said.took_s
    seen = lambda served: [(x.input_len, x.metrics, x.error, x.lag_s) for x in served.sent]
    assert seen(real) == seen(said)

CASES = [(policy, preemption, caching) for policy in ('vllm', 'static', 'dynamic', 'fair')
         for preemption in ('recompute', 'swap') for caching in (True, False)]

@pytest.mark.parametrize('policy,preemption,caching', CASES)
def test_decisions_are_the_engines(lm, policy, preemption, caching):
    for seed, blocks in ((7, 15), (2, 21)):
        work = crowd(seed)
        how = dict(policy=policy, preemption=preemption, prefix_caching=caching, num_blocks=blocks)
        real, said = both(lm, work, **how, **ODD)
        agree(real, said)
        assert real.records and any(x.error for x in real.sent) == any(x.parts[0][0] == 'long' for x in work)

def test_the_crowds_are_hard(lm):
    "Else the test above would say little: somebody is preempted, something is found, somebody is refused"
    real = [both(lm, crowd(seed), num_blocks=15, watermark=0., **ODD)[0] for seed in (2, 7)]
    assert sum(r.counters.num_preemptions for r in real) > 3 and sum(r.counters.num_cached_tokens for r in real) > 30
    assert any(x.error for r in real for x in r.sent)

def test_answers_of_equal_prompts_are_found_alike(lm):
    "A preempted request finds blocks that hold part of an answer, if another of the same prompt has said the same"
    found = 0
    for blocks in (15, 16, 17):
        real, said = both(lm, TWINS, num_blocks=blocks, watermark=0., **ODD)
        agree(real, said)
        found += sum(n > 9 for r in real.records for n in r.found.values())
    assert found, 'no part of an answer was ever found'

@pytest.mark.parametrize('policy', ['vllm', 'fair'])
def test_conversations(lm, policy):
    work = smaller(chat(5, 3, rate=2., think_s=.5, seed=3), 15, 6)
    agree(*both(lm, work, policy=policy, num_blocks=40, max_num_seqs=4, block_size=4, max_model_len=100))

@pytest.mark.parametrize('policy,name,fault', [
    ('static', 'VirtualClock', 'padding costs nothing'), ('vllm', 'VirtualClock', 'sleeps too long'),
    ('vllm', 'EngineConfig', 'finds no prefix'), ('vllm', '_NoRunner', 'answers of twins differ')])
def test_a_simulator_that_is_none_is_found(lm, monkeypatch, policy, name, fault):
    "Faults that would be believed: each changes the simulation alone, and some step differs"
    class Babel(simulator._NoRunner):
        def finish(self, plan, pending): return StepOutput({s.request.request_id: [-1 - s.request.seq]
                                                            for s in plan.scheduled if s.rows})
    class Slow(VirtualClock):
        def sleep(self, s): self.t += s + .01
    config = dict(policy=policy, num_blocks=15, watermark=0., **ODD)
    for work in (crowd(2), TWINS):
        real, said = both(lm, work, **config)
        agree(real, said)
        with monkeypatch.context() as m:
            m.setattr(simulator, name, {
                'padding costs nothing': lambda e, cost: VirtualClock(e, cost=lambda p: cost(replace(p, padding=[]))),
                'sleeps too long': Slow, 'answers of twins differ': Babel,
                'finds no prefix': lambda *a, **kw: EngineConfig(*a, **kw | dict(prefix_caching=False))}[fault])
            said = simulate(work, cost=COST, seed=1, vocab_size=lm.vocab_size, **config)
        try: agree(real, said)
        except AssertionError: return
    pytest.fail(f'{fault}, and nobody noticed')

# --- a cost

def test_features_before_and_after(lm):
    "What a plan is said to cost before it runs is what its record is said to cost, padding, chunks and all"
    for policy in ('vllm', 'static'):
        before = []
        with LLM(lm, policy=policy, num_blocks=30, **ODD) as llm:
            VirtualClock(llm, cost=lambda plan: before.append(features(plan)) or COST(plan))
            recs = serve_on(llm, crowd(5)).records
        after = [features(r) for r in recs]
        assert after == before and max(f.prefill_context for f in after) > max(f.prefill_rows for f in after) > 0
        for r, f in zip(recs, before):
            assert f.decode_rows + f.prefill_rows == sum(s[1] for s in r.scheduled) + sum(n for n, _ in r.padding)

def test_guesses_are_rows_before_and_after(lm):
    "Kept or not: and runs of one engine add up, place by place"
    before, g = [], Heard()
    with LLM(lm, num_blocks=30, guesses=g, guess_when='always', max_guesses=4, **ODD) as llm:
        VirtualClock(llm, cost=lambda plan: before.append(features(plan)) or COST(plan))
        g.listen(lambda g: serve_on(llm, crowd(5), salt='a'))
        first = len(before)
        two = [serve_on(llm, crowd(5), salt=s) for s in 'bc']
        assert [features(r) for r in llm.trace] == before and llm.counters.num_guesses > 20
        assert llm.counters.accepted_at == [a + b for a, b in zip(*(r.counters.accepted_at for r in two), strict=True)]
    rows = sum(f.decode_rows + f.prefill_rows for f in before[first:])
    c = [r.counters for r in two]
    assert rows == sum(x.num_prompt_tokens + x.num_decode_tokens for x in c)
    assert sum(x.num_accepted_tokens for x in c) > 9

def test_a_step_that_computes_nothing_costs_nothing():
    assert features(StepRecord(3, 0., 1., preempted=['a'])) == features(Plan(3, 0.)) == Features(0)
    assert COST(Plan(3, 0.)) == 0

def test_each_row_attends_to_itself_and_all_before_it():
    rec = StepRecord(0, 0., 1., scheduled=[('a', 1, 6, 1), ('b', 3, 4, 0)], padding=[(1, 5), (2, 9)])
    assert features(rec) == Features(1, 2, 5, 7 + 5, (5 + 6 + 7) + (8 + 9))

def test_time_between_steps_counts_while_somebody_stays():
    step = lambda i, start, end, who, new=(): StepRecord(i, start, end, [(who, 1, 0, 1)], admitted=list(new))
    recs = [step(0, 1., 2., 'a', 'a'), step(1, 2.5, 3., 'a'), step(2, 9., 9.5, 'b', 'b'), step(4, 10., 11., 'b')]
    assert step_seconds(recs) == [1., 1., .5, 1.]
    assert step_seconds([*recs[:2], step(2, .5, .75, 'a')]) == [1., 1., .25]        # another run, on another clock

SOURCE = dict(machine=dict(cpu='abacus', cores=10, threads=1, gpu=None, versions=dict(wood='3.1')), model='toy',
              dtype='float32', seed=7)

def records(lm, policy='static', seed=11):
    return simulate(crowd(seed, 40), policy, COST, vocab_size=lm.vocab_size, num_blocks=99, **ODD).records

def test_a_fit_finds_what_moved_the_clock(lm):
    cost = Cost.fit(records(lm), SOURCE)
    assert cost.coefficients == pytest.approx(COST.coefficients, rel=1e-3, abs=1e-9)
    assert cost.error == pytest.approx(dict(mean=0, p95=0, run=0), abs=1e-6)

def test_accidents_are_left_out_and_counted(lm):
    recs = records(lm)
    wild = [replace(r, start=r.start + shift, end=r.end + shift + (hit := 9. * (i in (0, 41, 82))))
            for i, (r, shift) in enumerate((r, 9. * sum(j < i for j in (0, 41, 82))) for i, r in enumerate(recs))]
    cost = Cost.fit(wild, SOURCE)
    assert cost.coefficients == pytest.approx(COST.coefficients, rel=1e-3, abs=1e-9)
    assert cost.source['left_out'] == 3

def test_the_error_is_of_steps_held_out(lm):
    rng, t, recs = random.Random(3), 0., []
    for r in records(lm):
        took = COST(r) * rng.uniform(.7, 1.3)
        recs.append(replace(r, start=t, end=(t := t + took)))
    e = Cost.fit(recs, SOURCE).error
    assert .1 < e['mean'] < .2 and .2 < e['p95'] < .45 and abs(e['run']) < .1

def test_a_fit_needs_steps_and_a_place(lm):
    with pytest.raises(ValueError, match='39 steps.*40'): Cost.fit(records(lm)[:39], SOURCE)
    with pytest.raises(ValueError, match='no machine, seed'): Cost.fit(records(lm), dict(model='m', dtype='d'))
    for machine in ('mine', dict(versions=5)):
        with pytest.raises(ValueError, match='give a dict'): Cost.fit(records(lm), dict(SOURCE, machine=machine))
    endless = [replace(r, end=math.inf) for r in records(lm)]
    with pytest.raises(ValueError, match='0 steps.*40'): Cost.fit(endless, SOURCE)

def test_a_cost_says_where_it_was_measured_or_that_it_was_not(lm):
    said = repr(Cost.fit(records(lm), SOURCE))
    for what in ('abacus', '10 cores', 'wood 3.1', 'toy in float32', 'seed 7', 'held out'): assert what in said
    assert 'stated, not measured' in repr(Cost.stated()) and 'measured' in repr(simulate(crowd(0), **ODD))

def test_stated_is_the_virtual_clocks_own(lm):
    "Two numbers, said in two places"
    done = []
    for cost in (None, Cost.stated()):
        with LLM(lm, policy='static', num_blocks=40, **ODD) as llm:
            VirtualClock(llm, cost=cost)
            done.append(serve_on(llm, crowd(2)).took_s)
    assert done[0] == pytest.approx(done[1])

def test_in_a_file_and_back(lm, tmp_path):
    path = tmp_path/'cost.json'
    for cost in (Cost.stated(), Cost.fit(records(lm), SOURCE)):
        cost.to_json(path)
        assert Cost.from_json(path) == cost and repr(Cost.from_json(path)) == repr(cost)

GOOD = dict(Cost.stated().to_dict(), source=dict(SOURCE, records=99), error=dict(mean=.1, p95=.2, run=-.1))
EACH = GOOD['coefficients']

@pytest.mark.parametrize('bad', [
    [], {}, 7, None, dict(GOOD, cbatch_cost=2), dict(GOOD, error=None), dict(GOOD, source=None),
    dict(GOOD, source={}), dict(GOOD, source=dict(SOURCE, machine='mine', records=9)), dict(GOOD, coefficients=None),
    dict(GOOD, source=dict(SOURCE, machine=dict(versions=5), records=9)),
    dict(GOOD, error=dict(mean=.1)), dict(GOOD, error=dict(mean='.1', p95=.2, run=0.)),
    *(dict(GOOD, coefficients=dict(EACH, steps=x)) for x in (-1., '1', None, True, float('nan'), float('inf'), [])),
    dict(GOOD, coefficients=dict(EACH, more=1.)), dict(GOOD, coefficients={})])
def test_a_bad_file_is_refused_by_name(bad, tmp_path):
    (tmp_path/'c.json').write_text(json.dumps(bad))
    with pytest.raises(ValueError, match='c.json: not a cost'): Cost.from_json(tmp_path/'c.json')

def test_no_json_is_refused_by_name(tmp_path):
    assert Cost.from_dict(GOOD)
    for text in (b'{', b'', b'\xff\xfe', b'[' * 100_000):
        (tmp_path/'c.json').write_bytes(text)
        with pytest.raises(ValueError, match='c.json: not a cost'): Cost.from_json(tmp_path/'c.json')
    with pytest.raises(OSError): Cost.from_json(tmp_path/'none.json')

# --- a simulation

def test_results_are_made_of_it_as_of_a_run(lm):
    real, said = both(lm, crowd(1), num_blocks=30, **ODD)
    a, b = (run_results(s.sent, s.took_s, dict(ttft=400.)) for s in (real, said))
    assert {k: v for k, v in a.items() if k != 'date'} == {k: v for k, v in b.items() if k != 'date'}
    assert a['failed'] == sum(x.metrics is None for x in real.sent) and a['completed'] > 5

def test_without_a_pool_memory_is_never_short():
    s = simulate(crowd(3, 30), max_num_seqs=4, block_size=4)
    assert s.counters.num_preemptions == 0 and not any(x.error for x in s.sent)
    assert s.trace.facts['num_blocks'] == 4 * -(-max(x.prompt_len + x.output_len for x in crowd(3, 30)) // 4)

def test_the_same_twice():
    a, b = (simulate(crowd(8), seed=4, **ODD) for _ in 'ab')
    agree(a, b)
    assert a.config == b.config and a.policy == 'vllm' and a.cost == Cost.stated()

def test_nobody_comes():
    s = simulate(Workload('nobody', []))
    assert s.took_s == 0 == s.counters.num_steps and not s.sent

@pytest.mark.parametrize('bad', [dict(kv_cache_mb=10), dict(swap_mb=10), dict(blocks=3), dict(policy='quick'),
                                 dict(max_num_seqs=0), dict(trace=-1), dict(guesses='lookup')])
def test_options_that_mean_nothing_are_refused(bad):
    with pytest.raises(ParamError) as e: simulate(crowd(0), **bad)
    assert e.value.param in bad

def test_a_run_counts_its_own_steps(lm):
    with LLM(lm, num_blocks=60, **ODD) as llm:
        VirtualClock(llm, cost=COST)
        first, second = (serve_on(llm, crowd(s), salt=str(s)) for s in (0, 1))
        assert len(first.records) >= first.counters.num_steps > 0 and second.records[0].step == first.counters.num_steps
        assert llm.metrics['num_steps'] == first.counters.num_steps + second.counters.num_steps
        assert sum(llm.metrics['finished'].values()) == sum(not x.error for s in (first, second) for x in s.sent)
    agree(second, replace(second)) and first.cost is None

def test_a_measured_clock_stays_its_own(lm):
    "serve_on an engine with its own clock: times are measured, nothing says forecast"
    with LLM(lm, num_blocks=60, **ODD) as llm: s = serve_on(llm, crowd(4).at([0.] * 14))
    assert s.cost is None and 'own clock' in repr(s) and s.took_s > 0
