"The trace against the real scheduler: random arrivals, aborts, failed steps, tiny rings, hostile files"
import json, random
from pathlib import Path
import pytest
from cbatch import LLM
from cbatch.core import Kind, Request, StepOutput, Why
from cbatch.params import EngineConfig, OutOfBlocks, SamplingParams
from cbatch.kv_blocks import BlockManager
from cbatch.catalog import get_policy
from cbatch.guesses import Guess, Guesser, Guesses
from cbatch.scheduler import Scheduler
from cbatch.trace import Trace

class Anything(Guesser):
    "As many guesses as may be, or fewer"
    def __init__(self, rng): self.rng = rng
    def guess(self, r, most): return Guess([7] * self.rng.randint(0, most))

class Crowd:
    """A scheduler, a trace and a virtual clock; `step` does what the engine does, with any token for an answer.
    With `guess`, so many tokens are guessed at most, and any number of them holds"""
    def __init__(self, policy='vllm', max_num_seqs=4, num_blocks=24, block_size=4, budget=16, guess=0, **kw):
        cfg = EngineConfig(policy=policy, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget,
                           block_size=block_size, num_blocks=num_blocks)
        self.cfg, self.now, self.added = cfg, 0., 0
        self.sched = Scheduler(cfg, BlockManager(num_blocks, block_size), get_policy(policy))
        self.trace = Trace(max_num_seqs, budget, block_size, num_blocks, policy, **kw)
        self.live, self.on_step, self.rng = {}, lambda plan, out: None, random.Random(guess)
        if guess: self.sched.guesses = Guesses(Anything(self.rng), guess, 'always')

    def add(self, prompt_len, num_output, rid=None, arrival=None):
        rid = rid or f'r{self.added}'
        r = Request(rid, [1] * prompt_len, SamplingParams(), num_output, arrival=self.now if arrival is None
                    else arrival, seq=self.added)
        self.added += 1
        self.sched.add(r); self.trace.arrived(r); self.live[rid] = r

    def abort(self, rid):
        r = self.live.pop(rid)
        self.sched.abort(r, self.now); self.trace.aborted(r)

    def step(self, fail=False, abort_inside=None):
        plan = self.sched.schedule(self.now)
        if not plan: self.now += .01; return None
        if fail: self.sched.undo(plan, moved=True); self.trace.failed(plan); return None
        out = StepOutput({s.request.request_id: [7] * self.rng.randint(1, s.rows) for s in plan.scheduled if s.rows})
        self.on_step(plan, out)
        if abort_inside: self.abort(abort_inside)
        end = self.now + 1
        done = self.sched.update(plan, out, end)
        for r in done: del self.live[r.request_id]
        rec = self.trace.executed(plan, out, done, self.now, end, self.sched.blocks.num_free_blocks)
        self.now = end
        return rec

    def truth(self):
        s = self.sched
        return dict(running=[r.request_id for r in s.running],
                    waiting=[r.request_id for r in sorted(s.waiting, key=lambda r: r.age)],
                    blocks={r.request_id: list(r.block_table) for r in s.running},
                    computed={r.request_id: r.num_computed_tokens for r in s.running},
                    free=s.blocks.num_free_blocks)

def seen(state):
    return dict(running=state.running, waiting=state.waiting, blocks=state.blocks, computed=state.computed,
                free=state.num_free_blocks)

def act(rng, c, reuse=True):
    "Some arrivals and aborts between two steps, sometimes of the same id"
    while rng.random() < .45 and len(c.live) < 12:
        ids = [i for i in ('same', 'other') if i not in c.live]
        c.add(rng.randint(1, 30), rng.randint(1, 20), rid=rng.choice(ids) if reuse and ids and rng.random() < .2
              else None, arrival=c.now - rng.random())
    while rng.random() < .12 and c.live: c.abort(rng.choice(list(c.live)))

@pytest.mark.parametrize('policy', ['vllm', 'static', 'dynamic'])
@pytest.mark.parametrize('seed', range(12))
@pytest.mark.parametrize('guess', [0, 9])
def test_states_are_the_schedulers(policy, seed, guess):
    rng = random.Random(seed)
    c = Crowd(policy, max_num_seqs=rng.randint(1, 6), num_blocks=rng.randint(14, 40), budget=rng.choice([8, 13, 64]),
              maxlen=rng.choice([7, 50]), keyframe_every=rng.choice([1, 5, 16]), guess=guess)
    then = {}
    for _ in range(150):
        act(rng, c)
        assert seen(c.trace.state()) == c.truth()   # with whoever came or left since the last step
        inside = rng.choice(list(c.live)) if c.live and rng.random() < .05 else None
        rec = c.step(fail=rng.random() < .05, abort_inside=inside)
        assert seen(c.trace.state()) == c.truth()
        if c.trace.live.requests == c.trace.state().requests and len(c.trace):      # nobody came or left since
            assert c.trace[-1].num_free_blocks == c.truth()['free']
        if rec: then[rec.step] = c.truth(); assert rec.num_free_blocks == c.trace.live.num_free_blocks
        c.trace.live.check(c.cfg.max_num_seqs)
    assert len(c.trace) == min(c.trace.maxlen, len(c.trace.records))
    for step in {r.step for r in c.trace.records} & set(then): assert seen(c.trace.state(step)) == then[step]
    for rid in list(c.live): c.abort(rid)
    assert not c.trace.state().requests

def test_slots_are_the_lowest_free_and_stay(seed=3):
    rng, c, seat = random.Random(seed), Crowd(max_num_seqs=5, num_blocks=60), {}
    for _ in range(120):
        act(rng, c, reuse=False)
        if rec := c.step():
            now = c.trace.state(rec.step, after=False).slots
            for r in now:
                if r in rec.admitted: seat[r] = now[r]
                assert now[r] == seat[r]
            if rec.admitted:
                assert max(now.values()) < len(now) + sum(s not in now.values() for s in range(max(now.values())))

def test_nothing_grows_with_the_number_served():
    c = Crowd(maxlen=20, keyframe_every=8)
    for _ in range(400):
        c.add(3, 2); c.step(); c.step()
    while c.live: c.step()
    c.step()
    t = c.trace
    assert len(t) == 20 and sum(len(rs) for _,rs in t.segments) < 36
    assert not (t.live.requests or t.live.slots or t.live.blocks or t.came or t.left) and t.live.num_finished == 400

def test_id_comes_back_between_two_steps():
    c = Crowd()
    c.add(5, 5, 'x'); c.step()
    c.abort('x'); c.add(3, 4, 'x'); c.abort('x'); c.add(2, 3, 'x')
    assert seen(c.trace.state()) == c.truth()
    rec = c.step()
    assert [r for r,_ in rec.finished] == ['x', 'x'] and c.trace.state().computed == {'x': 2}
    assert c.trace.state().num_finished == 2

def test_why_survives_a_ring_without_the_arrival():
    c = Crowd(maxlen=3, keyframe_every=3)
    c.add(2, 12, 'a')
    for _ in range(8): c.step()
    assert c.trace.why('a') == ['steps 5-7: decode']
    with pytest.raises(ValueError, match='nobody'): c.trace.why('nobody')

def test_blocks_of_guesses_are_lent_for_a_step():
    "All guesses fail, then all hold: what a state says while the step runs, and after it"
    c = Crowd(num_blocks=9, guess=9)
    c.sched.guesses.guesser.guess = lambda r, most: Guess([7] * most)
    c.add(3, 30, 'a')
    c.step()
    holds = [c.trace.state().blocks['a']]
    for kept in (0, 9):
        c.rng.randint = lambda lo, hi: 1 + kept if hi > 1 else 1
        rec = c.step()
        assert rec.guessed['a'][:2] == (9, kept) and rec.scheduled == [('a', 1 + kept, 3 + (kept > 0), 1 + kept)]
        inside = c.trace.state(rec.step, after=False)
        assert len(inside.blocks['a']) == 4 and inside.num_free_blocks == 5
        holds.append(c.trace.state(rec.step).blocks['a'])
        assert seen(c.trace.state()) == c.truth() and rec.num_free_blocks == 9 - len(holds[-1])
    assert [len(b) for b in holds] == [1, 1, 4] and c.trace[1].guessed['a'][2] == 3

def test_why_says_what_was_guessed_and_kept():
    c = Crowd(guess=3)
    c.sched.guesses.guesser.guess = lambda r, most: Guess([7] * most)
    c.add(2, 20, 'a')
    for kept in (0, 3, 3, 0, 0):
        c.rng.randint = lambda lo, hi: 1 + kept if hi > 1 else 1
        c.step()
    assert c.trace.why('a')[-3:] == ['step 0: admitted, prefill 2', 'steps 1-2: decode, 3 guessed, 3 kept',
                                     'steps 3-4: decode, 3 guessed, 0 kept']
    c.step(fail=True)
    assert c.trace.why('a')[-1] == 'steps 3-5: decode, 3 guessed, 0 kept' and not c.trace[5].scheduled

def test_a_trace_viewer_sees_guesses(tmp_path):
    rng, c = random.Random(1), Crowd(guess=5)
    for _ in range(30): act(rng, c); c.step()
    c.trace.to_chrome(tmp_path/'t.json')
    events = json.loads((tmp_path/'t.json').read_text())['traceEvents']
    ran = [(e['name'], e['args']) for e in events if e['ph'] == 'X']
    said = {(a['step'], r): (a['guessed'], a['kept']) for r, a in ran if 'kept' in a}
    assert said == {(rec.step, r): x[:2] for rec in c.trace for r, x in rec.guessed.items()} and len(said) > 9
    assert any(kept for _, kept in said.values())
    assert all(f"{a['guessed']} guessed, {a['kept']} kept" in a['why'] for _, a in ran if a.get('guessed'))

@pytest.fixture(params=[0, 5])
def saved(tmp_path, request):
    rng, c = random.Random(5), Crowd(num_blocks=14, maxlen=25, keyframe_every=10, guess=request.param)
    for _ in range(60): act(rng, c); c.step()
    c.trace.to_jsonl(tmp_path/'t.jsonl')
    return c.trace, tmp_path/'t.jsonl'

def test_a_file_replays_to_the_same_states(saved):
    trace, path = saved
    again = Trace.load(path)
    assert again.records == trace.records and again.facts == trace.facts
    for r in trace: assert again.state(r.step) == trace.state(r.step)

def test_bad_files_name_the_line(saved):
    "Every field of a header and of a record replaced by every kind of nonsense: a ValueError or a trace, nothing else"
    _, path = saved
    lines = path.read_text().splitlines()
    def load(header, rec):
        path.write_text('\n'.join([header, rec] + lines[2:]))
        return Trace.load(path)
    refused = 0
    for n in (0, 1):
        for key in json.loads(lines[n]):
            for bad in (None, True, -1, 1.5, 'x', [], [[]], [['r0']], {}, {'r0': 0}, {'ghost': [1]}, 10**30, '\ud800'):
                two = [json.loads(line) for line in lines[:2]]
                two[n][key] = bad
                try: load(*map(json.dumps, two))
                except ValueError as e: refused += 1; assert str(path) in str(e) and 'line' in str(e)
    assert refused > 200
    for text in ('', '[]', '{}', '\x00', '[' * 100_000, lines[1], lines[0] + '\n' + lines[0],
                 lines[0].replace('"cbatch_trace": 4', '"cbatch_trace": 5')):
        path.write_text(text)
        with pytest.raises(ValueError, match='line 1|line 2'): Trace.load(path)
    path.write_bytes(b'\xff\xfe{}')
    with pytest.raises(ValueError): Trace.load(path)

def test_guesses_that_fit_nothing_are_refused(tmp_path):
    c = Crowd(guess=5)
    c.sched.guesses.guesser.guess = lambda r, most: Guess([7] * most)
    c.add(4, 20, 'a'); c.add(4, 1, 'b')
    for _ in range(3): c.step()
    c.trace.to_jsonl(tmp_path/'t.jsonl')
    header, *lines = (tmp_path/'t.jsonl').read_text().splitlines()
    n, kept, back = json.loads(lines[1])['guessed']['a']
    for odd in (dict(a=[n, kept + 1, back]), dict(a=[kept - 1, kept, back]), dict(a=[n, kept, 3]), dict(b=[2, 1, 0]),
                dict(ghost=[1, 0, 1]), dict(a=[n, kept]), dict(a=[n, kept, -1]), [['a', n, kept, back]]):
        bad = json.dumps(json.loads(lines[1]) | dict(guessed=odd))
        (tmp_path/'t.jsonl').write_text('\n'.join([header, lines[0], bad]))
        with pytest.raises(ValueError, match='line 3: not a trace: record guessed'): Trace.load(tmp_path/'t.jsonl')

@pytest.mark.parametrize('size', [None, 23_040])
def test_a_block_has_bytes_where_they_are_known(tmp_path, size):
    "Kept in the file from version 4 on; a third version has no place for them"
    c = Crowd(num_blocks=14)
    c.add(5, 4)
    while c.live: c.step()
    c.trace.block_bytes = size
    c.trace.to_jsonl(tmp_path/'t.jsonl')
    assert Trace.load(tmp_path/'t.jsonl').block_bytes == size
    header, *lines = (tmp_path/'t.jsonl').read_text().splitlines()
    old = json.loads(header) | dict(cbatch_trace=3)
    for good in (False, True):
        (tmp_path/'old.jsonl').write_text('\n'.join([json.dumps(old), *lines]))
        if good: assert Trace.load(tmp_path/'old.jsonl').block_bytes is None
        else:
            with pytest.raises(ValueError, match='line 1'): Trace.load(tmp_path/'old.jsonl')
        old.pop('block_bytes', None)

def test_bytes_of_an_engines_blocks(tiny):
    for kv_dtype, vector in dict(auto=4 * 16, int8=16 + 4).items():
        with LLM(tiny, num_blocks=8, block_size=4, kv_dtype=kv_dtype) as llm:
            assert llm.trace.block_bytes == 4 * 2 * 3 * 2 * vector      # tokens, K and V, layers, KV heads

def test_a_file_of_the_second_version(tmp_path):
    "It knows no guesses: read as it is, and written again with a place for them"
    rng, c = random.Random(2), Crowd(num_blocks=14)
    for _ in range(40): act(rng, c); c.step()
    c.trace.to_jsonl(tmp_path/'t.jsonl')
    header, *lines = map(json.loads, (tmp_path/'t.jsonl').read_text().splitlines())
    for d in lines: assert d.pop('guessed') == {}
    assert header.pop('block_bytes') is None
    old = [json.dumps(d) for d in (header | dict(cbatch_trace=2), *lines)]
    (tmp_path/'old.jsonl').write_text('\n'.join(old))
    assert Trace.load(tmp_path/'old.jsonl').records == c.trace.records
    (tmp_path/'old.jsonl').write_text('\n'.join([old[0], json.dumps(lines[0] | dict(guessed={}))]))
    with pytest.raises(ValueError, match='line 2'): Trace.load(tmp_path/'old.jsonl')

def test_a_file_of_the_first_version():
    "trace_v1.jsonl was written when decisions were English: what it says is understood, and said again as it was"
    path = Path(__file__).parent/'trace_v1.jsonl'
    header, *lines = map(json.loads, path.read_text().splitlines())
    trace = Trace.load(path)
    assert header['cbatch_trace'] == 1 and trace.prompts == {'a': 'an old friend'}
    for rec, line in zip(trace, lines, strict=True):
        assert [[d.request_id, str(d)] for d in rec.decisions] == line['decisions']
        plain = json.loads(json.dumps({k: getattr(rec, k) for k in line}))
        assert plain | dict(decisions=line['decisions']) == line
        assert trace.state(rec.step).num_free_blocks == rec.num_free_blocks
    assert repr(trace) == ('Trace of vllm, 3 slots: steps 0 to 29, 0.330 s; 0 running, 0 waiting, 15 finished; '
                           '3 preemptions; 9 of 9 blocks free')
    assert trace.why('e') == [
        'step 3: arrived at 0.030 s', 'steps 3-11: waits: behind the head of the queue', 'step 12: admitted, prefill 3',
        'step 13: preempted: youngest', 'step 14: waits: behind the head of the queue',
        'step 15: resumed, prefill 4', 'step 15: finished: length']

def test_reasons_of_the_first_version_are_values(tmp_path):
    trace = Trace.load(Path(__file__).parent/'trace_v1.jsonl')
    said = {(d.kind, d.why, d.n, d.of) for rec in trace for d in rec.decisions}
    assert said >= {
        (Kind.ADMITTED, Why.CHUNK, 12, 14), (Kind.RESUMED, Why.PREFILL, 4, None), (Kind.RUNS, Why.DECODE, None, None),
        (Kind.ADMITTED, Why.BUDGET, None, None), (Kind.WAITS, Why.BLOCKS, 2, None), (Kind.WAITS, Why.FORK, None, 'a'),
        (Kind.WAITS, Why.PREFIX, 16, 'b'), (Kind.WAITS, Why.BATCH_FULL, None, None),
        (Kind.WAITS, Why.CLOSED, None, None), (Kind.WAITS, Why.WINDOW, .03, None),
        (Kind.WAITS, Why.MEMORY, None, None), (Kind.PREEMPTED, Why.FORCED, None, None),
        (Kind.PREEMPTED, 'youngest', None, None), (Kind.BEHIND, Why.NOTHING, 3, None),
        (Kind.FAILED, Why.NOTHING, None, None)}
    assert not any(kind is Kind.NOTE for kind, *_ in said)
    trace.to_jsonl(tmp_path/'again.jsonl', trace.prompts)
    again = Trace.load(tmp_path/'again.jsonl')
    assert again.records == trace.records and again.prompts == trace.prompts
