"""Ownership of testbeds: a locked file per bed, so that `down` can detect abandoned beds.

The kernel releases the lock when its owner ends, in any way. A process id in a file would be
ambiguous once the number is reused.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

CLAIMS = Path("/run/csps-testbed")


class Claim:
    """A bed's name, reserved; held by this process until `release` or `abandon`."""

    def __init__(self, name: str) -> None:
        CLAIMS.mkdir(mode=0o700, exist_ok=True)
        self.name = name
        self._path = CLAIMS / name
        # Not inherited by the processes of the bed (PEP 446), which may outlive the owner.
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise BedInUseError(f"testbed {name} belongs to a running process") from None

    def release(self) -> None:
        """Release the name and delete the bed's files after the bed is removed."""
        shutil.rmtree(files_of(self.name), ignore_errors=True)
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def abandon(self) -> None:
        """Leave the bed up without an owner, for later use by its name."""
        os.close(self._fd)


class BedInUseError(ValueError):
    """Another process owns that testbed."""


def files_of(name: str) -> Path:
    """Return the folder for a bed's files."""
    return CLAIMS / f"{name}.files"


def claimed() -> Iterator[str]:
    """Return the names of all beds that are up, or that a killed run left half made."""
    if CLAIMS.is_dir():
        yield from sorted(path.name for path in CLAIMS.iterdir() if path.is_file())
