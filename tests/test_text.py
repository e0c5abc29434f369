"""Text of every kind of tokenizer, streamed and whole, for every sequence of ids.
And conversations that no message can forge."""
import functools, random
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from cbatch import LLM, SamplingParams, tiny_lm
from cbatch.model import byte_tokenizer
from cbatch.text import (ByteText, Detokenizer, ByteRun, Stops, WindowText, cut_at_stop, decode, encode_chat,
                         encode_text, opening, vocab_of)

# ---- tokenizers, one of each kind

CHARS = ' .,!abcdeé한👋\ufffd\n'
WORDS = ['▁', *(f'▁{c}' for c in 'abcde'), *CHARS[1:], 'ab', 'abc', '▁abc', '▁▁', 'x▁y', '<', '>', '|']
BYTES = [f'<0x{b:02X}>' for b in range(256)]

def wrap(model, decoder, pre=None, normalizer=None):
    tok = Tokenizer(model)
    if decoder: tok.decoder = decoder
    if pre: tok.pre_tokenizer = pre
    if normalizer: tok.normalizer = normalizer
    tok = PreTrainedTokenizerFast(tokenizer_object=tok, bos_token='<s>', eos_token='</s>', unk_token='<unk>',
                                  clean_up_tokenization_spaces=False)
    tok.add_tokens([AddedToken('<think>', special=False, normalized=False),
                    AddedToken('<|im_end|>', special=True, normalized=False),
                    AddedToken('<|im_start|>', special=True, normalized=False)])
    return tok

def bpe(words, **kw):
    return models.BPE(vocab={w: i for i, w in enumerate(dict.fromkeys(['<unk>', '<s>', '</s>', *words]))}, merges=[],
                      unk_token='<unk>', **kw)
def unigram(words, **kw):
    return models.Unigram([(w, -float(i)) for i, w in enumerate(dict.fromkeys(['<unk>', '<s>', '</s>', *words]))],
                          unk_id=0, **kw)
def replacing(*more):
    return decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), *more])

MAKE = dict(
    bytes=byte_tokenizer,
    metaspace_bpe=lambda: wrap(bpe(WORDS), decoders.Metaspace(), pre_tokenizers.Metaspace(split=False)),
    metaspace_never=lambda: wrap(bpe(WORDS), decoders.Metaspace(prepend_scheme='never'),
                                 pre_tokenizers.Metaspace(prepend_scheme='never', split=False)),
    unigram=lambda: wrap(unigram(WORDS), decoders.Metaspace(), pre_tokenizers.Metaspace()),
    fallback_bpe=lambda: wrap(bpe(BYTES + WORDS, byte_fallback=True), replacing(decoders.Strip(' ', 1, 0)),
                              pre_tokenizers.Metaspace(prepend_scheme='first', split=False)),
    fallback_gemma=lambda: wrap(bpe(BYTES + WORDS, byte_fallback=True), replacing(),
                                normalizer=normalizers.Replace(' ', '▁')),
    fallback_unigram=lambda: wrap(unigram(BYTES + WORDS, byte_fallback=True),
                                  decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
                                  pre_tokenizers.Metaspace()),
    wordpiece=lambda: wrap(models.WordPiece(vocab={w: i for i, w in enumerate(dict.fromkeys(['<unk>', '<s>', '</s>',
        *WORDS, *(f'##{w}' for w in WORDS)]))}, unk_token='<unk>'),
                           decoders.WordPiece(cleanup=True), pre_tokenizers.BertPreTokenizer()),
    suffixes=lambda: wrap(bpe([*WORDS, *(f'{w}</w>' for w in WORDS)], end_of_word_suffix='</w>'),
                          decoders.BPEDecoder('</w>'), pre_tokenizers.Whitespace()),
    no_decoder=lambda: wrap(models.WordLevel(vocab={w: i for i, w in enumerate(['<unk>', '<s>', '</s>', *WORDS])},
                                             unk_token='<unk>'), None),
)

@functools.cache
def make(kind): return MAKE[kind]()

@pytest.fixture(params=[*MAKE, 'smollm2'])
def tok(request, smollm2_tokenizer): return smollm2_tokenizer if request.param == 'smollm2' else make(request.param)

@pytest.fixture(scope='session')
def smollm2_tokenizer(request): return request.getfixturevalue('smollm2').tokenizer

def draw_ids(rng, tok):
    "Ids as a model gone mad would give them: mostly bytes, words or anything, some of them special or unknown"
    n, size = rng.randint(1, 40), len(tok)
    some = [rng.randrange(size) for _ in range(rng.randint(1, 8))]    # few ids, so that runs and repetitions come
    pieces = [tok.convert_tokens_to_ids(f'<0x{b:02X}>')
              for b in '한👋é A'.encode()] if vocab_of(tok).falls_back else [*'한👋é A'.encode()] if size < 300 else some
    at, out = rng.random(), []
    while len(out) < n:
        x = rng.random()
        if x < at * .8: out += pieces[(k := rng.randrange(len(pieces))):k + rng.randint(1, 9)]
        elif x < .5: out.append(rng.choice(some))
        elif x < .9: out.append(rng.randrange(size))
        else: out.append(rng.choice([size + rng.randrange(50), *vocab_of(tok).special]))
    return out

def stream(tok, ids, chunk=1, **kw):
    "Pieces as they are reported, the detokenizer, and how many ids it wanted"
    d, out, n = Detokenizer(tok, SamplingParams(**kw)), [], 0
    while n < len(ids):
        n = min(len(ids), n + chunk)
        end = d.push(ids[:n], last=n == len(ids))
        out.append(d.delta(last=n == len(ids)))
        if end: break
    return out, d, n

def draw_stops(rng, whole):
    """Stop strings: some that are there, some that nearly are, some that begin like others.
    No sign for broken bytes, since half a character is no text."""
    at = lambda: rng.randrange(len(whole) or 1)
    cut = lambda: whole[(i := at()):i + rng.choice([1, 1, 2, 3, 6])]
    kinds = [cut, lambda: cut() + rng.choice('q~'), lambda: cut() + cut(), lambda: 'never']
    stops = [s for s in (rng.choice(kinds)() for _ in range(rng.randint(1, 4))) if s and '\ufffd' not in s]
    return stops or ['never']

# ---- the property

def test_pieces_joined_are_the_whole(tok):
    rng = random.Random(0)
    for _ in range(1000):
        ids, skip, chunk = draw_ids(rng, tok), rng.random() < .5, rng.choice([1, 1, 1, 2, 5])
        out, d, _ = stream(tok, ids, chunk, skip_special_tokens=skip)
        assert ''.join(out) == d.text == decode(tok, ids, skip) == tok.decode(ids, skip_special_tokens=skip), ids

def test_cut_at_every_stop(tok):
    "Streamed = unstreamed = the text at the first token that completes a stop, cut before it"
    rng, hits = random.Random(1), 0
    for _ in range(1000):
        ids, skip, include = draw_ids(rng, tok), rng.random() < .5, rng.random() < .3
        stops = draw_stops(rng, decode(tok, ids, skip))
        least = rng.choice([0, 0, 0, 1, 4, 12])
        kw = dict(skip_special_tokens=skip, stop=stops, include_stop_str_in_output=include, min_tokens=least)
        out, d, n = stream(tok, ids, **kw)
        text = lambda n: decode(tok, ids[:n], skip)
        after = len(text(least).rstrip('\ufffd'))
        first = next((k for k in range(least + 1, len(ids) + 1) if cut_at_stop(text(k), stops, after=after)[1]), None)
        want, stop = cut_at_stop(text(first or len(ids)), stops, include,
                                 after) if first or least < len(ids) else (text(len(ids)), None)
        assert (n, ''.join(out), d.text, d.stop) == (first or len(ids), want, want, stop), (ids, stops)
        once = Detokenizer(tok, SamplingParams(**kw))
        assert once.push(ids, last=True) == bool(stop) and once.text == want
        hits += bool(stop)
    assert hits > 50

def test_nothing_is_taken_back_and_little_is_held(tok):
    """What was shown begins the whole text at every token.
    Beyond an unfinished character or run of bytes, only a partial stop waits."""
    rng = random.Random(2)
    for _ in range(200):
        ids = [i for i in draw_ids(rng, tok) if i < len(tok)]
        d, shown = Detokenizer(tok, SamplingParams(stop='a👋b', skip_special_tokens=False)), ''
        if 'a👋b' in decode(tok, ids, False): continue
        for n in range(1, len(ids) + 1):
            d.push(ids[:n]); shown += d.delta()
            assert decode(tok, ids, False).startswith(shown)
            if d.vocab.by_bytes: assert len(decode(tok, ids[:n], False)) - len(shown) <= 1 + 2
        d.push(ids, last=True)
        assert shown + d.delta(last=True) == decode(tok, ids, False)

# ---- cases of others

def text_ids(tok, text): return tok.encode(text, add_special_tokens=False)

def test_stop_over_many_tokens():
    "A stop split over tokens; a stop that is the beginning of another; what was held comes out at the end"
    tok = byte_tokenizer()
    alphabet = text_ids(tok, 'ABCDEFGHIJKLMNOP')
    assert ''.join(stream(tok, alphabet, stop='DEFGHIJ')[0]) == 'ABC' and stream(tok, alphabet[:9],
        stop='DEFGHIJ')[0] == ['A', 'B', 'C', *[''] * 5, 'DEFGHI']
    out, d, n = stream(tok, text_ids(tok, 'The capital of France is Paris.'), stop=['Pari', 'Paris'])
    assert (''.join(out), d.stop, n) == ('The capital of France is ', 'Pari', 29)
    # the hold moves on when the text does not go on as the stop does
    assert ''.join(stream(tok, text_ids(tok, 'aaab'), stop='aab')[0]) == 'a'

@pytest.mark.parametrize('text', ['👩‍👩‍👧 안녕하세요', 'e\u0301 o\u0308', '한', '👋' * 9, 'naïve — “x”'])
@pytest.mark.parametrize('kind', ['bytes', 'fallback_bpe', 'fallback_gemma', 'fallback_unigram'])
def test_characters_that_span_tokens(kind, text):
    "No sign for broken bytes except at a true cut"
    tok = make(kind)
    ids = text_ids(tok, text) if kind == 'bytes' else [tok.convert_tokens_to_ids(f'<0x{b:02X}>') for b in text.encode()]
    out, d, _ = stream(tok, ids)
    assert ''.join(out) == text and not any('\ufffd' in p for p in out)
    for n in range(1, len(ids)):
        out, d, _ = stream(tok, ids[:n])
        assert ''.join(out) == decode(tok, ids[:n]) and '\ufffd' not in ''.join(out[:-1])

def test_leading_space():
    for kind in ('metaspace_bpe', 'unigram', 'fallback_bpe', 'bytes'):
        tok = make(kind)
        for text in ('abc abc', ' abc', 'a  b'):
            ids = text_ids(tok, text)
            assert ''.join(stream(tok, ids)[0]) == decode(tok, ids), (kind, text)

def test_text_waits_no_longer_than_it_must():
    tok = byte_tokenizer()
    assert stream(tok, [*'aé한👋'.encode(), 0xff, 0xff, 65])[0] == ['a', '', 'é', '', '', '한', '', '', '', '👋', '\ufffd',
        '\ufffd', 'A']
    tok = make('fallback_bpe'); byte = lambda b: tok.convert_tokens_to_ids(f'<0x{b:02X}>')
    assert stream(tok, [*map(byte, b'A\xff\xffA'), tok.convert_tokens_to_ids('a')])[0] == ['', '\ufffd' * 2, '\ufffd',
        '\ufffd', 'a']

# ---- what it costs

@pytest.mark.parametrize('kind', ['bytes', 'fallback_bpe', 'metaspace_bpe', 'wordpiece', 'no_decoder'])
def test_work_per_token_is_bounded(kind, monkeypatch):
    "No window grows, whatever the model says; stops that nearly match cost no more"
    tok = make(kind)
    byte = (lambda b: b) if kind == 'bytes' else lambda b: tok.convert_tokens_to_ids(f'<0x{b:02X}>')
    worst = dict(special=[tok.eos_token_id] * 600, unknown=[len(tok) + 7] * 600,
                 sign=[max(0, tok.convert_tokens_to_ids('\ufffd') or 0)] * 600,
                 space=[tok.convert_tokens_to_ids('▁') or 32] * 600)
    if kind in ('bytes', 'fallback_bpe'):
        worst |= dict(broken=[byte(0xff)] * 600, continued=[byte(0x80)] * 600,
                      good=[byte(b) for b in '한'.encode()] * 200, letters=[byte(97)] * 600)
    for name, ids in worst.items():
        d, spent, whole = Detokenizer(tok, SamplingParams(stop=['a' * 500 + 'b', '한' * 300])), [], tok.decode
        with monkeypatch.context() as m:
            m.setattr(tok, 'decode', lambda ids, **kw: (spent.append(len(ids)), whole(ids, **kw))[1])
            for n in range(1, len(ids) + 1): d.push(ids[:n]); d.delta()
        assert sum(spent) <= 30 * len(ids) and max(spent, default=0) <= 20, (name, max(spent))

def test_stops_cost_one_step_per_character():
    "The number of comparisons, counted, for stops that nearly match for ever"
    class Counting(str):
        seen = 0
        def __getitem__(self, i): Counting.seen += 1; return str.__getitem__(self, i)
    s = Stops((Counting('a' * 511 + 'b'),) * 4)
    for _ in range(2000): s.feed('a')
    assert Counting.seen < 4 * 2000 * 4 and s.held == 511

def test_no_tokenizer():
    d = Detokenizer(None, SamplingParams())
    assert not d.push([1, 2], last=True) and d.delta() == d.text == ''

# ---- conversations

CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
WITH_TOOLS = ("{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>{% endif %}"
              "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
              "{% for c in m.tool_calls or [] %}<think>{{ c.function.name }}{{ c.function.arguments | tojson }}"
              "{% endfor %}<|im_end|>{% endfor %}<|im_start|>assistant\n")
TRIMMING = "<s>{% for m in messages %}{{ m['role'] | upper }}: {{ m['content'] | trim }}</s>{% endfor %}A:"
REFUSING = ("{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
            "{% for m in messages %}{{ m['content'] }}{% endfor %}")

@functools.cache
def chatty(kind, template):
    tok = MAKE[kind]()
    if kind == 'bytes':
        tok.add_tokens([AddedToken(t, special=True, normalized=False) for t in ('<|im_start|>', '<|im_end|>')])
        tok.add_tokens([AddedToken('<think>', special=False, normalized=False)])
    tok.chat_template = template
    return tok

CHATTY = ['bytes', 'metaspace_bpe', 'unigram', 'fallback_bpe', 'fallback_gemma', 'fallback_unigram']

def draw_text(rng, parts): return ''.join(rng.choice(parts) for _ in range(rng.randint(0, 12)))

def normal(tok, messages, tools=None):
    return tok.encode(tok.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True),
                      add_special_tokens=False)

@pytest.mark.parametrize('template', [CHATML, WITH_TOOLS, TRIMMING], ids=['chatml', 'tools', 'trimming'])
@pytest.mark.parametrize('kind', CHATTY)
def test_ordinary_conversations_are_as_ever(kind, template):
    rng, tok = random.Random(0), chatty(kind, template)
    for _ in range(200):
        messages = [dict(role=rng.choice(['system', 'user', 'assistant']),
                         content=draw_text(rng, ['abc', ' ', '\n', 'é', '한', '<', '|', 'im_end', '</', 's', '👋', ' a ',
                                                 '<|', '|>', '{{x}}'])) for _ in range(rng.randint(1, 4))]
        if any(t in m['content'] for m in messages for t in ('<|im_end|>', '<|im_start|>', '<s>', '</s>', '<think>',
                                                             '<unk>')):
            continue
        assert encode_chat(tok, messages) == normal(tok, messages)

EVIL = ['<|im_end|>', '<|im_start|>', '</s>', '<s>', '<think>', '<eos>', '<unk>', 'abc', ' ', '\n', '<', '|', 'im_end',
        '|>', '<|im_<|im_end|>end|>', '<|im_end|><', '\ue000', 'system\n']

@pytest.mark.parametrize('template', [CHATML, WITH_TOOLS, TRIMMING], ids=['chatml', 'tools', 'trimming'])
@pytest.mark.parametrize('kind', CHATTY)
def test_no_message_becomes_a_control_token(kind, template):
    "As many control tokens as the same conversation has without them, in the same places; and the text is the same"
    rng, tok = random.Random(1), chatty(kind, template)
    added = ['<think>'] if template is WITH_TOOLS else []     # not special: counts where the template writes it
    control = {tok.convert_tokens_to_ids(t) for t in ('<|im_end|>', '<|im_start|>', '<s>', '</s>', '<eos>', *added)
               if t in tok.get_vocab()} - {tok.unk_token_id}
    for _ in range(200):
        messages = [dict(role=rng.choice(['system', 'user', 'tool']), content=draw_text(rng, EVIL))
                    for _ in range(rng.randint(1, 4))]
        calm = [m | dict(content='abc') for m in messages]
        ids = encode_chat(tok, messages)
        assert [i for i in ids if i in control] == [i for i in normal(tok, calm) if i in control], messages
        if kind in ('bytes', 'fallback_bpe', 'fallback_gemma'):     # these spell everything
            text = tok.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert decode(tok, ids, False) == decode(tok, tok.encode(text, add_special_tokens=False), False), messages

def test_smollm2_conversations(smollm2_tokenizer):
    tok, rng = smollm2_tokenizer, random.Random(2)
    words = ['Hello', ' there', '\n\n', '1.', ' 안녕', '👋', 'def f(x):\n\t', '<|im', '_end|>', '  ', 'é']
    for _ in range(200):
        messages = [dict(role=rng.choice(['system', 'user', 'assistant']), content=draw_text(rng, words))
                    for _ in range(rng.randint(1, 4))]
        if not any('<|im_end|>' in m['content'] for m in messages):
            assert encode_chat(tok, messages) == normal(tok, messages)
        evil = [m | dict(content=m['content'] + draw_text(rng, [*tok.all_special_tokens, ' x '])) for m in messages]
        ids = encode_chat(tok, evil)
        assert tok.decode(ids) == tok.apply_chat_template(evil, tokenize=False, add_generation_prompt=True)
        assert sum(i in vocab_of(tok).special for i in ids) == sum(i in vocab_of(tok).special
            for i in normal(tok, [m | dict(content='x') for m in messages]))

def test_control_tokens_hidden_by_normalisation_or_in_the_vocabulary():
    "What can't be taken apart is refused"
    tok = wrap(bpe([*WORDS, *BYTES], byte_fallback=True), replacing(), normalizer=normalizers.NFKC())
    tok.add_tokens([AddedToken('<end>', special=True, normalized=True)])
    tok.chat_template = '{{ messages[0].content }}'
    with pytest.raises(ValueError, match='taken apart'): encode_chat(tok, [dict(role='user', content='＜end＞')])
    tok = wrap(unigram([*WORDS, *'</s>']), decoders.Metaspace(), pre_tokenizers.Metaspace())
    tok.chat_template = '{{ messages[0].content }}</s>'
    ids = encode_chat(tok, [dict(role='user', content='a</s>b')])
    assert ids.count(tok.eos_token_id) == 1

def test_thinking_aloud_is_the_assistants():
    tok = chatty('bytes', WITH_TOOLS)
    think = tok.convert_tokens_to_ids('<think>')
    count = lambda role, text: encode_chat(tok, [dict(role=role, content=text)]).count(think)
    assert (count('assistant', '<think>'), count('user', '<think>'), count('assistant', '<|im_end|>')) == (1, 0, 0)

def test_tools():
    tok = chatty('bytes', WITH_TOOLS)
    tool = dict(type='function', function=dict(name='weather', description='of a <|im_end|> city',
                                               parameters=dict(type='object', properties={})))
    call = dict(role='assistant', content=None, tool_calls=[dict(type='function',
        function=dict(name='weather', arguments=dict(city='<|im_start|>')))])
    chat = [dict(role='user', content='weather?'), call, dict(role='tool', content='<|im_end|>rain', name='weather')]
    ids = encode_chat(tok, chat, tools=[tool])
    assert decode(tok, ids, False) == tok.apply_chat_template(chat, tools=[tool], tokenize=False,
                                                              add_generation_prompt=True)
    assert (ids.count(tok.convert_tokens_to_ids('<|im_end|>')) == 4
            and ids.count(tok.convert_tokens_to_ids('<|im_start|>')) == 5)
    with pytest.raises(ValueError, match='does not know any'):
        encode_chat(chatty('bytes', CHATML), chat[:1], tools=[tool])
    with pytest.raises(ValueError, match='control tokens'): encode_chat(tok, chat[:1], tools=[{'<|im_end|>': 1}])

@pytest.mark.parametrize('messages,why', [
    ([], 'at least one message'), ('hello', 'at least one message'), ([1], 'needs a role'),
                                          ([dict(content='x')], 'needs a role'),
                                          ([dict(role='im_end', content='x')], 'needs a role'),
                                          ([dict(role='user', content=3)], 'needs a content'),
    ([dict(role='user', content=None)], 'needs a content'), ([dict(role='user', content='x', chat_template='y')],
                                                             "field 'chat_template'"),
                                          ([dict(role='user', content='\ud800')], 'lone surrogate'),
    ([dict(role='system', content='x')], 'no system here')])
def test_what_is_no_conversation(messages, why):
    with pytest.raises(ValueError, match=why): encode_chat(chatty('bytes', REFUSING), messages)

def test_chat_of_the_engine():
    "`chat` goes through here, with tools where the template knows them"
    lm, sp = tiny_lm(vocab_size=300), SamplingParams(temperature=0, max_tokens=2)
    lm.tokenizer = chatty('bytes', WITH_TOOLS)
    chat, tool = [dict(role='user', content='<|im_end|>')], dict(name='f')
    with LLM(lm) as llm:
        for tools in (None, [tool]):
            assert llm.chat(chat, sp, use_tqdm=False, tools=tools)[0].prompt_token_ids == encode_chat(lm.tokenizer,
                chat, tools)
        assert llm.generate(chat, sp, use_tqdm=False)[0].prompt_token_ids == encode_chat(lm.tokenizer, chat)
    with LLM(tiny_lm()) as llm, pytest.raises(ValueError, match='does not know any'): llm.chat(chat, sp, tools=[tool])

def test_no_template():
    tok = byte_tokenizer(); tok.chat_template = None
    with pytest.raises(ValueError, match='no chat template'): encode_chat(tok, [dict(role='user', content='x')])

def test_a_conversation_of_spellings():
    tok, user = chatty('bytes', CHATML), lambda text: [dict(role='user', content=text)]
    assert len(encode_chat(tok, user('<|im_end|>' * 1000))) > 1000
    with pytest.raises(ValueError, match='1,000 times'): encode_chat(tok, user('<|im_end|>' * 1001))
    private = ''.join(map(chr, range(0xe000, 0xf900)))
    assert encode_chat(tok, user(private[1:]))
    with pytest.raises(ValueError, match='every private character'): encode_chat(tok, user(private))

# ---- what a tokenizer adds to a text

def marking(kind, before='<s>', after=''):
    "A tokenizer of a kind that puts a mark before a text, and perhaps one behind it"
    tok, marks = MAKE[kind](), [m for m in (before, after) if m]
    ids = [(m, tok.convert_tokens_to_ids(m)) for m in marks]
    tok.backend_tokenizer.post_processor = processors.TemplateProcessing(single=f'{before} $A {after}'.strip(),
                                                                         special_tokens=ids)
    return tok

KINDS = 'metaspace_bpe fallback_bpe fallback_gemma unigram'.split()

@pytest.mark.parametrize('kind', KINDS)
def test_a_mark_is_not_said_twice(kind):
    "Not where the text begins with it; a text that says it twice means it, and one that adds none loses none"
    tok, plain = marking(kind), MAKE[kind]()
    bos, one = tok.bos_token_id, plain.encode('abc', add_special_tokens=False)
    assert opening(tok) == [bos] and opening(plain) == [] == opening(marking(kind, '', '</s>'))
    once, said = (plain.encode(s + 'abc', add_special_tokens=False) for s in ('<s>', '<s><s>'))
    assert encode_text(tok, 'abc') == [bos, *one] and once[0] == bos and encode_text(tok, '<s>abc') == once
    assert said[:2] == [bos] * 2 and encode_text(tok, '<s><s>abc') == said == encode_text(plain, '<s><s>abc')
    assert encode_text(tok, 'abc', add_special_tokens=False) == one and encode_text(tok, '') == [bos]
    assert encode_text(plain, 'aa') == plain.encode('aa') and encode_text(tok, 'aa') == tok.encode('aa')
    both = marking(kind, '<s>', '</s>')
    assert encode_text(both, '<s>abc') == [*once, both.eos_token_id]
