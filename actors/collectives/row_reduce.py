"""Reduce-scatter of rows as a stream of micro-partitions (CSPS §3.2.4, §3.2.5)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType

import torch
from torch import Tensor

from csps.actors.collectives.background import Background, Task
from csps.actors.collectives.row_shards import RowPart, RowShards
from csps.actors.mesh import Tag
from csps.actors.transfers import Label, Transfer, Transfers


class RowReduce:
    """Contributions of all who computed with the rows, on their way to the rows' owners.

    Every taker adds its contribution to every part once, all in the same order of parts; what it
    adds travels beside its further computing. Sums are formed in a fixed order of members and in
    fp32 at least, so a result does not depend on who came first.

    Shapes: t rows that this member owns, d columns.
    """

    def __init__(
        self,
        shards: RowShards,
        like_d: Tensor,
        parts: Sequence[RowPart],
        transfers: Transfers,
        *,
        layer: int | None = None,
    ) -> None:
        self._shards = shards
        self._member = shards.member
        self._like_d = like_d
        self._transfers = transfers
        self._layer = layer
        self._arrivals: dict[RowPart, Transfer] = {}
        self._sums: dict[RowPart, Task[Tensor]] = {}
        self._forwards: dict[RowPart, Task[None]] = {}
        self._background = Background(like_d.device, "row-sum")
        if self._member not in shards.takers:
            for part in parts:
                if part.owner == self._member:
                    self._collect(part, None)

    def __enter__(self) -> RowReduce:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._background.close()

    def add(self, part: RowPart, contribution_td: Tensor) -> None:
        """Contribute to a part's rows; the tensor must not change afterwards."""
        tree = self._shards.reduce_trees[part.owner]
        if part.owner == self._member or tree.children_of(self._member):
            self._collect(part, contribution_td)
        else:
            self._send_up(part, contribution_td)

    def result(self) -> Tensor:
        """Own rows' sums (t, d), once every taker has added to all of them.

        Raises:
            RuntimeError: a peer died.
        """
        sums = []
        for part in sorted(self._sums, key=lambda part: part.start):
            self._transfers.wait(self._arrivals[part])
            sums.append(self._sums[part].result())
        return torch.cat(sums) if sums else self._like_d.new_empty(0, len(self._like_d))

    def _collect(self, part: RowPart, own_td: Tensor | None) -> None:
        """Sum what comes from behind this member; the owner keeps it, a gate passes it on."""
        children = self._shards.reduce_trees[part.owner].children_of(self._member)
        arriving = [self._like_d.new_empty(part.length, len(self._like_d)) for _ in children]
        sources = zip((self._shards.ranks[child] for child in children), arriving, strict=True)
        label = self._label(part)
        arrival = self._transfers.start([], list(sources), Tag.ROW_SUMS, label)
        terms = arriving if own_td is None else [own_td, *arriving]
        self._arrivals[part] = arrival
        if part.owner == self._member:
            self._sums[part] = self._background.submit(partial(_sum_arrived, arrival, terms))
        else:
            forward = partial(self._forward, part, arrival, terms)
            self._forwards[part] = self._background.submit(forward)

    def _finish(self) -> None:
        """Until this member has passed on all that goes through it."""
        for part, forward in self._forwards.items():
            self._transfers.wait(self._arrivals[part])
            forward.result()

    def _forward(self, part: RowPart, arrival: Transfer, terms: Sequence[Tensor]) -> None:
        self._send_up(part, _sum_arrived(arrival, terms))

    def _send_up(self, part: RowPart, sum_td: Tensor) -> None:
        parent = self._shards.reduce_trees[part.owner].parents[self._member]
        target = (self._shards.ranks[parent], sum_td)
        self._transfers.start([target], [], Tag.ROW_SUMS, self._label(part))

    def _label(self, part: RowPart) -> Label:
        return Label(phase="reduce-scatter", layer=self._layer, micro=part.index)


def reduce_scatter(shards: RowShards, contribution_td: Tensor, transfers: Transfers) -> Tensor:
    """Own rows' sums (t, d) of the takers' contributions (T, d); others pass an empty (0, d)."""
    parts = tuple(shards.parts(1))
    like_d = contribution_td.new_empty(contribution_td.shape[1])
    with RowReduce(shards, like_d, parts, transfers) as reduce:
        if shards.member in shards.takers:
            for part in parts:
                reduce.add(part, contribution_td[part.rows])
        return reduce.result()


def _sum_arrived(arrival: Transfer, terms: Sequence[Tensor]) -> Tensor:
    arrival.received.result()
    if len(terms) == 1:
        return terms[0]
    dtype = terms[0].dtype
    total = terms[0].to(torch.promote_types(dtype, torch.float32), copy=True)
    for term in terms[1:]:
        total += term
    return total.to(dtype)
