"""Measuring the link between two ranks of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress

from csps.protocols.errors import DeadlineExceeded, FaultError

SIZES = (8, 1_024, 16_384, 262_144, 1_048_576, 4_194_304, 16_777_216)
QUICK_SIZES = (8, 65_536, 4_194_304)
ROUNDS = 20
PROBE_S = 120.0
"""For both ends to start, measure and end."""
INSIDE = "inside"
"""Kind of link: both ranks on one server."""


async def measure_link(sizes: tuple[int, ...], *, host: str, device: str) -> dict[int, float]:
    """Seconds that a message of each size takes one way, medians.

    Half of the shortest round trip is taken for the way back.

    Raises:
        FaultError: an end failed.
        DeadlineExceeded: they do not end.
    """
    arguments = (",".join(map(str, sizes)), str(ROUNDS), device)
    ends: list[Process] = []
    try:
        async with asyncio.timeout(PROBE_S):
            ends.append(await _start("0", host, "-", *arguments))
            store = json.loads(await _line(ends[0]))
            ends.append(await _start("1", host, store, *arguments))
            rounds = [statistics.median(seconds) for seconds in json.loads(await _line(ends[1]))]
    except TimeoutError:
        raise DeadlineExceeded("measuring a link", PROBE_S) from None
    finally:
        for end in ends:
            with suppress(ProcessLookupError):
                end.kill()
            await end.wait()
    back = min(rounds) / 2
    return {size: seconds - back for size, seconds in zip(sizes, rounds, strict=True)}


async def _start(rank: str, *arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "csps.actors.link_probe", rank, *arguments),
        stdout=PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": rank},
        start_new_session=True,
    )


async def _line(end: Process) -> bytes:
    assert end.stdout is not None
    line = await end.stdout.readline()
    if not line:
        raise FaultError(f"a link's end stopped with status {await end.wait()}")
    return line
