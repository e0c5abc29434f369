"""Faults to plant into an engine that guesses; each is a function that does it with `put(owner, name, new)`, and says
by which of the tests of `test_guess_lives.py` it is found"""
from dataclasses import replace
import cbatch.sampler
from cbatch.core import Status
from cbatch.guesses import Guesses
from cbatch.prefix_caching import PrefixBlocks
from cbatch.reports import Answer
from cbatch.roster import Roster
from cbatch.runner import Sampler
from cbatch.sampling import SamplerState
from cbatch.scheduler import Scheduler
from test_mutations import rewritten

FAULTS = {}
def fault(*by):
    def add(f): FAULTS[f.__name__] = f, by; return f
    return add

@fault('lives')
def one_too_many_accepted(put):
    old = Sampler._choose
    def choose(self, want, got, out):
        old(self, want, got, out)
        for r in {w.request: 0 for w in want if w.draft}:
            tokens = [t for w, t in zip(want, got.ids) if w.request is r]
            said = out.sampled.get(r.request_id, ())
            if 0 < len(said) < len(tokens) and said[-1] not in r.stop_ids: said.append(tokens[len(said)])
    put(Sampler, '_choose', choose)

@fault('lives', 'worlds')
def rollback_forgotten(put):
    old = Scheduler.update
    def update(self, plan, out, *args):
        "As if all guesses had held"
        held = lambda x: max(0, len(out.sampled.get(x.request.request_id, ())) - 1)
        shares = [x._replace(stop=x.stop + len(x.draft) - held(x)) for x in plan.scheduled]
        return old(self, replace(plan, scheduled=shares), out, *args)
    put(Scheduler, 'update', update)

def kept(r, tokens, now):
    r.output_ids += tokens[:-1]; r.token_times += [now] * (len(tokens) - 1)
    return tokens[-1:]

@fault('oracle')
def what_held_is_computed_again(put):
    put(Scheduler, '_guessed', lambda self, r, tokens, stop, now: (kept(r, tokens, now), stop))

@fault('worlds')
def rejected_tokens_named(put):
    old = Scheduler.update
    def update(self, plan, out, *args):
        for x in plan.scheduled:
            r = x.request
            if not x.draft or r.status is not Status.RUNNING: continue
            n, computed = len(r.output_ids), r.num_computed_tokens
            r.output_ids += x.draft; r.num_computed_tokens = x.stop + len(x.draft)
            self.blocks.commit(r)
            del r.output_ids[n:]; r.num_computed_tokens = computed
        return old(self, plan, out, *args)
    put(Scheduler, 'update', update)

def ahead_with(put, what):
    "After `ahead`, spoil the state"
    old = SamplerState.ahead
    def ahead(self, draft=(), mask=None):
        s = old(self, draft, mask)
        what(self, s, len(draft))
        return s
    put(SamplerState, 'ahead', ahead)

def row_with(put, what):
    "After `row_of`, spoil the record of a state that is ahead by `back` tokens"
    ahead_with(put, lambda old, s, n: setattr(s, 'back', n))
    old = cbatch.sampler.row_of
    def row_of(s):
        r = old(s)
        if n := getattr(s, 'back', 0): what(s, r, n)
        return r
    put(cbatch.sampler, 'row_of', row_of)

@fault('lives', 'draws')
def number_of_another_position(put):
    def spoil(s, r, n): r.position -= n
    row_with(put, spoil)

@fault('lives')
def penalty_without_the_guesses(put): ahead_with(put, lambda old, s, n: setattr(s, 'read', old.read + n))

@fault('lives')
def bad_words_without_the_guesses(put):
    old = SamplerState.completed
    def before(self):
        whole, self.output_ids = self.output_ids, self.output_ids[:len(self.output_ids) - getattr(self, 'back', 0)]
        try: return old(self)
        finally: self.output_ids = whole
    row_with(put, lambda s, r, n: None)
    put(SamplerState, 'completed', before)

@fault('lives')
def min_tokens_without_the_guesses(put):
    def spoil(s, r, n): r.num_stops = len(s.stops) if r.position - n < s.params.min_tokens else 0
    row_with(put, spoil)

@fault('lives', 'worlds')
def lent_blocks_kept(put): put(Roster, 'settle', lambda self, plan: None)

@fault('lives')
def stop_id_among_the_guesses_overlooked(put):
    put(Sampler, '_choose', rewritten(Sampler._choose, ' or token in w.request.stop_ids', ''))

@fault('lives')
def answer_goes_on_behind_a_stop_id(put):
    stop_id_among_the_guesses_overlooked(put)
    put(Scheduler, '_guessed', rewritten(Scheduler._guessed, 'token in r.stop_ids or ', ''))

@fault('lives')
def scores_of_rejected_rows_kept(put):
    old = Sampler._choose
    def choose(self, want, got, out):
        old(self, want, got, out)
        for name in out.logprobs:
            out.logprobs[name] = [got.logprobs[i] for i, w in enumerate(want)
                                  if w.request.request_id == name and i in got.logprobs]
    put(Sampler, '_choose', choose)
    put(Answer, 'keep', rewritten(Answer.keep, '[:len(r.output_ids) - len(self.logprobs)]', ''))

@fault('twins')
def named_block_taken_for_an_unlikely_guess(put):
    put(Guesses, '_room', rewritten(Guesses._room, 'odds[first] <= .5', 'False'))

@fault('worlds')
def budget_overdrawn(put):
    put(Guesses, '_worth', rewritten(Guesses._worth, '[:plan.left - plan.num_padding]', ''))

@fault('twins')
def budget_of_the_padding_taken(put):
    "Guesses are added before the policy pads"
    add = 'if self.guesses: self.guesses.add(self, plan)'
    f = rewritten(Scheduler._conclude, add, 'pass')
    put(Scheduler, '_conclude', f)
    def first(policy):
        "The policy's own padding, asked once the guesses have taken theirs"
        real = policy.padding
        def pad(s, plan):
            if s.guesses: s.guesses.add(s, plan)
            return real(s, plan)
        return pad
    make = Scheduler.__init__
    def init(self, *args):
        make(self, *args)
        self.policy.padding = first(self.policy)
    put(Scheduler, '__init__', init)

@fault('lives')
def last_token_guessed(put):
    put(Guesses, '_most', rewritten(Guesses._most, 'r.max_tokens - len(r.output_ids) - 1',
                                    'r.max_tokens - len(r.output_ids)'))

@fault('lives')
def veto_overruled(put): put(Guesses, '_most', rewritten(Guesses._most, 's.policy.guess(s, r, n) if n > 0 else 0', 'n'))

@fault('lives')
def text_ends_and_tokens_go_on(put): put(Answer, 'cut', lambda self, n: 0)

@fault('lives')
def ended_requests_remembered(put): put(Guesses, 'forget', lambda self, r: None)
