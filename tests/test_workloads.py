"Crowds: drawn ones are pinned, files are read by name, and a bad row is told with its line"
import json, math
import numpy as np
import pytest
from cbatch.workloads import (WORKLOADS, Workload, WorkItem, arrivals, batch_steps, chat, get_workload, heavy,
                              load_workload, w64, w256)

def test_w64_is_pinned():
    w = w64()
    assert (len(w), w.num_prompt_tokens, w.num_output_tokens, max(x.output_len for x in w), w.max_num_seqs) == (64,
        8157, 6237, 346, 32)
    assert (min(x.prompt_len for x in w) >= 8, max(x.prompt_len for x in w) <= 512,
            min(x.output_len for x in w) >= 4) == (True,) * 3
    assert [(x.prompt_len, x.output_len) for x in w64(1)] != [(x.prompt_len, x.output_len) for x in w]
    assert len(w256()) == 256 and w256().num_output_tokens == 23033
    assert {x.arrival for x in w} == {0.}

def test_prompts_repeat_and_differ():
    a, b = w64()[0], w64()[1]
    assert a.prompt_ids(100) == w64()[0].prompt_ids(100) and len(a.prompt_ids(100)) == a.prompt_len
    assert a.prompt_ids(100) != a.prompt_ids(100, seed=1) and set(a.prompt_ids(3)) <= {0, 1, 2}
    assert a.prompt_ids(1000)[:8] != b.prompt_ids(1000)[:8]

def test_heavy_pays():
    for w, least in ((w64(), 1.5), (w256(), 2.9), (heavy(), 6.5)):
        static, free = batch_steps([x.output_len for x in w], 32)
        assert static / free > least
        assert free >= max(max(x.output_len for x in w), w.num_output_tokens / 32)

def test_chat_grows():
    w = chat(3, 4)
    turns = [x for x in w if x.session == 's1']
    for a, b in zip(turns, turns[1:]):
        assert b.parts[:len(a.parts)] == a.parts and b.arrival > a.arrival and len(b.parts) == len(a.parts) + 2
    assert ({x.parts[0] for x in w} == {('system', 200)}
            and turns[1].prompt_ids(500)[:turns[0].prompt_len] == turns[0].prompt_ids(500))

@pytest.mark.parametrize('b', [.2, 1., 4., math.inf])
def test_arrivals_take_n_over_rate(b):
    t = arrivals(400, 8., b, seed=3)
    assert t == sorted(t) and t[-1] == pytest.approx(50.) and t[0] >= 0 and t == arrivals(400, 8., b, seed=3)
    if b == math.inf: assert np.diff(t) == pytest.approx([.125] * 399)
    else: assert np.std(np.diff(t)) * 8 == pytest.approx(b ** -.5, rel=.25)

def test_slices_and_speeds_leave_the_original_alone():
    w = Workload('x', [WorkItem(3, [(str(i), 2)], arrival=i * 2.) for i in (2, 0, 1, 3)])
    assert [x.arrival for x in w] == [0., 2., 4., 6.]
    assert [x.arrival for x in w[1:3]] == [0., 2.] and w[1:3].name == 'x[1:3]' and w[-1].arrival == 6.
    assert [x.arrival for x in w.faster(4)] == [0., .5, 1., 1.5] and w.duration_s == 6.
    assert [x.arrival for x in w.at([1, 0, 2, 3])] == [0., 1., 2., 3.]
    assert len(w.shorter(4)) == 0 and len(w.shorter(5)) == 4 and len(w[4:]) == 0
    for bad in (lambda: w.at([1.]), lambda: w.faster(0), lambda: arrivals(2, -1)):
        with pytest.raises(ValueError): bad()

AZURE = ('TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:59:59.9799600,48,10\r\n'
         '2023-11-16 19:00:01.0000001,31,8')
BURST = ('Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n'
         '5,a,472,18,490,x\n45,a,10,0,10,x\n118,b,30,9,39,x\n')
LATER = ('Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n'
         '5,s,1,a,472,18,490,x\n45,s,1,a,10,0,10,x\n118,t,1,b,30,9,39,x\n')
MOON = ''.join(json.dumps(x) + '\n' for x in (dict(timestamp=3000, input_length=600, output_length=5, hash_ids=[0, 9]),
                                              dict(timestamp=6000, input_length=1024, output_length=3,
                                                   hash_ids=[0, 4])))

def write(tmp_path, name, text): p = tmp_path/name; p.write_bytes(text.encode()); return p

@pytest.mark.parametrize('name,text,lens,times,dropped', [
    ('a.csv', AZURE, [(48, 10), (31, 8)], [0., 1.0200401], 0), ('b.csv', BURST, [(472, 18), (30, 9)], [0., 113.], 1),
    ('b2.csv', LATER, [(472, 18), (30, 9)], [0., 113.], 1), ('m.jsonl', MOON, [(600, 5), (1024, 3)], [0., 3.], 0),
    ('o.csv', '\ufeffprompt_len,output_len\n3,4\n', [(3, 4)], [0.], 0),
    ('o.jsonl', '{"prompt_len": 3, "output_len": 4, "user": "ann"}\n\n', [(3, 4)], [0.], 0)])
def test_files_are_read_by_column_name(tmp_path, name, text, lens, times, dropped):
    w = load_workload(write(tmp_path, name, text))
    assert [(x.prompt_len, x.output_len) for x in w] == lens and [x.arrival for x in w] == pytest.approx(times,
        abs=1e-6) and w.num_dropped == dropped
    assert w.name == name.split('.')[0]

def test_pieces_of_mooncake_are_shared(tmp_path):
    a, b = load_workload(write(tmp_path, 'm.jsonl', MOON))
    assert a.prompt_ids(999)[:512] == b.prompt_ids(999)[:512] and a.prompt_ids(999)[512:] != b.prompt_ids(999)[512:600]
    assert [x.session for x in load_workload(write(tmp_path, 'b.csv', LATER))] == ['s', 't']

def test_part_of_a_file(tmp_path):
    p = write(tmp_path, 'x.csv', 'arrival,prompt_len,output_len\n' + ''.join(f'{i},{i + 1},2\n' for i in range(9))
              + 'bad,1,1\n')
    w = load_workload(p, 2, 5)
    # the bad row lies behind it
    assert [x.prompt_len for x in w] == [3, 4, 5] and [x.arrival for x in w] == [0., 1., 2.]
    with pytest.raises(ValueError, match="line 11: arrival: 'bad' is neither a number nor a date"): load_workload(p)

@pytest.mark.parametrize('name,text,says', [
    ('a.csv', 'prompt_len,output_len\n1,2\n1.5,2\n', "line 3: prompt_len: '1.5' is not a whole number from 1 up"),
                                            ('a.csv', 'prompt_len,output_len\n0,2\n', 'line 2: prompt_len'),
                                            ('a.csv', 'prompt_len,output_len\n1\n', 'line 2: output_len: None'),
    ('a.csv', 'prompt_len,output_len\n1,-1\n', 'line 2: output_len'),
                                            ('a.csv', 'tokens,output_len\n1,2\n',
                                             'no column tells the prompt_len; has tokens, output_len'),
                                            ('a.csv', 'arrival,prompt_len,output_len\nnan,1,1\n',
                                             'line 2: arrival: .* finite'),
    ('a.jsonl', '{"prompt_len": 1, "output_len": 1}\n[1]\n', 'line 2'),
                                            ('a.jsonl', '{"prompt_len": 1, "output_len": 1}\n{oops\n',
                                             'line 2: not JSON'), ('a.jsonl',
                                                 '{"prompt_len": true, "output_len": "x"}\n', 'line 1: output_len'),
    ('a.csv', '', 'no request'), ('a.csv', 'prompt_len,output_len\n', 'no request'),
                                            ('a.csv', 'prompt_len,output_len\n5,0\n', 'no request'),
                                            ('a.txt', 'x', 'give a .csv or a .jsonl')])
def test_what_is_wrong_is_said(tmp_path, name, text, says):
    with pytest.raises(ValueError, match=says): load_workload(write(tmp_path, name, text))

def test_by_name(tmp_path):
    assert [get_workload(n).name for n in WORKLOADS] == ['W64', 'W256', 'heavy', 'chat']
    assert len(get_workload(str(write(tmp_path, 'a.csv', AZURE)))) == 2
    with pytest.raises(ValueError, match='know w64, w256, heavy, chat'): get_workload('w65')
