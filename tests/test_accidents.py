"""Accidents from outside: exceptions that are no `Exception`, callers in the middle of a step, signals, forks, keys
that raise. Who is at fault is told so or ends alone; everybody else's tokens are those of a run without it."""
import asyncio, gc, os, random, signal, sys, threading, time
from collections import Counter
import pytest, torch
from cbatch import SamplingParams
from cbatch.async_engine import AsyncLLM, Unavailable
from cbatch.core import Code, Plan, Request, Status, failure_of, in_words
from cbatch.interrupts import Held, undisturbed
from cbatch.kv_blocks import BlockManager
from cbatch.params import EngineConfig
from cbatch.roster import Recompute, Roster, WaitingQueue
from cbatch.scheduler import STUCK, Policy
from cbatch.text import Detokenizer
from cbatch.token_loop import generate_ref
from cbatch.worker import Observer
from ask import sp
from harness import quiet
from test_engine import P, containers, drain, ids, solo, works

class Panic(BaseException): "As a library in Rust throws it past `except Exception`"
class Mute(Panic):
    def __str__(self): raise Panic('not even that')

FOREIGN = [Panic('slice index'), Mute(), asyncio.CancelledError()]
foreign = pytest.mark.parametrize('e', FOREIGN, ids=lambda e: type(e).__name__)

# --- exceptions that are no Exception

def test_what_an_exception_means():
    assert failure_of(Code.TEXT, Panic('x')) == (Code.TEXT, 'Panic: x') and in_words(Mute()) == 'Mute'
    for e in (KeyboardInterrupt(), SystemExit(), GeneratorExit()):
        with pytest.raises(type(e)): failure_of(Code.TEXT, e)

def culprit(llm, monkeypatch, where, e):
    "Let one part raise for requests of 13 tokens, at their third"
    def bad(r, n): return r.params.max_tokens == 13 and n >= 3
    if where == 'text':
        push = Detokenizer.push
        def broken(self, output_ids, last=False):
            if self.p.max_tokens == 13 and len(output_ids) >= 3: raise e
            return push(self, output_ids, last)
        monkeypatch.setattr(Detokenizer, 'push', broken)
    if where == 'sampler':
        def mask(w):
            if bad(w.request, len(w.request.output_ids)): raise e
        llm.runner.sampler.mask = mask
    if where == 'forward':
        run = llm.execute
        def execute(plan):
            if any(bad(s.request, len(s.request.output_ids)) for s in plan.scheduled): raise e
            return run(plan)
        monkeypatch.setattr(llm, 'execute', execute)

@foreign
@pytest.mark.parametrize('where', ['text', 'sampler', 'forward'])
def test_a_foreign_exception_ends_one_request(engine, tiny, monkeypatch, where, e):
    "Or those of its step, where the whole step is at fault; then a neighbour is served that comes after"
    llm = engine(); culprit(llm, monkeypatch, where, e)
    bad, good = llm.add(P[0], sp(13)), llm.add(P[1], sp())
    outs = drain(llm)
    assert outs[bad].outputs[0].finish_reason == 'error' and type(e).__name__ in outs[bad].error
    if where == 'forward': assert outs[good].failure.code is Code.STEP
    else: assert outs[good].outputs[0].token_ids == solo(tiny, P[1])
    works(llm, tiny)

@foreign
@pytest.mark.parametrize('where', ['text', 'sampler', 'forward', 'observer', 'enter', 'aborted text'])
def test_a_foreign_exception_in_the_engines_thread(engine, tiny, monkeypatch, where, e):
    "Everybody has a last report, and the thread lives"
    llm = engine(); want = solo(tiny, P[1]); culprit(llm, monkeypatch, where.split()[-1], e)
    class Broken(Observer):
        def finished(self, output, request): raise e
        stepped = refused = finished
    async def main():
        a = await AsyncLLM(llm).start()
        if where == 'observer': a.observers.append(Broken())
        if where == 'enter':
            push = llm.scheduler.waiting.push
            def fail(r):
                if r.max_tokens == 13: raise e
                push(r)
            llm.scheduler.waiting.push = fail
        streams = await a.add_many([(P[0], sp(13)), (P[1], sp())])
        if where == 'aborted text': await streams[0].abort()
        bad, good = await asyncio.wait_for(asyncio.gather(*(s.result() for s in streams)), 60)
        assert (type(e).__name__ in (bad.error or '')) == (where not in ('observer', 'aborted text'))
        if where != 'forward': assert good.outputs[0].token_ids == want
        assert a.is_live and (await a.generate(P[1], sp())).outputs[0].token_ids == want
        with pytest.raises(RuntimeError, match=type(e).__name__): await a.off_loop(throw, e)
        with pytest.raises(RuntimeError, match=type(e).__name__): await a.call(lambda l: throw(e))
        assert a.is_live
        await a.close()
    asyncio.run(main())
    quiet(llm)

def throw(e): raise e

@foreign
def test_the_last_act_finishes(engine, monkeypatch, e):
    "The thread dies of it and its own clean-up fails too: everybody hears, nobody waits"
    llm = engine(max_num_seqs=1)
    async def main():
        a = AsyncLLM(llm)
        streams = await a.add_many([(P[0], sp(100)), (P[1], sp())])
        async for _ in streams[0]: break
        monkeypatch.setattr(llm.scheduler, 'schedule', lambda now: throw(e))
        monkeypatch.setattr(llm, 'abort', lambda i: throw(e))
        outs = await asyncio.wait_for(asyncio.gather(*(s.result() for s in streams)), 60)
        assert all(type(e).__name__ in o.error and o.finished for o in outs)
        await asyncio.wait_for(a.close(), 60)
        assert a.state == 'dead' and not a.worker.is_alive()
    asyncio.run(main())

@foreign
@pytest.mark.parametrize('when', ['in a step', 'last', 'abort', 'close'])
def test_a_sink_that_raises(engine, tiny, when, e):
    "The others of the same step have had their reports; it is heard, its request has left, and its sink"
    llm, news = engine(), []
    def broken(draft):
        if draft.finished or when == 'in a step': raise e
    bad = llm.enter(llm.prepare(P[0], sp(3)), broken)
    good = llm.enter(llm.prepare(P[1], sp(3)), news.append)
    plain = llm.add(P[2], sp(3))
    def go():
        if when == 'abort': llm.step(); llm.abort(bad)
        elif when == 'close': llm.step(); llm.close()
        else:
            while True: llm.step()
    with pytest.raises(type(e)): go()
    assert bad not in llm.sinks and bad not in llm.groups and len(news) == llm.scheduler.num_steps + (when == 'close')
    if when == 'close': assert llm.model is None and news[-1].finished and not llm.groups; return
    outs = {o.request_id: o for o in llm.take()} | drain(llm)
    assert outs[plain].outputs[0].token_ids == solo(tiny, P[2], sp(3))
    assert news[-1].output().outputs[0].token_ids == solo(tiny, P[1], sp(3))
    works(llm, tiny)

@foreign
def test_generate_whose_bar_breaks(engine, tiny, monkeypatch, e):
    "Nothing stays behind, though the sink breaks again on the way out"
    llm = engine()
    class Bar:
        def __enter__(self): return self
        def __exit__(self, *a): pass
        def __getattr__(self, name): return lambda *a, **k: throw(e)
    monkeypatch.setattr('cbatch.llm.Progress', lambda *a, **k: Bar())
    with pytest.raises(type(e)): llm.generate(P, [sp(2), sp(), sp(), sp()], use_tqdm=False)
    monkeypatch.undo(); works(llm, tiny)

# --- in the middle of a step

CALLS = dict(step=lambda l: l.step(), add=lambda l: l.add(P[3], sp()), abort=lambda l: l.abort(next(iter(l.groups))),
             generate=lambda l: l.generate(P[3], sp(), use_tqdm=False), stream=lambda l: next(l.stream(P[3], sp())),
             close=lambda l: l.close(), turn=lambda l: l.turn())

@pytest.mark.parametrize('place', ['policy', 'sink', 'mask', 'text', 'execute'])
@pytest.mark.parametrize('thread', [False, True], ids=['itself', 'a thread'])
def test_nobody_comes_in(engine, tiny, monkeypatch, place, thread):
    "Whatever it is and whoever it is: refused by name, nothing is changed, and the first goes on"
    refused, done = [], []
    def meddle():
        if done: return
        done.append(place)
        for name, call in CALLS.items():
            before = llm.num_added, len(llm.scheduler.waiting), len(llm.scheduler.running), llm.scheduler.num_steps
            def ask():
                with pytest.raises(ValueError, match='AsyncLLM'): call(llm)
                refused.append(name)
            if thread: t = threading.Thread(target=ask); t.start(); t.join()
            else: ask()
            assert before == (llm.num_added, len(llm.scheduler.waiting), len(llm.scheduler.running),
                              llm.scheduler.num_steps)
    class Meddles(Policy):
        def turns(self, s, plan):
            if place == 'policy' and s.running: meddle()
            yield from super().turns(s, plan)
    llm = engine(policy=Meddles())
    if place == 'mask': llm.runner.sampler.mask = lambda w: meddle()
    if place == 'text':
        push = Detokenizer.push
        monkeypatch.setattr(Detokenizer, 'push', lambda self, out, last=False: (meddle(), push(self, out, last))[1])
    if place == 'execute':
        run = llm.execute
        monkeypatch.setattr(llm, 'execute', lambda plan: (meddle(), run(plan))[1])
    if place == 'sink': llm.enter(llm.prepare(P[2], sp(5)), lambda draft: meddle())
    assert ids(llm.generate(P[:2], sp(), use_tqdm=False)) == [solo(tiny, p) for p in P[:2]]
    drain(llm)
    assert refused == list(CALLS)
    works(llm, tiny)

def test_two_threads_in_one_engine(engine, tiny):
    "One is served, the other is told so, at every try; nothing is left of it"
    llm, said, go = engine(check=False), Counter(), threading.Event()
    want, old = [solo(tiny, p, sp(30)) for p in P], sys.getswitchinterval()
    def one(i):
        go.wait()
        for _ in range(4):
            try: said['right' if ids(llm.generate(P, sp(30), use_tqdm=False)) == want else 'wrong'] += 1
            except ValueError as e: said['refused' if 'AsyncLLM' in str(e) else str(e)] += 1
    ts = [threading.Thread(target=one, args=(i,)) for i in range(4)]
    try:
        sys.setswitchinterval(1e-5)
        for t in ts: t.start()
        go.set()
        for t in ts: t.join()
    finally: sys.setswitchinterval(old)
    assert said['right'] and said['refused'] and set(said) == {'right', 'refused'} and not llm.leaving
    works(llm, tiny)

def test_a_stream_that_is_dropped_in_a_step(engine, tiny, monkeypatch):
    "As the garbage collector may do it: it leaves when the step is over; a later owner of its id stays"
    llm = engine(); run = llm.execute
    held = [llm.stream(P[0], sp(30))]; next(held[0])
    def execute(plan):
        if held: held.pop().close()
        return run(plan)
    monkeypatch.setattr(llm, 'execute', execute)
    other = llm.add(P[1], sp())
    assert drain(llm)[other].outputs[0].token_ids == solo(tiny, P[1])
    assert not held and llm.metrics['finished'] == dict(abort=1, length=1)
    s = llm.stream(P[0], sp(2)); next(s); held.append(s)
    llm.step()                                       # its last step: it ends by itself
    assert not held and llm.leaving
    again = llm.add(P[1], sp(), request_id='r2')
    assert drain(llm)[again].outputs[0].token_ids == solo(tiny, P[1])
    works(llm, tiny)

@pytest.mark.skipif(not hasattr(os, 'fork'), reason='no fork')
def test_a_child_is_refused(engine, tiny):
    "In a forked process an engine would wait for threads that are not there: each use says so, at once"
    llm, idle = engine(), AsyncLLM(engine())
    llm.add(P[0], sp()); llm.step()
    async def main():
        busy = AsyncLLM(engine())
        await busy.generate(P[0], sp())
        r, w = os.pipe()
        if not (pid := os.fork()):
            try: os.write(w, in_the_child(llm, idle, busy).encode())
            finally: os._exit(0)
        os.close(w)
        said = await asyncio.to_thread(os.read, r, 9999)
        os.waitpid(pid, 0); os.close(r); await busy.close()
        return said.decode()
    assert asyncio.run(main()) == 'fine'
    assert drain(llm)['r0'].outputs[0].token_ids == solo(tiny, P[0])
    works(llm, tiny)

def in_the_child(llm, idle, busy):
    "What is wrong there, if anything is"
    signal.alarm(60)
    for name, call in CALLS.items():
        try: call(llm); return f'{name} was done'
        except ValueError as e:
            if 'forked' not in str(e): return f'{name}: {e}'
    asyncio._set_running_loop(None)
    for call in (lambda: idle.generate(P[0]), lambda: busy.generate(P[0]), lambda: busy.off_loop(len, 'x'), busy.close):
        try: asyncio.run(call()); return 'an AsyncLLM was used'
        except (ValueError, Unavailable) as e:
            if 'forked' not in str(e): return str(e)
    return 'fine'

# --- all or nothing

def test_a_request_that_enters_twice(engine, tiny):
    "What was looked at may come in as often as you like: each time it is a request of its own"
    llm = engine()
    asked = llm.prepare(P[0], sp(), request_id='mine')
    names = [llm.enter(asked), llm.enter(asked)]
    llm.step(); names.append(llm.enter(asked))
    outs = drain(llm)
    assert len(set(names)) == 3 and [outs[i].outputs[0].token_ids for i in names] == [solo(tiny, P[0])] * 3
    works(llm, tiny)

class Moody(Policy):
    "A key that raises for some, from some time on"
    angry = False
    def key(self, r):
        if self.angry and r.user == 'bad': raise ZeroDivisionError
        return r.age

def state(s):
    "All that a roster has, as values"
    running = [(r.request_id, r.status, r.num_computed_tokens, [*r.block_table], r.num_preemptions) for r in s.running]
    return (running, sorted(r.request_id for r in s.waiting), list(s.paused), s.blocks.num_free_blocks)

@pytest.mark.parametrize('move', ['add', 'preempt', 'pause', 'reorder'])
def test_a_key_that_raises_moves_nobody(move):
    policy = Moody()
    s = Roster(EngineConfig(block_size=4), BlockManager(8, 4), policy.key, Recompute())
    for i, user in enumerate(('good', 'bad', 'bad')):
        s.add(Request(f'r{i}', [1] * 6, SamplingParams(), 9, seq=i, user=user))
    for r in list(s.waiting)[:2]:
        s.waiting.remove(r); s.running.append(r); r.status = Status.RUNNING
        s.blocks.grow(r, 6); r.num_computed_tokens = 5
    s.check(); before, policy.angry, r = state(s), True, s.running[1]
    plan, new = Plan(0, 0.), Request('new', [1], SamplingParams(), 9, seq=9, user='bad', deadline=1.)
    calls = dict(add=lambda: s.add(new), preempt=lambda: s.preempt(r, plan, 'x'), pause=lambda: s.pause(r, plan),
                 reorder=s.waiting.reorder)
    with pytest.raises(ZeroDivisionError): calls[move]()
    assert state(s) == before and not s.deadlines and not (plan.preempted or plan.paused or plan.decisions)
    s.check()
    for r in [*s.running, *s.waiting]: s.abort(r)        # to leave asks no key
    assert not s and s.blocks.num_free_blocks == 8
    s.check()

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
def test_a_key_that_raises_in_a_crowd(engine, tiny, mode):
    "Memory runs short, the victim's key raises: step after step, until it doesn't; all tokens are right"
    policy = Moody()
    llm = engine(policy=policy, num_blocks=14, max_num_seqs=3, preemption=mode)
    rids, raised = [llm.add(P[1], sp(30), user='bad' if i else 'good') for i in range(3)], 0
    llm.step(); policy.angry = True
    for _ in range(200):
        try: llm.step()
        except ZeroDivisionError: raised += 1
        llm.check()
        if raised > 3: policy.angry = False
        if not llm.has_unfinished: break
    outs = {o.request_id: o for o in llm.take()}
    assert raised > 3 and not llm.has_unfinished
    works(llm, tiny)

def test_thousands_leave_though_keys_do_not_compare():
    q = WaitingQueue(lambda r: (0, 0) if r.seq == 0 else (1, None) if r.seq == 1 else (1, r.seq))
    rs = [Request(f'r{i}', [1], SamplingParams(), 9, seq=i) for i in range(2)]
    for r in rs: q.push(r)
    for i in range(2, 200):                              # compared with the first only: they get in, but not in order
        r = Request(f'r{i}', [1], SamplingParams(), 9, seq=i)
        try: q.push(r)
        except TypeError: assert r not in q
        else: rs.append(r)
    for r in rs: assert r in q; q.remove(r); assert r not in q
    assert len(q) == 0

class Stranger(Policy):
    "Yields a request that is not this engine's"
    def __init__(self): self.who = None
    def turns(self, s, plan):
        yield from s.line_of_running()
        if self.who: yield self.who
        yield from s.line_of_waiting()

@pytest.mark.parametrize('status', [Status.RUNNING, Status.WAITING, Status.PREEMPTED])
def test_a_stranger_gets_nothing(engine, tiny, status):
    llm = engine(policy=Stranger())
    mine = llm.add(P[0], sp()); llm.step()
    llm.scheduler.policy.who = Request('r1', [1] * 9, SamplingParams(), 9, seq=5, status=status)
    waits = llm.add(P[1], sp()); assert waits == 'r1'    # of the same name, to be mistaken for it
    for _ in range(3):
        with pytest.raises(ValueError, match='Stranger: r1 is not one of this engine'): llm.step()
        llm.check()
    llm.scheduler.policy.who = None
    outs = drain(llm)
    assert [outs[i].outputs[0].token_ids for i in (mine, waits)] == [solo(tiny, p) for p in P[:2]]
    works(llm, tiny)

class Fickle(Policy):
    "Says something else each time it is asked"
    asked = 0
    def reserve(self, s, r):
        self.asked += 1
        return 10**6 * (self.asked % 2 == 0)

def test_a_policy_that_changes_its_mind(engine, tiny):
    "What it reserves is asked once: nobody joins by half"
    llm = engine(policy=Fickle())
    rids = [llm.add(p, sp()) for p in P[:3]]
    outs = drain(llm)
    assert [outs[i].outputs[0].token_ids for i in rids] == [solo(tiny, p) for p in P[:3]]
    quiet(llm)

class Idle(Policy):
    def close(self, s, now): return 'never'

def test_a_step_that_waits_for_ever_says_so(engine, tiny):
    llm = engine(policy=Idle())
    rid = llm.add(P[0], sp())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=STUCK): llm.step()
    llm.scheduler.policy = Policy()
    assert drain(llm)[rid].outputs[0].token_ids == solo(tiny, P[0])
    works(llm, tiny)

class Flaky(Policy):
    "Raises while a step is planned, so many times in a row"
    def __init__(self, times): self.times = times
    def turns(self, s, plan):
        if s.running and self.times: self.times -= 1; raise OSError('locked')
        yield from super().turns(s, plan)

@pytest.mark.parametrize('times', [1, 2, 3])
def test_a_policy_that_raises_in_the_engines_thread(engine, tiny, times):
    "Twice nobody notices; the third time in a row ends the thread, and everybody hears why"
    llm = engine(policy=Flaky(times)); want = solo(tiny, P[0])
    async def main():
        a = AsyncLLM(llm)
        o = await asyncio.wait_for(a.generate(P[0], sp()), 60)
        if times < 3: assert o.outputs[0].token_ids == want and a.is_live
        else: assert 'locked' in o.error and o.outputs[0].finish_reason == 'error'
        await a.close()
        assert a.state == ('closed' if times < 3 else 'dead')
    asyncio.run(main())
    quiet(llm)

# --- flat

def test_nothing_grows_without_a_step(engine):
    "Come and go, refused, dropped: a thousand times, and no step runs"
    llm = engine(check=False)
    def visit(n):
        for i in range(n):
            assert llm.abort(llm.add(P[2], sp(n=1 + i % 2, temperature=1.), deadline=llm.clock() + 1e6))
            llm.abort(llm.enter(llm.prepare(P[0], sp()), [].append))
            with pytest.raises(ValueError): llm.add([])
            s = llm.stream(P[0], sp()); del s
    visit(420); before = containers(llm)
    visit(400); after = containers(llm)
    assert {k: n for k, n in after.items() if n > max(before.get(k, 60), 20)} == {}
    assert len(llm.trace.came) <= len(llm.trace.left) == 1000 and not (llm.scheduler.deadlines[20:] or llm.sinks)
    rid = llm.add(P[0], sp(1)); llm.step()
    assert llm.trace.state().num_finished == 1001 and llm.trace.why(rid) and not llm.trace.left

def test_who_has_left_is_forgotten(engine):
    "Nothing of an aborted request stays, though others wait with their deadlines"
    import weakref
    llm, gone = engine(), []
    stay = [llm.add(P[0], sp(), deadline=llm.clock() + 9e6) for _ in range(3)]
    for i in range(200):
        name = llm.add(P[2], sp(), deadline=llm.clock() + i)
        gone.append(weakref.ref(llm.requests[name].request)); llm.abort(name)
    gc.collect()
    assert sum(r() is not None for r in gone) < 30 and len(llm.scheduler.waiting.heap) < 30
    quiet_after = drain(llm); assert set(quiet_after) == set(stay)

def test_a_sink_goes_with_its_last_report(engine, tiny):
    llm, news = engine(), []
    a = llm.enter(llm.prepare(P[0], sp(2)), news.append)
    while llm.has_unfinished: llm.step()
    assert news[-1].finished and not llm.sinks
    b = llm.enter(llm.prepare(P[0], sp(), request_id=a), news.append)
    assert llm.abort(b) and news[-1].finished and not llm.sinks
    works(llm, tiny)

# --- signals

NAMES = [n for n in ('SIGINT', 'SIGTERM', 'SIGALRM', 'SIGHUP', 'SIGUSR1', 'SIGUSR2', 'SIGVTALRM', 'SIGPROF')
         if hasattr(signal, n)]

@pytest.fixture
def handlers():
    "Set handlers for a test; the old ones come back"
    old = {}
    def put(name, f): s = getattr(signal, name); old.setdefault(s, signal.getsignal(s)); signal.signal(s, f); return s
    yield put
    for s, f in old.items(): signal.signal(s, f)

class Time(Exception): "A timeout by signal"

@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('raises', [None, Time, Panic], ids=['returns', 'Exception', 'BaseException'])
def test_a_signal_in_a_step(engine, tiny, monkeypatch, handlers, name, raises):
    "Its handler is called once, with its number, where no step runs; what it raises gets through and drops all whole"
    llm, seen = engine(), []
    def handler(signum, frame):
        seen.append((signum, llm.inside))
        if raises: raise raises
    s, run, calls = handlers(name, handler), llm.execute, iter(range(99))
    def execute(plan):
        out = run(plan)
        if next(calls) == 3: signal.raise_signal(s); assert not seen
        return out
    monkeypatch.setattr(llm, 'execute', execute)
    act = lambda: llm.generate(P, sp(), use_tqdm=False)
    if raises:
        with pytest.raises(raises): act()
        assert llm.scheduler.num_steps == 4                 # at once, not at the end
    else: assert ids(act()) == [solo(tiny, p) for p in P]
    assert seen == [(s, False)] and signal.getsignal(s) is handler
    works(llm, tiny)

def test_signals_come_back_one_by_one(handlers):
    "Two that raise, one that returns, and one whose handler somebody has replaced meanwhile"
    seen = []
    def raises(signum, frame): seen.append(signum); raise Time
    def notes(signum, frame): seen.append(signum)
    who = dict(SIGTERM=raises, SIGUSR1=raises, SIGUSR2=notes, SIGHUP=notes)
    mine = [handlers(n, f) for n, f in who.items()]
    other = lambda *a: seen.append('other')
    with pytest.raises(Time):
        with undisturbed() as held:
            with undisturbed() as inner: assert not inner.old and set(mine) <= set(held.old)
            for s in mine: signal.raise_signal(s); signal.raise_signal(s)
            signal.signal(mine[3], other)
            assert seen == []
    assert Counter(seen) == dict.fromkeys(mine, 1)
    assert [signal.getsignal(s) for s in mine] == [raises, raises, notes, other]
    with undisturbed(): assert not isinstance(signal.getsignal(signal.SIGPIPE), Held)       # not Python's: left alone
    t = threading.Thread(target=lambda: seen.append(len(enter_in_thread()))); t.start(); t.join()
    assert seen[-1] == 0

def enter_in_thread():
    with undisturbed() as held: return held.old

def test_the_second_ctrl_c_does_not_wait(handlers):
    handlers('SIGINT', signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            try: signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt: pass
            else: raise AssertionError('it waited')
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

@pytest.mark.skipif(not hasattr(signal, 'setitimer'), reason='no timers')
@pytest.mark.parametrize('mode', ['recompute', 'swap'])
@pytest.mark.parametrize('seed', range(3))
def test_alarms_at_random(engine, tiny, handlers, mode, seed):
    "An alarm raises again and again while people come and are preempted: who is left says what he says alone"
    rng, rang = random.Random(seed), 0
    def handler(signum, frame): raise Time
    handlers('SIGALRM', handler)
    llm = engine(num_blocks=14, max_num_seqs=3, preemption=mode, max_num_batched_tokens=12)
    want = [solo(tiny, p, sp(24)) for p in P]
    who, outs = {llm.add(P[i % 4], sp(24)): i % 4 for i in range(8)}, {}
    try:
        for _ in range(5000):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(3e-4, .01))
                for o in llm.step(): outs[o.request_id] = o
                if rng.random() < .1: list(llm.stream(P[3], sp(2)))
            except Time: rang += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            try: outs |= {o.request_id: o for o in llm.take()}
            except Time: pass
            llm.check()
            if set(who) <= {i for i, o in outs.items() if o.finished}: break
    finally: signal.setitimer(signal.ITIMER_REAL, 0)
    while llm.has_unfinished: outs |= {o.request_id: o for o in llm.step()}
    assert rang > 3 and all(outs[i].outputs[0].token_ids == want[k] for i, k in who.items())
    works(llm, tiny)
