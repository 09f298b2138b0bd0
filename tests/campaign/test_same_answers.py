"""Tokens and log-probabilities do not depend on policy, placement, batch or attempt."""

from __future__ import annotations

from pathlib import Path

import pytest
from same_answers import KILLED, WAYS, compare_ways

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FEW = ("csps", "chunked_prefill", "loongserve")


@pytest.mark.parametrize(("ways", "requests"), [(FEW, 6), (tuple(WAYS), 15)], ids=["few", "all"])
async def test_answers_are_the_same_in_every_way(
    tiny_llama: Path, ways: tuple[str, ...], requests: int
) -> None:
    found = await compare_ways(tiny_llama, ways, requests=requests)
    assert not found.different
    assert found.answers == 2 * requests * len(ways)


async def test_answers_are_the_same_when_gangs_are_killed(tiny_llama: Path) -> None:
    found = await compare_ways(tiny_llama, tuple(KILLED), requests=12, killed=True)
    assert not found.different
    assert found.retried
