"""The cost of a step, by the spans of its ranks."""

from __future__ import annotations

from typing import Any

import prefill_costs
import pytest

from csps.services.telemetry.traces.spans import RecordedSpan, Trace

MS = 1_000_000


def span(name: str, milliseconds: int, **attributes: Any) -> RecordedSpan:
    return RecordedSpan(
        name=name,
        trace_id="t",
        span_id=name,
        parent_id=None,
        start_ns=0,
        end_ns=milliseconds * MS,
        failed=False,
        attributes={f"csps.{key}": value for key, value in attributes.items()},
    )


def test_costs_are_summed_over_the_ranks() -> None:
    spans = [
        part
        for rank, sent in ((0, [10, 1000]), (1, [1000, 10]))
        for part in (
            span("prefill.attention", 3, rank=rank, phase="attention", cpu_ns=2 * MS),
            span("prefill.qkv", 5, rank=rank, phase="qkv", cpu_ns=5 * MS),
            span(
                "prefill.compute",
                9,
                rank=rank,
                bytes_sent=sent,
                communication_s=0.001,
                exchange_s=0.004,
            ),
        )
    ]
    cost = prefill_costs.job_costs([Trace(tuple(spans))], ["0-0-0", "0-1-0"])["t"]
    assert cost.attention_s == pytest.approx(0.003)
    assert cost.attention_cpu_s == pytest.approx(0.002)
    assert cost.hidden == pytest.approx(0.75)
    assert (cost.between_bytes, cost.inside_bytes) == (2000, 20)
