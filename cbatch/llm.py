"""`LLM`: text in, text out, everybody in one batch."""

__all__ = ['LLM']

import numbers
from collections.abc import Iterator
from fastcore.basics import patch
from transformers import PreTrainedModel
from typing import Any
from .core import Asked, RequestOutput
from .engine import Engine, undisturbed
from .loading import load_model
from .model import CausalLM
from .params import EngineConfig, ParamError, RequestFailed, SamplingParams
from .policies import get_policy
from .reports import Draft
from .text import encode_chat

class LLM(Engine):
    "A language model that serves any number of requests by continuous batching"
    def __init__(self,
        model:Any,          # smollm2, a hub id, a folder, a .gguf file, a `CausalLM`, a transformers model
        tokenizer:Any=None, # None: the model's own
        runner:Any=None,    # what runs the plans of the engine; None: a `ModelRunner` on the model
        **config:Any,       # any field of `EngineConfig`
    ):
        self.model = None                # closed, until all is made
        cfg = EngineConfig(**config)
        get_policy(cfg.policy)           # a wrong name is found before a model is loaded
        dtype, device = cfg.dtype, cfg.device
        if isinstance(model, PreTrainedModel):
            model = CausalLM(model, None, model.config.name_or_path or type(model).__name__)
        if isinstance(model, CausalLM):      # as it is, unless told otherwise
            dtype, device = (model.dtype if dtype == 'auto' else dtype), (model.device if device == 'auto' else device)
        super().__init__(load_model(model, dtype, device, tokenizer, cfg.load_format), cfg, runner)

    @property
    def hf_model(self)->PreTrainedModel:
        "transformers' own model; it may be used between two steps"
        self.ensure_open()
        return self.model.hf_model
    @property
    def model_path(self)->str:
        "A folder that transformers loads the model from; written once if it has none"
        self.ensure_open()
        if self.model.path is None: self.model.path = self.model.save()
        return self.model.path

@patch
def encode(self:LLM,
    prompt:Any, # text, token ids, or a list of messages
)->list[int]:   # token ids
    "Tokens of a prompt, as a request would get them"
    self.ensure_open()
    return self.door.encode(prompt)

@patch
def _pump(self:LLM):
    "Run a step on behalf of `generate` or `stream`, or wait until one can run"
    if wait := self.turn(): self.sleep(min(.1, wait))    # in slices, to notice Ctrl-C

@patch
def generate(self:LLM,
    prompts:Any,     # one prompt or a list: text, token ids, or messages
    params:SamplingParams|list[SamplingParams]|None=None, # for all, or a list with one for each
    use_tqdm:bool=True,   # show progress
)->list[RequestOutput]:   # in the order of the prompts
    "Answer all prompts; `ValueError` before anything starts, `RequestFailed` if one could not be computed"
    self.ensure_open()
    asked, done, entered = self._asked(prompts, params), dict[str, RequestOutput](), list[str]()
    with self._progress(len(asked), use_tqdm) as bar, undisturbed() as pressed:
        def sink(o:Draft):
            if not o.finished: return
            done[o.request_id] = o.output()
            bar.update()
        try:
            for a in asked: entered.append(self.enter(a, sink))
            while len(done) < len(asked) and not pressed: self._pump()
        finally: self._drop(entered, sink)
    outs = [done[i] for i in entered]
    for o in outs:
        if o.failure: raise RequestFailed(f"{o.request_id}: {o.error}")
    return outs

@patch
def _asked(self:LLM, prompts:Any, params:Any)->list[Asked]:
    "Each prompt with its wishes, looked at"
    if not isinstance(prompts, (str, list, tuple)):
        raise ParamError('prompts', f"prompts is {type(prompts).__name__}: give one prompt or a list of them")
    one = isinstance(prompts, str) or bool(prompts) and isinstance(prompts[0], (numbers.Integral, dict))
    prompts = [prompts] if one else list(prompts)
    params = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
    if len(params) != len(prompts):
        have = f"{len(prompts)} prompts and {len(params)} params"
        raise ParamError('params', f"{have}: give one for all, or one for each")
    return [self.prepare(p, sp) for p, sp in zip(prompts, params)]

@patch
def _progress(self:LLM, n:int, show:bool):
    from tqdm.auto import tqdm
    return tqdm(total=n, desc='requests', disable=not show, leave=False)

@patch
def _drop(self:LLM, ids:list[str], sink:Any):
    "Let requests leave that are still here, and their sinks; others may have their ids by now"
    for i in ids:
        if self.sinks.get(i) == sink:
            self.abort(i)
            del self.sinks[i]

@patch
def chat(self:LLM,
    messages:list[Any],   # one conversation, a list of dict(role=, content=), or a list of conversations
    params:SamplingParams|list[SamplingParams]|None=None, use_tqdm:bool=True,
    tools:list[dict[str, Any]]|None=None, # JSON schemas of functions, for a model whose template knows tools
)->list[RequestOutput]:
    "`generate` for conversations, through the model's chat template"
    self.ensure_open()
    chats = [messages] if messages and isinstance(messages[0], dict) else messages
    return self.generate([encode_chat(self.tokenizer, m, tools) for m in chats] if tools else chats, params, use_tqdm)

@patch
def stream(self:LLM,
    prompt:Any,        # text, token ids, or messages
    params:SamplingParams|None=None,
)->Iterator[str]:      # text
    "Yield the answer piece by piece; `ValueError` at once if the request can't be served"
    asked = self.prepare(prompt, params)
    if asked.params.n > 1:
        raise ParamError('n', f"n={asked.params.n}: a stream has one answer; use add and step, or generate")
    return self._stream(asked)

@patch
def _stream(self:LLM, asked:Asked)->Iterator[str]:
    news:list[Draft] = []
    entered:list[str] = []
    sink, asked.arrival = news.append, self.clock()       # it comes when it is first asked for a piece
    try:
        with undisturbed(): entered.append(self.enter(asked, sink))
        while True:
            while not news:
                with undisturbed(): self._pump()
            o = news.pop(0).output()
            if o.finished: self._drop(entered, sink)
            if o.outputs[0].delta: yield o.outputs[0].delta
            if o.failure: raise RequestFailed(f"{o.request_id}: {o.error}")
            if o.finished: return
    finally:
        with undisturbed(): self._drop(entered, sink)

@patch
def __enter__(self:LLM)->LLM: return self
@patch
def __exit__(self:LLM, *exc:Any): self.close()

@patch
def __repr__(self:LLM)->str:
    if self.model is None: return 'LLM(closed)'
    c, m, room = self.config, self.model, self.num_blocks * self.config.block_size
    pool = f"{self.num_blocks:,} blocks x {c.block_size} = {room:,} tokens, {self.kv_bytes / 1e6:,.1f} MB"
    return (f"LLM({m.name}, {str(m.dtype)[6:]} on {m.device}, policy {self.scheduler.policy.name}; "
            f"at most {c.max_num_seqs} requests and {c.max_num_batched_tokens} tokens a step; KV pool {pool})")

@patch
def _repr_html_(self:LLM)->str:
    if self.model is None: return '<code>LLM(closed)</code>'
    c, m, now, room = self.config, self.model, self.metrics, self.num_blocks * self.config.block_size
    pool = f"{self.num_blocks:,} blocks of {c.block_size} = {room:,} tokens, {self.kv_bytes / 1e6:,.1f} MB"
    steps, use = f"{now['num_steps']:,} steps, {now['num_sampled_tokens']:,} tokens", f"{now['slot_utilisation']:.0%}"
    rows = {'model': f'{m.name}, {str(m.dtype)[6:]} on {m.device}', 'policy': self.scheduler.policy.name,
            'batch': f'{c.max_num_seqs} requests, {c.max_num_batched_tokens:,} tokens',
            'KV pool': f'{pool}; {self.num_free_blocks:,} blocks free',
            'now': f"{now['num_running']} running, {now['num_waiting']} waiting",
            'so far': f'{steps}, slot utilisation {use}'}
    return '<table>' + ''.join(f'<tr><td>{k}</td><td>{v}</td></tr>' for k, v in rows.items()) + '</table>'
