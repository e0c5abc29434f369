"Situations that engines have stumbled over; each is followed by silence and by a request that is served as ever"
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from cbatch import CapacityError, SamplingParams
from cbatch.model import CausalLM, tiny_lm
from cbatch.token_loop import generate_ref
from ask import sp
from harness import quiet

NEXT = [9, 8, 7]
def solo(tiny, prompt, params): return generate_ref(tiny, prompt, params)
def one(llm, prompt, params): return llm.generate([prompt], params, use_tqdm=False)[0].outputs[0]

def ends_well(llm, tiny):
    quiet(llm)
    assert one(llm, NEXT, sp()).token_ids == solo(tiny, NEXT, sp()).token_ids
    quiet(llm)

@pytest.fixture
def scripted(engine, tiny, monkeypatch):
    """An engine whose model says what it is told to, then end-of-sequence for ever.
    One byte a token, or one token of a list."""
    def make(script, **config):
        llm = engine(num_blocks=200, **config)
        says = {tuple(llm.encode(p)): list(s.encode()) if isinstance(s, str) else s for p, s in script.items()}
        def execute(plan):
            out = run(plan)
            for i in out.sampled:
                r = llm.requests[i].request
                if (told := says.get(tuple(r.prompt_ids))) is not None:
                    out.sampled[i] = told[len(r.output_ids):][:1] or [256]
            return out
        run = llm.execute
        monkeypatch.setattr(llm, 'execute', execute)
        return llm
    return make

def told(llm, prompt, params):
    "Streamed and unstreamed; they must agree"
    pieces, whole = list(llm.stream(prompt, params)), one(llm, prompt, params)
    assert ''.join(pieces) == whole.text and all(pieces)
    return pieces, whole

# 1
def test_a_prompt_larger_than_the_pool(engine, tiny):
    "1,002 tokens fit the model's 1,024 positions, but not 49 blocks of 16: refused at once, the next one is served"
    llm = engine(block_size=16, num_blocks=49, max_num_batched_tokens=512)
    with pytest.raises(CapacityError): llm.add([3] * 1002, sp(max_tokens=2))
    # asked for more than there is
    with pytest.warns(UserWarning, match='784'): wide = engine(block_size=16, num_blocks=49, max_model_len=1024)
    with pytest.raises(CapacityError, match='pool of 784'): wide.add([3] * 1002, sp(max_tokens=2))
    for e in (llm, wide):
        assert not e.has_unfinished
        assert one(e, list(range(10)), sp()).token_ids == solo(tiny, list(range(10)), sp()).token_ids
        ends_well(e, tiny)

# 2
@pytest.mark.parametrize('more,room', [(-1, 1), (0, 0), (1, 0)])
@pytest.mark.parametrize('max_tokens', [1, None])
def test_a_prompt_as_long_as_the_context(engine, tiny, more, room, max_tokens):
    "One token below the context's length there is room for one token; at the length and above it there is none"
    llm, n = engine(max_model_len=40), 40 + more
    llm.add(NEXT, sp(), request_id='mate'); llm.step()
    if room:
        c = one(llm, [5] * n, sp(max_tokens=max_tokens))
        assert (c.token_ids, c.finish_reason) == (solo(tiny, [5] * n, sp(max_tokens=1)).token_ids, 'length')
    else:
        with pytest.raises(CapacityError): llm.add([5] * n, sp(max_tokens=max_tokens))
    with pytest.raises(CapacityError): llm.add([5] * n, sp(max_tokens=2))
    while llm.has_unfinished or llm.unclaimed: last = llm.step()[-1]
    assert last.outputs[0].token_ids == solo(tiny, NEXT, sp()).token_ids
    ends_well(llm, tiny)

# 3
def test_one_request_and_a_pool_of_two_blocks(engine, tiny):
    "30 tokens of prompt, room for 32: 64 more are refused; what fits is computed and nobody preempts himself"
    llm = engine(block_size=16, num_blocks=2)
    with pytest.raises(CapacityError): llm.add([4] * 30, sp(max_tokens=64))
    for max_tokens, n in ((2, 2), (None, 2)):
        c = one(llm, [4] * 30, sp(max_tokens=max_tokens))
        assert (c.finish_reason, c.token_ids) == ('length', solo(tiny, [4] * 30, sp(max_tokens=n)).token_ids)
    assert llm.metrics['num_preemptions'] == 0
    ends_well(llm, tiny)

# 9
def test_the_same_id_twice(engine, tiny):
    "While its owner lives, an id is taken, whether he waits or runs; afterwards it may be used again"
    llm = engine(max_num_seqs=1)
    llm.add(NEXT, sp(), request_id='x'); llm.add(NEXT, sp(), request_id='y')
    for _ in range(3):
        for i in 'xy':
            with pytest.raises(ValueError, match='in use'): llm.add([1], sp(), request_id=i)
        llm.step()
    outs = []
    while llm.has_unfinished: outs += [o for o in llm.step() if o.finished]
    assert [(o.request_id, o.outputs[0].token_ids) for o in outs] == [(i, solo(tiny, NEXT, sp()).token_ids)
        for i in 'xy']
    assert llm.add([1], sp(), request_id='x') == 'x' and llm.abort('x')
    ends_well(llm, tiny)

# 11
def test_stop_strings_over_several_tokens(scripted, tiny):
    "The text ends before the stop string, wherever the tokens split it; what was held back in vain comes out"
    abc, paris = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ', ' the city of Paris, of course.'
    llm = scripted({'abc': abc, 'The capital of France is': paris})
    for stop, text, which in [(['DEFGHIJ'], 'ABC', 'DEFGHIJ'), (['DEFX', 'DEFGY'], abc, None),
                              (['DEFGHIJ', 'DEF'], 'ABC', 'DEF'), (['EFG', 'DEFGHIJ'], 'ABCD', 'EFG'),
                              (['YZ!', 'Z?'], abc, None), (['ABCDEFG'], '', 'ABCDEFG'), (['Z'], abc[:-1], 'Z'),
                              (['CDE', 'BCDEF', 'ABX'], 'AB', 'CDE')]:
        pieces, c = told(llm, 'abc', sp(max_tokens=26, stop=stop))
        assert (c.text, c.stop_reason, c.finish_reason) == (text, which, 'stop' if which else 'length')
    assert told(llm, 'abc', sp(max_tokens=26, stop=['DEF'], include_stop_str_in_output=True))[1].text == 'ABCDEF'
    pieces, c = told(llm, 'The capital of France is', sp(max_tokens=40, stop='Pari'))
    assert c.text == ' the city of ' and len(c.token_ids) == len(' the city of Pari')
    assert [p for p in told(llm, 'abc', sp(max_tokens=26, stop=['DEX']))[0]] == ['A', 'B', 'C', 'DEF',
        *'GHIJKLMNOPQRSTUVWXYZ']
    ends_well(llm, tiny)

# 12
@pytest.mark.parametrize('text', ['👨‍👩‍👧‍👦!', '안녕하세요 세계', 'e\u0301le\u0300ve n\u0303', '🇰🇷🏳️‍🌈'])
def test_characters_over_several_tokens(scripted, tiny, text):
    "Pieces are whole characters; only a cut inside one shows that something is missing"
    llm = scripted({'p': text})
    raw = text.encode()
    pieces, c = told(llm, 'p', sp(max_tokens=len(raw)))
    assert ''.join(pieces) == text and len(pieces) == len(text)
    for n in range(1, len(raw)):
        pieces, c = told(llm, 'p', sp(max_tokens=n))
        try: want = raw[:n].decode()
        except UnicodeDecodeError as e: want = raw[:e.start].decode() + '\ufffd'
        assert c.text.rstrip('\ufffd') == want.rstrip('\ufffd') and ('\ufffd' in c.text) == ('\ufffd' in want)
        assert not any('\ufffd' in p for p in pieces[:-1])
    ends_well(llm, tiny)

# 13
def test_four_samples(engine, tiny):
    "All differ; the set repeats; sample i depends neither on n nor on its mates"
    params = dict(seed=7, temperature=1, max_tokens=6)
    def ask(n, *mates):
        llm = engine()
        outs = llm.generate([[1, 2, 3], *mates], [sp(n=n, **params), *[sp(temperature=.5, seed=1)] * len(mates)],
                            use_tqdm=False)
        ends_well(llm, tiny)
        return [c.token_ids for c in outs[0].outputs]
    four = ask(4)
    assert len(set(map(tuple, four))) == 4 and ask(4) == four and ask(2) == four[:2] and ask(4, [1, 2, 3],
        [9] * 20) == four and ask(1) == four[:1]
    assert four == [generate_ref(tiny, [1, 2, 3], sp(**params), sample_index=i).token_ids for i in range(4)]

# 14
@pytest.mark.parametrize('prompt,kw', [([], {}), ('', {}), ([1], dict(logit_bias={258: 5.})),
                                       ([1], dict(logit_bias={10**6: 5.})), ([1], dict(stop_token_ids=[258])),
                                       ([258], {})], ids=repr)
def test_nothing_to_start_from_and_ids_that_do_not_exist(engine, tiny, prompt, kw):
    llm = engine()
    with pytest.raises(ValueError, match='empty prompt|vocabulary of 258'):
        llm.generate([prompt], sp(**kw), use_tqdm=False)
    ends_well(llm, tiny)

def test_the_last_id_of_the_vocabulary_can_be_biased(engine, tiny):
    llm = engine()
    assert one(llm, [1], sp(logit_bias={257: 100.}, max_tokens=3)).token_ids == [257] * 3
    assert one(llm, [1], sp(logit_bias={257: 100.}, stop_token_ids=[257])).finish_reason == 'stop'
    ends_well(llm, tiny)

# 15
def test_what_stop_may_be(scripted, tiny):
    """Absent, None and an empty list are alike; a string is a list of one; an empty string is refused.
    None of them silences the end-of-sequence id."""
    llm = scripted({'p': 'one X two'})
    params = dict(temperature=0, max_tokens=30)
    answers = [told(llm, 'p', SamplingParams(**params, **kw))[1]
               for kw in ({}, dict(stop=None), dict(stop=[]), dict(stop='X'), dict(stop=['X']))]
    assert [c.text for c in answers] == ['one X two'] * 3 + ['one '] * 2 and {c.finish_reason
        for c in answers} == {'stop'}
    assert [c.stop_reason for c in answers] == [256] * 3 + ['X'] * 2
    for bad in ('', [''], ['X', '']):
        with pytest.raises(ValueError): SamplingParams(stop=bad)
    ends_well(llm, tiny)

# 16
SAYING = ' the cat sat on the mat; the  한 cat, naïvely, sat\n on  the other mat 👋 .'

def trained(kind):
    "A tokenizer that learned from one sentence: bytes below, as GPT-2's, or words that begin with a mark, as Llama's"
    tok = Tokenizer(models.BPE(unk_token=None if kind == 'bytes' else '<unk>'))
    tok.pre_tokenizer, tok.decoder = (pre_tokenizers.ByteLevel(add_prefix_space=False),
                                      decoders.ByteLevel()) if kind == 'bytes' else (pre_tokenizers.Metaspace(),
                                          decoders.Metaspace())
    tok.train_from_iterator([SAYING], trainers.BpeTrainer(vocab_size=310, min_frequency=1,
                                                          special_tokens=['</s>', '<unk>'], show_progress=False,
                                                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
                                                          if kind == 'bytes' else []))
    return PreTrainedTokenizerFast(tokenizer_object=tok, eos_token='</s>', clean_up_tokenization_spaces=False)

@pytest.mark.parametrize('kind', ['bytes', 'pieces'])
def test_streamed_is_whole(scripted, kind):
    "Also the space at the start, which the first kind keeps and the second takes for the mark of a word"
    lm = CausalLM(tiny_lm('llama', vocab_size=320).hf_model, trained(kind), kind)
    encode = lambda text: lm.tokenizer.encode(text, add_special_tokens=False)
    texts = [SAYING, 'cat', ' cat', '  the cat', 'the', ' \n']
    llm = scripted({f'{"cat " * i}mat': encode(t) for i, t in enumerate(texts)}, model=lm, max_model_len=100)
    for i, t in enumerate(texts):
        pieces, c = told(llm, f'{"cat " * i}mat', sp(max_tokens=len(encode(t))))
        assert c.text == lm.tokenizer.decode(encode(t)) and (kind == 'pieces' or c.text == t)
    assert len(told(llm, 'mat', sp(max_tokens=len(encode(SAYING))))[0]) > 10
    assert told(llm, 'cat cat mat', sp(max_tokens=20))[1].text.startswith(' cat' if kind == 'bytes' else 'cat')
    quiet(llm)

# 17
def test_log_probabilities_with_and_without_others(engine, tiny):
    "0: each token's own alone; k: k others at most beside it; None: none at all; what can't be meant is refused"
    llm = engine()
    outs = llm.generate([NEXT] * 4, [sp(logprobs=k, prompt_logprobs=k) for k in (None, 0, 3, 20)], use_tqdm=False)
    ids = solo(tiny, NEXT, sp()).token_ids
    for o, k in zip(outs, (None, 0, 3, 20)):
        c = o.outputs[0]
        assert c.token_ids == ids
        if k is None: assert (c.logprobs, c.cumulative_logprob, o.prompt_logprobs) == (None, None, None); continue
        assert o.prompt_logprobs[0] is None
        for scores, tokens in (c.logprobs, ids), (o.prompt_logprobs[1:], NEXT[1:]):
            assert [next(iter(d)) for d in scores] == tokens and all(len(d) == k + (d[t].rank > k) if k
                else len(d) == 1 for d, t in zip(scores, tokens))
    for kw in (dict(logprobs=-1), dict(logprobs=21), dict(logprobs=True), dict(logprobs=1.5), dict(prompt_logprobs=-1),
               dict(prompt_logprobs='all')):
        with pytest.raises(ValueError, match=next(iter(kw))): SamplingParams(**kw)
    ends_well(llm, tiny)

# 18, `stream_options`, is the server's alone: the engine counts tokens in every output, and knows no such option

# 19
@pytest.mark.parametrize('k', [1, 2, 5])
def test_the_last_token_allowed(scripted, engine, tiny, k):
    "At `max_tokens` a request ends by length, unless that very token is the end of the text; it ends once"
    script = [65] * (k - 1) + [256]
    llm = scripted({'p': script, 'q': [65] * 9})
    params = SamplingParams(temperature=0, max_tokens=k)
    assert one(llm, 'q', params).finish_reason == 'length'
    c = one(llm, 'p', params)
    assert (c.finish_reason, c.stop_reason, c.token_ids) == ('stop', 256, script)
    assert one(llm, 'p', sp(max_tokens=k)).finish_reason == 'length'       # ignore_eos
    # the last token allowed completes a stop string
    c = one(llm, 'q', sp(max_tokens=k, stop='A' * k))
    assert (c.finish_reason, c.stop_reason, c.text) == ('stop', 'A' * k, '')
    llm.add('p', params, request_id='x')
    reasons = [o.outputs[0].finish_reason for _ in range(k + 3) for o in llm.step()]
    assert reasons == [None] * (k - 1) + ['stop']
    ends_well(llm, tiny)
