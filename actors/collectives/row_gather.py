"""All-gather of rows as a stream of micro-partitions (CSPS §3.2.4, §3.2.5)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from csps.actors.collectives.row_shards import RowShards
from csps.actors.collectives.row_stream import RowStream
from csps.actors.followers import Task
from csps.actors.mesh import Tag
from csps.actors.transfers import Transfer, Transfers
from csps.protocols.row_part import RowPart


class RowGather(RowStream):
    """Rows on their way to all who compute with them.

    Everything is under way from the start, nearby members' rows first, and without overlap it has
    arrived when the constructor returns. `wait` in any order, best from near to far.

    Shapes: t rows that this member holds, T rows of the batch, d columns.
    """

    def __init__(
        self,
        shards: RowShards,
        held_td: Tensor,
        parts: Sequence[RowPart],
        transfers: Transfers,
        *,
        layer: int | None = None,
    ) -> None:
        super().__init__(shards, transfers, phase="all-gather", layer=layer)
        self.rows_td = held_td.new_empty(shards.total_rows, held_td.shape[1])
        """All rows; undefined where no `wait` has returned."""
        self.rows_td[shards.held] = held_td
        self._relays: dict[RowPart, Task[None]] = {}
        with transfers.as_one():
            self._start(parts)
            if not transfers.overlap:
                self._finish()

    def wait(self, part: RowPart) -> None:
        """Until the part's rows are in `rows_td`; returns at once for rows held from the start.

        Raises:
            RuntimeError: a peer died.
        """
        if part in self._arrivals:
            self._transfers.wait(self._arrivals[part])

    def _finish(self) -> None:
        for part, relay in self._relays.items():
            self._transfers.join(relay, self._label(part))

    def _start(self, parts: Sequence[RowPart]) -> None:
        # In the same order on every rank, as NCCL demands. First parts of all owners before any
        # second one: arrivals are noticed in the order in which they were begun.
        parts = sorted(parts, key=lambda part: part.index)
        for part in parts:
            self._start_star(part, near=True)
        for part in parts:
            self._start_star(part, near=False)
            self._start_relay(part)

    def _start_star(self, part: RowPart, *, near: bool) -> None:
        """From the owner to the members next to it, of its own server or of others."""
        tree, servers = self._shards.gather_trees[part.owner], self._shards.servers
        children = [
            child
            for child in tree.children_of(part.owner)
            if (servers[child] == servers[part.owner]) == near
        ]
        if self._member == part.owner and children:
            self._transfers.start(self._sends(part, children), [], Tag.ROWS, self._label(part))
        elif self._member in children:
            self._arrivals[part] = self._receive(part, part.owner, Tag.ROWS)

    def _start_relay(self, part: RowPart) -> None:
        """From a gate to the members behind it."""
        tree = self._shards.gather_trees[part.owner]
        parent, children = tree.parents.get(self._member), tree.children_of(self._member)
        if parent is not None and parent != part.owner:
            self._arrivals[part] = self._receive(part, parent, Tag.RELAYED_ROWS)
        elif parent is not None and children:
            sends = self._sends(part, children)
            self._relays[part] = self._transfers.pass_on(
                self._arrivals[part], sends, Tag.RELAYED_ROWS, self._label(part)
            )

    def _sends(self, part: RowPart, members: Sequence[int]) -> list[tuple[int, Tensor]]:
        rows_td = self.rows_td[part.rows]
        return [(self._shards.ranks[member], rows_td) for member in members]

    def _receive(self, part: RowPart, member: int, tag: Tag) -> Transfer:
        source = (self._shards.ranks[member], self.rows_td[part.rows])
        return self._transfers.start([], [source], tag, self._label(part))


def all_gather(shards: RowShards, held_td: Tensor, transfers: Transfers) -> Tensor:
    """All rows of the batch (T, d), on every member that takes them."""
    parts = tuple(shards.parts(1))
    with RowGather(shards, held_td, parts, transfers) as gather:
        for part in parts:
            gather.wait(part)
    return gather.rows_td
