"Guesses by their parts: the search against a slow one, the price, the odds, the rule against all choices, and memory."
import functools, gc, itertools, os, random, tracemalloc
from types import SimpleNamespace
from unittest.mock import patch
import numpy as np, pytest, torch
from cbatch.core import Plan, Request, Scheduled, StepOutput
from cbatch.guesses import Guess, Guesser, Guesses, Lookup, Odds, RowCost, get_guesses
from cbatch.params import EngineConfig, ParamError, SamplingParams
from cbatch.policies import Policy
from cbatch.prefix_caching import PrefixBlocks
from cbatch.sampler import FAST, sample_native
from cbatch.sampling import SamplerState
from cbatch.scheduler import Scheduler

def request(name='r', prompt=(1, 2, 3), out=(4,), most=50, temperature=0., **kw):
    return Request(name, list(prompt), SamplingParams(temperature=temperature), most, output_ids=list(out), **kw)

class Says(Guesser):
    "Always the same, and counts how often it was asked"
    def __init__(self, *tokens, match=0, costly=False):
        self.tokens, self.match, self.costly, self.num = tokens, match, costly, 0
    def guess(self, r, most):
        self.num += 1
        return Guess(list(self.tokens[:most]), self.match)

# --- the search

def slow(text, least, longest):
    "Where the end of a text goes on by the longest agreement, the newest of equals, and how many agree"
    at, best = 0, least - 1
    for j in range(len(text) - 1, 0, -1):
        n = next((n for n in range(longest) if j - n <= 0 or text[j - 1 - n] != text[len(text) - 1 - n]), longest)
        if n > best: at, best = j, n
    return (at, best) if at else (0, 0)

@pytest.mark.parametrize('seed', range(20))
def test_search_agrees_with_a_slow_one(seed):
    rng = random.Random(seed)
    least, longest, letters = rng.choice([2, 2, 3]), rng.choice([3, 5, 8]), rng.choice([2, 3, 7, 40_000])
    draw = lambda n: [rng.randrange(letters) for _ in range(n)]
    r = request(prompt=draw(rng.randint(1, 60)), out=draw(1), prediction=tuple(draw(rng.choice([0, 9]))))
    lookup = Lookup(least, longest, links=10**6)
    for _ in range(60):
        lookup.guess(r, 5)
        text = [*r.prediction, *r.prompt_ids, *r.output_ids]
        assert lookup.seen[r].longest(least, longest, 10**6) == slow(text, least, longest)
        r.output_ids += draw(rng.randint(1, 4))

def test_a_circle_goes_on_as_a_circle():
    r = request(prompt=[9, 1, 2, 3], out=[1, 2, 3, 1])
    assert Lookup().guess(r, 7).tokens == [2, 3, 1, 2, 3, 1, 2]

def test_an_offer_grows_with_the_match_and_with_what_may_be_asked():
    r = request(prompt=[*range(20), 5, 6], out=[7])
    assert Lookup().guess(r, 99) == Guess([8, 9, 10, 11, 12, 13], 3) and Lookup().guess(r, 2).tokens == [8, 9]
    assert Lookup(least=4).guess(r, 9) == Guess([], 0)

def test_a_prediction_is_followed_and_found_again():
    r, lookup = request(prompt=[50], out=[1], prediction=tuple(range(1, 20))), Lookup()
    assert lookup.guess(r, 4) == Guess([2, 3, 4, 5], 8)
    r.output_ids += [2, 3, 99]                                # strays
    assert lookup.guess(r, 4).tokens == []
    r.output_ids += [8, 9]
    assert lookup.guess(r, 4).tokens == [10, 11, 12, 13]
    r.output_ids += range(10, 20)
    assert len(lookup.guess(r, 9).tokens) == 9               # beyond its end the prompt comes, or anything

def test_an_index_takes_less_than_100_bytes_a_token():
    rng = random.Random(0)
    for prompt, out in (500, 100), (4000, 1200):
        ids = [rng.randrange(49152) for _ in range(prompt + out)]
        r, answer, lookup = request(prompt=ids[:prompt]), ids[prompt:], Lookup()
        gc.collect(); tracemalloc.start()
        for t in answer:
            lookup.guess(r, 8)
            r.output_ids.append(t)
        used = tracemalloc.get_traced_memory()[0] - 9 * out       # the answer's own list
        tracemalloc.stop()
        assert 8 * (prompt + out) < used < 100 * (prompt + out), used / (prompt + out)

def test_an_index_goes_with_its_request():
    lookup, a, b = Lookup(), request('a'), request('b')
    for r in (a, b): lookup.guess(r, 3)
    lookup.forget(a); lookup.forget(a)
    assert list(lookup.seen) == [b]
    del b, r; gc.collect()
    assert not lookup.seen

# --- price and odds

def test_the_price_of_a_row_is_found():
    rng, cost = np.random.default_rng(0), RowCost()
    for _ in range(300): cost.seen(n := int(rng.integers(1, 12)), (.008 + .0006 * n) * rng.lognormal(0, .05))
    assert abs(cost.row - .0006) < .0001 and abs(cost.seconds(6) - .0116) < .0005
    for _ in range(300): cost.seen(n := int(rng.integers(1, 12)), (.03 + .002 * n) * rng.lognormal(0, .05))
    assert abs(cost.row - .002) < .0004                      # it has become another machine

@pytest.mark.parametrize('rows', [1, 5, 32])
def test_with_rows_of_one_number_a_price_is_assumed_and_an_old_one_forgotten(rows):
    cost = RowCost()
    for _ in range(3): cost.seen(rows, .01)
    assert cost.row == pytest.approx(.05 * cost.base) and cost.seconds(rows) == pytest.approx(.01)
    for n in (rows, rows + 8) * 20: cost.seen(n, .01 * n / rows)              # rows cost all there is
    dear = cost.row
    for _ in range(1000): cost.seen(rows, .01)
    assert cost.row < dear and cost.row == pytest.approx(.05 * cost.base, rel=.01)

def test_a_price_stays_a_price_whatever_was_measured():
    rng, cost = random.Random(0), RowCost()
    for _ in range(500):
        cost.seen(rng.randint(1, 40), rng.choice([1e-9, 1e-3, .02, 7.]))
        assert 0 < cost.row < 99 and cost.base >= -1e-9

def test_a_hiccup_is_cut():
    cost = RowCost()
    for i in range(50): cost.seen(1 + i % 9, .01)
    cost.seen(5, 60.)
    assert cost.seconds(5) < .012

def test_odds_are_learned_by_temperature_and_match_and_unlearned():
    odds, cold, hot = Odds(), request(), request(temperature=1.)
    for _ in range(300): odds.seen(cold, 3, True)
    assert odds.each(cold, Guess([1], 3))[0] > .95
    assert odds.each(hot, Guess([1], 3)) == odds.each(cold, Guess([1], 2)) == [.5]
    p, = odds.each(cold, Guess([1], 3))
    assert odds.each(cold, Guess([1, 1, 1], 2)) == pytest.approx([.5, .5 * p, .5 * p * p])    # 4 is taken to be like 3
    for _ in range(300): odds.seen(cold, 3, False)
    assert odds.each(cold, Guess([1], 3))[0] < .3
    odds.seen(cold, 10**9, True); odds.each(cold, Guess([1] * 40, 10**9))

def test_odds_of_who_is_always_wrong_are_never_good():
    odds, r = Odds(), request()
    for _ in range(500):
        assert max(odds.each(r, Guess([1] * 8, 2))) <= .5
        odds.seen(r, 2, False)
    assert max(odds.each(r, Guess([1] * 8, 2))) < .02

# --- the rule

def plan_of(rs, left=99):
    return Plan(0, 0., left=left, scheduled=[Scheduled(r, r.num_tokens - 1, r.num_tokens, (), 1) for r in rs])

@pytest.mark.parametrize('seed', range(30))
def test_no_choice_of_guesses_makes_more_tokens_a_second(seed):
    rng, g = random.Random(seed), Guesses(Says())
    g.margin = 1.
    n = rng.randint(1, 4)
    g.cost.base, g.cost.row = 1., rng.choice([.01, .1, .4, 1.])
    chances = [[rng.random() for _ in range(rng.randint(0, 4))] for _ in range(n)]
    odds = [list(itertools.accumulate(ps, lambda p, q: p * q)) for ps in chances]
    plan = plan_of([request(str(i)) for i in range(n)], rng.choice([0, 2, 99]))
    def rate(ks): return (n + sum(sum(ps[:k]) for ps, k in zip(odds, ks))) / (1 + g.cost.row * (n + sum(ks)))
    every = [ks for ks in itertools.product(*(range(len(ps) + 1) for ps in odds)) if sum(ks) <= plan.left]
    assert rate(g._worth(plan, odds)) == pytest.approx(max(map(rate, every)))
    g.when = 'always'
    assert sum(g._worth(plan, odds)) == min(plan.left, sum(map(len, odds)))

def test_a_guess_must_be_worth_more_than_its_row():
    g, plan = Guesses(Says()), plan_of([request()])
    g.cost.base, g.cost.row = 9., 1.
    assert g._worth(plan, [[.13]]) == [0] and g._worth(plan, [[.15]]) == [1]      # 1.4 x 1 / 10
    assert g._worth(plan, [[.3]], each=2.) == [0] and g._worth(plan, [[.5]], each=2.) == [1]

def world(guesser, blocks=12, size=4, **kw):
    cfg = EngineConfig(max_num_seqs=4, max_num_batched_tokens=40, block_size=size, num_blocks=blocks, watermark=0.)
    s = Scheduler(cfg, PrefixBlocks(blocks, size), kw.pop('policy', None))
    s.guesses = Guesses(guesser, vocab_size=100, **kw)
    return s

def step(s, truth, now=0.):
    "One step; who is right about `truth` gets on quicker"
    plan, said = s.schedule(now), {}
    for x in plan.scheduled:
        r, at = x.request, len(x.request.output_ids)
        if not x.rows: continue
        ok = next((i for i, t in enumerate(x.draft) if t != truth[at + i]), len(x.draft))
        said[r.request_id] = truth[at:at + ok + 1]
    s.update(plan, StepOutput(said), now + .01); s.check()
    return plan

def ask(s, prompt, most, name='r'):
    s.add(r := Request(name, list(prompt), SamplingParams(temperature=0), most, seq=len(s.running)))
    return r

def test_room_is_what_nobody_needs():
    s = world(Says(*range(9)), when='always'); r = ask(s, range(6), 20); step(s, [7] * 30)
    b, odds = s.blocks, [.4] * 9
    have, n = len(r.block_table) * 4 - r.num_tokens, b.num_free_blocks
    assert s.guesses._room(s, r, r.num_tokens, odds) == 9 and have == 1
    for free, room in (0, have), (1, have + 4), (2, 9):
        s.promised = n - free
        assert s.guesses._room(s, r, r.num_tokens, odds) == room
    s.promised, s.watermark = 0, n
    assert s.guesses._room(s, r, r.num_tokens, odds) == have

def test_what_others_may_find_is_taken_only_if_it_is_likely_used():
    s = world(Says(*range(9)), blocks=8, when='always')
    for name, start in ('a', 10), ('b', 30):
        ask(s, range(start, start + 12), 1, name)
        while s: step(s, [7])
    r = ask(s, range(50, 57), 20); step(s, [7] * 30)
    assert (s.blocks.num_free_blocks, s.blocks.num_idle(9)) == (6, 0)
    at, have = r.num_tokens, len(r.block_table) * 4 - r.num_tokens
    assert s.guesses._room(s, r, at, [.5] * 9) == have and s.guesses._room(s, r, at, [.51] * 9) == 9
    assert s.guesses._room(s, r, at, [.9] * 5 + [.3] * 4) == min(9, have + 4 * (1 + (have < 1)))

def test_whoever_is_always_wrong_takes_nothing_from_the_cache():
    s = world(Says(99, 99, 99, 99, 99, 99), blocks=9, when='always')
    ask(s, range(16), 1, 'a')
    while s: step(s, [7])
    r = ask(s, range(50, 59), 11, 'b')
    while s: step(s, [7] * 30)
    assert r.num_guessed and not r.num_accepted
    again = ask(s, range(16), 1, 'c')
    assert s.blocks.find(again).num_tokens >= 12

def test_an_oracle_takes_the_steps_that_it_must():
    truth = [i % 50 for i in range(200)]
    class Oracle(Guesser):
        def guess(self, r, most): return Guess(truth[len(r.output_ids):][:most])
    for k, n in itertools.product((1, 3, 8), (1, 2, 9, 10, 41)):
        s = world(Oracle(), blocks=40, most=k, when='always'); r = ask(s, [1, 2, 3], n); step(s, truth); steps = 0
        while s: step(s, truth); steps += 1
        assert r.output_ids == truth[:n] and steps == -(-(n - 1) // (k + 1))

def test_the_last_token_is_never_guessed_nor_a_prompts():
    s = world(Says(*range(9)), when='always'); r = ask(s, range(6), 4)
    drafts = []
    while s: drafts.append(len(step(s, [99] * 9).scheduled[0].draft))
    assert drafts == [0, 2, 1, 0]

@pytest.mark.parametrize('says,num', [(0, 0), (1, 1), (True, 1), (-3, 0)])
def test_a_policy_may_veto(says, num):
    class Shy(Policy):
        def guess(self, s, r, most): return says
    s = world(Says(*range(9)), when='always', policy=Shy()); ask(s, range(6), 9); step(s, [99] * 9)
    assert len(step(s, [99] * 9).scheduled[0].draft) == num

@pytest.mark.parametrize('says', [99, None, 'many', 1.5])
def test_a_policy_that_talks_nonsense_is_told_so(says):
    class Wild(Policy):
        def guess(self, s, r, most): return says
    s = world(Says(*range(9)), policy=Wild()); ask(s, range(6), 9); step(s, [99] * 9)
    with pytest.raises(ValueError, match='give a whole number, at most 7'): s.schedule()

NONSENSE = [None, [], [None], [7], [Guess([100])], [Guess([-1])], [Guess(['x'])], [Guess([1], 'x')]]

@pytest.mark.parametrize('said', NONSENSE)
def test_a_guesser_that_talks_nonsense_is_told_so(said):
    class Wild(Guesser):
        def propose(self, rs, most): return said
    with pytest.raises(ValueError, match='guesser Wild'): Guesses(Wild(), vocab_size=100)._ask([request()], [3])

def test_guesses_that_were_not_computed_teach_too():
    s = world(Says(7, 7, 7, match=2)); r = ask(s, range(6), 30)
    s.guesses.cost.row = 1e9
    for i in range(9):
        plan = step(s, [7] * 40)
        assert not plan.scheduled[0].draft
        s.guesses.cost.row = 1e9
    assert s.guesses.odds.each(r, Guess([7], 2))[0] > .8 and r.num_guessed == 0

def test_only_steps_of_nothing_but_decoding_tell_the_price():
    s = world(Says(7, 7), blocks=30); ask(s, range(30), 9); num = lambda: s.guesses.cost.num
    assert (step(s, [1] * 9), num())[1] == 0
    assert (step(s, [1] * 9), num())[1] == 1
    ask(s, range(50, 70), 9, 'other')
    assert (step(s, [1] * 9), num())[1] == 1

def test_whoever_takes_his_time_is_not_asked_for_nothing():
    slow = Says(99, 99, costly=True); s = world(slow, blocks=99); r = ask(s, range(6), 300)
    for i in range(260):
        step(s, [7] * 400, i * 1.)
        s.guesses.cost.base, s.guesses.cost.row = 1., 1.
    assert 3 <= slow.num <= 20, 'asked now and then, or it could never come back'

def test_names_of_guessers():
    lm = SimpleNamespace(vocab_size=10)
    assert get_guesses(EngineConfig(), lm) is None and get_guesses(EngineConfig(guesses='lookup')) is None
    assert isinstance(get_guesses(EngineConfig(guesses='lookup'), lm).guesser, Lookup)
    mine = Says(1); g = get_guesses(EngineConfig(guesses=mine, max_guesses=3), lm)
    assert g.guesser is mine and (g.most, g.vocab_size) == (3, 10)
    for bad in ('look up', 5, Lookup):
        with pytest.raises(ParamError, match='off, lookup, or a Guesser'): get_guesses(EngineConfig(guesses=bad))

# --- rows ahead

@functools.cache
def native():
    with patch.dict(os.environ, CBATCH_NATIVE='1'): return FAST._load() if FAST.build() else None

@pytest.mark.parametrize('kw', [dict(), dict(repetition_penalty=1.4, presence_penalty=.5), dict(min_tokens=6),
                                dict(logit_bias={3: 2., 5: -4.}), dict(top_k=4, top_p=.8, min_p=.01, logprobs=2)])
def test_a_state_ahead_of_one_that_was_used_samples_as_a_new_one(kw):
    if not (lib := native()): pytest.skip('no C++ compiler that works')
    x, p = torch.randn(1, 40, generator=torch.Generator().manual_seed(0)), SamplingParams(temperature=.9, **kw)
    make = lambda out: SamplerState(p, [1, 2, 3], out, 7, 1, [4, 9], [[5, 6], [8]])
    used = make([3, 5]); sample_native(lib, x, [used])
    for draft in [3], [3, 5], [3, 5, 5, 1]:
        for mask in None, np.array([0xfffff, 0xff], np.int32):
            fresh = make([3, 5, *draft]); fresh = fresh.ahead(mask=mask) if mask is not None else fresh
            a, b = (sample_native(lib, x, [s]) for s in (used.ahead(draft, mask), fresh))
            assert (a.ids, a.logprobs) == (b.ids, b.logprobs)
            used.ahead(draft, mask).ahead(); sample_native(lib, x, [used])
