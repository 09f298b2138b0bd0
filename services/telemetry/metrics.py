"""Prometheus metrics of the router, named as in vLLM and SGLang, under `csps:`.

`docs/metrics.md` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from prometheus_client import Counter, Histogram

from csps.protocols.errors import RequestError, TransferError
from csps.protocols.gang_members import GangRole
from csps.protocols.messages import KvLanded
from csps.protocols.tokens import FinishReason
from csps.services.router.running import Running
from csps.services.router.slo import Objective, Slo
from csps.services.router.timings import Timings
from csps.services.scheduling.scheduler import Counts
from csps.services.telemetry.elastic_metrics import ElasticEvent, ElasticMetrics
from csps.services.telemetry.error_type import error_type
from csps.services.telemetry.series import Series
from csps.services.telemetry.step_metrics import StepFigures, StepMetrics
from csps.services.telemetry.transfer_metrics import TransferMetrics

TOKEN_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10, 60, 300,
    1800,
)  # fmt: skip
TOKEN_COUNT_BUCKETS = tuple(float(4**power) for power in range(11))
"""1 token to a million."""
RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.4, 2.0, 4.0)


class Load(Protocol):
    """What gauges show of the request service."""

    @property
    def counts(self) -> Counts: ...
    @property
    def ready(self) -> bool: ...


class Metrics:
    """All series of one router; an `Observer` of its requests."""

    def __init__(self, model: str) -> None:
        self._series = Series(model)
        self._steps = StepMetrics(self._series)
        self._transfers = TransferMetrics(self._series)
        self._elastic = ElasticMetrics(self._series)
        self._counters()
        self._histograms()

    def render(self) -> bytes:
        """The Prometheus text format."""
        return self._series.render()

    def watch(self, load: Load) -> None:
        """Gauges that are read when somebody scrapes."""
        gauge = self._series.gauge
        gauge("num_requests_running", "Requests with a place.", lambda: load.counts.running)
        gauge("num_requests_waiting", "Requests in the line.", lambda: load.counts.waiting)
        gauge("ready", "1 when all gangs are there.", lambda: load.ready)
        usage = self._series.gauges(
            "kv_cache_usage_perc", "Share of KV slots taken or set aside; 1 is all.", "role"
        )
        usage(lambda: load.counts.prefill_kv, role="prefill")
        usage(lambda: load.counts.decode_kv, role="decode")

    def _counters(self) -> None:
        one, several = self._series.counter, self._series.counters
        self._prompt_tokens = one("prompt_tokens", "Prompt tokens of admitted requests.")
        self._prefix_queries = one("prefix_cache_queries", "Prompt tokens looked up in kept KV.")
        self._prefix_hits = one("prefix_cache_hits", "Prompt tokens whose KV had been kept.")
        self._generation_tokens = one("generation_tokens", "Tokens drawn.")
        self._success = several("request_success", "Finished requests.", "finished_reason")
        self._failures = several("request_failures", "Requests that ended in an error.", "code")
        self._refused = several(
            "requests_refused", "Requests that the server would not serve.", "code"
        )
        self._retries = one("request_retries", "Attempts repeated after a fault of the cluster.")
        self._gangs_lost = several("gangs_lost", "Gangs lost with what they held.", "role")
        self._bounds = several(
            "request_ttft_bounds", "First tokens of requests with a bound on TTFT.", "met"
        )
        self._slo = several(
            "request_slo",
            "Requests with an objective; refused and failed ones missed it, cancelled ones are "
            "left out.",
            "slo",
            "met",
        )

    def _histograms(self) -> None:
        seconds = self._series.histogram
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
        self._landing = seconds("kv_landing_seconds", "First token until the KV was there.")
        self._transfer_wait = seconds(
            "kv_transfer_wait_seconds", "Longest wait of a request's KV for its turn to be sent."
        )
        self._drift = seconds(
            "prefill_prediction_error_ratio",
            "Measured time to the first token over the predicted one.",
            RATIO_BUCKETS,
        )
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
        self._prompt_tokens.inc(length)
        self._prompt_length.observe(length)

    def refused(self, error: Exception, slo: Slo) -> None:
        """Admission said no. What is the client's own mistake missed no objective."""
        self._refused(code=error_type(error)).inc()
        if not isinstance(error, RequestError) or error.refusal:
            self._judge(slo.missed())

    def started(self, running: Running) -> None:
        """The prefill job is on its way."""
        _observe(self._queue, running.timings.queue_s)
        if running.generation.prefix is not None and running.timings.attempts == 1:
            self._prefix_queries.inc(running.generation.prompt.size)
            self._prefix_hits.inc(running.cached_tokens)

    def first_token(self, running: Running) -> None:
        """The time that people wait for."""
        self._generation_tokens.inc()
        _observe(self._ttft, running.timings.ttft_s)
        _observe(self._prefill, running.timings.prefill_s)
        plan, ttft_s = running.plan, running.timings.ttft_s
        if plan is not None and plan.predicted_ttft_ms and ttft_s is not None:
            self._drift.observe(ttft_s * 1e3 / plan.predicted_ttft_ms)
        if (bound_ms := running.generation.objective.max_ttft_ms) is not None:
            _count(self._bounds, (ttft_s or 0.0) * 1e3 <= bound_ms)

    def token(self, running: Running, gap_s: float) -> None:
        """In the token path: one increment, one observation."""
        self._generation_tokens.inc()
        self._gap.observe(gap_s)

    def retried(self, running: Running, error: Exception) -> None:
        """An attempt was lost."""
        self._retries.inc()
        self._count_transfer(error)

    def finished(self, running: Running, reason: FinishReason) -> None:
        """All that is known only at the end."""
        timings = running.timings
        self._success(finished_reason=reason).inc()
        self._answer_length.observe(timings.tokens)
        _observe(self._e2e, timings.total_s)
        _observe(self._landing, timings.transfer_s)
        _observe(self._transfer_wait, timings.transfer_wait_s)
        _observe(self._decode, timings.decode_s)
        _observe(self._tpot, time_per_output_token(timings))
        if reason != "cancelled":
            met = running.generation.slo.judged(
                ttft_s=timings.ttft_s,
                tpot_s=time_per_output_token(timings),
                e2e_s=timings.total_s,
            )
            self._judge(met)

    def failed(self, running: Running, error: Exception) -> None:
        """The request got an error; one that the server will not serve after all was refused."""
        if isinstance(error, RequestError):
            self.refused(error, running.generation.slo)
            return
        self._failures(code=error_type(error)).inc()
        self._count_transfer(error)
        self._judge(running.generation.slo.missed())

    def gang_lost(self, role: GangRole, gang_id: str) -> None:
        """A rank died."""
        self._gangs_lost(role=role).inc()

    def cluster_ready(self, epoch: str) -> None:
        """Nothing to count."""

    def preempted(self, requests: int) -> None:
        """Prompts that stand still for an urgent one."""
        self._steps.preempted(requests)

    def step_done(self, figures: StepFigures) -> None:
        """All ranks of a step have reported."""
        self._steps.done(figures)

    def elastic(self, event: ElasticEvent) -> None:
        """A group of an elastic gang has changed."""
        self._elastic.add(event)

    def kv_landed(self, landed: Sequence[KvLanded]) -> None:
        """A prompt's KV is where it decodes."""
        self._transfers.landed(landed)

    def _judge(self, met: Mapping[Objective, bool]) -> None:
        for slo, kept in met.items():
            _count(partial(self._slo, slo=slo), kept)

    def _count_transfer(self, error: Exception) -> None:
        if isinstance(error, TransferError):
            self._transfers.failed()


def time_per_output_token(timings: Timings) -> float | None:
    """(latency - TTFT) / (tokens - 1), as load generators count it."""
    if timings.total_s is None or timings.ttft_s is None or timings.tokens < 2:
        return None
    return (timings.total_s - timings.ttft_s) / (timings.tokens - 1)


def _count(counter: Callable[..., Counter], met: bool) -> None:
    """Both outcomes are there from the first on: a share of what is not there would be nothing, and
    not 0."""
    outcomes = {it: counter(met="true" if it else "false") for it in (True, False)}
    outcomes[met].inc()


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)
