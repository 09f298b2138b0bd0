"""Reduce-scatter of rows as a stream of micro-partitions (CSPS §3.2.4, §3.2.5)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from csps.actors.collectives.row_shards import RowShards
from csps.actors.collectives.row_stream import RowStream
from csps.actors.followers import Task
from csps.actors.mesh import Tag
from csps.actors.transfers import Transfers
from csps.protocols.row_part import RowPart


class RowReduce(RowStream):
    """Contributions of all who computed with the rows, on their way to the rows' owners.

    Every taker adds its contribution to every part once, all in the same order of parts, in which
    members that take no rows collect their own; what is added travels beside further computing, or,
    without overlap, when a member asks for its result.
    Sums are formed in a fixed order of members and in fp32 at least, so a result does not depend on
    who came first.

    Shapes: t rows that this member owns, d columns.
    """

    def __init__(
        self,
        shards: RowShards,
        like_d: Tensor,
        transfers: Transfers,
        *,
        layer: int | None = None,
    ) -> None:
        super().__init__(shards, transfers, phase="reduce-scatter", layer=layer)
        self._like_d = like_d
        self._sums: dict[RowPart, Task[Tensor]] = {}
        self._forwards: dict[RowPart, Task[None]] = {}
        self._kept_back: list[tuple[RowPart, Tensor | None]] = []

    def add(self, part: RowPart, contribution_td: Tensor) -> None:
        """Contribute to a part's rows; the tensor must not change afterwards."""
        if self._transfers.overlap:
            self._begin(part, contribution_td)
        else:
            self._kept_back.append((part, contribution_td))

    def collect(self, part: RowPart) -> None:
        """What others contribute to a part of the own rows, of a member that takes none: when the
        others come to add to it, and all that they want of this member before has been sent."""
        if self._transfers.overlap:
            self._begin(part, None)
        else:
            self._kept_back.append((part, None))

    def result(self) -> Tensor:
        """Own rows' sums (t, d), once every taker has added to all of them.

        Raises:
            RuntimeError: a peer died.
        """
        with self._transfers.as_one():
            for part, contribution_td in self._kept_back:
                self._begin(part, contribution_td)
            self._kept_back.clear()
            if not self._transfers.overlap:
                self._finish()
        sums = [self._sum_of(part) for part in sorted(self._sums, key=lambda part: part.start)]
        return torch.cat(sums) if sums else self._like_d.new_empty(0, len(self._like_d))

    def _sum_of(self, part: RowPart) -> Tensor:
        self._transfers.wait(self._arrivals[part])
        return self._transfers.join(self._sums[part], self._label(part))

    def _begin(self, part: RowPart, contribution_td: Tensor | None) -> None:
        tree = self._shards.reduce_trees[part.owner]
        if part.owner == self._member or tree.children_of(self._member):
            self._collect(part, contribution_td)
        else:
            assert contribution_td is not None, "who takes no rows has only its own to collect"
            self._send_up(part, contribution_td)

    def _collect(self, part: RowPart, own_td: Tensor | None) -> None:
        """Sum what comes from behind this member; the owner keeps it, a gate passes it on."""
        children = self._shards.reduce_trees[part.owner].children_of(self._member)
        arriving = [self._like_d.new_empty(part.length, len(self._like_d)) for _ in children]
        sources = zip((self._shards.ranks[child] for child in children), arriving, strict=True)
        tag = _tag(part, self._member)
        arrival = self._transfers.start([], list(sources), tag, self._label(part))
        terms = arriving if own_td is None else [own_td, *arriving]
        self._arrivals[part] = arrival
        # Two lines, or a gate would hold others' sums back until its own rows' have come from afar.
        if part.owner == self._member:
            self._sums[part] = self._transfers.follow("sums", arrival, partial(_sum, terms))
        else:
            forward = partial(self._forward, part, terms)
            self._forwards[part] = self._transfers.follow("sums passed on", arrival, forward)

    def _finish(self) -> None:
        for part, forward in self._forwards.items():
            self._transfers.wait(self._arrivals[part])
            self._transfers.join(forward, self._label(part))

    def _forward(self, part: RowPart, terms: Sequence[Tensor]) -> None:
        self._send_up(part, _sum(terms))

    def _send_up(self, part: RowPart, sum_td: Tensor) -> None:
        parent = self._shards.reduce_trees[part.owner].parents[self._member]
        target, tag = (self._shards.ranks[parent], sum_td), _tag(part, parent)
        self._transfers.start([target], [], tag, self._label(part))


def _tag(part: RowPart, receiver: int) -> Tag:
    """Apart, so that what a gate is to pass on is noticed while its own sums are yet to come."""
    return Tag.ROW_SUMS if receiver == part.owner else Tag.SUMS_TO_RELAY


def _sum(terms: Sequence[Tensor]) -> Tensor:
    if len(terms) == 1:
        return terms[0]
    dtype = terms[0].dtype
    total = terms[0].to(torch.promote_types(dtype, torch.float32)) + terms[1]
    for term in terms[2:]:
        total += term
    return total.to(dtype)
