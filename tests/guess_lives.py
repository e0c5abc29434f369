"""Random lives of engines that guess, beside the same requests answered without a guess: equal to the last bit.

The model runs in C++, where a row's bits do not depend on its company, or in torch, where a tie may part two runs.
INVARIANTS.md says what G1, G2 and the others are."""
import functools, random, signal
from collections import Counter
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch
import numpy as np, torch
from cbatch import LLM, SamplingParams
from cbatch.core import Status
from cbatch.draft_model import DraftModel
from cbatch.model import tiny_lm
from cbatch.params import cdiv
from cbatch.policies import Dynamic, Fair, Static
from cbatch.sampler import FAST, sample
from cbatch.sampling import SamplerState, uniform
from cbatch.scheduler import Policy
from guessers import KINDS
from harness import follows, quiet

ARCHS = 'llama', 'qwen3', 'mistral'
EVERY = *KINDS, 'draft'
NUM_ASKS = 80
V = 258

@functools.cache
def model(arch):
    "Tiny, with ends of sequence that it likes to say"
    return tiny_lm(arch, num_hidden_layers=2, eos_token_id=[145, 21, 245])

@functools.cache
def stranger():
    "Another small model of the same tokens"
    return tiny_lm('llama', 1, num_hidden_layers=1)

# --- what is asked for, and what comes without guesses

def choices(rng):
    "How to choose tokens"
    kw = dict(temperature=0.)
    if rng.random() < .6:
        cut = rng.choice([{}, {}, dict(top_k=20), dict(top_p=.8), dict(min_p=.1), dict(top_k=9, top_p=.9, min_p=.02)])
        kw = dict(temperature=rng.choice([.2, .7, 1., 1.5]), seed=rng.randint(-9, 99), **cut)
    for name, x in dict(repetition_penalty=1.3, presence_penalty=.7, frequency_penalty=-.4).items():
        if rng.random() < .15: kw[name] = x
    if rng.random() < .2: kw['logit_bias'] = {rng.randrange(V): rng.choice([-20., 2., 9.]) for _ in range(6)}
    if rng.random() < .2: kw['allowed_token_ids'] = rng.sample(range(V), rng.choice([2, 5, 40]))  # says things again
    if rng.random() < .4: kw['logprobs'] = rng.randint(0, 4)
    if rng.random() < .15: kw['prompt_logprobs'] = rng.randint(0, 2)
    return kw | dict(n=rng.choice([1, 1, 1, 2, 3]))

def ends(rng, kw, ref):
    "And how to end, somewhere in what a run without an end says"
    c = rng.choice(ref.outputs)
    letters = [x for x in c.text if x != '\ufffd']
    kw |= dict(max_tokens=rng.randint(1, 30), ignore_eos=rng.random() < .6)
    if rng.random() < .25: kw['stop_token_ids'] = [rng.choice(c.token_ids), *rng.sample(range(V), 2)]
    if rng.random() < .3 and letters:
        at = rng.randrange(len(letters))
        kw['stop'] = [''.join(letters[at:at + rng.choice([1, 1, 2])]), 'never said']
        kw['include_stop_str_in_output'] = rng.random() < .3
    if rng.random() < .2: kw['min_tokens'] = rng.randint(1, kw['max_tokens'])
    if rng.random() < .15 and letters: kw['bad_words'] = [''.join(rng.choices(letters, k=rng.choice([1, 2, 2])))]
    return kw

def plain(arch, backend, asks):
    "The answers of an engine that does not guess"
    own = dict(block_size=16, max_num_seqs=64, prefix_caching=False, trace=False)
    with LLM(model(arch), backend=backend, num_blocks=900, **own) as llm:
        return llm.generate([p for p, _ in asks], [SamplingParams(**kw) for _, kw in asks], use_tqdm=False)

@functools.cache
def asked(arch, backend='cpu'):
    "Prompts, wishes, and the answers to them"
    rng = random.Random(ARCHS.index(arch))
    start = [rng.randrange(256) for _ in range(40)]                 # beginnings that many have in common
    asks = []
    for _ in range(NUM_ASKS):
        own = [rng.randrange(256) for _ in range(rng.randint(1, 12))]
        prompt = start[:rng.choice([0, 0, 3, 16, 33, 40])] + own * rng.choice([1, 1, 3])
        asks.append((prompt, choices(rng)))
    free = plain(arch, backend, [(p, kw | dict(max_tokens=30, ignore_eos=True)) for p, kw in asks])
    asks = [(p, ends(rng, dict(kw), ref)) for (p, kw), ref in zip(asks, free)]
    refs = plain(arch, backend, asks)
    assert not any(o.error for o in refs)
    return [SimpleNamespace(prompt=p, params=SamplingParams(**kw), ref=o) for (p, kw), o in zip(asks, refs)]

# --- an engine, drawn

class Shy(Policy):
    "Lets only some guess, and of them not all that they could"
    def guess(self, s, r, most=99): return min(most, r.seq % 3)

POLICIES = dict(vllm=lambda: 'vllm', static=Static, bare=lambda: Static(False), dynamic=lambda: Dynamic(.03),
                fair=Fair, shy=Shy)

class Drawn:
    "A few requests, and an engine that guesses"
    def __init__(self, seed, kind=None, backend=None, **config):
        rng = self.rng = random.Random(seed)
        self.arch, self.kind = ARCHS[seed % 3], kind or rng.choice(EVERY)
        self.backend, self.seen = backend or rng.choice(['cpu', 'cpu', 'torch']), Counter()
        self.mine, self.text, self.ended, self.requests = {}, {}, {}, {}
        self.failed, self.wrong, self.cruel = False, None, rng.random() < .4
        todo = rng.sample(asked(self.arch), rng.randint(2, 7))
        self.todo = [(f'q{i}', a) for i, a in enumerate(todo)]
        self.llm = self.engine(max(len(a.prompt) + a.params.max_tokens for _, a in self.todo), config)

    def engine(self, longest, config):
        "With room for one of them, or for many; its clock moves by hand"
        rng, bs = self.rng, 16 if self.backend == 'cpu' else self.rng.choice([4, 5, 8])
        need, policy = cdiv(longest, bs), rng.choice(['vllm'] * 4 + list(POLICIES))
        guesser = make(self.kind, self.arch, self.answer, rng)
        own = dict(block_size=bs, num_blocks=need + rng.choice([0, 1, 2, need, 9 * need]), policy=POLICIES[policy](),
                   preemption=rng.choice(['recompute', 'swap']), prefix_caching=rng.random() < .6,
                   max_num_seqs=rng.choice([1, 2, 3, 4, 8]), max_num_batched_tokens=rng.choice([8, 9, 16, 33, 64, 512]),
                   watermark=rng.choice([0., .01, .2]), reserve_max=rng.random() < .05,
                   force_preempt=rng.choice([None, None, None, 3, 7]), max_guesses=rng.choice([1, 2, 4, 8, 17]),
                   guess_when=rng.choice(['always', 'always', 'pays']), guesses=guesser, check=True)
        llm = LLM(model(self.arch), backend=self.backend, **own | config)
        for cache in llm.runner.executor.backend.k + llm.runner.executor.backend.v: cache[1:] = float('nan')
        llm.now, forward, self.due = 0., llm.runner.executor.forward, None
        def clock(): llm.now += .001; return llm.now
        def trouble(batch):
            e, self.due = self.due, None
            if e: raise e
            return forward(batch)
        llm.clock, llm.runner.executor.forward = clock, trouble
        start = llm.runner.start
        def watched(plan, *args):
            try: self.planned(plan)
            except AssertionError as e: self.wrong = e               # the engine would take it for a failed step
            return start(plan, *args)
        llm.runner.start = watched
        return llm

    def planned(self, plan):
        "What a plan with guesses must keep to"
        c, s, most = self.llm.config, self.llm.scheduler, self.llm.config.max_guesses
        assert plan.num_tokens + plan.num_padding <= c.max_num_batched_tokens                         # S3
        for x in plan.scheduled:
            r, n = x.request, len(x.draft)
            assert n <= min(most, s.policy.guess(s, r, most))           # G4
            assert not n or x.stop - x.start == 1 and len(r.output_ids) + n < r.max_tokens
            assert len(r.block_table) * c.block_size >= x.stop + n                                    # S2

    def answer(self, r): return self.mine[r.group].ref.outputs[r.sample_index].token_ids

def make(kind, arch, answer, rng):
    "A guesser; a draft model is the model itself, or another"
    if kind != 'draft': return KINDS[kind](answer, V, seed=rng.randrange(99))
    return DraftModel(model(arch) if rng.random() < .6 else stranger(), num_blocks=rng.choice([1, 3, 9, 40]),
                      max_num_batched_tokens=rng.choice([7, 30, 512]))

# --- a life

class Alarm(Exception): "Thrown by a signal handler, anywhere in a step"

@contextmanager
def alarm(after_s):
    "A signal in the middle of what is done here, or behind it"
    def ring(*args): raise Alarm
    old = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, after_s)
        try: yield
        finally: signal.setitimer(signal.ITIMER_REAL, 0)
    finally: signal.signal(signal.SIGALRM, old)

class Life(Drawn):
    "What happens to them, and what must hold after each step"
    def add(self, name, a):
        "Ask; now and then with a salt, a deadline, what the answer will be or might be"
        rng, llm, said = self.rng, self.llm, list(a.ref.outputs[0].token_ids)
        if said and rng.random() < .5: said[rng.randrange(len(said))] = rng.randrange(V)
        self.mine[name] = a
        llm.add(a.prompt, a.params, name, cache_salt=rng.choice([None, None, 'x']), use_cache=rng.random() < .9,
                user=rng.choice('abb'), deadline=llm.now + rng.uniform(.01, .2) if rng.random() < .08 else None,
                prediction=rng.choice([None, None, said]))
        self.requests[name] = [x.request for x in llm.groups[name]]
        for i in range(a.params.n): self.text[name, i] = ''

    def step(self):
        "One step; in a cruel life it may raise, run out of memory or be interrupted"
        llm, x = self.llm, self.rng.random() if self.cruel else 1.
        if x < .12: self.due = (RuntimeError('odd') if x < .02 else KeyboardInterrupt() if x < .05 else
                                torch.OutOfMemoryError('no room'))
        try:
            if not .12 < x < .18: return llm.step()
            with alarm(self.rng.uniform(1e-5, 3e-3)): llm.turn()
        except (KeyboardInterrupt, Alarm) as e: self.seen[type(e).__name__] += 1
        finally: self.failed, self.due = self.failed or x < .12, None
        return llm.take()

    def told(self, outs):
        for o in outs:
            assert o.request_id not in self.ended                                                     # O3
            for c in o.outputs:
                self.text[o.request_id, c.index] += c.delta
                assert c.text == self.text[o.request_id, c.index]                                     # O5
            if o.finished: self.ended[o.request_id] = o

    def run(self):
        "Until everybody has left; what happened, counted"
        rng, llm, idle = self.rng, self.llm, 0
        with patch('logging.Logger.exception'), patch('logging.Logger.warning'), self.sampler():
            while self.todo or llm.has_unfinished:
                while self.todo and (not llm.has_unfinished or rng.random() < .5): self.add(*self.todo.pop(0))
                if llm.groups and rng.random() < .02:
                    name = rng.choice(list(llm.groups))
                    assert llm.abort(name)
                    self.ended[name] = None
                steps = llm.scheduler.num_steps
                self.told(self.step())
                if llm.scheduler.next_wakeup: llm.now += .005
                idle = 0 if llm.scheduler.num_steps > steps else idle + 1
                assert idle < 40, 'never ends'
                self.look()
        quiet(llm)
        self.books()
        for name, o in self.ended.items(): self.check(name, o)
        return self.seen

    def sampler(self):
        "In C++; in torch for half of those whose model runs in torch"
        slow = self.backend == 'torch' and self.llm.config.max_num_seqs % 2
        return patch.dict(FAST.__dict__, lib=None) if slow else nullcontext()

    def look(self):
        "Between two steps"
        llm, s, m = self.llm, self.llm.scheduler, self.llm.metrics
        if self.wrong: raise self.wrong
        llm.check()                                                                                   # A1 A2 A3 S1
        follows(llm)
        reserves = llm.config.reserve_max or isinstance(s.policy, Static)
        for r in s.running:                                                                           # S2 G2
            need = r.num_tokens if self.failed else r.num_computed_tokens
            if reserves: need = len(r.prompt_ids) + r.max_tokens
            assert len(r.block_table) <= cdiv(need, llm.config.block_size), f'{r.request_id} holds more than it needs'
        everybody = [r for rs in self.requests.values() for r in rs]
        assert m['num_sampled_tokens'] == sum(len(r.output_ids) for r in everybody)                   # G5
        assert m['num_sampling'] + m['num_prefilling'] + m['num_idle'] == m['num_slot_steps']
        assert m['num_guessed_tokens'] == sum(r.num_guessed for r in everybody)
        assert sum(m['accepted_at']) == m['num_accepted_tokens'] == sum(r.num_accepted for r in everybody)
        assert all(0 <= r.num_accepted <= r.num_guessed for r in everybody)
        assert m['accepted_at'] == sorted(m['accepted_at'], reverse=True)

    def books(self):
        "The trace tells the same, and its steps add up to what everybody has"
        llm, m = self.llm, self.llm.metrics
        if (g := getattr(llm.scheduler.guesses.guesser, 'ended', None)) is not None:
            assert set(g) == {r for rs in self.requests.values() for r in rs}, 'somebody is not forgotten'   # G6
        if isinstance(g := llm.scheduler.guesses.guesser, DraftModel):
            g.check()
            assert not g.mirrors and g.blocks.num_free_blocks == g.blocks.num_blocks                  # G6
        told = [g for rec in llm.trace for g in rec.guessed.values()]
        assert sum(n for n, _, _ in told) == m['num_guessed_tokens']
        assert sum(k for _, k, _ in told) == m['num_accepted_tokens']
        assert sum(n for rec in llm.trace for *_, n in rec.scheduled) == m['num_sampled_tokens']
        for rec in self.rng.sample(llm.trace.records, min(3, len(llm.trace))):
            assert llm.trace.state(rec.step).num_free_blocks == llm.trace[rec.step].num_free_blocks
        self.seen.update(guessed=m['num_guessed_tokens'], accepted=m['num_accepted_tokens'], steps=m['num_steps'],
                         preempted=m['num_preemptions'], cached=m['num_cached_tokens'],
                         returned=sum(b for _, _, b in told), swapped=m['num_swapped_blocks'],
                         forked=sum(len(rs) - 1 for rs in self.requests.values()))
        self.seen.update([self.kind, self.arch, self.backend, llm.scheduler.policy.name])

    # --- what came of it

    def check(self, name, o):
        "A whole answer is the one without guesses; one that was cut off is its beginning"
        a, rs = self.mine[name], self.requests[name]
        for r, ref in zip(rs, a.ref.outputs):
            whole = r.finish_reason in ('stop', 'length')
            own = ref.token_ids if whole else ref.token_ids[:len(r.output_ids)]
            if r.output_ids != own:
                assert self.backend == 'torch' and parted(model(self.arch), r, ref.token_ids), \
                    f'{r.request_id}: {r.output_ids} is not {own}'                                    # G1
                self.seen['ties'] += 1
                continue
            self.seen[f'by {r.finish_reason}'] += 1
            if whole: assert (r.finish_reason, r.stop_reason) == (ref.finish_reason, ref.stop_reason)
            if o: self.scores(o.outputs[r.sample_index], ref, whole)
        if o and self.backend == 'cpu' and not o.error: assert o.prompt_logprobs == a.ref.prompt_logprobs
        if o: assert o.metrics.num_accepted_tokens == sum(r.num_accepted for r in rs)

    def scores(self, c, ref, whole):
        "Text, log probabilities, their values and their order"
        if whole: assert c.text == ref.text
        assert (c.logprobs is None) == (ref.logprobs is None)
        if c.logprobs is None: return
        ours, theirs = ([list(d.items()) for d in x.logprobs] for x in (c, ref))
        assert len(ours) == len(c.token_ids)
        if self.backend == 'torch':
            for x, y in zip(ours, theirs):
                assert x[0][0] == y[0][0] and abs(x[0][1].logprob - y[0][1].logprob) < 1e-3
            return
        assert ours == theirs[:len(ours)]                                                             # G1
        if whole: assert c.cumulative_logprob == ref.cumulative_logprob

@torch.no_grad()
def parted(lm, r, ref):
    "May rounding part an answer from `ref`? Then another rounding gives its token there"
    ours, at = r.output_ids, next((i for i, (a, b) in enumerate(zip(r.output_ids, ref)) if a != b), None)
    if at is None: return False
    x = lm.hf_model(input_ids=torch.tensor([r.prompt_ids + ref[:at]])).logits[:, -1]
    noise, found = torch.Generator().manual_seed(0), set()
    state = SamplerState(r.params, r.prompt_ids, ref[:at], r.seed, r.sample_index, r.stop_ids | lm.eos_ids, r.bad_words)
    for i in range(60):
        moved = lambda *key: np.clip(uniform(*key) + (i % 3 - 1) * 1e-4, 0, 1 - 1e-9)
        with patch('cbatch.drawing.uniform', moved), patch.object(FAST, 'lib', None):
            found.update(sample(x + 1e-4 * torch.randn(x.shape, generator=noise), [state]).ids)
    return ours[at] in found
