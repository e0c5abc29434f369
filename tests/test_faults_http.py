"""What a server must survive, one test for each row of a list of faults.
After each the engine is at rest and the next answer is right."""
import asyncio, gc, json, random, re, socket, struct, sys, threading, time
import openai, pytest, torch
from cbatch import LLM, SamplingParams
from cbatch.async_engine import AsyncLLM, Overloaded, Unavailable
from cbatch.gate import Alarm
from cbatch.core import Code, Failure, Logprob
from cbatch.model import tiny_lm
from cbatch.server import background, make_server
from cbatch.wire import LIMITS, ProtocolError
from harness import quiet
from web import ENGINE, NEXT, Web, ref, web

@pytest.fixture(scope='module')
def shared(tiny):
    with web(tiny, send_timeout_s=1., limits=dict(max_waiting=32)) as w:
        w.server.config.app.linger_s = .3
        yield w

@pytest.fixture
def w(shared):
    "The shared server, examined after each test"
    yield shared
    shared.rests()

@pytest.fixture
def fresh(tiny):
    "Makes a server for one test"
    def make(**kw): return web(tiny, **kw)
    return make

def refused(r, status=400, param=..., code=...):
    assert r.status == status, (r.status, r.body)
    e = r.error
    assert param is ... or e['param'] == param, e
    assert code is ... or e['code'] == code, e
    return e

def added(w): return w.llm.num_added

@pytest.fixture
def nothing_added(w):
    "A refused request takes no number, no block, no pass of the tokenizer"
    before = added(w)
    yield w
    assert added(w) == before and w.llm.num_free_blocks == w.llm.num_blocks

def test_fault_01_no_json(nothing_added):
    w = nothing_added
    for body in (b'', b'{', b'[]', b'"x"', b'null', b'{"a": 1}}', b'\xff\xfe{}', b'{"model": "tiny",}'):
        for path in ('/v1/completions', '/v1/chat/completions', '/tokenize',
                     '/detokenize'): assert refused(w.ask('POST', path, body))['type'] == 'invalid_request_error'
    for kind in ('text/plain', 'application/x-www-form-urlencoded', ''):
        refused(w.ask('POST', '/v1/completions', b'{}', {'Content-Type': kind}))

def test_fault_02_no_unicode(nothing_added, monkeypatch):
    w = nothing_added
    monkeypatch.setattr(w.llm, 'encode', lambda *a: 1 / 0, raising=False)
    refused(w.ask('POST', '/v1/completions', b'{"model": "tiny", "prompt": "\xff"}'))
    refused(w.ask('POST', '/v1/completions', br'{"model": "tiny", "prompt": "a\ud800"}'), param='prompt')
    refused(w.ask('POST', '/v1/chat/completions',
                  br'{"model": "tiny", "messages": [{"role": "user", "content": '
                  br'[{"type": "text", "text": "\udc00x"}]}]}'),
            param='messages')
    refused(w.ask('POST', '/v1/completions', br'{"model": "tiny", "prompt": "x", "\ud800": 1}'))
    refused(w.ask('POST', '/v1/completions', br'{"model": "tiny", "prompt": "x", "user": "\ud800"}'), param='user')

def test_fault_03_huge_body(nothing_added):
    w = nothing_added
    refused(w.ask('POST', '/v1/completions', b'{"prompt": "' + b'x' * 10_000_000 + b'"}'), 413)
    s = socket.create_connection((w.host, w.port)); s.settimeout(20)
    s.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
              b'Transfer-Encoding: chunked\r\n\r\n')
    sent, piece = 0, b'10000\r\n' + b'x' * 65536 + b'\r\n'
    with pytest.raises(OSError):            # for ever, if the server would read for ever
        for sent in range(2000): s.sendall(piece); time.sleep(.001 if sent > 100 else 0)
    assert sent < 1999
    try: said = s.recv(65536)
    except ConnectionResetError: said = b'HTTP/1.1 413'    # it was there, and the kernel threw it away with the rest
    assert said.startswith(b'HTTP/1.1 413')
    s.close()

def test_fault_04_huge_headers(w):
    for headers in (b'X-A: ' + b'a' * 1_000_000 + b'\r\n', b'X-A: b\r\n' * 10_000, b'X-A: b\r\n' * 120):
        s = socket.create_connection((w.host, w.port)); s.settimeout(20)
        try: s.sendall(b'GET /health HTTP/1.1\r\nHost: localhost\r\n' + headers + b'\r\n')
        except ConnectionError: pass
        try: said = s.recv(65536)
        except ConnectionResetError: said = b'HTTP/1.1 431'
        assert re.match(rb'HTTP/1.1 (431|400)', said), said[:80]
        s.close()

def test_fault_05_too_long_for_the_context(fresh):
    with fresh(engine=dict(max_model_len=40)) as w:
        refused(w.complete([5] * 40), code='context_length_exceeded', param='prompt')
        refused(w.complete([5] * 41), code='context_length_exceeded', param='prompt')
        refused(w.complete([5] * 30, max_tokens=11), code='context_length_exceeded', param='prompt')
        refused(w.chat('x' * 60), code='context_length_exceeded', param='messages')
        refused(w.complete([5] * 40, max_tokens=None), code='context_length_exceeded')
        assert w.complete([5] * 30, max_tokens=10).json['usage']['completion_tokens'] == 10
        # 16 by default, clamped to what there is
        assert w.complete([5] * 30, max_tokens=None).json['usage']['completion_tokens'] == 10
        assert w.complete([5] * 4, max_tokens=None).json['usage']['completion_tokens'] == 16
        u = w.chat('Hi', max_tokens=None).json['usage']
        assert u['total_tokens'] == 40
        w.rests()

def test_fault_06_too_long_for_the_pool(tiny):
    with pytest.warns(UserWarning, match='pool holds 40'), web(tiny,
                                                               engine=dict(num_blocks=10, max_model_len=200)) as w:
        refused(w.complete([5] * 38), code='context_length_exceeded')
        refused(w.complete([5] * 100, max_tokens=1), code='context_length_exceeded')
        assert w.complete([5] * 30, max_tokens=None).json['usage']['completion_tokens'] == 10
        w.rests()

def test_fault_07_huge_n(nothing_added):
    w = nothing_added
    for n in (17, 10**6, 10**18, -1, 0): refused(w.complete(n=n), param='n')
    refused(w.complete([NEXT] * 129), param='prompt')
    refused(w.complete([NEXT] * 5, n=8), param='n')          # 40 answers, and 32 may wait
    refused(w.complete(best_of=2), param='best_of')
    assert w.llm.num_added < 10**6

def test_fault_08_max_tokens(nothing_added):
    w = nothing_added
    for x in (0, -1, 5.5, -2.0, '5', True, [], 10**30, 1e300): refused(w.complete(max_tokens=x))
    refused(w.complete(max_tokens=10**9), param='prompt', code='context_length_exceeded')
    refused(w.chat(max_tokens=0), param='max_tokens')
    refused(w.chat(max_completion_tokens=4), param='max_completion_tokens')
    refused(w.complete(min_tokens=10), param='min_tokens')
    refused(w.chat(max_tokens=None, min_tokens=10**6, n=17), param='n')

def test_fault_08_legal_max_tokens(w):
    assert w.chat(max_tokens=None, max_completion_tokens=3).json['usage']['completion_tokens'] == 3
    # JSON has one kind of number
    assert w.complete(max_tokens=2.0, n=2.0, seed=0.0).json['usage']['completion_tokens'] == 4
    assert w.complete(max_tokens=0, echo=True, prompt='abc').json['choices'][0] == dict(index=0, text='abc',
        logprobs=None, finish_reason='length')

def test_fault_09_odd_numbers(nothing_added):
    w = nothing_added
    for k in ('temperature', 'top_p', 'min_p', 'presence_penalty', 'frequency_penalty', 'repetition_penalty',
              'timeout'):
        for x in ('NaN', 'Infinity', '-Infinity', '1e999', '-1e999', '1e308', '-5', '"1"', 'true', '[]'):
            refused(w.ask('POST', '/v1/completions', f'{{"model": "tiny", "prompt": "x", "{k}": {x}}}'))
    refused(w.complete(top_p=0), param='top_p')
    for x in ('NaN', '-Infinity', '1e999'):
        refused(w.ask('POST', '/v1/completions', f'{{"model": "tiny", "prompt": "x", "unheard": {x}}}'))

def test_fault_10_logit_bias(nothing_added):
    w = nothing_added
    for b in ({'258': 1}, {'-1': 1}, {'abc': 1}, {'1.0': 1}, {'': 1}, {'5': 101}, {'5': '1'}, {'5': None},
              {'9' * 30: 1}, [5], 'x',
              {str(i): 1 for i in range(2000)}): refused(w.complete(logit_bias=b), param='logit_bias')
    for k in ('stop_token_ids', 'allowed_token_ids'):
        for ids in ([258], [-1], ['a'], [1.0], 5): refused(w.complete(**{k: ids}), param=k)
    refused(w.complete([3, 258]), param='prompt')
    refused(w.complete(allowed_token_ids=[]), param='allowed_token_ids')

def test_fault_11_stop(w):
    before = added(w)
    for x in (['a'] * 5, ['a'] * 50_000, '', [''], ['a', ''], 'x' * 10**5, 5, [5], {'a': 1}):
        refused(w.complete(stop=x), param='stop')
    assert added(w) == before
    text = lambda **kw: w.complete('Hello', max_tokens=40, **kw).json['choices'][0]
    free = text()
    assert free == text(stop=[]) == text(stop=None) and free['finish_reason'] == 'length'
    c = next(c for c in free['text'][3:] if c != '\ufffd' and c not in free['text'][:3])
    assert text(stop=c) == text(stop=[c]) and text(stop=c)['text'] == free['text'][:free['text'].index(c)]
    eos = lambda stop: w.complete(stop=stop, ignore_eos=False,
                                  logit_bias={'256': 100}).json['choices'][0]['finish_reason']
    assert [eos(x) for x in (None, [], ' ')] == ['stop'] * 3     # none of them silences the end-of-sequence id

def test_fault_12_logprobs(w):
    for x in (21, -1, 10**9, '5', True, 1.5): refused(w.complete(logprobs=x), param='logprobs')
    for x in (21, -1, 10**9): refused(w.chat(logprobs=True, top_logprobs=x), param='top_logprobs')
    for x in (21, -1, 10**9): refused(w.complete(prompt_logprobs=x), param='prompt_logprobs')
    refused(w.complete(prompt_logprobs=1, stream=True), param='prompt_logprobs')
    run, inf = w.llm.execute, float('-inf')
    def impossible(plan):
        out = run(plan)
        for ds in out.logprobs.values(): ds[-1][3] = Logprob(inf, 258)
        return out
    w.llm.execute = impossible
    try:
        tops = w.complete(echo=True, logprobs=3).json['choices'][0]['logprobs']
        assert (tops['token_logprobs'][0] is None and len(tops['tokens']) == 9 == len(tops['text_offset'])
                and '\x03' not in tops['top_logprobs'][-1])
        got = w.chat(logprobs=True, top_logprobs=20).json['choices'][0]['logprobs']['content']
        assert all(len(t['top_logprobs']) == 20 for t in got)
        out = w.complete(logprobs=20, prompt_logprobs=2).json['choices'][0]
        assert out['prompt_logprobs'][0] is None and len(out['prompt_logprobs']) == 3
    finally: w.llm.execute = run

def test_fault_13_empty_and_refused_by_the_template(w, monkeypatch):
    before = added(w)
    for p in ('', [], [[]], ['a', ''], [[1], []], None, 5, {}): refused(w.complete(p), param='prompt')
    for m in ([], None, [{}], [dict(role='user')], [dict(role='x', content='')], [dict(role='user', content=[])],
              [dict(role='tool', content='x')],
              [dict(role='user', content=[dict(type='image_url', image_url={})])], 'hi'):
        refused(w.ask('POST', '/v1/chat/completions', dict(model='tiny', messages=m)), param='messages')
    monkeypatch.setattr(w.llm.tokenizer, 'chat_template',
                        "{{ raise_exception('roles must alternate, says /usr/lib/secret/place.txt') }}")
    e = refused(w.chat(), param='messages')
    assert 'roles must alternate' in e['message'] and 'secret' not in e['message']
    assert added(w) == before

def test_fault_14_templates_of_clients(nothing_added):
    w = nothing_added
    refused(w.chat(chat_template='{{ 7 * 7 }}'), param='chat_template')
    for kw in (dict(tokenize=False), dict(chat_template='x'), [], 'x'):
        refused(w.chat(chat_template_kwargs=kw), param='chat_template_kwargs')
    for k, v in dict(tools=[{}], tool_choice='auto', response_format=dict(type='json_object'), functions=[{}],
                     modalities=['audio'],
                     audio={}).items(): refused(w.chat(**{k: v}), param=k)

def test_fault_14_values_that_change_nothing(w):
    assert w.chat(chat_template_kwargs={}, tools=[], tool_choice='none', response_format=dict(type='text'),
                  audio=None).status == 200

def test_fault_14_predictions_that_are_none(nothing_added):
    w = nothing_added
    content = lambda x: dict(type='content', content=x)
    for odd in ('text', 5, [], True, {}, dict(type='content'), dict(content='x'), dict(type='text', content='x'),
                dict(type='content', content='x', weight=1), *map(content, (5, [], {}, [5], ['x'], [dict(text='x')],
                [dict(type='image_url', image_url='x')], [dict(type='text', text=5)]))):
        e = refused(w.chat(prediction=odd), param='prediction')
        assert e['message'].startswith('prediction')
    for odd in (5, True, {}, [-1], [258], ['x'], [[5]], dict(type='text', content='x'), content([5])):
        refused(w.complete(prediction=odd), param='prediction')

def test_fault_14_predictions_longer_than_any_answer(w):
    for odd in ('', 'x' * 30_000, [5] * 30_000, dict(type='content', content='')):
        assert w.complete(prediction=odd).status == 200

def test_fault_15_unknown_model(nothing_added):
    w = nothing_added
    for name in ('gpt-4', '../../etc/passwd', 'TINY', 'tiny/'):
        refused(w.complete(model=name), 404, 'model', 'model_not_found')
        assert w.ask('GET', f'/v1/models/{name}').status == 404
    assert w.ask('GET', '/v1/models/tiny').json['id'] == 'tiny' and w.ask('GET',
        '/v1/models').json['data'][0]['id'] == 'tiny'

def test_fault_16_keys(tiny):
    with web(tiny, key='sesame', trace=True) as w:
        for path in ('/v1/models', '/metrics', '/trace', '/openapi.json', '/tokenize', '/nowhere', '//health',
                     '/health/', '/health/../v1/models', '/Health'):
            for auth in ({'Authorization': 'Bearer wrong'}, {'Authorization': 'sesame'}, {'Authorization': ''},
                         {'Authorization': 'Bearer wrong', 'Host': 'x/health?'}, {'Authorization': 'Bearer sesame2'}):
                r = w.ask('GET', path, headers=auth)
                assert r.status == 401 and r.headers['www-authenticate'] == 'Bearer', path
        for host in ('x/health?', '/health', 'x/health#', 'a@b/health'):
            s = socket.create_connection((w.host, w.port)); s.settimeout(20)
            s.sendall(f'GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n'.encode())
            assert s.recv(4096)[:12] in (b'HTTP/1.1 401', b'HTTP/1.1 400'); s.close()
        assert w.ask('GET', '/health', headers={'Authorization': 'Bearer wrong'}).status == 200
        assert w.ask('OPTIONS', '/v1/models', headers={'Authorization': '', 'Origin': 'http://evil'}).status == 401
        assert 'access-control-allow-origin' not in w.ask('GET', '/v1/models',
                                                          headers={'Origin': 'http://evil'}).headers
        for scheme in ('bearer', 'BEARER', 'Bearer '):
            assert w.ask('GET', '/v1/models', headers={'Authorization': f'{scheme} sesame'}).status == 200
        assert w.ask('GET', '/trace').status == 200 and w.ask('GET', '/trace?n=x').status == 400 and w.ask('GET',
            '/nowhere').status == 404
        assert w.ask('GET', '/v1/completions').status == 405
        w.rests()

def test_fault_17_streams_of_several(w):
    for ask, name in ((w.complete, 'text'), (w.chat, 'content')):
        kw = dict(n=3, temperature=1, seed=5, max_tokens=5)
        whole = {c['index']: c['text'] if name == 'text' else c['message']['content']
                 for c in ask(**kw).json['choices']}
        frames, got, ends = ask(**kw, stream=True).frames, {}, []
        for f in frames:
            c, = f['choices']
            got[c['index']] = got.get(c['index'], '') + ((c['text'] if name == 'text' else c['delta'].get('content'))
                                                         or '')
            if c['finish_reason']: ends.append(c['index'])
        assert got == whole and sorted(ends) == [0, 1, 2] and len(set(whole.values())) == 3
    both = w.complete([NEXT, [1, 2]], n=2, temperature=1, seed=1)
    assert [c['index'] for c in both.json['choices']] == [0, 1, 2, 3]

def test_fault_18_request_ids(w):
    for said, echoed in (('abc-1', 'abc-1'), ('abc-1', 'abc-1'), ('x' * 20_000, 'x' * 64), ('a b;<c>', 'abc')):
        r = w.complete(headers={'X-Request-Id': said})
        assert r.headers['x-request-id'] == echoed and r.json['id'] != echoed
    assert re.fullmatch('[0-9a-f]{32}', w.complete().headers['x-request-id'])
    s = [w.raw(max_tokens=20) for _ in range(2)]; [x.close() for x in s]       # two of one id at once are two requests
    assert w.complete(headers={'X-Request-Id': 'r1'}).status == 200

def test_fault_19_queue_full(fresh):
    with fresh(engine=dict(max_num_seqs=1), limits=dict(max_waiting=2)) as w:
        hold = threading.Event(); w.hooks.append(lambda plan: plan.scheduled[0].request.output_ids and hold.wait(10))
        busy = [w.raw(max_tokens=4)]
        w.wait(lambda: any(r.output_ids for r in w.llm.scheduler.running))
        busy += [w.raw(max_tokens=4) for _ in range(2)]
        w.wait(lambda: w.server.engine.worker.num_queued() == 2)
        for r in (w.complete(), w.complete(stream=True)):
            e = refused(r, 429)
            assert (e['type'] == 'rate_limit_error' and e['code'] == 'queue_full_requests'
                    and 1 <= int(r.headers['retry-after']) <= 120)
        with pytest.raises(openai.RateLimitError): w.client().completions.create(model='tiny', prompt='x')
        hold.set()
        for s in busy: assert b'200 OK' in s.recv(65536); s.close()
        w.rests()

def test_fault_19_not_ready(tiny):
    gate = threading.Event()
    def make(): gate.wait(20); return LLM(tiny, **ENGINE)
    def begin():
        s = make_server(make, 'tiny', port=0); t = threading.Thread(target=s.run, args=([s.sock],)); t.start()
        return s, t
    (server, t), (other, u) = begin(), begin()
    w = type('W', (Web,), dict(__init__=lambda self: None))()
    w.server, w.key, (w.host, w.port) = server, None, server.sock.getsockname()[:2]
    w.wait(lambda: server.started)
    for r in (w.ask('GET', '/health'), w.complete()): assert r.status == 503 and int(r.headers['retry-after']) <= 120
    assert w.complete().error['code'] == 'starting'
    # told to stop while the model loads: it does not wait for it
    w.wait(lambda: other.started); other.handle_exit(); u.join(5); assert not u.is_alive()
    gate.set(); server.up.wait(20)
    assert w.ask('GET', '/health').status == 200 and w.complete().status == 200
    server.handle_exit(); t.join(20); assert server.code == 0
    other.engine.worker.join(10)

@pytest.mark.parametrize('stream', [True, False])
def test_fault_20_gone_before_the_first_token(w, stream):
    w.slow(.02)
    for prompt in (NEXT, [7] * 200):                          # decoding at once, and several chunks of prompt
        s = w.raw(prompt=prompt, stream=stream, max_tokens=300)
        w.wait(lambda: w.llm.scheduler.running)
        s.close(); at = w.llm.scheduler.num_steps
        w.wait(lambda: not w.llm.has_unfinished)
        assert w.llm.scheduler.num_steps - at < 150         # far from its end

@pytest.mark.parametrize('how', ['close', 'rst', 'deaf'])
def test_fault_21_gone_in_the_middle(w, how):
    w.slow(.01)
    s = w.raw(stream=True, max_tokens=400)
    while b'data:' not in s.recv(65536): pass
    if how == 'rst': s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
    if how == 'deaf': s.shutdown(socket.SHUT_RD); s.close()
    else: s.close()
    at = w.llm.scheduler.num_steps
    w.wait(lambda: not w.llm.has_unfinished)
    assert w.llm.scheduler.num_steps - at < 200
    s.close()

def all_of(s): return b''.join(iter(lambda: s.recv(65536), b''))

@pytest.mark.parametrize('stream', [True, False])
def test_fault_21_half_closed_and_listening(w, stream):
    "He has said all, and gets all of his answer, also that to a request sent behind the first"
    w.slow(.01)
    for times in 1, 2:
        s = w.raw(stream=stream, max_tokens=40)
        if times == 2:
            s.close(); s = socket.create_connection((w.host, w.port)); s.settimeout(20)
            body = json.dumps(dict(model='tiny', prompt=NEXT, max_tokens=40, temperature=0, ignore_eos=True,
                                   stream=stream)).encode()
            s.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                      b'Content-Length: %d\r\n\r\n%b' % (len(body), body) * 2)
        s.shutdown(socket.SHUT_WR)
        said = all_of(s); s.close()
        assert said.count(b'200 OK') == said.count(b'"finish_reason":"length"') == times
        assert said.count(b'[DONE]') == times * stream
    w.rests()

def test_fault_21_half_a_body_and_no_more(w):
    s = socket.create_connection((w.host, w.port)); s.settimeout(20)
    s.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
              b'Content-Length: 900\r\n\r\n{')
    s.shutdown(socket.SHUT_WR)
    assert all_of(s) == b''; s.close()
    w.wait(lambda: not w.server.server_state.connections)

def test_fault_22_aborts(tiny):
    "Of the engine behind the server: whenever, twice, of nobody; one last report each"
    async def go():
        llm = LLM(tiny, **ENGINE | dict(num_blocks=12, max_num_seqs=2, watermark=0.))
        async with AsyncLLM(llm) as e:
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            async def life(i, abort_after):
                s, n, ends = await e.add([i + 1] * 3, params), 0, 0
                if not abort_after: assert await s.abort() and not await s.abort()
                async for o in s:
                    n += 1; ends += o.finished
                    if n == abort_after and not o.finished: await e.abort(s.request_id); await e.abort(s.request_id)
                return ends, o.outputs[0].finish_reason
            got = await asyncio.gather(*(life(i, [0, 1, 5, 29, 30, 99][i % 6]) for i in range(12)))
            assert [g[0] for g in got] == [1] * 12 and {g[1] for g in got} == {'abort', 'length'}
            assert not await e.abort('nobody')
            assert (await e.call(lambda llm: llm.metrics['num_preemptions'])) > 0
            await e.call(quiet)
            assert (await e.generate(NEXT, params)).outputs[0].token_ids == ref(tiny, NEXT, 30).token_ids
        quiet(llm)
    asyncio.run(go())

def test_fault_23_slow_reader(fresh):
    with fresh(send_timeout_s=.3, engine=dict(num_blocks=1100, max_num_seqs=32, check=False, trace=False)) as w:
        right = ref(w.llm.model, NEXT, 6).text      # the oracle and the engine use one model: not at once
        s = w.raw(rcvbuf=4096, stream=True, n=16, max_tokens=1000, logprobs=20)      # megabytes that nobody reads
        w.wait(lambda: w.llm.scheduler.running)
        assert w.complete().json['choices'][0]['text'] == right
        w.wait(lambda: not w.llm.has_unfinished, timeout=40)
        assert w.llm.counters.as_dict()['num_sampled_tokens'] < 16_000             # it was cut off
        w.wait(lambda: not w.server.server_state.connections)                      # and its connection dropped
        s.close()
        w.rests()

@pytest.mark.parametrize('stream', [True, False])
def test_fault_24_nan_in_one_row(w, stream):
    run = w.llm.execute
    def execute(plan):
        out = run(plan)
        for i in [s.request.request_id for s in plan.scheduled if 13 in s.request.prompt_ids
                  and len(s.request.output_ids) == 2]:
            if i in out.sampled:
                del out.sampled[i]; out.errors[i] = Failure(Code.NAN_LOGITS, 'the model gave NaN or infinite logits')
        return out
    w.llm.execute = execute
    mate = []
    t = threading.Thread(target=lambda: mate.append(w.complete(max_tokens=20))); w.slow(.005); t.start()
    r = w.complete([13], stream=stream)
    t.join(); w.llm.execute = run
    assert mate[0].json['choices'][0]['text'] == ref(w.llm.model, NEXT, 20).text
    if stream:
        assert (r.status == 200 and r.frames[-1]['error']['code'] == 'nan_logits'
                and not any(f['choices'][0]['finish_reason'] for f in r.frames[:-1]))
    else:
        assert refused(r, 500, code='nan_logits')['type'] == 'server_error' and r.headers['x-should-retry'] == 'false'

@pytest.mark.parametrize('where', ['text', 'sample'])
def test_fault_25_an_exception_for_one(w, monkeypatch, where):
    if where == 'text':
        from cbatch.text import Detokenizer
        push = Detokenizer.push
        monkeypatch.setattr(Detokenizer, 'push', lambda self, ids, last=False: 1 / 0 if self.p.seed == 666
                            and len(ids) == 3 else push(self, ids, last))
    else:
        import cbatch.runner as runner
        sample = runner.sample
        def fails(logits, states, *a):
            return 1 / 0 if any(s.params.seed == 666 for s in states) else sample(logits, states, *a)
        monkeypatch.setattr(runner, 'sample', fails)
    mate, t = [], threading.Thread(target=lambda: mate.append(w.complete(max_tokens=20)))
    w.slow(.005); t.start()
    e = refused(w.complete(seed=666), 500, code='engine_error')
    t.join()
    assert 'Zero' not in e['message'] and mate[0].json['choices'][0]['text'] == ref(w.llm.model, NEXT, 20).text

@pytest.mark.parametrize('exc', [RuntimeError('boom'), torch.OutOfMemoryError('no memory')], ids=['exception', 'oom'])
def test_fault_26_an_exception_in_a_step(w, exc):
    times = [1]
    def burst(plan):
        if len(plan.scheduled) == 2 and min(len(s.request.output_ids) for s in plan.scheduled) == 3 and times:
            times.pop(); raise exc
    w.until_sent(2); w.hooks.append(burst)
    got = {}
    ts = [threading.Thread(target=lambda s=s: got.update({s: w.complete(stream=s, max_tokens=20)}))
          for s in (True, False)]
    for t in ts: t.start()
    for t in ts: t.join(20)
    assert not times and len(got) == 2
    whole, stream = got[False], got[True]
    if isinstance(exc, torch.OutOfMemoryError):               # tried again with half of it, and nobody noticed
        assert (whole.json['choices'][0]['text'] == ref(w.llm.model, NEXT, 20).text
                and stream.frames[-1]['choices'][0]['finish_reason'] == 'length')
    else:
        refused(whole, 500, code='engine_error')
        assert stream.frames[-1]['error']['code'] == 'engine_error'
        assert ref(w.llm.model, NEXT, 20).text.startswith(''.join(f['choices'][0]['text'] for f in stream.frames[:-1]))

class Fatal(SystemExit): "What no request is to blame for"

@pytest.mark.parametrize('how', ['dies', 'stalls'])
def test_fault_27_the_engine_is_gone(tiny, how):
    with web(tiny, limits=dict(stall_s=1.)) as w:
        hold = threading.Event()
        def end(plan):
            if how == 'stalls': hold.wait(10)
            else: raise Fatal
        w.slow(.01)
        s, got = w.raw(stream=True), []
        while b'data:' not in s.recv(65536): pass
        t = threading.Thread(target=lambda: got.append(w.complete(max_tokens=100))); t.start()
        w.wait(lambda: len(w.llm.requests) == 2)
        w.hooks.append(end)
        w.wait(lambda: w.server.code, 'the watchdog')
        assert w.ask('GET', '/health').status == 503 and w.complete().status == 503
        t.join(10); refused(got[0], 500, code='engine_error')
        rest = b''
        while piece := s.recv(65536): rest += piece
        assert b'"code":"engine_error"' in rest and b'data: [DONE]' in rest
        w.wait(lambda: not w.server.started or w.server.should_exit)
        hold.set(); s.close()
        w.server.engine.worker.join(10)
    assert w.server.code == 1

def test_fault_28_drain(fresh):
    with fresh(drain_timeout_s=3., engine=dict(max_num_seqs=2)) as w:
        w.until_sent(4, .02)
        got, jobs = {}, dict(short=dict(max_tokens=4), waiting=dict(max_tokens=4), long=dict(max_tokens=450),
                             stream=dict(max_tokens=450, stream=True))
        ts = [threading.Thread(target=lambda k=k, kw=kw: got.update({k: w.complete(**kw)})) for k, kw in jobs.items()]
        for t in ts: t.start(); time.sleep(.01)
        w.wait(lambda: w.server.engine.worker.desk.sent == 4)
        w.server.handle_exit()
        w.wait(lambda: w.server.engine.state == 'draining')
        time.sleep(.4)                                      # the socket still answers
        r = w.complete()
        assert (r.status == 503 and r.error['code'] == 'draining' and int(r.headers['retry-after']) <= 120
                and w.ask('GET', '/health').status == 503)
        for t in ts: t.join(10)
        assert got['short'].json['choices'][0]['text'] == ref(w.llm.model, NEXT, 4).text
        assert got['waiting'].status in (200, 503)
        refused(got['long'], 503, code='aborted')
        assert got['stream'].status == 503 or got['stream'].frames[-1]['error']['code'] == 'aborted'
        quiet(w.llm)
    assert w.server.code == 0

def test_fault_29_deadlines(fresh):
    with fresh(engine=dict(max_num_seqs=1)) as w:
        w.slow(.02)
        s = w.raw(max_tokens=100)
        w.wait(lambda: w.llm.scheduler.running)
        for stream in (True, False):                            # in the queue: a status of its own
            r = w.complete(stream=stream, timeout=.1)
            refused(r, 408, code='timeout'); assert r.headers['x-should-retry'] == 'false'
        s.close(); w.wait(lambda: not w.llm.has_unfinished)
        r = w.complete(stream=True, timeout=1., max_tokens=300)  # running: in the stream
        assert r.status == 200 and r.frames[-1]['error']['code'] == 'timeout'
        refused(w.complete(timeout=.3, max_tokens=300), 408, code='timeout')
        w.rests()

def test_fault_30_errors_in_a_stream(w):
    def burst(plan):
        if plan.scheduled and len(plan.scheduled[0].request.output_ids) == 3:
            raise RuntimeError('boom at /usr/lib/x.py')
    w.hooks.append(burst)
    r = w.chat(stream=True)
    assert r.status == 200 and r.headers['content-type'].startswith('text/event-stream')
    assert r.frames[-1]['error'] == dict(message='the engine failed on this request', type='server_error', param=None,
                                         code='engine_error')
    with pytest.raises(openai.APIError, match='the engine failed'):
        list(w.client().chat.completions.create(model='tiny',
            messages=[dict(role='user', content='x')], stream=True, max_tokens=9, temperature=0))

def test_fault_31_the_clock_jumps(w, monkeypatch):
    "Of the wall; timers go by the monotonic one"
    now = time.time
    for jump in (-1e6, 1e6):
        monkeypatch.setattr(time, 'time', lambda: now() + jump)
        assert w.complete(timeout=20).status == 200
        assert all(r.end >= r.start for r in w.server.engine.records(20))
    assert w.llm.clock is time.monotonic

def test_fault_32_pressure(fresh):
    "Everybody wants all there is, and the pool has room for 1.2 of them"
    with fresh(engine=dict(num_blocks=19, max_num_seqs=8, watermark=0.), limits=dict(max_waiting=16)) as w:
        prompts = [[i + 1] * (4 + i) for i in range(8)]
        got = {}
        ts = [threading.Thread(target=lambda i=i: got.update({i: w.complete(prompts[i],
            max_tokens=60 - len(prompts[i]))})) for i in range(8)]
        for t in ts: t.start()
        for t in ts: t.join(60)
        for i, p in enumerate(prompts):
            assert got[i].json['choices'][0]['text'] == ref(w.llm.model, p, 60 - len(p)).text
        assert w.llm.metrics['num_preemptions'] > 0
        w.rests()

def test_fault_33_ids_beyond_the_model_and_no_end(caplog):
    "Of the model: text whose ids the model does not have is refused; without an end-of-sequence id max_tokens ends it"
    small = tiny_lm('llama', vocab_size=128, eos_token_id=None, pad_token_id=None)
    with web(small) as w:
        assert 'tokenizer knows 258 ids and the model 128' in caplog.text
        e = refused(w.complete('né'), param='prompt')
        assert 'vocabulary of 128' in e['message']
        assert w.complete([5], ignore_eos=False, max_tokens=50).json['choices'][0]['finish_reason'] == 'length'
        w.rests()

def test_fault_34_notebooks(tiny):
    "Of the engine: a server in a cell that is run again, a loop that already runs, an engine that nobody holds"
    llm, before = LLM(tiny, **ENGINE), set(threading.enumerate())
    for _ in range(2):
        with background(llm, 'tiny') as server: assert Web(server, llm).complete().status == 200
        assert llm.generate(NEXT, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
                            use_tqdm=False)[0].outputs[0].token_ids == ref(tiny, NEXT,
                6).token_ids
    async def cell():
        with background(llm, 'tiny') as server: return await asyncio.to_thread(Web(server, llm).complete)
    assert asyncio.run(cell()).status == 200
    with pytest.raises(KeyboardInterrupt), background(llm, 'tiny'): raise KeyboardInterrupt
    quiet(llm)
    assert not [t for t in set(threading.enumerate()) - before if t.name.startswith('cbatch')]

def test_fault_35_nobody_reads_the_log(w, monkeypatch):
    "A closed stdout and a full disk; the process that has them from its start is in test_server"
    class Full:
        def write(self, *a): raise OSError(28, 'No space left on device')
        flush = write
    for out in (Full(), None):
        monkeypatch.setattr(sys, 'stdout', out); monkeypatch.setattr(sys, 'stderr', out)
        def burst(plan): raise RuntimeError('logged')
        w.hooks.append(burst); assert w.complete().status == 500; w.hooks.clear()
        assert w.complete().status == 200

# --- bytes: where a request ends, how much of it is held, how much is said

CHUNKS, TWO = b'Transfer-Encoding: chunked', b'Content-Length: 2'
FRAMINGS = [TWO + b'\r\n' + CHUNKS, CHUNKS + b'\r\n' + TWO, TWO + b'\r\n' + TWO, TWO + b'\r\nContent-Length: 30',
            CHUNKS + b'\r\n' + CHUNKS, b'Content-Length: +2', b'Content-Length: -2', b'Content-Length: 2 2',
            b'Content-Length: 2, 2', b'Content-Length: 0x2', b'Content-Length:', b'Content-Length : 2',
            b'Transfer-Encoding: gzip, chunked', b'Transfer-Encoding: identity', b'Transfer-Encoding: xchunked',
            b'Transfer-Encoding : chunked', b'X: a\r\n ' + TWO, b'Transfer-Encoding:\r\n chunked', b'X: a\n' + TWO,
            b'X: a\r' + CHUNKS]

def knocked(w, data):
    "All that comes back until the connection ends"
    s, said = socket.create_connection((w.host, w.port), timeout=5), b''
    s.sendall(data)
    try:
        while piece := s.recv(65536): said += piece
    except ConnectionError: pass
    finally: s.close()
    return said

def second(path=b'/v1/models'): return b'GET ' + path + b' HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n'

@pytest.mark.parametrize('version', [b'1.1', b'1.0'])
@pytest.mark.parametrize('framing', FRAMINGS, ids=repr)
def test_nobody_can_tell_where_it_ends(shared, framing, version):
    "One answer, an error, and the connection ends: what follows is no request"
    for path, body in ((b'/v1/completions', b'{}'), (b'/health', b'{}'), (b'/nowhere', b'0\r\n\r\n')):
        head = b'POST ' + path + b' HTTP/' + version + b'\r\nHost: localhost\r\nContent-Type: application/json\r\n'
        said = knocked(shared, head + framing + b'\r\n\r\n' + body + second())
        assert said.count(b'HTTP/1.1 ') == 1 and said[9:10] in b'45' and b'"data":[' not in said, said

@pytest.mark.parametrize('path,kind', [(b'/nowhere', b'application/json'), (b'/v1/completions', b'text/plain'),
                                       (b'/health', b'application/json'), (b'/v1/completions', b'application/json')])
def test_a_head_with_a_body_that_is_none(shared, path, kind, caplog):
    "In one packet: one answer, and no second one by the handler, which would be an error in the log"
    head = b'POST ' if path != b'/health' else b'GET '
    head += path + b' HTTP/1.1\r\nHost: localhost\r\nContent-Type: ' + kind + b'\r\n' + CHUNKS + b'\r\n\r\n'
    for body in (b'zz\r\n', b'2\r\n{}\r\n-1\r\n', b'0\r\nX y\r\n\r\n'):
        said = knocked(shared, head + body)
        assert said.count(b'HTTP/1.1 ') == 1 and said.startswith(b'HTTP/1.1 400') and b'no HTTP request' in said
    shared.rests()
    assert not caplog.records, caplog.text

def test_an_encoding_in_http_1_0(shared):
    said = knocked(shared, b'POST /nowhere HTTP/1.0\r\nHost: localhost\r\n' + CHUNKS + b'\r\n\r\n0\r\n\r\n' + second())
    assert said.startswith(b'HTTP/1.1 400') and said.count(b'HTTP/1.1 ') == 1

def test_what_is_clear_may_follow_at_once(shared):
    "Pipelined requests are answered, also behind a body; but not behind one that nobody has read"
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 1}'
    head = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
    plain = head + b'Content-Length: %d\r\n\r\n' % len(body) + body
    chunked = head + CHUNKS + b'\r\n\r\n%x\r\n' % len(body) + body + b'\r\n0\r\n\r\n'
    for first in (plain, chunked, second().replace(b'close', b'keep-alive')):
        assert knocked(shared, first + second()).count(b'HTTP/1.1 200') == 2
    unread = b'GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n'
    s = socket.create_connection((shared.host, shared.port), timeout=5); s.sendall(unread)
    said = s.recv(65536)
    assert b'connection: close' in said.lower()
    s.close()

def test_random_heads(shared):
    "However the end of a body is said: the request behind it is answered only if it was said once"
    rng = random.Random(3)
    parts = [TWO, CHUNKS, b'content-length: 2', b'transfer-encoding: Chunked', b'X: y', b'Cookie: a=b']
    for _ in range(60):
        lines, ends = rng.choices(parts, k=rng.randrange(1, 4)), [b'\r\n'] * 9 + [b'\n', b'\r\n ']
        framing = b''.join(l + rng.choice(ends) for l in lines[:-1]) + lines[-1] + b'\r\n\r\n'
        said_by = [l for l in lines if l.lower().startswith((b'content-l', b'transfer'))]
        body = b'0\r\n\r\n' if said_by and said_by[0].lower().startswith(b'transfer') else b'{}' if said_by else b''
        said = knocked(shared, b'POST /nowhere HTTP/1.1\r\nHost: localhost\r\n' + framing + body + second())
        if len(said_by) > 1 or b'\n' in framing.replace(b'\r\n', b'') or b'\r\n ' in framing:
            assert said.startswith(b'HTTP/1.1 400') and said.count(b'HTTP/1.1 ') == 1, (framing, said)
        assert said.count(b'HTTP/1.1 ') <= 2

@pytest.mark.parametrize('kind,status', [('gzip', 415), ('br', 415), ('deflate, gzip', 415), ('x\xff' * 99, 415),
                                         ('identity', 200), ('', 200)])
def test_packed_bodies(shared, kind, status):
    r = shared.complete(headers={'Content-Encoding': kind})
    assert r.status == status
    if status != 200: assert len(refused(r, 415)['message']) < 100

def test_a_body_has_the_size_that_the_context_can_use(fresh):
    with fresh(engine=dict(max_model_len=40)) as w:
        assert w.server.front.body_bytes == 2**18 + 64 * 40
        refused(w.complete('x' * 300_000), 413, code='body_too_large')
        refused(w.complete('x' * 200_000), 400, code='context_length_exceeded')
    with fresh(max_body_bytes=500) as w:
        refused(w.complete('x' * 500), 413); assert w.complete('x').status == 200

def test_bodies_share_a_budget(w, monkeypatch):
    "Those that are large, and only while they are here"
    front, bodies = w.server.front, w.server.front.bodies
    monkeypatch.setattr(bodies, 'most', 300_000)
    head = ('POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
            f'Content-Length: {front.body_bytes}\r\n\r\n').encode()
    slow = []
    for _ in range(3):
        slow.append(socket.create_connection((w.host, w.port), timeout=10))
        slow[-1].sendall(head + b'{"x": "' + b'a' * 150_000)
    w.wait(lambda: 150_000 < bodies.held <= 300_000)
    got = refused(w.complete('a' * 280_000), 503, code='busy')
    assert got['type'] == 'service_unavailable'
    assert w.complete('a' * 300).status == 200
    assert w.ask('POST', '/tokenize', dict(model='tiny', prompt='x')).status == 200
    for s in slow: s.close()
    w.wait(lambda: not bodies.held)
    assert w.complete('a' * 280_000).error['code'] == 'context_length_exceeded' and not bodies.held

def test_refusals_are_forgotten(fresh):
    "Nothing refers to an error, its frames and their body once it is told; no garbage collector is needed"
    kinds = ProtocolError, Overloaded, Unavailable
    old = [o for o in gc.get_objects() if type(o) in kinds]          # of other tests
    alive = lambda: [type(o).__name__ for o in gc.get_objects() if type(o) in kinds and not any(o is x for x in old)]
    def slow(head, body):
        s = socket.create_connection((w.host, w.port), timeout=10)
        usual = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
        s.sendall(usual + head + b'\r\n\r\n' + body)
        s.recv(500); s.close()
    with fresh(body_timeout_s=.2, engine=dict(max_num_seqs=1), limits=dict(max_waiting=1)) as w:
        hard = w.server.front.body_bytes
        def fails(stream):
            def burst(plan): raise RuntimeError('boom')
            w.hooks.append(burst); w.complete(stream=stream); w.hooks.clear()
        ways = dict(
            slow=lambda: slow(b'Content-Length: 200000', b'a' * 190_000),
            long=lambda: slow(CHUNKS, b'%x\r\n' % 2**20 + b'a' * hard),
            announced=lambda: slow(b'Content-Length: 99999999', b'a'), model=lambda: w.complete(model='x' * 200),
            path=lambda: w.ask('GET', '/nope'), method=lambda: w.ask('PUT', '/health'),
            json=lambda: w.ask('POST', '/v1/completions', b'{"prompt": ' + b'[' * 50_000),
            wrong=lambda: w.complete(n='a' * 50_000), far=lambda: w.complete('a' * 100_000), n=lambda: w.complete(n=9),
            tokens=lambda: w.complete([5] * 3000), tokenize=lambda: w.ask('POST', '/tokenize', dict(model='tiny')),
            packed=lambda: w.complete(headers={'Content-Encoding': 'br'}),
            late=lambda: w.complete(timeout=.001, max_tokens=400),
            failed=lambda: fails(False), in_a_stream=lambda: fails(True))
        for name, f in ways.items():
            gc.collect(); gc.disable()
            try:
                for _ in range(3): f()
                w.wait(lambda: not alive(), f'{name} to be forgotten', 5)
            finally: gc.enable()
        w.rests()

def test_one_parser_at_a_time(w, monkeypatch):
    "Of large bodies; small ones don't wait for them"
    import cbatch.front as front
    lock, now, most, parse = threading.Lock(), [0], [0], front.parse_json
    def counted(body):
        if len(body) < 2**15: return parse(body)
        with lock: now[0] += 1; most[0] = max(most[0], now[0])
        time.sleep(.05)
        assert w.complete().status == 200
        try: return parse(body)
        finally:
            with lock: now[0] -= 1
    monkeypatch.setattr(front, 'parse_json', counted)
    ts = [threading.Thread(target=w.complete, args=('a' * 100_000,)) for _ in range(4)]
    for t in ts: t.start()
    for t in ts: t.join(20)
    assert most == [1] and now == [0]

def test_answers_that_would_be_too_large(w, monkeypatch):
    "Refused before anything is computed, with the names of what to lower; what is less is served"
    monkeypatch.setitem(LIMITS, 'answer_bytes', 10**6)
    before, want = added(w), dict(echo=True, logprobs=20, prompt_logprobs=20, max_tokens=1)
    for stream in (False, True):
        kw = want | (dict(stream=True, prompt_logprobs=None, n=16, max_tokens=3) if stream else dict(n=8))
        e = refused(w.complete([[5] * 100] * 2, **kw), 400, param='n')
        assert 'logprobs' in e['message'] and 'echo' in e['message']
    refused(w.chat('a' * 300, logprobs=True, top_logprobs=20, n=16, max_tokens=100), 400, param='n')
    assert added(w) == before
    assert w.complete([5] * 100, **want).status == 200

@pytest.mark.parametrize('stream', [False, True])
def test_large_answers_leave_in_pieces(w, monkeypatch, stream):
    "Whole and streamed, by both APIs, they say what they say in one piece"
    kw = dict(n=2, seed=3, temperature=1, max_tokens=30, stream=stream)
    of_prompt = {} if stream else dict(prompt_logprobs=9)
    asks = [lambda: w.complete([[5] * 60, NEXT], echo=True, logprobs=20, **kw),
            lambda: w.complete('né\u2028' * 20, echo=True, logprobs=3, **kw | of_prompt),
            lambda: w.chat(logprobs=True, top_logprobs=20, **kw)]
    def said(r):
        assert r.status == 200
        drop = lambda d: {k: v for k, v in d.items() if k not in ('id', 'created')}
        return joined(r.frames) if stream else drop(r.json)
    def joined(frames):
        got = {}
        for f in frames:
            for c in f['choices']:
                lp, mine = c['logprobs'] or {}, got.setdefault(c['index'], {})
                for k in lp: mine.setdefault(k, []).extend(lp[k])
                mine['text'] = mine.get('text', '') + (c.get('text') or c.get('delta', {}).get('content') or '')
        return got
    import cbatch.front as front
    at_once = [said(f()) for f in asks]
    monkeypatch.setattr(front, '_LIGHT', 0)
    for want, f in zip(at_once, asks):
        r = f()
        assert said(r) == want and (stream or 'content-length' not in r.headers)

def test_lines_that_json_allows(w):
    "Clients that split a stream by any end of a line find whole frames"
    odd = 'a\x85b\u2028c\u2029d\x0be\x1cf'
    r = w.complete(odd, echo=True, stream=True, max_tokens=1)
    lines = [l for l in r.body.decode().splitlines() if l]
    assert all(l.startswith('data: ') for l in lines)
    assert ''.join(json.loads(l[6:])['choices'][0]['text'] for l in lines[:-1]).startswith(odd)
    whole = w.complete(odd, echo=True, max_tokens=1)
    assert whole.json['choices'][0]['text'].startswith(odd) and len(whole.body.decode().splitlines()) == 1
    assert len(w.complete(model=odd).body.decode().splitlines()) == 1

def test_a_ping_is_not_a_token(fresh):
    "Nothing but comments before the first token, and the role with it"
    with fresh(ping_s=.05) as w:
        hold = threading.Event(); w.hooks.append(lambda plan: hold.wait(10))
        hi = [dict(role='user', content='x')]
        s = w.raw('/v1/chat/completions', stream=True, messages=hi, prompt=None, max_tokens=2)
        got = b''
        while got.count(b': still here') < 3: got += s.recv(65536)
        assert b'data:' not in got
        hold.set()
        while piece := s.recv(65536): got += piece
        first = got[got.index(b'data:'):].split(b'\n\n')[0]
        assert json.loads(first[6:])['choices'][0]['delta'] == dict(role='assistant', content='')
        s.close(); w.rests()

@pytest.mark.parametrize('method,path,says', [
    ('POST', '/completions', 'POST /v1/completions?'), ('POST', '/chat/completions', 'POST /v1/chat/completions?'),
    ('POST', '/v1/v1/chat/completions', 'POST /v1/chat/completions?'), ('GET', '/models', 'GET /v1/models?'),
    ('POST', '/v1/completion', 'POST /v1/completions?'), ('GET', '/healthz', 'GET /health?'),
    ('GET', '/', '/openapi.json'),
    ('POST', '//v1//completions', 'POST /v1/completions?'), ('POST', '/v1/embeddings', 'begins at /v1'),
    ('A' * 30_000, '/v1/completions', 'A' * 20 + '… /v1/completions'), ('GET', '/' + 'a%0A/' * 900, '/a?/a?/')])
def test_lost(shared, method, path, says):
    r = shared.ask(method, path)
    e = r.error
    assert r.status in (404, 405) and says in e['message'] and e['message'].isprintable() and len(e['message']) < 300

def refused_as(said):
    "Status and message of the one refusal in what came back"
    head, _, body = said.partition(b'\r\n\r\n')
    assert said.count(b'HTTP/1.1 ') == 1 and b'connection: close' in head.lower()
    return int(head.split()[1]), json.loads(body)['error']['message']

@pytest.mark.parametrize('head,status,says', [
    (b'GET /health HTTP/1.1\r\n\r\n', 400, 'Host'),
    (b'GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n', 400, 'Host'),
    (b'GET /health HTTP/1.1\r\nHost: localhost\r\nBad Header\r\n\r\n', 400, 'Bad Header'),
    (b'GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n', 400, 'Content-Length'),
    (b'GET  /health\r\n\r\n', 400, 'request line'), (b'\x16\x03\x01\x02\x00\r\n\r\n', 400, 'request line'),
    (b'GET /health HTTP/2.0\r\nHost: localhost\r\n\r\n', 505, 'HTTP/1.1'),
    (b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n', 505, 'HTTP/1.1')])
def test_what_is_no_request_is_told_why(shared, head, status, says):
    got, said = refused_as(knocked(shared, head))
    assert got == status and says in said and "b'" not in said and 'bytearray' not in said

CLOSE = b'\r\nConnection: close\r\n\r\n'

@pytest.mark.parametrize('host,status', [
    (b'localhost', 200), (b'LocalHost:80', 200), (b'127.0.0.1:1', 200), (b'[::1]', 200),
    (b'[::1]:80', 200), (b'10.0.0.7', 200), (b'a.localhost', 200), (b'mine.example:9', 200), (b'x', 403),
    (b'evil.example', 403), (b'localhost.evil.example', 403), (b'127.0.0.1.evil.example', 403),
    (b'localhost@evil.example', 403),
    (b'evil.example#localhost', 403), (b'127.1.evil', 403)])
def test_by_which_name_one_comes(tiny, host, status):
    "On a loopback address without a key: or a page could speak to it by a name of its own (DNS rebinding)"
    with web(tiny, allowed_hosts=['Mine.example']) as w:
        for path in b'/v1/models', b'/health', b'/nowhere':
            want = b'%d' % (404 if status == 200 and path == b'/nowhere' else status)
            for line in b'GET ' + path + b' HTTP/1.1\r\nHost: ' + host, (
                    b'GET http://' + host + path + b' HTTP/1.1\r\nHost: localhost'):
                assert knocked(w, line + CLOSE).split()[1] == want
        assert knocked(w, b'GET /health HTTP/1.0\r\n\r\n').split()[1] == b'200'

def test_with_a_key_any_name_will_do(tiny):
    with web(tiny, key='sesame') as w: assert w.ask('GET', '/v1/models', headers={'Host': 'evil.example'}).status == 200

def test_a_whole_url_is_a_path_to_the_gate_too(tiny):
    "The key is asked for by the path in the URL, not by what stands around it"
    with web(tiny, key='sesame') as w:
        for url, status in ((b'http://h/v1/models', b'401'), (b'http://h/health?x=/v1', b'200'),
                            (b'HTTPS://h/health', b'200'), (b'http://h/health/../v1/models', b'401'),
                            (b'http:///health@h/v1/models', b'401'),
                            (b'http://health', b'401'), (b'http://h/v1%2fmodels', b'401'), (b'ftp://h/health', b'401')):
            assert knocked(w, b'GET ' + url + b' HTTP/1.1\r\nHost: x' + CLOSE).split()[1] == status, url
        key = b'\r\nAuthorization: Bearer sesame'
        assert b'"tiny"' in knocked(w, b'GET http://h:8/v1/models HTTP/1.1\r\nHost: x' + key + CLOSE)

def test_another_name_meets_the_right_one(w):
    for r in (w.ask('GET', '/v1/models/tony'), w.complete(model='tony')):
        assert r.status == 404 and "'tony'" in r.error['message'] and "'tiny'" in r.error['message']

def test_special_tokens_come_back(w):
    "As vLLM does it: what /tokenize gives, /detokenize takes, and nothing is left out"
    ids = [*w.llm.tokenizer.all_special_ids, *w.llm.encode('so')]
    assert ids[0] in w.llm.tokenizer.all_special_ids
    said, tok = w.ask('POST', '/detokenize', dict(model='tiny', tokens=ids)).json['prompt'], w.llm.tokenizer
    assert said == tok.decode(ids, skip_special_tokens=False) and tok.all_special_tokens[0] in said

def test_a_slow_body_is_told_its_time(tiny):
    with web(tiny, body_timeout_s=.2) as w:
        said = knocked(w, b'POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                          b'Content-Length: 9\r\n\r\n{')
        assert b' 408 ' in said and b'did not come in time: it may take 0.2 s' in said

def test_a_pause_is_one_wait_of_an_alarm():
    async def main():
        rang, loop = [], asyncio.get_running_loop()
        alarm = Alarm(.4, lambda: rang.append(loop.time()))
        time.sleep(1)                         # as a process that is stopped
        await asyncio.sleep(.1); assert not rang
        end = loop.time() + 5
        while not rang and loop.time() < end: await asyncio.sleep(.01)
        assert len(rang) == 1
        quiet = Alarm(.01, lambda: rang.append('no')); quiet.cancel()
        await asyncio.sleep(.1); assert len(rang) == 1
        alarm.cancel()
    asyncio.run(main())
