"""Read how much main memory this machine, or the container that this process runs in, has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

GIB = 2**30
ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class MainMemory:
    """Main memory in bytes, as the processes of this machine or container may use it."""

    total: int
    available: int
    """Free, or freed at once when it is needed; without swap."""
    limited: bool = False
    """True if a container's limit is less than what the machine has."""


def main_memory(root: Path = ROOT) -> MainMemory | None:
    """Return the memory of this machine or container; None where the system does not tell.

    Args:
        root: folder in which `/proc` and `/sys` are looked for.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    total, available = (
        int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
    )
    memory = MainMemory(total=total, available=available)
    for limit, used in _limits(root):
        if limit < memory.total:
            left = min(memory.available, max(0, limit - used))
            memory = MainMemory(total=limit, available=left, limited=True)
    return memory


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group around this process, and what it uses of it."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
            cache = "inactive_file "
        elif "memory" in controllers.split(","):
            mount, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file "
        else:
            continue
        # In a container the path is often that of the host, and its own group lies at the top.
        for folder in {mount, *_folders(mount, PurePosixPath(path))}:
            if (bound := _number(folder / limit)) is not None:
                used = (_number(folder / usage) or 0) - _field(folder / "memory.stat", cache)
                yield bound, used


def _folders(mount: Path, path: PurePosixPath) -> Iterator[Path]:
    for ancestor in (path, *path.parents):
        yield mount / ancestor.relative_to("/")


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is none, or it says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _field(path: Path, name: str) -> int:
    """Return a line's number; the page cache counts as used, though it is freed when needed."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
