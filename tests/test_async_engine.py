"""Many callers, one engine thread: they come, wait, dawdle, leave and are cut off, parts fail and threads die.

Each gets exactly one last item, each block comes back, and the next request is served as ever."""
import asyncio, gc, os, random, subprocess, sys, threading, time
from collections import Counter
from contextlib import asynccontextmanager
import pytest, torch
from cbatch import CapacityError, LLM, SamplingParams
from cbatch.async_engine import AsyncLLM, Overloaded, Unavailable
from cbatch.core import Code, Failure, Request, Status, StepOutput
from cbatch.reports import Answer, Detokenizer, Draft
from cbatch.handover import Aside, Box, Desk, last_report
from cbatch.model import tiny_lm
from cbatch.token_loop import generate_ref
from cbatch.worker import Limits, Observer, Worker
from ask import poison
from harness import check_answer, draw_params, llama, prompts, quiet

P = [[5, 6, 7], [200, 3, 77, 8, 9, 10, 11], list(range(40, 60)), [33]]
SOLO = {}

def sp(**kw): return SamplingParams(**dict(temperature=0, max_tokens=12, ignore_eos=True) | kw)
def solo(tiny, prompt, params=None):
    "The oracle's answer; to be asked for before or after an engine runs on the model, not meanwhile"
    key = tuple(prompt), repr(params)
    if key not in SOLO: SOLO[key] = generate_ref(tiny, prompt, params or sp())
    return SOLO[key]

def threads(): return [t for t in threading.enumerate() if t.name.startswith('cbatch')]

@asynccontextmanager
async def serving(llm, **limits):
    "An AsyncLLM that must be at rest, and as good as ever, when the test is done with it"
    a = AsyncLLM(llm, **limits)
    async with a:
        yield a
        await rest(a)
        assert (await a.generate(P[1], sp())).outputs[0].token_ids == SOLO[tuple(P[1]), 'None'].token_ids
        await rest(a)
    assert (a.state, a.is_live, threads()) == ('closed', False, [])
    assert asyncio.all_tasks() == {asyncio.current_task()}
    quiet(llm)

async def until(f):
    "Give the engine time until something is so"
    for _ in range(4000):
        if f(): return
        await asyncio.sleep(.005)
    raise AssertionError('waited in vain')

async def rest(a):
    await until(lambda: a.worker.shared.queue.entered == a.worker.desk.sent and not a.worker.mine.boxes)
    await a.call(quiet)
    assert not a.worker.desk.live and not a.worker.num_queued()

class Gate:
    "Holds an engine within its steps, until the test lets it go on"
    def __init__(self, llm):
        self.plans, self.go, self.run, llm.execute = [], threading.Semaphore(0), llm.execute, self.execute
        self.free = False
    def execute(self, plan):
        self.plans.append(plan)
        if not self.free: assert self.go.acquire(timeout=20)
        return self.run(plan)
    async def inside(self, n): await until(lambda: len(self.plans) >= n)
    async def step(self): n = len(self.plans); self.go.release(); await self.inside(n + 1)
    def open(self): self.free = True; self.go.release()

async def read(stream):
    "All items of a stream: one is the last and says so, and the pieces are the text"
    items = [o async for o in stream]
    assert [o.finished for o in items] == [False] * (len(items) - 1) + [True]
    assert {o.request_id for o in items} == {stream.request_id}
    for i, c in enumerate(items[-1].outputs): assert ''.join(o.outputs[i].delta for o in items) == c.text
    for a, b in zip(items, items[1:]):
        for x, y in zip(a.outputs, b.outputs):
            assert y.token_ids[:len(x.token_ids)] == x.token_ids and y.text.startswith(x.text)
    return items

def tokens(items): return items[-1].outputs[0].token_ids

@pytest.fixture(autouse=True)
def reference(tiny):
    solo(tiny, P[1])
    yield
    assert not threads()

# --- answers

def test_everybody_gets_his_solo_answer(engine, tiny):
    want = [solo(tiny, p).token_ids for p in P]
    async def main():
        async with serving(engine()) as a:
            async def one(i): return tokens(await read(await a.add(P[i % 4], sp())))
            assert await asyncio.gather(*(one(i) for i in range(12))) == want * 3
            assert [o.outputs[0].token_ids for o in await asyncio.gather(*(a.generate(p, sp()) for p in P))] == want
            m = (await a.generate(P[0], sp())).metrics
            assert m.arrival <= m.scheduled_at <= m.token_times[0] <= m.token_times[-1] == m.finished_at
            assert len(m.token_times) == 12
    asyncio.run(main())

def test_text_messages_and_logprobs(engine, tiny):
    async def main():
        async with serving(engine()) as a:
            ids = await a.encode('né, 한국어')
            assert await a.decode(ids) == 'né, 한국어'
            o = await a.generate('né, 한국어', sp(logprobs=2, prompt_logprobs=1))
            c = o.outputs[0]
            assert o.prompt_token_ids == ids and len(o.prompt_logprobs) == len(ids)
            assert len(c.logprobs) == len(c.token_ids) == 12
            assert c.cumulative_logprob == pytest.approx(sum(d[t].logprob for d, t in zip(c.logprobs, c.token_ids)))
            items = await read(await a.add('né', sp(logprobs=0)))
            assert all(len(x.outputs[0].logprobs) == len(x.outputs[0].token_ids) for x in items)
    asyncio.run(main())

def test_predictions(engine, tiny):
    want = solo(tiny, P[0]).token_ids
    async def main():
        async with serving(engine(guesses='lookup', guess_when='always', max_guesses=4)) as a:
            for said, held in ((want, 8), (tuple(want[:3]), 2), ([], 0)):
                o = await a.generate(P[0], sp(), prediction=said)
                assert o.outputs[0].token_ids == want and o.metrics.num_accepted_tokens >= held
            items = await read(await a.add(P[0], sp(), prediction=want))
            assert tokens(items) == want and len(items) < len(want) // 2
            for odd in (5, [999], ['x'], dict(content='x'), 'a\ud800'):
                with pytest.raises(ValueError, match='prediction'): await a.add(P[0], sp(), prediction=odd)
    asyncio.run(main())

def test_n_answers_share_a_stream(engine, tiny):
    "Case 13: sample i is the same whatever n and the company"
    def drawn(n): return SamplingParams(n=n, seed=7, temperature=1., max_tokens=8, ignore_eos=True)
    want = [generate_ref(tiny, P[1], drawn(4), sample_index=i).token_ids for i in range(4)]
    async def main():
        async with serving(engine(max_num_seqs=6)) as a:
            others = [await a.add(P[2], sp()) for _ in range(3)]
            for n in (4, 2, 4):
                outputs = (await read(await a.add(P[1], drawn(n))))[-1].outputs
                assert [c.token_ids for c in outputs] == want[:n] and [c.index for c in outputs] == list(range(n))
            for s in others: await read(s)
    asyncio.run(main())
    assert len({tuple(w) for w in want}) == 4

def test_how_an_answer_ends(engine, tiny):
    "Case 19"
    ref = solo(tiny, P[0]).token_ids
    stop, at = [ref[4]], ref.index(ref[4]) + 1
    ends = [(sp(max_tokens=1), 1, 'length')]
    ends += [(sp(stop_token_ids=stop, **kw), at, 'stop') for kw in (dict(), dict(max_tokens=5))]
    async def main():
        async with serving(engine()) as a:
            for params, n, why in ends:
                items = await read(await a.add(P[0], params))
                assert tokens(items) == ref[:n]
                assert [o.outputs[0].finish_reason for o in items] == [None] * (len(items) - 1) + [why]
    asyncio.run(main())

# --- the boundary

def test_the_loop_goes_on_during_a_step(engine):
    "The step waits for what only the loop can do, then a tokeniser does"
    llm = engine(); gate, real, go = Gate(llm), llm.door.encode, threading.Event()
    async def main():
        async with serving(llm) as a:
            s = await a.add(P[0], sp()); await gate.inside(1)
            others = [await a.add('x' * 20, sp()) for _ in range(4)]      # come while a step runs
            gate.open()
            for x in [s, *others]: await read(x)
            llm.door.encode = lambda p: (go.wait(20), real(p))[1]
            t = asyncio.create_task(a.add('slow', sp()))
            await until(lambda: a.worker.desk.reserved)
            go.set(); await read(await t)
            del llm.door.encode
    asyncio.run(main())

def test_one_call_a_step(engine):
    llm = engine(max_num_seqs=8, num_blocks=100)
    async def main():
        async with serving(llm) as a:
            loop, calls = asyncio.get_running_loop(), []
            real = loop.call_soon_threadsafe
            a.worker.on_loop = lambda f, *args: (calls.append(f.__name__), real(f, *args))
            before = a.metrics()['num_steps']
            await asyncio.gather(*(read(s) for s in await a.add_many([(P[0], sp())] * 8)))
            await rest(a)
            assert 0 < calls.count('wake') <= a.metrics()['num_steps'] - before
            del a.worker.on_loop
    asyncio.run(main())

def test_nobody_else_drives_it(engine):
    llm = engine(); gate = Gate(llm)
    async def main():
        async with serving(llm) as a:
            s = await a.add(P[0], sp()); await gate.inside(1)
            for use in (llm.step, lambda: llm.add(P[0], sp()), lambda: llm.generate(P[0], sp(), use_tqdm=False),
                        lambda: next(llm.stream(P[0], sp())), lambda: llm.abort('r0')):
                with pytest.raises(ValueError, match='another thread'): use()
            gate.open(); await read(s)
    asyncio.run(main())

def test_others_may_look_at_any_time(engine):
    llm = engine(trace=50)
    async def main():
        async with serving(llm) as a:
            over, seen = threading.Event(), []
            def look():
                while not over.is_set():
                    recs, m = a.records(7), a.metrics()
                    assert len(recs) <= 7 and [r.step for r in recs] == sorted(r.step for r in recs)
                    assert 0 <= m['num_free_blocks'] <= m['num_blocks']
                    seen.append(m['num_steps']); time.sleep(.001)
            ts = [threading.Thread(target=look) for _ in range(2)]
            for t in ts: t.start()
            for _ in range(3): await asyncio.gather(*(a.generate(p, sp()) for p in P * 2))
            over.set()
            for t in ts: t.join()
            assert len(set(seen)) > 5
            n = await a.call(lambda l: l.metrics['num_steps'])
            assert n == a.metrics()['num_steps'] == a.records(1)[0].step + 1
            with pytest.raises(ZeroDivisionError): await a.call(lambda l: 1 / 0)
    asyncio.run(main())

# --- the door

def test_refused_as_the_engine_would(engine):
    async def main():
        async with serving(engine(num_blocks=10)) as a:
            wrong = [(x, ValueError) for x in ([], '', [999], 'a\ud800', None)]
            for bad, exc in (*wrong, ([1] * 60, CapacityError)):
                with pytest.raises(exc): await a.add(bad, sp())
                with pytest.raises(exc): await a.add_many([(P[0], sp()), (bad, sp())])
            for kw in (dict(params=5), dict(params=sp(max_tokens=99)), dict(timeout_s=float('nan')), dict(timeout_s=-1),
                       dict(timeout_s='1'), dict(priority='x'), dict(cache_salt=5), dict(cache_salt='x' * 257),
                       dict(request_id=5)):
                with pytest.raises(ValueError): await a.add(P[0], **kw)
            with pytest.raises(ValueError, match='2 request_ids'):
                await a.add_many([(P[0], sp())], request_ids=['a', 'b'])
            assert a.worker.desk.sent == 0 and a.metrics()['num_steps'] == 0
    asyncio.run(main())
    for kw in (dict(max_waiting=0), dict(max_buffer_bytes=1.5), dict(stall_s=0), dict(send_timeout_s=float('inf')),
               dict(max_waiting_tokens=0)):
        with pytest.raises(ValueError): AsyncLLM(engine(), **kw)
    with pytest.raises(ValueError): AsyncLLM('smollm2')

def test_queue_full(engine):
    "Row 19: answers are counted, those that are just being looked at too; all of a list or none"
    llm = engine(max_num_seqs=2); gate = Gate(llm)
    class Seen(Observer):
        def __init__(self): self.reasons = []
        def refused(self, reason): self.reasons.append(reason)
    async def main():
        async with serving(llm, max_waiting=5) as a:
            a.observers.append(seen := Seen())
            here = [await a.add(P[0], sp()) for _ in range(2)]; await gate.inside(1)
            await gate.step(); await gate.step()           # who has joined is known when his first step is over
            here += [await a.add(P[0], sp(temperature=1, n=2)), *await a.add_many([(P[1], sp())] * 2)]
            for ask in (lambda: a.add(P[0], sp(temperature=1, n=2)), lambda: a.add_many([(P[0], sp())] * 2)):
                with pytest.raises(Overloaded) as e: await ask()
                assert e.value.reason == 'requests'
                assert isinstance(e.value.retry_after, int) and 1 <= e.value.retry_after <= 120
            with pytest.raises(ValueError, match='queue holds 5'): await a.add_many([(P[0], sp())] * 6)
            race = (a.add('abc', sp()) for _ in range(4))              # for the last place
            got = await asyncio.gather(*race, return_exceptions=True)
            assert sorted(type(g).__name__ for g in got) == ['Overloaded'] * 3 + ['Stream']
            assert a.worker.num_queued() == 5
            assert seen.reasons == ['requests'] * 5
            gate.open()
            for s in here + [g for g in got if not isinstance(g, Exception)]: await read(s)
    asyncio.run(main())

def test_queue_full_of_tokens(engine):
    llm = engine(max_num_seqs=1); gate = Gate(llm)
    async def main():
        async with serving(llm, max_waiting_tokens=25) as a:
            here = [await a.add(P[0], sp())]; await gate.inside(1)
            here.append(await a.add(P[2], sp())); await gate.step(); await gate.step()
            with pytest.raises(Overloaded) as e: await a.add(P[1], sp())
            assert e.value.reason == 'tokens'
            here.append(await a.add(P[0], sp()))
            gate.open()
            for s in here: await read(s)
            s = await a.add(list(range(40)), sp()); await read(s)     # longer than the limit, but alone
    asyncio.run(main())

def test_ids(engine):
    "Case 9, row 18: what a caller calls his request is his affair"
    llm = engine(max_num_seqs=1); gate = Gate(llm)
    async def main():
        async with serving(llm) as a:
            here = [await a.add(P[0], sp(), request_id=i) for i in ('me', 'r3', 'x\n' * 500)]
            await gate.inside(1)
            for again in ('me', 'r3'):
                with pytest.raises(ValueError, match='in use'): await a.add(P[0], sp(), request_id=again)
            with pytest.raises(ValueError, match='in use'): await a.add_many([(P[0], sp())] * 2, request_ids=['a', 'a'])
            here += [await a.add(P[0], sp()), await a.add(P[0], sp())]
            assert len({s.request_id for s in here}) == 5
            gate.open()
            for s in here: await read(s)
            assert {r for rec in a.records(100) for r, *_ in rec.arrived} == {'r0', 'r1', 'r2', 'r3', 'r4'}
            await read(await a.add(P[0], sp(), request_id='me'))
    asyncio.run(main())

# --- abort and leaving

def test_abort_wherever_it_stands(engine, tiny):
    "Row 22, case 10: one last item each, and it is counted once"
    llm = engine(num_blocks=16, max_num_seqs=3, max_num_batched_tokens=8, force_preempt={'r1': 6}); gate = Gate(llm)
    solo(tiny, P[0])
    async def main():
        async with serving(llm) as a:
            run = await a.add(P[0], sp()); await gate.inside(1)
            other, chunked, waits = [await a.add(p, sp()) for p in (P[3], P[2], P[2])]
            for _ in range(3): await gate.step()
            here = {s: llm.groups[s.request_id][0].request for s in (run, other, chunked)}
            await until(lambda: 0 < here[chunked].num_computed_tokens < 20)
            assert await chunked.abort() and not await chunked.abort()
            assert await a.abort(waits.request_id) and not await a.abort(waits.request_id)
            await gate.step()
            assert not await a.abort('unknown')
            while here[other].status is not Status.PREEMPTED: await gate.step()
            assert await other.abort()
            await gate.step()
            for s in (chunked, waits, other):
                items = await read(s)
                assert items[-1].outputs[0].finish_reason == 'abort' and not items[-1].error
                assert not await s.abort() and not await a.abort(s.request_id)
            while len(here[run].output_ids) < 11: await gate.step()
            assert await run.abort()                      # in the very step in which it ends: too late
            gate.open()
            items = await read(run)
            assert tokens(items) == solo(tiny, P[0]).token_ids and items[-1].outputs[0].finish_reason == 'length'
            assert not await run.abort()
            await rest(a)
            assert a.metrics()['finished'] == dict(abort=3, length=1)
    asyncio.run(main())

async def crowd(a, n=8, **kw): return [await a.add(P[i % 4], sp(max_tokens=60), **kw) for i in range(n)]

@pytest.mark.parametrize('how', ['break', 'exception', 'cancelled', 'cancelled at the door', 'dropped',
                                 'generate cancelled', 'before the first item'])
def test_whoever_leaves_takes_his_request_along(engine, tiny, how):
    "Rows 20 and 21, case 10"
    llm = engine(num_blocks=60)
    async def reader(s):
        async with s:
            async for o in s:
                if how == 'break' and o.outputs[0].token_ids: break
                if how == 'exception' and o.outputs[0].token_ids: raise KeyError
    async def main():
        async with serving(llm) as a:
            stay = await a.add(P[2], sp(max_tokens=40))
            if how == 'cancelled at the door':
                real, gate = llm.door.encode, threading.Event()
                llm.door.encode = lambda p: (gate.wait(20), real(p))[1]
                tasks = [asyncio.create_task(a.add(p, sp())) for p in P * 2]
                await until(lambda: a.worker.desk.reserved == 8)
                for t in tasks: t.cancel()
                gate.set(); del llm.door.encode
            elif how == 'generate cancelled':
                tasks = [asyncio.create_task(a.generate(p, sp(max_tokens=60))) for p in P * 2]
                await until(lambda: a.worker.desk.sent == 9)
            else:
                tasks, nobody = [], how in ('dropped', 'before the first item')
                if not nobody: tasks = [asyncio.create_task(reader(s)) for s in await crowd(a)]
                if how == 'dropped': streams = await crowd(a); await anext(streams[0]); del streams; gc.collect()
                if how == 'before the first item':
                    for s in await crowd(a):
                        async with s: pass
            if 'cancelled' in how:
                await asyncio.sleep(.02)
                for t in tasks: t.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert tokens(await read(stay)) == want
            await rest(a)
            assert a.metrics()['finished'].get('abort', 0) == (0 if how == 'cancelled at the door' else 8)
    want = solo(tiny, P[2], sp(max_tokens=40)).token_ids
    asyncio.run(main())

# --- slow readers

def test_a_slow_reader_gets_fewer_and_longer_pieces(engine, tiny):
    async def main():
        async with serving(engine()) as a:
            slow, quick = await a.add(P[2], sp(max_tokens=40)), await a.add(P[2], sp(max_tokens=40))
            n = len(await read(quick))
            await until(lambda: slow.box.closed)
            items = await read(slow)
            assert len(items) == 1 < n and tokens(items) == want
            half = await a.add(P[2], sp(max_tokens=40)); first = await anext(half); await until(lambda: half.box.closed)
            last = await anext(half)
            assert first.outputs[0].delta + last.outputs[0].delta == last.outputs[0].text
            assert [o async for o in half] == []
    want = solo(tiny, P[2], sp(max_tokens=40)).token_ids
    asyncio.run(main())

@pytest.mark.parametrize('limits,why', [(dict(max_buffer_bytes=10), 'bytes of text were not read'),
                                        (dict(send_timeout_s=.02), 'nothing was read for')])
def test_a_reader_who_never_reads_is_cut_off(engine, tiny, limits, why):
    "Row 23: with a reason, and his company does not notice"
    llm = engine(num_blocks=100)
    if 'send_timeout_s' in limits:
        run = llm.execute; llm.execute = lambda plan: (time.sleep(.004), run(plan))[1]
    async def main():
        async with serving(llm, **limits) as a:
            slow = await a.add(P[2], sp(max_tokens=100))
            quiet_one = await a.generate(P[2], sp(max_tokens=20))      # it keeps its text to the end: not slow
            assert quiet_one.outputs[0].token_ids == want
            tokens(await read(await a.add(P[2], sp(max_tokens=20))))
            await until(lambda: slow.box.closed)
            items = await read(slow)
            assert why in items[-1].error and items[-1].outputs[0].finish_reason == 'abort'
            assert 0 < len(tokens(items)) < 100
    want = solo(tiny, P[2], sp(max_tokens=20)).token_ids
    asyncio.run(main())

def test_a_box():
    b = Box(Request('r', [1], sp(), 12), 'me')
    answer = Answer(b.request, None)
    def draft(new, ids, status=Status.RUNNING):
        b.request.output_ids, b.request.status = ids, status
        answer.text.text += new
        return Draft('r', [answer])
    assert b.take() is None
    assert b.put(draft('ab', [1]), 5.) and not b.put(draft('cé', [1, 2]), 6.) and (b.num_bytes, b.since) == (5, 5.)
    o = b.take()
    assert (o.outputs[0].delta, o.outputs[0].token_ids, o.request_id, b.num_bytes) == ('abcé', [1, 2], 'me', 0)
    assert b.put(draft('d', [1, 2, 3]), 7.) and b.put(draft('e', [1, 2, 3, 4], Status.FINISHED), 8.)
    assert not b.put(draft('f', [9], Status.FINISHED), 9.)
    o = b.take()
    assert (o.outputs[0].delta, o.finished, b.take()) == ('de', True, None)

# --- parts that fail

def test_a_row_that_fails_fails_alone(engine, tiny):
    "Rows 24 and 25"
    llm = engine()
    poison(llm, lambda r: r.user == 'nan' and len(r.output_ids) == 3)
    push = Detokenizer.push
    async def main():
        async with serving(llm) as a:
            bad, good = await a.add(P[0], sp(), user='nan'), await a.add(P[1], sp())
            items = await read(bad)
            assert 'NaN' in items[-1].error and items[-1].outputs[0].finish_reason == 'error'
            assert len(tokens(items)) == 3
            assert tokens(await read(good)) == solo(tiny, P[1]).token_ids
            odd, good = await a.add(P[0], sp(max_tokens=13)), await a.add(P[1], sp())
            def broken(self, ids, last=False):
                return 1 / 0 if self.p.max_tokens == 13 and len(ids) == 4 else push(self, ids, last)
            Detokenizer.push = broken
            try:
                assert 'ZeroDivisionError' in (await read(odd))[-1].error
                assert tokens(await read(good)) == solo(tiny, P[1]).token_ids
            finally: Detokenizer.push = push
    asyncio.run(main())

@pytest.mark.parametrize('exc', [RuntimeError, torch.OutOfMemoryError], ids=['forward', 'memory'])
def test_a_step_that_fails(engine, tiny, exc):
    "Row 26: an exception ends those of the step; a lack of memory only halves it"
    llm = engine(); real, calls = llm.execute, []
    def execute(plan):
        calls.append(len(plan.scheduled))
        if len(calls) == 5: raise exc('bang')
        return real(plan)
    llm.execute = execute
    async def main():
        async with serving(llm) as a:
            got = await asyncio.gather(*(read(s) for s in await a.add_many([(p, sp()) for p in P * 2])))
            bad = [g for g in got if g[-1].error]
            assert all('bang' in g[-1].error for g in bad) and len(bad) == (calls[4] if exc is RuntimeError else 0)
            assert [tokens(g) for g in got if g not in bad] == [w for g, w in zip(got, want * 2) if g not in bad]
    want = [solo(tiny, p).token_ids for p in P]
    asyncio.run(main())

def test_a_device_that_is_lost(engine, monkeypatch):
    "Row 26: after an illegal address each step fails, and only the thread's end tells"
    llm = engine(); probed = []
    def lost(*args, **kw): probed.append(1); raise RuntimeError('an illegal memory access was encountered')
    def execute(plan): raise RuntimeError('bang')
    run, llm.execute = llm.execute, execute
    async def main():
        async with serving(llm) as a:
            assert 'bang' in (await a.generate(P[0], sp())).error and a.is_live     # the device answers
            llm.execute = run
        llm.execute = execute
        a = AsyncLLM(llm)
        monkeypatch.setattr(torch, 'zeros', lost)
        assert 'bang' in (await a.generate(P[0], sp())).error
        await until(lambda: not a.is_live)
        monkeypatch.undo()
        assert (a.state, probed) == ('dead', [1])
        await a.close()
    asyncio.run(main()); quiet(llm)

@pytest.mark.parametrize('place', ['schedule', 'update'])
def test_the_thread_dies(engine, tiny, place):
    "Row 27: everybody hears of it, those who wait too"
    llm = engine(max_num_seqs=2); gate = Gate(llm)
    async def main():
        a = AsyncLLM(llm)
        streams = [await a.add(p, sp()) for p in P]; quick = asyncio.create_task(a.generate(P[0], sp()))
        await gate.inside(1); await gate.step()
        def broken(*args): raise SystemError('bang')
        setattr(llm.scheduler, place, broken)
        gate.open()
        for items in await asyncio.gather(*map(read, streams)):
            assert 'bang' in items[-1].error and items[-1].outputs[0].finish_reason == 'error'
        assert 'bang' in (await quick).error
        await until(lambda: not a.worker.is_alive())
        assert (a.state, a.is_live) == ('dead', False)
        with pytest.raises(Unavailable, match='bang') as e: await a.add(P[0], sp())
        assert e.value.state == 'dead' and 1 <= e.value.retry_after <= 120
        assert not await streams[0].abort() and not await a.abort(streams[0].request_id)
        assert [o async for o in streams[0]] == []
        await a.close(); await a.drain()
        assert a.state == 'dead'
        with pytest.raises(SystemError): await a.start()
        delattr(llm.scheduler, place)
        if place == 'schedule':
            async with serving(llm): pass
    asyncio.run(main())

def test_a_step_that_stalls(engine, tiny):
    "Row 27: seen from outside while it lasts; over when it ends"
    llm = engine(); gate = Gate(llm)
    async def main():
        async with serving(llm, stall_s=.05) as a:
            s = await a.add(P[0], sp()); await gate.inside(1)
            assert a.is_live
            await until(lambda: a.state == 'stalled')
            assert not a.is_live
            with pytest.raises(Unavailable) as e: await a.add(P[0], sp())
            assert e.value.state == 'stalled'
            gate.open(); await read(s)
            await until(lambda: a.state == 'ready'); assert a.is_live
            await until(lambda: a.worker.shared.busy_since is None)     # nothing to do is no stall
            gate.free = False; s = await a.add(P[0], sp()); await until(lambda: not a.is_live)
            gate.open(); await read(s); await until(lambda: a.is_live)
    asyncio.run(main())

def test_a_step_that_never_ends(engine):
    llm = engine(); gate = Gate(llm)
    async def main():
        a = AsyncLLM(llm, stall_s=.05)
        s = await a.add(P[0], sp()); await gate.inside(1)
        await a.close()
        assert 'does not end' in (await read(s))[-1].error and a.state == 'dead' and not a.is_live
        gate.open(); a.worker.join(20)
        assert [o async for o in s] == []
    asyncio.run(main()); quiet(llm)

def test_the_loop_closes_under_it(engine):
    llm, kept = engine(max_num_seqs=1), []
    async def leave(n):
        a = await AsyncLLM(llm, idle_s=.02).start()
        kept.append((a, [await a.add(P[0], sp(max_tokens=100)) for _ in range(n)]))
    for n in (3, 0):
        asyncio.run(leave(n))
        a, streams = kept.pop()
        a.worker.join(20)
        assert (a.state, a.is_live) == ('dead', False)
        async def later():
            for s in streams: assert 'event loop' in (await anext(s)).error and [o async for o in s] == []
            with pytest.raises(Unavailable) as e: await a.add(P[0], sp())
            assert e.value.state == 'dead'
        asyncio.run(later())
        quiet(llm)
    async def works():
        async with serving(llm): pass
    asyncio.run(works())

# --- time

def test_deadlines(engine, tiny):
    "Row 29: of one that runs, one that waits, and one that waits while nothing runs"
    now = [0.]
    llm = engine(max_num_seqs=1); llm.clock = lambda: now[0]; gate = Gate(llm)
    async def main():
        async with serving(llm, idle_s=.01) as a:
            runs, waits, fine = [await a.add(P[0], sp(), timeout_s=t) for t in (5, 3, None)]
            await gate.inside(1); await gate.step()
            now[0] = 4.; await gate.step(); await gate.step()
            assert 'deadline' in (await read(waits))[-1].error and not runs.box.closed
            now[0] = 6.; gate.open()
            items = await read(runs)
            assert 'deadline' in items[-1].error and items[-1].outputs[0].finish_reason == 'error'
            assert 0 < len(tokens(items)) < 12
            assert tokens(await read(fine)) == solo(tiny, P[0]).token_ids
            late = await a.generate(P[0], sp(), timeout_s=0)
            assert 'deadline' in late.error and not late.outputs[0].token_ids
    solo(tiny, P[0])
    asyncio.run(main())

def test_a_deadline_while_nothing_runs(engine):
    from cbatch.policies import Dynamic
    llm = engine(policy=Dynamic(1000.))
    async def main():
        async with AsyncLLM(llm) as a:
            o = await a.generate(P[0], sp(), timeout_s=.05)
            assert 'deadline' in o.error
            await rest(a)
    asyncio.run(main()); quiet(llm)

def test_the_wall_clock_may_jump(engine, monkeypatch):
    "Row 31"
    async def main():
        async with serving(engine()) as a:
            t = [1e9]
            monkeypatch.setattr(time, 'time', lambda: t.append(t[-1] - 3600) or t[-1])
            o = await a.generate(P[0], sp(), timeout_s=30.)
            assert not o.error and o.metrics.arrival <= o.metrics.token_times[0] <= o.metrics.finished_at
            monkeypatch.undo()
    asyncio.run(main())

def test_hardly_any_memory(engine, tiny):
    "Row 32: requests as long as the pool nearly allows; each comes through"
    params = sp(max_tokens=28)
    want = [solo(tiny, p, params).token_ids for p in P]
    async def main():
        async with serving(engine(num_blocks=14, max_num_seqs=4)) as a:
            got = await asyncio.gather(*(a.generate(p, params) for p in P * 2))
            assert [o.outputs[0].token_ids for o in got] == want * 2
            assert 0 < a.metrics()['num_preemptions'] < 100
    asyncio.run(main())

def test_a_model_without_an_end(tiny):
    "Row 33"
    lm = tiny_lm('llama', eos_token_id=None)
    async def main():
        async with AsyncLLM(LLM(lm, num_blocks=20, block_size=4, check=True)) as a:
            o = await a.generate(P[0], SamplingParams(temperature=0))
            assert (len(o.outputs[0].token_ids), o.outputs[0].finish_reason) == (77, 'length')
    asyncio.run(main())

# --- a life from start to end

def test_a_function_that_makes_the_engine(tiny):
    go, made = threading.Event(), []
    def make(): assert go.wait(20); made.append(LLM(tiny, num_blocks=20)); return made[0]
    async def main():
        a = AsyncLLM(make)
        assert (a.state, a.metrics(), a.records(3)) == ('starting', {}, [])
        t = asyncio.create_task(a.start()); await until(a.worker.is_alive)
        assert (a.state, a.is_live) == ('starting', True)
        with pytest.raises(Unavailable) as e: await a.add(P[0], sp())
        assert e.value.state == 'starting'
        go.set(); await t
        assert a.state == 'ready' and (await a.generate(P[1], sp())).outputs[0].token_ids == solo_ids
        await a.drain()
        assert a.state == 'closed' and made[0].model is None          # what it made, it closes
        for broken, exc in ((lambda: 1 / 0, ZeroDivisionError), (lambda: 5, ValueError)):
            b = AsyncLLM(broken)
            with pytest.raises(exc): await b.start()
            assert (b.state, b.is_live) == ('dead', False)
            with pytest.raises(Unavailable): await b.add(P[0], sp())
            await b.close()
        c = AsyncLLM(make); await c.close()
        assert c.state == 'closed'
        with pytest.raises(Unavailable): await c.add(P[0], sp())
        with pytest.raises(Unavailable): await c.start()
    solo_ids = solo(tiny, P[1]).token_ids
    asyncio.run(main())

def test_drain(engine, tiny):
    "Row 28, at this level"
    llm = engine(max_num_seqs=2); gate = Gate(llm)
    want = [solo(tiny, p).token_ids for p in P]
    async def main():
        a = AsyncLLM(llm)
        streams = [await a.add(p, sp()) for p in P]; await gate.inside(1)
        t = asyncio.create_task(a.drain(60.)); await asyncio.sleep(0)
        assert (a.state, a.is_live) == ('draining', True)
        for ask in (lambda: a.add(P[0], sp()), lambda: a.encode('x'), lambda: a.call(len)):
            with pytest.raises(Unavailable) as e: await ask()
            assert e.value.state == 'draining'
        gate.open()
        assert [tokens(await read(s)) for s in streams] == want
        await t
        assert (a.state, a.is_live) == ('closed', False)
        await a.drain(); await a.close()
        quiet(llm)
        gate.free = False
        a, n = AsyncLLM(llm), len(gate.plans)
        streams = [await a.add(p, sp()) for p in P]; await gate.inside(n + 1)
        t = asyncio.create_task(a.drain(60.)); await asyncio.sleep(0)
        u = asyncio.create_task(a.close()); await asyncio.sleep(0)              # a second signal: now
        gate.open(); await asyncio.gather(t, u)
        ends = [(await read(s))[-1] for s in streams]
        assert [(o.outputs[0].finish_reason, o.error) for o in ends] == [('abort', None)] * 4 and a.state == 'closed'
        quiet(llm)
        async with serving(llm): pass
    asyncio.run(main())

def test_closed_while_a_prompt_becomes_tokens(engine):
    llm = engine(); real, go = llm.door.encode, threading.Event()
    llm.door.encode = lambda p: (go.wait(20), real(p))[1]
    async def main():
        a = await AsyncLLM(llm).start()
        t = asyncio.create_task(a.add('slow', sp())); await until(lambda: a.worker.desk.reserved)
        closing = asyncio.create_task(a.drain(60.)); await asyncio.sleep(.01)
        go.set()
        with pytest.raises(Unavailable): await t
        await closing
        assert a.state == 'closed' and not a.worker.desk.sent and not a.worker.desk.reserved
    asyncio.run(main()); quiet(llm)

def test_adds_that_race_with_the_end(engine):
    "Whatever comes first, nobody waits for ever"
    llm = engine()
    async def one(k):
        a = await AsyncLLM(llm).start()
        async def ask():
            try: return (await a.generate(P[0], sp())).outputs[0].finish_reason
            except Unavailable: return 'unavailable'
        tasks = [asyncio.create_task(ask()) for _ in range(6)]
        for _ in range(k): await asyncio.sleep(0)
        await a.close()
        assert set(await asyncio.gather(*tasks)) <= {'unavailable', 'abort', 'length'}
        quiet(llm)
    for k in range(12): asyncio.run(one(k))

def test_a_new_one_takes_over(engine, tiny):
    "Row 34: a notebook cell that runs again, while the old objects are still held"
    llm = engine(num_blocks=60)
    async def main():
        old = AsyncLLM(llm); s = await old.add(P[2], sp(max_tokens=100)); await anext(s)
        async with serving(llm) as a:
            assert [o.outputs[0].finish_reason async for o in s][-1] == 'abort' and old.state == 'closed'
            with pytest.raises(Unavailable): await old.add(P[0], sp())
            await read(await a.add(P[0], sp()))
    asyncio.run(main())

def test_forgotten(engine):
    "Row 34: nobody holds it any more"
    llm = engine(num_blocks=60)
    async def main():
        a = AsyncLLM(llm); s = await a.add(P[2], sp(max_tokens=100)); await anext(s); w = a.worker
        del a, s; gc.collect()
        await until(lambda: not w.is_alive())
        assert w.state == 'closed'
        quiet(llm)
        async with serving(llm): pass
    asyncio.run(main())

def test_the_interpreter_ends():
    "With an engine at work and nobody to close it"
    code = '''if 1:
        import asyncio
        from cbatch import LLM, SamplingParams, tiny_lm
        from cbatch.async_engine import AsyncLLM
        async def main():
            global a, s
            a = AsyncLLM(LLM(tiny_lm('llama'), num_blocks=40))
            s = await a.add([1, 2], SamplingParams(max_tokens=500, ignore_eos=True))
            await anext(s); print('served')
        loop = asyncio.new_event_loop(); loop.run_until_complete(main())'''
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120)
    assert (r.returncode, r.stdout) == (0, 'served\n'), r.stderr

def test_observers(engine):
    llm = engine()
    class Seen(Observer):
        def __init__(self): self.ends, self.steps, self.threads = [], [], set()
        def finished(self, output, request):
            self.ends.append((request.request_id, output.outputs[0].finish_reason))
            self.threads.add(threading.current_thread().name)
        def stepped(self, record, metrics): self.steps.append((record.step, metrics['num_steps'])); 1 / 0
    async def main():
        async with serving(llm) as a:
            a.observers.append(seen := Seen())
            streams = await a.add_many([(p, sp()) for p in P])
            await streams[2].abort()
            for s in streams: await read(s)
            await rest(a)
            assert sorted(seen.ends) == [('r0', 'length'), ('r1', 'length'), ('r2', 'abort'), ('r3', 'length')]
            assert seen.threads == {'cbatch-engine'}
            assert [b for _, b in seen.steps] == [s + 1 for s, _ in seen.steps] == list(range(1, len(seen.steps) + 1))
    asyncio.run(main())

# --- all of it at once

@pytest.mark.parametrize('preemption', ['recompute', 'swap'])
def test_soak(preemption):
    "Readers that are quick, slow, absent, impatient or gone, on hardly enough memory; CBATCH_SOAK_S for longer"
    seconds, rng, seen = float(os.environ.get('CBATCH_SOAK_S', 8)) / 2, random.Random(f'soak {preemption}'), Counter()
    def draw(i):
        prompt, wish = rng.randrange(len(prompts())), rng.choice([0, 0, 0, 1, 2, 3])
        return f'q{i}', prompt, wish, draw_params(rng, prompt, wish)
    asks = [draw(i) for i in range(30)]                     # their answers are known before the engine starts
    pool = dict(num_blocks=30, block_size=4, max_num_seqs=6, max_num_batched_tokens=33)
    llm = LLM(llama(), preemption=preemption, check=True, **pool)
    async def visit(a, ask):
        how = rng.choice(['read', 'read', 'read', 'generate', 'slow', 'leave', 'cancel', 'late', 'abort'])
        _, prompt, _, params = ask; ids = list(prompts()[prompt])
        try:
            if how == 'generate':
                o = await a.generate(ids, params)
                return check_answer(ask, o.outputs[0].token_ids, o, seen)
            if how == 'cancel':
                t = asyncio.create_task(a.generate(ids, params)); await asyncio.sleep(rng.random() * .03); t.cancel()
                await asyncio.gather(t, return_exceptions=True); seen['cancelled'] += 1; return
            last = text = None
            async with await a.add(ids, params, timeout_s=rng.random() * .05 if how == 'late' else None) as s:
                async for o in s:
                    assert last is None or not last.finished
                    last, text = o, (text or '') + o.outputs[0].delta
                    assert text == o.outputs[0].text
                    if how == 'leave' and rng.random() < .2: break
                    if how == 'slow': await asyncio.sleep(rng.random() * .03)
                    if how == 'abort' and rng.random() < .2: await s.abort()
            if last is None: return
            whole = last.finished and not last.error and last.outputs[0].finish_reason in ('stop', 'length')
            check_answer(ask, last.outputs[0].token_ids, last if whole else None, seen)
            seen[f'{how}, {"whole" if whole else "part"}'] += 1
        except Overloaded: seen['overloaded'] += 1
    async def main():
        async with AsyncLLM(llm, max_waiting=12, send_timeout_s=.02) as a:
            end, tasks = time.monotonic() + seconds, set()
            while time.monotonic() < end:
                if len(tasks) > 30: tasks = (await asyncio.wait(tasks, return_when='FIRST_COMPLETED'))[1]
                tasks.add(asyncio.create_task(visit(a, rng.choice(asks)))); seen['visits'] += 1
                if rng.random() < .5: await asyncio.sleep(rng.random() * .01)
                for t in [t for t in tasks if t.done()]: tasks.discard(t); t.result()
            await asyncio.gather(*tasks)
            await rest(a)
            m = a.metrics()
            assert sum(m['finished'].values()) == a.worker.desk.sent and a.is_live
            return m
    for ask in asks: check_answer(ask, [], None, seen)      # ask the oracle for all of them beforehand
    m = asyncio.run(main()); quiet(llm)
    assert m['num_preemptions'] and seen['equal'] and not seen['different']

def test_the_thread_for_text(engine, tiny):
    "It counts as a place in the queue, is seen when it hangs, and takes nobody with it when it ends"
    llm = engine(); solo(tiny, P[1]); go = threading.Event()
    async def main():
        a = await AsyncLLM(llm, max_waiting=3, stall_s=.05).start()
        with pytest.raises(RuntimeError, match='StopIteration'): await asyncio.wait_for(a.off_loop(next, iter(())), 5)
        first = asyncio.ensure_future(a.off_loop(go.wait, 20)); await until(lambda: a.state == 'stalled')
        assert not a.is_live
        go.set(); await first; assert a.is_live; go.clear()
        first = asyncio.ensure_future(a.off_loop(go.wait, 20))
        rest_ = [asyncio.ensure_future(f) for f in (a.encode('a'), a.decode([65]), a.encode('b'))]
        await until(lambda: a.worker.aside.since); assert a.worker.desk.reserved == 3
        with pytest.raises(Overloaded): await a.encode('c')
        with pytest.raises(Overloaded): await a.decode([65])
        a.worker.stop()
        got = await asyncio.wait_for(asyncio.gather(*rest_, return_exceptions=True), 5)
        assert [type(r) for r in got] == [Unavailable] * 3
        go.set(); assert await first
        assert a.worker.desk.reserved == 0
        await a.close()
    asyncio.run(main()); quiet(llm)

def test_too_many_scores(engine, tiny, monkeypatch):
    llm = engine(); solo(tiny, P[1]); monkeypatch.setattr('cbatch.async_engine.MAX_SCORES', 100)
    async def main():
        async with serving(llm) as a:
            for asks in ([(P[0], sp(logprobs=9))], [(P[0], sp(logprobs=4, n=2))], [(P[2], sp(prompt_logprobs=5))],
                         [(P[0], sp(logprobs=4)), (P[1], sp(logprobs=4))]):
                with pytest.raises(ValueError, match='logprobs of 1[24]0 tokens in all: at most 100'):
                    await a.add_many(asks)
            fine = [(P[0], sp(logprobs=1, n=2)), (P[0], sp(logprobs=0, prompt_logprobs=0))]
            for s in await a.add_many(fine): await read(s)
    asyncio.run(main())

@pytest.mark.parametrize('n,at', [(1, 1), (2, 1), (2, 2)])
def test_a_request_that_can_not_enter(engine, tiny, n, at):
    "It ends by an error, nothing of it stays, the others go on"
    llm = engine(); solo(tiny, P[1])
    async def main():
        async with serving(llm) as a:
            with pytest.raises(ValueError, match='lone surrogate'): await a.add(P[0], sp(), cache_salt='a\ud800')
            push, seen = llm.scheduler.waiting.push, []
            def fail(r):
                if r.params.n == n and not r.params.greedy: seen.append(r)
                if len(seen) == at and r is seen[-1]: raise KeyError('push')
                push(r)
            llm.scheduler.waiting.push = fail
            bad, good = await a.add_many([(P[0], sp(temperature=1, n=n)), (P[1], sp())])
            assert (await read(bad))[-1].error == "KeyError: 'push'"
            assert (await read(good))[-1].outputs[0].token_ids == solo(tiny, P[1]).token_ids
            del llm.scheduler.waiting.push
    asyncio.run(main())

def test_scores_fill_a_box_too(engine, tiny):
    "A reader of log probabilities leaves more lying than text"
    llm = engine(); solo(tiny, P[1])
    async def main():
        async with serving(llm, max_buffer_bytes=3000) as a:
            cut, kept = await a.add_many([(P[0], sp(logprobs=4, max_tokens=100)), (P[0], sp(max_tokens=100))])
            await until(lambda: cut.box.closed and kept.box.closed)
            assert (await read(cut))[-1].error.startswith('cut off: 3') and (await read(kept))[-1].error is None
    asyncio.run(main())

# --- the parts, by themselves

def test_a_call_that_the_end_overtakes(engine):
    "A wish that the thread never reads, or that can't be told, keeps nobody waiting"
    llm = engine(); gate = Gate(llm)
    async def main():
        a = await AsyncLLM(llm).start()
        with pytest.raises(RuntimeError, match='StopIteration'):
            await asyncio.wait_for(a.call(lambda l: next(iter(()))), 20)
        s = await a.add(P[0], sp()); await gate.inside(1)
        gone, call = (asyncio.create_task(a.call(lambda l: l.num_free_blocks)) for _ in range(2))
        await asyncio.sleep(0); gone.cancel()
        a.worker.stop(); gate.open()
        with pytest.raises(Unavailable): await asyncio.wait_for(call, 20)
        assert (await asyncio.gather(gone, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        await read(s); await a.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
    asyncio.run(main()); quiet(llm)

def test_ensure_ready_and_off_loop(engine):
    "The gate of a server: the engine, or a refusal that is counted; and work aside, which ends with the engine"
    llm, reasons = engine(), []
    class Seen(Observer):
        def refused(self, reason): reasons.append(reason)
    async def main():
        a = AsyncLLM(llm); a.observers.append(Seen())
        with pytest.raises(Unavailable): a.ensure_ready()
        async with a:
            assert a.ensure_ready() is llm and await a.off_loop(lambda x, y=0: x + y, 1, y=2) == 3
            with pytest.raises(ZeroDivisionError): await a.off_loop(lambda: 1 / 0)
            with pytest.raises(RuntimeError, match='another event loop'):
                await asyncio.to_thread(asyncio.run, inside(a))
        for ask in (lambda: a.off_loop(len, 'x'), lambda: inside(a)):
            with pytest.raises(Unavailable) as e: await ask()
            assert e.value.state == 'closed' and e.value.retry_after >= 1
        assert reasons == ['starting', 'closed', 'closed']
    async def inside(a): return a.ensure_ready()
    asyncio.run(main())

def test_a_text_aside():
    async def main():
        aside, begun, go = Aside(), threading.Event(), threading.Event()
        first = asyncio.create_task(aside.do(lambda: (begun.set(), go.wait(20)))); await until(begun.is_set)
        assert aside.since is not None
        later = [asyncio.create_task(aside.do(str, i)) for i in range(3)]; await asyncio.sleep(0)
        later[0].cancel()                                   # its caller has gone: it is never done
        t = threading.Thread(target=aside.close); t.start()
        with pytest.raises(RuntimeError, match='dropped'): await later[1]
        go.set(); await first; t.join()
        assert aside.since is None and later[0].cancelled()
        with pytest.raises(RuntimeError): await aside.do(len, 'x')
    asyncio.run(main())

def test_a_last_report_by_whoever_comes_first(engine):
    "A box closes once, whatever the engine says later"
    llm = engine()
    r = llm.prepare(P[0], sp()); b = Box(r, 'me')
    llm.enter(r, lambda draft: b.put(draft, 0.))
    for _ in range(3): llm.step()
    lost = last_report(b, 'error', Failure(Code.ENGINE, 'lost'))
    assert b.put(lost, 1.) and not b.put(last_report(b, 'abort', None), 2.)
    while llm.has_unfinished: llm.step()
    o = b.take()
    assert (o.finished, o.error, o.outputs[0].finish_reason, len(o.outputs[0].token_ids)) == (True, 'lost', 'error', 3)
    assert b.take() is None and o.outputs[0].delta == o.outputs[0].text
    n = Box(llm.prepare(P[0], sp(temperature=1, n=3)), 'three'); n.put(last_report(n, 'abort', None), 0.)
    assert [(c.finish_reason, c.token_ids, c.text) for c in n.take().outputs] == [('abort', [], '')] * 3

def test_a_box_that_is_too_full(engine):
    b = Box(engine().prepare(P[0], sp()), 'me')
    assert b.excess(1e9, 1, .001) is None                   # nothing lies here, so nobody is late
    b.news, b.since, b.num_bytes = object(), 5., 10
    assert b.excess(6., 10, 1.) is None
    assert 'cut off: 10 bytes' in b.excess(6., 9, 1.).text and 'cut off: nothing' in b.excess(6.1, 10, 1.).text

def test_the_desk(engine):
    "It wakes who waits, forgets who has ended, and lets a name be used again"
    llm = engine()
    async def main():
        desk, one, two = Desk(), *(Box(llm.prepare(P[0], sp()), 'me') for _ in range(2))
        desk.live['me'] = two
        one.closed, one.waiter = True, asyncio.get_running_loop().create_future()
        desk.wake([one])
        assert one.waiter.done() and desk.live == {'me': two}        # the name is another's by now
        desk.wake([one, two]); assert desk.live == {'me': two}       # who was called already, and who waits for nothing
        two.closed = True; desk.farewell()
        assert not desk.live and desk.ready.is_set() and desk.ended.is_set()
    asyncio.run(main())

def test_who_stops_first(engine):
    "From many threads at once: the soonest counts"
    w = Worker(engine(), Limits())
    assert (w.stop_at, w.state) == (None, 'starting')
    ts = [threading.Thread(target=w.stop, args=(60. + i,)) for i in range(20)]
    for t in ts: t.start()
    for t in ts: t.join()
    assert len(w.stops) == w.inbox.qsize() == 20 and w.stop_at == min(w.stops) and w.state == 'closed'
    w.stop(); assert w.stop_at < time.monotonic() + 1
