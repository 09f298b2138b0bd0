"""The server span of a request, as its client sees and steers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_service import FakeService
from live_server import serving
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from csps.protocols.core.errors import QueueFull
from csps.protocols.rpc.trace_context import wants_timeline
from csps.services.http.api import HttpApi
from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.settings.credentials import ApiKeys
from csps.services.settings.settings import AuthSettings, Settings, TelemetrySettings
from csps.services.telemetry import request_trace
from csps.services.telemetry.metrics import Metrics
from csps.services.telemetry.tracing import make_provider

ASKED = {"traceparent": f"00-{7:032x}-{9:016x}-01", "tracestate": "vendor=7,csps=timeline"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider = make_provider("csps-router", TelemetrySettings(), InMemorySpanExporter())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(request_trace, "_TRACER", provider.get_tracer("test"))
    return exporter


class Server:
    def __init__(self, model: Path) -> None:
        parser = RequestParser(Settings(model=str(model), served_model_name="tiny"))
        self.service = FakeService(parser.tokenizer, "Yes.")
        self.options: dict[str, Any] = {
            "parser": parser,
            "parser_pool": ParserPool(parser.body_parser),
            "service": self.service,
            "keys": ApiKeys([]),
            "metrics": Metrics("tiny"),
            "max_body_bytes": 1_000_000,
        }

    async def ask(self, headers: dict[str, str], **options: Any) -> dict[str, Any]:
        api = HttpApi(**{**self.options, **options})
        body = {"model": "tiny", "prompt": "Say it.", "max_tokens": 3}
        async with serving(api.app()) as url, httpx.AsyncClient(base_url=url) as client:
            answer = await client.post("/v1/completions", json=body, headers=headers)
        body: dict[str, Any] = answer.json()
        return body


@pytest.fixture
def server(tiny_llama: Path) -> Server:
    return Server(tiny_llama)


def named(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_the_clients_trace_continues(server: Server, spans: InMemorySpanExporter) -> None:
    body = await server.ask(ASKED)
    found = named(spans)
    request = found["llm_request"]
    assert request.parent is not None
    assert (request.context.trace_id, request.parent.span_id) == (7, 9)
    assert request.attributes is not None
    assert request.attributes["gen_ai.response.id"] == body["id"]
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)
    for name in ("receive", "tokenize"):
        assert found[name].parent == request.context
    assert request.start_time == found["receive"].start_time


async def test_an_error_has_the_type_that_the_client_received(
    server: Server, spans: InMemorySpanExporter
) -> None:
    server.service.refusal = QueueFull("full", retry_after_s=1.0)
    body = await server.ask({})
    attributes = named(spans)["llm_request"].attributes
    assert attributes is not None
    assert attributes["error.type"] == body["error"]["code"] == "queue_full"


FRIEND, OTHER = ({"authorization": f"Bearer {name}'s"} for name in ("friend", "other"))
KEYS = ["friend friend's", "other other's"]


@pytest.mark.parametrize(
    ("diagnostics", "keys", "headers", "allowed"),
    [
        (None, [], {}, True),
        ("nobody", [], {}, False),
        (None, KEYS, FRIEND, False),
        ("everyone", KEYS, OTHER, True),
        (["friend"], KEYS, FRIEND, True),
        (["friend"], KEYS, OTHER, False),
    ],
)
async def test_a_setting_decides_whose_traces_and_timelines_continue(
    server: Server,
    spans: InMemorySpanExporter,
    diagnostics: Any,
    keys: list[str],
    headers: dict[str, str],
    allowed: bool,
) -> None:
    auth = AuthSettings(diagnostics=diagnostics)
    await server.ask({**ASKED, **headers}, auth=auth, keys=ApiKeys(keys))
    context = named(spans)["llm_request"].context
    assert wants_timeline(context) is allowed
    assert (context.trace_id == 7) is allowed
    assert ("vendor" in context.trace_state) is allowed


async def test_a_client_that_may_not_cannot_have_its_request_traced(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a sampled `traceparent` overrode `telemetry.sample` for everyone."""
    exporter = InMemorySpanExporter()
    provider = make_provider("csps-router", TelemetrySettings(sample=0), InMemorySpanExporter())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(request_trace, "_TRACER", provider.get_tracer("test"))
    options = {"auth": AuthSettings(diagnostics=("friend",)), "keys": ApiKeys(KEYS)}
    await server.ask({**ASKED, **OTHER}, **options)
    assert not exporter.get_finished_spans()
    await server.ask({**ASKED, **FRIEND}, **options)
    assert "llm_request" in named(exporter)
