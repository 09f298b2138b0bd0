"""Metrics: what the dispatcher tells ends up under the names that people know."""

from __future__ import annotations

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from csps.protocols.errors import GangLost, QueueFull, TransferError
from csps.protocols.sampling import Sampling
from csps.services.router.running import Generation, Running
from csps.services.scheduling.scheduler import Counts
from csps.services.telemetry.metrics import Metrics

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def running(*, slo_ttft_ms: float | None = None) -> Running:
    generation = Generation(
        request_id="r",
        prompt=np.arange(100, dtype=np.int32),
        sampling=Sampling(),
        slo_ttft_ms=slo_ttft_ms,
    )
    request = Running(generation, number=1, on_cancel=lambda _: None)
    timings = request.timings
    timings.queue_s, timings.prefill_s, timings.ttft_s = 0.5, 1.5, 2.0
    timings.decode_s, timings.total_s, timings.tokens = 3.0, 5.0, 4
    return request


def series(metrics: Metrics) -> Series:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, frozenset(sample.labels.items() - {("model_name", "m")})): sample.value
        for family in families
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return series(metrics)[f"csps:{name}", frozenset(labels.items())]


def test_a_request_from_submission_to_end() -> None:
    metrics, request = Metrics("m"), running(slo_ttft_ms=1999.0)
    metrics.submitted(request)
    metrics.started(request)
    metrics.first_token(request)
    for gap_s in (0.5, 1.0, 1.5):
        metrics.token(request, gap_s)
    metrics.finished(request, "length")
    assert value(metrics, "prompt_tokens_total") == 100
    assert value(metrics, "generation_tokens_total") == 4
    assert value(metrics, "time_to_first_token_seconds_sum") == 2.0
    assert value(metrics, "inter_token_latency_seconds_sum") == 3.0
    assert value(metrics, "request_time_per_output_token_seconds_sum") == 1.0
    assert value(metrics, "request_queue_time_seconds_sum") == 0.5
    assert value(metrics, "e2e_request_latency_seconds_sum") == 5.0
    assert value(metrics, "request_success_total", finished_reason="length") == 1
    assert value(metrics, "request_slo_total", slo="ttft", met="false") == 1


def test_what_goes_wrong_is_counted_by_reason() -> None:
    metrics, request = Metrics("m"), running()
    metrics.refused(QueueFull("full", retry_after_s=1))
    metrics.retried(request, TransferError("late"))
    metrics.failed(request, GangLost("died"))
    metrics.gang_lost("decode", "0xdead")
    assert value(metrics, "requests_refused_total", code="queue_full") == 1
    assert value(metrics, "request_retries_total") == 1
    assert value(metrics, "num_transfer_failed_reqs_total") == 1
    assert value(metrics, "request_failures_total", code="GangLost") == 1
    assert value(metrics, "gangs_lost_total", role="decode") == 1


class FakeLoad:
    counts = Counts(running=3, waiting=2, prefill_kv=0.25, decode_kv=0.5)
    ready = True


def test_gauges_are_read_when_scraped() -> None:
    metrics, load = Metrics("m"), FakeLoad()
    metrics.watch(load)
    assert value(metrics, "num_requests_waiting") == 2
    load.counts = load.counts._replace(waiting=7)
    assert value(metrics, "num_requests_waiting") == 7
    assert value(metrics, "kv_cache_usage_perc", role="decode") == 0.5
    assert value(metrics, "ready") == 1


def test_buckets_reach_past_ten_minutes() -> None:
    bounds = [
        float(dict(labels)["le"])
        for name, labels in series(Metrics("m"))
        if name == "csps:time_to_first_token_seconds_bucket"
    ]
    assert sorted(bounds)[-2] > 600
