"""Blocks of queries so short that a test has several of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from csps.actors.attention.base import yield_points


@contextmanager
def blocks_of(rows: int) -> Iterator[None]:
    """Let attention work on so many queries at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yield_points, "BLOCK_PRODUCTS", 0)
        patch.setattr(yield_points, "MIN_BLOCK_ROWS", rows)
        yield
