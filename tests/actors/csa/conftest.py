from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_world import RankWorld, rank_world


@pytest.fixture(scope="session")
def world() -> Iterator[RankWorld]:
    with rank_world(8) as threads:
        yield threads


@pytest.fixture(scope="session")
def gloo_world() -> Iterator[RankWorld]:
    """Return a world whose clocks and timelines record when exchanges ended."""
    with rank_world(4, None) as threads:
        yield threads
