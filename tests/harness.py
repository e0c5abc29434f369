"""Random schedules against the oracle: a crowd of requests, an engine, and everything that must hold after each step.

INVARIANTS.md says what A1, S3 and the others are."""
import functools, random
from collections import Counter
from contextlib import contextmanager
from unittest.mock import patch
import numpy as np, torch
from cbatch import LLM, SamplingParams
from cbatch.core import Status
from cbatch.kernels import cpu, lean
from cbatch.params import cdiv
from cbatch.model import tiny_lm
from cbatch.policies import Dynamic, Static
from cbatch.proof import steps_left
from cbatch.sampler import FAST, sample
from cbatch.sampling import SamplerState, uniform
from cbatch.token_loop import compare_tokens, generate_ref

LONGEST = 30
WISHES = (dict(temperature=0.), dict(temperature=1., seed=11), dict(temperature=.7, top_k=20, seed=5),
          dict(temperature=1.3, top_p=.8, seed=-3))

@contextmanager
def in_cpp(*more):
    "Attention and lean model in C++, and `more` of it, which tests leave aside otherwise; None if there is no compiler"
    def forget():
        for n in (cpu.ATTENTION, lean.STEP, *more): n.__dict__.pop('lib', None)
    with patch.dict('os.environ', CBATCH_NATIVE='1'):
        forget()
        try: yield cpu.ready(cpu.ATTENTION)
        finally: forget()

@functools.cache
def llama():
    "Tiny, with three end-of-sequence ids that it likes to say"
    return tiny_lm('llama', num_hidden_layers=2, eos_token_id=[145, 21, 245])

@functools.cache
def prompts():
    rng = random.Random(0)
    lens = [*range(1, 12), *(rng.randint(12, 60) for _ in range(29))]
    return [tuple(rng.randrange(258) for _ in range(n)) for n in lens]

@functools.cache
def free_run(prompt, wish, kv_dtype='auto'):
    """The oracle's answer to a prompt if nothing but its length stops it.
    Of KV in codes, the oracle is an engine that serves one request at a time and remembers none"""
    params, ids = SamplingParams(**WISHES[wish], max_tokens=LONGEST, ignore_eos=True), list(prompts()[prompt])
    if kv_dtype == 'auto': return generate_ref(llama(), ids, params).token_ids
    with LLM(llama(), kv_dtype=kv_dtype, num_blocks=8, max_num_seqs=1, prefix_caching=False) as alone:
        return alone.generate([ids], params, use_tqdm=False)[0].outputs[0].token_ids

def decode(ids): return llama().tokenizer.decode(ids, skip_special_tokens=True)

def expected(prompt, wish, params, kv_dtype='auto'):
    "The oracle's answer with the wished end: token ids and finish reason. Its start does not depend on where it ends"
    ids = free_run(prompt, wish, kv_dtype)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else llama().eos_ids)}
    for n in range(1, params.max_tokens + 1):
        if ids[n-1] in ends or any(s in decode(ids[:n]) for s in params.stop): return ids[:n], 'stop'
    return ids[:n], 'length'

@torch.no_grad()
def agree(prompt_ids, params, ours, ref):
    """Equal, or parted where rounding may decide: the two likeliest tokens within 1e-4, or the random number within
    1e-4 of the border between the two"""
    if ours == ref: return 'equal'
    if params.greedy: return 'tie' if compare_tokens(llama(), prompt_ids, ours, ref) else 'different'
    at = next((i for i, (a, b) in enumerate(zip(ours, ref)) if a != b), None)
    if at is None: return 'different'
    x = llama().hf_model(input_ids=torch.tensor([list(prompt_ids) + ref[:at]])).logits[:, -1]
    near = set()
    for d in (-1e-4, 0, 1e-4):
        moved = lambda *key: np.clip(uniform(*key) + d, 0, 1 - 1e-9)
        with patch('cbatch.drawing.uniform', moved), patch.object(FAST, 'lib', None):
            near.update(sample(x.clone(), [SamplerState(params, prompt_ids, ref[:at], params.seed)]).ids)
    return 'tie' if {ours[at], ref[at]} <= near else 'different'

class Watch:
    "Sees every plan and every step of an engine, and asserts what must hold"
    def __init__(self, llm, in_order=True):
        self.llm, self.order, self.tokens, self.sampled, self.text, self.ended = llm, {}, {}, {}, {}, {}
        self.plan, self.counts, self.bound, self.preempted = None, Counter(), 0, 0
        self.first_come, self.in_order = llm.scheduler.policy.name == 'vllm', in_order
        run = llm.execute
        def execute(plan):
            self.planned(plan)
            out = run(plan)
            assert not out.errors, out.errors
            for r, ts in out.sampled.items(): self.sampled[r] += ts
            return out
        llm.execute = execute

    def added(self, rid):
        self.order[rid], self.tokens[rid], self.sampled[rid], self.text[rid] = len(self.order), [], [], ''
        live = [r for r in (a.request for a in self.llm.requests.values())]
        self.bound = steps_left(live, self.llm.config.max_num_batched_tokens)

    def planned(self, plan):
        self.plan, s, cfg = plan, self.llm.scheduler, self.llm.config
        who = [x.request.request_id for x in plan.scheduled]
        self.preempted += len(plan.preempted)
        assert plan.num_tokens + plan.num_padding <= cfg.max_num_batched_tokens                  # S3
        assert plan.left == cfg.max_num_batched_tokens - plan.num_tokens
        assert len(set(who)) == len(who) and len(s.running) <= cfg.max_num_seqs
        assert all(x.request.status is Status.RUNNING and x.num_tokens > 0 for x in plan.scheduled)
        for x in plan.scheduled:
            assert len(x.request.block_table) * cfg.block_size >= x.request.num_computed_tokens + x.num_tokens
        assert plan.num_waiting == len(s.waiting)
        (self._first_come if self.first_come else self._closed)(plan, s, who)

    def _closed(self, plan, s, who):
        "A batch that has begun lets nobody in; one with a window waits for it or for a full house"
        p = s.policy
        assert not plan.preempted and (not plan.admitted or plan.admitted == s.running)
        if plan.admitted and p.name == 'dynamic':
            full = len(s.running) + len(s.waiting) >= self.llm.config.max_num_seqs
            assert full or plan.now >= min(r.arrival for r in s.running) + p.window
        assert p.pad or not plan.padding

    def _first_come(self, plan, s, who):
        by_age = lambda rs: sorted(rs, key=lambda r: self.order[r.request_id])
        if self.in_order:
            assert [*s.running, *by_age(s.waiting)] == by_age([*s.running, *s.waiting])          # S4
            assert by_age(s.running)[0].request_id in who                                        # S5
            assert by_age([*s.running, *s.waiting])[0] not in plan.preempted
        for x in plan.scheduled:
            assert not plan.left or plan.preempted or x.num_tokens == x.request.num_left         # S8
        assert not plan.left or plan.preempted or len(who) == len(s.running)
        if plan.left and s.waiting and not plan.preempted and len(s.running) < self.llm.config.max_num_seqs:
            need = lambda r: cdiv(r.num_tokens, self.llm.config.block_size) - len(r.block_table)
            short = sum(need(r) for r in [*s.running, s.waiting.peek()]) > self.llm.num_free_blocks
            assert short, 'the first in line could have joined'

    def stepped(self, outs):
        llm, s = self.llm, self.llm.scheduler
        assert len({o.request_id for o in outs}) == len(outs)
        for o in outs:
            rid, c, old = o.request_id, o.outputs[0], self.tokens[o.request_id]
            assert rid not in self.ended                                                         # O3
            assert c.token_ids == self.sampled[rid] and c.token_ids[:len(old)] == old            # O1
            self.tokens[rid], self.text[rid] = c.token_ids, self.text[rid] + c.delta
            assert c.text == self.text[rid] and o.finished == (c.finish_reason is not None)
            if o.finished: self.ended[rid] = o
        if self.first_come:
            for r in s.running:
                assert len(r.block_table) == cdiv(r.num_computed_tokens, llm.config.block_size)  # S2
        for r in (a.request for a in llm.requests.values()): assert r.output_ids == self.sampled[r.request_id]
        llm.check()                                                                              # A1 A2 A3 S1
        self._metrics(); self._trace(llm.trace.state())

    def aborted(self, rid): self.ended[rid] = None

    def _metrics(self):
        m, s = self.llm.metrics, self.llm.scheduler
        gauges = 'num_running', 'num_waiting', 'num_free_blocks'
        flat = Counter({k: v for k, v in m.items() if k.startswith('num_') and k not in gauges})
        assert all(flat[k] >= v for k, v in self.counts.items()); self.counts = flat             # M1
        assert (m['num_running'], m['num_waiting']) == (len(s.running), len(s.waiting))
        assert sum(m['finished'].values()) == len(self.order) - len(self.llm.requests) == len(self.ended)
        assert m['num_sampled_tokens'] == sum(map(len, self.sampled.values()))
        assert m['num_preemptions'] == self.preempted

    def _trace(self, state):
        s = self.llm.scheduler
        assert state.running == [r.request_id for r in s.running]
        assert set(state.waiting) == {r.request_id for r in s.waiting}
        assert state.blocks == {r.request_id: r.block_table for r in s.running}
        assert state.num_free_blocks == self.llm.num_free_blocks
        assert state.computed == {r.request_id: r.num_computed_tokens for r in s.running}

def quiet(llm):
    "Nobody is here, nothing is held, nothing is owed"
    llm.check()
    s, pool = llm.scheduler, llm.scheduler.blocks.pool
    assert not (llm.has_unfinished or s.running or len(s.waiting) or llm.sinks or llm.unclaimed)
    assert llm.num_free_blocks == llm.num_blocks and not any(pool.refs)
    assert sorted(pool.free_ids) == list(range(1, llm.num_blocks + 1))

def follows(llm):
    "The trace knows where everybody is"
    s, now = llm.scheduler, llm.trace.state()
    here = [*s.running, *s.paused]
    assert now.running == [r.request_id for r in s.running]
    assert now.waiting == [r.request_id for r in sorted(s.waiting, key=lambda r: r.age)]
    assert now.blocks == {r.request_id: r.block_table for r in here} and now.num_free_blocks == llm.num_free_blocks
    assert now.computed == {r.request_id: r.num_computed_tokens for r in here}

def draw_params(rng, prompt, wish):
    "Some wishes about how to end, on top of how to choose"
    ids, kw = free_run(prompt, wish), dict(max_tokens=rng.randint(1, LONGEST), ignore_eos=rng.random() < .6)
    if rng.random() < .2: kw['stop_token_ids'] = rng.sample(range(256), 3) + [rng.choice(ids)]
    whole = [c for c in decode(ids) if c != '\ufffd']
    if rng.random() < .2 and whole: kw['stop'] = [rng.choice(whole), 'never said']
    return SamplingParams(**WISHES[wish], **kw)

def draw_engine(rng, policy, longest, kv_dtype='auto'):
    """An engine that can serve requests of up to `longest` tokens, now and then with little more memory than one of
    them needs; its clock moves by hand"""
    bs = rng.choice([4, 5, 8, 16, 32] if kv_dtype == 'auto' else [16, 32])     # codes: one path, bit for bit
    need = cdiv(longest, bs)
    policy = policy or rng.choice(['vllm'] * 3 + [Static(True), Static(False), Dynamic(.03, pad=rng.random() < .5)])
    more = [need, 3 * need, 8 * need]     # who reserves needs more to have company
    if policy == 'vllm': more = [0, 1, 2, rng.randint(0, need), 8 * need]
    llm = LLM(llama(), policy=policy, block_size=bs, num_blocks=need + rng.choice(more),
              preemption=rng.choice(['recompute', 'swap']), prefix_caching=rng.random() < .6,
              max_num_seqs=rng.choice([1, 2, 3, 4, 6, 8, 12, 16]),
              max_num_batched_tokens=rng.choice([8, 9, 12, 16, 33, 64, 128, 512]), kv_dtype=kv_dtype)
    # whoever reads what was never written is found out
    for x in llm.runner.executor.backend.tensors: x[1:] = float('nan') if x.is_floating_point() else 77
    llm.now = 0.
    llm.clock = lambda: llm.now
    return llm

def run_schedule(seed, policy=None, num_requests=None, kv_dtype='auto'):
    "One random schedule, checked at every step and at its end; returns what happened, counted"
    rng = random.Random(seed)
    todo = []
    for i in range(num_requests or rng.randint(3, 10)):
        prompt, wish = rng.randrange(len(prompts())), rng.choice([0, 0, 0, 1, 2, 3])
        todo.append((f'q{i}', prompt, wish, draw_params(rng, prompt, wish)))
    llm = draw_engine(rng, policy, max(len(prompts()[p]) + sp.max_tokens for _, p, _, sp in todo), kv_dtype)
    late = rng.choice([0, 0, 0, .3])    # s; arrivals may be told long after they happened
    watch, asked, seen = Watch(llm, not late), {t[0]: t for t in todo}, Counter()
    rush, cruelty = rng.choice([.3, .7, 1.]), rng.choice([0, 0, .06])
    since = idle = 0
    while todo or llm.has_unfinished:
        while todo and (not llm.has_unfinished or rng.random() < rush):
            rid, prompt, _, params = todo.pop(0)
            llm.add(list(prompts()[prompt]), params, request_id=rid, arrival=llm.now - late * rng.random())
            watch.added(rid)
            since = 0
        if llm.requests and rng.random() < cruelty:
            everybody = [r for r in (a.request for a in llm.requests.values())]
            r = rng.choice([r for r in everybody if r.status is Status.PREEMPTED] or everybody)
            mid_prompt = 0 < r.num_computed_tokens < len(r.prompt_ids)
            seen[f"aborted {'mid-prompt' if mid_prompt else r.status.value}"] += 1
            assert llm.abort(r.request_id) and not llm.abort(r.request_id)
            watch.aborted(r.request_id)
            check_answer(asked[r.request_id], r.output_ids, None, seen, kv_dtype)
        watch.plan = None
        watch.stepped(llm.step())
        llm.now += .01
        idle = 0 if watch.plan else idle + 1
        assert idle < 10 and len(llm.trace) < 1000, 'never ends'
        if watch.plan:
            since += 1
            assert not (watch.first_come and watch.in_order) or since <= watch.bound, 'starved'     # S6
        elif llm.has_unfinished: assert llm.scheduler.next_wakeup > llm.now - .01, 'idle for no reason'   # S8
    quiet(llm)
    assert set(watch.ended) == set(asked)
    for rid, o in watch.ended.items():
        if o: check_answer(asked[rid], o.outputs[0].token_ids, o, seen, kv_dtype)
    for rec in rng.sample(llm.trace.records, min(2, len(llm.trace.records))):
        assert llm.trace.state(rec.step).num_free_blocks == rec.num_free_blocks
    m = llm.metrics
    seen['preempted'] += m['num_preemptions']
    seen['steps'] += m['num_steps']
    seen['padding'] += m['num_padding_tokens']
    seen['cached'] += m['num_cached_tokens']
    seen[f'preempted by {llm.config.preemption}'] += m['num_preemptions'] > 0
    seen[llm.scheduler.policy.name] += 1
    return seen

def check_answer(ask, ours, o, seen, kv_dtype='auto'):
    "A finished answer is the oracle's; one cut off by an abort is its beginning"
    rid, prompt, wish, params = ask
    ref, reason = expected(prompt, wish, params, kv_dtype)
    want = ref if o else ref[:len(ours)]
    if kv_dtype == 'auto': how = agree(prompts()[prompt], params, ours, want)
    else: how = 'equal' if ours == want else 'different'
    assert how != 'different', f'{rid}: {ours} is not {ref}'                                  # O2
    seen[how] += 1
    if not o or how == 'tie': return
    c, m = o.outputs[0], o.metrics
    text = decode(ref)
    for s in params.stop: text = text[:text.index(s)] if s in text else text
    assert (c.finish_reason, c.text) == (reason, text)
    assert len(m.token_times) == len(ours) and m.finished_at == m.token_times[-1]
    assert m.arrival <= m.scheduled_at < m.finished_at + 1e-9
    seen[f'by {reason}'] += 1
