"""Products by kept weights against float64, interpreted with bounds and races checked, or on a GPU where
TRITON_INTERPRET=0 and there is one."""
import math
from contextlib import nullcontext
import pytest, torch
import cbatch.quant
from cbatch.kernels.coded_matmul import MAX_ROWS, coded_matmul, floats
from cbatch.kernels.kv_write import INTERPRETED
from cbatch.kernels.paged_decode import has_dots
from cbatch.quant import Codes, CodedLinear, codes_of
from reference import DTYPES, KINDS, new_memory_is_nan, product_case, product_error
from sanitizer import sanitized

DEVICE = 'cpu' if INTERPRETED else 'cuda'
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip('TRITON_INTERPRET=0 without a GPU', allow_module_level=True)
checked = sanitized if INTERPRETED else nullcontext
# of the sum of the terms' sizes. 16 bits: the output is rounded to half an ulp; float32: sums in another order
TOL = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-8}
FORMATS = [(b, g, k) for b in (4, 8) for g in (16, 32, 64, 128) for k in KINDS if (b, k) != (4, 'signed')]

def right(*shape, dtype='fp32', rows=3, seed=0, bias=True, **kw):
    dtype = DTYPES[dtype]
    x, c, b = product_case(*shape, dtype=dtype, rows=rows, seed=seed, device=DEVICE)
    with checked(), new_memory_is_nan(): y = coded_matmul(x, c, b if bias else None, **kw)
    assert y.dtype == dtype and y.shape == (rows, c.shape[0])
    assert product_error(y, x, c, b if bias else None) <= TOL[dtype]

def ways(dtype): return (True, False) if has_dots(DEVICE) and (INTERPRETED or dtype != 'fp32') else (False,)

@pytest.mark.parametrize('bits, group, kind', FORMATS)
def test_formats(bits, group, kind):
    "Odd numbers of outputs and groups, in every type, by dots and by sums"
    i = FORMATS.index((bits, group, kind))
    for j, dtype in enumerate(DTYPES):
        dot = ways(dtype)[(i + j) % len(ways(dtype))]
        right(33 + i % 3, 3, bits, group, kind, dtype=dtype, rows=1 + i % 5, seed=i, bias=i % 2 > 0, dot=dot)

@pytest.mark.parametrize('rows', range(1, MAX_ROWS + 2))
def test_rows(rows):
    for dot in ways('fp32'): right(5, 3, 4, 32, 'both', rows=rows, dot=dot)
    right(5, 3, 8, 32, 'signed', dtype='fp16', rows=rows)

@pytest.mark.parametrize('splits', [None, 1, 2, 3, 8, 64])
def test_parts(splits):
    "More parts than tiles, too: some are empty"
    for dot in ways('fp32'): right(35, 9, 4, 32, 'both', rows=5, num_splits=splits, dot=dot)

@pytest.mark.parametrize('bits, group, groups', [(4, 96, 5), (8, 24, 3), (4, 576, 1), (8, 40, 7), (4, 256, 3),
                                                 (4, 32, 1)])
def test_odd_groups(bits, group, groups):
    "Groups that are no power of two, whole rows and more than a tile in a group, less than a tile in a row"
    for dot in ways('fp32'): right(19, groups, bits, group, 'both', rows=2, dot=dot)

@pytest.mark.parametrize('bits, group', [(4, 6), (8, 9), (4, 24)])
def test_groups_too_small_for_a_kernel(bits, group): right(7, 3, bits, group, 'both', rows=2)

@pytest.mark.parametrize('bits, group, kind', FORMATS)
def test_floats_are_those_of_the_codes(bits, group, kind, interpreter):
    _, c, _ = product_case(35, 3, bits, group, kind)
    for dtype in DTYPES.values():
        with sanitized(), new_memory_is_nan(): assert torch.equal(floats(c, dtype), c.dequantise(dtype))

def test_steps_in_other_types():
    for d, m in ((torch.float32, torch.float32), (torch.bfloat16, torch.float16)):
        x, c, _ = product_case(9, 3, 4, 32, 'both', device=DEVICE)
        c = Codes(c.q, c.d.to(d), c.m.to(m), bits=4)
        with checked(): assert product_error(coded_matmul(x, c), x, c) <= 1e-6

def test_views():
    "Rows out of something wider, every second, transposed, in more axes; codes as they lie in a file's blocks"
    x, c, b = product_case(7, 3, 4, 32, 'both', rows=8, device=DEVICE)
    wide = torch.full((16, 120), math.nan, device=DEVICE)
    wide[::2, 11:-13] = x
    assert wide[::2, 11:-13].shape == x.shape
    raw = torch.zeros(7, 3, 20, dtype=torch.uint8, device=DEVICE)
    raw[..., 4:], raw[..., :2], raw[..., 2:4] = c.q, c.d[..., None].view(torch.uint8), c.m[..., None].view(torch.uint8)
    half = lambda at: raw[..., at:at + 2].view(torch.float16).squeeze(-1)
    kept = Codes(raw[..., 4:], half(0), half(2), bits=4)
    want = coded_matmul(x, c, b)
    for y in (wide[::2, 11:-13], x.T.contiguous().T, x.view(2, 4, -1)):
        with checked(): assert torch.equal(coded_matmul(y, kept, b).view(8, 7), want)

@pytest.mark.filterwarnings('ignore::RuntimeWarning')        # numpy's
def test_what_is_no_number_survives():
    "In its row or its output, and nowhere else"
    for dot in ways('fp32'):
        x, c, b = product_case(35, 3, 4, 32, 'both', rows=5, device=DEVICE)
        x[2, 50], x[3, 95] = math.nan, math.inf
        y = coded_matmul(x, c, b, dot=dot)
        assert y[2].isnan().all() and not y[3].isfinite().any() and y[[0, 1, 4]].isfinite().all()
        x, c, b = product_case(35, 3, 4, 32, 'both', rows=5, device=DEVICE)
        c.d[34, 2] = math.nan
        y = coded_matmul(x, c, b, dot=dot, num_splits=2)
        assert y[:, 34].isnan().all() and y[:, :34].isfinite().all()

def test_nobody():
    x, c, b = product_case(5, 3, 8, 32, 'signed', device=DEVICE)
    assert coded_matmul(x[:0], c, b).shape == (0, 5)
    assert coded_matmul(x[:0].view(2, 0, 96), c).shape == (2, 0, 5)

def test_refused():
    x, c, b = product_case(5, 3, 8, 32, 'signed', device=DEVICE)
    for says, args in {'must be 96': (x[:, 1:], c), 'must be float16': (x.long(), c), r'must be \[5\]': (x, c, b[:4]),
                       '1 to 64': (x, c, b, False, 65)}.items():
        with pytest.raises(ValueError, match=says): coded_matmul(*args)

def test_a_matrix_larger_than_what_is_floats_at_a_time(monkeypatch):
    "More than sixteen rows, some outputs at a time"
    monkeypatch.setattr('cbatch.kernels.coded_matmul._AT_ONCE', 96 * 10)
    right(35, 3, 4, 32, 'both', rows=17)

def test_layers_take_it_on_gpus(monkeypatch):
    "The device is a CPU, the choice is real"
    import cbatch.kernels.triton_backend
    assert cbatch.quant.DEVICE_PRODUCTS == dict(cuda=coded_matmul)
    lin = torch.nn.Linear(64, 5).requires_grad_(False)
    layer, x, seen = CodedLinear(codes_of(lin.weight), lin.bias, torch.float32), torch.randn(2, 3, 64), []
    want = layer(x)
    monkeypatch.setitem(cbatch.quant.DEVICE_PRODUCTS, 'cpu', lambda *args: seen.append(args) or coded_matmul(*args))
    assert torch.allclose(layer(x), want, atol=1e-5) and len(seen) == 1
