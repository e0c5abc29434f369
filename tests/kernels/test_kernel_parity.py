"""The kernels against attention in float64, at odd shapes.
Interpreted, with bounds and races checked, or compiled where TRITON_INTERPRET=0 and a GPU is there. `-m slow` has the
larger grid."""
import itertools, math
from contextlib import nullcontext
from dataclasses import replace
import pytest, torch
from cbatch.kernels.kv_write import INTERPRETED, kv_write
from cbatch.kernels.paged_decode import paged_decode
from cbatch.kernels.paged_prefill import paged_prefill
from reference import (DTYPES, assert_right, coded, decode, expected, far_cache, kv_case, kv_codes_right, kv_right,
                       make, prefill, sunk, vast)
from sanitizer import sanitized

DEVICE = 'cpu' if INTERPRETED else 'cuda'
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip('TRITON_INTERPRET=0 without a GPU', allow_module_level=True)
TYPES = [t for t in DTYPES if INTERPRETED or t != 'fp32']        # on a GPU fp32 attention goes through torch
checked = sanitized if INTERPRETED else nullcontext

def decodes(c, **kw):
    with checked(): assert_right(decode(paged_decode, c, **kw), c)

def prefills(c, **kw):
    with checked(): assert_right(prefill(paged_prefill, c, **kw), c)

# --- writing

@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('T, K, D, bs', [(1, 1, 64, 16), (7, 3, 64, 16), (5, 1, 80, 8), (4, 5, 96, 32),
                                         (3, 8, 128, 128), (2, 4, 256, 16), (0, 2, 64, 16)])
def test_kv_write(T, K, D, bs, dtype):
    with checked(): assert kv_right(kv_write, *kv_case(T, K, D, bs, DTYPES[dtype], device=DEVICE))

@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('T, K, D, bs', [(1, 1, 64, 16), (7, 3, 64, 16), (4, 5, 80, 8), (5, 2, 256, 16)])
@pytest.mark.filterwarnings('ignore::RuntimeWarning')       # numpy's, of what is no number
def test_kv_write_codes(T, K, D, bs, dtype):
    case = kv_case(T, K, D, bs, DTYPES[dtype], device=DEVICE)
    with checked(): assert kv_codes_right(kv_write, *case)

def test_kv_write_int32_slots():
    *case, slots = kv_case(7, 3, 64, device=DEVICE)
    assert kv_right(kv_write, *case, slots.int())

def test_kv_write_beyond_32_bits(interpreter):
    "Slot 2**21 of 1,024 elements each begins at element 2**31"
    k, v, *_ = kv_case(3, 8, 128, dtype=torch.float16)
    caches = [vast(2**31 + 2**20).view(-1, 16, 8, 128) for _ in 'kv']
    kv_write(k, v, *caches, torch.tensor([2**21, -1, 2**21 + 5]))
    for x, cache in zip((k, v), caches):
        assert torch.equal(cache[2**21 // 16, 0], x[0]) and torch.equal(cache[2**21 // 16, 5], x[2])

# --- decoding

DECODE = [ # group, kv heads, head_dim, block_size, keys of each request, the rest
    (3, 3, 64, 16, [1, 15, 16, 17, 77], {}),
    (1, 4, 64, 16, [130, 5], dict(num_splits=3)),
    (4, 2, 128, 32, [31, 32, 33, 100], dict(window=40)),
    (8, 1, 128, 16, [200, 0, 3], dict(num_splits=4, softcap=2.)),
    (7, 2, 80, 8, [7, 8, 9, 64], dict(scaling=.3)),
    (1, 3, 96, 128, [127, 128, 129], {}),
    (4, 1, 256, 32, [70, 1], dict(window=17, softcap=1.)),
    (3, 1, 64, 128, [300], dict(num_splits=8)),               # more parts than tiles: some are empty
    (5, 1, 64, 16, [90, 64, 65], dict(num_splits=2, window=64)),
    (20, 1, 64, 16, [40, 0], {}),                             # a group larger than a tile's rows
]

@pytest.mark.parametrize('dot', [True, False], ids=['dot', 'sum'])
@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('G, K, D, bs, lens, kw', DECODE, ids=[f'G{c[0]}-K{c[1]}-D{c[2]}-bs{c[3]}' for c in DECODE])
def test_decode(G, K, D, bs, lens, kw, dtype, dot):
    kw = dict(kw); splits = kw.pop('num_splits', 1)
    decodes(make(lens, G=G, K=K, D=D, bs=bs, dtype=DTYPES[dtype], device=DEVICE, **kw), num_splits=splits, dot=dot)

@pytest.mark.parametrize('dot', [True, False], ids=['dot', 'sum'])
@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('G, K, D, bs, lens, kw', DECODE, ids=[f'G{c[0]}-K{c[1]}-D{c[2]}-bs{c[3]}' for c in DECODE])
def test_decode_of_codes(G, K, D, bs, lens, kw, dtype, dot):
    kw = dict(kw); splits = kw.pop('num_splits', 1)
    c = make(lens, G=G, K=K, D=D, bs=bs, dtype=DTYPES[dtype], device=DEVICE, **kw)
    decodes(coded(c), num_splits=splits, dot=dot)

@pytest.mark.parametrize('splits', [None, *range(1, 9)])
def test_decode_splits(splits):
    decodes(make([150, 0, 33], G=3, device=DEVICE, dtype=DTYPES[TYPES[0]]), num_splits=splits)

@pytest.mark.parametrize('window', [1, 2, 16, 63, 64, 65, 1000])
def test_decode_windows(window):
    decodes(make([129, 64, 1], G=3, window=window, device=DEVICE, dtype=DTYPES[TYPES[0]]), num_splits=2)

SUNK = [dict(), dict(window=40), dict(softcap=2.), dict(window=17, softcap=1.), dict(G=20, K=1), dict(D=80, bs=8)]

@pytest.mark.parametrize('kind', [lambda c: c, coded], ids=['floats', 'codes'])
@pytest.mark.parametrize('kw', SUNK, ids=str)
def test_sinks(kw, kind):
    "In float32 within 2e-6; requests without keys get zeros, with a sink too"
    atol, kw = 2e-6 if INTERPRETED else None, dict(G=3, K=2, device=DEVICE, dtype=DTYPES[TYPES[0]]) | kw
    c = kind(sunk(make([129, 0, 16, 64], **kw)))
    for n, dot in ((1, True), (2, False), (8, True)):
        with checked(): assert_right(decode(paged_decode, c, num_splits=n, dot=dot), c, atol)
    c = kind(sunk(make([70, 9, 0, 30], [40, 9, 0, 1], padding=2, **kw)))
    with checked(): assert_right(prefill(paged_prefill, c), c, atol)

def test_sinks_of_other_types(interpreter):
    for dtype in (torch.float16, torch.bfloat16):
        decodes(sunk(make([70, 16], G=3, dtype=dtype)), num_splits=2)
        prefills(sunk(make([70, 16], [30, 16], G=3, dtype=dtype)))

@pytest.mark.parametrize('wrong', [torch.zeros(2), torch.zeros(3).half(), torch.zeros(6)[::2]])
def test_sinks_that_would_be_misread_are_refused(wrong):
    c = make([5], [5], G=3, device=DEVICE, dtype=DTYPES[TYPES[0]])
    with pytest.raises(ValueError, match=r'must be \[3\] of float32'):
        prefill(paged_prefill, c, sinks=wrong.to(DEVICE))
    with pytest.raises(ValueError, match=r'must be \[3\] of float32'):
        decode(paged_decode, replace(c, q=c.q[:1]), sinks=wrong.to(DEVICE))

@pytest.mark.parametrize('scaling, softcap', [(1., None), (1., 3.), (.01, 50.), (2., .5)])
def test_decode_scales(scaling, softcap):
    decodes(make([70, 3], G=2, scaling=scaling, softcap=softcap, device=DEVICE, dtype=DTYPES[TYPES[0]]))

def test_decode_large_scores():
    "exp2 of raw scores would overflow; the maximum is taken off first"
    c = make([70, 40], G=2, device=DEVICE, dtype=torch.float16)
    c = replace(c, q=c.q * 30)
    decodes(c, num_splits=2)

def test_decode_nobody():
    for lens in ([], [0, 0]): decodes(make(lens, G=2, device=DEVICE, dtype=DTYPES[TYPES[0]]), num_splits=1)
    decodes(make([0, 0], G=2, device=DEVICE, dtype=DTYPES[TYPES[0]]), num_splits=3)

@pytest.mark.parametrize('splits', [1, 3])
def test_decode_into_out(splits):
    "`out` may be a view; what is around it stays"
    c = make([100, 0, 5], G=3, K=2, device=DEVICE, dtype=DTYPES[TYPES[0]])
    wide = torch.full((3, 8, 2, 64), math.nan, dtype=c.q.dtype, device=DEVICE)
    out = wide[:, 1:-1, 0]
    with checked(): assert decode(paged_decode, c, num_splits=splits, out=out).data_ptr() == out.data_ptr()
    assert_right(out, c)
    out.fill_(math.nan)
    assert wide.isnan().all()

def test_decode_transposed_queries():
    c = make([30, 7], G=3, K=2, device=DEVICE, dtype=DTYPES[TYPES[0]])
    decodes(replace(c, q=c.q.transpose(0, 1).contiguous().transpose(0, 1)))

def test_beyond_32_bits(interpreter):
    c = far_cache(make([17], G=2, dtype=torch.float16))     # blocks 1 and 2
    assert_right(decode(paged_decode, c), c)
    assert_right(prefill(paged_prefill, c), c)

def test_caches_with_heads_first():
    "[B, K, block_size, D] in memory: strides are arguments"
    c = make([30, 7], G=2, K=3, device=DEVICE, dtype=DTYPES[TYPES[0]])
    c = replace(c, **{k: getattr(c, k).transpose(1, 2).contiguous().transpose(1, 2) for k in ('k_cache', 'v_cache')})
    decodes(c); prefills(c)

# --- prefilling

PREFILL = [ # group, kv heads, head_dim, block_size, queries, keys, the rest
    (3, 3, 64, 16, [1, 20, 7], [5, 20, 77], {}),
    (1, 2, 128, 32, [33, 64], [100, 64], dict(window=16)),
    (4, 1, 80, 8, [9, 0, 30], [9, 0, 64], dict(padding=3)),
    (8, 1, 96, 16, [17], [200], dict(softcap=2.)),
    (7, 1, 256, 16, [5, 12], [5, 40], dict(scaling=.2, padding=1)),
    (1, 1, 64, 128, [130, 1], [130, 129], dict(window=64, softcap=1.)),
    (80, 1, 64, 16, [3], [20], {}),                            # a group larger than a tile's rows
]

@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('G, K, D, bs, queries, keys, kw', PREFILL,
                         ids=[f'G{c[0]}-K{c[1]}-D{c[2]}-bs{c[3]}' for c in PREFILL])
def test_prefill(G, K, D, bs, queries, keys, kw, dtype):
    prefills(make(keys, queries, G=G, K=K, D=D, bs=bs, dtype=DTYPES[dtype], device=DEVICE, **kw))

@pytest.mark.parametrize('dtype', TYPES)
@pytest.mark.parametrize('G, K, D, bs, queries, keys, kw', PREFILL,
                         ids=[f'G{c[0]}-K{c[1]}-D{c[2]}-bs{c[3]}' for c in PREFILL])
def test_prefill_of_codes(G, K, D, bs, queries, keys, kw, dtype):
    prefills(coded(make(keys, queries, G=G, K=K, D=D, bs=bs, dtype=DTYPES[dtype], device=DEVICE, **kw)))

def test_codes_without_scales_are_refused():
    c = coded(make([5], G=3, device=DEVICE))
    for wrong in (dict(k_scales=None), dict(k_scales=None, v_scales=None), dict(v_scales=c.options['v_scales'].half()),
                  dict(v_scales=c.options['v_scales'][:, :, :0])):
        with pytest.raises(ValueError): decode(paged_decode, c, **wrong)
    plain = make([5], G=3, device=DEVICE)
    with pytest.raises(ValueError, match='scales go with int8'):
        decode(paged_decode, plain, k_scales=c.options['k_scales'], v_scales=c.options['v_scales'])

@pytest.mark.parametrize('window', [1, 2, 31, 32, 33, 1000])
def test_prefill_windows(window):
    prefills(make([70, 3], [40, 3], G=3, window=window, device=DEVICE, dtype=DTYPES[TYPES[0]]))

def test_prefill_many_short_requests():
    "More requests than tiles, empty ones among them, first and last: each tile must find its own"
    queries = [0, 1, 22, 0, 21, 1, 43, 0]
    prefills(make([n + 2 * (n > 0) for n in queries], queries, G=3, padding=5, device=DEVICE, dtype=DTYPES[TYPES[0]]))

def test_prefill_of_single_queries_is_decode():
    c = make([1, 15, 16, 17], G=3, K=2, device=DEVICE, dtype=DTYPES[TYPES[0]])
    prefills(c)

def test_prefill_nobody():
    for keys, queries, padding in (([], [], 0), ([], [], 2), ([0], [0], 0), ([0], [0], 2)):
        prefills(make(keys, queries, G=2, padding=padding, device=DEVICE, dtype=DTYPES[TYPES[0]]))

def test_prefill_into_out():
    "Rows for nobody are left as they are, and so is what is around a view"
    c = make([30, 9], [12, 9], G=3, K=2, padding=2, device=DEVICE, dtype=DTYPES[TYPES[0]])
    wide = torch.full((23, 8, 2, 64), math.nan, dtype=c.q.dtype, device=DEVICE)
    out = wide[:, 1:-1, 0]
    with checked(): prefill(paged_prefill, c, out=out)
    assert out[21:].isnan().all()
    out[21:] = 0
    assert_right(out, c)
    out.fill_(math.nan)
    assert wide.isnan().all()

# --- the larger grid

GRID = list(itertools.product([1, 3, 4, 7, 8], [64, 80, 96, 128, 256], [8, 16, 32, 128]))

@pytest.mark.slow
@pytest.mark.parametrize('G, D, bs', GRID)
def test_grid(G, D, bs):
    i = GRID.index((G, D, bs))
    dtype, window, softcap = DTYPES[TYPES[i % len(TYPES)]], [None, bs - 1, bs, bs + 1][i % 4], [None, 1.5][i // 4 % 2]
    lens = [1, bs - 1, bs, bs + 1, 0, 3 * bs + 5]
    kw = dict(G=G, D=D, bs=bs, dtype=dtype, window=window, softcap=softcap, seed=i, device=DEVICE)
    for K in (1, 2): decodes(make(lens, K=K, **kw), num_splits=1 + i % 8, dot=i % 3 > 0)
    prefills(make(lens, [1, bs - 1, 1, 2, 0, 2 * bs], padding=i % 3, **kw))

def test_reference_is_torchs_attention():
    "The reference is checked, too"
    c = make([33], [20], G=3, K=2, D=32)
    # [2, L, K, D]
    rows = torch.cat([c.k_cache[None], c.v_cache[None]])[:, c.block_tables[0, :3].long()].flatten(1, 2)[:, :33].double()
    k, v = rows.repeat_interleave(3, 2).transpose(1, 2)
    mask = torch.arange(33) <= torch.arange(13, 33)[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(c.q.double().transpose(0, 1), k, v,
                                                            attn_mask=mask).transpose(0, 1)
    torch.testing.assert_close(expected(c, **c.options), want)
