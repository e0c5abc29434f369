"C++ pieces: built once, found again, never in the way"
import ctypes, os, subprocess, sys, time
import pytest, torch
from cbatch import native
from cbatch.native import Native, build_all

SOURCE = ('#include <cstdint>\nextern "C" void twice(float* x, int64_t n) {\n    #pragma omp parallel for\n'
          '    for (int64_t i = 0; i < n; i++) x[i] *= 2;\n}')
FUNCTIONS = dict(twice=[ctypes.c_void_p, ctypes.c_int64])
needs_compiler = pytest.mark.skipif(native._compiler() is None or sys.platform == 'win32', reason='no C++ compiler')

@pytest.fixture
def piece(tmp_path, monkeypatch):
    "Makes the same piece, as a new process would see it"
    for k, v in dict(CBATCH_CACHE=str(tmp_path), CBATCH_NATIVE='1').items(): monkeypatch.setenv(k, v)
    monkeypatch.setattr(native, 'KERNELS', {})
    native._warn.cache_clear()
    return lambda source=SOURCE, **kw: Native('piece', source, FUNCTIONS, **kw)

def works(lib):
    x = torch.arange(5.); lib.twice(x.data_ptr(), 5)
    return x.tolist() == [0, 2, 4, 6, 8]

@needs_compiler
def test_nothing_is_built_by_itself_and_what_is_settled_stays(piece):
    p = piece()
    assert p.lib is None and p.find() is None
    so = p.build()
    assert p.lib is None and p.find() == so        # this one has gone without
    assert works(piece().lib) and piece().build() == so

@needs_compiler
def test_no_compiler_is_no_error(piece, monkeypatch):
    so = piece().build()
    monkeypatch.setenv('PATH', ''); monkeypatch.delenv('CXX', raising=False)
    p = piece()
    with pytest.warns(UserWarning, match='no C\\+\\+ compiler.*torch') as seen:
        assert p.build() is None and p.build() is None and not any(build_all().values())
    assert len(seen) == 1 and p.lib is None and so.exists()

@needs_compiler
def test_a_build_that_fails_or_a_folder_that_is_none(piece, monkeypatch, tmp_path):
    for bad, what in (piece('int main( {'), 'failed'), (piece(flags=('--no-such-flag',)), 'failed'):
        with pytest.warns(UserWarning, match=what): assert bad.build() is None
    assert bad.lib is None and not list(tmp_path.rglob('*.so'))
    (tmp_path/'file').write_text(''); monkeypatch.setenv('CBATCH_CACHE', str(tmp_path/'file'))
    with pytest.warns(UserWarning, match='file'): assert piece().build() is None
    assert piece().lib is None
    monkeypatch.setenv('CBATCH_CACHE', str(tmp_path))
    lacking = Native('piece', SOURCE, dict(thrice=[]))
    assert lacking.build()
    with pytest.warns(UserWarning, match='thrice'): assert lacking.lib is None

WAITS = '''
import re, sys, threading, torch
from pathlib import Path
torch.set_num_threads(2)
x = torch.zeros(1 << 17).add_(1)                     # OpenMP is loaded, and has a team
{}
from cbatch import native
teams, native._teams = native._teams, dict()         # nobody sends them away
for t in teams.values(): t.lie_down()
def slept():
    "How often its threads have given their processor back"
    texts = [t.read_text() for t in Path('/proc/self/task').glob('*/status')]
    return sum(int(re.search('^voluntary_ctxt_switches:(.*)', t, re.M)[1]) for t in texts)
before = slept()
for _ in range(200): x.add_(1); sum(range(5000))
print(slept() - before, sum(t.name == 'openmp gives way' for t in threading.enumerate()))
'''

def waits(code):
    "How often two threads that wait for their next share have slept in 200 shares, and how many hold them to it"
    env = {k: v for k, v in os.environ.items() if not k.startswith(('OMP_', 'GOMP_'))}
    ran = subprocess.run([sys.executable, '-c', WAITS.format(code)], env=env, capture_output=True,
                         text=True, check=True)
    return [int(n) for n in ran.stdout.split()]

@pytest.mark.skipif(sys.platform != 'linux', reason='needs Linux')
@pytest.mark.parametrize('code', ['from cbatch import AsyncLLM; AsyncLLM',
                                  'from cbatch.native import give_way; give_way(); give_way()'])
def test_threads_that_wait_go_to_sleep_also_where_torch_was_first(code):
    slept, held = waits(code)
    assert slept > 100 and held == 1

@pytest.mark.skipif(sys.platform != 'linux', reason='needs Linux')
def test_whoever_said_how_to_wait_keeps_his_word(monkeypatch):
    filled = []
    class Team:
        def __init__(self, path): filled.append(path)
        def lie_down(self): pass
    monkeypatch.setattr(native, '_Team', Team)
    monkeypatch.setattr(native, '_watch', lambda: None)
    for name in 'OMP_WAIT_POLICY', 'GOMP_SPINCOUNT': monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(native, '_teams', {})
    native.give_way()
    assert filled and all('libgomp' in p for p in filled)      # torch's own
    for name, value in dict(OMP_WAIT_POLICY='ACTIVE', GOMP_SPINCOUNT='3').items():
        with monkeypatch.context() as m: m.setenv(name, value); filled.clear(); native.give_way(); assert not filled

@pytest.mark.skipif(sys.platform != 'linux', reason='needs Linux')
def test_sleepers_leave_while_nobody_else_is_here(monkeypatch):
    "After three windows alone; at once there again when somebody works; whoever does nothing decides nothing"
    here, took = [True], []
    class Team: lie_down, leave = (lambda self: here.append(True)), (lambda self: here.append(False))
    monkeypatch.setattr(native, '_teams', dict(x=Team()))
    calm = 0
    for worked, ours in (.2, .2), (.2, .14), (.2, .19), (.2, .01), (.2, .2), (.4, .4), (.2, .2), (.4, .2), (.2, .2):
        calm = native._look(calm, worked, ours)
        took.append(here[-1])
    assert took == [True, True, True, True, True, False, False, True, True]

@pytest.mark.skipif(sys.platform != 'linux', reason='needs Linux')
def test_what_others_use_is_seen():
    before = native._used()
    busy = subprocess.Popen([sys.executable, '-c', 'while True: pass'])
    try: time.sleep(1)
    finally: busy.kill(); busy.wait()
    worked, ours = (b - a for a, b in zip(before, native._used()))
    assert worked > .2 and ours < .2

@needs_compiler
@pytest.mark.parametrize('content', [b'', b'nonsense', None], ids=['empty', 'nonsense', 'cut'])
def test_a_damaged_file_is_not_there_and_is_built_again(piece, content):
    so = piece().build()
    whole = so.read_bytes()
    so.unlink(); so.write_bytes(whole[:len(whole) // 2] if content is None else content)
    p = piece()
    assert p.find() is None and p.lib is None
    assert p.build() == p.build() != None
    assert works(piece().lib) and len(list(so.parent.glob('*.so'))) == 1

@needs_compiler
def test_another_processor_compiler_source_or_torch_finds_nothing(piece, monkeypatch, tmp_path):
    piece().build()
    assert piece(SOURCE + '\n').find() is None and piece(flags=('-g',)).find() is None and piece().find()
    for what, name, value in (native, '_cpu', lambda: 'a 386'), (torch, '__version__', '1.0'), (torch.backends.cpu,
        'get_cpu_capability', lambda: 'NO AVX'):
        with monkeypatch.context() as m: m.setattr(what, name, value); assert piece().find() is None
    other = tmp_path/'c++'; other.write_text('#!/bin/sh\nexit 1\n'); other.chmod(0o755)
    monkeypatch.setenv('CXX', str(other)); assert piece().find() is None

@needs_compiler
def test_turned_off(piece, monkeypatch):
    p = piece(); p.build()
    monkeypatch.setenv('CBATCH_NATIVE', '0')
    assert p.lib is None and build_all() == {}

@needs_compiler
def test_every_struct_lies_alike_on_both_sides(monkeypatch, tmp_path):
    "Sizes and offsets of all structs, asked of the compiler"
    from cbatch.kernels.lean_step import LEAN_CPP
    from cbatch.sampler import SAMPLER_CPP
    monkeypatch.setenv('CBATCH_CACHE', str(tmp_path)); monkeypatch.setenv('CBATCH_NATIVE', '1')
    found = {s for s in native.Struct.__subclasses__() if s.cpp in LEAN_CPP or s.cpp in SAMPLER_CPP}
    assert {s.__name__ for s in found} == {'Row', 'KVPool', 'Write', 'Step', 'Matrix', 'LeanLayer', 'LeanWeights',
                                           'LeanStep'}
    for s in found:
        names = [f for f, *_ in s._fields_]
        asks = ''.join(f'*out++ = offsetof({s.__name__}, {f}); *out++ = sizeof((({s.__name__}*)0)->{f}); '
                       for f in names)
        source = LEAN_CPP if s.cpp in LEAN_CPP else SAMPLER_CPP
        lib = native.trial(f'{source}\n#include <cstddef>\nextern "C" void layout(int64_t* out) '
                           f'{{ *out++ = sizeof({s.__name__}); {asks}}}', dict(layout=[ctypes.c_void_p]), '-O0')
        theirs = torch.zeros(1 + 2 * len(names), dtype=torch.long); lib.layout(theirs.data_ptr())
        assert theirs.tolist() == [ctypes.sizeof(s), *(x for f in names
                                                       for x in (getattr(s, f).offset, getattr(s, f).size))], s.__name__

@pytest.mark.parametrize('table', ['int32', 'int16 x', 'Other x', 'int64 x; float'])
def test_a_table_that_says_nothing_is_refused(table):
    with pytest.raises(ValueError, match="struct T"): native.struct('T', table)

@needs_compiler
def test_a_trial_is_nobodys(piece):
    p = piece()
    assert works(native.trial(SOURCE, FUNCTIONS)) and native.KERNELS == {'piece': p}

@needs_compiler
def test_two_processes_at_once(piece, tmp_path):
    "One compiles, the other waits and finds it; whoever dies leaves no lock"
    # no transformers
    light = ('import ctypes, pathlib, sys, types\nm = sys.modules["cbatch.loading"] = types.ModuleType("m"); '
             f'm.cache_dir = lambda: pathlib.Path({str(tmp_path)!r})')
    code = (f'{light}\nfrom cbatch.native import Native\n'
            f'p = Native("piece", {SOURCE!r}, dict(twice=[ctypes.c_void_p, ctypes.c_int64]))\n'
            'print(p.build()); assert p.lib')
    ran = [subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
           for _ in range(2)]
    said = [p.communicate(timeout=120) for p in ran]
    assert [p.returncode for p in ran] == [0, 0] and said[0][0] == said[1][0] != 'None\n'
    assert sum('compiling' in err for _, err in said) == 1 and len(list(tmp_path.rglob('*.so'))) == 1
