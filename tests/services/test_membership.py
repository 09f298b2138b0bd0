"""Gangs that form from ranks registering in any order, and that replace each other."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import permutations

import pytest

from csps.protocols.gang.members import GangRole, RankAddress
from csps.services.cluster.membership import (
    LIVENESS_TIMEOUT_S,
    ClusterView,
    Member,
    Membership,
)

ORDER = {"a": 1, "b": 2, "c": 3}
"""Incarnations of the gangs."""


def member(gang_id: str, rank: int, *, role: GangRole = "prefill", size: int = 3) -> Member:
    return Member(
        role=role,
        gang_id=gang_id,
        world_size=size,
        address=RankAddress(rank=rank, host="127.0.0.1", port=1000 + rank),
        incarnation=ORDER[gang_id] if rank == 0 else 0,
    )


def join(membership: Membership, gang_id: str, now: float = 0.0) -> list[bool]:
    """Register all ranks of a gang; return whether each changed the view."""
    return [membership.join(member(gang_id, rank), now) for rank in range(3)]


def serving(membership: Membership) -> str | None:
    gang = membership.view().prefill
    return None if gang is None else gang.gang_id


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_gang_serves_once_it_is_complete(order: tuple[int, ...]) -> None:
    membership = Membership()
    changes = [membership.join(member("a", rank), 0.0) for rank in order]
    assert changes == [False, False, True]
    assert membership.view().prefill is not None
    assert [address.rank for address in membership.view().prefill.ranks] == [0, 1, 2]
    assert membership.view().prefill.incarnation == 1
    assert membership.view().decode is None


def test_gangs_of_all_roles_serve_beside_each_other() -> None:
    """A cell may be redeployed with an elastic gang instead of a pair."""
    membership = Membership()
    for gang, role in (("a", "prefill"), ("b", "decode"), ("c", "elastic")):
        assert membership.join(member(gang, 0, role=role, size=1), 0.0)  # type: ignore[arg-type]
    view = membership.view()
    assert [gang.gang_id for gang in (view.prefill, view.decode, view.elastic) if gang] == [
        "a",
        "b",
        "c",
    ]


def test_registering_again_changes_nothing() -> None:
    membership = Membership()
    join(membership, "a")
    assert not membership.join(member("a", 1), 3.0)


def test_a_newer_gang_replaces_the_older() -> None:
    """Late registrations of the older one, while it is torn down, change nothing."""
    membership = Membership()
    join(membership, "a")
    join(membership, "b")
    assert not any(join(membership, "a"))
    assert serving(membership) == "b"


def test_an_incomplete_newer_gang_replaces_nothing() -> None:
    membership = Membership()
    join(membership, "a")
    membership.join(member("b", 0), 0.0)
    assert serving(membership) == "a"


def test_roles_are_independent() -> None:
    membership = Membership()
    membership.join(member("a", 0, size=1), 0.0)
    membership.join(member("b", 0, role="decode", size=1), 0.0)
    assert membership.view().prefill is not None
    assert membership.view().decode is not None


@pytest.mark.parametrize("seed", range(20))
def test_the_newest_gang_serves_after_a_restart_in_any_order_of_ranks(seed: int) -> None:
    """An empty registry may learn last of the gang that is torn down."""
    arrivals = [member(gang_id, rank) for gang_id in "abc" for rank in range(3)]
    random.Random(seed).shuffle(arrivals)
    membership = Membership()
    for arrival in arrivals:
        membership.join(arrival, 0.0)
    assert serving(membership) == "c"


def test_a_dead_gang_displaces_no_living_one() -> None:
    membership = Membership()
    join(membership, "b")
    join(membership, "a", now=LIVENESS_TIMEOUT_S)
    assert serving(membership) == "b"
    join(membership, "a", now=LIVENESS_TIMEOUT_S + 1.0)
    assert serving(membership) == "a"
    join(membership, "b", now=LIVENESS_TIMEOUT_S + 2.0)
    assert serving(membership) == "b", "it was only silent"


def test_the_last_gang_serves_however_silent() -> None:
    membership = Membership()
    join(membership, "a")
    membership.join(member("b", 0), now=1000.0)
    assert serving(membership) == "a"


def of_rollout(gang_id: str, rollout: int, rank: int = 0) -> Member:
    return replace(member(gang_id, rank, size=1), rollout=rollout)


def test_a_gang_serves_in_its_own_rollout_only() -> None:
    membership = Membership()
    assert membership.join(of_rollout("a", 1), 0.0)
    assert membership.join(of_rollout("b", 2), 0.0)
    assert not membership.join(of_rollout("a", 1), 0.0), "it is the newest one of its rollout"
    views = [membership.view(rollout).prefill for rollout in (1, 2)]
    assert [gang.gang_id for gang in views if gang] == ["a", "b"]
    assert membership.view() == membership.view(2), "the newest one counts for others"
    assert membership.view(3) == ClusterView()
    assert [membership.outdated(rollout, 0.0) for rollout in (1, 2, 3)] == [(), ("a",), ("a", "b")]


def test_a_rollout_without_living_gangs_is_forgotten() -> None:
    membership = Membership()
    membership.join(of_rollout("a", 1), 0.0)
    later = LIVENESS_TIMEOUT_S + 1.0
    membership.join(of_rollout("b", 2), later)
    assert membership.view(1) == ClusterView()
    assert membership.outdated(2, later) == ()
    assert membership.join(of_rollout("a", 1), later), "its registrations were only late"
