"""The number of examples of property tests."""

from __future__ import annotations

from hypothesis import settings

FEW = 4
"""The least that a property is tried with, if it names no smaller number itself."""
ALL = 100
"""Examples of the profile that runs all, for properties that name no number."""


def examples(count: int) -> int:
    """Return `count` in `make test-slow` (`--hypothesis-profile=slow`), otherwise a part of them.

    The few are the same in each run: a suite that fails by chance tells nothing of a commit. All
    are drawn anew.
    """
    return max(min(count, FEW), count * settings().max_examples // ALL)
