"The checks of test_memory at work: each of these faults is found by random lives"
import random
import pytest
from memory_faults import FAULTS
from world import draw_world, live_on

def found(seeds=400):
    "The first seed whose life goes wrong"
    for seed in range(seeds):
        rng = random.Random(seed)
        w = draw_world(rng)
        try: live_on(w, rng)
        except Exception: return seed

@pytest.mark.parametrize('name', FAULTS)
def test_found(name, monkeypatch):
    FAULTS[name](monkeypatch.setattr)
    assert found() is not None

def test_no_fault_no_finding(): assert found(60) is None
