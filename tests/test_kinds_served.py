"""Models of each kind from a folder: over HTTP, and by the command line in a process of its own."""
import json, re, subprocess, sys, time, urllib.error, urllib.request
import pytest, torch
from transformers.cache_utils import Cache
from cbatch.loading import load_model
from cbatch.model import tiny_lm
from cbatch.twin import with_attention
from web import NEXT, web

STATES = 'qwen3_next kimi_linear granitemoehybrid falcon_h1 mamba2 jamba lfm2 minimax'.split()
OTHERS = 'gpt_oss deepseek_v3 minicpm3 gemma4_text gemma3n_text llama4_text mimo_v2_flash nemotron'.split()

pytestmark = pytest.mark.skipif(not hasattr(Cache, 'get_conv_state'), reason='transformers hides the states')

def greedy(lm, n):
    "What transformers answers to NEXT, by its plainest attention"
    x = torch.tensor([NEXT])
    with torch.no_grad():
        out = with_attention(lm.hf_model, 'eager').generate(x, attention_mask=torch.ones_like(x), max_new_tokens=n,
            min_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=257)
    return lm.tokenizer.decode(out[0, len(NEXT):].tolist(), skip_special_tokens=True)

def told(request):
    "The answer of a server, when it has loaded its model"
    for _ in range(100):
        try:
            with urllib.request.urlopen(request) as r: return json.loads(r.read() or '{}')
        except urllib.error.HTTPError as e:
            if e.code != 503: raise
        time.sleep(.3)
    pytest.fail('the server never got ready')

@pytest.mark.parametrize('arch', STATES + OTHERS)
def test_from_a_folder_over_http(tmp_path, arch):
    lm = tiny_lm(arch)
    with web(load_model(lm.save(tmp_path))) as w:
        got = [w.complete(logprobs=0), w.complete(n=2), w.complete(stream=False)]
        assert {r.status for r in got} == {200}
        assert {c['text'] for r in got for c in r.json['choices']} == {greedy(lm, 6)}

@pytest.mark.slow
@pytest.mark.parametrize('arch', STATES + OTHERS)
def test_by_the_command(tmp_path, arch):
    lm = tiny_lm(arch)
    run = 'import sys; from cbatch.cli import main; sys.exit(main())'
    command = [sys.executable, '-c', run, 'serve', lm.save(tmp_path), '--port', '0', '--num-blocks', '64']
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as p:
        try:
            said = []
            for line in p.stdout:
                said.append(line)
                if found := re.search(r'http://[\w.]+:\d+', line): break
            else: pytest.fail(''.join(said))
            told(f'{found[0]}/health')
            ask = dict(model=told(f'{found[0]}/v1/models')['data'][0]['id'], prompt=NEXT, temperature=0, max_tokens=6,
                       ignore_eos=True)
            got = told(urllib.request.Request(f'{found[0]}/v1/completions', json.dumps(ask).encode(),
                                              {'Content-Type': 'application/json'}))
            assert got['choices'][0]['text'] == greedy(lm, 6)
        finally: p.terminate()
