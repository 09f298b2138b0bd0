"""Groups of an elastic gang that follow its rows, against groups worked out from all rows."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.gang.client import GangClient
from csps.services.router.live_sequences import DecodeGroups, Members

GANG = cast(GangClient, object())
members = st.frozensets(st.integers(0, 5), min_size=1, max_size=3)


def together(rows: list[Members]) -> set[Members]:
    """Instances that can be reached from one another."""
    found = set()
    for row in rows:
        group = row
        for _ in rows:
            group = group.union(*(it for it in rows if it & group))
        found.add(group)
    return found


def groups_of(groups: DecodeGroups) -> set[Members]:
    return set(groups.touching(GANG, range(6)))


@given(st.lists(st.tuples(st.sampled_from(["add", "move", "remove"]), members), max_size=20))
def test_groups_follow_rows_that_come_move_and_go(events: list[tuple[str, Members]]) -> None:
    groups, rows = DecodeGroups(), list[Members]()
    for kind, placed in events:
        if kind == "add":
            groups.add(GANG, placed)
            rows.append(placed)
        elif rows:
            before = rows.pop(0)
            was = {it for row in [*rows, before] for it in row}
            (own,) = [it for it in together([before, *rows]) if before <= it]
            if kind == "remove":
                groups.remove(GANG, before)
            else:
                found = groups.move(GANG, before, placed)
                assert found.new == placed - was
                assert found.left == own - {it for row in [*rows, placed] for it in row}
                strangers = [row for row in rows if not row & own]
                assert found.met == any(
                    it & placed and any(row <= it for row in strangers) for it in together(rows)
                )
                rows.append(placed)
        assert groups_of(groups) == together(rows)
    assert (not rows) == (not groups._sequence_counts)


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ((0,), (1,), {"left": {0}, "new": set(), "met": True}),
        ((0,), (2,), {"left": {0}, "new": {2}, "met": False}),
        ((0, 1), (1,), {"left": {0}, "new": set(), "met": False}),
        ((0,), (0,), {"left": set(), "new": set(), "met": False}),
    ],
)
def test_what_a_move_changes(before: Any, after: Any, changed: dict[str, Any]) -> None:
    """Beside a row on instance 1."""
    groups = DecodeGroups()
    for it in (before, (1,)):
        groups.add(GANG, frozenset(it))
    found = groups.move(GANG, frozenset(before), frozenset(after))
    assert found._asdict() == {
        name: frozenset(it) if isinstance(it, set) else it for name, it in changed.items()
    }
