"""A cost table as bytes, as it lies beside the log of a live router under its digest."""

from __future__ import annotations

from pathlib import Path

import msgspec

from csps.protocols.errors import ConfigError
from csps.protocols.ring_choice import parse_rules
from csps.services.scheduling.cost import Allowed, Bucket, CostTable
from csps.services.scheduling.latency import LatencyTable, parse_table


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    latencies: bytes
    buckets: list[tuple[Bucket, tuple[Allowed, ...]]]
    rings: bytes | None = None
    overhead_ns: int = 0


def stored(table: CostTable) -> bytes:
    """What `read_stored` reads."""
    assert isinstance(table.latencies, LatencyTable), "latencies that cannot be stored"
    return msgspec.msgpack.encode(
        _Stored(
            table.latencies.canonical,
            sorted(table.buckets.items()),
            None if table.rings is None else table.rings.canonical,
            table.overhead_ns,
        )
    )


def read_stored(path: Path) -> CostTable:
    """The table of a file.

    Raises:
        ConfigError: there is no such file, or it is none.
    """
    found = _read(path)
    return CostTable(
        latencies=parse_table(found.latencies),
        buckets=dict(found.buckets),
        rings=None if found.rings is None else parse_rules(found.rings),
        overhead_ns=found.overhead_ns,
    )


def read_latencies(path: Path) -> LatencyTable:
    """The latencies of a file's table.

    Raises:
        ConfigError: as above.
    """
    return parse_table(_read(path).latencies)


def _read(path: Path) -> _Stored:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=_Stored)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except msgspec.MsgspecError:
        raise ConfigError(f"{path} is no table of a router's log") from None
