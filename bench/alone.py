"""Whose tokens are those that he would get alone: python bench/alone.py [--answer 48]

Writes bench/records/alone.json. Eight questions to SmolLM2, together and one by one, greedy and drawn, over each path
in float32 and bfloat16. Counts equal answers; measures no time."""
import argparse
from pathlib import Path
from cbatch import LLM, SamplingParams
from cbatch.loading import load_model
from cbatch.results import write_record

PATHS = {'transformers modules, attention in torch': dict(backend='torch', lean=False),
         'transformers modules, attention in C++': dict(lean=False), 'lean model': dict(products='panels')}
ASKS = ['Write a poem about the sea.', 'Explain gravity.', 'List ten animals.', 'How do I bake bread?',
        'Why is the sky blue?', 'Name five rivers.', 'Who was Newton?', 'Describe Paris.']

def equal_answers(lm, how, params):
    "Of the questions: answers that are the same in a batch and alone"
    chats = [[dict(role='user', content=a)] for a in ASKS]
    with LLM(lm, kv_cache_mb=300, prefix_caching=False, **how) as llm:
        ids = lambda chats: [o.outputs[0].token_ids for o in llm.chat(chats, params, use_tqdm=False)]
        return sum(a == ids([c])[0] for a, c in zip(ids(chats), chats))

if __name__ == '__main__':
    p = argparse.ArgumentParser()
    p.add_argument('--answer', type=int, default=48)
    p.add_argument('--seed', type=int, default=3)
    a = p.parse_args()
    ways = dict(greedy=dict(temperature=0), drawn=dict(temperature=1., seed=a.seed))
    equal = {}
    for dtype in ('float32', 'bfloat16'):
        lm = load_model('smollm2', dtype)
        for name, how in PATHS.items():
            got = {w: equal_answers(lm, how, SamplingParams(max_tokens=a.answer, **kw)) for w, kw in ways.items()}
            equal[f'{name}, {dtype}'] = got
            print(f'{name}, {dtype}: {got} of {len(ASKS)}', flush=True)
    out = Path(__file__).parent/'records'/'alone.json'
    write_record(out, answer=a.answer, seed=a.seed, of=len(ASKS), equal=equal)
