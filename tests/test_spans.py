"Requests as OpenTelemetry has them: what ended how, when, and nothing that anybody said"
import json
from urllib.request import Request, urlopen
import pytest
from cbatch import LLM, SamplingParams, tiny_lm
from cbatch.cli import main
from cbatch.driving import VirtualClock
from cbatch.server import background
from cbatch.spans import Spans, attributes, otlp_provider, phases
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

@pytest.fixture
def kept():
    "A provider, and what it was given"
    out, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(out))
    return provider, out.get_finished_spans

def lives(spans): return [s for s in spans if not s.parent]

def test_parts_lie_in_the_life_one_after_the_other(kept):
    provider, got = kept
    with LLM(tiny_lm(), max_num_seqs=2, num_blocks=9, block_size=4, watermark=0.) as llm:
        clock = VirtualClock(llm)
        spans = Spans('tiny', provider, clock=lambda: clock.t)
        asked = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        outs = llm.generate([[5] * 7, [6] * 9, [7] * 3], asked, use_tqdm=False)
        for o in outs: spans.finished(o)
    assert sum(o.metrics.num_preemptions for o in outs) > 0
    for o, life in zip(outs, lives(got())):
        assert life.kind is SpanKind.SERVER and life.name == 'text_completion tiny'
        assert life.attributes['cbatch.num_preemptions'] == o.metrics.num_preemptions
        parts = [s for s in got() if s.parent and s.parent.span_id == life.context.span_id]
        assert [s.name for s in parts] == ['queue', 'prefill', 'decode']
        assert [parts[0].start_time, *(s.end_time for s in parts)] == \
               [life.start_time, *(s.start_time for s in parts[1:]), life.end_time]
        took = o.metrics.finished_at - o.metrics.arrival
        assert life.end_time - life.start_time == pytest.approx(took * 1e9, abs=1e3)

def test_a_failure_is_one(kept):
    provider, got = kept
    with LLM(tiny_lm()) as llm:
        llm.add([1, 2], SamplingParams(max_tokens=3), deadline=llm.clock() - 1)
        out, = llm.step()
    Spans('tiny', provider).finished(out)
    part, life = got()
    assert life.status.status_code is StatusCode.ERROR and 'deadline' in life.status.description
    assert life.attributes['error.type'] == 'deadline' and part.name == 'queue'
    assert [*phases(out.metrics)] == [('queue', out.metrics.arrival, out.metrics.finished_at)]

def test_guesses_are_told_where_there_were_any(kept):
    provider, got = kept
    asked = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with LLM(tiny_lm(), guesses='lookup', guess_when='always', max_guesses=3) as llm:
        spans = Spans('tiny', provider)
        said = llm.generate([[5, 6]], asked, use_tqdm=False)[0].outputs[0].token_ids
        llm.add([5, 6], asked, prediction=said)
        while llm.has_unfinished: out = llm.step()[-1]
        spans.finished(out)
    at = lives(got())[0].attributes
    assert (at['cbatch.num_guessed_tokens'], at['cbatch.num_accepted_tokens']) == (6, 6)
    with LLM(tiny_lm()) as llm: plain, = llm.generate([[5, 6]], asked, use_tqdm=False)
    assert not [k for k in attributes(plain) if 'guess' in k]

def test_a_server_reports_what_was_asked_and_never_the_words(kept):
    provider, got = kept
    with background(lambda: LLM(tiny_lm()), 'm', observers=[Spans('m', provider)]) as server:
        body = dict(model='m', prompt='a secret', max_tokens=5, temperature=.5, stop=['never said'], n=2,
                    ignore_eos=True)
        ask = Request(f'{server.url}/v1/completions', json.dumps(body).encode(), {'Content-Type': 'application/json'})
        with urlopen(ask, timeout=60) as r: answer = json.loads(r.read())
    life, = lives(got())
    at = dict(life.attributes)
    assert at['gen_ai.request.max_tokens'] == 5 and at['gen_ai.request.temperature'] == .5
    assert at['gen_ai.request.choice.count'] == 2 and 'gen_ai.request.top_p' not in at
    assert at['gen_ai.usage.output_tokens'] == answer['usage']['completion_tokens'] == 10
    assert at['gen_ai.usage.input_tokens'] == answer['usage']['prompt_tokens']
    assert list(at['gen_ai.response.finish_reasons']) == ['length', 'length']
    assert 'secret' not in json.dumps(at, default=str)

def test_an_address_that_is_none_is_refused_before_anything_starts(capsys):
    assert main(['serve', 'smollm2', '--otlp', 'localhost:4318']) == 2
    assert "give a collector's address" in capsys.readouterr().err
    with pytest.raises(ValueError, match='collector'): otlp_provider('')

def test_spans_reach_a_collector():
    "Over HTTP, in the protocol's own bytes"
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    came = []
    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers['content-length']))
            came.append((self.path, self.headers.get('content-encoding'), body))
            self.send_response(200); self.end_headers()
        def log_message(self, *a): pass
    server = HTTPServer(('127.0.0.1', 0), Collector)
    Thread(target=server.serve_forever, daemon=True).start()
    provider = otlp_provider(f'http://127.0.0.1:{server.server_port}/v1/traces')
    with LLM(tiny_lm()) as llm: out, = llm.generate([[1, 2, 3]], max_tokens=3, ignore_eos=True, use_tqdm=False)
    Spans('tiny', provider).finished(out)
    provider.shutdown(); server.shutdown(); server.server_close()
    (path, packed, body), = came
    assert path == '/v1/traces' and packed is None
    message = ExportTraceServiceRequest.FromString(body)
    names = [s.name for r in message.resource_spans for x in r.scope_spans for s in x.spans]
    assert sorted(names) == ['decode', 'prefill', 'queue', 'text_completion tiny']
