"""bf16 in Triton's interpreter, mended.
numpy has no bf16, so the interpreter keeps its bits in uint16 - and then adds, compares and multiplies those as
integers, and rounds fp32 to bf16 by adding the first bit that is cut off. `mend()` computes bf16 in fp32 and rounds to
nearest even."""
import re
from contextlib import contextmanager
import numpy as np
import triton.language as tl
from triton.runtime import interpreter

ARITHMETIC = re.compile(r'create_(f(?!p_)\w+|(approx_|precise_)?(divf|sqrt)|rsqrt|exp2?|log2?|sin|cos|erf|ceil|clampf'
                        r'|(min|max)(imum|num)f|dot)$')

def to_fp32(bits):
    "bf16 is the upper half of an fp32"
    return (bits.astype(np.uint32) << 16).view(np.float32)

def to_bf16(x):
    "fp32 to the bits of the nearest bf16; of two that are equally near, the even one"
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7fc0, near).astype(np.uint16)

def is_bf16(x): return isinstance(x, interpreter.TensorHandle) and x.dtype.scalar == tl.bfloat16
def widen(x): return interpreter.TensorHandle(to_fp32(x.data), tl.float32) if is_bf16(x) else x
# a comparison stays bool
def narrow(x): return interpreter.TensorHandle(to_bf16(x.data), tl.bfloat16) if x.dtype.scalar == tl.float32 else x

def _arithmetic(old, name):
    def new(self, *args, **kw):
        if not any(map(is_bf16, args)): return old(self, *args, **kw)
        out = old(self, *map(widen, args), **kw)
        return out if name == 'create_dot' and not is_bf16(args[2]) else narrow(out)
    return new

def _cast(old):
    def new(self, src, to):
        a, b = src.dtype.scalar, to.scalar
        if a == b or tl.bfloat16 not in (a, b): return old(self, src, to)
        if b == tl.bfloat16: return narrow(interpreter.TensorHandle(widen(src).data.astype(np.float32), tl.float32))
        return interpreter.TensorHandle(to_fp32(src.data).astype(interpreter._get_np_dtype(b)), b)
    return new

def _convert(old):
    def new(x, a, b, rounding):
        if (a, b) == (tl.float32, tl.bfloat16): return to_bf16(x)
        if (a, b) == (tl.bfloat16, tl.float32): return to_fp32(x)
        return old(x, a, b, rounding)
    return new

def _reduce(old):
    "Sums of bf16 are kept in fp32 and rounded once, which is what fewer roundings would give on a GPU"
    def new(self, inputs):
        if not isinstance(inputs, tuple) or not any(is_bf16(x.handle) for x in inputs): return old(self, inputs)
        wide = tuple(tl.core.tensor(widen(x.handle), tl.block_type(tl.float32, list(x.shape))) if is_bf16(x.handle)
                     else x for x in inputs)
        back = lambda out: self.to_tensor(to_bf16(out.handle.data).reshape(out.handle.data.shape if out.shape else ()),
                                          tl.bfloat16)
        return tuple(back(out) if is_bf16(x.handle) else out for out, x in zip(old(self, wide), inputs))
    return new

def _index(old):
    "Triton 3.6 takes int() of an array of one, which numpy 2.4 refuses: every `for` over a loaded length would fail"
    def new(tensor, *scope):
        old(tensor, *scope)
        put = scope[0].set_attr if scope else setattr
        put(tensor, '__index__', lambda self: int(self.handle.data.squeeze()))
    return new

def patches():
    "What is wrong: (owner, name, new)"
    b = interpreter.InterpreterBuilder
    for name in filter(ARITHMETIC.match, dir(b)): yield b, name, _arithmetic(getattr(b, name), name)
    yield b, 'cast_impl', _cast(b.cast_impl)
    yield interpreter, '_convert_float', _convert(interpreter._convert_float)
    yield interpreter.ReduceScanOpInterface, 'apply', _reduce(interpreter.ReduceScanOpInterface.apply)
    yield interpreter, '_patch_lang_tensor', _index(interpreter._patch_lang_tensor)

_swapped = []

def mend():
    "Mend the interpreter of this process"
    if not _swapped: swap([(owner, name, new) for owner, name, new in patches()])

def swap(new):
    "Put what `new` names in its place, and remember what was there"
    _swapped[:] = [(owner, name, getattr(owner, name)) for owner, name, _ in new]
    for owner, name, x in new: setattr(owner, name, x)

@contextmanager
def unmended():
    "The interpreter as Triton ships it, for a while"
    swap(list(_swapped))
    try: yield
    finally: swap(list(_swapped))
