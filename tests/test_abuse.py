"""Lives among strangers, see `abuse.py`; and the faults that they were made to find, each planted and found"""
import functools, signal
from collections import Counter
import pytest
import cbatch.core, cbatch.engine, cbatch.params, cbatch.runner, cbatch.twin
from cbatch.engine import Engine
from cbatch.interrupts import Held
from cbatch.llm import LLM
from cbatch.reports import Draft, Outbox
from cbatch.roster import Roster
from cbatch.scheduler import Scheduler
from abuse import ILLS, live
from test_mutations import rewritten

SEEDS = range(60)
pytestmark = pytest.mark.skipif(not hasattr(signal, 'SIGALRM'), reason='alarms need a SIGALRM')

@pytest.fixture(autouse=True)
def quiet_log(monkeypatch): monkeypatch.setattr('logging.Logger.exception', lambda *a: None)

@functools.cache
def outcome(seed): return live(seed)

@pytest.mark.parametrize('seed', SEEDS)
def test_lives(seed): outcome(seed)

def test_the_lives_were_hard():
    seen = sum(map(outcome, SEEDS), Counter())
    print(dict(seen))
    assert all(seen[i] >= 5 for i in ILLS)
    assert seen['equal'] > 200 and seen['struck'] > 5 and not seen['came in']
    thrown = 'Panic', 'Wordless', 'RuntimeError', 'KeyError', 'MemoryError', 'Alarm', 'refused', 'entered again'
    assert all(seen[x] >= 5 for x in thrown)

# --- faults

FAULTS = {}
def fault(*ills):
    "Register a fault: a function that plants it with `put(owner, name, new)`, and the ills by which it is found"
    def add(f): FAULTS[f.__name__] = f, list(ills); return f
    return add

@fault('tokenizer')
def only_exceptions_end_a_request(put):
    old = cbatch.core.failure_of
    def failure_of(code, e):
        if not isinstance(e, Exception): raise e
        return old(code, e)
    for m in (cbatch.engine, cbatch.runner): put(m, 'failure_of', failure_of)

@fault('tokenizer', 'mask')
def an_error_must_have_words(put): put(cbatch.core, 'in_words', lambda e: f'{type(e).__name__}: {e}')

@fault('sink')
def a_sink_that_raised_is_asked_again(put):
    put(Outbox, 'put', rewritten(Outbox.put, 'failed[name] = e\n', 'continue\n'))

@fault('sink')
def a_sink_outlives_its_request(put):
    put(Outbox, 'put', rewritten(Outbox.put, 'self.sinks.pop(name, None) if draft.finished else ', ''))

@fault('sink')
def reports_behind_a_sink_that_raised_are_lost(put):
    put(Outbox, 'put', rewritten(Outbox.put, 'failed[name] = e\n', 'return {name: e}\n'))

@fault('reentry')
def anybody_may_come_in(put):
    put(Engine, 'inside', property(lambda self: False, lambda self, x: None), raising=False)

@fault('alarms')
def a_signal_does_not_wait(put):
    put(Held, '__call__', lambda self, signum, frame: self.old[signum](signum, frame))

@fault('alarms')
def a_signal_is_forgotten(put): put(Held, 'deliver', lambda self: None)

@fault('moody')
def a_key_that_raised_leaves_its_mark(put):
    put(Roster, 'requeue', rewritten(Roster.requeue, 'r.status, r.num_preemptions = was', 'pass'))

@fault('moody')
def what_a_policy_learns_may_raise_at_once(put):
    put(Scheduler, 'update', rewritten(Scheduler.update, 'except BaseException as e: self.trouble = e',
                                       'except ZeroDivisionError as e: self.trouble = e'))

@fault('moody')
def a_plan_that_broke_off_is_not_undone(put): put(Engine, '_void', lambda self, plan, moved: None)

@fault('ambient')
def modes_are_not_seen(put):
    for name in ('_inference', '_autocast', '_modes'): put(cbatch.twin, name, lambda: False)

@fault('numpy')
def numbers_are_kept_as_they_come(put):
    for name in ('check_whole', 'check_number'):
        old = getattr(cbatch.params, name)
        put(cbatch.params, name, lambda name, x, *a, old=old, **kw: (old(name, x, *a, **kw), x)[1])

@fault('vandal')
def a_report_shares_the_prompt(put):
    put(Draft, 'output', rewritten(Draft.output, '[*self.requests[0].prompt_ids]', 'self.requests[0].prompt_ids'))

@fault('vandal')
def a_report_shares_the_tokens(put):
    put(Draft, 'output', rewritten(Draft.output, 'c.token_ids[:n], c.finish', 'c.token_ids, c.finish'))

@fault('twice')
def who_left_can_be_aborted(put):
    put(LLM, 'abort', lambda self, i: True if i not in self.groups else Engine.abort(self, i))

def found(ills, seeds):
    for seed in seeds:
        try: live(seed, ills)
        except (NameError, SyntaxError): raise      # the fault does not fit the engine any more: mend the fault
        except BaseException as e:
            if isinstance(e, (KeyboardInterrupt, SystemExit, pytest.fail.Exception)): raise
            return True

@pytest.mark.parametrize('name', FAULTS)
def test_found(name, monkeypatch):
    plant, ills = FAULTS[name]
    plant(monkeypatch.setattr)
    assert found(ills, range(30))

def test_no_fault_no_finding():
    for ill in ILLS: assert not found([ill], range(2)), ill
