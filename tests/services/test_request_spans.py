"""States of a request as spans of its trace."""

from __future__ import annotations

import pytest
from fake_gangs import FakeGang, fake_cell, until
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from csps.protocols.rpc import trace_context
from csps.services.telemetry import request_trace as request_spans
from csps.services.telemetry.tracing import PlannedIdGenerator

STATES = ["queue", "plan", "prefill", "transfer", "decode"]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(id_generator=PlannedIdGenerator())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(request_spans, "_TRACER", provider.get_tracer("test"))
    return exporter


def sampled() -> trace.Span:
    """Return a sampled span context, as a client's `traceparent` describes it."""
    parent = trace_context.extract({"traceparent": f"00-{7:032x}-{9:016x}-01"})
    return trace.get_current_span(parent)


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_every_state_is_a_child_span_of_the_request(spans: InMemorySpanExporter) -> None:
    async with fake_cell() as cell:
        with trace.use_span(sampled()):
            handle = cell.submit(tokens=3000, max_tokens=3)
        sequence_id = await cell.decoding(handle)
        cell.finish(sequence_id, 3)
        assert len([token async for token in handle]) == 3
        found = named(spans)
        assert sorted(found) == sorted(STATES)
        for name in STATES:
            span = found[name]
            assert span.parent is not None
            assert (span.context.trace_id, span.parent.span_id) == (7, 9)
            assert span.attributes is not None
            assert span.attributes["gen_ai.request.id"] == "r"
        times = [(found[name].start_time, found[name].end_time) for name in STATES]
        assert times == sorted(times)
        assert found["prefill"].attributes["csps.prefill.group"] == (0, 1)
        assert found["decode"].attributes["gen_ai.usage.output_tokens"] == 3
        assert found["decode"].attributes["gen_ai.response.finish_reasons"] == ("length",)


async def test_the_trace_travels_to_both_gangs(spans: InMemorySpanExporter) -> None:
    async with fake_cell() as cell:
        with trace.use_span(sampled()):
            handle = cell.submit()
        step = await cell.prefilling(handle)
        carrier = {"traceparent": f"00-{7:032x}-{9:016x}-01"}
        assert step.trace == carrier
        (reserved,) = cell.decode.leader.reserved.values()
        assert reserved.trace == carrier


async def test_ranks_know_the_spans_that_theirs_lie_below(spans: InMemorySpanExporter) -> None:
    """A rank derives the ids of a request's prefill and decode spans from what it was sent."""
    async with fake_cell() as cell:
        with trace.use_span(sampled()):
            handle = cell.submit(max_tokens=3)
        step = await cell.prefilling(handle)
        (reserved,) = cell.decode.leader.reserved.values()
        computing = trace_context.below(step.trace, "prefill", step.chunks[0].sequence_id)
        decoding = trace_context.below(reserved.trace, "decode", reserved.sequence_id)
        sequence_id = await cell.decoding(handle)
        cell.finish(sequence_id, 3)
        assert len([token async for token in handle]) == 3
        found = named(spans)
        for name, carrier in (("prefill", computing), ("decode", decoding)):
            parent = trace.get_current_span(trace_context.extract(carrier)).get_span_context()
            assert found[name].context.span_id == parent.span_id
            assert found[name].context.trace_id == parent.trace_id == 7
            assert found[name].status.status_code is StatusCode.OK
        assert len({span.context.span_id for span in found.values()}) == len(STATES)


async def test_every_attempt_has_spans_of_its_own(spans: InMemorySpanExporter) -> None:
    async with fake_cell() as cell:
        with trace.use_span(sampled()):
            handle = cell.submit(max_tokens=3)
        first = await cell.prefilling(handle)
        cell.prefill.fail(first.chunks[0].sequence_id, "TransferError")
        await until(lambda: handle.sequence_id not in (None, first.chunks[0].sequence_id))
        handle.cancel()
        prefills = [span for span in spans.get_finished_spans() if span.name == "prefill"]
        assert prefills[0].attributes is not None
        assert prefills[0].attributes["csps.interrupted"] is True
        queues = [span for span in spans.get_finished_spans() if span.name == "queue"]
        assert len(queues) == 2


async def test_an_interrupted_state_ends_with_the_request(
    spans: InMemorySpanExporter,
) -> None:
    async with fake_cell() as cell:
        with trace.use_span(sampled()):
            handle = cell.submit()
        await cell.prefilling(handle)
        handle.cancel()
        found = named(spans)
        assert sorted(found) == ["plan", "prefill", "queue"]
        assert found["prefill"].attributes["csps.interrupted"] is True
        assert found["prefill"].status.status_code is StatusCode.ERROR
        assert found["prefill"].status.description == "cancelled"
        assert found["queue"].status.status_code is StatusCode.OK


async def test_an_unsampled_request_makes_no_spans(spans: InMemorySpanExporter) -> None:
    async with fake_cell(prefill=FakeGang("prefill", "p1")) as cell:
        handle = cell.submit()
        step = await cell.prefilling(handle)
        assert step.trace == {}
        handle.cancel()
        await until(lambda: handle.ended)
        assert not spans.get_finished_spans()
