"A real model in float32: what comes out of a crowded, short-of-memory engine is what transformers' own `generate` says"
import pytest, torch
from cbatch import LLM, SamplingParams
from cbatch.core import Why
from cbatch.loading import load_model
from cbatch.sampler import FAST
from cbatch.token_loop import compare_tokens
from harness import in_cpp

CHAT = ['What is 2+2?', 'Name three primary colours.', 'Who wrote Romeo and Juliet?',
        'Why is the sky blue? Answer in one sentence.', '한국의 수도는 어디입니까?', 'Translate "good morning" into French.',
        'Give me a haiku about rain 🌧️', 'Is 91 a prime number?', 'Schreibe einen Satz über Berlin.',
        'List five animals.']
CODE = ['def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
        'import numpy as np\n\nx = np.arange(10)\nprint(', 'SELECT name, COUNT(*) FROM users\nWHERE ',
        'for (int i = 0; i < n; i++) {\n    sum +=',
        '<html>\n  <head>\n    <title>', '{"name": "Ada", "born": 1815, "', '$ git commit -m "',
        'class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n']
TEXT = ['Once upon a time', 'The', 'hello', '안녕하세요. 오늘 날씨가', '👩‍🚀🚀🌕', '🙂', 'a', '1 2 3 4 5 6',
        'The capital of France is', 'To be, or not to be,', 'E = mc', 'Ingredients:\n- 2 eggs\n-']
STORY = ('The lighthouse keeper had counted ships for thirty years, and on the night of the great storm he counted '
         'none. The wind came out of the north-west, as it always did in November, and it carried with it the smell '
         'of salt and of wet rope. He lit the lamp at five, wrote the hour into his book, and sat down by the stove '
         'with a cup of tea that he forgot to drink. ')
LONG = [STORY * 4 + 'Then', f'Summarise the following text.\n\n{STORY * 2}\n\nSummary:']

def as_ids(tok):
    "The 32 prompts"
    chat = [tok.encode(tok.apply_chat_template([dict(role='user', content=c)], add_generation_prompt=True,
                                               tokenize=False), add_special_tokens=False) for c in CHAT]
    return chat + [tok.encode(p) for p in CODE + LONG + TEXT]

@pytest.fixture(scope='module')
def asked(smollm2):
    "32 prompts as ids, how long each answer may be, and what transformers says"
    prompts = as_ids(smollm2.tokenizer)
    assert len(prompts) == 32 and max(map(len, prompts)) > 300 and min(map(len, prompts)) == 1
    lens = [(32, 5, 24, 16, 9, 28, 12, 20)[i % 8] for i in range(32)]
    return prompts, lens, [theirs(smollm2.hf_model, p, n) for p, n in zip(prompts, lens)]

def theirs(hf_model, ids, n):
    return hf_model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                             do_sample=False, max_new_tokens=n)[0, len(ids):].tolist()

def same(model, prompts, ours, refs):
    "Assert agreement; returns how many answers part at a tie"
    ties = 0
    for p, a, b in zip(prompts, ours, refs):
        how = compare_tokens(model, p, a, b)
        assert how, (f'{model.tokenizer.decode(p)[-60:]!r}: {model.tokenizer.decode(a)!r} '
                     f'is not {model.tokenizer.decode(b)!r}')
        ties += how.tie
    print(f'{ties} ties of {len(refs)}')
    return ties

def greedy(n): return SamplingParams(temperature=0, max_tokens=n)

@pytest.mark.parametrize('long,num_blocks', [(False, 12), (True, 26)])
def test_32_prompts(smollm2, asked, long, num_blocks):
    "Thirty in a pool of 192 tokens, which makes many of them start again; the two longest beside two short ones"
    mine = [i for i, p in enumerate(asked[0]) if (len(p) > 100) == long] + [0, 20] * long
    prompts, lens, refs = ([x[i] for i in mine] for x in asked)
    llm = LLM(smollm2, max_num_seqs=8, max_num_batched_tokens=64, num_blocks=num_blocks, check=True)
    outs = llm.generate(prompts, [greedy(n) for n in lens], use_tqdm=False)
    assert same(smollm2, prompts, [o.outputs[0].token_ids for o in outs], refs) <= 1
    assert all(o.outputs[0].text == smollm2.tokenizer.decode(o.outputs[0].token_ids, skip_special_tokens=True)
               for o in outs)
    assert any(d.why is Why.CHUNK for r in llm.trace for d in r.decisions)
    assert long or llm.metrics['num_preemptions'] >= 5 and {o.outputs[0].finish_reason for o in outs} == {'stop',
        'length'}
    assert llm.num_free_blocks == llm.num_blocks
    assert theirs(llm.hf_model, prompts[-1], 6) == refs[-1][:6]      # the model attends as before

def test_static_batches(smollm2, asked):
    prompts, lens, refs = (x[:20:2] for x in asked)
    llm = LLM(smollm2, policy='static', max_num_seqs=5, max_num_batched_tokens=256, num_blocks=100, check=True)
    outs = llm.generate(prompts, [greedy(n) for n in lens], use_tqdm=False)
    assert same(smollm2, prompts, [o.outputs[0].token_ids for o in outs], refs) <= 1
    assert llm.metrics['num_padding_tokens'] > 100

def test_transformers_padded_batch_agrees(smollm2, asked):
    prompts, lens, refs = (x[10:18] for x in asked)
    longest, n = max(map(len, prompts)), 16
    left = [longest - len(p) for p in prompts]
    batch, mask = (torch.tensor([[0] * k + list(f(p)) for k, p in zip(left, prompts)])
                   for f in (lambda p: p, lambda p: [1] * len(p)))
    outs = smollm2.hf_model.generate(batch, attention_mask=mask, do_sample=False, max_new_tokens=n)[:,
        longest:].tolist()
    end = lambda ids: ids[:next((i + 1 for i, t in enumerate(ids) if t in smollm2.eos_ids), n)]
    assert same(smollm2, prompts, [end(o)[:m] for o, m in zip(outs, lens)], [r[:n] for r in refs]) <= 1

@pytest.mark.parametrize('dtype', ['bfloat16', pytest.param('float32', marks=pytest.mark.slow)])
def test_guesses_change_nothing(smollm2, dtype):
    "32 prompts at temperatures 0, 0.7 and 1: tokens and log probabilities, to the last bit"
    wishes = [SamplingParams(temperature=t, seed=7, max_tokens=24, logprobs=1) for t in (0, .7, 1.)]
    with in_cpp(FAST) as there:
        if not there: pytest.skip('no C++ compiler')
        lm = smollm2 if dtype == 'float32' else load_model('smollm2', dtype, 'cpu')
        prompts, params = as_ids(lm.tokenizer) * 3, [w for w in wishes for _ in range(32)]
        def run(**how):
            with LLM(lm, num_blocks=400, max_num_seqs=32, max_num_batched_tokens=512, **how) as llm:
                outs = llm.generate(prompts, params, use_tqdm=False)
                return [(c.token_ids, c.text, c.finish_reason, [list(d.items()) for d in c.logprobs],
                         c.cumulative_logprob) for o in outs for c in o.outputs], llm.metrics
        (plain, was), (guessed, m) = run(), run(guesses='lookup', guess_when='always')
        assert guessed == plain
        assert m['num_accepted_tokens'] > 100 and m['num_steps'] < was['num_steps']
