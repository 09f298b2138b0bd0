"""What tests of ranks share: gangs of tiny models, each started once for the tests of all
strategies, and the spans that ranks write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from strategy_gangs import Gangs, started_once


@pytest.fixture(scope="session")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    with started_once(tmp_path_factory) as started:
        yield started


@pytest.fixture(scope="session")
def gloo_gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    """Whose clocks and timelines tell when exchanges ended."""
    with started_once(tmp_path_factory, data_group=None) as started:
        yield started


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Spans of this test, with an SDK of its own."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield exporter
    provider.shutdown()
