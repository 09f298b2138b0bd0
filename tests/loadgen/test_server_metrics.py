"""The server's own figures of a run, from what its `/metrics` showed before and after."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from csps.loadgen.bench.console import lines
from csps.loadgen.bench.server_metrics import between, parsed, totals
from csps.loadgen.client.connection import Server
from csps.loadgen.results.result import RunDescription, summarize
from csps.services.telemetry.metrics import Metrics


class Shown:
    """Series of a server, as prometheus_client renders them."""

    def __init__(self, prefix: str) -> None:
        self._registry = CollectorRegistry()
        labels = ("model_name", "engine")
        self._ttft = Histogram(
            f"{prefix}:time_to_first_token_seconds", "x", labels, registry=self._registry
        )
        self._counters = {
            name: Counter(f"{prefix}:{name}", "x", labels, registry=self._registry)
            for name in ("prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")
        }

    def answered(self, ttft_s: float, prompt: int, hits: int, engine: str = "0") -> None:
        labels = {"model_name": "m", "engine": engine}
        self._ttft.labels(**labels).observe(ttft_s)
        gains = {"prompt_tokens": prompt, "prefix_cache_queries": prompt, "prefix_cache_hits": hits}
        for name, gain in gains.items():
            self._counters[name].labels(**labels).inc(gain)

    def text(self) -> str:
        return generate_latest(self._registry).decode()


@pytest.mark.parametrize("prefix", ["csps", "vllm"])
def test_figures_are_of_the_run_alone_and_sum_over_labels(prefix: str) -> None:
    shown = Shown(prefix)
    shown.answered(9.0, prompt=1000, hits=1000)
    before = parsed(shown.text())
    shown.answered(1.0, prompt=100, hits=0)
    shown.answered(2.0, prompt=300, hits=100, engine="1")
    (figures,) = between(before, parsed(shown.text())).values()
    assert figures == {"prompt_tokens": 400, "mean_ttft_ms": 1500.0, "prefix_cache_hit_rate": 0.25}


def test_a_router_of_csps_has_all_the_names() -> None:
    text = Metrics("m").render().decode()
    found = parsed(text)
    assert found is not None
    (figures,) = between(found, found).values()
    assert figures["prompt_tokens"] == figures["retries"] == 0
    assert "mean_ttft_ms" not in figures, "nothing was answered"


@pytest.mark.parametrize("text", ["", "up 1\n", "<html>not found</html>"])
def test_other_texts_give_no_figures(text: str) -> None:
    assert parsed(text) is None
    assert between(parsed(text), parsed(text)) == {}


@pytest.fixture(params=[200, 404])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """Yield the port of a server that shows one request's metrics, or does not; and the status."""
    shown = Shown("vllm")
    shown.answered(1.0, prompt=10, hits=0)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = shown.text().encode()
            self.send_response(request.param)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port, request.param
    server.shutdown()
    thread.join()
    server.server_close()


async def test_metrics_are_read_where_the_server_shows_them(served: tuple[int, int]) -> None:
    port, status = served
    server = Server(f"http://127.0.0.1:{port}")
    try:
        found = await totals(server)
    finally:
        server.close()
    assert (found is not None) == (status == 200)
    assert found is None or found["prompt_tokens_total"] == 10


def test_the_printout_has_them() -> None:
    facts = {"server_metrics": {"mean_ttft_ms": 12.5, "retries": 1}}
    said = "\n".join(lines(summarize([], RunDescription(kind="live", label="x", facts=facts))))
    assert "The server's own metrics" in said
    assert "mean_ttft_ms:" in said
