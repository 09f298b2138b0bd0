"""Latency tables: predicting, inverting, interpolating, and what papers have published."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_tables import TETRIS_TABLE_1

from csps.configurator.costs.latency import (
    FRACTION_BITS,
    DecodeCost,
    HybridCost,
    LatencyKey,
    LatencyTable,
    LinearDecodeCost,
    LinkCost,
    StepCost,
    parse_table,
)
from csps.configurator.costs.latency_tables import (
    PUBLISHED,
    TETRIS_LLAMA3_8B_A100,
)
from csps.protocols.core.errors import ConfigError

ONE_NS = 1 << FRACTION_BITS
coefficients = st.builds(
    StepCost,
    a=st.integers(0, 10**9 * ONE_NS),
    b=st.integers(0, 10**5 * ONE_NS),
    c=st.integers(0, 10 * ONE_NS),
    d=st.integers(0, 10 * ONE_NS),
)
"""Up to a second, 100 us a token and 10 ns a pair."""
lengths = st.integers(0, 1_000_000)


def table_of(**fields: object) -> LatencyTable:
    """A small table with one group size."""
    steps = ((LatencyKey(strategy="ulysses", sp=1), StepCost.of_seconds(1e-3, 1e-6, 0, 0)),)
    return LatencyTable(**{"name": "t", "exact": "ulysses", "steps": steps, **fields})  # type: ignore[arg-type]


# --- predicting -------------------------------------------------------------------------------

lines = st.builds(
    LinearDecodeCost,
    a=st.integers(0, 10**9 * ONE_NS),
    b=st.integers(0, 100 * ONE_NS),
    c=st.integers(0, 10**6 * ONE_NS),
)
chunks = st.lists(
    st.lists(st.tuples(st.integers(1, 4000), lengths), min_size=1, max_size=3), max_size=3
)


@given(step=coefficients, line=lines, chunks=chunks, batch=st.integers(0, 64), context=lengths)
def test_an_iteration_with_pieces_costs_what_its_parts_add(
    step: StepCost,
    line: LinearDecodeCost,
    chunks: list[list[tuple[int, int]]],
    batch: int,
    context: int,
) -> None:
    """Nothing but chunks is a step, nothing but rows an iteration of decoding; together they pay
    the larger constant, and masters work side by side."""
    decode = DecodeCost(small=line, large=line, tipping_batch=8)
    hybrid = HybridCost(step=step, decode=decode)
    took_ns = hybrid.predict_ns(chunks, batch, context)
    if batch:
        assert hybrid.predict_ns([], batch, context) == decode.predict_ns(batch, context)
    rows_ns = decode.predict_ns(batch, context) if batch else 0
    alone_ns = [step.predict_batch_ns(of_master) for of_master in chunks]
    assert took_ns >= max([rows_ns, *alone_ns])
    assert took_ns <= max(alone_ns, default=0) + rows_ns + 1
    if not batch:
        assert took_ns == max(alone_ns, default=0)


@given(cost=coefficients, length=lengths, history=lengths)
def test_a_prediction_is_the_formula_rounded_down(
    cost: StepCost, length: int, history: int
) -> None:
    exact = Fraction(
        cost.a + cost.b * length + cost.c * history * length + cost.d * length**2, ONE_NS
    )
    assert cost.predict_ns(length, history) <= exact < cost.predict_ns(length, history) + 1
    assert cost.predict_batch_ns([(length, history)]) == cost.predict_ns(length, history)


@given(cost=coefficients, rows=st.lists(st.tuples(lengths, lengths), max_size=5))
def test_a_batch_pays_the_constant_once(cost: StepCost, rows: list[tuple[int, int]]) -> None:
    alone = sum(
        Fraction(cost.b * n + cost.c * n * history + cost.d * n * n, ONE_NS) for n, history in rows
    )
    exact = Fraction(cost.a, ONE_NS) + alone
    assert cost.predict_batch_ns(rows) == int(exact)


def test_n_chunks_on_one_group_cost_n_minus_one_constants_more() -> None:
    """Where c = 2d, cutting a prompt costs nothing else (Tetris Eq. 1)."""
    cost = TETRIS_LLAMA3_8B_A100.step(4)
    chunks = [3_000, 7_000, 11_000, 11_768]
    starts = [sum(chunks[:n]) for n in range(4)]
    whole = sum(cost.predict_ns(n, start) for n, start in zip(chunks, starts, strict=True))
    expected = cost.predict_ns(32_768) + 3 * (cost.a >> FRACTION_BITS)
    assert abs(whole - expected) <= 4  # each prediction is rounded down


# --- the inverse ------------------------------------------------------------------------------


@given(
    cost=coefficients,
    budget=st.integers(0, 10**13),
    history=lengths,
    at_most=st.integers(1, 2_000_000),
)
def test_the_longest_piece_fits_and_one_token_more_does_not(
    cost: StepCost, budget: int, history: int, at_most: int
) -> None:
    length = cost.longest(budget, history=history, at_most=at_most)
    assert 0 <= length <= at_most
    assert length == 0 or cost.predict_ns(length, history) <= budget
    assert length == at_most or cost.predict_ns(length + 1, history) > budget


@given(
    cost=st.builds(
        StepCost,
        a=st.integers(0, 50 * ONE_NS),
        b=st.integers(0, 3 * ONE_NS),
        c=st.integers(0, ONE_NS),
        d=st.integers(0, ONE_NS),
    ),
    budget=st.integers(0, 300),
    history=st.integers(0, 20),
)
def test_the_inverse_equals_trying_every_length(cost: StepCost, budget: int, history: int) -> None:
    fitting = [n for n in range(1, 65) if cost.predict_ns(n, history) <= budget]
    assert cost.longest(budget, history=history, at_most=64) == max(fitting, default=0)


def test_a_budget_below_the_constant_holds_nothing() -> None:
    cost = StepCost.of_seconds(0.5, 0, 0, 0)
    assert cost.longest(499_999_999, at_most=10) == 0
    assert cost.longest(500_000_000, at_most=10) == 10


def test_a_negative_coefficient_is_refused() -> None:
    with pytest.raises(ConfigError, match="negative"):
        StepCost(a=0, b=-1, c=0, d=0)


# --- sizes that were not measured ---------------------------------------------------------------


@given(first=coefficients, last=coefficients, length=lengths, history=lengths)
def test_between_measured_sizes_a_prediction_is_monotone(
    first: StepCost, last: StepCost, length: int, history: int
) -> None:
    steps = (
        (LatencyKey(strategy="ulysses", sp=2), first),
        (LatencyKey(strategy="ulysses", sp=16), last),
    )
    table = table_of(steps=steps)
    times = [table.step(sp).predict_ns(length, history) for sp in range(2, 17)]
    if times[0] > times[-1]:
        times.reverse()
    # Rounding coefficients costs a million tokens less than 0.02 ns, rounding times one.
    assert all(later >= earlier - 1 for earlier, later in itertools.pairwise(times))
    assert times[0] in (first.predict_ns(length, history), last.predict_ns(length, history))


def test_what_shrinks_with_the_group_goes_on_shrinking_beyond_the_measured_sizes() -> None:
    two = StepCost.of_seconds(0.1, 1e-5, 2e-9, 1e-9)
    table = table_of(steps=((LatencyKey(strategy="ulysses", sp=2), two),))
    assert table.step(4) == StepCost(a=two.a, b=two.b // 2, c=two.c // 2, d=two.d // 2)
    assert table.step(1) == StepCost(a=two.a, b=two.b * 2, c=two.c * 2, d=two.d * 2)


@pytest.mark.parametrize("sp", [2, 4, 8])
def test_table_1_without_a_size_is_interpolated_from_its_neighbours(sp: int) -> None:
    """The quadratic coefficient times SP is nearly constant in the paper's own measurements."""
    full = TETRIS_LLAMA3_8B_A100
    without = table_of(
        exact="ring_kv", steps=tuple(step for step in full.steps if step[0].sp != sp)
    )
    assert without.step(sp).d == pytest.approx(full.step(sp).d, rel=0.15)
    predicted = [latency.step(sp).predict_ns(131_072) for latency in (without, full)]
    assert predicted[0] == pytest.approx(predicted[1], rel=0.15)


def test_decode_groups_are_interpolated_alike() -> None:
    lines = [LinearDecodeCost.of_seconds(1e-3, b, 1e-5) for b in (4e-9, 1e-9)]
    decode = tuple(
        (
            LatencyKey(strategy="decode", sp=sp),
            DecodeCost(small=line, large=line, tipping_batch=8),
        )
        for sp, line in zip((1, 4), lines, strict=True)
    )
    table = table_of(decode=decode)
    assert table.iteration(2).small.b == pytest.approx(lines[0].b / 2, rel=1e-9)
    assert table.iteration(8).small.b == lines[1].b // 2
    assert table.iteration(8).small.a == lines[1].a


def test_what_was_never_measured_is_an_error_that_says_what_was() -> None:
    with pytest.raises(ConfigError, match="csa with tp=1; measured: ulysses with tp=1"):
        table_of().step(1, strategy="csa")
    with pytest.raises(ConfigError, match="tp=4"):
        table_of().step(1, tp=4)
    with pytest.raises(ConfigError, match="measured: none"):
        table_of().iteration(1)
    with pytest.raises(ConfigError, match="no link 'between'"):
        table_of().link("between")


def test_decoding_has_two_regimes() -> None:
    small, large = LinearDecodeCost.of_seconds(1, 0, 0), LinearDecodeCost.of_seconds(2, 1e-3, 1e-2)
    cost = DecodeCost(small=small, large=large, tipping_batch=95)
    assert cost.predict_ns(95, 1000) == 10**9
    assert cost.predict_ns(96, 1000) == pytest.approx(3.96e9)


# --- identity -----------------------------------------------------------------------------------


def test_a_table_survives_its_bytes_and_its_digest_names_its_coefficients() -> None:
    line = LinearDecodeCost.of_seconds(1e-3, 1e-8, 1e-5)
    decode = DecodeCost(small=line, large=line, tipping_batch=4)
    table = table_of(
        decode=((LatencyKey(strategy="decode", sp=1), decode),),
        links=(("inside", LinkCost.of_seconds(1e-4, 1e-9)),),
    )
    again = parse_table(table.canonical)
    assert again == table
    assert again.digest == table.digest
    assert table_of(name="other").digest != table_of().digest
    table.step(7)  # what was looked up is no part of it
    assert table == again
    assert table.canonical == again.canonical


@pytest.mark.parametrize("data", [b"", b"{}", b'{"name":"x","exact":"y","steps":[[{},{}]]}'])
def test_bytes_of_something_else_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="not a latency table"):
        parse_table(data)


# --- what papers have published -----------------------------------------------------------------


def test_published_tables_are_found_by_their_names() -> None:
    assert set(PUBLISHED) == {"tetris-llama3-8b-a100", "loongserve-lwm-7b-a800"}


@pytest.mark.parametrize("sp", TETRIS_TABLE_1)
def test_tetris_table_1_within_seven_percent(sp: int) -> None:
    for tokens, seconds in TETRIS_TABLE_1[sp].items():
        predicted = TETRIS_LLAMA3_8B_A100.step(sp).predict_ns(tokens * 1024) / 1e9
        assert predicted == pytest.approx(seconds, rel=0.07)


def test_tetris_section_2_4_by_the_fit() -> None:
    step = TETRIS_LLAMA3_8B_A100.step
    first = 1 + step(16).predict_ns(32_768) / 1e9
    last = min(step(sp).predict_ns(16_384) for sp in (1, 2, 4, 8, 16)) / 1e9
    assert first == pytest.approx(1.53, rel=0.03)
    assert first + last == pytest.approx(1.84, rel=0.03)
