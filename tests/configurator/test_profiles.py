"""Planted times come back from rows of the scaling information base."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.configurator.model.fits import nonnegative_fit
from csps.configurator.model.scaling_information_base import LinkRow, PhaseRow
from csps.configurator.plan.profiles import CAUSAL, STRATEGY, fit_phases, link_speed
from csps.protocols.core.errors import ConfigError

HEADS, KV_HEADS = 8, 2
SIZES = (256, 1_024, 4_096)


def row(phase: str, tokens: int, seconds: float, *, keys: int = 0, size: int = 0) -> PhaseRow:
    return PhaseRow(
        strategy=STRATEGY,
        group_shape="1",
        tp=1,
        phase=phase,
        tokens=tokens,
        keys=keys,
        bytes=size,
        seconds=seconds,
        load=0.0,
        date="d",
    )


def rows() -> list[PhaseRow]:
    lines = {"qkv": 1, "linear": 1, "mlp": 1, "select": KV_HEADS, "merge": HEADS}
    found = [
        row(phase, tokens, 1e-4 + 2e-8 * each * tokens)
        for phase, each in lines.items()
        for tokens in SIZES
    ]
    for tokens in SIZES:
        causal = HEADS * tokens * (tokens + 1) / 2
        found += [
            row("attention", tokens, attended(HEADS * tokens, causal), keys=CAUSAL),
            row("attention", 64, attended(HEADS * 64, HEADS * 64 * tokens), keys=tokens),
            row("importance", 64, 1e-5 + 3e-9 * HEADS * 64 * tokens, keys=tokens),
            row("copy", tokens, 2e-10 * tokens * 512, size=tokens * 512),
        ]
    return found


def attended(rows_h: float, pairs_h: float) -> float:
    return 2e-5 + 1e-8 * rows_h + 2e-9 * pairs_h


def test_planted_phases_are_recovered() -> None:
    times = fit_phases(rows(), heads=HEADS, kv_heads=KV_HEADS, tp=1)
    for line in (times.qkv, times.linear, times.rest, times.select, times.merge):
        assert (line.fixed, line.each) == pytest.approx((1e-4, 2e-8))
    assert (times.importance.fixed, times.importance.each) == pytest.approx((1e-5, 3e-9))
    assert (times.copy.fixed, times.copy.each) == pytest.approx((0, 2e-10))
    attention = times.attention
    assert (attention.call, attention.row, attention.pair) == pytest.approx(
        (2e-5, 1e-8, 2e-9), rel=1e-4
    )


def test_disturbed_measurements_do_not_count() -> None:
    disturbed = [row("qkv", tokens, 1.0) for tokens in SIZES]
    assert fit_phases([*disturbed, *rows()], heads=HEADS, kv_heads=KV_HEADS, tp=1) == fit_phases(
        rows(), heads=HEADS, kv_heads=KV_HEADS, tp=1
    )


def test_phases_that_were_not_measured_are_named() -> None:
    with pytest.raises(ConfigError, match=r"instances of 2 ranks .* qkv, attention"):
        fit_phases(rows(), heads=HEADS, kv_heads=KV_HEADS, tp=2)
    with pytest.raises(ConfigError, match="linear; run `csps profile phases`"):
        fit_phases(
            [row for row in rows() if row.phase != "linear"], heads=HEADS, kv_heads=KV_HEADS, tp=1
        )


def test_planted_link_is_recovered() -> None:
    measured = [
        LinkRow(
            kind="inside",
            sender="0-0-0",
            receiver="0-0-1",
            bytes=size,
            seconds=5e-5 + size / 1.3e9,
            load=0.0,
            date="d",
        )
        for size in (8, 65_536, 4_194_304)
    ]
    found = link_speed(measured, "inside")
    assert (found.bytes_per_s, found.latency_s) == pytest.approx((1.3e9, 5e-5))
    with pytest.raises(ConfigError, match="links between a server were not measured"):
        link_speed(measured, "between")


@settings(max_examples=examples(50))
@given(st.lists(st.floats(0, 1e-3), min_size=3, max_size=3), st.integers(0, 2**31))
def test_no_coefficient_is_negative_and_none_fits_better(planted: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = np.abs(rng.normal(size=(8, 3))) + 0.01
    seconds = features @ np.array(planted) + rng.uniform(1e-6, 1e-4, 8)
    for whole in (None, seconds * rng.uniform(1, 9, 8)):
        found = nonnegative_fit(features, seconds, whole)
        relative_to = seconds if whole is None else whole
        assert (found >= 0).all()
        error = (((features @ found - seconds) / relative_to) ** 2).sum()
        for nudge in np.eye(3) * 1e-6:
            for other in (found + nudge, np.maximum(found - nudge, 0)):
                assert error <= (((features @ other - seconds) / relative_to) ** 2).sum() + 1e-9
