"""Memory under fire: no block lost, no token changed.
Preemption in both modes, prefix cache, forks, deadlines, failed steps."""
import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from cbatch import LLM, SamplingParams
from cbatch.core import Request, StepOutput
from cbatch.params import EngineConfig
from cbatch.prefix_caching import PrefixBlocks
from cbatch.preemption import VICTIMS
from cbatch.scheduler import Scheduler
from cbatch.token_loop import generate_ref
from ask import sp
from world import World, run_world

class Machine(RuleBasedStateMachine):
    w = None
    @initialize(blocks=st.integers(2, 14), size=st.integers(1, 4), seqs=st.integers(1, 6), budget=st.integers(1, 14),
                policy=st.sampled_from(['vllm', 'vllm', 'static', 'dynamic']),
                mode=st.sampled_from(['recompute', 'swap']), victim=st.sampled_from(list(VICTIMS)),
                host=st.sampled_from([None, 1, 4]), caching=st.booleans(),
                reserve=st.sampled_from([False] * 7 + [True]))
    def make(self, blocks, size, seqs, budget, policy, mode, victim, host, caching, reserve):
        self.w = World(blocks, size, seqs, budget, policy, preemption=mode, victim=victim, swap_mb=host,
                       prefix_caching=caching, reserve_max=reserve)

    @rule(common=st.integers(0, 6), own=st.lists(st.integers(1, 12), min_size=1, max_size=6), most=st.integers(1, 10),
          n=st.sampled_from([1, 1, 1, 2, 3]),
          deadline=st.sampled_from([None] * 5 + [3, 12]), salt=st.sampled_from([None, None, 'a']),
          use_cache=st.sampled_from([True] * 4 + [False]))
    def add(self, common, own, most, n, deadline, salt, use_cache):
        self.w.add([1, 2, 3, 4, 5, 6][:common] + own, most, n, deadline, salt, use_cache)

    @rule(i=st.integers(0, 60))
    def abort(self, i): self.w.abort(i)
    @rule(i=st.integers(0, 5))
    def preempt(self, i): self.w.preempt(i)
    @rule(k=st.integers(1, 6))
    def steps(self, k):
        for _ in range(k): self.w.step()
    @rule()
    def failed_step(self): self.w.step(fails=True)
    def teardown(self):
        if self.w: self.w.drain()

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=250, stateful_step_count=30, deadline=None, phases=[Phase.generate],
                                suppress_health_check=list(HealthCheck), derandomize=True)

@pytest.mark.parametrize('start', range(0, 1200, 100))
def test_worlds(start):
    "Random lives, cheaper than the machine's; what they met must have been hard"
    met = dict(preempted=0, hits=0, swapped=0, forked=0)
    for seed in range(start, start + 100):
        try: w = run_world(seed)
        except AssertionError as e: raise AssertionError(f'seed {seed}: {e}') from e
        for k in met: met[k] += getattr(w, k)
    assert all(n > 50 for n in met.values()), met

# --- the real engine

P = sp(14)

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
@pytest.mark.parametrize('k', [1, 3, 4, 5])
def test_preempted_while_streaming(tiny, mode, k):
    "After 1 token, block - 1, block, block + 1: the joined stream is the solo text, in company too"
    prompt = [7, 8, 9, 10]
    solo = generate_ref(tiny, prompt, P)
    for caching in (False, True):
        with LLM(tiny, block_size=4, num_blocks=40, preemption=mode, prefix_caching=caching, force_preempt={'r0': k},
                 check=True) as llm:
            a, b = llm.stream(prompt, P), llm.stream([1, 2, 3], P)
            pieces = [next(a)]; list(b)
            text = ''.join(pieces + list(a))
            assert text == solo.text and llm.metrics['num_preemptions'] == 1
            assert llm.metrics['num_recomputed_tokens'] == 0 or mode == 'recompute'
            assert llm.num_free_blocks == llm.num_blocks

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
def test_two_long_prompts_do_not_starve_each_other(tiny, mode):
    "Two prompts of 0.7 of the pool each, in chunks: bounded steps, computed / useful below 2, both answered"
    prompts = [[i] * 112 for i in (3, 4)]
    with LLM(tiny, block_size=8, num_blocks=20, max_num_batched_tokens=16, preemption=mode, prefix_caching=False,
             check=True) as llm:
        outs = llm.generate(prompts, P, use_tqdm=False)
        computed = sum(n for rec in llm.trace for _, n, _, _ in rec.scheduled)
        assert computed < 2 * 2 * 126 and llm.metrics['num_steps'] < 2 * (112 // 16 + 16)
        assert [o.outputs[0].token_ids for o in outs] == [generate_ref(tiny, p, P).token_ids for p in prompts]

def test_all_cross_a_block_boundary_at_once(tiny):
    """Eight requests of mixed priority need a block in the same step, and none is free.
    Each stands at most once in a batch, nobody is lost."""
    for victim in VICTIMS:
        with LLM(tiny, block_size=4, num_blocks=16, max_num_seqs=8, victim=victim, watermark=0., prefix_caching=False,
                 check=True) as llm:
            ids = [llm.add([i, 1, 2, 3, 4, 5, 6], P, priority=i % 3) for i in range(8)]
            done = {}
            while llm.has_unfinished:
                done.update({o.request_id: o for o in llm.step() if o.finished})
                who = [r for r, *_ in llm.trace[-1].scheduled]; assert len(set(who)) == len(who)
            assert llm.metrics['num_preemptions'] > 0
            for i in ids:
                assert done[i].outputs[0].token_ids == generate_ref(tiny, done[i].prompt_token_ids, P).token_ids

@pytest.mark.parametrize('n', [4, 8, 9])
def test_a_prompt_twice(tiny, n):
    "Exactly one block, two, and one token more: the second answer is the first, and at least one token is computed"
    with LLM(tiny, block_size=4, num_blocks=40, check=True) as llm:
        one, two = (llm.generate(list(range(n)), P, use_tqdm=False)[0] for _ in range(2))
        assert one.outputs[0].token_ids == two.outputs[0].token_ids == generate_ref(tiny, list(range(n)), P).token_ids
        assert 0 < two.metrics.num_cached_tokens < n or n == 4 and two.metrics.num_cached_tokens == 0

def test_a_prefix_that_is_not_computed_yet(tiny):
    "Two requests with a common beginning, both added before the first step: nobody reads what is not there"
    prompts = [[*range(8), 50], [*range(8), 60, 61]]
    with LLM(tiny, block_size=4, num_blocks=40, max_num_batched_tokens=16, check=True) as llm:
        outs = llm.generate(prompts, P, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outs] == [generate_ref(tiny, p, P).token_ids for p in prompts]

def test_forks(tiny):
    "n = 4: four samples, the set repeats, sample i depends neither on n nor on company; the prompt is stored once"
    prompt, p = list(range(10)), lambda n: sp(8, temperature=1, seed=7, n=n)
    def run(n, company=0, **kw):
        with LLM(tiny, block_size=4, num_blocks=60, max_num_seqs=8, check=True, **kw) as llm:
            for i in range(company): llm.add([i + 1] * 5, SamplingParams(temperature=1, seed=i, max_tokens=20))
            i = llm.add(prompt, p(n)); held = []
            while llm.has_unfinished:
                for o in llm.step():
                    if o.request_id == i: out = o
                held.append(llm.num_blocks - llm.num_free_blocks)
            assert llm.num_free_blocks == llm.num_blocks
            return [c.token_ids for c in out.outputs], [c.index for c in out.outputs], max(held), llm.metrics
    four, index, held, _ = run(4)
    assert len({tuple(t) for t in four}) == 4 and index == [0, 1, 2, 3] and run(4)[0] == four
    assert run(2)[0] == four[:2] and run(4, company=3)[0] == four and run(4, prefix_caching=False)[0] == four
    assert run(4, preemption='swap', force_preempt=2)[0] == four and run(4, force_preempt=2)[0] == four
    # two full blocks of the prompt, shared; per answer the last one and its own tokens
    assert held <= 2 + 4 * 3

def test_deadlines(tiny):
    "Queued and running requests end when their time is over, in that step, and leave nothing"
    with LLM(tiny, block_size=4, num_blocks=40, max_num_seqs=1, check=True) as llm:
        now = [0.]; llm.clock = lambda: now[0]
        runs, waits, fine = llm.add([1, 2], P, deadline=3.5), llm.add([3, 4], P, deadline=2.5), llm.add([5, 6], P,
            deadline=99.)
        ends = {}
        while llm.has_unfinished:
            for o in llm.step():
                if o.finished: ends[o.request_id] = o, now[0]
            now[0] += 1
        assert [ends[i][0].outputs[0].finish_reason for i in (runs, waits, fine)] == ['error', 'error', 'length']
        assert (ends[waits][1], ends[runs][1]) == (3., 4.) and 'deadline' in ends[waits][0].error
        assert ends[runs][0].outputs[0].token_ids and llm.num_free_blocks == llm.num_blocks

def test_out_of_memory_is_tried_again_with_less(tiny):
    "Once; what still fails is told to those concerned, and the next is served"
    import torch
    prompts = [[i + 1, 2, 3] for i in range(4)]
    with LLM(tiny, block_size=4, num_blocks=40, check=True) as llm:
        real, sizes = llm.runner.executor.forward, []
        def forward(batch):
            sizes.append(batch.input_ids.shape[1])
            if sizes[-1] > 6: raise torch.OutOfMemoryError('no room')
            return real(batch)
        llm.runner.executor.forward = forward
        outs = llm.generate(prompts, P, use_tqdm=False)
        assert sizes[:2] == [12, 6] and [o.outputs[0].token_ids for o in outs] == [generate_ref(tiny, p, P).token_ids
            for p in prompts]
        def never(batch): raise torch.OutOfMemoryError('no room')
        llm.runner.executor.forward = never
        i = llm.add([1, 2, 3], P)
        out = llm.step()[0]
        assert out.request_id == i and 'OutOfMemoryError' in out.error and llm.num_free_blocks == llm.num_blocks
        llm.runner.executor.forward = real
        assert llm.generate(prompts[0], P, use_tqdm=False)[0].outputs[0].token_ids == outs[0].outputs[0].token_ids

@pytest.mark.parametrize('fail', [KeyboardInterrupt, RuntimeError])
def test_a_step_that_fails_before_it_moved_anything(tiny, fail):
    "Swaps and copies of a failed step are void: whoever relied on them computes again"
    with LLM(tiny, block_size=4, num_blocks=9, max_num_seqs=3, preemption='swap', watermark=0., prefix_caching=False,
             check=True) as llm:
        ids = [llm.add([i + 1] * 6, P) for i in range(3)]; real, failed, done = llm.execute, [], {}
        def execute(plan):
            if (plan.swap_out or plan.swap_in) and len(failed) < 4: failed.append(plan); raise fail('now')
            return real(plan)
        llm.execute = execute
        while llm.has_unfinished:
            try: done.update({o.request_id: o for o in llm.step() if o.finished})
            except KeyboardInterrupt: pass
            llm.check()
        assert failed
        for i in ids:
            if not done[i].error:
                assert done[i].outputs[0].token_ids == generate_ref(tiny, done[i].prompt_token_ids, P).token_ids
        assert fail is RuntimeError or not any(o.error for o in done.values())
        assert llm.num_free_blocks == llm.num_blocks and llm.scheduler.preemptor.host.num_free_blocks == llm.num_blocks

def test_cost_of_bookkeeping_does_not_grow_with_the_queue():
    "Operations of the scheduler at 256 running requests, counted: block operations follow the blocks, not the requests"
    s = Scheduler(EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192), PrefixBlocks(20_000, 16))
    s.explain = False
    for i in range(600): s.add(Request(f'r{i}', [i] * 40, SamplingParams(), 100, seq=i))
    names = []; real = s.blocks.pool.name
    s.blocks.pool.name = lambda b, n: (names.append(b), real(b, n))
    for _ in range(4):
        p = s.schedule(); s.update(p, StepOutput({x.request.request_id: [1] for x in p.scheduled if x.rows}))
    names.clear()
    for _ in range(16): p = s.schedule(); s.update(p, StepOutput({x.request.request_id: [1] for x in p.scheduled}))
    assert len(names) == len(s.running) == 256                # one block each in sixteen steps

def test_an_exception_in_sampling_ends_one_request(tiny, monkeypatch):
    "Its mates keep their tokens, whichever row it is"
    prompts = [[i + 1, 2, 3] for i in range(4)]
    for bad in range(4):
        with LLM(tiny, block_size=4, num_blocks=40, check=True) as llm:
            real, ids = llm.runner.sampler.state, [llm.add(p, P) for p in prompts]
            def state(w):
                if w.request.request_id == ids[bad] and len(w.request.output_ids) == 3:
                    raise RuntimeError('cannot sample')
                return real(w)
            monkeypatch.setattr(llm.runner.sampler, 'state', state)
            done = {}
            while llm.has_unfinished: done.update({o.request_id: o for o in llm.step() if o.finished})
            for i, p in zip(ids, prompts):
                ref, got = generate_ref(tiny, p, P).token_ids, done[i].outputs[0]
                if i == ids[bad]:
                    assert (got.finish_reason == 'error' and 'cannot sample' in done[i].error
                            and got.token_ids == ref[:3])
                else: assert got.finish_reason == 'length' and got.token_ids == ref
            assert llm.num_free_blocks == llm.num_blocks

def test_eight_streams_are_dropped(tiny):
    "Blocks are back at once, and the next request is served as ever"
    with LLM(tiny, block_size=4, num_blocks=60, max_num_seqs=8, check=True) as llm:
        streams = [llm.stream([i + 1, 5, 6], P) for i in range(8)]
        for s in streams: next(s)
        assert llm.num_free_blocks < llm.num_blocks
        for s in streams: s.close()
        assert llm.num_free_blocks == llm.num_blocks and not llm.has_unfinished
        assert llm.generate([1, 5, 6], P, use_tqdm=False)[0].outputs[0].token_ids == generate_ref(tiny, [1, 5, 6],
            P).token_ids
