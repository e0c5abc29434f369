"""The memory of an engine under fire: the real scheduler, allocator, prefix cache and preemptors on the toy model.

INVARIANTS.md says what A1, S3 and the others are."""
import random
from cbatch.core import Request, Status
from cbatch.params import EngineConfig, SamplingParams, cdiv
from cbatch.catalog import get_policy
from cbatch.guesses import Guesses
from cbatch.preemption import VICTIMS, get_preemptor
from cbatch.prefix_caching import PrefixBlocks, block_hash, root
from cbatch.scheduler import Scheduler
from cbatch.proof import steps_left, toy_answer as alone
from toy import Memory

class World:
    "A scheduler with its memory, driven from outside; `step` checks everything that must hold"
    def __init__(self, num_blocks=8, block_size=2, max_num_seqs=4, budget=8, policy='vllm', guesser=None, most=4,
                 **cfg):
        own = dict(block_size=block_size, num_blocks=num_blocks, max_num_seqs=max_num_seqs,
                   max_num_batched_tokens=budget, watermark=0.)
        self.cfg = EngineConfig(**own | cfg)
        blocks = PrefixBlocks(num_blocks, block_size, self.cfg.prefix_caching)
        host = num_blocks if self.cfg.swap_mb is None else int(self.cfg.swap_mb)       # here: blocks
        self.s = Scheduler(self.cfg, blocks, get_policy(policy), get_preemptor(self.cfg, host))
        self.pool, self.memory = blocks.pool, Memory(blocks.pool, block_size)
        self.now, self.all, self.said, self.ends, self.content = 0., [], {}, {}, {}
        self.steps = self.preempted = self.hits = self.swapped = self.forked = 0
        self.pushed = False     # somebody was preempted without need
        self.failed = False     # a step failed: who had got blocks for it still has them
        if guesser: self.s.guesses = Guesses(guesser, most, self.cfg.guess_when, 13)

    @property
    def live(self): return [r for r in self.all if r.status is not Status.FINISHED]
    @property
    def room(self): return self.cfg.num_blocks * self.cfg.block_size

    def add(self, prompt, max_tokens, n=1, deadline=None, salt=None, use_cache=True):
        "Requests as the engine would make them; those that can't fit are refused there"
        prompt = prompt[:self.room - 1]; max_tokens = min(max_tokens, self.room - len(prompt))
        first = None
        for i in range(n):
            r = Request(f'r{len(self.all)}', list(prompt), SamplingParams(), max_tokens,
                        arrival=self.now, seq=len(self.all), stop_ids=frozenset({0}),
                        deadline=None if deadline is None else self.now + deadline,
                        cache_salt=salt, use_cache=use_cache, sample_index=i, fork_of=first)
            first = first or r; self.forked += i > 0
            self.all.append(r); self.said[r], self.ends[r] = [], 0; self.s.add(r)

    def abort(self, i):
        if not self.all: return
        r = self.all[i % len(self.all)]; ended = r.status is Status.FINISHED
        self.s.abort(r, self.now)
        assert ended or (r.finish_reason == 'abort' and not r.block_table and not r.host_table)
        self.ends[r] += not ended

    def preempt(self, i):
        "Without need, between two steps: at the next"
        if not self.s.running: return
        r = self.s.running[i % len(self.s.running)]; self.pushed = True
        self.s.preemptor.force = {r.request_id: self.s.num_steps}

    def step(self, fails=False):
        "One step, or one that fails before it does anything; False if there was nothing to do"
        s, oldest, had = self.s, self.live[:1], {r: r.num_preemptions for r in self.live}
        before = [(r.num_computed_tokens, len(r.output_ids), r.status) for r in oldest]
        plan = s.schedule(self.now); self.now += 1
        assert plan.num_tokens + plan.num_padding <= self.cfg.max_num_batched_tokens               # S3
        assert len(s.running) <= self.cfg.max_num_seqs
        assert len({x.request.request_id for x in plan.scheduled}) == len(plan.scheduled)
        self.preempted += len(plan.preempted); self.swapped += len(plan.swap_out)
        self.hits += sum(r.num_computed_tokens > 0 and not plan.swap_in for r in plan.admitted)
        if not plan:
            waits = s.next_wakeup is not None and s.next_wakeup > self.now - 1
            assert not self.live or waits, 'idle for no reason'                                    # S8
            self.check()
            return False
        if fails:
            self.failed = True
            # who has to be moved goes back to the queue, past others that joined with him
            self.pushed |= bool(plan.swap_in or plan.copies)
            s.undo(plan, moved=False); self.ended(plan.expired); self.check()
            return True
        out = self.memory.execute(plan)
        for x in plan.scheduled:
            if x.request.request_id in out.sampled: self.said[x.request] += out.sampled[x.request.request_id]
        self.ended(s.update(plan, out, self.now)); self.steps += 1
        self.first_come(oldest, before, had, plan); self.check()
        return True

    def ended(self, requests):
        for r in requests: self.ends[r] += 1; assert r.finish_reason and not r.block_table and not r.host_table

    def first_come(self, oldest, before, had, plan):
        "The default policy's own promises"
        if self.s.policy.name != 'vllm' or self.s.preemptor.force: return
        for r, (computed, said, status) in zip(oldest, before):
            # younger ones may hold what it needs
            if status is not Status.RUNNING and (self.pushed or self.s.preemptor.why != 'youngest'): continue
            moved = r.status is Status.FINISHED or r.num_computed_tokens > computed or len(r.output_ids) > said
            assert moved and r.num_preemptions == had[r], f'the oldest stood still: {r.request_id}'    # S5
        if self.s.preemptor.why == 'youngest' and not self.pushed:
            order = [r.seq for r in [*self.s.running, *sorted(self.s.waiting, key=lambda r: r.seq)]]
            assert order == sorted(order), 'somebody was overtaken'                                    # S4

    def check(self):
        self.s.check()                                                                                 # A1 A2 A3 S1 S2
        ended = {r: r.status is Status.FINISHED for r in self.ends}
        assert self.ends == ended, 'an end was missed, or told twice'                                  # O3
        for r in self.all:
            assert r.output_ids == self.said[r], 'a token was said twice, or lost'                     # O1
            assert r.output_ids == self.answer(r)[:len(r.output_ids)], 'not what it says alone'        # O2
        self.names(); self.host(); self.tables()

    def answer(self, r):
        key = tuple(r.prompt_ids), r.max_tokens, r.sample_index
        if key not in self.content: self.content[key] = alone(r)
        return self.content[key]

    def names(self):
        "A block that can be found holds what its name says; a shared one is full and computed for each of its holders"
        p, bs = self.pool, self.cfg.block_size
        for r in self.s.running:
            for i, b in enumerate(r.block_table):
                full = (i + 1) * bs <= r.num_computed_tokens
                assert full or p.refs[b] == 1, f'block {b} is shared and not full'                     # A4
        chains = {}
        for r in self.all:
            name = root(r.cache_salt); ids = r.prompt_ids + r.output_ids
            for i in range(len(ids) // bs):
                part = ids[i * bs:(i + 1) * bs]
                name = block_hash(name, part)
                chains[name] = i, part
        for b, name in p.name_of.items():
            i, ids = chains[name]
            held = [self.memory.device.get(b * bs + k) for k in range(bs)]
            want = [(i * bs + k, t) for k, t in enumerate(ids)]
            assert held == want, f'block {b} is not what its name says'                                # A5
        for r in self.s.blocks.pending.values(): assert r.status is Status.RUNNING, 'a promise of one who does not run'

    def tables(self):
        "Nobody holds a block for tokens that he has not; nor, unless a step failed, for those not computed yet"
        if self.s.policy.name != 'vllm' or self.cfg.reserve_max: return
        for r in self.s.running:
            most = cdiv(r.num_tokens if self.failed else r.num_computed_tokens, self.cfg.block_size)
            assert len(r.block_table) <= most, f'{r.request_id} holds more than it needs'                  # S2

    def host(self):
        "The host's blocks are those of the swapped out, each once"
        h = getattr(self.s.preemptor, 'host', None)
        if h: h.check([r.host_table for r in self.live if r.host_table])

    def drain(self):
        "Everybody ends within the bound, answers are whole, and all memory is back"
        self.s.preemptor.force = None
        bound = steps_left(self.live, self.cfg.max_num_batched_tokens)                                 # S6
        limit = bound if self.s.policy.name == 'vllm' else 40 * bound + 400
        for _ in range(limit + 1):
            if not self.live: break
            self.step()
        assert not self.live, 'starved'
        assert not self.s and self.s.blocks.num_free_blocks == self.cfg.num_blocks and not self.s.blocks.pending
        for r in self.all: assert r.finish_reason in ('abort', 'error') or r.output_ids == self.answer(r)

def draw_world(rng, **more):
    "A random configuration"
    mode = rng.choice(['recompute', 'swap'])
    return World(rng.randint(2, 14), rng.choice([1, 2, 3, 4]), rng.randint(1, 6), rng.randint(1, 14),
                 rng.choice(['vllm'] * 4 + ['static', 'dynamic']), preemption=mode, victim=rng.choice(list(VICTIMS)),
                 swap_mb=rng.choice([None, 1, 4]), prefix_caching=rng.random() < .7,
                 reserve_max=rng.random() < .1, **more)

def live_on(w, rng, events=40):
    "Random events, then the end"
    for _ in range(events):
        x = rng.random()
        if x < .3 or not w.all:
            start = [1, 2, 3, 4, 5, 6][:rng.randint(0, 6)]       # beginnings that many have in common
            own = [rng.randrange(1, 13) for _ in range(rng.randint(1, 6))]
            w.add(start + own, rng.randint(1, 10), rng.choice([1, 1, 1, 2, 3]), rng.choice([None] * 9 + [3, 12]),
                  rng.choice([None, None, None, 'a']), rng.random() < .9)
        elif x < .36: w.abort(rng.randrange(99))
        elif x < .42: w.preempt(rng.randrange(99))
        else: w.step(fails=rng.random() < .03)
    w.drain()
    return w

def run_world(seed, **more):
    rng = random.Random(seed)
    return live_on(draw_world(rng, **more), rng)
