"""Who stands where: in the queue, in the batch, or aside with its memory; and what it takes to move from one to another."""

__all__ = ['WaitingQueue', 'Recompute', 'Roster']

import heapq
from collections.abc import Callable, Iterator
from dataclasses import replace
from fastcore.basics import patch
from typing import Any
from .core import Code, Decision, Failure, Kind, Plan, Request, Status, Why
from .kv_blocks import BlockManager
from .params import EngineConfig

class WaitingQueue:
    "Requests in the order of `key`; push, peek and remove in O(log n) at most"
    def __init__(self,
        key:Callable[[Request], Any], # smallest first
    ):
        self.key = key
        self.heap:list[tuple[Any, int, Request]] = []               # entries of those who left stay until they surface
        self.live:dict[str, tuple[Any, int, Request]] = {}

    def push(self, r:Request):
        self.live[r.request_id] = entry = self.key(r), r.seq, r
        heapq.heappush(self.heap, entry)

    def peek(self)->Request|None:
        "The first in line, or None"
        heap, live = self.heap, self.live
        while heap and live.get(heap[0][2].request_id) is not heap[0]: heapq.heappop(heap)
        return heap[0][2] if heap else None

    def remove(self, r:Request):
        "Let `r` leave from wherever it stands"
        del self.live[r.request_id]
        if len(self.heap) > 2 * len(self.live) + 16: self.reorder()

    def reorder(self):
        "Build the heap anew: for keys that have changed"
        self.live = {i: (self.key(r), r.seq, r) for i, (_, _, r) in self.live.items()}
        self.heap = list(self.live.values())
        heapq.heapify(self.heap)

    def __len__(self)->int: return len(self.live)
    def __iter__(self)->Iterator[Request]: return (r for _, _, r in self.live.values())

class Recompute:
    "Preempt the youngest: drop its blocks, keep its tokens"
    why = 'youngest'
    def victim(self, s:'Roster')->Request: return max(s.running, key=lambda r: r.age)  # who gives its memory back
    def forced(self, s:'Roster', step:int)->list[Request]: return []                   # who must, without need
    def preempt(self, s:'Roster', r:Request, plan:Plan): s.drop(r)                     # take its memory
    def resume(self, s:'Roster', r:Request, plan:Plan): pass                           # before it joins the batch again
    def forget(self, r:Request): pass                                                     # what was kept of it is void

class Roster:
    "Everybody who is here, where they stand, and the memory they hold"
    def __init__(self,
        config:EngineConfig,
        blocks:BlockManager,                   # who counts the memory
        key:Callable[[Request], Any],          # who waits first in line: the smallest
        preemptor:Recompute,                   # how memory is given back
    ):
        self.config, self.blocks, self.preemptor, self.explain = config, blocks, preemptor, True
        self.waiting, self.running = WaitingQueue(key), list[Request]()
        self.paused:dict[Request, None] = {}   # of those who wait: they hold memory
        self.deadlines:list[tuple[float, int, Request]] = []

    def __bool__(self)->bool: return bool(self.waiting or self.running)

@patch
def add(self:Roster, r:Request):
    "Let `r` wait in line"
    self.waiting.push(r)
    if r.deadline is not None: heapq.heappush(self.deadlines, (r.deadline, r.seq, r))

@patch
def finish(self:Roster, r:Request, reason:str, now:float):
    "End `r`, wherever it stands, and take back its blocks"
    if r.status is Status.FINISHED: return
    if r.status is Status.RUNNING: self.running.remove(r)
    else: self.waiting.remove(r)
    self.paused.pop(r, None)
    self.blocks.release(r)
    self.preemptor.forget(r)
    r.status, r.finish_reason, r.finished_at = Status.FINISHED, reason, now

@patch
def abort(self:Roster, r:Request, now:float=0.): self.finish(r, 'abort', now)

@patch
def expire(self:Roster, plan:Plan):
    "End those whose deadline has passed"
    while self.deadlines and (self.deadlines[0][0] <= plan.now or self.deadlines[0][2].status is Status.FINISHED):
        r = heapq.heappop(self.deadlines)[2]
        if r.status is Status.FINISHED: continue
        r.failure = Failure(Code.DEADLINE, f'deadline of {r.deadline:g} s has passed')
        self.finish(r, 'error', plan.now)
        plan.expired.append(r)
    if len(self.deadlines) > 2 * (len(self.waiting) + len(self.running)) + 16:   # the rest ended long before theirs
        self.deadlines = [d for d in self.deadlines if d[2].status is not Status.FINISHED]
        heapq.heapify(self.deadlines)

@patch
def drop(self:Roster, r:Request):
    "Take the memory of `r` and keep its tokens: their KV is computed again"
    self.blocks.release(r)
    r.num_recomputed_tokens += r.num_computed_tokens
    r.num_computed_tokens = 0

@patch
def preempt(self:Roster, r:Request, plan:Plan, why:str):
    "Send `r` back to the queue without its memory, and out of this step if it was in it"
    self.leave_batch(r, plan)
    if r in plan.admitted: self.unjoin(r, plan)
    elif plan.swap_in: self.drop(r)          # its host blocks could be written before they are read
    else: self.preemptor.preempt(self, r, plan)
    r.status, r.num_preemptions = Status.PREEMPTED, r.num_preemptions + 1
    plan.preempted.append(r)
    self.waiting.push(r)
    self.note(plan, r, Kind.PREEMPTED, why)

@patch
def leave_batch(self:Roster, r:Request, plan:Plan):
    "Take `r` from where it stands, and its share out of the step"
    if r in self.paused:
        del self.paused[r]
        return self.waiting.remove(r)
    self.running.remove(r)
    for s in plan.scheduled:
        if s.request is r:
            plan.scheduled.remove(s)
            plan.left += s.num_tokens
            break
    for d in (plan.blocks, plan.found): d.pop(r.request_id, None)

@patch
def unjoin(self:Roster, r:Request, plan:Plan):
    "`r` joined in this very plan: nothing was moved for it yet, and nothing shall be"
    mine = set(r.block_table)
    plan.swap_in, plan.copies = ([p for p in pairs if p[1] not in mine] for pairs in (plan.swap_in, plan.copies))
    plan.admitted.remove(r)
    self.drop(r)

@patch
def pause(self:Roster, r:Request, plan:Plan, why:str=Why.NOTHING):
    "For policies, in their `turns`: `r` leaves the batch for the queue and keeps its memory, unless others need it"
    if r.status is not Status.RUNNING or r in plan.admitted:
        raise ValueError(f"{r.request_id} can't pause: it is {r.status.value}, or has just joined")
    grown = plan.blocks.get(r.request_id)
    self.leave_batch(r, plan)
    if grown: plan.blocks[r.request_id] = grown
    r.status = Status.PAUSED
    self.paused[r] = None
    plan.paused.append(r)
    self.waiting.push(r)
    self.note(plan, r, Kind.PAUSED, why)

@patch
def note(self:Roster, plan:Plan, r:Request|None, kind:Kind, why:str=Why.NOTHING, n:float|None=None,
         of:str|int|None=None):
    "Write down a decision, if somebody listens"
    if self.explain: plan.decisions.append(Decision(r.request_id if r else None, kind, why, n, of))

@patch
def grow(self:Roster, r:Request, num_tokens:int, plan:Plan):
    "Give `r` blocks for `num_tokens`, and say so in the plan"
    if new := self.blocks.grow(r, num_tokens): plan.blocks[r.request_id] = plan.blocks.get(r.request_id, []) + new

@patch
def idler(self:Roster, r:Request)->Request|None:
    "Who of the paused gives its memory to `r`: the last in line"
    return max((x for x in self.paused if x is not r), key=lambda x: (self.waiting.key(x), x.seq), default=None)

@patch
def undo(self:Roster,
    plan:Plan,   # whose step raised
    moved:bool,  # had its swaps and copies been done?
)->Plan:         # the plan without those whom it let in with memory that was never filled
    "A step did not happen: nothing was computed"
    if moved: return plan
    for r in plan.preempted:
        if r.status is Status.PREEMPTED and r.host_table: self.preemptor.forget(r)
    unfilled = {b for _, b in plan.swap_in + plan.copies}
    void = {r for r in plan.admitted if r.status is Status.RUNNING and unfilled.intersection(r.block_table)}
    for r in plan.admitted:
        if r not in void: continue
        self.running.remove(r)
        self.drop(r)
        r.status, r.num_preemptions = Status.PREEMPTED, r.num_preemptions + 1
        self.waiting.push(r)
    names = {r.request_id for r in void}
    blocks, found = ({i: x for i, x in d.items() if i not in names} for d in (plan.blocks, plan.found))
    admitted = [r for r in plan.admitted if r not in void]
    scheduled = [s for s in plan.scheduled if s.request not in void]
    return replace(plan, admitted=admitted, scheduled=scheduled, blocks=blocks, found=found)

@patch
def check(self:Roster):
    "Assert what must hold between two steps"
    running, waiting = self.running, list(self.waiting)
    assert len(running) <= self.config.max_num_seqs, f"{len(running)} requests run, {self.config.max_num_seqs} may"
    assert len({id(r) for r in running + waiting}) == len(running) + len(waiting), "a request stands in two places"
    for r in running: assert r.status is Status.RUNNING, f"{r.request_id} runs as {r.status}"
    assert {r for r in waiting if r.status is Status.PAUSED} == set(self.paused), "somebody paused is lost"
    for r in waiting:
        assert r.status in (Status.WAITING, Status.PREEMPTED, Status.PAUSED), f"{r.request_id} waits as {r.status}"
        held = r.block_table or bool(r.num_computed_tokens) != bool(r.host_table)
        assert r in self.paused or not held, f"{r.request_id} waits and holds memory"
    for r in running + waiting:
        going_on = 0 <= r.num_computed_tokens < r.num_tokens and len(r.output_ids) < r.max_tokens
        assert going_on, f"{r.request_id} should have ended"
    self.blocks.check([*running, *self.paused])
