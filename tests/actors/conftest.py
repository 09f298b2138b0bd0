"""What tests of ranks share: gangs of tiny models, each started once for the tests of a file, and
the spans that ranks write."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from strategy_ranks import Gangs, started_once


# Not of a session: each group of gloo has a thread that wakes a hundred times a second.
@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    with started_once(tmp_path_factory) as started:
        yield started


@pytest.fixture(scope="module")
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
