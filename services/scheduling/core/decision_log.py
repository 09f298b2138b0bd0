"""Decision log: every batch of events, and what is needed to replay them.

The file is a series of MessagePack records, each behind its length in four bytes; the first one is
a header. It holds sizes and times but no token and no text. The same log gives the same commands,
byte for byte, under the same Python version and with the cost tables that the digests name, which
are stored beside it (`CostTable.digest`, `CostTableUpdated`).
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from csps.protocols.core.errors import ConfigError
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.commands import AnyCommand
from csps.services.scheduling.events.events import AnyEvent
from csps.services.scheduling.events.limits import QueueLimits, ReuseSettings, SchedulerDeadlines

PREFIX_BYTES = 4
SCHEMA_VERSION = 2
"""Version of events and of this file; 2 since fields and tags were renamed."""


class DecisionLogHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs, besides the events, on which the commands depend."""

    policy: str
    """Name of the policy."""
    policy_digest: str
    table_digest: str
    """Digest of the cost table at the start."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options of the policy."""
    limits: QueueLimits = QueueLimits()
    deadlines: SchedulerDeadlines = SchedulerDeadlines()
    reuse: ReuseSettings = ReuseSettings()
    schema: int = SCHEMA_VERSION
    python: str = platform.python_version()
    """Python version: another one may sum floats in another order."""


class EventBatch(NamedTuple):
    """Events of one round."""

    now_ns: int
    events: list[AnyEvent]


class LogWriter:
    """Appends batches to a file.

    It writes records when `BUFFERED` bytes have come together, and in `flush`: a log that is
    flushed in every round would cost the event loop a system call each time.
    """

    BUFFERED = 1 << 16

    def __init__(self, file: BinaryIO, header: DecisionLogHeader) -> None:
        self._file, self._encoder = file, msgspec.msgpack.Encoder()
        self._buffer = bytearray()
        self._add(header)

    def append(self, now_ns: int, events: Sequence[AnyEvent]) -> None:
        """Append a batch that is handed to the scheduler."""
        self._add((now_ns, events))
        if len(self._buffer) >= self.BUFFERED:
            self.flush()

    def _add(self, record: object) -> None:
        begin = len(self._buffer)
        self._buffer += bytes(PREFIX_BYTES)
        self._encoder.encode_into(record, self._buffer, -1)
        size = len(self._buffer) - begin - PREFIX_BYTES
        self._buffer[begin : begin + PREFIX_BYTES] = size.to_bytes(PREFIX_BYTES, "big")

    def flush(self) -> None:
        """Write everything to the file."""
        self._file.write(self._buffer)
        self._file.flush()
        self._buffer.clear()


def read_log(path: Path) -> tuple[DecisionLogHeader, Iterator[EventBatch]]:
    """Return a log's header, and its batches one by one. A record that was cut off ends it.

    Raises:
        ConfigError: the file is no decision log, or one of another schema.
    """
    records = _records(path)
    try:
        header = msgspec.msgpack.decode(next(records), type=DecisionLogHeader)
    except (StopIteration, msgspec.MsgspecError):
        raise ConfigError(f"{path} is not the log of a scheduler") from None
    if header.schema != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema {header.schema}; this release reads schema {SCHEMA_VERSION}"
        )
    decoder = msgspec.msgpack.Decoder(EventBatch)
    return header, map(decoder.decode, records)


def replay(path: Path, make_scheduler: Callable[[DecisionLogHeader], Scheduler]) -> bytes:
    """Return the commands that a log leads to, as the bytes of MessagePack arrays, one a round.

    Args:
        path: of the log.
        make_scheduler: makes a scheduler with the policy, options and tables that the header names.
    """
    header, batches = read_log(path)
    scheduler = make_scheduler(header)
    return b"".join(_turns(scheduler, batches))


def command_bytes(commands: Iterable[AnyCommand]) -> bytes:
    """Return the commands of a round as `replay` writes them."""
    return msgspec.msgpack.encode(list(commands))


def _turns(scheduler: Scheduler, batches: Iterable[EventBatch]) -> Iterator[bytes]:
    for now_ns, events in batches:
        yield command_bytes(scheduler.handle(events, now_ns).commands)


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records without their lengths."""
    with path.open("rb") as file:
        while len(prefix := file.read(PREFIX_BYTES)) == PREFIX_BYTES:
            size = int.from_bytes(prefix, "big")
            if len(record := file.read(size)) < size:
                return
            yield record
