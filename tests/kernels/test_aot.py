"tools/aot.py at work: each planted fault is found, and a compiler that dies takes nobody along"
import importlib.util, sys
from pathlib import Path
import pytest

TOOLS = Path(__file__).resolve().parents[2]/'tools'
sys.path.insert(0, str(TOOLS))
import aot

WORKER = f'''
import os, sys
sys.path[:0] = [{str(TOOLS)!r}, {str(TOOLS.parent)!r}]
import aot
real = aot.call
def call(job, dtype):
    import torch
    from cbatch.kernels import paged_decode as d, paged_prefill as p
    plant = job['plant']
    if plant == 'abort': os.abort()
    if plant == 'raise': raise ValueError('planted')
    if plant == 'warps': p._config = lambda *args: (128, 64, 1, 1)     # too few registers
    if plant == 'tile': d._config = lambda G, BD, dot: (16, 512, 8, 4) # too much shared memory
    if plant == 'strides':\
                                             # 65 places a head: no two of them on one 16-byte grid
        wide = lambda *shape: torch.empty(*shape, 65, dtype=dtype)[..., :64]
        cache, lens = wide(3, 16, 3), torch.ones(7, dtype=torch.int32)
        return d.paged_decode(wide(7, 9), cache, cache, lens[:, None], lens, .1, num_splits=1)
    real(job, dtype)
aot.call = call
aot.worker()
'''

def rows(tmp_path, monkeypatch, **plants):
    "What is said of jobs with something planted, or nothing"
    (tmp_path/'worker.py').write_text(WORKER)
    monkeypatch.setattr(aot, '__file__', str(tmp_path/'worker.py'))
    job = dict(target='sm_80', dtype='fp16', head_dim=64, group=3, kv_heads=3, turing=False, kernel='paged_decode',
               dot=True)
    return aot.compile_all([job | dict(plant=n) | kw for n, kw in plants.items()], lambda r: None,
                           str(tmp_path/'cache'))

def test_planted_faults_are_found(tmp_path, monkeypatch):
    plants = dict(abort={}, strides={}, warps=dict(kernel='paged_prefill', head_dim=128), turing=dict(target='sm_75'),
                  again=dict(kernel='kv_write'))
    plants['raise'] = {}
    says = {}
    for r in rows(tmp_path, monkeypatch, **plants):
        says.setdefault((r['kernel'], r['target'], r['head_dim']), []).append(r['why'])
    decode = says['paged_decode', 'sm_80', 64]
    assert decode[:3:2] == ['the compiler ended its process (-6)', 'ValueError: planted']
    assert decode[1] == 'loads keys or values 2 bytes at a time, could 16'
    assert says['paged_prefill', 'sm_80', 128][0].startswith('spills')
    assert 'a dot without tensor cores' in says['paged_decode', 'sm_75', 64][0]
    assert says['kv_write', 'sm_80', 64] == ['']

def test_too_much_shared_memory(tmp_path, monkeypatch):
    r = rows(tmp_path, monkeypatch, tile=dict(head_dim=128))[0]
    assert 'shared memory' in r['why'] and not r['ok']

def test_every_job_is_for_a_gpu_with_known_limits():
    for quick in (True, False):
        todo = list(aot.jobs(quick))
        assert {j['target'] for j in todo} <= set(aot.SMEM)
        turing = {(j['kernel'], j['dtype'], j.get('dot')) for j in todo if j['target'] == 'sm_75'}
        sums = ('paged_decode', 'fp16', False), ('coded_matmul', 'fp16', False)
        assert {('kv_write', 'fp16', None), *sums} <= turing
        assert turing <= {('kv_write', 'fp16', None), *sums, ('coded_matmul', 'fp32', False)}
    assert {j['target'] for j in todo} == set(aot.SMEM) == set(aot.SM_SMEM) == set(aot.SM_THREADS)
    heads = [j for j in todo if j['kernel'] != 'coded_matmul']
    assert {j['head_dim'] for j in heads} == {64, 80, 96, 128, 256} and {j['group'] for j in heads} == {1, 3, 4, 8}
    assert {j['group'] for j in todo if j not in heads} >= {16, 32, 128}
