"""A gang's log, and what ranks report about it, as they cross between ranks.

Rank 0's conductor (`sequencer.py`) appends entries; every rank executes those that name it, in
the log's order. A frame is a MessagePack array of entries or of reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec

from csps.protocols.core.errors import ProtocolError
from csps.protocols.core.placement import Span

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]
"""An id, a number of something, or nanoseconds."""
Positive = Annotated[int, msgspec.Meta(ge=1)]


class RunQuantum(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Compute a step up to a part; the first one begins it, the one to its last part ends it."""

    step: Count
    until: Positive
    cancelled: tuple[Count, ...] = ()
    """Sequences given up from the next layer on; each is named once."""


class Iterate(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A lease: iterate a stream's rows `iterations` times, or those of a group of its ranks."""

    batch: Count
    version: Count
    """Changes of the stream before this entry."""
    iterations: Positive
    group: tuple[Count, ...] = ()
    """Ranks: only rows that concern no others are iterated. Empty: all rows, at all ranks."""


class Change(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Change a stream's rows: first some leave, then others join. A sequence may do both."""

    batch: Count
    version: Positive
    """Changes of the stream, this one included."""
    joined: tuple[tuple[Count, Count | None], ...] = ()
    """(sequence, the token that its first iteration is given; None if it rides, and computes its
    prompt first)."""
    left: tuple[Count, ...] = ()
    budget: Count = 0
    """Tokens that an iteration may compute from now on (`iteration.fill`)."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Give back what a step holds, and stop it if it has begun; there is no report of it.

    A step that has begun may lie below another one, which goes on.
    """

    step: Count


class EndOwner(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Drop what is prepared for an owner. What ran for it was aborted, and its rows have left."""

    owner: Count


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The last entry."""


class Free(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Free some of the KV of a sequence that is over, and say how much is left of it."""

    sequence: Count
    spans: tuple[Span, ...]


class PlaceSequence(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """A row goes on where its KV has been moved to: placement, master and keepers change at all
    ranks before the same iteration. Follows upon the last `RunQuantum` of the step that moved it."""

    sequence: Count
    ranks: tuple[Count, ...]
    """Whom the row concerns from now on."""


Op = RunQuantum | Iterate | Change | Abort | EndOwner | Shutdown | Free | PlaceSequence


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One line of the log."""

    seq: Positive
    """Its number. Consecutive in the log, increasing at each rank."""
    op: Op


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A rank has a step's tokens, and has taken its slots."""

    rank: Count
    step: Count


class RanQuantum(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A step's leader has executed a `RunQuantum`."""

    rank: Count
    seq: Positive
    """Of the `RunQuantum`."""
    step: Count
    yield_point: Count
    """Reached."""
    nanoseconds: Count
    """Taken by the step itself since the `RunQuantum` before."""


class Iterated(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """An instance's first rank has executed an `Iterate`, as all of them report."""

    rank: Count
    seq: Positive
    """Of the `Iterate`."""
    batch: Count
    nanoseconds: Count
    """Of all iterations of the lease."""
    finished: tuple[Count, ...] = ()
    """Sequences of this master that need no further iteration."""


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A rank is being closed, and its gang ends with it."""


Report = Prepared | RanQuantum | Iterated | Leaving

_ENCODER = msgspec.msgpack.Encoder()
_ENTRIES = msgspec.msgpack.Decoder(list[Entry])
_REPORTS = msgspec.msgpack.Decoder(list[Report])


def pack_entries(entries: Iterable[Entry]) -> bytes:
    """A frame of entries, in the order of the log."""
    return _ENCODER.encode(list(entries))


def unpack_entries(frame: bytes) -> list[Entry]:
    """The entries of a frame.

    Raises:
        ProtocolError: the frame is none of entries.
    """
    return _decoded(_ENTRIES, frame, "log entries")


def pack_reports(reports: Iterable[Report]) -> bytes:
    """A frame of reports of one rank, in the order in which it made them."""
    return _ENCODER.encode(list(reports))


def unpack_reports(frame: bytes) -> list[Report]:
    """The reports of a frame.

    Raises:
        ProtocolError: the frame is none of reports.
    """
    return _decoded(_REPORTS, frame, "reports")


def _decoded(decoder: msgspec.msgpack.Decoder[list[T]], frame: bytes, what: str) -> list[T]:
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"not a frame of {what}: {error}") from None
