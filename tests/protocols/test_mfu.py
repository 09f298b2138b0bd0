"""App. A of Context Parallelism: a million tokens of Llama 3 405B in 77 s on 128 GPUs."""

from __future__ import annotations

import pytest

from csps.protocols.attention.ring_choice import flops_per_second, prefill_flops, utilization


def test_a_million_tokens() -> None:
    flops = prefill_flops(parameters=405 * 10**9, layers=126, width=16384, new=10**6)
    assert flops == pytest.approx(8.1e17 + 4.13e18, rel=1e-3)
    reached = flops_per_second(flops, seconds=77, devices=128)
    assert round(reached / 1e12) == 501
    assert utilization(flops, seconds=77, devices=128, peak=800e12) == pytest.approx(0.63, abs=5e-3)
    binary = prefill_flops(parameters=405 * 10**9, layers=126, width=16384, new=2**20)
    assert round(flops_per_second(binary, seconds=77, devices=128) / 1e12) == 547


def test_history_is_attended_to_and_not_computed() -> None:
    shape = {"parameters": 1000, "layers": 3, "width": 8}
    whole = prefill_flops(**shape, new=100)
    parts = prefill_flops(**shape, new=60) + prefill_flops(**shape, new=40, history=60)
    assert parts == whole
    assert prefill_flops(**shape, new=100, batch=3) == 3 * whole
