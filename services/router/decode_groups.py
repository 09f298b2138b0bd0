"""Which instances of an elastic gang are iterated together, as its rows come, move and go.

Rows that concern the same instances count together, and there are few such sets: whoever asks walks
these, and not the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from csps.protocols.gang_client import GangClient
from csps.services.scheduling.decode_slots import Placed
from csps.services.scheduling.ids import InstanceId

Members = frozenset[InstanceId]


def concerned(placed: Placed) -> Members:
    """Who takes part in decoding a sequence."""
    named = (it.instance for it in (*placed.shares, *placed.answer))
    return frozenset((placed.master, *named))


class Regrouped(NamedTuple):
    """What a row that goes on elsewhere has changed."""

    left: Members
    """Instances of its group on which nothing is decoded any more."""
    new: Members
    """Instances on which nothing was decoded before."""
    met: bool
    """Rows of another group go on with it."""


class DecodeGroups:
    """Of all gangs."""

    def __init__(self) -> None:
        self._rows: dict[GangClient, Counter[Members]] = {}

    def add(self, gang: GangClient, members: Members) -> None:
        """A row that concerns these instances is decoded from now on."""
        self._rows.setdefault(gang, Counter())[members] += 1

    def remove(self, gang: GangClient, members: Members) -> None:
        """One is not any more."""
        rows = self._rows[gang]
        rows[members] -= 1
        if not rows[members]:
            del rows[members]
        if not rows:
            del self._rows[gang]

    def move(self, gang: GangClient, before: Members, after: Members) -> Regrouped:
        """A row concerns other instances from now on."""
        was = Members().union(*self.touching(gang, before))
        self.remove(gang, before)
        beside = self.touching(gang, after)
        self.add(gang, after)
        return Regrouped(
            left=was.difference(*self.touching(gang, was)),
            new=after.difference(was, *beside),
            met=any(it.isdisjoint(was) for it in beside),
        )

    def touching(self, gang: GangClient, instances: Collection[InstanceId]) -> list[Members]:
        """Groups that have some of these instances."""
        groups: list[Members] = []
        for members in self._rows.get(gang, ()):
            apart = [it for it in groups if it.isdisjoint(members)]
            groups = [*apart, members.union(*(it for it in groups if it not in apart))]
        return [it for it in groups if not it.isdisjoint(instances)]
