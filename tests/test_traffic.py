"Logs of requests in everybody's format: what can be read is, what can't is counted, and what is no log is refused"
import json, random
import pytest
from cbatch.core import StepRecord
from cbatch.driving import VirtualClock, drive
from cbatch.llm import LLM
from cbatch.model import tiny_lm
from cbatch.trace import Trace
from cbatch.traffic import get_workload, load_traffic, workload_of
from cbatch.workloads import WORKLOADS, Workload, WorkItem

AZURE = ('TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:59:59.9799600,48,10\r\n'
         '2023-11-16 19:00:01.0000001,31,8')
AZURE24 = ('TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-12 00:00:00.003930+00:00,48,10\n'
           '2024-05-12 00:00:02+00:00,31,8\n')
BURST = ('Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n'
         '5,a,472,18,490,x\n45,a,10,0,10,x\n118,b,30,9,39,x\n')
LATER = ('Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n'
         '5,s,1,a,472,18,490,x\n45,s,1,a,10,0,10,x\n118,t,1,b,30,9,39,x\n')
MOON = ''.join(json.dumps(x) + '\n' for x in (
    dict(timestamp=3000, input_length=600, output_length=5, hash_ids=[0, 9]),
    dict(timestamp=6000, input_length=1024, output_length=3, hash_ids=[0, 4])))
RUN = dict(duration=3.5, completed=2, request_rate='inf', input_lens=[7, 8, 9], output_lens=[5, 0, 6],
           ttfts=[.1, 0., .2], itls=[[.1], [], [.2]], errors=['', 'lost', ''], generated_texts=['a', '', 'b'])
VLLM = RUN | dict(start_times=[907.5, 908., 909.25])

def write(tmp_path, name, text):
    p = tmp_path/name
    p.write_bytes(text if isinstance(text, bytes) else text.encode())
    return p

def lens(w): return [(x.prompt_len, x.output_len) for x in w]

@pytest.mark.parametrize('name,text,what,times,dropped', [
    ('a.csv', AZURE, [(48, 10), (31, 8)], [0., 1.0200401], 0),
    ('a24.csv', AZURE24, [(48, 10), (31, 8)], [0., 1.99607], 0),
    ('b.csv', BURST, [(472, 18), (30, 9)], [0., 113.], 1), ('b2.csv', LATER, [(472, 18), (30, 9)], [0., 113.], 1),
    ('m.jsonl', MOON, [(600, 5), (1024, 3)], [0., 3.], 0),
    ('v.json', json.dumps(VLLM), [(7, 5), (9, 6)], [0., 1.75], 1),
    ('s.jsonl', json.dumps(RUN) + '\n', [(7, 5), (9, 6)], [0., 0.], 1),
    ('c.json', json.dumps(dict(command='x', machine={}, result=VLLM), indent=1), [(7, 5), (9, 6)], [0., 1.75], 1),
    ('list.json', '[{"prompt_len": 3, "output_len": 4},\n{"prompt_len": 5, "output_len": 0}]', [(3, 4)], [0.], 1),
    ('one.json', '{"prompt_len": 3,\n "output_len": 4}', [(3, 4)], [0.], 0),
    ('o.csv', '\ufeffprompt_len,output_len\n3,4\n', [(3, 4)], [0.], 0),
    ('o.tsv', '\n\r\nPROMPT_LEN\t output_len \r\n3\t4\r\n\r\n', [(3, 4)], [0.], 0),
    ('semi.csv', 'prompt_len;output_len;note\n3;4;"a, b; c"\n', [(3, 4)], [0.], 0),
    ('comma.csv', 'arrival,prompt_len,output_len,\n2,3,4,\n7,5,6,,,\n', [(3, 4), (5, 6)], [0., 5.], 0),
    ('o.jsonl', '\ufeff\n{"prompt_len": 3, "output_len": 4, "user": "ann"}\r\n\n', [(3, 4)], [0.], 0)])
def test_each_format_is_read(tmp_path, name, text, what, times, dropped):
    w = load_traffic(write(tmp_path, name, text))
    assert lens(w) == what and [x.arrival for x in w] == pytest.approx(times, abs=1e-6)
    assert w.num_dropped == dropped and set(w.dropped) <= {'no answer'}
    assert w.name.split(' (no times')[0] == name.split('.')[0]

def test_pieces_of_mooncake_are_shared(tmp_path):
    a, b = load_traffic(write(tmp_path, 'm.jsonl', MOON))
    assert a.prompt_ids(999)[:512] == b.prompt_ids(999)[:512] and a.prompt_ids(999)[512:] != b.prompt_ids(999)[512:600]
    assert [x.session for x in load_traffic(write(tmp_path, 'b.csv', LATER))] == ['s', 't']
    few = json.dumps(dict(timestamp=0, input_length=1500, output_length=1, hash_ids=[1]))
    assert [n for _, n in load_traffic(write(tmp_path, 'f.jsonl', few))[0].parts] == [512, 988]

OWN = 'ts,in,out,who,prompt_len\n1000,3,4,ann,99\n2500,5,6,bob,99\n'

def test_columns_by_name(tmp_path):
    p = write(tmp_path, 'own.csv', OWN)
    for columns in ('prompt_len=in,output_len=out,arrival=ts,user=who',
                    dict(prompt_len='IN', output_len='out', arrival='ts', user='who')):
        w = load_traffic(p, columns)
        assert (lens(w), [x.user for x in w], w[1].arrival) == ([(3, 4), (5, 6)], ['ann', 'bob'], 1500.)
    assert load_traffic(p, 'output_len=out')[0].prompt_len == 99      # the others by their own names
    rows = [dict(zip(('ts', 'in', 'out'), r)) for r in ((1, 2, 3), (4, 5, 6))]
    w = load_traffic(write(tmp_path, 'own.jsonl', '\n'.join(map(json.dumps, rows))), 'prompt_len=in,output_len=out')
    assert lens(w) == [(2, 3), (5, 6)]
    cols = json.dumps(dict(ins=[1, 2], outs=[3, 4], at=[5., 7.]))
    w = load_traffic(write(tmp_path, 'cols.json', cols), 'prompt_len=ins,output_len=outs,arrival=at')
    assert (lens(w), w[1].arrival) == ([(1, 3), (2, 4)], 2.)

@pytest.mark.parametrize('columns,says', [
    ('prompt=in', "'prompt' is none of arrival, prompt_len"), ('in', 'write prompt_len=in'),
    ('prompt_len=inn,output_len=out', 'line 2: no column tells the prompt_len: it has ts, in, out, who, prompt_len')])
def test_columns_that_are_not_there(tmp_path, columns, says):
    with pytest.raises(ValueError, match=says): load_traffic(write(tmp_path, 'own.csv', OWN), columns)

@pytest.mark.parametrize('column,unit,a,b,gap_s', [
    ('arrival', None, 1000, 3500, 2500.), ('arrival_ms', None, 1000, 3500, 2.5), ('at_us', None, 0, 2500, .0025),
    ('sent_ns', None, 0, 5 * 10**8, .5), ('at_s', None, 10**12, 10**12 + 5, 5.), ('arrival', 'ms', 1000, 3500, 2.5),
    ('at_ms', 's', 1000, 3500, 2500.), ('arrival', None, 1.7e9, 1.7e9 + 2.5, 2.5), ('us', None, 1, 3, 2.),
    ('arrival', None, 17 * 10**11, 17 * 10**11 + 2500, 2.5), ('arrival', None, 17 * 10**14, 17 * 10**14 + 2500, .0025),
    ('arrival', None, 17 * 10**17, 17 * 10**17 + 5 * 10**8, .5), ('arrival', None, -5, -2.5, 2.5),
    ('arrival', None, '2023-12-31 23:59:59.5', '2024-01-01T00:00:00', .5),
    ('arrival', None, '2024-02-29T12:00:00+02:00', '2024-02-29 10:00:01Z', 1.),
    ('arrival', None, '2024-02-29T12:00:00,25-0330', '2024-02-29 15:30:01', .75)])
def test_units_of_time_by_the_rule(tmp_path, column, unit, a, b, gap_s):
    text = f'{column};prompt_len;output_len\n{a};1;2\n{b};3;4\n'
    w = load_traffic(write(tmp_path, 'x.csv', text), dict(arrival=column), unit=unit)
    assert [x.arrival for x in w] == pytest.approx([0., gap_s], abs=2e-6) and lens(w) == [(1, 2), (3, 4)]

PROMPT = 'prompt_len is no whole number from 1 to 10000000'
OUTPUT = 'output_len is no whole number from 0 to 10000000'
URGENCY = 'priority is no whole number from -1000000000 to 1000000000'
BAD = [  # a row, and why it is left out
    ('1,0,2', PROMPT), ('1,-3,2', PROMPT),
    ('1,1.5,2', PROMPT), ('1,nan,2', PROMPT),
    ('1,' + '9' * 5000 + ',2', PROMPT), ('1,7', 'no answer'), ('1,7,', 'no answer'),
    ('1,10000001,2', PROMPT), ('1,7,0', 'no answer'),
    ('1,7,-1', OUTPUT), ('1,7,n/a', OUTPUT),
    ('nan,7,2', 'arrival is no time'), ('inf,7,2', 'arrival is no time'), ('noon,7,2', 'arrival is no time'),
    (',7,2', 'arrival is no time'), ('2023-13-01 00:00:00,7,2', 'arrival is no time'),
    ('-1e999,7,2', 'arrival is no time')]

@pytest.mark.parametrize('row,why', BAD)
def test_rows_that_are_no_requests_are_counted_by_reason(tmp_path, row, why):
    good = '\n'.join(f'{i},{i + 1},2' for i in range(5))
    w = load_traffic(write(tmp_path, 'x.csv', f'arrival,prompt_len,output_len\n{row}\n{good}\n{row}\n'))
    assert w.dropped == {why: 2} and lens(w) == [(i + 1, 2) for i in range(5)] and f'left out: 2 ({why})' in repr(w)

def test_rows_of_json_are_counted_too(tmp_path):
    good = dict(arrival=0, prompt_len=3, output_len=4)
    odd = [dict(prompt_len=True), dict(output_len=None), dict(arrival=[1]), dict(arrival=True), dict(priority='x'),
           dict(prompt_len=2.5)]
    odd = [good | d for d in odd] + [dict(arrival=1, output_len=3)]
    lines = [*map(json.dumps, [good] * 12 + odd), '[1]', '{oops', '{"a": NaN', '17', '[' * 100_000]
    w = load_traffic(write(tmp_path, 'x.jsonl', '\n'.join(lines)))
    assert len(w) == 12 and w.dropped == {
        PROMPT: 2, 'no answer': 1, 'arrival is no time': 2,
        URGENCY: 1, 'no column tells the prompt_len': 1, 'no object': 2,
        'not JSON': 3}

@pytest.mark.parametrize('name,text,says', [
    ('a.csv', 'prompt_len,output_len\n1,2\n1.5,2\nx,2\n',
     f'line 3: {PROMPT}: 1.5; 2 rows of 3'),
    ('a.csv', 'tokens,output_len\n1,2\n', 'line 2: no column tells the prompt_len: it has tokens, output_len'),
    ('a.jsonl', '{"prompt_len": 1, "output_len": 1}\n[1]\n7\n', 'line 2: no object; 2 rows of 3'),
    ('a.json', '{"prompt_len": 1,\n "output_len": }', 'neither JSON nor an object a line'),
    ('a.json', '[{"conversations": [{"from": "human", "value": "hi"}]}]', 'item 1: no column tells the prompt_len'),
    ('a.csv', '\n\nprompt_len,output_len\n\nx,2\n', 'line 5: '), ('a.jsonl', '\n{}\n', 'line 2: '),
    ('a.csv', '', 'no request'), ('a.csv', '\n\n', 'no request'), ('a.csv', 'prompt_len,output_len\n', 'no request'),
    ('a.csv', 'prompt_len,output_len\n5,0\n', r'no request.*left out: 1 \(no answer\)'), ('a.json', '[]', 'no request'),
    ('a.jsonl', json.dumps(RUN) + '\n' + json.dumps(RUN), 'line 2: a second run'), ('a.json', '{}', 'no column tells'),
    ('a.csv', 'prompt_len,output_len\n3,4\n'.encode('utf-16'), 'not UTF-8 text'),
    ('a.csv', b'prompt_len,output_len,user\n3,4,\xe9\n', 'not UTF-8 text'), ('a.csv', '\x00\x01', 'no request|read')])
def test_what_is_wrong_is_said(tmp_path, name, text, says):
    with pytest.raises(ValueError, match=says) as e: load_traffic(write(tmp_path, name, text))
    assert name in str(e.value)

def test_half_is_not_most(tmp_path):
    "Answers of no tokens don't speak against a file; what can't be read does, from one more than half"
    def p(good, none, bad):
        rows = '1,1\n' * good + '1,0\n' * none + 'x,1\n' * bad
        return write(tmp_path, 'x.csv', 'prompt_len,output_len\n' + rows)
    assert len(load_traffic(p(1, 98, 1))) == 1 and len(load_traffic(p(2, 0, 2))) == 2
    with pytest.raises(ValueError, match='3 rows of 5'): load_traffic(p(2, 0, 3))

def test_a_folder_and_nothing(tmp_path):
    with pytest.raises(ValueError, match='is a folder'): load_traffic(tmp_path)
    with pytest.raises(OSError): load_traffic(tmp_path/'none.csv')

def test_part_of_a_file(tmp_path):
    p = write(tmp_path, 'x.csv', 'arrival,prompt_len,output_len\n' + ''.join(f'{i},{i + 1},2\n' for i in range(9))
              + 'bad,1,1\n')
    w = load_traffic(p, start=2, stop=5)
    assert lens(w) == [(3, 2), (4, 2), (5, 2)] and [x.arrival for x in w] == [0., 1., 2.] and w.name == 'x[2:5]'
    assert not w.dropped and load_traffic(p).dropped == {'arrival is no time': 1}      # the bad row lies behind it
    assert load_traffic(p, start=8).name == 'x[8:]' and load_traffic(p, stop=1, name='a').name == 'a'
    for bad in (dict(start=-1), dict(start=1.5), dict(start=9), dict(start=3, stop=3), dict(unit='min')):
        with pytest.raises(ValueError): load_traffic(p, **bad)

def test_a_file_out_of_order_is_cut_as_it_stands(tmp_path):
    w = load_traffic(write(tmp_path, 'x.csv', 'arrival,prompt_len,output_len\n9,1,1\n3,2,1\n5,3,1\n'), stop=2)
    assert lens(w) == [(2, 1), (1, 1)] and [x.arrival for x in w] == [0., 6.]

def test_by_name(tmp_path):
    assert [get_workload(n).name for n in WORKLOADS] == ['W64', 'W256', 'heavy', 'chat']
    assert len(get_workload(str(write(tmp_path, 'a.csv', AZURE)))) == 2
    with pytest.raises(ValueError, match='know w64, w256, heavy, chat'): get_workload('w65')

# --- a trace as a log

def served(work, **config):
    with LLM(tiny_lm(), **dict(max_num_seqs=3, num_blocks=40, max_num_batched_tokens=32) | config) as llm:
        VirtualClock(llm)
        drive(llm, work)
        return llm.trace

def crowd(n=11, seed=0):
    rng, t = random.Random(seed), 0.
    items = []
    for i in range(n):
        items.append(WorkItem(rng.randint(1, 9), [(i, rng.randint(1, 40))], t))
        t += rng.random() * .2
    return Workload('x', items)

@pytest.mark.parametrize('policy', ['vllm', 'static', 'dynamic', 'fair'])
def test_a_trace_gives_its_crowd_back(tmp_path, policy):
    w = crowd()
    trace = served(w, policy=policy, num_blocks=12)
    back = workload_of(trace)
    assert lens(back) == lens(w) and not back.dropped and back.max_num_seqs == 3
    assert [x.arrival for x in back] == pytest.approx([x.arrival for x in w], abs=1e-9)
    assert all(len({name for name, _ in x.parts}) == 1 for x in back) and len({x.parts[0][0] for x in back}) == 11
    trace.to_jsonl(tmp_path/'t.jsonl')
    again = get_workload(str(tmp_path/'t.jsonl'))
    assert again.items == back.items and again.name == 't' and load_traffic(tmp_path/'t.jsonl', start=3).name == 't[3:]'

def test_who_is_in_doubt_is_counted():
    t = Trace(2, 16, 4, 20)
    t.append(StepRecord(0, 0., 1., arrived=[('a', 3, 0.), ('b', 4, 0.), ('c', 5, .5)], admitted=['a', 'b'],
                        scheduled=[('a', 3, 0, 1), ('b', 4, 0, 1)]))
    t.append(StepRecord(1, 1., 2., arrived=[('d', 2, 1.5)], scheduled=[('a', 1, 3, 1), ('b', 1, 4, 1)],
                        finished=[('a', 'length'), ('c', 'abort')]))
    t.append(StepRecord(2, 2., 3., arrived=[('a', 7, 2.5)], admitted=['a'], scheduled=[('b', 1, 5, 2), ('a', 7, 0, 1)],
                        finished=[('a', 'stop')]))
    w = workload_of(t)
    assert lens(w) == [(3, 2), (7, 1)] and [x.arrival for x in w] == [0., 2.5]      # `a` came twice
    assert w.dropped == {'unfinished': 2, 'no answer': 1}
    w = workload_of(t, unfinished=True)
    assert lens(w) == [(3, 2), (4, 4), (7, 1)] and w.dropped == {'no answer': 2}
    ring = Trace(2, 16, 4, 20, maxlen=1, keyframe_every=1)
    for rec in t: ring.append(rec)
    w = workload_of(ring)
    assert lens(w) == [(7, 1)] and w.dropped == {'came before the first kept step': 2}
    assert len(workload_of(Trace(2, 16, 4, 20))) == 0

@pytest.mark.parametrize('head', ['time,prompt_tokens,completion_tokens', 'startTime,usage.input,usage.output',
                                  'created_at,input_tokens,output_tokens', 'ts,prompt_tokens,answer_tokens'])
def test_names_that_others_use(tmp_path, head):
    f = tmp_path/'log.csv'
    f.write_text(f'{head}\n2026-03-02 09:00:00,7,3\n2026-03-02 09:00:02,8,4\n')
    work = load_traffic(f)
    assert [(x.arrival, x.prompt_len, x.output_len) for x in work] == [(0., 7, 3), (2., 8, 4)]

def test_a_file_without_times_says_so(tmp_path):
    f = tmp_path/'log.csv'
    f.write_text('when it was,prompt_tokens,output_tokens\n1,7,3\n2,8,4\n')
    assert repr(load_traffic(f)).startswith('log (no times in it): 2 requests, all at once')
    assert get_workload(str(f), 0, 'arrival=when it was').duration_s == 1.
    with pytest.raises(ValueError, match="there is no file 'none.csv'"): get_workload('none.csv')
