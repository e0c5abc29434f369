"""Guesses change nothing: random lives of engines that guess, beside the same requests answered without.
Every token, every log probability, every end, whatever was guessed, and whatever happens meanwhile."""
import functools, itertools, math, random
from collections import Counter
import numpy as np, pytest, torch
from cbatch import LLM, SamplingParams
from cbatch.core import Request
from cbatch.guesses import Guess, Guesser
from cbatch.params import cdiv
from cbatch.ragged_batch import Wanted, wanted
from cbatch.runner import Sampler
from cbatch.sampler import FAST
from cbatch.sampling import SamplerState, distribution
from cbatch.token_loop import generate_ref
from ask import sp
from guess_faults import FAULTS
from guess_lives import ARCHS, EVERY, Life, asked, model
from guess_twins import twins
from guessers import KINDS, Oracle, Wrong
from harness import follows, in_cpp, quiet
from toy import Crowd, alone
from world import run_world

@pytest.fixture(scope='module', autouse=True)
def cpp():
    with in_cpp(FAST) as there:
        if not there: pytest.skip('no C++ compiler')
        yield

QUICK = range(0, 240, 40)
WHOLE = [*QUICK, *(pytest.param(i, marks=pytest.mark.slow) for i in range(240, 2400, 40))]

@functools.cache
def lives(start):
    "Forty random lives; what happened in them"
    seen = Counter()
    for seed in range(start, start + 40):
        try: seen += Life(seed).run()
        except AssertionError as e: raise AssertionError(f'seed {seed}: {e}') from e
    return seen

@pytest.mark.parametrize('start', WHOLE)
def test_lives(start): lives(start)

def test_the_lives_were_hard():
    "What those of the quick share met"
    seen = sum(map(lives, QUICK), Counter())
    print(dict(seen))
    assert all(seen[k] >= 10 for k in (*EVERY, *ARCHS, 'cpu', 'torch', 'Shy', 'static', 'dynamic', 'fair'))
    assert all(seen[f'by {r}'] > 60 for r in ('stop', 'length', 'error', 'abort'))
    assert seen['accepted'] > 2000 and seen['guessed'] > 2 * seen['accepted'] and seen['returned'] > 200
    assert min(seen[k] for k in ('preempted', 'cached', 'swapped', 'forked')) > 100
    assert min(seen['Alarm'], seen['KeyboardInterrupt']) > 20
    assert seen['ties'] <= .01 * (seen['by stop'] + seen['by length'])

@pytest.mark.parametrize('arch', ARCHS)
def test_the_answers_without_guesses_are_the_oracles(arch):
    "What the lives are compared with, against transformers' own forward pass"
    same = 0
    for a in asked(arch)[:20]:
        if a.params.n > 1: continue
        ref, c = generate_ref(model(arch), a.prompt, a.params), a.ref.outputs[0]
        same += (ref.token_ids, ref.text, ref.finish_reason) == (c.token_ids, c.text, c.finish_reason)
    assert same >= len([a for a in asked(arch)[:20] if a.params.n == 1]) - 1      # a tie may part one

# --- the toy model: small blocks, many lives

@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('seeds', [range(60), *(pytest.param(range(i, i + 100), marks=pytest.mark.slow)
                                                for i in range(60, 560, 100))], ids=lambda r: r.start)
def test_worlds(kind, seeds):
    "Preemption both ways, prefix cache, forks, deadlines, failing steps, plain blocks"
    guessed = 0
    for seed in seeds:
        guesser = lambda: KINDS[kind](alone, seed=seed)
        try:
            w = run_world(seed, guesser=guesser(), guess_when=['always', 'pays'][seed % 2], most=seed % 8 + 1)
            Crowd(seed, guesser=guesser()).run()
        except AssertionError as e: raise AssertionError(f'seed {seed}: {e}') from e
        guessed += sum(r.num_guessed for r in w.all)
    assert guessed > len(seeds)

@pytest.mark.parametrize('start', [*range(0, 200, 50), *(pytest.param(i, marks=pytest.mark.slow)
                                                         for i in range(200, 1200, 50))])
def test_wrong_guesses_change_no_step(start):
    """Who joins, who is preempted, what is found in the cache, which blocks are free and in which order those with a
    name will be taken: step by step as without guesses"""
    met = [0, 0, 0]
    for seed in range(start, start + 50):
        try: met = [a + b for a, b in zip(met, twins(seed))]
        except AssertionError as e: raise AssertionError(f'seed {seed}: {e}') from e
    assert min(met) > 20, met

@pytest.mark.parametrize('mode', ['recompute', 'swap'])
@pytest.mark.parametrize('backend,size,num_blocks', [('torch', 4, 14), ('cpu', 16, 5)])
def test_wrong_guesses_change_no_step_of_an_engine(tiny, mode, backend, size, num_blocks):
    "A pool that is short and a cache that is warm"
    prompts = [[*range(20 * (i % 2), 20), 7 * i] for i in range(6)]
    refs = {tuple(p): generate_ref(tiny, p, sp(20)).token_ids for p in prompts}
    def run(**how):
        with LLM(tiny, backend=backend, block_size=size, num_blocks=num_blocks, max_num_seqs=4, check=True,
                 max_num_batched_tokens=40, preemption=mode, watermark=0., **how) as llm:
            for _ in range(2): outs = llm.generate(prompts, sp(20), use_tqdm=False)
            assert [o.outputs[0].token_ids for o in outs] == [refs[tuple(p)] for p in prompts]
            return llm.metrics, [(r.scheduled, r.admitted, r.preempted, r.found, r.finished, r.num_free_blocks)
                                 for r in llm.trace]
    (was, ours), (m, theirs) = run(), run(guesses=Wrong(lambda r: refs[tuple(r.prompt_ids)], 258), guess_when='always')
    assert ours == theirs and m['num_guessed_tokens'] > 100 > 0 == m['num_accepted_tokens']
    assert all(m[k] == was[k] for k in ('num_preemptions', 'num_prefix_hit', 'num_cached_tokens', 'num_steps'))
    assert m['num_prefix_hit'] and m['num_preemptions']

@pytest.mark.parametrize('k,size', [(1, 4), (2, 5), (3, 16), (5, 4), (8, 16), (8, 5)])
def test_right_guesses_take_the_fewest_steps(tiny, k, size):
    "ceil((n - 1) / (k + 1)) after the first token"
    ref = generate_ref(tiny, [5, 6, 7], sp(25)).token_ids
    with LLM(tiny, block_size=size, num_blocks=cdiv(28, size), max_guesses=k, guess_when='always', check=True,
             guesses=Oracle(lambda r: ref, 258), watermark=0., prefix_caching=False) as llm:
        for n in (1, 2, 3, 7, 12, 25):
            before = dict(llm.metrics)
            out, = llm.generate([[5, 6, 7]], sp(n), use_tqdm=False)
            assert out.outputs[0].token_ids == ref[:n]
            steps, guessed, held = (llm.metrics[x] - before[x] for x in ('num_steps', 'num_guessed_tokens',
                                                                         'num_accepted_tokens'))
            assert steps == 1 + cdiv(n - 1, k + 1) and guessed == held == n - steps                     # G7

# --- chance

def requests(n, **more):
    p = SamplingParams(temperature=1., logprobs=0)
    return [Request(f'{i}', [1, 2, 3], p, 99, seed=i, output_ids=[5, 6], **more) for i in range(n)]

def unlikely(counts, probs):
    "Would fewer than one in a thousand draws be as far from what they should be? (Wilson and Hilferty)"
    want = probs.double().numpy() * counts.sum()
    rare = want < 8
    want, counts = (np.append(x[~rare], x[rare].sum()) for x in (want, counts))
    x, df = ((counts - want) ** 2 / np.maximum(want, 1e-9)).sum(), len(want) - 1
    return x > df * (1 - 2 / (9 * df) + 3.09 * math.sqrt(2 / (9 * df))) ** 3

@functools.cache
def draws(num, part=5000):
    "Tokens drawn where a guess stands and behind it, and the distributions; equal, draw by draw, to those without"
    with torch.no_grad(): x = model('llama').hf_model(input_ids=torch.tensor([[1, 2, 3, 5, 6, 9]])).logits[0, -2:]
    x[0, 9] = x[0].logsumexp(0)                                    # the guess holds in half of the draws
    state = SamplerState(SamplingParams(temperature=1.))
    probs, got = distribution(x, [state] * 2), [[], []]
    for at in range(0, num, part):
        rs = requests(part)
        for r in rs: r.seed += at
        want = [w for r in rs for w in (Wanted(r, 4), Wanted(r, 5, (9,)))]
        said = Sampler()(want, x.repeat(part, 1)).sampled
        assert all(len(t) == 1 + (t[0] == 9) for t in said.values())
        got[0] += [t[0] for t in said.values()]
        got[1] += [t[1] for t in said.values() if len(t) > 1]
        if at: continue
        first = Sampler()([Wanted(r, 4) for r in rs], x[:1].repeat(part, 1)).sampled
        for r in rs: r.output_ids = [5, 6, 9]
        second = Sampler()([Wanted(r, 5) for r in rs], x[1:].repeat(part, 1)).sampled
        assert all(t == (first[i] + second[i] if first[i] == [9] else first[i]) for i, t in said.items())     # O4
    return [np.bincount(t, minlength=258) for t in got], probs

@pytest.mark.parametrize('num', [20_000, pytest.param(400_000, marks=pytest.mark.slow)])
def test_draws(num):
    "At the guess, and behind one that held: as often as they should, and as without guesses"
    counts, probs = draws(num)
    assert counts[0].sum() == num and counts[1].sum() > .48 * num
    assert not any(map(unlikely, counts, probs))
    assert unlikely(counts[0], probs[1]) and unlikely(counts[1], probs[0])

# --- what goes wrong in a row of a guess, or in a guesser

class Says(Guesser):
    def __init__(self, f): self.f = f
    def guess(self, r, most): return self.f(r, most)

def right(ref, wrong=()):
    "Guesses from `ref`; where `wrong` says so, another token"
    def say(r, most):
        at = len(r.output_ids)
        return Guess([(t + 1) % 258 if at + j in wrong else t for j, t in enumerate(ref[at:at + most])], 3)
    return Says(say)

@pytest.mark.parametrize('at', range(1, 7))
def test_a_row_that_is_not_a_number(engine, tiny, at):
    "It ends its request with the tokens before it, no sooner than without guesses"
    ref = generate_ref(tiny, [5, 6, 7], sp(12)).token_ids
    llm = engine(guesses=right(ref), guess_when='always', max_guesses=4)
    finish = llm.runner.finish
    def poisoned(plan, pending):
        for i, w in enumerate(wanted(plan)):
            if w.position == 2 + at: pending.result[i] = float('nan')
        return finish(plan, pending)
    llm.runner.finish = poisoned
    llm.add([5, 6, 7], sp(12))
    while llm.has_unfinished: out, = llm.step()
    assert (out.outputs[0].token_ids, out.failure.code) == (ref[:at], 'nan_logits')                     # G8
    quiet(llm)

def test_a_mask_that_knows_no_way_behind_a_wrong_guess(engine, tiny):
    "A grammar may raise there: nobody hears of it, for without guesses nobody would have asked"
    ref = generate_ref(tiny, [5, 6, 7], sp(12)).token_ids
    llm = engine(guesses=right(ref, wrong=(3, 6)), guess_when='always')
    def mask(w):
        said = [*w.request.output_ids, *w.draft]
        if said != ref[:len(said)]: raise KeyError('no such state')
    llm.runner.sampler = Sampler(tiny.eos_ids, mask=mask)
    out, = llm.generate([[5, 6, 7]], sp(12), use_tqdm=False)
    assert out.outputs[0].token_ids == ref and not out.error and llm.metrics['num_guessed_tokens']      # G8
    quiet(llm)

@pytest.mark.parametrize('bad', [lambda r, n: None, lambda r, n: Guess([999]), lambda r, n: Guess([-1]),
                                 lambda r, n: 1 / 0, lambda r, n: Guess('no'), lambda r, n: Guess([1.5, None])])
def test_a_guesser_that_talks_nonsense(engine, tiny, bad):
    "The step is void and says why; with a guesser that has come to its senses the answer is what it was"
    refs = [generate_ref(tiny, p, sp(12)).token_ids for p in ([5, 6], [7])]
    asks, calls = itertools.count(), right(refs[0]).f
    llm = engine(guesses=Says(lambda r, n: (bad if next(asks) in (2, 3, 6) else calls)(r, n)), guess_when='always')
    names = [llm.add([5, 6], sp(12)), llm.add([7], sp(12))]
    last, raised = {}, 0
    while llm.has_unfinished:
        try: last |= {o.request_id: o for o in llm.step()}
        except (ValueError, ZeroDivisionError): raised += 1
        llm.check()
        follows(llm)
    assert raised and [last[i].outputs[0].token_ids for i in names] == refs
    quiet(llm)

@pytest.mark.parametrize('error', [RuntimeError('odd'), KeyboardInterrupt(), torch.OutOfMemoryError('no room')],
                         ids=['odd', 'Ctrl-C', 'no room'])
def test_a_step_fails_that_swapped_in_and_guessed(tiny, error):
    "Who had just joined again, with blocks for guesses, stands in the queue without any, and the trace knows"
    prompts = [[i + 1] * 6 for i in range(3)]
    refs = {f'q{i}': generate_ref(tiny, p, sp(14)).token_ids for i, p in enumerate(prompts)}
    with LLM(tiny, block_size=4, num_blocks=9, max_num_seqs=3, preemption='swap', watermark=0., prefix_caching=False,
             check=True, guesses=Oracle(lambda r: refs[r.request_id], 258), guess_when='always') as llm:
        for i, p in enumerate(prompts): llm.add(p, sp(14), f'q{i}')
        real, failed, ended = llm.execute, [], {}
        def execute(plan):
            if plan.swap_in and any(r in plan.lent for r in plan.admitted) and len(failed) < 2:
                failed.append(plan)
                raise error
            return real(plan)
        llm.execute = execute
        while llm.has_unfinished:
            try: ended |= {o.request_id: o for o in llm.step() if o.finished}
            except KeyboardInterrupt: pass
            llm.check()
            follows(llm)
        assert failed
        for i, o in ended.items(): assert o.error or o.outputs[0].token_ids == refs[i]
        quiet(llm)

@pytest.mark.parametrize('batch', [1, 3])
def test_half_of_a_step_guesses_nothing(engine, tiny, batch):
    "Memory of the device runs short: what was lent for guesses is given back, and the answer is the same"
    prompts = [[i + 1, 2, 3] for i in range(batch)]
    refs = {f'q{i}': generate_ref(tiny, p, sp(20)).token_ids for i, p in enumerate(prompts)}
    llm = engine(guesses=Oracle(lambda r: refs[r.request_id], 258), guess_when='always', max_guesses=6)
    forward, sizes = llm.runner.executor.forward, []
    def tight(b):
        sizes.append(b.input_ids.shape[1])
        if len(sizes) % 3 == 0: raise torch.OutOfMemoryError('no room')
        return forward(b)
    llm.runner.executor.forward = tight
    for i, p in enumerate(prompts): llm.add(p, sp(20), f'q{i}')
    ended, lent = {}, 0
    while llm.has_unfinished:
        ended |= {o.request_id: o for o in llm.step() if o.finished}
        follows(llm)
        lent += any(n for _, _, n in llm.trace[-1].guessed.values())
        for r in llm.scheduler.running: assert len(r.block_table) <= cdiv(r.num_tokens, 4)
    assert lent and {i: o.outputs[0].token_ids for i, o in ended.items()} == refs
    quiet(llm)

# --- the checks at work

def found_in(run, seeds):
    for seed in seeds:
        try: run(seed)
        except (TypeError, AttributeError, NameError): raise            # the fault does not fit any more: mend it
        except Exception: return True

def oracle(seed):
    for k in (1, 3): test_right_guesses_take_the_fewest_steps(model('llama'), k, 4)

def toy_life(seed): return run_world(seed, guesser=KINDS['mixed'](alone, seed=seed), guess_when='always')
def draw(seed): draws.__wrapped__(5000)

FIND = dict(lives=(lambda seed: Life(seed, backend='cpu').run(), range(240)), worlds=(toy_life, range(120)),
            twins=(twins, range(300)), oracle=(oracle, range(1)), draws=(draw, range(1)))

@pytest.mark.parametrize('name,by', [(name, by) for name, (_, all) in FAULTS.items() for by in all])
def test_faults_are_found(name, by, monkeypatch):
    FAULTS[name][0](monkeypatch.setattr)
    assert found_in(*FIND[by])

def test_no_fault_no_finding():
    for run, seeds in FIND.values(): assert not found_in(run, seeds[:3])
