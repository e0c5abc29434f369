"The sanitizer on tiny kernels: each planted fault is found and named, a right kernel passes"
import pytest, torch, triton
import triton.language as tl
from sanitizer import Fault, sanitized

pytestmark = pytest.mark.usefixtures('interpreter')

@triton.jit
def _copy(x, y, n, B: tl.constexpr, LIMIT: tl.constexpr, STEP: tl.constexpr):
    i = tl.program_id(0) * STEP + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n + LIMIT), mask=i < n)

@triton.jit
def _shift(x, n, B: tl.constexpr):
    "Each program reads what the next one writes"
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(x + i, tl.load(x + i + 1, mask=i + 1 < n, other=0), mask=i < n)

@triton.jit
def _total(x, y):
    tl.store(y, tl.load(y) + tl.load(x + tl.program_id(0)))

@triton.jit
def _scatter(x, y, B: tl.constexpr, TO: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i // TO, tl.load(x + i))

@triton.jit
def _rows(x, y, n, stride, D: tl.constexpr, B: tl.constexpr):
    d = tl.arange(0, B)
    for r in range(n): tl.store(y + r * D + d, tl.load(x + r * stride + d, mask=d < D), mask=d < D)

@triton.jit
def _from_behind(x, y, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(y + i, tl.load(x - i))

@triton.jit
def _count(y, AT: tl.constexpr):
    tl.atomic_add(y + AT, 1)

@triton.jit
def _asserts(N: tl.constexpr): tl.static_assert(N > 0, 'not positive')

def copy(n=10, B=4, limit=0, step=4, out=10):
    x, y = torch.arange(10.), torch.zeros(out)
    with sanitized(): _copy[(3,)](x, y, n, B, limit, step)
    return torch.equal(y[:n], x[:n])

def fails(f, *words):
    with pytest.raises(Fault) as e: f()
    for w in words: assert w in str(e.value), e.value

def test_right_kernel_passes(): assert copy()

def test_load_beyond_the_end():
    fails(lambda: copy(limit=1), '1 of 3 lanes out of bounds', '10 elements from the start of 10',
          'load of `x` by program (2, 0, 0)',
          '_copy, line', 'tl.load(x + i')

def test_store_beyond_the_end(): fails(lambda: copy(out=9), 'out of bounds', 'store of `y`')

def test_before_the_start():
    with sanitized(): _from_behind[(1,)](torch.arange(8.)[7:], torch.zeros(1), 1)
    # the storage is there, the view is not
    fails(lambda: _launch(_from_behind, torch.arange(8.)[4:], torch.zeros(4), 4), '-1 elements from the start')

def _launch(kernel, *args, grid=(1,)):
    with sanitized(): kernel[grid](*args)

def test_overlapping_stores():
    fails(lambda: copy(step=3), 'race, another program wrote there', 'store of `y` by program (1, 0, 0)')

def test_reads_what_another_writes():
    fails(lambda: _launch(_shift, torch.arange(8.), 8, 4, grid=(2,)), 'race, another program read there',
          'program (1, 0, 0)')

def test_lost_update():
    fails(lambda: _launch(_total, torch.ones(3), torch.zeros(1), grid=(3,)), 'race, another program wrote there',
          'load of `y`')

def test_one_program_may_update(): _launch(_total, torch.ones(1), torch.zeros(1))

def test_two_values_for_one_place():
    fails(lambda: _launch(_scatter, torch.arange(8.), torch.zeros(8), 8, 2), 'two values for one place')
    _launch(_scatter, torch.ones(8), torch.zeros(8), 8, 2)          # the same value twice is no harm
    _launch(_scatter, torch.arange(8.), torch.zeros(8), 8, 1)

def test_gaps_of_a_view():
    qkv = torch.arange(30.).view(3, 10)
    out = torch.zeros(3, 4)
    _launch(_rows, qkv[:, 2:6], out, 3, 10, 4, 4)
    assert torch.equal(out, qkv[:, 2:6])
    fails(lambda: _launch(_rows, qkv[:, 2:6], out, 3, 9, 4, 4), '1 of 4 lanes out of bounds')
    # the next row is not there
    fails(lambda: _launch(_rows, qkv[:, 2:6], torch.zeros(4, 4), 4, 10, 4, 4), '4 of 4 lanes out of bounds')

def test_another_argument_is_out_of_bounds():
    "The allocator may put two tensors side by side; reading one from the other's pointer is wrong all the same"
    both = torch.arange(16.)
    fails(lambda: _launch(_copy, both[:8], both[8:], 8, 16, 8, 4), 'load of `x`')

def test_two_views_of_one_storage_race():
    x = torch.arange(8.)
    fails(lambda: _launch(_copy, x[1:], x[:7], 7, 4, 0, 4, grid=(2,)), 'race')

def test_atomics():
    y = torch.zeros(1, dtype=torch.int32)
    _launch(_count, y, 0, grid=(3,))
    assert y.item() == 3
    fails(lambda: _launch(_count, y, 1), 'atomic of `y`')

def test_each_launch_starts_anew():
    x, y = torch.arange(8.), torch.zeros(8)
    with sanitized():
        _copy[(2,)](x, y, 8, 4, 0, 4)
        _copy[(2,)](y, x, 8, 4, 0, 4)

def test_leaves_nothing_behind():
    with pytest.raises(Fault): copy(limit=1)
    x, y = torch.arange(16.), torch.zeros(10)
    _copy[(3,)](x[:10], y, 10, 4, 1, 4)        # unchecked again: reads x[10]
    assert torch.equal(y, x[:10])

def test_other_errors_come_through():
    with pytest.raises(AssertionError, match='not positive'), sanitized(): _asserts[(1,)](0)
