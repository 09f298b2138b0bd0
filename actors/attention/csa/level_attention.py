"""The first all-to-all: kept rows on their way to the owners of their heads (CSPS §3.2.4).

Each exchange has one message per destination, of however many levels, parts and blocks of heads it
consists. Overlapped with attention, an exchange is the least that something can be computed with;
without overlap it is everything: one consolidated all-to-all per layer.

The attention that one member computes at one level, for the heads that it owns there.

Shape suffixes: n tokens, h query heads, g KV heads, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor

from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.yield_points import query_blocks
from csps.actors.attention.csa.kept_rows import KeptRows, LevelBuffers
from csps.actors.attention.csa.routes import Rectangle, RouteStep, SegmentRoutes, SendSlice
from csps.actors.comm.mesh import Tag
from csps.actors.comm.transfers import Label, Transfers
from csps.kernels.attention import attention
from csps.kernels.merge import merge_into, nothing_seen

_Content = Sequence[tuple[LevelBuffers, RouteStep]]
"""What travels in one exchange, in one order for all."""


class FirstAllToAll:
    """That of one layer on one member; all exchanges are begun at once, near levels first."""

    def __init__(
        self,
        group: SpGroup,
        rows: KeptRows,
        levels: Mapping[int, LevelBuffers],
        transfers: Transfers,
        *,
        layer: int,
        consolidated: bool,
    ) -> None:
        """
        Args:
            levels: by number, ascending.
            consolidated: everything in one exchange.
        """
        self._exchanges: dict[tuple[int, RouteStep], _Exchange] = {}
        rounds = [[(lv, step) for step in steps] for lv in levels.values() for steps in _rounds(lv)]
        if consolidated and rounds:
            rounds = [list(chain(*rounds))]
        for content in rounds:
            label = _label(layer, content, consolidated)
            exchange = _Exchange(group, rows, content, transfers, label)
            for level, step in content:
                self._exchanges[level.routes.level, step] = exchange

    def wait(self, level: int, step: RouteStep) -> None:
        """Block until a step's rows are in place."""
        self._exchanges[level, step].wait()


class _Exchange:
    """Some steps of some levels."""

    def __init__(
        self,
        group: SpGroup,
        rows: KeptRows,
        content: _Content,
        transfers: Transfers,
        label: Label,
    ) -> None:
        self._rows = rows
        self._transfers = transfers
        incoming = {member: list(_incoming(content, member)) for member in group.others}
        arriving = {member: _Message(places) for member, places in incoming.items() if places}
        sends = [(group.peers[member], self._packed(content, member)) for member in group.others]
        recvs = [(group.peers[member], message.payload) for member, message in arriving.items()]
        self._arriving = list(arriving.values())
        self._transfer = transfers.start(sends, recvs, Tag.FIRST_EXCHANGE, label)
        self._place_own(content)

    def wait(self) -> None:
        """Block until everything is in place."""
        self._transfers.wait(self._transfer)
        for message in self._arriving:
            message.unpack()
        self._arriving.clear()

    def _packed(self, content: _Content, owner: int) -> Tensor:
        """The message to one owner."""
        send_slices = [it for it in _outgoing(content, owner) if it.part in self._rows.parts]
        shapes = [self._rows.shape(it.kind, it.heads, it.tokens) for it in send_slices]
        payload = self._rows.q_thd.new_empty(sum(map(math.prod, shapes)))
        for send_slice, out in zip(send_slices, _views(payload, shapes), strict=True):
            self._rows.gather(
                send_slice.kind, send_slice.part, send_slice.heads, send_slice.tokens, out
            )
        return payload

    def _place_own(self, content: _Content) -> None:
        for level, step in content:
            for send_slice in level.mine.send_slices(step):
                if send_slice.part in self._rows.parts:
                    out = level.place(send_slice, step)
                    self._rows.gather(
                        send_slice.kind, send_slice.part, send_slice.heads, send_slice.tokens, out
                    )


class _Message:
    """What one member sends; alone, a parcel arrives where it belongs."""

    def __init__(self, places: Sequence[Tensor]) -> None:
        self._places = places
        alone = len(places) == 1
        size = sum(place.numel() for place in places)
        self.payload = places[0] if alone else places[0].new_empty(size)

    def unpack(self) -> None:
        """Put everything where it belongs, once it has arrived."""
        if len(self._places) == 1:
            return
        shapes = [place.shape for place in self._places]
        for place, view in zip(self._places, _views(self.payload, shapes), strict=True):
            place.copy_(view)


def _rounds(level: LevelBuffers) -> Iterator[Sequence[RouteStep]]:
    """Steps that travel together: nothing can be computed with the first queries alone."""
    steps = level.routes.steps
    if steps:
        yield steps[:2]
    for step in steps[2:]:
        yield [step]


def _outgoing(content: _Content, owner: int) -> Iterator[SendSlice]:
    """What an owner gets from anybody."""
    for level, step in content:
        if owner in level.routes.members:
            for send_slice in level.routes.owner(owner).send_slices(step):
                if send_slice.reused_from is None:
                    yield send_slice


def _incoming(content: _Content, member: int) -> Iterator[Tensor]:
    """The places of what one other member sends here."""
    for level, step in content:
        parts = level.routes.routes.counts.parts
        for send_slice in level.mine.send_slices(step):
            if send_slice.reused_from is None and parts[send_slice.part].member == member:
                yield level.place(send_slice, step)


def _views(payload: Tensor, shapes: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """A payload's parts, one after the other."""
    begin = 0
    for shape in shapes:
        end = begin + math.prod(shape)
        yield payload[begin:end].view(*shape)
        begin = end


def _label(layer: int, content: _Content, consolidated: bool) -> Label:
    if consolidated:
        return Label(phase="first all-to-all", layer=layer)
    level, step = content[-1]
    return Label(phase="first all-to-all", layer=layer, level=level.routes.level, micro=step.micro)


@dataclass(frozen=True)
class FinishedQueries:
    """One micro-partition of queries, whose attention at this level is complete."""

    routes: SegmentRoutes
    micro: int
    outs_nhd: tuple[Tensor, ...]
    """Per block of the owner, in the order of its query buffers."""
    lses_hn: tuple[Tensor, ...]


class OwnedLevel:
    """One level of one layer on one member."""

    def __init__(self, group: SpGroup, buffers: LevelBuffers, *, layer: int, scale: float) -> None:
        self.buffers = buffers
        self.routes = buffers.routes
        self._group = group
        self._layer = layer
        self._scale = scale
        self._partial: dict[int, tuple[Tensor, Tensor]] = {}
        """By query block, what its queries have seen so far."""

    def compute(
        self, arrivals: FirstAllToAll, nearer: Mapping[int, LevelBuffers]
    ) -> Iterator[FinishedQueries]:
        """Attend as micro-partitions arrive, with points between them; yields those of the queries
        as they are finished.

        Args:
            nearer: lower levels by number, whose data has all arrived.
        """
        for step in self.routes.steps:
            arrivals.wait(self.routes.level, step)
            self.buffers.take_reused(step, nearer)
            if not self._computes(step):
                continue
            for rectangle in self.buffers.mine.rectangles(step):
                self._attend_in_blocks(rectangle, step)
            if self._finishes(step):
                yield self._finished(step.query_micro)

    def _attend_in_blocks(self, rectangle: Rectangle, step: RouteStep) -> None:
        timeline = self._group.clock.timeline
        q_nhd = self.buffers.queries[step.query_micro][rectangle.block][rectangle.queries]
        for rows in query_blocks(q_nhd, rectangle.keys.stop - rectangle.keys.start):
            with timeline.phase(
                "attention", layer=self._layer, level=self.routes.level, micro=step.micro
            ):
                self._attend(rectangle, rows, step)
            self._group.points.point()

    def _attend(self, rectangle: Rectangle, part: slice, step: RouteStep) -> None:
        """Some of a rectangle's queries."""
        queries = self.buffers.queries[step.query_micro][rectangle.block][rectangle.queries]
        k_ngd, v_ngd = self.buffers.keys_of(rectangle)
        q_nhd, sees = queries[part], len(k_ngd)
        positions = range(sees - len(queries), sees)[part]
        out_nhd, lse_hn = attention(
            q_nhd,
            k_ngd,
            v_ngd,
            q_positions=positions if rectangle.causal else None,
            k_positions=range(sees) if rectangle.causal else None,
            scale=self._scale,
        )
        first, block = rectangle.queries.start, rectangle.block
        rows = slice(first + part.start, first + part.stop)
        buffer = self.buffers.queries[step.query_micro][block]
        if len(q_nhd) == len(buffer) and block not in self._partial:
            self._partial[block] = out_nhd, lse_hn  # one call for all is common: no copy
            return
        if block not in self._partial:
            self._partial[block] = nothing_seen(buffer)
        out, lse = self._partial[block]
        merge_into(out[rows], lse[:, rows], out_nhd, lse_hn)

    def _computes(self, step: RouteStep) -> bool:
        return step != RouteStep("queries", 0)  # which waits for the first keys

    def _finishes(self, step: RouteStep) -> bool:
        if step.kind == "queries":
            return step.micro > 0
        return step.micro == self.routes.micro_partitions - 1

    def _finished(self, micro: int) -> FinishedQueries:
        done = [
            self._partial[block] if block in self._partial else nothing_seen(buffer)
            for block, buffer in enumerate(self.buffers.queries[micro])
        ]
        self._partial.clear()
        outs, lses = tuple(out for out, _ in done), tuple(lse for _, lse in done)
        return FinishedQueries(self.routes, micro, outs, lses)
