"""Compile every kernel for every GPU that cbatch names, without having one: python tools/aot.py [--quick] [--json FILE]

It says what came out. What is compiled is what the host functions launch: they are called with small CPU tensors while
a stand-in driver names the GPU, so that types, constants, alignment, warps and stages are those of the real launch.
Registers come from the binary, instructions from its disassembly; Triton brings the tools for both.
A row is bad, and the exit status 1, if the kernel
- does not compile, or needs more shared memory than the GPU has;
- spills: keeps in slow memory what did not fit into its registers;
- has a dot that is not computed by tensor cores;
- loads keys, values or weights in pieces of less than 16 bytes, the widest there are; where a tile has less than that
  for each thread, in more than one piece a thread; of keys' and values' codes 8 bytes, as many numbers: they lie as
  what becomes of them.
Each compile runs in a process of its own that may die: an error inside LLVM ends it."""
import argparse, collections, json, os, re, subprocess, sys, tempfile, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# shared memory that a program can have, bytes: CUDA C++ Programming Guide, technical specifications per compute
# capability; CDNA3 ISA, LDS
SMEM = dict(sm_75=65536, sm_80=166912, sm_86=101376, sm_89=101376, sm_90=232448, sm_100=232448, sm_120=101376,
            gfx942=65536)
# what the programs on one processor share: shared memory, threads, registers
SM_SMEM = dict(sm_75=65536, sm_80=167936, sm_86=102400, sm_89=102400, sm_90=233472, sm_100=233472, sm_120=102400,
               gfx942=65536)
SM_THREADS = dict(sm_75=1024, sm_80=2048, sm_86=1536, sm_89=1536, sm_90=2048, sm_100=2048, sm_120=1536, gfx942=2048)
SM_REGS = dict.fromkeys(SMEM, 65536) | dict(gfx942=131072)
TYPES = dict(fp16='float16', bf16='bfloat16', fp32='float32')
SHAPES = [(64, 3, 3), (64, 4, 8), (64, 8, 1), (64, 1, 8), (80, 1, 32), (96, 1, 32), (96, 3, 8),
          # head_dim, group, kv heads
          (128, 1, 8), (128, 4, 8), (128, 8, 4), (256, 1, 16), (256, 8, 1)]
QUICK = [(64, 3, 3), (80, 1, 32), (128, 4, 8), (256, 8, 1)]
QUICK_TARGETS = ['sm_75', 'sm_80', 'sm_90', 'gfx942']
CODED = [(64, 3), (80, 1), (128, 4), (256, 8)] # head_dim, group
SINKS = (64, 8)
WEIGHTS = [(4, 32, 'offsets'), (4, 32, 8), (4, 128, 'zeros'), (8, 32, 0), (8, 16, 32), (8, 128, 'zeros')]
           # bits, group, how codes count
EXTRAS = dict(window=4096, softcap=50.)

def jobs(quick=False, turing=False):
    "Calls of host functions: what to compile for what"
    for target in ['sm_75'] if turing else QUICK_TARGETS if quick else SMEM:
        # no bf16 in Turing
        for dtype in ['fp16'] if target == 'sm_75' else ['bf16'] if quick and target != 'sm_80' else ['fp16', 'bf16']:
            for D, G, K in QUICK if quick else SHAPES:
                job = dict(target=target, dtype=dtype, head_dim=D, group=G, kv_heads=K, turing=turing)
                plain = target == 'sm_75' and not turing
                refused = (target, D) == ('sm_100', 256)
                coded = [False, True] if (D, G) in CODED and not refused else [False]
                if not turing: yield from (dict(job, kernel='kv_write', coded=c) for c in coded)
                # dots on Turing have no tensor cores: neither they nor prefill are claimed
                if plain:
                    yield from (dict(job, kernel='paged_decode', dot=False, coded=c) for c in coded)
                    if (D, G) == (128, 4): yield dict(job, kernel='paged_decode', dot=False, **EXTRAS)
                    if (D, G) == SINKS: yield dict(job, kernel='paged_decode', dot=False, sinks=True)
                    continue
                yield from (dict(job, kernel='paged_decode', dot=True, coded=c) for c in coded)
                yield from (dict(job, kernel='paged_prefill', coded=c) for c in coded)
                if (D, G) in ((128, 4), (256, 8)) and (not quick or target == 'sm_80'):
                    yield dict(job, kernel='paged_decode', dot=True, **EXTRAS)
                    yield dict(job, kernel='paged_prefill', **EXTRAS)
                if (D, G) == SINKS:
                    yield from (dict(job, kernel='paged_decode', dot=True, sinks=True, coded=c) for c in (False, True))
                    yield from (dict(job, kernel='paged_prefill', sinks=True, coded=c) for c in (False, True))
        if not turing: yield from products(target, quick)

def products(target, quick=False):
    "Products by kept weights: dots of 16 bits but on Turing, sums of one row and of four, and floats for more rows"
    types = ['fp16'] if target == 'sm_75' else ['fp16', 'bf16']
    for dtype in types[-1:] if quick else [*types, 'fp32']:
        dot = target != 'sm_75' and dtype != 'fp32'
        for bits, group, count in WEIGHTS[:1] if quick else WEIGHTS[::5] if dtype == 'fp32' else WEIGHTS:
            job = dict(target=target, dtype=dtype, kernel='coded_matmul', bits=bits, group=group, count=count, dot=dot,
                       turing=False)
            yield from (dict(job, rows=n) for n in ([16] if dot else [1, 4]) + [17] * (dtype != 'fp32'))

# --- in the compiling process

def launches(job):
    "Call the host function; the kernels that it launches, compiled: [(kernel, arguments by name, compiled)]"
    import torch, triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime.jit import JITFunction, KernelInterface
    arch = job['target']
    target = GPUTarget('cuda', int(arch[3:]), 32) if arch.startswith('sm_') else GPUTarget('hip', arch, 64)
    class NoGPU(DriverBase):
        "Names a GPU, and cannot launch"
        is_active = classmethod(lambda cls: True)
        get_current_target = lambda self: target
        get_current_device = lambda self: 0
        get_current_stream = lambda self, device=0: 0
        get_active_torch_device = lambda self: torch.device('cpu')
        map_python_to_cpp_type = lambda self, ty: ty
        get_benchmarker = None
    triton.runtime.driver.set_active(NoGPU())
    got = []
    def launch(self, grid):
        self.device_caches.clear()                             # they remember the last GPU
        return lambda *args, **kw: got.append((self, self.warmup(*args, grid=grid, **kw)))
    old, KernelInterface.__getitem__ = KernelInterface.__getitem__, launch
    try: call(job, getattr(torch, TYPES[job['dtype']]))
    finally: KernelInterface.__getitem__ = old
    return got

def call(job, dtype):
    "Call a host function of cbatch with small tensors of the right types and strides"
    import torch
    from cbatch.kernels.kv_write import kv_write
    from cbatch.kernels.paged_decode import paged_decode
    from cbatch.kernels.paged_prefill import paged_prefill
    if job['kernel'] == 'coded_matmul': return call_product(job, dtype)
    D, G, K, R = job['head_dim'], job['group'], job['kv_heads'], 7
    q, cache = torch.empty(R, G * K, D, dtype=dtype), torch.empty(3, 16, K, D, dtype=dtype)
    tables, lens = torch.ones(R, 64, dtype=torch.int32), torch.ones(R, dtype=torch.int32)
    extra = {k: job[k] for k in EXTRAS if k in job}
    scales = {}
    if job.get('coded'):
        cache, scale = cache.to(torch.int8), torch.empty(3, 16, K)
        scales = dict(k_scales=scale, v_scales=scale)
        extra |= scales
    if job.get('sinks'): extra |= dict(sinks=torch.empty(G * K))
    if job['kernel'] == 'kv_write': kv_write(q[:, :K], q[:, :K], cache, cache, lens, **scales)
    elif job['kernel'] == 'paged_decode':
        paged_decode(q, cache, cache, tables, lens, D**-.5, num_splits=8, dot=job['dot'], **extra)
    else: paged_prefill(q, cache, cache, tables, lens, torch.arange(R + 1, dtype=torch.int32), D**-.5, **extra)

def call_product(job, dtype):
    "Multiply by a matrix of codes"
    import torch
    from cbatch.kernels.coded_matmul import coded_matmul
    from cbatch.quant import Codes
    bits, group, count, (num_out, num_in) = job['bits'], job['group'], job['count'], (64, 1024)
    q = torch.zeros(num_out, num_in // group, group * bits // 8, dtype=torch.uint8 if bits == 4 else torch.int8)
    d, z = torch.empty(q.shape[:2], dtype=torch.float16), torch.zeros(q.shape[:2], dtype=torch.uint8)
    m, z = (d, 0) if count == 'offsets' else (None, z if count == 'zeros' else count)
    coded_matmul(torch.empty(job['rows'], num_in, dtype=dtype), Codes(q, d, m, z, bits),
                 torch.empty(num_out, dtype=dtype), dot=job['dot'], num_splits=1)

LOADS = re.compile(r'tl\.load\((k_cache|v_cache|k|v|codes) \+')        # where the sources load keys, values, weights
WIDTH = dict(dword=4, ushort=2, short=2, ubyte=1, sbyte=1)

def kv_loads(fn, asm, hip):
    "Bytes of each instruction that loads keys, values or weights, by the source lines noted beside them"
    path = Path(fn.fn.__code__.co_filename)
    at = {i for i, l in enumerate(path.read_text().splitlines(), 1) if LOADS.search(l)}
    files = re.findall(r'^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"(?:[^"]*/)?%s"' % re.escape(path.name), asm, re.M)
    here, last, widths = False, None, collections.Counter()
    for l in asm.splitlines():
        if m := re.match(r'\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)', l):
            loc = tuple(map(int, m.groups()))
            # in inline assembly the line counts on
            here = m[1] in files and loc[1] in at or here and last == (loc[0], loc[1] - 1, loc[2])
            last = loc
        elif here and hip and (m := re.match(r'\s*(?:global|buffer)_load_(dword|u?short|[us]byte)(?:x(\d))?', l)):
            widths[WIDTH[m[1]] * int(m[2] or 1)] += 1
        elif here and (m := re.search(r'\bld\.global[.\w:]*?(?:\.v(\d))?\.[bsuf](\d+)', l)):
            widths[int(m[1] or 1) * int(m[2]) // 8] += 1
        elif here and (m := re.search(r'\bcp\.async\.c[ag]\.shared\.global.*?, 0x([0-9a-f]+)', l)):
            widths[int(m[1], 16)] += 1
    return widths

def cubin_facts(cubin):
    "Registers, stack and spills, tensor-core instructions of a CUDA binary"
    import triton
    tools = Path(triton.__file__).parent/'backends/nvidia/bin'
    with tempfile.NamedTemporaryFile(suffix='.cubin') as f:
        f.write(cubin); f.flush()
        run = lambda *cmd: subprocess.run([str(tools/cmd[0]), *cmd[1:], f.name], capture_output=True, text=True,
                                          check=True).stdout
        usage = {k: int(v) for k, v in re.findall(r'\b(REG|STACK|LOCAL):(\d+)',
                                                  run('cuobjdump', '--dump-resource-usage'))}
        sass = run('nvdisasm', '-c')
    return dict(regs=usage['REG'], spill=usage['STACK'] + usage['LOCAL'] + len(re.findall(r'\b(?:LDL|STL)\b', sass)),
                mma=len(re.findall(r'\b(?:HMMA|HGMMA|UTC\w*MMA|OMMA|QMMA)\b', sass)),
                copies=len(re.findall(r'\bLDGSTS\b', sass)))

def amd_facts(asm):
    num = lambda key: int((re.search(rf'\.{key}:\s+(\d+)', asm) or [0, 0])[1])
    return dict(regs=num('vgpr_count'), spill=num('vgpr_spill_count') + num('private_segment_fixed_size'),
                mma=len(re.findall(r'\bv_(?:mfma|wmma)_', asm)), copies=0)

def row(job, fn, k):
    "What one compiled kernel is like, and what is wrong with it"
    hip, target = job['target'].startswith('gfx'), job['target']
    asm = k.asm['amdgcn' if hip else 'ptx']
    facts = amd_facts(asm) if hip else cubin_facts(k.asm['cubin'])
    name, threads = fn.__name__.strip('_'), k.metadata.num_warps * (64 if hip else 32)
    consts = {fn.arg_names[i[0]]: v for i, v in k.src.constants.items()}
    widths = kv_loads(fn, asm, hip)
    has_dot = consts.get('DOT', 'tl.dot(' in fn.src)
    resident = min(SM_REGS[target] // (-(-facts['regs'] // 8) * 8 * threads), SM_THREADS[target] // threads,
                   SM_SMEM[target] // max(k.metadata.shared, 1024))
    bad = []
    if facts['spill']: bad.append(f"spills: {facts['spill']}")
    if k.metadata.shared > SMEM[target]: bad.append(f"shared memory: {k.metadata.shared} bytes of {SMEM[target]}")
    if has_dot and not facts['mma']: bad.append('a dot without tensor cores')
    if not resident: bad.append('registers for no program at all')
    if name != 'reduce':
        # bytes of a tile that each thread loads
        size = 1 if job.get('coded') and name != 'kv_write' else 2
        if 'bits' in job: need = min(16, consts['BN'] * consts['BB'] // threads)
        else: need = size * min(8, consts['BK' if name == 'kv_write' else 'TILE'] * consts['BD'] // threads)
        what = 'weights' if 'bits' in job else 'keys or values'
        if not widths: bad.append(f'no load of {what} found')
        elif min(widths) < need: bad.append(f"loads {what} {min(widths)} bytes at a time, could {need}")
    variant = [{True: 'dot', False: 'dot-free'}.get(consts.get('DOT')), 'window and soft cap' if consts.get('WINDOW')
               else None, 'sinks' if job.get('sinks') else None, 'codes' if job.get('coded') else None,
               f"{job['bits']} bits" if 'bits' in job else None]
    return dict(kernel=name, variant=', '.join(filter(None, variant)), dtype=job['dtype'],
                head_dim=job.get('head_dim'), group=job['group'], target=target,
                warps=k.metadata.num_warps, **facts, smem=k.metadata.shared, load_bytes=min(widths, default=None),
                resident=resident,
                ok=not bad, why='; '.join(bad))

def worker():
    "Read jobs, a line each, and answer each with a line of rows"
    sys.path.insert(0, str(ROOT))
    hook = None
    for line in sys.stdin:
        job = json.loads(line)
        if job['turing'] and not hook:
            from cbatch.kernels.triton_backend import enable_turing_dots as hook
            hook()
        try: rows = [row(job, fn, k) for fn, k in launches(job)]
        except Exception as e:
            rows = [failed(job, f"{type(e).__name__}: {next(iter(str(e).strip().splitlines()), '')[:160]}")]
        print(json.dumps(rows), flush=True)

# --- in the process that asks

def failed(job, why):
    return dict(kernel=job['kernel'], variant=dict({True: 'dot', False: 'dot-free'}).get(job.get('dot'), ''),
                dtype=job['dtype'], head_dim=job.get('head_dim'),
                group=job['group'], target=job['target'], ok=False, why=why)

def compile_all(todo, report, cache):
    "Rows of some jobs, from one process that is started again whenever it dies"
    env = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'} | dict(TRITON_CACHE_DIR=cache,
        TRITON_DEFAULT_FP_FUSION='1', OMP_NUM_THREADS='1')
    proc, rows = None, []
    for job in todo:
        if proc is None:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            proc = subprocess.Popen([sys.executable, __file__, '--worker'], env=env, text=True, **pipes)
        try: proc.stdin.write(json.dumps(job) + '\n'); proc.stdin.flush(); line = proc.stdout.readline()
        except BrokenPipeError: line = ''
        if line: new = json.loads(line)
        else: new, proc = [failed(job, f'the compiler ended its process ({proc.wait()})')], None
        for r in new: report(r)
        rows += new
    if proc: proc.stdin.close(); proc.wait()
    return rows

def has_turing():
    try: from cbatch.kernels.triton_backend import enable_turing_dots
    except ImportError: return False
    return True

def span(rows, key):
    "Least and greatest value of a column"
    xs = [r[key] for r in rows if r.get(key) is not None]
    return '-' if not xs else f'{min(xs)}' if min(xs) == max(xs) else f'{min(xs)}-{max(xs)}'

def table(rows):
    "A line for each kernel and GPU"
    show = lambda name, target, *cells: print(f'{name:<45}{target:>7}' + ''.join(f'{c:>11}' for c in cells))
    show('\nkernel', ' target', 'compiled', 'bad', 'registers', 'spills', 'shared kB', 'mma', 'load bytes', 'programs')
    groups = collections.defaultdict(list)
    for r in rows: groups[r['kernel'] + (f" ({r['variant']})" if r['variant'] else ''), r['target']].append(r)
    for (name, target), rs in groups.items():
        shared = max(r.get('smem', 0) for r in rs) / 1024
        show(name, target, len(rs), sum(not r['ok'] for r in rs), span(rs, 'regs'), span(rs, 'spill'), f'{shared:.0f}',
             *(span(rs, k) for k in ('mma', 'load_bytes', 'resident')))

def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0]); arg = p.add_argument
    arg('--quick', action='store_true', help='some shapes and GPUs')
    arg('--json', help='write the rows here, beside those of other Triton versions')
    arg('--only', default='', help='host functions whose name has this')
    arg('--workers', type=int, default=min(2, os.cpu_count()))
    arg('--worker', action='store_true', help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.worker: return worker()
    import importlib.util
    if not importlib.util.find_spec('triton'): return print(f'skipped: there is no Triton for {sys.platform}')
    os.environ.pop('TRITON_INTERPRET', None)
    sys.path.insert(0, str(ROOT))
    import triton
    start = time.time()
    def run(todo):
        todo = [j for j in todo if o.only in j['kernel']]
        named = lambda r: (f"{r['kernel']} {r['variant']} {r['dtype']} head_dim {r['head_dim']} group {r['group']} "
                           f"{r['target']}")
        report = lambda r: None if r['ok'] else print(f"BAD {named(r)}: {r['why']}", flush=True)
        with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(o.workers) as pool:
            parts = pool.map(lambda i: compile_all(todo[i::o.workers], report, cache), range(o.workers))
            return sorted(sum(parts, []), key=lambda r: (r['kernel'], r['variant'], list(SMEM).index(r['target']),
                                                         r['dtype'], r['head_dim'] or 0, r['group']))
    rows, turing = run(jobs(o.quick)), []
    table(rows)
    if has_turing():
        turing = run(jobs(o.quick, turing=True))
        print('\nUnverified, and so not counted: dots on sm_75 with its tensor cores, through enable_turing_dots()')
        table(turing)
    bad = sum(not r['ok'] for r in rows)
    print(f'\nTriton {triton.__version__}: {len(rows)} kernels compiled, {bad} bad ({time.time() - start:.0f} s)')
    if o.json: record(Path(o.json), triton.__version__, rows, turing, o.quick)
    sys.exit(bad > 0)

def record(path, version, rows, turing, quick):
    "Put a Triton version into the file: the last that ran at the top, the others below `versions`"
    old = json.loads(path.read_text()) if path.exists() else {}
    entries = {e['triton']: {k: v for k, v in e.items() if k != 'versions'}
               for e in [*old.get('versions', {}).values(), old] if e}
    entries[version] = dict(triton=version, command=f"python tools/aot.py{' --quick' * quick} --json {path}",
                            rows=rows, turing=turing)
    others = sorted(entries.keys() - {version}, key=lambda v: [int(x) for x in re.findall(r'\d+', v)[:3]])
    whole = entries[version] | dict(versions={v: entries[v] for v in others})
    path.write_text(json.dumps(whole).replace('}, {', '},\n {') + '\n')   # a line for each kernel

if __name__ == '__main__': main()
