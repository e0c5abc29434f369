"The lab: one pass that agrees with slow ways to count, pages that need nobody, commands that refuse before they serve"
import json, random
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from cbatch import lab as lab_module
from cbatch.catalog import POLICIES
from cbatch.cli import main
from cbatch.core import StepRecord
from cbatch.cost import Cost
from cbatch.lab import bench_policies, label, lab_command, measured_cost, run_lab, rush
from cbatch.lab_page import FRONTIERS, Lab, frontier, part, window
from cbatch.measures import MEASURES, Line, Pool, Shares, account, best, judge, text_table, unbeaten, users_of
from cbatch.metrics import head_of_line_s
from cbatch.driving import VirtualClock
from cbatch.llm import LLM
from cbatch.model import tiny_lm
from cbatch.simulator import serve_on, simulate
from cbatch.trace import Trace
from cbatch.workloads import Workload, WorkItem
from heard import Heard

def crowd(seed, n=22, users=3):
    "Small odd requests in bursts: some share a beginning, some are urgent, some come while a step runs"
    rng, t, items = random.Random(seed), 0., []
    for i in range(n):
        t += rng.choice((0., 0., .011, .4))
        parts = [('all', 9)] * (rng.random() < .5) + [(f'{seed}/{i}', rng.randrange(1, 31))]
        items.append(WorkItem(rng.randrange(1, 19), parts, t, f'u{rng.randrange(users)}', rng.randrange(2)))
    return Workload(f'crowd {seed}', items)

SMALL = dict(max_num_seqs=5, max_num_batched_tokens=23, block_size=4)

def guessing(policy, work, seed=0, **more):
    "The same people, served by an engine that has heard them before"
    def serve(g):
        lm = tiny_lm()
        with LLM(lm, policy=policy, guesses=g, guess_when='always', max_guesses=6, **SMALL, **more) as llm:
            VirtualClock(llm)
            return serve_on(llm, work, seed)
    g = Heard()
    g.listen(serve)
    return serve(g)

def served(policy, seed=0, **more):
    rng = random.Random(seed)
    more = dict(num_blocks=rng.randrange(15, 24), force_preempt=rng.choice((None, 7))) | more
    return simulate(crowd(seed), policy, seed=seed, **SMALL, **more)

# --- the account

@pytest.mark.parametrize('policy', POLICIES)
def test_needless_waiting_is_that_of_each_request_alone(policy):
    total = 0.
    for seed in range(2):
        for more in (dict(), dict(preemption='swap'), dict(prefix_caching=False, watermark=.2)):
            r = served(policy, seed, **more)
            slow = {i: head_of_line_s(r.trace, i) for rec in r.trace for i, _, _ in rec.arrived}
            assert account(r).needless == pytest.approx(slow, abs=1e-9)
            total += sum(slow.values())
    assert total > 0

def test_a_seat_that_was_left_between_two_steps_is_empty():
    t = Trace(1, 64, 4, 8)
    t.append(StepRecord(0, 0., 1., scheduled=[('a', 4, 0, 1)], admitted=['a'], arrived=[('a', 4, 0.), ('b', 4, .5)],
                        blocks=dict(a=[1]), num_free_blocks=7))
    t.append(StepRecord(1, 1., 3., finished=[('a', 'abort')], num_free_blocks=8))     # nobody took it
    t.append(StepRecord(2, 3., 4., scheduled=[('b', 4, 0, 1)], admitted=['b'], blocks=dict(b=[1]), num_free_blocks=7))
    line, pool = Line(1, 8, 4), Pool(8, 4)
    for rec in t:
        pool.begin(rec)
        line.begin(rec, pool.num_free)
        pool.end(rec)
        line.end(rec)
    assert line.needless == {r: head_of_line_s(t, r) for r in 'ab'} == dict(a=0., b=2.)

@pytest.mark.parametrize('policy', ['vllm', 'static', 'fair'])
def test_an_engine_that_guesses_is_accounted_for(policy):
    work = crowd(2, users=1)
    r = guessing(policy, replace(work, items=[replace(x, arrival=0.) for x in work.items]), num_blocks=15)
    a, c = account(r), r.counters
    assert c.num_accepted_tokens > 20 < c.num_guessed_tokens - c.num_accepted_tokens
    assert c.num_preemptions or policy == 'static'
    assert (a.num_steps, a.num_sampling, a.num_idle) == (c.num_steps, c.num_sampling, c.num_idle)
    d = judge(r, work)
    assert d['slot_utilisation'] == c.slot_utilisation <= 1 < c.num_sampled_tokens / c.num_sampling
    slow = {i: head_of_line_s(r.trace, i) for rec in r.trace for i, _, _ in rec.arrived}
    assert a.needless == pytest.approx(slow, abs=1e-9) and d['itl_p50_s'] >= min(x.end - x.start for x in r.trace) > 0
    shares = Shares({i: 'u' for i in slow})
    for rec in r.trace: shares.step(rec, {})
    assert shares.served['u'] == sum(x.prompt_len + 2 * x.output_len for x in work)    # nothing twice, nothing lost

@pytest.mark.parametrize('policy', POLICIES)
def test_the_pool_is_that_of_the_state(policy):
    "Free blocks, seats and places without a token, against sets made anew at each step"
    for r in (served(policy, 0), served(policy, 1), guessing(policy, crowd(1), num_blocks=16)):
        line, pool = Line(5, r.trace.facts['num_blocks'], 4), Pool(r.trace.facts['num_blocks'], 4)
        for rec, state in r.trace.replay():
            pool.begin(rec)
            line.begin(rec, pool.num_free)
            n = {i: k + next((s[1] for s in rec.scheduled if s[0] == i), 0) for i, k in state.computed.items()}
            full = {(b, j) for i, bs in state.blocks.items() for p in range(n[i]) for b, j in [(bs[p // 4], p % 4)]}
            held = set().union(*state.blocks.values())
            assert pool.num_free == state.num_free_blocks and set(pool.holders) == held
            assert pool.empty == 4 * len(held) - len(full)
            assert line.seated == set(state.slots) and set(line.since) == set(state.requests) - set(state.slots)
            pool.end(rec)
            line.end(rec)
        assert not (pool.holders or pool.written or line.since)

def gap(user_of, *steps):
    "Steps as (who arrives with a prompt of 4, (id, tokens, before, sampled) that run, who waits, who ends)"
    s = Shares(user_of)
    for i, (came, ran, line, done) in enumerate(steps):
        arrived, ended = [(r, 4, float(i)) for r in came], [(r, 'stop') for r in done]
        rec = StepRecord(i, i, i + 1, arrived=arrived, scheduled=ran, finished=ended)
        s.step(rec, dict.fromkeys(line, 0.))
    return s.gap

USERS = dict(a='ann', a2='ann', a3='ann', b='bob', b2='bob', c='cy')

def test_fairness_counts_prompts_once_and_answers_twice():
    wait = ('a2', 'b')
    assert gap(USERS, (['a', 'a2', 'b'], [('a', 4, 0, 0)], wait, [])) == 4
    assert gap(USERS, (['a', 'a2', 'b'], [('a', 4, 0, 1)], wait, []), ([], [('a', 1, 4, 1)], wait, [])) == 8
    found = (['a', 'a2', 'b'], [('a', 1, 3, 1)], wait, [])            # three of its tokens were in the cache
    assert gap(USERS, found) == 6
    again = ([], [('a', 5, 0, 1)], wait, [])                          # preempted: its KV is made once more
    assert gap(USERS, (['a', 'a2', 'b'], [('a', 4, 0, 1)], wait, []), again) == 8
    piece, rest = ([], [('a', 3, 0, 0)], wait, []), ([], [('a', 2, 3, 1)], wait, [])
    assert gap(USERS, (['a', 'a2', 'b'], [('a', 4, 0, 1)], wait, []), piece, rest) == 8

def test_fairness_looks_only_at_those_who_wait():
    ran = [('a', 4, 0, 0)]
    assert gap(USERS, (['a', 'b'], ran, (), [])) == 0 and gap(USERS, (['a', 'b'], ran, ('b',), [])) == 0
    assert gap({k: 'ann' for k in USERS}, (['a', 'b'], ran, ('a', 'b'), [])) == 0

def test_fairness_absence_is_no_claim():
    first = ['a', 'a2'], [('a', 12, 0, 9)], ('a2',), []                 # ann has 22 when bob comes
    assert gap(USERS, first, (['b'], [], ('a2', 'b'), [])) == 0
    more = [], [('a', 1, 12, 1)], ('a2', 'b'), []
    assert gap(USERS, first, (['b'], [], ('a2', 'b'), []), more) == 2
    home = [], [], (), ['a', 'a2']                                     # everybody leaves: forgotten
    assert gap(USERS, first, home, (['b', 'a3'], [], ('b', 'a3'), [])) == 0

def test_users_are_those_of_the_workload_in_its_order():
    work = crowd(1)
    big = WorkItem(500, [('big', 500)], work[3].arrival, 'big')        # refused: it never arrives in the trace
    work = replace(work, items=[*work.items, big])
    r = simulate(work, num_blocks=20, **SMALL)
    users = users_of(r, work)
    assert [users[i] for rec in r.records for i, _, _ in rec.arrived] == [x.user for x in work if x.user != 'big']
    one = replace(work, items=[replace(x, user='u') for x in work])
    assert judge(r, work)['num_failed'] == 1 and users_of(r, one) == {}
    few = replace(work, items=work.items[:9] + [big] * 3)
    with pytest.raises(ValueError, match='another workload'): users_of(r, few)

def test_a_trace_that_lost_steps_is_refused():
    r = simulate(crowd(0), trace=20, **SMALL)
    with pytest.raises(ValueError, match='20 of .* steps were kept'): account(r)
    with pytest.raises(ValueError, match='0 of'): account(simulate(crowd(0), trace=False, **SMALL))

def test_the_judge_adds_up():
    r = served('static', 3)
    d, c = judge(r, crowd(3), dict(ttft=500, e2el=900)), r.counters
    assert d['num_steps'] == c.num_steps and d['num_idle'] == c.num_idle and d['num_padding'] == c.num_padding_tokens
    assert d['slot_utilisation'] == pytest.approx(c.slot_utilisation) and d['num_preemptions'] == c.num_preemptions
    met = [m for s in r.sent if (m := s.metrics).token_times[0] - m.arrival <= .5 and m.finished_at - m.arrival <= .9]
    assert 0 < len(met) < 22 and d['slo_attainment'] == len(met) / 22 and d['request_goodput'] == len(met) / r.took_s
    assert set(d) == {*MEASURES, 'hol_by'}

def test_kv_waste_by_hand():
    "One request of 5 tokens in blocks of 4 that samples 2 more: 8 places, 5, 6 tokens in them; then reserved: 12"
    one = Workload('one', [WorkItem(2, [('x', 5)])])
    serve = lambda **k: simulate(one, cost=Cost.stated(1., 0.), max_num_seqs=1, block_size=4, num_blocks=9, **k)
    waste = lambda **k: judge(serve(**k), one)['kv_waste']
    assert waste() == pytest.approx(5 / 16)
    assert waste(policy='orca') == waste(policy='static') == waste(reserve_max=True) >= waste()

def test_unbeaten_against_all_pairs():
    rng = random.Random(0)
    for better in ((1, 1), (-1, 1), (1, -1), (-1, -1)):
        pts = {f'p{i}': (rng.randrange(6), rng.randrange(6)) for i in range(20)}
        s = {p: [x * b for x, b in zip(xy, better)] for p, xy in pts.items()}
        rule = {p for p in pts if not any(s[q] != s[p] and s[q][0] >= s[p][0] and s[q][1] >= s[p][1] for q in pts)}
        assert set(unbeaten(pts, better)) == rule

# --- what it looks like

def fake(n=3, **more):
    row = {k: 1234567.891 if m.form[-1] != 'd' else 123456 for k, m in MEASURES.items()}
    rows = {f'a-policy-with-a-name-{i}': dict(row) for i in range(n)}
    for r in rows.values(): r.update(more)
    return Lab('w <b>', 'how & where', rows, dict(ttft=1.))

def test_the_table_fits_a_terminal():
    rows = {'trtllm-max-utilization': dict.fromkeys(MEASURES, 0), 'x': dict.fromkeys(MEASURES, None)}
    rows['x'] |= dict(tokens_per_s=12345.6, hol_s=99999.9, wait_mean_s=9999.99, ttft_p95_s=9999.999, itl_p99_s=99.9999,
                      e2e_p95_s=99999.99, slo_attainment=1., num_preemptions=99999, num_recomputed=999999,
                      fairness_gap=99999., kv_waste=1.)
    lines = repr(Lab('w', 'h', rows, {})).splitlines()[3:]
    assert len(lines) == 3 and len({*map(len, lines)}) == 1 and len(lines[0]) <= 110
    first = lambda width: text_table(rows, ['hol_s', 'kv_waste'], width).splitlines()[0]
    assert 'trtllm-max-utilization' in lines[1] and len(first(5)) < len(first(110))

def test_the_best_of_a_column_is_somebody():
    rows = dict(a=dict(hol_s=1., tokens_per_s=1., num_steps=1), b=dict(hol_s=2., tokens_per_s=2., num_steps=2),
                c=dict(hol_s=None, tokens_per_s=1.))
    assert [best(rows, k) for k in ('hol_s', 'tokens_per_s', 'num_steps')] == [{'a'}, {'b'}, set()]
    assert best(dict(a=dict(hol_s=1.), b=dict(hol_s=1.)), 'hol_s') == set()

class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.open, self.links, self.seen = [], [], []
        self.feed(page)
    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        mine = '#', 'data:'
        self.links += [v for k, v in attrs if k in ('src', 'href', 'srcset', 'data') and v and not v.startswith(mine)]

def test_the_page_needs_nobody_and_believes_nobody():
    work = replace(rush(9), name='<script>alert(1)</script>')
    lab = run_lab(work, ['static', 'vllm'], slos=dict(ttft=2000), max_num_seqs=3, max_num_batched_tokens=64)
    page = lab.page()
    t = Tags(page)
    assert not [x for x in t.links if 'w3.org' not in x] and '@import' not in page and 'url(http' not in page
    assert '<script>alert' not in page and t.seen.count('script') == 2 and t.seen.count('svg') >= 4
    assert page.count('<th title') == len(lab.columns(MEASURES)) > 25
    ids = {r for rec in lab.traces['vllm'] for r, _, _ in rec.arrived}
    assert all(page.count(f'<summary>{r}: ') == 2 for r in ids)               # a story under both

def test_nobody_comes_to_the_page():
    lab = run_lab(Workload('nobody', [], 4), ['static', 'vllm'])
    assert 'nobody' in lab.page() and 'Step by step' not in lab.page()

def test_a_window_is_where_people_stand():
    lab = run_lab(rush(24), ['static', 'vllm'], max_num_seqs=3, max_num_batched_tokens=64)
    longest = max(r.num_waiting for r in lab.traces['static'])
    cut = window(lab.traces, 40)
    assert [len(t) for t in cut.values()] == [40, 40] and max(r.num_waiting for r in cut['static']) == longest
    for p, t in cut.items():
        s = t.records[0].step
        for k in (0, 17, 39): assert vars(t.state(s + k)) == vars(lab.traces[p].state(s + k))
    assert window(lab.traces, 10 ** 6) == lab.traces and len(part(lab.traces['vllm'], 0, 5)) == 5

def test_equal_points_share_a_label():
    lab = fake(3)
    lab.rows = {p + 'x' * i: r for i, (p, r) in enumerate(lab.rows.items())}
    ax = frontier(lab, *FRONTIERS[0])
    assert [t.get_text() for t in ax.texts] == [', '.join(lab.rows)[:38] + '...']
    lab.rows['none'] = dict.fromkeys(MEASURES, None)
    frontier(lab, *FRONTIERS[0])                                              # who has no number has no point

# --- the commands

def test_lab_by_name_and_from_a_file(tmp_path, capsys):
    f = tmp_path/'t.csv'
    f.write_text('arrival,prompt_len,output_len,user\n0,30,5,a\n0.1,9,3,b\n0.1,40,7,a\n')
    html, rec = tmp_path/'l.html', tmp_path/'l.json'
    files = ['--html', str(html), '--record', str(rec)]
    assert main(['lab', str(f), '--policies', 'vllm,static,continuous', '--max-num-seqs', '1', *files]) == 0
    out, d = capsys.readouterr().out, json.loads(rec.read_text())
    assert list(d['lab']['rows']) == ['vllm', 'static'] and set(d['lab']['rows']['vllm']) == set(MEASURES)
    assert 'simulated' in out and 'max_num_seqs=1' in out and 't: 3 requests' in out
    assert html.read_text().startswith('<!doctype')
    assert main(['lab', 'rush', '--num-prompts', '5', '--policies', 'static', '--rate', '2', '--cost', 'stated']) == 0
    assert 'stated and not measured' in capsys.readouterr().out

@pytest.mark.parametrize('args,said', [
    (['nothing.csv'], "no file 'nothing.csv'"), (['rush', '--policies', 'vllm,statc'], "policy='statc'"),
    (['rush', '--slo', 'ttft:x'], 'ttft:x'), (['rush', '--num-prompts', '0'], '--num-prompts 0'),
    (['rush', '--rate', '-1'], 'rate=-1'), (['rush', '--look', 'nobody'], "policy='nobody'"),
    (['rush', '--html', '/no/such/place/x.html'], 'no folder'), (['rush', '--cost', 'no.json'], 'no.json'),
    (['rush', '--max-num-seqs', '0'], 'max_num_seqs=0')])
def test_lab_refuses_before_it_serves(args, said, capsys, monkeypatch):
    monkeypatch.setattr(lab_module, 'judge', lambda *a: pytest.fail('served'))
    assert main(['lab', *args]) == 2
    assert said in capsys.readouterr().err

def test_another_machines_cost_is_said_to_be_one(capsys):
    c = measured_cost()
    here = lab_module.machine()
    same = {**here, 'cpu': 'Abacus 3000'}
    other = Cost(c.coefficients, c.error, c.source | dict(machine=same))
    said = lambda cost: run_lab(rush(3), ['vllm'], cost).how
    assert 'ANOTHER machine' in said(other) and 'Abacus 3000' in said(other)
    assert 'ANOTHER' not in said(Cost(c.coefficients, c.error, c.source | dict(machine=here)))
    for word in ('wrong on steps held out', 'measured'): assert word in said(other)

def test_a_policy_of_ones_own_has_its_own_row(tmp_path):
    f = tmp_path/'mine.py'
    f.write_text('from cbatch.scheduler import Policy\nclass Mine(Policy): pass\n')     # its name is that of its parent
    lab = run_lab(rush(5), ['vllm', f'{f}:Mine'], look=[f'{f}:Mine'])
    assert list(lab.rows) == ['vllm', 'Mine'] == [label('fcfs'), label(f'{f}:Mine')] and list(lab.traces) == ['Mine']
    assert lab.rows['vllm'] == lab.rows['Mine']

def test_all_policies_on_a_model_say_the_same(tmp_path, capsys):
    rec, fig, html = tmp_path/'p.json', tmp_path/'f.png', tmp_path/'p.html'
    assert bench_policies(quick=True, record=str(rec), figure=str(fig), html=str(html), cpu_clock=True) == 0
    d, out = json.loads(rec.read_text()), capsys.readouterr().out
    n = len(POLICIES) - 1
    assert f'answers: {n * 10} of {n * 10} equal' in out and f'{n * 5} of {n * 5} equal' in out
    assert list(d['lab']['rows']) == list(POLICIES) and d['machine']['cpu'] and d['seed'] == 0
    assert Cost.from_dict(d['cost']).source['model'] and fig.read_bytes()[1:4] == b'PNG'
    assert 'CPU seconds' in d['lab']['how'] and all(r['num_failed'] == 0 for r in d['lab']['rows'].values())

def test_other_answers_are_found(monkeypatch, capsys):
    serve = lab_module._serve
    def other(policy, *args):
        r = serve(policy, *args)
        if policy == 'static': r.sent[1].output_ids = [*r.sent[1].output_ids[:-1], 1 + r.sent[1].output_ids[-1] % 40]
        return r
    args = dict(policies='vllm,static', num_prompts=3, run=True, model='tiny')
    assert lab_command('rush', **args) == 0 and '3 of 3 equal' in capsys.readouterr().out
    monkeypatch.setattr(lab_module, '_serve', other)
    assert lab_command('rush', **args) == 1 and 'DIFFERENT: static: request 1' in capsys.readouterr().out

def test_answers_with_guesses_are_equal_too(capsys):
    work = Workload('again', [WorkItem(30, [(f'q{i}', 9)], .01 * i) for i in range(4)])
    lab = run_lab(work, ['vllm', 'fair'], None, tiny_lm(), look=['vllm'], max_num_seqs=4, guesses='lookup',
                  guess_when='always')
    plain = run_lab(work, ['vllm'], None, tiny_lm(), max_num_seqs=4)
    assert lab.answers['vllm'] == lab.answers['fair'] == plain.answers['vllm'] and 'guesses=lookup' in lab.how
    assert any(r.guessed for r in lab.traces['vllm'])
    assert lab_command('rush', policies='vllm', num_prompts=3, run=True, model='tiny', guesses='lookup') == 0
    with pytest.raises(ValueError, match='--run'): lab_command('rush', guesses='lookup')
    with pytest.raises(ValueError, match='guesses='): lab_command('rush', guesses='lokup', run=True)

def test_who_left_somebody_out_is_named():
    "A scheme without chunks refuses a long prompt: what it is good at then, it is on an easier crowd"
    work = Workload('two', [WorkItem(3, [('a', 8)]), WorkItem(3, [('b', 40)], .1)])
    lab = run_lab(work, ['vllm', 'orca', 'nano'], Cost.stated(), max_num_batched_tokens=16)
    said = ('1 request not served by orca, nano (prompt of 40 tokens: orca computes it in one step, of 16 tokens '
            'at most: shorten it or raise max_num_batched_tokens): other numbers are of the rest, an easier crowd')
    assert [*lab.whole] == ['vllm'] and lab.page().count('class=best') <= lab.table().count('class=best') == 0
    assert lab.without == said and repr(lab).endswith(said) and said in lab._repr_html_() and said in lab.page()
    assert run_lab(work, ['vllm', 'static'], Cost.stated(), max_num_batched_tokens=16).without == ''

def test_those_whom_nothing_tells_apart_are_named():
    "One user, no hurry and memory for all: shares and priorities have nothing to decide"
    lone = [replace(x, user=None, priority=0) for x in crowd(3)]
    lab = run_lab(Workload('lone', lone), ['vllm', 'fair', 'static', 'priority'], Cost.stated(), max_num_seqs=4)
    assert lab.alike == 'the same in every number on this crowd: vllm = fair = priority'
    assert lab.alike in repr(lab) and lab.alike in lab.page()
    assert run_lab(Workload('lone', lone), ['vllm', 'static'], Cost.stated(), max_num_seqs=4).alike == ''
