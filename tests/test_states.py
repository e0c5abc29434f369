"""Models whose layers keep states, over random schedules, against transformers' own `generate`; faults that must show.

Memory is short, chunks are small, blocks are odd, and what was never written is NaN."""
import functools, logging, random
import pytest, torch
from transformers import AutoConfig
from transformers.cache_utils import Cache
from cbatch import LLM, SamplingParams
from cbatch.mixers import mixers
from cbatch.model import tiny_lm
from cbatch.params import ParamError
from cbatch.probe import CannotServe, refuse
from cbatch.states import StatePool
from cbatch.twin import with_attention
from cbatch.token_loop import compare_tokens

pytestmark = pytest.mark.skipif(not hasattr(Cache, 'get_conv_state'), reason='transformers hides the states')
ARCHS = ('qwen3_next qwen3_5_text kimi_linear granitemoehybrid falcon_h1 mamba mamba2 jamba lfm2 minimax bamba '
         'olmo_hybrid').split()
LONGEST = 12  # tokens of an answer

@functools.cache
def model(arch): return tiny_lm(arch)

@functools.cache
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 3, 5, 8, 13, 17, 23, 31, 40)]

@functools.cache
def oracle(arch, prompt):
    "transformers' answer, a whole prompt first and then token by token, by its plainest attention"
    p, hf = torch.tensor([prompts()[prompt]]), with_attention(model(arch).hf_model, 'eager')
    with torch.no_grad():
        out = hf.generate(p, attention_mask=torch.ones_like(p), max_new_tokens=LONGEST, min_new_tokens=LONGEST,
                          do_sample=False, eos_token_id=None, pad_token_id=257)
    return out[0, p.shape[1]:].tolist()

def greedy(most, **kw): return SamplingParams(temperature=0, max_tokens=most, ignore_eos=True, **kw)

def engine(arch, **kw):
    "An engine whose memory holds NaN wherever nobody has written"
    llm = LLM(model(arch), check=True, **kw)
    e = llm.runner.executor
    for cache in e.backend.k + e.backend.v: cache[1:] = float('nan')
    for pool in e.states.pools.values():
        for x in pool.values(): x.fill_(float('nan'))
    return llm

def compare(arch, prompt, ids):
    "Is this the oracle's answer, as far as it goes? A tie counts as one"
    ref = oracle(arch, prompt)[:len(ids)]
    how = compare_tokens(model(arch), prompts()[prompt], ids, ref)
    assert how, f'{arch}, prompt {prompt}: {how}'
    return how.equal

def run_schedule(arch, seed, **kw):
    "(answers that are equal, ties, preemptions) of a crowd"
    rng = random.Random(f'{arch} {seed}')
    asks = [(rng.randrange(len(prompts())), rng.randint(3, LONGEST)) for _ in range(rng.randint(5, 8))]
    bs = rng.choice([1, 3, 4, 8])
    need = max(-(-(len(prompts()[p]) + n) // bs) for p, n in asks)
    kw = dict(block_size=bs, num_blocks=need + rng.randint(0, need // 2), max_num_seqs=rng.choice([2, 3, 5]),
              max_num_batched_tokens=rng.choice([8, 9, 16])) | kw
    llm, todo, done = engine(arch, **kw), list(enumerate(asks)), {}
    while todo or llm.has_unfinished:
        if todo and rng.random() < .5:
            i, (p, n) = todo.pop(0)
            llm.add(prompts()[p], greedy(n, n=rng.choice([1, 1, 2])), request_id=str(i))
        done |= {o.request_id: o for o in llm.step() if o.finished}
    hows = []
    for i, (p, n) in enumerate(asks):
        assert not done[str(i)].error, done[str(i)].error
        hows += [compare(arch, p, c.token_ids) for c in done[str(i)].outputs]
    b = llm.scheduler.blocks
    assert llm.num_free_blocks == llm.num_blocks and b.slots.num_free_blocks == b.slots.num_blocks
    return sum(hows), len(hows) - sum(hows), llm.metrics['num_preemptions']

COUNTS = {}

@pytest.mark.parametrize('arch', ARCHS)
def test_schedules(arch):
    runs = [run_schedule(arch, s) for s in range(2)] + [run_schedule(arch, 2, preemption='swap', force_preempt=4)]
    COUNTS[arch] = equal, ties, preempted = tuple(map(sum, zip(*runs)))
    print(arch, COUNTS[arch])
    assert equal > 10 and ties <= 1 and preempted

@pytest.mark.slow
@pytest.mark.parametrize('arch', ARCHS)
def test_more_schedules(arch):
    runs = [run_schedule(arch, s, **kw) for s in range(10, 18)
            for kw in ({}, dict(preemption='swap', force_preempt=3))]
    equal, ties, preempted = map(sum, zip(*runs))
    print(arch, equal, ties, preempted)
    assert equal > 80 and ties <= 2 and preempted > 8

def test_the_answers_are_of_many_tokens():
    for arch in ARCHS: assert len({t for p in range(len(prompts())) for t in oracle(arch, p)}) > 15, arch

# ---- the tests have teeth

def wrong(arch, seeds=3, **kw):
    "Of a few schedules, those that gave a wrong answer"
    bad = 0
    for seed in range(seeds):
        try: run_schedule(arch, seed, **kw)
        except AssertionError: bad += 1
    return bad

def lossy(kind):
    "A pool that hands over zeros instead of one kind of state"
    begin = StatePool.begin
    def forgetful(self, slots, meta):
        for pool in self.pools.values():
            for (k, _), x in pool.items():
                if k == kind: x.zero_()
        begin(self, slots, meta)
    return forgetful

@pytest.mark.parametrize('arch,kind', [('qwen3_next', 'conv'), ('qwen3_next', 'recurrent'), ('bamba', 'recurrent'),
                                       ('lfm2', 'conv'), ('minimax', 'linear'), ('jamba', 'recurrent')])
def test_a_lost_state_shows(monkeypatch, arch, kind):
    monkeypatch.setattr(StatePool, 'begin', lossy(kind))
    assert wrong(arch) == 3

def test_mixed_up_slots_show(monkeypatch):
    attach = StatePool._attach
    def mixed(self, m, module):
        attach(self, m, module)
        run = module.forward
        def turned(*args, **kw):
            self.pieces = [p._replace(slots=p.slots[1:] + p.slots[:1]) for p in self.pieces]
            return run(*args, **kw)
        module.forward = turned
    monkeypatch.setattr(StatePool, '_attach', mixed)
    assert wrong('qwen3_next', max_num_seqs=5) >= 2

def test_a_forgotten_swap_shows(monkeypatch):
    def stamps_only(self, out, back):
        for s, h in out: self.host_stamps[h] = self.stamps[s]
        for h, s in back: self.stamps[s] = self.host_stamps[h]
    monkeypatch.setattr(StatePool, 'move', stamps_only)
    assert wrong('qwen3_next', preemption='swap', force_preempt=2, num_blocks=150) >= 2

def test_a_scan_that_forgets_is_refused(monkeypatch):
    "Mamba 1 without what came before: nobody serves it, rather than serve it wrong"
    monkeypatch.setattr('cbatch.mixers.continuing', lambda scan, state: scan)
    with pytest.raises(CannotServe, match='something else in pieces'): tiny_lm('mamba', seed=1).layers

def test_a_stale_state_is_not_read():
    llm = engine('lfm2', block_size=4, num_blocks=20)
    llm.add(prompts()[5], greedy(4))
    llm.step()
    r, = llm.scheduler.running
    llm.runner.states.stamps[r.slot] -= 1
    with pytest.raises(AssertionError, match='slot 1 has read 12 tokens'): llm.check()

# ---- what fails in the middle is tried again, from the same states

class Once:
    "Raises at its nth call, once"
    def __init__(self, f, at, error): self.f, self.left, self.error = f, at, error
    def __call__(self, *args, **kw):
        self.left -= 1
        if not self.left: raise self.error
        return self.f(*args, **kw)

def out_of_memory(): return torch.OutOfMemoryError('planted')

def crowd(arch, plant, **kw):
    "Answers to four prompts, with something planted in the engine; what interrupts is caught, and the engine goes on"
    llm = engine(arch, **dict(block_size=3, num_blocks=60, max_num_seqs=4, max_num_batched_tokens=9) | kw)
    some, caught = [3, 5, 6, 7], 0
    for p in some: llm.add(prompts()[p], greedy(8), request_id=str(p))
    plant(llm)
    done = {}
    logging.disable()
    try:
        while llm.has_unfinished:
            try: done |= {o.request_id: o for o in llm.step() if o.finished}
            except KeyboardInterrupt: caught += 1
    finally: logging.disable(logging.NOTSET)
    for p in some:
        assert not done[str(p)].error, done[str(p)].error
        assert len(done[str(p)].outputs[0].token_ids) == 8 and compare(arch, p, done[str(p)].outputs[0].token_ids)
    return llm, caught

def middle(llm, at, error):
    "Plant an error in the last mixer, when the others have been through"
    m = llm.runner.executor.call.get_submodule(llm.runner.states.mixers[-1].name)
    m.forward = Once(m.forward, at, error)

@pytest.mark.parametrize('at', [2, 5, 11])
@pytest.mark.parametrize('arch', ['qwen3_next', 'jamba'])
def test_out_of_memory_in_a_forward_pass(arch, at):
    "Half of the step is tried; the states are as they were"
    crowd(arch, lambda llm: middle(llm, at, out_of_memory()))

@pytest.mark.parametrize('at', [2, 5, 11])
def test_an_interrupt_in_a_forward_pass(at):
    llm, caught = crowd('qwen3_next', lambda llm: middle(llm, at, KeyboardInterrupt()))
    assert caught == 1 and llm.metrics['num_preemptions'] == 0

@pytest.mark.parametrize('error', [out_of_memory(), KeyboardInterrupt(), ValueError('planted')])
@pytest.mark.parametrize('at', [3, 8])
def test_sampling_that_fails(error, at):
    "Memory, an interrupt, and an exception, after which each row is sampled alone"
    def plant(llm): llm.runner.sampler = Once(llm.runner.sampler, at, error)
    crowd('qwen3_next', plant)

def test_an_interrupt_between_the_states_and_the_tokens():
    "States have been written, tokens not: those requests start anew"
    def plant(llm):
        done = Once(lambda: None, 6, KeyboardInterrupt())
        commit = llm.runner.states.commit
        llm.runner.states.commit = lambda: (commit(), done())
    llm, caught = crowd('qwen3_next', plant)
    assert caught == 1

def test_an_interrupt_while_states_move():
    def plant(llm): llm.runner.states.move = Once(llm.runner.states.move, 6, KeyboardInterrupt())
    llm, caught = crowd('qwen3_next', plant, preemption='swap', force_preempt=2)
    assert caught == 1

def test_a_retry_that_forgets_would_show(monkeypatch):
    "States that are written at once, and a step that is tried again: another text"
    monkeypatch.setattr('cbatch.states.StatePool.begin', eager(StatePool.begin))
    with pytest.raises(AssertionError): crowd('qwen3_next', lambda llm: middle(llm, 5, out_of_memory()))

def eager(begin):
    class Now(list):
        def __init__(self, pool): self.pool = pool
        def append(self, x):
            name, slots, held = x
            for k, v in held.items(): self.pool.pools[name][k][slots] = v
    def at_once(self, slots, meta):
        begin(self, slots, meta)
        self.proposed = Now(self)
    return at_once

# ---- slots

def test_paused_requests_keep_their_slots():
    "Who rests holds a slot; when a newcomer needs one, the last of them gives it back"
    llm = engine('lfm2', block_size=4, num_blocks=60, max_num_seqs=2, max_num_batched_tokens=32)
    for i, p in enumerate((4, 5)): llm.add(prompts()[p], greedy(6), request_id=str(i))
    llm.step()
    s = llm.scheduler
    first, done = s.running[0], {}
    llm.add(prompts()[3], greedy(6), request_id='2', priority=-1)
    turns = s.policy.turns
    def pausing(sched, plan):
        if first in sched.running and first.num_computed_tokens < 10: sched.pause(first, plan)
        return turns(sched, plan)
    s.policy.turns = pausing
    while llm.has_unfinished: done |= {o.request_id: o for o in llm.step() if o.finished}
    for i, p in enumerate((4, 5, 3)): assert compare('lfm2', p, done[str(i)].outputs[0].token_ids)

def test_padding_is_nobody():
    "Static batches pad; the rows of nobody touch no state"
    llm = engine('qwen3_next', policy='static', block_size=4, num_blocks=60, max_num_seqs=3, max_num_batched_tokens=64)
    done = {}
    for p in (1, 4, 6): llm.add(prompts()[p], greedy(4 + p), request_id=str(p))
    while llm.has_unfinished: done |= {o.request_id: o for o in llm.step() if o.finished}
    for p in (1, 4, 6): assert compare('qwen3_next', p, done[str(p)].outputs[0].token_ids)
    assert all(x[0].isnan().all() for pool in llm.runner.states.pools.values() for x in pool.values())

# ---- who is refused, and what is told

def test_refused():
    for arch in ('nemotron_h', 'zamba2'):
        with pytest.raises(CannotServe, match='other time steps'): refuse(AutoConfig.for_model(arch))
    with pytest.raises(ParamError, match='keeps states'): LLM(model('lfm2'), guesses='lookup')

def test_told():
    llm = LLM(model('qwen3_next'), num_blocks=9)
    assert 'states of 32 requests, 0.02 MB each' in repr(llm) and 'states' in llm.runner.path
    assert 'state per request' in model('qwen3_next')._repr_html_() and 'state per' not in tiny_lm()._repr_html_()
    assert not mixers(tiny_lm('llama').hf_model) and LLM(tiny_lm()).runner.states is None

def test_states_in_the_host_stay_below_swap_mb():
    "Half of it is theirs; whoever finds no slot there is computed again"
    lm = model('mamba')
    how = dict(num_blocks=60, block_size=4, force_preempt=2, check=True)
    with LLM(lm, preemption='swap', swap_mb=.2, max_num_seqs=200, **how) as llm:
        held = sum(x.nbytes for pool in llm.runner.states.host.values() for x in pool.values())
        slots = llm.scheduler.preemptor.slots.num_free_blocks
        assert 1 <= slots < 200 and held == (slots + 1) * lm.state_bytes and slots * lm.state_bytes <= 1e5
        outs = llm.generate([prompts()[3]] * 12, greedy(LONGEST), use_tqdm=False)
    assert {tuple(o.outputs[0].token_ids) for o in outs} == {tuple(oracle('mamba', 3))}

def test_another_forward_pass_is_not_passed_over():
    "Put into a mixer before or after the model was asked"
    asked, fresh = tiny_lm('lfm2'), tiny_lm('lfm2')
    LLM(asked, num_blocks=9).close()
    for lm in asked, fresh:
        conv = next(m for m in lm.hf_model.modules() if type(m).__name__.endswith('ShortConv'))
        conv.forward = lambda *args, usual=conv.forward, **kwargs: usual(*args, **kwargs) * .5
        with pytest.raises(ValueError, match='another forward pass'): LLM(lm, num_blocks=9)
