"""What guesses are worth: python bench/guesses.py [--task edit|summarise|rag|chat] [--temperature 0,.7,1] [--slots 1,4]

Writes bench/records/guesses.json. The same requests on the same weights by an engine without guesses and by one that
looks them up, in turns within one run, one prompt after the other (or one crowd, with more than one slot); both must
say the same tokens. Tasks: rewrite functions of Python's own library, summarise paragraphs of this repository's texts,
quote from them, and chat. The guesser of each cell starts knowing nothing. `ratio` is of tokens per second in steps
that decode and nothing else, `ratio_of_all` of whole runs, prompts and all. Then `w64`: 64 chats in 32 slots with W64's
answer lengths; `sweep`: where it stops paying; `rows`: what a step of one request takes with so many guesses.
On a machine with neighbours: --threads 1 --cpu, which counts CPU time. --quick: few requests and no record."""
import argparse, heapq, inspect, json, shlex, statistics, string, textwrap, time
from collections.abc import Callable
from pathlib import Path
from statistics import median
import torch
from cbatch import LLM, SamplingParams
from cbatch.guesses import Guess, Guesser, get_guesses
from cbatch.loading import load_model
from cbatch.results import write_record
from cbatch.workloads import w64

HERE = Path(__file__).resolve().parent
OUT, TASKS = HERE/'records'/'guesses.json', ('edit', 'summarise', 'rag', 'chat')
ASKED = ("Write a short story about {}.", "Explain {} to a child.", "Write a letter to a friend about {}.",
         "List ten facts about {}.", "What should everybody know about {}?", "How would you begin to learn about {}?",
         "Write a poem about {}.", "What was known about {} a hundred years ago?")
THINGS = ("a lighthouse", "the moon", "bread", "computers", "the piano", "Paris", "a day at the beach", "whales")

def functions()->list[str]:
    "Sources of functions of the standard library, 8 to 60 lines each"
    found = []
    for module in (heapq, textwrap, shlex, statistics, string, json.decoder, inspect):
        mine = (f for _, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__)
        found += [textwrap.dedent(t) for t in map(inspect.getsource, mine) if 8 <= t.count('\n') <= 60]
    return found[::2]

def texts()->list[str]:
    files = [HERE.parent/f for f in ('README.md', 'LICENSE', 'CONTRIBUTING.md')]
    every = [p.replace('\n', ' ') for f in files for p in f.read_text().split('\n\n')]
    return [p for p in every if 300 < len(p) < 1200 and '|' not in p]

def prompts(task:str, n:int)->list[str]:
    edit = ("Here is some Python code:\n```python\n{}```\nRewrite the whole code with every comment removed and the "
            "first parameter renamed to `data`. Answer with the complete code only.")
    brief = "Summarise the following text in a few sentences, using its own words where you can.\n\n{}"
    quote = ("Context:\n{}\n{}\n\nQuestion: What does the first paragraph say? Quote the sentence that answers, then "
             "explain.")
    if task == 'edit': some = [edit.format(c) for c in functions()]
    elif task == 'chat': some = [a.format(THINGS[(i + j) % 8]) for i in range(8) for j, a in enumerate(ASKED)]
    else:
        ts = texts()
        some = [brief.format(t) if task == 'summarise' else quote.format(t, u) for t, u in zip(ts, ts[1:] + ts[:1])]
    return [some[i % len(some)] for i in range(n)]

def engine(lm, a:argparse.Namespace, **config)->LLM:
    llm = LLM(lm, prefix_caching=False, **config)
    if a.cpu: llm.clock = time.thread_time
    return llm

class Meter:
    "Runs requests and adds up what their steps took"
    def __init__(self, llm:LLM):
        self.llm, self.s, self.decode_s, self.tokens, self.decode_tokens, self.guess_s = llm, 0., 0., 0, 0, 0.
        self.decode_steps, self.start = 0, llm.counters.as_dict()
        if llm.config.guesses == 'off': return
        g = llm.scheduler.guesses = get_guesses(llm.config, llm.model)      # knows nothing
        g.add, g.learn = self.timed(g.add), self.timed(g.learn)

    def timed(self, f:Callable)->Callable:
        def run(*args):
            start = self.llm.clock()
            f(*args)
            self.guess_s += self.llm.clock() - start
        return run

    def __call__(self, some:list[tuple[str, SamplingParams]])->list[list[int]]:
        llm, c, got = self.llm, self.llm.counters, {}
        ids = [llm.add([dict(role='user', content=p)], params) for p, params in some]
        while llm.has_unfinished:
            tokens, prompt, start = c.num_sampled_tokens, c.num_prompt_tokens, llm.clock()
            for o in llm.step():
                if o.finished: got[o.request_id] = list(o.outputs[0].token_ids)
            took, made = llm.clock() - start, c.num_sampled_tokens - tokens
            self.s, self.tokens = self.s + took, self.tokens + made
            if c.num_prompt_tokens > prompt: continue
            self.decode_s, self.decode_tokens = self.decode_s + took, self.decode_tokens + made
            self.decode_steps += 1
        return [got[i] for i in ids]

    def since(self, name:str)->int: return self.llm.counters.as_dict()[name] - self.start[name]

def compare(plain:LLM, guessing:LLM, crowds:list[list[tuple[str, SamplingParams]]], rounds:int)->dict:
    "Both engines in turns, crowd after crowd"
    a, b = Meter(plain), Meter(guessing)
    for i in range(rounds):
        for j, crowd in enumerate(crowds):
            said = [m(crowd) for m in ((a, b) if (i + j) % 2 == 0 else (b, a))]
            assert said[0] == said[1], 'guesses changed a token'
    guessed, held = b.since('num_guessed_tokens'), b.since('num_accepted_tokens')
    return dict(requests=rounds * sum(map(len, crowds)), tokens=b.tokens, equal=True,
                tokens_per_s=[m.decode_tokens / m.decode_s for m in (a, b)],
                ratio=b.decode_tokens / b.decode_s * a.decode_s / a.decode_tokens, ratio_of_all=a.s / b.s,
                tokens_per_step=[m.decode_tokens / m.decode_steps for m in (a, b)], guessed=guessed, held=held,
                acceptance=held / guessed if guessed else None, accepted_at=b.llm.counters.accepted_at[:],
                guessing_share=b.guess_s / b.s)

class Wrong(Guesser):
    "So many guesses of one token, good or not"
    num = 0
    def guess(self, r, most): return Guess([1] * min(most, self.num))

def rows(lm, a:argparse.Namespace)->dict[int, float]:
    "Median ms of a step of one request with so many guesses"
    wrong, took = Wrong(), {n: [] for n in (0, 1, 2, 3, 4, 5, 6, 8, 11, 15, 23, 31)}
    with engine(lm, a, guesses=wrong, guess_when='always', max_guesses=32, num_blocks=200) as llm:
        llm.add(list(range(100, 400)), max_tokens=1500, ignore_eos=True, temperature=0)
        for i in range(a.steps + 1):
            for n, s in took.items():
                wrong.num, start = n, llm.clock()
                llm.step()
                if i: s.append(1000 * (llm.clock() - start))
    return {n: median(s) for n, s in took.items()}

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = lambda kind: lambda text: [kind(x) for x in text.split(',')]
    p.add_argument('--task', type=listed(str), default=TASKS)
    p.add_argument('--temperature', type=listed(float), default=[0., .7, 1.])
    p.add_argument('--slots', type=listed(int), default=[1, 4, 32])
    p.add_argument('--sweep', type=listed(int), default=[1, 2, 4, 8, 16, 32], help='slots, for where it stops paying')
    for name, default in dict(requests=10, tokens=160, rounds=2, steps=20, max_guesses=8, threads=2, seed=1).items():
        p.add_argument(f'--{name.replace("_", "-")}', type=int, default=default)
    p.add_argument('--quick', action='store_true', help='does it work?')
    p.add_argument('--cpu', action='store_true', help='CPU time of one thread, not seconds on the wall')
    a = p.parse_args()
    if a.cpu and a.threads != 1: p.error('--cpu counts one thread: --threads 1')
    if a.quick: a.requests, a.tokens, a.rounds, a.steps, a.sweep = 2, 40, 1, 3, [4]
    torch.set_num_threads(a.threads)
    lm = load_model('smollm2', 'bfloat16')
    def run(slots:int, task:str, temperature:float, lens:list[int]|None=None, rounds:int=a.rounds)->dict:
        n = len(lens or ()) or max(a.requests, 2 * slots) if slots > 1 else a.requests
        wish = lambda i: SamplingParams(temperature=temperature, max_tokens=lens[i] if lens else a.tokens, seed=a.seed)
        asked = [(q, wish(i)) for i, q in enumerate(prompts(task, n))]
        sizes = dict(max_num_seqs=slots, num_blocks=80 * max(4, slots))
        guesses = dict(guesses='lookup', max_guesses=a.max_guesses)
        with engine(lm, a, **sizes) as plain, engine(lm, a, **sizes, **guesses) as guessing:
            got = compare(plain, guessing, [[x] for x in asked] if slots == 1 else [asked], rounds)
        some = 'ratio', 'ratio_of_all', 'acceptance', 'guessing_share'
        share = ' '.join(f'{k} {got[k]:.3f}' for k in some if got[k])
        print(f"{slots} slots, {task}, T={temperature:g}: {share}, {got['tokens_per_step'][1]:.2f} a step", flush=True)
        return dict(slots=slots, task=task, temperature=temperature) | got
    by_rows = rows(lm, a)
    print('ms by guesses', {n: round(ms, 2) for n, ms in by_rows.items()}, flush=True)
    runs = [run(s, t, x) for s in a.slots for t in a.task for x in a.temperature]
    lens = [x.output_len for x in w64(a.seed)]
    long = [run(32, 'chat', x, lens[:8] if a.quick else lens) for x in a.temperature]
    sweep = [run(s, t, 0., rounds=1) for s in a.sweep for t in ('edit', 'chat') if t in a.task]
    write_record(None if a.quick else OUT, **vars(a) | dict(sweep=sweep), model='smollm2', dtype='bfloat16',
                 rows=by_rows, runs=runs, w64=long)

if __name__ == '__main__': main()
