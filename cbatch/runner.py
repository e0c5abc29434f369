"""From a plan to tokens: an executor that knows a device and no request, a sampler that knows requests and no device, and what joins them."""

__all__ = ['step_bytes', 'pool_blocks', 'Pending', 'Executor', 'Sampler', 'ModelRunner']

import logging, math, torch
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary
import numpy as np
from fastcore.basics import patch
from .backends import get_backend
from .core import Code, Failure, Logprob, Padding, Plan, Request, StepOutput
from .model import CausalLM, with_attention
from .native import build_all
from .paged_attention import AttnMeta, KVShape, register_attention
from .params import EngineConfig
from .ragged_batch import Batch, Moves, Wanted, pack, wanted
from .drawing import Sampled, failed, score
from .sampler import sample
from .sampling import SamplerState

_log = logging.getLogger('cbatch')

def step_bytes(
    model:CausalLM, config:EngineConfig,
)->int: # bytes
    "What a step takes on a GPU beside weights and KV, generously: activations, logits, and half a GB for CUDA itself"
    c = model.config
    inner = getattr(c, 'intermediate_size', None) or 4 * c.hidden_size
    wide = max(c.hidden_size, inner, model.layers[0].num_heads * model.head_dim)
    logits = config.max_num_seqs * model.vocab_size * 48
    return int(config.max_num_batched_tokens * 8 * wide * model.dtype.itemsize + logits + 5e8)

def pool_blocks(
    model:CausalLM, config:EngineConfig,
)->int: # blocks of the KV pool, the null block not counted
    "Size of the pool: as configured, else what fits the GPU, else 1 GB; never more than the batch could ever use"
    if config.num_blocks: return config.num_blocks
    block = config.block_size * model.kv_bytes_per_token
    longest = -(-min(model.max_len, config.max_model_len or model.max_len) // config.block_size)
    if config.kv_cache_mb is not None: room = config.kv_cache_mb * 1e6
    elif torch.device(model.device).type == 'cuda':
        free, total = torch.cuda.mem_get_info(model.device)
        room = config.gpu_memory_utilization * total - (total - free) - step_bytes(model, config)
    else: room = 1e9
    if room < 2 * block:
        need = f"KV pool of {room / 1e6:.1f} MB holds no block of {block / 1e6:.2f} MB"
        raise ValueError(f"{need}: raise kv_cache_mb or lower block_size")
    return max(1, min(int(room // block) - 1, longest * config.max_num_seqs))

@dataclass
class Pending:
    "A batch that was handed to a device"
    batch:Batch
    moved:bool = False                    # its blocks have been moved
    result:torch.Tensor|None = None       # [S, V]
    error:BaseException|None = None

    def logits(self)->torch.Tensor: # [S, V]
        "The logits of the wanted rows, when they are there; raises what the batch raised"
        if self.error: raise self.error
        assert self.result is not None
        return self.result

class Executor:
    "Runs batches on one device; it has never heard of requests"
    def __init__(self,
        model:CausalLM, config:EngineConfig,
        num_blocks:int,             # size of the KV pool
        max_blocks:int|None=None,   # of one request; None: the whole pool
        num_host_blocks:int=0,      # of a pool in host memory, for swapping
    ):
        self.model, self.config, self.num_blocks = model, config, num_blocks
        register_attention(opaque=config.compile)
        cpu = torch.device(model.device).type == 'cpu'
        if cpu: build_all()          # of C++: once on a machine
        m = model
        shape = KVShape(num_blocks, config.block_size, m.num_layers, m.num_kv_heads, m.head_dim, m.dtype, m.device)
        self.backend = get_backend(config.backend, shape)
        if num_host_blocks: self.backend.reserve_host(num_host_blocks)
        self.lean = _lean(model, self.backend, config) if cpu else None
        self.call = None if self.lean else with_attention(model.hf_model, 'cbatch')
        if config.compile: self.call = torch.compile(self.call, dynamic=True)
        make = getattr(self.backend, 'graphs', None)      # a backend may know how to replay decode steps
        self.graphs = make(config.max_num_seqs, max_blocks or num_blocks) if make and config.cuda_graphs else None

    @property
    def forward_s(self)->dict[str, float]:
        "Seconds by part of the forward pass, over all steps, where the model counts them"
        return dict(self.lean.spent) if self.lean else {}

def _lean(model:CausalLM, backend:Any, config:EngineConfig)->Any:
    "The version of the model that was written for serving on a CPU, if there is one"
    if not config.lean or config.compile: return None
    from .kernels.lean import lean        # here: a machine with a GPU needs nothing of it
    return lean(model, backend)

@patch
def submit(self:Executor, batch:Batch)->Pending:
    "Move blocks, then run the model; what goes wrong is told by `logits`"
    done = Pending(batch)
    try:
        with self.there():
            self.move(batch.moves)
            done.moved = True
            done.result = self.forward(batch)
    except BaseException as e: done.error = e
    return done

@patch
def there(self:Executor)->AbstractContextManager:
    "Kernels are launched on the current GPU, so let it be ours"
    return torch.cuda.device(self.model.device) if torch.device(self.model.device).type == 'cuda' else nullcontext()

@patch
def move(self:Executor, moves:Moves):
    b = self.backend
    for do, pairs in ((b.swap_out, moves.swap_out), (b.swap_in, moves.swap_in), (b.copy_blocks, moves.copies)):
        if pairs: do(pairs)

@patch
@torch.no_grad()
def logits(self:Executor,
    input_ids:torch.Tensor, position_ids:torch.Tensor, # [1, T]
    rows:torch.Tensor,    # [S], whose logits are wanted
    meta:AttnMeta,
)->torch.Tensor:          # [S, V]
    "Logits [rows, V] of some rows of a packed step"
    if self.lean: return self.lean(input_ids, position_ids, rows, meta)
    out = self.call(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=rows, cbatch=meta)
    return out.logits[0]

@patch
@torch.no_grad()
def forward(self:Executor, batch:Batch)->torch.Tensor:
    "Logits [S, V] of the wanted rows"
    if not batch.input_ids.shape[1]: return torch.empty(0, self.model.vocab_size, device=self.model.device)
    self.backend.prepare(batch.meta)
    if self.graphs and (logits := self.graphs(batch, self.logits)) is not None: return logits
    rows = batch.logit_rows
    keep = rows if len(rows) else rows.new_zeros(1)         # an empty index would keep all
    return self.logits(batch.input_ids, batch.position_ids, keep, batch.meta)[:len(rows)]

@patch
@torch.no_grad()
def warm_up(self:Executor, progress:Callable[[list[int]], Iterable[int]]=lambda xs: xs):
    "Get ready before the first request: record decode steps, or compute once what torch compiles on first use"
    with self.there():
        if self.graphs: self.graphs.warm_up(self.logits, progress)
        elif self.config.compile:
            for n in progress([1, 2, 3]): self.logits(*self._nothing(n))

@patch
def _nothing(self:Executor, n:int)->tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttnMeta]:
    "Arguments of `logits` for a step of `n` rows for nobody"
    b = pack(Plan(0, 0., padding=[Padding(n, n)]), self.config.block_size, self.model.device, self.model.max_len)
    self.backend.prepare(b.meta)
    return b.input_ids, b.position_ids, torch.arange(n, device=self.model.device), b.meta

class Sampler:
    "Chooses the tokens of a step, and scores those of prompts"
    def __init__(self,
        eos_ids:frozenset[int]=frozenset(),  # of the model: `min_tokens` holds them back
        mask:Callable[[Wanted], np.ndarray|None]|None=None, # tokens that may come: a bit for each, int32 [ceil(V / 32)]
    ):
        self.eos_ids, self.mask = eos_ids, mask
        self.states:WeakKeyDictionary[Request, SamplerState] = WeakKeyDictionary()   # made again if lost

    def state(self, w:Wanted)->SamplerState:
        "What sampling must know for a row"
        r, s = w.request, self.states.get(w.request)
        if s is None or s.output_ids is not r.output_ids:
            ends = r.stop_ids | self.eos_ids
            s = SamplerState(r.params, r.prompt_ids, r.output_ids, r.seed, r.sample_index, ends, r.bad_words)
            self.states[r] = s
        mask = self.mask(w) if self.mask else None
        return s if mask is None and not w.draft else s.ahead(w.draft, mask)

@patch
def __call__(self:Sampler, want:list[Wanted], logits:torch.Tensor)->StepOutput:
    "What a step brought, from its logits [S, V]; they may be overwritten"
    out, n = StepOutput(), sum(not w.scores for w in want)
    if n < len(want): self._score(want[n:], logits[n:], out)
    if n: self._choose(want[:n], sample(logits[:n], [self.state(w) for w in want[:n]]), out)
    return out

@patch
def _choose(self:Sampler, want:list[Wanted], got:Sampled, out:StepOutput):
    "Take each request's tokens as far as its guesses hold: the first that differs is the last that counts"
    over = set[str]()
    for i, (w, token) in enumerate(zip(want, got.ids)):
        name = w.request.request_id
        if name in over: continue
        if token is None:
            if name not in out.sampled: out.errors.setdefault(name, got.errors[i])   # else the next step does
            over.add(name)
            continue
        out.sampled.setdefault(name, []).append(token)
        if i in got.logprobs: out.logprobs.setdefault(name, []).append(got.logprobs[i])
        if i + 1 < len(want) and want[i+1].request is w.request and want[i+1].draft[-1] != token: over.add(name)

@patch
def _score(self:Sampler, want:list[Wanted], logits:torch.Tensor, out:StepOutput):
    "Score tokens of prompts, some rows at a time: log probabilities of all rows would be large"
    for i in range(0, len(want), 64):
        part = want[i:i+64]
        tokens = [w.request.prompt_ids[w.position + 1] for w in part]
        nums = [w.request.params.prompt_logprobs or 0 for w in part]
        for w, scores in zip(part, score(logits[i:i+64], tokens, nums)):
            name = w.request.request_id
            out.prompt_logprobs.setdefault(name, (w.position, []))[1].append(scores)
            if any(math.isnan(x.logprob) for x in scores.values()): out.errors[name] = failed(2)

class ModelRunner:
    "Joins executor and sampler: a Plan in, a StepOutput out"
    def __init__(self, executor:Executor, sampler:Sampler):
        self.executor, self.sampler, self.num_blocks = executor, sampler, executor.num_blocks
        self.spent = dict.fromkeys(('pack', 'forward', 'sample'), 0.)   # s, over all steps

    @property
    def forward_s(self)->dict[str, float]: return self.executor.forward_s   # s, where the forward pass counts its parts

    def _lap(self, what:str, since:float)->float:
        now = perf_counter()
        self.spent[what] += now - since
        return now

@patch
def start(self:ModelRunner,
    plan:Plan,
    moved:bool=False, # its swaps and copies were done by a try that failed
)->Pending:
    "Hand a step to the device"
    t, e = perf_counter(), self.executor
    batch = pack(plan, e.config.block_size, e.model.device, e.model.max_len, moved)
    t = self._lap('pack', t)
    pending = e.submit(batch)
    self._lap('forward', t)
    return pending

@patch
def finish(self:ModelRunner, plan:Plan, pending:Pending)->StepOutput:
    "Wait for the step and choose its tokens"
    t, want = perf_counter(), wanted(plan)
    logits = pending.logits()
    t = self._lap('forward', t)
    try: out = self.sampler(want, logits)
    except torch.OutOfMemoryError: raise
    except Exception:
        _log.exception("sampling failed, each row goes alone")
        out = self._one_by_one(want, self.executor.forward(pending.batch))
    self._lap('sample', t)
    return out

@patch
def execute(self:ModelRunner, plan:Plan)->StepOutput:
    "Run one step: block moves, forward pass, sampling"
    return self.finish(plan, self.start(plan))

@patch
def _one_by_one(self:ModelRunner, want:list[Wanted], logits:torch.Tensor)->StepOutput:
    "Sample request by request after the whole has failed; an exception is the error of its own request"
    out = StepOutput()
    for r in dict.fromkeys(w.request for w in want):
        rows = [i for i, w in enumerate(want) if w.request is r]
        try: got = self.sampler([want[i] for i in rows], logits[rows])
        except torch.OutOfMemoryError: raise
        except Exception as e:
            out.errors[r.request_id] = Failure(Code.SAMPLING, f'{type(e).__name__}: {e}')
            continue
        for name in ('sampled', 'errors', 'logprobs', 'prompt_logprobs'): getattr(out, name).update(getattr(got, name))
    return out
