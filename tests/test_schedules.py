"""Random schedules: every answer is the one that the request would get alone.
Whatever the batch, the budget, the memory, the policy and the moment."""
import functools, random
from collections import Counter
import pytest
from cbatch.token_loop import generate_ref
from harness import WISHES, draw_params, expected, llama, prompts, run_schedule
from toy import Crowd

SEEDS = range(220)

@functools.cache
def outcome(seed): return run_schedule(seed)

@pytest.mark.parametrize('seed', SEEDS)
def test_schedule(seed): outcome(seed)

def test_the_schedules_were_hard():
    "What the seeds above have met; ties are few"
    seen = sum(map(outcome, SEEDS), Counter())
    print(dict(seen))
    assert (all(seen[f'preempted by {how}'] >= 15 for how in ('recompute', 'swap')) and seen['preempted'] >= 60
            and min(seen['padding'], seen['cached']) > 500)
    assert all(seen[p] >= 20 for p in ('vllm', 'static', 'dynamic')) and all(seen[f'by {r}'] > 100
        for r in ('stop', 'length'))
    assert all(seen[f'aborted {s}'] for s in ('waiting', 'mid-prompt', 'running', 'preempted'))
    assert seen['tie'] <= .01 * seen['equal']

@pytest.mark.parametrize('seed', range(12))
def test_expected_is_the_oracles(seed):
    "The shortcut by which the schedules know the right answer, against the oracle itself"
    rng = random.Random(seed)
    prompt, wish = rng.randrange(len(prompts())), rng.randrange(len(WISHES))
    params = draw_params(rng, prompt, wish)
    ref = generate_ref(llama(), list(prompts()[prompt]), params)
    assert expected(prompt, wish, params) == (ref.token_ids, ref.finish_reason)

@pytest.mark.parametrize('seeds', [range(i, i + 150) for i in range(0, 3000, 150)],
                         ids=lambda r: f'{r.start}-{r.stop - 1}')
def test_scheduler_alone(seeds):
    "Many small crowds before the scheduler and a toy model that reads through the block table"
    preempted = 0
    for seed in seeds:
        try: preempted += Crowd(seed).run().preempted > 0
        except AssertionError as e: raise AssertionError(f'seed {seed}') from e
    assert preempted >= 10
