"""Who owns a testbed: a locked file per bed, so that `down` can tell what a killed run left.

The lock is the kernel's, so it ends with its owner however that ends; a process id in a file
would have to be guessed about once the number is used again.
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
        """The bed is gone: forget its name, and delete its files."""
        shutil.rmtree(files_of(self.name), ignore_errors=True)
        self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def abandon(self) -> None:
        """Leave the bed up without an owner, for whoever comes with its name."""
        os.close(self._fd)


class BedInUseError(ValueError):
    """Another process owns that testbed."""


def files_of(name: str) -> Path:
    """Where a bed may keep files for as long as it is up."""
    return CLAIMS / f"{name}.files"


def claimed() -> Iterator[str]:
    """Names of all beds that are up, or that a killed run left half made."""
    if CLAIMS.is_dir():
        yield from sorted(path.name for path in CLAIMS.iterdir() if path.is_file())
