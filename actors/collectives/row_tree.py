"""The way of rows through a group: one tree per owner, used down to gather and up to reduce.

Going down, an owner's rows reach every member that computes with them; going up, the members'
contributions to these rows come back and are summed at every fork. The flat tree is a star. In
the hierarchical one (CSPS §3.2.4) each other server is entered once, through a gate that spreads
the rows inside, so that a server's link carries rows and sums once instead of once per GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from csps.protocols.row_gates import gates


@dataclass(frozen=True)
class RowTree:
    """Where one owner's rows go; members are numbered in the order of the sequence."""

    owner: int
    parents: Mapping[int, int]
    """Of every member that takes the rows, but the owner, in ascending order."""

    @cached_property
    def _children(self) -> Mapping[int, tuple[int, ...]]:
        forks: dict[int, tuple[int, ...]] = {}
        for child, parent in self.parents.items():
            forks[parent] = (*forks.get(parent, ()), child)
        return forks

    def children_of(self, member: int) -> tuple[int, ...]:
        """The members next to it on the way down, ascending."""
        return self._children.get(member, ())


MakeTree = Callable[[int, Sequence[Hashable], Sequence[int]], RowTree]
"""(owner, server of each member, members that take the rows) -> tree."""


def flat_tree(owner: int, servers: Sequence[Hashable], takers: Sequence[int]) -> RowTree:
    """Everyone gets the rows from the owner itself, and sends its contribution there."""
    return RowTree(owner, {member: owner for member in takers if member != owner})


def server_tree(owner: int, servers: Sequence[Hashable], takers: Sequence[int]) -> RowTree:
    """Inside the owner's server a star; every other server has one gate (`row_gates`)."""
    return RowTree(owner, gates(owner, servers, takers))
