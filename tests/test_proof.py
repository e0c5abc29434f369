"The proof of a policy: good ones pass, bad ones are told what they broke, and a seed brings it back"
import pytest
from cbatch.catalog import POLICIES
from cbatch.core import Status
from cbatch.params import ParamError
from cbatch.preemption import Swap
from cbatch.prefix_caching import PrefixBlocks
from cbatch.proof import STREAMS, Life, PolicyError, against_oracle, check_policy, one_life, starved
from cbatch.queues import MLFQ, Priority
from cbatch.roster import Roster
from cbatch.scheduler import Policy, Scheduler
from test_policies import (Closed, Deaf, Generous, Halves, Listed, Nobody, Padded, Restless, Sometime, TakeTurns,
                           WholePrompts)

def quiet(text): pass

@pytest.mark.parametrize('name', POLICIES)
def test_those_of_the_catalog_pass(name):
    said = []
    proof = check_policy(name, lives=12, engine=False, say=said.append)
    assert proof.met['preempted'] + proof.met['swapped'] > 0 or name in ('static', 'dynamic')
    assert proof.met['requests'] > 100 and said == [str(proof)] and proof.policy == name
    assert set(proof.starves) == dict(sjf={'shorter'}, fair={'more urgent'}, vtc={'more urgent'}).get(name, set())

@pytest.mark.parametrize('make', [TakeTurns, WholePrompts, lambda: Restless(3), lambda: MLFQ(quantum=3, patience=4)])
def test_those_of_strangers_pass(make):
    proof = check_policy(make, lives=12, engine=False, say=quiet)
    assert proof.met['paused'] > 0 or make is WholePrompts and proof.met['refused'] > 0

@pytest.mark.parametrize('name', ['vllm', 'mlfq', 'dynamic'])
def test_on_a_model(name):
    assert check_policy(name, lives=0, seed=5, say=quiet).answers == 24

# --- policies that are wrong

class Idle(Policy):
    "Never lets in who asks for much"
    def turns(self, s, plan):
        yield from s.line_of_running()
        for r in list(s.waiting):
            if r.max_tokens < 6: yield r

class Bully(Policy):
    "Lets long ones read a token, and throws them out for it: something happens at every step, and never an end"
    def chunk(self, s, r, wanted, left): return min(1 if r.max_tokens > 6 else wanted, left)
    def turns(self, s, plan):
        for r in s.line_of_running():
            if r.max_tokens > 6 and r.num_left > 1: s.preempt(r, plan, 'too long')
            else: yield r
        yield from s.line_of_waiting()

class Thief(Policy):
    "Takes the memory of one who runs"
    def on_update(self, s, plan, out):
        if s.running: s.blocks.release(s.running[0])

class Liar(Policy):
    "Puts words into somebody's mouth"
    def on_update(self, s, plan, out):
        for r in s.running: r.output_ids[-1:] = [5] * bool(r.output_ids)

class Forgetful(Policy):
    "Throws out who stands last in line"
    def turns(self, s, plan):
        yield from super().turns(s, plan)
        if len(s.waiting) > 3: s.waiting.remove(max(s.waiting, key=lambda r: r.age))

class Muddled(Policy):
    "Keys that don't compare"
    def key(self, r): return r.age if r.user else 'nobody'

class Falls(Policy):
    def turns(self, s, plan):
        if len(s.running) > 2: raise KeyError('three')
        yield from super().turns(s, plan)

class Late(Policy):
    "Waits for company, and forgets to say until when"
    def close(self, s, now): return None if len(s.waiting) > 1 or s.running else 'alone'

class Double(Policy):
    "Computes more than it was told, by hand"
    def turns(self, s, plan):
        yield from super().turns(s, plan)
        plan.scheduled += plan.scheduled[:1]

class Nobodys(Policy):
    "Has room for nobody"
    def refuses(self, s, r): return 'full'

class Panics(Policy):
    "As a library in Rust does: past every `except Exception`"
    class Panic(BaseException): pass
    def chunk(self, s, r, wanted, left): raise self.Panic('in the library')

BAD = {Nobodys: 'refuses everybody', Panics: 'Panic: in the library', Deaf: 'again and again',
       Nobody: 'not a request', Listed: 'not a generator', Halves: 'whole number',
       Closed: 'not a reason', Generous: 'at most', Padded: 'over the budget', Sometime: 'wakeup gave nan',
       Idle: 'nothing runs', Bully: 'starved', Thief: '', Liar: 'told twice, or lost', Forgetful: '',
       Muddled: 'TypeError', Falls: 'KeyError', Late: 'nothing runs', Double: 'are allowed'}

@pytest.mark.parametrize('bad', BAD)
def test_what_is_wrong_is_found_and_comes_back(bad):
    with pytest.raises(PolicyError) as e: check_policy(bad, engine=False, say=quiet)
    found = e.value
    assert BAD[bad] in found.what and found.policy == bad.__name__
    assert f'seed {found.seed}, step {found.step}' in str(found)
    assert len(str(found).splitlines()) <= 7 and f'lives=1, seed={found.seed}' in str(found)
    with pytest.raises(PolicyError) as e: check_policy(bad, lives=1, seed=found.seed, engine=False, say=quiet)
    assert str(e.value) == str(found)

# --- with guesses

class OneAtATime(Policy):
    "Believes that a step brings a request one token at most"
    def on_update(self, s, plan, out):
        for x in plan.scheduled:
            if x.rows: token, = out.sampled[x.request.request_id]

class Lavish(Policy):
    "Lets guess more than was asked"
    def guess(self, s, r, most): return most + 1

class Sober(Policy):
    "No guesses"
    def guess(self, s, r, most): return 0

def test_a_policy_is_proved_with_guesses_too():
    assert check_policy(Policy, lives=12, engine=False, say=quiet).met['guessed'] > 20
    assert check_policy(Sober, lives=12, engine=False, say=quiet).met['guessed'] == 0
    for bad, words in ((OneAtATime, 'too many values'), (Lavish, 'guess gave')):
        with pytest.raises(PolicyError) as e: check_policy(bad, lives=12, engine=False, say=quiet)
        assert words in e.value.what and e.value.seed % 2             # in a life of those that guess
        with pytest.raises(PolicyError, match='on the tiny model'): against_oracle(bad, 0)

SAID = r"starved: r\d+ \(\d+ \+ \d+ tokens\) came \d+ steps ago, is \w+ .*'(preempted: too long|admitted, chunk 1/\d+)'"

def test_who_starves_is_named_with_the_last_decision():
    with pytest.raises(PolicyError, match=SAID):
        check_policy(Bully, engine=False, say=quiet)

@pytest.mark.parametrize('bad,words', [(Falls, 'KeyError'), (Idle, 'nothing can run'), (Bully, 'not served after'),
                                       (Liar, 'and alone it is')])
def test_on_a_model_too(bad, words):
    with pytest.raises(PolicyError, match='on the tiny model') as e: against_oracle(bad, 0)
    assert words in e.value.what and e.value.seed == 0

def test_starvation_in_a_stream():
    class Youngest(Policy):
        def key(self, r): return -r.arrival, r.seq
    assert all(starved(Youngest(), k) for k in STREAMS)
    assert set(STREAMS) > {k for k in STREAMS if starved(Priority(aging=None), k)} == {'more urgent'}
    class Shortest(Policy):
        def key(self, r): return len(r.prompt_ids), r.age
    class ByName(Policy):
        def key(self, r): return r.user or '', r.age
    assert [k for k in STREAMS if starved(Shortest(), k)] == ['shorter in prompt']
    assert [k for k in STREAMS if starved(ByName(), k)] == ['of a user before it']
    assert '0 of 12 tokens in 50 steps' in starved(Youngest(), 'younger', steps=50)

# --- faults below the policy

def wrong_resume(self, s, r, plan):
    "Reads the host's blocks in another order"
    table = r.host_table[::-1]
    RIGHT['resume'](self, s, r, plan)
    if len(table) > 1: plan.swap_in[-len(table):] = zip(table, r.block_table)

def no_undo(self, plan, moved): return plan
def half_drop(self, r): self.blocks.release(r)

RIGHT = dict(resume=Swap.resume)
FAULTS = {(Swap, 'resume'): wrong_resume, (Roster, 'drop'): half_drop, (Roster, 'undo'): no_undo}

@pytest.mark.parametrize('where', FAULTS, ids=lambda w: w[1])
def test_faults_of_the_machine_are_found(where, monkeypatch):
    monkeypatch.setattr(*where, FAULTS[where])
    with pytest.raises(PolicyError): check_policy('vllm', lives=200, engine=False, say=quiet)

# --- what it takes

def test_what_means_a_policy(tmp_path):
    (tmp_path/'mine.py').write_text('from cbatch.scheduler import Policy\nclass Mine(Policy): pass')
    for p in ('fcfs', Policy, lambda: Policy(), f'{tmp_path}/mine.py:Mine'):
        assert check_policy(p, lives=1, engine=False, say=quiet).lives == 1

@pytest.mark.parametrize('wrong,words', [
    (Policy(), 'an object keeps state'), ('statc', 'did you mean static'), (5, 'know vllm'), (lambda: 5, 'gave 5'),
    (Restless, 'missing a required argument')])
def test_what_does_not(wrong, words):
    with pytest.raises(ParamError, match=words): check_policy(wrong)

def test_each_life_has_a_policy_of_its_own():
    made = []
    def make():
        made.append(Policy())
        return made[-1]
    check_policy(make, lives=3, engine=False, say=quiet)
    assert len(set(map(id, made))) == len(made) >= 3 + len(STREAMS)

def test_a_life_is_its_seed_and_lives_differ():
    a, b, c = (Life(Policy(), seed) for seed in (4, 4, 5))
    assert a.run() == b.run() and a.told.values() and [r.output_ids for r in a.all] == [r.output_ids for r in b.all]
    assert c.run() != a.met and all(r.status is Status.FINISHED for r in a.all)
