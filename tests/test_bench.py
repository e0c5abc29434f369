"The benchmark's arithmetic, its client and its peers, in small; nothing here looks at a clock"
import asyncio, importlib.util, json, re, sys, threading
from types import SimpleNamespace
import numpy as np
import pytest
from cbatch import SamplingParams
from cbatch.bench import time_scheduler
from cbatch.ceiling import model_facts, rates, roofline, step_work
from cbatch.quant import quantise, weight_bytes
from cbatch.cli import main
from cbatch.contest import ContestSpec, run_alone, run_contest, run_engine
from cbatch.core import RequestMetrics, StepRecord
from cbatch.driving import Outcome, drive
from cbatch.metrics import goodput, itls_s, token_times, tpot_s, ttft_s
from cbatch.peers import drive_url, run_generate, run_generate_batch, run_llama_cpp, served_model
from cbatch.results import best_of, field_table, machine, run_results
from cbatch.token_loop import generate_ref
from cbatch.workloads import Workload, WorkItem, smaller, w64

CROWD = smaller(w64(), 6, 16)
M = RequestMetrics

# --- the table

def test_the_fields_table():
    sent = [Outcome(7, M(0., None, [.5, .75, 1.], 1.)), Outcome(9, M(.5, None, [1.], 1.)), Outcome(3, error='HTTP 429')]
    d = run_results(sent, 2., dict(ttft=600, tpot=200), backend='x', request_rate=3., max_concurrency=None)
    assert (d['completed'], d['failed'], d['total_input_tokens'], d['total_output_tokens'], d['request_throughput'],
            d['output_throughput'], d['total_token_throughput']) == (2, 1, 16, 4, 1., 2., 10.)
    # one token has no pace to break
    assert (d['request_goodput'], d['slo_attainment'], d['slo_attainment_by']) == (.5, 1/3, dict(ttft=2/3, tpot=1/3))
    assert (d['mean_ttft_ms'], d['std_ttft_ms'], d['mean_tpot_ms'], d['median_itl_ms'], d['max_e2el_ms'],
            d['max_concurrent_requests'], d['max_output_tokens_per_s']) == (500., 0., 250., 250., 1000., 2, 2.)
    keys = ('date backend num_prompts completed failed total_input_tokens total_output_tokens request_throughput '
            'request_goodput output_throughput total_token_throughput input_lens output_lens ttfts itls errors')
    assert {*keys.split(), *(f'{s}_{k}_ms' for s in ('mean', 'median', 'std', 'p99')
                             for k in ('ttft', 'tpot', 'itl', 'e2el'))} <= set(d) and json.dumps(d)
    lines = field_table(d).splitlines()
    assert lines[0] == '============ Serving Benchmark Result ============' and lines[-1] == '=' * 50
    assert (lines[1] == f"{'Successful requests:':<40} {2:<10}"
            and f"{'Request rate configured (RPS):':<40} {'3.00':<10}" in lines
            and f"{'Mean TTFT (ms):':<40} {'500.00':<10}" in lines)
    assert [l for l in lines if l.startswith('--')][:4] == ['---------------Time to First Token----------------',
                                                            '-----Time per Output Token (excl. 1st token)------',
                                                            '---------------Inter-token Latency----------------',
                                                            '----------------End-to-end Latency----------------']
    assert all(len(l) in (50, 51) for l in lines) and not any('concurrency' in l for l in lines)

def test_nothing_came_back():
    d = run_results([Outcome(3, error='no')], 1., dict(e2el=1))
    assert (d['completed'], d['mean_ttft_ms'], d['slo_attainment']) == (0, None, 0.) and 'TTFT' not in field_table(d)

def test_chunks_share_their_gap():
    t = token_times([(1., 3), (2., 1), (3., 4)])
    assert t == [1., 1., 1., 2., 2.25, 2.5, 2.75, 3.] and itls_s(M(0., None, t, 3.)) == [1.] + [.25] * 4
    assert ttft_s(M(0., None, t, 3.)) == 1. and tpot_s(M(0., None, t,
                                                         3.)) == pytest.approx(2 / 7) and token_times([]) == []

def test_goodput_needs_every_promise_and_counts_the_failed():
    fast, slow, late = M(0., 0., [.1, .2], .2), M(0., 0., [.1, 2.], 2.), M(0., 0., [3., 3.1], 3.1)
    g = goodput([fast, slow, late, None], dict(ttft=1000, tpot=1000), 8.)
    assert g == dict(request_goodput=.125, slo_attainment=.25, slo_attainment_by=dict(ttft=.5, tpot=.5))
    assert goodput([fast, slow], dict(e2el=200.1), 1.)['slo_attainment'] == .5 and goodput([], dict(ttft=1),
        1.)['slo_attainment'] == 0.
    for bad in (dict(itl=1), dict(ttft=0)):
        with pytest.raises(ValueError, match='limits above 0 ms for ttft, tpot, e2el'): goodput([fast], bad, 1.)

# --- the engine

def test_drive_asks_for_what_the_workload_wants(tiny, engine):
    llm = engine(num_blocks=200)
    sent, took = drive(llm, CROWD, seed=3)
    for s, x in zip(sent, CROWD):
        assert s.error is None and s.input_len == x.prompt_len and len(s.metrics.token_times) == x.output_len
        assert s.output_ids == generate_ref(tiny, x.prompt_ids(tiny.vocab_size, 3),
                                            SamplingParams(temperature=0, max_tokens=x.output_len,
                                                           ignore_eos=True)).token_ids
    assert took > 0 and not llm.has_unfinished

@pytest.mark.parametrize('policy', ['vllm', 'dynamic'])
def test_drive_is_an_open_loop(engine, policy):
    "On a clock that moves by hand: nobody comes early, and who comes while a step runs is late by its rest"
    llm, now = engine(policy=policy, num_blocks=200), [5.]
    run = llm.execute
    def execute(plan): now[0] += .01; return run(plan)
    def sleep(s): assert s > 0; now[0] += s
    llm.execute, llm.clock, llm.sleep = execute, lambda: now[0], sleep
    work = Workload('x', [WorkItem(3, [(str(i), 4)], arrival=t) for i, t in enumerate((0., .004, 7.))])
    sent, took = drive(llm, work)
    assert [s.metrics.arrival for s in sent] == [5., 5.004, 12.] and [s.lag_s
        for s in sent][0] == 0 and sent[2].lag_s == pytest.approx(0) and 7 < took < 7.2
    if policy == 'vllm': assert sent[1].lag_s == pytest.approx(.006) and ttft_s(sent[1].metrics) == pytest.approx(.016)

def test_a_request_that_does_not_fit_is_a_failure(engine):
    sent, _ = drive(engine(num_blocks=4), Workload('x', [WorkItem(3, [('a', 4)]), WorkItem(3, [('b', 400)])]))
    assert sent[0].error is None and 'exceed' in sent[1].error or 'leaves no room' in sent[1].error

def test_run_engine_counts_its_own_run_alone(tiny):
    d = run_engine(tiny, CROWD, 'static', repeats=2, limit_s=1e9, max_num_seqs=3, num_blocks=200, prefix_caching=True)
    assert (d['total_output_tokens'], d['failed'], len(d['durations']), len(d['recs'])) == (CROWD.num_output_tokens, 0,
        2, d['num_steps'])
    assert (sum(s for r in d['recs'] for *_, s in r.scheduled) == CROWD.num_output_tokens
            and d['slot_utilisation'] == pytest.approx(CROWD.num_output_tokens / 3 / d['num_steps']))
    # nothing was found from the run before
    assert sum(n for r in d['recs']
               for _, n, _, _ in r.scheduled) == CROWD.num_prompt_tokens + CROWD.num_output_tokens - len(CROWD)
    assert {'schedule', 'pack', 'forward', 'sample', 'update', 'text',
            'trace'} <= set(d['ms_per_step']) and sum(d['ms_per_step'].values()) <= d['step_ms'] * 1.001

def test_best_of():
    took = iter([3., 1., 2., 9.])
    assert best_of(lambda: dict(duration=next(took)), 3) == dict(duration=1., durations=[3., 1., 2.])
    assert best_of(lambda: dict(duration=100.), 3, limit_s=50.)['durations'] == [100.]

# --- the roofline

def test_step_work_by_hand(tiny):
    f = dict(body=1000, body_bytes=700, head=300, head_bytes=350, vocab=30, itemsize=2, kv_bytes=8, attention=4)
    # a decodes at context 10, b computes tokens 2, 3, 4
    rec = StepRecord(0, 0., 0., scheduled=[('a', 1, 9, 1), ('b', 3, 2, 0)])
    moved, did = step_work(rec, f)
    assert moved == 700 + 350 + 30 * 2 + (10 + 5) * 8 + (1 + 3) * 8
    assert did == 2 * 4 * 1000 + 2 * 300 + 4 * (10 + 3 + 4 + 5)
    # no logits, no head
    assert step_work(StepRecord(0, 0., 0., scheduled=[('b', 3, 2, 0)]), f)[0] == 700 + 5 * 8 + 3 * 8
    r = roofline([rec, rec], f, dict(bytes_per_s=moved, flop_per_s=10 * did), 4.)
    assert (r['least_s'], r['share'], r['steps']) == (2., .5, 2) and roofline([rec], f,
        dict(bytes_per_s=1e99, flop_per_s=did / 3), 4.)['least_s'] == pytest.approx(3.)

def test_facts_and_rates(tiny):
    f, hf = model_facts(tiny), tiny.hf_model
    assert (f['weight_bytes'] == weight_bytes(tiny) and f['body_bytes'] == 4 * f['body']
            and f['head'] == hf.lm_head.weight.numel() and f['kv_bytes'] == tiny.kv_bytes_per_token)
    linears = sum(m.weight.numel() for m in hf.modules() if type(m).__name__ == 'Linear' and m is not hf.lm_head)
    assert f['body'] == linears
    coded = model_facts(quantise(tiny), 'int8')         # a byte holds two, and 32 share four bytes
    same = ('body', 'head', 'vocab', 'attention')
    assert all(coded[k] == f[k] for k in same) and coded['body_bytes'] == linears // 2 + linears // 8
    assert coded['head_bytes'] == f['head'] + f['head'] // 16 and coded['weight_bytes'] < f['weight_bytes'] / 3
    assert coded['kv_bytes'] * 4 * tiny.head_dim == f['kv_bytes'] * (tiny.head_dim + 4)
    assert all(x > 0 for x in rates(tiny.dtype, quick=True).values()) and {'cpu', 'cores', 'versions',
        'load'} <= set(machine())

# --- peers

def test_transformers_peers_compute_what_is_asked(tiny):
    work = CROWD; prompts = [x.prompt_ids(tiny.vocab_size) for x in work]
    calls, old = [], tiny.hf_model.generate
    def generate(ids, **kw): out = old(ids, **kw); calls.append((ids, kw['attention_mask'], out)); return out
    tiny.hf_model.generate = generate
    try: run_generate(tiny, work, prompts, 4)
    finally: del tiny.hf_model.generate
    rows = [(p.tolist(), m.tolist(), o.tolist()) for ids, mask, out in calls for p, m, o in zip(ids, mask, out)]
    assert len(calls) == 2 and len(rows) == len(work)
    for (row, mask, out), p, x in zip(rows, prompts, work):
        assert row[-len(p):] == p and sum(mask) == len(p) and len(out) - len(row) >= x.output_len
        assert out[len(row):len(row) + x.output_len] == generate_ref(tiny, p,
            SamplingParams(temperature=0, max_tokens=x.output_len, ignore_eos=True)).token_ids
    # raises unless each got as many tokens as it wanted
    run_generate_batch(tiny, work[:3], prompts[:3], 2)

def fake_llama(vocab=50):
    """A stand-in for llama_cpp.
    A model whose next token is the sum of what its sequence holds; it insists on positions without a gap."""
    held, done, arr = {}, [], lambda n: [0] * n
    batch = SimpleNamespace(token=arr(2048), pos=arr(2048), n_seq_id=arr(2048), logits=arr(2048),
                            seq_id=[[0] for _ in range(2048)], n_tokens=0)
    rows = {}
    def decode(ctx, b):
        rows.clear()
        for i in range(b.n_tokens):
            k = b.seq_id[i][0]; seq = held.setdefault(k, [])
            assert b.pos[i] == len(seq) and b.n_seq_id[i] == 1
            seq.append(b.token[i])
            if b.logits[i]: rows[i] = np.eye(vocab, dtype=np.float32)[sum(seq) % vocab]
        return 0
    L = SimpleNamespace(llama_model_load_from_file=lambda p, m: 'model', llama_init_from_model=lambda m, c: c,
                        llama_model_default_params=dict, llama_context_default_params=SimpleNamespace,
                        llama_batch_init=lambda *a: batch,
        llama_model_get_vocab=lambda m: m, llama_vocab_n_tokens=lambda v: vocab, llama_decode=decode,
                        llama_get_memory=lambda c: c, llama_memory_seq_rm=lambda m, k, a, b: done.append(held.pop(k)),
        llama_batch_free=lambda b: None, llama_get_model=lambda c: None, llama_model_free=lambda m: None,
                        llama_free=lambda c: done.append('free'), llama_get_logits_ith=lambda c,
                        i: (np.ctypeslib.ctypes.c_float * vocab)(*rows[i]))
    return L, held, done

def test_llama_cpp_is_driven_right(monkeypatch):
    L, held, done = fake_llama()
    monkeypatch.setitem(sys.modules, 'llama_cpp', L)
    work = CROWD; prompts = [x.prompt_ids(50) for x in work]
    run_llama_cpp('x.gguf', work, prompts, 3, 64)
    assert done.pop() == 'free' and not held and len(done) == len(work)
    want = []
    for p, x in zip(prompts, work):
        seq = list(p)
        for _ in range(x.output_len - 1): seq.append(sum(seq) % 50)       # the last token is sampled and never computed
        want.append(seq)
    assert sorted(done) == sorted(want)

class Toy:
    "A server on a thread of its own; `reply(body)` gives the status and a list of events, or raw bytes"
    def __init__(self, reply, chunked=True):
        self.reply, self.chunked, self.seen, self.now, self.most = reply, chunked, [], 0, 0
    def __enter__(self):
        up = threading.Event()
        def run():
            async def go():
                self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
                server = await asyncio.start_server(self.client, '127.0.0.1', 0)
                self.url = f'http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1'; up.set()
                async with server: await self.stop.wait()
            asyncio.run(go())
        self.thread = threading.Thread(target=run, daemon=True); self.thread.start(); up.wait(10)
        return self
    def __exit__(self, *a): self.loop.call_soon_threadsafe(self.stop.set); self.thread.join(10)

    async def client(self, reader, writer):
        head = (await reader.readuntil(b'\r\n\r\n')).decode()
        n = re.search(r'Content-Length: (\d+)', head)
        body = json.loads(await reader.readexactly(int(n[1]))) if n else None
        self.seen.append((head, body)); self.now += 1; self.most = max(self.most, self.now)
        status, events = self.reply(body)
        writer.write(f"HTTP/1.1 {status} x\r\nContent-Type: text/event-stream\r\n"
                     f"{'Transfer-Encoding: chunked' if self.chunked else 'Connection: close'}\r\n\r\n".encode())
        for e in events:
            data = e if isinstance(e, bytes) else f'data: {json.dumps(e)}\n\n'.encode()
            for part in (data[:7], data[7:]) if self.chunked else (data,):        # an event may come in two pieces
                if part: writer.write(f'{len(part):x}\r\n'.encode() + part + b'\r\n' if self.chunked else part)
            await writer.drain(); await asyncio.sleep(.002)
        self.now -= 1
        if self.chunked: writer.write(b'0\r\n\r\n')
        await writer.drain(); writer.close()

said = lambda text: dict(choices=[dict(text=text)])
def usage(n): return dict(choices=[], usage=dict(completion_tokens=n))

@pytest.mark.parametrize('chunked', [True, False])
def test_the_client_counts_tokens(chunked):
    events = {2: [said(''), said('a'), said('b'), b'data: [DONE]\n\n'],
              3: [said('a'), said('bcd'), usage(5), b': ping\n\n', b'data: [DONE]\n\n'], 4: [said(''), usage(2)]}
    with Toy(lambda b: (200, events[b['max_tokens']]), chunked) as toy:
        sent, took = drive_url(toy.url, Workload('x', [WorkItem(n, [(str(n), 5)]) for n in (2, 3, 4)]), 'm', 100,
                               key='sesame')
    assert [(s.error, len(s.metrics.token_times)) for s in sent[:2]] == [(None, 2),
        (None, 5)] and len(sent[2].metrics.token_times) == 2 and took > 0
    assert all(s.metrics.arrival < s.metrics.token_times[0] <= s.metrics.finished_at for s in sent)
    for head, body in toy.seen:
        assert head.startswith('POST /v1/completions HTTP/1.1\r\n') and 'Authorization: Bearer sesame' in head
        assert (len(body['prompt']), body['stream'], body['ignore_eos'], body['temperature'],
                body['stream_options']) == (5, True, True, 0, dict(include_usage=True))

@pytest.mark.parametrize('status,events,says', [(429, [b'{"error": "busy"}'], 'HTTP 429.*busy'),
                                                (200, [dict(error=dict(message='lost'))], 'lost'),
                                                (200, [], 'no token came'),
                                                (200, [b'data: {oops\n\n'], 'JSONDecodeError')])
def test_what_fails_is_kept_apart(status, events, says):
    with Toy(lambda b: (status, events)) as toy:
        sent, took = drive_url(toy.url, Workload('x', [WorkItem(2, [('a', 3)])]), 'm', 100)
    d = run_results(sent, took, dict(ttft=1e6))
    assert d['failed'] == 1 and re.search(says, sent[0].error) and d['slo_attainment'] == 0.

def test_nobody_listens():
    sent, took = drive_url('http://127.0.0.1:9/v1', Workload('x', [WorkItem(2, [('a', 3)])]), 'm', 100)
    assert 'Error' in sent[0].error and sent[0].metrics is None and run_results(sent, max(took, 1e-9))['failed'] == 1
    for url in 'http://127.0.0.1:9/v1', 'http://a b/v1', 'http://[::1', '-':
        with pytest.raises(ValueError, match='give its address up to /v1'): served_model(url)

@pytest.mark.parametrize('status,answer', [(200, b'{"data": 5}'), (200, b'[]'), (200, b'hello'), ('SSH-2.0', b'')])
def test_whoever_answers_something_else_is_no_server(status, answer):
    with Toy(lambda b: (status, [answer])) as toy, pytest.raises(ValueError, match='does not answer as an OpenAI'):
        served_model(toy.url)

def test_concurrency_and_lag():
    with Toy(lambda b: (200, [said('a')] * 5)) as toy:
        sent, _ = drive_url(toy.url, Workload('x', [WorkItem(5, [(str(i), 3)]) for i in range(7)]), 'm', 100,
                            max_concurrency=2)
    # an answer takes 10 ms or more: who waited for a place was sent late, and that is said
    assert toy.most <= 2 and len(toy.seen) == 7 and sum(s.lag_s > .009 for s in sent) >= 5

@pytest.mark.skipif(not importlib.util.find_spec('starlette'), reason='needs cbatch[serve]')
def test_against_our_own_server(engine, capsys, tmp_path):
    from cbatch.server import background
    with background(engine(num_blocks=200, check=False), 'tiny') as server:
        assert served_model(server.url + '/v1') == 'tiny'
        code = main(['bench', 'serve', '--url', server.url + '/v1', '--quick', '--rate', '200', '--vocab-size', '250',
                     '--goodput', 'e2el:60000', '--record', str(tmp_path/'r.json')])
    d = json.loads((tmp_path/'r.json').read_text())['result']
    assert code == 0 and d['completed'] == 12 and d['slo_attainment'] == 1. and d['output_lens'] == [x.output_len
        for x in smaller(w64())] and 'SLO attainment' in capsys.readouterr().out

# --- the commands

def test_throughput_in_a_child(tmp_path, capsys, monkeypatch):
    spec = ContestSpec(model='tiny', workload='w64', dtype='float32', max_num_seqs=4, max_num_batched_tokens=64,
                       num_blocks=200, prefix_caching=False, slos={}, repeats=1, limit_s=9., vocab_size=250, seed=0,
                       quick=True)
    assert run_contest(['vllm'], spec, str(tmp_path/'r.json'), True) == 0
    r = json.loads((tmp_path/'r.json').read_text()); d = r['runs']['vllm']
    assert (0 < d['memory_mb'] and d['cpu_s'] > 0 and d['imports_mb'] > 50
            and d['total_output_tokens'] == smaller(w64()).num_output_tokens and 0 < d['roofline']['share'] < 1)
    assert {'command', 'machine', 'rates', 'said', 'seed'} <= set(r) and 'roofline' in capsys.readouterr().out
    monkeypatch.setattr(sys, 'executable', 'false')
    with pytest.raises(RuntimeError, match='vllm: ended with 1'): run_alone('vllm', spec)

def test_a_peer_that_cannot_run_stops_nobody(capsys):
    assert main(['bench', 'throughput', '--quick', '--policies', 'vllm', '--peer', 'openai:http://127.0.0.1:9/v1']) == 0
    out = capsys.readouterr().out
    assert 'openai:http://127.0.0.1:9/v1: not measured' in out and re.search(r'^vllm +\d', out, re.M)

def test_scheduler_and_serve(capsys):
    assert time_scheduler(5, 9, True, steps=3, repeats=1) > 0
    assert main(['bench', 'serve', '--quick', '--rate', '500', '--num-prompts', '3']) == 0
    assert 'Max schedule lag (ms):' in capsys.readouterr().out

@pytest.mark.parametrize('args,says', [(['throughput', '--policies', 'statc'], 'know vllm'),
                                       (['throughput', '--workload', 'chat', '--peer', 'transformers'], 'w64 only'),
                                       (['throughput', '--workload', 'nope'], 'know w64'),
    (['throughput', '--goodput', 'ttft'], 'ttft:2000'), (['serve', '--goodput', 'x:1'], 'ttft, tpot, e2el'),
                                       (['throughput', '--dtype', 'int8'], 'must be float32'),
                                       (['serve', '--rate', '-1', '--quick'], 'above 0'),
    *((c.split(), says) for c, says in {
        'serve --seed -1': 'seed=-1', 'throughput --quick --seed -1': 'seed=-1', 'policies --seed -1': 'seed=-1',
        'serve --num-prompts -1': '--num-prompts -1', 'policies --num-prompts 0': '--num-prompts 0',
        'serve --max-concurrency -1': '--max-concurrency -1', 'serve --vocab-size 0': '--vocab-size 0',
        'throughput --repeats 0': '--repeats 0', 'policies --figure a.doc': 'a .svg, .png or .pdf',
        'serve --url http://a.b:x': 'give its address', 'serve --url -': 'give its address'}.items()),
    (['scheduler', '--record', '/no/such/folder/r.json'], 'no folder'), (['nonsense'], 'no command')])
def test_mistakes_are_said(args, says, capsys):
    assert main(['bench', *args]) == 2 and says in capsys.readouterr().err

def test_a_decode_step_looks_at_memory_at_block_ends_only(monkeypatch):
    "Whether anybody waits or not: what the scheduler costs per request must not depend on the queue"
    from cbatch.core import Request, StepOutput
    from cbatch.params import EngineConfig
    from cbatch.kv_blocks import BlockManager
    from cbatch.scheduler import Scheduler
    asked, old = [], BlockManager.blocks_short
    monkeypatch.setattr(BlockManager, 'blocks_short', lambda self, r, n: asked.append(r) or old(self, r, n))
    s = Scheduler(EngineConfig(max_num_seqs=64, max_num_batched_tokens=512, watermark=0.), BlockManager(65, 8))
    for i in range(32): s.add(Request(f'r{i}', [1] * 3, SamplingParams(), 50, seq=i))
    s.add(Request('big', [1] * 400, SamplingParams(), 50, seq=99))
    for step in range(10):
        asked.clear(); plan = s.schedule()
        s.update(plan, StepOutput({x.request.request_id: [1] for x in plan.scheduled}))
        # tokens 9 of all 32; the head asks once
        if step:
            assert len(plan.scheduled) == 32 and len(s.waiting) == 1 and len(asked) == 1 + 2 * 32 * (step == 6), step
