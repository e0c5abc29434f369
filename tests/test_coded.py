"""Products on codes against float64, in each way that processors do them, and what compilers made of it"""
import ctypes, functools, shutil, subprocess
import pytest, torch
from cbatch.kernels.coded_product import CODED_CPP, Matrix, coded_panels
from cbatch.kernels.cpu import ATTENTION_CPP
from cbatch.native import KERNELS, Native, struct

P, N = ctypes.c_void_p, ctypes.c_int64
SOURCE = ATTENTION_CPP + CODED_CPP + r"""
template <typename T>
void times(const Matrix* m, const T* x, float* out, int64_t tokens, int64_t threads, const Rows* r) {
    #pragma omp parallel num_threads(threads)
    {
        quantise(x, tokens, m->inputs, *r);
        product_codes(*m, *r, tokens, threads, [=](int64_t t, int64_t c, V y) {
            for (int l = 0; l < std::min<int64_t>(L, m->outputs - c); l++) out[t * m->outputs + c + l] = y[l];
        });
    }
}
#define ENTRY(name, T) extern "C" void name(const Matrix* m, const T* x, float* y, int64_t n, int64_t threads, \
                                            const Rows* r) { times(m, x, y, n, threads, r); }
ENTRY(times_f32, float)
ENTRY(times_bf16, bf16)
"""
Rows = struct('Rows', 'int8* codes; float* scales; int32* sums')
WAYS = dict(native=(), eight=('-DLANES=8', '-mno-avx512f'), avx2=('-DLANES=8', '-mno-avx512f', '-mno-avxvnni'),
            portable=('-DLANES=4', '-mno-avx512f'))

@functools.cache
def library(way):
    "The product compiled in one of the ways; skips where this compiler or processor can't"
    others = dict(KERNELS)
    flags = ('-ffp-contract=fast', '-fno-math-errno', '-Wno-psabi', *WAYS[way])
    n = Native(f'coded_{way}', SOURCE, dict.fromkeys(('times_f32', 'times_bf16'), [P, P, P, N, N, P]), flags)
    KERNELS.clear(); KERNELS.update(others)
    with pytest.MonkeyPatch.context() as mp:
        mp.setenv('CBATCH_NATIVE', '1')
        return n.lib if n.build() else None

@pytest.fixture(params=WAYS)
def lib(request):
    there = library(request.param)
    if not there: pytest.skip(f'no compiler for {request.param}')
    return there

def times(lib, matrix, x, threads=1):
    "What comes out, and the rows in codes"
    groups = x.shape[1] // 32
    codes, sums = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), groups, dtype=torch.int32)
    scales, out = torch.empty(len(x), groups), torch.full((len(x), matrix.outputs), 7.)
    f = lib.times_f32 if x.dtype == torch.float32 else lib.times_bf16
    rows = Rows(codes.data_ptr(), scales.data_ptr(), sums.data_ptr())
    f(ctypes.byref(matrix), x.data_ptr(), out.data_ptr(), len(x), threads, ctypes.byref(rows))
    return out, codes, scales, sums

class Case:
    "A weight in codes, drawn at random, as it is and as `product_codes` wants it"
    def __init__(self, out, inputs, bits, zero, half, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.q = torch.randint(0, 1 << bits, (out, inputs), dtype=torch.uint8, generator=g)
        self.d = (torch.rand(out, inputs // 32, generator=g) * .01).half().float()
        self.m = (torch.randn(out, inputs // 32, generator=g) * .05).half().float() if zero < 0 else None
        self.laid = coded_panels(self.q, bits, self.d, self.m, half)
        self.bias = torch.randn(-(-out // 48) * 48, generator=g)
        self.matrix = Matrix(self.laid.data_ptr(), self.bias.data_ptr(), out, inputs, bits, zero, int(half))
        q, d = self.q.double().view(out, -1, 32), self.d[..., None]
        self.weight = (q * d + self.m[..., None] if zero < 0 else (q - zero) * d).view(out, inputs)

CASES = [(out, n, bits, zero, half) for out, n in ((50, 64), (7, 32), (144, 192)) for bits in (4, 8)
         for zero in (-1, 8 if bits == 4 else 128) for half in (True, False)]

@pytest.mark.parametrize('case', CASES, ids=str)
def test_against_float64(lib, case):
    "Within 1e-5 of the sum of all absolute terms; the same bits in any company and with any number of threads"
    c, (out, n, *_) = Case(*case), case
    x = torch.randn(9, n, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 9)[:, None]
    for rows in (x, x.bfloat16()):
        y, codes, scales, sums = times(lib, c.matrix, rows)
        groups = codes.view(9, -1, 32)
        assert torch.equal(sums, groups.sum(-1, dtype=torch.int32)) and groups.abs().amax(-1).eq(127).all()
        held = (groups.double() * scales[..., None].double()).view(9, n)
        assert ((held - rows.double()).abs().view(9, -1, 32).amax(-1) <= scales * .50001).all()
        exact, much = held @ c.weight.T + c.bias[:out], held.abs() @ c.weight.abs().T + c.bias[:out].abs()
        assert ((y - exact).abs() <= 1e-5 * much + 1e-30).all()
        for i in range(9): assert torch.equal(times(lib, c.matrix, rows[i:i+1])[0][0], y[i])
        assert torch.equal(times(lib, c.matrix, rows, threads=3)[0], y)

def test_all_ways_agree():
    "Whole numbers have no rounding, and floats are added in one order: the same bits however a processor multiplies"
    libs = [l for w in WAYS if (l := library(w))]
    if len(libs) < 2: pytest.skip('one way only')
    for case in CASES:
        c, x = Case(*case), torch.randn(5, case[1])
        first, *others = (times(l, c.matrix, x)[0] for l in libs)
        assert all(torch.equal(first, o) for o in others), case

def test_sums_do_not_overflow(lib):
    "The largest codes of the largest rows, of both signs"
    for bits, zero in ((4, -1), (8, -1), (8, 128)):
        c = Case(48, 64, bits, zero, False)
        c.q.fill_(255 if bits == 8 else 15)
        laid, more = coded_panels(c.q, bits, c.d, c.m, False), 0 if c.m is None else c.m[..., None]
        c.matrix.panels = laid.data_ptr()
        w = ((c.q.double().view(48, 2, 32) - max(zero, 0)) * c.d[..., None] + more).view(48, 64)
        for sign in (1, -1):
            x = torch.full((2, 64), 3. * sign)
            want = x.double() @ w.T + c.bias[:48]
            torch.testing.assert_close(times(lib, c.matrix, x)[0].double(), want, rtol=1e-5, atol=1e-4)

@pytest.mark.parametrize('odd', [float('nan'), float('inf'), -float('inf')])
def test_what_is_no_number_stays_none(lib, odd):
    "In its own row, whatever else is in the group; zeros give zeros"
    c, x = Case(50, 64, 4, -1, True), torch.randn(4, 64)
    x[1, 40], x[2] = odd, 0
    y = times(lib, c.matrix, x)[0]
    assert y[1].isnan().all() and y[[0, 2, 3]].isfinite().all() and torch.equal(y[2], c.bias[:50])

def test_half_precision_of_the_smallest(lib):
    "Scales below the smallest normal number of half precision are what they are"
    c = Case(48, 32, 4, -1, True)
    c.d[:] = torch.tensor([2 ** -24, 2 ** -20, 3 * 2 ** -24, -2 ** -15.])[torch.arange(48) % 4, None]
    laid = coded_panels(c.q, 4, c.d, c.m, True); c.matrix.panels = laid.data_ptr()
    x, w = torch.randn(1, 32), c.q.double() * c.d + c.m
    y, codes, scales, _ = times(lib, c.matrix, x)
    torch.testing.assert_close(y.double(), codes.double() * scales @ w.T + c.bias[:48].double(), rtol=1e-5, atol=1e-6)

@pytest.mark.skipif(not shutil.which('objdump'), reason='no objdump')
def test_sums_stay_in_registers():
    "In the loop over a group next to nothing is stored"
    if not (there := library('native')): pytest.skip('no compiler')
    command = ['objdump', '-d', '--no-show-raw-insn', there._name]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loops = [f for f in said.split('\n\n') if 'through_codes' in f.split('\n')[0] and f.count('vpdpbusd') >= 96]
    if not loops: pytest.skip('this processor has no vpdpbusd')
    for f in loops:
        lines = [l.split('\t', 2)[-1] for l in f.split('\n')[1:]]
        dots = [i for i, l in enumerate(lines) if l.startswith('vpdpbusd')]
        between = lines[dots[0]:dots[-1]]
        stores = sum(1 for l in between if l.startswith('vmov') and l.rstrip().endswith(')'))
        assert stores <= len(dots) // 4, f'{stores} stores among {len(dots)} products'
