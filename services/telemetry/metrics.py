"""Prometheus metrics of the router, under the names that vLLM's users know, as `csps:`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from csps.protocols.errors import RequestError, TransferError
from csps.protocols.gang_members import GangRole
from csps.protocols.tokens import FinishReason
from csps.services.router.running import Running, Timings
from csps.services.scheduling.scheduler import Counts

LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560,
)  # fmt: skip
"""Seconds. A million-token prompt may take minutes to its first token."""
TOKEN_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10, 60, 900,
)  # fmt: skip
TOKEN_COUNT_BUCKETS = tuple(float(4**power) for power in range(11))
"""1 token to a million."""


class Load(Protocol):
    """What gauges show of the request service."""

    @property
    def counts(self) -> Counts: ...
    @property
    def ready(self) -> bool: ...


class Metrics:
    """All series of one router; an `Observer` of its requests."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model}
        self._counters()
        self._histograms()

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def watch(self, load: Load) -> None:
        """Gauges that are read when somebody scrapes."""
        self._gauge("num_requests_running", "Requests with a place.", lambda: load.counts.running)
        self._gauge("num_requests_waiting", "Requests in the line.", lambda: load.counts.waiting)
        self._gauge("ready", "1 when all gangs are there.", lambda: load.ready)
        usage = Gauge(
            "csps:kv_cache_usage_perc",
            "Share of KV slots taken or set aside; 1 is all.",
            ("model_name", "role"),
            registry=self.registry,
        )
        for role, read in (
            ("prefill", lambda: load.counts.prefill_kv),
            ("decode", lambda: load.counts.decode_kv),
        ):
            usage.labels(**self._labels, role=role).set_function(read)

    def _counters(self) -> None:
        count = self._counter
        self._prompt_tokens = count("prompt_tokens", "Prompt tokens of admitted requests.")
        self._prefix_queries = count("prefix_cache_queries", "Prompt tokens looked up in kept KV.")
        self._prefix_hits = count("prefix_cache_hits", "Prompt tokens whose KV had been kept.")
        drawn = count("generation_tokens", "Tokens drawn.")
        self._generation_tokens = drawn.labels(**self._labels)
        self._success = count("request_success", "Finished requests.", "finished_reason")
        self._failures = count("request_failures", "Requests that ended in an error.", "code")
        self._refused = count("requests_refused", "Requests that were not admitted.", "code")
        self._retries = count("request_retries", "Attempts repeated after a fault of the cluster.")
        self._gangs_lost = count("gangs_lost", "Gangs lost with what they held.", "role")
        self._transfer_failures = count("num_transfer_failed_reqs", "Requests whose KV got lost.")
        self._slo = count("request_slo", "Finished requests with an objective.", "slo", "met")

    def _histograms(self) -> None:
        seconds = self._histogram
        self._ttft = seconds("time_to_first_token_seconds", "Submission to first token.")
        self._gap = seconds(
            "inter_token_latency_seconds", "Between two tokens.", TOKEN_LATENCY_BUCKETS
        )
        self._tpot = seconds(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, by request.",
            TOKEN_LATENCY_BUCKETS,
        )
        self._e2e = seconds("e2e_request_latency_seconds", "Submission to last token.")
        self._queue = seconds("request_queue_time_seconds", "Waiting for a place.")
        self._prefill = seconds("request_prefill_time_seconds", "Prefill until the first token.")
        self._transfer = seconds("kv_transfer_wait_seconds", "First token until the KV was there.")
        self._decode = seconds("request_decode_time_seconds", "Hand-over until the last token.")
        self._prompt_length = seconds(
            "request_prompt_tokens", "Prompt length.", TOKEN_COUNT_BUCKETS
        )
        self._answer_length = seconds(
            "request_generation_tokens", "Answer length.", TOKEN_COUNT_BUCKETS
        )

    # --- Observer ---

    def submitted(self, running: Running) -> None:
        """An admitted request: its prompt counts."""
        length = running.generation.prompt.size
        self._prompt_tokens.labels(**self._labels).inc(length)
        self._prompt_length.observe(length)

    def refused(self, error: Exception) -> None:
        """Admission said no."""
        self._refused.labels(**self._labels, code=_code(error)).inc()

    def started(self, running: Running) -> None:
        """The prefill job is on its way."""
        _observe(self._queue, running.timings.queue_s)
        if running.generation.prefix is not None and running.timings.attempts == 1:
            self._prefix_queries.labels(**self._labels).inc(running.generation.prompt.size)
            self._prefix_hits.labels(**self._labels).inc(running.cached_tokens)

    def first_token(self, running: Running) -> None:
        """The time that people wait for."""
        self._generation_tokens.inc()
        _observe(self._ttft, running.timings.ttft_s)
        _observe(self._prefill, running.timings.prefill_s)

    def token(self, running: Running, gap_s: float) -> None:
        """In the token path: one increment, one observation."""
        self._generation_tokens.inc()
        self._gap.observe(gap_s)

    def retried(self, running: Running, error: Exception) -> None:
        """An attempt was lost."""
        self._retries.labels(**self._labels).inc()
        self._count_transfer(error)

    def finished(self, running: Running, reason: FinishReason) -> None:
        """All that is known only at the end."""
        timings = running.timings
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._answer_length.observe(timings.tokens)
        _observe(self._e2e, timings.total_s)
        _observe(self._transfer, timings.transfer_s)
        _observe(self._decode, timings.decode_s)
        _observe(self._tpot, time_per_output_token(timings))
        self._judge(running)

    def failed(self, running: Running, error: Exception) -> None:
        """The request got an error."""
        self._failures.labels(**self._labels, code=_code(error)).inc()
        self._count_transfer(error)

    def gang_lost(self, role: GangRole, gang_id: str) -> None:
        """A rank died."""
        self._gangs_lost.labels(**self._labels, role=role).inc()

    def cluster_ready(self, epoch: str) -> None:
        """Nothing to count."""

    def _judge(self, running: Running) -> None:
        wanted, timings = running.generation, running.timings
        self._judge_one("ttft", wanted.slo_ttft_ms, timings.ttft_s)
        self._judge_one("tpot", wanted.slo_tpot_ms, time_per_output_token(timings))

    def _judge_one(self, slo: str, bound_ms: float | None, measured_s: float | None) -> None:
        if bound_ms is not None and measured_s is not None:
            met = "true" if measured_s * 1000 <= bound_ms else "false"
            self._slo.labels(**self._labels, slo=slo, met=met).inc()

    def _count_transfer(self, error: Exception) -> None:
        if isinstance(error, TransferError):
            self._transfer_failures.labels(**self._labels).inc()

    # --- making series ---

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"csps:{name}", help_text, ("model_name", *labels), registry=self.registry)

    def _gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        gauge = Gauge(f"csps:{name}", help_text, ("model_name",), registry=self.registry)
        gauge.labels(**self._labels).set_function(read)

    def _histogram(
        self, name: str, help_text: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        family = Histogram(
            f"csps:{name}", help_text, ("model_name",), registry=self.registry, buckets=buckets
        )
        return family.labels(**self._labels)


def time_per_output_token(timings: Timings) -> float | None:
    """(latency - TTFT) / (tokens - 1), as load generators count it."""
    if timings.total_s is None or timings.ttft_s is None or timings.tokens < 2:
        return None
    return (timings.total_s - timings.ttft_s) / (timings.tokens - 1)


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)


def _code(error: Exception) -> str:
    code = error.code if isinstance(error, RequestError) else None
    return code or type(error).__name__
