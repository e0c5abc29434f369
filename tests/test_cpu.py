"""Attention in C++ and the lean model.
Every path gives the oracle's tokens, and a build that watches its bounds finds nothing."""
import math, os, platform, random, shutil, subprocess, sys
import pytest, torch
from dataclasses import replace
from torch.utils._python_dispatch import TorchDispatchMode
from cbatch import LLM, SamplingParams
from cbatch.core import Padding, Plan, Request, Scheduled
from cbatch.params import EngineConfig
from cbatch.kernels import cpu, lean, lean_step
from cbatch.kv_blocks import slot_mapping
from cbatch.model import tiny_lm
from cbatch.native import Native
from cbatch.backends import best_backend
from cbatch.paged_attention import AttnMeta, KVShape, TorchBackend, from_codes, paged_attention_ref, to_codes
from cbatch.ragged_batch import pack, wanted
from cbatch.runner import Executor
from cbatch.token_loop import generate_ref
from harness import in_cpp, quiet

needs_compiler = pytest.mark.skipif(not (shutil.which('c++') or shutil.which('g++')), reason='no C++ compiler')
@pytest.fixture(autouse=True)
def native():
    "These tests want C++, whatever the others do"
    with in_cpp(): yield

def sp(n): return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)

def difference(be, H, K, D, bs, qlens, slens, window=None, softcap=None, dtype=torch.float32, seed=0):
    """Largest difference between a backend and the formula in float64; every slot that nobody owns holds NaN.
    What is kept in codes is compared with what the codes stand for"""
    g = torch.Generator().manual_seed(seed)
    order = (1 + torch.randperm(be.v[0].shape[0] - 1, generator=g)).tolist()
    tables = [[order.pop() for _ in range(-(-n // bs))] for n in slens]
    first = 0 if isinstance(be, cpu.CPUBackend) else 1             # to torch, block 0 is for nobody and stays zero
    for x in be.tensors: x[first:] = math.nan if x.is_floating_point() else 77
    kv = [torch.randn(2, K, n, D, generator=g).transpose(1, 2).to(dtype) for n in slens]
    for t, x, n in zip(tables, kv, slens):
        meta = AttnMeta([n], [n], torch.tensor([t]), torch.tensor(slot_mapping(t, 0, n, bs)))
        be.write(0, x[0], x[1], meta)
    width, wrong = max(map(len, tables)), 2 ** 30
    meta = AttnMeta(list(qlens), list(slens), torch.tensor([t + [wrong] * (width - len(t)) for t in tables]),
                    torch.zeros(0, dtype=torch.long))
    be.prepare(meta)
    q = torch.randn(1, H, sum(qlens), D, generator=g)[0].transpose(0, 1).to(dtype)
    out, at, worst = be.attend(0, q, meta, .2, window, softcap).double(), 0, 0.
    for x, n, m in zip(kv, slens, qlens):
        flat = (from_codes(*to_codes(x)) if be.shape.coded else x).double()[:, :, None]
        ref = paged_attention_ref(q[at:at+m].double(), flat[0], flat[1],
                                  AttnMeta([m], [n], torch.arange(n)[None], None), .2, window, softcap)
        worst, at = max(worst, (out[at:at+m] - ref).abs().max().nan_to_num(math.inf).item()), at + m
    return worst

PROMPTS = [list(range(40, 75)), [9] * 15, list(range(20, 37)), list(range(40, 70)) + [1, 2]]

def step(lm, prompts, backend='auto', products='auto', kv_dtype='auto'):
    "Logits of the last token of each prompt, all in one step"
    executor = Executor(lm, EngineConfig(backend=backend, products=products, kv_dtype=kv_dtype), 40)
    rs, free = [], iter(range(1, 40))
    for i, p in enumerate(prompts):
        rs.append(Request(str(i), p, sp(1), 9, block_table=[next(free) for _ in range(-(-len(p) // 16))]))
    plan = Plan(0, 0., scheduled=[Scheduled(r, 0, len(r.prompt_ids), rows=1) for r in rs])
    batch = pack(plan, 16)
    executor.backend.prepare(batch.meta)
    with torch.no_grad(): out = executor.forward(batch)
    assert (executor.lean is None) == (backend == 'torch')
    return {int(w.request.request_id): x for w, x in zip(wanted(plan), out)}

def shaken(lm):
    """The same model, with norms and biases that are not all alike.
    Those of a new model are ones and zeros, and nobody would see them ignored."""
    g = torch.Generator().manual_seed(5)
    for p in lm.hf_model.parameters():
        if p.dim() == 1: p.data += .3 * torch.randn(p.shape, generator=g)
    return lm

def logits_differ(arch, dtype, products='auto', **sizes):
    """How far logits in `dtype` are from those in float32 with the same weights, relative to the largest.
    Those of the lean model, and those of transformers' modules; the last prompt is one token."""
    cpu, prompts = torch.device('cpu'), [*PROMPTS, [7]]
    rounded = lambda to: shaken(tiny_lm(arch, **sizes)).to(dtype, cpu).to(to, cpu)
    ref = step(rounded(torch.float32), prompts, 'torch')
    return [max(((got[i].float() - ref[i]).abs().max() / ref[i].abs().max()).item() for i in ref)
            for got in (step(rounded(dtype), prompts, products=products), step(rounded(dtype), prompts, 'torch'))]

def logits_are_right(arch, dtype, products='auto', **sizes):
    ours, theirs = logits_differ(arch, dtype, products, **sizes)
    # 16 bits are coarse: no coarser than theirs, in which more is rounded
    return ours < (1e-5 if dtype == torch.float32 else 1.5 * theirs)

def backend(bs, K, D, slens, dtype=torch.float32, kv_dtype='auto'):
    return cpu.CPUBackend(KVShape(sum(-(-n // bs) for n in slens), bs, 1, K, D, dtype, kv_dtype=kv_dtype))

both_kinds = pytest.mark.parametrize('kv_dtype', ['auto', 'int8'])

@needs_compiler
# sums of some hundred terms; 8 bits of a result of about 1
@pytest.mark.parametrize('dtype,tol', [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)], ids=['float32', 'bfloat16'])
@both_kinds
@pytest.mark.parametrize('H,K,D', [(9, 3, 64), (8, 8, 80), (14, 2, 96), (16, 2, 128), (9, 1, 256), (5, 1, 16)])
def test_odd_shapes(H, K, D, dtype, tol, kv_dtype):
    rng = random.Random(H * D)
    for bs in (16, 48, 128):
        slens = [1, 15, 16, 17, 63, 64, 65, rng.randrange(100, 300)]
        qlens = [rng.choice([1, 1, 2, n, (n + 1) // 2]) for n in slens]
        qlens = [min(q, n) for q, n in zip(qlens, slens)]
        for window, cap in ((None, None), (1, None), (17, 2.), (64, None)):
            be = backend(bs, K, D, slens, dtype, kv_dtype)
            assert difference(be, H, K, D, bs, qlens, slens, window, cap, dtype) < tol

@needs_compiler
@pytest.mark.parametrize('n', [1, 2, 16, 100, 1000, 4096])
def test_long_contexts(n): assert difference(backend(16, 2, 64, [n, n]), 6, 2, 64, 16, [1, min(n, 33)], [n, n]) < 2e-5

@needs_compiler
@pytest.mark.skipif(platform.machine() not in ('x86_64', 'AMD64'), reason='the flags are those of x86')
@pytest.mark.parametrize('flag', ['-mno-avx512bf16', '-mno-avx512f', '-mno-avx'])
def test_narrower_processors(monkeypatch, flag):
    "No products of pairs, registers of 8 and of 4 numbers: the same source, the same results"
    monkeypatch.setattr('cbatch.native.KERNELS', {})
    for module, name in ((cpu, 'ATTENTION'), (lean, 'STEP')):
        n = getattr(module, name); kernel = Native(n.name, n.source, n.functions, flags=(*n.flags, flag))
        monkeypatch.setattr(module, name, kernel); assert kernel.build()
    for H, K, D in ((9, 3, 64), (8, 1, 80), (16, 2, 128)):
        slens, qlens = [1, 17, 64, 150], [1, 9, 1, 70]
        for window, cap in ((None, None), (7, 2.)):
            for dtype, tol in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
                for kv in ('auto', 'int8'):
                    be = backend(16, K, D, slens, dtype, kv)
                    assert difference(be, H, K, D, 16, qlens, slens, window, cap, dtype) < tol
    for dtype in (torch.float32, torch.bfloat16): assert logits_are_right('qwen3', dtype)

# numbers that a small model has, and those of most would be 1
MORE = dict(granite=dict(embedding_multiplier=3., residual_multiplier=.4, logits_scaling=5., attention_multiplier=.3),
            gemma2=dict(final_logit_softcapping=2.))

PATHS = {'torch': dict(backend='torch', lean=False), 'attention in C++': dict(lean=False), 'lean': {}}

@needs_compiler
@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('arch', [*lean.KINDS, 'cohere'])
def test_every_path_is_token_equal(arch, path):
    "Chunks, a pool that runs short in both ways, prefix hits: the oracle's tokens in float32"
    lm = shaken(tiny_lm(arch, **MORE.get(arch, {}))); want = [generate_ref(lm, p, sp(14)).token_ids for p in PROMPTS]
    for how in (dict(force_preempt=3), dict(force_preempt=3, preemption='swap'), {}):
        with LLM(lm, block_size=16, max_num_seqs=3, max_num_batched_tokens=24, num_blocks=20, check=True, **how,
                 **PATHS[path]) as llm:
            used = ('torch' if type(llm.runner.executor.backend) is TorchBackend
                    else 'lean' if llm.runner.executor.lean else 'attention in C++')
            assert used == (path if arch in lean.KINDS or path == 'torch' else 'attention in C++')
            for _ in range(2):
                assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, sp(14), use_tqdm=False)] == want
            assert llm.metrics['num_preemptions' if how else 'num_cached_tokens'] > 0
            quiet(llm)

@needs_compiler
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['float32', 'bfloat16'])
@pytest.mark.parametrize('products', ['panels', 'onednn'])
@pytest.mark.parametrize('sizes', [{}, dict(hidden_size=52, intermediate_size=37, vocab_size=301, head_dim=16)],
                         ids=['even', 'odd'])
def test_lean_logits(dtype, products, sizes):
    "Widths that fill no panel, no register and no pair"
    for arch in lean.KINDS:
        more = dict(intermediate_size=48) if sizes and arch == 'phi3' else {}     # gate and up are one matrix
        assert logits_are_right(arch, dtype, products, **(sizes | more | MORE.get(arch, {})))

def other(arch, **fields):
    "The table with one entry changed"
    return lean.KINDS | {arch: replace(lean.KINDS[arch], **fields)}

FAULTS = [('gemma2', 'norms without the 1', dict(plus=0.)), ('gemma2', 'no cap of logits', dict(reads='')),
          ('gemma2', 'embeddings as they are', dict(root=False)),
          ('gemma3_text', 'norms without the 1', dict(plus=0.)),
          ('gemma3_text', 'angles swapped', dict(bases=('sliding_attention', 'full_attention'))),
          ('granite', 'no multiplier of embeddings', dict(reads='residual_multiplier logits_scaling')),
          ('granite', 'no multiplier of branches', dict(reads='embedding_multiplier logits_scaling')),
          ('granite', 'logits not divided', dict(reads='embedding_multiplier residual_multiplier'))]
FIELDS = [('gemma2', 'cap'), ('gemma2', 'window'), ('gemma2', 'after1'), ('gemma3_text', 'after2'), ('olmo2', 'after1'),
          ('gemma3_text', 'q_norm'), ('granite', 'scale')]

@needs_compiler
@pytest.mark.parametrize('arch,what,fields', FAULTS, ids=[f'{a}: {w}' for a, w, _ in FAULTS])
def test_each_entry_of_the_table_is_needed(monkeypatch, arch, what, fields):
    if what == 'angles swapped':
        layer = lean.Laid.layer
        monkeypatch.setattr(lean.Laid, 'layer', lambda self, *args: layer(self, *args[:-1], 1 - args[-1]))
    else: monkeypatch.setattr(lean, 'KINDS', other(arch, **fields))
    assert not logits_are_right(arch, torch.float32, **MORE.get(arch, {}))

@needs_compiler
@pytest.mark.parametrize('arch,field', [*FIELDS, ('gemma2', 'gelu'), ('olmo2', 'whole')])
def test_each_field_of_a_layer_is_needed(monkeypatch, arch, field):
    "gelu and whole are fields of the model"
    name = 'LeanWeights' if field in ('gelu', 'whole') else 'LeanLayer'
    kind = getattr(lean, name)
    class Spoiled(kind):
        def __init__(self, *args):
            super().__init__(*args)
            setattr(self, field, .01 if field == 'scale' else None if field[:5] in ('after', 'q_nor') else 0)
    monkeypatch.setattr(lean, name, Spoiled)
    assert not logits_are_right(arch, torch.float32, **MORE.get(arch, {}))

@needs_compiler
@pytest.mark.parametrize('products', ['panels', 'onednn'])
@pytest.mark.parametrize('arch,config', [('qwen3', dict(use_sliding_window=True, sliding_window=9, num_hidden_layers=3,
                                                        layer_types=['full_attention', 'sliding_attention',
                                                            'full_attention'])),
                                         ('qwen2', dict(use_sliding_window=True, sliding_window=5, num_hidden_layers=2,
                                                        layer_types=['sliding_attention', 'full_attention'])),
                                         ('qwen3', dict(attention_bias=True)),
                                         ('llama', dict(attention_bias=True, mlp_bias=True)),
                                         ('llama', dict(tie_word_embeddings=True, rms_norm_eps=.3)),
                                         ('mistral', dict(sliding_window=3))])
def test_lean_logits_of_other_configurations(arch, config, products):
    "Windows of some layers, biases everywhere, norms and biases that differ"
    assert logits_are_right(arch, torch.float32, products, **config)

@needs_compiler
def test_padding_leaves_the_others_and_the_cache_alone():
    lm = tiny_lm('llama'); executor = Executor(lm, EngineConfig(), 4)
    r = Request('a', list(range(20)), sp(1), 9, block_table=[1, 2])
    def run(padding):
        batch = pack(Plan(0, 0., scheduled=[Scheduled(r, 0, 20, rows=1)], padding=padding), 16)
        executor.backend.prepare(batch.meta)
        with torch.no_grad(): return executor.forward(batch)
    want = run([]); caches = [c.clone() for c in executor.backend.k + executor.backend.v]
    assert torch.equal(run([Padding(1, 7), Padding(30, 30), Padding(1, 1)]), want) and executor.lean
    assert all(torch.equal(a, b) for a, b in zip(caches, executor.backend.k + executor.backend.v))

@needs_compiler
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['float32', 'bfloat16'])
@pytest.mark.parametrize('window', [None, 1, 20, 64, 100])
@both_kinds
def test_how_a_prompt_is_cut_changes_no_bit(dtype, window, kv_dtype):
    "250 queries in one chunk, alone, and in pieces of seven"
    n, K, D, be = 250, 2, 32, backend(16, 2, 32, [250], dtype, kv_dtype)
    g = torch.Generator().manual_seed(1); k, v = torch.randn(2, n, K, D, generator=g).to(dtype)
    q = torch.randn(n, 6, D, generator=g).to(dtype)
    table = list(range(1, 17))
    be.write(0, k, v, AttnMeta([n], [n], torch.tensor([table]), torch.tensor(slot_mapping(table, 0, n, 16))))
    def attend(start, stop):
        meta = AttnMeta([stop - start], [stop], torch.tensor([table]), None); be.prepare(meta)
        return be.attend(0, q[start:stop], meta, .2, window)
    whole = attend(0, n)
    for piece in (1, 7):
        assert torch.equal(whole, torch.cat([attend(i, min(n, i + piece)) for i in range(0, n, piece)]))

@needs_compiler
@pytest.mark.parametrize('softcap', [None, 5.])
@both_kinds
def test_nan_stays_nan(softcap, kv_dtype):
    "A query or a key that is not a number gives no number, so that the engine can tell"
    be = backend(16, 1, 16, [40], kv_dtype=kv_dtype); k, q = torch.ones(40, 1, 16), torch.ones(2, 1, 16)
    meta = AttnMeta([2], [40], torch.tensor([[1, 2, 3]]), torch.tensor(slot_mapping([1, 2, 3], 0, 40, 16)))
    be.prepare(meta); q[0, 0, 3] = math.nan; be.write(0, k, torch.ones(40, 1, 16), meta)
    assert be.attend(0, q, meta, 1., None, softcap).isnan().all(-1).flatten().tolist() == [True, False]
    k[7, 0, 2] = math.nan; be.write(0, k, torch.ones(40, 1, 16), meta)
    assert be.attend(0, torch.ones(2, 1, 16), meta, 1., None, softcap).isnan().all()

@needs_compiler
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['float32', 'bfloat16'])
@both_kinds
@pytest.mark.parametrize('arch', ['llama', 'gemma2', 'gemma3_text', 'phi3', 'granite', 'olmo2'])
def test_company_changes_no_bit(arch, dtype, kv_dtype):
    "Logits of a request are the same alone, beside others, and in another order"
    lm = shaken(tiny_lm(arch, **MORE.get(arch, {}))).to(dtype, torch.device('cpu'))
    prompts = [*PROMPTS, [7], [7, 8],
        *([i] * i for i in range(1, 12))]
    how = dict(products='panels', kv_dtype=kv_dtype)
    together, other = step(lm, prompts, **how), step(lm, prompts[::-1], **how)
    for i, p in enumerate(prompts):
        assert torch.equal(step(lm, [p], **how)[0], together[i])
        assert torch.equal(other[len(prompts) - 1 - i], together[i])

@needs_compiler
def test_head_with_bias_and_other_odd_parts_goes_the_general_way():
    lm = tiny_lm('llama', mlp_bias=True, attention_bias=True)
    torch.nn.init.normal_(lm.hf_model.model.layers[0].self_attn.q_proj.bias)
    torch.nn.init.normal_(lm.hf_model.model.layers[0].mlp.down_proj.bias)
    with LLM(lm, num_blocks=20) as llm:
        assert llm.runner.executor.lean and llm.generate([PROMPTS[0]], sp(8),
                                                         use_tqdm=False)[0].outputs[0].token_ids == generate_ref(lm,
                                                             PROMPTS[0], sp(8)).token_ids
    assert 'gelu' in lean.misfit(tiny_lm('llama', hidden_act='gelu')) and 'cohere' in lean.misfit(tiny_lm('cohere'))
    assert 'no multiple of 16' in lean.misfit(tiny_lm('phi3', intermediate_size=37))
    class Wrapped(torch.nn.Linear): pass
    def wrapped(lm): lm.hf_model.model.layers[1].mlp.up_proj.__class__ = Wrapped
    def head(lm): lm.hf_model.lm_head.__class__ = Wrapped
    def hooked(lm): lm.hf_model.model.norm.register_forward_hook(lambda *a: None)
    def patched(lm): lm.hf_model.model.embed_tokens.forward = lambda ids: None
    def bare(lm): del lm.hf_model.model.rotary_emb
    def activation(lm): lm.hf_model.model.layers[1].mlp.act_fn = torch.nn.GELU()
    def norm(lm): lm.hf_model.model.layers[0].input_layernorm = torch.nn.RMSNorm(lm.config.hidden_size)
    def mixed(lm): lm.hf_model.lm_head.to(torch.bfloat16)
    for spoil, why in ((wrapped, 'layers.1.mlp.up_proj is a Wrapped'), (head, 'lm_head is a Wrapped'),
                       (hooked, 'model.norm has a hook'), (patched, 'embed_tokens has a forward'),
                       (bare, 'rotary_emb missing'), (activation, 'layer 1: the activation is GELU'),
                       (norm, 'layer 0.input_layernorm is a RMSNorm'),
                       (mixed, 'is torch.bfloat16, the model torch.float32')):
        lm = tiny_lm('llama'); assert lean.misfit(lm) is None
        spoil(lm); assert why in lean.misfit(lm), (spoil, lean.misfit(lm))
    with pytest.raises(ValueError, match="products='mkl': must be auto or panels or onednn"):
        EngineConfig(products='mkl')
    with pytest.raises(ValueError, match="products='mkl': must be one of auto, panels, onednn"):
        lean.takes_onednn('mkl', torch.float32)

class Largest(TorchDispatchMode):
    "Numbers in the largest tensor that any operation made"
    numel = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(x.numel() for x in (out if isinstance(out, (tuple, list)) else [out])
                                        if isinstance(x, torch.Tensor))])
        return out

@needs_compiler
@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('arch', ['llama', 'mistral', 'gemma2'])
def test_a_long_prompt_makes_no_square(arch, path):
    "4,000 tokens in one step: nothing of 4,000 x 4,000 numbers, or a quarter of that, is made"
    lm, T = tiny_lm(arch, max_position_embeddings=8192, vocab_size=300), 4000
    with LLM(lm, block_size=16, num_blocks=260, max_num_batched_tokens=T, max_num_seqs=1, **PATHS[path]) as llm:
        llm.add([i % 250 for i in range(T)], sp(1))
        with Largest() as seen: llm.step()
    # gemma2's soft cap needs 256 x 4,000 scores for each of its heads, where C++ is not there
    assert T * lm.config.hidden_size <= seen.numel < T * T / (1 if arch == 'gemma2' else 4)

@pytest.mark.parametrize('window,cap', [(None, None), (1, None), (17, 2.), (None, 3.)])
def test_pieces_of_a_prompt_in_torch(monkeypatch, window, cap):
    monkeypatch.setattr('cbatch.paged_attention.QUERIES', 7)
    slens, qlens = [1, 15, 64, 65, 90], [1, 15, 20, 65, 1]
    for kv in ('auto', 'int8'):
        be = TorchBackend(KVShape(sum(-(-n // 16) for n in slens), 16, 1, 2, 32, kv_dtype=kv))
        assert difference(be, 6, 2, 32, 16, qlens, slens, window, cap) < 2e-5

@needs_compiler
def test_tensors_of_the_wrong_kind_are_refused_before_they_reach_the_kernel():
    be = backend(16, 2, 16, [16])
    meta = AttnMeta([1], [1], torch.tensor([[1]]), torch.tensor([16])); be.prepare(meta)
    good = torch.zeros(1, 2, 16)
    be.write(0, good, good, meta); be.attend(0, good, meta, 1.)
    for k, v in ((good.bfloat16(), good), (good, good.bfloat16()), (good[:, :1], good[:, :1]), (good, good[:, :, :8]),
                 (good.double(), good.double())):
        with pytest.raises(ValueError): be.write(0, k, v, meta)
    for q in (good.bfloat16(), torch.zeros(1, 3, 16), torch.zeros(1, 2, 32)):
        with pytest.raises(ValueError): be.attend(0, q, meta, 1.)

@pytest.mark.parametrize('bs,D', [(4, 64), (24, 64), (16, 24)])
def test_what_the_kernel_does_not_know_goes_through_torch(bs, D):
    for shape in (KVShape(4, bs, 1, 1, D), KVShape(4, 16, 1, 1, 64, torch.float16)):
        assert best_backend(shape) == 'torch'
    with pytest.raises(ValueError, match="backend='cpu'"): cpu.CPUBackend(KVShape(4, bs, 1, 1, D))

def test_without_a_compiler(tmp_path):
    "It is said once, nothing fails, and the tokens are the same"
    code = '''
import warnings; warnings.simplefilter('always')
from cbatch import LLM, SamplingParams
from cbatch.core import Padding, Plan, Request, Scheduled
from cbatch.params import EngineConfig
from cbatch.model import tiny_lm
for _ in range(2):
    llm = LLM(tiny_lm('llama'), num_blocks=20)
    print(type(llm.runner.executor.backend).__name__, llm.runner.executor.lean, \
llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), \
use_tqdm=False)[0].outputs[0].token_ids)
'''
    ran = subprocess.run([sys.executable, '-c', code], env={k: v for k, v in os.environ.items() if k != 'CXX'}
                         | dict(PATH=str(tmp_path), CBATCH_CACHE=str(tmp_path)), capture_output=True, text=True)
    want = generate_ref(tiny_lm('llama'), [1, 2, 3], sp(4)).token_ids
    assert ran.stdout.splitlines() == [f'TorchBackend None {want}'] * 2, ran.stderr
    assert ran.stderr.count('no C++ compiler') == 1

DRIVER = r'''
#include <cstdio>
#include <cstdlib>
template <typename T> std::vector<T> filled(size_t n, float x) {
    std::vector<T> v(n); for (T& y : v) put(&y, x); return v;
}
template <typename T, bool CODES> void attention() {   // every buffer is as long as it must be, no byte longer
    for (int D : {16, 64, 80}) for (int G : {1, 3, 9}) for (int window : {0, 5}) {
        const int K = 2, BS = 16, R = 3, H = K * G, lens[R] = {1, 33, 64}; int N = 6;
        std::vector<int> tables = {2, 0, 0, 0, 5, 1, 3, 0, 4, 6, 7, 8}, starts = {0, 1, 5, 6}; tables.shrink_to_fit();
        auto q = filled<T>(N * H * D, .5f), out = filled<T>(N * H * D, 0), k = filled<T>(9 * K * BS * D, NAN), v = k,
             x = filled<T>(65 * K * D, .25f);
        std::vector<float> scales(CODES ? 9 * K * BS : 0, NAN), more = scales;
        std::vector<int8_t> kc(CODES ? 9 * K * BS * D : 0, 77), vc = kc;
        KVPool pool{k.data(), v.data(), K, D, BS};
        if (CODES) pool = {kc.data(), vc.data(), K, D, BS, scales.data(), more.data()};
        for (int r = 0; r < R; r++) {
            std::vector<int64_t> slots(lens[r]);
            for (int i = 0; i < lens[r]; i++) slots[i] = tables[r * 4 + i / BS] * BS + i % BS;
            slots.push_back(-1);                                             // for nobody
            Write w{x.data(), x.data(), slots.data(), lens[r] + 1, K * D, D, K * D, D, 2, pool};
            write<T>(w);
        }
        Step s{q.data(), out.data(), tables.data(), lens, starts.data(), H * D, D, H * D, D, R, 4, H, window, 2,
               .1f, 2.f, pool};
        attend_alone<T>(s);
        // all values alike: their mean is one of them
        for (T y : out) if (!(std::fabs(one(y) - .25f) < 4e-3)) { std::puts("wrong"); std::exit(1); }
    }
}
template <typename T, bool CODES> void whole_step() {     // a model of one layer whose weights are all alike
    const int D = 16, H = 3, K = 1, hidden = CODES ? 64 : 52, inner = 48, vocab = 101, N = 11, BS = 16, P = PER<T>;
    std::vector<std::vector<T>> kept; kept.reserve(9);
    auto matrix = [&](int out, int in) {
        kept.push_back(filled<T>((out + 47) / 48 * 48 * in, .01f));
        return Matrix{(word*)kept.back().data(), nullptr, out, in};
    };
    std::vector<std::vector<uint16_t>> codes; codes.reserve(2);
    auto coded = [&](int out, int in) {           // each code 1, scales a hundredth in half precision, offsets 0
        if (!CODES) return matrix(out, in);
        codes.emplace_back();
        for (int g = 0; g < (out + 47) / 48 * in / 32; g++) {
            codes.back().insert(codes.back().end(), 384, 0x1111); codes.back().insert(codes.back().end(), 48, 0x211f);
            codes.back().insert(codes.back().end(), 48, 0);
        }
        return Matrix{(word*)codes.back().data(), nullptr, out, in, 4, -1, 1};
    };
    std::vector<float> branch(N * hidden);
    std::vector<float> ones(hidden, 1.f), residual(N * hidden, .5f), angle(N * D, 1.f); std::vector<double> spent(3);
    auto k = filled<T>(2 * K * BS * D, .01f), v = k;                          // one place is not written below
    LeanLayer layer{matrix((H + 2 * K) * D, hidden), matrix(hidden, H * D), coded(2 * inner, hidden),
                    matrix(hidden, inner), ones.data(), ones.data(), nullptr, nullptr,
                    {k.data(), v.data(), K, D, BS}, 0, .25f, 1e-5f, 1e-5f, 2.f, 0,
                    CODES ? ones.data() : nullptr, CODES ? ones.data() : nullptr};
    LeanWeights m{&layer, coded(vocab, hidden), ones.data(), 1, hidden, H, K, D, inner, 1e-5f, 1, 1};
    std::vector<int64_t> slots(N), rows = {10, 3}; std::vector<int> tables = {1}, lens = {N}, starts = {0, N};
    for (int i = 0; i < N; i++) slots[i] = i == 5 ? -1 : BS + i;
    std::vector<T> x(N * hidden), wide(N * 2 * inner), narrow(N * H * D), logits(2 * vocab);
    std::vector<int8_t> rows8(N * hidden); std::vector<float> scales(N * hidden / 32);
    std::vector<int> sums(N * hidden / 32);
    LeanStep r{residual.data(), angle.data(), angle.data(), slots.data(), rows.data(), tables.data(), lens.data(),
               starts.data(), x.data(), wide.data(), narrow.data(), logits.data(), rows8.data(),
               scales.data(), sums.data(), spent.data(), N, 2, 1, 1, 2, branch.data()};
    run<T>(m, r);
    // equal numbers, normed to 1, times a hundredth
    for (T y : logits) if (!(std::fabs(one(y) - .01f * hidden) < 1e-2)) std::printf("wrong %f", one(y)), std::exit(1);
}
int main() {
    attention<float, false>(); attention<bf16, false>(); attention<float, true>(); attention<bf16, true>();
    whole_step<float, false>(); whole_step<bf16, false>();
    whole_step<float, true>(); whole_step<bf16, true>(); std::puts("clean");
}'''

@needs_compiler
def test_with_the_address_sanitizer(tmp_path):
    src, exe = tmp_path/'t.cpp', tmp_path/'t'
    src.write_text(lean_step.LEAN_CPP + DRIVER)
    made = subprocess.run(['c++', '-O1', '-g', '-std=c++17', '-march=native', '-fsanitize=address,undefined',
                           '-fno-sanitize=alignment', '-fno-sanitize-recover=all', '-Wno-psabi', str(src), '-o',
                           str(exe)], capture_output=True, text=True)
    if 'cannot find' in made.stderr and 'asan' in made.stderr: pytest.skip('no runtime of the address sanitizer')
    assert made.returncode == 0, made.stderr[-2000:]
    ran = subprocess.run([str(exe)], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.strip()) == (0, 'clean'), ran.stderr[-3000:]
