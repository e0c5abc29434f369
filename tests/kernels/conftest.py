"""Kernels in Triton's interpreter.
The conftest.py at the top sets TRITON_INTERPRET=1 before anything imports Triton, on a machine with a GPU too. With
TRITON_INTERPRET=0 the parity tests compile the kernels and run on the GPU; what needs the interpreter is skipped."""
import importlib.util
import pytest

if importlib.util.find_spec('triton'):
    import triton, triton.language as tl
    INTERPRETED = triton.knobs.runtime.interpret
    if ('Interpreted' in type(tl.sum).__name__) != INTERPRETED:
        raise pytest.UsageError('triton was imported before TRITON_INTERPRET was set')
    if INTERPRETED:
        import interp
        interp.mend()
else: collect_ignore_glob = ['test_*.py']   # no Triton on this platform: macOS, Windows

@pytest.fixture
def interpreter():
    if not INTERPRETED: pytest.skip('needs TRITON_INTERPRET=1')
