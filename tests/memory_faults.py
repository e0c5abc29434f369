"Faults to plant into preemption, prefix cache and forks; each is a function that does it with `put(owner, name, new)`"
import cbatch.prefix_caching
from cbatch.core import Why
from cbatch.kv_blocks import BlockManager, Found
from cbatch.preemption import Preempt, Swap
from cbatch.prefix_caching import CachingAllocator, PrefixBlocks
from cbatch.roster import Roster
from cbatch.scheduler import Scheduler

FAULTS = {}
def fault(f): FAULTS[f.__name__] = f; return f

@fault
def share_without_a_reference(put):
    def share(self, ids):
        for b in ids:
            if not self.refs[b]: del self.free_ids[b]; self.refs[b] = 1
    put(CachingAllocator, 'share', share)

@fault
def freed_although_shared(put):
    def free(self, ids):
        for b in list(ids): self.refs[b] = 0; self.free_ids[b] = None
    put(CachingAllocator, 'free', free)

@fault
def old_name_on_a_new_block(put):
    def allocate(self, n):
        ids = [self.free_ids.popitem(last=False)[0] for _ in range(n)]
        for b in ids: self.refs[b] = 1
        return ids
    put(CachingAllocator, 'allocate', allocate)

@fault
def a_block_more_than_asked_for_is_lost(put):
    old = CachingAllocator.allocate
    def allocate(self, n): return old(self, n) if n < 2 else old(self, n) + (old(self, 1)[:0] if self.free_ids else [])
    put(CachingAllocator, 'allocate', allocate)

@fault
def whole_prompt_from_the_cache(put):
    old = PrefixBlocks.names
    def find(self, r):
        ids = []
        for name in old(self, r, r.num_tokens // self.block_size):
            if (b := self.pool.by_name.get(name)) is None: break
            ids.append(b)
        return Found(ids, len(ids) * self.block_size, sum(not self.pool.refs[b] for b in ids))
    put(PrefixBlocks, 'find', find)

@fault
def found_before_it_is_computed(put):
    old = PrefixBlocks.claim
    def claim(self, r, found, plan):
        old(self, r, found, plan)
        n = min(r.num_tokens // self.block_size, self.num_free_blocks)
        if self.caching and r.use_cache and not r.host_table and n > len(r.block_table):
            self.grow(r, n * self.block_size)
            for b, name in zip(r.block_table, self.names(r, n)): self.pool.name(b, name)
    put(PrefixBlocks, 'claim', claim)

@fault
def names_a_block_that_is_not_full(put):
    def commit(self, r):
        full = min(len(r.block_table), r.num_computed_tokens // self.block_size + 1)
        if not self.caching or r.num_tokens < full * self.block_size: return
        for b, name in zip(r.block_table[:full], self.names(r, full)): self.pool.name(b, name)
    put(PrefixBlocks, 'commit', commit)

@fault
def name_without_its_parent(put):
    old = cbatch.prefix_caching.block_hash
    put(cbatch.prefix_caching, 'block_hash', lambda parent, tokens: old(b'x' * 16, tokens))

@fault
def salt_ignored(put):
    old = cbatch.prefix_caching.root
    put(cbatch.prefix_caching, 'root', lambda salt: old(None))

@fault
def promise_outlives_its_maker(put): put(PrefixBlocks, 'release', BlockManager.release)

@fault
def fork_shares_the_partial_block(put):
    old = PrefixBlocks._find_fork
    def find_fork(self, r):
        f = old(self, r)
        if f and f.copy is not None: f.blocks, f.copy = [*f.blocks, f.copy], None
        return f
    put(PrefixBlocks, '_find_fork', find_fork)

@fault
def fork_does_not_copy(put):
    old = PrefixBlocks.claim
    def claim(self, r, found, plan): old(self, r, found, plan); plan.copies.clear()
    put(PrefixBlocks, 'claim', claim)

@fault
def swapped_in_without_a_copy(put):
    old = Swap.resume
    def resume(self, s, r, plan): old(self, s, r, plan); plan.swap_in.clear()
    put(Swap, 'resume', resume)

@fault
def swapped_in_the_wrong_order(put):
    old = Swap.resume
    def resume(self, s, r, plan):
        old(self, s, r, plan)
        plan.swap_in[:] = list(zip([a for a, _ in reversed(plan.swap_in)], [b for _, b in plan.swap_in]))
    put(Swap, 'resume', resume)

@fault
def host_blocks_leak(put):
    def forget(self, r): r.host_table = []
    put(Swap, 'forget', forget)

@fault
def host_blocks_freed_twice_over(put):
    def resume(self, s, r, plan):
        if not r.host_table: return
        s.blocks.grow(r, len(r.host_table) * s.blocks.block_size)
        plan.swap_in += zip(r.host_table, r.block_table); r.host_table = []
    put(Swap, 'resume', resume)

@fault
def kv_of_the_swapped_counted_as_lost(put):
    old = Swap.preempt
    def preempt(self, s, r, plan): old(self, s, r, plan); r.num_computed_tokens = 0
    put(Swap, 'preempt', preempt)

@fault
def failed_step_taken_for_done(put): put(Roster, 'undo', lambda self, plan, moved: plan)

@fault
def head_is_the_victim(put):
    put(Preempt, 'victim', lambda self, s: min(s.running, key=lambda r: r.age))

@fault
def expired_keep_their_blocks(put):
    def expire(self, plan):
        while self.deadlines and self.deadlines[0][0] <= plan.now:
            r = self.deadlines[0][2]; self.deadlines.pop(0)
            if r in self.running:
                self.running.remove(r); r.status, r.finish_reason = type(r.status).FINISHED, 'error'
                plan.expired.append(r)
    put(Roster, 'expire', expire)

@fault
def newcomers_take_what_is_promised(put):
    old = Scheduler._why_not
    def why_not(self, r, n, found, plan):
        return None if (why := old(self, r, n, found, plan)) and why.why is Why.BLOCKS else why
    put(Scheduler, '_why_not', why_not)
