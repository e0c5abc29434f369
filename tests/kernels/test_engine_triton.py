"""The whole engine on the Triton kernels, interpreted.
Chunks, preemption, prefix hits and recorded steps, token for token as the oracle."""
from types import SimpleNamespace
import pytest, torch
from cbatch import LLM
from cbatch.guesses import Guess, Guesser
from cbatch.kernels import triton_backend
from cbatch.kernels.triton_backend import DecodeGraphs, TritonBackend
from cbatch.model import tiny_lm
from cbatch.paged_attention import AttnMeta, KVShape
from cbatch.token_loop import generate_ref
from ask import sp

PROMPTS = [[5, 6, 7] * 4, [9], list(range(20, 29)), [5, 6, 7] * 3 + [1]]

def engine(lm, **kw):
    return LLM(lm, backend='triton', **dict(num_blocks=40, block_size=4, max_num_seqs=3, max_num_batched_tokens=8,
                                            check=True) | kw)
def answers(llm, n=5): return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, sp(n), use_tqdm=False)]
def answers_to(llm, p, n=5): return llm.generate([p], sp(n), use_tqdm=False)[0].outputs[0].token_ids
def alone(lm, n=5): return [generate_ref(lm, p, sp(n)).token_ids for p in PROMPTS]

@pytest.mark.parametrize('arch', ['llama', 'qwen3'])
@pytest.mark.parametrize('how', [dict(num_blocks=8), dict(num_blocks=8, preemption='swap'),
                                 dict(num_blocks=40, block_size=2, max_num_batched_tokens=5)],
                         ids=['recompute', 'swap', 'small chunks'])
def test_equals_the_oracle(arch, how):
    lm = tiny_lm(arch)
    with engine(lm, **how) as llm:
        assert isinstance(llm.runner.executor.backend, TritonBackend)
        assert answers(llm) == alone(lm)
        if how['num_blocks'] == 8: assert llm.metrics['num_preemptions'] > 0

@pytest.mark.parametrize('arch', ['llama', 'qwen3'])
def test_prefix_hits(arch):
    "The second time the prompts are found in the cache; answers that share blocks, and forks that copy one, are alike"
    lm = tiny_lm(arch)
    with engine(lm) as llm:
        first, again = answers(llm, 3), answers(llm, 3)
        assert first == again == alone(lm, 3) and llm.metrics['num_cached_tokens'] > 8
        forked = llm.generate([PROMPTS[0]], sp(3, n=2), use_tqdm=False)[0]
        assert [c.token_ids for c in forked.outputs] == [first[0]] * 2

@pytest.mark.parametrize('dots', [True, False])
@pytest.mark.parametrize('how', [dict(num_blocks=8), dict(num_blocks=8, preemption='swap'), dict(num_blocks=40)],
                         ids=['recompute', 'swap', 'prefix'])
def test_keys_and_values_in_codes(how, dots, monkeypatch):
    "Equal to the one who is alone, and to torch's definition of what is kept"
    monkeypatch.setattr(TritonBackend, '_dots', lambda self, device: dots)
    lm, want = tiny_lm('llama'), {}
    for backend in ('torch', 'triton'):
        with LLM(lm, backend=backend, kv_dtype='int8', num_blocks=40, block_size=4, max_num_seqs=1,
                 prefix_caching=False, lean=False) as llm: want[backend] = [answers_to(llm, p) for p in PROMPTS]
    assert want['torch'] == want['triton']
    with engine(lm, kv_dtype='int8', **how) as llm:
        assert answers(llm) == want['triton'] and answers(llm) == want['triton']
        assert llm.metrics['num_preemptions' if how['num_blocks'] == 8 else 'num_cached_tokens'] > 0

@pytest.mark.parametrize('arch', ['mistral', 'gemma2'])
def test_window_and_soft_cap(arch):
    "Local layers see 16 tokens, which is fewer than these requests have; gemma2 caps its scores as well"
    lm, prompt = tiny_lm(arch), list(range(40, 61))
    with engine(lm) as llm:
        assert llm.generate([prompt], sp(4), use_tqdm=False)[0].outputs[0].token_ids == generate_ref(lm, prompt,
            sp(4)).token_ids

def test_recorded_steps():
    "Through the buffers, the ladder and the rows for nobody of recorded steps; to record is a plain call here"
    lm = tiny_lm('llama')
    with engine(lm, num_blocks=7) as llm:
        replayed = []
        def record(run, pool): run(); return lambda: (replayed.append(1), run()), pool
        llm.runner.executor.graphs = DecodeGraphs(llm.runner.executor.backend, 3, llm.max_model_len // 4, record=record)
        llm.runner.executor.warm_up()
        assert answers(llm) == alone(lm)
        assert replayed and llm.metrics['num_preemptions'] > 0 and sorted(llm.runner.executor.graphs.replays) == [1, 2,
            3]

def test_rows_in_the_order_asked_for_and_none_beyond():
    "Four rows, then two: what the larger step left in the buffers is not looked at"
    be = TritonBackend(KVShape(9, 4, 1, 1, 16))
    def step(*rows, lens=(1, 1, 1, 1)):
        n = len(lens)
        meta = AttnMeta(list(lens), [3] * n, torch.arange(1, n + 1)[:, None], torch.arange(n) * 4 + 6); be.prepare(meta)
        return SimpleNamespace(input_ids=torch.arange(10, 10 + sum(lens))[None],
                               position_ids=torch.full((1, sum(lens)), 2), meta=meta, logit_rows=torch.tensor(rows))
    seen = []
    def logits(ids, pos, rows, meta):
        seen.append((meta.slot_mapping.tolist(), meta.scratch['lens'].tolist())); return ids[0, rows][:, None].float()
    graphs = DecodeGraphs(be, 4, 2, record=lambda run, pool: (run(), (run, pool))[1])
    assert graphs(step(2, 0, 3, 1), logits).tolist() == [[12], [10], [13], [11]]
    assert graphs(step(1, 0, lens=(1, 1)), logits).tolist() == [[11], [10]] and seen[-1] == ([6, 10], [3, 3])
    assert graphs(step(1, 2, 0, lens=(1, 1, 1)), logits).tolist() == [[11], [12],
        [10]] and seen[-1] == ([6, 10, 14, -1], [3, 3, 3, 0])
    for batch in (step(1, 0), step(1, 0, lens=(1, 2)), step(*range(5), lens=[1] * 5)):
        assert graphs(batch, logits) is None

def test_a_model_that_can_not_be_recorded(monkeypatch):
    "It is said once, and steps are launched as before"
    lm = tiny_lm('llama')
    def record(run, pool): raise RuntimeError('operation not permitted when stream is capturing')
    said = []
    monkeypatch.setattr(triton_backend._log, 'warning', lambda text, *args: said.append(text % args))
    with engine(lm) as llm:
        llm.runner.executor.graphs = DecodeGraphs(llm.runner.executor.backend, 3, 40, record=record)
        assert answers(llm, 2) == alone(lm, 2)
    assert len(said) == 1 and "can't be recorded" in said[0] and 'capturing' in said[0]

@pytest.mark.parametrize('e', [torch.OutOfMemoryError(''), KeyboardInterrupt()], ids=['out of memory', 'Ctrl-C'])
def test_a_recording_that_stops_half_way(monkeypatch, e):
    "Out of memory at the second size: none is used. Interrupted there: the rest comes later. Answers are the oracle's"
    lm, runs = tiny_lm('llama'), []
    monkeypatch.setattr(triton_backend._log, 'warning', lambda *args: None)
    def record(run, pool):
        runs.append(1)
        if len(runs) == 2: raise e
        run(); return run, pool
    with engine(lm) as llm:
        graphs = llm.runner.executor.graphs = DecodeGraphs(llm.runner.executor.backend, 3, 40, record=record)
        if isinstance(e, KeyboardInterrupt):
            with pytest.raises(KeyboardInterrupt): llm.runner.executor.warm_up()
        else: llm.runner.executor.warm_up()
        assert answers(llm, 3) == alone(lm, 3) and graphs.off == (not isinstance(e,
            KeyboardInterrupt)) and len(graphs.replays) == (0 if graphs.off else 3)

def test_what_is_refused(monkeypatch):
    with pytest.raises(ValueError, match='power of two'): engine(tiny_lm('llama'), block_size=12)
    import cbatch.kernels.triton_backend as tb
    monkeypatch.setattr(tb, 'INTERPRETED', False)
    with pytest.raises(ValueError, match='needs a GPU, or TRITON_INTERPRET=1'): engine(tiny_lm('llama'))
    with pytest.raises(ValueError, match="dtype='float16' or 'bfloat16'"):
        TritonBackend(KVShape(4, 4, 1, 1, 16, torch.float32, 'cuda'))

def test_guesses():
    "Right and wrong ones, through the kernel for prompts; a recorded step takes none"
    lm = tiny_lm('llama')
    refs = {tuple(p): generate_ref(lm, p, sp(8)).token_ids for p in PROMPTS}
    class Half(Guesser):
        "Every third token of an answer is wrong; of its end it says nothing"
        def guess(self, r, most):
            at, right = len(r.output_ids), refs[tuple(r.prompt_ids)]
            return Guess([(t + (i % 3 == 2)) % 258 for i, t in enumerate(right[at:4], at)][:most], 4)
    with engine(lm, guesses=Half(), guess_when='always', max_guesses=3) as llm:
        def record(run, pool): run(); return run, pool
        graphs = DecodeGraphs(llm.runner.executor.backend, 3, llm.max_model_len // 4, record=record)
        replayed = []
        def asked(batch, logits):
            out = graphs(batch, logits)
            replayed.append((max(batch.meta.query_lens), out is not None))
            return out
        llm.runner.executor.graphs = asked
        assert answers(llm, 8) == [refs[tuple(p)] for p in PROMPTS]
        m = llm.metrics
        assert 0 < m['num_accepted_tokens'] < m['num_guessed_tokens']
        assert {(longest > 1, was) for longest, was in replayed} == {(True, False), (False, True)}
