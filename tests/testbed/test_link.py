"""Quantities in the units of `tc`."""

from __future__ import annotations

import pytest
from testbed.link import Link


@pytest.mark.parametrize(
    ("rate", "bits"),
    [("800mbit", 8e8), ("2gbit", 2e9), ("1.5Gbit", 1.5e9), ("64kbit", 64e3), ("unlimited", None)],
)
def test_a_rate_is_bits_per_second(rate: str, bits: float | None) -> None:
    assert Link.parse(rate).rate_bits == bits


@pytest.mark.parametrize(("delay", "seconds"), [("0.2ms", 2e-4), ("50us", 5e-5), ("1s", 1.0)])
def test_a_delay_is_one_way(delay: str, seconds: float) -> None:
    assert Link.parse(delay=delay).delay_s == pytest.approx(seconds)


def test_bytes_per_second_are_an_eighth() -> None:
    assert Link.parse("800mbit").bytes_per_s == 1e8
    assert Link.parse().bytes_per_s is None


@pytest.mark.parametrize("rate", ["", "fast", "800", "800 mbit", "-1mbit", "800mb", "0mbit"])
def test_an_invalid_rate_is_rejected(rate: str) -> None:
    with pytest.raises(ValueError, match="mbit"):
        Link.parse(rate)


def test_an_invalid_delay_is_rejected() -> None:
    with pytest.raises(ValueError, match="us, ms, s"):
        Link.parse(delay="5mbit")
