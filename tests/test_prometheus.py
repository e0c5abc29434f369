"""The metrics page: names, buckets, labels, values that agree with the engine.
Two engines in one process; a dashboard whose every query finds something."""
import asyncio, gc, json, re, threading, weakref
from functools import partial
from pathlib import Path
import pytest
pytest.importorskip('prometheus_client')
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from cbatch.async_engine import AsyncLLM, Overloaded, Unavailable
from cbatch.core import Decision, Kind, StepRecord, Why
from cbatch.prometheus import (ITL, LATENCY, OWN, REASONS, SIZES, STEP_TOKENS, TIMES, TTFT, Exporter, token_buckets,
                               why_waiting)
from ask import poison, sp
from heard import Heard

sp = partial(sp, max_tokens=6)

ROOT = Path(__file__).resolve().parent.parent
VLLM = '''num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total
request_success_total time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prompt_tokens request_generation_tokens request_max_num_generation_tokens iteration_tokens_total
num_preemptions_total request_num_preemptions prefix_cache_queries_total prefix_cache_hits_total
request_inference_time_seconds request_params_n request_params_max_tokens num_requests_waiting_by_reason
admission_rejections_total corrupted_requests_total cache_config_info'''.split()

def families(page): return {s.name: f for f in text_string_to_metric_families(page.decode()) for s in f.samples}
def serve(llm, visit, compat='cbatch', **kw):
    "Run `visit(AsyncLLM, Exporter)` and return what it returns, and a reader of samples"
    async def main():
        async with AsyncLLM(llm, **kw) as a:
            e = Exporter(a, 'm', compat)
            out = await visit(a, e)
            await a.call(lambda llm: None)                  # the last step is over
            return a, e, out
    a, e, out = asyncio.run(main())
    value = lambda name, **labels: e.registry.get_sample_value(name, dict(model_name='m', engine='0') | labels)
    value.engine = a
    return out, value, e

async def crowd(a, e): return [await s.result() for s in await a.add_many([([i + 1] * 9, sp()) for i in range(7)])]

@pytest.mark.parametrize('compat', ['cbatch', 'vllm'])
def test_names_labels_buckets(engine, compat):
    async def visit(a, e):
        await crowd(a, e)
        e.refused('requests'); e.corrupted.inc(0)
        return e.render()
    (page, kind), value, e = serve(engine(), visit, compat)
    f = families(page)
    assert kind.startswith('text/plain') and {n.split(':')[0] for n in f} == {'cbatch', compat}
    for n in VLLM: assert {f'{compat}:{n}', f'{compat}:{n}_bucket'} & set(f), n
    for n in OWN: assert f'cbatch:{n}_total' in f
    for fam in f.values():
        for s in fam.samples: assert (s.labels['model_name'], s.labels['engine']) == ('m', '0')
    bounds = lambda n: tuple(float(s.labels['le']) for s in f[f'{compat}:{n}_bucket'].samples if 'le' in s.labels)[:-1]
    for n, want in dict(time_to_first_token_seconds=TTFT, inter_token_latency_seconds=ITL,
                        request_time_per_output_token_seconds=ITL, e2e_request_latency_seconds=LATENCY,
                        request_queue_time_seconds=LATENCY,
                        iteration_tokens_total=STEP_TOKENS, request_prompt_tokens=token_buckets(160),
                        request_num_preemptions=(1, 2, 3, 4, 5, 10, 20)).items(): assert bounds(n) == want
    assert (TTFT[:3] == (.001, .005, .01) and TTFT[-2:] == (640, 2560) and len(TTFT) == 22 and len(ITL) == 19
            and len(LATENCY) == 21
            and STEP_TOKENS == (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
    page, kind = e.render('application/openmetrics-text; version=1.0.0')
    assert 'openmetrics' in kind and page.endswith(b'# EOF\n')

@pytest.mark.parametrize('trace', [True, False])
def test_values_agree_with_the_engine_and_the_requests(engine, trace):
    llm = engine(trace=trace, num_blocks=14)                # with preemptions
    outs, value, e = serve(llm, crowd)
    m, ms = value.engine.metrics(), [o.metrics for o in outs]
    assert m['num_preemptions'] and value('cbatch:num_preemptions_total') == m['num_preemptions']
    assert (value('cbatch:generation_tokens_total') == 42 == m['num_sampled_tokens']
            and value('cbatch:request_success_total', finished_reason='length') == 7)
    assert sum(value('cbatch:slot_steps_total', use=u) for u in ('sampled', 'prefilling', 'idle')) == 4 * m['num_steps']
    for name, xs in dict(time_to_first_token_seconds=[x.token_times[0] - x.arrival for x in ms],
                         e2e_request_latency_seconds=[x.finished_at - x.arrival for x in ms],
                         request_queue_time_seconds=[x.scheduled_at - x.arrival for x in ms],
                         request_decode_time_seconds=[x.finished_at - x.token_times[0] for x in ms],
                         inter_token_latency_seconds=[b - a for x in ms
                                                      for a, b in zip(x.token_times, x.token_times[1:])],
                         request_num_preemptions=[x.num_preemptions for x in ms], request_prompt_tokens=[9] * 7,
                         request_params_max_tokens=[6] * 7,
                         request_time_per_output_token_seconds=[(x.finished_at - x.token_times[0]) / 5
                                                                for x in ms]).items():
        assert (value(f'cbatch:{name}_count') == len(xs) and value(f'cbatch:{name}_sum') == pytest.approx(sum(xs))
                and min(xs) >= 0), name
    for name in TIMES: assert value(f'cbatch:{name}_sum') >= 0
    assert (value('cbatch:kv_cache_usage_perc'), value('cbatch:num_requests_running'),
            value('cbatch:num_requests_waiting')) == (0, 0, 0) and not e.since
    if trace:
        assert (value('cbatch:iteration_tokens_total_sum') == m['num_prompt_tokens'] + m['num_decode_tokens']
                and value('cbatch:iteration_tokens_total_count') == m['num_steps'])

@pytest.mark.parametrize('trace', [True, False])
def test_slots_and_gaps_where_a_step_brings_several_tokens(engine, trace):
    g, more = Heard(), dict(guess_when='always', max_guesses=3, trace=trace)
    g.listen(lambda g: serve(engine(guesses=g, **more), crowd))
    outs, value, _ = serve(engine(guesses=g, **more), crowd)
    m = value.engine.metrics()
    used = {u: value('cbatch:slot_steps_total', use=u) for u in ('sampled', 'prefilling', 'idle')}
    assert sum(used.values()) == 4 * m['num_steps'] and used['sampled'] == m['num_sampling'] < m['num_sampled_tokens']
    assert value('cbatch:generation_tokens_total') == m['num_sampled_tokens'] == 42
    gaps = [b - a for o in outs for ts in [sorted(set(o.metrics.token_times))] for a, b in zip(ts, ts[1:])]
    assert value('cbatch:inter_token_latency_seconds_count') == len(gaps) < 35
    assert value('cbatch:inter_token_latency_seconds_sum') == pytest.approx(sum(gaps)) and min(gaps) > 0
    if trace: assert value('cbatch:iteration_tokens_total_sum') == m['num_prompt_tokens'] + m['num_decode_tokens']

@pytest.mark.parametrize('trace', [True, False])
def test_guesses_have_vllm_s_names(engine, trace):
    async def visit(a, e):
        said = (await a.generate([7, 8], sp())).outputs[0].token_ids
        odd = [(t + 1) % 250 for t in said]
        for p in (said, said[:2] + odd[2:], odd): await a.generate([7, 8], sp(), prediction=p)
    llm = engine(trace=trace, guesses='lookup', guess_when='always', max_guesses=3)
    _, value, e = serve(llm, visit, 'vllm')
    m, name = value.engine.metrics(), 'vllm:spec_decode_num'
    got = [value(f'{name}_{k}_total') for k in ('drafts', 'draft_tokens', 'accepted_tokens')]
    assert got == [m['num_guesses'], m['num_guessed_tokens'], m['num_accepted_tokens']] and 0 < got[2] < got[1]
    held = [value(f'{name}_accepted_tokens_per_pos_total', position=str(i)) for i in range(3)]
    assert sum(held) == got[2] and held == sorted(held, reverse=True)
    assert value(f'{name}_accepted_tokens_per_pos_total', position='3') is None
    used = [value('cbatch:slot_steps_total', use=u) for u in ('sampled', 'prefilling', 'idle')]
    assert sum(used) == 4 * m['num_steps'] and m['num_sampled_tokens'] == 24 == used[0] + got[2]
    assert value('cbatch:slot_utilisation') == pytest.approx(used[0] / sum(used))
    # a client sees a step's tokens together: so many gaps as steps that brought some, but for the first of each
    assert value('vllm:inter_token_latency_seconds_count') == used[0] - 4
    if trace: assert value('vllm:iteration_tokens_total_sum') == m['num_prompt_tokens'] + m['num_decode_tokens']

def test_what_went_wrong_is_counted_once(engine):
    llm = engine(max_num_seqs=1)
    poison(llm, lambda r: r.user == 'nan')
    async def visit(a, e):
        for how in ('bad', 'late', 'left'):
            async with await a.add([1, 2], sp(max_tokens=100), user='nan' if how == 'bad' else None, timeout_s=0
                                   if how == 'late' else None) as s:
                if how != 'left': assert (await s.result()).error
                else: assert (await anext(s)).outputs[0].token_ids       # has tokens, and is no latency all the same
        await crowd(a, e)
        with pytest.raises(ValueError): await a.add([], sp())
        s = await a.add_many([([1], sp())] * 7)
        with pytest.raises(Overloaded): await a.add_many([([1], sp())] * 8)
        for x in s: await x.abort()
        await asyncio.gather(*(x.result() for x in s))
        await a.close()
        with pytest.raises(Unavailable): await a.add([1], sp())
        return e.registry.get_sample_value
    async def main():
        a = AsyncLLM(llm, max_waiting=8)
        await a.start()
        return await visit(a, Exporter(a, 'm'))
    get = asyncio.run(main())
    value = lambda name, **kw: get(name, dict(model_name='m', engine='0') | kw)
    assert value('cbatch:corrupted_requests_total') == 1 and value('cbatch:request_success_total',
        finished_reason='error') == 2
    assert value('cbatch:request_success_total', finished_reason='abort') + value('cbatch:request_success_total',
        finished_reason='length') == 15
    assert [value('cbatch:admission_rejections_total', reason=r) for r in ('requests', 'closed', 'tokens')] == [1, 1,
        None]
    assert value('cbatch:e2e_request_latency_seconds_count') == value('cbatch:request_success_total',
        finished_reason='length')

def test_why_the_queue_waits(engine):
    def said(*decisions, **kw): return why_waiting(StepRecord(0, 0., 0., decisions=list(decisions), **kw))
    def waits(*reason): return Decision('a', Kind.WAITS, *reason)
    reasons = [(Why.BATCH_FULL,), (Why.BUDGET,), (Why.BLOCKS, 1), (Why.BLOCKS, 3), (Why.MEMORY,),
               (Why.FORK, None, 'r0'),
               (Why.CLOSED,), (Why.WINDOW, 5), (Why.PREFIX, 144, 'r3'), ('words of a policy of its own',)]
    assert [said(waits(*r)) for r in reasons] == ['batch_full', 'budget', 'blocks', 'blocks', 'blocks', 'prefix',
                                                  'policy', 'policy', 'prefix', 'policy']
    behind, lost = Decision(None, Kind.BEHIND, n=2), Decision('a', Kind.PREEMPTED, 'youngest')
    assert said(waits(Why.BUDGET), waits(Why.BATCH_FULL), behind) == 'batch_full'
    assert said(lost, preempted=['a']) == 'blocks' and said() == 'policy'
    llm = engine(max_num_seqs=1); run, go, at = llm.execute, threading.Semaphore(0), []
    def execute(plan): at.append(plan); assert len(at) != 3 or go.acquire(timeout=20); return run(plan)
    llm.execute = execute
    async def visit(a, e):
        streams = await a.add_many([([1, 2], sp())] * 5)
        while len(at) < 3: await asyncio.sleep(.002)
        seen = [e.registry.get_sample_value('cbatch:num_requests_waiting_by_reason',
                                            dict(model_name='m', engine='0', reason=r)) for r in REASONS]
        go.release()
        for s in streams: await s.result()
        return seen
    seen, value, _ = serve(llm, visit)
    assert seen == [4, 0, 0, 0, 0] and value('cbatch:num_requests_waiting_by_reason', reason='batch_full') == 0

def test_two_engines_in_one_process(engine):
    async def main():
        async with AsyncLLM(engine()) as a, AsyncLLM(engine(max_num_seqs=2)) as b:
            shared = CollectorRegistry()
            x, y = Exporter(a, 'm'), Exporter(b, 'm', engine_name='1')
            for _ in range(2): Exporter(a, 'again')           # a cell that runs twice
            await a.generate([1], sp())                       # one after the other: they share a model
            await b.generate([1], sp(max_tokens=3))
            get = lambda e, i: e.registry.get_sample_value('cbatch:generation_tokens_total',
                                                           dict(model_name='m', engine=i))
            assert (get(x, '0'), get(y, '1'), get(x, '1')) == (6, 3, None)
            Exporter(a, 'm', registry=shared)
            assert shared.get_sample_value('cbatch:generation_tokens_total', dict(model_name='m', engine='0')) == 6
    before = set(REGISTRY._names_to_collectors)
    asyncio.run(main())
    assert set(REGISTRY._names_to_collectors) == before

def test_an_exporter_keeps_nothing_alive(engine):
    async def main():
        a = AsyncLLM(engine()); await a.start()
        e, w, worker = Exporter(a, 'm'), weakref.ref(a), a.worker
        del a; gc.collect()
        assert w() is None and e.render()[0]
        worker.join(20)
        assert not worker.is_alive()
    asyncio.run(main())

def test_bad_use(engine):
    with pytest.raises(ValueError, match='start it first'): Exporter(AsyncLLM(lambda: engine()))
    with pytest.raises(ValueError, match='compat'): Exporter(AsyncLLM(engine()), compat='sglang')

# --- the dashboard

def test_every_query_of_the_dashboard_finds_something(engine):
    d = json.loads((ROOT/'examples/grafana.json').read_text(encoding='utf-8'))
    assert d['title'] and d['schemaVersion'] >= 36 and '__inputs' not in d
    names = [v['name'] for v in d['templating']['list']]
    assert (names == ['datasource', 'model_name'] and d['templating']['list'][0]['type'] == 'datasource'
            and d['templating']['list'][0]['query'] == 'prometheus')
    ids, places = [p['id'] for p in d['panels']], [tuple(p['gridPos'][k] for k in 'xywh') for p in d['panels']]
    assert len(set(ids)) == len(ids) and len(set(places)) == len(places) and all(x + w <= 24 for x, y, w, h in places)
    async def visit(a, e):
        e.refused('requests')
        await crowd(a, e)
        return e.render()[0]
    page, _, _ = serve(engine(), visit)
    have = {n: s.labels for f in text_string_to_metric_families(page.decode()) for s in f.samples for n in [s.name]}
    labels = {s.name: set(s.labels) for f in text_string_to_metric_families(page.decode()) for s in f.samples}
    asked = set()
    for p in d['panels']:
        assert p['type'] == 'timeseries' and p['title'] and p['targets'] and len({t['refId']
            for t in p['targets']}) == len(p['targets'])
        for t in p['targets']:
            assert t['datasource'] == p['datasource'] == dict(type='prometheus', uid='${datasource}')
            used = re.findall(r'cbatch:\w+', t['expr']); asked |= set(used)
            assert used and all(u in have for u in used), t['expr']
            assert (t['expr'].count('(') == t['expr'].count(')')
                    and t['expr'].count('model_name=~"$model_name"') == len(used))
            for by in re.findall(r'by \((\w+)\)|\{\{(\w+)\}\}', t['expr'] + t['legendFormat']):
                assert {*by} - {''} <= set().union(*(labels[u] for u in used))
    base = lambda n: re.sub(r'_(bucket|total)$', '', n)
    missing = {*TIMES, *OWN, 'request_success', 'admission_rejections', 'corrupted_requests', 'slot_steps',
               'num_requests_waiting_by_reason', 'kv_cache_usage_perc'} - {base(n)[7:] for n in asked}
    assert missing <= {'request_inference_time_seconds'}, missing
