"""Gangs of tiny models, each started once for the tests of all strategies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from strategy_gangs import Gangs, started_once


@pytest.fixture(scope="session")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    with started_once(tmp_path_factory) as started:
        yield started


@pytest.fixture(scope="session")
def gloo_gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    """Whose clocks and timelines tell when exchanges ended."""
    with started_once(tmp_path_factory, data_group=None) as started:
        yield started
