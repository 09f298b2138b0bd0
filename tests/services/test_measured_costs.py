"""Options that take longer than predicted, and what first tokens take beside their steps."""

from __future__ import annotations

import pytest

from csps.configurator.costs.cost_table import Allowed, Bucket
from csps.protocols.core.topology import GroupShape
from csps.services.router.cost_table_service import FEWEST, OptionDrift, Overhead

BUCKET = Bucket("bounded", GroupShape((2,)), 10)
BUCKETS = {BUCKET: (Allowed("ulysses"), Allowed("csa#{}", permille=500))}


@pytest.mark.parametrize(("ratio", "permille"), [(2.0, 1001), (0.5, 250), (1.01, 500)])
def test_an_option_is_corrected_by_what_its_steps_took(ratio: float, permille: int) -> None:
    drift = OptionDrift()
    for _ in range(10):
        drift.observe(BUCKET, "csa#{}", ratio)
    corrected = {**BUCKETS, **drift.corrections(BUCKETS)}
    assert corrected == {BUCKET: (Allowed("ulysses"), Allowed("csa#{}", permille=permille))}
    assert not drift.corrections(BUCKETS), "corrected twice for one measurement"


def test_several_options_of_a_bucket_are_corrected_together() -> None:
    drift = OptionDrift()
    both = {BUCKET: (Allowed("csa#{}", permille=500), Allowed("levels", permille=400))}
    for strategy in ("csa#{}", "levels"):
        drift.observe(BUCKET, strategy, 2.0)
    (corrected,) = drift.corrections(both).values()
    assert corrected == (Allowed("csa#{}", permille=1001), Allowed("levels", permille=800))


def test_buckets_that_are_gone_are_left_alone() -> None:
    drift = OptionDrift()
    drift.observe(BUCKET, "csa#{}", 3.0)
    assert drift.corrections({}) == {}


def test_the_overhead_covers_all_but_the_slowest() -> None:
    overhead = Overhead()
    for late in range(FEWEST - 1):
        overhead.observe(late)
    assert overhead.in_ns == 0
    for late in range(100):
        overhead.observe(late)
    assert 90 <= overhead.in_ns <= 99
    for _ in range(1_000):
        overhead.observe(-5)
    assert overhead.in_ns == 0
