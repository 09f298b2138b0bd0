"""Count and time requests, steps, KV transfers and group changes for `/metrics`.

Names are those of vLLM and SGLang, under `csps:`, each with the served model as a label.
`docs/metrics.md` lists them. With the prefix `vllm`, those that vLLM has are as vLLM exports them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from csps.protocols.core.errors import RequestError, TransferError
from csps.protocols.core.topology import Location
from csps.protocols.gang.members import GangRole
from csps.protocols.gang.messages import FinishReason, RankKvReceived
from csps.services.requests.request_handle import ElasticEvent, RequestHandle, Timings
from csps.services.requests.request_spec import SloBounds, SloName
from csps.services.scheduling.core.scheduler import SchedulerCounts
from csps.services.settings.settings import MetricsPrefix
from csps.services.telemetry.observer import StepFigures
from csps.services.telemetry.request_trace import error_type

LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 600, 1200, 1800,
)  # fmt: skip
"""Buckets in seconds, up to half an hour: a million-token prompt may take minutes to its first
token."""


OF_VLLM = frozenset(
    {
        "e2e_request_latency_seconds",
        "generation_tokens",
        "inter_token_latency_seconds",
        "kv_cache_usage_perc",
        "num_preemptions",
        "num_requests_running",
        "num_requests_waiting",
        "prefix_cache_hits",
        "prefix_cache_queries",
        "prompt_tokens",
        "request_decode_time_seconds",
        "request_generation_tokens",
        "request_inference_time_seconds",
        "request_params_max_tokens",
        "request_prefill_time_seconds",
        "request_prompt_tokens",
        "request_queue_time_seconds",
        "request_success",
        "request_time_per_output_token_seconds",
        "time_to_first_token_seconds",
    }
)
"""Series that vLLM has too, with the same meaning. All others are `csps:` under either prefix: they
would look like vLLM's and be found in none of its dashboards."""


class Series:
    """Registry of one router's series."""

    def __init__(self, model: str, prefix: MetricsPrefix) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._model = {"model_name": model}
        self._model_of_vllm = {**self._model, "engine": "0"}
        """Labels of vLLM, which numbers its data-parallel engines."""

    def render(self) -> bytes:
        """Return the series in Prometheus text format."""
        return generate_latest(self.registry)

    def counter(self, name: str, help_text: str) -> Counter:
        """Register `csps:NAME_total`."""
        return self.counters(name, help_text)()

    def counters(self, name: str, help_text: str, *labels: str) -> Callable[..., Counter]:
        """Register `csps:NAME_total` with labels; return a function from their values to a
        counter."""
        full, own = self._named(name)
        family = Counter(full, help_text, (*own, *labels), registry=self.registry)
        return lambda **values: family.labels(**own, **values)

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Register `csps:NAME`, read at every scrape."""
        self.gauges(name, help_text)(read)

    def gauges(self, name: str, help_text: str, *labels: str) -> Callable[..., None]:
        """Register gauges of one name; return a function that adds one, with the labels' values."""
        full, own = self._named(name)
        family = Gauge(full, help_text, (*own, *labels), registry=self.registry)

        def add(read: Callable[[], float], **values: str) -> None:
            family.labels(**own, **values).set_function(read)

        return add

    def histogram(
        self, name: str, help_text: str, buckets: Sequence[float] = LATENCY_BUCKETS
    ) -> Histogram:
        """Register `csps:NAME`, in seconds unless its buckets say otherwise."""
        full, own = self._named(name)
        family = Histogram(full, help_text, tuple(own), registry=self.registry, buckets=buckets)
        return family.labels(**own)

    def _named(self, name: str) -> tuple[str, dict[str, str]]:
        """Return a series' full name, and the labels that all of its kind have."""
        if self._prefix == "vllm" and name in OF_VLLM:
            return f"vllm:{name}", self._model_of_vllm
        return f"csps:{name}", self._model


class StepMetrics:
    """Counters of prefill steps: strategy, instances, bytes sent, and hidden communication.

    `docs/metrics.md` has queries for shares over any time.
    """

    def __init__(self, series: Series) -> None:
        one, several = series.counter, series.counters
        self._steps = several("prefill_steps", "Prefill steps.", "strategy", "sp_size")
        self._tokens = several(
            "prefill_step_tokens", "Prompt tokens computed in steps.", "strategy", "sp_size"
        )
        self._sent = several(
            "prefill_sent_bytes", "Bytes sent between ranks during steps, by distance.", "within"
        )
        self._compute = one(
            "prefill_compute_seconds", "Seconds computing in steps, summed over ranks."
        )
        self._exchange = one(
            "prefill_communication_seconds",
            "Seconds with an exchange under way in steps, summed over ranks.",
        )
        self._waited = one(
            "prefill_exposed_communication_seconds",
            "Portion of the above during which ranks were blocked, summed over ranks.",
        )
        self._yielded = one(
            "prefill_yielded_seconds",
            "Seconds that steps were paused for other work, summed over ranks.",
        )
        self._preemptions = one(
            "num_preemptions", "Prompts whose step was preempted by a high-priority one."
        )

    def preempted(self, requests: int) -> None:
        """Count the requests of a step that a high-priority step preempts."""
        self._preemptions.inc(requests)

    def done(self, step: StepFigures) -> None:
        """Count a step that all of its ranks have reported."""
        labels = {"strategy": step.strategy, "sp_size": str(step.sp)}
        self._steps(**labels).inc()
        self._tokens(**labels).inc(step.tokens)
        for rank in step.ranks:
            self._compute.inc(max(0.0, rank.compute_s))
            self._exchange.inc(rank.exchange_s)
            self._waited.inc(min(rank.communication_s, rank.exchange_s))
            self._yielded.inc(rank.yielded_s)
            for peer, sent in enumerate(rank.bytes_sent):
                if sent:
                    self._sent(within=_within(step.places[rank.rank], step.places[peer])).inc(sent)


def _within(one: Location, other: Location) -> str:
    """Return the smallest unit that contains both: server, rack or cluster."""
    if one.server_id == other.server_id:
        return "server"
    return "rack" if one.rack == other.rack else "cluster"


SPEED_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Buckets in GB/s: from a slow network to NVLink."""
MB_BUCKETS = tuple(float(4**power) for power in range(11))


class TransferMetrics:
    """Size, speed and failures of KV transfers, one observation per prompt."""

    def __init__(self, series: Series) -> None:
        self._speed = series.histogram(
            "kv_transfer_speed_gb_s",
            "Size of a prompt's KV over the time from its first received message to its last. "
            "Layers are sent as they are computed: the link may be faster.",
            SPEED_BUCKETS,
        )
        self._latency = series.histogram(
            "kv_transfer_latency_ms",
            "Milliseconds from a prompt's first received KV to its last.",
            tuple(seconds * 1e3 for seconds in LATENCY_BUCKETS),
        )
        self._size = series.histogram("kv_transfer_total_mb", "Size of a prompt's KV.", MB_BUCKETS)
        self._failed = series.counter(
            "num_transfer_failed_reqs", "Requests whose KV was lost or changed in transfer."
        )

    def received(self, ranks: Sequence[RankKvReceived]) -> None:
        """Observe a prompt's KV once every rank that decodes it has received it."""
        total = sum(rank.received_bytes for rank in ranks)
        if not total:  # decoded in place: nothing was sent
            return
        seconds = max(rank.receiving_s for rank in ranks)
        self._size.observe(total / 1e6)
        self._latency.observe(seconds * 1e3)
        if seconds:
            self._speed.observe(total / 1e9 / seconds)

    def failed(self) -> None:
        """Count a request whose KV was lost or changed in transfer."""
        self._failed.inc()


class FileMetrics:
    """KV that is written to files and read from them."""

    def __init__(self, series: Series) -> None:
        self._saved = series.counter("kv_saved_tokens", "Tokens whose KV was written to files.")
        self._tokens = series.counter("kv_restored_tokens", "Tokens whose KV was read from files.")
        self._restores = series.counters(
            "kv_restores", "Reads of KV from files: restored, or failed.", "outcome"
        )
        self._seconds = series.histogram(
            "kv_restore_seconds", "Time of the slowest rank to read KV from files."
        )

    def saved(self, tokens: int) -> None:
        """Count tokens that an instance has written."""
        self._saved.inc(tokens)

    def restored(self, tokens: int | None, seconds: float) -> None:
        """Count a read; without tokens it has failed."""
        self._restores(outcome="failed" if tokens is None else "restored").inc()
        if tokens is not None:
            self._tokens.inc(tokens)
            self._seconds.observe(seconds)


class ElasticMetrics:
    """Counters of group changes on an elastic gang: growing, shrinking, merging, preemption."""

    def __init__(self, series: Series) -> None:
        several = series.counters
        self._events = several("elastic_events", "Changes of groups on elastic gangs.", "event")
        self._bytes = several(
            "elastic_bytes", "KV bytes sent for these changes, summed over ranks.", "event"
        )
        self._seconds = several(
            "elastic_seconds", "Seconds of these changes, on the slowest rank of each.", "event"
        )

    def add(self, event: ElasticEvent) -> None:
        """Count one change."""
        self._events(event=event.kind).inc()
        self._bytes(event=event.kind).inc(event.sent_bytes)
        self._seconds(event=event.kind).inc(event.seconds)


TOKEN_LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 10, 60, 300,
    1800,
)  # fmt: skip
TOKEN_COUNT_BUCKETS = tuple(float(4**power) for power in range(11))
"""Buckets from 1 token to a million."""
RATIO_BUCKETS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.4, 2.0, 4.0)


class ServiceLoad(Protocol):
    """Part of the request service that gauges read."""

    @property
    def counts(self) -> SchedulerCounts: ...
    @property
    def ready(self) -> bool: ...


class Metrics:
    """All series of one router; a `RequestObserver`."""

    def __init__(self, model: str, prefix: MetricsPrefix = "csps") -> None:
        self._prefix = prefix
        self._series = Series(model, prefix)
        self._steps = StepMetrics(self._series)
        self._transfers = TransferMetrics(self._series)
        self._files = FileMetrics(self._series)
        self._elastic = ElasticMetrics(self._series)
        self._counters()
        self._histograms()

    def render(self) -> bytes:
        """Return all series in Prometheus text format."""
        return self._series.render()

    def watch(self, load: ServiceLoad) -> None:
        """Register gauges that read the service's load at every scrape."""
        gauge = self._series.gauge
        gauge(
            "num_requests_running", "Requests that run on instances.", lambda: load.counts.running
        )
        gauge("num_requests_waiting", "Requests in the waiting queue.", lambda: load.counts.waiting)
        gauge("ready", "1 if all gangs are attached.", lambda: load.ready)
        gauge(
            "kv_window_usage_perc",
            "Fraction of the slots of layers with a window in use or reserved, where these layers "
            "have slots of their own; 1 is all.",
            lambda: load.counts.window_kv,
        )
        name, help_text = (
            "kv_cache_usage_perc",
            "Fraction of KV slots in use or reserved; 1 is all.",
        )
        if self._prefix == "vllm":
            # vLLM has one cache, and its routers compare one number: that of the fuller gang.
            gauge(name, help_text, lambda: max(load.counts.prefill_kv, load.counts.decode_kv))
            return
        usage = self._series.gauges(name, help_text, "role")
        usage(lambda: load.counts.prefill_kv, role="prefill")
        usage(lambda: load.counts.decode_kv, role="decode")

    def _counters(self) -> None:
        one, several = self._series.counter, self._series.counters
        self._prompt_tokens = one("prompt_tokens", "Prompt tokens of admitted requests.")
        self._prefix_queries = one(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = one("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._generation_tokens = one("generation_tokens", "Tokens sampled.")
        self._success = several("request_success", "Finished requests.", "finished_reason")
        self._failures = several("request_failures", "Requests that ended in an error.", "code")
        self._refused = several("requests_refused", "Requests that the server rejected.", "code")
        self._retries = one("request_retries", "Attempts repeated after a fault of the cluster.")
        self._gangs_lost = several("gangs_lost", "Gangs lost with their KV.", "role")
        self._bounds = several(
            "request_ttft_bounds", "First tokens of requests with a bound on TTFT.", "met"
        )
        self._slo = several(
            "request_slo",
            "Requests with an objective; rejected and failed ones missed it, cancelled ones do not "
            "count.",
            "slo",
            "met",
        )

        self.slo_counts: dict[str, tuple[int, int]] = {}
        """How often each objective was met and missed, for people who look."""

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
        self._queue = seconds("request_queue_time_seconds", "Time in the waiting queue.")
        self._prefill = seconds("request_prefill_time_seconds", "Prefill until the first token.")
        self._kv_receive_time = seconds(
            "kv_landing_seconds", "First token until all KV was received."
        )
        self._transfer_wait = seconds(
            "kv_transfer_wait_seconds", "Longest wait of a request's KV for a transfer slot."
        )
        self._drift = seconds(
            "prefill_prediction_error_ratio",
            "Measured time to the first token over the predicted one.",
            RATIO_BUCKETS,
        )
        self._decode = seconds("request_decode_time_seconds", "Hand-over until the last token.")
        self._inference = seconds(
            "request_inference_time_seconds", "End of the queue until the last token."
        )
        self._max_tokens = seconds(
            "request_params_max_tokens", "Longest answer that was allowed.", TOKEN_COUNT_BUCKETS
        )
        self._prompt_length = seconds(
            "request_prompt_tokens", "Prompt length.", TOKEN_COUNT_BUCKETS
        )
        self._answer_length = seconds(
            "request_generation_tokens", "Answer length.", TOKEN_COUNT_BUCKETS
        )

    def submitted(self, handle: RequestHandle) -> None:
        """Count an admitted request's prompt."""
        length = handle.spec.prompt.size
        self._prompt_tokens.inc(length)
        self._prompt_length.observe(length)
        self._max_tokens.observe(handle.spec.sampling.max_tokens)

    def refused(self, error: Exception, slo: SloBounds) -> None:
        """Count a request that admission rejects; a client's own mistake misses no objective."""
        self._refused(code=error_type(error)).inc()
        if not isinstance(error, RequestError) or error.refusal:
            self._count_slo(slo.missed())

    def started(self, handle: RequestHandle) -> None:
        """Observe the queue time and the prefix-cache hits of a request whose first step was
        sent."""
        _observe(self._queue, handle.timings.queue_s)
        if handle.spec.prefix is not None and handle.timings.attempts == 1:
            self._prefix_queries.inc(handle.spec.prompt.size)
            self._prefix_hits.inc(handle.cached_tokens)

    def first_token(self, handle: RequestHandle) -> None:
        """Observe TTFT and prefill time, and compare them with prediction and bound."""
        self._generation_tokens.inc()
        _observe(self._ttft, handle.timings.ttft_s)
        _observe(self._prefill, handle.timings.prefill_s)
        plan, ttft_s = handle.plan, handle.timings.ttft_s
        if plan is not None and plan.predicted_ttft_ms and ttft_s is not None:
            self._drift.observe(ttft_s * 1e3 / plan.predicted_ttft_ms)
        if (bound_ms := handle.spec.objective.max_ttft_ms) is not None:
            _count(self._bounds, (ttft_s or 0.0) * 1e3 <= bound_ms)

    def token(self, handle: RequestHandle, gap_s: float) -> None:
        """Count a token and its gap. On the token path: one increment, one observation."""
        self._generation_tokens.inc()
        self._gap.observe(gap_s)

    def retried(self, handle: RequestHandle, error: Exception) -> None:
        """Count an attempt that was lost."""
        self._retries.inc()
        self._count_transfer(error)

    def finished(self, handle: RequestHandle, reason: FinishReason) -> None:
        """Observe everything that is known only at the end."""
        timings = handle.timings
        self._success(finished_reason=self._reason(reason)).inc()
        self._answer_length.observe(timings.tokens)
        _observe(self._e2e, timings.total_s)
        _observe(self._kv_receive_time, timings.transfer_s)
        _observe(self._transfer_wait, timings.transfer_wait_s)
        _observe(self._decode, timings.decode_s)
        if timings.total_s is not None and timings.queue_s is not None:
            self._inference.observe(timings.total_s - timings.queue_s)
        _observe(self._tpot, time_per_output_token(timings))
        if reason != "cancelled":
            met = handle.spec.slo.evaluate(
                ttft_s=timings.ttft_s,
                tpot_s=time_per_output_token(timings),
                e2e_s=timings.total_s,
            )
            self._count_slo(met)

    def failed(self, handle: RequestHandle, error: Exception) -> None:
        """Count a request that ended in an error, or was rejected after all."""
        if isinstance(error, RequestError):
            self.refused(error, handle.spec.slo)
            return
        self._failures(code=error_type(error)).inc()
        self._count_transfer(error)
        self._count_slo(handle.spec.slo.missed())

    def gang_lost(self, role: GangRole, gang_id: str) -> None:
        """Count a lost gang."""
        self._gangs_lost(role=role).inc()

    def cluster_ready(self, epoch: str) -> None:
        """Count nothing."""

    def preempted(self, requests: int) -> None:
        """Count the requests of a preempted step."""
        self._steps.preempted(requests)

    def step_done(self, figures: StepFigures) -> None:
        """Count a step that all of its ranks have reported."""
        self._steps.done(figures)

    def elastic(self, event: ElasticEvent) -> None:
        """Count a change of an elastic group."""
        self._elastic.add(event)

    def kv_received(self, received: Sequence[RankKvReceived]) -> None:
        """Observe a prompt's KV transfer."""
        self._transfers.received(received)

    def kv_saved(self, tokens: int) -> None:
        """Count KV that was written to files."""
        self._files.saved(tokens)

    def kv_restored(self, tokens: int | None, seconds: float) -> None:
        """Count KV that was read from files."""
        self._files.restored(tokens, seconds)

    def _reason(self, reason: FinishReason) -> str:
        return "abort" if self._prefix == "vllm" and reason == "cancelled" else reason

    def _count_slo(self, met: Mapping[SloName, bool]) -> None:
        for slo, attained in met.items():
            _count(partial(self._slo, slo=slo), attained)
            kept, missed = self.slo_counts.get(slo, (0, 0))
            self.slo_counts[slo] = (kept + attained, missed + (not attained))

    def _count_transfer(self, error: Exception) -> None:
        if isinstance(error, TransferError):
            self._transfers.failed()


def time_per_output_token(timings: Timings) -> float | None:
    """Return (latency - TTFT) / (tokens - 1), as load generators count it."""
    if timings.total_s is None or timings.ttft_s is None or timings.tokens < 2:
        return None
    return (timings.total_s - timings.ttft_s) / (timings.tokens - 1)


def _count(counter: Callable[..., Counter], met: bool) -> None:
    """Increment the counter of one outcome, with both outcomes registered."""
    # Without the other outcome at 0, a query for its share would return nothing.
    outcomes = {outcome: counter(met=str(outcome).lower()) for outcome in (True, False)}
    outcomes[met].inc()


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None:
        histogram.observe(seconds)
