"""What a step has to say to those who asked: the text and scores of each answer, and a report that is true for the moment it was made."""

__all__ = ['Answer', 'Draft']

from fastcore.basics import patch
from typing import Any
from .core import CompletionOutput, Failure, Request, RequestMetrics, RequestOutput, Scores, Status, StepOutput
from .text import Detokenizer

class Answer:
    "A request's text and scores, which no scheduler needs"
    def __init__(self,
        request:Request,
        tokenizer:Any,     # transformers' tokenizer, or None: no text
    ):
        self.request, self.text = request, Detokenizer(tokenizer, request.params)
        self.logprobs:list[Scores] = []         # of each token, if asked for
        self.prompt_logprobs:list[Scores] = []  # of each token of the prompt after the first, if asked for
        self.score = 0.                                     # sum of the log probabilities of its own tokens

    @property
    def done(self)->bool: return self.request.status is Status.FINISHED

    def keep(self, out:StepOutput):
        "Take over the scores that a step brought, once the scheduler has taken its tokens"
        name, r = self.request.request_id, self.request
        for new in out.logprobs.get(name, ())[:len(r.output_ids) - len(self.logprobs)]:
            self.logprobs.append(new)
            self.score += next(iter(new.values())).logprob
        at, scores = out.prompt_logprobs.get(name, (0, []))
        self.prompt_logprobs += scores[len(self.prompt_logprobs) - at:]     # some come again after a preemption

class Draft:
    "What there was to say about a request after a step; `output` writes it out"
    def __init__(self,
        group:str,            # the id that its caller knows
        answers:list[Answer], # all answers to its prompt
    ):
        self.request_id, self.requests = group, [a.request for a in answers]
        self.finished = all(a.done for a in answers)
        self.failure:Failure|None = next((r.failure for r in self.requests if r.failure), None)
        self.scores = answers[0].prompt_logprobs if self.requests[0].params.prompt_logprobs is not None else None
        self.ends:list[tuple[int, int]] = []             # tokens and characters of each answer; the lists still grow
        self.answers:list[CompletionOutput] = []
        for a in answers: self._add(a)

    def _add(self, a:Answer):
        r, t = a.request, a.text
        new = t.delta(last=a.done)
        c = CompletionOutput(r.sample_index, t.text, r.output_ids, r.finish_reason, r.stop_reason, new)
        if r.params.logprobs is not None: c.logprobs, c.cumulative_logprob = a.logprobs, a.score
        self.ends.append((len(r.output_ids), t.sent))
        self.answers.append(c)

@patch
def output(self:Draft)->RequestOutput:
    "The report, as it was true then"
    for c, (n, sent) in zip(self.answers, self.ends):
        c.text, c.token_ids, c.logprobs = c.text[:sent], c.token_ids[:n], c.logprobs and c.logprobs[:n]
    r, name = self.requests[0], self.request_id
    scores = None if self.scores is None else [None, *self.scores]
    timing = self._timing()
    return RequestOutput(name, r.prompt, r.prompt_ids, self.answers, self.finished, timing, self.failure, scores)

@patch
def _timing(self:Draft)->RequestMetrics:
    "When things happened to the answers to one prompt"
    rs, each = self.requests, [r.token_times[:n] for r, (n, _) in zip(self.requests, self.ends)]
    begun = [r.scheduled_at for r in rs if r.scheduled_at is not None]
    ended = [r.finished_at for r in rs if r.finished_at is not None]
    times = each[0] if len(rs) == 1 else sorted(t for ts in each for t in ts) if self.finished else []
    end = max(ended, default=None) if self.finished else None
    num = [sum(getattr(r, k) for r in rs) for k in ('num_preemptions', 'num_recomputed_tokens', 'num_cached_tokens')]
    return RequestMetrics(rs[0].arrival, min(begun, default=None), times, end, *num)
