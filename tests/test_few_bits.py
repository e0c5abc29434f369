"""Random lives with few bits: weights kept in codes, keys and values in codes, and both.

Company, prompts in pieces, swaps, forks, prefixes and preemption: tokens and log probabilities are, to the last bit,
those of the request that is served alone. INVARIANTS.md says what O2 is."""
import functools, random
from collections import Counter
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch
import pytest, torch
import torch.nn.functional as F
from cbatch import LLM
from cbatch.kernels import cpu, lean
from cbatch.model import tiny_lm
from cbatch.paged_attention import PagedKV, TorchBackend, attend_chunk, chunks_of
from cbatch.quant import quantise
from ask import sp
from harness import in_cpp, quiet

WAYS = {'kept': (4, 'auto'), 'int8': (None, 'int8'), 'both': (8, 'int8')}
PATHS = {'C++': dict(backend='cpu'), 'torch': dict(backend='torch', lean=False)}

@functools.cache
def model(bits):
    "Small, its rows divide into groups of 32"
    m = tiny_lm('llama', num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4,
                num_key_value_heads=2, head_dim=16)
    return quantise(m, bits) if bits else m

@functools.cache
def asks():
    "Prompts, many with a beginning in common, and what is wished of each"
    rng, common = random.Random(3), [9, 8, 7, 6, 5] * 8
    own = lambda: [rng.randrange(258) for _ in range(rng.randint(1, 20))]
    wishes = sp(9, logprobs=2), sp(11, logprobs=1), sp(8, temperature=1., seed=5, logprobs=1, n=3), \
             sp(7, prompt_logprobs=1, logprobs=1), sp(13, temperature=.8, seed=2, n=2, logprobs=1)
    return [(common[:rng.choice([0, 17, 32, 39])] + own(), w) for w in wishes * 4]

def told(o): return [(c.index, c.token_ids, c.logprobs) for c in o.outputs], o.prompt_logprobs

@functools.cache
def alone(way, path):
    "What each gets with nobody beside it, its prompt in one piece, from an engine that remembers none"
    bits, kv = WAYS[way]
    with LLM(model(bits), block_size=16, num_blocks=23, max_num_seqs=1, prefix_caching=False, kv_dtype=kv,
             **PATHS[path]) as llm:
        return [told(llm.generate([ids], w, use_tqdm=False)[0]) for ids, w in asks()]

@contextmanager
def row_by_row():
    "torch's products, one row at a time: in a batch their sums run in an order that depends on its size"
    def linear(x, w, bias=None):
        flat = x.flatten(0, -2)
        y = torch.bmm(flat[:, None], w.T.expand(len(flat), *w.T.shape)).view(*x.shape[:-1], len(w))
        return y if bias is None else y + bias
    def attend(self, layer, q, meta, scaling, *how):
        out = torch.empty_like(q)
        for c in chunks_of(meta, range(len(meta.query_lens)), self.shape.block_size):
            for i in range(c.rows.start, c.rows.stop):
                slots = c.slots[:len(c.slots) + i + 1 - c.rows.stop]
                out[i:i+1] = attend_chunk(q[i:i+1], partial(self.read, layer), slots, meta, scaling, *how)
        return out
    with patch.object(F, 'linear', linear), patch.object(TorchBackend, 'attend', attend): yield

@pytest.fixture(params=['C++', 'torch'])
def path(request):
    with in_cpp(lean.STEP) if request.param == 'C++' else row_by_row():
        if request.param == 'C++' and not cpu.ready(lean.STEP): pytest.skip('no C++ compiler')
        yield request.param

def draw_life(way, path, rng, **more):
    "An engine that is short of memory, on a pool in which nothing was ever written"
    bits, kv = WAYS[way]
    size = rng.choice([16, 32] if path == 'C++' else [5, 7, 16])
    most = max(len(ids) + w.max_tokens for ids, w in asks())
    own = dict(block_size=size, num_blocks=-(-most // size) + rng.choice([0, 1, 3, 5]), watermark=0., kv_dtype=kv,
               max_num_seqs=rng.randint(2, 7), max_num_batched_tokens=rng.randint(8, 16), check=True,
               preemption=rng.choice(['recompute', 'swap']), prefix_caching=rng.random() < .5)
    llm = LLM(model(bits), **own | PATHS[path] | more)
    for x in llm.runner.executor.backend.tensors: x[1:] = float('nan') if x.is_floating_point() else 77
    return llm

def live(way, path, seed, num=6, **more):
    "One life, and what was met in it, counted"
    rng = random.Random(seed)
    llm, todo, who, seen = draw_life(way, path, rng, **more), rng.sample(range(len(asks())), num), {}, Counter()
    backend = llm.runner.executor.backend
    with llm, patch.object(backend, 'copy_blocks', wraps=backend.copy_blocks) as copied:
        want = alone(way, path)
        while todo or llm.has_unfinished:
            while todo and (not llm.has_unfinished or rng.random() < .5):
                i = todo.pop()
                who[llm.add(*asks()[i])] = i
            s = llm.scheduler
            if rng.random() < .1: s.preemptor.force = {r.request_id: s.num_steps for r in s.running[-1:]}
            for o in llm.step():
                if o.finished: assert told(o) == want[who[o.request_id]], f'{o.request_id} in life {seed}'         # O2
        quiet(llm)
        m, mode = llm.metrics, llm.config.preemption
        seen[mode] += m['num_preemptions']
        seen['cached'] += m['num_cached_tokens']
        seen['copied'] += copied.call_count
    return seen

LIVES = range(8)

@pytest.mark.parametrize('way', WAYS)
def test_as_if_alone(way, path):
    seen = sum((live(way, path, seed) for seed in LIVES), Counter())
    assert min(seen[k] for k in ('recompute', 'swap', 'copied')) >= 10 and seen['cached'] >= 100, seen

def scales(be): return [*be.k_scales, *be.v_scales]

def left_behind(real):
    "Blocks move, their scales do not"
    def move(self, pairs):
        old = [x.clone() for x in scales(self)]
        real(self, pairs)
        for x, o in zip(scales(self), old): x.copy_(o)
    return move

def next_door(real):
    "Each vector comes back with the scale of the one beside it"
    def move(self, pairs):
        real(self, pairs)
        for x in scales(self):
            for _, b in pairs: x[b] = x[b].roll(1, -1)
    return move

def of_a_neighbour(real):
    "In a step of several tokens, each is written with the scale of another"
    def write(self, layer, k, v, meta):
        real(self, layer, k, v, meta)
        b, i = meta.slot_mapping // self.shape.block_size, meta.slot_mapping % self.shape.block_size
        for x in (self.k_scales[layer], self.v_scales[layer]): x[b, :, i] = x[b, :, i].roll(1, 0)
    return write

@pytest.mark.parametrize('name,fault', [('swap_in', left_behind), ('swap_in', next_door),
                                        ('copy_blocks', left_behind), ('copy_blocks', next_door),
                                        ('write', of_a_neighbour)])
def test_a_fault_is_found(name, fault, path):
    "Scales that are lost or somebody else's, planted"
    if name == 'write' and path == 'C++': pytest.skip('written in C++')
    alone('both', path)
    with patch.object(PagedKV, name, fault(getattr(PagedKV, name))), pytest.raises(AssertionError, match='in life'):
        for seed in LIVES: live('both', path, seed)
