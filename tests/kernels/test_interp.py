"The mended interpreter against torch, whose bf16 is right"
import pytest, torch, triton
import triton.language as tl
import interp

pytestmark = pytest.mark.usefixtures('interpreter')
BF16 = torch.bfloat16

@triton.jit
def _add(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) + tl.load(y + i))

@triton.jit
def _dot(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + i, tl.dot(tl.load(x + i), tl.load(y + i)))

@triton.jit
def _cast(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))

@triton.jit
def _mix(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    x, y = tl.load(x + i), tl.load(y + i)
    tl.store(out + i, tl.where(x < y, tl.maximum(x * y, y), -x / y))

@triton.jit
def _sum_and_max(x, out, N: tl.constexpr):
    x = tl.load(x + tl.arange(0, N))
    tl.store(out, tl.sum(x, 0))
    tl.store(out + 1, tl.max(x, 0))

@triton.jit
def _loop(n, out):
    total = 0
    for i in range(tl.load(n)): total += i
    tl.store(out, total)

def rnd(*shape, seed=0): return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

def test_add():
    x, y, out = rnd(64).to(BF16), rnd(64, seed=1).to(BF16), torch.empty(64, dtype=BF16)
    _add[(1,)](x, y, out, 64)
    assert torch.equal(out, x + y)

def test_unmended_is_wrong():
    "Should a Triton of the future be right, interp.py can go"
    x, y, out = rnd(64).to(BF16), rnd(64, seed=1).to(BF16), torch.empty(64, dtype=BF16)
    with interp.unmended(): _add[(1,)](x, y, out, 64)
    if torch.equal(out, x + y): pytest.skip(f"Triton {triton.__version__} adds bf16 as it should")
    assert not torch.allclose(out.float(), (x + y).float(), atol=.1)

def test_dot():
    x, y, out = rnd(16, 16).to(BF16), rnd(16, 16, seed=1).to(BF16), torch.empty(16, 16)
    _dot[(1,)](x, y, out, 16)
    # products of bf16 are exact in fp32; sums differ in their order
    torch.testing.assert_close(out, x.float() @ y.float(), atol=1e-5, rtol=1e-5)

def test_rounds_to_nearest_even():
    # ties go down, up, towards 0; above a tie; into the next power
    halfway = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 2 - 2**-9])
    x = torch.cat([halfway, rnd(256), torch.tensor([0., -0., torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40])])[:256]
    x[-7:] = torch.tensor([0., -0., torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-40])
    out = torch.empty(256, dtype=BF16)
    _cast[(1,)](x, out, 256)
    assert torch.equal(out.nan_to_num(7), x.to(BF16).nan_to_num(7))
    assert out[:5].tolist() == [1, 1 + 2**-6, -1, 1 + 2**-7, 2]

@pytest.mark.parametrize('other', [torch.float32, torch.float16, torch.int32, torch.float64])
def test_casts(other):
    x, out, back = (rnd(64) * 9).to(BF16), torch.empty(64, dtype=other), torch.empty(64, dtype=BF16)
    _cast[(1,)](x, out, 64); _cast[(1,)](out, back, 64)
    assert torch.equal(out, x.to(other)) and torch.equal(back, out.to(BF16))

def test_compare_multiply_divide():
    x, y, out = rnd(64).to(BF16), rnd(64, seed=1).to(BF16), torch.empty(64, dtype=BF16)
    _mix[(1,)](x, y, out, 64)
    want = torch.where(x < y, torch.maximum(x * y, y), -x / y)
    assert (out - want).abs().max() <= 2**-8 * want.abs().max()   # Triton may divide in fp32 and round once more

def test_sum_and_max():
    x, out = rnd(64).to(BF16), torch.empty(2, dtype=BF16)
    _sum_and_max[(1,)](x, out, 64)
    assert torch.equal(out, torch.stack([x.float().sum().to(BF16), x.max()]))

def test_loop_over_a_loaded_length():
    out = torch.empty(1, dtype=torch.int32)
    _loop[(1,)](torch.tensor([5], dtype=torch.int32), out)
    assert out.item() == 10
