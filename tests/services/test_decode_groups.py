"""Decode groups of an elastic gang, against groups computed from all of its sequences."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.gang.client import GangClient
from csps.services.router.live_sequences import DecodeGroups, Members

GANG = cast(GangClient, object())
members = st.frozensets(st.integers(0, 5), min_size=1, max_size=3)


def connected(placements: list[Members]) -> set[Members]:
    """Return the sets of instances that placements connect."""
    found = set()
    for placement in placements:
        group = placement
        for _ in placements:
            group = group.union(*(other for other in placements if other & group))
        found.add(group)
    return found


def groups_of(groups: DecodeGroups) -> set[Members]:
    return set(groups.touching(GANG, range(6)))


@given(st.lists(st.tuples(st.sampled_from(["add", "move", "remove"]), members), max_size=20))
def test_groups_follow_sequences_that_join_move_and_end(events: list[tuple[str, Members]]) -> None:
    groups, placements = DecodeGroups(), list[Members]()
    for kind, placement in events:
        if kind == "add":
            groups.add(GANG, placement)
            placements.append(placement)
        elif placements:
            before = placements.pop(0)
            was = Members().union(*placements, before)
            (own,) = [group for group in connected([before, *placements]) if before <= group]
            if kind == "remove":
                groups.remove(GANG, before)
            else:
                regrouped = groups.move(GANG, before, placement)
                assert regrouped.new == placement - was
                assert regrouped.left == own.difference(*placements, placement)
                strangers = [other for other in placements if not other & own]
                assert regrouped.merged == any(
                    group & placement and any(other <= group for other in strangers)
                    for group in connected(placements)
                )
                placements.append(placement)
        assert groups_of(groups) == connected(placements)
    assert (not placements) == (not groups._sequence_counts)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ((0,), (1,), {"left": {0}, "new": set(), "merged": True}),
        ((0,), (2,), {"left": {0}, "new": {2}, "merged": False}),
        ((0, 1), (1,), {"left": {0}, "new": set(), "merged": False}),
        ((0,), (0,), {"left": set(), "new": set(), "merged": False}),
    ],
)
def test_a_move_beside_a_sequence_on_instance_1_changes_groups(
    before: Any, after: Any, changed: dict[str, Any]
) -> None:
    groups = DecodeGroups()
    for instances in (before, (1,)):
        groups.add(GANG, frozenset(instances))
    regrouped = groups.move(GANG, frozenset(before), frozenset(after))
    assert regrouped._asdict() == changed
