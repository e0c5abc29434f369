"How many users: answers that can be worked out by hand, endings that must be said, and the rule of the queue."
import json
from dataclasses import replace

import pytest

from cbatch.capacity import (Capacity, Trial, basis, bracket, capacities, capacity, confirm, sentence,
                             keeps_up, rate_of, try_rate, twice)
from cbatch.cli import main
from cbatch.core import RequestMetrics
from cbatch.cost import Cost
from cbatch.driving import Outcome
from cbatch.metrics import EngineCounters
from cbatch.params import EngineConfig
from cbatch.simulator import Served, simulate
from cbatch.workloads import WorkItem, Workload, arrivals, drawn

COST = Cost.stated(.02, .0008)

def equal(n, out=5, gap=1.):
    "The same question again and again, at equal gaps"
    return Workload('equal', [WorkItem(out, [(f'q{i}', 7)], i * gap) for i in range(n)])

def one_slot(service_s, slots=1):
    "Serves each for so long, in order of arrival: what `simulate` would be if steps took no time"
    def serve(work):
        free, sent = [0.] * slots, []
        for x in work:
            start = max(x.arrival, min(free))
            free[free.index(min(free))] = end = start + service_s
            sent.append(Outcome(7, RequestMetrics(x.arrival, start, [end], end)))
        return Served(sent, max(free), None, EngineCounters(), EngineConfig(), 'none')
    return serve

# --- a rate

def test_a_trace_played_twice_has_its_rate_and_asks_other_things():
    work = drawn('x', 31, seed=4).at(arrivals(31, 2.5, seed=4))
    both = twice(work)
    assert rate_of(both) == pytest.approx(rate_of(work)) and len(both) == 62
    assert [x.output_len for x in both] == 2 * [x.output_len for x in work]
    gaps = lambda items: [b.arrival - a.arrival for a, b in zip(items, items[1:])]
    assert gaps(both.items[31:]) == pytest.approx(gaps(work.items))
    assert both.items[31].arrival - both.items[30].arrival == pytest.approx(1 / rate_of(work))
    assert not {p for x in work for p, _ in x.parts} & {p for x in both.items[31:] for p, _ in x.parts}

def test_the_second_time_finds_nothing_in_the_cache_of_the_first():
    s = simulate(twice(equal(8)), cost=COST)
    assert s.counters.num_cached_tokens == 0

@pytest.mark.parametrize('work', [equal(1), equal(5, gap=0.), Workload('none', [])])
def test_what_has_no_rate_is_refused(work):
    with pytest.raises(ValueError, match='no rate'): rate_of(work)
    with pytest.raises(ValueError, match='no rate'): capacity(work, dict(ttft=100.), cost=COST)

def test_only_the_second_time_counts():
    "Nobody is served the first time: the machine warms up, and it is not looked at"
    def serve(work):
        served = one_slot(.1)(work)
        for s in served.sent[:30]: s.metrics = RequestMetrics(s.metrics.arrival, 0., [500.], 500.)
        return served
    t = try_rate(equal(30), 1., dict(e2el=1000.), serve)
    assert t.attainment == 1. and t.e2e_s == pytest.approx(.1)

# --- the queue

@pytest.mark.parametrize('rate,held', [(.5, True), (.99, True), (1., True), (1.05, False), (1.5, False), (20., False)])
@pytest.mark.parametrize('slots', [1, 3])
def test_the_queue_of_a_known_server(rate, held, slots):
    t = try_rate(equal(100), rate * slots, dict(e2el=1e9), one_slot(1., slots))
    assert t.attainment == 1. and t.keeps_up == held

def test_a_short_wait_for_all_is_not_taken_for_a_queue_that_grows():
    "Everybody waits for half a gap: a closed door that opens regularly"
    sent = [Outcome(1, RequestMetrics(t, t + .5, [t + .6], t + .6)) for t in range(40)]
    assert keeps_up(sent)
    doors = [(t, 10 * (t // 10 + 1)) for t in range(80)]
    assert keeps_up([Outcome(1, RequestMetrics(t, door, [door + 10], door + 10)) for t, door in doors])

def test_nobody_waits_and_still_more_and_more_are_there():
    stays = lambda s: [Outcome(1, RequestMetrics(float(t), float(t), [t + s], t + s)) for t in range(40)]
    assert keeps_up(stays(7.5)) and not keeps_up(stays(100.))

def test_somebody_who_is_never_served_again_is_a_queue_that_does_not_end():
    sent = [Outcome(1, RequestMetrics(float(t), float(t), [t + .5], t + .5)) for t in range(40)]
    sent[3].metrics = RequestMetrics(3., 99., [100.], 100.)
    assert not keeps_up(sent)
    assert not keeps_up(sent, first=20)            # who came before counts as being there

def test_failures_are_no_queue():
    assert keeps_up([]) and keeps_up([Outcome(1, error='no')] * 9)

# --- the search

@pytest.mark.parametrize('edge,start', [(5., 1.), (5., 300.), (.013, 1.), (1., 1.)])
@pytest.mark.parametrize('tolerance', [.02, .3])
def test_a_bracket_holds_the_edge(edge, start, tolerance):
    lo, hi = bracket(lambda r: r <= edge, start, tolerance)
    assert lo <= edge < hi <= lo * (1 + tolerance)

def test_one_slot_holds_one_over_its_service():
    "4 steps of 1 s after the one that reads: 5 s of work, so one each 5 s"
    work, cost = equal(60), Cost.stated(1., 0.)
    c = capacity(work, dict(e2el=6000.), target=1., cost=cost, max_num_seqs=1, tolerance=.01)
    assert c.rate == pytest.approx(.2, rel=.02) and c.at.e2e_s == pytest.approx(5., abs=.6)
    loose = capacity(work, dict(e2el=1e7), cost=cost, max_num_seqs=1, tolerance=.01)
    assert loose.rate == pytest.approx(.2, rel=.04)            # the queue is what stops it
    assert loose.above.attainment == 1. and not loose.above.keeps_up and 'the queue grows' in sentence(loose)
    assert 'the queue' in repr(capacities(work, dict(e2el=1e7), cost=cost, tolerance=.1, max_num_seqs=[1]))

def test_twice_the_slots_hold_twice_the_rate_if_steps_cost_the_same():
    work, cost = equal(80), Cost.stated(1., 0.)
    one, two = (capacity(work, dict(e2el=1e7), cost=cost, max_num_seqs=n, tolerance=.01).rate for n in (1, 2))
    assert two == pytest.approx(2 * one, rel=.06)

def test_the_same_question_has_the_same_answer():
    work = drawn('x', 40, mean_out=20, mean_in=30, seed=2).at(arrivals(40, 1., seed=2))
    assert capacity(work, dict(ttft=500., tpot=60.), cost=COST) == capacity(work, dict(ttft=500., tpot=60.), cost=COST)

def test_the_answer_does_not_depend_on_the_rate_the_trace_came_with():
    work = drawn('x', 40, mean_out=20, mean_in=30, seed=2).at(arrivals(40, 1., seed=2))
    rates = [capacity(work.faster(f), dict(ttft=500., tpot=60.), cost=COST).rate for f in (1, .01, 700)]
    assert max(rates) < 1.05 * min(rates)

def test_both_ends_of_the_answer_are_what_they_say():
    work = drawn('x', 40, mean_out=20, mean_in=30, seed=2).at(arrivals(40, 1., seed=2))
    c = capacity(work, dict(ttft=500., tpot=60.), cost=COST)
    again = lambda t: try_rate(work, t.rate, c.slos, lambda w: simulate(w, cost=COST))
    assert again(c.at) == c.at and again(c.above) == c.above
    assert c.at.good(.95) and not c.above.good(.95) and c.above.rate <= 1.02 * c.at.rate
    assert [t.rate for t in c.trials] == sorted({t.rate for t in c.trials})
    assert sum(t.rate > c.above.rate for t in c.trials) >= 3

def test_a_promise_that_nobody_can_keep():
    c = capacity(equal(12), dict(ttft=5.), cost=COST)
    assert c.at is None and c.rate == 0 == c.users(20.) and c.alone.attainment == 0. and len(c.trials) == 1
    assert 'No rate is low enough: even with the machine to itself 0.0 % of 12' in sentence(c)

def test_a_request_that_can_never_be_served_is_named():
    c = capacity(equal(12), dict(ttft=1e6), cost=COST, num_blocks=1, block_size=4)
    assert c.at is None and 'the first that failed' in sentence(c) and c.alone.error

def test_bursts_at_one_instant_stay_together_at_any_rate():
    work = equal(24).at([float(i // 8) for i in range(24)])
    c = capacity(work, dict(e2el=200.), cost=COST, max_num_seqs=1)
    assert c.at is None and c.alone.attainment == 1. and 'even at ' in sentence(c)

def test_a_limit_that_is_never_reached_is_said():
    c = Capacity('vllm', {}, 3, dict(ttft=9.), .9, COST, Trial(2., 1., {}, True, 5., 1., 1.), None, [])
    assert 'too short to tell' in sentence(c) and c.again == []

def test_a_second_knee_is_named(monkeypatch):
    held = lambda rate: rate <= 4 or 4.9 < rate < 5.3
    fake = lambda work, rate, slos, serve: Trial(rate, float(held(rate)), dict(ttft=1.), True, 1., 1., 1.)
    monkeypatch.setattr('cbatch.capacity.try_rate', fake)
    c = capacity(equal(9), dict(ttft=9.), cost=COST)
    assert c.at.rate <= 4 < c.above.rate and [4.9 < t.rate < 5.3 for t in c.again] == [True] * len(c.again) != []
    assert 'well again at' in sentence(c)

# --- people

def test_little_by_hand():
    t = Trial(1.5, .95, dict(ttft=.95), True, 6., 1., 1.)
    c = Capacity('vllm', {}, 40, dict(ttft=2000.), .95, COST, t, replace(t, rate=1.52, attainment=.9), [t])
    assert (c.users(), c.users(30.)) == (9., 54.)
    said = sentence(c, 30.)
    assert '1.5/s x (6 s for an answer + 30 s to think) = 54.0 users' in said and 'At 1.52/s 90.0 %' in said

def test_little_holds_in_the_run_itself():
    "Mean number of people there = rate x mean time, over a time in which all come and go"
    sent = one_slot(.7, 2)(equal(50)).sent
    spans = [(s.metrics.arrival, s.metrics.finished_at) for s in sent]
    T = max(b for _, b in spans)
    mean_there = sum(b - a for a, b in spans) / T
    assert mean_there == pytest.approx(len(sent) / T * sum(b - a for a, b in spans) / len(sent))

# --- a table, a check

def test_frontier_is_capacity_of_each():
    work = drawn('x', 24, mean_out=10, mean_in=30, seed=1).at(arrivals(24, 1., seed=1))
    f = capacities(work, dict(ttft=500.), ['vllm', 'static'], cost=COST, tolerance=.2, max_num_seqs=[1, 4])
    each = [(p, n) for p in ('vllm', 'static') for n in (1, 4)]
    assert [(c.policy, c.config['max_num_seqs']) for c in f.rows] == each
    assert f.rows[1] == capacity(work, dict(ttft=500.), cost=COST, tolerance=.2, max_num_seqs=4)
    assert f.best.rate == max(c.rate for c in f.rows) and len({len(l) for l in repr(f).splitlines()}) == 1

@pytest.mark.parametrize('true,confirmed', [(1., True), (.95, True), (1.3, False), (1.15, False), (.8, False),
                                            (.3, False)])
def test_an_engine_confirms_what_is_true(true, confirmed):
    t = Trial(1., 1., {}, True, 1., 1., 1.)
    found = Capacity('vllm', {}, 60, dict(e2el=1e9), .95, COST, t, None, [t])
    check = confirm(found, equal(60), one_slot(1 / true))
    assert check.confirmed == confirmed and len(check.trials) <= 5
    assert ('confirmed within 10%' in repr(check)) == confirmed
    if not confirmed and true > .5: assert check.holds <= true * 1.04 and check.holds >= true * .75
    if true == .3: assert check.holds == 0 and 'too high' in repr(check)

# --- the command

@pytest.fixture
def log(tmp_path):
    rows = [dict(arrival=i / 3, prompt_len=9 + i % 5, output_len=4 + i % 7) for i in range(24)]
    (tmp_path/'log.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    return str(tmp_path/'log.jsonl')

def test_the_command_forecasts_and_records(log, tmp_path, capsys):
    args = ['capacity', log, '--cost', 'stated', '--num-blocks', '8,64', '--policies', 'vllm,static', '--think', '7']
    assert main([*args, '--record', str(tmp_path/'r.json')]) == 0
    out, rec = capsys.readouterr().out, json.loads((tmp_path/'r.json').read_text())
    assert 'a cost that nobody measured' in out and '7 s to think' in out and 'requests/s' in out
    each = [(p, n) for p in ('vllm', 'static') for n in (8, 64)]
    assert [(r['policy'], r['config']['num_blocks']) for r in rec['rows']] == each
    for r in rec['rows']:
        if r['at']: assert r['users'] == pytest.approx(r['at']['rate'] * (r['at']['e2e_s'] + 7), rel=1e-4)

@pytest.mark.parametrize('more,said', [
    (['--slo', 'ttft=3'], 'ttft:2000'), (['--slo', 'speed:3'], 'speed'), (['--slo', ''], '--slo is empty'),
    (['--policies', 'vlm'], 'vllm'), (['--num-blocks', '8,x'], '--num-blocks 8,x'),
    (['--max-num-seqs', '0'], '--max-num-seqs 0'),
    (['--target', '1.5'], 'target=1.5'), (['--think', '-1'], 'think=-1'), (['--tolerance', '0'], 'tolerance=0'),
    (['--num-prompts', '1'], '--num-prompts 1'), (['--cost', '/no/file'], '/no/file'),
    (['--record', '/no/such/r.json'], 'no folder'),
    (['--save-cost', '/no/such/c.json'], 'no folder')])
def test_the_command_says_what_is_wrong(log, more, said, capsys):
    assert main(['capacity', log, *more]) == 2
    assert said in capsys.readouterr().err

def test_a_trace_of_nobody_or_of_one(tmp_path, capsys):
    for text in ('', json.dumps(dict(arrival=0, prompt_len=4, output_len=4))):
        (tmp_path/'t.jsonl').write_text(text)
        assert main(['capacity', str(tmp_path/'t.jsonl')]) == 2 and capsys.readouterr().err

def test_the_cost_says_whose_it_is(tmp_path):
    assert 'nobody measured' in basis(COST)
    far = dict(machine=dict(cpu='abacus', cores=1, threads=1), model='m', dtype='float32', seed=0, records=50)
    cost = Cost(COST.coefficients, dict(mean=.25, p95=.5, run=.1), far)
    assert 'ANOTHER machine' in basis(cost) and '25.0%' in basis(cost) and 'abacus' in basis(cost)
    assert 'here and now' in basis(cost, True)

def test_a_cost_of_this_machine_and_a_check_by_its_engine(tmp_path, capsys):
    path = tmp_path/'cost.json'
    args = ['capacity', 'w64', '--quick', '--num-prompts', '12', '--slo', 'e2el:40', '--tolerance', '.1']
    assert main([*args, '--run', '--save-cost', str(path), '--record', str(tmp_path/'r.json')]) in (0, 1)
    out, rec = capsys.readouterr().out, json.loads((tmp_path/'r.json').read_text())
    assert 'here and now' in out
    if rec['rows'][0]['at']: assert 'confirmed' in out and {'90%', '100%', '110%'} <= set(rec['check'])
    assert Cost.from_json(path).source['model'] == rec['cost']['source']['model']
    assert main([*args, '--cost', str(path)]) == 0 and 'like this one' in capsys.readouterr().out
