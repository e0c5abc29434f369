"""The server as its clients meet it.
The openai package, a fuzzer with the server's own document, a supervisor that sends signals, and bad company."""
import asyncio, contextlib, json, os, re, signal, socket, subprocess, sys, threading, time
import openai, pytest, schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (content_type_conformance, response_schema_conformance,
                                               status_code_conformance)
from cbatch import LLM
from cbatch.async_engine import Observer
from cbatch.openapi import PATHS
from cbatch.server import Connection, background, bind, make_server
from cbatch.wire import LIMITS
from soak import soak
from web import ENGINE, NEXT, Web, ref, web

@pytest.fixture(scope='module')
def shared(tiny):
    with web(tiny, trace=True) as w: yield w

@pytest.fixture
def w(shared):
    yield shared
    shared.rests()

HI = [dict(role='user', content='Hi')]
GREEDY = dict(model='tiny', temperature=0, max_tokens=8, extra_body=dict(ignore_eos=True))

# --- the openai package

def test_openai_plain_and_streamed(w):
    c = w.client()
    whole = c.completions.create(prompt=NEXT, **GREEDY)
    want = ref(w.llm.model, NEXT, 8)
    assert (whole.choices[0].text == want.text and whole.choices[0].finish_reason == 'length'
            and whole.object == 'text_completion')
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (3, 8,
        11) and whole.system_fingerprint.startswith('fp_')
    assert ''.join(p.choices[0].text for p in c.completions.create(prompt=NEXT, stream=True, **GREEDY)) == want.text
    chat = c.chat.completions.create(messages=HI, **GREEDY)
    assert chat.choices[0].message.content == ref(w.llm.model, w.llm.encode(HI),
                                                  8).text and chat.choices[0].message.role == 'assistant'
    parts = list(c.chat.completions.create(messages=HI, stream=True, stream_options=dict(include_usage=True), **GREEDY))
    assert ''.join(p.choices[0].delta.content or '' for p in parts[:-1]) == chat.choices[0].message.content
    assert (parts[0].choices[0].delta.role == 'assistant' and parts[-1].choices == [] and parts[-1].usage == chat.usage
            and len({p.id for p in parts}) == 1)
    assert c.models.list().data[0].id == 'tiny' and c.models.retrieve('tiny').max_model_len == w.llm.max_model_len

def test_openai_asyncio_many_at_once(w):
    prompts, n = [[i + 20] * (i % 5 + 1) for i in range(12)], 12
    want = [ref(w.llm.model, p, n).text for p in prompts]
    async def go():
        async with openai.AsyncOpenAI(base_url=w.server.url + '/v1', api_key='x', max_retries=0) as c:
            async def one(p): return ''.join([x.choices[0].text async
                                              for x in await c.completions.create(prompt=p, stream=True, **GREEDY
                                                  | dict(max_tokens=n))])
            return await asyncio.gather(*map(one, prompts))
    assert asyncio.run(go()) == want

def test_openai_samples_and_logprobs(w):
    c = w.client()
    out = c.completions.create(prompt=[NEXT, 'abc'], n=2, seed=3, logprobs=2, echo=True, model='tiny', max_tokens=4)
    assert [x.index for x in out.choices] == [0, 1, 2, 3] and out.choices[2].text.startswith('abc')
    lp = out.choices[0].logprobs
    assert (len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset) == 7
            and lp.token_logprobs[0] is None)
    out = c.chat.completions.create(messages=HI, logprobs=True, top_logprobs=3, **GREEDY)
    t = out.choices[0].logprobs.content
    assert len(t) == 8 and all(len(x.top_logprobs) == 3 and x.top_logprobs[0].logprob >= x.logprob and bytes(x.bytes)
                               for x in t)
    assert b''.join(bytes(x.bytes) for x in t).decode(errors='replace') == out.choices[0].message.content

@pytest.mark.parametrize('kw,exc,param,code', [(dict(temperature=-1), openai.BadRequestError, 'temperature', None),
                                               (dict(model='gpt'), openai.NotFoundError, 'model', 'model_not_found'),
    (dict(prompt=[5] * 2000), openai.BadRequestError, 'prompt', 'context_length_exceeded'),
                                               (dict(prompt=''), openai.BadRequestError, 'prompt',
            None), (dict(suffix='x'), openai.BadRequestError, 'suffix', 'unsupported'),
    (dict(extra_body=dict(timeout=.001, ignore_eos=True), max_tokens=400), openai.APIStatusError, 'timeout',
     'timeout')])
def test_openai_errors(w, kw, exc, param, code):
    with pytest.raises(exc) as e: w.client().completions.create(**dict(prompt=NEXT, **GREEDY) | kw)
    assert (e.value.param, e.value.code) == (param, code) and e.value.request_id

def test_openai_retries_when_told_to(tiny):
    "429 while the queue is full; the client waits as long as it is told, and is served"
    with web(tiny, engine=dict(max_num_seqs=1), limits=dict(max_waiting=1)) as w:
        hold = threading.Event(); w.hooks.append(lambda plan: plan.scheduled[0].request.output_ids and hold.wait(20))
        busy = [w.raw(max_tokens=4)]; w.wait(lambda: any(r.output_ids for r in w.llm.scheduler.running))
        busy += [w.raw(max_tokens=4)]; w.wait(lambda: w.server.engine.worker.num_queued() == 1)
        refusals = []
        class Door(Observer):
            def refused(self, reason): refusals.append(reason); hold.set()
        w.server.engine.observers.append(Door())
        right = w.client(max_retries=2).completions.create(prompt=NEXT, **GREEDY).choices[0].text
        assert refusals == ['requests']
        for s in busy: s.close()
        assert right == ref(tiny, NEXT, 8).text
        w.rests()

# --- predictions

LETTERS = dict(allowed_token_ids=[*range(97, 123)], max_tokens=12)       # bytes that are text by themselves

@pytest.fixture
def guessing(tiny):
    with web(tiny, engine=dict(guesses='lookup', guess_when='always', max_guesses=5)) as w:
        yield w
        w.rests()

def rejected_and_accepted(usage):
    d = usage['completion_tokens_details']
    assert set(d) == {'accepted_prediction_tokens', 'rejected_prediction_tokens'}
    return d['rejected_prediction_tokens'], d['accepted_prediction_tokens']

def test_a_prediction_changes_when_and_not_what(guessing):
    w, n = guessing, 12
    plain = w.chat(**LETTERS).json
    text = plain['choices'][0]['message']['content']
    parts = [dict(type='text', text=t) for t in (text[:5], text[5:])]
    for content in (text, parts):
        r = w.chat(prediction=dict(type='content', content=content), **LETTERS)
        assert r.json['choices'] == plain['choices'] and 'warning' not in r.headers
        # the prompt's step brings a token, the next five guesses and one, the last four: the end is never guessed
        assert rejected_and_accepted(r.json['usage']) == (0, 9) and r.json['usage']['completion_tokens'] == n
    r = w.chat(prediction=dict(type='content', content=text[:4] + text[4].swapcase() * 9), **LETTERS).json
    assert r['choices'] == plain['choices'] and rejected_and_accepted(r['usage'])[0] > 0
    last = w.chat(prediction=dict(type='content', content=text), stream=True, stream_options=dict(include_usage=True),
                  **LETTERS).frames[-1]
    assert rejected_and_accepted(last['usage']) == (0, 9)

@pytest.mark.parametrize('kw', [dict(n=3, temperature=.9, seed=4), dict(logprobs=2, echo=True), dict(stop=['q', 'lw']),
                                dict(prompt=[NEXT, 'abc'], repetition_penalty=1.3), dict(min_tokens=9, temperature=1.)])
def test_predictions_in_any_company(guessing, kw):
    w, kw = guessing, LETTERS | dict(seed=1) | kw
    plain = w.complete(**kw).json['choices']
    for said in (plain[-1]['text'][-9:], w.llm.encode(plain[0]['text']) * 2, 'aeiou' * 9):
        r = w.complete(prediction=said, **kw).json
        for ours, want in zip(r['choices'], plain, strict=True):
            a, b = ours.pop('logprobs'), want['logprobs']
            assert ours == {k: x for k, x in want.items() if k != 'logprobs'}
            # of torch's products the last bits depend on a row's company
            assert (a and a['tokens']) == (b and b['tokens'])
            if a: assert a['token_logprobs'][1:] == pytest.approx(b['token_logprobs'][1:], abs=1e-4)
        assert sum(rejected_and_accepted(r['usage'])) > 0

def test_an_engine_that_does_not_guess_takes_predictions(w):
    plain = w.chat().json
    r = w.chat(prediction=dict(type='content', content='so it begins')).json
    assert r['choices'] == plain['choices'] and rejected_and_accepted(r['usage']) == (0, 0)
    assert 'completion_tokens_details' not in plain['usage']

def test_openai_predictions(guessing):
    c, kw = guessing.client(), GREEDY | dict(max_tokens=12, extra_body=dict(ignore_eos=True, **LETTERS))
    text = c.chat.completions.create(messages=HI, **kw).choices[0].message.content
    out = c.chat.completions.create(messages=HI, prediction=dict(type='content', content=text), **kw)
    assert out.choices[0].message.content == text
    assert out.usage.completion_tokens_details.accepted_prediction_tokens == 9

# --- small routes

def test_tokenize_there_and_back(w):
    ids = w.ask('POST', '/tokenize', dict(model='tiny', prompt='né 한')).json
    assert ids['tokens'] == w.llm.encode('né 한') and ids['count'] == len(ids['tokens'])
    assert w.ask('POST', '/detokenize', dict(model='tiny', tokens=ids['tokens'])).json == dict(prompt='né 한')
    assert w.ask('POST', '/tokenize', dict(model='tiny', messages=HI)).json['tokens'] == w.llm.encode(HI)
    for bad in (dict(), dict(prompt='x', messages=HI), dict(prompt=5)):
        assert w.ask('POST', '/tokenize', dict(model='tiny') | bad).status == 400
    assert w.ask('POST', '/detokenize', dict(model='tiny', tokens=[258])).error['param'] == 'tokens'

def test_errors_of_the_router(w):
    assert w.ask('GET', '/nowhere').error['code'] == 'not_found' and w.ask('GET', '/nowhere').status == 404
    r = w.ask('GET', '/v1/completions')
    assert r.status == 405 and r.headers['allow'] == 'POST' and r.error['type'] == 'invalid_request_error'
    assert w.ask('DELETE', '/v1/models').status == 405 and w.ask('GET', '/v1/models/').status == 404
    # no redirect to a place of the client's choice
    assert w.ask('POST', '/v1/completions/', dict(model='tiny', prompt='x')).status == 404

def test_unknown_fields_are_named(w):
    assert w.complete(temperatur=1, foo=None).headers['warning'] == '299 cbatch "ignored: temperatur"'
    assert 'stream' in w.complete(stream=True,
                                  streem=1).headers['content-type'] and 'warning' not in w.complete().headers

def test_metrics_trace_and_health(w):
    w.complete()
    r = w.ask('GET', '/metrics')
    assert r.status == 200 and b'cbatch' in r.body and r.headers['content-type'].startswith('text/plain')
    steps = w.ask('GET', '/trace?n=5').json
    assert len(steps) == 5 and {'step', 'scheduled', 'decisions'} <= set(steps[0])
    assert w.ask('GET', '/health').json == dict(status='ready')
    assert {p.path for p in PATHS} == set(w.ask('GET', '/openapi.json').json['paths'])

def test_trace_is_off_by_default(tiny):
    with web(tiny) as w: assert w.ask('GET', '/trace').status == 404 and w.ask('GET', '/docs').status == 404

# --- the socket

def test_only_loopback_without_a_key(monkeypatch):
    for host in ('0.0.0.0', '', '::', '192.0.2.1'):
        with pytest.raises(ValueError, match='no key|address'): bind(host or None, 0)
    for host in ('127.0.0.1', 'localhost', '127.0.0.5'): bind(host, 0).close()
    bind('0.0.0.0', 0, 'key').close()
    s = bind('127.0.0.1', 0); s.listen()
    with pytest.raises(ValueError, match='in use'): bind('127.0.0.1', s.getsockname()[1])
    s.close()

def test_garbage_on_the_wire(w):
    for said, answer in ((b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03', b'400'),
                         (b'GET /health HTTP/1.1\r\nHost: localhost\r\nBad Header\r\n\r\n', b'400'),
                         (b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n', b'400')):
        s = socket.create_connection((w.host, w.port)); s.settimeout(10); s.sendall(said + b'\r\n\r\n')
        got = b''
        while piece := s.recv(4096): got += piece
        assert (got.split()[1] == answer
                and json.loads(got.split(b'\r\n\r\n')[1])['error']['type'] == 'invalid_request_error')
        s.close()

def test_a_body_that_never_comes(tiny):
    with web(tiny, body_timeout_s=.2) as w:
        s = socket.create_connection((w.host, w.port)); s.settimeout(10)
        s.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                  b'Content-Length: 100\r\n\r\n{')
        assert s.recv(4096).split()[1] == b'408'; s.close()

def test_pings_while_nothing_comes(tiny):
    with web(tiny, ping_s=.05) as w:
        w.slow(.2)
        r = w.complete(max_tokens=2, stream=True)
        assert r.status == 200 and r.body.startswith(b': ') and r.frames[-1]['choices'][0]['finish_reason'] == 'length'
        r = w.complete(max_tokens=50, stream=True, timeout=.3)
        assert r.frames[-1]['error']['code'] == 'timeout'
        w.rests()

def test_keep_alive(w):
    "One connection, many requests, an error among them"
    import http.client
    c = http.client.HTTPConnection(w.host, w.port, timeout=10)
    for body, status in (('{}', 400), (json.dumps(dict(model='tiny', prompt='x', max_tokens=2)), 200),
                         (json.dumps(dict(model='tiny', prompt='x', max_tokens=2, stream=True)), 200), ('{', 400)) * 3:
        c.request('POST', '/v1/completions', body, {'Content-Type': 'application/json'}); r = c.getresponse(); r.read()
        assert r.status == status and r.getheader('connection') != 'close'
        sock = c.sock
    assert c.sock is sock
    taken = [k.transport.get_extra_info('socket') for k in list(w.server.server_state.connections)]
    # or a small piece waits 40 ms for the one before
    assert taken and all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in taken)
    c.close()

# --- a fuzzer

@pytest.fixture(scope='module')
def fuzzed(tiny):
    with web(tiny, trace=True, engine=dict(max_model_len=48)) as w:
        yield schemathesis.openapi.from_url(w.server.url + '/openapi.json')
        w.rests()

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]

@pytest.mark.parametrize('mode', schemathesis.GenerationMode, ids=lambda m: m.value)
@pytest.mark.parametrize('path,method', [(p.path, p.method) for p in PATHS])
def test_document(fuzzed, path, method, mode):
    "No 5xx and no odd answer to what the document allows, nor to what it forbids"
    op = fuzzed[path][method]
    if mode.is_negative and not op.body and not op.query: return
    @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(op.as_strategy(generation_mode=mode))
    def push(case): said.add(case.call_and_validate(checks=CHECKS, timeout=20).status_code)
    said = set()
    push()
    assert mode.is_negative or 200 in said           # it came through

# --- signals

@contextlib.contextmanager
def process(folder, *args, **kw):
    """The command in a process of its own, and where it listens.
    Nobody reads what it says after that, and its log goes to a full disk."""
    code = ('import sys, cbatch.cli; sys.exit(cbatch.cli.main('
            f'{["serve", str(folder), "--port", "0", "--served-model-name", "tiny", *args]!r}))')
    err = open('/dev/full', 'w') if os.path.exists('/dev/full') else subprocess.DEVNULL
    p = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=err, text=True, **kw)
    try:
        url = re.search(r'http://([\d.]+):(\d+)', p.stdout.readline())
        p.stdout.close()
        w = Web.__new__(Web); w.host, w.port, w.key = url[1], int(url[2]), None
        yield p, w
    finally: p.kill(); p.wait()

def test_term_under_load(tmp_path, tiny):
    """Those who run or wait are served to the end, newcomers are sent away, the exit code is 0.
    And nobody reads stdout, and the log's disk is full."""
    with process(tiny.save(tmp_path / 'tiny'), '--max-num-seqs', '2', '--num-blocks', '64', '--drain-timeout',
                 '60') as (p, w):
        w.wait(lambda: w.ask('GET', '/health').status == 200, 'the model', 60)
        right, got = ref(tiny, NEXT, 120).text, {}
        ts = [threading.Thread(target=lambda i=i: got.update({i: w.complete(max_tokens=120, stream=i % 2 == 0)}))
              for i in range(6)]
        for t in ts: t.start()
        first = w.raw(stream=True, max_tokens=300)
        # the last to come has begun: those before him have been let in
        while b'data:' not in first.recv(65536): pass
        p.send_signal(signal.SIGTERM)
        w.wait(lambda: w.ask('GET', '/health').status == 503)
        r = w.complete()
        assert r.status == 503 and r.error['code'] == 'draining' and r.headers['retry-after']
        for t in ts: t.join(60)
        for i in range(6):
            assert got[i].status == 200
            assert (''.join(f['choices'][0]['text'] for f in got[i].frames) == right if i % 2 == 0
                    else got[i].json['choices'][0]['text'] == right)
        first.close()
        assert p.wait(20) == 0

def test_second_signal(tiny):
    with web(tiny) as w:
        w.slow(.01)
        s = w.raw(stream=True, max_tokens=400)
        while b'data:' not in s.recv(65536): pass
        w.server.handle_exit(); w.wait(lambda: w.server.engine.state == 'draining')
        w.server.handle_exit(); w.wait(lambda: w.server.should_exit)
        w.server.engine.worker.join(5)
        s.close()
    assert w.server.code == 0

def test_an_engine_that_can_not_start():
    def make(): raise RuntimeError('no such GPU')
    server = make_server(make, 'tiny', port=0)
    server.run(sockets=[server.sock])
    assert server.code == 1

def test_serve_needs_its_extra(monkeypatch, capsys):
    from cbatch.cli import main
    monkeypatch.setitem(sys.modules, 'cbatch.server', None)
    assert main(['serve', 'smollm2']) == 2 and 'cbatch[serve]' in capsys.readouterr().err
    monkeypatch.undo()
    assert main(['serve', '/no/such/model', '--port', '0']) == 2
    err = capsys.readouterr().err
    assert '/no/such/model' in err and 'Traceback' not in err

# --- bad company

def test_soak():
    "CBATCH_SOAK_S=60 in CI; ten minutes: python tests/soak.py"
    did = soak(float(os.environ.get('CBATCH_SOAK_S', 6)), seed=1)
    assert did['visits']['right'] > 10 and did['preemptions'] > 0

# --- connections that nobody needs

def ends(s):
    "Is the connection dropped?"
    s.settimeout(5)
    try:
        while s.recv(65536): pass
    except ConnectionError: pass
    s.close()
    return True

def connect(w, rcvbuf=None):
    s = socket.socket()
    if rcvbuf: s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    s.settimeout(5); s.connect((w.host, w.port))
    return s

GET = 'GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n'

def test_connections_without_a_request(w, monkeypatch):
    monkeypatch.setattr(Connection, 'patience_s', .1)
    silent, dribbling, deaf = connect(w), connect(w), connect(w, 4096)
    dribbling.sendall(GET.format('/health').encode()); assert dribbling.recv(4096).startswith(b'HTTP/1.1 200')
    dribbling.sendall(b'G')
    deaf.sendall(GET.format('/openapi.json').encode() * 700)
    w.wait(lambda: not w.server.server_state.connections, 'the connections to be dropped')
    assert ends(silent) and ends(dribbling) and ends(deaf)

def test_too_many_connections(w, monkeypatch):
    monkeypatch.setitem(LIMITS, 'connections', 2)
    w.wait(lambda: not w.server.server_state.connections)
    kept = [connect(w) for _ in range(2)]
    w.wait(lambda: len(w.server.server_state.connections) == 2)
    assert well(w) and ends(kept[0]) and asked(kept[1])    # not the newest has to go, but who was silent for longest
    kept[1].close()
    w.wait(lambda: not w.server.server_state.connections)

def asked(s):
    s.sendall(GET.format('/health').encode()); said = b''
    while not said.endswith(b'}') and (piece := s.recv(4096)): said += piece
    return said.startswith(b'HTTP/1.1 200')

def well(w): return w.ask('GET', '/health').status == 200

def test_who_goes_when_there_are_too_many(w, monkeypatch):
    "Who never asked, then who rests, then who doesn't go on; never who is being served"
    monkeypatch.setitem(LIMITS, 'connections', 5)
    w.wait(lambda: not w.server.server_state.connections)
    num = lambda: len(w.server.server_state.connections)
    w.slow(.02)
    served = w.raw(stream=True, max_tokens=400); served.recv(4096); w.wait(lambda: num() == 1)
    half = half_a_body(w); w.wait(lambda: num() == 2)
    rests, silent = connect(w), connect(w)
    assert asked(rests); w.wait(lambda: num() == 4)
    fifth = connect(w); assert asked(fifth); w.wait(lambda: num() == 5)
    newer = [connect(w)]; assert asked(newer[0]) and ends(silent)
    newer.append(connect(w)); assert asked(newer[1]) and ends(rests)
    for s in (fifth, *newer):
        s.sendall(b'POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                  b'Content-Length: 9\r\n\r\n{')
    w.wait(lambda: all(c.cycle and not c.cycle.response_complete for c in list(w.server.server_state.connections)))
    assert well(w) and ends(half)
    assert served.recv(4096)
    for s in (served, fifth, *newer): s.close()
    w.rests()

def test_a_connection_may_rest_longer_than_pools_keep_it(tiny, monkeypatch):
    monkeypatch.setattr(Connection, 'patience_s', .05)
    with web(tiny) as w:
        assert w.server.config.timeout_keep_alive > 90
        s = connect(w); assert asked(s)
        looks = []; look = Connection.look
        monkeypatch.setattr(Connection, 'look', lambda self: (looks.append(1), look(self)))
        silent = connect(w); assert ends(silent)
        w.wait(lambda: len(looks) > 8); assert asked(s); s.close()
    with web(tiny, keep_alive_s=.1) as w:
        s = connect(w); assert asked(s) and ends(s)
    for kw in (dict(keep_alive_s=-1), dict(drain_timeout_s=-5), dict(drain_timeout_s=float('nan')), dict(ping_s=0),
               dict(send_timeout_s=-1), dict(body_timeout_s='x'), dict(port=99999), dict(port=-5), dict(port=True)):
        with pytest.raises(ValueError, match=next(iter(kw))): make_server(lambda: None, 'tiny', **dict(port=0) | kw)

@pytest.mark.parametrize('more', [1, 200_000])
def test_bytes_behind_a_body(w, more):
    "They hide neither that the client hangs up, nor are they kept without end"
    w.slow(.02); s = connect(w)
    body = json.dumps(dict(model='tiny', prompt=NEXT, temperature=0, max_tokens=400, ignore_eos=True))
    s.sendall('POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
              f'Content-Length: {len(body)}\r\n\r\n{body}'.encode())
    w.wait(lambda: w.llm.has_unfinished)
    s.sendall(b'x' * more)
    if more > 1: assert ends(s)
    s.close()
    w.wait(lambda: not w.llm.has_unfinished, timeout=4)

def test_texts_that_are_no_prompts(w):
    private, far = ''.join(map(chr, range(0xe000, 0xf900))), 'x' * (64 * w.llm.max_model_len + 1)
    r = w.chat(private); assert r.status == 400 and r.error['param'] == 'messages'
    for r in (w.complete(far), w.chat(far), w.ask('POST', '/tokenize', dict(model='tiny', prompt=far))):
        assert r.error['code'] == 'context_length_exceeded' and 'characters' in r.error['message']
    r = w.ask('POST', '/detokenize', dict(model='tiny', tokens=[65] * (w.llm.max_model_len + 1)))
    assert r.status == 400 and r.error['param'] == 'tokens'
    assert w.ask('POST', '/detokenize', dict(model='tiny', tokens=[65] * w.llm.max_model_len)).status == 200
    assert w.server.engine.worker.desk.reserved == 0

def test_a_body_that_outlives_the_engine(tiny):
    with background(lambda: LLM(tiny, **ENGINE), 'tiny') as server:
        w = type('W', (Web,), dict(__init__=lambda self: None))()
        w.server, (w.host, w.port) = server, server.sock.getsockname()[:2]
        s, body = connect(w), json.dumps(dict(model='tiny', prompt=NEXT)).encode()
        s.sendall('POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                  f'Content-Length: {len(body)}\r\n\r\n'.encode())
        w.wait(lambda: any(c.cycle for c in list(server.server_state.connections)))
        w.on_loop(asyncio.sleep(.05)); w.on_loop(server.engine.close())
        s.sendall(body); assert s.recv(4096).startswith(b'HTTP/1.1 503'); s.close()

def test_limits_on_the_command_line(monkeypatch):
    from cbatch.cli import main
    seen = []; monkeypatch.setattr('cbatch.server.serve', lambda *a, limits, **kw: seen.append(limits) or 0)
    assert main(['serve', 'x']) == main(['serve', 'x', '--stall-timeout', '9', '--max-waiting-tokens', '70',
                                         '--max-waiting', '3']) == 0
    assert seen == [dict(max_waiting=256, max_waiting_tokens=None, stall_s=300.),
                    dict(max_waiting=3, max_waiting_tokens=70, stall_s=9.)]

# --- under pressure

def half_a_body(w):
    "A request of whose body a byte has come"
    s = connect(w)
    s.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
              b'Content-Length: 900\r\n\r\n{')
    return s

def until_end(s):
    said = b''
    while piece := s.recv(65536): said += piece
    return said

@contextlib.contextmanager
def served(code, tmp_path, files=None):
    "Python code in a process of its own that serves the tiny model; what it says on stderr is `said()`"
    import resource
    err = open(tmp_path / 'err', 'w')
    limit = files and (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files))
    p = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=err, text=True, preexec_fn=limit)
    try:
        w = Web.__new__(Web); w.key = None
        line = p.stdout.readline()
        if url := re.search(r'http://([\d.]+):(\d+)', line): w.host, w.port = url[1], int(url[2])
        yield p, w, lambda: (tmp_path / 'err').read_text()
    finally: p.kill(); p.wait(); err.close()

TINY = """
import cbatch, time
from cbatch.server import serve
from cbatch.model import tiny_lm
def make():
    llm = cbatch.LLM(tiny_lm('llama'), num_blocks=200, max_num_seqs=4)
    run = llm.execute
    llm.execute = lambda plan: (time.sleep(.02), run(plan))[1]
    return llm
raise SystemExit(serve(make, 'tiny', port=0))
"""

needs_posix = pytest.mark.skipif(os.name != 'posix', reason='signals and limits of POSIX')

@needs_posix
def test_few_descriptors_and_a_terminal_that_hangs_up(tmp_path):
    """More connections than the process may have files: it stays reachable, and silent.
    Then SIGHUP: who has begun is served to the end, half a body is told at once, and nothing is a crash."""
    with served(TINY, tmp_path, (256, 256)) as (p, w, said):
        w.wait(lambda: well(w), 'the model', 120)
        many = [socket.create_connection((w.host, w.port)) for _ in range(400)]
        for _ in range(5): assert well(w)
        assert w.complete(max_tokens=2).status == 200
        stream, half = w.raw(stream=True, max_tokens=60), half_a_body(w)
        while b'data:' not in stream.recv(65536): pass
        half.settimeout(60); stream.settimeout(60); p.send_signal(signal.SIGHUP)
        told, rest = until_end(half), until_end(stream)
        assert told.startswith(b'HTTP/1.1 503') and b'"draining"' in told
        assert rest and b'"finish_reason":"length"' in rest and b'[DONE]' in rest     # and he was told before that
        assert p.wait(30) == 0 and said() == ''
        for s in many: s.close()

@needs_posix
def test_a_second_signal_ends_it_in_order(tmp_path):
    with served(TINY, tmp_path) as (p, w, said):
        w.wait(lambda: well(w), 'the model', 120)
        busy = [w.raw(stream=True, max_tokens=1000), w.raw(max_tokens=1000), half_a_body(w)]
        while b'data:' not in busy[0].recv(65536): pass
        p.send_signal(signal.SIGTERM)
        w.wait(lambda: w.ask('GET', '/health').status == 503)
        p.send_signal(signal.SIGTERM)
        assert p.wait(30) == 0 and 'Traceback' not in said()
        assert until_end(busy[1]).startswith(b'HTTP/1.1 503')
        for s in busy: s.close()

LOADS = """
import time
from cbatch.server import serve
raise SystemExit(serve(lambda: time.sleep(600), 'tiny', port=0))
"""
IMPORTS = """
import sys, time
class Slow:
    def find_spec(self, name, *a):
        if name == 'cbatch.server': print('importing', flush=True); time.sleep(600)
sys.meta_path.insert(0, Slow())
from cbatch.cli import main
sys.exit(main(['serve', 'smollm2']))
"""

@needs_posix
@pytest.mark.parametrize('sig', ['SIGTERM', 'SIGHUP'])
@pytest.mark.parametrize('code', [LOADS, IMPORTS], ids=['loading', 'importing'])
def test_a_signal_before_it_is_ready(tmp_path, code, sig):
    with served(code, tmp_path) as (p, w, said):
        if code == LOADS: w.wait(lambda: w.ask('GET', '/health').status == 503)
        p.send_signal(getattr(signal, sig))
        assert p.wait(30) == 0 and said() == ''

SLOW_END = """
import atexit, sys, time
from cbatch.cli import main
atexit.register(lambda: (print('torn down', flush=True), time.sleep(2)))
sys.argv = ['cbatch', {args}]
sys.exit(main())
"""

@needs_posix
@pytest.mark.parametrize('command', ['serve', 'bench'])
def test_a_signal_after_the_end_changes_nothing(tmp_path, tiny, command):
    "The end is decided, torch is torn down, which takes a while: the exit code stays what it was"
    args = ("'bench', 'scheduler', '--quick'" if command == 'bench' else
            f"'serve', {str(tiny.save(tmp_path / 'm'))!r}, '--port', '0', '--served-model-name', 'tiny'")
    with served(SLOW_END.format(args=args), tmp_path) as (p, w, said):
        if command == 'serve':
            w.wait(lambda: well(w), 'the model', 120)
            p.send_signal(signal.SIGTERM)
        while p.stdout.readline() != 'torn down\n': pass
        for sig in signal.SIGTERM, signal.SIGINT, signal.SIGHUP: p.send_signal(sig); time.sleep(.05)
        assert p.wait(30) == 0 and said() == ''

@needs_posix
def test_ctrl_c_while_it_imports(tmp_path):
    with served(IMPORTS, tmp_path) as (p, w, said):
        p.send_signal(signal.SIGINT)
        assert p.wait(30) == 130 and said() == '\ncbatch: interrupted\n'

@needs_posix
def test_a_pause_is_no_part_of_a_drain(tmp_path):
    code = TINY.replace("'tiny', port=0)", "'tiny', port=0, drain_timeout_s=4., body_timeout_s=4., send_timeout_s=4.)")
    with served(code, tmp_path) as (p, w, said):
        w.wait(lambda: well(w), 'the model', 120)
        s = w.raw(stream=True, max_tokens=60)
        while b'data:' not in s.recv(65536): pass
        p.send_signal(signal.SIGTERM); w.wait(lambda: w.ask('GET', '/health').status == 503)
        p.send_signal(signal.SIGSTOP); time.sleep(5); p.send_signal(signal.SIGCONT)
        assert b'"finish_reason":"length"' in until_end(s)
        assert p.wait(30) == 0 and said() == ''

def test_what_the_command_line_hands_on(monkeypatch):
    from cbatch.cli import main
    seen = []; monkeypatch.setattr('cbatch.server.serve', lambda *a, **kw: seen.append(kw) or 0)
    assert main(['serve', 'x', '--max-body-bytes', '5000', '--allowed-hosts', 'a.b, c']) == main(['serve', 'x']) == 0
    assert [(d['max_body_bytes'], d['allowed_hosts']) for d in seen] == [(5000, ['a.b', 'c']), (None, [''])]

@needs_posix
def test_descriptors_are_raised_as_far_as_allowed():
    code = """
import resource as r; from cbatch.server import max_connections, raise_descriptors
r.setrlimit(r.RLIMIT_NOFILE, (300, 700)); few = max_connections()
raise_descriptors(); print(few, r.getrlimit(r.RLIMIT_NOFILE), max_connections())
"""
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout
    assert out == '108 (700, 700) 508\n'

def test_accepts_that_fail_are_told_once_a_minute(w, caplog):
    async def fail():
        for _ in range(500):
            e = OSError(24, 'Too many open files')
            w.server.loop.call_exception_handler(dict(message='socket.accept() out of system resource', exception=e))
    w.on_loop(fail())
    assert len(caplog.records) == 1 and 'Too many open files' in caplog.text

def test_failing_steps_are_seen_and_forgotten(tiny):
    "Not ready after three in a row that brought nothing but errors; the first that works makes it well"
    with web(tiny) as w:
        broken = [True]
        def burst(plan):
            if broken: raise RuntimeError('the device is gone')
        w.hooks.append(burst)
        states = []
        for _ in range(4): states.append(w.ask('GET', '/health').json['status']); assert w.complete().status == 500
        assert states == ['ready', 'ready', 'ready', 'failing']
        r = w.ask('GET', '/health'); assert r.status == 503 and r.headers['retry-after']
        assert b'failed_steps_in_a_row{engine="0",model_name="tiny"} 4.0' in w.ask('GET', '/metrics').body
        broken.clear()
        assert w.complete().status == 200 and w.ask('GET', '/health').status == 200
        w.rests()

def test_one_bad_request_among_good_ones_is_no_failing_engine(tiny):
    with web(tiny) as w:
        for _ in range(5):
            r = w.complete(timeout=.001, max_tokens=400); assert r.status == 408     # his own fault
        assert w.ask('GET', '/health').status == 200
        w.rests()

@needs_posix
def test_time_in_which_the_process_was_stopped_is_nobody_s_fault(tmp_path):
    code = TINY.replace("'tiny', port=0)", "'tiny', port=0, limits=dict(stall_s=1., send_timeout_s=1.))")
    with served(code, tmp_path) as (p, w, said):
        w.wait(lambda: well(w), 'the model', 120)
        s = w.raw(stream=True, max_tokens=80)
        while b'data:' not in s.recv(65536): pass
        p.send_signal(signal.SIGSTOP); time.sleep(3); p.send_signal(signal.SIGCONT)
        rest = until_end(s)
        assert b'"finish_reason":"length"' in rest and well(w) and p.poll() is None
        p.send_signal(signal.SIGTERM); assert p.wait(30) == 0 and said() == ''

def test_a_default_that_is_too_large_may_be_clamped(tiny):
    with web(tiny, clamp_max_tokens=True, engine=dict(max_model_len=60)) as w:
        assert w.complete(max_tokens=32000).json['usage']['total_tokens'] == 60
        assert w.chat(max_tokens=32000).json['usage']['total_tokens'] == 60
        assert w.complete(max_tokens=5).json['usage']['completion_tokens'] == 5
        assert w.complete([5] * 60, max_tokens=32000).error['code'] == 'context_length_exceeded'
        both = w.complete([NEXT, [5] * 30], max_tokens=10**6, stream=True, stream_options=dict(include_usage=True))
        assert both.frames[-1]['usage']['total_tokens'] == 120
        w.rests()
    with web(tiny, engine=dict(max_model_len=60)) as w: assert w.complete(max_tokens=32000).status == 400

def test_a_reader_who_has_gone_is_seen_during_a_long_prefill(tiny):
    "A reset is seen at once; who shut down only his reading end and is reset by a ping, at the next ping"
    import struct
    for stream in (False, True):
        with web(tiny, ping_s=.05, engine=dict(max_num_batched_tokens=4)) as w:
            w.slow(.05)
            s = w.raw(prompt=[7] * 300, max_tokens=20, stream=stream)
            w.wait(lambda: w.llm.scheduler.running)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); s.close()
            w.wait(lambda: not w.llm.has_unfinished)
            assert w.llm.metrics['num_sampled_tokens'] == 0
            w.rests()
