"The door: what comes in is made into Python's own values or refused with words that teach; results are nobody else's"
import copy, errno, json, math, os, pickle, subprocess, sys, warnings
from dataclasses import asdict, replace
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path
import numpy as np, pytest, torch
from cbatch import LLM, EngineConfig, SamplingParams, load_model
from cbatch.kernels import cpu, lean
from cbatch.loading import ModelNotFound
from cbatch.model import tiny_lm
from cbatch.params import Fixed, ParamError, check_number, check_whole, near, plain
from cbatch.catalog import get_policy
from cbatch.policies import Dynamic
from cbatch.results import refuse_folders, write_record
from cbatch.sampling import bad_word_ids
from cbatch.token_loop import generate_ref
from cbatch.trace import Trace
from cbatch.trace_format import written
from cbatch.worker import Limits
from ask import sp

PYTHONS = {int, float, bool, str, tuple, type(None), Fixed}

class Five(IntEnum): five = 5
class Name(str):
    def __repr__(self): return 'not what it says'
class Choice(str, Enum): swap = 'swap'

def made(lm, **more): return LLM(lm, **dict(num_blocks=64, block_size=4, check=True) | more)

# --- Python's own values

@pytest.mark.parametrize('x,want', [(np.float64(.5), .5), (np.float32(.5), .5), (np.int64(3), 3), (np.uint8(3), 3),
                                    (Five.five, 5),
    (Fraction(1, 2), .5), (torch.tensor(.5), .5), (torch.tensor(2), 2), (np.array(2.), 2.), (np.longdouble(.5), .5)])
def test_a_number_is_made_pythons_own(x, want):
    got = check_number('x', x, 0, 100, 'a number')
    assert got == want and type(got) is type(want)

@pytest.mark.parametrize('x', [math.nan, np.float32('nan'), math.inf, 10**400, Fraction(10**400), True, np.bool_(True),
                               '1', None, 1j,
                               torch.ones(2), np.ones(2), b'1'], ids=repr)
def test_what_is_no_number_is_refused(x):
    with pytest.raises(ParamError, match='^x='): check_number('x', x, 0, 1e9, 'a number')
    with pytest.raises(ParamError, match='^x='): check_whole('x', x, 0, 'an integer')

ODD = dict(n=np.int64(2), temperature=np.float32(.5), top_p=np.float64(.5), top_k=np.int32(5), min_p=torch.tensor(.25),
           seed=Five.five,
           max_tokens=np.uint8(3), min_tokens=torch.tensor(1), stop=[Name('ab'),
               np.str_('c')], stop_token_ids=np.array([7, 9]),
           ignore_eos=np.bool_(True), repetition_penalty=Fraction(3,
               2), presence_penalty=np.float16(.5), frequency_penalty=np.float32(.5),
           logit_bias={np.int64(4): np.float32(2),
                       Five.five: 1}, bad_words=(Name('x'),), allowed_token_ids=np.arange(200),
           logprobs=np.int8(2), prompt_logprobs=np.int64(0), skip_special_tokens=np.bool_(False),
           include_stop_str_in_output=torch.tensor(True))

def test_every_field_of_sampling_params():
    assert {*ODD} == {*SamplingParams.__dataclass_fields__}
    p = SamplingParams(**ODD)
    for k, v in vars(p).items():
        assert type(v) in PYTHONS, k
        if isinstance(v, tuple): assert {type(x) for x in v} <= PYTHONS, k
    assert {(type(i), type(b)) for i, b in p.logit_bias.items()} <= {(int, float), (int, int)}
    assert p.stop == ('ab', 'c') and repr(p.stop) == "('ab', 'c')"
    assert replace(p) == p == pickle.loads(pickle.dumps(p)) == copy.deepcopy(p)
    json.dumps(asdict(p))

def test_every_field_of_a_configuration():
    odd = dict(dtype=torch.bfloat16, device=np.str_('cpu'), policy=Name('static'), max_num_seqs=np.int64(3),
               block_size=np.uint8(8),
               max_num_batched_tokens=torch.tensor(64), max_model_len=Five.five,
               kv_cache_mb=np.float32(1.5),
               gpu_memory_utilization=Fraction(1,
                   2), preemption=Choice.swap, victim=np.str_('youngest'), swap_mb=np.int64(3),
               watermark=np.float64(.1), reserve_max=np.bool_(True), force_preempt={Name('r1'): np.int64(2)},
               trace=np.int64(50),
               seed=np.int64(5), load_format=Name('auto'), lean=np.bool_(False))
    c = EngineConfig(**odd)
    for k, v in vars(c).items(): assert type(v) in PYTHONS, k
    assert type(EngineConfig(num_blocks=np.int32(40)).num_blocks) is int
    assert (c.dtype, c.preemption, c.force_preempt) == ('bfloat16', 'swap', {'r1': 2})
    assert {type(x) for x in (*c.force_preempt, *c.force_preempt.values())} == {str, int}
    assert type(EngineConfig(trace=np.bool_(True)).trace) is bool

def test_requests_limits_and_policies_keep_pythons_own(tiny):
    llm = made(tiny)
    a = llm.prepare([np.int64(5), Five.five], sp(), request_id=Name('mine'), arrival=np.float64(1),
                    priority=np.int64(2),
                    user=np.str_('me'), deadline=np.float32(9), cache_salt=Name('s'), use_cache=np.bool_(False))
    said = a.request_id, a.arrival, a.priority, a.user, a.deadline, a.cache_salt, a.use_cache, *a.prompt_ids
    assert [type(x) for x in said] == [str, float, int, str, float, str, bool, int, int]
    assert type(llm.prepare(Name('abc'), sp()).prompt) is str
    assert type(Limits(max_waiting=np.int64(3)).max_waiting) is int and type(Dynamic(np.float32(.5)).window) is float

@pytest.mark.parametrize('native', [True, False])
def test_an_engine_of_numpy_scalars_is_an_engine(tiny, tmp_path, monkeypatch, native):
    if not native: monkeypatch.setenv('CBATCH_NATIVE', '0')
    llm = made(tiny, num_blocks=np.int64(60), block_size=np.int64(4), max_num_seqs=np.int64(4))
    odd = SamplingParams(temperature=np.float64(0), top_k=np.int64(5), max_tokens=np.int32(4),
                         logit_bias={np.int64(42): np.float32(3)})
    same = SamplingParams(temperature=0, top_k=5, max_tokens=4, logit_bias={42: 3})
    want = [o.outputs[0].token_ids for o in llm.generate([[1, 2, 3]], same, use_tqdm=False)]
    assert [o.outputs[0].token_ids for o in llm.generate([[1, 2, 3]], odd, use_tqdm=False)] == want
    llm.trace.to_jsonl(tmp_path/'t.jsonl')
    assert len(Trace.load(tmp_path/'t.jsonl')) == len(llm.trace)

# --- texts that are none

@pytest.mark.parametrize('kw', [dict(stop='a\ud800'), dict(stop=['\udfff']), dict(bad_words=['x\ud812'])])
def test_half_a_character_in_params(kw):
    with pytest.raises(ParamError, match='lone surrogate') as e: SamplingParams(**kw)
    assert e.value.param == next(iter(kw))

@pytest.mark.parametrize('kw', [dict(request_id='\ud800'), dict(user='a\udc00'), dict(cache_salt='\ud9ff'),
                                dict(prompt='b\ud800'),
                                dict(prompt=[dict(role='user', content='\ud800')])])
def test_half_a_character_in_a_request(tiny, kw):
    llm = made(tiny)
    with pytest.raises(ValueError, match='lone surrogate'): llm.add(**dict(prompt=[1, 2]) | kw)
    assert not llm.has_unfinished

@pytest.mark.parametrize('word', ['\n', ' ', '\t', '\n\n'])
def test_blanks_can_be_forbidden(tiny, word):
    "Even where the model wants nothing else"
    ids = tiny.tokenizer.encode(word)
    assert bad_word_ids((word,), tiny.tokenizer, tiny.vocab_size) == (tuple(ids),)
    bias = dict.fromkeys(ids, 100.)
    o = made(tiny).generate([[1, 2]], sp(8, bad_words=[word], logit_bias=bias), use_tqdm=False)[0]
    assert word not in o.outputs[0].text and (len(ids) > 1 or ids[0] not in o.outputs[0].token_ids)

def test_a_blank_behind_a_letter():
    "A tokenizer that marks beginnings spells a newline in two ways"
    class Marked:
        def encode(self, text,
            add_special_tokens=False): return [1] * (not text.startswith('a')) + [9 if c == '\n' else 5 for c in text]
    assert bad_word_ids(('\n',), Marked(), 10) == ((1, 9), (9,))

# --- ids that no logit belongs to

@pytest.mark.parametrize('said,want', [(300, set()), ([256, 300], {256}), ([-1, 7, None, True], {7}), (-1, set()),
                                       (True, set()),
                                       (torch.tensor([3, 258]), {3}), ((5, '6', 2.), {5}), ([None], set()), (257,
                                           {257})])
def test_end_ids_outside_the_logits_are_dropped(said, want):
    lm = tiny_lm('llama', seed=1)
    lm.hf_model.generation_config.eos_token_id = said
    assert lm.eos_ids == want and all(type(i) is int for i in lm.eos_ids)

@pytest.mark.parametrize('eos', [258, 515, [256, 400], -1])
def test_end_ids_outside_the_logits_disturb_nobody(monkeypatch, eos):
    monkeypatch.setenv('CBATCH_NATIVE', '0')
    lm = tiny_lm('llama', seed=1)
    lm.hf_model.generation_config.eos_token_id = eos
    held = sp(5, min_tokens=5, ignore_eos=False)
    params = [sp(5, logit_bias={i: 100}) for i in (42, 257, 0)]       # where a row's end would spill into its neighbour
    for order in (lambda xs: xs, lambda xs: xs[::-1]):
        llm = made(lm)
        outs = llm.generate(order([[1, 2, 3]] + [[5, 6, 7]] * 3), order([held, *params]), use_tqdm=False)
        got = order([o.outputs[0].token_ids for o in outs])
        assert got[1:] == [[42] * 5, [257] * 5, [0] * 5] and len(got[0]) == 5

# --- results are nobody else's

def spoil(x):
    "Change whatever can be changed in a result"
    if isinstance(x, list):
        for y in x: spoil(y)
        x += x or [7]; x.reverse()
    elif isinstance(x, Fixed):
        for change in (x.clear, x.popitem, lambda: x.update(a=1), lambda: x.setdefault(3, 4)):
            with pytest.raises(TypeError, match='change a copy'): change()
    elif isinstance(x, dict):
        for y in x.values(): spoil(y)
        x['odd'] = 1
    elif hasattr(x, '__dict__') and type(x).__module__ == 'cbatch.core':
        for y in vars(x).values(): spoil(y)

@pytest.mark.parametrize('kw', [{}, dict(n=3, temperature=1., seed=1), dict(logprobs=2, prompt_logprobs=1),
                                dict(stop='\x07')], ids=repr)
def test_a_spoilt_report_changes_nothing(tiny, kw):
    def run(touch):
        llm, out, given = made(tiny, max_num_batched_tokens=4), [], [1, 2, 3, 4, 5, 6, 7]
        llm.add(given, SamplingParams(**dict(temperature=0, max_tokens=9, ignore_eos=True) | kw), request_id='a')
        if touch: given.clear()
        while llm.has_unfinished:
            for o in llm.step():
                out.append(repr(asdict(replace(o, metrics=None))))
                if touch: spoil(o); spoil(llm.metrics)
        return out
    assert run(True) == run(False)

def test_the_callers_dict_is_his_own(tiny):
    bias = {42: 100.}
    p = sp(6, logit_bias=bias)
    llm = made(tiny)
    llm.add([1, 2], p)
    llm.step()
    bias[42], bias['x'] = -100., None
    with pytest.raises(TypeError, match='change a copy'): p.logit_bias[42] = 0
    while llm.has_unfinished: outs = llm.step()
    assert outs[0].outputs[0].token_ids == [42] * 6

def test_a_fixed_dict_is_a_dict():
    d = Fixed({1: 2})
    assert d == {1: 2} and json.dumps(d) == '{"1": 2}' and d | {3: 4} == {1: 2, 3: 4}
    assert type(copy.deepcopy(d)) is type(copy.copy(d)) is type(pickle.loads(pickle.dumps(d))) is Fixed
    with pytest.raises(TypeError): d |= {3: 4}
    with pytest.raises(TypeError): del d[1]

# --- files

def no_room(f, *args): raise OSError(errno.ENOSPC, 'No space left on device')

def test_a_failure_leaves_the_old_file(tiny, tmp_path, monkeypatch):
    llm, path = made(tiny), tmp_path/'t.jsonl'
    llm.generate([[1, 2]], sp(3), use_tqdm=False)
    llm.trace.to_jsonl(path)
    old = path.read_bytes()
    llm.trace.facts['policy'] = object()              # no JSON
    with pytest.raises((TypeError, ValueError)): llm.trace.to_jsonl(path)
    with pytest.raises((TypeError, ValueError)): write_record(path, machine={}, odd=object())
    with pytest.raises(OSError, match='t.jsonl'), written(path) as f: f.write('half'); no_room(f)
    assert path.read_bytes() == old and os.listdir(tmp_path) == ['t.jsonl']

def test_an_error_names_the_file(tmp_path):
    for bad in (tmp_path, tmp_path/'none'/'x.json', Path('/proc/none/x')):
        with pytest.raises(OSError, match=str(bad)), written(bad) as f: f.write('x')
    with pytest.raises(ValueError, match='--record .*: is a folder'): refuse_folders(record=str(tmp_path))

@pytest.mark.skipif(os.name == 'nt', reason='links and pipes of Unix')
def test_links_modes_and_devices_stay_what_they_are(tmp_path):
    real, link = tmp_path/'real', tmp_path/'link'
    real.write_text('old'); real.chmod(0o640); link.symlink_to(real)
    with written(link) as f: f.write('new')
    assert link.is_symlink() and real.read_text() == 'new' and real.stat().st_mode & 0o777 == 0o640
    with written('/dev/null') as f: f.write('x')
    assert not Path('/dev/null').is_file()

def test_numpy_in_a_record(tmp_path):
    write_record(tmp_path/'r.json', machine={}, took=np.float64(.5), n=np.int64(3), ok=np.bool_(True))
    assert {k: v for k, v in json.loads((tmp_path/'r.json').read_text()).items() if k in ('took', 'n',
        'ok')} == dict(took=.5, n=3, ok=True)

def test_a_model_that_can_not_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    lm = tiny_lm('llama', seed=1)
    lm.save(tmp_path/'m')
    before = {p.name: p.read_bytes() for p in (tmp_path/'m').iterdir()}
    monkeypatch.setattr(lm.tokenizer, 'save_pretrained', no_room)
    with pytest.raises(OSError, match='m: the model could not be written'): replace(tiny_lm('llama', seed=2),
        tokenizer=lm.tokenizer).save(tmp_path/'m')
    assert {p.name: p.read_bytes() for p in (tmp_path/'m').iterdir()} == before

# --- wrong calls

MESSAGE = dict(role='user', content='What is 2+2?')

@pytest.mark.parametrize('messages', ['What is 2+2?', ['What is 2+2?'], MESSAGE, 3, None, [MESSAGE, 'x'], [[MESSAGE],
    MESSAGE], [[]], [3],
                                      b'x', {1, 2}, [[MESSAGE], 'What is 2+2?'], ('a', 'b'), np.array([1])], ids=repr)
def test_chat_shows_how_it_is_called(tiny, messages):
    llm = made(tiny)
    with pytest.raises(ParamError, match=r"llm\.chat\(\[dict\(role='user', content=") as e: llm.chat(messages, sp(),
        use_tqdm=False)
    assert e.value.param == 'messages' and not llm.has_unfinished
    if messages in ('What is 2+2?', MESSAGE): assert "content='What is 2+2?'" in str(e.value)

def test_chats_that_are_some(tiny):
    llm = made(tiny)
    counts = [len(llm.chat(m, sp(2), use_tqdm=False)) for m in ([MESSAGE], (MESSAGE,), [[MESSAGE], (MESSAGE, MESSAGE)],
        [])]
    assert counts == [1, 1, 2, 0]

@pytest.mark.parametrize('message,says', [({}, 'role'), (dict(role='user'), 'content'), (dict(role='nobody',
    content='x'), 'role'),
    (dict(role='user', content=[dict(type='text', text='x')]), 'join the texts'), (dict(role='user',
        content='x' * 9999, odd=1), 'odd')])
def test_a_wrong_message_is_named_in_short(tiny, message, says):
    with pytest.raises(ValueError, match=says) as e: made(tiny).chat([message], sp())
    assert len(str(e.value)) < 300

@pytest.mark.parametrize('prompt,says', [(np.array([1, 2]), 'tolist'), (torch.tensor([1, 2]), 'tolist'), (b'ab',
    'decode'),
                                         (MESSAGE, "list with it"), (dict(input_ids=[1, 2]), 'input_ids')], ids=repr)
def test_a_prompt_that_is_almost_one(tiny, prompt, says):
    llm = made(tiny)
    for call in (llm.add, llm.stream, llm.encode, llm.generate, llm.prepare):
        with pytest.raises(ParamError, match=says): call(prompt)
    with pytest.raises(ParamError, match='list of prompts'): llm.add(['one', 'two'])

@pytest.mark.parametrize('make,says', [
    (lambda: SamplingParams(temprature=0), 'temperature'), (lambda: SamplingParams(max_new_tokens=5), 'max_tokens'),
    (lambda: SamplingParams(num_return_sequences=2), 'mean n'), (lambda: SamplingParams(do_sample=False),
        'temperature'),
    (lambda: SamplingParams(logit_biass={}), 'logit_bias'), (lambda: EngineConfig(max_num_seq=8), 'max_num_seqs'),
    (lambda: EngineConfig(torch_dtype='auto'), 'mean dtype'), (lambda: LLM(None, max_batch_size=4), 'max_num_seqs'),
    (lambda: LLM(None, policy='dynamik'), 'dynamic'), (lambda: get_policy('statik'), 'static'),
    (lambda: LLM(None, enforce_eager=True), 'cuda_graphs')])
def test_a_wrong_name_meets_the_right_one(make, says):
    with pytest.raises(ParamError, match=f'(did you mean|: that is).*{says}|{says}'): make()
    assert near('qqqq', ['temperature']) == ''

@pytest.mark.parametrize('prompt,says', [
    ([dict(prompt_token_ids=[1, 2])] * 2, r"p\['prompt_token_ids'\] for p"), ([dict(prompt='hi')], r"p\['prompt'\]"),
    (dict(prompt_token_ids=[1, 2]), 'its prompt_token_ids'), ([1, 2.5, 3], r'prompt\[1\] is 2.5'),
    ([1, 2, True], r'prompt\[2\] is True'), ([1, 2, None, 'x'], r'prompt\[2\] is None'),
    ([1, 2, 999], r'prompt\[2\]: token id 999'), ([1, -3], r'prompt\[1\]: token id -3'),
    ([5, 10**5000], r'prompt\[1\]: token id \(int\)')], ids=lambda x: repr(x)[:30] if x != [5, 10**5000] else 'huge')
def test_a_prompt_is_told_what_is_wrong_in_it(tiny, prompt, says):
    llm = made(tiny)
    for call in (llm.add, llm.generate):
        with pytest.raises(ParamError, match=says): call(prompt)
    assert not llm.has_unfinished

@pytest.mark.parametrize('name', ['max_tokens', 'top_k', 'min_tokens', 'seed'])
def test_a_limit_is_told(name):
    for n in (2**63, 10**5000):
        with pytest.raises(ParamError, match=rf'^{name}=.*less than 2\*\*63'): SamplingParams(**{name: n})
    with pytest.raises(ParamError, match='max_num_seqs=.*less than 2'): EngineConfig(max_num_seqs=2**64)
    with pytest.raises(ParamError, match='temperature=') as e: SamplingParams(temperature=10**5000)
    assert e.value.param == 'temperature'

def test_params_are_keys():
    a, b = (SamplingParams(logit_bias={3: x, 5: 1}, stop=['a']) for x in (2, 2.))
    assert hash(a) == hash(b) and {a: 1}[b] == 1 and {Fixed({1: 2}): 3}[Fixed({1: 2})] == 3
    assert len({a, SamplingParams(logit_bias={3: 1}), SamplingParams()}) == 3
    assert hash(EngineConfig(force_preempt={'a': 1})) == hash(EngineConfig(force_preempt={'a': 1}))

def test_names_of_a_call_beside_its_wishes(tiny):
    llm = made(tiny)
    for params in (None, sp(3)):
        for call, bad, good in ((llm.generate, 'use_tqmd', 'use_tqdm'), (llm.add, 'request_di', 'request_id'),
                                (llm.chat, 'use_tdqm', 'use_tqdm'), (llm.stream, 'max_tokes', 'max_tokens')):
            with pytest.raises(ParamError, match=f'did you mean {good}') as e:
                call([MESSAGE] if call == llm.chat else [1], params, **{bad: 1})
            assert e.value.param == bad
    with pytest.raises(ParamError, match='deadline=1: is for LLM.add'): llm.generate([1], deadline=1)

def test_the_pool_is_said_once(tiny):
    with pytest.raises(ParamError, match='num_blocks=9 and kv_cache_mb=2.*give one') as e:
        made(tiny, num_blocks=9, kv_cache_mb=2)
    assert e.value.param == 'kv_cache_mb'

@pytest.mark.parametrize('copier', [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_is_not_copied(tiny, copier):
    llm = made(tiny)
    with pytest.raises(TypeError, match='make another'): copier(llm)

def test_wishes_by_name(tiny):
    llm = made(tiny)
    want = generate_ref(tiny, [1, 2, 3], sp(5)).token_ids
    kw = dict(temperature=0, max_tokens=5, ignore_eos=True)
    assert llm.generate([1, 2, 3], use_tqdm=False, **kw)[0].outputs[0].token_ids == want
    llm.add([1, 2, 3], **kw, priority=1)
    while llm.has_unfinished: outs = llm.step()
    assert outs[0].outputs[0].token_ids == want
    assert ''.join(llm.stream('abc', **kw)) == llm.generate('abc', sp(5), use_tqdm=False)[0].outputs[0].text
    assert len(llm.chat([MESSAGE], max_tokens=2, use_tqdm=False)) == 1
    for call in (llm.generate, llm.add, llm.stream):
        with pytest.raises(ParamError, match='beside params'): call([1], sp(), max_tokens=5)
        with pytest.raises(ParamError, match='did you mean max_tokens'): call([1], max_new_tokens=5)
    assert not llm.has_unfinished

def test_the_trace_says_who_was_there(tiny):
    llm = made(tiny)
    with pytest.raises(ValueError, match='there are none'): llm.trace.why('r999')
    llm.add([1, 2], sp(3))
    assert 'no step since' in llm.trace.why('r0')[0]
    llm.generate([[1]] * 3, sp(2), use_tqdm=False)
    with pytest.raises(ValueError, match="no request 'xx'.*they are r0 to r3"): llm.trace.why('xx')

def test_the_trace_names_the_answers_to_one_prompt(tiny):
    llm = made(tiny)
    name = llm.add([1, 2], sp(3, n=3))
    for _ in range(2):                      # before a step has seen them, and after
        with pytest.raises(ValueError, match=f"its answers are {name}/0, {name}/1, {name}/2"): llm.trace.why(name)
        llm.step()

@pytest.mark.parametrize('path', [5, 1.5, None, b'x', True])
def test_what_is_no_path(tiny, path):
    "Not even the number of an open file: nothing is written into that"
    llm = made(tiny)
    llm.generate([1], sp(1), use_tqdm=False)
    for call in (llm.trace.to_jsonl, llm.trace.to_chrome, Trace.load):
        with pytest.raises(ParamError, match='^path=.*must be the path'): call(path)

def test_an_engine_says_which_way_it_goes(tiny, monkeypatch):
    "And warns if a setting took a faster one away, unless the model is a toy"
    monkeypatch.setenv('CBATCH_NATIVE', '1')
    for n in (cpu.ATTENTION, lean.STEP): n.__dict__.pop('lib', None)
    if not cpu.ready(cpu.ATTENTION): pytest.skip('no C++ compiler')
    large = tiny_lm('llama', vocab_size=90_000).to(torch.bfloat16, 'cpu')
    with pytest.warns(UserWarning, match='block_size=8.*going on with torch.*set block_size=16'):
        llm = made(large, block_size=8)
    assert 'bfloat16 on cpu, backend torch, policy' in repr(llm) and 'backend torch<' in llm._repr_html_()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert 'backend cpu, lean, policy' in repr(made(large, block_size=16))
        assert 'backend cpu, policy' in repr(made(large, block_size=16, lean=False))
        assert 'backend torch' in repr(made(large, block_size=8, backend='torch'))        # asked for
        assert 'backend torch' in repr(made(tiny, block_size=4))
    for n in (cpu.ATTENTION, lean.STEP): n.__dict__.pop('lib', None)

def test_sizes_beyond_the_machine(tiny):
    for kw in (dict(num_blocks=10**12), dict(num_blocks=2**60), dict(num_blocks=64, preemption='swap', swap_mb=1e9)):
        with pytest.raises(ParamError, match=r'GB, and cpu has [\d,.]+ GB') as e: made(tiny, **kw)
        assert e.value.param == [*kw][-1]

def test_optimised_python_says_that_it_checks_nothing():
    code = """from cbatch import EngineConfig
EngineConfig()
try: EngineConfig(check=True)
except ValueError as e: print(e)"""
    out = subprocess.run([sys.executable, '-O', '-c', code], capture_output=True, text=True, check=True).stdout
    assert '-O' in out and 'check=True' in out

# --- models that are none

@pytest.fixture(scope='module')
def folder(tmp_path_factory): return Path(tiny_lm('llama', seed=3).save(tmp_path_factory.mktemp('lm')/'m'))

def test_names_that_lead_nowhere(folder, tmp_path, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    for name, says in (('SmolLM2', 'did you mean smollm2'), ('./missing', 'no such folder'), (str(tmp_path/'no'),
        'no such folder'),
                       (str(tmp_path), 'no config.json'), (str(folder/'config.json'), 'is a file'), ('x.gguf',
                           'no such file')):
        with pytest.raises(ModelNotFound, match=says): load_model(name)

def cut(path, n): path.write_bytes(path.read_bytes()[:n])

def test_weights_that_are_not_whole(folder, tmp_path):
    import shutil
    for name, n in (('short', 5000), ('empty', 0), ('header', 40)):
        shutil.copytree(folder, tmp_path/name)
        cut(tmp_path/name/'model.safetensors', n)
        with pytest.raises(ValueError, match='model.safetensors: incomplete or damaged'): load_model(str(tmp_path/name))
    shutil.copytree(folder, tmp_path/'pickled')
    (tmp_path/'pickled'/'model.safetensors').rename(tmp_path/'pickled'/'pytorch_model.bin')
    with pytest.raises(ModelNotFound, match='pickle.*(?s:.)*save_pretrained'): load_model(str(tmp_path/'pickled'))

def test_a_gguf_that_broke_off(tmp_path, monkeypatch):
    pytest.importorskip('gguf')
    from cbatch.loading import smollm2_gguf
    try: whole = smollm2_gguf()
    except ModelNotFound: pytest.skip('no gguf here')
    monkeypatch.setenv('CBATCH_CACHE', str(tmp_path/'cache'))
    with open(whole, 'rb') as f: (tmp_path/'cut.gguf').write_bytes(f.read(4_000_000))
    with pytest.raises(ValueError, match='cut.gguf: incomplete or damaged'): load_model(str(tmp_path/'cut.gguf'))
    assert not [*(tmp_path/'cache').iterdir()]
    (tmp_path/'file').touch()
    monkeypatch.setenv('CBATCH_CACHE', str(tmp_path/'file'))
    with pytest.raises(OSError, match='CBATCH_CACHE.*file'): load_model(str(tmp_path/'cut.gguf'))

# --- shown

def test_names_are_escaped_where_html_is_made(tiny):
    llm = made(replace(tiny, name='<script>alert(1)</script>'))
    for page in (llm._repr_html_(), llm.model._repr_html_(), llm.trace._repr_html_()): assert '<script' not in page
    assert '&lt;script&gt;' in llm._repr_html_()

def test_an_output_fits_a_line(tiny):
    llm = made(tiny)
    outs = llm.generate([[7] * 100, 'a long question, ' * 6], sp(40, n=2, logprobs=3), use_tqdm=False)
    for o in outs:
        text = repr(o)
        assert len(text) < 300 and o.request_id in text and '40 tokens, length' in text and '\n' not in text
