"""Random lives among strangers: what a tokenizer, a sink, a policy, a mask or a signal handler throws, and what a
caller does to his results or to torch, costs nobody else a token.

Each life has some of the ILLS. Who is not struck himself gets the oracle's answer, and at the end nothing is held."""
import copy, random, signal, threading
from collections import Counter
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
import numpy as np, torch
from cbatch import LLM
from cbatch.model import tiny_lm
from cbatch.params import cdiv
from cbatch.runner import Sampler
from cbatch.scheduler import Policy
from harness import agree, check_answer, draw_params, expected, llama, prompts, quiet

class Panic(BaseException): "What a library in another language throws: no `Exception`"

class Wordless(Exception):
    "An error that can't be told"
    def __str__(self): raise Panic('no words')

class Alarm(Exception): "Thrown by a signal handler, anywhere"

ILLS = {}

class Ill:
    "Something that goes wrong in a life; each method is a place where it may"
    def __init_subclass__(cls): ILLS[cls.__name__.lower()] = cls
    def __init__(self, life): self.life, self.rng = life, life.rng
    def config(self, config): pass      # of the engine
    def begin(self, llm): pass
    def ask(self, rid, wish): pass      # a request's arguments, as `prepare` has them
    def around(self): return nullcontext()   # a step
    def after(self, outs): pass
    def throws(self):
        "Something to throw"
        return self.rng.choice([Panic, Wordless, RuntimeError, KeyError, MemoryError])('thrown on purpose')

class Tokenizer(Ill):
    "Spells every token but one"
    def begin(self, llm):
        tok, bad = copy.copy(llm.model.tokenizer), self.rng.randrange(256)
        spell = tok.convert_ids_to_tokens
        def broken(ids, *args, **kw):
            if bad in (ids if isinstance(ids, list) else [ids]): raise self.throws()
            return spell(ids, *args, **kw)
        tok.convert_ids_to_tokens = broken
        llm.tokenizer = llm.door.tokenizer = tok
        self.life.unspoken = bad

class Sink(Ill):
    "One request's sink throws"
    def begin(self, llm): self.life.sinks.append(self)
    def told(self, rid, draft):
        if self.rng.random() < .05:
            self.life.deaf.add(rid)
            raise self.throws()

class Moody(Ill):
    "A policy that throws, wherever it is asked"
    def config(self, config):
        ill = self
        class P(Policy):
            name = 'vllm'
            def moody(self, often=.02):
                if ill.armed and ill.rng.random() < often: ill.armed = False; raise ill.throws()
            def key(self, r): self.moody(.3); return super().key(r)
            def chunk(self, *a): self.moody(); return super().chunk(*a)
            def close(self, *a): self.moody(); return super().close(*a)
            def starts(self, *a): self.moody(); return super().starts(*a)
            def reserve(self, *a): self.moody(); return super().reserve(*a)
            def wakeup(self, *a): self.moody(); return super().wakeup(*a)
            def on_update(self, *a): self.moody(); return super().on_update(*a)
            def turns(self, s, plan):
                self.moody()
                for_us = super().turns(s, plan)
                r = next(for_us, None)
                while r is not None:
                    answer = yield r
                    self.moody()
                    try: r = for_us.send(answer)
                    except StopIteration: return
        self.armed = False
        config['policy'] = P()
    @contextmanager
    def around(self):
        self.armed = True
        try: yield
        finally: self.armed = False

class Mask(Ill):
    "The mask of one request throws"
    def begin(self, llm):
        def mask(w):
            if w.request.request_id in self.bad and self.rng.random() < .2:
                self.life.struck.add(w.request.request_id)
                raise self.throws()
        self.bad = set()
        llm.runner.sampler = Sampler(llm.model.eos_ids, mask=mask)
    def ask(self, rid, wish):
        if self.rng.random() < .3: self.bad.add(rid)

class Device(Ill):
    "A step fails before or after its blocks were moved, or runs out of memory"
    def begin(self, llm):
        e = llm.runner.executor
        real_forward, real_move = e.forward, e.move
        def forward(batch): self.maybe(); return real_forward(batch)
        def move(moves): self.maybe(); return real_move(moves)
        e.forward, e.move = forward, move
    def maybe(self):
        if self.rng.random() < .03:
            e = self.rng.choice([torch.OutOfMemoryError, RuntimeError, Panic])('the device is odd')
            if not isinstance(e, torch.OutOfMemoryError): self.life.failed_step = True
            raise e

class Ambient(Ill):
    "The caller has torch in a mode of his own"
    MODES = dict(inference=torch.inference_mode, grad=torch.enable_grad, half=lambda: dtype(torch.float64),
                 meta=lambda: torch.device('meta'), autocast=lambda: torch.autocast('cpu', dtype=torch.bfloat16),
                 numpy=lambda: np.errstate(all='raise'), anomaly=torch.autograd.detect_anomaly)
    def begin(self, llm): self.modes = self.rng.sample(sorted(self.MODES), self.rng.randint(1, 2))
    @contextmanager
    def around(self):
        with ExitStack() as stack:
            for m in self.modes: stack.enter_context(self.MODES[m]())
            yield

@contextmanager
def dtype(d):
    old = torch.get_default_dtype(); torch.set_default_dtype(d)
    try: yield
    finally: torch.set_default_dtype(old)

class Numpy(Ill):
    "Numbers of numpy where Python's are meant"
    def config(self, config):
        for k in ('num_blocks', 'block_size', 'max_num_seqs', 'max_num_batched_tokens'): config[k] = np.int64(config[k])
    def ask(self, rid, wish):
        p = wish['params']
        as_numpy = {int: np.int64, float: np.float64, bool: np.bool_}
        names = 'temperature', 'top_k', 'top_p', 'seed', 'max_tokens', 'ignore_eos'
        new = {k: as_numpy[type(x)](x) for k in names if type(x := getattr(p, k)) in as_numpy}
        wish['params'] = replace(p, **new)
        wish['prompt'] = [np.int64(i) for i in wish['prompt']]
        wish['priority'] = np.float32(0)

class Vandal(Ill):
    "Whatever it is given, it changes"
    def after(self, outs):
        for o in outs:
            for xs in (o.prompt_token_ids, o.metrics.token_times, o.outputs, *(c.token_ids for c in o.outputs)):
                if isinstance(xs, list): xs += xs[:3]; xs.reverse()
            for c in o.outputs:
                if isinstance(c.logprobs, list): c.logprobs.clear()
        m = self.life.llm.metrics
        for x in list(m.values()):
            if isinstance(x, dict): x.clear()
        m.clear()
    def ask(self, rid, wish):
        self.life.later.append(wish['prompt'].clear)     # the caller uses his list again

class Reentry(Ill):
    "Sinks, and another thread, come in while a step runs"
    def begin(self, llm):
        self.life.sinks.append(self)
        run = llm.execute
        def execute(plan):
            if self.rng.random() < .2:
                t = threading.Thread(target=self.come_in, args=[llm]); t.start(); t.join()
            return run(plan)
        llm.execute = execute
    def told(self, rid, draft):
        if self.rng.random() < .2: self.come_in(self.life.llm)
    def come_in(self, llm):
        some = next(iter(llm.groups), 'nobody')
        doors = (llm.step, lambda: llm.add([1, 2]), lambda: llm.generate([[3]], use_tqdm=False), llm.turn, llm.close,
                 lambda: some == 'nobody' or llm.abort(some), lambda: next(llm.stream([4])))
        try: self.rng.choice(doors)()
        except ValueError as e:
            assert 'AsyncLLM' in str(e), e
            self.life.seen['refused'] += 1
        else: self.life.seen['came in'] += some != 'nobody'

class Alarms(Ill):
    "A signal handler throws at any moment of a step"
    @contextmanager
    def around(self):
        rang, due_s = [], self.rng.uniform(1e-5, 3e-3) if self.rng.random() < .5 else 0
        def ring(*args): rang.append(1); raise Alarm
        old = signal.signal(signal.SIGALRM, ring)
        try:
            signal.setitimer(signal.ITIMER_REAL, due_s)
            try: yield
            finally: left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)
            if due_s and not left_s and not rang: self.life.wrong = 'a signal was lost'
        finally: signal.signal(signal.SIGALRM, old)

class Twice(Ill):
    "What was entered is entered again: another request with an answer of its own; what has left is aborted"
    def after(self, outs):
        life = self.life
        for rid in life.ended: assert not life.llm.abort(rid)
        if self.rng.random() < .1 and len(life.todo) < 12 and life.entered:
            asked = self.rng.choice(life.entered)
            name = life.llm.enter(asked)
            life.todo[name] = life.todo[asked.request_id]
            life.ended.pop(name, None)          # an id may be used again
            life.seen['entered again'] += 1

@torch.no_grad()
def strange_llama():
    "The harness's, whose configuration also names ends that its logits don't have"
    return tiny_lm('llama', num_hidden_layers=2, eos_token_id=[145, 21, 245, 258, 300, 10**6])

class Life:
    "One engine, a few requests, and some ills"
    def __init__(self, seed, ills):
        self.rng, self.seen = random.Random(seed), Counter()
        self.struck, self.deaf, self.ended = set(), set(), {}     # deaf: whose sink threw, so they were let go
        self.entered, self.sinks, self.later = [], [], []
        self.unspoken, self.failed_step, self.wrong = None, False, None
        self.ills = [ILLS[i](self) for i in ills]
        rng, todo = self.rng, {}
        for i in range(rng.randint(3, 8)):
            prompt, wish = rng.randrange(len(prompts())), rng.choice([0, 0, 1, 2, 3])
            todo[f'q{i}'] = f'q{i}', prompt, wish, draw_params(rng, prompt, wish)
        self.todo = todo
        longest = max(len(prompts()[p]) + sp.max_tokens for _, p, _, sp in todo.values())
        self.llm = self._engine(longest)
        for ill in self.ills: ill.begin(self.llm)

    def _engine(self, longest):
        rng = self.rng
        bs = rng.choice([4, 5, 16])
        need = cdiv(longest, bs)
        config = dict(block_size=bs, num_blocks=need + rng.choice([0, 1, 2, need]), max_num_seqs=rng.choice([2, 4, 8]),
                      max_num_batched_tokens=rng.choice([12, 33, 128]), preemption=rng.choice(['recompute', 'swap']),
                      prefix_caching=rng.random() < .5, check=True)
        for ill in self.ills: ill.config(config)
        return LLM(strange_llama(), **config)

    def sink(self, rid):
        def told(draft):
            o = draft.output()
            if o.finished: self.ended[rid] = copy.deepcopy(o)
            if rid in self.deaf: self.wrong = f'{rid} was told after its sink threw'
            for ill in self.sinks: ill.told(rid, draft)
        return told

    def come(self, rid):
        _, prompt, _, params = self.todo[rid]
        wish = dict(prompt=list(prompts()[prompt]), params=params, request_id=rid)
        for ill in self.ills: ill.ask(rid, wish)
        asked = self.llm.prepare(**wish)
        self.llm.enter(asked, self.sink(rid) if self.sinks else None)
        self.entered.append(asked)
        for change in self.later: change()
        self.later.clear()

    def step(self):
        with ExitStack() as stack:
            for ill in self.ills: stack.enter_context(ill.around())
            outs = self.llm.step()
        for o in outs:
            if o.finished: self.ended[o.request_id] = copy.deepcopy(o)
        for ill in self.ills: ill.after(outs)

    def run(self):
        coming, idle = list(self.todo), 0
        while coming or self.llm.has_unfinished or self.llm.unclaimed:
            while coming and (not self.llm.has_unfinished or self.rng.random() < .5): self.come(coming.pop(0))
            before = self.llm.metrics['num_steps']
            try: self.step()
            except (Panic, Wordless, RuntimeError, KeyError, MemoryError, Alarm) as e: self.seen[type(e).__name__] += 1
            idle = 0 if self.llm.metrics['num_steps'] > before else idle + 1
            assert idle < 200, 'never ends'
        quiet(self.llm)
        assert not self.wrong, self.wrong
        missing = set(self.todo) - set(self.ended)
        assert missing <= self.deaf, f'{missing} have no end'
        for rid, o in self.ended.items(): self.judge(rid, o)
        return self.seen

    def judge(self, rid, o):
        "The oracle's answer; its beginning, and a reason, for those who were struck"
        ask, ours = self.todo[rid], o.outputs[0].token_ids
        if not o.failure: return check_answer(ask, list(ours), o, self.seen)
        ref, _ = expected(*ask[1:])
        assert rid in self.struck or self.failed_step or self.unspoken in ref, f'{rid} was not struck: {o.error}'
        how = agree(prompts()[ask[1]], ask[3], list(ours), ref[:len(ours)])
        assert how != 'different', f'{rid}: {ours} is no beginning of {ref}'
        self.seen['struck'] += 1

def live(seed, ills=None):
    "A life with the given ills, or some"
    rng = random.Random(f'ills {seed}')
    ills = ills or rng.sample(sorted(set(ILLS)), rng.randint(1, 4))
    return Life(seed, ills).run() + Counter(ills)
