"""Decode groups of an elastic gang, and how moves change them, against groups built one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.services.router.live_sequences import Members, decode_groups, regroupings

members = st.frozensets(st.integers(0, 5), min_size=1, max_size=3)
placements = st.lists(members, max_size=6)


def connected(placements: Sequence[Members]) -> set[Members]:
    """Return the sets of instances that placements connect."""
    found = set()
    for placement in placements:
        group = placement
        for _ in placements:
            group = group.union(*(other for other in placements if other & group))
        found.add(group)
    return found


@given(placements)
def test_groups_are_what_sequences_connect(placements: list[Members]) -> None:
    assert set(decode_groups(placements)) == connected(placements)
    assert len(decode_groups(placements)) == len(connected(placements))


@given(members, members, placements)
def test_a_move_changes_groups(before: Members, after: Members, others: list[Members]) -> None:
    busy = Members().union(*others)
    (own,) = [group for group in connected([before, *others]) if before <= group]
    strangers = [other for other in others if not other & own]
    kinds = list(regroupings(before, after, others))
    assert ("scale_up" in kinds) == bool(after - before - busy)
    assert ("scale_down" in kinds) == bool(own.difference(*others, after))
    assert ("merge" in kinds) == any(
        group & after and any(other <= group for other in strangers) for group in connected(others)
    )
    assert len(kinds) == len(set(kinds))


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        ((0,), (1,), ["merge", "scale_down"]),
        ((0,), (2,), ["scale_down", "scale_up"]),
        ((0, 1), (1,), ["scale_down"]),
        ((0,), (0,), []),
    ],
)
def test_a_move_beside_a_sequence_on_instance_1(
    before: tuple[int, ...], after: tuple[int, ...], kinds: list[str]
) -> None:
    assert list(regroupings(frozenset(before), frozenset(after), [frozenset((1,))])) == kinds
