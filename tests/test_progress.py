"What moves while somebody waits, and what is swept up behind those who were killed"
import os, tempfile
from itertools import count
from pathlib import Path
from types import SimpleNamespace
import pytest
from cbatch import loading
from cbatch.llm import LLM
from cbatch.model import tiny_lm
from ask import sp

@pytest.fixture
def bars(monkeypatch):
    "Every bar that is made, and what it has shown"
    made = []
    class Bar:
        def __init__(self, it=None, **kw):
            self.it, self.kw, self.shown, self.done, self.open = it, kw, [], 0, True
            made.append(self)
        def __iter__(self): return iter(self.it)
        def set_postfix_str(self, s): self.shown.append((self.done, s))
        def update(self): self.done += 1
        def close(self): self.open = False
    monkeypatch.setattr('tqdm.auto.tqdm', Bar)
    return made

def numbers(shown): return [[int(w.replace(',', '')) for w in s.split() if w[0].isdigit()] for _, s in shown]

def test_tokens_move_long_before_the_first_request_is_done(bars, monkeypatch):
    now = count(0, .03)
    monkeypatch.setattr('cbatch.llm.time', SimpleNamespace(monotonic=lambda: next(now)))
    with LLM(tiny_lm(), max_num_seqs=3, max_num_batched_tokens=8) as llm:
        llm.generate([[1, 2]], sp(5), use_tqdm=False)      # the bar begins with nothing, whatever the engine has done
        outs = llm.generate([[1] * 9, [2] * 11, [3] * 5], sp(40))
        steps = llm.metrics['num_steps'] - 5
    quiet, bar = bars
    assert quiet.kw['disable'] and not quiet.shown and not bar.open and bar.done == 3 and len(outs) == 3
    early = [s for done, s in bar.shown if not done]
    assert len(early) > 5 and steps // 5 <= len(bar.shown) <= steps // 3 + 1       # each 0.1 s, of steps that take 0.03
    read, said, rate = zip(*numbers(bar.shown))
    assert list(read) == sorted(read) and read[-1] == 25 and read[0] <= 8
    assert list(said) == sorted(said) and len(set(said)) > 5 and said[-1] <= 120 and min(rate[1:]) > 0

def test_the_bar_goes_whatever_ends_it(bars, monkeypatch):
    with LLM(tiny_lm(), max_num_seqs=2) as llm:
        monkeypatch.setattr(llm, 'turn', lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError): llm.generate([[1, 2]], sp(5))
    assert [b.open for b in bars] == [False]

def test_unpacking_moves_tensor_by_tensor(bars, monkeypatch, tmp_path):
    from transformers import modeling_gguf_pytorch_utils as theirs
    monkeypatch.setattr(theirs, 'tqdm', lambda it, **kw: bars.append((it, kw)) or it)
    monkeypatch.setattr(loading.AutoConfig, 'from_pretrained', lambda *a, **kw: tiny_lm().hf_model.config)
    def unpack(*a, **kw):
        list(theirs.tqdm([1, 2], desc='theirs', total=2))
        raise ZeroDivisionError
    monkeypatch.setattr(theirs, 'load_gguf_checkpoint', unpack)
    before = theirs.tqdm
    with pytest.raises(ZeroDivisionError): loading._gguf_model(tmp_path/'m.gguf')
    (it, kw), = bars
    assert it == [1, 2] and kw['desc'] == 'unpacking' and not kw['leave'] and theirs.tqdm is before

class Saved:
    def save_pretrained(self, folder): Path(folder, type(self).__name__).write_text('whole')

@pytest.mark.skipif(os.name != 'posix', reason='needs locks on folders')
def test_what_the_killed_have_left_is_swept_and_what_lives_is_not(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv('CBATCH_CACHE', str(tmp_path/'cache'))
    monkeypatch.setattr(loading, '_need', lambda *a: None)
    for part in '_gguf_model', '_gguf_tokenizer': monkeypatch.setattr(loading, part, lambda gguf: Saved())
    (tmp_path/'cache').mkdir(); (tmp_path/'m.gguf').write_bytes(b'GGUF' * 100)
    dead, live = (Path(tempfile.mkdtemp(prefix='.half-', dir=tmp_path/'cache')) for _ in range(2))
    (dead/'model.safetensors').write_bytes(b'x' * 1000)
    held = loading._hold(live)
    folder = loading._convert(tmp_path/'m.gguf')
    assert (folder/'Saved').read_text() == 'whole' and live.is_dir() and not dead.exists()
    with pytest.raises(OSError): loading._hold(live)
    os.close(held)
    (tmp_path/'m.gguf').write_bytes(b'GGUF' * 101)
    assert loading._convert(tmp_path/'m.gguf') != folder and not live.exists()       # its holder is gone now
    assert {p.name for p in (tmp_path/'cache').iterdir()} == {p.name for p in (tmp_path/'cache').glob('m-*')}
