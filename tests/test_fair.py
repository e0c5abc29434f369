"""Slots and places in the queue, shared among users: counted, never timed."""
import asyncio, random
from collections import Counter
import pytest
from cbatch import LLM, SamplingParams
from cbatch.async_engine import AsyncLLM, Overloaded
from cbatch.core import Request, StepOutput
from cbatch.kv_blocks import BlockManager
from cbatch.params import EngineConfig
from cbatch.policies import Fair
from cbatch.scheduler import Policy, Scheduler
from cbatch.token_loop import generate_ref
from toy import Crowd
from web import ENGINE, NEXT, web

class Users(Crowd):
    "A crowd whose requests belong to somebody, and some are more urgent"
    def add(self):
        n, push = len(self.all), self.s.add
        def add(r): r.user, r.priority = self.rng.choice('abbbb'), self.rng.choice([0, 0, 0, 1]); push(r)
        self.s.add = add
        try: super().add()
        finally: self.s.add = push

@pytest.mark.parametrize('part', range(4))
def test_random_lives(part):
    lives = [Users(seed, Fair()).run() for seed in range(part, 600, 4)]
    assert sum(c.preempted for c in lives) > 20

def play(policy, come, slots=4, budget=64, blocks=999):
    "Who had tokens in each step; `come`: step -> (user, prompt, answer) of those who come then"
    s, steps, n = Scheduler(EngineConfig(max_num_seqs=slots, max_num_batched_tokens=budget),
                            BlockManager(blocks, 4), policy), [], 0
    while s or come:
        for user, p, m in come.pop(s.num_steps, ()):
            s.add(Request(f'{user}{n}', [0] * p, SamplingParams(), m, seq=n, user=user)); n += 1
        plan = s.schedule()
        steps.append([x.request.request_id for x in plan.scheduled])
        s.update(plan, StepOutput({x.request.request_id: [1] for x in plan.scheduled if x.rows}))
        s.check()
    return steps

def last(steps, user): return max(i for i, who in enumerate(steps) if any(r[0] == user for r in who))
def slots_of(step): return Counter(r[0] for r in step)

def test_many_long_ones_hold_up_nobody():
    "64 of one user, and another who comes every now and then for five tokens"
    come = {0: [('a', 5, 40)] * 64} | {i: [('b', 5, 5)] for i in range(20, 200, 20)}
    fair, plain = play(Fair(), dict(come), slots=8), play(Policy(), dict(come), slots=8)
    for i in range(20, 200, 20): assert [slots_of(s)['b'] for s in fair[i:i + 5]] == [1] * 5
    assert not any(slots_of(s)['b'] for s in plain[:300])
    assert all(len(s) == 8 for s in fair[:300])             # and no slot is idle for it

def test_shares_are_equal_when_all_want_more():
    steps = play(Fair(), {0: [('a', 5, 60)] * 12, 7: [('b', 5, 60)] * 12, 15: [('c', 5, 60)] * 12}, slots=6)
    assert slots_of(steps[5]) == dict(a=6) and slots_of(steps[12]) == dict(a=3, b=3)
    assert all(slots_of(s) == dict(a=2, b=2, c=2) for s in steps[22:60])

def test_long_prompts_of_one_do_not_hold_up_the_short_one_of_another():
    "The budget of a step is shared too: who has more slots reads later"
    come = {0: [('a', 400, 5)] * 6, 3: [('b', 40, 3)]}
    fair, plain = play(Fair(), dict(come), slots=8, budget=32), play(Policy(), dict(come), slots=8, budget=32)
    assert last(fair, 'b') < 20 < 60 < last(plain, 'b')

def test_one_user_is_served_as_by_the_default():
    rng = random.Random(0)
    for _ in range(30):
        come = {i: [('a', rng.randint(1, 40), rng.randint(1, 9))] * rng.randint(0, 3) for i in range(30)}
        kw = dict(slots=rng.randint(1, 5), budget=rng.randint(4, 32), blocks=rng.choice([16, 999]))
        assert play(Fair(), dict(come), **kw) == play(Policy(), dict(come), **kw)

def test_answers_do_not_change(tiny):
    llm = LLM(tiny, **ENGINE | dict(policy='fair', max_num_seqs=2, num_blocks=40))
    asks = [([1 + i, 2, 3], 'x' if i < 5 else 'y') for i in range(8)]
    def add(asks):
        return [llm.add(p, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), user=u) for p, u in asks]
    ids, outs = add(asks[:5]), {}
    for _ in range(5): llm.step()
    ids += add(asks[5:])
    while llm.has_unfinished: outs |= {o.request_id: o for o in llm.step()}
    assert any(rec.paused for rec in llm.trace)
    for i, (p, _) in zip(ids, asks):
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        assert outs[i].outputs[0].token_ids == generate_ref(tiny, p, params).token_ids
    llm.close()

# --- the queue

def test_the_last_places_are_for_others(tiny):
    long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    async def go():
        async with AsyncLLM(LLM(tiny, **ENGINE | dict(max_num_seqs=1, check=False)), max_waiting=32) as e:
            async def ask(user, n=1):
                try: return [await e.add(NEXT, long, user=user) for _ in range(n)]
                except Overloaded as x: return x.reason
            got = []
            while not isinstance(mine := await ask('a'), str): got += mine
            assert mine == 'requests' and 28 <= len(got) <= 29      # one may be in the batch
            others = [await ask(u) for u in 'bcd']
            assert all(isinstance(x, list) for x in others)
            assert await ask('b') == 'requests'                     # he has one already
            anonymous = await ask(None); assert isinstance(anonymous, list)
            for s in [*got, *sum(others, []), *anonymous]: await s.abort()
    asyncio.run(go())

def test_over_http_a_user_or_an_address_is_a_client(tiny):
    "A light client's request joins the batch though one client's long ones fill it; all are from one address"
    with web(tiny, engine=dict(policy='fair', max_num_seqs=2, check=False)) as w:
        w.slow(.01)
        greedy = [w.raw(max_tokens=400) for _ in range(6)]          # known by their address
        w.wait(lambda: w.server.engine.worker.desk.sent == 6)
        assert w.complete(user='light').status == 200
        assert len(w.llm.groups) == 6                               # none of those has ended meanwhile
        for s in greedy: s.close()
        w.rests()

# --- a priority orders one's own requests, and takes nothing from others

def with_priority(policy, mine, others=((0, 30),) * 8, slots=4):
    "Who had tokens in each step; requests of `a` are (priority, tokens), then those of `b`"
    s, steps = Scheduler(EngineConfig(max_num_seqs=slots), BlockManager(999, 4), policy), []
    for i, (user, (priority, n)) in enumerate([*(('a', x) for x in mine), *(('b', x) for x in others)]):
        s.add(Request(f'{user}{i}', [0] * 5, SamplingParams(), n, seq=i, user=user, priority=priority))
    while s:
        plan = s.schedule()
        steps.append([x.request.request_id for x in plan.scheduled])
        s.update(plan, StepOutput({x.request.request_id: [1] for x in plan.scheduled if x.rows}))
        s.check()
    return steps

@pytest.mark.parametrize('urgent', [-1000, -1, 0, 1, 1000])
def test_who_calls_himself_urgent_gets_no_more_slots(urgent):
    steps = with_priority(Fair(), [(urgent, 30)] * 8)
    assert all(slots_of(s) == dict(a=2, b=2) for s in steps[:100])

def test_of_ones_own_the_urgent_first():
    steps = with_priority(Fair(), [(0, 30), (0, 30), (5, 3), (-5, 3), (1, 3)])
    begins = lambda i: next(k for k, s in enumerate(steps) if f'a{i}' in s)
    assert begins(3) == 0 and begins(0) < begins(1) < begins(4) < begins(2)

def test_the_least_urgent_of_the_heaviest_rests():
    s = Scheduler(EngineConfig(max_num_seqs=3), BlockManager(99, 4), Fair())
    def add(user, priority, i):
        s.add(Request(f'{user}{i}', [0] * 5, SamplingParams(), 20, seq=i, user=user, priority=priority))
    def step():
        plan = s.schedule()
        s.update(plan, StepOutput({x.request.request_id: [1] for x in plan.scheduled if x.rows}))
        return plan
    for i, p in enumerate([0, 3, 1]): add('a', p, i)
    step()
    add('b', 99, 3)
    assert [r.request_id for r in step().paused] == ['a1']

def test_over_http_urgent_is_no_way_past_others(tiny):
    with web(tiny, engine=dict(policy='fair', max_num_seqs=2, check=False)) as w:
        w.slow(.01)
        greedy = [w.raw(max_tokens=400, user='greedy', priority=-1000) for _ in range(6)]
        w.wait(lambda: w.server.engine.worker.desk.sent == 6)
        assert w.complete(user='light', priority=1000).status == 200
        assert len(w.llm.groups) == 6
        for s in greedy: s.close()
        w.rests()
