"""The engine under bad input, failing parts, interruption and abandonment.
What is wrong is refused or ends alone, and nothing stays behind."""
import gc, operator, random, signal, sys, weakref
from pathlib import Path
import pytest, torch
from cbatch import LLM, RequestFailed, SamplingParams
from cbatch.model import byte_tokenizer, tiny_lm
from cbatch.text import Detokenizer
from cbatch.token_loop import cut_at_stop, generate_ref
from ask import sp
from harness import quiet

P = [[5, 6, 7], [200, 3, 77, 8, 9, 10, 11], list(range(40, 60)), [33]]

def ids(outs): return [o.outputs[0].token_ids for o in outs]
def solo(tiny, prompt, params=None): return generate_ref(tiny, prompt, params or sp()).token_ids
def works(llm, tiny):
    "Nobody is left, and the next request is served as ever"
    quiet(llm)
    assert ids(llm.generate(P[1], sp(), use_tqdm=False)) == [solo(tiny, P[1])]
    quiet(llm)

def fill(llm, n=4):
    "Requests that are at work, two running and the rest waiting"
    rids = [llm.add(P[i % 4], sp(max_tokens=20)) for i in range(n)]
    llm.step(); llm.step()
    return rids

def drain(llm):
    "What was said since, by request"
    last = {}
    while llm.has_unfinished:
        for o in llm.step(): last[o.request_id] = o
    return last

# --- bad input

class Odd:
    def __repr__(self): return 'Odd()'

BAD_PROMPTS = {'empty': [], 'empty text': '', 'unknown id': [258], 'negative id': [-1], 'bool': [True, 5],
               'float': [1., 2.], 'none': None,
               'nested': [[1, 2]], 'bytes': b'ab',
               'surrogate': 'a\ud800b', 'mixed': [1, 'x'], 'odd': Odd(), 'tensor': torch.tensor([1, 2]),
               'dict': dict(role='user', content='x'), 'role without content': [dict(role='user')],
               'content no text': [dict(role='user', content=5)],
               'surrogate in chat': [dict(role='user', content='\udfff')],
               'message and id': [dict(role='user', content='x'), 5],
               'longer than the context': [1] * 161, 'exactly the context': [1] * 160, 'huge id': [10**30],
               'set': {1, 2}}

@pytest.mark.parametrize('prompt', BAD_PROMPTS.values(), ids=BAD_PROMPTS)
def test_bad_prompts(engine, tiny, prompt):
    llm = engine()
    fill(llm); before = llm.metrics, len(llm.requests), llm.num_added
    for call in (llm.add, llm.stream, lambda p: llm.generate([P[0], p], use_tqdm=False),
                 lambda p: llm.generate([p, P[0]], use_tqdm=False)):
        with pytest.raises(ValueError): call(prompt)
        assert (llm.metrics, len(llm.requests), llm.num_added) == before
    assert [o.outputs[0].token_ids for o in drain(llm).values()] == [solo(tiny, P[i], sp(max_tokens=20))
        for i in range(4)]
    works(llm, tiny)

@pytest.mark.parametrize('prompts', [5, None, torch.tensor([1, 2]), dict(a=1), Odd(), b'ab', 'a\ud800', [None],
                                     [[1], 'a\ud800']], ids=repr)
def test_bad_lists_of_prompts(engine, tiny, prompts):
    llm = engine()
    with pytest.raises(ValueError): llm.generate(prompts, sp(), use_tqdm=False)
    works(llm, tiny)

nan, inf = float('nan'), float('inf')
BAD_PARAMS = dict(temperature=[nan, inf, -1, 1e308, None, '1', True, [1]], top_p=[0, -1, 1.1, nan, None, 'x'],
                  top_k=[-2, 1.5, nan, '3', True, None], seed=[1.5, 'x', True, 2**64, nan],
                  max_tokens=[0, -1, 1.5, '3', True, nan, 10**30], 
                  stop=['', [''], ['a', ''], 5, [5], b'x', ['a'] * 17, 'x' * 513, True, [None]],
                  stop_token_ids=[[-1], [1.5], ['a'], 5, [True], [0] * 129, 'ab', True],
                  logit_bias=[{1: nan}, {1: 101}, {-1: 1}, {'a': 1}, {1: 'x'}, 5, [1], 'ab', {1: None}, {True: 1},
                              {i: 1 for i in range(1025)}],
                  ignore_eos=['no', None, 2], skip_special_tokens=['x'], include_stop_str_in_output=[1.5])

@pytest.mark.parametrize('name,value', [(k, v) for k, vs in BAD_PARAMS.items() for v in vs], ids=lambda x: repr(x)[:30])
def test_bad_params(name, value):
    with pytest.raises(ValueError): SamplingParams(**{name: value})

def test_params_that_do_not_fit_the_model_or_the_prompts(engine, tiny):
    llm = engine()
    fill(llm, 2)
    for bad in (sp(stop_token_ids=[258]), sp(logit_bias={258: 1.}), dict(temperature=0), 'greedy', 5,
                sp(max_tokens=158), sp(max_tokens=10**9)):
        with pytest.raises(ValueError): llm.add([1, 2, 3], bad)
    for bad in ([sp()], [sp()] * 3, [], [sp(), 5], [sp(), None, None]):
        with pytest.raises(ValueError): llm.generate([[1], [2]], bad, use_tqdm=False)
    with pytest.raises(ValueError):
        engine(tokenizer=None, model=type(tiny)(tiny.hf_model, None, 'mute')).add([1], sp(stop='x'))
    assert len(drain(llm)) == 2
    works(llm, tiny)

@pytest.mark.parametrize('kw', [dict(request_id=5), dict(request_id=b'x'), dict(request_id=['x']), dict(arrival=nan),
                                dict(arrival='soon'), dict(arrival=inf), dict(arrival=True),
                                dict(priority='high'), dict(priority=nan), dict(priority=None)], ids=repr)
def test_bad_circumstances(engine, tiny, kw):
    llm = engine()
    fill(llm)
    with pytest.raises(ValueError): llm.add(P[0], sp(), **kw)
    assert len(llm.requests) == 4
    drain(llm); works(llm, tiny)

@pytest.mark.parametrize('config', [dict(policy='fifo'), dict(policy=None), dict(policy=['vllm']), dict(policy=5),
                                    dict(backend='cuda9'), dict(backend=None), dict(backend=['torch']),
                                    dict(dtype='int8'), dict(dtype=None),
    dict(dtype=['float32']), dict(device='tpu9'), dict(device=['cpu']), dict(device=5.5), dict(max_num_seqs=0),
                                    dict(max_num_seqs=True), dict(max_num_batched_tokens=-1),
    dict(block_size=0), dict(block_size=1.5), dict(num_blocks=0), dict(num_blocks='9'),
    dict(max_model_len=0), dict(max_model_len=1025), dict(num_blocks=None, kv_cache_mb=0),
                                    dict(num_blocks=None, kv_cache_mb=nan), dict(gpu_memory_utilization=2),
    dict(trace=0), dict(trace='yes'), dict(seed='x'), dict(seed=1.5), dict(seed=None), dict(check='x')], ids=repr)
def test_bad_config(engine, config):
    with pytest.raises(ValueError): engine(**config)

@pytest.mark.parametrize('model', [None, 5, 'no/such-model-here', '/nowhere/model.gguf', '', Odd()], ids=repr)
def test_bad_models(model):
    with pytest.raises(ValueError): LLM(model)

# --- parts that fail

def failing(llm, monkeypatch, when, error):
    "Let the forward pass raise `error` on its call number `when`"
    old, calls = llm.runner.executor.forward, iter(range(10**6))
    def f(*args):
        if next(calls) == when: raise error
        return old(*args)
    monkeypatch.setattr(llm.runner.executor, 'forward', f)

def spoilt(llm, monkeypatch, spoil):
    "Let `spoil(want, logits)` change what the model gave, row by row, before anybody looks at it"
    sampler = llm.runner.sampler
    def look(want, logits):
        spoil(want, logits)
        return sampler(want, logits)
    monkeypatch.setattr(llm.runner, 'sampler', look)

@pytest.mark.parametrize('when', range(6))
@pytest.mark.parametrize('policy', ['vllm', 'static', 'dynamic'])
def test_forward_fails(engine, tiny, monkeypatch, when, policy):
    "Each request of that step ends by an error, those behind are served"
    llm = engine(policy=policy, max_num_seqs=2, num_blocks=60)
    failing(llm, monkeypatch, when, RuntimeError('out of memory'))
    rids = [llm.add(p, sp()) for p in P]
    outs, hit = {}, None
    while llm.has_unfinished:
        step = llm.step()
        outs |= {o.request_id: o for o in step if o.finished}
        if failed := [o for o in step if o.error]: assert hit is None; hit = {o.request_id for o in failed}
    assert hit == {s[0] for s in llm.trace[when].scheduled} and set(outs) == set(rids)
    for rid, p in zip(rids, P):
        c, ref = outs[rid].outputs[0], solo(tiny, p)
        assert (c.finish_reason, c.token_ids) == (('error', ref[:len(c.token_ids)]) if rid in hit else ('length', ref))
        assert (outs[rid].error is not None and 'out of memory' in outs[rid].error) == (rid in hit)
    works(llm, tiny)

def test_generate_and_stream_tell_of_a_failure(engine, tiny, monkeypatch):
    llm = engine()
    failing(llm, monkeypatch, 2, ValueError('odd'))
    with pytest.raises(RequestFailed, match='odd'): llm.generate(P, sp(), use_tqdm=False)
    works(llm, tiny)
    failing(llm, monkeypatch, 2, ValueError('odd'))
    with pytest.raises(RequestFailed, match='odd'): list(llm.stream(P[0], sp()))
    works(llm, tiny)

def test_prompt_scores_of_a_broken_model(engine, tiny, monkeypatch):
    "A prompt whose scores are not numbers ends by an error in the chunk that shows it, and nobody else does"
    llm = engine(max_num_batched_tokens=16)
    def spoil(want, logits):
        logits[[i for i, w in enumerate(want) if w.scores and w.request.prompt_ids[0] == 3 and w.position == 5]] = nan
    spoilt(llm, monkeypatch, spoil)
    params = sp(4, prompt_logprobs=1)
    bad, good = llm.add([3] * 20, params), llm.add([4] * 9, params)
    outs = {o.request_id: o for _ in range(12) for o in llm.step()}
    assert outs[bad].outputs[0].finish_reason == 'error' and 'NaN' in outs[bad].error
    assert outs[good].outputs[0].finish_reason == 'length' and len(outs[good].prompt_logprobs) == 9
    quiet(llm)

@pytest.mark.parametrize('poison', [nan, inf], ids=['nan', 'inf'])
@pytest.mark.parametrize('temperature', [0, 1.])
def test_one_row_of_bad_logits(engine, tiny, monkeypatch, poison, temperature):
    "Its mates keep their tokens, and the next owner of its blocks, whose KV is as bad as it gets, is not poisoned"
    llm, params = engine(num_blocks=14), sp(temperature=temperature, seed=3)
    rids = [llm.add(p, params) for p in P[:3]]
    def spoil(want, logits):
        for i, r in enumerate(w.request for w in want):
            if r.request_id == rids[1] and len(r.output_ids) == 4:
                logits[i, 7] = poison
                for cache in llm.runner.executor.backend.k + llm.runner.executor.backend.v: cache[r.block_table] = nan
    spoilt(llm, monkeypatch, spoil)
    outs = drain(llm)
    assert outs[rids[1]].outputs[0].finish_reason == 'error' and 'NaN' in outs[rids[1]].error
    for i in (0, 2): assert outs[rids[i]].outputs[0].token_ids == solo(tiny, P[i], params)
    assert outs[rids[1]].outputs[0].token_ids == solo(tiny, P[1], params)[:4]
    assert ids(llm.generate(P, sp(), use_tqdm=False)) == [solo(tiny, p) for p in P]
    works(llm, tiny)

def test_one_text_fails(engine, tiny, monkeypatch):
    llm, push = engine(), Detokenizer.push
    rids = [llm.add(p, sp(), request_id=f'x{i}') for i, p in enumerate(P)]
    def fails(self, output_ids, last=False):
        if 'x2' in llm.requests and self is llm.requests['x2'].text and len(output_ids) == 5:
            raise UnicodeError('no text')
        return push(self, output_ids, last)
    monkeypatch.setattr(Detokenizer, 'push', fails)
    outs = drain(llm)
    assert (outs['x2'].outputs[0].finish_reason == 'error' and 'no text' in outs['x2'].error
            and outs['x2'].outputs[0].token_ids == solo(tiny, P[2])[:5])
    for i in (0, 1, 3): assert outs[rids[i]].outputs[0].token_ids == solo(tiny, P[i]) and not outs[rids[i]].error
    works(llm, tiny)

# --- interruption

PLACES = ['execute', 'runner.start', 'runner.executor.forward', 'runner.finish', 'scheduler.schedule',
          'scheduler.update', '_reports', 'trace.executed', 'clock']

def interrupt(llm, monkeypatch, place, when, after):
    "Ctrl-C before or after a part of step number `when`"
    *path, name = place.split('.')
    owner = operator.attrgetter('.'.join(path))(llm) if path else llm
    old, calls = getattr(owner, name), iter(range(10**6))
    def f(*args, **kw):
        now = next(calls) == when
        if now and not after: signal.raise_signal(signal.SIGINT)
        res = old(*args, **kw)
        if now and after: signal.raise_signal(signal.SIGINT)
        return res
    monkeypatch.setattr(owner, name, f)

@pytest.mark.parametrize('after', [False, True], ids=['before', 'after'])
@pytest.mark.parametrize('place', PLACES)
def test_interrupted(engine, tiny, monkeypatch, place, after):
    "generate and stream leave nothing behind; whoever was added goes on"
    for when in (0, 3, 11):
        for act in ('generate', 'stream', 'step'):
            llm = engine(max_num_seqs=2, num_blocks=12)
            added = [llm.add(p, sp(), request_id=f'mine{i}')
                     for i, p in enumerate(P[:2])] if act == 'step' or when % 2 else []
            interrupt(llm, monkeypatch, place, when, after)
            with pytest.raises(KeyboardInterrupt):
                if act == 'generate': llm.generate(P[2:], sp(), use_tqdm=False)
                if act == 'stream': list(llm.stream(P[2], sp()))
                if act == 'step':
                    while llm.has_unfinished: llm.step()
            assert set(llm.requests) <= set(added) and not llm.sinks
            llm.check()
            steps = 0
            while llm.has_unfinished and steps < 100: llm.step(); steps += 1
            llm.step()
            assert not llm.has_unfinished
            works(llm, tiny)

def test_interrupted_in_one_of_many_enters(engine, tiny, monkeypatch):
    llm = engine()
    interrupt(llm, monkeypatch, 'enter', 2, False)
    with pytest.raises(KeyboardInterrupt): llm.generate(P, sp(), use_tqdm=False)
    works(llm, tiny)

def test_interrupted_while_asleep(engine, tiny, monkeypatch):
    from cbatch.policies import Dynamic
    llm = engine(policy=Dynamic(30.))
    def sleep(s): assert 0 < s <= 30; raise KeyboardInterrupt
    monkeypatch.setattr(llm, 'sleep', sleep)
    with pytest.raises(KeyboardInterrupt): llm.generate(P[:2], sp(), use_tqdm=False)
    quiet(llm)

def press_ctrl_c(k, f):
    "Run `f`; at the `k`-th line of cbatch in it the user presses Ctrl-C. Returns the lines executed, and where it was"
    n, where = 0, None
    def local(frame, event, arg):
        nonlocal n, where
        n += event == 'line'
        if n == k and not where:
            where = f'{Path(frame.f_code.co_filename).name}:{frame.f_lineno}'; signal.raise_signal(signal.SIGINT)
        return local
    sys.settrace(lambda frame, event, arg: local if '/cbatch/' in frame.f_code.co_filename else None)
    try: f()
    except KeyboardInterrupt: pass
    finally: sys.settrace(None)
    return n, where

@pytest.mark.parametrize('seed', range(4))
def test_interrupted_anywhere(engine, tiny, seed):
    "A real SIGINT at a random line of generate, in a pool too small for all: nothing is left, nothing is broken"
    act = lambda llm: llm.generate(P, sp(max_tokens=5), use_tqdm=False)
    own = tiny_lm('llama')     # not the oracle's: a broken one must not break the oracle
    make = lambda: engine(own, max_num_seqs=3, num_blocks=8, max_num_batched_tokens=8, check=False)
    num_lines, _ = press_ctrl_c(0, lambda: act(make()))
    broken, rng = {}, random.Random(seed)
    for k in rng.sample(range(1, num_lines), 25):
        llm = make()
        _, where = press_ctrl_c(k, lambda: act(llm))
        try:
            quiet(llm)
            assert ids(llm.generate(P[3], sp(max_tokens=2), use_tqdm=False)) == [solo(tiny, P[3], sp(max_tokens=2))]
        except Exception as e: broken[where] = repr(e)[:80]
    assert not broken

# --- streams, and everything at once

def test_a_stream_left_early(engine, tiny):
    llm = engine()
    for n in range(1, 4):
        s = llm.stream(P[0], sp())
        for _ in range(n): next(s)
        assert llm.has_unfinished
        if n == 2: del s
        else: s.close()
        gc.collect()
        works(llm, tiny)
    unused = llm.stream(P[0], sp())
    works(llm, tiny)
    del unused
    works(llm, tiny)

def test_streams_side_by_side(engine, tiny):
    llm = engine()
    a, b, said = llm.stream(P[0], sp(max_tokens=20)), llm.stream(P[1], sp()), ['', '']
    while a or b:
        for i, s in enumerate((a, b)):
            if s: said[i] += (piece := next(s, '')); a, b = (a, b) if piece else (None, b) if i == 0 else (a, None)
    assert said == [generate_ref(tiny, P[0], sp(max_tokens=20)).text, generate_ref(tiny, P[1], sp()).text]
    works(llm, tiny)

def test_stream_generate_and_add_mixed(engine, tiny):
    llm = engine(num_blocks=16)
    mine = [llm.add(p, sp(), request_id=f'mine{i}') for i, p in enumerate(P)]
    s = llm.stream(P[2], sp(max_tokens=18))
    text = next(s)
    assert ids(llm.generate(P[:3], sp(), use_tqdm=False)) == [solo(tiny, p) for p in P[:3]]
    got = {}
    for o in llm.step(): got[o.request_id] = o.outputs[0].delta
    text += ''.join(s)
    while llm.has_unfinished or llm.unclaimed:
        for o in llm.step(): got[o.request_id] = got.get(o.request_id, '') + o.outputs[0].delta
    assert text == generate_ref(tiny, P[2], sp(max_tokens=18)).text
    assert got == {rid: generate_ref(tiny, p, sp()).text for rid, p in zip(mine, P)}
    works(llm, tiny)

def test_an_id_used_again_before_its_last_output_was_fetched(engine, tiny):
    llm, ends = engine(), []
    for _ in range(2):
        llm.add(P[3], sp(max_tokens=2), request_id='x')
        llm.generate(P[:2], sp(), use_tqdm=False)
    while llm.unclaimed: ends += [o for o in llm.step() if o.finished]
    assert [o.request_id for o in ends] == ['x', 'x']
    works(llm, tiny)

def test_an_id_used_again_while_its_stream_says_goodbye(engine, tiny):
    llm = engine()
    s = llm.stream(P[0], sp())
    while llm.has_unfinished or not llm.trace.records: next(s)
    rid = llm.trace.records[-1].finished[0][0]
    llm.add(P[1], sp(), request_id=rid)
    assert list(s) == [] and llm.has_unfinished
    assert drain(llm)[rid].outputs[0].token_ids == solo(tiny, P[1])
    works(llm, tiny)

def test_a_stream_that_starts_late_does_not_jump_the_queue(engine):
    llm = engine()
    s = llm.stream(P[0], sp())
    rids = fill(llm, 3)
    next(s)
    assert [r.request_id for r in sorted(llm.scheduler.running, key=lambda r: r.age)][:3] == rids

# --- abort

def test_abort(engine, tiny):
    "Whoever waits, is half way through a prompt, decodes or is preempted; once, twice, or not at all"
    llm = engine(max_num_seqs=3, num_blocks=13, max_num_batched_tokens=8)
    rids = [llm.add(p, sp(max_tokens=20)) for p in (P[0], P[1], P[2], P[3])]
    assert llm.abort(rids[3]) and not llm.abort(rids[3])                                   # waiting
    for _ in range(2): llm.step()
    r = llm.requests[rids[2]].request
    assert 0 < r.num_computed_tokens < len(r.prompt_ids) and llm.abort(rids[2])               # mid-prompt
    assert llm.num_free_blocks == 13 - sum(len(r.block_table) for r in llm.scheduler.running)
    assert llm.abort(rids[0]) and not llm.abort('nobody') and not llm.abort(None)              # decoding
    assert drain(llm)[rids[1]].outputs[0].token_ids == solo(tiny, P[1], sp(max_tokens=20))
    assert not any(llm.abort(r) for r in rids)
    assert llm.metrics['finished'] == {'abort': 3, 'length': 1}
    works(llm, tiny)

def test_abort_a_preempted(engine, tiny):
    llm = engine(num_blocks=12)
    rids = [llm.add(P[1], sp(max_tokens=30)) for _ in range(3)]
    while not (waits := [r for r in llm.scheduler.waiting if r.num_preemptions]): llm.step()
    assert len(waits) == 1 and llm.abort(waits[0].request_id)
    llm.check()
    outs = drain(llm)
    assert [outs[r].outputs[0].token_ids for r in rids[:2]] == [solo(tiny, P[1], sp(max_tokens=30))] * 2
    works(llm, tiny)

def test_abort_between_deltas_of_a_stream(engine, tiny):
    llm = engine()
    s = llm.stream(P[0], sp())
    first = next(s)
    assert llm.abort(next(iter(llm.requests)))
    assert generate_ref(tiny, P[0], sp()).text.startswith(first + ''.join(s))
    works(llm, tiny)

@pytest.mark.parametrize('policy', ['vllm', 'static', 'dynamic'])
def test_abort_from_inside_the_step(engine, tiny, monkeypatch, policy):
    "It is refused there, and granted between two steps; nobody else notices"
    llm, refused = engine(policy=policy), []
    rids, run = [llm.add(p, sp()) for p in P[:3]], llm.execute
    def execute(plan):
        out = run(plan)
        if llm.metrics['num_steps'] == 3:
            with pytest.raises(ValueError, match='between two steps'): llm.abort(rids[1])
            refused.append(rids[1])
        return out
    monkeypatch.setattr(llm, 'execute', execute)
    while not refused: llm.step()
    assert llm.abort(rids[1])
    outs = drain(llm)
    assert rids[1] not in outs
    assert [outs[rids[i]].outputs[0].token_ids for i in (0, 2)] == [solo(tiny, P[i]) for i in (0, 2)]
    works(llm, tiny)

# --- close

def test_close(engine, tiny):
    llm = engine()
    fill(llm)
    s = llm.stream(P[0], sp()); next(s)
    pool = [weakref.ref(t) for t in llm.runner.executor.backend.k + llm.runner.executor.backend.v]
    llm.close(); llm.close()
    gc.collect()
    assert not any(r() is not None for r in pool) and not llm.has_unfinished
    assert 'closed' in repr(llm) and 'closed' in llm._repr_html_()
    for use in (lambda: llm.generate(P, sp(), use_tqdm=False), lambda: llm.add(P[0]), lambda: llm.stream('x'),
                lambda: llm.chat([dict(role='user', content='x')], use_tqdm=False), llm.step,
                lambda: llm.generate([], use_tqdm=False), lambda: llm.encode('x'), lambda: llm.metrics,
                lambda: llm.hf_model, lambda: llm.model_path, lambda: llm.kv_bytes):
        with pytest.raises(ValueError, match='closed'): use()
    assert list(s) == [] and not llm.sinks and not llm.abort('r0')

def test_the_pool_goes_with_its_engine(tiny):
    llm = LLM(tiny, num_blocks=8)
    llm.generate(P[:2], sp(), use_tqdm=False)
    pool = weakref.ref(llm.runner.executor.backend.k[0])
    del llm; gc.collect()
    assert pool() is None
    with LLM(tiny, num_blocks=8) as llm: llm.add(P[0])
    assert llm.model is None

def test_two_engines_on_one_model(engine, tiny):
    a, b = engine(), engine(policy='static', block_size=8)
    s = a.stream(P[0], sp())
    text = next(s)
    assert ids(b.generate(P, sp(), use_tqdm=False)) == [solo(tiny, p) for p in P]
    b.close()
    assert text + ''.join(s) == generate_ref(tiny, P[0], sp()).text

# --- promises

def test_answers_come_in_the_order_of_the_prompts(engine, tiny):
    llm = engine(max_num_seqs=3)
    lens = [9, 1, 5, 12, 2, 7]
    outs = llm.generate([P[i % 4] for i in range(6)], [sp(max_tokens=n) for n in lens], use_tqdm=False)
    assert ids(outs) == [solo(tiny, P[i % 4], sp(max_tokens=n)) for i, n in enumerate(lens)]
    assert llm.generate([], use_tqdm=False) == [] and [o.prompt
                                                       for o in llm.generate('ab', sp(), use_tqdm=False)] == ['ab']

def test_a_seed_decides_whatever_the_batch(engine, tiny):
    one = sp(temperature=1.2, seed=42, top_k=60)
    want = solo(tiny, P[0], one)
    for n in (0, 1, 5):
        llm = engine(max_num_seqs=n + 1, num_blocks=30)
        outs = llm.generate([*([P[1]] * n), P[0]], [*(sp(temperature=.9) for _ in range(n)), one], use_tqdm=False)
        assert ids(outs)[-1] == want

def test_the_engines_seed_makes_runs_repeat(engine):
    hot = sp(temperature=1.)
    runs = [ids(engine(seed=s).generate([P[0]] * 4, hot, use_tqdm=False)) for s in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2] and len({tuple(x) for x in runs[0]}) == 4
    again = engine(seed=0, max_num_seqs=1)     # the seed belongs to the request's number, not to its row
    assert ids(again.generate([P[0]] * 4, hot, use_tqdm=False)) == runs[0]
    assert ids(again.generate([P[0]] * 4, hot, use_tqdm=False)) != runs[0]

def containers(root):
    "Sizes of everything that `root` holds, tensors and the model aside, by path"
    sizes, seen, todo = {}, set(), [('llm', root)]
    while todo:
        path, x = todo.pop(0)         # by the shortest path
        if id(x) in seen or isinstance(x, (torch.nn.Module, torch.Tensor, type, str, int,
                                           float)) or callable(x) or 'tokenizer' in path:
            continue
        seen.add(id(x))
        if hasattr(x, '__len__'): sizes[path] = len(x)
        if isinstance(x, dict): todo += [(f'{path}[{k if len(x) < 50 else ""}]', v) for k, v in x.items()]
        elif hasattr(x, '__iter__'): todo += [(f'{path}[]', v) for v in x]
        slots = [k for c in type(x).__mro__ for k in getattr(c, '__slots__', ()) if k != '__weakref__'
                 and hasattr(x, k)]
        todo += [(f'{path}.{k}', v) for k, v in [*getattr(x, '__dict__', {}).items(),
                                                 *((k, getattr(x, k)) for k in slots)]]
    return sizes

def test_nothing_grows_with_the_number_of_served_requests(engine):
    llm = engine(trace=20, max_num_seqs=8, check=False)
    def serve(n):
        for i in range(n // 3):
            llm.generate([P[i % 4], P[3]], sp(max_tokens=2, stop='\x00'), use_tqdm=False)
            s = llm.stream(P[3], sp(max_tokens=3)); next(s); s.close()
            llm.abort(llm.add(P[0]))
            with pytest.raises(ValueError): llm.add([])
    serve(120); before = containers(llm)
    serve(300); after = containers(llm)
    assert 'llm.scheduler.blocks.pool.free_ids' in after and 'llm.runner.executor.backend.k' in after
    assert {k: n for k, n in after.items() if n > before.get(k, 60)} == {}

def test_the_model_is_free_between_steps(engine, tiny):
    llm = engine()
    want = tiny.hf_model.generate(torch.tensor([P[2]]), max_new_tokens=6, do_sample=False)
    s = llm.stream(P[0], sp())
    for _ in range(3):
        next(s)
        assert torch.equal(llm.hf_model.generate(torch.tensor([P[2]]), max_new_tokens=6, do_sample=False), want)
    s.close(); works(llm, tiny)

# --- text

@pytest.fixture(params=['bytes', 'smollm2'])
def tokenizer(request): return request.getfixturevalue('tiny' if request.param == 'bytes' else 'smollm2').tokenizer

TEXTS = ['가나다라 한국어', '👩‍👩‍👧‍👦 family', 'e\u0301a\u0300o\u0302', 'plain text, with stops. And more.',
         '  indented\n\tcode()', '\ufffd odd \ufffd', '日本語', 'مرحبا']

def random_ids(rng, tok):
    "Random tokens, some real text between them, special tokens too; now and then cut anywhere"
    out = []
    for _ in range(rng.randint(1, 6)):
        if rng.random() < .5: out += [rng.randrange(len(tok)) for _ in range(rng.randint(1, 6))]
        else: out += tok.encode(rng.choice(TEXTS), add_special_tokens=False)
    return out[rng.randint(0, 2):rng.randint(3, 60)] or [0]

def whole(tok, out, skip): return tok.decode(out, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

def told(tok, out, **kw):
    "What a Detokenizer says of `out`, piece by piece, and the number of tokens it took to say it"
    d, pieces = Detokenizer(tok, SamplingParams(**kw)), []
    for n in range(1, len(out) + 1):
        hit = d.push(out[:n], last=n == len(out))
        pieces.append(d.delta(last=hit or n == len(out)))
        assert ''.join(pieces) == d.text[:d.sent]
        if hit: break
    return pieces, n, d.stop

def test_pieces_make_the_whole(tokenizer):
    for seed in range(500):
        rng = random.Random(seed)
        out, skip = random_ids(rng, tokenizer), rng.random() < .7
        pieces, n, _ = told(tokenizer, out, skip_special_tokens=skip)
        assert ''.join(pieces) == whole(tokenizer, out, skip), f'seed {seed}: {out}'

def test_pieces_stop_where_they_should(tokenizer):
    "The first moment a stop string stands in the text ends it; what was held back comes out, nothing that should not"
    stopped = 0
    for seed in range(500):
        rng = random.Random(seed)
        out = random_ids(rng, tokenizer)
        text = whole(tokenizer, out, True).strip('\ufffd')
        at = rng.randrange(len(text) + 1)
        stops = [text[at:at + rng.randint(1, 6)], text[at + 1:at + 3] + 'never', rng.choice(TEXTS)]
        stops, include = [s for s in stops if s and '\ufffd' not in s], rng.random() < .3
        pieces, n, stop = told(tokenizer, out, stop=stops, include_stop_str_in_output=include)
        first = next((k for k in range(1, len(out) + 1) if any(s in whole(tokenizer, out[:k], True) for s in stops)),
                     None)
        want, which = cut_at_stop(whole(tokenizer, out[:first], True), tuple(stops), include)
        assert (''.join(pieces), n, stop) == (want, first or len(out), which), f'seed {seed}: {out} {stops}'
        stopped += stop is not None
    assert 250 < stopped < 500

def test_nothing_is_held_longer_than_a_stop_might_need():
    tok = byte_tokenizer()
    pieces, _, _ = told(tok, tok.encode('aab aac'), stop=['aac'])
    assert pieces == ['', '', 'aab', ' ', '', '', '']
    assert told(tok, tok.encode('aab aa'), stop=['aac'])[0][-1] == 'aa'
