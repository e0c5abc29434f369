"""What a request must pass before it is one: text becomes tokens, limits are held against what there is, and nothing is taken yet."""

__all__ = ['Door']

import numbers
from fastcore.basics import patch
from typing import Any
from .core import Asked
from .model import CausalLM
from .params import CapacityError, ParamError, SamplingParams, check_ids, check_number
from .sampling import bad_word_ids
from .scheduler import Scheduler
from .text import encode_chat, encode_text

class Door:
    "Looks at what comes in: a prompt with its wishes becomes an `Asked`, or an error that says what to change"
    def __init__(self,
        model:CausalLM,
        scheduler:Scheduler,   # whose memory and policy have the last word
        max_model_len:int,     # tokens of prompt and answer together
    ):
        self.tokenizer, self.scheduler, self.max_model_len = model.tokenizer, scheduler, max_model_len
        self.vocab_size, self.eos_ids = model.vocab_size, model.eos_ids

    @property
    def pool_tokens(self)->int: return self.scheduler.blocks.num_blocks * self.scheduler.blocks.block_size

@patch
def encode(self:Door,
    prompt:Any,   # text, token ids, or a list of messages
)->list[int]:     # token ids
    "Tokens of a prompt"
    if isinstance(prompt, str) or isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        return self._read(prompt)
    if not isinstance(prompt, (list, tuple)) or not all(map(_is_id, prompt)):
        what = "give text, a list of token ids, or a list of messages"
        raise ParamError('prompt', f"prompt is {type(prompt).__name__}: {what}")
    return [int(i) for i in prompt]

def _is_id(i:Any)->bool: return isinstance(i, numbers.Integral) and not isinstance(i, bool)

def _num_chars(prompt:Any)->int:
    "Characters of a text, or of all messages"
    if isinstance(prompt, str): return len(prompt)
    return sum(len(s) for m in prompt if isinstance(m, dict) and isinstance(s := m.get('content'), str))

@patch
def _read(self:Door, prompt:str|list[dict[str, Any]])->list[int]:
    "Tokens of text or messages, if they are not absurdly long"
    if self.tokenizer is None:
        raise ParamError('prompt', "the model came without a tokenizer: give token ids, or LLM(..., tokenizer=...)")
    if (size := _num_chars(prompt)) > 64 * self.max_model_len:
        far = f"prompt of {size} characters is far too long for a context of {self.max_model_len} tokens"
        raise CapacityError('prompt', f"{far}: shorten it")
    return encode_text(self.tokenizer, prompt) if isinstance(prompt, str) else encode_chat(self.tokenizer, prompt)

@patch
def limit(self:Door, num_prompt:int, params:SamplingParams)->int:
    "Tokens that a request may generate; `CapacityError` if it can't fit"
    context, pool = self.max_model_len, self.pool_tokens
    room = context - num_prompt
    if room < 1:
        full = f"prompt of {num_prompt} tokens leaves no room for an answer in a context of {context}"
        raise CapacityError('prompt', f"{full}: shorten it")
    n = params.max_tokens or min(room, pool - num_prompt)
    if n > room:
        both = f"prompt of {num_prompt} and max_tokens={n} exceed the context of {context}"
        raise CapacityError('max_tokens', f"{both}: lower max_tokens, or leave it out")
    if n < 1 or not self.scheduler.blocks.fits(num_prompt + n):
        much = f"{num_prompt + max(n, 1)} tokens exceed the KV pool of {pool}"
        raise CapacityError('prompt', f"{much}: shorten the request or raise num_blocks")
    return n

@patch
def ask(self:Door,
    prompt:Any,
    params:SamplingParams|None=None,
    request_id:str|None=None,
    arrival:float=0.,
    **more:Any,           # further fields of `Asked`
)->Asked:                 # checked; nothing is taken
    "Look at a request: `ParamError` if it could not be served"
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise ParamError('params', f"params is {type(params).__name__}: give SamplingParams")
    if request_id is not None and not isinstance(request_id, str):
        raise ParamError('request_id', f"request_id={request_id!r}: must be text")
    _check_more(arrival=arrival, **more)
    ids = self.encode(prompt)
    check_ids(ids, params, self.vocab_size)
    if params.stop and self.tokenizer is None:
        raise ParamError('stop', "stop strings need a tokenizer: LLM(..., tokenizer=...)")
    ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos_ids)}
    words = bad_word_ids(params.bad_words, self.tokenizer, self.vocab_size)
    text, limit = prompt if isinstance(prompt, str) else None, self.limit(len(ids), params)
    r = Asked(request_id or '', ids, params, limit, arrival, stop_ids=frozenset(ends), bad_words=words,
              prompt=text, **more)
    if params.prompt_logprobs is not None: r.use_cache = False     # a cached prompt has no logits: it is not computed
    if why := self.scheduler.policy.refuses(self.scheduler, r): raise CapacityError('prompt', why)
    return r

def _check_more(arrival:float, deadline:float|None=None, priority:float=0, cache_salt:str|None=None, **_:Any):
    "Raise `ParamError` for a wish about time, order or cache that can't be meant"
    for name, x in dict(arrival=arrival, deadline=deadline).items():
        if x is not None: check_number(name, x, -1e18, 1e18, 'a finite number')
    check_number('priority', priority, -1e18, 1e18, 'a finite number')
    if not (cache_salt is None or isinstance(cache_salt, str) and len(cache_salt) <= 256):
        raise ParamError('cache_salt', "cache_salt: must be text of up to 256 characters")
    try: (cache_salt or '').encode()
    except UnicodeEncodeError:
        raise ParamError('cache_salt', "cache_salt: is no Unicode text (a lone surrogate)") from None
