"""Cases for the kernels, full of traps, and what they must give.
That is attention in float64, written from the formula. The traps: blocks out of order; every cache slot that no token
owns is NaN, the null block 0 among them; table entries beyond a request's end point far outside the cache; queries are
a slice of a wider tensor; rows for nobody hold NaN; new memory is NaN until it is written."""
import math, mmap
from contextlib import contextmanager
from dataclasses import dataclass, replace
import torch
from cbatch.paged_attention import from_codes, to_codes
from cbatch.quant import Codes

DTYPES = dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16)
# Outputs are averages of values of size 1, some up to 4.
# 16-bit types: weights and outputs are rounded to half an ulp each, fp16 2**-11, bf16 2**-8.
# fp32: scores of size 10 are right to 10 * 2**-24, which the exponential hands on to the weights; sums of some hundred
# products add to that.
ATOL = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

@dataclass
class Case:
    q:torch.Tensor            # [T, H, D]
    k_cache:torch.Tensor      # [B, block_size, K, D]
    v_cache:torch.Tensor
    block_tables:torch.Tensor # [R, W] int32
    seq_lens:torch.Tensor     # [R] int32
    query_starts:torch.Tensor # [R+1] int32
    options:dict              # scaling, window, softcap

def make(seq_lens, query_lens=None, G=1, K=1, D=64, bs=16, dtype=torch.float32, padding=0, seed=0, device='cpu',
         **options):
    "Requests of `seq_lens` keys whose last `query_lens` tokens ask (None: one each), and `padding` more query rows"
    g = torch.Generator().manual_seed(seed)
    rnd = lambda *shape: torch.randn(*shape, generator=g).to(dtype)
    query_lens = [1] * len(seq_lens) if query_lens is None else query_lens
    blocks = [-(-n // bs) for n in seq_lens]
    ids = iter((1 + torch.randperm(sum(blocks), generator=g)).tolist())
    tables = torch.full((len(seq_lens), max(blocks, default=0) + 1), 2**30, dtype=torch.int32)
    caches = torch.full((2, sum(blocks) + 1, bs, K, D), math.nan, dtype=dtype)
    for r, n in enumerate(seq_lens):
        for j in range(blocks[r]):
            tables[r, j] = b = next(ids)
            caches[:, b, :n - j * bs] = rnd(2, min(bs, n - j * bs), K, D)
    T = sum(query_lens)
    q = rnd(T + padding, (G + 2) * K, D).to(device)[:, K:-K]
    q[T:] = math.nan
    if query_lens == [1] * len(seq_lens):
        q[torch.tensor([not n for n in seq_lens] + [False] * padding, dtype=torch.bool)] = math.nan
    i32 = lambda x: torch.tensor(x, dtype=torch.int32, device=device)
    options = dict(scaling=D**-.5) | options
    return Case(q, *caches.to(device), tables.to(device), i32(seq_lens),
                i32([0, *query_lens]).cumsum(0, dtype=torch.int32), options)

def sunk(c:Case, size=3.):
    "The same case with sinks, some worth far more than the keys and some less"
    heads = c.q.shape[1]
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(heads)) * size + 2
    return replace(c, options=c.options | dict(sinks=sinks.to(c.q.device)))

def coded(c:Case):
    "The same case with keys and values in codes; what no token owns has rubbish for codes and NaN for a scale"
    kept = [to_codes(x) for x in (c.k_cache, c.v_cache)]
    for codes, scale in kept: codes[scale.isnan()] = 77
    (k, k_scales), (v, v_scales) = kept
    return replace(c, k_cache=k, v_cache=v, options=c.options | dict(k_scales=k_scales, v_scales=v_scales))

def expected(c:Case, scaling, window=None, softcap=None, k_scales=None, v_scales=None, sinks=None):
    "[T, H, D] float64; zeros for who sees nothing"
    if k_scales is not None:
        c = replace(c, k_cache=from_codes(c.k_cache, k_scales), v_cache=from_codes(c.v_cache, v_scales))
    out = torch.zeros(c.q.shape, dtype=torch.float64)
    K, bs = c.k_cache.shape[2], c.k_cache.shape[1]
    all_q, caches, tables, starts = (c.q.double().cpu(), [c.k_cache.cpu(), c.v_cache.cpu()], c.block_tables.tolist(),
                                     c.query_starts.tolist())
    for r, L in enumerate(c.seq_lens.tolist()):
        at = [(tables[r][p // bs], p % bs) for p in range(L)]
        for row in range(starts[r], starts[r + 1] if L else starts[r]):
            p = L - starts[r + 1] + row                          # the position of this query
            seen = at[max(0, p + 1 - window) if window else 0:p + 1]
            k, v = (torch.stack([cache[b, s] for b, s in seen]).double() for cache in caches)   # [n, K, D]
            q = all_q[row].unflatten(0, (K, -1))                                                # [K, G, D]
            scores = torch.einsum('kgd,nkd->kgn', q, k) * scaling
            if softcap: scores = softcap * torch.tanh(scores / softcap)
            weights = scores.softmax(-1)
            if sinks is not None:                                # one more score, whose value is nothing
                more = sinks.double().cpu().view(*scores.shape[:2], 1)
                weights = torch.cat([scores, more], -1).softmax(-1)[..., :-1]
            out[row] = torch.einsum('kgn,nkd->kgd', weights, v).flatten(0, 1)
    return out

@contextmanager
def new_memory_is_nan():
    "What `torch.empty` returns is NaN: a place that no program writes shows"
    torch.use_deterministic_algorithms(True)
    try: yield
    finally: torch.use_deterministic_algorithms(False)

def decode(kernel, c:Case, **kw):
    with new_memory_is_nan(): return kernel(c.q, c.k_cache, c.v_cache, c.block_tables, c.seq_lens, **c.options | kw)

def prefill(kernel, c:Case, **kw):
    with new_memory_is_nan():
        return kernel(c.q, c.k_cache, c.v_cache, c.block_tables, c.seq_lens, c.query_starts, **c.options | kw)

def assert_right(out, c:Case, atol=None):
    "Equal to the reference wherever a request's query is; padding is zero"
    want, T = expected(c, **c.options), int(c.query_starts[-1])
    assert not out[:T].isnan().any(), 'NaN: something was read that no token owns, or not written'
    err = (out.cpu().double() - want)[:T].abs().max().item() if T else 0
    assert err <= (atol or ATOL[c.q.dtype]), f'off by {err:.2g}'
    assert not out[T:].any(), 'padding is not zero'

def kv_case(T, K, D, bs=16, dtype=torch.float32, blocks=None, seed=0, device='cpu'):
    """k, v, caches and slots for kv_write.
    Views as models hand them over, every third row padding, the cache full of what must stay."""
    g = torch.Generator().manual_seed(seed)
    blocks = blocks or T // bs + 2
    rnd = lambda *shape: torch.randn(*shape, generator=g).to(dtype).to(device)
    qkv = rnd(T, 4 * K, D)
    slots = bs + torch.randperm((blocks - 1) * bs, generator=g)[:T]      # block 0 is the null block: nobody's
    slots[1::3] = -1
    return qkv[:, K:2*K], rnd(K, T, D).transpose(0, 1), rnd(blocks, bs, K, D), rnd(blocks, bs, K, D), slots.to(device)

def kv_right(kernel, k, v, k_cache, v_cache, slots):
    "Every bit of both caches"
    want = [k_cache.clone(), v_cache.clone()]
    for i, s in enumerate(slots.tolist()):
        if s >= 0:
            for x, w in zip((k, v), want): w[s // w.shape[1], s % w.shape[1]] = x[i]
    kernel(k, v, k_cache, v_cache, slots)
    return torch.equal(k_cache, want[0]) and torch.equal(v_cache, want[1])

def kv_codes_right(kernel, k, v, k_cache, v_cache, slots):
    "Every bit of codes and scales, but the codes of what is no number"
    k, v = k.clone(), v.clone()
    k[0, 0, 3], v[-1, -1, 0] = math.nan, -math.inf
    k[len(k) // 2], v[0, 0] = 0, v[0, 0] * 1e-6
    caches = [torch.full(x.shape, 77, dtype=torch.int8, device=x.device) for x in (k_cache, v_cache)]
    scales = [torch.full(x.shape[:3], 5., device=x.device) for x in caches]
    want = [x.clone() for x in caches + scales]
    for i, s in enumerate(slots.tolist()):
        for x, codes, scale in ((k, *want[::2]), (v, *want[1::2])):
            if s >= 0: codes.flatten(0, 1)[s], scale.flatten(0, 1)[s] = to_codes(x[i])
    kernel(k, v, *caches, slots, *scales)
    same = lambda a, b: torch.equal(a.nan_to_num(7.), b.nan_to_num(7.))
    number = [~x.isnan()[..., None] for x in want[2:]]
    return (all(map(same, scales, want[2:])) and sum(int(x.isnan().sum()) for x in scales) > 0
            and all(torch.equal(a * n, b * n) for a, b, n in zip(caches, want, number)))

def vast(numel, before=2**31, dtype=torch.float16):
    """A flat tensor of `numel` elements with `before` more ahead of it, without the memory.
    An offset that wraps around in 32 bits lands there, on zeros."""
    size = torch.empty((), dtype=dtype).element_size()
    ram = mmap.mmap(-1, (before + numel) * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                    | getattr(mmap, 'MAP_NORESERVE', 0x4000))
    return torch.frombuffer(ram, dtype=dtype)[before:]

def far_cache(c:Case, stride=2**30):
    "The same case with blocks so far apart that block 2 begins beyond 32 bits"
    far = lambda x: vast((len(x) - 1) * stride + x[0].numel(), dtype=x.dtype).as_strided(x.shape,
        (stride, *x.stride()[1:])).copy_(x)
    return replace(c, k_cache=far(c.k_cache), v_cache=far(c.v_cache))

KINDS = ('step', 'both', 'zeros', 'signed')    # what there is beside the codes

def product_case(num_out, groups, bits, group, kind, rows=3, dtype=torch.float32, seed=0, device='cpu'):
    "x [rows, in], a slice of what is NaN around it; codes; bias"
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 256, (num_out, groups, group * bits // 8), generator=g, dtype=torch.uint8)
    d, m = torch.randn(2, num_out, groups, generator=g).half().to(device)
    zeros = torch.randint(0, 16, d.shape, generator=g, dtype=torch.int16).to(device)
    q = (q.view(torch.int8) if kind == 'signed' else q).to(device)
    c = Codes(q, d, m if kind == 'both' else None, dict(zeros=zeros, step=8).get(kind, 0), bits)
    x = torch.full((rows, groups * group + 16), math.nan, dtype=dtype, device=device)
    x = x[:, 8:-8].copy_(torch.randn(rows, groups * group, generator=g))
    return x, c, torch.randn(num_out, generator=g).to(device, dtype)

def product_error(y, x, c, bias=None):
    "The largest, as a share of the sum of the terms' sizes; NaN if there is one"
    w, b = c.dequantise(x.dtype).double(), 0 if bias is None else bias.double()
    size = x.double().abs() @ w.abs().T + (0 if bias is None else b.abs())
    return ((y.double() - (x.double() @ w.T + b)).abs() / size).max().item()
