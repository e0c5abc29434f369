"""Before every step: who computes, how many tokens each, who waits, and why."""

__all__ = ['Turns', 'Policy', 'Scheduler']

from collections.abc import Generator
from fastcore.basics import patch
from typing import Any
from .core import Asked, Decision, Failure, Kind, Padding, Plan, Reason, Request, Scheduled, Status, StepOutput, Why
from .kv_blocks import BlockManager, Found
from .params import EngineConfig
from .roster import Recompute, Roster

_ASKED, _ENDED, _BUDGET, _FULL, _MEMORY = map(Reason, (Why.ASKED, Why.ENDED, Why.BUDGET, Why.BATCH_FULL, Why.MEMORY))
_new = tuple.__new__     # twice as quick as the class itself
_RUNNING, _RUNS = Status.RUNNING, Kind.RUNS       # looked up once
_DECODE, _PREFILL, _CHUNK = Why.DECODE, Why.PREFILL, Why.CHUNK
Turns = Generator[Request, Reason|None, None]   # yields a request; is told None if it was served, else why not

class Policy:
    "First come, first served; prefill and decode mixed, prompts in chunks; blocks as they are needed: vLLM's rules"
    name = 'vllm'
    def key(self, r:Request)->Any: return r.age                       # who waits first in line

    def turns(self, s:'Scheduler', plan:Plan)->Turns:
        "Whose turn it is, one after the other"
        for r in list(s.running):                             # oldest first
            if r.status is _RUNNING: yield r                  # an older one may just have taken its blocks
        yield from s.line_of_waiting()

    def chunk(self, s:'Scheduler', r:Request, wanted:int, left:int)->int: return min(wanted, left)  # how many tokens
    def close(self, s:'Scheduler', now:float)->Reason|None: return None        # why nobody may join in this step
    def starts(self, r:Request, num_tokens:int)->bool: return num_tokens > 0   # may it join with so many?
    def reserve(self, s:'Scheduler', r:Request)->int: return 0              # tokens whose blocks it takes when it joins
    def padding(self, s:'Scheduler', plan:Plan)->list[Padding]: return []      # rows computed for nobody
    def wakeup(self, s:'Scheduler', now:float)->float|None: return None        # s, when time alone changes an answer
    def refuses(self, s:'Scheduler', r:Asked)->str|None: return None       # why it can never be served
    def on_update(self, s:'Scheduler', plan:Plan, out:StepOutput): pass        # learn from the step

class Scheduler(Roster):
    "Decides each step: `schedule` before it, `update` after it"
    def __init__(self,
        config:EngineConfig,
        blocks:BlockManager,            # who counts the memory
        policy:Policy|None=None,        # the rules; None: `Policy`
        preemptor:Recompute|None=None,  # who gives memory back; None: `Recompute`
    ):
        self.policy = policy or Policy()
        super().__init__(config, blocks, self.policy.key, preemptor or Recompute())
        self.num_steps, self.num_plans = 0, 0
        self.num_idle, self.num_refused, self.promised = 0, 0, 0     # of the plan that is being made
        self.closed:Reason|None|bool = False                         # its answer to `close`; False: not asked yet
        self.next_wakeup:float|None = None         # s, when time alone changes an answer
        self.watermark = int(config.watermark * blocks.num_blocks)

    def line_of_running(self)->Turns:
        "Those in the batch, oldest first; whoever has lost its memory meanwhile is passed over"
        running = Status.RUNNING
        for r in list(self.running):
            if r.status is running: yield r

    def line_of_waiting(self)->Turns:
        "Those in the queue, in order, until one can't join"
        while (r := self.waiting.peek()) and not (yield r): pass

@patch
def schedule(self:Scheduler,
    now:float=0., # s, on the engine's clock
)->Plan:          # empty when there is nothing to do now; then see `next_wakeup`
    "Decide the next step: ask the policy whose turn it is, and tell it how that went"
    plan, answer = self._begin(now), None
    turn_of, chunk, give = self.policy.turns(self, plan).send, self.policy.chunk, plan.scheduled.append
    block_size, turn, explain = self.blocks.block_size, self.num_plans, self.explain
    while True:
        try: r = turn_of(answer)
        except StopIteration: return self._conclude(plan)
        if r.status is not _RUNNING: answer = self._admit(r, plan)
        elif r.turn == turn: answer = _ASKED
        else:
            r.turn, start, total = turn, r.num_computed_tokens, len(r.prompt_ids) + len(r.output_ids)
            n = total - start
            if n > 1 or plan.left < 1: n = chunk(self, r, n, plan.left)       # of one token there is nothing to choose
            stop = start + n
            if n <= 0: answer = self._skip(r, plan)
            elif stop > len(r.block_table) * block_size and not self._make_room(r, stop, plan): answer = _MEMORY
            else:
                answer = None
                give(_new(Scheduled, (r, start, stop, (), 1 if stop == total else 0)))   # its last: the next is sampled
                plan.left -= n
                if explain or stop < total: self._given(r, start, stop, total, plan, _RUNS)

@patch
def _given(self:Scheduler, r:Request, start:int, stop:int, total:int, plan:Plan, kind:Kind):
    "Tokens `start:stop` of `r` are in the step: write it down, and keep blocks for the rest"
    if stop < total: self.promised += self.blocks.blocks_short(r, total)     # it has the first claim on free blocks
    if not self.explain: return
    if stop < total: what = r.request_id, kind, _CHUNK, stop, total
    elif stop - start == 1 and r.output_ids: what = r.request_id, kind, _DECODE, None, None
    else: what = r.request_id, kind, _PREFILL, stop - start, None
    plan.decisions.append(_new(Decision, what))

@patch
def _begin(self:Scheduler, now:float)->Plan:
    "An empty plan, after those had to go whose time is over, or who were told to"
    plan = Plan(self.num_steps, now, left=self.config.max_num_batched_tokens)
    self.num_plans, self.num_idle, self.num_refused, self.promised, self.closed = self.num_plans + 1, 0, 0, 0, False
    self.expire(plan)
    for r in self.preemptor.forced(self, self.num_steps): self.preempt(r, plan, Why.FORCED)
    return plan

@patch
def _conclude(self:Scheduler, plan:Plan)->Plan:
    "The plan, when everybody has had a turn"
    if self.num_refused and len(self.waiting) > self.num_refused:
        self.note(plan, None, Kind.BEHIND, n=len(self.waiting) - self.num_refused)
    plan.padding, plan.num_waiting = self.policy.padding(self, plan), len(self.waiting)
    times = self.policy.wakeup(self, plan.now), self.deadlines[0][0] if self.deadlines else None
    self.next_wakeup = min((t for t in times if t is not None), default=None)
    return plan

@patch
def _skip(self:Scheduler, r:Request, plan:Plan)->Reason:
    "No tokens are left for `r` in this step"
    self.num_idle += 1
    self.note(plan, r, Kind.WAITS, Why.BUDGET)
    self.promised += self.blocks.blocks_short(r, r.num_tokens)
    return _BUDGET

@patch
def _make_room(self:Scheduler, r:Request, num_tokens:int, plan:Plan)->bool:
    "Get `r` blocks for `num_tokens`, preempting as long as it must; False if `r` itself had to go"
    while self.blocks.blocks_short(r, num_tokens) > self.blocks.num_free_blocks:
        victim = self.idler(r) or self.preemptor.victim(self)
        self.preempt(victim, plan, self.preemptor.why)
        if victim is r: return False
    self.grow(r, num_tokens, plan)
    return True

@patch
def _admit(self:Scheduler, r:Request, plan:Plan)->Reason|None:
    "The turn of a request in the queue: it joins the batch, or is told why not"
    if r.status is Status.FINISHED: return _ENDED
    found, n, why = Found(), 0, self._shut(plan)
    if not why:
        if r.status is not Status.PAUSED: found = self.blocks.find(r)
        n = self.policy.chunk(self, r, r.num_left - found.num_tokens, plan.left)
        why = self._why_not(r, n, found, plan)
    if not why: return self._join(r, n, found, plan)
    self.num_refused += 1
    if r not in plan.preempted: self.note(plan, r, Kind.WAITS, *why)
    return why

@patch
def _shut(self:Scheduler, plan:Plan)->Reason|None:
    "Why nobody may join, whoever it is"
    if plan.preempted: return _MEMORY
    if self.closed is False: self.closed = self.policy.close(self, plan.now)
    return self.closed or (_FULL if len(self.running) >= self.config.max_num_seqs else None)

@patch
def _why_not(self:Scheduler, r:Request, n:int, found:Found, plan:Plan)->Reason|None:
    "Why `r` can't join with `n` tokens: blocks that others were promised are not free"
    if found.wait: return found.wait
    if not self.policy.starts(r, n): return _BUDGET
    if len(plan.scheduled) + self.num_idle < len(self.running):               # some of the batch were not asked yet
        unasked = sum(self.blocks.blocks_short(x, x.num_tokens) for x in self.running if x.turn != self.num_plans)
    else: unasked = 0
    need = self.blocks.blocks_short(r, max(self._reserve(r), r.num_tokens)) - len(found.blocks) + found.num_free
    need += self.promised + unasked + (self.watermark if self.running else 0)
    while need > self.blocks.num_free_blocks and (idler := self.idler(r)): self.preempt(idler, plan, self.preemptor.why)
    return Reason(Why.BLOCKS, need - self.blocks.num_free_blocks) if need > self.blocks.num_free_blocks else None

@patch
def _join(self:Scheduler, r:Request, n:int, found:Found, plan:Plan):
    "Move `r` from the queue into the batch with `n` tokens"
    self.waiting.remove(r)
    if r in self.paused: del self.paused[r]
    else:
        self.blocks.claim(r, found, plan)
        self.preemptor.resume(self, r, plan)
    start, total = r.num_computed_tokens, r.num_tokens
    self.blocks.grow(r, max(self._reserve(r), start + n))
    kind = Kind.ADMITTED if r.status is Status.WAITING else Kind.RESUMED
    r.status, r.turn = _RUNNING, self.num_plans
    if r.scheduled_at is None: r.scheduled_at = plan.now
    self.running.append(r)
    plan.admitted.append(r)
    if r.block_table: plan.blocks[r.request_id] = list(r.block_table)
    if start: plan.found[r.request_id] = start
    if n:
        plan.scheduled.append(Scheduled(r, start, start + n, (), 1 if start + n == total else 0))
        plan.left -= n
        self._given(r, start, start + n, total, plan, kind)
    else:
        self.num_idle += 1
        self.note(plan, r, kind, Why.BUDGET)
        self.promised += self.blocks.blocks_short(r, total)

@patch
def update(self:Scheduler,
    plan:Plan,       # what `schedule` decided
    out:StepOutput,  # what came of it
    now:float=0.,    # s, when the step ended
)->list[Request]:    # those that ended in this step
    "Take over what a step brought"
    self.num_steps += 1
    done, block_size, sampled, errors = list(plan.expired), self.blocks.block_size, out.sampled, out.errors
    for r, start, stop, _, _ in plan.scheduled:
        if r.status is not _RUNNING: continue             # aborted while the step ran
        tokens = sampled.get(r.request_id, ())
        if len(tokens) > 1: tokens, stop = self._guessed(r, tokens, stop, now)
        r.num_computed_tokens = stop
        if errors and r.request_id in errors:
            done.append(self._fail(r, errors[r.request_id], now))
            continue
        if stop % block_size < stop - start: self.blocks.commit(r)       # a block is full
        for token in tokens:
            r.output_ids.append(token)
            r.token_times.append(now)
            if token in r.stop_ids: r.stop_reason, reason = token, 'stop'
            elif len(r.output_ids) >= r.max_tokens: reason = 'length'
            else: continue
            self.finish(r, reason, now)
            done.append(r)
            break
    self.policy.on_update(self, plan, out)
    return done

@patch
def _guessed(self:Scheduler, r:Request, tokens:list[int], stop:int, now:float)->tuple[list[int], int]:
    "Append guesses that held, up to one that ends the answer; the token that is left, and how far KV is written"
    for i, token in enumerate(tokens[:-1]):
        if token in r.stop_ids or len(r.output_ids) + 1 >= r.max_tokens: return [token], stop + i
        r.output_ids.append(token)
        r.token_times.append(now)
    return tokens[-1:], stop + len(tokens) - 1

@patch
def _fail(self:Scheduler, r:Request, failure:Failure, now:float)->Request:
    "End `r` by an error; nobody shall find what it computed"
    r.failure = failure
    self.blocks.forget(r)
    self.finish(r, 'error', now)
    return r

@patch
def _reserve(self:Scheduler, r:Request)->int:
    "Tokens whose blocks `r` takes when it joins"
    most = len(r.prompt_ids) + r.max_tokens if self.config.reserve_max else 0
    return max(most, self.policy.reserve(self, r))

