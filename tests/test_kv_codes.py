"""Keys and values in codes of 8 bits: what they cost, what they lose, and that nobody but their owner notices."""
import math, shutil
from pathlib import Path
import pytest, torch
from cbatch import LLM, SamplingParams
from cbatch.core import Plan, Request, Scheduled
from cbatch.kernels import cpu, lean
from cbatch.model import tiny_lm
from cbatch.paged_attention import AttnMeta, KVShape, TorchBackend, from_codes, to_codes
from cbatch.params import EngineConfig, ParamError
from cbatch.ragged_batch import pack
from cbatch.runner import Executor, host_blocks, kv_shape, pool_blocks
from harness import in_cpp, quiet, run_schedule

ROOT = Path(__file__).resolve().parent.parent
needs_compiler = pytest.mark.skipif(not (shutil.which('c++') or shutil.which('g++')), reason='no C++ compiler')
@pytest.fixture(autouse=True)
def native():
    with in_cpp(): yield

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
PROMPTS = [list(range(40, 75)), [9] * 15, list(range(20, 37)), list(range(40, 70)) + [1, 2]]

def test_a_code_is_half_a_step_away_at_most():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, 33, generator=g) * torch.logspace(-30, 30, 50)[:, None, None]
    codes, scale = to_codes(x)
    assert (codes.abs().amax(-1) == 127).all()
    assert ((from_codes(codes, scale) - x).abs() <= scale[..., None] * .50001).all()
    halves = torch.tensor([[127, .5, 1.5, 2.5, -.5, -1.5]])                        # to even
    assert to_codes(halves)[0].tolist() == [[127, 0, 2, 2, 0, -2]]

BACKENDS = [TorchBackend, pytest.param(cpu.CPUBackend, marks=needs_compiler)]
@pytest.mark.parametrize('backend', BACKENDS)
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=['float32', 'bfloat16'])
def test_what_is_kept_of_odd_vectors(backend, dtype):
    "Zeros, the smallest and the largest numbers there are, infinities: the codes of the definition, in any backend"
    be = backend(KVShape(3, 16, 2, 2, 32, dtype, kv_dtype='int8'))
    for x in be.tensors: x.fill_(math.nan if x.is_floating_point() else 77)
    x = torch.randn(9, 2, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[1] = 0
    x[2] *= 1e-44
    x[3] = torch.finfo(dtype).max / 2
    x[4, 0, 5], x[5, 1, 7], x[6, 0, 0] = math.inf, -math.inf, math.nan
    slots = torch.tensor([16, 17, 33, 34, 35, 50, 51, 52, 63])
    be.write(1, x, x.flip(0), AttnMeta([9], [9], None, slots))
    for got, want in zip(be.read(1, slots), (x, x.flip(0))):
        assert torch.equal(got.nan_to_num(7.), from_codes(*to_codes(want), dtype).nan_to_num(7.))
    assert be.read(1, slots)[0].isnan().all(-1).nonzero().tolist() == [[4, 0], [5, 1], [6, 0]]

@pytest.mark.parametrize('backend', BACKENDS)
def test_blocks_move_with_their_scales(backend):
    be = backend(KVShape(5, 16, 2, 2, 32, kv_dtype='int8'))
    k, v = torch.randn(2, 16, 2, 32, generator=torch.Generator().manual_seed(2))
    at = lambda b: torch.arange(16) + 16 * b
    for layer in (0, 1): be.write(layer, k + layer, v, AttnMeta([16], [16], None, at(2)))
    want = [be.read(layer, at(2)) for layer in (0, 1)]
    be.reserve_host(3); be.swap_out([(2, 3)])
    for x in be.tensors: x.zero_()
    be.swap_in([(3, 1)]); be.copy_blocks([(1, 5)])
    for layer in (0, 1):
        for b in (1, 5): assert all(torch.equal(*x) for x in zip(be.read(layer, at(b)), want[layer]))
        assert not be.read(layer, at(2))[0].any()

def test_sizes_follow():
    lm = tiny_lm('llama'); D = lm.head_dim
    small = EngineConfig(kv_dtype='int8', kv_cache_mb=1, preemption='swap', swap_mb=2)
    plain = EngineConfig(kv_cache_mb=1)
    assert kv_shape(lm, plain).token_bytes == lm.kv_bytes_per_token
    assert kv_shape(lm, small).token_bytes * 4 * D == lm.kv_bytes_per_token * (D + 4)
    block = 16 * kv_shape(lm, small).token_bytes
    assert pool_blocks(lm, small) == 10**6 // block - 1 and host_blocks(lm, small, 7) == 2 * 10**6 // block
    executor = Executor(lm, small, 20, num_host_blocks=4)
    be = executor.backend
    assert sum(x.nbytes for x in be.tensors) == be.shape.num_bytes == 21 * block
    assert sum(x.nbytes for x in be.host) == 5 * block
    with LLM(lm, kv_dtype='int8', num_blocks=20) as llm:
        assert llm.kv_bytes == 21 * block and 'MB of int8' in repr(llm) and 'MB of int8' in llm._repr_html_()
    with LLM(lm, num_blocks=20) as llm: assert 'int8' not in repr(llm)

def test_what_there_is_not_is_refused():
    with pytest.raises(ParamError, match="kv_dtype='fp8': must be auto or int8"): EngineConfig(kv_dtype='fp8')
    with pytest.raises(ValueError, match="kv_dtype"): EngineConfig(kv_cache_dtype='int8')

def alone(lm, prompts, params, **config):
    "The oracle of KV in codes: one request at a time, none remembered"
    with LLM(lm, kv_dtype='int8', max_num_seqs=1, prefix_caching=False, num_blocks=20, **config) as llm:
        return [llm.generate([p], params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]

PATHS = {'torch': dict(backend='torch', lean=False), 'attention in C++': dict(lean=False), 'lean': {}}

@needs_compiler
@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('arch', ['llama', 'qwen3', 'gemma2'])
def test_every_path_gives_the_tokens_of_the_one_who_is_alone(arch, path):
    "Chunks, a pool that runs short in both ways, prefix hits, several answers to one prompt"
    lm = tiny_lm(arch); want = alone(lm, PROMPTS, GREEDY, **PATHS[path])
    for how in (dict(force_preempt=3), dict(force_preempt=3, preemption='swap'), {}):
        with LLM(lm, max_num_seqs=3, max_num_batched_tokens=24, num_blocks=20, check=True, kv_dtype='int8', **how,
                 **PATHS[path]) as llm:
            for _ in range(2):
                assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == want
            assert llm.metrics['num_preemptions' if how else 'num_cached_tokens'] > 0
            quiet(llm)

@needs_compiler
def test_forks_share_codes_until_they_part():
    lm, params = tiny_lm('llama'), SamplingParams(temperature=1., seed=4, n=3, max_tokens=12, ignore_eos=True)
    answers = lambda llm: [sorted(tuple(c.token_ids) for c in o.outputs)
                           for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    with LLM(lm, kv_dtype='int8', num_blocks=60, max_num_seqs=3, prefix_caching=False) as llm: want = answers(llm)
    with LLM(lm, kv_dtype='int8', num_blocks=30, max_num_seqs=9, max_num_batched_tokens=20, force_preempt=4) as llm:
        assert answers(llm) == want and llm.metrics['num_preemptions']

@needs_compiler
@pytest.mark.parametrize('seed', range(40))
def test_schedule(seed): run_schedule(seed, kv_dtype='int8')

@needs_compiler
@pytest.mark.parametrize('path', PATHS)
def test_nan_stays_with_its_request(path):
    "A key that is no number spoils the request that it belongs to, and whoever gets its block afterwards is well"
    lm = tiny_lm('llama')
    with LLM(lm, kv_dtype='int8', num_blocks=9, max_num_seqs=2, prefix_caching=False, **PATHS[path]) as llm:
        want = alone(lm, PROMPTS[1:3], GREEDY, **PATHS[path])
        for i, p in enumerate(PROMPTS[1:3]): llm.add(p, GREEDY, request_id=str(i))
        llm.step(); llm.step()
        be, block = llm.runner.executor.backend, llm.requests['0'].request.block_table[0]
        be.k_scales[0][block] = math.nan
        done = {}
        while llm.has_unfinished: done |= {o.request_id: o for o in llm.step() if o.finished}
        assert done['0'].error and done['1'].outputs[0].token_ids == want[1]
        assert [llm.generate([p], GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in PROMPTS[1:3]] == want

def logits_of(llm, ids):
    "Of every token of a prompt, computed in one step"
    size = llm.config.block_size
    r = Request('x', list(ids), GREEDY, 1, block_table=list(range(1, 2 + len(ids) // size)))
    batch = pack(Plan(0, 0., scheduled=[Scheduled(r, 0, len(ids), rows=1)]), size)
    batch.logit_rows = torch.arange(len(ids))
    return llm.runner.executor.forward(batch).float().log_softmax(-1)

@pytest.mark.slow
@needs_compiler
def test_what_is_lost_of_a_real_model(smollm2):
    "Distributions of the next token over some texts: how far codes move them from those of float32"
    texts = [(ROOT/name).read_text()[at:at + 2500] for name, at in
             (('LICENSE', 0), ('README.md', 0), ('CONTRIBUTING.md', 0), ('cbatch/scheduler.py', 3000))]
    prompts = [smollm2.tokenizer(t)['input_ids'][:576] for t in texts]
    with LLM(smollm2, num_blocks=40) as plain, LLM(smollm2, num_blocks=40, kv_dtype='int8') as small:
        pairs = [(logits_of(plain, p), logits_of(small, p)) for p in prompts]
    a, b, next_ids = *(torch.cat(x) for x in zip(*pairs)), [i for p in prompts for i in (*p[1:], -1)]
    kl = (a.exp() * (a - b)).sum(-1).mean().item()
    told = torch.tensor([i >= 0 for i in next_ids])
    nll = [-x[told].gather(1, torch.tensor(next_ids)[told][:, None]).mean().item() for x in (a, b)]
    same = (a.argmax(-1) == b.argmax(-1)).float().mean().item()
    print(f'{len(a)} tokens: KL {kl:.5f}, NLL {nll[1] - nll[0]:+.5f}, same top token {same:.1%}')
    assert kl <= .002 and abs(nll[1] - nll[0]) <= .005 and same >= .97
