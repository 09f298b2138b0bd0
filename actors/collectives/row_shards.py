"""The rows of one batch, sharded over the ranks of a group."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from csps.actors.collectives.row_tree import MakeTree, RowTree
from csps.actors.mesh import Mesh
from csps.protocols.even_share import even_share
from csps.protocols.row_part import RowPart


@dataclass(frozen=True, kw_only=True)
class RowShards:
    """Member i of the group owns rows [bounds[i], bounds[i+1]) of the batch.

    Members without rows take part, and members that compute with none of the rows (`takers`
    lacks them) own rows all the same.
    """

    mesh: Mesh
    ranks: tuple[int, ...]
    """Mesh rank of each member, in the order of the sequence."""
    bounds: tuple[int, ...]
    servers: tuple[Hashable, ...]
    """What says of two members whether they share a server."""
    takers: tuple[int, ...]
    """Members that take all rows, ascending."""
    tree: MakeTree
    replicas: tuple[int, ...]
    """Members with equal numbers hold each other's rows from the start."""

    def __post_init__(self) -> None:
        sizes = {len(self.ranks), len(self.bounds) - 1, len(self.servers), len(self.replicas)}
        assert len(sizes) == 1, "ranks, bounds, servers and replicas are of different groups"
        assert list(self.bounds) == sorted(self.bounds), f"bounds {self.bounds} descend"

    @property
    def member(self) -> int:
        """This rank's place in the group."""
        return self.ranks.index(self.mesh.rank)

    @property
    def total_rows(self) -> int:
        """Rows of the whole batch."""
        return self.bounds[-1]

    def rows_of(self, member: int) -> slice:
        """Rows that a member owns."""
        return slice(self.bounds[member], self.bounds[member + 1])

    @property
    def held(self) -> slice:
        """Rows that this member has from the start: its own and its replicas'."""
        alike = [m for m, label in enumerate(self.replicas) if label == self.replicas[self.member]]
        return slice(self.bounds[alike[0]], self.bounds[alike[-1] + 1])

    @cached_property
    def reduce_trees(self) -> tuple[RowTree, ...]:
        """Per owner, the way of contributions to its rows."""
        return tuple(self.tree(o, self.servers, self.takers) for o in range(len(self.ranks)))

    @cached_property
    def gather_trees(self) -> tuple[RowTree, ...]:
        """Per owner, the way of its rows, past those who hold them already."""
        return tuple(
            self.tree(owner, self.servers, self._takers_of(owner))
            for owner in range(len(self.ranks))
        )

    def parts(self, micro_partitions: int) -> Iterator[RowPart]:
        """Every member's rows in at most so many parts, ascending; none is empty."""
        for owner in range(len(self.ranks)):
            rows = self.rows_of(owner)
            for index in range(micro_partitions):
                cut = even_share(rows.stop - rows.start, micro_partitions, index)
                if cut:
                    yield RowPart(owner, rows.start + cut.start, rows.start + cut.stop, index)

    def _takers_of(self, owner: int) -> Sequence[int]:
        return [m for m in self.takers if self.replicas[m] != self.replicas[owner] or m == owner]
