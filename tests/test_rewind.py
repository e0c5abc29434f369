"A step as it was, the first decision in which two traces part, and yesterday's people again"
import random
from copy import deepcopy
import pytest
import torch
from cbatch.cli import main
from cbatch.core import Decision, Kind, StepRecord
from cbatch.cost import Cost
from cbatch.driving import VirtualClock, drive
from cbatch.llm import LLM
from cbatch.metrics import summarize
from cbatch.model import tiny_lm
from cbatch.rewind import at, diff, recorded, renamed, rerun, summary_of
from cbatch.trace import Trace
from cbatch.workloads import Workload, WorkItem
from ask import sp
from heard import Heard

def people(seed, n=14, gap=.08):
    rng, t, items = random.Random(seed), 0., []
    for i in range(n):
        items.append(WorkItem(rng.randint(1, 14), [(i, rng.randint(1, 45))], t))
        if rng.random() < .7: t += rng.random() * gap
    return Workload('x', items)

def served(work, policy='vllm', **config):
    "A trace, and what the engine itself has counted"
    config = dict(max_num_seqs=3, num_blocks=10, max_num_batched_tokens=24, block_size=8) | config
    with LLM(tiny_lm(), policy=policy, **config) as llm:
        VirtualClock(llm)
        sent, _ = drive(llm, work)
        return llm.trace, llm.metrics, sent

@pytest.fixture(scope='module')
def tight(): return served(people(1))

@pytest.fixture(scope='module')
def guessing():
    "The same people, by an engine that has heard them"
    g, more = Heard(3), dict(guess_when='always', max_guesses=9)
    g.listen(lambda g: served(people(1), guesses=g, **more))
    return served(people(1), guesses=g, **more)

def changed(trace, change, i, **more):
    "A copy in which one record is another"
    other = Trace(**trace.facts, **more)
    for k, rec in enumerate(trace):
        if k == i: change(rec := deepcopy(rec))
        other.append(rec)
    return other

# --- guesses

def test_a_trace_with_guesses_is_seen_and_summed_up(guessing, tight):
    trace, counted, _ = guessing
    test_a_summary_is_the_engines(guessing)
    test_a_moment_is_what_the_states_say(guessing)
    s = summary_of(trace)
    counts = 'num_guessed_tokens', 'num_accepted_tokens', 'accepted_share', 'num_steps'
    assert {k: s[k] for k in counts} == {k: counted[k] for k in counts} and s['slot_utilisation'] <= 1
    assert summary_of(tight[0])['accepted_share'] is None and 0 < s['accepted_share'] < 1
    rec = next(rec for rec in trace if any(back for *_, back in rec.guessed.values()))
    r = next(r for r, x in rec.guessed.items() if x[2])
    text = repr(at(trace, rec.step))
    assert f'{rec.guessed[r][0]} guessed, {rec.guessed[r][1]} kept' in text and f'gave blocks back  {r}' in text

def test_guesses_are_a_difference_and_go_with_a_name(guessing, tight, tmp_path):
    trace, _, _ = guessing
    assert not diff(trace, trace) and 'guessed' in diff(trace, tight[0]).fields
    trace.to_jsonl(tmp_path/'t.jsonl')
    assert not diff(trace, Trace.load(tmp_path/'t.jsonl'))
    def less(rec): r = next(iter(rec.guessed)); rec.guessed[r] = (rec.guessed[r][0] + 1, *rec.guessed[r][1:])
    i = next(i for i, rec in enumerate(trace) if rec.guessed)
    assert diff(trace, changed(trace, less, i)).fields == ('guessed',)
    there = renamed(trace, {'r1': 'x'})
    assert 'x' in {r for rec in there for r in rec.guessed} and renamed(there, {'x': 'r1'}).records == trace.records

@pytest.mark.parametrize('seed', range(4))
def test_accidents_among_guesses_leave_a_trace_that_can_be_read(seed, tmp_path):
    "Stop strings within a guess, aborts, steps that fail or are halved: after each, the state is the allocator's"
    rng, said = random.Random(seed), {}
    prompts = [[rng.randrange(50) for _ in range(rng.randint(1, 30))] for _ in range(8)]
    def serve(g, stop={}, faults=False):
        llm = LLM(tiny_lm(), guesses=g, guess_when='always', max_num_seqs=3, num_blocks=14, block_size=4,
                  max_num_batched_tokens=30, max_model_len=56)
        for i, p in enumerate(prompts): llm.add(p, sp(20, stop=stop.get(f'q{i}')), request_id=f'q{i}')
        execute = llm.execute
        def falters(plan):
            if faults and rng.random() < .09: raise rng.choice([torch.OutOfMemoryError, KeyboardInterrupt])('now')
            return execute(plan)
        llm.execute = falters
        while llm.has_unfinished:
            try: said.update((o.request_id, o.outputs[0].text) for o in llm.step())
            except KeyboardInterrupt: pass
            if faults and rng.random() < .03 and llm.scheduler.running: llm.abort(llm.scheduler.running[0].request_id)
            assert llm.trace.state().num_free_blocks == llm.scheduler.blocks.num_free_blocks
        return llm.trace
    g = Heard(rng.choice([2, 3, 99]))
    g.listen(serve)
    stop = {r: text[k:k + 2] or None for r, text in said.items() for k in [rng.randint(3, 12)]}
    for trace in (serve(g, stop), serve(g, stop, faults=True)):
        trace.to_jsonl(tmp_path/'t.jsonl')
        again = Trace.load(tmp_path/'t.jsonl')
        assert again.records == trace.records and any(back for r in again for *_, back in r.guessed.values())
        assert all(trace.why(f'q{i}') == again.why(f'q{i}') for i in range(8))

def test_served_again_nobody_guesses(guessing, tmp_path, capsys):
    trace, _, sent = guessing
    again = rerun(trace)
    assert not any(rec.guessed for rec in again.trace) and again.counters.num_sampled_tokens == sum(
        len(x.output_ids) for x in sent)
    trace.to_jsonl(tmp_path/'t.jsonl')
    main(['replay', str(tmp_path/'t.jsonl'), '--policy', 'static'])
    assert 'the trace has guesses' in capsys.readouterr().out

# --- one step

def test_a_moment_is_what_the_states_say(tight):
    trace = tight[0]
    for i, rec in enumerate(trace):
        m = at(trace, rec.step)
        assert m.record is rec and m.then == trace.state(rec.step, after=False)
        given_up = sum(len(m.seen.blocks[r]) for r in rec.preempted)
        assert m.seen.num_free_blocks + given_up >= m.then.num_free_blocks
        before = set(trace.state(trace.records[i - 1].step).requests) if i else set()
        assert set(m.seen.requests) == before | {r for r, _, _ in rec.arrived}
        text = repr(m)
        assert all(r in text for r in m.then.slots) and f'step {rec.step} of vllm' in text
        assert all(str(d) in text for d in rec.decisions if d.request_id in (*m.then.slots, *rec.preempted))
    assert at(trace, -1).record is trace[-1]
    for bad in (10**6, -10**6):
        with pytest.raises(IndexError, match='is not in the trace'): at(trace, bad)

def test_a_moment_shows_its_free_blocks():
    t = Trace(2, 16, 4, 12)
    t.append(StepRecord(0, 0., 1., arrived=[('a', 9, 0.), ('b', 4, 0.)], admitted=['a'], scheduled=[('a', 9, 0, 1)],
                        blocks={'a': [3, 4, 9]}, decisions=[Decision('b', Kind.WAITS, 'it is Monday')]))
    text = repr(at(t, 0))
    assert 'free blocks  1-2 5-8 10-12' in text and 'b (waits: it is Monday)' in text and '3-4 9' in text

def test_ids_steer_nothing():
    t = Trace(2, 16, 4, 12)
    t.append(StepRecord(0, 0., 1., arrived=[('<i>\x1b[2J\n', 9, 0.)], admitted=['<i>\x1b[2J\n'],
                        scheduled=[('<i>\x1b[2J\n', 9, 0, 1)], blocks={'<i>\x1b[2J\n': [1]}))
    m, d = at(t, 0), diff(t, renamed(t, {'<i>\x1b[2J\n': 'b'}))
    for text in (repr(m), repr(d)): assert '\x1b' not in text and '<i> [2J' in text
    assert '<i>' not in m._repr_html_() and '&lt;i&gt;' in m._repr_html_()

# --- two traces

def test_a_trace_is_equal_to_itself(tight, tmp_path):
    trace = tight[0]
    trace.to_jsonl(tmp_path/'t.jsonl')
    d = diff(trace, Trace.load(tmp_path/'t.jsonl'))
    assert not d and d.num_same == len(trace) and d.slip is None and not d.facts
    assert f'{len(trace)} steps from step 0 on are decided the same, and these are all' in repr(d)

def reason(rec): rec.decisions[0] = rec.decisions[0]._replace(why='it is Monday')
def number(rec): rec.decisions[0] = rec.decisions[0]._replace(n=77)
def block(rec): next(ids for ids in rec.blocks.values() if ids)[0] = 10
def tokens(rec): rec.scheduled[0] = (*rec.scheduled[0][:3], 9)
def waiting(rec): rec.num_waiting += 1
def free(rec): rec.num_free_blocks += 1
def newcomer(rec): rec.arrived.append(('new', 3, 0.))
CHANGES = [(reason, 'decisions'), (number, 'decisions'), (block, 'blocks'), (tokens, 'scheduled'),
           (waiting, 'num_waiting'), (free, 'num_free_blocks'), (newcomer, 'arrived')]

@pytest.mark.parametrize('change,field', CHANGES)
def test_a_planted_difference_is_found(tight, change, field):
    trace = tight[0]
    rng, got = random.Random(7), [i for i, rec in enumerate(trace) if any(rec.blocks.values()) and i and rec.decisions]
    for i in (got[0], rng.choice(got), got[-1]):
        other = changed(trace, change, i)
        d = diff(trace, other)
        assert d and d.num_same == i and d.fields == (field,) and d.slip is None
        a, b = d.sides
        assert a.record is trace.records[i] and b.record is other.records[i] and a.record != b.record
        back = diff(other, trace)
        assert back.num_same == i and back.fields == (field,)
        assert f'step {trace.records[i].step} differs in {field}' in repr(d)

def test_the_first_of_several_differences_counts(tight):
    trace = tight[0]
    other = changed(changed(trace, reason, 30), waiting, 12)
    assert diff(trace, other).fields == ('num_waiting',) and diff(trace, other).num_same == 12

def test_times_alone_are_no_difference(tight):
    trace = tight[0]
    def later(rec): rec.end += .25
    def a_little(rec): rec.end += 5e-7
    d = diff(trace, changed(trace, later, 9))
    assert not d and d.slip == (trace.records[9].step, pytest.approx(.25)) and 'times differ from step 9' in repr(d)
    assert diff(trace, changed(trace, a_little, 9)).slip is None
    moved = Trace(**trace.facts)                 # the same on a clock that began elsewhere
    for rec in trace:
        moved.append(rec := deepcopy(rec))
        rec.start, rec.end = rec.start + 1000, rec.end + 1000
        rec.arrived = [(r, n, t + 1000) for r, n, t in rec.arrived]
    assert diff(trace, moved).slip is None
    def came_later(rec): rec.arrived[0] = (*rec.arrived[0][:2], rec.arrived[0][2] + .01)
    i = next(i for i, rec in enumerate(trace) if i and rec.arrived)
    assert diff(trace, changed(trace, came_later, i)).slip[0] == trace.records[i].step

def test_why_somebody_ended_is_no_decision_but_that_he_did_is(tight):
    trace = tight[0]
    i = next(i for i, rec in enumerate(trace) if rec.finished)
    def other_reason(rec): rec.finished = [(r, 'stop') for r, _ in rec.finished]
    def nobody(rec): rec.finished = []
    assert not diff(trace, changed(trace, other_reason, i))
    assert diff(trace, changed(trace, nobody, i)).fields == ('finished',)

def test_rings_are_compared_where_both_have_begun(tight):
    trace = tight[0]
    ring = Trace(**trace.facts, maxlen=20, keyframe_every=5)
    for rec in trace: ring.append(rec)
    d = diff(trace, ring)
    assert not d and d.first == ring.records[0].step and d.num_same == 20
    i = len(trace) - 8
    other = changed(trace, reason, i)
    d = diff(ring, other)
    assert d.num_same == 12 and d.sides[0].record is trace.records[i] and d.sides[1].record is other.records[i]
    early = Trace(**trace.facts)
    for rec in trace.records[:5]: early.append(rec)
    with pytest.raises(ValueError, match='no step in common'): diff(ring, early)

def test_one_that_ends_sooner(tight):
    trace = tight[0]
    short = Trace(**trace.facts)
    for rec in trace.records[:7]: short.append(rec)
    d = diff(trace, short)
    assert d and d.num_same == 7 and d.sides[1] is None and d.sides[0].record is trace.records[7]
    assert 'then the second ends' in repr(d) and 'then the first ends' in repr(diff(short, trace))
    empty = Trace(**trace.facts)
    assert not diff(empty, empty) and diff(empty, short).num_same == 0

def test_pools_of_different_sizes_part_where_it_matters():
    "Not at once, because other blocks are free; only where somebody gets fewer, waits or is preempted"
    small, large = (served(people(1), num_blocks=n)[0] for n in (10, 60))
    d = diff(small, large)
    assert d.facts == {'num_blocks': (10, 60)} and d.num_same > 3
    a, b = (m.record for m in d.sides)
    assert (a.scheduled, a.decisions, a.preempted) != (b.scheduled, b.decisions, b.preempted)

def test_a_failed_step_is_compared_under_its_number():
    t = Trace(2, 16, 4, 12)
    t.append(StepRecord(0, 0., 0., arrived=[('a', 3, 0.)], admitted=['a'], blocks={'a': [1]},
                        decisions=[Decision(None, Kind.FAILED)]))
    t.append(StepRecord(0, 0., 1., scheduled=[('a', 3, 0, 1)]))
    t.append(StepRecord(1, 1., 2., scheduled=[('a', 1, 3, 1)]))
    assert not diff(t, t) and diff(t, changed(t, tokens, 1)).num_same == 1

# --- again

@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('policy,config', [
    ('vllm', {}), ('vllm', dict(num_blocks=40, max_num_batched_tokens=11)), ('static', {}), ('dynamic', {}),
    ('vllm', dict(block_size=4, num_blocks=16))])
def test_the_same_again_is_the_same(tmp_path, policy, config, seed):
    trace, _, _ = served(people(seed), policy, **config)
    trace.to_jsonl(tmp_path/'t.jsonl')
    old = Trace.load(tmp_path/'t.jsonl')
    new = rerun(old).trace
    d = diff(old, new)
    assert not d, d
    assert d.slip is None and new.facts == old.facts and len(new) == len(old)

@pytest.mark.parametrize('seed', range(3))
def test_time_that_passes_between_steps_is_recorded_too(seed):
    "On a clock that each look at it moves, as a real one does: steps are the same, though they end when the next begin"
    with LLM(tiny_lm(), max_num_seqs=3, num_blocks=40, max_num_batched_tokens=24, block_size=8) as llm:
        virtual = VirtualClock(llm)
        def tick():
            virtual.t += .002
            return virtual.t
        llm.clock = tick
        drive(llm, people(seed, 20))
        old = llm.trace
    assert any(b.start - a.end > .001 for a, b in zip(old, old.records[1:]))
    new = rerun(old).trace
    d = diff(old, new)
    assert not d, d
    assert [r.start - new[0].start for r in new] == pytest.approx([r.start - old[0].start for r in old], abs=.03)

def test_bursts_at_the_very_moment_of_a_step():
    "Arrivals that fall together with the end of a step, on a clock whose sums are rounded"
    work = Workload('x', [WorkItem(3, [(i, 5)], (i // 3) * (.03 + .0002 * 15)) for i in range(12)])
    trace, _, _ = served(work, num_blocks=40)
    assert not diff(trace, rerun(trace).trace)

@pytest.mark.parametrize('seed', range(2))
def test_differently_is_what_the_engine_would_do(seed):
    "Recorded steps and a fitted cost: on a clock that is a line, the forecast is exact and so are all decisions"
    work = people(seed, 20)
    old, _, _ = served(work)
    for policy, config in (('static', {}), ('vllm', dict(num_blocks=60)),
                           ('vllm', dict(max_num_seqs=6, num_blocks=30))):
        truth, _, _ = served(work, policy, **config)
        d = diff(truth, rerun(old, policy, Cost.stated(), **config).trace)
        assert not d, d
        assert d.slip is None

def test_who_does_not_fit_is_refused(tight):
    again = rerun(tight[0], num_blocks=5)
    failed = [s.error for s in again.sent if s.error]
    assert failed and all('context of 40' in e for e in failed)
    names = {r for rec in again.trace for r, _, _ in rec.arrived}
    assert len(names) == len(again.sent) - len(failed)
    old = {r: n for rec in tight[0] for r, n, _ in rec.arrived}
    assert all(old[r] == n for rec in again.trace for r, n, _ in rec.arrived)      # the others keep their names

def test_a_clock_that_stood_still_between_two_people():
    work = Workload('x', [WorkItem(3, [('a', 5)], 1.), WorkItem(2, [('b', 5)], 9.), WorkItem(2, [('c', 5)], 9.01)])
    trace, _, _ = served(work)
    new = rerun(trace).trace
    assert diff(trace, new).slip is None and new[-1].end - new[0].start == pytest.approx(trace[-1].end - trace[0].start)
    clock = recorded(trace, Cost.stated(1., 0.))
    took = [s for _, s in clock.took.values()]
    assert max(took) < .1 and clock(trace[2]) < .1 and clock(StepRecord(99, 0., 0., scheduled=[('x', 1, 0, 1)])) == 1.

def test_nobody_to_serve(tight):
    with pytest.raises(ValueError, match='nobody came'): rerun(Trace(2, 16, 4, 12))
    t = Trace(2, 16, 4, 12)
    t.append(StepRecord(0, 0., 1., arrived=[('a', 3, 0.)]))
    with pytest.raises(ValueError, match='nobody to serve again.*unfinished'): rerun(t)
    with pytest.raises(ValueError, match='know vllm'): rerun(tight[0], 'statc')

def test_renaming_there_and_back(tight):
    trace = tight[0]
    there = renamed(trace, {'r1': 'x', 'r2': 'r1', 'x': 'never'})
    assert {'x', 'r1'} <= {r for rec in there for r, _, _ in rec.arrived} and there.why('x') == trace.why('r1')
    assert renamed(there, {'x': 'r1', 'r1': 'r2'}).records == trace.records

def test_a_summary_is_the_engines(tight):
    trace, counted, sent = tight
    s = summary_of(trace)
    counts = 'num_steps', 'num_preemptions', 'num_prefilling', 'num_idle', 'num_padding_tokens'
    assert {k: s[k] for k in counts} == {k: counted[k] for k in counts}
    assert s['slot_utilisation'] == pytest.approx(counted['slot_utilisation'])
    ms = [x.metrics for x in sent]
    assert s['num_output_tokens'] == sum(len(m.token_times) for m in ms) and s['num_failed'] == 0
    ttft = sorted(m.token_times[0] - m.arrival for m in ms)
    assert ttft[0] <= s['ttft_p50_s'] <= ttft[-1]
    assert s['ttft_p50_s'] == pytest.approx((ttft[6] + ttft[7]) / 2)
    assert summary_of(Trace(2, 16, 4, 12)) == summarize([], 0.)

# --- the commands

@pytest.fixture
def files(tight, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tight[0].to_jsonl('a.jsonl', {'r0': 'hello'})
    changed(tight[0], reason, 9).to_jsonl('b.jsonl')
    def later(rec): rec.end += .1
    changed(tight[0], later, 9).to_jsonl('c.jsonl')
    return tmp_path

@pytest.mark.parametrize('args,code,says', [
    (['a.jsonl', 'a.jsonl'], 0, 'these are all'), (['a.jsonl', 'b.jsonl'], 1, 'step 9 differs in decisions'),
    (['a.jsonl', 'c.jsonl'], 0, 'times differ from step 9'), (['a.jsonl', 'c.jsonl', '--times'], 1, 'times differ'),
    (['a.jsonl', 'a.jsonl', '--times'], 0, 'these are all'), (['a.jsonl', 'none.jsonl'], 2, 'No such file'),
    (['a.jsonl', 'bad.jsonl'], 2, 'not a trace')])
def test_diff_says_and_exits(files, capsys, args, code, says):
    (files/'bad.jsonl').write_text('{}')
    assert main(['diff', *args]) == code
    out = capsys.readouterr()
    assert says in out.out + out.err

def test_replay_differently(files, capsys):
    assert main(['replay', 'a.jsonl', '--trace', 'same.jsonl']) == 0
    assert 'these are all' in capsys.readouterr().out
    assert main(['replay', 'a.jsonl', '--policy', 'static', '--max-num-seqs', '2', '--max-num-batched-tokens', '64',
                 '--num-blocks', '30', '--trace', 'new.jsonl', '--html', 'new.html']) == 0
    out = capsys.readouterr().out
    assert 'recorded' in out and 'again' in out and 'policy vllm | static' in out and 'times: as recorded' in out
    new = Trace.load('new.jsonl')
    assert new.facts == dict(max_num_seqs=2, max_num_batched_tokens=64, block_size=8, num_blocks=30, policy='static')
    assert new.prompts == {'r0': 'hello'} and (files/'new.html').read_text().startswith('<!doctype html>')
    assert main(['diff', 'a.jsonl', 'same.jsonl']) == 0 and main(['diff', 'a.jsonl', 'new.jsonl']) == 1

@pytest.mark.parametrize('args,says', [
    (['--policy', 'statc'], 'know vllm'), (['--num-blocks', '0'], 'num_blocks'), (['--trace', 'a.jsonl'], 'itself'),
    (['--policy', 'static', '--html', 'a.jsonl'], 'itself'), (['--trace', 'no/where.jsonl'], 'no folder')])
def test_replay_refuses(files, capsys, args, says):
    old = (files/'a.jsonl').read_text()
    assert main(['replay', 'a.jsonl', *args]) == 2
    assert says in capsys.readouterr().err and (files/'a.jsonl').read_text() == old and len(list(files.iterdir())) == 3

def test_a_line_that_is_missing_is_told(files):
    lines = (files/'a.jsonl').read_text().splitlines()
    for bad, says in ((lines[:9] + lines[10:], 'line 10.*step 9 follows step 7'),
                      (lines[:9] + lines[8:], 'line 10.*step 7 follows step 7'),
                      (lines[:5] + [lines[7], lines[6], lines[5]], 'line 6.*step 6 follows step 3')):
        (files/'bad.jsonl').write_text('\n'.join(bad))
        with pytest.raises(ValueError, match=says): Trace.load(files/'bad.jsonl')
    (files/'bad.jsonl').write_text('\n'.join(lines[:1]))
    assert len(Trace.load(files/'bad.jsonl')) == 0
