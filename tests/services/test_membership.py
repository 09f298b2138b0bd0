"""Gangs form from ranks that register in any order, and replace each other."""

from __future__ import annotations

from itertools import permutations

import pytest

from csps.protocols.gang_members import GangRole, RankAddress
from csps.services.membership import Member, Membership


def member(gang_id: str, rank: int, *, role: GangRole = "prefill", size: int = 3) -> Member:
    address = RankAddress(rank=rank, host="127.0.0.1", port=1000 + rank)
    return Member(role=role, gang_id=gang_id, world_size=size, address=address)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_gang_counts_once_it_is_complete(order: tuple[int, ...]) -> None:
    membership = Membership()
    changes = [membership.join(member("a", rank)) for rank in order]
    assert changes == [False, False, True]
    assert membership.view.prefill is not None
    assert [address.rank for address in membership.view.prefill.ranks] == [0, 1, 2]
    assert membership.view.decode is None


def test_registering_again_changes_nothing() -> None:
    membership = Membership()
    for rank in range(3):
        membership.join(member("a", rank))
    assert not membership.join(member("a", 1))


def test_a_newer_gang_replaces_the_older_for_good() -> None:
    membership = Membership()
    for rank in range(3):
        membership.join(member("a", rank))
    for rank in range(3):
        membership.join(member("b", rank))
    assert not any(membership.join(member("a", rank)) for rank in range(3))
    assert membership.view.prefill is not None
    assert membership.view.prefill.gang_id == "b"


def test_an_incomplete_newer_gang_replaces_nothing() -> None:
    membership = Membership()
    for rank in range(3):
        membership.join(member("a", rank))
    membership.join(member("b", 0))
    assert membership.view.prefill is not None
    assert membership.view.prefill.gang_id == "a"


def test_roles_are_apart() -> None:
    membership = Membership()
    membership.join(member("a", 0, size=1))
    membership.join(member("b", 0, role="decode", size=1))
    assert membership.view.prefill is not None
    assert membership.view.decode is not None
