"""The first all-to-all, and the attention of the owned heads at one level (CSPS §3.2.4).

The first all-to-all sends kept rows to the owners of their heads. Each exchange has one message per
destination, with any number of levels, parts and blocks of heads. If exchanges overlap attention,
an exchange is the smallest amount of data on which attention can run. Without overlap there is one
consolidated all-to-all per layer.

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
"""Steps in one exchange, in the same order at all members."""


class FirstAllToAll:
    """First all-to-all of one layer on one member; begins all exchanges at once, near levels first.

    Args:
        levels: buffers by number of the level, ascending.
        consolidated: True for one exchange of everything.
    """

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

        self._exchanges: dict[tuple[int, RouteStep], _Exchange] = {}
        contents = [
            [(level, step) for step in steps]
            for level in levels.values()
            for steps in _joint_steps(level)
        ]
        if consolidated and contents:
            contents = [list(chain(*contents))]
        for content in contents:
            label = _label(layer, content, consolidated)
            exchange = _Exchange(group, rows, content, transfers, label)
            for level, step in content:
                self._exchanges[level.routes.level, step] = exchange

    def wait(self, level: int, step: RouteStep) -> None:
        """Block until the rows of a step are in their buffers."""
        self._exchanges[level, step].wait()


class _Exchange:
    """One exchange of some steps of some levels."""

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
        sends = [(group.peers[member], self._pack(content, member)) for member in group.others]
        recvs = [(group.peers[member], message.payload) for member, message in arriving.items()]
        self._arriving = list(arriving.values())
        self._transfer = transfers.start(sends, recvs, Tag.FIRST_EXCHANGE, label)
        self._place_own(content)

    def wait(self) -> None:
        """Block until all rows are in their buffers."""
        self._transfers.wait(self._transfer)
        for message in self._arriving:
            message.unpack()
        self._arriving.clear()

    def _pack(self, content: _Content, owner: int) -> Tensor:
        """Gather the message to one owner."""
        send_slices = [
            send_slice
            for send_slice in _outgoing(content, owner)
            if send_slice.part in self._rows.parts
        ]
        shapes = [
            self._rows.shape(send_slice.kind, send_slice.heads, send_slice.tokens)
            for send_slice in send_slices
        ]
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
    """Message from one member; a single send slice is received directly into its buffer."""

    def __init__(self, places: Sequence[Tensor]) -> None:
        self._places = places
        alone = len(places) == 1
        size = sum(place.numel() for place in places)
        self.payload = places[0] if alone else places[0].new_empty(size)

    def unpack(self) -> None:
        """Copy the send slices of a received message into their buffers."""
        if len(self._places) == 1:
            return
        shapes = [place.shape for place in self._places]
        for place, view in zip(self._places, _views(self.payload, shapes), strict=True):
            place.copy_(view)


def _joint_steps(level: LevelBuffers) -> Iterator[Sequence[RouteStep]]:
    """Yield the steps of a level that are sent together."""
    # The first queries go with the first keys, as nothing can be computed with queries alone.
    steps = level.routes.steps
    if steps:
        yield steps[:2]
    for step in steps[2:]:
        yield [step]


def _outgoing(content: _Content, owner: int) -> Iterator[SendSlice]:
    """Yield the send slices that an owner receives from any member."""
    for level, step in content:
        if owner in level.routes.members:
            for send_slice in level.routes.owner(owner).send_slices(step):
                if send_slice.reused_from is None:
                    yield send_slice


def _incoming(content: _Content, member: int) -> Iterator[Tensor]:
    """Yield the buffer rows for the send slices from another member."""
    for level, step in content:
        parts = level.routes.routes.counts.parts
        for send_slice in level.mine.send_slices(step):
            if send_slice.reused_from is None and parts[send_slice.part].member == member:
                yield level.place(send_slice, step)


def _views(payload: Tensor, shapes: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Yield consecutive views of a payload with the given shapes."""
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
    """One micro-partition of queries whose attention at this level is complete."""

    routes: SegmentRoutes
    micro: int
    outs_nhd: tuple[Tensor, ...]
    """Outputs of each block of the owner, in the order of its query buffers."""
    lses_hn: tuple[Tensor, ...]


class OwnedLevel:
    """Attention of one member's own heads at one level of one layer."""

    def __init__(self, group: SpGroup, buffers: LevelBuffers, *, layer: int, scale: float) -> None:
        self.buffers = buffers
        self.routes = buffers.routes
        self._group = group
        self._layer = layer
        self._scale = scale
        self._partial: dict[int, tuple[Tensor, Tensor]] = {}
        """Running result of each query block."""

    def compute(
        self, arrivals: FirstAllToAll, nearer: Mapping[int, LevelBuffers]
    ) -> Iterator[FinishedQueries]:
        """Attend as micro-partitions arrive, with yield points; yield finished queries.

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
        """Attend some queries of a rectangle to its keys."""
        queries = self.buffers.queries[step.query_micro][rectangle.block][rectangle.queries]
        k_ngd, v_ngd = self.buffers.keys_of(rectangle)
        q_nhd, key_count = queries[part], len(k_ngd)
        positions = range(key_count - len(queries), key_count)[part]
        out_nhd, lse_hn = attention(
            q_nhd,
            k_ngd,
            v_ngd,
            q_positions=positions if rectangle.causal else None,
            k_positions=range(key_count) if rectangle.causal else None,
            scale=self._scale,
        )
        first, block = rectangle.queries.start, rectangle.block
        rows = slice(first + part.start, first + part.stop)
        buffer = self.buffers.queries[step.query_micro][block]
        if len(q_nhd) == len(buffer) and block not in self._partial:
            self._partial[block] = out_nhd, lse_hn  # One call for all is common; saves a copy.
            return
        if block not in self._partial:
            self._partial[block] = nothing_seen(buffer)
        out, lse = self._partial[block]
        merge_into(out[rows], lse[:, rows], out_nhd, lse_hn)

    def _computes(self, step: RouteStep) -> bool:
        return step != RouteStep("queries", 0)  # the first queries wait for the first keys

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
