"""Orders of the queue: what each promises, on the scheduler and on the tiny model. Steps are counted, never timed."""
import random
from collections import Counter
import pytest
from cbatch.core import Request, Status, StepOutput
from cbatch.kv_blocks import BlockManager
from cbatch.params import EngineConfig, ParamError, SamplingParams
from cbatch.preemption import VICTIMS
from cbatch.proof import ToyMemory
from cbatch.queues import MLFQ, SJF, VTC, Lengths, Priority
from cbatch.scheduler import Policy, Scheduler
from ask import sp
from harness import quiet
from test_fair import Users
from test_seams import P, solo
from world import World, live_on

def play(policy, asks, slots=2, most=2000, budget=64, blocks=999, true=None):
    """Requests as they were served, and who had tokens in each step. `asks`: (step, tokens, prompt, user, priority).
    With `true`, from its number to its answer's length, requests end by an id that nobody foresees"""
    s, steps, reqs = Scheduler(EngineConfig(max_num_seqs=slots, max_num_batched_tokens=budget),
                               BlockManager(blocks, 4), policy), [], []
    for i, (t, n, p, u, priority) in enumerate(sorted(asks, key=lambda a: a[0])):
        reqs.append(Request(f'r{i}', [0] * p, SamplingParams(), n, arrival=float(t), seq=i, user=u, priority=priority,
                            stop_ids=frozenset({9})))
    todo = list(reqs)
    while (todo or s) and len(steps) < most:
        now = float(len(steps))
        while todo and todo[0].arrival <= now: s.add(todo.pop(0))
        plan, out = s.schedule(now), {}
        for x in plan.scheduled:
            over = true and len(x.request.output_ids) + 1 == true[x.request.seq]
            if x.rows: out[x.request.request_id] = [9 if over else 1]
        steps.append([(x.request, x.num_tokens) for x in plan.scheduled])
        s.update(plan, StepOutput(out), now + 1)
        s.check()
    return reqs, steps

def job(step=0, tokens=5, prompt=4, user=None, priority=0): return step, tokens, prompt, user, priority
def wait(reqs): return sum(r.scheduled_at - r.arrival for r in reqs) / len(reqs)
def order(reqs): return [r.seq for r in sorted(reqs, key=lambda r: (r.scheduled_at, r.seq))]

# --- shortest first

@pytest.mark.parametrize('seed', range(5))
def test_shortest_first_waits_less_on_a_skewed_crowd(seed):
    rng = random.Random(seed)
    crowd = [job(rng.randrange(20), rng.choice([2, 3, 4, 60])) for _ in range(30)]
    assert wait(play(SJF(), crowd)[0]) < .8 * wait(play(Policy(), crowd)[0])

def test_among_equals_shortest_first_is_first_come():
    crowd = [job(i // 3, 7) for i in range(30)]
    assert play(SJF(), crowd)[1] and order(play(SJF(), crowd)[0]) == order(play(Policy(), crowd)[0]) == list(range(30))

def test_one_slot_serves_in_the_order_of_lengths():
    reqs, _ = play(SJF(), [job(0, n) for n in (9, 3, 7, 1, 5)], slots=1)
    assert order(reqs) == [3, 1, 4, 2, 0]

def test_what_is_left_counts_and_not_what_is_said():
    "A preempted request that is nearly done stands before one that is shorter as a whole"
    key, r = SJF().key, Request('r', [0], SamplingParams(), 30, output_ids=[1] * 28)
    assert key(r) < key(Request('x', [0], SamplingParams(), 3, seq=1))
    assert SJF(Lengths(first=4)).key(r)[0] == 1          # outgrew the guess

def test_a_guess_is_learned_from_answers_that_ended_by_themselves():
    rng = random.Random(3)
    who = [rng.choice('abb') for _ in range(80)]
    true = [rng.randint(30, 40) if u == 'a' else rng.randint(1, 3) for u in who]
    crowd, guess = [job(6 * i, 500, user=u) for i, u in enumerate(who)], Lengths()
    learned, blind = (wait(play(p, crowd, true=true)[0]) for p in (SJF(guess), SJF()))
    assert learned < .8 * blind and guess.num_seen >= 79 and guess.error < 12
    a, b = (Request('x', [0] * 4, SamplingParams(), 500, user=u) for u in 'ab')
    assert 30 <= guess(a) <= 40 and 1 <= guess(b) <= 3
    assert 'off by' in repr(guess)

def test_the_error_is_of_guesses_made_before():
    guess = Lengths(first=10)
    for n, off in ((4, 6), (4, 6), (8, 10)):
        guess.learn(Request('x', [0], SamplingParams(), 99, output_ids=[1] * n))
        assert guess.off == off

def test_it_forgets_the_least_lately_used():
    guess = Lengths(most=5)
    for i in range(50): guess.learn(Request('x', [0], SamplingParams(), 99, user=f'u{i}', output_ids=[1] * 3))
    assert len(guess.means) == 5 and ('u49', 1) in guess.means and ('u0', 1) not in guess.means

def test_who_was_aborted_teaches_nothing(engine):
    guess = Lengths()
    llm = engine(policy=SJF(guess))
    gone, late = llm.add(P[0], sp()), llm.add(P[1], sp(), deadline=llm.clock() + 1e-9)
    llm.step(); llm.abort(gone); llm.step()
    assert not llm.has_unfinished and guess.num_seen == 0
    quiet(llm)

def test_a_stop_string_is_an_end_too(engine, tiny):
    "It is found when the scheduler has closed its books of the step"
    guess = Lengths()
    llm = engine(policy=SJF(guess))
    said = tiny.tokenizer.decode(solo(tiny, P[0], sp()))
    llm.generate([P[0]], sp(stop=next(c for c in said if c != '\ufffd')), use_tqdm=False)
    llm.generate([P[1]], sp(3), use_tqdm=False)          # what was learned is looked at in the next step
    assert guess.num_seen == 1

# --- priority

def stream(*more, every=1, steps=400, **kw): return [*(job(t, **kw) for t in range(0, steps, every)), *more]

def test_without_aging_the_less_urgent_starves_and_with_it_nobody_does():
    crowd = stream(job(3, 7, priority=0), tokens=4, priority=-1)
    mine = lambda reqs: next(r for r in reqs if r.max_tokens == 7)
    assert mine(play(Priority(aging=None), crowd, most=400)[0]).scheduled_at is None
    for aging in (5, 20, 60):
        reqs, _ = play(Priority(aging), crowd, most=400)
        r = mine(reqs)
        assert all(x.arrival <= r.arrival + aging for x in reqs if x.scheduled_at is not None
                   and x is not r and x.scheduled_at < r.scheduled_at)
        assert r.scheduled_at <= 3 + 3 * aging

def test_order_by_priority_and_then_by_age():
    reqs, _ = play(Priority(), [job(0, 3, priority=p) for p in (0, 5, -5, 5, 0, -5)], slots=1)
    assert order(reqs) == [2, 5, 0, 4, 1, 3]

# --- virtual token counter

def served(steps, users='ab', w_in=1, w_out=2):
    "What each user was served after each step: prompts when they join, answers as they come"
    got, seen, out = Counter(), set(), []
    for who in steps:
        for r, n in who:
            if r not in seen: got[r.user] += w_in * len(r.prompt_ids)
            seen.add(r)
        out.append((got.copy(), who))
    return out

def gaps(policy, seed, slots, w_in=1., w_out=2., steps=200):
    "Differences in service between two users who always have somebody waiting, over every interval; and the bound"
    rng = random.Random(seed)
    mine = lambda u, many: [job(0, rng.randint(1, 12), rng.randint(1, 20), u) for _ in range(many)]
    reqs, log = play(policy, mine('a', 250) + mine('b', 250), slots=slots, most=steps, budget=24)
    diff, d, joined = [0.], 0., set()
    said = Counter()
    for step in log:
        for r, n in step:
            sign = 1 if r.user == 'a' else -1
            if r not in joined: d += sign * w_in * len(r.prompt_ids)
            joined.add(r)
            said[r] += n
            if said[r] >= len(r.prompt_ids): d += sign * w_out
        diff.append(d)
    assert all(any(r.user == u and r.scheduled_at is None for r in reqs) for u in 'ab')     # both always wait
    return max(diff) - min(diff), 2 * max(w_in * 20, w_out * slots * 32)

@pytest.mark.parametrize('seed,slots', [(0, 1), (1, 2), (2, 3), (3, 6)])
def test_the_gap_in_service_is_bounded(seed, slots):
    gap, bound = gaps(VTC(), seed, slots)
    assert 0 < gap <= bound
    plain, _ = gaps(Policy(), seed, slots)
    assert plain > 2 * bound or slots == 6 and plain > bound     # all of one's, then the other's: without end

@pytest.mark.parametrize('w_in,w_out', [(1, 1), (5, 0), (0, 3)])
def test_other_weights(w_in, w_out):
    gap, bound = gaps(VTC(w_in, w_out), 4, 3, w_in, w_out)
    assert gap <= bound

def test_who_comes_back_does_not_bring_what_he_did_not_use():
    "`b` comes at step 200 and stays: from then on the two are equal; absence is no savings account"
    crowd = [job(0, 5, 4, 'a') for _ in range(400)] + [job(200, 5, 4, 'b') for _ in range(200)]
    steps = play(VTC(), crowd, most=300)[1]
    got = Counter(r.user for who in steps[200:300] for r, _ in who)
    assert abs(got['a'] - got['b']) <= 20

def test_a_new_name_is_worth_nothing_while_all_slots_are_taken():
    "The lift is to the least counter at the moment of coming; who waited longer for a slot has not lost by it"
    crowd = [job(0, 50, 4, 'a') for _ in range(8)] + [job(5, 5, 4, 'b')]
    reqs, _ = play(VTC(), crowd)
    b = next(r for r in reqs if r.user == 'b')
    assert b.scheduled_at == 50                              # the first slot that came free

def test_of_ones_own_the_urgent_first_and_past_nobody_else():
    crowd = [job(0, 5, 4, 'a', p) for p in (3, 0, -9, 1)] + [job(0, 5, 4, 'b') for _ in range(4)]
    reqs, _ = play(VTC(), crowd, slots=1)
    assert [reqs[i].user for i in order(reqs)] == list('abababab')
    assert [i for i in order(reqs) if reqs[i].user == 'a'] == [2, 1, 3, 0]

def test_users_who_left_are_forgotten():
    p = VTC()
    play(p, [job(i, 2, 2, f'u{i}') for i in range(600)], slots=4)
    assert len(p.served) < 200

def test_only_the_most_served_are_remembered_of_many_who_left():
    "Newcomers begin at the least counter, so it never rises, and all who were served are ahead of it"
    few, all_of_them, crowd = VTC(most=20), VTC(), [job(i // 2, 1 + (i == 5) * 30, 2, f'u{i}') for i in range(900)]
    for p in (few, all_of_them): play(p, crowd, slots=2)
    assert len(few.served) < 250 and len(all_of_them.served) > 800
    assert few.served['u5'] == max(few.served.values()) > 60

def test_a_queue_of_many_users_is_lined_up_in_one_pass():
    "Their counters are looked at a few times each, not once for each of the others"
    class Counting(dict):
        looks = 0
        def __getitem__(self, k): Counting.looks += 1; return self.setdefault(k, 0.)
    p = VTC()
    p.served = Counting()
    s = Scheduler(EngineConfig(max_num_seqs=2), BlockManager(99, 4), p)
    for i in range(300): s.add(Request(f'r{i}', [0], SamplingParams(), 5, seq=i, user=f'u{i}'))
    p.lift(s)
    assert 0 < Counting.looks < 3000

# --- feedback

def test_short_ones_are_done_sooner_and_nothing_is_computed_twice():
    rng = random.Random(5)
    crowd = [job(7 * i, rng.choice([3, 4, 5, 40])) for i in range(50)]
    late = lambda reqs: sum(r.finished_at - r.arrival - r.max_tokens for r in reqs if r.max_tokens < 10)
    (fed, steps), (plain, _) = play(MLFQ(quantum=16, patience=500), crowd), play(Policy(), crowd)
    assert late(fed) < .3 * late(plain)
    assert sum(n for who in steps for _, n in who) == sum(len(r.prompt_ids) + r.max_tokens - 1 for r in fed)

def test_a_short_one_never_waits_for_a_long_one():
    "As soon as it comes a long one rests, goes on with the KV that it had, and is not shoved about"
    reqs, steps = play(MLFQ(quantum=8), [job(0, 40), job(0, 40), job(20, 3), job(21, 3)])
    assert [r.scheduled_at for r in reqs[2:]] == [20, 21]
    assert not any(r.num_recomputed_tokens or r.num_preemptions for r in reqs)

def test_among_equals_nobody_is_disturbed():
    "Four on the same level, one slot: one after the other, and the slot never changes hands in between"
    reqs, steps = play(MLFQ(quantum=64), [job(i, 6) for i in range(4)], slots=1)
    assert [who[0][0].seq for who in steps] == [i for i in range(4) for _ in range(6)]

def test_levels():
    p, r = MLFQ(quantum=4, levels=3), lambda n, m=0: Request('r', [0] * n, SamplingParams(), 99, output_ids=[1] * m)
    assert [p.level(r(n)) for n in (1, 4, 5, 8, 9, 99)] == [0, 0, 1, 1, 2, 2]     # joins where its prompt fits
    assert [p.level(r(2, m)) for m in (0, 2, 3, 10, 11, 99)] == [0, 0, 1, 1, 2, 2]    # and sinks: 4, then 8 more
    assert [p.level(r(6, m)) for m in (2, 3)] == [1, 2]

def test_patience_saves_the_long_one():
    crowd = stream(job(3, 40), tokens=4)
    long = lambda p: next(r for r in play(p, crowd, most=400)[0] if r.max_tokens == 40)
    assert long(MLFQ(8, patience=None)).finished_at is None
    assert long(MLFQ(8, patience=30)).finished_at < 300

def test_who_has_gone_is_not_kept():
    p = MLFQ(quantum=4, patience=5)
    play(p, [job(i // 2, 6) for i in range(300)])
    assert len(p.lifted) < 100

# --- all of them

MAKE = dict(sjf=SJF, guess=lambda: SJF(Lengths(first=5)), priority=lambda: Priority(aging=3), vtc=VTC,
            mlfq=lambda: MLFQ(quantum=4, patience=7))

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
@pytest.mark.parametrize('name', MAKE)
def test_random_worlds(name, mode):
    "Preemption, prefixes, forks, deadlines, failing steps; `live_on` checks after every step and demands an end"
    met = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        w = World(rng.randint(2, 14), rng.choice([1, 2, 3, 4]), rng.randint(1, 6), rng.randint(1, 14), MAKE[name](),
                  preemption=mode, victim=rng.choice(list(VICTIMS)), swap_mb=rng.choice([None, 1, 4]),
                  prefix_caching=rng.random() < .7)
        w.memory, add = ToyMemory(w.pool, w.cfg.block_size), w.s.add
        def theirs(r): r.user, r.priority = rng.choice('abb'), rng.choice([0, 0, -3, 2]); add(r)
        w.s.add = theirs
        try: live_on(w, rng)
        except AssertionError as e: raise AssertionError(f'seed {seed}: {e}') from e
        met.update(preempted=w.preempted, hits=w.hits, forked=w.forked, swapped=w.swapped)
    assert all(met[k] > 10 for k in ('preempted', 'hits', 'forked')) and (met['swapped'] > 0) == (mode == 'swap')

@pytest.mark.parametrize('name', MAKE)
def test_random_crowds(name):
    assert sum(Users(seed, MAKE[name]()).run().preempted for seed in range(60)) > 10

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
@pytest.mark.parametrize('name', MAKE)
def test_answers_are_the_oracles(engine, tiny, name, mode):
    "In little memory, with late comers, on the tiny model"
    llm = engine(policy=MAKE[name](), num_blocks=11, max_num_seqs=2, preemption=mode, watermark=0.)
    lens, outs, rids = [20, 6, 9, 2, 14, 3, 5], {}, {}
    for i, n in enumerate(lens):
        rids[llm.add(P[i % 4], sp(n), user='ab'[i % 2], priority=i % 3)] = P[i % 4], n
        for _ in range(2): outs |= {o.request_id: o for o in llm.step()}
    while llm.has_unfinished: outs |= {o.request_id: o for o in llm.step()}
    for i, (p, n) in rids.items(): assert outs[i].outputs[0].token_ids == solo(tiny, p, sp(n))
    quiet(llm)

@pytest.mark.parametrize('make,words', [
    (lambda: Priority(aging=0), 'aging=0'), (lambda: VTC(w_in=-1), 'w_in=-1'), (lambda: MLFQ(quantum=0), 'quantum=0'),
    (lambda: MLFQ(patience=0), 'patience=0'), (lambda: MLFQ(levels=.5), 'levels'),
    (lambda: Lengths(first=0), 'first=0')])
def test_what_cannot_be_meant(make, words):
    with pytest.raises(ParamError, match=words): make()
