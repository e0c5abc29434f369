"The checks at work: each of these faults, planted into the engine, is found by the random schedules"
import inspect
from dataclasses import replace
import pytest
import cbatch.drawing, cbatch.paged_attention, cbatch.ragged_batch, cbatch.runner
from cbatch import LLM
from cbatch.core import Reason, Status, Why
from cbatch.kv_blocks import BlockAllocator, BlockManager
from cbatch.metrics import EngineCounters
from cbatch.paged_attention import TorchBackend, block_slots
from cbatch.policies import Dynamic, Static
from cbatch.preemption import Preempt
from cbatch.prefix_caching import CachingAllocator
from cbatch.roster import Recompute, Roster
from cbatch.scheduler import Policy, Scheduler
from cbatch.text import Detokenizer
from cbatch.trace import Trace
from harness import run_schedule
from toy import Crowd

FAULTS = {}
def fault(policy='vllm', by='engine'):
    """Register a fault: a function that plants it with `put(owner, name, new)`.
    It is found by the engine's schedules, the toy's, or both."""
    def add(f): FAULTS[f.__name__] = f, policy, by; return f
    return add

def rewritten(f, old, new):
    "The function `f` with a piece of its text replaced"
    text, made = inspect.getsource(f), {}
    assert text.count(old) == 1, f'{old} is not in {f.__name__} any more: mend the fault'
    exec(text[text.index('def '):].replace(old, new), f.__globals__, made)
    return made[f.__name__]

# --- tensors and slots

@fault()
def slot_off_by_one(put):
    old = cbatch.ragged_batch.slot_mapping
    put(cbatch.ragged_batch, 'slot_mapping', lambda table, start, stop,
        bs: [x - x % bs + (x + 1) % bs for x in old(table, start, stop, bs)])

@fault()
def reads_beyond_its_length(put):
    def rectangle(meta, requests, block_size):
        right = old(meta, requests, block_size)
        return right._replace(slots=block_slots(meta.block_tables[requests], block_size)[:, :right.slots.shape[1]])
    old = cbatch.paged_attention._rectangle
    put(cbatch.paged_attention, '_rectangle', rectangle)

@fault('static')
def padding_writes_into_block_1(put):
    old = TorchBackend.write
    def write(self, layer, k, v, meta):
        old(self, layer, k, v, meta)
        if -1 in meta.slot_mapping: self.k[layer][1, 0], self.v[layer][1, 0] = k[-1], v[-1]
    put(TorchBackend, 'write', write)

@fault()
def row_instead_of_seed(put):
    old = cbatch.drawing.uniform
    put(cbatch.drawing, 'uniform', lambda seeds, *args: old(list(range(len(seeds))), *args))

@fault()
def logits_of_the_row_before(put):
    old = cbatch.runner.pack
    def pack(*args):
        b = old(*args); b.logit_rows = (b.logit_rows - 1).clamp(min=0)
        return b
    put(cbatch.runner, 'pack', pack)

# --- blocks

@fault(by='both')
def block_given_away_twice(put):
    def allocate(self, n):
        ids = list(self.free_ids)[:n]
        for b in ids: self.refs[b] += 1
        return ids
    for pool in (BlockAllocator, CachingAllocator): put(pool, 'allocate', allocate)

@fault(by='both')
def freed_while_held(put):
    put(BlockAllocator, 'free', lambda self, ids: self.free_ids.extend(list(ids)))
    put(CachingAllocator, 'free', lambda self, ids: self.free_ids.update(dict.fromkeys(ids)))

@fault(by='both')
def block_leaks_on_abort(put):
    def abort(self, r, now=0.):
        if r.status is not Status.FINISHED: r.block_table = []
        self.finish(r, 'abort', now)
    put(Scheduler, 'abort', abort)

@fault(by='both')
def one_block_too_few(put):
    put(BlockManager, 'blocks_short', lambda self, r, n: max(0, -(-(n - 1) // self.block_size) - len(r.block_table)))

# --- the scheduler

@fault(by='both')
def output_dropped_on_preemption(put):
    old = Recompute.preempt
    def preempt(self, s, r, plan): old(self, s, r, plan); r.output_ids.clear()
    put(Recompute, 'preempt', preempt)

@fault()
def kv_kept_in_the_books_on_preemption(put):
    put(Recompute, 'preempt', lambda self, s, r, plan: s.blocks.release(r))

@fault(by='both')
def requeued_at_the_tail(put):
    old = Roster.preempt
    def preempt(self, r, *args):
        self.waiting.key = lambda r: (bool(r.num_preemptions), *r.age)
        old(self, r, *args)
    put(Roster, 'preempt', preempt)

@fault(by='both')
def oldest_is_the_victim(put):
    for preemptor in (Recompute, Preempt): put(preemptor, 'victim', lambda self, s: min(s.running, key=lambda r: r.age))

@fault(by='both')
def last_come_first_served(put): put(Policy, 'key', lambda self, r: (-r.arrival, -r.seq))

@fault(by='toy')
def preempted_stays_in_the_step(put):
    old = Roster.preempt
    def preempt(self, r, plan, *args):
        kept, left = list(plan.scheduled), plan.left
        old(self, r, plan, *args)
        plan.scheduled, plan.left = kept, left
    put(Roster, 'preempt', preempt)

@fault(by='both')
def budget_ignored(put): put(Policy, 'chunk', lambda self, s, r, wanted, left: wanted)

@fault()
def budget_wasted(put): put(Policy, 'chunk', lambda self, s, r, wanted, left: min(wanted, left, 7))

@fault()
def one_request_more_than_slots(put):
    put(Scheduler, '_shut', rewritten(Scheduler._shut, 'len(self.running) >=', 'len(self.running) >'))

@fault()
def nobody_joins_while_others_run(put):
    put(Policy, 'close', lambda self, s, now: Reason(Why.CLOSED) if s.running else None)

@fault('static')
def joins_a_closed_batch(put): put(Static, 'close', lambda self, s, now: None)

@fault('dynamic')
def does_not_wait_for_company(put):
    put(Dynamic, 'close', lambda self, s, now: Reason(Why.CLOSED) if s.running else None)

@fault('dynamic')
def window_never_ends(put):
    put(Dynamic, 'wakeup', lambda self, s, now: None if s.running or not s.waiting else now + 1e-3)

@fault()
def one_token_too_many(put):
    put(Scheduler, 'update', rewritten(Scheduler.update, 'len(r.output_ids) >= r.max_tokens',
                                       'len(r.output_ids) > r.max_tokens'))

# --- reports

@fault()
def token_reported_twice(put):
    old = Detokenizer.delta
    def delta(self, last=False):
        new = old(self, last)
        return new + new[-1:] if last else new
    put(Detokenizer, 'delta', delta)

@fault()
def held_text_never_comes_out(put):
    old = Detokenizer.push
    put(Detokenizer, 'push', lambda self, ids, last=False: old(self, ids))

@fault()
def finishes_twice(put):
    old = LLM.step
    def step(self):
        outs = old(self); again = getattr(self, 'again', []); self.again = [o for o in outs if o.finished]
        return outs + again
    put(LLM, 'step', step)

@fault()
def preemptions_not_counted(put):
    old = EngineCounters.count
    def count(self, plan, *args): n = self.num_preemptions; old(self, plan, *args); self.num_preemptions = n
    put(EngineCounters, 'count', count)

@fault()
def trace_misses_preemptions(put):
    old = Trace.executed
    put(Trace, 'executed', lambda self, plan, *args: old(self, replace(plan, preempted=[]), *args))

def found(run, seeds):
    "Does a schedule fail?"
    for seed in seeds:
        try: run(seed)
        # the fault does not fit the engine any more: mend the fault
        except (TypeError, AttributeError): raise
        except Exception as e:
            assert not any(w in str(e) for w in ('TypeError', 'AttributeError')), e
            return True

POLICY = dict(vllm=lambda: 'vllm', static=Static, dynamic=lambda: Dynamic(.03))

@pytest.mark.parametrize('name', [n for n, (_, _, by) in FAULTS.items() if by != 'toy'])
def test_found_by_the_engine(name, monkeypatch):
    plant, policy, _ = FAULTS[name]
    monkeypatch.setattr('logging.Logger.exception', lambda *a: None)
    plant(monkeypatch.setattr)
    assert found(lambda seed: run_schedule(seed, POLICY[policy](), 8), range(30))

@pytest.mark.parametrize('name', [n for n, (_, _, by) in FAULTS.items() if by != 'engine'])
def test_found_by_the_toy(name, monkeypatch):
    FAULTS[name][0](monkeypatch.setattr)
    assert found(lambda seed: Crowd(seed, 'vllm').run(), range(200))

def test_share_without_a_reference(monkeypatch):
    "Nobody shares blocks yet; the books would show it"
    monkeypatch.setattr(BlockAllocator, 'share', lambda self, ids: None)
    pool = BlockAllocator(4, 4)
    a = pool.allocate(2); pool.share(a)
    with pytest.raises(AssertionError, match='1 holders counted, 2 found'): pool.check([a, list(a)])

def test_no_fault_no_finding():
    for policy in POLICY.values(): assert not found(lambda seed: run_schedule(seed, policy(), 8), range(2))
