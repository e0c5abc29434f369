"""The protocol without a server.
Nothing but a refusal or a checked ask comes out, and what goes back is what openai's own types say."""
import json, math, re
import pytest
from hypothesis import example, given, settings, strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from cbatch.core import Asked, Code, CompletionOutput, Failure, Logprob, RequestOutput
from cbatch.params import CapacityError, ParamError, SamplingParams
from cbatch.answers import Chunks, Head, answer_bytes, check_answer, failure, frame
from cbatch.openapi import document, schema
from cbatch.protocol import API_FIELDS, APIS, READERS, fields_of, fitted, read_fields, read_request, refusal, unknown
from cbatch.wire import LIMITS, ProtocolError, dumps, error_headers, parse_json, pieces, sanitise

VOCAB = 258
MUST = dict(C=dict(model='m', prompt='x'), H=dict(model='m', messages=[dict(role='user', content='x')]))
values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
                      | st.sampled_from(['none', 'm', 'user', 5, 1.0, 1e308]),
                      lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=4)
                          | st.sampled_from(['role', 'content', 'type', 'text', '5']),
                              x, max_size=4), max_leaves=8)
plain = settings(max_examples=150, deadline=None, derandomize=True)

@plain
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda s: s.encode('utf-8', 'surrogatepass'))
       | values.map(lambda v: json.dumps(v).encode()))
@example(b'{"a": 1, "a": 1}')
@example(b'{"a": -Infinity}')
@example(b'[' * 10**5)
@example(b'{"a":' * 10**5)
@example(rb'{"\udc00": 1}')
@example(rb'{"a": [{"b": "\udbff"}]}')
@example(b'\xef\xbb\xbf{}')
def test_any_bytes(body):
    "An object that can be written as strict JSON and read again, or 400"
    try: d = parse_json(body)
    except ProtocolError as e:
        assert e.status == 400 and set(e.body['error']) == {'message', 'type', 'param', 'code'}
        assert dumps(e.body)
        return
    assert isinstance(d, dict) and parse_json(dumps(d)) == d

@pytest.mark.parametrize('body,says', [(b'{"a": 1, "a": 1}', "'a' twice"), (b'{"a": {"b": 1, "b": 2}}', "'b' twice"),
                                       (b'', 'is empty'), (b' \n', 'is empty'),
                                       (b'{"a": NaN}', 'NaN'),
                                       (b'{"a": 1e400}', 'too large'),
    (b'{"a": ' + b'9' * 21 + b'}', '21 digits'), (rb'{"a": "\ud800"}', 'surrogate'), (rb'{"\udc00": 1}',
            'surrogate'), (b'{"a": ' + b'[' * 16 + b']' * 16 + b'}', 'deeply'), (b'[{}]', 'object')])
def test_strict_json(body, says):
    with pytest.raises(ProtocolError, match=says): parse_json(body)

@plain
@given(st.sampled_from('CH'), st.dictionaries(st.sampled_from([f.name for f in API_FIELDS]), values, max_size=4))
def test_any_fields(api, odd):
    "Whatever stands in a field: an ask that the engine can take, or a refusal that names a field, sent or missing"
    try: ask = read_request(api, MUST[api] | odd, VOCAB)
    except ProtocolError as e:
        assert e.status == 400 and (e.param in {**MUST[api], **odd, 'min_tokens': 0, 'max_tokens': 0})
        assert dumps(e.body)
        return
    assert isinstance(ask.params, SamplingParams) and ask.prompts and all(math.isfinite(getattr(ask.params, k))
        for k in ('temperature', 'top_p', 'min_p'))
    assert all(i < VOCAB for i in [*ask.params.stop_token_ids, *(ask.params.logit_bias or ()),
                                   *(ask.params.allowed_token_ids or ())])

@pytest.mark.parametrize('f', API_FIELDS, ids=lambda f: f'{f.name}-{f.apis}')
def test_each_row(f):
    "Null is the default; a wrong type names the field; the default and the limits can be said"
    for api in f.apis:
        must = {k: v for k, v in dict(model='m', prompt='x', messages=MUST['H']['messages'], tokens=[1]).items()
                if k in fields_of(api) and fields_of(api)[k].need}
        if not f.need: assert read_fields(api, must | {f.name: None}, VOCAB)[f.name] == f.default
        for bad in (object, [object], {'x': object}, 'x' * (2**22 + 1)):
            with pytest.raises(ProtocolError) as e: read_fields(api, must | {f.name: bad}, VOCAB)
            assert e.value.param == f.name
            break
        if f.kind in ('integer', 'number'):
            for x in (f.least, f.most): assert read_fields(api, must | {f.name: x}, VOCAB)[f.name] == x
            for x in (f.least - 1, f.most + 1, str(f.least), True, [], math.nan, math.inf):
                with pytest.raises(ProtocolError): read_fields(api, must | {f.name: x}, VOCAB)
        for x in f.only: read_fields(api, must | {f.name: x}, VOCAB)
    assert f.kind in READERS and set(f.apis) <= set(APIS)

def test_the_document_is_the_table():
    for api in APIS: assert set(schema(api)['properties']) == set(fields_of(api))
    doc = document('1', ['m'])
    assert json.loads(dumps(doc)) == doc and doc['openapi'] == '3.1.0'

def test_defaults_are_those_of_the_api():
    c, h = read_request('C', MUST['C'], VOCAB), read_request('H', MUST['H'], VOCAB)
    assert (c.params.max_tokens, h.params.max_tokens, c.params.temperature, h.params.top_p, c.params.n) == (16, None,
        1., 1., 1)
    assert not (c.stream or c.echo or c.fixed or c.ignored or c.include_usage) and c.top is None

@pytest.mark.parametrize('room,omitted,said', [(20, 16, 16), (16, 16, 16), (5, 5, 16), (0, 16, 16), (-3, 16, 16)])
def test_refuse_explicit_clamp_omitted(room, omitted, said):
    assert fitted(read_request('C', MUST['C'], VOCAB), room).max_tokens == omitted
    assert fitted(read_request('C', MUST['C'] | dict(max_tokens=16), VOCAB), room).max_tokens == said
    assert fitted(read_request('C', MUST['C'] | dict(min_tokens=10), VOCAB), 5).min_tokens == 5

def test_messages_that_come_back_from_a_client():
    said = dict(role='assistant', content='Yes.', refusal=None, annotations=[], audio=None, function_call=None,
                tool_calls=None)
    ask = read_request('H', dict(model='m', messages=[dict(role='developer', content='D'), said,
                                                      dict(role='user', content=[dict(type='text', text='a'),
                                                          dict(type='text', text='b')],
                                                           name='joe')]), VOCAB)
    assert ask.prompts == [[dict(role='system', content='D'), dict(role='assistant', content='Yes.'),
                            dict(role='user', content='a\nb', name='joe')]]

def test_unknown_fields_are_named_and_fit_for_a_header():
    names = unknown('H', MUST['H'] | {'x\r\nSet-Cookie: a': 1, 'é': 1, 'null': None, 'y' * 500: 1,
                                      **{f'z{i}': 1 for i in range(50)}})
    assert len(names) == 10 and all(n.isascii() and n.isprintable() and len(n) <= 40
                                    for n in names) and 'null' not in names
    assert unknown('C', MUST['C'] | dict(top_p=1)) == []

@pytest.mark.parametrize('said', ['no such file: /home/joe/x/model.bin', r'C:\Users\joe\secret.txt is open',
                                  'Object at 0x7f00deadbeef',
                                  'a\nTraceback (most recent call last)', 'x' * 10**6])
def test_sanitised(said):
    text = sanitise(said)
    assert not any(s in text for s in ('joe', 'dead', 'Traceback', '\n')) and len(text) <= 300

def test_what_the_engine_refuses_names_its_field():
    long = refusal(CapacityError('prompt', 'too long'), 'messages')
    assert (long.param, long.code) == ('messages', 'context_length_exceeded')
    assert refusal(ParamError('bad_words', '2000 tokens'), 'prompt').param == 'bad_words'
    assert refusal(ParamError('max_model_len', 'of the engine alone'), 'prompt').param == 'prompt'
    assert refusal(ValueError('bad_words: in words only'), 'prompt').param == 'prompt'

@pytest.mark.parametrize('s,want', [(0., '1'), (.2, '1'), (3.4, '4'), (1e9, '120')])
def test_retry_after_is_what_the_client_obeys(s, want):
    assert error_headers(ProtocolError(503, 'x', retry_after=s))['retry-after'] == want

def spell(i): return bytes([i]) if i < 256 else b'<eos>'
def head(api='H', **kw): return Head(read_request(api, MUST[api] | kw, VOCAB), 'fp_x', spell)
scores = st.floats(allow_nan=True, allow_infinity=True)

@st.composite
def answers(draw):
    "A finished report and the reports on its way, of one answer"
    ids = draw(st.lists(st.integers(0, 256), min_size=1, max_size=8))
    lps = [{i: Logprob(draw(scores), 1), 7: Logprob(draw(scores), 2)} for i in ids]
    text, cuts = draw(st.text(max_size=8)), sorted(draw(st.lists(st.integers(0, 8), min_size=len(ids),
        max_size=len(ids))))
    cuts[-1], at, reports = max(8, len(text)), 0, []
    for n, cut in enumerate(cuts, 1):
        last = n == len(ids)
        reports.append(RequestOutput('r', None, [1, 2], [CompletionOutput(0, text[:cut], ids[:n],
                draw(st.sampled_from(['stop', 'length'])) if last else None, delta=text[at:cut], logprobs=lps[:n])],
                                     last,
                                     prompt_logprobs=[None, {2: Logprob(-1., 1)}]))
        at = max(at, cut)
    return reports

@plain
@given(answers(), st.sampled_from('CH'), st.booleans(), st.booleans(), st.sampled_from([None, 0, 2]))
def test_a_stream_says_what_the_whole_says(reports, api, usage, echo, top):
    kw = dict(stream_options=dict(include_usage=usage)) | ({} if top is None else dict(logprobs=top) if api == 'C'
                                                           else dict(logprobs=True, top_logprobs=top))
    h = head(api, stream=True, **kw, **(dict(echo=echo) if api == 'C' else {}))
    ch = Chunks(h, ['PQ'])
    chunks = [c for o in reports for c in ch.news(0, o)] + ch.close()
    whole = json.loads(dumps(h.whole([reports[-1]], ['PQ'])))
    if api == 'H':
        for c in chunks: ChatCompletionChunk.model_validate(c, strict=True)
        ChatCompletion.model_validate(whole)
        assert chunks[0]['choices'][0]['delta'] == dict(role='assistant', content='')
        assert not any('role' in c['choices'][0]['delta'] for c in chunks[1:] if c['choices'])
    # a prompt's first token has no score: null, as OpenAI's own API says and its types don't
    elif not (echo and top is not None): Completion.model_validate(whole)
    body = [c['choices'][0] for c in chunks if c['choices']]
    text = ''.join((c['text'] if api == 'C' else c['delta'].get('content') or '') for c in body)
    assert text == (whole['choices'][0]['text'] if api == 'C' else whole['choices'][0]['message']['content'])
    ends = [c for c in body if c['finish_reason']]
    assert (len(ends) == 1 and ends[0] is body[-1] and ends[0]['finish_reason'] == whole['choices'][0]['finish_reason']
            and ends[0].get('delta', {}) == {})
    assert not ends[0].get('text')
    want, got = whole['choices'][0]['logprobs'], [c['logprobs'] for c in body if c['logprobs']]
    for k in (want or ()): assert sum((g[k] or [] for g in got), []) == (want[k] or [])
    assert all(('usage' in c) == usage for c in chunks) and (not chunks[-1]['choices']
                                                             and chunks[-1].get('usage') == whole['usage']) == usage
    assert all(frame(c).startswith(b'data: {') and frame(c).endswith(b'}\n\n') and b'\n' not in frame(c)[:-2]
               for c in chunks)

def test_scores_of_a_prompt_only():
    h = head('C', echo=True, logprobs=1, max_tokens=0, n=1)
    out = RequestOutput('r', None, [65, 66], [CompletionOutput(0, 'z', [122], 'length', logprobs=None)], True,
                        prompt_logprobs=[None, {66: Logprob(-math.inf, 9), 67: Logprob(-1., 1)}])
    d = h.whole([out], ['AB'])
    assert d['choices'][0]['text'] == 'AB'
    assert d['choices'][0]['logprobs'] == dict(tokens=['A', 'B'], token_logprobs=[None, -9999.],
                                               top_logprobs=[None, {'C': -1., 'B': -9999.}],
                                               text_offset=[0, 1])
    assert d['usage'] == dict(prompt_tokens=2, completion_tokens=0, total_tokens=2)

def test_cached_tokens_only_for_those_who_brought_a_salt():
    from cbatch.core import RequestMetrics
    out = RequestOutput('r', None, [1] * 9, [CompletionOutput(0, 'z', [122], 'stop')], True,
                        RequestMetrics(0., 0., [], 1., num_cached_tokens=8))
    assert 'prompt_tokens_details' not in head().whole([out], [''])['usage']
    assert head(cache_salt='s').whole([out], [''])['usage']['prompt_tokens_details'] == dict(cached_tokens=8)

def test_guesses_in_usage():
    from cbatch.core import RequestMetrics
    out = lambda guessed, held: RequestOutput('r', None, [1], [CompletionOutput(0, 'z', [122], 'stop')], True,
        RequestMetrics(0., 0., [1.], 1., num_guessed_tokens=guessed, num_accepted_tokens=held))
    details = lambda h, *outs: h.usage([*outs]).get('completion_tokens_details')
    assert details(head(), out(0, 0)) is None
    assert details(head('C'), out(5, 2), out(4, 4)) == dict(accepted_prediction_tokens=6, rejected_prediction_tokens=3)
    for ask in (head(prediction=dict(type='content', content='')), head('C', prediction=[])):
        assert details(ask, out(0, 0)) == dict(accepted_prediction_tokens=0, rejected_prediction_tokens=0)
    assert head('C').usage([out(5, 2)])['completion_tokens'] == 1          # what was wrong is nobody's

TOLD = {None: (503, 'aborted'), Code.NAN_LOGITS: (500, 'nan_logits'), Code.NO_TOKEN_LEFT: (400, 'no_token_left'),
        Code.DEADLINE: (408, 'timeout'), Code.SLOW_READER: (408, 'slow_reader'),
        **{c: (500, 'engine_error') for c in (Code.STEP, Code.SAMPLING, Code.TEXT, Code.ENGINE)}}

@pytest.mark.parametrize('words', ['timeout of a kernel', 'abort', 'NaN', 'deadline of 3 s', 'cut off', 'instant'])
@pytest.mark.parametrize('code', [*Code, None])
def test_failures(code, words):
    "The code says what a client is told, whatever the words are"
    fault, reason = Failure(code, words) if code else None, 'error' if code else 'abort'
    e = failure(RequestOutput('r', None, [1], [CompletionOutput(0, '', [], reason)], True, failure=fault))
    assert (e.status, e.code) == TOLD[code] and words not in e.message

@pytest.mark.parametrize('reason', ['stop', 'length'])
def test_no_failure(reason):
    assert failure(RequestOutput('r', None, [1], [CompletionOutput(0, '', [], reason)], True)) is None

# --- what leaves: one line, in pieces, with a price

ENDS = '\x85\u2028\u2029\u000b\u001c'
texts_with_ends = st.text(st.sampled_from('ab"\\é😀' + ENDS), max_size=30)
grown = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                     | texts_with_ends, lambda x: st.lists(x, max_size=40) | st.dictionaries(texts_with_ends, x,
                                                                                             max_size=9), max_leaves=90)

@plain
@given(grown, st.integers(1, 300))
def test_json_is_one_line_and_the_same_in_pieces(x, times):
    "Whoever splits by lines, of whatever kind, finds one; and many calls write what one would have written"
    big = dict(rows=[x] * times, text='é\u2028' * 60 * times)
    for y in (x, big):
        said = dumps(y)
        assert b''.join(pieces(y)) == said and len(said.decode().splitlines()) == 1 and json.loads(said) == y
    assert b''.join(pieces(dict(rows=iter([x, iter([x])])))) == dumps(dict(rows=[x, [x]]))

def test_no_call_sees_much():
    rows = [{f'{i}': dict(logprob=-.5, rank=i, decoded_token='x' * 9) for i in range(21)} for _ in range(3000)]
    for x in (rows, dict(a=dict(b=rows)), 'é' * 10**6, [['x' * 10**5]] * 20, [0.5] * 10**5):
        assert max(map(len, pieces(x))) < 2**17

@pytest.mark.parametrize('x', [2.0, 2, -0.0 + 2])
def test_a_whole_number_is_one(x):
    ask = read_request('C', MUST['C'] | dict(max_tokens=x, n=x, logprobs=x, seed=x, top_k=x, priority=x), VOCAB)
    p = ask.params
    said = [p.max_tokens, p.n, p.logprobs, p.seed, p.top_k, ask.priority]
    assert said == [2] * 6 and {type(i) for i in said} == {int}

@pytest.mark.parametrize('x', [2.5, 1e300, -1e300, math.nan, math.inf, '2', True, 1e19])
def test_other_numbers_are_not(x):
    with pytest.raises(ProtocolError) as e: read_request('C', MUST['C'] | dict(max_tokens=x), VOCAB)
    assert e.value.param == 'max_tokens'

@pytest.mark.parametrize('bias', [{'5': 1, '05': 2}, {'0': 1, '000': 1}, {'9': 1, '7': 1, '0009': 1}])
def test_two_spellings_of_an_id(bias):
    with pytest.raises(ProtocolError, match='two spellings') as e:
        read_request('C', MUST['C'] | dict(logit_bias=bias), VOCAB)
    assert e.value.param == 'logit_bias'

def test_unknown_fields_are_named_at_any_depth():
    parts = [dict(type='text', text='a', cache_control=1, detail=None), dict(type='text', text='b', cache_control=2)]
    body = MUST['H'] | dict(messages=[dict(role='user', content=parts)], stream=True, odd={},
                            stream_options=dict(include_usage=True, continuous_usage_stats=True))
    assert read_request('H', body, VOCAB).ignored == ['odd', 'stream_options.continuous_usage_stats',
                                                      'messages.content.cache_control']
    assert unknown('C', dict(messages=5, stream_options=dict(x=1))) == ['messages', 'stream_options.x']
    assert unknown('T', dict(stream_options=7, messages=[dict(content='x')])) == ['stream_options']

def echoed(num_prompt, num, top, of_prompt, n=1):
    "An ask for all that can be said of a prompt, and an answer to it"
    kw = dict(logprobs=top, echo=True, n=n) | ({} if of_prompt is None else dict(prompt_logprobs=of_prompt))
    h, k = head('C', **kw), max(top, of_prompt or 0) + 1
    row = lambda: {j: Logprob(-j - 1 / 3, j + 1) for j in range(k)}
    outs = [CompletionOutput(i, 'ab' * num, [0] * num, 'length', logprobs=[row() for _ in range(num)])
            for i in range(n)]
    out = RequestOutput('r', None, [0] * num_prompt, outs, True,
                        prompt_logprobs=[None] + [row() for _ in range(num_prompt - 1)])
    return h, out

@pytest.mark.parametrize('args', [(50, 9, 20, None), (40, 1, 20, 20, 8), (9, 90, 0, None), (30, 30, 5, 2, 3),
                                  (99, 1, 1, 20)])
def test_the_price_of_an_answer(args):
    "About what is written, whatever is copied how often; and written row by row it is the same"
    h, out = echoed(*args)
    said = dumps(h.whole([out], ['p' * args[0]]))
    price = answer_bytes(h.ask, args[0], args[1])
    assert price / 2.5 < len(said) < 2.5 * price + 2000
    assert b''.join(pieces(h.whole([out], ['p' * args[0]], iter))) == said

@pytest.mark.parametrize('kw,param', [(dict(n=16, prompt_logprobs=20), 'n'), (dict(logprobs=20, echo=True), 'logprobs'),
                                      (dict(prompt_logprobs=20), 'prompt_logprobs')])
def test_who_asks_for_too_much_is_told_what_to_lower(kw, param, monkeypatch):
    monkeypatch.setitem(LIMITS, 'answer_bytes', 10**6)
    ask = read_request('C', MUST['C'] | kw, VOCAB)
    check_answer(ask, [Asked('', [1] * 20, ask.params, 4)])
    with pytest.raises(ProtocolError, match='MB, at most 1: lower ' + param) as e:
        check_answer(ask, [Asked('', [1] * 900, ask.params, 4)] * 4)
    assert (e.value.status, e.value.param) == (400, param)

def test_the_role_comes_with_the_first_token():
    ch = Chunks(head('H', stream=True, n=2), [''])
    report = lambda *cs: RequestOutput('r', None, [1], list(cs), False)
    said = lambda *cs: [c['choices'][0] for c in ch.news(0, report(*cs))]
    assert said(CompletionOutput(0, '', []), CompletionOutput(1, '', [])) == []
    first = said(CompletionOutput(0, '', [0xc3]), CompletionOutput(1, '', []))
    assert [(c['index'], c['delta']) for c in first] == [(0, dict(role='assistant', content=''))]
    later = said(CompletionOutput(0, 'é', [0xc3, 0xa9], delta='é'), CompletionOutput(1, 'A', [65], delta='A'))
    assert [(c['index'], *c['delta'].values()) for c in later] == [(0, 'é'), (1, 'assistant', ''), (1, 'A')]
    assert [c['delta'] for c in said(CompletionOutput(0, 'é', [0xc3, 0xa9], 'abort'))] == []

@pytest.mark.parametrize('ids,text,places', [
    ([65, 0xc3, 0xa9, 66], 'AéB', [0, 1, 1, 2]), ([1, 65], 'A', [0, 0]), ([1, 65], '<s>A', [0, 3]),
    ([0xf0, 0x9f, 0x91, 0x8b, 33], '👋!', [0, 0, 0, 0, 1]), ([1, 1, 65], '<s>A', [0, 3, 3]),
    ([65, 66, 67], 'A', [0, 1, 1])])
def test_places_are_those_of_the_text(ids, text, places):
    h = Head(read_request('C', MUST['C'] | dict(echo=True, logprobs=0), VOCAB), 'fp', lambda i: b'<s>' if i == 1
             else bytes([i]), special=frozenset([1]))
    assert h.places_in(text, ids) == places
    said, lps = [0xc3, 0xa9, 120], [{i: Logprob(-1., 1)} for i in (0xc3, 0xa9, 120)]
    out = RequestOutput('r', None, ids, [CompletionOutput(0, 'éx', said, 'stop', logprobs=lps)], True)
    c = h.whole([out], [text])['choices'][0]
    n = len(text)
    assert c['logprobs']['text_offset'] == [*places, n, n, n + 1] and c['text'][n + 1] == 'x'

ODD = [True, None, [None], [True], {'a': None}, {'5': None}, [{'role': None}], [{'role': 'user', 'content': None}],
       [{'role': 'user', 'content': [None, True]}], [{'role': 'user', 'content': 'x', 'name': False}],
       [{'role': 'user', 'content': 'x', 'odd': True}], {'include_usage': [None]}, [[None]], [1, None], 1e300, 'x', -5]

@pytest.mark.parametrize('api', APIS)
def test_refusals_speak_json(api):
    "Whatever stands in whichever field: what a client is told has no word of Python's"
    told, must = 0, MUST.get(api) or dict(model='m', **({'prompt': 'x'} if api == 'T' else {'tokens': [1]}))
    read = (lambda d: read_request(api, d, VOCAB)) if api in 'CH' else lambda d: read_fields(api, d, VOCAB)
    for name in fields_of(api):
        for x in ODD:
            try: read(must | {name: x})
            except ProtocolError as e:
                told += 1
                assert not re.search(r'\b(True|False|None|inf|nan|tuple|dict|bool)\b', e.message), e.message
    assert told > 20
