import os

import pytest

os.environ.setdefault('TRITON_INTERPRET', '1')  # 0 compiles the kernels, which needs a GPU
os.environ.setdefault('HF_HUB_OFFLINE', '1')    # tests fetch nothing
os.environ.setdefault('MPLBACKEND', 'agg')
# C++ is used by the tests that say so, whatever lies in the cache; 1: by all, once it is built
os.environ.setdefault('CBATCH_NATIVE', '0')

def pytest_runtest_setup(item):
    if item.get_closest_marker('cuda'):
        import torch
        if not torch.cuda.is_available(): pytest.skip('needs a CUDA GPU')
