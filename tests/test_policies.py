"""Policies as strangers write them, in a few lines each: whatever the order, the answers are the oracle's.

One of them pauses requests: they leave the batch and keep their memory, as long as nobody needs it."""
import random
import pytest
from cbatch import CapacityError
from cbatch.core import Code, Kind, Padding, Reason, Status, Why
from cbatch.preemption import VICTIMS
from cbatch.proof import ToyMemory
from cbatch.scheduler import Policy
from ask import sp
from harness import quiet
from test_seams import P, follows, ids, solo
from world import World, live_on

class TakeTurns(Policy):
    "Whoever has spoken rests until the others have: the slots go round"
    name = 'take turns'
    def key(self, r): return len(r.output_ids), r.age
    def turns(self, s, plan):
        for r in s.line_of_running():
            if s.waiting: s.pause(r, plan, 'its turn is over')
            else: yield r
        yield from s.line_of_waiting()

class PromptsFirst(Policy):
    "Newcomers, then those who still read, then those who speak"
    name = 'prompts first'
    def turns(self, s, plan):
        yield from s.line_of_waiting()
        for r in sorted(s.running, key=lambda r: r.num_left == 1):
            if r.status is Status.RUNNING: yield r

class ShortestFirst(Policy):
    "Who asks for least waits least"
    name = 'shortest first'
    def key(self, r): return r.max_tokens, r.age

class WholePrompts(Policy):
    "No chunks: all of a prompt in one step, and what could never be one is refused"
    name = 'whole prompts'
    def chunk(self, s, r, wanted, left): return wanted if wanted <= left else 0
    def refuses(self, s, r):
        n, most = len(r.prompt_ids) + r.max_tokens, s.config.max_num_batched_tokens
        return f"{n} tokens in a step of {most}: shorten the request" if n > most else None

class Restless(Policy):
    "Pauses anybody at any moment, before or after it got its tokens"
    name = 'restless'
    def __init__(self, seed): self.rng = random.Random(seed)
    def turns(self, s, plan):
        for r in s.line_of_running():
            self.unsettle(s, plan, .3)
            if r.status is Status.RUNNING: yield r
            self.unsettle(s, plan, .1)
        while (r := s.waiting.peek()) and not (yield r): self.unsettle(s, plan, .1)
        self.unsettle(s, plan, .1)

    def unsettle(self, s, plan, share):
        for r in list(s.running):
            if r not in plan.admitted and self.rng.random() < share / len(s.running): s.pause(r, plan)

# --- on the tiny model

def drain(llm):
    "What everybody said, by id; the trace knows at every step, and later, who was where"
    last, then = {}, {}
    while llm.has_unfinished:
        last |= {o.request_id: o for o in llm.step()}
        follows(llm)
        then[llm.trace[-1].step] = llm.trace.state()
    for step, state in then.items(): assert llm.trace.state(step) == state
    quiet(llm)
    return last

def test_two_take_turns(engine, tiny):
    "One slot: it changes hands at every step, and nothing is computed twice"
    llm = engine(policy=TakeTurns(), max_num_seqs=1)
    a, b = llm.add(P[0], sp()), llm.add(P[1], sp())
    for _ in range(5):
        llm.step()
        (aside,), s = llm.scheduler.paused or [None], llm.scheduler
        if not aside: continue
        assert aside.status is Status.PAUSED and aside in list(s.waiting) and aside not in s.running
        assert len(aside.block_table) * 4 >= aside.num_computed_tokens == aside.num_tokens - 1 > 0
        assert f'{aside.request_id}' in llm.trace.state().blocks
    outs = drain(llm)
    assert [outs[i].outputs[0].token_ids for i in (a, b)] == [solo(tiny, p, sp()) for p in P[:2]]
    who = [s[0] for rec in llm.trace for s in rec.scheduled]
    assert who == [a, b] * 12 and llm.metrics['num_preemptions'] == 0
    assert sum(s[1] for rec in llm.trace for s in rec.scheduled) == len(P[0]) + len(P[1]) + 2 * 11
    assert all(rec.paused == [s[0] for s in llm.trace[rec.step - 1].scheduled] for rec in llm.trace[2:-1])
    said = {str(d) for rec in llm.trace for d in rec.decisions if d.kind is Kind.PAUSED}
    assert said == {'paused: its turn is over'}

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
@pytest.mark.parametrize('slots', [1, 2, 3])
def test_who_rests_gives_its_memory_to_who_needs_it(engine, tiny, mode, slots):
    llm = engine(policy=TakeTurns(), max_num_seqs=slots, num_blocks=11, preemption=mode, watermark=0.)
    rids = [llm.add(p, sp(20)) for p in P]
    outs = drain(llm)
    assert [outs[i].outputs[0].token_ids for i in rids] == [solo(tiny, p, sp(20)) for p in P]
    assert llm.metrics['num_preemptions'] > 0 and any(rec.paused for rec in llm.trace)
    assert (llm.metrics['num_swapped_blocks'] > 0) == (mode == 'swap')

def resting(llm):
    "The first request, once it rests"
    rids = [llm.add(p, sp(20), deadline=llm.clock() + 50) for p in P[:3]]
    while not llm.scheduler.paused: llm.step()
    return next(iter(llm.scheduler.paused)), rids

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
def test_who_rests_may_leave(engine, tiny, mode):
    "By abort or by deadline: its blocks are free at once, the others go on"
    llm = engine(policy=TakeTurns(), max_num_seqs=1, preemption=mode)
    llm.now = 0.
    llm.clock = lambda: llm.now
    r, rids = resting(llm)
    free, held = llm.num_free_blocks, len(r.block_table)
    assert held and llm.abort(r.request_id) and not llm.scheduler.paused
    assert llm.num_free_blocks == free + held and not r.block_table and r.finish_reason == 'abort'
    while not llm.scheduler.paused: llm.step()
    r = next(iter(llm.scheduler.paused))
    llm.now = 60.
    ended = {o.request_id: o for o in llm.step()}
    assert set(ended) == {i for i in rids[1:]} and all(o.failure.code is Code.DEADLINE for o in ended.values())
    assert r.finish_reason == 'error' and not r.block_table
    quiet(llm)

def test_only_who_runs_can_rest(engine, tiny):
    class Hasty(Policy):
        def turns(self, s, plan):
            for r in s.line_of_waiting():
                yield r
                s.pause(r, plan)
    llm = engine(policy=Hasty())
    llm.add(P[0], sp())
    with pytest.raises(ValueError, match='just joined'): llm.step()

def test_a_pause_has_a_reason_in_words(engine, tiny):
    class Numbered(Policy):
        def turns(self, s, plan):
            for r in list(s.running): s.pause(r, plan, 5)
            yield from s.line_of_waiting()
    llm = engine(policy=Numbered())
    rid = llm.add(P[0], sp())
    llm.step()
    with pytest.raises(ValueError, match='5 is no reason'): llm.step()
    llm.scheduler.policy = Policy()
    assert drain(llm)[rid].outputs[0].token_ids == solo(tiny, P[0], sp())
    quiet(llm)

def test_prompts_first(engine, tiny):
    "A newcomer's prompt takes the whole budget while the others wait"
    llm = engine(policy=PromptsFirst(), max_num_batched_tokens=10)
    rids = [llm.add(P[0], sp()), llm.add(P[3], sp())]
    llm.step(); llm.step()
    rids.append(llm.add(P[2], sp()))
    llm.step()
    assert [s[:2] for s in llm.trace[-1].scheduled] == [(rids[2], 10)]
    assert [(d.kind, d.why) for d in llm.trace[-1].decisions][1:] == [(Kind.WAITS, Why.BUDGET)] * 2
    outs = drain(llm)
    assert [outs[i].outputs[0].token_ids for i in rids] == [solo(tiny, P[k], sp()) for k in (0, 3, 2)]

def test_shortest_first(engine, tiny):
    llm, lens = engine(policy=ShortestFirst(), max_num_seqs=1), [20, 6, 9, 2]
    outs = llm.generate(P, [sp(n) for n in lens], use_tqdm=False)
    assert ids(outs) == [solo(tiny, p, sp(n)) for p, n in zip(P, lens)]
    assert [r for rec in llm.trace for r in rec.admitted] == ['r3', 'r1', 'r2', 'r0']

def test_whole_prompts(engine, tiny):
    llm = engine(policy=WholePrompts(), max_num_batched_tokens=32)
    with pytest.raises(CapacityError, match='33 tokens in a step of 32'): llm.add(P[2], sp(13))
    assert not llm.has_unfinished
    outs = llm.generate(P * 2, sp(), use_tqdm=False)
    assert ids(outs) == [solo(tiny, p, sp()) for p in P] * 2
    assert not any(d.why is Why.CHUNK for rec in llm.trace for d in rec.decisions)
    quiet(llm)

# --- in random crowds

def crowd(seed, policy, mode):
    "A random world under a policy, from its first event to its last; it checks itself after every step"
    rng = random.Random(seed)
    w = World(rng.randint(2, 14), rng.choice([1, 2, 3, 4]), rng.randint(1, 6), rng.randint(1, 14), policy,
              preemption=mode, victim=rng.choice(list(VICTIMS)), swap_mb=rng.choice([None, 1, 4]),
              prefix_caching=rng.random() < .7)
    w.memory = ToyMemory(w.pool, w.cfg.block_size)
    return live_on(w, rng)

class Script(Policy):
    "Does what it is told: asks a request, or pauses one"
    name = 'script'
    def turns(self, s, plan):
        for act, r in self.todo:
            if act == 'pause': s.pause(r, plan)
            else: yield r

def test_a_block_is_not_taken_before_it_is_copied():
    """A fork joins by a copy of its sibling's last block; the sibling rests; a third comes back from the host, in the
    same step, and needs memory: not that block, which is copied after swapping"""
    p = Script()
    w = World(4, 4, 4, 20, p, preemption='swap')
    w.memory = ToyMemory(w.pool, 4)
    w.add([1, 1, 2, 3, 4, 5, 6], 6)
    w.add([8, 1, 2, 3, 4, 5], 6, n=2)
    x, first, fork = w.all
    for todo in [('ask', x)], [], [('ask', first)], [('ask', fork), ('pause', first), ('ask', x)]:
        if not todo: w.preempt(0)
        p.todo = todo
        w.step()
    assert fork.output_ids and first.num_computed_tokens and x.host_table
    while w.live:
        p.todo = [('ask', r) for r in w.live]
        w.step()

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
@pytest.mark.parametrize('make', [lambda seed: PromptsFirst(), lambda seed: TakeTurns(), Restless],
                         ids=['prompts first', 'take turns', 'restless'])
@pytest.mark.parametrize('start', [0, 100])
def test_crowds(make, mode, start):
    "Everybody is served, whole and right, and what the crowds met was hard"
    met = dict(preempted=0, hits=0, forked=0, swapped=0)
    for seed in range(start, start + 100):
        try: w = crowd(seed, make(seed), mode)
        except AssertionError as e: raise AssertionError(f'seed {seed}: {e}') from e
        for k in met: met[k] += getattr(w, k)
    assert all(n > 20 for k, n in met.items() if k != 'swapped' or mode == 'swap'), met

# --- policies that are wrong

class Deaf(Policy):
    "Goes through the line without handing on the answers"
    def turns(self, s, plan):
        yield from s.line_of_running()
        for r in s.line_of_waiting(): yield r

class Nobody(Policy):
    def turns(self, s, plan): yield None

class Listed(Policy):
    def turns(self, s, plan): return list(s.running)

class Halves(Policy):
    def chunk(self, s, r, wanted, left): return wanted / 2

class Generous(Policy):
    def chunk(self, s, r, wanted, left): return wanted + 1

class Spares(Policy):
    "Lets in whoever has no room"
    def spare(self, s, r, plan): return -100

class NoNumber(Policy):
    def spare(self, s, r, plan): return float('nan')

class Owed(Policy):
    def padding(self, s, plan): return [Padding(-5, 1)]

class Parts(Policy):
    def padding(self, s, plan): return [Padding(1, 1.5)]

class NoWords(Policy):
    def close(self, s, now): return Reason(5)

class Padded(Policy):
    def padding(self, s, plan): return [Padding(99, 99)]

class Sometime(Policy):
    def wakeup(self, s, now): return float('nan')

class Closed(Policy):
    def close(self, s, now): return 5

class Soon(Policy):
    def wakeup(self, s, now): return 'x'

class Wide(Policy):
    def padding(self, s, plan): return 5

class Wider(Policy):
    def padding(self, s, plan): return [5]

class Greedy(Policy):
    def reserve(self, s, r): return 'all'

@pytest.mark.parametrize('make,words', [
    (Deaf, 'again and again'), (Nobody, 'not a request'), (Listed, 'not a generator'), (Halves, 'whole number'),
    (Generous, 'at most'), (Padded, 'over the budget'), (Sometime, 'wakeup gave nan'), (Closed, 'not a reason'),
    (Soon, "wakeup gave 'x'"), (Wide, 'padding gave 5'), (Wider, r'padding gave \[5\]'),
    (Greedy, "reserve gave 'all'"), (Spares, 'spare gave -100'), (NoNumber, 'spare gave nan'),
    (Owed, 'padding gave .*-5'), (Parts, 'padding gave .*1.5'), (NoWords, 'not a reason')])
def test_a_wrong_policy_is_told_so(engine, tiny, make, words):
    "By its name, and nobody has lost anything: under a policy that is right all are served"
    llm = engine(num_blocks=14, max_num_seqs=2, policy=make())
    rids = [llm.add(p, sp()) for p in P[:4]]
    with pytest.raises(ValueError, match=f'policy {make.__name__}: .*{words}'):
        for _ in range(99): llm.step()
    llm.check()
    llm.scheduler.policy = Policy()
    outs = {o.request_id: o for o in drain(llm).values()}
    assert [outs[i].outputs[0].token_ids for i in rids] == [solo(tiny, p, sp()) for p in P[:4]]
    quiet(llm)

def test_a_refusal_is_a_sentence(engine):
    class Mute(Policy):
        def refuses(self, s, r): return 5
    llm = engine(policy=Mute())
    with pytest.raises(ValueError, match='policy Mute: refuses gave 5, not a sentence'): llm.add(P[0], sp())

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
@pytest.mark.parametrize('when', ['preempted', 'swap_in', 'copies', 'admitted', 'expired', 'scheduled'])
def test_a_policy_may_raise_halfway(engine, tiny, mode, when):
    "Whatever was decided before: blocks are moved or taken back, tokens are the oracle's, who is late hears of it"
    class Falls(Policy):
        fallen = 0
        def turns(self, s, plan):
            yield from super().turns(s, plan)
            if getattr(plan, when) and self.fallen < 5:
                self.fallen += 1
                raise ZeroDivisionError
    llm = engine(num_blocks=10, max_num_seqs=3, policy=Falls(), preemption=mode)
    rids = [llm.add(p, sp(n=2) if i == 1 else sp()) for i, p in enumerate(P[:4])]
    late = llm.add(P[0], sp(), deadline=llm.clock() - 1)
    outs, falls = {}, 0
    while llm.has_unfinished or llm.unclaimed:
        try:
            for o in llm.step(): outs[o.request_id] = o
        except ZeroDivisionError: falls += 1
        llm.check()
        outs |= {o.request_id: o for o in llm.take()}
    assert falls == llm.scheduler.policy.fallen and (falls or when in ('preempted', 'swap_in', 'copies'))
    assert outs[late].outputs[0].finish_reason == 'error'
    for i, p in zip(rids, P): assert all(c.token_ids == solo(tiny, p, sp()) for c in outs[i].outputs), i
    quiet(llm)

def test_what_on_update_raises_comes_after_the_reports(engine, tiny):
    class Fails(Policy):
        def on_update(self, s, plan, out):
            if any(r.finish_reason for r, *_ in plan.scheduled): raise ZeroDivisionError
    llm = engine(policy=Fails())
    rid = llm.add(P[0], sp())
    with pytest.raises(ZeroDivisionError):
        for _ in range(99): llm.step()
    out, = llm.take()
    assert (out.request_id, out.outputs[0].token_ids) == (rid, solo(tiny, P[0], sp())) and not llm.has_unfinished
    quiet(llm)

def test_a_key_that_raises_lets_nobody_in(engine, tiny):
    class Odd(Policy):
        def key(self, r): return (1 if r.user is None else r.user, r.seq)
    llm = engine(policy=Odd())
    first = llm.add(P[0], sp())
    with pytest.raises(TypeError): llm.add(P[1], sp(), user='a word among numbers')
    llm.check()
    assert drain(llm)[first].outputs[0].token_ids == solo(tiny, P[0], sp())
    quiet(llm)
