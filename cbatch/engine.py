"""The loop that ties scheduler, runner, text and trace together: requests in, steps, reports out, and nobody lost whatever fails."""

__all__ = ['undisturbed', 'Engine']

import gc, logging, signal, time, torch, warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from fastcore.basics import patch
from threading import Thread, current_thread, main_thread
from time import perf_counter
from typing import Any
from .core import Asked, Code, Failure, Plan, Request, RequestOutput, Scheduled, StepOutput
from .door import Door
from .metrics import EngineCounters
from .model import CausalLM
from .params import EngineConfig, ParamError, SamplingParams
from .policies import get_policy
from .preemption import get_preemptor
from .prefix_caching import PrefixBlocks
from .reports import Answer, Draft
from .runner import Executor, ModelRunner, Sampler, pool_blocks
from .sampling import uniform
from .scheduler import Scheduler
from .trace import Trace

_log = logging.getLogger('cbatch')

@contextmanager
def undisturbed()->Iterator[list[bool]]: # filled when Ctrl-C was pressed
    "Ctrl-C waits for the end of the block, where it does no harm; a second one does not wait"
    pressed:list[bool] = []
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return                                      # not ours to handle, or handled further out
    def later(*args):
        if pressed: signal.default_int_handler(*args)
        pressed.append(True)
    signal.signal(signal.SIGINT, later)
    try: yield pressed
    finally: signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed: raise KeyboardInterrupt

class Engine:
    "Serves any number of requests by continuous batching"
    def __init__(self,
        model:CausalLM,
        config:EngineConfig,
        runner:Any=None,    # what runs its plans: `start` and `finish`; None: a `ModelRunner`
    ):
        policy = get_policy(config.policy)
        if config.max_model_len and config.max_model_len > model.max_len:
            have = f"{model.name} has {model.max_len} positions"
            raise ParamError('max_model_len', f"max_model_len={config.max_model_len}: {have}")
        self.config, self.model, self.tokenizer = config, model, model.tokenizer
        self.clock, self.sleep = time.monotonic, time.sleep
        self.driver:Thread|None = None             # the only thread that may, if there is one
        self.num_blocks = pool_blocks(model, config) if runner is None else runner.num_blocks
        self.max_model_len = self._longest()
        self.runner = runner or self._runner()
        self.scheduler = self._scheduler(policy)
        self.door = Door(model, self.scheduler, self.max_model_len)
        self.trace = self._trace() if config.trace else None
        self.scheduler.explain = self.trace is not None
        self.requests:dict[str, Answer] = {}               # by internal id: those who are here
        self.groups:dict[str, list[Answer]] = {}           # by the id that its caller knows: the answers to one prompt
        self.sinks:dict[str, Callable[[Draft], Any]] = {}  # who gets the reports of whom
        self.unclaimed:list[RequestOutput] = []            # reports that nobody has taken yet
        self.counters, self.num_added, self.moved = EngineCounters(), 0, False
        self.spent = dict.fromkeys(('schedule', 'update', 'text', 'trace'), 0.)   # s, over all steps
        if config.warmup: self.runner.executor.warm_up(lambda xs: _bar(xs, 'warm-up'))

def _bar(xs, what:str):
    from tqdm.auto import tqdm
    return tqdm(xs, desc=what, leave=False)

@patch
def _longest(self:Engine)->int:
    "Tokens of the longest request: as configured, else what model and pool allow"
    most, room = self.config.max_model_len, self.num_blocks * self.config.block_size
    if most and most > room:
        held = f"the KV pool holds {room} tokens"
        warnings.warn(f"max_model_len={most}, but {held}: longer requests will be refused", stacklevel=3)
    return most or min(self.model.max_len, room)

@patch
def _num_host_blocks(self:Engine)->int:
    "Blocks of the pool that swapping needs in host memory"
    c, block = self.config, self.config.block_size * self.model.kv_bytes_per_token
    if c.preemption != 'swap': return 0
    return self.num_blocks if c.swap_mb is None else max(1, int(c.swap_mb * 1e6 // block))

@patch
def _runner(self:Engine)->ModelRunner:
    longest = -(-self.max_model_len // self.config.block_size)
    executor = Executor(self.model, self.config, self.num_blocks, longest, self._num_host_blocks())
    return ModelRunner(executor, Sampler(self.model.eos_ids))

@patch
def _trace(self:Engine)->Trace:
    c, n = self.config, 10_000 if self.config.trace is True else int(self.config.trace)
    name = self.scheduler.policy.name
    return Trace(c.max_num_seqs, c.max_num_batched_tokens, c.block_size, self.num_blocks, name, maxlen=n)

@patch
def _scheduler(self:Engine, policy)->Scheduler:
    blocks = PrefixBlocks(self.num_blocks, self.config.block_size, self.config.prefix_caching)
    return Scheduler(self.config, blocks, policy, get_preemptor(self.config, self._num_host_blocks()))

@patch
def ensure_open(self:Engine):
    "Refuse to go on after `close`"
    if self.model is None: raise ValueError("this LLM is closed: make a new one")

@patch
def _ours(self:Engine):
    "Refuse a second thread while one drives this engine"
    if self.driver not in (None, current_thread()) and self.driver.is_alive():
        raise ValueError("another thread drives this LLM (an AsyncLLM?): ask that one, or close it first")

@patch
def prepare(self:Engine,
    prompt:Any,                  # text, token ids, or a list of messages
    params:SamplingParams|None=None,
    request_id:str|None=None,    # None: the engine makes one
    arrival:float|None=None,     # s on `llm.clock`; None: now
    priority:float=0, user:str|None=None, # for policies that look at them; a smaller priority is more urgent
    deadline:float|None=None,    # s on `llm.clock`; a request that is not done by then ends with an error
    cache_salt:str|None=None,    # cached blocks are shared among equal salts only
    use_cache:bool=True,         # False: neither read nor leave anything in the prefix cache
)->Asked:                        # for `enter`
    "Look at a request and turn its text into tokens; nothing is taken. `ParamError` if it could not be served"
    self.ensure_open()
    if request_id in self.groups:
        raise ParamError('request_id', f"request_id={request_id!r} is in use: wait until it ends, or leave it out")
    now = self.clock() if arrival is None else arrival
    return self.door.ask(prompt, params, request_id, now, priority=priority, user=user, deadline=deadline,
                         cache_salt=cache_salt, use_cache=use_cache)

@patch
def enter(self:Engine,
    asked:Asked, # from `prepare`
    sink:Callable[[Draft], Any]|None=None, # gets each `Draft` of it, in the step that made it; None: `take` has them
)->str:          # the request's id
    "Queue what was looked at, once for each answer that it wants; to be called between two steps"
    self._ours()
    name, n, seq = asked.request_id or f'r{self.num_added}', asked.params.n, self.num_added
    while name in self.groups: name += "'"         # somebody chose our next name for himself
    seed = int(uniform([self.config.seed], [seq])[0] * 2 ** 53) if asked.params.seed is None else asked.params.seed
    self.groups[name], first = [], None
    try:
        for i in range(n):
            own = f'{name}/{i}' if n > 1 else name
            r = self._request(asked, own, group=name, seed=seed, sample_index=i, fork_of=first)
            first = first or r
            self._queue(r)
    except BaseException:
        self.abort(name)                           # all or none
        raise
    if sink: self.sinks[name] = sink
    return name

@patch
def _request(self:Engine, asked:Asked, request_id:str, **more:Any)->Request:
    "One answer's request under an id of its own"
    while request_id in self.requests: request_id += "'"
    given = {f.name: getattr(asked, f.name) for f in fields(Asked)}
    r = Request(**(given | dict(request_id=request_id, seq=self.num_added) | more))
    if r.fork_of: r.params = replace(r.params, prompt_logprobs=None)
    return r

@patch
def _queue(self:Engine, r:Request):
    answer = Answer(r, self.tokenizer)
    self.groups[r.group].append(answer)
    self.scheduler.add(r)
    self.requests[r.request_id], self.num_added = answer, self.num_added + 1
    if self.trace: self.trace.arrived(r)

@patch
def add(self:Engine,
    prompt:Any,                  # text, token ids, or a list of messages
    params:SamplingParams|None=None,
    *args:Any, **kw:Any,         # as `prepare` has them
)->str:                          # the request's id
    "Queue a request; `step` does the rest. `ValueError` if it could not be served; nothing has changed then"
    return self.enter(self.prepare(prompt, params, *args, **kw))

@patch
def _step(self:Engine)->list[Draft]:
    "One iteration; drafts of the requests that got something, or ended"
    start, lap = self.clock(), perf_counter()
    plan = self.scheduler.schedule(start)
    lap = self._lap('schedule', lap)
    if not plan: return []
    plan, out = self._try(plan)
    now, lap = self.clock(), perf_counter()
    finished = self.scheduler.update(plan, out, now)
    self.counters.count(plan, out, self.config.max_num_seqs)
    lap = self._lap('update', lap)
    drafts, stopped = self._reports(plan, out, now)
    lap = self._lap('text', lap)
    if self.trace: self.trace.executed(plan, out, finished + stopped, start, now, self.num_free_blocks)
    self._lap('trace', lap)
    if self.config.check: self.check()
    return drafts

@patch
def _lap(self:Engine, what:str, since:float)->float:
    now = perf_counter()
    self.spent[what] += now - since
    return now

@patch
def _try(self:Engine, plan:Plan)->tuple[Plan, StepOutput]: # the plan as far as it was tried
    "Run a plan; an exception becomes an error of each of its requests"
    self.moved = False
    try:
        try: return plan, self.execute(plan)
        except torch.OutOfMemoryError: plan = self._half(plan)
        return plan, self.execute(plan)
    except Exception as e:
        _log.exception("step %d failed", plan.step)
        plan, failure = self.scheduler.undo(plan, self.moved), Failure(Code.STEP, f"{type(e).__name__}: {e}")
        return plan, StepOutput(errors={s.request.request_id: failure for s in plan.scheduled})
    except BaseException:
        plan = self.scheduler.undo(plan, self.moved)
        if self.trace: self.trace.failed(plan)
        raise

@patch
def execute(self:Engine, plan:Plan)->StepOutput:
    "Start a plan and wait for it; `moved` says whether its blocks have been moved, should it fail"
    pending = self.runner.start(plan, self.moved)
    self.moved = self.moved or pending.moved
    return self.runner.finish(plan, pending)

@patch
def _half(self:Engine, plan:Plan)->Plan:
    "The plan with half of its tokens, for a device that ran out of memory; the others come later"
    _log.warning("step %d ran out of memory: trying half of it", plan.step)
    if torch.cuda.is_available(): torch.cuda.empty_cache()
    shares = plan.scheduled
    some = shares[:len(shares) // 2] if len(shares) > 1 else [_cut(s) for s in shares]
    return replace(plan, padding=[], scheduled=some)

def _cut(s:Scheduled)->Scheduled:
    "Half of a share"
    n = s.stop - s.start
    return s._replace(draft=(), rows=min(s.rows, 1)) if n == 1 else s._replace(stop=s.start + n // 2, draft=(), rows=0)

@patch
def _reports(self:Engine, plan:Plan, out:StepOutput, now:float)->tuple[list[Draft], list[Request]]:
    "Drafts of a step, and the requests that ended by what their text said"
    touched:dict[str, None] = {}
    stopped:list[Request] = []
    for r in (*plan.expired, *(s.request for s in plan.scheduled)):
        if not (answer := self.requests.get(r.request_id)): continue
        answer.keep(out)
        if not (r.request_id in out.sampled or answer.done): continue
        if self._read(answer, now): stopped.append(r)
        touched[r.group] = None
        if answer.done: self._leave(r)
    return [self._report(g) for g in touched], stopped

@patch
def _read(self:Engine, answer:Answer, now:float)->bool: # did that end it?
    "Turn the newest tokens of an answer into text; a stop string ends it, and so does an exception"
    r, over = answer.request, answer.done
    try: hit = answer.text.push(r.output_ids, last=over)
    except Exception as e: hit, r.failure = False, Failure(Code.TEXT, f"{type(e).__name__}: {e}")
    if not (hit or r.failure): return False
    if not over: self.scheduler.finish(r, 'stop', now)
    r.finish_reason = 'error' if r.failure else 'stop'
    if hit: r.stop_reason = answer.text.stop
    return not over

@patch
def _leave(self:Engine, r:Request):
    "Forget a request that has ended"
    del self.requests[r.request_id]
    self.counters.finish(r)

@patch
def _report(self:Engine, group:str)->Draft:
    "What there is to say about a request and all its answers"
    draft = Draft(group, self.groups[group])
    if draft.finished: del self.groups[group]
    return draft

@patch
def abort(self:Engine,
    request_id:str,
)->bool: # False if there is no such request (any more)
    "End a request now; its blocks are free at once"
    if request_id not in self.groups: return False
    self._ours()
    for a in self.groups[request_id]:
        if a.done: continue
        self.scheduler.abort(a.request, self.clock())
        if self.trace: self.trace.aborted(a.request)
        self._leave(a.request)
        try: a.text.push(a.request.output_ids, last=True)          # what was held back
        except Exception as e: a.request.failure = Failure(Code.TEXT, f"{type(e).__name__}: {e}")
    draft, sink = self._report(request_id), self.sinks.get(request_id)
    if sink: sink(draft)
    return True

_STUCK = "requests wait, nothing can run and nothing will change"

@patch
def turn(self:Engine)->float|None: # s until it may do something again: 0 after a step; None: nobody is here
    "Run a step, if one can run now; for loops that drive the engine. Reports go to their sinks, others to `take`"
    self.ensure_open()
    self._ours()
    before = self.scheduler.num_steps
    for draft in self._step():
        sink = self.sinks.get(draft.request_id)
        if sink: sink(draft)
        else: self._keep(draft.output())
    if self.scheduler.num_steps > before: return 0.
    if not self.requests: return None
    wake = self.scheduler.next_wakeup
    if wake is None: raise RuntimeError(f"{_STUCK}: the policy must let somebody in")
    return max(0., wake - self.clock())

@patch
def _keep(self:Engine, o:RequestOutput):
    "Keep an output until somebody takes it, joined with one that is there already"
    i = next((i for i, u in enumerate(self.unclaimed) if u.request_id == o.request_id and not u.finished), None)
    if i is None: return self.unclaimed.append(o)
    for new, old in zip(o.outputs, self.unclaimed[i].outputs): new.delta = old.delta + new.delta
    self.unclaimed[i] = o

@patch
def take(self:Engine)->list[RequestOutput]:
    "Reports that nobody has taken yet"
    out, self.unclaimed = self.unclaimed, []
    return out

@patch
def step(self:Engine)->list[RequestOutput]: # one per request that has news
    "Run one step, if there is something to do now, and report what came of it"
    with undisturbed(): self.turn()
    return self.take()

@patch(as_prop=True)
def num_free_blocks(self:Engine)->int: return self.scheduler.blocks.num_free_blocks
@patch(as_prop=True)
def has_unfinished(self:Engine)->bool: return bool(self.requests)
@patch(as_prop=True)
def kv_bytes(self:Engine)->int:
    "Size of the KV pool, the null block included"
    self.ensure_open()
    return (self.num_blocks + 1) * self.config.block_size * self.model.kv_bytes_per_token

@patch(as_prop=True)
def metrics(self:Engine)->dict[str, Any]:
    "Counters since the engine was made, gauges of now, and where the time of its steps went"
    self.ensure_open()
    s, b, spent = self.scheduler, self.scheduler.blocks, {**self.spent, **self.runner.spent}
    now = dict(num_running=len(s.running), num_waiting=len(s.waiting), num_blocks=b.num_blocks,
               num_free_blocks=b.num_free_blocks)
    rate = b.num_hit / b.num_asked if b.num_asked else 0.
    found = dict(num_prefix_asked=b.num_asked, num_prefix_hit=b.num_hit, prefix_hit_rate=rate)   # tokens
    return {**self.counters.as_dict(), **now, **found, 'spent_s': spent, 'forward_s': self.runner.forward_s}

@patch
def check(self:Engine):
    "Assert every invariant of blocks, scheduler and engine"
    self.scheduler.check()
    known = {r.request_id for r in [*self.scheduler.running, *self.scheduler.waiting]}
    assert known == set(self.requests), "scheduler and engine disagree about who is here"
    grouped = {a.request.request_id for g in self.groups.values() for a in g if not a.done}
    assert known == grouped, "a request has no group"
    assert not any(a.done for a in self.requests.values()), "somebody who has ended is still here"

@patch
def close(self:Engine):
    "Abort what runs and give back model and memory; once or ten times is the same"
    if self.model is None: return
    for i in list(self.groups): self.abort(i)
    cuda = torch.device(self.model.device).type == 'cuda'
    self.model:Any = None
    self.runner:Any = None
    self.tokenizer = self.door.tokenizer = None
    gc.collect()
    if cuda: torch.cuda.empty_cache()
