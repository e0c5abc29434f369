"""Check the Triton kernels on a GPU, then time them: python bench/gpu.py

Writes bench/records/gpu.json; under eight minutes. First what is right: every kernel against float64, the rewritten
instruction for Turing on whatever card this is, recorded against launched steps. Then what is fast: attention in GB/s
beside a plain copy on the same card, and the engine on dummy weights of two sizes beside transformers'
`generate_batch`. --dry-run does all of it in small on a CPU, interpreted, so that the script itself is known to work;
it times nothing that means anything and writes no record."""
import argparse, json, os, subprocess, sys, time
from pathlib import Path

DRY = '--dry-run' in sys.argv
if DRY: os.environ['TRITON_INTERPRET'] = '1'
import torch
from cbatch import LLM, SamplingParams
from cbatch.results import machine
from cbatch.trace_format import written
from cbatch.kernels.kv_write import kv_write
from cbatch.kernels.paged_decode import has_dots, paged_decode
from cbatch.kernels.paged_prefill import paged_prefill
from cbatch.kernels.triton_backend import DecodeGraphs

DEV = 'cpu' if DRY else 'cuda'
DTYPES = [torch.float32] if DRY else [torch.float16] + ([torch.bfloat16] if torch.cuda.is_available()
                                                        and torch.cuda.get_device_capability() >= (8, 0) else [])
# largest difference from float64, for values about as large as 1
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
START = time.monotonic()

def say(*what): print(f'{time.monotonic() - START:6.1f} s ', *what, flush=True)

class Case:
    """Requests over shuffled blocks.
    The null block and all slots past a request's end hold NaN, table entries past it point far away."""
    def __init__(self, query_lens, seq_lens, dtype, H, K, D, block_size=16, seed=0):
        g = torch.Generator(DEV).manual_seed(seed)
        rnd = lambda *s: torch.randn(*s, generator=g, device=DEV)
        need = [-(-n // block_size) for n in seq_lens]
        order = (1 + torch.randperm(sum(need), generator=g, device=DEV)).int()
        self.tables = torch.full((len(need), max(need)), 2 ** 30, dtype=torch.int32, device=DEV)
        for row, part in zip(self.tables, order.split(need)): row[:len(part)] = part
        self.k, self.v = (torch.full((sum(need) + 1, block_size, K, D), float('nan'), dtype=dtype, device=DEV)
                          for _ in 'kv')
        pos = [torch.arange(n, device=DEV) for n in seq_lens]
        self.slots = torch.cat([self.tables[i, p // block_size] * block_size + p % block_size
                                for i, p in enumerate(pos)])
        kv_write(rnd(sum(seq_lens), K, D).to(dtype), rnd(sum(seq_lens), K, D).to(dtype), self.k, self.v, self.slots)
        self.q, self.lens, self.seq_lens, self.query_lens = rnd(sum(query_lens), H,
                                                                D).to(dtype), torch.tensor(seq_lens, dtype=torch.int32,
                                                                    device=DEV), seq_lens, query_lens
        self.starts = torch.tensor([0, *query_lens], dtype=torch.int32, device=DEV).cumsum(0, dtype=torch.int32)

    def reference(self, scaling, window, softcap):
        outs, G = [], self.q.shape[1] // self.k.shape[2]
        for q, slots, n, m in zip(self.q.split(self.query_lens), self.slots.split(self.seq_lens), self.seq_lens,
                                  self.query_lens):
            k, v = (c.flatten(0, 1)[slots].double().repeat_interleave(G, 1) for c in (self.k, self.v))
            s = torch.einsum('qhd,khd->hqk', q.double(), k) * scaling
            if softcap: s = softcap * torch.tanh(s / softcap)
            i, j = torch.arange(n - m, n, device=DEV)[:, None], torch.arange(n, device=DEV)[None]
            s = s.masked_fill(~((j <= i) & (j > i - (window or n))), -torch.inf)
            outs.append(torch.einsum('hqk,khd->qhd', s.softmax(-1), v))
        return torch.cat(outs)

def check_kernels(arch=None):
    "Largest error of each kernel over odd shapes; a case out of tolerance is a failure, not a footnote"
    shapes = [(4, 2, 16)] if DRY else [(9, 3, 64), (16, 8, 128), (32, 8, 128), (8, 1, 96), (28, 4, 80), (8, 8, 256),
                                       (7, 1, 64)]
    worst, bad = {}, []
    for dtype in DTYPES if arch is None else [torch.float16]:
        for H, K, D in shapes:
            for block_size in (16,) if DRY else (8, 16, 128):
                for window, softcap in ((None, None), (7, 3.)):
                    lens = [1, block_size, block_size + 1, 3 * block_size + 5] + ([] if DRY else [1500])
                    one, some = Case([1] * len(lens), lens, dtype, H, K, D,
                                     block_size), Case([min(n, q) for n, q in zip(lens, (1, 9, 2, 40, 300))], lens,
                                                       dtype, H, K, D, block_size)
                    runs = {f'decode{"" if dot else ", no dots"}, {s or "rule"} splits': (one, lambda c, dot=dot,
                        s=s: paged_decode(c.q, c.k, c.v, c.tables, c.lens, .2, window, softcap, s, dot))
                            for dot in ((True,) if arch else (True, False)) if dot is False or arch or has_dots(DEV)
                            for s in (None, 1, 5)}
                    if arch or has_dots(DEV):
                        runs['prefill'] = some, lambda c: paged_prefill(c.q, c.k, c.v, c.tables, c.lens, c.starts, .2,
                            window, softcap)
                    for name, (case, run) in runs.items():
                        err = (run(case).double() - case.reference(.2, window, softcap)).abs().max().item()
                        key = f'{name}, {str(dtype)[6:]}'
                        worst[key] = max(worst.get(key, 0.), err)
                        if not err <= TOLERANCE[dtype]:
                            bad.append(dict(kernel=key, shape=[H, K, D], block_size=block_size, window=window,
                                            error=err))
    return dict(worst=worst, failures=bad, tolerance={str(d)[6:]: t for d, t in TOLERANCE.items()})

def check_turing():
    "The kernels as a T4 would get them with tensor cores: lowered for capability 7.5, then assembled for this card"
    if DRY: return dict(skipped='nothing is compiled here')
    child = subprocess.run([sys.executable, __file__, '--turing-child'], capture_output=True, text=True, timeout=150)
    return json.loads(child.stdout.splitlines()[-1]) if child.returncode == 0 else dict(failed=child.stderr[-800:])

def turing_child():
    from triton import knobs
    from cbatch.kernels.triton_backend import enable_turing_dots
    knobs.runtime.override_arch = 'sm75'; enable_turing_dots()
    print(json.dumps(check_kernels(arch=75)))

def config(size):
    from transformers import LlamaConfig, Qwen3Config
    if DRY:
        return LlamaConfig(vocab_size=258, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    if size == '0.6B':
        return Qwen3Config(vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                           num_attention_heads=16, num_key_value_heads=8, head_dim=128,
                                          max_position_embeddings=40_960, tie_word_embeddings=True)
    return LlamaConfig(vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
                       num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192)

def prompts(n, lo, hi, vocab, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (int(torch.randint(lo, hi, (1,), generator=g)),), generator=g).tolist()
            for _ in range(n)]

def engine(model, **kw):
    small = dict(num_blocks=60, max_num_seqs=4, max_model_len=64) if DRY else dict(max_num_seqs=64,
        max_num_batched_tokens=8192, max_model_len=2048)
    return LLM(model, dtype='auto' if not DRY else 'float32', device=DEV, backend='triton' if DRY else 'auto',
               load_format='dummy', **small | kw)

def check_graphs():
    "Recorded against launched decode steps: the logits of the same step, and the tokens of whole answers"
    with engine(config('0.6B')) as llm:
        if DRY:
            llm.runner.executor.graphs = DecodeGraphs(llm.runner.executor.backend, 4, 4, record=lambda run,
                                                      pool: (run(), (run, pool))[1])
        if llm.runner.executor.graphs is None: return dict(skipped='this backend records nothing')
        ask, sp = prompts(3 if DRY else 48, 4, 20 if DRY else 200, 250), SamplingParams(temperature=0, max_tokens=4
            if DRY else 48, ignore_eos=True)
        graphs, diffs = llm.runner.executor.graphs, []
        class Both:
            def warm_up(self, *a): graphs.warm_up(*a)
            def __call__(self, batch, logits):
                got = graphs(batch, logits)
                if got is None: return None
                ref = logits(batch.input_ids, batch.position_ids, batch.logit_rows, batch.meta)
                diffs.append(((got - ref).abs().max() / ref.abs().max()).item())
                return got
        llm.runner.executor.graphs = Both()
        recorded = [o.outputs[0].token_ids for o in llm.generate(ask, sp, use_tqdm=False)]
        llm.runner.executor.graphs = None
        launched = [o.outputs[0].token_ids for o in llm.generate(ask, sp, use_tqdm=False)]
    worst = float('nan') if any(d != d for d in diffs) else max(diffs, default=None)
    return dict(steps=len(diffs), largest_relative_difference=worst,
                equal_answers=sum(a == b for a, b in zip(recorded, launched)), answers=len(ask), off=graphs.off)

def seconds(run, repeats=20):
    "Median time of `run` on the GPU"
    if DRY: run(); return 1.
    times, flush = [], torch.empty(2 ** 28, dtype=torch.uint8, device=DEV)
    for _ in range(3): run()
    for _ in range(repeats):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()                       # nothing is left in the cache, and the GPU is busy while Python launches
        a.record(); run(); b.record(); torch.cuda.synchronize(); times.append(a.elapsed_time(b) / 1e3)
    return sorted(times)[len(times) // 2]

def copy_rate():
    x = torch.empty(1000 if DRY else 2 ** 29, dtype=torch.uint8, device=DEV); y = torch.empty_like(x)
    return 2 * x.numel() / seconds(lambda: y.copy_(x)) / 1e9

def time_attention(copy):
    "Decode as GB/s of keys and values, prefill as TFLOP/s, beside torch's attention over gathered blocks"
    shapes = {'tiny': (4, 2, 16)} if DRY else {'SmolLM2-135M': (9, 3, 64), 'Qwen3-0.6B': (16, 8, 128),
                                               'Llama-3.1-8B': (32, 8, 128)}
    decode, prefill = [], []
    for name, (H, K, D) in shapes.items():
        for R, L in ((2, 20),) if DRY else ((1, 2048), (16, 512), (64, 512), (64, 2048), (256, 1024), (1, 32_768)):
            c = Case([1] * R, [L] * R, DTYPES[-1], H, K, D)
            size = 2 * R * L * K * D * c.k.element_size()
            def gathered():
                k, v = (x[c.tables.long()].flatten(1, 2)[:, :L].transpose(1, 2) for x in (c.k, c.v))
                return torch.nn.functional.scaled_dot_product_attention(c.q[:, :, None], k, v, scale=.1,
                    enable_gqa=True)
            best = seconds(lambda: paged_decode(c.q, c.k, c.v, c.tables, c.lens, .1, dot=has_dots(DEV)))
            decode.append(dict(model=name, requests=R, context=L, shape=f'{name}, {R} x {L}', us=best * 1e6,
                               gb_per_s=size / best / 1e9, share_of_copy=size / best / 1e9 / copy,
                               no_dots_us=seconds(lambda: paged_decode(c.q, c.k, c.v, c.tables, c.lens, .1,
                                   dot=False)) * 1e6, torch_gathered_us=seconds(gathered) * 1e6))
            del c
        if not has_dots(DEV): continue
        for R, n, L in ((1, 10, 20),) if DRY else ((1, 2048, 2048), (4, 512, 4096), (8, 1024, 1024)):
            c = Case([n] * R, [L] * R, DTYPES[-1], H, K, D)
            t = seconds(lambda: paged_prefill(c.q, c.k, c.v, c.tables, c.lens, c.starts, .1))
            flop = 4 * R * H * D * (n * (L - n) + n * (n + 1) / 2)
            prefill.append(dict(model=name, requests=R, queries=n, context=L, us=t * 1e6, tflop_per_s=flop / t / 1e12))
    return dict(decode=decode, prefill=prefill)

def time_engine(size, peer):
    "Output tokens per second, beside transformers' own continuous batching on the same weights"
    n, new = (3, 4) if DRY else (128 if size == '0.6B' else 64, 128)
    ask = prompts(n, 8, 20 if DRY else 512, 250)
    if not DRY: torch.cuda.reset_peak_memory_stats()
    out = dict(model=size, requests=n, new_tokens=new)
    with engine(config(size), warmup=not DRY) as llm:
        hf, sp = llm.hf_model, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        llm.generate(prompts(4, 8, 20, 250, seed=1), sp, use_tqdm=False)
        t = time.perf_counter(); outs = llm.generate(ask, sp, use_tqdm=False)
        out['cbatch_tokens_per_s'] = sum(len(o.outputs[0].token_ids) for o in outs) / (time.perf_counter() - t)
        out['pool_tokens'], out['peak_gb'] = llm.num_blocks * 16, 0 if DRY else torch.cuda.max_memory_allocated() / 1e9
    if not peer: return out
    del llm, outs
    from transformers import GenerationConfig
    gc = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    try:
        hf.generate_batch(ask[:2], generation_config=gc)
        t = time.perf_counter(); got = hf.generate_batch(ask, generation_config=gc)
        out['transformers_tokens_per_s'] = sum(len(o.generated_tokens)
                                               for o in got.values()) / (time.perf_counter() - t)
        out['ratio'] = out['cbatch_tokens_per_s'] / out['transformers_tokens_per_s']
    except Exception as e: out['transformers_failed'] = f'{type(e).__name__}: {e}'[:300]
    return out

def check_memory():
    "What is left on the card after an engine was made, closed or deleted, ten times over, as a notebook's cells do it"
    if DRY: return dict(skipped='no card')
    left = []
    for i in range(10):
        llm = engine(config('0.6B'), kv_cache_mb=4000, warmup=i % 2 == 0)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
        if i % 3: llm.close()
        del llm
        left.append(torch.cuda.memory_allocated() / 1e6)
    return dict(mb_left=left)

def main():
    p = argparse.ArgumentParser()
    p.add_argument('--dry-run', action='store_true'); p.add_argument('--turing-child', action='store_true')
    p.add_argument('--no-peer', action='store_true')
    p.add_argument('--out', default=str(Path(__file__).parent/'records'/'gpu.json'))
    a = p.parse_args()
    if a.turing_child: return turing_child()
    if not DRY and not torch.cuda.is_available(): sys.exit('no GPU here; --dry-run tries the script itself')
    import triton
    rec = dict(command='python bench/gpu.py', seed=0, machine=machine(), triton=triton.__version__)
    if not DRY:
        rec.update(gpu=torch.cuda.get_device_name(), capability=torch.cuda.get_device_capability(),
                   cuda=torch.version.cuda)
    def keep():
        with written(a.out) as f: f.write(json.dumps(rec, indent=1) + '\n')
    def part(name, f, *args):
        try: rec[name] = f(*args)
        except Exception as e: rec[name] = dict(failed=f'{type(e).__name__}: {e}'[:800])
        say(name, json.dumps(rec[name])[:600])
        # whatever happens next
        if not DRY: torch.cuda.empty_cache(); keep()
    part('kernels', check_kernels); part('turing', check_turing); part('graphs', check_graphs)
    part('memory', check_memory)
    part('copy_gb_per_s', copy_rate)
    rate = rec['copy_gb_per_s'] if isinstance(rec['copy_gb_per_s'], float) else float('nan')
    try: rec.update(time_attention(rate))
    except Exception as e: rec['attention'] = dict(failed=f'{type(e).__name__}: {e}'[:800])
    say('attention', json.dumps(rec.get('decode', rec.get('attention')))[:600])
    for size in ('0.6B',) if DRY else ('0.6B', '8B'): part(f'engine_{size}', time_engine, size, not (a.no_peer or DRY))
    rec['seconds'] = time.monotonic() - START
    if not DRY: keep()
    wrong = [k for k, v in rec.items() if isinstance(v, dict) and ('failed' in v or v.get('failures'))]
    g = rec['graphs']
    if 'steps' in g and (g['off'] or not g['steps'] or not g['largest_relative_difference'] < 2e-2):
        wrong.append('graphs')
    left = rec['memory'].get('mb_left')
    if left and left[-1] > left[1] + 50: wrong.append('memory')
    print('wrong: ' + ', '.join(wrong) if wrong else 'all checks passed')
    sys.exit(bool(wrong))

if __name__ == '__main__': main()
