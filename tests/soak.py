"""A server among bad company: python tests/soak.py [--seconds 600] [--seed 0]

Clients that leave, dawdle, send garbage or ask for too much, and some honest ones whose greedy answers are compared
with the oracle, on a pool too small for all of them. At the end no block, thread, task, socket or file is left, and
memory has grown by less than GROWTH_MB since the first quarter."""
import argparse, gc, json, os, random, socket, threading, time
from collections import Counter
from pathlib import Path
from cbatch.core import Code, Failure
from cbatch.handover import Box
from cbatch.model import tiny_lm
from cbatch.front import Events
from cbatch.server import Connection
from web import ref, web

GROWTH_MB = 24

def rss_mb():
    "Resident memory of this process, MB; 0 where there is no /proc"
    p = Path('/proc/self/statm')
    return int(p.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 1e6 if p.exists() else 0.
def held():
    "What clients make the server hold, by type"
    gc.collect()
    return Counter(type(o).__name__ for o in gc.get_objects() if type(o) in (Connection, Box, Events))

def num_files(): return len(os.listdir('/proc/self/fd')) if Path('/proc/self/fd').exists() else 0

class Company:
    "What a client may be up to; each method is one visit and says how it went"
    def __init__(self, w, rng, refs): self.w, self.rng, self.refs = w, rng, refs

    def honest(self):
        prompt, n = self.rng.choice(list(self.refs))
        stream = self.rng.random() < .5
        said = self.rng.choice([None, self.refs[prompt, n], [*prompt], []])
        r = self.w.complete(list(prompt), max_tokens=n, stream=stream, priority=self.rng.randint(0, 3), prediction=said)
        if r.status == 429: assert int(r.headers['retry-after']) >= 1; return 'busy'
        assert r.status == 200, (r.status, r.body)
        if stream and 'error' in r.frames[-1]: raise AssertionError(r.frames[-1])
        text = ''.join(f['choices'][0]['text'] for f in r.frames) if stream else r.json['choices'][0]['text']
        assert text == self.refs[prompt, n], (prompt, n, text)
        return 'right'

    def leaver(self):
        prompt = [self.rng.randrange(256) for _ in range(self.rng.randint(1, 60))]
        stream, n = self.rng.random() < .7, self.rng.choice([1, 1, 2])
        s = self.w.raw(prompt=prompt, stream=stream, max_tokens=30, n=n, temperature=1)
        if self.rng.random() < .7: s.recv(self.rng.randint(1, 2000))
        if self.rng.random() < .3: s.shutdown(self.rng.choice([socket.SHUT_WR, socket.SHUT_RD]))
        if self.rng.random() < .5: time.sleep(self.rng.random() * .02)
        s.close()
        return 'left'

    def dawdler(self):
        s = self.w.raw(rcvbuf=2048, stream=True, n=4, max_tokens=25, logprobs=5, temperature=1)
        for _ in range(self.rng.randint(1, 10)):
            if not s.recv(64): break
            time.sleep(.01)
        s.close()
        return 'dawdled'

    def fool(self):
        body = self.rng.choice([b'', b'{', b'\xff' * 50, b'[' * 5000, b'{"model": "tiny"}',
                                b'{"model": "tiny", "prompt": "x", "n": 99}', b'{"model": "no", "prompt": "x"}',
                                json.dumps(dict(model='tiny', prompt=[5] * 500)).encode(),
                                json.dumps(dict(model='tiny', prompt='x', prediction=[999])).encode(),
                                json.dumps(dict(model='tiny', prompt='x', tools=1, logit_bias={'999': 1})).encode()])
        r = self.w.ask('POST', self.rng.choice(['/v1/completions', '/v1/chat/completions', '/nowhere']), body)
        assert 400 <= r.status < 500, (body, r.status, r.body)
        assert 'error' in r.json
        return 'refused'

    def babbler(self):
        "Half a request, or none"
        s = socket.create_connection((self.w.host, self.w.port))
        half = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
        half += b'Content-Type: application/json\r\nContent-Length: 500\r\n\r\n{"mod'
        s.sendall(self.rng.choice([b'', b'GET', half, b'\x16\x03\x01\x00', b'GET / HTTP/9\r\n\r\n']))
        time.sleep(self.rng.random() * .01); s.close()
        return 'babbled'

    def hurried(self):
        prompt, timeout = [7] * self.rng.randint(1, 20), self.rng.choice([.001, .01, .05])
        r = self.w.complete(prompt, max_tokens=40, timeout=timeout, stream=self.rng.random() < .5)
        assert r.status in (200, 408, 429), r.body
        return 'hurried'

    def poisoned(self):
        r = self.w.complete([13, self.rng.randrange(256)], max_tokens=9)
        assert r.status in (429, 500) and (r.status == 429 or r.error['code'] == 'nan_logits'), r.body
        return 'poisoned'

    def watcher(self):
        assert all(self.w.ask('GET', p).status == 200 for p in ('/health', '/metrics', '/v1/models', '/trace?n=3'))
        return 'watched'

    def aborter(self):
        engine = self.w.server.engine
        live = list(engine.worker.desk.live)
        for i in live and self.rng.sample(live, 1):
            box = engine.worker.desk.live.get(i)
            if box and box.request.params.temperature: self.w.on_loop(engine.abort(i))   # it is not compared
        return 'aborted'

KINDS = ['honest'] * 8 + ['leaver'] * 4 + ['fool'] * 2 + 'dawdler babbler hurried poisoned watcher aborter'.split()

def poison(llm):
    "Give NaN to whoever has 13 in his prompt, at his third token"
    run = llm.execute
    def execute(plan):
        out = run(plan)
        for r in [s.request for s in plan.scheduled]:
            if r.prompt_ids[0] == 13 and len(r.output_ids) == 2 and r.request_id in out.sampled:
                del out.sampled[r.request_id]; out.errors[r.request_id] = Failure(Code.NAN_LOGITS, 'NaN')
        return out
    llm.execute = execute

def soak(seconds, seed=0, clients=8):
    "Let them in; what came of it"
    model, rng = tiny_lm('llama', num_hidden_layers=2), random.Random(seed)
    def draw(): return tuple(rng.randrange(14, 256) for _ in range(rng.randint(1, 40))), rng.randint(1, 30)
    prompts = [draw() for _ in range(20)]
    refs, did, failed = {(p, n): ref(model, p, n).text for p, n in prompts}, Counter(), []
    files, before = num_files(), held()
    pool = dict(num_blocks=40, max_num_seqs=6, watermark=0., trace=200, guesses='lookup', guess_when='always')
    with web(model, trace=True, send_timeout_s=2., limits=dict(max_waiting=24), engine=pool) as w:
        poison(w.llm)
        start, end = time.monotonic(), time.monotonic() + seconds
        def visit(i):
            c = Company(w, random.Random(seed * 1000 + i), refs)
            while time.monotonic() < end and not failed:
                kind = c.rng.choice(KINDS)
                try: did[getattr(c, kind)()] += 1
                except ConnectionError: did['connection lost'] += 1
                except BaseException as e: failed.append((kind, repr(e)))
        threads = [threading.Thread(target=visit, args=(i,)) for i in range(clients)]
        for t in threads: t.start()
        time.sleep(seconds / 4); base = rss_mb()
        for t in threads: t.join(seconds + 60)
        assert not failed, failed[0]
        assert not any(t.is_alive() for t in threads), 'a client hangs'
        grown = rss_mb() - base
        w.rests()
        w.wait(lambda: not w.server.server_state.connections, 'connections to close')
        kept = held() - before
        m = dict(w.server.engine.metrics())
    left = num_files() - files
    assert left <= 0, f'{left} files or sockets are left'
    assert not kept, f'still held: {dict(kept)}'
    assert grown < GROWTH_MB, f'memory grew by {grown:.0f} MB'
    counted = dict(steps=m['num_steps'], preemptions=m['num_preemptions'])
    return dict(seconds=round(time.monotonic() - start, 1), visits=dict(did), **counted, grown_mb=round(grown, 1))

if __name__ == '__main__':
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--seconds', type=float, default=600); p.add_argument('--seed', type=int, default=0)
    a = p.parse_args()
    print(json.dumps(soak(a.seconds, a.seed)))
