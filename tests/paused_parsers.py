"""Parsers' processes that take as long as a test likes."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from csps.services.http.parser_pool import ParserPool


@asynccontextmanager
async def paused(pool: ParserPool) -> AsyncIterator[list[int]]:
    """Pause the processes of a pool; yield their ids. Those that are killed meanwhile stay away."""
    await pool.start()
    pids = pool.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pids
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
