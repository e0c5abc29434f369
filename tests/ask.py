"What most tests ask for"
from cbatch.params import SamplingParams

def sp(max_tokens=12, **more):
    "The likeliest token, `max_tokens` times, whatever ends a text; and more"
    return SamplingParams(**dict(temperature=0, max_tokens=max_tokens, ignore_eos=True) | more)
