"A scheduler with a toy model in place of tensors: each slot remembers the token written to it, and the next token is a hash of what is read through the block table"
import hashlib, random
from cbatch.core import Request, StepOutput
from cbatch.params import cdiv, EngineConfig, SamplingParams
from cbatch.kv_blocks import BlockManager, slot_mapping
from cbatch.policies import Dynamic, Static, get_policy
from cbatch.scheduler import Scheduler

def next_token(tokens): return hashlib.blake2b(bytes(tokens), digest_size=1).digest()[0] % 13

def alone(prompt, max_tokens):
    "The answer of one request, token by token; 0 ends it"
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(next_token(ids))
        if not ids[-1]: break
    return ids[len(prompt):]

class ToyRunner:
    def __init__(self, block_size): self.block_size, self.slots = block_size, {}

    def execute(self, plan):
        todo = [(s, s.request, s.start) for s in plan.scheduled]
        for s, r, start in todo:
            where = slot_mapping(r.block_table, start, start + s.num_tokens, self.block_size)
            for pos, slot in enumerate(where, start): self.slots[slot] = pos, r.tokens(pos, pos + 1)[0]
        out = StepOutput()
        for s, r, start in todo:
            n = start + s.num_tokens
            read = [self.slots.get(x, (None, None)) for x in slot_mapping(r.block_table, 0, n, self.block_size)]
            assert read == list(enumerate(r.tokens(0, n))), f'{r.request_id} reads what is not its own'
            if s.rows: out.sampled[r.request_id] = [next_token([t for _, t in read])]
        return out

class Crowd:
    "Requests that come, go and are aborted at random, between two checks"
    def __init__(self, seed, policy=None):
        rng = self.rng = random.Random(seed)
        bs, self.now, self.all, self.said = rng.choice([1, 2, 3, 4]), 0., [], {}
        self.cfg = EngineConfig(block_size=bs, num_blocks=rng.randint(2, 12), max_num_seqs=rng.randint(1, 6),
                                max_num_batched_tokens=rng.randint(1, 12))
        policy = policy or rng.choice(['vllm', 'vllm', Static(True), Static(False), Dynamic(2, pad=rng.random() < .5)])
        self.s = Scheduler(self.cfg, BlockManager(self.cfg.num_blocks, bs), get_policy(policy))
        self.late = rng.choice([0, 0, 9])      # arrivals may be told long after they happened; then nobody is bound by the order of `add`
        self.runner, self.first_come, self.preempted, self.bound = ToyRunner(bs), self.s.policy.name == 'vllm' and not self.late, 0, 0

    @property
    def live(self): return [r for r in self.all if not r.finish_reason]

    def add(self):
        rng, room = self.rng, self.cfg.num_blocks * self.cfg.block_size
        n = rng.randint(1, min(rng.choice([3, 10]), room - 1))
        r = Request(f'r{len(self.all)}', [rng.randrange(13) for _ in range(n)], SamplingParams(), rng.randint(1, min(16, room - n)),
                    self.now - rng.random() * self.late, len(self.all), stop_ids=frozenset({0}))
        self.all.append(r); self.said[r] = []; self.s.add(r)
        self.bound = sum(cdiv(x.num_tokens + x.max_tokens, self.cfg.max_num_batched_tokens) + x.max_tokens + 1 for x in self.live)

    def abort(self):
        r = self.rng.choice(self.all)          # who has ended may be aborted again: nothing happens
        before = r.finish_reason
        self.s.abort(r, self.now)
        assert r.finish_reason == (before or 'abort')

    def step(self):
        s, old, was = self.s, self.live[:1], {r: r.num_preemptions for r in self.live}
        before = [(r.num_computed_tokens, len(r.output_ids)) for r in old]
        plan = s.schedule(self.now)
        assert plan.num_tokens + plan.num_padding <= self.cfg.max_num_batched_tokens
        self.preempted += len(plan.preempted)
        if not plan: assert not self.live or s.next_wakeup > self.now, 'idle for no reason'; return False
        out = self.runner.execute(plan)
        for x in plan.scheduled:
            if x.request.request_id in out.sampled: self.said[x.request] += out.sampled[x.request.request_id]
        done = s.update(plan, out, self.now)
        assert all(r.output_ids == self.said[r] for r in self.all), 'a token was said twice, or lost'
        assert all(r.output_ids == alone(r.prompt_ids, r.max_tokens)[:len(r.output_ids)] for r in was), 'not what it says alone'
        assert all(r.finish_reason and not r.block_table for r in done)
        if self.first_come:
            assert all(r in done or (r.num_computed_tokens, len(r.output_ids)) > b and r.num_preemptions == was[r] for r, b in zip(old, before)), 'the oldest stood still'
            order = [r.seq for r in [*s.running, *sorted(s.waiting, key=lambda r: r.seq)]]
            assert order == sorted(order), 'somebody was overtaken'
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
            assert steps <= self.bound if self.first_come else self.now < 2000, 'starved'
        assert self.s.blocks.num_free_blocks == self.cfg.num_blocks and not self.s
        for r in self.all:
            if r.finish_reason != 'abort': assert r.output_ids == alone(r.prompt_ids, r.max_tokens)
        return self
