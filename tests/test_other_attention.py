"""Sinks, chunks, latents and narrow values against the formula, in torch and C++; and layers of several shapes."""
import math, random
from dataclasses import replace
import pytest, torch
from cbatch.backends import BACKENDS, best_backend, get_backend
from cbatch.other_attention import LayeredBackend, LayeredShape, backend_for, shape_for
from cbatch.paged_attention import AttnMeta, KVShape, attention
from cbatch.probe import AttnLayer
from harness import in_cpp

LENS = dict(queries=(1, 3, 16, 1, 7, 2), keys=(1, 15, 16, 67, 64, 130))

def difference(name, H, K, D, seed=0, scale=3., window=None, softcap=None, sinks=False, chunk=None, V=None,
               latent=False):
    "The largest between a backend and the formula, over requests of odd lengths whose neighbours are NaN"
    g, bs = torch.Generator().manual_seed(seed), 16
    rand = lambda *size: torch.randn(*size, generator=g)
    need = [-(-n // bs) for n in LENS['keys']]
    shape = KVShape(sum(need), bs, 1, K, D, value_dim=V, sinks=sinks, chunk=bool(chunk), latent=latent)
    be, free = get_backend(name, shape), (1 + torch.randperm(sum(need), generator=g)).tolist()
    for pool in be.tensors: pool[1:] = math.nan
    tables = [[free.pop() for _ in range(n)] for n in need]
    wide = torch.tensor([t + [0] * (max(need) - len(t)) for t in tables])
    keys = [rand(n, K, D) for n in LENS['keys']]
    values = [k[..., :V] if latent else rand(len(k), K, V or D) for k in keys]
    for t, k, v in zip(tables, keys, values):
        at = torch.tensor([t[i // bs] * bs + i % bs for i in range(len(k))])
        be.write(0, k, v, AttnMeta([len(k)], [len(k)], None, at))
    sink = rand(H) * scale if sinks else None
    meta = AttnMeta(list(LENS['queries']), list(LENS['keys']), wide, torch.zeros(1, dtype=torch.long))
    q = rand(sum(LENS['queries']), H, D)
    be.prepare(meta)
    more = {k: v for k, v in dict(sinks=sink, chunk=chunk).items() if v is not None}
    got = be.attend(0, q, meta, .2, window, softcap, **more)
    double = lambda x: None if x is None else x.double()
    want = [attention(q[s:s+n].double(), k.double(), v.double(), .2, window, softcap, double(sink), chunk)
            for s, n, k, v in zip(meta.starts, meta.query_lens, keys, values)]
    return (got - torch.cat(want)).abs().max().item()

@pytest.mark.parametrize('window,softcap', [(None, None), (7, None), (40, 5.)])
@pytest.mark.parametrize('H,K,D', [(9, 3, 64), (4, 4, 16), (14, 2, 96)])
@pytest.mark.parametrize('name', ['torch', 'cpu'])
def test_sinks(name, H, K, D, window, softcap):
    with in_cpp() as built:
        if name == 'cpu' and not built: pytest.skip('no compiler')
        for seed in range(2):
            assert difference(name, H, K, D, seed, window=window, softcap=softcap, sinks=True) < 2e-6

@pytest.mark.parametrize('how', [dict(chunk=8), dict(chunk=5, sinks=True), dict(V=5), dict(latent=True, V=11),
                                 dict(latent=True, V=11, chunk=16, softcap=4.)])
@pytest.mark.parametrize('H,K', [(6, 3), (4, 1)])
def test_torch_knows_all_kinds(H, K, how): assert difference('torch', H, K, 14, **how) < 2e-6

@pytest.mark.parametrize('wants', [dict(chunk=True), dict(latent=True, value_dim=8), dict(value_dim=8)])
def test_what_a_backend_never_heard_of_is_not_asked_of_it(wants):
    shape = KVShape(4, 16, 2, 2, 16, **wants)
    assert best_backend(shape) == 'torch'
    for name in set(BACKENDS) & {'cpu'}:
        with pytest.raises(ValueError, match=f"backend='{name}' knows no attention with"): get_backend(name, shape)

LAYERS = [AttnLayer(4, 2, 16), AttnLayer(4, 1, 32), AttnLayer(4, 2, 16, window=4), AttnLayer(4, 2, 16, shares=0),
          AttnLayer(4, 1, 24, value_dim=16, latent=True)]

def test_places_and_bytes():
    shape = shape_for(LAYERS, KVShape(5, 4, 0, 0, 0))
    assert isinstance(shape, LayeredShape) and [g.num_layers for g in shape.groups] == [2, 1, 1]
    assert [tuple(p) for p in shape.places] == [(0, 0), (1, 0), (0, 1), (0, 0), (2, 0)]
    assert shape.token_bytes == 4 * sum(l.kept for l in LAYERS) == 4 * (64 + 64 + 64 + 0 + 24)
    be = backend_for('torch', shape)
    assert sum(t[0].numel() * t.itemsize for t in be.tensors) == 4 * shape.token_bytes
    assert shape_for(LAYERS[:1] * 3, KVShape(5, 4, 0, 0, 0)) == KVShape(5, 4, 3, 2, 16)

def test_codes_of_layers_that_differ():
    shape = shape_for(LAYERS, KVShape(5, 4, 0, 0, 0, kv_dtype='int8'))
    be = backend_for('torch', shape)
    assert sum(t[0].numel() * t.itemsize for t in be.tensors) == 4 * shape.token_bytes

def test_what_a_reader_wants_its_owner_must_know():
    chunked = replace(LAYERS[3], chunk=8)
    assert [g.chunk for g in shape_for([*LAYERS[:3], chunked], KVShape(5, 16, 0, 0, 0)).groups] == [True, False, False]

def test_blocks_move_in_all_layers():
    rng, be = random.Random(0), backend_for('torch', shape_for(LAYERS, KVShape(5, 4, 0, 0, 0)))
    assert isinstance(be, LayeredBackend)
    for t in be.tensors: t.copy_(torch.arange(6.).view(-1, *[1] * (t.dim() - 1)).expand_as(t))
    be.reserve_host(2)
    be.swap_out([(3, 1)]); be.copy_blocks([(5, 3), (1, 2)]); be.swap_in([(1, 4)])
    assert all(t.flatten(1)[:, rng.randrange(8)].tolist() == [0, 1, 1, 5, 3, 5] for t in be.tensors)
