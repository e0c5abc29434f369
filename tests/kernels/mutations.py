"""Do the checks see a wrong kernel?
Each mutation changes one line of a kernel's exported source; the checks must object, or it says why there is no harm.
python tests/kernels/mutations.py writes bench/records/kernel_mutations.json"""
import os
os.environ.setdefault('TRITON_INTERPRET', '1')
import importlib.util, json, sys, tempfile
from dataclasses import replace
from pathlib import Path
import torch
import interp
from reference import (assert_right, coded, decode, far_cache, kv_case, kv_codes_right, kv_right, make,
                       new_memory_is_nan, prefill, product_case, product_error, sunk, vast)
from sanitizer import Fault, sanitized

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT/'cbatch/kernels'
MUTATIONS = [] # (module, what goes wrong, text, what it becomes, why it does no harm)

def m(module, name, old, new, harmless=''): MUTATIONS.append((module, name, old, new, harmless))

m('kv_write', 'padding is not left out', 'if slot >= 0:', 'if slot >= -1:')
m('kv_write', 'a head too many', '(h < K)', '(h <= K)')
m('kv_write', 'a place of the head too many', '(d < D)', '(d <= D)')
m('kv_write', 'heads of a slot on top of each other', '+ h * D + d\n', '+ h * 0 + d\n')
m('kv_write', 'slots as wide as the tile', 'slot * (K * D)', 'slot * (K * BD)')
m('kv_write', "values with the keys' stride", 'v + t * v_stride_t', 'v + t * k_stride_t')
m('kv_write', 'keys taken for packed', 'k + t * k_stride_t', 'k + t * K * D')
m('kv_write', 'keys where values belong', 'tl.store(v_cache + to', 'tl.store(k_cache + to')
m('kv_write', 'slots of 32 bits', 'tl.load(slots + t).to(tl.int64)', 'tl.load(slots + t).to(tl.int32)')
m('kv_write', 'tokens of 32 bits', 'tl.program_id(0).to(tl.int64)', 'tl.program_id(0)')

m('kv_write', 'a scale too many', 'k_scale, mask=head < K', 'k_scale, mask=head <= K')
m('kv_write', 'scales as wide as the tile', 'k_scales + slot * K + head', 'k_scales + slot * BK + head')
m('kv_write', "values with the keys' scale", 'head, v_scale, mask', 'head, k_scale, mask')
m('kv_write', 'codes cut off, not rounded', '(y + 12582912.) - 12582912.', 'y')
m('kv_write', 'no number gets a scale', "tl.where(odd == 0, scale, float('nan'))", 'scale')
m('kv_write', 'one more than a code can be', ', -127.), 127.)', ', -128.), 128.)',
  'the scale is the largest number over 127, so no code is beyond that but by half a rounding')

d = 'paged_decode'
m(d, 'scales not masked', 'tl.load(scales + at, mask=inside, other=0.)', 'tl.load(scales + at)')
m(d, 'scales of other keys', 'tl.load(k_scales + at // D', 'tl.load(k_scales + at // BD')
m(d, "values with the keys' scales", 'widen(value, v_scales', 'widen(value, k_scales')
m(d, 'a key too many', '(pos < n)', '(pos <= n)')
m(d, 'a key too few', '(pos < n)', '(pos < n - 1)')
m(d, 'window a key too long', 'tl.maximum(n - WINDOW, 0)', 'tl.maximum(n - WINDOW - 1, 0)')
m(d, 'window a key too short', 'tl.maximum(n - WINDOW, 0)', 'tl.maximum(n - WINDOW + 1, 0)')
m(d, "window's first key left out", '(pos >= start)', '(pos > start)')
m(d, 'last tile left out', 'tl.cdiv(n, TILE)', 'n // TILE')
m(d, 'splits too short', 'per = tl.cdiv(last - first, tl.num_programs(2))',
  'per = (last - first) // tl.num_programs(2)')
m(d, 'splits overlap', 'lo = first + split * per', 'lo = first + split * per - (split > 0)')
m(d, 'splits do not begin at the window', 'lo = first + split * per', 'lo = split * per')
m(d, 'splits run past the last tile', 'tl.minimum(lo + per, last)', 'lo + per',
  'no key of such a tile is inside: all is masked, only time is lost')
m(d, "another group's heads", 'kv_head * G + g, tl', 'kv_head * BG + g, tl')
m(d, 'a head of the next group', '(g < G)[:, None]', '(g <= G)[:, None]')
m(d, 'large groups: every program takes the first heads', '% chunks * BG + tl', '% chunks + tl')
m(d, 'queries taken for packed', 'q + r * q_stride_r', 'q + r * H * D')
m(d, 'requests of 32 bits', 'tl.program_id(0).to(tl.int64), tl.program_id(2)', 'tl.program_id(0), tl.program_id(2)')
m(d, "the first request's table for all", 'block_tables + r * table_stride', 'block_tables')
m(d, 'heads taken for packed', 'at = kv_head * head_stride', 'at = kv_head * D')
m(d, 'table read beyond the end', 'tl.load(table + pos // BS, mask=inside, other=0)', 'tl.load(table + pos // BS)')
m(d, 'block offsets of 32 bits', 'mask=inside, other=0).to(tl.int64)', 'mask=inside, other=0)')
m(d, 'slot off by one', 'pos % BS * slot_stride', '(pos + 1) % BS * slot_stride')
m(d, 'slots and blocks exchanged', 'inside, block_stride, slot_stride, BS)\n        key',
  'inside, slot_stride, block_stride, BS)\n        key')
m(d, 'keys not masked', 'k_cache + at[:, None] + d[None, :], mask=inside[:, None] & cols',
  'k_cache + at[:, None] + d[None, :], mask=cols',
  'keys that are not inside come from block 0, and their scores are replaced by -inf')
m(d, 'values not masked', 'v_cache + at[:, None] + d[None, :], mask=inside[:, None] & cols',
  'v_cache + at[:, None] + d[None, :], mask=cols')
m(d, 'keys wider than the head', 'k_cache + at[:, None] + d[None, :], mask=inside[:, None] & cols',
  'k_cache + at[:, None] + d[None, :], mask=inside[:, None]')
m(d, 'what is not inside takes part', 'tl.where(inside[None, :], scores, -float(\'inf\'))', 'scores')
m(d, 'output not shrunk when the maximum grows', 'acc * shrink[:, None]', 'acc')
m(d, 'sum not shrunk when the maximum grows', 'total * shrink + tl.sum(p, 1)', 'total + tl.sum(p, 1)')
m(d, 'maximum of the last tile only', 'new = tl.maximum(top, tl.max(scores, 1))', 'new = tl.max(scores, 1)')
m(d, 'nothing seen yet: -inf - -inf', "base = tl.where(new == -float('inf'), 0., new)", 'base = new')
m(d, 'the last tile is all (dot)', 'acc = tl.dot(p.to(value.dtype), value, acc)',
  'acc = tl.dot(p.to(value.dtype), value)')
m(d, 'the last tile is all (dot-free)', 'acc += tl.sum(p[:, :, None]', 'acc = tl.sum(p[:, :, None]')
m(d, 'soft cap loses the sign', 'tl.where(scores < 0, -size, size)', 'size')
m(d, 'soft cap applied to the wrong scale', 'scaling / softcap', 'scaling')
m(d, 'nobody: 0 / 0', 'total = tl.where(total == 0, 1., total)', 'total = total')
m(d, 'all splits write one place', ' + split * D + d[None, :]', ' + d[None, :]')
m(d, "splits' weights miss the sum", 'top + tl.log2(total)', 'top')
m(d, 'weights of heads that are not there', 'top + tl.log2(total), mask=g < G)', 'top + tl.log2(total))')
m(d, 'reduce without the maximum', "tl.exp2(size - tl.where(top == -float('inf'), 0., top))", 'tl.exp2(size)')
m(d, 'splits that are not there count', "mask=s < num_splits, other=-float('inf')", 'mask=s < num_splits, other=0.')
m(d, 'splits of another head', '(r * H + h) * num_splits + s', '(r * H + h) * BS + s')
m(d, 'sum of weights forgotten', 'tl.sum(part * weight[:, None], 0) / tl.where(total == 0, 1., total)',
  'tl.sum(part * weight[:, None], 0)')
m(d, 'every part has the sink', '(g < G) & (split == 0)', 'g < G')
m(d, 'sinks of heads that are not there', '(g < G) & (split == 0)', 'split == 0')
m(d, 'sinks not in powers of 2', "other=-float('inf')) * 1.4426950408889634", "other=-float('inf'))")
m(d, 'the sum begins without the sink', 'tl.where(has, 1., 0.)', 'tl.where(has, 0., 0.)')
m(d, 'who has no sink begins at 0', "tl.load(sinks + head, mask=has, other=-float('inf'))",
  'tl.load(sinks + head, mask=has, other=0.)')
m(d, 'sinks of the first heads', 'total = sink_start(sinks, head,', 'total = sink_start(sinks, g,')

p = 'paged_prefill'
m(p, 'sinks of the first heads', 'sink_start(sinks, head,', 'sink_start(sinks, m % G,')
m(p, 'no sinks', 'sink_start(sinks, head, m < BQ * G)', 'sink_start(sinks, head, m < 0)')
m(p, 'scales of other keys', 'tl.load(k_scales + at // D', 'tl.load(k_scales + at // BD')
m(p, 'keys without their scales', 'scores *= tl.load(k_scales', 'scores += 0 * tl.load(k_scales')
m(p, "values with the keys' scales", 'tl.load(v_scales + at // D', 'tl.load(k_scales + at // D')
m(p, 'a query does not see itself', 'pos[None, :] <= before + i[:, None]', 'pos[None, :] < before + i[:, None]')
m(p, 'a query sees the next', 'pos[None, :] <= before + i[:, None]', 'pos[None, :] <= before + 1 + i[:, None]')
m(p, 'window a key too long', 'pos[None, :] > before + i[:, None] - WINDOW',
  'pos[None, :] >= before + i[:, None] - WINDOW')
m(p, 'window begins a key too late', 'before + i0 + 1 - WINDOW', 'before + i0 + 2 - WINDOW')
m(p, 'window begins a key too early', 'before + i0 + 1 - WINDOW', 'before + i0 - WINDOW',
  "the mask of each query's own window drops that key")
m(p, 'keys beyond the last query', 'end = before + tl.minimum(i0 + BQ, num_queries)', 'end = before + i0 + BQ')
m(p, 'keys before the chunk forgotten', 'tl.load(seq_lens + r).to(tl.int32) - num_queries',
  'tl.load(seq_lens + r).to(tl.int32) * 0')
m(p, 'a head of the next group', 'kv_head * G + m % G', 'kv_head * G + m % (G + 1)')
m(p, "the first group's heads for all", 'kv_head * G + m % G', 'm % G')
m(p, "the next tile's queries, too", '(m < BQ * G) & (i < num_queries)', 'i < num_queries')
m(p, "the next request's queries, too", '(m < BQ * G) & (i < num_queries)', 'm < BQ * G')
m(p, 'tiles of the request before', '// BQ + mid <= tile', '// BQ + mid < tile')
m(p, 'tiles counted without those that are not full', '// BQ + mid <= tile', '// BQ <= tile')
m(p, "a request's first tile misplaced", '(tile - begin // BQ - r) * BQ', '(tile - begin // BQ) * BQ')
m(p, 'a tile for nobody', 'if i0 < num_queries', 'if i0 <= num_queries',
  'all of its rows are masked; only time is lost')
m(p, 'a tile too few', 'T // (BM // G) + R, K)', 'T // (BM // G) + R - 1, K)')
m(p, 'tokens of 32 bits', '(begin + i).to(tl.int64)[:, None]', '(begin + i)[:, None]')
m(p, "the first request's table for all", 'block_tables + tl.cast(r, tl.int64) * table_stride', 'block_tables')
m(p, 'values not masked', 'v_cache + at[:, None] + d[None, :], mask=inside[:, None] & cols',
  'v_cache + at[:, None] + d[None, :], mask=cols')
m(p, 'values wider than the head', 'v_cache + at[:, None] + d[None, :], mask=inside[:, None] & cols',
  'v_cache + at[:, None] + d[None, :], mask=inside[:, None]')
m(p, 'no sum', 'acc = acc / tl.where(total == 0, 1., total)[:, None]', 'acc = acc')
m(p, 'the last tile is all', 'value, acc)', 'value)')

c = 'coded_matmul'
m(c, 'codes not masked', 'mask=here[:, None] & (b < row_bytes)[None, :], other=0)', 'mask=here[:, None], other=0)')
m(c, 'codes of outputs that are not there', 'mask=here[:, None] & (b < row_bytes)[None, :], other=0)',
  'mask=(b < row_bytes)[None, :], other=0)')
m(c, 'rows of another length', 'codes + o[:, None] * row_bytes', 'codes + o[:, None] * (row_bytes - 1)')
m(c, 'steps of other groups', '(pieces // (GB // PIECE))[None, :]', 'pieces[None, :]')
m(c, "the first group's steps for all", '(pieces // (GB // PIECE))[None, :]', '(pieces * 0)[None, :]')
m(c, "steps of another row", 'at = o[:, None] * (row_bytes // GB)', 'at = o[:, None] * (row_bytes // PIECE)')
m(c, 'a step too many', 'pieces * PIECE < row_bytes', 'pieces * PIECE <= row_bytes')
m(c, 'steps of outputs that are not there', 'inside = here[:, None] & (pieces', 'inside = (pieces')
m(c, 'halves exchanged', 'code & 15 if BITS == 4 else code', 'code >> 4 if BITS == 4 else code')
m(c, 'lower halves not masked', 'code & 15 if BITS == 4 else code', 'code')
m(c, 'upper halves not shifted', 'code >> 4, step', 'code, step')
m(c, 'zeros forgotten', '// step.shape[1]) - zero) * step', '// step.shape[1])) * step')
m(c, 'offsets forgotten', 'if offset is not None: w += offset', 'if offset is not None: w += 0 * offset')
m(c, 'steps for offsets', 'tl.load(m + at', 'tl.load(d + at')
m(c, 'halves of the wrong distance', 'tl.load(at + GB, mask', 'tl.load(at + PIECE, mask')
m(c, 'groups without their upper halves', 'b // GB * (2 * GB) + b % GB', 'b // GB * GB + b % GB')
m(c, 'neighbours for halves', 'b // GB * (2 * GB) + b % GB', '2 * b')
m(c, 'inputs beyond the row', 'inside = rows[:, None] & (t * BB + tl.arange(0, BB) < row_bytes)[None, :]',
  'inside = rows[:, None]')
m(c, "rows that are not there", 'inside = rows[:, None] & (t * BB', 'inside = (t * BB')
m(c, 'rows taken for packed', 'x + r[:, None] * x_stride', 'x + r[:, None] * (row_bytes * 8 // BITS)')
m(c, 'the last tile is all (dot)', 'tl.dot(x, tl.trans(w), acc)', 'tl.dot(x, tl.trans(w))')
m(c, 'the last tile is all (sums)', 'else: acc += tl.sum', 'else: acc = tl.sum')
m(c, 'parts too short', 'per = tl.cdiv(tiles, tl.num_programs(2))', 'per = tiles // tl.num_programs(2)')
m(c, 'parts overlap', 'range(split * per, tl', 'range(split * per - (split > 0), tl')
m(c, 'parts run past the last tile', 'tl.minimum(split * per + per, tiles)', 'split * per + per',
  'all of such a tile is masked, only time is lost')
m(c, 'all parts write one place', '(split * num_rows + r[:, None]) * num_out', 'r[:, None] * num_out')
m(c, 'a bias in each part', 'here & (split == 0)', 'here')
m(c, 'biases of outputs that are not there', 'here & (split == 0)', 'split == 0')
m(c, 'outputs that are not there', 'mask=rows[:, None] & here[None, :])', 'mask=rows[:, None])')
m(c, 'rows that are not there, written', 'mask=rows[:, None] & here[None, :])', 'mask=here[None, :])')
m(c, 'the first rows for all', 'tl.program_id(1) * BM + tl.arange(0, BM)', 'tl.program_id(1) * 0 + tl.arange(0, BM)')
m(c, 'a tile of outputs too few', 'n = _sizes(c, BB), triton.cdiv(num_out, BN)', 'n = _sizes(c, BB), num_out // BN')
m(c, 'rows of 32 bits', 'tl.arange(0, BM)).to(tl.int64)', 'tl.arange(0, BM))')
m(c, 'floats: upper halves where the lower are', 'tl.store(to + GB, high', 'tl.store(to, high')
m(c, 'floats beyond the row', 'here[:, None] & (t * BB + tl.arange(0, BB) < row_bytes)[None, :]', 'here[:, None]')
m(c, 'floats: rows of another length', 'o[:, None] * (row_bytes * 8 // BITS)', 'o[:, None] * row_bytes')
m(c, 'floats of outputs that are not there', 'inside = here[:, None] & (t * BB', 'inside = (t * BB')

# --- the checks: small cases, quick ones first

def kv_checks(kv_write):
    def small(*shape, **kw):
        with sanitized(): assert kv_right(kv_write, *kv_case(*shape, **kw)), 'wrong bits'
    yield 'small', lambda: small(4, 3, 64)
    yield 'head_dim 80', lambda: small(3, 2, 80, bs=8)
    def codes():
        with sanitized(): assert kv_codes_right(kv_write, *kv_case(5, 3, 80, bs=8)), 'wrong bits'
    yield 'codes', codes
    def far():
        k, v, *_ = kv_case(1, 8, 128, dtype=torch.float16)
        caches = [vast(2**31 + 2**20).view(-1, 16, 8, 128) for _ in 'kv']
        kv_write(k, v, *caches, torch.tensor([2**21]))
        assert torch.equal(caches[0][2**21 // 16, 0], k[0]), 'wrong bits'
    yield 'slots beyond 32 bits', far
    def far_tokens():
        k, v, kc, vc, slots = kv_case(3, 1, 64, dtype=torch.float16)
        far = vast(2**31 + 64).as_strided((3, 1, 64), (2**30, 64, 1)).copy_(k)
        assert kv_right(kv_write, far, v, kc, vc, slots), 'wrong bits'
    yield 'tokens beyond 32 bits', far_tokens

def heads_first(c):
    "The same caches, stored [B, K, block_size, D]"
    return replace(c, **{k: getattr(c, k).transpose(1, 2).contiguous().transpose(1, 2) for k in ('k_cache', 'v_cache')})

def far_queries(c, stride=2**30):
    "The same queries, so far apart that row 2 begins beyond 32 bits"
    return replace(c, q=vast(2 * stride + c.q[0].numel(), dtype=c.q.dtype).as_strided(c.q.shape,
        (stride, c.q.shape[2], 1)).copy_(c.q))

def far_blocks(run, kernel):
    c = far_cache(make([17], dtype=torch.float16))    # blocks 1 and 2
    assert_right(run(kernel, c), c)

def attention_checks(run, kernel, cases):
    def check(c, **kw):
        with sanitized(): assert_right(run(kernel, c, **kw), c)
    for name, (c, kw) in cases.items(): yield name, lambda c=c, kw=kw: check(c(), **kw)

def decode_checks(kernel):
    yield from attention_checks(decode, kernel, {
        'short contexts': (lambda: make([1, 15, 16, 17], G=3, K=2), {}),
        'two tiles and nobody': (lambda: make([70, 0], G=2, scaling=.5), {}),
        'dot-free': (lambda: make([70, 33], G=3), dict(dot=False)),
        'codes': (lambda: coded(make([70, 17], G=3, K=2, D=80, bs=8)), {}),
        'three splits': (lambda: make([150, 0, 33], G=3), dict(num_splits=3)),
        'window': (lambda: make([150, 64], G=1, window=70), dict(num_splits=2)),
        'soft cap': (lambda: make([30], G=2, softcap=1.5), {}),
        'sinks': (lambda: sunk(make([70, 5], G=3, K=2)), dict(num_splits=2)),
        'head_dim 80': (lambda: make([24], G=1, K=2, D=80, bs=8), {}),
        'heads first': (lambda: heads_first(make([20], K=2)), {}),
        'large group': (lambda: make([9], G=20), {}),
        'large scores': (lambda: make([150], scaling=40.), dict(num_splits=2))})
    def far(): c = far_queries(make([3, 2, 4], dtype=torch.float16)); assert_right(decode(kernel, c), c)
    yield 'blocks beyond 32 bits', lambda: far_blocks(decode, kernel)
    yield 'queries beyond 32 bits', far

def prefill_checks(kernel):
    yield from attention_checks(prefill, kernel, {
        'chunks': (lambda: make([5, 40, 27], [1, 30, 7], G=3, K=2, padding=2), {}),
        'many requests': (lambda: make([0, 1, 24, 0, 23, 45], [0, 1, 22, 0, 21, 43], G=3), {}),
        'one request': (lambda: make([5], [3]), {}),
        'codes': (lambda: coded(make([40, 5], [9, 2], G=3, K=2, D=80, bs=8)), {}),
        'window': (lambda: make([75], [70], window=33), {}),
        'head_dim 80': (lambda: make([24], [9], G=1, K=2, D=80, bs=8), {}),
        'soft cap': (lambda: make([9], [9], softcap=1.5), {}),
        'sinks': (lambda: sunk(make([40, 5], [9, 2], G=3, K=2)), {})})
    def far(): c = far_queries(make([3], [3], dtype=torch.float16)); assert_right(prefill(kernel, c), c)
    yield 'queries beyond 32 bits', far

def product_checks(mod):
    def check(*shape, rows=3, bias=True, **kw):
        x, c, b = product_case(*shape, rows=rows)
        b = b if bias else None
        with sanitized(), new_memory_is_nan(): y = mod.coded_matmul(x, c, b, **kw)
        err = product_error(y, x, c, b)
        assert err <= 1e-6, f'off by {err:.2g} of the sum of sizes'
    for dot in (True, False):
        way = 'dot' if dot else 'sums'
        yield f'4 bits ({way})', lambda dot=dot: check(35, 3, 4, 32, 'both', rows=5, dot=dot)
        yield f'8 bits ({way})', lambda dot=dot: check(5, 3, 8, 32, 'zeros', dot=dot)
        yield f'parts ({way})', lambda dot=dot: check(5, 11, 4, 32, 'step', dot=dot, num_splits=3)
    yield 'groups of 96', lambda: check(5, 3, 4, 96, 'both', num_splits=2)
    def far():
        c = product_case(3, 1, 8, 32, 'signed')[1]
        x = vast(2**31 + 64).as_strided((3, 32), (2**30, 1)).copy_(torch.randn(3, 32))
        assert product_error(mod.coded_matmul(x, c), x, c) <= 1e-3, 'wrong rows'
    yield 'rows beyond 32 bits', far
    def all_floats():
        for bits in (4, 8):
            c = product_case(35, 3, bits, 32, 'both')[1]
            with sanitized(), new_memory_is_nan(): same = torch.equal(mod.floats(c, torch.float32), c.dequantise())
            assert same, 'wrong floats'
    yield 'floats', all_floats

def load(module, source, **others):
    """A module of its own from changed source.
    Triton reads a kernel's text from its file. It sees the modules `others` in place of the real ones."""
    name = f'mutant{load.n}_{module}'; load.n += 1
    path = Path(load.dir.name)/f'{name}.py'
    for old, new in others.items():
        source = source.replace(f'from .{old} import', f'from .{new.__name__.rpartition(".")[2]} import')
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f'cbatch.kernels.{name}', path)
    sys.modules[spec.name] = mod = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod
load.n, load.dir = 0, tempfile.TemporaryDirectory()

def text(module): return (SOURCES/f'{module}.py').read_text()

def checks(module, source):
    "What must hold of a module with this source: its own kernel, and prefill, which uses parts of decode"
    mod = load(module, source)
    if module == 'kv_write': yield from kv_checks(mod.kv_write)
    elif module == 'coded_matmul': yield from product_checks(mod)
    elif module == 'paged_prefill': yield from prefill_checks(mod.paged_prefill)
    else:
        yield from decode_checks(mod.paged_decode)
        later = load('paged_prefill', text('paged_prefill'), paged_decode=mod)
        yield from ((f'prefill: {n}', f) for n, f in prefill_checks(later.paged_prefill))

def caught(module, old, new):
    "Which check objects, and what it says; None if none does"
    source = text(module)
    if source.count(old) != 1:
        raise LookupError(f'{module}: {old!r} is there {source.count(old)} times: '
                          'the kernel has changed, change the mutation')
    for name, check in checks(module, source.replace(old, new)):
        try: check()
        except Fault as e: return dict(check=name, by='sanitizer', says=str(e).split(': ')[0].partition(', the')[0])
        except AssertionError as e: return dict(check=name, by='result', says=str(e).splitlines()[0])

def main():
    interp.mend()
    rows = []
    for module, name, old, new, harmless in MUTATIONS:
        found = caught(module, old, new)
        rows.append(dict(module=module, mutation=name, line=old.strip(), becomes=new.strip(),
                         **(found or dict(check=None)), harmless=harmless))
        verdict = ('{by}: {says} ({check})'.format(**found) if found
                   else f'harmless: {harmless}' if harmless else 'NOT CAUGHT')
        print(f'{module:<14} {name:<48} {verdict}', flush=True)
    survived = [r for r in rows if not r['check']]
    record = dict(command='python tests/kernels/mutations.py', mutations=len(rows), caught=len(rows) - len(survived),
                  harmless=len(survived), rows=rows)
    if all(bool(r['harmless']) != bool(r['check']) for r in rows):
        (ROOT/'bench/records/kernel_mutations.json').write_text(json.dumps(record, indent=1) + '\n')
    else: sys.exit('not recorded: some mutation is neither caught nor harmless')

if __name__ == '__main__': main()
