"""What is around an engine: settings of torch and numpy, the caller's own model, other threads.
None of it changes an answer, and none of it is changed."""
import random, sys, threading, warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
import numpy as np, pytest, torch
from transformers.utils import logging as hf_logging
from cbatch import LLM, SamplingParams
from cbatch.core import SCORED
from cbatch.loading import load_model
from cbatch.model import small_config, tiny_lm
from cbatch.probe import CannotServe, probe
from cbatch.twin import at_rest
from cbatch.params import EngineConfig
from cbatch.policies import Dynamic, Static
from cbatch.runner import Executor, step_bytes
from cbatch.scheduler import Policy
from cbatch.static_batching import generate_padded
from cbatch.token_loop import compare_tokens, generate_ref
from ask import sp

PROMPTS = [[7, 3, 200], list(range(40, 61)), [9] * 5]
PATHS = dict(torch=dict(backend='torch', lean=False), cpu=dict(lean=False), lean={})
DRAWN = [sp(9), sp(9, temperature=1., seed=4, top_p=.9, repetition_penalty=1.1),
         sp(9, temperature=.7, seed=1, logprobs=2)]

@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    "Torch's modules, attention in C++, the lean model; the last two are torch's where there is no compiler"
    from cbatch.kernels.cpu import ATTENTION
    from cbatch.kernels.lean import STEP
    for n in (ATTENTION, STEP): n.__dict__.pop('lib', None)
    monkeypatch.setenv('CBATCH_NATIVE', '0' if request.param == 'torch' else '1')
    yield dict(num_blocks=30, block_size=16, check=True) | PATHS[request.param]
    for n in (ATTENTION, STEP): n.__dict__.pop('lib', None)

@pytest.fixture(scope='module')
def wanted(): return {a: [generate_ref(tiny_lm(a, seed=2), p, s).token_ids for p, s in zip(PROMPTS, DRAWN)]
                      for a in ('llama', 'mixtral')}

def said(llm, prompts=PROMPTS, params=DRAWN):
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

@contextmanager
def setting(get, put, value):
    was = get()
    put(value)
    try: yield
    finally: put(was)

class Function(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, f, types, args=(), kwargs=None): return f(*args, **kwargs or {})

AROUND = {
    'inference': torch.inference_mode, 'grad': torch.enable_grad, 'no grad': torch.no_grad,
    'autocast': lambda: torch.autocast('cpu', dtype=torch.bfloat16), 'anomaly': torch.autograd.detect_anomaly,
    'device': lambda: torch.device('meta'), 'function': Function,
    'default device': lambda: setting(torch.get_default_device, torch.set_default_device, 'meta'),
    'default dtype': lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    'half dtype': lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.bfloat16),
    'deterministic': lambda: setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms,
                                     True),
    'numpy': lambda: np.errstate(all='raise'),
}

@contextmanager
def around(name):
    with warnings.catch_warnings(), AROUND[name]():
        warnings.simplefilter('ignore')
        yield

def ambient():
    "All that could have been changed behind the caller's back"
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled('cpu'),
            torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled(),
            torch.get_num_threads(), torch.is_anomaly_enabled(), np.geterr(), warnings.filters[:],
            hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled(), torch.random.get_rng_state().tolist())

@pytest.mark.parametrize('arch', ['llama', 'mixtral'])
@pytest.mark.parametrize('name', AROUND)
def test_nothing_around_changes_an_answer(name, arch, path, wanted):
    "The model, the engine or its steps are made in it, or all three"
    for inside in ((0, 1, 0), (0, 0, 1), (1, 1, 1)):
        model, made, steps = (around(name) if i else nullcontext() for i in inside)
        with model:
            before = ambient()
            lm = tiny_lm(arch, seed=2)
            assert ambient() == before
        with made:
            before = ambient()
            llm = LLM(lm, **path)
            assert ambient() == before
        with steps:
            before = ambient()
            assert said(llm) == wanted[arch], inside
            assert ambient() == before

@pytest.mark.parametrize('name', AROUND)
def test_nothing_around_changes_what_needs_no_engine(name, tmp_path):
    lm = tiny_lm(seed=2)
    loaded = lambda: load_model(lm.save(tmp_path/'model')).hf_model.state_dict()
    dummy = lambda: load_model(small_config('qwen3'), load_format='dummy').hf_model.state_dict()
    def all_of_it():
        half = lm.to(torch.bfloat16, torch.device('cpu'))
        return (generate_ref(lm, [1, 2], sp(5)), generate_padded(lm, PROMPTS, [4, 5, 6]).token_ids,
                compare_tokens(lm, [1, 2], [1, 2, 3], [1, 2, 4]), probe(lm.hf_model), half.hf_model.dtype)
    plain, weights, drawn = all_of_it(), loaded(), dummy()
    with around(name):
        assert all_of_it() == plain
        again = loaded(), dummy()
    for a, b in zip(again, (weights, drawn)):
        assert {k: v.dtype for k, v in a.items()} == {k: v.dtype for k, v in b.items()}
        assert all(v.equal(b[k]) and not v.is_inference() for k, v in a.items())

# ---- the caller's model

@pytest.mark.parametrize('arch', ['llama', 'gpt2', 'gemma2'])
def test_a_model_in_training_stays_there(arch, path):
    "Dropout is off in what we run, and on in what is trained"
    quiet = tiny_lm(arch, seed=3)
    lm = tiny_lm(arch, seed=3, attention_dropout=.5, **dict.fromkeys(('resid_pdrop', 'attn_pdrop', 'embd_pdrop'), .5))
    hf = lm.hf_model.train().requires_grad_(True)
    hf.lm_head.eval()                                   # each part as it was
    modes = [m.training for m in hf.modules()]
    want = [generate_ref(quiet, p, s).token_ids for p, s in zip(PROMPTS, DRAWN)]
    with LLM(hf, **path) as llm:
        assert llm.hf_model is hf and said(llm) == want
    assert [generate_ref(lm, p, s).token_ids for p, s in zip(PROMPTS, DRAWN)] == want
    assert generate_padded(lm, PROMPTS[:1], [9]).token_ids == want[:1]
    assert compare_tokens(lm, PROMPTS[0], want[0], want[0][:-1] + [257]).at == 8
    with LLM(lm, dtype='bfloat16', **path) as llm: said(llm)
    assert [m.training for m in hf.modules()] == modes and all(p.requires_grad for p in hf.parameters())
    x = torch.tensor([[1, 2, 3]])
    hf(input_ids=x, labels=x).loss.backward()
    assert all(p.grad is not None for p in hf.parameters() if p.dim() > 1)
    if arch == 'gpt2': assert not hf(input_ids=x).logits.equal(hf(input_ids=x).logits)      # dropout is still on
    assert at_rest(hf)(input_ids=x).logits.equal(at_rest(hf)(input_ids=x).logits)

def test_what_we_load_is_at_rest(tmp_path):
    lm = tiny_lm(seed=3)
    for made in (load_model(lm.save(tmp_path/'m')), load_model(small_config('gpt2'), load_format='dummy'),
                 lm.to(torch.bfloat16, torch.device('cpu')), tiny_lm('gpt2')):
        assert not any(m.training for m in made.hf_model.modules())
        assert not any(p.requires_grad for p in made.hf_model.parameters())

# ---- other weights

@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('arch', ['llama', 'gemma2'])
def test_other_weights(arch, tied, path):
    "Changed in place and noticed, changed unseen and told of, or given by name: nothing of the old ones is left"
    lm, long = tiny_lm(arch, seed=1, tie_word_embeddings=tied), list(range(40))
    g, rng = sp(8), torch.Generator().manual_seed(0)
    def right():
        ask = [long, long[::-1], long + [1]]                   # cached, new, half cached
        return said(llm, ask, [g] * 3) == [generate_ref(lm, p, g).token_ids for p in ask]
    llm = LLM(lm, **path)
    assert right() and right()
    for change in range(3):
        with torch.no_grad():
            for p in lm.hf_model.parameters():
                new = p + .1 * torch.randn(p.shape, generator=rng)
                if change == 0: p.copy_(new)                   # counted
                elif change == 1: p.data = new                 # another address
                else: p.data.copy_(new)                        # nobody counts it
        if change == 2: llm.reload_weights()
        assert right(), change
    other = tiny_lm(arch, seed=5, tie_word_embeddings=tied)
    before = generate_ref(lm, long, g).token_ids
    llm.reload_weights(other.hf_model.state_dict())
    assert right() and generate_ref(other, long, g).token_ids == generate_ref(lm, long, g).token_ids
    assert tied or generate_ref(lm, long, g).token_ids != before      # a tied head mostly says again what it reads

def test_weights_into_a_copy_in_another_dtype(path):
    lm, other, half = tiny_lm(seed=1), tiny_lm(seed=2), dict(dtype='bfloat16')
    with LLM(lm, **path | half) as llm, LLM(other, **path | half) as like:
        llm.reload_weights(other.hf_model.state_dict())
        assert said(llm) == said(like) and llm.hf_model is not lm.hf_model
        assert not lm.hf_model.lm_head.weight.equal(other.hf_model.lm_head.weight)

def test_weights_that_are_refused(engine):
    "By name, and nothing is written: half of it would be worse than none"
    lm = tiny_lm(seed=1)
    llm, head = engine(lm), lm.hf_model.lm_head.weight.clone()
    good, norm = {'lm_head.weight': torch.zeros_like(head)}, 'model.norm.weight'
    with pytest.raises(ValueError, match="none called 'head'"): llm.reload_weights(good | dict(head=head))
    with pytest.raises(ValueError, match='model.norm.weight is'): llm.reload_weights(good | {norm: torch.ones(3)})
    llm.add([1, 2, 3], sp(5))
    with pytest.raises(ValueError, match='under way'): llm.reload_weights(good)
    llm.step()
    with pytest.raises(ValueError, match='under way'): llm.reload_weights()
    assert lm.hf_model.lm_head.weight.equal(head)
    while llm.has_unfinished: llm.step()
    lm.hf_model.to(torch.bfloat16)
    with pytest.raises(ValueError, match='make a new LLM'): llm.reload_weights()

def test_reset_prefix_cache(engine):
    "At any time; who runs keeps his blocks, and what comes after is cached again"
    llm, p = engine(), list(range(20))
    cached = lambda: llm.generate([p], sp(2), use_tqdm=False)[0].metrics.num_cached_tokens
    assert [cached(), cached()] == [0, 16]
    llm.reset_prefix_cache()
    assert [cached(), cached()] == [0, 16]
    llm.add(p[::-1], sp(9)); llm.step(); llm.reset_prefix_cache()
    while llm.has_unfinished: llm.step()
    assert cached() == 0

# ---- rows of logits

@pytest.mark.parametrize('policy', [Policy, Static, Dynamic])
def test_a_prompt_is_scored_in_parts(policy, engine, monkeypatch):
    "However long it is, and however many there are: the same scores, and no step has more rows than were reserved"
    lm, most = tiny_lm(seed=1), 0
    rng = random.Random(3)
    prompts = [[rng.randrange(250) for _ in range(n)] for n in (700, 30, 300, 1, 2, 650)]
    asks = [sp(3, prompt_logprobs=1), sp(3, prompt_logprobs=0), sp(3), sp(3, prompt_logprobs=1),
            sp(2, prompt_logprobs=2),
            sp(3, prompt_logprobs=1)]
    config = dict(num_blocks=200, block_size=16, max_num_seqs=4, max_num_batched_tokens=1024)
    def run(lm, asks):
        llm = engine(lm, policy=policy(), **config)
        forward = llm.runner.executor.forward
        def counted(batch):
            nonlocal most
            most = max(most, len(batch.logit_rows))
            return forward(batch)
        monkeypatch.setattr(llm.runner.executor, 'forward', counted)
        return llm.generate(prompts, asks, use_tqdm=False)
    outs, limit = run(lm, asks), SCORED + 2 * 4
    assert most <= limit
    for o, p, a in zip(outs, prompts, asks):
        assert o.outputs[0].token_ids == generate_ref(lm, p, a).token_ids
        if a.prompt_logprobs is None: continue
        want = lm.hf_model(torch.tensor([p])).logits[0].log_softmax(-1)
        got = [s[t].logprob for s, t in zip(o.prompt_logprobs[1:], p[1:])]
        assert o.prompt_logprobs[0] is None and len(got) == len(p) - 1
        assert torch.allclose(torch.tensor(got), want[range(len(p) - 1), p[1:]], atol=1e-3)
    wide = tiny_lm(vocab_size=2000)
    more = [step_bytes(m, EngineConfig(**config)) for m in (lm, wide)]
    assert (more[1] - more[0]) >= limit * (2000 - 258) * 4          # what they take is reserved

def test_a_policy_that_wants_whole_prompts_is_not_stuck(engine):
    class Whole(Policy):
        def chunk(self, s, r, wanted, left): return wanted if wanted <= left else 0
    llm = engine(policy=Whole(), num_blocks=200, max_num_batched_tokens=800)
    p = [i % 250 for i in range(700)]
    assert len(llm.generate([p], sp(2, prompt_logprobs=0), use_tqdm=False)[0].prompt_logprobs) == 700

# ---- other threads

def at_once(f, n=4):
    "Call f(i) in threads that take turns as often as Python can"
    was = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(n) as ex: return [*ex.map(f, range(n))]
    finally: sys.setswitchinterval(was)

@pytest.mark.parametrize('arch', ['llama', 'gemma2'])
def test_engines_over_one_model_in_threads(arch, path):
    "Made and run at the same time, beside somebody who uses the model itself"
    lm = tiny_lm(arch, seed=1)
    asks = [(list(range(i, 2 * i + 5)), DRAWN[i % 3]) for i in range(8)]
    want, texts = [generate_ref(lm, p, s).token_ids for p, s in asks], []
    def one(i):
        if not i: return [generate_ref(lm, p, s).token_ids for _ in range(3) for p, s in asks] == want * 3
        right = []
        for _ in range(3):
            with LLM(lm, **path | dict(num_blocks=100)) as llm: right.append(said(llm, *map(list, zip(*asks))) == want)
        return all(right)
    assert at_once(one) == [True] * 4

def test_models_made_in_threads():
    "Torch has one state of random numbers: each gets its own weights all the same, and yours are left alone"
    want = [tiny_lm('llama', seed=s).hf_model.state_dict() for s in range(4)]
    state = torch.random.get_rng_state()
    for got, w in zip(at_once(lambda s: tiny_lm('llama', seed=s).hf_model.state_dict()), want):
        assert all(got[k].equal(w[k]) for k in w)
    assert torch.random.get_rng_state().equal(state)

@pytest.mark.parametrize('kind', ['longrope', 'dynamic'])
def test_positions_that_stretch_belong_to_one(kind):
    "Somebody computes a long text with the model itself, between the steps of an engine"
    half = dict(rope_type=kind, rope_theta=10000., factor=4.)
    if kind == 'longrope':
        half |= dict(short_factor=[1.] * 8, long_factor=[9.] * 8, original_max_position_embeddings=64)
    lm = tiny_lm('llama', seed=1, rope_parameters=half, max_position_embeddings=256 if kind == 'longrope' else 64)
    want = generate_ref(lm, PROMPTS[0], sp(9)).token_ids
    llm = LLM(lm, num_blocks=30, block_size=16, lean=False)
    rotary = llm.runner.executor.call.model.rotary_emb
    before = rotary.inv_freq.clone()
    with torch.no_grad(): lm.hf_model(torch.arange(200)[None])
    assert rotary.inv_freq.equal(before)                    # not even for a moment
    assert said(llm, PROMPTS[:1], [sp(9)]) == [want]
