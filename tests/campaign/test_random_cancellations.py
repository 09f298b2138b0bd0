"""Requests cancelled at random moments leave an empty pool but for cached KV, and right answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from random_cancellations import GANGS, cancel_at_random

DEFAULT = ("csps", "loongserve")
"""Policies of the default suite: one on two gangs, one that moves sequences."""


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        *((policy, 40) for policy in DEFAULT),
        *(pytest.param(policy, 200, marks=pytest.mark.slow) for policy in GANGS),
    ],
)
async def test_cancelled_requests_leave_nothing_but_cached_kv(
    tiny_llama: Path, policy: str, count: int
) -> None:
    found = await cancel_at_random(tiny_llama, policy, count=count, seed=1)
    assert not found.wrong
    assert found.answered
    assert len(found.cancelled) > 2, "all were cancelled at the same moment of their lives"
