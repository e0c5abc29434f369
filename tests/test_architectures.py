"""Every architecture that can be served, against transformers' own attention; every one that can't, by name.

`python tests/test_architectures.py` runs all that transformers has and writes bench/records/architectures.json, from
which the table in nbs/04_probe.ipynb is drawn."""
import functools, json, logging, os, random, subprocess, sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
import pytest, torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Phi3Config
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ALL
from cbatch import LLM, SamplingParams, CapacityError, paged_attention
from cbatch.loading import load_model
from cbatch.model import CausalLM, small_config, tiny_lm
from cbatch.probe import CannotServe, rehearse
from cbatch.twin import with_attention
from cbatch.paged_attention import TorchBackend
from cbatch.params import EngineConfig
from cbatch.runner import kv_shape
from cbatch.token_loop import compare_tokens, generate_ref

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT/'bench'/'records'/'architectures.json'
NAMED = ('llama qwen2 qwen3 mistral gemma2 gemma3 phi phi3 olmo2 smollm3 granite cohere starcoder2 gpt2 gpt_neox opt '
         'mixtral qwen3_moe').split()
WINDOWED = dict(mistral={}, mixtral={}, phi3={}, starcoder2={}, gemma2={}, gemma3={},
                qwen2=dict(use_sliding_window=True, max_window_layers=1),
                qwen3=dict(use_sliding_window=True, max_window_layers=1))
LONGEST = 14  # tokens of an answer

# ---- the matrix

@functools.cache
def model(arch, over=()): return tiny_lm(arch, **dict(over))

@functools.cache
def prompts():
    rng = random.Random(0)
    # shorter, as long as and longer than windows of 5 and 16
    return [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 4, 5, 6, 9, 13, 16, 17, 23, 31, 40, 64)]

@functools.cache
def oracle(arch, over, prompt):
    "transformers' answer, by its plainest attention: early versions forget soft caps in the fast one"
    lm = model(arch, over)
    plain = replace(lm, hf_model=with_attention(lm.hf_model, 'eager'))
    if lm.mixers: return generated(plain.hf_model, prompts()[prompt])
    return generate_ref(plain, prompts()[prompt], SamplingParams(temperature=0, max_tokens=LONGEST,
        ignore_eos=True)).token_ids

@functools.cache
def recorded():
    "Was the record written with this version of transformers? Others serve fewer models, and say so"
    return record()['versions']['transformers'] == transformers.__version__

def generated(hf, prompt):
    "Of models with states: some have caches of their own, or count positions in their own way, and `generate` knows"
    x = torch.tensor([prompt])
    out = hf.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=LONGEST, min_new_tokens=LONGEST,
                      do_sample=False, eos_token_id=None, pad_token_id=257)
    return out[0, len(prompt):].tolist()

def served(arch):
    "Skip an architecture that another version of transformers does not let us serve"
    if recorded(): return
    try: load_model(model(arch))       # which asks all that an engine asks
    except (CannotServe, ValueError) as e: pytest.skip(f'transformers {transformers.__version__}: {e}')

def run_schedule(arch, over, seed, **options):
    """Answers that are (equal, tied), and preemptions.
    Memory is short, chunks are small, blocks are odd, and what was never written is NaN."""
    n_each = options.pop('n', 1)
    rng = random.Random(f'{arch} {seed}')
    asks = [(rng.randrange(len(prompts())), rng.randint(1, LONGEST)) for _ in range(rng.randint(4, 7))]
    bs, longest = rng.choice([1, 3, 4, 8, 16]), max(len(prompts()[p]) + n for p, n in asks)
    need = -(-longest // bs)
    llm = LLM(model(arch, over), block_size=bs, num_blocks=need + rng.randint(0, need),
              max_num_seqs=rng.choice([2, 3, 5, 8]), max_num_batched_tokens=rng.choice([8, 9, 16, 40, 128]),
              check=True, **options)
    for pool in llm.runner.executor.backend.tensors: pool[1:] = float('nan')
    todo, done = list(enumerate(asks)), {}
    while todo or llm.has_unfinished:
        if todo and rng.random() < .5:
            i, (p, n) = todo.pop(0)
            llm.add(prompts()[p], SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, n=n_each),
                    request_id=str(i))
        done |= {o.request_id: o for o in llm.step() if o.finished}
    equal = tied = 0
    for i, (p, n) in enumerate(asks):
        o, ref = done[str(i)], oracle(arch, over, p)[:n]
        assert not o.error, o.error
        for out in o.outputs:
            how = compare_tokens(model(arch, over), prompts()[p], out.token_ids, ref)
            assert how, f'{arch} {dict(over)} seed {seed}, prompt {p}: {how}'
            equal += how.equal; tied += how.tie
    assert llm.num_free_blocks == llm.num_blocks
    return equal, tied, llm.metrics['num_preemptions']

def variants(arch):
    "Overrides to run an architecture under: as it is, windows shorter and longer than most prompts, a tied head"
    windows = [tuple((dict(sliding_window=w) | WINDOWED[arch]).items()) for w in (5, 33)] if arch in WINDOWED else []
    return [(), *windows, (('tie_word_embeddings', True),)]

@functools.cache
def outcome(arch, over, seeds):
    "Summed over schedules: answers that were equal, that were ties, preemptions"
    runs = [run_schedule(arch, over, seed) for seed in range(seeds)]
    return dict(zip(('equal', 'ties', 'preemptions'), map(sum, zip(*runs))), schedules=seeds)

@pytest.mark.parametrize('arch', NAMED)
def test_named(arch):
    served(arch)
    for over in variants(arch): outcome(arch, over, 6 if not over else 3)

def test_the_matrix_was_hard():
    "Ties are few, memory was short, and answers are of many tokens, not one again and again"
    total = [outcome(a, o, 6 if not o else 3) for a in (NAMED if recorded() else NAMED[:4]) for o in variants(a)]
    got = {k: sum(t[k] for t in total) for k in total[0]}
    print(got)
    assert got['equal'] > (1000 if recorded()
                           else 200) and got['ties'] <= .01 * got['equal'] and got['preemptions'] > (50 if recorded()
                               else 5)
    for a in NAMED[:4] if not recorded() else NAMED:
        assert len({t for p in range(len(prompts())) for t in oracle(a, (), p)}) > 20, a

UNLIKE = ('gpt_oss deepseek_v3 deepseek_v2 minicpm3 gemma4_text gemma3n_text llama4_text mimo_v2_flash stablelm biogpt '
          'nemotron').split()      # sinks, latents, layers of several shapes, chunks; and no keywords

@pytest.mark.parametrize('arch', UNLIKE)
def test_attention_of_other_kinds(arch):
    "Under both preemptions, forked, with cached prefixes and without"
    served(arch)
    for seed in range(4):
        equal, tied, _ = run_schedule(arch, (), f'other {seed}', preemption=('recompute', 'swap')[seed // 2],
                                      prefix_caching=seed % 2 == 1, n=1 + seed % 2)
        assert equal > 3 and tied <= 1, (arch, seed)

def test_deepseeks_real_size():
    "One latent and one turned key a layer in bf16: 61 * (512 + 64) * 2 bytes"
    config = AutoConfig.for_model('deepseek_v3')
    with torch.device('meta'): big = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    big.config._experts_implementation = 'batched_mm'
    lm = CausalLM(big, None, 'deepseek_v3')
    assert lm.kv_bytes_per_token == 70272
    assert kv_shape(lm, EngineConfig()).token_bytes == 70272

def record(): return json.loads(RECORD.read_text())

OTHERS = sorted({r['arch'] for r in record()['architectures'] if 'equal' in r} - {*NAMED}) if RECORD.exists() else []

@pytest.mark.parametrize('arch', OTHERS)
def test_other(arch):
    served(arch)
    outcome(arch, (), 1)

# ---- the tests have teeth

@pytest.mark.parametrize('arch,over,ignored', [('mistral', (), 'window'), ('gemma2', (), 'window'),
                                               ('gemma2', (), 'softcap'), ('gemma3', (), 'window'),
                                               ('phi3', (('sliding_window', 5),), 'window'),
                                               ('granite', (), 'scaling'), ('gemma2', (), 'scaling'),
                                               ('llama', (), 'order'), ('gpt_oss', (), 'sinks'),
                                               ('llama4_text', (), 'chunk'), ('llama4_text', (), 'temperature'),
                                               ('gemma4_text', (), 'order'), ('deepseek_v3', (), 'scaling')])
def test_what_is_ignored_shows(monkeypatch, arch, over, ignored):
    attend = TorchBackend.attend
    def wrong(self, layer, q, meta, scaling, window=None, softcap=None, sinks=None, chunk=None):
        if ignored == 'order' and layer == 1: layer = 0
        if ignored == 'chunk': window, chunk = chunk or window, None      # as if it slid
        if ignored == 'scaling': scaling = q.shape[-1] ** -.5
        if ignored == 'window': window = None
        return attend(self, layer, q, meta, scaling, window, None if ignored == 'softcap' else softcap,
                      None if ignored == 'sinks' else sinks, chunk)
    monkeypatch.setattr(TorchBackend, 'attend', wrong)
    if ignored == 'temperature': monkeypatch.setattr(paged_attention, 'by_position', lambda module, q, positions: q)
    with pytest.raises(AssertionError):
        for seed in range(3): run_schedule(arch, over, seed, backend='torch')

# ---- positions

@pytest.mark.parametrize('arch', ['gpt2', 'opt', 'gpt_neox', 'llama', 'phi'])
def test_to_the_last_position(arch):
    served(arch)
    lm = tiny_lm(arch, max_position_embeddings=64)
    assert lm.max_len == 64
    with LLM(lm, block_size=8, max_num_batched_tokens=16) as llm:
        p, sp = prompts()[10][:20], SamplingParams(temperature=0, max_tokens=44, ignore_eos=True)
        assert llm.generate([p], sp, use_tqdm=False)[0].outputs[0].token_ids == generate_ref(lm, p, sp).token_ids
        with pytest.raises(CapacityError): llm.add(p, SamplingParams(max_tokens=45))

def test_long_positions_by_other_angles_are_not_reached():
    "Beyond the first length, longrope turns everybody by other angles when one request gets there"
    rope = dict(rope_type='longrope', short_factor=[1.] * 8, long_factor=[4.] * 8, original_max_position_embeddings=32,
                rope_theta=10000.)
    lm = tiny_lm('phi3', rope_parameters=rope, original_max_position_embeddings=32, max_position_embeddings=256)
    assert lm.max_len == 32 and LLM(lm).max_model_len == 32
    assert tiny_lm(rope_parameters=dict(rope_type='yarn', factor=8., rope_theta=10000.,
                                        original_max_position_embeddings=32),
                   max_position_embeddings=256).max_len == 256

# ---- heads and ends

def test_head_wider_than_the_tokenizer():
    "Ids that the tokenizer does not know may be sampled; they have no text"
    with LLM(tiny_lm(vocab_size=400)) as llm:
        out = llm.generate(['abc'] * 8, SamplingParams(temperature=5, max_tokens=40, seed=3, ignore_eos=True),
                           use_tqdm=False)
        ids = out[0].outputs[0].token_ids
        assert max(ids) >= 258 and out[0].outputs[0].text == llm.tokenizer.decode([i for i in ids if i < 256])

@pytest.mark.parametrize('eos', [7, [7, 9], None])
def test_ends_of_the_generation_config(eos):
    lm = tiny_lm()
    free = generate_ref(lm, prompts()[5], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)).token_ids
    end = free[4] if isinstance(eos, int) else [free[6], free[4]] if eos else None
    lm.hf_model.generation_config.eos_token_id = lm.hf_model.config.eos_token_id = end
    with LLM(lm, tokenizer=None) as llm:
        o, = llm.generate([prompts()[5]], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
        first = free.index(free[4]) + 1 if eos else 12
        if isinstance(eos, list): first = min(first, free.index(free[6]) + 1)
        assert (o.outputs[0].token_ids, o.outputs[0].finish_reason) == (free[:first], 'stop' if eos else 'length')

# ---- refusals

REFUSED = dict(bloom='attention interface', falcon='attention interface', mpt='attention interface',
               t5='encoder-decoder', bart='encoder-decoder', nemotron_h='time steps', bert='looks both ways',
               roberta='looks both ways', diffllama='attends more than once', moshi='keeps another window')

@pytest.mark.parametrize('arch', REFUSED)
def test_refused_before_weights(tmp_path, arch):
    "By name and with a reason, when nothing but the configuration is there"
    if not recorded(): pytest.skip('recorded with another version of transformers')
    AutoConfig.for_model(arch).save_pretrained(tmp_path)
    with pytest.raises(CannotServe, match=f"^{arch}: can't be run, because .*{REFUSED[arch]}"): load_model(tmp_path)

@pytest.mark.parametrize('arch,over,why', [('doge', {}, 'mask that its keywords')])
def test_refused_objects(arch, over, why):
    if not recorded(): pytest.skip('recorded with another version of transformers')
    with pytest.raises(CannotServe, match=why): LLM(tiny_lm(arch, **over))

def spy(monkeypatch, **more):
    "A model whose layers pass more keywords than they used to"
    from transformers.models.llama import modeling_llama as ml
    forward = ml.LlamaAttention.forward
    monkeypatch.setattr(ml.LlamaAttention, 'forward', lambda self, *a, **k: forward(self, *a, **k, **more))

def test_unknown_keywords(monkeypatch):
    spy(monkeypatch, new_bias=torch.ones(1))
    with pytest.raises(CannotServe, match='LlamaAttention passes new_bias to attention'): load_model(tiny_lm())

def test_unknown_keywords_later(monkeypatch):
    with LLM(tiny_lm()) as llm:
        spy(monkeypatch, new_bias=torch.ones(1))
        logging.disable()
        try: llm.add([1, 2, 3]); o, = llm.step()
        finally: logging.disable(logging.NOTSET)
        assert o.finished and 'LlamaAttention passes new_bias to attention' in o.error

def test_harmless_keywords(monkeypatch):
    spy(monkeypatch, unknown_but_none=None, output_router_logits=False, off=False)
    outcome.__wrapped__('llama', (), 1)

def test_rows_that_depend_on_their_neighbours(monkeypatch):
    "A mix of neighbouring tokens outside of attention, as in a convolution, is found without being known"
    from transformers.models.llama import modeling_llama as ml
    mlp = ml.LlamaMLP.forward
    monkeypatch.setattr(ml.LlamaMLP, 'forward', lambda self, x: mlp(self, x + x.roll(1, dims=1)))
    with pytest.raises(CannotServe, match='depend on more than'): tiny_lm().layers

def test_positions_of_its_own(monkeypatch):
    from transformers.models.llama import modeling_llama as ml
    rot = ml.LlamaRotaryEmbedding.forward
    monkeypatch.setattr(ml.LlamaRotaryEmbedding, 'forward', lambda self, x,
                        position_ids: rot(self, x, torch.arange(x.shape[1])[None]))
    with pytest.raises(CannotServe, match='more than a token and its position'): tiny_lm().layers

# ---- random weights

def test_dummy_from_a_configuration():
    config = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4)
    state = torch.random.get_rng_state()
    a, b = (load_model(config, 'bfloat16', load_format='dummy') for _ in 'ab')
    assert torch.random.get_rng_state().equal(state) and a.dtype == torch.bfloat16
    assert all(x.equal(y) for x, y in zip(a.hf_model.parameters(), b.hf_model.parameters()))
    with pytest.raises(ValueError, match="load_format='dummy'"): load_model(config)
    with pytest.raises(ValueError, match="load_format='none'"): load_model(config, load_format='none')
    with pytest.raises(CannotServe, match='bloom'): load_model(AutoConfig.for_model('bloom'), load_format='dummy')
    with LLM(config, load_format='dummy') as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True),
                                use_tqdm=False)[0].outputs[0].token_ids) == 5

@pytest.mark.parametrize('with_tokenizer', [False, True])
def test_dummy_from_a_folder(tmp_path, with_tokenizer):
    "`config.json` is enough; a tokenizer that lies beside it is taken"
    lm = tiny_lm('qwen3')
    lm.hf_model.config.save_pretrained(tmp_path)
    if with_tokenizer: lm.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(Exception): load_model(tmp_path)
    with LLM(str(tmp_path), load_format='dummy') as llm:
        assert (llm.tokenizer is not None) == with_tokenizer and llm.model.layers == lm.layers
        assert ((tmp_path/'config.json').exists() and llm.model_path != str(tmp_path)
                and load_model(llm.model_path).layers == lm.layers)

def test_dummy_from_a_hub_id(tmp_path):
    "The hub's cache holds the configuration alone"
    snap = tmp_path/'hub'/'models--some--model'/'snapshots'/('0' * 40)
    snap.mkdir(parents=True); (snap.parent.parent/'refs').mkdir()
    (snap.parent.parent/'refs'/'main').write_text('0' * 40)
    tiny_lm('llama').hf_model.config.save_pretrained(snap)
    code = ("from cbatch.loading import *; lm = load_model('some/model', load_format='dummy'); "
            "print(lm.name, len(lm.layers), lm.tokenizer)")
    r = subprocess.run([sys.executable, '-c', code], env=os.environ | dict(HF_HOME=str(tmp_path), HF_HUB_OFFLINE='1'),
                       capture_output=True, text=True)
    assert r.stdout.strip() == 'some/model, random weights 3 None', r.stderr

# ---- the record, and the table that is drawn from it

def describe(arch, schedules, deep):
    "A row of the record"
    row = dict(arch=arch, cls=ALL[arch][0] if isinstance(ALL[arch], tuple) else ALL[arch])
    try: rehearse(AutoConfig.for_model(arch))
    except CannotServe as e: return row | dict(refused=str(e).partition('because ')[2])
    except Exception as e: return row | dict(not_tried=f'its default configuration is no model: {type(e).__name__}')
    try:
        with torch.device('meta'):
            n = sum(p.numel() for p in AutoModelForCausalLM.from_config(small_config(arch)).parameters())
        if n > 1e7: return row | dict(not_tried='it has parts beside the text model that do not get small')
        lm = model(arch)
    except Exception as e: return row | dict(not_tried=f'no small one could be made: {type(e).__name__}')
    try: layers = lm.layers
    except CannotServe as e: return row | dict(refused=str(e).partition('because ')[2])
    except Exception as e: return row | dict(not_tried=f'asking the small one failed: {type(e).__name__}')
    try: oracle(arch, (), 0)
    except (RuntimeError, ValueError): return row | dict(not_tried="transformers itself can't run the small one")
    overs = variants(arch) if deep else [()]
    runs = [(over, outcome(arch, over, schedules if not over else 3)) for over in overs]
    windows, caps = sorted({l.window for l in layers if l.window}), sorted({l.softcap for l in layers if l.softcap})
    row |= dict(cls=type(lm.hf_model).__name__, params=sum(p.numel() for p in lm.hf_model.parameters()),
                windows=windows, softcaps=caps)
    return row | {k: sum(r[k] for _, r in runs) for k in ('equal', 'ties', 'preemptions', 'schedules')}

def write_record():
    rows = []
    for arch in sorted(ALL, key=str.lower):
        rows.append(describe(arch, 6 if arch in NAMED else 3, arch in NAMED)); print(rows[-1], flush=True)
    versions = {p: version(p) for p in ('torch', 'transformers')} | dict(python=sys.version.split()[0])
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(dict(command='python tests/test_architectures.py', versions=versions,
                                      architectures=rows), indent=1) + '\n')

def test_record_is_fresh():
    "The record tells of what these tests run, and of nothing that they contradict"
    rows = {r['arch']: r for r in record()['architectures']}
    for a in NAMED:
        assert rows[a]['equal'] > 0 and rows[a]['schedules'] == sum(6 if not o else 3 for o in variants(a)), a
    if not recorded(): pytest.skip('recorded with another version of transformers')
    assert set(rows) == set(ALL)
    for a, why in REFUSED.items():
        if a in rows: assert why in rows[a]['refused'], a
    for a in NAMED:
        lm = model(a)
        assert (rows[a]['cls'], rows[a]['params']) == (type(lm.hf_model).__name__,
                                                       sum(p.numel() for p in lm.hf_model.parameters())), a

def test_the_notebooks_table_is_the_records():
    "Each row of the record stands in the stored output of nbs/04_probe.ipynb as it is now"
    nb = json.loads((ROOT/'nbs'/'04_probe.ipynb').read_text(encoding='utf-8'))
    shown = ''.join(''.join(o.get('data', {}).get('text/html', '')) for c in nb['cells'] for o in c.get('outputs', []))
    for r in record()['architectures']:
        cells = [r['arch'], r['cls'], f"{r['params']:,}", f"{r['equal'] + r['ties']}",
                 f"{r['ties']}"] if 'equal' in r else None
        if cells:
            row = next((l for l in shown.split('<tr>') if l.startswith(f"<td>{r['arch']}</td>")), '')
            assert all(f'<td>{c}</td>' in row
                       for c in cells), f"{r['arch']}: run `python tools/run_nbs.py nbs/04_probe.ipynb`"
        else:
            assert r['arch'] in shown and (r.get('refused')
                                           or r['not_tried']).split(', ')[0][:40] in shown.replace('&#x27;',
                                               "'"), r['arch']

if __name__ == '__main__': logging.disable(); write_record()
