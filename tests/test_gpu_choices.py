"What is decided for a GPU, on a machine without one: the card is made up, the decision is real"
import gc, importlib.util, subprocess, sys, weakref
from pathlib import Path
import pytest, torch
from cbatch import LLM, SamplingParams
from cbatch.core import EngineConfig
from cbatch.model import tiny_lm
from cbatch.paged_attention import best_backend
from cbatch.ragged_batch import pool_blocks, step_bytes

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

@pytest.mark.parametrize('capability,dtype,want', [((7, 5), torch.float16, 'triton'), ((7, 5), torch.bfloat16, 'torch'), ((7, 0), torch.float16, 'torch'), ((8, 0), torch.bfloat16, 'triton'),
                                                   ((9, 0), torch.float16, 'triton'), ((9, 0), torch.float32, 'torch'), ((12, 0), torch.bfloat16, 'triton')])
def test_backend_by_capability(monkeypatch, capability, dtype, want):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: capability)
    assert best_backend('cuda', dtype) == want and best_backend('mps', dtype) == 'torch'

@pytest.mark.parametrize('kw', [dict(block_size=24), dict(head_dim=512)])
def test_what_the_kernels_do_not_know_goes_through_torch(monkeypatch, kw):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (9, 0))
    assert best_backend('cuda', torch.float16, **kw) == 'torch'

def test_no_triton_no_kernels(monkeypatch):
    "On Windows there is CUDA and no Triton"
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (9, 0)); monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    assert best_backend('cuda', torch.float16) == 'torch'

def test_rocm_stays_with_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (9, 4)); monkeypatch.setattr(torch.version, 'hip', '6.4')
    assert best_backend('cuda', torch.float16) == 'torch'

@pytest.mark.parametrize('capability,dots', [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_dots_by_capability(monkeypatch, capability, dots):
    triton = pytest.importorskip('cbatch.kernels.triton_backend')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: capability)
    assert triton.has_dots('cuda') is dots and triton.has_dots('cpu')

def test_the_pool_is_what_is_left_of_the_card(monkeypatch):
    "Total times the share that may be used, less what is taken already, less what a step needs"
    lm = tiny_lm('llama')
    class OnCard:                                    # the tiny model, as if it lay on a card
        device, config, layers, dtype, vocab_size, head_dim, max_len, kv_bytes_per_token = 'cuda', lm.config, lm.layers, lm.dtype, lm.vocab_size, lm.head_dim, 10**9, lm.kv_bytes_per_token
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (12e9, 16e9))
    cfg = EngineConfig(gpu_memory_utilization=.5, max_num_batched_tokens=1000, max_num_seqs=10**5)
    room = .5 * 16e9 - 4e9 - step_bytes(OnCard, cfg)
    assert pool_blocks(OnCard, cfg) == room // (16 * lm.kv_bytes_per_token) - 1
    monkeypatch.setattr(torch.cuda, 'mem_get_info', lambda device: (8e9, 16e9))
    with pytest.raises(ValueError, match='holds no block'): pool_blocks(OnCard, cfg)

@pytest.mark.parametrize('how', ['close', 'del', 'del after an error'])
def test_an_engine_that_is_gone_leaves_nothing(how):
    "Model and pool go with the engine, without waiting for the garbage collector: a notebook runs its cells again"
    llm = LLM(tiny_lm('llama'), num_blocks=20, block_size=4)
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    gone = [weakref.ref(x) for x in (llm.model.hf_model, llm.runner.backend.k[0], llm.runner)]
    gc.collect(); gc.disable()
    try:
        if how == 'close': llm.close()
        elif how == 'del after an error':
            with pytest.raises(ValueError): llm.generate([[10**6]], GREEDY, use_tqdm=False)
            del llm
        else: del llm
        assert [g() for g in gone] == [None] * 3
    finally: gc.enable()

def test_the_script_for_a_gpu_runs_through_in_small():
    "Every part of bench/gpu.py, interpreted; it writes no record"
    pytest.importorskip('triton')
    root = Path(__file__).resolve().parent.parent
    ran = subprocess.run([sys.executable, root/'bench'/'gpu.py', '--dry-run'], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] == 'all checks passed', ran.stdout + ran.stderr[-2000:]

@pytest.mark.slow
def test_compiled_by_torch():
    "`compile=True` changes no token"
    lm, prompts = tiny_lm('llama'), [[1, 2, 3] * 7, [4, 5], [6, 7, 8] * 9]
    small = dict(num_blocks=50, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
    with LLM(lm, **small) as llm: want = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(lm, compile=True, **small) as llm: assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == want
