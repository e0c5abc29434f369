"""Bounds and races in Triton's interpreter. `with sanitized(): launch()` raises `Fault` at the first
- lane of a load or store outside the tensor its pointer came from: beyond the ends, or in the gaps of a strided view;
- place that one program of a launch writes and another reads or writes. The interpreter runs programs one after the
  other; a GPU does not;
- store of two different values to one place.
A masked-off lane may point anywhere. Atomics are checked for bounds only."""
import sys
from contextlib import contextmanager
from pathlib import Path
import numpy as np, torch, triton
from triton.runtime import interpreter

class Fault(RuntimeError): pass

NOT_THE_KERNEL = __file__, str(Path(triton.__file__).parent), '<'

class Arg:
    "A tensor argument of a launch: the addresses of its elements, sorted"
    def __init__(self, name, t, log):
        at = np.zeros(1, np.int64)
        for n, s in zip(t.shape, t.stride()): at = np.add.outer(at, np.arange(n) * s).ravel()
        self.name, self.item, self.start, self.log = name, t.element_size(), t.data_ptr(), log
        self.at = self.start + self.item * (at if t.is_contiguous() else np.unique(at))
        log.parts.append(self.at)

class Log:
    "Who touched each element of a storage, by number of the program: 0 nobody, -1 more than one"
    def __init__(self): self.parts, self.at = [], None

    def index(self, addr):
        "Places of addresses in `writer` and `reader`; made when the first program runs: arguments may share a storage"
        if self.at is None:
            self.at = self.parts[0] if len(self.parts) == 1 else np.unique(np.concatenate(self.parts))
            self.writer, self.reader = np.zeros((2, len(self.at)), np.int32)
        return np.searchsorted(self.at, addr)

def line():
    "The kernel's line that is being interpreted"
    f = sys._getframe()
    while f.f_code.co_filename.startswith(NOT_THE_KERNEL): f = f.f_back
    try: text = open(f.f_code.co_filename).read().splitlines()[f.f_lineno - 1].strip()
    except (OSError, IndexError): text = ''
    return f"{f.f_code.co_name}, line {f.f_lineno}: {text}"

def touch(builder, kind, ptrs, mask, value=None):
    "Check one load, store or atomic of the program that runs now"
    arg = ptrs.attr['argument']
    on = np.broadcast_to(True if mask is None else mask.data.astype(bool), ptrs.data.shape)
    addr = ptrs.data[on].astype(np.int64)
    if not addr.size: return
    say = lambda what: Fault(f"{what}: {kind} of `{arg.name}` by program {tuple(map(int, builder.grid_idx))} "
                             f"in {line()}")
    near = arg.at[np.searchsorted(arg.at, addr).clip(max=len(arg.at) - 1)] if len(arg.at) else 0
    bad = near != addr
    first = lambda: (addr[bad][0] - arg.start) // arg.item
    if bad.any():
        raise say(f"{bad.sum()} of {bad.size} lanes out of bounds, the first {first()} elements from the start "
                  f"of {len(arg.at)}")
    if kind == 'atomic': return
    log, at, me = arg.log, arg.log.index(addr), 1 + int(np.ravel_multi_index(builder.grid_idx, builder.grid_dim))
    others = lambda who: (who != 0) & (who != me)
    if others(log.writer[at]).any(): raise say('race, another program wrote there')
    if kind == 'load': log.reader[at] = np.where(others(log.reader[at]), -1, me)
    else:
        if others(log.reader[at]).any(): raise say('race, another program read there')
        log.writer[at] = me
        order = np.argsort(at, kind='stable')
        a, v = at[order], np.broadcast_to(value.data, ptrs.data.shape)[on][order]
        if ((a[1:] == a[:-1]) & (v[1:] != v[:-1]) & (v[1:] == v[1:])).any(): raise say('two values for one place')

def keeps_origin(old):
    "A pointer made from a pointer belongs to the same argument"
    def new(self, *args, **kw):
        out = old(self, *args, **kw)
        for a in args:
            if isinstance(a, interpreter.TensorHandle) and 'argument' in a.attr:
                out.attr['argument'] = a.attr['argument']
        return out
    return new

POINTERS = 'addptr splat broadcast expand_dims reshape trans select bitcast'.split()

@contextmanager
def sanitized():
    B, undo = interpreter.InterpreterBuilder, []
    def put(owner, name, new): undo.append((owner, name, getattr(owner, name))); setattr(owner, name, new)
    names, logs = [], {}
    call, cvt = interpreter.GridExecutor.__call__, interpreter._implicit_cvt
    load, store, rmw, cas = B.create_masked_load, B.create_masked_store, B.create_atomic_rmw, B.create_atomic_cas
    def launch(self, *args, **kw):
        logs.clear(); names[:] = [n for n in self.arg_names if n not in self.constexprs]
        return call(self, *args, **kw)
    def convert(arg):
        out, name = cvt(arg), names.pop(0) if names else '?'
        if isinstance(arg, torch.Tensor):
            s = arg.untyped_storage()
            if s.data_ptr() not in logs: logs[s.data_ptr()] = Log()
            out.handle.attr['argument'] = Arg(name, arg, logs[s.data_ptr()])
        return out
    def masked_load(self, ptrs, mask, *a, **k): touch(self, 'load', ptrs, mask); return load(self, ptrs, mask, *a, **k)
    def masked_store(self, ptrs, value, mask, *a, **k):
        touch(self, 'store', ptrs, mask, value); return store(self, ptrs, value, mask, *a, **k)
    def atomic_rmw(self, op, ptrs, value, mask, *a):
        touch(self, 'atomic', ptrs, mask); return rmw(self, op, ptrs, value, mask, *a)
    def atomic_cas(self, ptrs, *a): touch(self, 'atomic', ptrs, None); return cas(self, ptrs, *a)
    try:
        put(interpreter.GridExecutor, '__call__', launch); put(interpreter, '_implicit_cvt', convert)
        put(B, 'create_masked_load', masked_load); put(B, 'create_masked_store', masked_store)
        put(B, 'create_atomic_rmw', atomic_rmw); put(B, 'create_atomic_cas', atomic_cas)
        for n in POINTERS: put(B, f'create_{n}', keeps_origin(getattr(B, f'create_{n}')))
        yield
    except interpreter.InterpreterError as e:   # it wraps what a kernel raises
        while isinstance(e, interpreter.InterpreterError) and e.__cause__: e = e.__cause__
        raise e from None
    finally:
        for o in reversed(undo): setattr(*o)
