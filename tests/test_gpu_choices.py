"What is decided for a GPU, on a machine without one: the card is made up, the decision is real"
import gc, importlib.util, inspect, subprocess, sys, weakref
from pathlib import Path
import pytest, torch
from cbatch import LLM, SamplingParams
from cbatch.backends import BACKENDS, best_backend, get_backend, register_backend
from cbatch.params import EngineConfig
from cbatch.model import tiny_lm
from cbatch.paged_attention import Backend, KVShape, PagedKV, TorchBackend
from cbatch.runner import pool_blocks, step_bytes

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)

def kv(device, dtype=torch.float16, block_size=16, head_dim=64):
    return KVShape(4, block_size, 1, 2, head_dim, dtype, device)

@pytest.mark.parametrize('capability,dtype,want', [((7, 5), torch.float16, 'triton'),
                                                   ((7, 5), torch.bfloat16, 'torch'), ((7, 0), torch.float16, 'torch'),
                                                   ((8, 0), torch.bfloat16, 'triton'),
                                                   ((9, 0), torch.float16, 'triton'), ((9, 0), torch.float32, 'torch'),
                                                   ((12, 0), torch.bfloat16, 'triton')])
def test_backend_by_capability(monkeypatch, capability, dtype, want):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: capability)
    assert best_backend(kv('cuda', dtype)) == want and best_backend(kv('mps', dtype)) == 'torch'

@pytest.mark.parametrize('kw', [dict(block_size=24), dict(head_dim=512)])
def test_what_the_kernels_do_not_know_goes_through_torch(monkeypatch, kw):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (9, 0))
    assert best_backend(kv('cuda', **kw)) == 'torch'

def test_no_triton_no_kernels(monkeypatch):
    "On Windows there is CUDA and no Triton"
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (9, 0))
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    assert best_backend(kv('cuda')) == 'torch'

def test_rocm_stays_with_torch(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (9, 4))
    monkeypatch.setattr(torch.version, 'hip', '6.4')
    assert best_backend(kv('cuda')) == 'torch'

def fresh(code):
    "The modules of ours that are loaded after `code`, in a new process"
    ran = subprocess.run([sys.executable, '-c', code
                          + "; import sys; print(*(m for m in sys.modules if m.startswith('cbatch.')))"],
                         capture_output=True, text=True, check=True)
    return set(ran.stdout.splitlines()[-1].split())

def test_an_engine_on_a_cpu_loads_nothing_for_gpus():
    loaded = fresh("from cbatch import LLM; from cbatch.model import tiny_lm; LLM(tiny_lm('llama'), num_blocks=20)")
    assert 'cbatch.backends' in loaded and not loaded & {'cbatch.kernels.kv_write', 'cbatch.kernels.triton_backend'}

def test_a_choice_for_a_gpu_loads_nothing_for_cpus():
    pytest.importorskip('triton')
    loaded = fresh("import torch; torch.cuda.get_device_capability = lambda device=None: (9, 0)\n"
                   "from cbatch.backends import best_backend; from cbatch.paged_attention import KVShape\n"
                   "assert best_backend(KVShape(4, 16, 1, 2, 64, torch.float16, 'cuda')) == 'triton'")
    assert 'cbatch.kernels.triton_backend' in loaded and not loaded & {'cbatch.kernels.cpu', 'cbatch.kernels.lean'}

@pytest.mark.parametrize('name', BACKENDS)
def test_each_backend_does_what_is_asked_of_one(name):
    "By attributes, and with the arguments that the list says"
    if name.startswith('triton'): pytest.importorskip('triton')
    cls = BACKENDS[name]()
    for what, asked in vars(Backend).items():
        if what.startswith('_') and what != '__init__': continue
        has = getattr(cls, what)
        assert callable(has)
        if what != 'fits':
            got, want = (list(inspect.signature(f).parameters) for f in (has, asked))
            more = [dict(sinks='sinks', chunks='chunk').get(w) for w in ('sinks', 'chunks') if w in cls.can] if (
                what == 'attend' and hasattr(cls, 'can')) else []
            assert got == want + more, what
    assert list(inspect.signature(cls.fits).parameters) == ['shape']

SAID = [('cpu', kv('cuda', torch.float32), 'on cuda: needs a CPU'),
        ('cpu', kv('cpu'), "use dtype='float32' or 'bfloat16'"),
        ('cpu', kv('cpu', torch.float32, block_size=24), 'block_size=24: must be a multiple of 16'),
        ('cpu', kv('cpu', torch.float32, head_dim=24), 'head_dim=24: must be a multiple of 16'),
        ('triton', kv('mps'), 'on mps: needs a GPU'), ('triton', kv('cuda', torch.float32),
                                                       "use dtype='float16' or 'bfloat16'"),
        ('triton', kv('cuda', torch.bfloat16), 'capability 7.5: needs 8.0'),
        ('triton', kv('cuda', block_size=24), 'block_size=24: must be a power of two'),
        ('triton', kv('cuda', head_dim=512), 'head_dim=512: must be at most 256')]

@pytest.mark.parametrize('name,shape,why', SAID, ids=[f'{n}: {w}' for n, _, w in SAID])
def test_what_does_not_fit_is_said(monkeypatch, name, shape, why):
    "By `fits`, in a sentence; by the constructor, with the same; and 'auto' takes another"
    if name == 'triton': monkeypatch.setattr(pytest.importorskip('cbatch.kernels.triton_backend'), 'INTERPRETED', False)
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: (7, 5))
    said = BACKENDS[name]().fits(shape)
    assert why in said and said.startswith(f"backend='{name}'")
    with pytest.raises(ValueError) as e: get_backend(name, shape)
    assert str(e.value) == said and best_backend(shape) != name

@pytest.mark.parametrize('name', ['torch', 'cpu'])
def test_what_was_made_keeps_its_shape(monkeypatch, name):
    monkeypatch.setenv('CBATCH_NATIVE', '1')
    shape = kv('cpu', torch.float32)
    if BACKENDS[name]().fits(shape): pytest.skip('no C++ compiler')
    be = get_backend(name, shape)
    assert isinstance(be, Backend) and be.shape is shape and not isinstance(PagedKV(shape), Backend)

def test_a_backend_of_ones_own(monkeypatch):
    monkeypatch.setattr('cbatch.backends.BACKENDS', dict(BACKENDS))
    class Mine(TorchBackend):
        @classmethod
        def fits(cls, shape): return 'not today' if shape.block_size > 4 else None
    register_backend('mine', Mine)
    with LLM(tiny_lm('llama'), backend='mine', num_blocks=20, block_size=4) as llm:
        assert type(llm.runner.executor.backend) is Mine
    with pytest.raises(ValueError, match='not today'):
        LLM(tiny_lm('llama'), backend='mine', num_blocks=20, block_size=8)
    with pytest.raises(ValueError, match="backend='yours': know auto, torch, cpu, triton, triton-turing, mine"):
        LLM(tiny_lm('llama'), backend='yours', num_blocks=20)

@pytest.mark.parametrize('capability,dots', [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_dots_by_capability(monkeypatch, capability, dots):
    triton = pytest.importorskip('cbatch.kernels.triton_backend')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: capability)
    assert triton.has_dots('cuda') is dots and triton.has_dots('cpu')

@pytest.mark.parametrize('capability,D,fits', [((10, 0), 256, False), ((10, 0), 128, True), ((9, 0), 256, True)])
def test_codes_where_there_are_registers_for_them(monkeypatch, capability, D, fits):
    triton = pytest.importorskip('cbatch.kernels.triton_backend')
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: capability)
    for kv, ok in (('int8', fits), ('auto', True)):
        why = triton.TritonBackend.fits(KVShape(4, 16, 1, 2, D, torch.float16, 'cuda', kv))
        assert why is None if ok else "kv_dtype='int8' and head_dim=256" in why

def test_the_pool_is_what_is_left_of_the_card(monkeypatch):
    "Total times the share that may be used, less what is taken already, less what a step needs"
    lm = tiny_lm('llama')
    class OnCard:                                    # the tiny model, as if it lay on a card
        device, config, layers, dtype, vocab_size, head_dim, max_len, num_layers, num_kv_heads, state_bytes = (
            'cuda', lm.config, lm.layers, lm.dtype, lm.vocab_size, lm.head_dim, 10**9,
            lm.num_layers, lm.num_kv_heads, 0)
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
    gone = [weakref.ref(x) for x in (llm.model.hf_model, llm.runner.executor.backend.k[0], llm.runner)]
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
    ran = subprocess.run([sys.executable, root/'bench'/'gpu.py', '--dry-run'], capture_output=True, text=True,
                         timeout=300)
    assert ran.returncode == 0 and ran.stdout.splitlines()[-1] == 'all checks passed', ran.stdout + ran.stderr[-2000:]

@pytest.mark.slow
def test_compiled_by_torch():
    "`compile=True` changes no token"
    lm, prompts = tiny_lm('llama'), [[1, 2, 3] * 7, [4, 5], [6, 7, 8] * 9]
    small = dict(num_blocks=50, block_size=4, max_num_seqs=4, max_num_batched_tokens=32)
    with LLM(lm, **small) as llm: want = [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(lm, compile=True, **small) as llm:
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)] == want
