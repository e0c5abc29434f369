"""What a request may ask for and how an engine may be set: every option with its limits, checked once, where it comes in."""

__all__ = ['ParamError', 'CapacityError', 'OutOfBlocks', 'RequestFailed', 'cdiv', 'ANY', 'NUMBERS', 'WHOLES', 'MOST', 'MAX_CHARS', 'MAX_BAD_TOKENS',
           'MAX_SCORES', 'check_number', 'check_whole', 'SamplingParams', 'check_ids', 'EngineConfig']

import math, numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

class ParamError(ValueError):
    "A value that can't be meant; `param` is the name of what it was given for"
    def __init__(self,
        param:str,    # a field of `SamplingParams` or `EngineConfig`, an argument, or `prompt`
        message:str,  # what was asked, what there is, what to change
    ):
        super().__init__(message)
        self.param = param

class CapacityError(ParamError):
    "The request can never fit the model's context or the whole KV pool"

class OutOfBlocks(RuntimeError):
    "The allocator was asked for more blocks than are free; nothing was allocated"

class RequestFailed(RuntimeError):
    "A request ended by an error in the step that computed it"

def cdiv(
    a:int, # what is divided
    b:int, # by what, > 0
)->int:    # the quotient, rounded up
    "Integer division, rounded up"
    return -(-a // b)

ANY = 2**63 - 1    # as good as no limit
NUMBERS = dict(temperature=(0, 100), top_p=(1e-9, 1), min_p=(0, 1), repetition_penalty=(.01, 100),
               presence_penalty=(-2, 2), frequency_penalty=(-2, 2))                  # name: (least, most)
WHOLES = dict(n=(1, 16), top_k=(-1, ANY), min_tokens=(0, ANY), seed=(-ANY - 1, ANY), max_tokens=(1, ANY),
              logprobs=(0, 20), prompt_logprobs=(0, 20))
MOST = dict(stop=16, stop_token_ids=128, logit_bias=1024, bad_words=128, allowed_token_ids=16_384)  # entries
MAX_CHARS = 512         # of a stop string or bad word
MAX_BAD_TOKENS = 1024   # of all bad words
MAX_SCORES = 2**20      # prompt tokens x log probabilities

def check_number(
    name:str, x:Any,
    lo:float, hi:float, # limits, both allowed
    what:str,           # says what it must be
):
    "Refuse anything but a finite number in `lo..hi`"
    if isinstance(x, bool) or not isinstance(x, numbers.Real) or not (math.isfinite(x) and lo <= x <= hi):
        raise ParamError(name, f"{name}={x!r}: must be {what}")

def check_whole(name:str, x:Any, lo:int, what:str, hi:int=ANY):
    "Refuse anything but an integer in `lo..hi`"
    if isinstance(x, bool) or not isinstance(x, numbers.Integral) or not lo <= x <= hi:
        raise ParamError(name, f"{name}={x!r}: must be {what}")

def _check_bool(name:str, x:Any):
    if not isinstance(x, bool): raise ParamError(name, f"{name}={x!r}: must be True or False")

def _entries(name:str, xs:Any)->tuple[Any, ...]:
    "A list of a bounded length, as a tuple; absent, null and [] are alike"
    try: xs = tuple(xs or ())
    except TypeError: raise ParamError(name, f"{name}={xs!r}: must be a list") from None
    if len(xs) > MOST[name]: raise ParamError(name, f"{len(xs)} entries of {name}: at most {MOST[name]}")
    return xs

def _texts(name:str, texts:Any)->tuple[str, ...]:
    "Stop strings or bad words as a tuple"
    texts = _entries(name, (texts,) if isinstance(texts, str) else texts)
    for s in texts:
        if not isinstance(s, str) or not 0 < len(s) <= MAX_CHARS:
            raise ParamError(name, f"{name}={s!r}: each must be a string of 1 to {MAX_CHARS} characters")
    return texts

def _ids(name:str, ids:Any)->tuple[int, ...]:
    "Token ids as a tuple"
    ids = _entries(name, ids)
    for i in ids: check_whole(name, i, 0, 'token ids')
    return ids

@dataclass(frozen=True)
class SamplingParams:
    "How a request's tokens are chosen and when it ends; `ParamError` where a value can't be meant"
    n:int = 1                     # answers to each prompt, which share its memory
    temperature:float = 1.0       # 0 is greedy; else logits are divided by it
    top_p:float = 1.0             # keep the likeliest tokens that hold this much probability, in (0, 1]
    top_k:int = 0                 # keep this many of the likeliest tokens; 0 or -1 keeps all
    min_p:float = 0.0             # keep tokens at least this likely, compared with the likeliest
    seed:int|None = None          # same seed, same request: same tokens, in any batch; None: drawn by the engine
    max_tokens:int|None = None    # tokens to generate; None: to the end of the context
    min_tokens:int = 0            # no end before so many tokens
    stop:str|list[str]|tuple[str, ...]|None = None  # end before any of these appears; kept as a tuple, as all lists are
    stop_token_ids:list[int]|tuple[int, ...]|None = None  # end after any of these ids, besides the model's own
    ignore_eos:bool = False       # go on after the model's end-of-sequence ids
    repetition_penalty:float = 1.0  # above 1: tokens seen get less likely; divides a logit, multiplies a negative one
    presence_penalty:float = 0.0  # taken from the logit of a token that the answer has
    frequency_penalty:float = 0.0 # taken from it for each time that the answer has it
    logit_bias:dict[int, float]|None = None   # token id -> number from -100 to 100, added to its logit
    bad_words:list[str]|tuple[str, ...]|None = None  # texts that the answer must not have
    allowed_token_ids:list[int]|tuple[int, ...]|None = None  # no other ids may come
    logprobs:int|None = None      # report each token's log probability, and those of so many of the likeliest
    prompt_logprobs:int|None = None  # the same for the tokens of the prompt
    skip_special_tokens:bool = True  # leave special tokens out of the text (never out of `token_ids`)
    include_stop_str_in_output:bool = False  # keep the stop string that ended the request

    def __post_init__(self):
        for k, v in _checked(self).items(): object.__setattr__(self, k, v)

    @property
    def greedy(self)->bool: return self.temperature < 1e-5

def _checked(p:SamplingParams)->dict[str, Any]:
    "Raise `ParamError` for a value out of its limits; the lists of `p`, made into what they mean"
    for k, (low, high) in NUMBERS.items(): check_number(k, getattr(p, k), low, high, f'a number from {low} to {high}')
    for k in ('ignore_eos', 'skip_special_tokens', 'include_stop_str_in_output'): _check_bool(k, getattr(p, k))
    for k, (lo, hi) in WHOLES.items():
        if getattr(p, k) is None and SamplingParams.__dataclass_fields__[k].default is None: continue
        check_whole(k, getattr(p, k), lo, f'an integer from {lo} ' + ('up' if hi == ANY else f'to {hi}'), hi)
    if p.max_tokens and p.min_tokens > p.max_tokens:
        raise ParamError('min_tokens', f"min_tokens={p.min_tokens} exceeds max_tokens={p.max_tokens}")
    allowed = _ids('allowed_token_ids', p.allowed_token_ids) if p.allowed_token_ids is not None else None
    if allowed == (): raise ParamError('allowed_token_ids', "allowed_token_ids=[]: allows no token; None allows all")
    return dict(stop=_texts('stop', p.stop), bad_words=_texts('bad_words', p.bad_words), allowed_token_ids=allowed,
                stop_token_ids=_ids('stop_token_ids', p.stop_token_ids), logit_bias=_bias(p.logit_bias))

def _bias(given:Any)->dict[int, float]:
    "A checked `logit_bias`"
    if not isinstance(given, (dict, type(None))):
        raise ParamError('logit_bias', f"logit_bias={given!r}: must be a dict from token ids to numbers")
    bias = dict(_entries('logit_bias', (given or {}).items()))
    for i, b in bias.items():
        check_whole('logit_bias', i, 0, 'token ids to numbers')
        if isinstance(b, bool) or not isinstance(b, numbers.Real) or not (math.isfinite(b) and -100 <= b <= 100):
            raise ParamError('logit_bias', f"logit_bias[{i}]={b!r}: must be a number from -100 to 100")
    return bias

def check_ids(
    prompt_ids:list[int], # the prompt, already tokens
    params:SamplingParams,
    vocab_size:int,       # width of the model's logits
):
    "Raise `ParamError` for an empty prompt or an id that the model does not have"
    if not prompt_ids: raise ParamError('prompt', "empty prompt: a request needs at least one token to start from")
    for name in ('prompt', 'stop_token_ids', 'logit_bias', 'allowed_token_ids'):
        ids:Iterable[Any] = prompt_ids if name == 'prompt' else getattr(params, name) or ()
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, numbers.Integral) or not 0 <= i < vocab_size:
                raise ParamError(name, f"{name}: token id {i!r} is not in the vocabulary of {vocab_size}")
    k, n = params.prompt_logprobs, len(prompt_ids)
    if k is not None and n * (1 + k) > MAX_SCORES:
        raise ParamError('prompt_logprobs', f"prompt_logprobs={k} of {n} tokens: at most {MAX_SCORES} numbers in all")

@dataclass(frozen=True)
class EngineConfig:
    "Every knob of the engine"
    dtype:str = 'auto'                # float32, bfloat16, float16; auto: float32 on CPU, else what the GPU is good at
    device:Any = 'auto'               # auto: cuda, else mps, else cpu; a name, or a torch device
    policy:Any = 'vllm'               # a name or a `Policy` object
    max_num_seqs:int = 32             # requests in the batch at most
    max_num_batched_tokens:int = 2048 # tokens a step computes at most
    max_model_len:int|None = None     # prompt and output together; None: what the model and the pool allow
    block_size:int = 16               # tokens per KV block
    num_blocks:int|None = None        # KV pool; None: from `kv_cache_mb`
    kv_cache_mb:float|None = None     # KV pool in MB (10^6 bytes); None: see `pool_blocks`
    gpu_memory_utilization:float = 0.9  # share of a GPU that weights and pool may take
    backend:str = 'auto'              # attention: torch, cpu, triton; auto: what suits the device
    cuda_graphs:bool = True           # with Triton on a GPU: replay decode steps instead of launching them
    lean:bool = True                  # on a CPU: run models of the Llama shape by a version written for serving
    products:str = 'auto'             # its weight products: panels (own C++), onednn; auto: what suits the processor
    compile:bool = False              # torch.compile the model; the first steps then take minutes
    warmup:bool = False               # get ready (graphs, compilation) before the first request, not while it waits
    preemption:str = 'recompute'      # how a request gives its memory back: recompute, or swap to the host
    victim:Any = 'youngest'           # who gives it back: a rule by name, or a function of a request; the largest goes
    swap_mb:float|None = None         # host memory for swapping in MB; None: as much as the KV pool
    watermark:float = 0.01            # share of the pool that stays free when a request joins others
    reserve_max:bool = False          # take blocks for the longest answer when joining: nothing is ever preempted
    prefix_caching:bool = True        # share the blocks of equal beginnings
    force_preempt:Any = None          # for teaching and tests: every k steps, or {request_id: step}
    load_format:str = 'auto'          # dummy: random weights, only the configuration is read
    trace:bool|int = True             # keep step records: True for the last 10,000, a number for that many
    seed:int = 0                      # for requests that bring no seed
    check:bool = False                # run every invariant after every step (slow)

    def __post_init__(self):
        _check_sizes(self)
        _check_choices(self)

def _check_sizes(c:EngineConfig):
    "Raise `ParamError` for a number that can't stand so"
    for k in ('max_num_seqs', 'max_num_batched_tokens', 'block_size'):
        check_whole(k, getattr(c, k), 1, 'an integer from 1 up')
    for k in ('max_model_len', 'num_blocks'):
        if getattr(c, k) is not None: check_whole(k, getattr(c, k), 1, 'an integer from 1 up, or None')
    for k in ('kv_cache_mb', 'swap_mb'):
        if getattr(c, k) is not None: check_number(k, getattr(c, k), 0, 1e9, 'a size in MB, or None')
    check_number('gpu_memory_utilization', c.gpu_memory_utilization, 0.01, 1, 'a share of a GPU, up to 1')
    check_number('watermark', c.watermark, 0, 0.5, 'a share of the pool, up to 0.5')
    check_whole('seed', c.seed, -2**63, 'a 64-bit integer')
    if not (isinstance(c.trace, bool) or isinstance(c.trace, int) and c.trace > 0):
        raise ParamError('trace', f"trace={c.trace!r}: must be True, False or a number of records")

_CHOICES = dict(preemption=('recompute', 'swap'), load_format=('auto', 'dummy'), products=('auto', 'panels', 'onednn'))

def _check_choices(c:EngineConfig):
    "Raise `ParamError` for a choice that there is not"
    for k, names in _CHOICES.items():
        if getattr(c, k) not in names: raise ParamError(k, f"{k}={getattr(c, k)!r}: must be {' or '.join(names)}")
    dtypes = 'auto', 'float32', 'bfloat16', 'float16'
    if c.dtype not in dtypes: raise ParamError('dtype', f"dtype={c.dtype!r}: must be one of {', '.join(dtypes)}")
    for k in ('check', 'reserve_max', 'prefix_caching', 'cuda_graphs', 'lean', 'compile', 'warmup'):
        _check_bool(k, getattr(c, k))
    if not isinstance(c.device, str) and type(c.device).__name__ != 'device':
        raise ParamError('device', f"device={c.device!r}: must be auto, cpu, cuda, mps ...")
