"""The counting in the benchmark of LoongServe's figures, and the order of Fig. 12."""

from __future__ import annotations

import loongserve_load as load
import pytest

from csps.loadgen.simulator.requests import Arrival, RequestOutcome

S = 1_000_000_000


def outcome(prompt: int, ttft_s: float, tpot_s: float, output: int = 11) -> RequestOutcome:
    outcome = RequestOutcome(
        arrival=Arrival(at_ns=S, prompt_tokens=prompt, output_tokens=output), due_ns=S
    )
    outcome.first_token_ns = S + round(ttft_s * S)
    outcome.ended_ns = outcome.first_token_ns + round(tpot_s * (output - 1) * S)
    return outcome


def test_bounds_of_a_request() -> None:
    """25 times 3.0 s for 100K tokens alone, 15 s for short ones; and 50 ms a token."""
    assert load.in_time(outcome(100, 14.9, 0.049))
    assert not load.in_time(outcome(100, 15.1, 0.049))
    assert not load.in_time(outcome(100, 1.0, 0.051))
    assert load.in_time(outcome(100_000, 70.0, 0.01))
    assert not load.in_time(outcome(100_000, 80.0, 0.01))


def test_means_are_normalised_by_length() -> None:
    total, first, output = load.means_ms([outcome(100, 1.0, 0.1), outcome(400, 2.0, 0.1)])
    assert first == pytest.approx((1000 / 100 + 2000 / 400) / 2)
    assert output == pytest.approx(100)
    assert total == pytest.approx((2000 / 111 + 3000 / 411) / 2)


def test_the_highest_rate_is_bracketed_and_bisected() -> None:
    assert load.highest(lambda rate: rate <= 3.0, 1.0, 12) == pytest.approx(3.0, rel=1e-3)
    assert load.highest(lambda rate: rate <= 0.2, 1.0, 12) == pytest.approx(0.2, rel=1e-3)


def test_requests_of_all_seeds_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "FEWEST", 3)
    name = "zipf:1.4"
    assert load.carries(load.ELASTIC, name, 1.0, lambda found: len(found) == 6, 0, [0, 1])


@pytest.mark.slow
def test_elastic_carries_what_no_static_parallelism_does() -> None:
    """Fig. 12, for as long as the paper's runs: queues that have no bound need time to grow."""
    name, rate, seconds = "zipf:1.0", 0.95, 1000
    assert load.carries(load.ELASTIC, name, rate, load.goodput, seconds, [0])
    for system in load.STATIC:
        assert not load.carries(system, name, rate, load.goodput, seconds, [0]), system.name
