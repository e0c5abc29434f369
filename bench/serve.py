"""What the HTTP server costs and what its clients see, on a real model: python bench/serve.py [users|w64 ...] [--quick]

Writes bench/records/serve.json. users: 200 streams at once and a KV pool for 20, each answer compared with
`generate`'s; TTFT from sending to the first text, ITL the gaps between chunks, both as a client in another process sees
them. w64: CPU seconds of the server's event loop and of the client beside those of the engine. --quick is small and
writes nothing."""
import asyncio, json, math, random, subprocess, sys, time
from pathlib import Path

OUT, SEED = Path(__file__).parent/'records'/'serve.json', 0

# --- the client: a process of its own that loads nothing but asyncio

async def ask(port, body):
    "One stream: text, times of its chunks in s after sending, usage, error"
    data, r = json.dumps(body).encode(), dict(text='', times=[], usage=None, error=None)
    reader, writer = await asyncio.open_connection('127.0.0.1', port)
    start = time.perf_counter()
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
                 b'Content-Length: %d\r\n\r\n' % len(data) + data)
    async for line in reader:
        if not line.startswith(b'data: '): continue
        if line == b'data: [DONE]\n': break
        d = json.loads(line[6:])
        if 'error' in d: r['error'] = d['error']['message']
        elif not d['choices']: r['usage'] = d['usage']
        elif t := d['choices'][0]['text']: r['text'] += t; r['times'].append(time.perf_counter() - start)
    r['e2e_s'] = time.perf_counter() - start
    writer.close()
    return r

async def crowd(port, bodies): return await asyncio.gather(*(ask(port, b) for b in bodies))

def client():
    "Read port and bodies from stdin, write what came of them"
    job, began = json.load(sys.stdin), time.process_time()
    start = time.perf_counter(); got = asyncio.run(crowd(job['port'], job['bodies']))
    json.dump(dict(got=got, wall_s=time.perf_counter() - start, cpu_s=time.process_time() - began), sys.stdout)

# --- the server's side

def percentiles(xs):
    "p50, p90, p99 and max in ms, linear between neighbours"
    import numpy as np
    return {f'p{q}': round(1000 * float(np.percentile(xs, q)), 1)
            for q in (50, 90, 99)} | dict(max=round(1000 * max(xs), 1)) if xs else None

def served(llm, prompts, params, **kw):
    "Serve all prompts at once to a client process; what it saw, and CPU s by who spent them"
    from cbatch.server import background
    bodies = [dict(model='m', prompt=p, temperature=0, max_tokens=sp.max_tokens, ignore_eos=True, stream=True,
                   stream_options=dict(include_usage=True))
              for p, sp in zip(prompts, params)]
    async def loop_cpu(): return time.thread_time()
    with background(llm, 'm', limits=dict(max_waiting=1024), **kw) as server:
        on_loop = lambda: asyncio.run_coroutine_threadsafe(loop_cpu(), server.loop).result()
        loop, own, total = on_loop(), time.thread_time(), time.process_time()
        out = subprocess.run([sys.executable, __file__, 'client'],
                             input=json.dumps(dict(port=server.sock.getsockname()[1], bodies=bodies)),
                             capture_output=True, text=True, check=True).stdout
        loop, own, total = on_loop() - loop, time.thread_time() - own, time.process_time() - total
    r = json.loads(out)
    ok = [g for g in r['got'] if not g['error']]
    num = sum(g['usage']['completion_tokens'] for g in ok)
    return r['got'], dict(requests=len(r['got']), failed=len(r['got']) - len(ok), wall_s=r['wall_s'],
                          output_tokens=num, tokens_per_s=num / r['wall_s'],
        ttft_ms=percentiles([g['times'][0] for g in ok if g['times']]),
                          itl_ms=percentiles([b - a for g in ok for a, b in zip(g['times'], g['times'][1:])]),
        tpot_ms=percentiles([(g['e2e_s'] - g['times'][0]) / (g['usage']['completion_tokens'] - 1) for g in ok
                             if g['times']
                             and g['usage']['completion_tokens'] > 1]), e2e_ms=percentiles([g['e2e_s'] for g in ok]),
        cpu_s=dict(event_loop=loop, client=r['cpu_s'], engine=total - loop - own))

def alone(llm, prompts, params):
    "The same by `generate`: answers, wall and CPU s"
    wall, cpu = time.perf_counter(), time.process_time()
    outs = llm.generate(prompts, params, use_tqdm=False)
    return [o.outputs[0].text for o in outs], dict(wall_s=time.perf_counter() - wall, cpu_s=time.process_time() - cpu)

def users(lm, quick=False, room_for=20, max_tokens=32):
    "200 streams at once, a pool for 20: everybody is answered, and rightly"
    from cbatch import LLM, SamplingParams
    rng, n, bs = random.Random(SEED), 40 if quick else 200, 16
    if quick: room_for, max_tokens = 8, 16
    prompts = [[rng.randrange(100, 40_000) for _ in range(rng.randint(8, 48))] for _ in range(n)]
    params = [SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)] * n
    blocks = room_for * -(-(48 + max_tokens) // bs)
    with LLM(lm, max_num_seqs=32, max_num_batched_tokens=512, num_blocks=1024) as llm:
        right, _ = alone(llm, prompts, params)
    with LLM(lm, max_num_seqs=n, max_num_batched_tokens=512, num_blocks=blocks, block_size=bs, watermark=0.) as llm:
        got, facts = served(llm, prompts, params)
        m = llm.metrics
        return dict(blocks=blocks, **facts, equal=sum(g['text'] == t for g, t in zip(got, right)),
                    preemptions=m['num_preemptions'],
                    recomputed_tokens=m['num_recomputed_tokens'], blocks_lost=llm.num_blocks - llm.num_free_blocks)

def lengths(rng, n, mean, sigma, lo, hi):
    return [min(hi, max(lo, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)))) for _ in range(n)]

def w64(lm, quick=False, n=64):
    """64 requests at once, greedy, in 32 slots.
    Random ids; lengths lognormal, sigma 0.8: prompts of mean 128, 8 to 512; outputs of mean 96, 4 to 384."""
    from cbatch import LLM, SamplingParams
    rng = random.Random(SEED)
    ins, outs = lengths(rng, n, 128, .8, 8, 512), lengths(rng, n, 96, .8, 4, 384)
    if quick: ins, outs = [min(32, x) for x in ins[:12]], [min(24, x) for x in outs[:12]]
    prompts = [[rng.randrange(100, 40_000) for _ in range(k)] for k in ins]
    params = [SamplingParams(temperature=0, max_tokens=k, ignore_eos=True) for k in outs]
    with LLM(lm, max_num_seqs=32, max_num_batched_tokens=2048, prefix_caching=False) as llm:
        llm.generate(prompts[0], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)    # warm
        right, by_hand = alone(llm, prompts, params)
        got, facts = served(llm, prompts, params)
    cpu = facts['cpu_s']
    return dict(**facts, generate=by_hand, equal=sum(g['text'] == t for g, t in zip(got, right)),
                front_over_engine=(cpu['event_loop'] + cpu['client']) / cpu['engine'],
                wall_over_generate=facts['wall_s'] / by_hand['wall_s'])

def main(*names):
    from cbatch import load_model
    from cbatch.results import machine
    from cbatch.trace_format import written
    quick, names = '--quick' in names, [n for n in names if n != '--quick']
    facts, old, lm = dict(command='python bench/serve.py', seed=SEED,
                          machine=machine()), json.loads(OUT.read_text()) if OUT.exists() else {}, load_model('smollm2')
    for f in (users, w64):
        if names and f.__name__ not in names: continue
        r = json.loads(json.dumps(f(lm, quick)), parse_float=lambda x: round(float(x), 4))
        print(f.__name__, json.dumps(r, indent=1), flush=True)
        old[f.__name__] = {**facts, **r}
        if not quick:
            with written(OUT) as file: file.write(json.dumps(old, indent=1) + '\n')

if __name__ == '__main__': client() if sys.argv[1:] == ['client'] else main(*sys.argv[1:])
