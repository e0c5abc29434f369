"What most tests ask for"
from cbatch.params import SamplingParams
from cbatch.ragged_batch import wanted

def sp(max_tokens=12, **more):
    "The likeliest token, `max_tokens` times, whatever ends a text; and more"
    return SamplingParams(**dict(temperature=0, max_tokens=max_tokens, ignore_eos=True) | more)

def poison(llm, who):
    "Make the model give NaN to each request of which `who` is true"
    finish = llm.runner.finish
    def poisoned(plan, pending):
        for i, w in enumerate(wanted(plan)):
            if who(w.request): pending.result[i] = float('nan')
        return finish(plan, pending)
    llm.runner.finish = poisoned
