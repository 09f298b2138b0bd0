"""Entries of a gang's log, reports of ranks about them, and how both are encoded.

Rank 0's sequencer (`sequencer.py`) appends entries; each rank executes those that name it, in the
log's order. A frame is a MessagePack array of entries or of reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, TypeVar

import msgspec

from csps.protocols.core.errors import ProtocolError
from csps.protocols.core.placement import Span

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0)]
"""Id, number or nanoseconds."""
Positive = Annotated[int, msgspec.Meta(ge=1)]


class RunQuantum(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Compute a step up to a yield point. The first quantum begins the step, the one to the last
    yield point ends it."""

    step: Count
    until: Positive
    cancelled: tuple[Count, ...] = ()
    """Sequences cancelled from the next layer on; each is named once."""


class Iterate(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A decode grant: iterate a batch's sequences, or those of a group of its ranks,
    `iterations` times."""

    batch: Count
    version: Count
    """Changes of the batch before this entry."""
    iterations: Positive
    group: tuple[Count, ...] = ()
    """Ranks of a group: only sequences that need no other rank are iterated. Empty: all of the
    batch."""


class Change(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Change a batch's sequences: some leave first, then others join. A sequence may do both."""

    batch: Count
    version: Positive
    """Changes of the batch, this one included."""
    joined: tuple[tuple[Count, Count | None], ...] = ()
    """(sequence, token that its first iteration is given). None instead of a token: the prefill
    of the sequence is piggybacked, so its prompt comes first."""
    left: tuple[Count, ...] = ()
    budget: Count = 0
    """Tokens that an iteration may compute from now on (`decode_batches.chunk_lengths`)."""
    iterated: tuple[tuple[tuple[Count, ...], Positive], ...] = ()
    """(ranks of a group, its iterations since the change before), for groups with piggybacked
    sequences. The other ranks count what these sequences have computed: once they share a master
    with one of them, both must know what it leaves of the budget."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Free what a step has reserved, and stop it if it has begun. Nothing is reported.

    A step that has begun may be paused below another one, which continues.
    """

    step: Count


class EndOwner(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Drop what is prepared for an owner. Its running steps were aborted and its sequences have
    left."""

    owner: Count


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """End the log."""


class Free(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Free some of the KV of a finished sequence, and report how much of it is left."""

    sequence: Count
    spans: tuple[Span, ...]


class PlaceSequence(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Continue a sequence on the ranks to which its KV was moved.

    Placement, master and KV holders change on all ranks before the same iteration. The entry
    follows the last `RunQuantum` of the step that moved the KV.
    """

    sequence: Count
    ranks: tuple[Count, ...]
    """Ranks that the sequence needs from now on."""
    master: Count
    """Instance that samples its tokens from now on. All ranks need it, also those that the move
    does not concern: it says whose token budget the sequence uses."""


Op = RunQuantum | Iterate | Change | Abort | EndOwner | Shutdown | Free | PlaceSequence


class LogEntry(msgspec.Struct, frozen=True, array_like=True):
    """One entry of the log."""

    seq: Positive
    """Number of the entry: consecutive in the log, increasing on each rank."""
    op: Op


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A rank has received a step's tokens and reserved its slots."""

    rank: Count
    step: Count


class RanQuantum(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A step's leader has executed a `RunQuantum`."""

    rank: Count
    seq: Positive
    """Number of the `RunQuantum`."""
    step: Count
    yield_point: Count
    """Yield point that was reached."""
    nanoseconds: Count
    """Time that the step itself took since its previous `RunQuantum`."""


class Iterated(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The first rank of an instance has executed an `Iterate`; every instance reports."""

    rank: Count
    seq: Positive
    """Number of the `Iterate`."""
    batch: Count
    nanoseconds: Count
    """Time of all iterations of the grant."""
    finished: tuple[Count, ...] = ()
    """Sequences of this master that need no further iteration."""


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A rank is shutting down, and its gang with it."""


Report = Prepared | RanQuantum | Iterated | Leaving

_ENCODER = msgspec.msgpack.Encoder()
_ENTRIES = msgspec.msgpack.Decoder(list[LogEntry])
_REPORTS = msgspec.msgpack.Decoder(list[Report])


def pack_entries(entries: Iterable[LogEntry]) -> bytes:
    """Encode entries as a frame, in the order of the log."""
    return _ENCODER.encode(list(entries))


def unpack_entries(frame: bytes) -> list[LogEntry]:
    """Decode a frame of entries.

    Raises:
        ProtocolError: the frame holds something else.
    """
    return _decoded(_ENTRIES, frame, "log entries")


def pack_reports(reports: Iterable[Report]) -> bytes:
    """Encode reports of one rank as a frame, in the order in which they were made."""
    return _ENCODER.encode(list(reports))


def unpack_reports(frame: bytes) -> list[Report]:
    """Decode a frame of reports.

    Raises:
        ProtocolError: the frame holds something else.
    """
    return _decoded(_REPORTS, frame, "reports")


def _decoded(decoder: msgspec.msgpack.Decoder[list[T]], frame: bytes, what: str) -> list[T]:
    try:
        return decoder.decode(frame)
    except (ValueError, RecursionError) as error:  # deeply nested lists behind the known fields
        raise ProtocolError(f"not a frame of {what}: {error}") from None
