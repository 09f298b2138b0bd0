"""A process that writes KV to files until it is killed: run as a script, it makes such processes.

For each line on its standard input it forks a writer, lets it live for the microseconds that the
line says from its first byte on, kills it, and answers with a line.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from csps.actors.kv_cache.kv_files import KvFiles
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import SavedRun

LAYOUT = "00112233"
BODY_BYTES = 20_000
PART = 1_024


def run_of(number: int) -> SavedRun:
    """Return a run, different for every number."""
    return SavedRun(
        start=64 * number,
        hashes=(b"%016d" % number,),
        slices=(KvSlice(0, 64 * number, 64 * number + 64),),
    )


def body_of(number: int) -> bytes:
    """Return the bytes of a run, which follow from its number."""
    return random.Random(number).randbytes(BODY_BYTES)


def parts_of(body: bytes) -> list[memoryview]:
    """Return a body in the pieces in which it is written."""
    view = memoryview(body)
    return [view[at : at + PART] for at in range(0, len(view), PART)]


def save(files: KvFiles, number: int, *, owner: str = "", permille: int = 1000) -> int:
    """Write a run; return the bytes of its file."""
    body = parts_of(body_of(number))
    return files.save(run_of(number), body, BODY_BYTES, owner=owner, permille=permille)


def _write(path: Path, most_bytes: int, first: int, begun: int) -> None:
    """Write one run after the other; say so when the first one begins."""
    files = KvFiles(path, most_bytes, layout=LAYOUT, rank=0)
    os.write(begun, b".")
    for number in range(first, first + 1_000_000):
        save(files, number)


def _main(path: Path, most_bytes: int) -> None:
    for kill, line in enumerate(sys.stdin):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                _write(path, most_bytes, 1_000 * kill, writing)
            finally:
                os._exit(1)
        os.read(reading, 1)
        time.sleep(int(line) / 1e6)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        print(flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
