"""Metrics: what the dispatcher tells ends up under the names that people know."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from csps.protocols.attention.plan import AttentionPlan, Objective
from csps.protocols.core.errors import (
    BoundNotMet,
    GangLost,
    InvalidRequest,
    QueueFull,
    RequestError,
    TransferError,
)
from csps.protocols.core.topology import Location
from csps.protocols.gang.messages import PrefillDone, RankKvReceived, Sampling
from csps.services.requests.request_handle import ElasticEvent, RequestHandle
from csps.services.requests.request_spec import RequestSpec, SloBounds
from csps.services.scheduling.core.scheduler import SchedulerCounts
from csps.services.settings.settings import MetricsPrefix
from csps.services.telemetry.metrics import OF_VLLM, Metrics
from csps.services.telemetry.observer import StepFigures

ROOT = Path(__file__).resolve().parents[2]
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def handle(slo: SloBounds | None = None) -> RequestHandle:
    spec = RequestSpec(
        client_request_id="r",
        prompt=np.arange(100, dtype=np.int32),
        sampling=Sampling(),
        slo=slo or SloBounds(),
    )
    request = RequestHandle(spec, request_id=1, on_cancel=lambda _: None)
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
    metrics, request = Metrics("m"), handle(SloBounds(ttft_ms=1999.0, e2e_ms=5000.0))
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
    assert slo_counts(metrics) == {("ttft", "false"): 1, ("e2e", "true"): 1, ("all", "false"): 1}


def test_predictions_are_compared_with_what_came() -> None:
    """2 s, where 1.6 were predicted and 1.9 are the bound."""
    metrics, request = Metrics("m"), handle(SloBounds())
    metrics.first_token(request)
    assert value(metrics, "prefill_prediction_error_ratio_count") == 0
    request.plan = AttentionPlan(predicted_ttft_ms=1600.0)
    request.spec = replace(request.spec, objective=Objective(max_ttft_ms=1900.0))
    metrics.first_token(request)
    assert value(metrics, "prefill_prediction_error_ratio_sum") == 1.25
    assert value(metrics, "request_ttft_bounds_total", met="false") == 1
    assert value(metrics, "request_ttft_bounds_total", met="true") == 0


def slo_counts(metrics: Metrics) -> dict[tuple[str, str], float]:
    return {
        (dict(labels)["slo"], dict(labels)["met"]): count
        for (name, labels), count in series(metrics).items()
        if name == "csps:request_slo_total" and count
    }


BOUNDS = SloBounds(ttft_ms=3000.0, tpot_ms=1000.0)


def test_an_answer_within_all_bounds_meets_them() -> None:
    metrics = Metrics("m")
    metrics.finished(handle(BOUNDS), "stop")
    assert slo_counts(metrics) == {(name, "true"): 1 for name in ("ttft", "tpot", "all")}


def test_one_token_has_no_time_per_further_token() -> None:
    metrics, request = Metrics("m"), handle(BOUNDS)
    request.timings.tokens = 1
    metrics.finished(request, "length")
    assert slo_counts(metrics) == {("ttft", "true"): 1, ("all", "true"): 1}


@pytest.mark.parametrize(
    ("error", "missed"),
    [
        (QueueFull("full", retry_after_s=1), True),
        (BoundNotMet(ttft_ms=812.5, loss=0.02), True),
        (InvalidRequest("no such thing"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, RequestError) else None,
)
@pytest.mark.parametrize("admitted", [False, True])
def test_a_refused_request_missed_its_objectives_unless_it_was_wrong(
    error: RequestError, missed: bool, admitted: bool
) -> None:
    """Count it the same if it had been admitted before."""
    metrics = Metrics("m")
    if admitted:
        metrics.failed(handle(BOUNDS), error)
    else:
        metrics.refused(error, BOUNDS)
    assert slo_counts(metrics) == {(name, "false"): 1 for name in ("ttft", "tpot", "all") if missed}
    code = error.code or type(error).__name__
    assert value(metrics, "requests_refused_total", code=code) == 1
    assert not any(name == "csps:request_failures_total" for name, _ in series(metrics))


def test_a_failed_request_missed_its_objectives_and_a_cancelled_one_had_none() -> None:
    failed, cancelled = Metrics("m"), Metrics("m")
    failed.failed(handle(BOUNDS), GangLost("died"))
    cancelled.finished(handle(BOUNDS), "cancelled")
    assert slo_counts(failed) == {(name, "false"): 1 for name in ("ttft", "tpot", "all")}
    assert slo_counts(cancelled) == {}


def test_objectives_that_nobody_has_met_were_met_by_none() -> None:
    metrics = Metrics("m")
    assert not any(name == "csps:request_slo_total" for name, _ in series(metrics))
    metrics.failed(handle(BOUNDS), GangLost("died"))
    for name in ("ttft", "tpot", "all"):
        assert value(metrics, "request_slo_total", slo=name, met="true") == 0


def test_a_step_counts_by_strategy_and_by_how_far_it_sent() -> None:
    metrics = Metrics("m")
    figures = {"step_id": 1, "cancelled": False, "queue_s": 0.0, "transfer_s": 0.0}
    ranks = [
        PrefillDone(
            rank=rank,
            compute_s=2.0,
            communication_s=0.25,
            exchange_s=1.0,
            yielded_s=0.5,
            bytes_sent=sent,
            **figures,
        )
        for rank, sent in ((0, (0, 5, 7, 11)), (2, (13, 0, 1, 0)))
    ]
    places = [Location.parse(place) for place in ("0-0-0", "0-0-1", "0-1-0", "1-0-0")]
    metrics.step_done(StepFigures(strategy="csa", sp=2, tokens=99, ranks=ranks, places=places))
    labels = {"strategy": "csa", "sp_size": "2"}
    assert value(metrics, "prefill_steps_total", **labels) == 1
    assert value(metrics, "prefill_step_tokens_total", **labels) == 99
    assert value(metrics, "prefill_compute_seconds_total") == 4.0
    assert value(metrics, "prefill_communication_seconds_total") == 2.0
    assert value(metrics, "prefill_exposed_communication_seconds_total") == 0.5
    assert value(metrics, "prefill_yielded_seconds_total") == 1.0
    sent = {"server": 5 + 1, "rack": 7 + 13, "cluster": 11}
    for within, size in sent.items():
        assert value(metrics, "prefill_sent_bytes_total", within=within) == size


def received(rank: int, *, size: int, seconds: float) -> RankKvReceived:
    return RankKvReceived(
        sequence_id=1, rank=rank, tokens=9, seconds=9.0, receiving_s=seconds, received_bytes=size
    )


def test_a_prompts_kv_counts_once_over_its_ranks() -> None:
    metrics = Metrics("m")
    ranks = [received(0, size=10**9, seconds=0.5), received(1, size=10**9, seconds=2.0)]
    metrics.kv_received(ranks)
    assert value(metrics, "kv_transfer_speed_gb_s_sum") == 1.0
    assert value(metrics, "kv_transfer_latency_ms_sum") == 2000.0
    assert value(metrics, "kv_transfer_total_mb_sum") == 2000.0


def test_kv_that_stays_where_it_lies_was_not_transferred() -> None:
    metrics = Metrics("m")
    metrics.kv_received([received(0, size=0, seconds=0.0)])
    assert value(metrics, "kv_transfer_speed_gb_s_count") == 0


def test_what_goes_wrong_is_counted_by_reason() -> None:
    metrics, request = Metrics("m"), handle()
    metrics.refused(QueueFull("full", retry_after_s=1), SloBounds())
    metrics.retried(request, TransferError("late"))
    metrics.failed(request, GangLost("died"))
    metrics.gang_lost("decode", "0xdead")
    assert value(metrics, "requests_refused_total", code="queue_full") == 1
    assert value(metrics, "request_retries_total") == 1
    assert value(metrics, "num_transfer_failed_reqs_total") == 1
    assert value(metrics, "request_failures_total", code="GangLost") == 1
    assert value(metrics, "gangs_lost_total", role="decode") == 1


class FakeLoad:
    counts = SchedulerCounts(running=3, waiting=2, prefill_kv=0.25, decode_kv=0.5, window_kv=0.75)
    ready = True


def test_what_changes_groups_of_an_elastic_gang_is_counted_by_kind() -> None:
    metrics = Metrics("m")
    for seconds in (0.5, 0.25):
        metrics.elastic(
            ElasticEvent(
                kind="migrate", began=1.0, ended=2.0, seconds=seconds, sent_bytes=1000, tokens=3
            )
        )
    metrics.elastic(ElasticEvent(kind="merge", began=1.0, ended=1.0))
    found = series(metrics)
    for event, counts in {"migrate": (2, 2000, 0.75), "merge": (1, 0, 0)}.items():
        labels = frozenset({("event", event)})
        names = ("events", "bytes", "seconds")
        assert tuple(found[f"csps:elastic_{name}_total", labels] for name in names) == counts


def test_gauges_are_read_when_scraped() -> None:
    metrics, load = Metrics("m"), FakeLoad()
    metrics.watch(load)
    assert value(metrics, "num_requests_waiting") == 2
    load.counts = load.counts._replace(waiting=7)
    assert value(metrics, "num_requests_waiting") == 7
    assert value(metrics, "kv_cache_usage_perc", role="decode") == 0.5
    assert value(metrics, "kv_window_usage_perc") == 0.75
    assert value(metrics, "ready") == 1


def test_buckets_of_seconds_reach_to_half_an_hour() -> None:
    last: dict[str, float] = {}
    for name, labels in series(Metrics("m")):
        bound = float(dict(labels).get("le", "inf"))
        if name.endswith("_seconds_bucket") and bound < float("inf"):
            last[name] = max(bound, last.get(name, 0.0))
    assert len(last) >= 8
    assert set(last.values()) == {1800.0}


VLLM_SERIES = {
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
    "counter": (
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "request_success",
    ),
    "histogram": (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_max_tokens",
    ),
}
"""Names and kinds as https://docs.vllm.ai/en/v0.32.0/usage/metrics/ lists them, of those that a
server without blocks, LoRA, images and speculative decoding can have."""
VLLM_LABELS = {"model_name": "m", "engine": "0"}


def served(prefix: MetricsPrefix) -> list[Metric]:
    """Return the families of a router that has answered one request."""
    metrics, request = Metrics("m", prefix), handle()
    metrics.watch(FakeLoad())
    metrics.submitted(request)
    metrics.started(request)
    metrics.first_token(request)
    metrics.finished(request, "cancelled")
    return list(text_string_to_metric_families(metrics.render().decode()))


def test_with_vllms_prefix_names_kinds_and_labels_are_vllms() -> None:
    families = {family.name: family for family in served("vllm")}
    kinds = {f"vllm:{name}": kind for kind, names in VLLM_SERIES.items() for name in names}
    found = {name: family.type for name, family in families.items() if name.startswith("vllm:")}
    assert {name: kind for name, kind in found.items() if not name.endswith("_created")} == kinds
    for name in kinds:
        for sample in families[name].samples:
            own = {label: text for label, text in sample.labels.items() if label != "le"}
            reason = {"finished_reason": "abort"} if name == "vllm:request_success" else {}
            assert own == VLLM_LABELS | reason, sample
    (usage,) = families["vllm:kv_cache_usage_perc"].samples
    assert usage.value == 0.5, "the fuller gang's"


def test_series_that_vllm_lacks_keep_their_names() -> None:
    own, theirs = ({family.name for family in served(prefix)} for prefix in ("csps", "vllm"))
    assert {name.partition(":")[2] for name in own} == {name.partition(":")[2] for name in theirs}
    assert all(name.startswith("csps:") for name in own)
    assert {name.partition(":")[2] for name in theirs - own if not name.endswith("_created")} == (
        OF_VLLM
    )
    assert "csps:ready" in theirs


def test_the_page_for_users_of_vllm_names_every_series() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text()
    table = page.partition("| as in vLLM |")[2].partition("Not there:")[0]
    named = {name.removesuffix("_total") for name in re.findall(r"`vllm:(\w+)", table)}
    assert named == OF_VLLM
