"""Situations that engines have stumbled over, as clients of the server see them.
Each is followed by silence and by a request that is served as ever."""
import threading
import pytest
from cbatch.model import tiny_lm
from cbatch.text import decode, opening, vocab_of
from test_text import make, marking
from web import ref, web

@pytest.fixture(scope='module')
def shared(tiny):
    with web(tiny, engine=dict(num_blocks=200)) as w: yield w

@pytest.fixture
def w(shared):
    yield shared
    shared.rests()

@pytest.fixture
def says(w, monkeypatch):
    "Make the model answer a prompt as told, one byte a token (or one id of a list), then by end-of-sequence"
    def make(script):
        told = {tuple(w.llm.encode(p)): list(s.encode()) if isinstance(s, str) else s for p, s in script.items()}
        run = w.llm.execute
        def execute(plan):
            out = run(plan)
            for i in out.sampled:
                r = w.llm.requests[i].request
                if (ids := told.get(tuple(r.prompt_ids))) is not None:
                    out.sampled[i] = [ids[len(r.output_ids)] if len(r.output_ids) < len(ids) else 256]
            return out
        monkeypatch.setattr(w.llm, 'execute', execute)
    return make

def both(w, prompt, **kw):
    "Streamed and whole, by both APIs' shapes of the same text prompt; they must agree. (pieces, whole choice)"
    whole, = w.complete(prompt, **dict(ignore_eos=False) | kw).json['choices']
    frames = w.complete(prompt, stream=True, **dict(ignore_eos=False) | kw).frames
    pieces = [f['choices'][0]['text'] for f in frames if f['choices'][0]['text']]
    assert ''.join(pieces) == whole['text'] and [f['choices'][0]['finish_reason']
                                                 for f in frames].count(None) == len(frames) - 1
    assert frames[-1]['choices'][0]['finish_reason'] == whole['finish_reason']
    return pieces, whole

def test_case_10_eight_streams_drop(tiny):
    "Blocks are back within a few steps; also those of clients that wait, are in a chunk, or are preempted"
    with web(tiny, engine=dict(num_blocks=60, watermark=0.)) as w:
        w.slow(.01)
        socks = [w.raw(prompt=[i + 1] * (5 if i % 2 else 100), stream=i % 3 > 0, max_tokens=130) for i in range(8)]
        w.wait(lambda: any(r.output_ids for r in (a.request for a in list(w.llm.requests.values()))))
        for s in socks: s.close()
        at = w.llm.scheduler.num_steps
        w.wait(lambda: not w.llm.has_unfinished)
        assert w.llm.scheduler.num_steps - at < 130 and w.llm.num_free_blocks == w.llm.num_blocks
        w.rests()

def test_case_11_stop_strings(w, says):
    abc = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ'
    says({'abc': abc, 'The capital of France is': ' the city of Paris, of course.'})
    for stop, text, why in [(['DEFGHIJ'], 'ABC', 'stop'), (['DEFX', 'DEFGY'], abc, 'length'),
                            (['DEFGHIJ', 'DEF'], 'ABC', 'stop'),
                            (['EFG', 'DEFGHIJ'], 'ABCD', 'stop'), (['YZ!'], abc, 'length'), (['Z'], abc[:-1], 'stop')]:
        _, c = both(w, 'abc', max_tokens=26, stop=stop)
        assert (c['text'], c['finish_reason']) == (text, why)
    assert both(w, 'The capital of France is', max_tokens=40, stop='Pari')[1]['text'] == ' the city of '
    assert both(w, 'abc', max_tokens=26, stop=['DEF'], include_stop_str_in_output=True)[1]['text'] == 'ABCDEF'

@pytest.mark.parametrize('text', ['👨‍👩‍👧‍👦!', '안녕하세요', 'e\u0301le\u0300ve'])
def test_case_12_characters_over_tokens(w, says, text):
    says({'p': text})
    raw = text.encode()
    pieces, c = both(w, 'p', max_tokens=len(raw))
    assert c['text'] == text and not any('\ufffd' in p for p in pieces)
    for n in range(1, len(raw), 3):
        pieces, c = both(w, 'p', max_tokens=n)
        try: want = raw[:n].decode()
        except UnicodeDecodeError as e: want = raw[:e.start].decode() + '\ufffd'
        assert c['text'].rstrip('\ufffd') == want.rstrip('\ufffd') and ('\ufffd' in c['text']) == ('\ufffd' in want)
        assert not any('\ufffd' in p for p in pieces[:-1])

def test_case_13_four_samples(w):
    "They differ, the set repeats, and the i-th depends neither on n nor on who else is there"
    samples = lambda n, **kw: [c['text'] for c in sorted(w.complete('Hello', n=n, seed=7, temperature=1, max_tokens=12,
        **kw).json['choices'],
                                                         key=lambda c: c['index'])]
    four = samples(4)
    assert len(set(four)) == 4 and samples(4) == four and samples(2) == four[:2] and samples(1) == four[:1]
    others = [threading.Thread(target=lambda i=i: w.complete([i] * 9, max_tokens=30)) for i in range(3)]
    for t in others: t.start()
    assert samples(3) == four[:3]
    for t in others: t.join()

@pytest.mark.parametrize('kw,param', [(dict(prompt=''), 'prompt'), (dict(prompt=[]), 'prompt'),
                                      (dict(prompt='x', logit_bias={'258': 1}), 'logit_bias'),
                                      (dict(prompt='x', stop_token_ids=[258]), 'stop_token_ids'),
                                      (dict(prompt=[258]), 'prompt')], ids=str)
def test_case_14_nothing_to_start_from(w, kw, param):
    r = w.complete(**kw)
    assert r.status == 400 and r.error['param'] == param

def test_case_15_what_stop_may_be(w, says):
    says({'p': 'one X two'})
    answers = [both(w, 'p', max_tokens=30, **kw)[1] for kw in ({}, dict(stop=None), dict(stop=[]), dict(stop='X'),
                                                               dict(stop=['X']))]
    assert [c['text'] for c in answers] == ['one X two'] * 3 + ['one '] * 2 and {c['finish_reason']
        for c in answers} == {'stop'}
    for bad in ('', ['']): assert w.complete('p', stop=bad).error['param'] == 'stop'

@pytest.mark.parametrize('kind', ['bytes', 'metaspace_bpe', 'fallback_bpe'])
def test_case_16_tokenizers(kind):
    "Streamed and whole are the same string, which is what the tokenizer makes of the ids, leading space included"
    tok = make(kind)
    model = tiny_lm('llama', vocab_size=max(258, len(tok)), eos_token_id=None, pad_token_id=None)
    model.tokenizer = tok
    with web(model) as w:
        for prompt in ([5, 6, 7], [9], [200, 3]):
            ids = ref(model, prompt, 20).token_ids
            pieces, c = both(w, prompt, max_tokens=20)
            assert c['text'] == decode(tok, [i for i in ids if i < len(tok)])
        assert w.ask('POST', '/detokenize', dict(model='tiny', tokens=tok.encode(' ab',
            add_special_tokens=False))).status == 200
        w.complete(logprobs=2); w.rests()

def test_case_17_logprobs_forms(w):
    t = w.chat(logprobs=True).json['choices'][0]['logprobs']['content']
    assert len(t) == 6 and all(x['top_logprobs'] == [] and x['logprob'] <= 0 and x['bytes'] for x in t)
    for kw in (dict(top_logprobs=2), dict(logprobs=False, top_logprobs=2)):
        assert w.chat(**kw).error['param'] == 'top_logprobs'
    assert w.chat().json['choices'][0]['logprobs'] is None
    streamed = [x for f in w.chat(logprobs=True, stream=True).frames for c in f['choices'] if c['logprobs']
                for x in c['logprobs']['content']]
    assert streamed == t

def test_case_18_stream_options(w):
    bills = lambda **kw: [f for f in w.chat(stream=True, **kw).frames if f['choices'] == []]
    assert (bills() == bills(stream_options=None) == bills(stream_options={})
            == bills(stream_options=dict(include_usage=False)) == [])
    bill, = bills(stream_options=dict(include_usage=True))
    assert (bill['usage'] == w.chat().json['usage']
            and w.chat(stream=True, stream_options=dict(include_usage=True)).frames[-1]['choices'] == [])
    assert all(f['usage'] is None for f in w.chat(stream=True, stream_options=dict(include_usage=True)).frames[:-1])
    for kw in (dict(stream_options=dict(include_usage=True)), dict(stream=False, stream_options={})):
        assert w.chat(**kw).error['param'] == 'stream_options'
    assert w.chat(stream=True, stream_options=dict(include_usage='yes')).error['param'] == 'stream_options'

def test_case_19_the_last_token(w, says):
    """max_tokens = 1 ends by length; an end-of-sequence id as the last token allowed ends by stop.
    One finish reason each (`both` counts)."""
    says({'p': 'abc'})
    assert both(w, 'p', max_tokens=1)[1]['finish_reason'] == 'length'
    for n, why in ((3, 'length'), (4, 'stop'), (9, 'stop')):
        _, c = both(w, 'p', max_tokens=n)
        assert (c['text'], c['finish_reason']) == ('abc', why)

# --- marks and places

@pytest.fixture(scope='module', params=['bytes', 'fallback_bpe', 'metaspace_bpe', 'fallback_gemma'])
def marked(request):
    "A server whose tokenizer is of a kind; those with a mark put it before a text"
    tok = make(request.param) if request.param == 'bytes' else marking(request.param)
    model = tiny_lm('llama', vocab_size=max(258, len(tok)), eos_token_id=None, pad_token_id=None)
    model.tokenizer = tok
    with web(model) as w:
        yield w
        w.rests()

def test_special_tokens_as_the_client_wants(marked):
    w, tok = marked, marked.llm.tokenizer
    bos = [] if tok.bos_token_id is None or not opening(tok) else [tok.bos_token_id]
    count = lambda **kw: w.complete(**kw).json['usage']['prompt_tokens']
    plain = tok.encode('abc', add_special_tokens=False)
    ids = lambda **kw: w.ask('POST', '/tokenize', dict(model='tiny') | kw).json['tokens']
    assert ids(prompt='abc') == ids(prompt='abc', add_special_tokens=True) == bos + plain
    assert ids(prompt='abc', add_special_tokens=False) == plain
    assert count(prompt='abc') == len(bos + plain)
    assert count(prompt=['abc', 'abc'], add_special_tokens=False) == 2 * len(plain)
    once = tok.encode('<s>abc', add_special_tokens=False)
    assert ids(prompt='<s>abc') == once and count(prompt='<s>abc') == len(once)
    assert count(prompt=bos + plain, add_special_tokens=False) == len(bos + plain)
    assert w.complete(add_special_tokens='yes').error['param'] == 'add_special_tokens'
    hi, tok.chat_template = [dict(role='user', content='abc')], '{{ messages[0].content }}'
    assert ids(messages=hi) == ids(messages=hi, add_special_tokens=False) == plain
    assert ids(messages=hi, add_special_tokens=True) == bos + plain
    chat = lambda **kw: w.chat('abc', **kw).json['usage']['prompt_tokens']
    assert (chat(), chat(add_special_tokens=True)) == (len(plain), len(bos + plain))
    tok.chat_template = '{{ bos_token }}{{ messages[0].content }}'
    if bos: assert ids(messages=hi, add_special_tokens=True) == ids(messages=hi) == once

@pytest.mark.parametrize('prompt', ['abc', '<s>abc', 'é 👋 한', [5, 6, 7, 1, 40], 'a' * 30], ids=repr)
def test_text_offset_is_an_offset_into_text(marked, prompt):
    "Whole and streamed alike; where a token is text by itself, it stands there"
    kw = dict(prompt=prompt, echo=True, logprobs=1, max_tokens=24)
    c = marked.complete(**kw).json['choices'][0]
    lp, text = c['logprobs'], c['text']
    places = lp['text_offset']
    assert places == sorted(places) and places[0] == 0 and places[-1] <= len(text)
    frames = [f['choices'][0] for f in marked.complete(**kw, stream=True).frames]
    assert sum((f['logprobs']['text_offset'] for f in frames if f['logprobs']), []) == places
    n = len(places) - 24
    echoed = prompt if isinstance(prompt, str) else decode(marked.llm.tokenizer, prompt)
    assert places[n] == len(echoed) and text.startswith(echoed)
    alone = marked.complete(**kw | dict(echo=False)).json['choices'][0]
    assert [len(echoed) + i for i in alone['logprobs']['text_offset']] == places[n:]
    # an answer's byte tokens need not be text, where a tokenizer has them for what it lacks
    k = len(places) if vocab_of(marked.llm.tokenizer).by_bytes else n
    for i, t in [*zip(places, lp['tokens'])][1:k]:
        if t.isalnum() and t.isascii(): assert text.startswith(t, i)
