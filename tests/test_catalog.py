"Policies by name, by class and from a file, wherever a policy can be said"
import sys
import pytest
from cbatch import LLM
from cbatch.catalog import ALIASES, POLICIES, get_policy
from cbatch.cli import main
from cbatch.params import ParamError
from cbatch.scheduler import Policy
from ask import sp
from test_seams import P, ids, solo

MINE = """
from dataclasses import dataclass
from cbatch.scheduler import Policy
@dataclass
class Eager(Policy):
    "Newcomers first"
    most: int = 3
    def turns(self, s, plan):
        yield from s.line_of_waiting()
        yield from s.line_of_running()
class Sized(Policy):
    def __init__(self, size): self.size = size
class Falls(Policy):
    def __init__(self): raise OSError('no disk')
class Leaves(Policy):
    def __init__(self): raise SystemExit(5)
limit = 5
"""

@pytest.fixture
def mine(tmp_path):
    (tmp_path/'mine.py').write_text(MINE)
    (tmp_path/'broken.py').write_text('def f(:')
    (tmp_path/'leaves.py').write_text('raise SystemExit(3)')
    (tmp_path/'panics.py').write_text('raise BaseException("a panic")')
    return tmp_path

def test_names_and_aliases():
    assert [get_policy(n).name for n in POLICIES] == list(POLICIES) and not set(ALIASES) & set(POLICIES)
    for alias, name in ALIASES.items(): assert type(get_policy(alias)) is POLICIES[name]
    assert all(cls.__doc__ for cls in POLICIES.values())
    assert get_policy('vtc') is not get_policy('vtc')

def test_a_class_makes_one_and_an_object_stays_itself():
    for cls in POLICIES.values(): assert type(get_policy(cls)) is cls
    one = Policy()
    assert get_policy(one) is one

def test_a_file_is_run_under_a_name_of_its_own(mine):
    path, modules = list(sys.path), set(sys.modules)
    p = get_policy(f'{mine}/mine.py:Eager')
    assert (p.name, p.most) == ('Eager', 3) and sys.path == path and 'mine' not in sys.modules
    assert not [m for m in set(sys.modules) - modules if not m.startswith('_cbatch_policy')]
    assert not [f for f in mine.rglob('*') if f.suffix == '.pyc']
    (mine/'mine.py').write_text(MINE.replace('int = 3', 'int = 4'))      # of the same length, in the same second
    assert get_policy(f'{mine}/mine.py:Eager').most == 4

@pytest.mark.parametrize('said,words', [
    ('yours.py:Eager', 'there is no file'),
    ('mine.py:Egaer', 'the file has no Egaer; its policies: Eager, Sized, Falls, Leaves'),
    ('mine.py:limit', 'limit is not a Policy'), ('mine.py:dataclass', 'dataclass is not a Policy'),
    ('mine.py:Sized', "'size': give an object, Sized"), ('mine.py:Falls', r'Falls\(\) raised OSError: no disk'),
    ('broken.py:X', 'the file raised SyntaxError'), ('leaves.py:X', 'the file raised SystemExit'),
    ('panics.py:X', 'the file raised BaseException: a panic'), ('mine.py:Leaves', r'Leaves\(\) raised SystemExit'),
    ('mine.py:', 'has no')])
def test_what_is_wrong_with_a_file(mine, said, words):
    with pytest.raises(ParamError, match=words) as e: get_policy(f'{mine}/{said}')
    assert e.value.param == 'policy' and str(e.value).startswith(f"policy='{mine}/{said}'")

@pytest.mark.parametrize('said,words', [
    ('statc', 'did you mean static'), ('', 'know vllm'), (5, 'policy=5'), (None, 'policy=None'), (dict, 'know vllm'),
    ([], 'know vllm'), ('mine.py', 'file.py:Class')])
def test_what_is_wrong_with_a_name(said, words):
    with pytest.raises(ParamError, match=words): get_policy(said)

@pytest.mark.parametrize('said', [*POLICIES, *ALIASES, *POLICIES.values(), 'file'], ids=str)
def test_an_engine_takes_them_all(tiny, mine, said):
    if said == 'file': said = f'{mine}/mine.py:Eager'
    with LLM(tiny, policy=said, num_blocks=40, block_size=4, max_num_seqs=2, check=True) as llm:
        assert ids(llm.generate(P, sp(), use_tqdm=False)) == [solo(tiny, p, sp()) for p in P]

def test_commands_take_them_all(mine, monkeypatch, capsys):
    monkeypatch.chdir(mine)
    assert main(['bench', 'throughput', '--quick', '--policies', 'fcfs,mine.py:Eager,mlfq']) == 0
    out = capsys.readouterr().out
    assert all(f'\n{n}  (best of 1)' in out for n in ('fcfs', 'mine.py:Eager', 'mlfq')) and 'answers equal' in out
    assert main(['bench', 'serve', '--quick', '--rate', '500', '--num-prompts', '3', '--policy', 'sjf']) == 0
    for command in (['serve', 'no-model', '--policy'], ['demo', '--policies'], ['bench', 'throughput', '--policies']):
        capsys.readouterr()
        assert main([*command, 'mine.py:Egaer']) == 2
        assert 'its policies: Eager' in capsys.readouterr().err

def test_a_contestant_in_a_process_of_its_own(mine, monkeypatch):
    from cbatch.contest import ContestSpec, run_alone
    monkeypatch.chdir(mine)
    monkeypatch.setenv('PYTHONPATH', ':'.join(sys.path))
    spec = ContestSpec(model='tiny', workload='w64', dtype='float32', max_num_seqs=4, max_num_batched_tokens=2048,
                       num_blocks=None, prefix_caching=False, slos={}, repeats=1, limit_s=99., vocab_size=250, seed=0,
                       quick=True)
    assert run_alone('mine.py:Eager', spec)['output_throughput'] > 0
