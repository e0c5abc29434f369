"""The lean model on weights in codes: what it takes, what it makes of them, and bits that know no company."""
import ctypes, random
from dataclasses import replace
import pytest, torch
from cbatch import LLM
from cbatch.kernels import cpu, lean
from cbatch.kernels.lean import Laid, misfit
from cbatch.model import tiny_lm
from cbatch.quant import Codes, CodedLinear, coded, codes_of, quantise, swap, unpack
from ask import sp
from harness import in_cpp, quiet

@pytest.fixture(autouse=True)
def native():
    "With C++"
    with in_cpp():
        if not cpu.ready(lean.STEP): pytest.skip('no C++ compiler')
        yield

def wide(arch='llama', seed=0, dtype=torch.float32, **config):
    "A small model whose rows divide into groups of 32"
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    m = tiny_lm(arch, seed, **sizes, **config)
    return replace(m, hf_model=m.hf_model.to(dtype))

def engine(model, **kw):
    return LLM(model, backend='cpu', block_size=16, num_blocks=24, check=True, **kw)

def logits(model, ids, backend='cpu', **kw):
    "Of each token of a prompt, in one step"
    with LLM(model, backend=backend, block_size=16, num_blocks=24, **kw) as llm:
        out = llm.generate([ids], sp(1, prompt_logprobs=0), use_tqdm=False)[0]
    return torch.tensor([next(iter(x.values())).logprob for x in out.prompt_logprobs[1:]])

def rounded(self, x):
    "A layer in codes by torch, its rows rounded as the C++ rounds them"
    g = x.float().unflatten(-1, (-1, 32))
    d = g.abs().amax(-1, keepdim=True) / 127
    y = (torch.where(d > 0, g / d, 0.).round() * d).flatten(-2) @ self.codes.dequantise().T
    return (y if self.bias is None else y + self.bias.float()).to(x.dtype)

P = [[5, 6, 7], [200, 3, 77, 8, 9, 10, 11], list(range(40, 60)), [33], list(range(100, 170))]

@pytest.mark.parametrize('arch', lean.KINDS)
@pytest.mark.parametrize('bits', [4, 8])
def test_taken_as_they_are(arch, bits, monkeypatch):
    "No weight is unpacked, and tokens are scored as by torch with the same rows: each group of 32 rounded to 127 steps"
    model = quantise(wide(arch), bits)
    assert misfit(model) is None
    with engine(model) as llm:
        assert 'lean' in llm.runner.path
        made = llm.runner.executor.lean
        shapes = [made.layers[0].qkv, made.layers[0].o, made.layers[0].gate_up, made.layers[0].down, made.weights.head]
        assert [m.bits for m in shapes] == [bits] * 4 + [8] and not made.laid.products
    ours = logits(model, P[4])
    monkeypatch.setattr(CodedLinear, 'forward', rounded)
    same = (ours - logits(model, P[4], backend='torch', lean=False)).abs()
    monkeypatch.undo()
    other = (ours - logits(model, P[4], backend='torch', lean=False)).abs()
    assert same.quantile(.1) < 1e-5 < other.quantile(.1)      # near a half, a rounding goes either way

@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize('mode', ['recompute', 'swap'])
@pytest.mark.parametrize('kv', ['auto', 'int8'])
@pytest.mark.parametrize('arch', ['llama', 'gemma3_text'])
def test_the_same_in_any_company(arch, dtype, mode, kv):
    "Alone, in a crowd short of memory, prompts in pieces, with guesses: tokens and log probabilities to the last bit"
    model = quantise(wide(arch, dtype=dtype, num_hidden_layers=2), 4)
    wishes = [sp(18, logprobs=2), sp(14, temperature=1., seed=5), sp(20, repetition_penalty=1.3), sp(),
              sp(12, temperature=.7, seed=2)]
    with engine(model, prefix_caching=False, kv_dtype=kv) as one:
        alone = [one.generate([p], w, use_tqdm=False)[0].outputs[0] for p, w in zip(P, wishes)]
    guessing = dict(guesses='lookup', guess_when='always')
    for more in dict(max_num_batched_tokens=8), dict(num_blocks=7, watermark=0.), guessing:
        knobs = dict(backend='cpu', block_size=16, num_blocks=24, check=True, preemption=mode, kv_dtype=kv)
        with LLM(model, **{**knobs, **more}) as llm:
            outs = llm.generate(P, wishes, use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outs] == [c.token_ids for c in alone]
            assert [o.outputs[0].logprobs for o in outs] == [c.logprobs for c in alone]
            quiet(llm)

def drawn(out, inputs, kind, rng):
    "A layer in codes of a kind, as files have them"
    g = torch.Generator().manual_seed(rng.randrange(10**6))
    group = 64 if kind == 'groups of 64' else 16 if kind == 'groups of 16' else 32
    groups = inputs // group
    d = (torch.rand(out, groups, generator=g) * .02).half()
    q = torch.randint(0, 256 if 'byte' in kind else 16, (out, groups, group), dtype=torch.uint8, generator=g)
    if kind == 'signed byte': return CodedLinear(Codes(q.view(torch.int8), d), None, torch.float32)
    zeros = torch.randint(0, 16, (out, groups), dtype=torch.uint8, generator=g)
    if kind == 'zeros': return CodedLinear(Codes(q, d, None, zeros), None, torch.float32)
    if kind == 'zero of 8': return CodedLinear(Codes(q, d, None, 8), None, torch.float32)
    m = (torch.randn(out, groups, generator=g) * .1).half()
    bias = torch.nn.Parameter(torch.randn(out, generator=g), False) if kind == 'bias' else None
    return CodedLinear(Codes(q, d.float() / 3 if kind == 'odd scales' else d, m), bias, torch.float32)

KINDS = ['offsets', 'zero of 8', 'zeros', 'signed byte', 'byte', 'groups of 64', 'bias', 'odd scales']

@pytest.mark.parametrize('seed', range(12))
def test_layers_side_by_side(seed):
    "Of any kinds: what C++ reads stands for the same weights, up to a rounding"
    rng = random.Random(seed)
    parts = [drawn(rng.choice([16, 40]), 64, rng.choice(KINDS), rng) for _ in range(rng.randint(1, 3))]
    laid, pad = Laid(False), rng.choice([1, 16])
    m = laid.matrix(parts, pad)
    assert m.bits in (4, 8) and laid.coded
    rows = sum(-(-p.out_features // pad) * pad for p in parts)
    assert (m.outputs, m.inputs) == (rows, 64)
    want = torch.cat([torch.nn.functional.pad(p.weight, (0, 0, 0, -p.out_features % pad)) for p in parts])
    torch.testing.assert_close(read(m), want, rtol=1e-5, atol=1e-5)

def read(m):
    "The weights that a `Matrix` stands for"
    per = 4 * m.bits * 48 + 48 * (1 if m.zero >= 0 else 2) * (2 if m.half else 4)
    n, groups = -(-m.outputs // 48), m.inputs // 32
    there = (ctypes.c_ubyte * (n * groups * per)).from_address(m.panels)
    raw = torch.frombuffer(bytearray(there), dtype=torch.uint8).view(n, groups, per)
    q = raw[..., :4 * m.bits * 48].reshape(n, groups, m.bits, 48, 4)
    if m.bits == 4: q = torch.stack([q & 15, q >> 4], 3).flatten(2, 3)
    q = q.permute(0, 3, 1, 2, 4).reshape(n * 48, groups, 32).float()
    s = raw[..., 4 * m.bits * 48:].contiguous().view(torch.float16 if m.half else torch.float32).float()
    d, o = s[..., :48].transpose(1, 2).reshape(n * 48, groups, 1), s[..., 48:]
    w = (q - m.zero) * d if m.zero >= 0 else q * d + o.transpose(1, 2).reshape(n * 48, groups, 1)
    return w.flatten(1)[:m.outputs]

def test_other_groups_are_unpacked():
    "Groups of 16 have no product of their own: the layer becomes floats, and the answers those of floats"
    model = quantise(wide(), 4, group=16)
    assert misfit(model) is None
    with engine(model) as llm: assert 'lean' in llm.runner.path and not llm.runner.executor.lean.laid.coded
    assert torch.equal(logits(model, P[4]), logits(unpack(model), P[4]))

def test_who_has_no_numbers_ends_alone():
    "A token whose embedding is infinite: its request ends by name, those beside it go on as if it were not there"
    plain = wide(tie_word_embeddings=False)
    embed = plain.hf_model.model.embed_tokens
    with torch.no_grad(): embed.weight[77] = torch.inf
    model = swapped(plain)
    with engine(model) as llm:
        bad, good = llm.add([5, 77, 9], sp(8)), llm.add(P[2], sp(8))
        outs = {}
        while llm.has_unfinished: outs |= {o.request_id: o for o in llm.step()}
        assert outs[bad].failure.code == 'nan_logits' and outs[good].outputs[0].finish_reason == 'length'
        assert outs[good].outputs[0].token_ids == llm.generate([P[2]], sp(8), use_tqdm=False)[0].outputs[0].token_ids
        quiet(llm)

def swapped(model):
    "All but the embedding in codes"
    def other(m): return coded(m, codes_of(m.weight), torch.float32) if type(m) is torch.nn.Linear else None
    swap(model.hf_model, other)
    return model
