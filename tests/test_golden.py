"""Golden plans: 660 random crowds before the scheduler alone, each planned and explained today as it was long ago

golden_plans.json holds two digests for each crowd. The first is of its plans: for each step who computes how many
tokens in which blocks and who samples, who joined, lost its memory or ran out of time, padding, swaps, copies, what
was left of the budget, when to look again, and who ended; at the end the books of each request. The second is of what
was said: every decision, in English. The digests were made before the scheduler was rebuilt around turns, by a
scheduler that served the batch and then let the queue in: what they hold, two different schedulers agree upon.

python tests/test_golden.py 17     prints crowd 17, a line for each step: compare it with an older checkout
python tests/test_golden.py write  makes the digests anew, for a change of plans that is meant"""
import hashlib, json, random, sys
from pathlib import Path
import pytest
from cbatch.core import Code, Failure, Request, StepOutput
from cbatch.params import EngineConfig, SamplingParams
from cbatch.policies import Dynamic, Static
from cbatch.preemption import VICTIMS, Preempt, Swap
from cbatch.prefix_caching import PrefixBlocks
from cbatch.scheduler import Policy, Scheduler

FILE, NUM_CROWDS, BATCH = Path(__file__).parent/'golden_plans.json', 660, 110
POLICIES = Policy, Policy, Policy, Static, lambda: Static(False), lambda: Dynamic(3.)
BROKEN = Failure(Code.STEP, 'broken')

def draw_scheduler(rng, seed):
    "Policy and preemption by the seed, all else by chance"
    bs = rng.choice([1, 2, 4, 8])
    cfg = EngineConfig(block_size=bs, max_num_seqs=rng.randint(1, 9), max_num_batched_tokens=rng.randint(3, 40),
                       watermark=rng.choice([0., .01, .1]), reserve_max=rng.random() < .08)
    num_blocks = rng.randint(9, rng.choice([10, 11, 13, 30])) * 8 // bs if rng.random() < .9 else 200
    blocks = PrefixBlocks(num_blocks, bs, rng.random() < .7)
    victim, force = rng.choice(['youngest'] * 3 + sorted(VICTIMS)), rng.choice([None] * 5 + [3, 7])
    swap = seed % 4 >= 2
    preemptor = Swap(rng.choice([2, 20, 60]), victim, force) if swap else Preempt(victim, force)
    return Scheduler(cfg, blocks, POLICIES[seed % 6](), preemptor)

def draw_person(rng):
    "When somebody comes, and what for; the last number says how the prompt begins"
    step, prompt_len, max_tokens = rng.randint(0, 40), rng.randint(1, 40), rng.randint(1, 30)
    n = rng.choice([1, 1, 1, 2, 3])
    deadline, salt = rng.choice([None] * 9 + [5, 25]), rng.choice([None, None, 'a'])
    return step, prompt_len, max_tokens, n, deadline, salt, rng.random() < .9, rng.randint(0, 3)

class Crowd:
    "Fourteen people, from the first arrival to the last end; `plans` and `said` have an entry for each step"
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.s = draw_scheduler(self.rng, seed)
        self.people = sorted((draw_person(self.rng) for _ in range(14)), key=lambda p: p[:2])
        self.everybody, self.plans, self.said, self.t = [], [], [], 0

    def run(self):
        while self.s or self.people:
            while self.people and self.people[0][0] <= self.t: self.arrive(*self.people.pop(0))
            self.leave()
            self.step()
            assert self.t < 6000, 'never ends'
        assert self.s.blocks.num_free_blocks == self.s.blocks.num_blocks
        self.plans.append([books(r) for r in self.everybody])
        return self

    def arrive(self, _, prompt_len, max_tokens, n, deadline, salt, use_cache, start):
        if not self.s.blocks.fits(prompt_len + max_tokens): return
        ids, first = [start] * min(prompt_len, 6) + list(range(max(0, prompt_len - 6))), None
        until = None if deadline is None else self.t + float(deadline)
        for i in range(n):
            r = Request(f'r{len(self.everybody)}', list(ids), SamplingParams(), max_tokens, float(self.t),
                        len(self.everybody), deadline=until, cache_salt=salt, use_cache=use_cache, sample_index=i,
                        fork_of=first)
            first = first or r
            self.everybody.append(r)
            self.s.add(r)

    def leave(self):
        "Now and then somebody who runs goes away, or somebody who waits"
        rng, s = self.rng, self.s
        if rng.random() < .03 and s.running: s.abort(rng.choice(s.running), float(self.t))
        if rng.random() < .02 and len(s.waiting):
            s.abort(rng.choice(sorted(s.waiting, key=lambda r: r.seq)), float(self.t))

    def step(self):
        plan = self.s.schedule(float(self.t))
        self.t += 1
        self.plans.append([*planned(plan), self.s.next_wakeup])
        self.said.append([(d.request_id, str(d)) for d in plan.decisions])
        if not plan: return
        done = self.fail(plan) if self.rng.random() < .02 else self.succeed(plan)
        self.plans[-1].append(sorted((r.request_id, r.finish_reason) for r in done))
        self.s.check()

    def fail(self, plan):
        "The step fails: before or after blocks have moved"
        plan = self.s.undo(plan, self.rng.random() < .5)
        errors = {x.request.request_id: BROKEN for x in plan.scheduled}
        return self.s.update(plan, StepOutput(errors=errors), float(self.t))

    def succeed(self, plan):
        "Any tokens will do; a row may break"
        names = [x.request.request_id for x in plan.scheduled]
        errors = {i: BROKEN for i in names if self.rng.random() < .003}
        sampled = {i: [(k * 7 + self.t) % 11] for k, (i, x) in enumerate(zip(names, plan.scheduled))
                   if x.rows and i not in errors}
        return self.s.update(plan, StepOutput(sampled, errors), float(self.t))

def planned(plan):
    "A plan in plain data"
    shares = [(x.request.request_id, x.num_tokens, x.rows, list(x.request.block_table)) for x in plan.scheduled]
    groups = [[r.request_id for r in rs] for rs in (plan.admitted, plan.preempted, plan.expired)]
    padding = [(p.num_tokens, p.context_len) for p in plan.padding]
    return [shares, *groups, padding, list(plan.swap_out), list(plan.swap_in), list(plan.copies), plan.left]

def books(r):
    "What is known of a request that has ended"
    return (r.request_id, r.finish_reason, r.num_preemptions, r.num_recomputed_tokens, r.num_cached_tokens,
            r.scheduled_at, r.finished_at, len(r.output_ids))

def digest(x): return hashlib.blake2b(json.dumps(x).encode(), digest_size=6).hexdigest()

def digests(seed):
    crowd = Crowd(seed).run()
    return [digest(crowd.plans), digest(crowd.said)]

def golden(): return json.loads(FILE.read_text())

@pytest.mark.parametrize('start', range(0, NUM_CROWDS, BATCH))
def test_plans_are_what_they_were(start):
    for seed, (plans, said) in enumerate(golden()[start:start + BATCH], start):
        got = digests(seed)
        how = f'crowd {seed} is not {{}} as it was: python tests/test_golden.py {seed} prints it'
        assert got[0] == plans, how.format('planned')
        assert got[1] == said, how.format('explained')

def test_all_crowds_differ(): assert len({p for p, _ in golden()}) == NUM_CROWDS == len(golden())

def show(seed):
    crowd = Crowd(seed).run()
    for i, (plan, said) in enumerate(zip(crowd.plans, crowd.said)):
        print(i, json.dumps(plan), *(f"{r or ''}: {what}" for r, what in said), sep='\n  ')
    print(*crowd.plans[-1], sep='\n')

def write(): FILE.write_text('[\n' + ',\n'.join(json.dumps(digests(i)) for i in range(NUM_CROWDS)) + '\n]\n')

if __name__ == '__main__':
    if sys.argv[1:] == ['write']: write()
    else: show(int(sys.argv[1]))
