"""How many decode instances hold a prompt: as few as are predicted to iterate fastest."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_view import Busy, gang
from property_examples import examples

from csps.configurator.costs.cost_table import Costs, CostTable
from csps.configurator.costs.latency import (
    DecodeCost,
    LatencyKey,
    LatencyTable,
    LinearDecodeCost,
)
from csps.protocols.core.errors import ConfigError
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.policies.rounds.decode_overlay import DecodeOptions, DecodeOverlay

POLICIES = "csps", "tetris", "fixed_sp", "chunked_prefill"
AMPLE = 200_000


def costs(lines: dict[int, tuple[float, float]]) -> Costs:
    """Return costs of iterations in milliseconds: constant, and for each 1,000 tokens."""
    decode = []
    for sp, (constant, tokens) in lines.items():
        line = LinearDecodeCost.of_seconds(constant / 1e3, tokens / 1e6, 0.0)
        cost = DecodeCost(small=line, large=line, tipping_batch=64)
        decode.append((LatencyKey(strategy="decode", sp=sp), cost))
    table = LatencyTable(name="planted", exact="ulysses", steps=(), decode=tuple(decode))
    return Costs(CostTable(latencies=table))


def holders(
    prompt: int, instances: list[Busy], cost: Costs, options: DecodeOptions | None = None
) -> list[int]:
    """Return the tokens of each instance that holds any of a prompt."""
    overlay = DecodeOverlay(gang(2, instances, prefill=False), options or DecodeOptions(), cost)
    placed = overlay.place(prompt, 10)
    assert placed is not None
    return [kv_slice.stop - kv_slice.start for kv_slice in placed.slices]


LINES = st.tuples(st.integers(1, 20), st.integers(0, 20))


@settings(max_examples=examples(100), deadline=None)
@given(
    lines=st.fixed_dictionaries({1: LINES, 2: LINES, 4: LINES}),
    prompt=st.integers(100, 100_000),
)
def test_as_few_as_are_fastest(lines: dict[int, tuple[float, float]], prompt: int) -> None:
    predicted = {sp: constant + tokens * prompt / 1000 for sp, (constant, tokens) in lines.items()}
    fastest = min(predicted.values())
    found = len(holders(prompt, [Busy(AMPLE)] * 4, costs(dict(lines))))
    # Predictions are kept to a few digits, so what differs by less is equal.
    assert predicted[found] <= fastest * 1.02 + 0.01
    assert all(predicted[sp] * 1.02 + 0.01 >= fastest for sp in lines if sp < found)
    if all(predicted[1] <= time_ms for time_ms in predicted.values()):
        assert found == 1


def test_an_exchange_that_costs_more_than_reading_keeps_a_prompt_on_one_instance() -> None:
    pays_behind_10000 = costs({1: (1, 1.0), 2: (6, 0.5)})
    two = [Busy(AMPLE), Busy(AMPLE)]
    assert holders(9_000, two, pays_behind_10000) == [9_000]
    assert holders(12_000, two, pays_behind_10000) == [6_000, 6_000]


def test_a_prompt_that_fits_one_instance_goes_there_even_if_it_is_not_the_freest() -> None:
    """The freest by sequence has fewer slots than the other in all."""
    equal = costs({1: (1, 1.0), 2: (1, 1.0)})
    assert holders(900, [Busy(600), Busy(1000, requests=9)], equal) == [900]
    assert sorted(holders(1200, [Busy(600), Busy(1000, requests=9)], equal)) == [590, 610]


def test_a_number_decides_by_itself() -> None:
    never = costs({1: (1, 1.0), 2: (100, 1.0)})
    options = DecodeOptions(spread_tokens=500)
    assert holders(1000, [Busy(AMPLE), Busy(AMPLE)], never, options) == [500, 500]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_option_is_auto_or_a_number(policy: str) -> None:
    for value in ("auto", 700):
        assert make_policy(policy, {"spread_tokens": value})
    with pytest.raises(
        ConfigError, match="option spread_tokens must be auto or a number, not 'no'"
    ):
        make_policy(policy, {"spread_tokens": "no"})
    with pytest.raises(ConfigError, match="option spread_tokens must be at least 1, not 0"):
        make_policy(policy, {"spread_tokens": 0})
    with pytest.raises(ConfigError, match="whole number"):
        make_policy(policy, {"spread_tokens": 1.5})
