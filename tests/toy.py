"""The toy model in place of tensors, and the scheduler alone with it.

Each slot remembers the token that was written to it, and the next token is a hash of what is read through the block
table: a wrong table, a stale block or an early reuse becomes a wrong token, or an assertion. INVARIANTS.md says what
A1, S3 and the others are."""
import random
from cbatch.core import Request
from cbatch.params import EngineConfig, SamplingParams
from cbatch.kv_blocks import BlockManager
from cbatch.catalog import get_policy
from cbatch.guesses import Guesses
from cbatch.policies import Dynamic, Static
from cbatch.proof import ToyMemory, steps_left, toy_answer as alone
from cbatch.scheduler import Scheduler

class Memory(ToyMemory):
    "The package's, stricter: under a policy that pauses nobody, a step swaps out or in, not both"
    def move(self, plan):
        assert not (plan.swap_out and plan.swap_in), 'a host block could be overwritten before it is read'
        self.copy(plan)

def draw_policy(rng):
    return rng.choice(['vllm', 'vllm', Static(True), Static(False), Dynamic(2, pad=rng.random() < .5)])

class Crowd:
    "Requests that come, go and are aborted at random, between two checks"
    def __init__(self, seed, policy=None, guesser=None):
        rng = self.rng = random.Random(seed)
        bs, self.now, self.all, self.said = rng.choice([1, 2, 3, 4]), 0., [], {}
        self.cfg = EngineConfig(block_size=bs, num_blocks=rng.randint(2, 12), max_num_seqs=rng.randint(1, 6),
                                max_num_batched_tokens=rng.randint(1, 12))
        policy = policy or draw_policy(rng)
        self.s = Scheduler(self.cfg, BlockManager(self.cfg.num_blocks, bs), get_policy(policy))
        # arrivals may be told long after they happened; then nobody is bound by the order of `add`
        self.late = rng.choice([0, 0, 9])
        self.memory, self.first_come = Memory(self.s.blocks.pool, bs), self.s.policy.name == 'vllm' and not self.late
        self.preempted = self.bound = 0
        if guesser: self.s.guesses = Guesses(guesser, seed % 7 + 1, 'pays' if seed % 3 else 'always', 13)

    @property
    def live(self): return [r for r in self.all if not r.finish_reason]

    def add(self):
        rng, room = self.rng, self.cfg.num_blocks * self.cfg.block_size
        n = rng.randint(1, min(rng.choice([3, 10]), room - 1))
        r = Request(f'r{len(self.all)}', [rng.randrange(13) for _ in range(n)], SamplingParams(),
                    rng.randint(1, min(16, room - n)), self.now - rng.random() * self.late, len(self.all),
                    stop_ids=frozenset({0}))
        if self.s.policy.refuses(self.s, r): return
        self.all.append(r); self.said[r] = []; self.s.add(r)
        self.bound = steps_left(self.live, self.cfg.max_num_batched_tokens)

    def abort(self):
        r = self.rng.choice(self.all)          # who has ended may be aborted again: nothing happens
        before = r.finish_reason
        self.s.abort(r, self.now)
        assert r.finish_reason == (before or 'abort')

    def step(self):
        s, old, was = self.s, self.live[:1], {r: r.num_preemptions for r in self.live}
        before = [(r.num_computed_tokens, len(r.output_ids)) for r in old]
        plan = s.schedule(self.now)
        assert plan.num_tokens + plan.num_padding <= self.cfg.max_num_batched_tokens   # S3
        self.preempted += len(plan.preempted)
        if not plan:
            assert not self.live or s.next_wakeup > self.now, 'idle for no reason'     # S8
            return False
        out = self.memory.execute(plan)
        for x in plan.scheduled:
            if x.request.request_id in out.sampled: self.said[x.request] += out.sampled[x.request.request_id]
        done = s.update(plan, out, self.now)
        assert all(r.output_ids == self.said[r] for r in self.all), 'a token was said twice, or lost'      # O1
        assert all(r.output_ids == alone(r)[:len(r.output_ids)] for r in was), 'not what it says alone'    # O2
        assert all(r.finish_reason and not r.block_table for r in done)
        if self.first_come:
            for r, b in zip(old, before):
                moved = (r.num_computed_tokens, len(r.output_ids)) > b and r.num_preemptions == was[r]
                assert r in done or moved, 'the oldest stood still'            # S5
            order = [r.seq for r in [*s.running, *sorted(s.waiting, key=lambda r: r.seq)]]
            assert order == sorted(order), 'somebody was overtaken'            # S4
        return True

    def run(self):
        "A life of 40 events, then until the last has left"
        for _ in range(40):
            x = self.rng.random()
            if x < .3 or not self.all: self.add()
            elif x < .38: self.abort()
            else: self.step()
            self.now += 1
            self.s.check()
        steps = 0
        while self.live:
            steps += self.step(); self.now += 1; self.s.check()
            assert steps <= self.bound if self.first_come else self.now < 2000, 'starved'      # S6
        assert self.s.blocks.num_free_blocks == self.cfg.num_blocks and not self.s
        for r in self.all:
            if r.finish_reason != 'abort': assert r.output_ids == alone(r)
        return self
