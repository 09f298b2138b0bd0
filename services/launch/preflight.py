"""What must be true of a machine before a server is started on it. Each finding is one line."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

from csps.protocols.errors import ConfigError
from csps.services.launch.memory_need import GIB, MemoryNeed

MIN_PYTHON = (3, 11)


def check_python() -> None:
    """Raise `ConfigError` if this interpreter is too old."""
    if sys.version_info < MIN_PYTHON:
        have = ".".join(map(str, sys.version_info[:3]))
        want = ".".join(map(str, MIN_PYTHON))
        raise ConfigError(f"Python {want} or newer is needed, this is {have}")


SERVER_PORT = "http_options.port, or `csps serve --port`"
"""Where the server's port is chosen."""


def check_port(host: str, port: int, *, setting: str = SERVER_PORT) -> None:
    """Raise `ConfigError` if somebody listens there already; `setting` chooses another port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigError(
                f"port {port} on {host} cannot be used ({exc.strerror}): stop what uses it, or "
                f"choose another one ({setting})"
            ) from None


MEMINFO = Path("/proc/meminfo")
POLL_S = 0.5


def check_memory_at_all(need: MemoryNeed, *, meminfo: Path = MEMINFO) -> None:
    """Raise `ConfigError` if a server would not fit even if all memory were free."""
    whole = memory_gib("MemTotal", meminfo)
    if whole is not None and whole < need.total / GIB:
        raise ConfigError(
            f"this machine has {whole:.1f} GiB of memory, but {need.total / GIB:.1f} GiB are "
            f"needed ({need.parts})"
        )


def wait_memory(need: MemoryNeed, deadline_s: float) -> None:
    """`check_memory`, again and again while processes that have ended may still hold some."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return check_memory(need)
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(POLL_S)


def check_memory(need: MemoryNeed, *, freed: int = 0, meminfo: Path = MEMINFO) -> None:
    """Raise `ConfigError` if a server does not fit into what is free; silent where unknown.

    Args:
        freed: bytes that are free as well once what runs has ended.
    """
    available = memory_gib("MemAvailable", meminfo)
    if available is not None and available + freed / GIB < need.total / GIB:
        more = f", and at most {freed / GIB:.1f} more without what runs" if freed else ""
        raise ConfigError(
            f"{available:.1f} GiB of memory are available{more}, but {need.total / GIB:.1f} GiB "
            f"are needed ({need.parts}): free some, or lower instances or kv_slots, or set dtype "
            "to bfloat16"
        )


def memory_gib(name: str, meminfo: Path = MEMINFO) -> float | None:
    """A figure of the system's: MemTotal, or MemAvailable, what processes can have unswapped."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # not Linux
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields[name].split()[0]) / 2**20 if name in fields else None
