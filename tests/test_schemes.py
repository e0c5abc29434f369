"""The schemes of the field on one scheduler: each keeps its own rule, serves everybody, and says what the oracle says.

What a scheme is good at is tested where it should be, and where it should not."""
import random
import pytest
from cbatch import LLM, CapacityError
from cbatch.catalog import POLICIES
from cbatch.core import Plan, Request, Scheduled, Status, StepOutput
from cbatch.model import tiny_lm
from cbatch.params import EngineConfig, ParamError, SamplingParams, cdiv
from cbatch.preemption import Preempt, VICTIMS
from cbatch.prefix_caching import PrefixBlocks
from cbatch.proof import ToyMemory
from cbatch.roster import WaitingQueue
from cbatch.scheduler import Policy, Scheduler
from cbatch.schemes import (MOST_RANKED, TGI, MaxUtilization, Nano, NoEvict, Orca, Sarathi, SGLang, VLLM0,
                            blocks_to_come, still_reads)
from ask import sp
from harness import quiet
from test_seams import P, ids, solo
from toy import Crowd, alone
from world import World, live_on

SCHEMES = {'orca': Orca, 'no-evict': NoEvict, 'no-evict chunked': lambda: NoEvict(True),
           'max-utilization': MaxUtilization, 'max-utilization chunked': lambda: MaxUtilization(chunked=True),
           'vllm-v0': VLLM0, 'nano': Nano, 'tgi': TGI, 'tgi patient': lambda: TGI(3., 4), 'sarathi': Sarathi,
           'sarathi 3': lambda: Sarathi(3), 'sglang': SGLang, 'sglang bold': lambda: SGLang(.1, 0, 5)}
SURE = {k: SCHEMES[k] for k in ('orca', 'no-evict', 'no-evict chunked', 'tgi', 'tgi patient')}
SURE['sglang at 1'] = lambda: SGLang(1, 1)
APART = {k: SCHEMES[k] for k in ('vllm-v0', 'nano', 'tgi', 'tgi patient', 'sglang', 'sglang bold')}
WHOLE = {k: SCHEMES[k] for k in ('orca', 'no-evict', 'max-utilization', 'vllm-v0', 'nano', 'tgi')}

def each(schemes): return pytest.mark.parametrize('make', schemes.values(), ids=schemes)
both = pytest.mark.parametrize('mode', ['recompute', 'swap'])

def test_names():
    got = [p().name for p in (Orca, TGI, NoEvict, MaxUtilization, VLLM0, Nano, Sarathi, SGLang)]
    assert got == ['orca', 'tgi', 'trtllm-no-evict', 'trtllm-max-utilization', 'vllm-v0', 'nano', 'sarathi', 'sglang']

# --- random lives

def draw(rng, policy, mode, cls=World, **cfg):
    own = dict(victim=rng.choice(list(VICTIMS)), swap_mb=rng.choice([None, 1, 4]), prefix_caching=rng.random() < .7)
    w = cls(rng.randint(2, 14), rng.choice([1, 2, 3, 4]), rng.randint(1, 6), rng.randint(1, 14), policy,
            preemption=mode, **own | cfg)
    w.memory = ToyMemory(w.pool, w.cfg.block_size)
    return w

def lives(make, mode, seeds, **kw):
    "Random worlds under a scheme, from the first event to the last; each checks itself after every step"
    for seed in seeds:
        rng = random.Random(seed)
        try: yield live_on(draw(rng, make(), mode, **kw), rng)
        except AssertionError as e: raise AssertionError(f'seed {seed}: {e}') from e

@both
@each(SCHEMES)
def test_everybody_is_served(make, mode):
    "Whole and right, whatever was drawn: forks, caches, deadlines, aborts, preemptions without need"
    met = dict(preempted=0, hits=0, forked=0)
    for w in lives(make, mode, range(1000, 1020)):
        for k in met: met[k] += getattr(w, k)
    assert all(n > 10 for n in met.values()), met

@each(SCHEMES)
def test_everybody_is_served_without_a_cache(make):
    "Requests that come late, go and are aborted; those that a scheme refuses are not asked again"
    for seed in range(40): Crowd(seed, make()).run()

class Calm(World):
    "Nobody is preempted without need"
    def preempt(self, i): pass

@both
@each(SURE)
def test_who_reserves_never_preempts(make, mode):
    assert sum(w.preempted for w in lives(make, mode, range(60), cls=Calm)) == 0

def test_those_crowds_are_tight():
    "The same crowds under schemes that hope"
    for make in (MaxUtilization, Nano, Sarathi):
        assert sum(w.preempted for w in lives(make, 'recompute', range(30), cls=Calm)) > 20

def watched(make):
    "A scheme that notes of each step who spoke before it, and who got tokens"
    p, steps = make(), []
    turns, update = p.turns, p.on_update
    def look(s, plan):
        p.spoke = {r for r in [*s.running, *s.waiting] if not still_reads(r)}
        p.ran = set(s.running)
        return (yield from turns(s, plan))
    def note(s, plan, out):
        update(s, plan, out)
        steps.append((plan, [x.request for x in plan.scheduled], p.spoke, p.ran))
    p.turns, p.on_update, p.steps = look, note, steps
    return p

@both
@each(APART)
def test_a_step_is_prompts_or_decodes(make, mode):
    "Never both, also when somebody comes back from the host"
    num = 0
    for w in lives(lambda: watched(make), mode, range(20)):
        for plan, got, spoke, _ in w.s.policy.steps:
            assert len({r in spoke for r in got}) < 2, f'step {plan.step} is mixed'
            num += len(got) > 1
    assert num > 60

def test_others_mix():
    for make in (Orca, NoEvict, MaxUtilization, Sarathi):
        steps = [x for w in lives(lambda: watched(make), 'recompute', range(12)) for x in w.s.policy.steps]
        assert sum(len({r in spoke for r in got}) == 2 for _, got, spoke, _ in steps) > 10

@each(WHOLE)
def test_a_prompt_is_whole(make):
    "Whoever joins for the first time computes all of its prompt, unless no step could"
    num = 0
    for w in lives(lambda: watched(make), 'recompute', range(25)):
        most = w.cfg.max_num_batched_tokens
        for plan, *_ in w.s.policy.steps:
            for x in plan.scheduled:
                if x.request not in plan.admitted or len(x.request.prompt_ids) > most: continue
                if x.request.num_preemptions: continue
                assert x.stop == len(x.request.prompt_ids), f'step {plan.step}: {x}'
                num += x.num_tokens > 1
    assert num > 40

@pytest.mark.parametrize('size', [1, 3, 8])
@both
def test_sarathi_keeps_its_budget_and_nobody_stalls(size, mode):
    "However long a prompt is: at most `chunk_size` tokens or one for each that decodes; and each of them gets one"
    reads = 0
    for w in lives(lambda: watched(lambda: Sarathi(size)), mode, range(20), cls=Calm):
        for plan, got, spoke, ran in w.s.policy.steps:
            speak = sum(r in spoke for r in got)
            assert plan.num_tokens <= max(size, speak)
            if len(spoke & ran) > w.cfg.max_num_batched_tokens: continue
            assert all(r in got or r in plan.preempted or r.status is Status.FINISHED for r in spoke & ran)
            reads += speak and speak < len(got)
    assert reads > (10 if size > 1 else -1)

def test_no_evict_lets_in_whom_orca_lets_in():
    "Without a cache a promise and a purchase are one: the same steps"
    plans = []
    for make in (Orca, NoEvict):
        ws = lives(lambda: watched(make), 'recompute', range(40), prefix_caching=False)
        plans.append([[(x.request.request_id, x.start, x.stop) for x in plan.scheduled]
                      for w in ws for plan, *_ in w.s.policy.steps])
    assert plans[0] == plans[1] and len(plans[0]) > 500

# --- crowds that are made for a claim

class Run:
    "A crowd of (step it comes in, prompt or its length, max_tokens, tokens it says) from the first to the last"
    def __init__(self, policy, asks, num_blocks=60, slots=4, budget=32, caching=False, watermark=0., bs=4):
        cfg = EngineConfig(max_num_seqs=slots, max_num_batched_tokens=budget, watermark=watermark, block_size=bs)
        self.s = Scheduler(cfg, PrefixBlocks(num_blocks, bs, caching), policy, Preempt())
        self.spent, self.steps, self.held, self.reqs = [0], [], [], []
        todo = sorted(asks, key=lambda a: a[0])
        while todo or self.s:
            while todo and todo[0][0] <= len(self.spent) - 1: self.arrive(*todo.pop(0))
            self.step()

    def arrive(self, at, prompt, most, says):
        i = len(self.reqs)
        prompt = [100 + i] * prompt if isinstance(prompt, int) else prompt
        r = Request(f'r{i}', prompt, SamplingParams(), most, float(at), i, stop_ids=frozenset({0}))
        self.reqs.append(r)
        r.prompt = says                        # nobody looks at the text
        self.s.add(r)

    def step(self):
        t = float(len(self.spent) - 1)
        plan = self.s.schedule(t)
        assert plan or not self.s, 'idle for no reason'
        held = sum(len(r.block_table) for r in self.s.running) * self.s.blocks.block_size
        self.held.append(held - sum(r.num_computed_tokens for r in self.s.running) - plan.num_tokens)
        say = lambda r: [int(len(r.output_ids) + 1 < r.prompt)]
        self.s.update(plan, StepOutput({x.request.request_id: say(x.request) for x in plan.scheduled if x.rows}), t + 1)
        self.s.check()
        self.spent.append(self.spent[-1] + plan.num_tokens)
        self.steps.append(plan)

    @property
    def preempted(self): return sum(r.num_preemptions for r in self.reqs)
    @property
    def joined(self): return [int(r.request_id[1:]) for plan in self.steps for r in plan.admitted]
    def gap(self, i=None):
        "Most tokens computed between two of somebody's"
        ts = [r.token_times for r in (self.reqs if i is None else [self.reqs[i]])]
        return max((self.spent[int(b)] - self.spent[int(a)] for t in ts for a, b in zip(t, t[1:])), default=0)
    def wait(self, i): return self.spent[int(self.reqs[i].token_times[0])] - self.spent[int(self.reqs[i].arrival)]

def test_what_orca_reserves_in_vain():
    """Six and ten tokens are four blocks, three and five are two: 24 slots, of which step k has written 9 + 2k; after
    the second has said five, 16 of which it has written 6 + k"""
    run = Run(Orca(), [(0, 6, 10, 10), (0, 3, 5, 5)])
    assert run.held == [15, 13, 11, 9, 7, 5, 4, 3, 2, 1]
    need = Run(Policy(), [(0, 6, 10, 10), (0, 3, 5, 5)]).held
    assert need == [cdiv(6 + k, 4) * 4 - 6 - k + (cdiv(3 + k, 4) * 4 - 3 - k if k < 5 else 0) for k in range(10)]

def test_what_orca_reserves_in_vain_on_a_model(engine, tiny):
    llm = engine(policy=Orca(), max_num_batched_tokens=32, prefix_caching=False)
    llm.generate([[1, 2, 3, 4, 5, 6], [7, 8, 9]], [sp(10), sp(5)], use_tqdm=False)
    held = []
    for rec, now in llm.trace.replay():
        written = sum(now.computed[r] for r in now.blocks) + sum(n for _, n, *_ in rec.scheduled)
        held.append(sum(4 * len(b) for b in now.blocks.values()) - written)
    assert held == [15, 13, 11, 9, 7, 5, 4, 3, 2, 1]

def test_hope_and_promise():
    "Hope is quicker where answers are short, and computes twice where they are not; with memory for all they are one"
    for say, worse in (5, False), (20, True):
        asks = [(0, 5, 20, say)] * 24
        sure, hope = (Run(p, asks, 24, 8) for p in (NoEvict(), MaxUtilization()))
        assert sure.preempted == 0 and len(hope.steps) < len(sure.steps)
        assert (hope.preempted > 5) == worse == (hope.spent[-1] > sure.spent[-1])
        sure, hope = (Run(p, asks, 999, 8) for p in (NoEvict(), MaxUtilization()))
        assert sure.spent == hope.spent and hope.preempted == 0

def test_max_utilization_preempts_where_no_evict_waits():
    "Two of 16 tokens, and five blocks of four: one waits for the other, or joins at once and is thrown out"
    asks = [(0, 4, 12, 12), (0, 4, 12, 12)]
    sure, hope = (Run(p, asks, 5) for p in (NoEvict(), MaxUtilization()))
    assert [len(plan.admitted) for plan in sure.steps if plan.admitted] == [1, 1] and sure.preempted == 0
    assert len(hope.steps[0].admitted) == 2 and hope.preempted == 1 and hope.spent[-1] > sure.spent[-1]

def test_a_promise_leaves_the_cache_alone():
    "Three strangers' worst cases are promised, not taken: a beginning that was computed is still found"
    start = [7] * 16
    asks = [(0, start + [1], 4, 2), *[(3, 3, 24, 5)] * 3, (12, start + [2], 4, 2)]
    bought, promised = (Run(p, asks, 22, caching=True).s.blocks.num_hit for p in (Orca(), NoEvict()))
    assert bought < promised == 16
    assert Run(Orca(), asks, 60, caching=True).s.blocks.num_hit == 16  # a large pool has room for both

def test_blocks_to_come():
    s = Scheduler(EngineConfig(block_size=4), PrefixBlocks(9, 4))
    r = Request('r', [0] * 10, SamplingParams(), 14)
    assert blocks_to_come(s, r) == 3                       # six in all, three for the prompt
    s.blocks.grow(r, 13); r.output_ids = [1, 2, 3]; r.num_computed_tokens = 12
    assert blocks_to_come(s, r) == 2
    s.blocks.grow(r, 24)
    assert blocks_to_come(s, r) == 0

def test_a_watermark_keeps_people_in():
    asks = [(2 * i, 4, 10, 10) for i in range(12)]
    kept, last = (Run(p, asks, 21, 8, watermark=.1) for p in (VLLM0(), Nano()))
    assert kept.preempted < last.preempted and kept.spent[-1] < last.spent[-1]
    kept, last = (Run(p, asks, 60, 8, watermark=.1) for p in (VLLM0(), Nano()))
    assert kept.spent == last.spent and not last.preempted

def test_nano_counts_what_the_cache_has():
    "Three of 27 tokens, 24 of them in the cache: nine are to be computed, but beside six 27 don't fit a step of 32"
    start = [7] * 24
    asks = [(0, start + [1, 1, 1], 2, 2), *[(5, start + [i] * 3, 2, 2) for i in (2, 3, 4)]]
    for make, want in (VLLM0, [1, 3]), (Nano, [1, 2, 1]):
        run = Run(make(), asks, caching=True)
        assert [len(plan.admitted) for plan in run.steps if plan.admitted] == want
        assert run.s.blocks.num_hit == 72

def test_prompts_first_and_decodes_first():
    "A long prompt comes while four speak: how long they stop. Where nobody speaks, small pieces only cost steps"
    for seed in range(30):
        rng = random.Random(seed)
        long = rng.randint(16, 32)
        asks = [*[(0, rng.randint(1, 6), 30, 30) for _ in range(4)], (rng.randint(3, 9), long, 4, 4)]
        stalled, free = (Run(p, asks, slots=6) for p in (VLLM0(), Sarathi(8)))
        assert stalled.gap(0) >= long and free.gap() <= 8
        assert stalled.wait(4) < free.wait(4)                                          # the newcomer pays
        asks = [(0, long, 1, 1)] * 4
        assert len(Run(Sarathi(8), asks).steps) > len(Run(VLLM0(), asks).steps)
        asks = [(0, 1, 9, 9)] * 4                                                      # nothing to cut
        assert Run(Sarathi(8), asks).spent == Run(VLLM0(), asks).spent

def test_sarathi_takes_no_more_than_the_engine_has():
    assert [plan.num_tokens for plan in Run(Sarathi(512), [(0, 20, 1, 1)], budget=8).steps] == [8, 8, 4]

# --- TGI

def test_tgi_decodes_after_each_batch_of_prompts():
    "Whoever speaks is not stopped twice in a row"
    num = 0
    for w in lives(lambda: watched(lambda: TGI(0., 0)), 'recompute', range(40), cls=Calm):
        steps = w.s.policy.steps
        for (plan, *_), (_, got, spoke, ran) in zip(steps, steps[1:]):
            if not (plan.admitted and spoke & ran): continue
            assert spoke.issuperset(got)
            num += 1
    assert num > 50

def test_tgi_interrupts_when_enough_wait():
    "Four run; at a ratio of one half two must wait"
    asks = [*[(0, 2, 30, 30)] * 4, (5, 3, 2, 2), (9, 3, 2, 2)]
    run = Run(TGI(.5, 99), asks, slots=8)
    assert [plan.step for plan in run.steps if plan.admitted] == [0, 9]
    assert [len(plan.scheduled) for plan in run.steps[8:11]] == [4, 2, 6]      # all speak; two read; all speak
    run = Run(TGI(.25, 99), asks, slots=8)
    assert [plan.step for plan in run.steps if plan.admitted] == [0, 5, 9]

@pytest.mark.parametrize('patience', [0, 2, 3, 7, 12])
def test_tgi_interrupts_when_they_have_waited_enough(patience):
    "A batch of prompts counts as one step without a newcomer, and one step of decodes is always between"
    run = Run(TGI(99., patience), [*[(0, 2, 40, 40)] * 4, (1, 3, 2, 2)], slots=8)
    assert [plan.step for plan in run.steps if plan.admitted] == [0, max(patience, 2)]

def test_tgi_asks_nobody_when_nobody_speaks():
    runs = [Run(TGI(*x), [(0, 6, 8, 8)] * 4) for x in ((0., 0), (.3, 20), (9., 99))]
    assert runs[0].spent == runs[1].spent == runs[2].spent

def test_tgi_trades_interruptions_for_gaps():
    asks = [(0, 6, 30, 30)] * 2 + [(3 + 2 * i, 20, 2, 2) for i in range(8)]
    eager, patient = (Run(TGI(x, 12), asks, slots=12, budget=64) for x in (0., 4.))
    count = lambda run: sum(bool(plan.admitted) for plan in run.steps)
    assert count(patient) < count(eager) and patient.gap() > eager.gap()

# --- SGLang

def families(rng, n, common):
    "Prompts of a few families, in any order"
    return [(0, [rng.randint(1, 3)] * common + [10 + i] * rng.randint(1, 3), 4, rng.randint(1, 4)) for i in range(n)]

def test_sglang_finds_more_than_first_come():
    more = 0
    for seed in range(40):
        asks = families(random.Random(seed), 12, 24)
        first, prefix = (Run(p, asks, 10, 2, caching=True) for p in (VLLM0(), SGLang()))
        assert prefix.s.blocks.num_hit >= first.s.blocks.num_hit, f'seed {seed}'
        more += prefix.s.blocks.num_hit > first.s.blocks.num_hit
    assert more > 30

def test_without_common_beginnings_it_is_first_come():
    for seed in range(20):
        asks = families(random.Random(seed), 12, 0)
        assert Run(SGLang(), asks, 10, 2, caching=True).joined == list(range(12))

def waiting_for(lens, others=0):
    "A scheduler whose cache holds 40 tokens; requests that share so many of them wait, then others that share none"
    cfg = EngineConfig(max_num_seqs=1, max_num_batched_tokens=64, block_size=4)
    s = Scheduler(cfg, PrefixBlocks(40, 4), SGLang())
    s.add(Request('first', list(range(40)), SamplingParams(), 2))
    for _ in range(2): s.update(plan := s.schedule(), StepOutput({x.request.request_id: [1] for x in plan.scheduled}))
    assert not s
    for i, n in enumerate([*lens, *[0] * others], 1):
        s.add(Request(f'r{i}', [*range(n), *[99] * (44 - n)], SamplingParams(), 2, seq=i))
    return s

def order(s):
    s.schedule()
    joined = [r.request_id for r in s.running]
    return joined + [r.request_id for r in sorted(s.waiting, key=lambda r: (s.waiting.live[r.request_id][0], r.seq))]

def test_longest_prefix_first():
    "A block is found whole or not at all, and of equals the older one goes first"
    assert order(waiting_for([0, 8, 40, 7, 16, 9])) == ['r3', 'r5', 'r2', 'r6', 'r4', 'r1']

def test_a_long_queue_is_first_come():
    n = MOST_RANKED - 2
    assert order(waiting_for([0, 40], n))[:2] == ['r2', 'r1']
    assert order(waiting_for([0, 40], n + 1))[:2] == ['r1', 'r2']

def test_nobody_is_looked_up_in_vain(monkeypatch):
    "Once for each that waits; then only whom the scheduler itself asks about, until queue or cache change"
    asked = []
    find = PrefixBlocks.find
    monkeypatch.setattr(PrefixBlocks, 'find', lambda self, r: asked.append(r.request_id) or find(self, r))
    def looked_up(s):
        asked.clear(); plan = s.schedule()
        s.update(plan, StepOutput({x.request.request_id: [1] for x in plan.scheduled if x.rows}))
        return len(asked)
    s = Scheduler(EngineConfig(max_num_seqs=2, block_size=16), PrefixBlocks(12, 16), SGLang())
    for i in range(50): s.add(Request(f'r{i}', [i] * 3, SamplingParams(), 150, seq=i))
    assert looked_up(s) == 50 + 2                       # all, the one that joins, and the one that can't
    assert len(s.running) == 1                          # ten blocks each: there is no room for two
    assert looked_up(s) == 49 + 1                       # a block was taken: it may have had a name
    assert [looked_up(s) for _ in range(10)] == [1] * 10
    s.add(Request('new', [7] * 3, SamplingParams(), 150, seq=99))
    assert looked_up(s) == 50 + 1
    for i in range(100): s.add(Request(f'more{i}', [7] * 3, SamplingParams(), 150, seq=100 + i))
    assert looked_up(s) == 1                            # too many

def test_a_long_queue_is_not_lined_up_again_and_again(monkeypatch):
    "Those who can't be ranked stand as they came"
    times, reorder = [], WaitingQueue.reorder
    monkeypatch.setattr(WaitingQueue, 'reorder', lambda self: times.append(len(self)) or reorder(self))
    s = Scheduler(EngineConfig(max_num_seqs=2, block_size=16), PrefixBlocks(99, 16), SGLang())
    for i in range(MOST_RANKED + 50): s.add(Request(f'r{i}', [i] * 3, SamplingParams(), 2, seq=i))
    while s:
        plan = s.schedule()
        s.update(plan, StepOutput({x.request.request_id: [1] for x in plan.scheduled if x.rows}))
    assert times and max(times) <= MOST_RANKED

def test_the_ratio_falls_and_rises():
    "By an equal part of the way with each step in which nobody joins; by what was said after a retract; and at the end"
    p, seen = SGLang(.8, .2, 6), []
    update = p.on_update
    def note(s, plan, out):
        before = p.ratio
        update(s, plan, out)
        seen.append((plan, before, p.ratio, [(len(r.output_ids), r.max_tokens) for r in s.running], bool(s)))
    p.on_update = note
    run = Run(p, [(i, 3, 200, 120) for i in range(4)], 100)
    assert run.preempted and run.preempted == sum(len(plan.preempted) for plan, *_ in seen)
    for plan, before, after, said, more in seen:
        if not more: assert after == .8
        elif plan.preempted:
            want = (sum(n for n, _ in said) + 20 * len(said)) / (sum(m for _, m in said) + 1)
            assert after == min(1, want) > before
        elif plan.admitted: assert after == before
        else: assert after == pytest.approx(max(.2, before - .1))
    assert min(after for *_, after, _, _ in seen) == pytest.approx(.2)

def test_the_dial():
    "What is kept for those who run: all, some, nothing. Less is quicker where answers are short, else work done twice"
    sure, some, none = (Run(SGLang(x, x), [(0, 5, 20, 5)] * 24, 24, 8) for x in (1, .5, 0))
    assert len(sure.steps) > len(some.steps) > len(none.steps) and sure.spent[-1] == none.spent[-1]
    sure, some, none = (Run(SGLang(x, x), [(0, 5, 20, 20)] * 24, 24, 8) for x in (1, .3, 0))
    assert sure.preempted == 0 < some.preempted < none.preempted and sure.spent[-1] < some.spent[-1] < none.spent[-1]

# --- on the tiny model

@both
@each(SCHEMES)
def test_says_what_the_oracle_says(engine, tiny, make, mode):
    "On a pool that is short, with prompts that come while others speak"
    llm = engine(policy=make(), num_blocks=12, preemption=mode, watermark=0., max_num_seqs=3)
    want, outs = {}, {}
    for i in range(8):
        want[llm.add(P[i % 4], sp(16))] = solo(tiny, P[i % 4], sp(16))
        for _ in range(2): outs |= {o.request_id: o for o in llm.step()}
    while llm.has_unfinished: outs |= {o.request_id: o for o in llm.step()}
    assert {i: outs[i].outputs[0].token_ids for i in want} == want
    if make in SURE.values(): assert llm.metrics['num_preemptions'] == 0
    quiet(llm)

@each(WHOLE)
def test_too_long_is_refused_at_the_door(engine, tiny, make):
    llm = engine(policy=make(), max_num_batched_tokens=16)
    with pytest.raises(CapacityError, match='prompt of 20 tokens: .* one step, of 16 tokens .*max_num_batched_tokens'):
        llm.add(P[2], sp())
    assert not llm.has_unfinished
    assert ids(llm.generate([P[1], P[3]], sp(), use_tqdm=False)) == [solo(tiny, p, sp()) for p in (P[1], P[3])]

@each({k: v for k, v in SCHEMES.items() if k not in (*WHOLE, 'tgi patient')})
def test_others_cut_it(engine, tiny, make):
    llm = engine(policy=make(), max_num_batched_tokens=16)
    assert ids(llm.generate(P, sp(), use_tqdm=False)) == [solo(tiny, p, sp()) for p in P]

@each(WHOLE)
def test_who_outgrew_a_step_comes_back_in_pieces(engine, tiny, make):
    "Twenty tokens of prompt and ten said, preempted by force: more than a step of 24"
    llm = engine(policy=make(), max_num_batched_tokens=24, prefix_caching=False, force_preempt={'r0': 10})
    out, = llm.generate([P[2]], sp(20), use_tqdm=False)
    assert out.outputs[0].token_ids == solo(tiny, P[2], sp(20)) and llm.metrics['num_preemptions'] == 1
    assert [n for rec in llm.trace for _, n, *_ in rec.scheduled if 1 < n] == [20, 24, 6]

@pytest.mark.parametrize('make,name', [
    (lambda: TGI(-1), 'waiting_served_ratio'), (lambda: TGI(.3, 1.5), 'max_waiting_tokens'),
    (lambda: Sarathi(0), 'chunk_size'), (lambda: SGLang(1.5), 'ratio'), (lambda: SGLang(.5, -1), 'least'),
    (lambda: SGLang(num_steps=0), 'num_steps'), (lambda: NoEvict('yes'), 'chunked'),
    (lambda: MaxUtilization(2), 'chunked')])
def test_what_cannot_be_meant(make, name):
    with pytest.raises(ParamError, match=name): make()

def test_sglang_ranks_anew_when_guesses_fill_a_block():
    "Six tokens of a block of eight: a guess that fails fills nothing, two that hold fill it"
    s = Scheduler(EngineConfig(num_blocks=9, block_size=8, max_num_batched_tokens=16), PrefixBlocks(9, 8), SGLang())
    r = Request('a', [1] * 5, SamplingParams(), 9)
    s.add(r)
    s.update(s.schedule(0.), StepOutput({'a': [7]}), 1.)
    for draft, stale in (((7,), False), ((7, 7, 7), True)):
        s.policy.stale = False
        plan = Plan(1, 1., scheduled=[Scheduled(r, 5, 6, draft, 1 + len(draft))])
        s.policy.on_update(s, plan, StepOutput({'a': [7] * len(draft)}))
        assert s.policy.stale == stale, draft

@pytest.mark.parametrize('policy', sorted(POLICIES))
def test_who_fits_alone_joins_also_with_the_worst_case_reserved(policy):
    "What is taken at once is not asked for a second time"
    with LLM(tiny_lm('llama'), block_size=16, num_blocks=4, policy=policy, reserve_max=True) as llm:
        out = llm.generate([list(range(45))], max_tokens=10, temperature=0, ignore_eos=True, use_tqdm=False)[0]
    assert len(out.outputs[0].token_ids) == 10
