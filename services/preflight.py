"""What must be true of a machine before a server is started on it. Each finding is one line."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from csps.protocols.errors import ConfigError
from csps.services.memory_need import GIB, MemoryNeed

MIN_PYTHON = (3, 11)


def check_python() -> None:
    """Raise `ConfigError` if this interpreter is too old."""
    if sys.version_info < MIN_PYTHON:
        have = ".".join(map(str, sys.version_info[:3]))
        want = ".".join(map(str, MIN_PYTHON))
        raise ConfigError(f"Python {want} or newer is needed, this is {have}")


def check_port(host: str, port: int) -> None:
    """Raise `ConfigError` if somebody listens there already."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigError(
                f"port {port} on {host} cannot be used ({exc.strerror}): stop what uses it, "
                "or choose another one with --port or http_options.port"
            ) from None


def check_memory(need: MemoryNeed, *, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Raise `ConfigError` if a server does not fit into what is free; silent where unknown."""
    available = available_gib(meminfo)
    if available is not None and available < need.total / GIB:
        raise ConfigError(
            f"{available:.1f} GiB of memory are available, but {need.total / GIB:.1f} GiB are "
            f"needed ({need.parts}): free some, or lower instances or kv_slots, or set dtype to "
            "bfloat16"
        )


def available_gib(meminfo: Path) -> float | None:
    """Memory that new processes can have without swapping."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # not Linux
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) / 2**20 if "MemAvailable" in fields else None
