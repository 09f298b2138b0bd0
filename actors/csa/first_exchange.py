"""The first all-to-all: kept rows on their way to the owners of their heads (CSPS §3.2.4).

Each exchange has one message per destination, of however many levels, parts and blocks of heads it
consists. Overlapped with attention, an exchange is the least that something can be computed with;
without overlap it is everything: one consolidated all-to-all per layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from torch import Tensor

from csps.actors.csa.kept_rows import KeptRows
from csps.actors.csa.level_buffers import LevelBuffers
from csps.actors.csa.routes import Parcel, Step
from csps.actors.mesh import Tag
from csps.actors.strategies.group import SpGroup
from csps.actors.transfers import Label, Transfers

_Content = Sequence[tuple[LevelBuffers, Step]]
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
        self._exchanges: dict[tuple[int, Step], _Exchange] = {}
        rounds = [[(lv, step) for step in steps] for lv in levels.values() for steps in _rounds(lv)]
        if consolidated and rounds:
            rounds = [list(chain(*rounds))]
        for content in rounds:
            label = _label(layer, content, consolidated)
            exchange = _Exchange(group, rows, content, transfers, label)
            for level, step in content:
                self._exchanges[level.routes.level, step] = exchange

    def wait(self, level: int, step: Step) -> None:
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
        parcels = [it for it in _outgoing(content, owner) if it.part in self._rows.parts]
        shapes = [self._rows.shape(it.kind, it.heads, it.tokens) for it in parcels]
        payload = self._rows.q_thd.new_empty(sum(map(math.prod, shapes)))
        for parcel, out in zip(parcels, _views(payload, shapes), strict=True):
            self._rows.gather(parcel.kind, parcel.part, parcel.heads, parcel.tokens, out)
        return payload

    def _place_own(self, content: _Content) -> None:
        for level, step in content:
            for parcel in level.mine.parcels(step):
                if parcel.part in self._rows.parts:
                    out = level.place(parcel, step)
                    self._rows.gather(parcel.kind, parcel.part, parcel.heads, parcel.tokens, out)


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


def _rounds(level: LevelBuffers) -> Iterator[Sequence[Step]]:
    """Steps that travel together: nothing can be computed with the first queries alone."""
    steps = level.routes.steps
    if steps:
        yield steps[:2]
    for step in steps[2:]:
        yield [step]


def _outgoing(content: _Content, owner: int) -> Iterator[Parcel]:
    """What an owner gets from anybody."""
    for level, step in content:
        if owner in level.routes.members:
            for parcel in level.routes.owner(owner).parcels(step):
                if parcel.reused_from is None:
                    yield parcel


def _incoming(content: _Content, member: int) -> Iterator[Tensor]:
    """The places of what one other member sends here."""
    for level, step in content:
        parts = level.routes.routes.counts.parts
        for parcel in level.mine.parcels(step):
            if parcel.reused_from is None and parts[parcel.part].member == member:
                yield level.place(parcel, step)


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
