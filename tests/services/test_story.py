"""What happened to a request, in words: from requests that run on fake ranks."""

from __future__ import annotations

import pytest
from fake_gangs import fake_cell
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from csps.services.requests.request_spec import ApiKey, SloBounds
from csps.services.requests.story import story
from csps.services.telemetry import request_trace
from csps.services.telemetry.request_trace import RequestTrace


async def test_a_whole_answer_is_told() -> None:
    async with fake_cell() as cell:
        handle = cell.submit(tokens=3000, max_tokens=3, slo=SloBounds(ttft_ms=90_000))
        assert story(handle) == ("It waits in the queue.",)
        sequence_id = await cell.decoding(handle)
        cell.finish(sequence_id, 3)
        assert len([token async for token in handle]) == 3
        told = "\n".join(story(handle))
        for sentence in (
            "in the queue, passed by nobody.",
            "Prefill of 3,000 tokens on instances 0 and 1 by Ulysses in ",
            " were predicted.",
            "The prompt's KV moved to where it is decoded (",
            " decoded 3 tokens, ",
            "Its objective of 90.0 s to the first token was kept.",
        ):
            assert sentence in told, told


async def test_a_request_is_behind_its_own_and_not_behind_others_names() -> None:
    async with fake_cell() as cell:
        own, other = ApiKey("a", 1, b"a"), ApiKey("b", 2, b"b")
        cell.submit(tokens=3000, api_key=own, client_request_id="first")
        second = cell.submit(tokens=3000, api_key=own, client_request_id="second")
        third = cell.submit(tokens=3000, api_key=other, client_request_id="third")
        assert story(second) == ("It waits in the queue behind first.",)
        assert story(third) == ("It waits in the queue behind 2 requests.",)


async def test_who_passes_a_request_is_counted() -> None:
    async with fake_cell() as cell:
        late = cell.submit(tokens=3000, priority=9)
        first = [cell.submit(tokens=3000, priority=-1) for _ in range(2)]
        await cell.decoding(first[0])
        await cell.prefilling(late)
        assert all(handle.line.passed == 0 for handle in first)
        assert "passed by 2 requests that came later." in story(late)[0]


async def test_the_trace_and_the_api_tell_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(request_trace, "_TRACER", provider.get_tracer("test"))
    async with fake_cell() as cell:
        traced = RequestTrace({}, operation="chat", client_request_id="r", began_ns=1)
        with traced:
            handle = cell.submit(tokens=300)
        await cell.prefilling(handle)
        handle.cancel()
        traced.answered(handle, model="m", response_id="i", reason=None)
        traced.end()
        (root,) = (span for span in exporter.get_finished_spans() if span.name == "llm_request")
        assert root.attributes is not None
        assert root.attributes["csps.story"] == story(handle)
        assert root.status.status_code is trace.StatusCode.ERROR
        assert story(handle)[-1] == "It was cancelled after 0 tokens."
