"""Fits recover what was planted, and follow a machine that changes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_tables import TETRIS_TABLE_1
from scipy.optimize import nnls

from csps.configurator.costs.fitting import (
    DecodeMeasurement,
    LinkMeasurement,
    NormalEquations,
    Refit,
    StepMeasurement,
    fit_decode,
    fit_link,
    fit_step,
)
from csps.configurator.costs.latency import (
    DecodeCost,
    LatencyKey,
    LatencyTable,
    LinearDecodeCost,
    LinkCost,
    StepCost,
)
from csps.protocols.core.errors import ConfigError

LENGTHS = (128, 512, 1024, 4096, 8192, 16_384, 32_768)
SHAPE = LatencyKey(strategy="ulysses", sp=2)


def seconds(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high) | st.just(0.0)


planted_steps = st.builds(
    StepCost.of_seconds,
    a=st.floats(1e-4, 1.0),
    b=seconds(1e-7, 1e-4),
    c=seconds(1e-12, 1e-8),
    d=seconds(1e-12, 1e-8),
)


def took(cost: StepCost, *rows: tuple[int, int]) -> StepMeasurement:
    return StepMeasurement(chunks=rows, seconds=cost.predict_batch_ns(rows) / 1e9)


def eighths(low: int, high: int) -> st.SearchStrategy[float]:
    return st.integers(low, high).map(lambda number: number / 8)


# --- least squares ------------------------------------------------------------------------------


@given(
    rows=st.lists(
        st.tuples(*[eighths(-80, 80)] * 4, eighths(1, 80)),
        min_size=1,
        max_size=12,
    )
)
def test_nonnegative_least_squares_is_as_good_as_scipy_s(
    rows: list[tuple[float, float, float, float, float]],
) -> None:
    equations = NormalEquations(3)
    for *columns, value, weight in rows:
        equations.add(columns, value, weight)
    solution = equations.solve()
    data = np.array(rows)
    root = np.sqrt(data[:, 4])
    matrix, right = data[:, :3] * root[:, None], data[:, 3] * root
    _, least = nnls(matrix, right)
    assert min(solution) >= 0
    mine = float(np.linalg.norm(matrix @ np.array(solution) - right))
    assert mine <= least + 1e-4 * (1 + float(np.linalg.norm(right)))


# --- planted coefficients -----------------------------------------------------------------------


@given(cost=planted_steps)
def test_planted_step_coefficients_are_recovered(cost: StepCost) -> None:
    grid = [(length, history) for length in LENGTHS for history in (0, 2048, 32_768)]
    fitted = fit_step([took(cost, row) for row in grid])
    for row in [(300, 0), (3_000, 1_000), (100_000, 0), (20_000, 60_000)]:
        assert fitted.predict_ns(*row) == pytest.approx(cost.predict_ns(*row), rel=1e-3)


@given(cost=planted_steps, seed=st.integers(0, 1_000))
def test_batches_give_the_same_coefficients(cost: StepCost, seed: int) -> None:
    draw = random.Random(seed)
    batches = [
        [(draw.choice(LENGTHS), draw.choice((0, 4096))) for _ in range(draw.randint(1, 6))]
        for _ in range(60)
    ]
    fitted = fit_step([took(cost, *rows) for rows in batches])
    whole = [(1000, 0), (2000, 5000), (64, 0)]
    assert fitted.predict_batch_ns(whole) == pytest.approx(cost.predict_batch_ns(whole), rel=1e-2)


def test_without_measured_history_a_pair_with_it_costs_as_much_as_a_causal_one() -> None:
    cost = StepCost.of_seconds(1e-3, 1e-6, 0, 1e-9)
    fitted = fit_step([took(cost, (length, 0)) for length in LENGTHS])
    assert fitted.c == pytest.approx(2 * cost.d, rel=1e-6)


@given(
    cost=st.builds(
        LinearDecodeCost.of_seconds,
        a=st.floats(1e-4, 1e-1),
        b=seconds(1e-10, 1e-7),
        c=seconds(1e-7, 1e-3),
    )
)
def test_planted_decode_coefficients_are_recovered_in_one_regime(cost: LinearDecodeCost) -> None:
    fitted = fit_decode(iterations(DecodeCost(small=cost, large=cost, tipping_batch=1)))
    for batch, context in [(1, 100), (5, 20_000), (200, 300_000)]:
        expected = cost.predict_ns(batch, context)
        assert fitted.predict_ns(batch, context) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("tipping", [4, 16, 95])
def test_two_regimes_are_separated_where_the_batch_tips(tipping: int) -> None:
    cost = DecodeCost(
        small=LinearDecodeCost.of_seconds(5e-3, 1e-8, 1e-6),
        large=LinearDecodeCost.of_seconds(1e-3, 1e-8, 5e-4),
        tipping_batch=tipping,
    )
    fitted = fit_decode(iterations(cost))
    assert fitted.tipping_batch == tipping
    for batch, context in itertools.product((1, 3, 120), (500, 100_000)):
        expected = cost.predict_ns(batch, context)
        assert fitted.predict_ns(batch, context) == pytest.approx(expected, rel=1e-3)


def iterations(cost: DecodeCost) -> list[DecodeMeasurement]:
    return [
        DecodeMeasurement(
            batch=batch,
            context=batch * length,
            seconds=cost.predict_ns(batch, batch * length) / 1e9,
        )
        for batch in (1, 2, 4, 8, 16, 32, 95, 128, 256)
        for length in (16, 1024, 8192)
    ]


def test_planted_link_is_recovered() -> None:
    cost = LinkCost.of_seconds(2.5e-4, 1e-9)
    sizes = [8, 1024, 65_536, 4_000_000]
    measured = [LinkMeasurement(size=size, seconds=cost.predict_ns(size) / 1e9) for size in sizes]
    fitted = fit_link(measured)
    assert fitted.predict_ns(10**8) == pytest.approx(cost.predict_ns(10**8), rel=1e-4)
    assert fitted.a == pytest.approx(cost.a, rel=1e-3)


def test_nothing_can_be_fitted_to_nothing_or_to_no_time() -> None:
    with pytest.raises(ConfigError, match="no measurements"):
        fit_step([])
    with pytest.raises(ConfigError, match="not positive"):
        fit_step([StepMeasurement(chunks=((1, 0),), seconds=0.0)])


# --- what was published -------------------------------------------------------------------------


@pytest.mark.parametrize("sp", TETRIS_TABLE_1)
def test_our_own_fit_of_tetris_table_1_is_within_seven_percent(sp: int) -> None:
    row = {tokens * 1024: took_s for tokens, took_s in TETRIS_TABLE_1[sp].items()}
    fitted = fit_step(
        [StepMeasurement(chunks=((tokens, 0),), seconds=seconds) for tokens, seconds in row.items()]
    )
    for tokens, took_s in row.items():
        assert fitted.predict_ns(tokens) / 1e9 == pytest.approx(took_s, rel=0.07)


# --- refitting while serving --------------------------------------------------------------------


def table(cost: StepCost) -> LatencyTable:
    return LatencyTable(name="t", exact="ulysses", steps=((SHAPE, cost),))


BASE = StepCost.of_seconds(5e-3, 4e-6, 2e-9, 1e-9)


def test_a_machine_that_slows_down_is_followed_also_where_nothing_was_seen() -> None:
    refit = Refit(table(BASE))
    for number in range(200):
        row = (1024 + number % 7, 0)
        refit.observe(SHAPE, [row], 2 * BASE.predict_ns(*row))
    for row in [(128, 0), (1024, 0), (65_536, 0), (4096, 65_536)]:
        fitted = refit.table().step(2).predict_ns(*row)
        assert fitted == pytest.approx(2 * BASE.predict_ns(*row), rel=0.05)


def test_other_coefficients_are_learned_from_enough_different_steps() -> None:
    other = StepCost.of_seconds(20e-3, 2e-6, 5e-9, 2e-9)
    refit = Refit(table(BASE))
    draw = random.Random(0)
    for _ in range(400):
        row = (draw.choice(LENGTHS), draw.choice((0, 2048, 32_768)))
        refit.observe(SHAPE, [row], other.predict_ns(*row))
    for row in [(256, 0), (2048, 2048), (32_768, 0), (8192, 32_768)]:
        fitted = refit.table().step(2).predict_ns(*row)
        assert fitted == pytest.approx(other.predict_ns(*row), rel=0.15)


def test_without_observations_the_table_stays() -> None:
    first = table(BASE)
    assert Refit(first).table() == first


def test_first_observations_that_agree_change_nothing_to_speak_of() -> None:
    refit = Refit(table(BASE))
    refit.observe(SHAPE, [(1000, 0)], BASE.predict_ns(1000))
    for length in LENGTHS:
        expected = BASE.predict_ns(length)
        assert refit.table().step(2).predict_ns(length) == pytest.approx(expected, rel=1e-5)


def test_one_process_that_stood_still_is_not_taken_for_a_slow_machine() -> None:
    refit = Refit(table(BASE))
    for number in range(40):
        row = (LENGTHS[number % len(LENGTHS)], 0)
        refit.observe(SHAPE, [row], BASE.predict_ns(*row))
    refit.observe(SHAPE, [(1024, 0)], 1_000 * BASE.predict_ns(1024))
    fitted = refit.table().step(2).predict_ns(4096)
    assert fitted == pytest.approx(BASE.predict_ns(4096), rel=0.25)


def test_the_same_observations_give_the_same_bytes_whenever_a_table_is_asked_for() -> None:
    refits = [Refit(table(BASE)) for _ in range(2)]
    draw = random.Random(3)
    for _ in range(50):
        row = (draw.choice(LENGTHS), draw.choice((0, 4096)))
        took_ns = int(BASE.predict_ns(*row) * draw.uniform(0.7, 1.5))
        for refit in refits:
            refit.observe(SHAPE, [row], took_ns)
        refits[1].table()
    assert refits[0].table().canonical == refits[1].table().canonical


def test_a_group_size_that_was_never_profiled_gets_an_entry_of_its_own() -> None:
    refit = Refit(table(BASE))
    wide = LatencyKey(strategy="ulysses", sp=4)
    for length in LENGTHS * 20:
        refit.observe(wide, [(length, 0)], BASE.predict_ns(length))  # no faster than two
    assert refit.table().step(4).predict_ns(8192) == pytest.approx(BASE.predict_ns(8192), rel=0.05)
    assert refit.table().step(2) == BASE


def test_steps_of_an_unknown_strategy_are_an_error() -> None:
    with pytest.raises(ConfigError, match="no latencies of csa"):
        Refit(table(BASE)).observe(LatencyKey(strategy="csa", sp=2), [(1, 0)], 1)
