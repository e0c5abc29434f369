"A real server on loopback for tests, on the tiny model: how to ask it, and what must hold when everybody has left"
import asyncio, http.client, json, socket, threading, time
from contextlib import contextmanager
import openai
from cbatch import LLM, SamplingParams
from cbatch.model import tiny_lm
from cbatch.server import background
from cbatch.token_loop import generate_ref
from harness import quiet

NEXT = [9, 8, 7]
JSON = {'Content-Type': 'application/json'}
ENGINE = dict(num_blocks=128, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, check=True)

class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, {k.lower(): v for k, v in headers}, body
    @property
    def json(self): return json.loads(self.body, parse_constant=lambda c: 1 / 0)
    @property
    def error(self):
        assert set(self.json) == {'error'} and set(self.json['error']) == {'message', 'type', 'param',
            'code'}, self.body
        e = self.json['error']
        assert isinstance(e['message'], str) and isinstance(e['type'], str) and all(isinstance(e[k], (str, type(None)))
            for k in ('param', 'code'))
        assert not any(s in e['message'] for s in ('Traceback', '/home', '.py', '0x7'))
        return e
    @property
    def frames(self):
        "Payloads of an event stream; it must end by [DONE]"
        lines = [l for l in self.body.decode().split('\n\n') if l and not l.startswith(':')]
        assert all(l.startswith('data: ')
                   for l in lines) and lines.count('data: [DONE]') == 1 and lines[-1] == 'data: [DONE]', lines[-2:]
        return [json.loads(l[6:]) for l in lines[:-1]]

class Web:
    "A running server as its clients and its doctor see it"
    def __init__(self, server, llm, key=None):
        self.server, self.llm, self.key, self.hooks = server, llm, key, []
        self.host, self.port = server.sock.getsockname()[:2]
        run = llm.execute
        def execute(plan):
            for h in list(self.hooks): h(plan)
            return run(plan)
        llm.execute = execute

    def ask(self, method, path, body=None, headers=None, timeout=20):
        "One request, one reply"
        c = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        body = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body).encode()
        auth = {'Authorization': f'Bearer {self.key}'} if self.key else {}
        try:
            c.request(method, path, body, {**(JSON if body is not None else {}), **auth, **(headers or {})})
            r = c.getresponse()
            return Reply(r.status, r.getheaders(), r.read())
        finally: c.close()

    def complete(self, prompt=NEXT, headers=None, **kw): return self.ask('POST', '/v1/completions',
            dict(model='tiny', prompt=prompt, temperature=0, max_tokens=6, ignore_eos=True) | kw, headers)
    def chat(self, content='Hi', **kw): return self.ask('POST', '/v1/chat/completions',
                                                        dict(model='tiny', messages=[dict(role='user',
                                                            content=content)], temperature=0, max_tokens=6,
                                                             ignore_eos=True) | kw)
    def client(self, **kw):
        return openai.OpenAI(**dict(base_url=self.server.url + '/v1', api_key=self.key or 'none', max_retries=0,
                                    timeout=20) | kw)

    def raw(self, path='/v1/completions', rcvbuf=None, **kw):
        "A socket on which a request has been sent"
        s = socket.socket()
        if rcvbuf: s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        s.settimeout(20); s.connect((self.host, self.port))
        body = json.dumps(dict(model='tiny', prompt=NEXT, temperature=0, max_tokens=400, ignore_eos=True) | kw).encode()
        head = (f'POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n'
                f'Content-Length: {len(body)}\r\n\r\n')
        s.sendall(head.encode() + body)
        return s

    def on_loop(self, coro, timeout=20): return asyncio.run_coroutine_threadsafe(coro, self.server.loop).result(timeout)
    def inside(self, f): return self.on_loop(self.server.engine.call(f))

    def wait(self, true, what='that', timeout=10):
        end = time.monotonic() + timeout
        while not true():
            assert time.monotonic() < end, f'waited for {what} in vain'
            time.sleep(.005)

    def slow(self, s=.01):
        "Let each step take a while"
        self.hooks.append(lambda plan: time.sleep(s))

    def until_sent(self, n, s=.01):
        "Let no step end before `n` more answers have been handed to the engine, and each take a while"
        desk = self.server.engine.worker.desk; n += desk.sent
        def wait(plan):
            while desk.sent < n: time.sleep(.002)
            time.sleep(s)
        self.hooks.append(wait)

    def rests(self):
        "The quiesce check: nobody is here, nothing is held, the next answer is right"
        self.hooks.clear()
        m = self.server.engine.metrics
        self.wait(lambda: not self.llm.has_unfinished and not self.server.engine.worker.desk.live,
                  'the engine to be empty')
        self.inside(quiet)
        r = self.complete(logprobs=0)
        assert r.status == 200, r.body
        assert r.json['choices'][0]['text'] == ref(self.llm.model, NEXT, 6).text
        self.inside(quiet)
        self.wait(lambda: m()['num_running'] == m()['num_waiting'] == 0)
        self.wait(lambda: self.on_loop(tasks()) <= 2, 'tasks to end')        # uvicorn's own, and the one that counts

async def tasks(): return len(asyncio.all_tasks())

def ref(model, prompt, n, **kw):
    return generate_ref(model, list(prompt), SamplingParams(**dict(temperature=0, max_tokens=n, ignore_eos=True) | kw))

@contextmanager
def web(model=None, key=None, engine=None, **kw):
    "A server with an engine of its own; when it ends, no thread of it is left"
    before = set(threading.enumerate())
    llm = LLM(model or tiny_lm('llama'), **ENGINE | (engine or {}))
    with background(llm, 'tiny', api_key=key, **kw) as server: yield Web(server, llm, key)
    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith('cbatch')]
    assert not left, left
    llm.close()
