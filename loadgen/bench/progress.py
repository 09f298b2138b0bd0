"""A line about a run that goes on, once a second."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import TextIO

from csps.loadgen.client.asker import Counts

EVERY_S = 1.0
_RECENT = 100
"""Requests whose TTFT is shown."""


@asynccontextmanager
async def progress(counts: Counts, total: int, out: TextIO = sys.stderr) -> AsyncIterator[None]:
    """Prints while the body runs: over itself on a terminal, else a line every ten seconds."""
    task = asyncio.create_task(_report(counts, total, out))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if out.isatty():
            print(file=out)


async def _report(counts: Counts, total: int, out: TextIO) -> None:
    terminal = out.isatty()
    begin = time.monotonic()
    while True:
        await asyncio.sleep(EVERY_S if terminal else 10 * EVERY_S)
        text = line(counts, total, time.monotonic() - begin)
        print(f"\r{text:<79}" if terminal else text, end="" if terminal else "\n", file=out)
        out.flush()


def line(counts: Counts, total: int, seconds: float) -> str:
    """`120/300 done, 14 running, 0 failed, 2.00 req/s, TTFT 350 ms (median of 100)`."""
    recent = counts.ttfts_s[-_RECENT:]
    ttft = f", TTFT {1000 * median(recent):.0f} ms (median of {len(recent)})" if recent else ""
    cancelled = f", {counts.cancelled} cancelled" if counts.cancelled else ""
    return (
        f"{counts.completed}/{total} done, {counts.running} running, {counts.failed} failed"
        f"{cancelled}, {counts.completed / seconds:.2f} req/s{ttft}"
    )
