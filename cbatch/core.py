"""The words of the engine: what a request is, what a step plans, what it brings back, and why."""

__all__ = ['Status', 'Code', 'Failure', 'Asked', 'Request', 'Kind', 'Why', 'Reason', 'Decision', 'Scheduled', 'Padding', 'Plan', 'Logprob', 'Scores', 'StepOutput',
           'StepRecord', 'RequestMetrics', 'CompletionOutput', 'RequestOutput']

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple
from fastcore.basics import patch
from .params import SamplingParams

class Status(str, Enum):
    "Where a request is in its life"
    WAITING, RUNNING, PREEMPTED, PAUSED, FINISHED = 'waiting', 'running', 'preempted', 'paused', 'finished'

class Code(str, Enum):
    "What kind of failure ended a request"
    DEADLINE = 'deadline'            # its time was over
    NAN_LOGITS = 'nan_logits'        # the model gave numbers that are not finite
    NO_TOKEN_LEFT = 'no_token_left'  # its options forbid every token
    SAMPLING = 'sampling'            # choosing its token raised
    STEP = 'step'                    # the step that computed it raised
    TEXT = 'text'                    # turning its tokens into text raised
    SLOW_READER = 'slow_reader'      # nobody took what it said
    ENGINE = 'engine'                # the engine itself has ended

class Failure(NamedTuple):
    "Why a request ended by an error: a code for programs, a text for people"
    code:Code
    text:str

class _Weak: __slots__ = ('__weakref__',)   # a class with slots refuses weak references, unless told otherwise

@dataclass(eq=False, slots=True)
class Asked(_Weak):
    "What was asked: one answer to one prompt. Set when the request enters, never changed after"
    request_id:str
    prompt_ids:list[int]
    params:SamplingParams
    max_tokens:int                # resolved: never None here
    arrival:float = 0.            # s, on the engine's clock
    seq:int = 0                   # order of `add`, breaks ties of `arrival`
    seed:int = 0                  # resolved: what its random numbers are keyed by
    stop_ids:frozenset[int] = frozenset()  # ids that end it: the model's own and the params'
    bad_words:tuple[tuple[int, ...], ...] = ()  # the params' words, as token ids
    prompt:str|None = None        # the text it came from, if it came as text
    user:str|None = None
    priority:float = 0            # smaller is more urgent
    deadline:float|None = None    # s, ends by an error if it is not done by then
    cache_salt:str|None = None    # shares cached blocks only with requests of the same salt
    use_cache:bool = True         # may it read and leave blocks in the prefix cache?
    group:str = ''                # the id that its caller knows, shared by all answers to one prompt
    sample_index:int = 0          # which of its prompt's answers this is

@dataclass(eq=False, slots=True)
class Request(Asked):
    "What was asked, and how far the scheduler has got with it. Its text and scores are the engine's business"
    fork_of:'Request|None' = None # whose prompt it shares, if it is a later answer to it
    output_ids:list[int] = field(default_factory=list)
    num_computed_tokens:int = 0   # tokens whose KV is written
    block_table:list[int] = field(default_factory=list)    # block ids, in order
    host_table:list[int] = field(default_factory=list)     # host block ids, while it is swapped out
    block_hashes:list[bytes] = field(default_factory=list) # of its full blocks, as far as they were asked for
    num_committed_blocks:int = 0  # leading blocks that others can find
    status:Status = Status.WAITING
    turn:int = 0                  # number of the last plan that asked about it
    finish_reason:str|None = None # stop, length, abort, error
    stop_reason:int|str|None = None  # the id or string that stopped it
    failure:Failure|None = None   # what went wrong, if it ended by an error
    num_preemptions:int = 0
    num_recomputed_tokens:int = 0 # tokens computed once more because their KV was given up
    num_cached_tokens:int = 0     # prompt tokens found in the prefix cache
    scheduled_at:float|None = None   # s, first step that gave it tokens
    token_times:list[float] = field(default_factory=list)  # s, one per output token
    finished_at:float|None = None

@patch(as_prop=True)
def num_tokens(self:Request)->int: return len(self.prompt_ids) + len(self.output_ids)

@patch(as_prop=True)
def num_left(self:Request)->int:
    "Tokens that still need KV; one for a request that decodes"
    return len(self.prompt_ids) + len(self.output_ids) - self.num_computed_tokens

@patch(as_prop=True)
def age(self:Request)->tuple[float, int]:
    "Sorts requests by arrival: first come is smallest"
    return self.arrival, self.seq

@patch
def tokens(self:Request, start:int, stop:int)->list[int]:
    "Token ids `start:stop` of prompt and output together"
    n = len(self.prompt_ids)
    if start >= n: return self.output_ids[start-n:stop-n]
    return self.prompt_ids[start:stop] + (self.output_ids[:stop-n] if stop > n else [])

class Kind(str, Enum):
    "What was done with a request"
    ADMITTED = 'admitted'      # joined the batch
    RESUMED = 'resumed'        # joined it again after a preemption or a pause
    RUNS = 'runs'              # computes in this step
    WAITS = 'waits'            # does not
    PREEMPTED = 'preempted'    # lost its memory
    PAUSED = 'paused'          # left the batch and kept its memory
    BEHIND = 'behind'          # `n` of the queue were not even asked
    FAILED = 'failed'          # the step raised
    NOTE = 'note'              # said in words only, by a trace of another version

class Why(str, Enum):
    "For what reason; a policy may have reasons of its own, as plain strings"
    DECODE, PREFILL, CHUNK = 'decode', 'prefill {n}', 'chunk {n}/{of}'   # what a share of the step is
    BUDGET = 'budget'                          # no tokens are left for it in this step
    BATCH_FULL = 'batch full'
    BLOCKS = '{n} block{s} short'
    MEMORY = 'memory ran short'                # somebody was preempted in this step: nobody joins
    PREFIX = '{of} computes {n} of its tokens' # they will be in the cache
    FORK = '{of} computes the prompt'          # which they will share
    CLOSED = 'batch closed'
    WINDOW = 'window of {n:g} s'               # waits for company
    FORCED = 'forced'                          # for teaching and tests
    ASKED = 'asked before'                     # had its turn in this step
    ENDED = 'ended'
    NOTHING = ''

class Reason(NamedTuple):
    "Why somebody waits, with its number and its object"
    why:str                      # a `Why`, or a policy's own words
    n:float|None = None
    of:str|int|None = None

    def __str__(self)->str:
        text = self.why.value if isinstance(self.why, Why) else self.why
        return text.format(n=self.n, of=self.of, s='s' * (self.n != 1)) if isinstance(self.why, Why) else text

_SHARES = Why.DECODE, Why.PREFILL, Why.CHUNK

class Decision(NamedTuple):
    "What was done with a request in a step, and why"
    request_id:str|None          # None speaks of the step or of the queue
    kind:Kind
    why:str = Why.NOTHING        # a `Why`; the victim rule's name; a policy's own words
    n:float|None = None          # tokens of the share, blocks short, seconds, requests behind
    of:str|int|None = None       # of how many; who is waited for

    @property
    def reason(self)->Reason: return Reason(self.why, self.n, self.of)

    def __str__(self)->str:
        kind, said = self.kind, str(self.reason)
        if kind is Kind.BEHIND: return f'{self.n} more wait behind'
        if kind is Kind.FAILED: return 'the step failed: nothing was computed'
        if kind in (Kind.RUNS, Kind.NOTE): return said
        if kind in (Kind.WAITS, Kind.PREEMPTED, Kind.PAUSED): return f'{kind.value}: {said}' if said else kind.value
        return f'{kind.value}, {said}' if self.why in _SHARES else f'{kind.value}, waits: {said}'

class Scheduled(NamedTuple):
    "A request's share of a step, settled when it is planned"
    request:Request
    start:int                    # first token to compute
    stop:int                     # one past the last that is known
    draft:tuple[int, ...] = ()   # tokens guessed to follow, computed after them
    rows:int = 0                 # logit rows wanted: none, or one for the last known token and one for each guess

    @property
    def num_tokens(self)->int: return self.stop - self.start + len(self.draft)

@dataclass
class Padding:
    "Tokens computed for nobody"
    num_tokens:int        # rows of the batch
    context_len:int       # KV positions the last of them attends to

@dataclass
class Plan:
    "What one step computes, in the order swap_out, swap_in, copies, writes. A value: nobody changes it once it is made"
    step:int                                        # number of the step, from 0
    now:float                                       # s, when it was decided
    left:int = 0                                    # tokens of the budget not given away
    scheduled:list[Scheduled] = field(default_factory=list)
    padding:list[Padding] = field(default_factory=list)
    admitted:list[Request] = field(default_factory=list)   # new or resumed in this step
    preempted:list[Request] = field(default_factory=list)
    paused:list[Request] = field(default_factory=list)
    expired:list[Request] = field(default_factory=list)    # their deadline has passed
    swap_out:list[tuple[int, int]] = field(default_factory=list)  # (block, host block)
    swap_in:list[tuple[int, int]] = field(default_factory=list)   # (host block, block)
    copies:list[tuple[int, int]] = field(default_factory=list)    # (from block, to block)
    blocks:dict[str, list[int]] = field(default_factory=dict)     # request_id -> blocks it got; if admitted, all it has
    found:dict[str, int] = field(default_factory=dict)            # request_id -> tokens that it had when admitted
    decisions:list[Decision] = field(default_factory=list)        # empty when nobody listens
    num_waiting:int = 0                             # still in the queue

    @property
    def num_tokens(self)->int: return sum(s.num_tokens for s in self.scheduled)
    @property
    def num_padding(self)->int: return sum(p.num_tokens for p in self.padding)
    def __bool__(self)->bool:
        return bool(self.scheduled or self.padding or self.preempted or self.paused or self.expired)

@dataclass(frozen=True)
class Logprob:
    "How likely the model itself held a token, before any option changed its mind"
    logprob:float   # natural logarithm of its probability
    rank:int        # 1 for the likeliest

Scores = dict[int, Logprob]   # of a token and of the likeliest beside it, its own first

@dataclass
class StepOutput:
    "What a step brought: for each sampling request its new tokens, or why it has none"
    sampled:dict[str, list[int]] = field(default_factory=dict)    # request_id -> ids: guesses that held, and one more
    errors:dict[str, Failure] = field(default_factory=dict)       # request_id -> what went wrong in its row alone
    logprobs:dict[str, list[Scores]] = field(default_factory=dict)              # of each new token
    prompt_logprobs:dict[str, tuple[int, list[Scores]]] = field(default_factory=dict)  # (first position, of each)

@dataclass
class StepRecord:
    "One step in plain data: what ran, what was decided and why, what changed"
    step:int
    start:float                   # s
    end:float                     # s
    scheduled:list[tuple[str, int, int, int]] = field(default_factory=list)  # (id, num_tokens, before, sampled)
    padding:list[tuple[int, int]] = field(default_factory=list)     # (num_tokens, context_len)
    decisions:list[Decision] = field(default_factory=list)
    admitted:list[str] = field(default_factory=list)    # request ids, resumed ones too
    preempted:list[str] = field(default_factory=list)   # request ids
    paused:list[str] = field(default_factory=list)      # request ids
    finished:list[tuple[str, str]] = field(default_factory=list)    # (request_id, finish_reason)
    arrived:list[tuple[str, int, float]] = field(default_factory=list)  # (id, prompt_len, arrival) since the last step
    found:dict[str, int] = field(default_factory=dict)       # request_id -> tokens that an admitted request had already
    blocks:dict[str, list[int]] = field(default_factory=dict)  # request_id -> block ids added since the step before
    num_waiting:int = 0           # still in the queue when the step was decided
    num_free_blocks:int = 0       # after the step

@dataclass
class RequestMetrics:
    "When things happened to a request, in seconds on the engine's clock"
    arrival:float
    scheduled_at:float|None
    token_times:list[float]       # one per output token
    finished_at:float|None
    num_preemptions:int = 0
    num_recomputed_tokens:int = 0
    num_cached_tokens:int = 0

@dataclass
class CompletionOutput:
    "One answer to a prompt"
    index:int
    text:str
    token_ids:list[int]
    finish_reason:str|None = None # None while it runs
    stop_reason:int|str|None = None
    delta:str = ''                # text since the last report
    logprobs:list[Scores]|None = None  # of each token; None if not asked for
    cumulative_logprob:float|None = None  # sum over its own tokens

@dataclass
class RequestOutput:
    "A prompt and its answers so far"
    request_id:str
    prompt:str|None
    prompt_token_ids:list[int]
    outputs:list[CompletionOutput]
    finished:bool
    metrics:RequestMetrics|None = None
    failure:Failure|None = None   # why it ended by an error
    prompt_logprobs:list[Scores|None]|None = None  # None for the first token; None if not asked for

    @property
    def error(self)->str|None:
        "What went wrong, in words"
        return self.failure.text if self.failure else None
