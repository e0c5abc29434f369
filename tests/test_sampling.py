"""Every sampling option.
Against transformers' processors, against its definition, against the request alone, whatever its mates want."""
import functools, math, os, platform, random
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from unittest.mock import patch
import numpy as np, pytest, torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.generation import logits_process as hf
from cbatch import LLM, SamplingParams, drawing, sampler
from cbatch.params import check_ids, MAX_SCORES
from cbatch.model import tiny_lm
from cbatch.native import KERNELS, Native
from cbatch.drawing import Blocks, score
from cbatch.sampler import FAST, SAMPLER_CPP, sample
from cbatch.sampling import SamplerState, bad_word_ids, distribution, edit_logits, uniform
from cbatch.token_loop import TIE, generate_ref
from ask import sp

sp = functools.partial(sp, max_tokens=8)

def noise(rows, vocab, seed=0, scale=3.):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
def chi2_limit(df): return df + 4.5 * math.sqrt(2 * df) + 10      # passed once in some 100,000 tests

@functools.cache
def native():
    "The library in C++, built if it was not, or the reason why not"
    with patch.dict(os.environ, CBATCH_NATIVE='1'):
        return FAST._load() if FAST.build() else 'no C++ compiler that works'

@pytest.fixture(params=['torch', 'native', 'device'])
def way(request, monkeypatch):
    "The ways to sample; that of a GPU runs on a CPU as well"
    if request.param == 'native' and isinstance(native(), str): pytest.skip(native())
    monkeypatch.setattr(FAST, 'lib', native() if request.param == 'native' else None)
    if request.param == 'device': monkeypatch.setattr(sampler, 'sample_torch', drawing.sample_device)
    return request.param

each_way = pytest.mark.usefixtures('way')

# --- transformers' processors

PROMPT, SAID, ENDS, BAD = [5, 6, 7, 5, 150], [9, 7, 9, 9, 2, 1, 2], {3, 250}, [[11], [1, 2, 40], [2, 41], [9, 2, 42],
    [5, 2, 43]]

def processed(x, p, prompt=PROMPT, said=SAID):
    """What transformers makes of logits: its processors in vLLM's order.
    Presence and frequency, which it lacks, in one line."""
    both, said_ids = torch.tensor([prompt + said]).expand(len(x), -1), torch.tensor([said]).expand(len(x), -1)
    if p.logit_bias: x = hf.SequenceBiasLogitsProcessor({(t,): float(b) for t, b in p.logit_bias.items()})(both, x)
    if p.repetition_penalty != 1: x = hf.RepetitionPenaltyLogitsProcessor(float(p.repetition_penalty))(both, x)
    counts = torch.bincount(torch.tensor(said, dtype=torch.long), minlength=x.shape[1])
    x = x - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)
    x = hf.MinNewTokensLengthLogitsProcessor(len(prompt), p.min_tokens, sorted(ENDS))(both, x) if p.min_tokens else x
    # transformers looks at the prompt too, vLLM at the answer alone
    if p.bad_words: x = hf.NoBadWordsLogitsProcessor(BAD)(said_ids, x)
    if p.allowed_token_ids: x = hf.PrefixConstrainedLogitsProcessor(lambda *_: list(p.allowed_token_ids), 1)(both, x)
    if p.temperature != 1: x = hf.TemperatureLogitsWarper(float(p.temperature))(both, x)
    # transformers puts it after top_p, vLLM before top_k
    if p.min_p: x = hf.MinPLogitsWarper(float(p.min_p))(both, x)
    if p.top_k > 0: x = hf.TopKLogitsWarper(p.top_k)(both, x)
    if p.top_p < 1: x = hf.TopPLogitsWarper(p.top_p)(both, x)
    return x.softmax(-1)

def states(params, n=1, prompt=PROMPT, said=SAID):
    return [SamplerState(params, prompt, said, i, 0, ENDS, BAD if params.bad_words else ()) for i in range(n)]

ONE = [dict(temperature=t) for t in (.01, .3, 1, 7.5, 100)] + [dict(top_k=k)
                                                               for k in (1, 2, 50, 299, 300, 10_000,
                                                                   -1)] + [dict(top_p=p)
                                                                       for p in (1e-9, .1, .5, .9, .999, 1)] + \
    [dict(min_p=p) for p in (.001, .2, .9, 1)] + [dict(repetition_penalty=r)
                                                  for r in (.01, .5, 1.3, 100)] + [dict(presence_penalty=-2),
                                                      dict(presence_penalty=1.5), dict(frequency_penalty=-.7),
    dict(frequency_penalty=2), dict(logit_bias={0: 100, 5: -100, 9: 3.5, 299: .25}), dict(min_tokens=7),
        dict(min_tokens=8), dict(bad_words=['x']), dict(allowed_token_ids=[9]),
    dict(allowed_token_ids=[2, 5, 9, 40, 200])]

def same(p, x):
    ours, theirs = distribution(x, states(p, len(x))), processed(x, p)
    assert torch.equal(ours > 1e-30, theirs > 1e-30)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-4)

@pytest.mark.parametrize('kw', ONE, ids=str)
def test_one_option_is_that_of_transformers(kw): same(SamplingParams(**kw), noise(4, 300))

def draw_options(rng, vocab):
    "Some of the options, at random"
    some = lambda n: rng.sample(range(vocab), min(n, vocab))
    kw = dict(temperature=rng.choice([0, .3, .7, 1, 1, 1.8]), top_k=rng.choice([0, 0, 1, 3, 20, 500]),
              top_p=rng.choice([1, 1, .2, .7, .95]), min_p=rng.choice([0, 0, .02, .4]))
    for k, v in dict(repetition_penalty=rng.choice([.7, 1.2, 1.8]), presence_penalty=rng.uniform(-2, 2),
                     frequency_penalty=rng.uniform(-2, 2), min_tokens=rng.randint(1, 8),
                     logit_bias={t: rng.uniform(-9, 9) for t in some(6)}, bad_words=['x'],
                     allowed_token_ids=some(rng.choice([1, 4, 80]))).items():
        if rng.random() < .3: kw[k] = v
    return kw

@pytest.mark.parametrize('seed', range(40))
def test_options_together_are_those_of_transformers(seed):
    kw = draw_options(random.Random(seed), 300)
    if 'allowed_token_ids' in kw: kw['allowed_token_ids'] += [200]         # something is left
    kw['temperature'] = kw['temperature'] or 1
    same(SamplingParams(**kw), noise(3, 300, seed))

@each_way
def test_equal_logits_stay_or_go_together():
    "transformers' top_k keeps all that equal the k-th; its top_p takes some of them, by chance, and ours all"
    x = torch.tensor([[1., 3, 3, 2, 3, 0]])
    for kw in dict(top_k=1), dict(top_k=2), dict(top_p=.1), dict(top_p=.4):
        assert (distribution(x, [SamplerState(SamplingParams(**kw))]) > 0).tolist() == [[False, True, True, False,
            True, False]]
        assert {sample(x.clone(), [SamplerState(SamplingParams(**kw), seed=i)]).ids[0] for i in range(60)} == {1, 2, 4}
    assert sample(x.clone(), [SamplerState(SamplingParams(temperature=0))]).ids == [1]      # greedy takes the first

# --- the sampler draws from the definition

def expected_draw(x, state):
    """The definition's token, and those nearby.
    It adds up probabilities in order of the ids until they pass the random number."""
    probs, u = distribution(x, [state])[0].double(), uniform([state.seed], [len(state.output_ids)],
                                                             state.sample_index)[0]
    cdf = probs.cumsum(0) / probs.sum()
    return {int(torch.searchsorted(cdf, torch.tensor(min(max(u + d, 0), 1 - 1e-9), dtype=torch.float64), right=True))
            for d in (-1e-5, 0, 1e-5)}

@each_way
@pytest.mark.parametrize('vocab', [1, 7, 127, 128, 129, 1000])
def test_each_draw_is_where_the_random_number_says(vocab):
    rng, x = random.Random(vocab), noise(64, vocab, vocab)
    all_states = [SamplerState(SamplingParams(**{k: v for k, v in draw_options(rng, vocab).items()
                                                 if k not in ('top_p', 'bad_words', 'min_tokens')} | dict(seed=i)),
                               said := rng.choices(range(vocab), k=3),
                  said, i, i % 3) for i in range(64)]
    got = sample(x.clone(), all_states)
    assert not got.errors
    for i, s in enumerate(all_states):
        if s.params.greedy: assert got.ids[i] == int(distribution(x[i:i+1], [s]).argmax())
        else: assert got.ids[i] in expected_draw(x[i:i+1], s)

@each_way
@pytest.mark.parametrize('kw', [dict(), dict(temperature=2.5), dict(top_p=.05), dict(top_p=.5), dict(top_p=.97),
                                dict(top_k=30, top_p=.6), dict(min_p=.03, top_p=.8), dict(temperature=.6, top_k=7),
                                dict(repetition_penalty=1.4, frequency_penalty=.3, top_p=.9)], ids=str)
def test_draws_have_the_defined_distribution(kw):
    n, x, p = 12_000, noise(1, 400, 5, 2.), SamplingParams(**kw)
    exact = distribution(x, states(p))[0].double()
    counts = np.zeros(400)
    for i in range(0, n, 400):
        for t in sample(x.repeat(400, 1), [SamplerState(p, PROMPT, SAID, i + j) for j in range(400)]).ids:
            counts[t] += 1
    assert not counts[exact.numpy() == 0].any()
    want = exact.numpy() * n
    rare = want < 5                                                     # pooled, as the test demands
    obs, want = np.append(counts[~rare], counts[rare].sum()), np.append(want[~rare], want[rare].sum())
    obs, want = obs[want > 0], want[want > 0]
    assert ((obs - want) ** 2 / want).sum() < chi2_limit(len(obs) - 1)

@each_way
def test_extremes_are_drawn_rightly():
    for x in (torch.full((1, 300), -1e4), torch.full((1, 300), 3e4), torch.linspace(-1e30, 1e30, 300)[None],
              torch.tensor([[0.] + [-math.inf] * 299])):
        for kw in dict(), dict(temperature=1e-5), dict(temperature=100), dict(min_p=1), dict(top_p=1e-9), dict(top_k=3):
            s = [SamplerState(SamplingParams(**kw), seed=i) for i in range(20)]
            got, exact = sample(x.repeat(20, 1), s), distribution(x, s[:1])[0]
            assert not got.errors and all(exact[t] > 0 for t in got.ids)

@each_way
def seed_for(u):
    "The seed whose first random number is `u`: each step of `uniform` can be undone"
    bits, golden, h = (1 << 64) - 1, 0x9E3779B97F4A7C15, int(u * 2 ** 53) << 11
    for _ in range(3):
        for shift, factor in (31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1):
            h = (h ^ h >> shift ^ h >> 2 * shift) * pow(factor, -1, 1 << 64) & bits
        h = h - golden & bits
    return h

@pytest.mark.parametrize('u', [0., 2. ** -53, 1 - 2. ** -53])
def test_the_first_and_the_last_random_number(u):
    "Even they bring no token that can't come: blocks at the ends may hold nothing, or next to nothing"
    x = noise(6, 700, 1, 4.)
    x[0, :200] = -math.inf; x[1, 600:] = -math.inf; x[2, :300] = -60; x[3, 400:] = -60; x[4] = -60; x[4, 350] = 0
    x[5, 1:] = -math.inf
    assert uniform([seed_for(u)], [0])[0] == u
    for kw in (dict(), dict(temperature=.05), dict(temperature=1e-5), dict(top_k=5), dict(min_p=.1), dict(top_p=.01),
               dict(top_k=9, top_p=.5, temperature=.01)):
        all_states = [SamplerState(SamplingParams(**kw), seed=seed_for(u)) for _ in x]
        assert all(p[t] > 0 for p, t in zip(distribution(x, all_states), sample(x.clone(), all_states).ids))

# --- random numbers

def hist_ok(u, bins=64):
    counts = np.histogram(u, bins, (0, 1))[0]
    return ((counts - len(u) / bins) ** 2 / (len(u) / bins)).sum() < chi2_limit(bins - 1)

AXES = dict(seeds=lambda n: uniform(range(n), [3] * n), positions=lambda n: uniform([12] * n, range(n)),
            samples=lambda n: uniform([12] * n, [3] * n, list(range(n))),
            attempts=lambda n: np.array([uniform([12], [3], 0, i)[0] for i in range(n)]),
            far_seeds=lambda n: uniform([i << 40 for i in range(n)], [0] * n),
            negative_seeds=lambda n: uniform([-i for i in range(n)], [0] * n),
            diagonal=lambda n: uniform(range(n), range(n), list(range(n))))

@pytest.mark.parametrize('axis', AXES)
def test_random_numbers_are_uniform_and_uncorrelated_along(axis):
    n = 20_000
    u = AXES[axis](n)
    assert u.dtype == np.float64 and u.min() >= 0 and u.max() < 1 and len(set(u.tolist())) == n
    assert hist_ok(u)
    for lag in (1, 2, 3, 7, 64): assert abs(np.corrcoef(u[:-lag], u[lag:])[0, 1]) < 5 / math.sqrt(n)
    pairs = np.histogram2d(u[:-1:2], u[1::2], 16, [[0, 1], [0, 1]])[0].ravel()
    assert ((pairs - pairs.mean()) ** 2 / pairs.mean()).sum() < chi2_limit(255)
    assert hist_ok((u * 2 ** 20) % 1)                               # low bits too

def test_random_numbers_differ_in_every_part_of_their_key():
    keys = list(permutations([0, 1, 2, 3], 3))
    assert len({uniform([s], [p], i, a)[0] for s, p, i in keys for a in range(3)}) == 3 * len(keys)
    assert uniform([7], [1])[0] != uniform([1], [7])[0]
    assert uniform([7, 3], [0, 5], [2, 1]).tolist() == [uniform([7], [0], 2)[0], uniform([3], [5], 1)[0]]

# --- nobody depends on his mates

def crowd(seed, vocab, n=40):
    rng = random.Random(seed)
    def one(i):
        kw, said = draw_options(rng, vocab), rng.choices(range(vocab), k=rng.randint(0, 30))
        if rng.random() < .4: kw['logprobs'] = rng.randint(0, 5)
        return SamplerState(SamplingParams(**kw), rng.choices(range(vocab), k=9), said, rng.getrandbits(64),
                            rng.randrange(4), [1, 2], [[4], [said[-1] if said else 3, 6]] if kw.get('bad_words')
                            else ())
    return [one(i) for i in range(n)]

@each_way
@pytest.mark.parametrize('vocab', [11, 258, 5000])
@pytest.mark.parametrize('seed', range(4))
def test_a_row_is_what_it_is_alone(seed, vocab):
    all_states, x = crowd(seed, vocab), noise(40, vocab, seed)
    alone = [sample(x[i:i+1].clone(), [s]) for i, s in enumerate(all_states)]
    order = random.Random(seed).sample(range(40), 40)
    for rows in (list(range(40)), order, order[:7]):
        got = sample(x[rows], [all_states[i] for i in rows])
        assert got.ids == [alone[i].ids[0] for i in rows] and set(got.errors) == {j for j, i in enumerate(rows)
            if alone[i].errors}
        for j, i in enumerate(rows):
            a, b = got.logprobs.get(j), alone[i].logprobs.get(0)
            assert (a is None) == (b is None)
            if a:
                assert list(a) == list(b) and all(abs(a[t].logprob - b[t].logprob) < 1e-5 and a[t].rank == b[t].rank
                                                  for t in a)

@each_way
@pytest.mark.parametrize('poison', [math.nan, math.inf, -math.inf])
def test_a_bad_row_has_its_own_error(poison):
    all_states, x = crowd(9, 258), noise(40, 258)
    clean = sample(x.clone(), all_states)
    y = x.clone(); y[5, 100] = poison; y[6] = poison; y[7] = -math.inf
    got = sample(y, all_states)
    hurt = {5, 6, 7}
    assert {6, 7} <= set(got.errors) and (poison == -math.inf or all_states[5].allowed is not None or 5 in got.errors)
    assert all(got.ids[i] == clean.ids[i] and got.logprobs.get(i) == clean.logprobs.get(i) for i in range(40)
               if i not in hurt)
    assert all(got.ids[i] is None and i not in got.logprobs for i in got.errors)

@each_way
def test_everything_forbidden():
    forbid = SamplerState(SamplingParams(allowed_token_ids=[3, 4], min_tokens=2, logprobs=1), [1], [], stop_ids=[3],
                          bad_words=[[4]])
    got = sample(noise(2, 50), [forbid, SamplerState(SamplingParams(temperature=0))])
    assert got.ids[0] is None and 'forbid' in got.errors[0].text and got.ids[1] == int(noise(2, 50)[1].argmax())

def test_a_state_counts_as_it_goes_as_if_made_anew():
    rng, p, said = random.Random(1), SamplingParams(repetition_penalty=1.1, frequency_penalty=.5), []
    old = SamplerState(p, PROMPT, said)
    for _ in range(60):
        said += rng.choices(range(40), k=rng.randint(0, 3))
        a, b = noise(1, 300), noise(1, 300)
        edit_logits(a, [old]); edit_logits(b, [SamplerState(p, PROMPT, list(said))])
        assert torch.equal(a, b)

@pytest.mark.parametrize('vocab', [1, 100, 128, 1001])
def test_blocks_find_what_a_full_search_finds(vocab):
    x = noise(5, vocab, vocab); b = Blocks(x)
    assert b.argmax().tolist() == x.argmax(-1).tolist()
    for k in {1, min(3, vocab), min(130, vocab), vocab}:
        vals, ids = b.largest(torch.tensor([4, 1]), k)
        assert torch.equal(vals, x[[4, 1]].topk(k).values) and torch.equal(x[[4, 1]].gather(1, ids), vals)

@each_way
def test_logits_of_half_precision():
    x = noise(30, 300).bfloat16()
    got = sample(x.clone(), [SamplerState(SamplingParams(top_p=.8, logprobs=2), seed=i) for i in range(30)])
    assert got.ids == sample(x.float(), [SamplerState(SamplingParams(top_p=.8), seed=i) for i in range(30)]).ids
    assert all(abs(got.logprobs[i][t].logprob - x[i].float().log_softmax(-1)[t]) < 1e-5 for i, t in enumerate(got.ids))

# --- log probabilities

@each_way
def test_log_probabilities_are_raw():
    "Options that change or forbid leave them alone; the rank is that of the model"
    x = noise(3, 300); lp = x.log_softmax(-1)
    for kw in (dict(), dict(temperature=3), dict(logit_bias={7: 100}), dict(allowed_token_ids=[7]), dict(top_k=1),
               dict(repetition_penalty=9)):
        got = sample(x.clone(), [SamplerState(SamplingParams(**kw, logprobs=4), PROMPT, SAID, i) for i in range(3)])
        for i, t in enumerate(got.ids):
            d, top = got.logprobs[i], lp[i].topk(4)
            assert list(d) == list(dict.fromkeys([t, *top.indices.tolist()]))
            assert all(abs(d[k].logprob - lp[i, k]) < 1e-5 and d[k].rank == int((lp[i] > lp[i, k]).sum()) + 1
                       for k in d)
    assert [len(d) for d in score(x, lp.argmin(-1).tolist(), [0, 2, 0])] == [1, 3, 1]

@torch.no_grad()
def raw(lm, ids): return lm.hf_model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(-1)

@each_way
def test_log_probabilities_of_an_answer(engine, tiny):
    llm = engine()
    prompts = [[1, 2, 3], list(range(20, 50)), [7]]
    outs = llm.generate(prompts, [sp(logprobs=2), sp(temperature=1, seed=1, logprobs=0, presence_penalty=2), sp()],
                        use_tqdm=False)
    assert (outs[2].outputs[0].logprobs is None and outs[2].outputs[0].cumulative_logprob is None
            and outs[2].prompt_logprobs is None)
    for o, prompt, k in zip(outs[:2], prompts, (2, 0)):
        c, lp = o.outputs[0], raw(tiny, prompt + o.outputs[0].token_ids)
        # case 17: the token alone if no others are asked for
        assert [next(iter(d)) for d in c.logprobs] == c.token_ids and all(k <= len(d) <= k + 1 for d in c.logprobs)
        for i, d in enumerate(c.logprobs):
            assert all(abs(x.logprob - lp[len(prompt) - 1 + i, t]) < 1e-3 for t, x in d.items())
        assert abs(c.cumulative_logprob - sum(d[t].logprob for d, t in zip(c.logprobs, c.token_ids))) < 1e-6

@pytest.mark.parametrize('config', [dict(max_num_batched_tokens=5), dict(max_num_batched_tokens=64),
                                    dict(prefix_caching=False), dict(num_blocks=14, force_preempt=3),
                                    dict(policy='static')], ids=str)
def test_prompt_log_probabilities_in_chunks_or_whole(engine, tiny, config):
    llm = engine(**config)
    prompt = list(range(30, 61))
    # the second finds nothing cached, since it must compute
    for _ in range(2):
        outs = llm.generate([prompt, [5, 6], prompt, [9]], [sp(prompt_logprobs=3), sp(),
                                                            sp(prompt_logprobs=0, n=2, temperature=1),
                                                            sp(prompt_logprobs=1)], use_tqdm=False)
        lp = raw(tiny, prompt)
        for o, k in zip((outs[0], outs[2]), (3, 0)):
            assert o.prompt_logprobs[0] is None and len(o.prompt_logprobs) == len(prompt)
            for i, d in enumerate(o.prompt_logprobs[1:]):
                assert next(iter(d)) == prompt[i + 1] and k <= len(d) <= k + 1
                assert all(abs(x.logprob - lp[i, t]) < 1e-3 and (t == prompt[i + 1] or x.rank == j)
                           for j, (t, x) in enumerate(d.items()))
        assert outs[1].prompt_logprobs is None and outs[3].prompt_logprobs == [None]

def test_rows_that_nobody_asks_for_have_no_logits(engine):
    llm, rows = engine(max_num_batched_tokens=64), []
    forward = llm.runner.executor.forward
    def watch(batch):
        x = forward(batch); rows.append(len(x)); return x
    llm.runner.executor.forward = watch
    llm.generate([list(range(20)), [1, 2]], sp(max_tokens=2), use_tqdm=False)
    llm.generate([list(range(20)), [1, 2]], [sp(max_tokens=2, prompt_logprobs=0), sp(max_tokens=2)], use_tqdm=False)
    assert rows == [2, 2, 21, 2]

# --- tokens that nobody has said, and masks

def twins(kw, said, draft, **more):
    "A state some tokens ahead, and one that is made for the longer answer"
    make = lambda said: SamplerState(SamplingParams(**kw), PROMPT, said, 7, 2, ENDS, BAD if kw.get('bad_words') else ())
    return make(list(said)).ahead(draft, **more), make(list(said) + list(draft)).ahead(**more)

@each_way
@pytest.mark.parametrize('kw', [dict(), dict(temperature=0), *ONE], ids=str)
def test_a_state_ahead_is_that_of_the_longer_answer(kw):
    "Every option, and drafts that complete a bad word, reach `min_tokens`, repeat and bring new tokens"
    for logprobs in (None, 2):
        for said in ([], SAID, SAID + [2]):
            for i, draft in enumerate(([], [9], [1, 2], [9, 2, 1, 2], [77, 77, 2])):
                ahead, made = twins(kw | dict(logprobs=logprobs), said, draft)
                x = noise(1, 300, i)
                a, b = x.clone(), x.clone()
                edit_logits(a, [ahead]); edit_logits(b, [made])
                assert torch.equal(a, b) and sample(x.clone(), [ahead]) == sample(x.clone(), [made])

@each_way
@pytest.mark.parametrize('seed', range(6))
def test_states_ahead_change_nothing_behind(seed):
    "In any order, some from others, while the answer itself goes on: each is what it would be if made anew"
    rng, x = random.Random(seed), noise(1, 300, seed)
    kw = draw_options(rng, 300) | dict(repetition_penalty=1.2, frequency_penalty=.4)
    said = rng.choices(range(12), k=4)
    make = lambda out: SamplerState(SamplingParams(**kw), PROMPT, out, 3, 1, ENDS, BAD)
    real = make(said)
    for _ in range(12):
        draft = rng.choices(range(12), k=rng.randint(0, 4))
        far = real.ahead(draft[:1]).ahead(draft[1:]) if rng.random() < .5 else real.ahead(draft)
        both = sample(x.repeat(2, 1), [far, real] if rng.random() < .5 else [real.ahead(draft), real])
        assert both == sample(x.repeat(2, 1), [make(said + draft), make(list(said))])
        said += rng.choices(range(12), k=rng.randint(0, 2))

def mask_of(ids, vocab):
    m = np.zeros(-(-vocab // 32), np.uint32)
    for t in ids: m[t // 32] |= np.uint32(1 << t % 32)
    return m.view(np.int32)

@each_way
@pytest.mark.parametrize('vocab', [11, 31, 32, 33, 258, 1000])
def test_a_mask_is_a_list_of_allowed_tokens(vocab):
    "With all other options beside it, and with bits set beyond the vocabulary"
    rng, x = random.Random(vocab), noise(40, vocab, vocab)
    masked, listed = [], []
    for i, s in enumerate(crowd(vocab, vocab)):
        may = rng.sample(range(vocab), rng.choice([1, min(5, vocab), vocab]))
        if s.params.allowed_token_ids: may = [t for t in s.params.allowed_token_ids if t in may] or may[:0]
        mask = mask_of(may, vocab)
        if vocab % 32: mask[-1] |= np.int32(-1 << vocab % 32)
        masked.append(s.ahead(mask=mask))
        twin = s.ahead(); twin.allowed = np.array(may or [0], np.int64)
        if not may: twin.allowed, twin.mask = None, np.zeros_like(mask)
        listed.append(twin)
    got = sample(x.clone(), masked)
    assert got == sample(x.clone(), listed)
    for i in {*range(40)} - {*got.errors}:
        a, b = distribution(x[i:i+1], masked[i:i+1]), distribution(x[i:i+1], listed[i:i+1])
        assert torch.equal(a, b)

@each_way
def test_a_mask_that_allows_nothing_and_masks_of_the_wrong_length():
    x, s, free = noise(3, 70), SamplerState(SamplingParams(logprobs=1),
                                            seed=1), SamplerState(SamplingParams(temperature=0))
    got = sample(x.clone(), [free, s.ahead(mask=np.zeros(3, np.int32)), free])
    assert got.ids[1] is None and 'no token is left' in got.errors[1].text and list(got.errors) == [1]
    assert got.ids[0] == int(x[0].argmax()) and got.ids[2] == int(x[2].argmax())
    for bad in (np.zeros(2, np.int32), np.zeros(4, np.int32), np.zeros((1, 3), np.int32), np.zeros(0, np.int32)):
        with pytest.raises(ValueError, match='a vocabulary of 70 needs 3'):
            sample(x.clone(), [free, s.ahead(mask=bad), free])
    full = np.full(3, -1, np.int32)
    assert sample(x.clone(), [s.ahead(mask=full)] * 3) == sample(x.clone(), [s] * 3)

def test_a_mask_is_read_when_sampled_and_not_carried_on():
    mask, s = mask_of([3], 70), SamplerState(SamplingParams(temperature=0))
    held = s.ahead(mask=mask)
    assert s.mask is None and held.ahead([1]).mask is None
    for t in (3, 40):
        mask[:] = mask_of([t], 70)
        assert sample(noise(1, 70), [held]).ids == [t]

# --- C++ against torch

@contextmanager
def shifted(d):
    "Torch's way, with random numbers a little off"
    with patch('cbatch.drawing.uniform', lambda *key: np.clip(uniform(*key) + d, 0, 1 - 1e-9)), patch.object(FAST,
        'lib', None):
        yield

def near(x, state):
    "Every token that torch's way gives one row if its random numbers, `top_p` or `min_p` are a hundred-thousandth off"
    p, ids = state.params, set()
    for more in (0, -1e-5, 1e-5):
        state.params = replace(p, top_p=min(1, max(1e-9, p.top_p + more * (p.top_p < 1))),
                               min_p=min(1, max(0, p.min_p * (1 + more))))
        for d in (0, -1e-5, 1e-5):
            with shifted(d): ids.update(sample(x.clone(), [state]).ids)
    state.params = p
    return ids

def in_both(x, all_states):
    if isinstance(native(), str): pytest.skip(native())
    out = []
    for lib in (None, native()):
        with patch.object(FAST, 'lib', lib): out.append(sample(x.clone(), all_states))
    return out

@pytest.mark.parametrize('vocab', [11, 258, 1000, 5001])
def test_cpp_gives_what_torch_gives(vocab):
    """28,000 draws in all: the same token, unless the random number lies within rounding of a border.
    The same errors; the same scores."""
    apart = []
    for seed in range(10):
        all_states, x = crowd(seed, vocab, 700), noise(700, vocab, seed)
        ours, theirs = in_both(x, all_states)[::-1]
        assert ours.errors == theirs.errors and set(ours.logprobs) == set(theirs.logprobs)
        apart += [(x[i:i+1], s, a) for i, (s, a, b) in enumerate(zip(all_states, ours.ids, theirs.ids)) if a != b]
        for i, a in ours.logprobs.items():
            b = theirs.logprobs[i]
            if ours.ids[i] == theirs.ids[i]:
                assert list(a) == list(b) and all(abs(a[t].logprob - b[t].logprob) < 1e-5 and a[t].rank == b[t].rank
                                                  for t in a)
    assert len(apart) < 9, f'{len(apart)} apart'
    assert all(not s.params.greedy and a in near(x, s) for x, s, a in apart)

@pytest.mark.parametrize('vocab', [258, 49_153])
@pytest.mark.parametrize('rows', [1, 64])
def test_cpp_takes_logits_of_every_shape(rows, vocab):
    """Half precision, rows or columns that are not neighbours in memory, one thread or two, in any order.
    The same tokens and scores, to the bit."""
    if isinstance(native(), str): pytest.skip(native())
    all_states, x = crowd(3, vocab, rows), noise(rows, vocab, 3).bfloat16().float()
    order = random.Random(4).sample(range(rows), rows)
    with patch.object(FAST, 'lib', native()):
        want = sample(x, all_states)
        assert sum(t is not None for t in want.ids) > rows // 2
        wide = torch.full((rows, 2 * vocab + 3), math.nan); wide[:, 1:2*vocab+1:2] = x
        padded = torch.full((rows + 1, vocab + 5), math.nan); padded[1:, 5:] = x
        for y in x.bfloat16(), padded.bfloat16()[1:, 5:], x.half() if x.half().float().equal(x) else x, wide[:,
            1:2*vocab+1:2], padded[1:, 5:], x.t().contiguous().t(), x.double():
            assert sample(y, all_states) == want
        shuffled = sample(x[order], [all_states[i] for i in order])
        assert shuffled.ids == [want.ids[i] for i in order] and shuffled.logprobs == {j: want.logprobs[i]
            for j, i in enumerate(order) if i in want.logprobs}
        for n in (2, 1):
            with patch('torch.get_num_threads', lambda: n): assert sample(x, all_states) == want

@pytest.mark.skipif(platform.machine() != 'x86_64', reason='names a processor of that family')
def test_cpp_is_the_same_on_a_processor_with_small_registers(tmp_path, monkeypatch):
    "To the bit: nothing is summed in another order or rounded otherwise"
    if isinstance(native(), str): pytest.skip(native())
    for k, v in dict(CBATCH_CACHE=str(tmp_path), CBATCH_NATIVE='1').items(): monkeypatch.setenv(k, v)
    with patch.dict(KERNELS):
        (old := Native('old', SAMPLER_CPP, FAST.functions, flags=('-march=x86-64', '-O1'))).build()
    for vocab in 258, 5001:
        all_states, x = crowd(5, vocab, 300), noise(300, vocab, 5)
        with patch.object(FAST, 'lib', native()): want = sample(x, all_states)
        with patch.object(FAST, 'lib', old.lib): assert sample(x, all_states) == want

def test_the_way_of_a_gpu_reads_once():
    """Nothing waits for the device but the read of tokens and errors, whatever is asked.
    Log probabilities are further reads of those who want them."""
    reads = []
    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            name = f.__name__.split('.')[0]
            if name in ('_local_scalar_dense', 'nonzero', 'equal', 'masked_select', 'unique2', 'is_nonzero'):
                reads.append(name)
            if name in ('index', 'index_put', 'index_put_') and any(i is not None and i.dtype == torch.bool
                for i in args[1]):
                reads.append('index by a mask')
            return f(*args, **(kwargs or {}))
    rng, kinds = random.Random(0), [dict(temperature=0), dict(top_k=5), dict(top_p=.7), dict(min_p=.1),
                                    dict(presence_penalty=1., logit_bias={3: 2.}), dict(allowed_token_ids=[4, 5]),
                                    dict(min_tokens=9)]
    states = [SamplerState(SamplingParams(**k), [1, 2], [3], rng.randrange(99), 0, [0]) for k in kinds * 3]
    tolist, lists = torch.Tensor.tolist, []
    with patch.object(torch.Tensor, 'tolist', lambda x: (lists.append(x.shape), tolist(x))[1]), Counting():
        got = drawing.sample_device(noise(len(states), 300), states)
    assert lists == [(2, len(states))] and not reads and not got.errors

def test_cpp_writes_no_token_that_is_not_there():
    "Ids beyond the vocabulary can't come anyway, and must not be written into the memory behind"
    if isinstance(native(), str): pytest.skip(native())
    far = [-1, 300, 2**40]
    s = SamplerState(SamplingParams(temperature=0, repetition_penalty=2, logit_bias={300: 1., 2**40: 2.},
                                    allowed_token_ids=[5, 300], min_tokens=3), far[1:], [], stop_ids=far,
                     bad_words=[[300]])
    with patch.object(FAST, 'lib', native()): assert sample(noise(1, 300), [s]).ids == [5]

# --- through the engine

@torch.no_grad()
def agrees(lm, prompt, params, ours, ref, index):
    "Equal, or parted where rounding may decide"
    if ours == ref: return True
    at = next((i for i, (a, b) in enumerate(zip(ours, ref)) if a != b), None)
    if at is None: return False
    state = SamplerState(params, prompt, ref[:at], params.seed, index, {*params.stop_token_ids, *lm.eos_ids},
                         bad_word_ids(params.bad_words, lm.tokenizer, lm.vocab_size))
    x = lm.hf_model(input_ids=torch.tensor([prompt + ref[:at]])).logits[:, -1].float()
    if params.greedy:
        edit_logits(x, [state]); top = x[0].topk(2)
        return {ours[at], ref[at]} == set(top.indices.tolist()) and float(top.values[0] - top.values[1]) < TIE
    near = set()
    for d in (-1e-4, 0, 1e-4):
        with shifted(d): near.update(sample(x.clone(), [state]).ids)
    return {ours[at], ref[at]} <= near

def draw_request(rng, lm):
    kw = draw_options(rng, 256)
    kw |= dict(seed=rng.getrandbits(63), max_tokens=rng.randint(1, 14), n=rng.choice([1, 1, 1, 2, 3]),
               ignore_eos=rng.random() < .5, logprobs=rng.choice([None, None, 0, 3]),
               stop_token_ids=rng.sample(range(256), 40) if rng.random() < .3 else None)
    kw['min_tokens'] = min(kw.get('min_tokens', 0), kw['max_tokens'])
    if kw.get('bad_words'): kw['bad_words'] = [chr(rng.randint(33, 126)) for _ in range(5)] + ['ab', 'a b']
    # not all of it is a bad word
    if 'allowed_token_ids' in kw: kw['allowed_token_ids'] += [rng.randrange(128, 200)]
    if kw['n'] > 1: kw['temperature'] = kw['temperature'] or 1
    return [rng.randrange(256) for _ in range(rng.randint(1, 25))], SamplingParams(**kw)

@each_way
@pytest.mark.parametrize('seed', range(8))
def test_random_options_for_every_request_of_a_batch(tiny, seed):
    "A pool that is too small, shared prefixes, states lost on the way: each answer is the oracle's"
    rng = random.Random(seed)
    todo = [draw_request(rng, tiny) for _ in range(10)]
    llm = LLM(tiny, num_blocks=rng.choice([14, 30, 80]), block_size=4, max_num_seqs=rng.choice([3, 8]),
              max_num_batched_tokens=rng.choice([9, 40]), check=True)
    execute = llm.execute
    def forgetful(plan):
        if rng.random() < .3: llm.runner.sampler.states.clear()
        return execute(plan)
    llm.execute = forgetful
    done, ids = {}, [llm.add(*t) for t in todo]
    while llm.has_unfinished: done |= {o.request_id: o for o in llm.step() if o.finished}
    for (prompt, params), o in zip(todo, [done[i] for i in ids]):
        assert len(o.outputs) == params.n
        for c in o.outputs:
            try: ref = generate_ref(tiny, prompt, params, sample_index=c.index)
            except Exception as e: assert c.finish_reason == 'error' and str(e) in o.error; continue
            assert agrees(tiny, prompt, params, c.token_ids, ref.token_ids, c.index), (params, c.token_ids,
                ref.token_ids)
            if c.token_ids == ref.token_ids:
                assert (c.finish_reason, c.text) == (ref.finish_reason, ref.text)
                if params.logprobs is not None:
                    for a, b in zip(c.logprobs, ref.logprobs):
                        assert all(abs(a[t].logprob - b[t].logprob) < 1e-3 for t in a if t in b)

@each_way
def test_the_end_at_the_last_token(engine, tiny):
    "Case 19, and what min_tokens makes of it"
    llm, prompt = engine(), [3, 1, 4]
    free = generate_ref(tiny, prompt, sp(max_tokens=6)).token_ids
    ends = lambda **kw: [(c.token_ids, c.finish_reason) for o in llm.generate([prompt],
        SamplingParams(temperature=0, **kw), use_tqdm=False) for c in o.outputs][0]
    assert ends(max_tokens=1, ignore_eos=True) == (free[:1], 'length')
    for k in range(1, 7):
        if free[k-1] in free[:k-1]: continue
        assert ends(max_tokens=k, stop_token_ids=[free[k-1]]) == (free[:k], 'stop')
        # it can't come as token k, but may come later
        said, why = ends(max_tokens=6, min_tokens=k, stop_token_ids=[free[k-1]])
        assert said[:k-1] == free[:k-1] and free[k-1] not in said[:k] and (said[-1] == free[k-1]) == (why == 'stop')

@each_way
def test_bad_words_never_come(engine, tiny):
    llm = engine()
    prompts = [list(range(i, i + 9)) for i in range(6)]
    free = llm.generate(prompts, sp(max_tokens=20), use_tqdm=False)
    words = sorted({c for o in free for c in o.outputs[0].text if c.isascii() and c.isprintable() and c != ' '})[:20]
    assert words
    for o in llm.generate(prompts, sp(max_tokens=20, bad_words=words), use_tqdm=False):
        assert not set(words) & set(o.outputs[0].text)
    pair = next(a + b for o in free for a, b in zip(o.outputs[0].text, o.outputs[0].text[1:]) if (a + b).isascii()
                and (a + b).isprintable() and ' ' not in a + b)
    outs = llm.generate(prompts, sp(max_tokens=20, bad_words=[pair]), use_tqdm=False)
    assert not any(pair in o.outputs[0].text for o in outs) and any(pair[0] in o.outputs[0].text for o in outs)

# --- what is refused

NO = [(k, v) for k, vs in dict(
    temperature=[-1, math.nan, math.inf, 101, '1', None, True], top_p=[0, -1, 1.1, math.nan],
                               top_k=[-2, 1.5, 2**63, None], min_p=[-.1, 1.1, math.nan],
                               n=[0, 17, 10**6, 1.5, None, True],
    repetition_penalty=[0, -1, math.inf, 101], presence_penalty=[2.1, -2.1, math.nan],
                               frequency_penalty=[3, math.nan, 'x'], min_tokens=[-1, 1.5, None],
                               logprobs=[-1, 21, 1.5, True],
    prompt_logprobs=[-1, 21, 10**9], logit_bias=[{-1: 1}, {1: 101}, {1: math.nan}, {'1': 1}, {1.5: 1}, [1],
                                                 {i: 0 for i in range(1025)}],
                               bad_words=[[''], [1], 'x' * 513, ['x'] * 129, 5],
    allowed_token_ids=[[], [-1], [1.5], [True], 'ab', 5, range(16_385)], stop=[[''], 5, ['x'] * 17],
                               stop_token_ids=[[-1], ['1'], range(129)], seed=[1.5, 2**63, 'x'],
                               max_tokens=[0, -1, 1.5]).items() for v in vs]

@pytest.mark.parametrize('name, value', NO, ids=[f'{k}={str(v)[:20]}' for k, v in NO])
def test_refused(name, value):
    with pytest.raises(ValueError, match=name): SamplingParams(**{name: value})

def test_refused_together():
    with pytest.raises(ValueError, match='min_tokens=5 exceeds max_tokens=4'):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match='prompt_logprobs'):
        check_ids([0] * (MAX_SCORES // 21 + 1), SamplingParams(prompt_logprobs=20), 10)
    check_ids([0] * (MAX_SCORES // 21 + 1), SamplingParams(), 10)

def test_absent_null_and_empty_are_alike():
    for name, empty in dict(stop=[], stop_token_ids=[], logit_bias={}, bad_words=[]).items():
        assert SamplingParams(**{name: empty}) == SamplingParams(**{name: None}) == SamplingParams()
    assert SamplingParams(bad_words='x') == SamplingParams(bad_words=['x'])

@pytest.mark.parametrize('kw', [dict(logit_bias={258: 1}), dict(stop_token_ids=[258]),
                                dict(allowed_token_ids=[0, 258])], ids=str)
def test_an_id_outside_the_logits_is_refused_and_nobody_notices(engine, tiny, kw):
    "Case 14"
    llm = engine()
    with pytest.raises(ValueError, match=next(iter(kw))): llm.add([1, 2], SamplingParams(**kw))
    with pytest.raises(ValueError, match='empty prompt'): llm.add([], SamplingParams())
    assert not llm.has_unfinished
    assert llm.generate([[1, 2]], sp(), use_tqdm=False)[0].outputs[0].token_ids == generate_ref(tiny, [1, 2],
        sp()).token_ids

def test_a_tokenizer_longer_than_the_logits(tiny):
    narrow = tiny_lm('llama', vocab_size=100, eos_token_id=99, pad_token_id=0)
    with pytest.raises(ValueError, match='bad_words: a token is not in the vocabulary of 100'):
        bad_word_ids(('x',), narrow.tokenizer, narrow.vocab_size)
    with pytest.raises(ValueError, match='need a tokenizer'): bad_word_ids(('x',), None, 100)
    with pytest.raises(ValueError, match='at most'): bad_word_ids(('word' * 100,) * 3, tiny.tokenizer, tiny.vocab_size)
