"""A draft model says what it likes, and no token changes; what it says of its own model holds to the last guess.

Answers can't show a mistake here: how many guesses hold does. So the draft model is the target model itself where
guesses are counted, and another one where answers are compared."""
import functools, logging, random, threading
from collections import Counter
from copy import deepcopy
from dataclasses import replace
import numpy as np, pytest, torch
from cbatch import LLM, SamplingParams
from cbatch.core import Request
from cbatch.draft_model import DraftModel
from cbatch.model import CausalLM, tiny_lm
from cbatch.params import ParamError, cdiv
from cbatch.sampler import sample
from cbatch.sampling import SamplerState
from cbatch.scheduler import Policy
from cbatch.token_loop import generate_ref

SMALL = dict(block_size=4, check=True, guess_when='always')

@functools.cache
def model(arch='llama', seed=0, **config): return tiny_lm(arch, seed, **config)

@functools.cache
def prompts():
    rng = random.Random(1)
    return [[rng.randrange(256) for _ in range(n)] for n in (1, 3, 7, 12, 18, 25, 31, 40)]

@functools.cache
def alone(arch, prompt, params, index=0):
    "The oracle's answer"
    return generate_ref(model(arch), prompts()[prompt], params, sample_index=index).token_ids

def wish(max_tokens=21, temperature=1., seed=5, **more):
    return SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, **dict(ignore_eos=True) | more)

def first(lm, n):
    "A model made of the first layers of another"
    hf = deepcopy(lm.hf_model)
    hf.model.layers, hf.config.num_hidden_layers = hf.model.layers[:n], n
    return CausalLM(hf, lm.tokenizer, f'{n} layers')

def make(lm=None, num_blocks=100, **more):
    "A draft model in whose memory what was never written is not a number"
    d = DraftModel(lm or model(), num_blocks=num_blocks, **dict(block_size=4) | more)
    for cache in d.runner.executor.backend.k + d.runner.executor.backend.v: cache[1:] = float('nan')
    return d

def empty(d):
    d.check()
    assert not d.mirrors and d.blocks.num_free_blocks == d.blocks.num_blocks

def said(llm, *ask, **params):
    return [o.outputs[0].token_ids for o in llm.generate(*ask, use_tqdm=False, **params)]

# ---- the model itself

WISHES = dict(
    greedy=wish(temperature=0.), drawn=wish(), cut=wish(temperature=1.4, top_k=30, top_p=.9, min_p=.01),
    punished=wish(repetition_penalty=1.3, presence_penalty=.4, frequency_penalty=.7),
    greedy_punished=wish(temperature=0., repetition_penalty=1.5, frequency_penalty=1.),
    biased=wish(logit_bias={i: 3. for i in range(40)}, min_tokens=30, max_tokens=31, stop_token_ids=[*range(80)]),
    bad=wish(bad_words=[chr(i) for i in range(65, 90)] + ['ab', 'a b'], logit_bias={97: 4., 98: 4., 32: 4.}),
    allowed=wish(allowed_token_ids=[*range(0, 256, 3)], logprobs=2, prompt_logprobs=1))

@pytest.mark.parametrize('k', [1, 3, 8])
@pytest.mark.parametrize('name', WISHES)
def test_the_same_model_is_always_right(name, k):
    params, d = WISHES[name], make()
    llm = LLM(model(), guesses=d, max_guesses=k, **SMALL)
    out = llm.generate(prompts()[2:6], params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in out] == [alone('llama', i, params) for i in range(2, 6)]
    m = llm.metrics
    assert m['num_guessed_tokens'] == m['num_accepted_tokens'] > 0
    assert m['num_steps'] == 1 + cdiv(params.max_tokens - 1, k + 1)
    empty(d)

def disturbed(d, params, k=4, every=7):
    """Steps of an answer that a mask bends to token 7 at every seventh place: each guess before such a place must hold,
    and none beyond. After every other such place a step has no guesses"""
    class Now(Policy):
        def guess(self, s, r, most): return 0 if len(r.output_ids) % (2 * every) == every else most
    llm, lasts = LLM(model(), guesses=d, max_guesses=k, policy=Now(), **SMALL), []
    only = np.zeros(-(-model().vocab_size // 32), np.int32)
    only[0] = 1 << 7
    at = lambda r, draft=(): len(r.output_ids) + len(draft)
    llm.runner.sampler.mask = lambda w: only if at(w.request, w.draft) % every == every - 1 else None
    run = llm.execute
    def execute(plan):
        places = {s.request.request_id: (at(s.request), s.draft) for s in plan.scheduled}
        out = run(plan)
        for name, (n, draft) in places.items():
            if draft: lasts.append((n, len(draft), len(out.sampled[name]) - 1, draft, out.sampled[name]))
        return out
    llm.execute = execute
    tokens = said(llm, prompts()[2:6], params)
    assert all(t[i] == 7 for t in tokens for i in range(every - 1, len(t), every))
    return tokens, lasts

def right(lasts, every=7):
    "Did all guesses hold as far as they could?"
    for n, num, kept, draft, got in lasts:
        hurdle = every - 1 - n % every               # guesses before the next bend
        if kept != num and (kept != hurdle or draft[kept] == 7): return False
        assert list(draft[:kept]) == got[:kept]
    return bool(lasts)

@pytest.mark.parametrize('name', ['greedy', 'drawn', 'punished', 'greedy_punished', 'cut', 'bad'])
def test_right_again_after_each_mistake(name):
    "What did not hold is taken back: KV, tokens, what the sampler has counted"
    params, d = replace(WISHES[name], max_tokens=60), make()
    tokens, lasts = disturbed(d, params)
    assert right(lasts) and sum(num > kept for _, num, kept, _, _ in lasts) > 15
    assert tokens == disturbed(make(model(seed=3)), params)[0]
    empty(d)

def no_rollback(d, follow, r):
    m, n = d.mirrors.get(r), 0
    if m: n = m.num_computed_tokens
    m = follow(r)
    m.num_computed_tokens = max(m.num_computed_tokens, min(n, m.num_tokens - 1))
    return m

def still_counted(d, follow, r):
    if m := d.mirrors.get(r): old = m.output_ids
    got = follow(r)
    if m and got.output_ids is not old:
        old[:] = got.output_ids
        got.output_ids = old
    return got

def wrong_number(d, follow, r):
    m = follow(r)
    m.seed = r.seed + 1
    return m

def one_behind(d, follow, r):
    m = follow(r)
    m.num_computed_tokens = max(0, m.num_computed_tokens - 1)   # computes once more than it must: still right
    return m

@pytest.mark.parametrize('fault,name,shows', [(no_rollback, 'greedy', True), (wrong_number, 'drawn', True),
                                              (wrong_number, 'greedy', False), (still_counted, 'punished', True),
                                              (still_counted, 'drawn', False), (one_behind, 'drawn', False)])
def test_faults_show_in_what_holds_and_in_no_token(fault, name, shows):
    params = replace(WISHES[name], max_tokens=60)
    d = make()
    d._follow = functools.partial(fault, d, d._follow)
    tokens, lasts = disturbed(d, params)
    assert right(lasts) != shows
    assert tokens == disturbed(make(), params)[0]

# ---- whatever it says

def play(arch, lm, seed, ties):
    """A random life: short memory on both sides, both ways to preempt, forks, aborts, deadlines, an unwilling policy,
    a draft model that raises now and then"""
    rng = random.Random(f'{arch} {seed}')
    class Unwilling(Policy):
        def guess(self, s, r, most): return rng.randint(0, most) if rng.random() < .3 else most
    asks = [(rng.randrange(len(prompts())), wish(rng.randint(1, 40), rng.choice([0., 1.]), rng.randrange(3),
                n=rng.choice([1, 1, 3]), repetition_penalty=rng.choice([1., 1.4]))) for _ in range(rng.randint(4, 7))]
    longest = max(len(prompts()[p]) + w.max_tokens for p, w in asks)
    d = make(lm, rng.choice([10, 30, 60, 200]), block_size=rng.choice([3, 4, 16]),
             max_num_batched_tokens=rng.choice([16, 40, 512]))
    llm = LLM(model(arch), guesses=d, max_guesses=rng.choice([1, 3, 8]), guess_when='always', block_size=4, check=True,
              num_blocks=cdiv(longest, 4) + rng.choice([5, 60]), max_num_seqs=rng.choice([2, 5, 9]), policy=Unwilling(),
              preemption=rng.choice(['recompute', 'swap']), force_preempt=rng.choice([None, 7]),
              max_num_batched_tokens=rng.choice([9, 40, 300]))
    llm.now, fails, execute = 0., rng.choice([0, 0, .1]), d.runner.execute
    llm.clock = lambda: llm.now
    def breaks(plan):
        if rng.random() < fails: raise rng.choice([ArithmeticError, torch.OutOfMemoryError, KeyboardInterrupt])
        return execute(plan)
    d.runner.execute = breaks
    todo, done, cruel = [*enumerate(asks)], {}, rng.choice([0, .03])
    while todo or llm.has_unfinished:
        if todo and rng.random() < .5:
            i, (p, w) = todo.pop(0)
            late = dict(deadline=llm.now + rng.uniform(3, 20)) if rng.random() < cruel * 5 else {}
            llm.add(prompts()[p], w, request_id=str(i), **late)
        if llm.groups and rng.random() < cruel:
            name = rng.choice([*llm.groups])
            check(arch, asks[int(name)], [a.request.output_ids for a in llm.groups[name]], False, ties)
            llm.abort(name)
        try: outs = llm.step()
        except (ArithmeticError, KeyboardInterrupt): outs = llm.take()
        done |= {o.request_id: o for o in outs if o.finished}
        d.check()
        llm.now += 1.
    for i, o in done.items(): check(arch, asks[int(i)], [c.token_ids for c in o.outputs], not o.error, ties)
    assert llm.num_free_blocks == llm.num_blocks
    empty(d)
    m = llm.metrics
    return dict(guessed=m['num_guessed_tokens'], held=m['num_accepted_tokens'], preempted=m['num_preemptions'],
                done=len(done))

def check(arch, ask, tokens, whole, ties):
    "Answers are the oracle's, or their beginning, as far as rounding does not decide"
    for i, ours in enumerate(tokens):
        params = replace(ask[1], n=1)
        ref = alone(arch, ask[0], params, i)
        if not whole: ref = ref[:len(ours)]
        assert ours == ref or tied(arch, prompts()[ask[0]], params, i, ours, ref)
        ties[ours != ref] += 1

@torch.no_grad()
def tied(arch, prompt, params, index, ours, ref):
    "Where two answers part, may a little noise bring either token?"
    at, g = next(i for i, (a, b) in enumerate(zip(ours, ref)) if a != b), torch.Generator().manual_seed(0)
    x = model(arch).hf_model(input_ids=torch.tensor([prompt + ref[:at]])).logits[:, -1]
    state = lambda: SamplerState(params, prompt, ref[:at], params.seed, index)
    near = {sample(x + 1e-4 * torch.randn(x.shape, generator=g), [state()]).ids[0] for _ in range(30)}
    return {ours[at], ref[at]} <= near

@pytest.mark.parametrize('arch', ['llama', 'gpt2', 'gemma2'])
def test_random_lives(arch):
    logging.disable()
    others = dict(itself=model(arch), other=model('qwen3', 4), layers=first(model(), 2))
    runs, ties = Counter(), Counter()
    try:
        for name, lm in others.items():
            for seed in range(3):
                for what, n in play(arch, lm, f'{name} {seed}', ties).items(): runs[name, what] += n
    finally: logging.disable(logging.NOTSET)
    print(runs, ties)
    for name in others: assert runs[name, 'guessed'] > 60 and runs[name, 'preempted'] > 1 and runs[name, 'done'] > 8
    assert ties[True] <= .02 * ties[False]
    assert runs['itself', 'held'] >= .99 * runs['itself', 'guessed'] > 4 * runs['other', 'held']

# ---- memory and reading

@pytest.mark.parametrize('num_blocks', [1, 2, 5, 9, 14])
def test_short_memory_costs_guesses_only(num_blocks):
    d = make(num_blocks=num_blocks)
    llm = LLM(model(), guesses=d, **SMALL)
    assert said(llm, prompts()[2:6], wish()) == [alone('llama', i, wish()) for i in range(2, 6)]
    m = llm.metrics
    assert m['num_guessed_tokens'] == m['num_accepted_tokens'] and (m['num_guessed_tokens'] > 0) == (num_blocks > 1)
    empty(d)

def test_who_was_asked_about_longest_ago_gives_way():
    d, (a, b, c) = make(num_blocks=9), [request(f'r{i}', 10, [1, 2]) for i in range(3)]
    for r in a, b, a: assert len(d.propose([r], [1])[0].tokens) == 1
    assert len(d.propose([c], [4])[0].tokens) == 4
    have = {r.request_id: bool(m.block_table) for r, m in d.mirrors.items()}
    assert have == dict(r0=True, r1=False, r2=True)
    again = d.propose([b], [3])[0].tokens                      # it is read anew, and says what it would have said
    for r in a, b, c: d.forget(r); d.forget(r)
    assert again == d.propose([b], [3])[0].tokens
    d.forget(b)
    empty(d)

def request(name, prompt_len, output_ids=(), **more):
    return Request(name, [(7 * i) % 250 for i in range(prompt_len)], wish(99, **more), 99, output_ids=list(output_ids))

def test_a_prompt_is_read_in_chunks_beside_who_keeps_up():
    d = make(max_num_batched_tokens=16)
    short, long = request('short', 3, [1]), request('long', 40, [1])
    seen = []
    for _ in range(5):
        a, b = d.propose([long, short], [2, 2])
        seen.append((len(b.tokens), len(a.tokens), d.mirrors[long].num_computed_tokens))
        short.output_ids += b.tokens[:1]
    assert seen == [(2, 0, 12), (2, 0, 27), (2, 2, 42), (2, 2, 42), (2, 2, 42)]

def test_two_long_prompts_do_not_wait_for_each_other():
    "Neither takes blocks that would keep the other from ever being through"
    d, rs = make(num_blocks=14, max_num_batched_tokens=8), [request(f'r{i}', 40, [1]) for i in range(2)]
    told = [[len(g.tokens) for g in d.propose(rs, [1, 1])] for _ in range(14)]
    assert told[-1] == [1, 0]
    d.forget(rs[0])
    assert [d.propose(rs[1:], [1])[0].tokens != [] for _ in range(6)][-1]

def test_a_request_that_is_too_long_holds_nobody_up():
    d, (a, b) = make(num_blocks=6), [request(f'r{i}', 20, [1]) for i in range(2)]
    assert d.propose([a], [1])[0].tokens
    a.output_ids += [1] * 10                                   # now it needs more than there is
    assert [len(g.tokens) for g in d.propose([a, b], [2, 2])] == [0, 2]
    d.check()

def test_a_step_that_did_not_happen_changes_nothing():
    d, r = make(), request('r', 9, [1])
    once = d.propose([r], [5])[0].tokens
    assert [d.propose([r], [n])[0].tokens for n in (5, 2, 1, 5)] == [once, once[:2], once[:1], once]
    assert d.propose([r, request('s', 3, [1])], [0, 0]) == [([], 0), ([], 0)] and len(d.mirrors) == 1

def test_positions_of_its_own_end_its_guesses():
    d = make(first(model(max_position_embeddings=48), 3))      # the same weights, fewer positions
    llm, params = LLM(model(), guesses=d, max_guesses=4, **SMALL), wish(60)
    assert said(llm, [prompts()[5]], params) == [alone('llama', 5, params)]
    m = llm.metrics             # the last that it can read has place 47, and it says what has place 48
    assert m['num_guessed_tokens'] == m['num_accepted_tokens'] == 19 and m['num_steps'] == 60 - 19
    empty(d)

# ---- vocabularies, kinds, refusals

def test_other_vocabularies_are_refused_before_anything_starts():
    words = deepcopy(model())
    words.tokenizer = deepcopy(words.tokenizer)
    swapped = words.tokenizer.get_vocab()
    words.tokenizer.get_vocab = lambda: {t: 257 - i for t, i in swapped.items()}
    bare, wide = (replace(lm, tokenizer=None) for lm in (model(), model(vocab_size=300)))
    for lm, why in (words, 'of 258 tokens that both could have, 0 are the same'), (wide, 'is 300 wide, that of .* 258'):
        with pytest.raises(ParamError, match=f"can't guess for .*{why}.*family") as e: LLM(model(), guesses=make(lm))
        assert e.value.param == 'guesses'
    with pytest.raises(ParamError, match='300 wide'): LLM(bare, guesses=make(wide))
    LLM(model(), guesses=make(bare)); LLM(model(vocab_size=300), guesses=make())

@pytest.mark.parametrize('ours,theirs', [(300, 258), (258, 300)])
def test_heads_of_other_widths(ours, theirs):
    "Neither is told of a token that it has not"
    target, d = model(vocab_size=theirs), make(model(vocab_size=ours))
    llm, odd = LLM(target, guesses=d, **SMALL), [290] if theirs == 300 else [3]
    asks = [(p, wish(30, temperature=3., **w)) for p, w in zip(prompts()[2:7], (
        {}, dict(logit_bias={odd[0]: 2.}), dict(stop_token_ids=odd, min_tokens=30),
        dict(allowed_token_ids=odd + [5, 6]), dict(repetition_penalty=1.2)))] + [(odd + prompts()[2], wish(30))]
    for p, w in asks: llm.add(p, w)
    done = {}
    while llm.has_unfinished: done |= {o.request_id: o.outputs[0].token_ids for o in llm.step() if o.finished}
    assert [*map(done.get, (f'r{i}' for i in range(6)))] == [generate_ref(target, p, w).token_ids for p, w in asks]
    assert llm.metrics['num_guessed_tokens'] > 10
    empty(d)

def test_what_it_may_be_made_of(tmp_path):
    lm = model()
    lm.save(tmp_path)
    for given, more in ((lm, {}), (lm.hf_model, {}), (str(tmp_path), {}), (tmp_path, {}), (lm, dict(kv_cache_mb=1.))):
        d = DraftModel(given, **more)
        assert (d.model.dtype, d.model.device.type) == (torch.float32, 'cpu')
        assert said(LLM(lm, guesses=d, **SMALL), prompts()[:3], wish()) == [alone('llama', i, wish()) for i in range(3)]
    half = DraftModel(lm, dtype='bfloat16', num_blocks=50)
    llm = LLM(lm, guesses=half, **SMALL)
    assert said(llm, prompts()[:3], wish()) == [alone('llama', i, wish()) for i in range(3)]
    assert half.model.dtype == torch.bfloat16 and llm.metrics['num_accepted_tokens'] > 10
    for more, why in ((dict(num_blocks=4, kv_cache_mb=1.), 'give one of them'), (dict(num_blocks=0), 'num_blocks=0'),
                      (dict(kv_cache_mb=1e-3), 'holds no block'), (dict(device='nowhere'), 'not available'),
                      (dict(max_num_batched_tokens=0), 'max_num_batched_tokens=0')):
        with pytest.raises(ValueError, match=why): DraftModel(lm, **more)
    with pytest.raises(ValueError, match='no such folder'): DraftModel('./nowhere')
    with pytest.raises(ValueError, match='must be a name'): DraftModel(3)

# ---- accidents and company

def test_what_it_raises_is_raised_by_step_and_nobody_is_lost():
    d = make()
    llm, execute, num = LLM(model(), guesses=d, max_guesses=4, **SMALL), d.runner.execute, [0]
    def breaks(plan):
        num[0] += 1
        if num[0] in (1, 4, 6): raise ZeroDivisionError('on purpose')
        return execute(plan)
    d.runner.execute = breaks
    for p in prompts()[2:5]: llm.add(p, wish())
    done, raised = {}, 0
    while llm.has_unfinished:
        try: done |= {o.request_id: o.outputs[0].token_ids for o in llm.step() if o.finished}
        except ZeroDivisionError: raised += 1
        llm.check(); d.check()
    assert raised == 3 and [done[f'r{i}'] for i in range(3)] == [alone('llama', i, wish()) for i in (2, 3, 4)]
    assert llm.metrics['num_guessed_tokens'] == llm.metrics['num_accepted_tokens'] > 30
    empty(d)

def test_no_memory_on_the_device_means_fewer_guesses(caplog):
    d = make()
    llm, execute = LLM(model(), guesses=d, max_guesses=4, **SMALL), d.runner.execute
    def breaks(plan):
        if llm.scheduler.num_steps % 3 == 2 and plan.num_tokens == 3: raise torch.OutOfMemoryError('on purpose')
        return execute(plan)
    d.runner.execute = breaks
    assert said(llm, prompts()[2:5], wish()) == [alone('llama', i, wish()) for i in (2, 3, 4)]
    assert llm.metrics['num_guessed_tokens'] == llm.metrics['num_accepted_tokens'] > 20
    assert 'fewer guesses' in caplog.text
    empty(d)

def test_a_row_that_is_no_number_gives_no_guess():
    lm = deepcopy(model())
    lm.hf_model.get_output_embeddings().weight.data.fill_(float('nan'))
    llm = LLM(model(), guesses=make(lm), **SMALL)
    assert said(llm, prompts()[2:5], wish()) == [alone('llama', i, wish()) for i in (2, 3, 4)]
    assert llm.metrics['num_guessed_tokens'] == 0

def test_two_engines_share_one():
    "Requests of one name in both, asked about in turns, then from two threads"
    d, want = make(num_blocks=60), [alone('llama', i, wish()) for i in range(2, 6)]
    a, b = (LLM(model(), guesses=d, **SMALL) for _ in 'ab')
    done = {}
    for llm in a, b:
        for p in prompts()[2:6]: llm.add(p, wish())
    while a.has_unfinished or b.has_unfinished:
        for llm in a, b: done |= {(llm is a, o.request_id): o for o in llm.take() or llm.step() if o.finished} \
            if llm.has_unfinished else {}
    for who in True, False: assert [done[who, f'r{i}'].outputs[0].token_ids for i in range(4)] == want
    got = {}
    threads = [threading.Thread(target=lambda llm=llm: got.setdefault(llm is a, said(llm, prompts()[2:6], wish())))
               for llm in (a, b)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert got == {True: want, False: want}
    assert all(x.metrics['num_guessed_tokens'] == x.metrics['num_accepted_tokens'] > 0 for x in (a, b))
    empty(d)

def test_an_engine_that_is_closed_leaves_it_to_the_next():
    d = make()
    with LLM(model(), guesses=d, **SMALL) as llm:
        for p in prompts(): llm.add(p, wish(60))
        for _ in range(4): llm.step()
        assert d.mirrors
    empty(d)
    assert said(LLM(model(), guesses=d, **SMALL), prompts()[2:4], wish()) == [alone('llama', i, wish()) for i in (2, 3)]

def test_new_weights_change_what_holds_and_not_what_is_said():
    lm, other = deepcopy(model()), model(seed=9)
    d = make()
    llm = LLM(lm, guesses=d, **SMALL)
    said(llm, prompts()[2:5], wish())
    held = llm.metrics['num_accepted_tokens']
    llm.reload_weights(other.hf_model.state_dict())
    assert said(llm, prompts()[2:5], wish()) == said(LLM(other), prompts()[2:5], wish())
    assert held > 40 > llm.metrics['num_accepted_tokens'] - held

@pytest.mark.parametrize('seed,each,most', [(9, .1, 60), (0, 2., 60), (0, .05, 999)])
def test_the_rule_asks_only_for_what_pays(seed, each, most):
    "A step takes a second, a pass of the draft model what it says; prior and learning must tell these three apart"
    d, now = make(model(seed=seed), num_blocks=200), [0.]
    llm = LLM(model(), guesses=d, max_guesses=4, **SMALL | dict(guess_when='pays'))
    def slow(f, seconds):
        def g(*args):
            now[0] += seconds
            return f(*args)
        return g
    d.runner.execute, llm.execute = slow(d.runner.execute, each), slow(llm.execute, 1.)
    d.clock = llm.clock = lambda: now[0]
    said(llm, prompts()[2:5], wish(150, temperature=0.))
    guessed = llm.metrics['num_guessed_tokens']
    assert guessed < most and now[0] < 165 and (most < 999 or guessed > 300 and now[0] < 60)
