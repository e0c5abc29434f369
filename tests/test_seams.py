"""Every seam of the engine with a toy in its place: plans made by hand, executors, runners, masks, old files.

What is put in is as small as a stranger would write it; what comes out is compared with the oracle."""
import random
from concurrent.futures import Future, ThreadPoolExecutor
import numpy as np, pytest, torch
from cbatch import LLM
from cbatch.core import Plan, Scheduled, StepOutput
from cbatch.metrics import EngineCounters
from cbatch.prefix_caching import block_hash, root
from cbatch.runner import Executor, Pending, Sampler
from cbatch.token_loop import generate_ref
from cbatch.trace import record
from ask import sp
from harness import follows, in_cpp, quiet
from toy import Crowd

P = [[5, 6, 7], [200, 3, 77, 8, 9, 10, 11], list(range(40, 60)), [33]]

def solo(model, prompt, params): return generate_ref(model, prompt, params).token_ids
def ids(outs): return [o.outputs[0].token_ids for o in outs]

ROOMY = dict(torch=dict(block_size=4, num_blocks=40), cpu=dict(block_size=16, num_blocks=12))
SHORT = dict(torch=dict(block_size=4, num_blocks=11), cpu=dict(block_size=16, num_blocks=4))   # for three that join

@pytest.fixture(params=['torch', 'cpu'])
def backend(request):
    "Attention in torch, and in C++ with the lean model"
    if request.param == 'torch':
        yield 'torch'
        return
    with in_cpp() as there:
        if not there: pytest.skip('no C++ compiler')
        yield 'cpu'

# --- a step that computes guesses

def decoding(llm, prompt, params, num_said=3):
    "A request that has said something; what comes next is told by hand"
    name = llm.add(prompt, params)
    while len((r := llm.requests[name].request).output_ids) < num_said: llm.step()
    return r

def guessing(llm, r, draft):
    "A step that computes the last known token of `r` and guesses what follows"
    n, plan = r.num_tokens, Plan(llm.scheduler.num_steps, 0.)
    llm.scheduler.grow(r, n + len(draft), plan)
    plan.scheduled.append(Scheduled(r, n - 1, n, tuple(draft), 1 + len(draft)))
    return plan

def wrong(token): return (token + 1) % 258

@pytest.mark.parametrize('prompt', P[:3], ids=len)
@pytest.mark.parametrize('num_right', range(6))
def test_guesses_hold_up_to_the_first_that_differs(engine, tiny, backend, prompt, num_right):
    "Five guesses: those before the first wrong one are taken, and one token more; the next steps go on from there"
    llm, params = engine(backend=backend, **ROOMY[backend]), sp(20)
    ref = solo(tiny, prompt, params)
    r = decoding(llm, prompt, params)
    draft = [*ref[3:3 + num_right], *map(wrong, ref[3 + num_right:8])]
    plan = guessing(llm, r, draft)
    out = llm.execute(plan)
    assert out.sampled == {r.request_id: ref[3:4 + num_right]} and not out.errors
    assert llm.scheduler.update(plan, out, 1.) == []
    assert r.output_ids == ref[:4 + num_right] and r.token_times[3:] == [1.] * (1 + num_right)
    assert r.num_computed_tokens == r.num_tokens - 1
    named(llm.scheduler.blocks, r)
    llm.scheduler.check()
    while llm.has_unfinished: last = llm.step()
    assert ids(last) == [ref]
    quiet(llm)

def named(blocks, r):
    "Each full block of `r` can be found by what it holds, and no other"
    name, bs = root(r.cache_salt), blocks.block_size
    assert r.num_committed_blocks == r.num_computed_tokens // bs
    for i in range(len(r.block_table)):
        name = block_hash(name, r.tokens(i * bs, (i + 1) * bs))
        assert blocks.pool.by_name.get(name) == (r.block_table[i] if i < r.num_committed_blocks else None)

@pytest.mark.parametrize('at', range(6))
def test_an_end_within_the_guesses(engine, tiny, backend, at):
    "A stop id, or the last token allowed: what was guessed beyond is nobody's"
    ref = solo(tiny, P[1], sp(20))
    assert ref[3 + at] not in ref[:3 + at]
    for params, why in (sp(20, stop_token_ids=[ref[3 + at]]), 'stop'), (sp(4 + at), 'length'):
        llm = engine(backend=backend, **ROOMY[backend])
        r = decoding(llm, P[1], params)
        plan = guessing(llm, r, ref[3:8])
        out = llm.execute(plan)
        assert out.sampled[r.request_id] == ref[3:(4 + at if why == 'stop' else 9)]
        assert llm.scheduler.update(plan, out, 1.) == [r]
        assert (r.output_ids, r.finish_reason) == (ref[:4 + at], why) and len(r.token_times) == 4 + at
        assert llm.num_free_blocks == llm.num_blocks

class Guesses:
    "Adds guesses to each plan of an engine, where budget and memory allow: some right, some wrong"
    def __init__(self, llm, answers, seed):
        self.llm, self.answers, self.rng, self.plan = llm, answers, random.Random(seed), llm.scheduler.schedule
        self.num_right = self.num_wrong = 0
        llm.scheduler.schedule = self.schedule

    def schedule(self, now):
        plan = self.plan(now)
        for i, x in enumerate(plan.scheduled):
            if x.rows: plan.scheduled[i] = self.guess(plan, x)
        return plan

    def guess(self, plan, x):
        r, s = x.request, self.llm.scheduler
        n = min(self.rng.randint(0, 4), plan.left, r.max_tokens - len(r.output_ids) - 1)
        right = self.answers[r.request_id][len(r.output_ids):][:n]
        k = self.rng.choice([0, len(right), len(right)])
        draft = right[:k] + [wrong(t) for t in right[k:]]
        if s.blocks.blocks_short(r, x.stop + len(draft)) > s.blocks.num_free_blocks: return x
        s.grow(r, x.stop + len(draft), plan)
        plan.left -= len(draft)
        self.num_right, self.num_wrong = self.num_right + k, self.num_wrong + len(draft) - k
        return x._replace(draft=tuple(draft), rows=1 + len(draft))

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
@pytest.mark.parametrize('seed', range(3))
def test_an_engine_that_guesses(engine, tiny, backend, mode, seed):
    "Text, log probabilities, times, trace and counters of whole answers, in company and short of memory"
    llm = engine(backend=backend, preemption=mode, watermark=0., **SHORT[backend])
    wishes = [sp(18, logprobs=2), sp(14, temperature=1., seed=5), sp(20, repetition_penalty=1.3, prompt_logprobs=0),
              sp()]
    refs = {f'q{i}': generate_ref(tiny, p, w) for i, (p, w) in enumerate(zip(P, wishes))}
    g = Guesses(llm, {i: r.token_ids for i, r in refs.items()}, seed)
    for i, p, w in zip(refs, P, wishes): llm.add(p, w, request_id=i)
    text, last = dict.fromkeys(refs, ''), {}
    while llm.has_unfinished:
        for o in llm.step():
            text[o.request_id] += o.outputs[0].delta
            last[o.request_id] = o
        follows(llm)
    for i, ref in refs.items():
        c, m = last[i].outputs[0], last[i].metrics
        assert (c.token_ids, c.text, text[i], c.finish_reason) == (ref.token_ids, ref.text, ref.text, 'length')
        assert len(m.token_times) == len(ref.token_ids)
    assert [list(d) for d in last['q0'].outputs[0].logprobs] == [list(d) for d in refs['q0'].logprobs]
    assert len(last['q2'].prompt_logprobs) == len(P[2])
    steps, tokens = llm.metrics['num_steps'], sum(len(r.token_ids) for r in refs.values())
    assert llm.metrics['num_sampled_tokens'] == tokens and g.num_right > 4 < g.num_wrong and steps < tokens
    quiet(llm)

@pytest.mark.parametrize('seed', range(4))
def test_a_stop_string_within_the_guesses(engine, tiny, seed):
    "The answer ends with the token that completes it, however many more were guessed right"
    whole = generate_ref(tiny, P[1], sp(20))
    for stop in sorted({c for c in whole.text if c != '\ufffd'}):
        for more in {}, dict(include_stop_str_in_output=True), dict(logprobs=1):
            params = sp(20, stop=stop, **more)
            ref, llm = generate_ref(tiny, P[1], params), engine()
            Guesses(llm, {'g': whole.token_ids}, seed)
            llm.add(P[1], params, request_id='g')
            while llm.has_unfinished: last = llm.step()
            c, m = last[0].outputs[0], last[0].metrics
            assert (c.token_ids, c.text, c.finish_reason) == (ref.token_ids, ref.text, 'stop')
            assert len(m.token_times) == len(ref.token_ids) == len(c.logprobs or ref.token_ids)
            quiet(llm)

# --- masks

def only(tokens, vocab_size=258):
    "A mask that allows these tokens"
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder='little').view(np.int32)

def test_a_mask(engine, tiny, backend):
    "Its owner says what it allows, in company of others; with guesses each row has a mask of its own"
    llm, even = engine(backend=backend, **ROOMY[backend]), range(0, 258, 2)
    def mask(w):
        if w.request.prompt_ids == P[0]: return only(even)
        if w.request.prompt_ids == P[3]: return only(range(w.position % 7, 258, 7))
    llm.runner.sampler = Sampler(tiny.eos_ids, mask=mask)
    outs = llm.generate([P[0], P[1], P[0], P[3]], [sp(), sp(), sp(temperature=1., seed=3), sp()], use_tqdm=False)
    assert ids(outs)[0] == solo(tiny, P[0], sp(allowed_token_ids=even)) != solo(tiny, P[0], sp())
    assert ids(outs)[1] == solo(tiny, P[1], sp())
    assert ids(outs)[2] == solo(tiny, P[0], sp(temperature=1., seed=3, allowed_token_ids=even))
    assert [t % 7 for t in ids(outs)[3]] == [i % 7 for i in range(12)]
    steps = llm.metrics['num_steps']
    Guesses(llm, {'g': ids(outs)[3]}, 1)
    llm.add(P[3], sp(), request_id='g')
    while llm.has_unfinished: last = llm.step()
    assert ids(last) == ids(outs)[3:] and llm.metrics['num_steps'] - steps < 12
    quiet(llm)

def test_a_mask_that_allows_nothing_ends_its_request_alone(engine, tiny):
    llm = engine()
    llm.runner.sampler = Sampler(tiny.eos_ids, mask=lambda w: only(()) if w.request.prompt_ids == P[0] else None)
    bad, good = llm.add(P[0], sp()), llm.add(P[1], sp())
    outs = {o.request_id: o for _ in range(14) for o in llm.step()}
    assert outs[bad].failure.code == 'no_token_left' and outs[bad].outputs[0].token_ids == []
    assert outs[good].outputs[0].token_ids == solo(tiny, P[1], sp())
    quiet(llm)

# --- executors

class Later(Pending):
    "A batch that another thread runs"
    def __init__(self, batch, done:Future):
        super().__init__(batch)
        self.done = done

    def logits(self):
        there = self.done.result()
        self.moved = there.moved
        return there.logits()

class Threaded(Executor):
    "Runs its batches in a thread of its own"
    def __init__(self, *args):
        super().__init__(*args)
        self.pool = ThreadPoolExecutor(1)

    def submit(self, batch): return Later(batch, self.pool.submit(super().submit, batch))

def threaded(llm):
    llm.runner.executor = Threaded(llm.model, llm.config, llm.num_blocks, None, llm.num_blocks)
    return llm

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
def test_an_executor_in_another_thread(engine, tiny, backend, mode):
    llm = threaded(engine(backend=backend, preemption=mode, watermark=0., **SHORT[backend]))
    outs = llm.generate(P, sp(20), use_tqdm=False)
    assert ids(outs) == [solo(tiny, p, sp(20)) for p in P] and llm.metrics['num_preemptions'] > 0
    quiet(llm)

@pytest.mark.parametrize('error', [RuntimeError('odd'), torch.OutOfMemoryError('no room')], ids=['odd', 'no room'])
def test_a_thread_that_fails_after_it_moved_blocks(engine, tiny, error):
    "What it had moved is not moved again, and not taken back; memory that runs out is tried again with half"
    llm = threaded(engine(preemption='swap', num_blocks=12, watermark=0., prefix_caching=False))
    real, failed = llm.runner.executor.forward, []
    def forward(batch):
        logits = real(batch)
        if (batch.moves.swap_out or batch.moves.swap_in) and len(failed) < 3:
            failed.append(batch)
            raise error
        return logits
    llm.runner.executor.forward = forward
    rids, outs = [llm.add(p, sp(20)) for p in P * 3], {}
    while llm.has_unfinished: outs |= {o.request_id: o for o in llm.step()}
    assert len(failed) == 3 and any(o.error for o in outs.values()) == (type(error) is RuntimeError)
    for i, p in zip(rids, P * 3):
        if not outs[i].error: assert outs[i].outputs[0].token_ids == solo(tiny, p, sp(20))
    quiet(llm)

@pytest.mark.parametrize('first', [0, 1], ids=['the first is finished first', 'the second is finished first'])
@pytest.mark.parametrize('lengths', [(1, 3), (3, 3)], ids=['prompt and decode', 'decodes'])
def test_two_steps_under_way(engine, tiny, backend, first, lengths):
    "Two plans of different requests: both are started before either is finished"
    llm, params = engine(backend=backend, **ROOMY[backend]), sp(20)
    refs = [solo(tiny, p, params) for p in P[:2]]
    rs = [decoding(llm, p, params, n) for p, n in zip(P, lengths)]
    for _ in range(3):
        plans = [guessing(llm, r, ref[len(r.output_ids):][:2]) for r, ref in zip(rs, refs)]
        under_way = [llm.runner.start(p) for p in plans]
        for i in (first, 1 - first):
            out = llm.runner.finish(plans[i], under_way[i])
            n = len(rs[i].output_ids)
            assert out.sampled == {rs[i].request_id: refs[i][n:n + 3]}
            llm.scheduler.update(plans[i], out, 1.)
    while llm.has_unfinished: last = {o.request_id: o for o in llm.step()}
    assert [r.output_ids for r in rs] == refs
    quiet(llm)

# --- what is told of a step needs nothing but the step

@pytest.mark.parametrize('seed', range(8))
def test_records_and_counters_may_come_late(seed):
    "Of (plan, out) alone: before `update` or long after, in any order"
    crowd, steps = Crowd(seed, policy='vllm' if seed % 2 else None), []
    run, slots = crowd.memory.execute, crowd.cfg.max_num_seqs
    def execute(plan):
        out = run(plan)
        steps.append((plan, out, told([(plan, out)], slots)))
        return out
    crowd.memory.execute = execute
    crowd.run()
    at_once = [t for _, _, t in steps]
    late = [told([(plan, out)], slots) for plan, out, _ in reversed(steps)][::-1]
    assert late == at_once
    pairs = [(plan, out) for plan, out, _ in steps]
    shuffled = random.Random(seed).sample(pairs[:-1], len(pairs) - 1) + pairs[-1:]      # gauges are of the last
    assert told(shuffled, slots)[1] == told(pairs, slots)[1]

def told(steps, slots):
    "Records and counters"
    counters = EngineCounters()
    for plan, out in steps: counters.count(plan, out, slots)
    return [record(plan, out, plan.now, plan.now + 1) for plan, out in steps], counters

# --- a runner without a model

class Parrot:
    "Says the prompt backwards, over and over"
    num_blocks, spent, forward_s = 20, {}, {}
    def start(self, plan, moved=False): return Pending(None)
    def finish(self, plan, pending):
        return StepOutput({s.request.request_id: [self.next(s.request)] for s in plan.scheduled if s.rows})
    def next(self, r): return r.prompt_ids[::-1][len(r.output_ids) % len(r.prompt_ids)]

def test_a_runner_without_a_model(tiny, monkeypatch):
    "The engine does not notice: text, stops, streams, preemption and trace are as ever"
    def never(*args, **kw): raise AssertionError('the model was asked')
    monkeypatch.setattr(type(tiny.hf_model), 'forward', never)
    with LLM(tiny, runner=Parrot(), block_size=4, max_num_seqs=3, max_num_batched_tokens=8, check=True) as llm:
        outs = llm.generate(['abc', 'stop here', 'x' * 30, 'wow'], sp(16), use_tqdm=False)
        assert [o.outputs[0].text for o in outs] == [('cba' * 6)[:16], 'ereh potsereh po', 'x' * 16, ('wow' * 6)[:16]]
        assert ''.join(llm.stream('on and on', sp(40, stop='and on'))) == 'no dna no' * 4 + 'no d'
        assert llm.num_blocks == 20 and llm.metrics['num_preemptions'] > 0 and 'wow' not in llm.trace.why('r3')
        quiet(llm)

# --- a step that is interrupted

def test_a_deadline_in_a_step_that_is_interrupted(engine, tiny, monkeypatch):
    "Whoever's time was over hears of it all the same, once; the others go on"
    llm = engine()
    llm.now = 0.
    llm.clock = lambda: llm.now
    late, fine = llm.add(P[0], sp(), deadline=2.5), llm.add(P[1], sp())
    for llm.now in (0., 1., 2.): llm.step()
    said = solo(tiny, P[0], sp())[:3]
    real = llm.execute
    def pressed(plan): raise KeyboardInterrupt
    llm.now, llm.execute = 3., pressed
    with pytest.raises(KeyboardInterrupt): llm.step()
    llm.check()
    follows(llm)
    llm.execute, outs = real, []
    while llm.has_unfinished: outs += [o for o in llm.step() if o.finished]
    assert [(o.request_id, o.error is not None) for o in outs] == [(late, True), (fine, False)]
    assert ids(outs) == [said, solo(tiny, P[1], sp())] and llm.metrics['finished'] == dict(error=1, length=1)
    assert llm.trace.state().num_finished == 2
    quiet(llm)
