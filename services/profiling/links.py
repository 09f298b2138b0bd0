"""Measuring the links between all pairs of ranks."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import combinations
from typing import Protocol

from csps.protocols.core.errors import DeadlineExceeded, FaultError
from csps.services.settings.devices import resolve_device
from csps.services.settings.settings import Settings

SIZES = (8, 1_024, 16_384, 262_144, 1_048_576, 4_194_304, 16_777_216)
QUICK_SIZES = (8, 65_536, 4_194_304)
ROUNDS = 20
PAIR_S = 120.0
"""For a pair to be measured, and before the first one for all ranks to start."""
LOOPBACK = "127.0.0.1"
RecordPair = Callable[[int, int, dict[int, float]], None]
"""Takes sender, receiver, and seconds by size."""


class LinkProbe(Protocol):
    """A rank that takes part in measuring."""

    async def start(self, gpu: int, arguments: Sequence[str]) -> None:
        """Start the process.

        Args:
            gpu: of its machine, if ranks have GPUs.
            arguments: of `csps.actors.link_probe`, but for the device.
        """
        ...

    async def line(self) -> str:
        """What it prints next; empty when it has ended."""
        ...

    async def stop(self) -> None:
        """End it, wherever it is."""
        ...


class LocalLinkProbe:
    """On this machine."""

    def __init__(self, device: str, num_gpus: float) -> None:
        """Start nothing yet.

        Args:
            device, num_gpus: as the settings have them; what `auto` is, this machine decides.
        """
        self._device, self._num_gpus = device, num_gpus
        self._process: Process | None = None

    async def start(self, gpu: int, arguments: Sequence[str]) -> None:
        device = resolve_device(self._device, self._num_gpus)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "csps.actors.link_probe", *arguments, device),
            stdout=PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": str(gpu)},
            start_new_session=True,
        )

    async def line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode()

    async def stop(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


async def measure_links(
    ends: Sequence[LinkProbe],
    hosts: Sequence[str],
    sizes: tuple[int, ...],
    record_pair: RecordPair,
) -> None:
    """Seconds that a message of each size takes one way, medians, of each pair of ranks in turn.

    Half of the shortest round trip is taken for the way back.

    Args:
        hosts: the interface that each end listens on.
        keep: is called for each pair when it has been measured.

    Raises:
        FaultError: an end failed.
        DeadlineExceeded: it takes too long.
    """
    try:
        await _start(ends, hosts, sizes)
        for sender, receiver in combinations(range(len(ends)), 2):
            rounds = [statistics.median(load) for load in json.loads(await _line(ends, receiver))]
            one_way = [seconds - min(rounds) / 2 for seconds in rounds]
            record_pair(sender, receiver, dict(zip(sizes, one_way, strict=True)))
    finally:
        await asyncio.gather(*(end.stop() for end in ends))


async def _start(ends: Sequence[LinkProbe], hosts: Sequence[str], sizes: tuple[int, ...]) -> None:
    options = (",".join(map(str, sizes)), str(ROUNDS))
    store = "-"
    for rank, (end, host) in enumerate(zip(ends, hosts, strict=True)):
        gpu = hosts[:rank].count(host)
        await end.start(gpu, (str(rank), str(len(ends)), host, store, *options))
        if rank == 0:
            store = json.loads(await _line(ends, 0))


async def _line(ends: Sequence[LinkProbe], rank: int) -> str:
    try:
        async with asyncio.timeout(PAIR_S):
            line = await ends[rank].line()
    except TimeoutError:
        raise DeadlineExceeded("measuring a link", PAIR_S) from None
    if not line:
        raise FaultError(f"rank {rank} of those that measure links has ended")
    return line


def ranks_here(settings: Settings) -> list[str]:
    """Rack-Server-GPU ids of the ranks that compute prompts, as far as they are of one server, the
    first; two where a server has one rank, which then are of two instances."""
    named = settings.topology.of(settings.prefilling_role)
    if not named:
        return [f"0-0-{rank}" for rank in range(max(2, settings.prefilling.ranks))]
    servers = [it.rpartition("-")[0] for it in named]
    here = [it for it, server in zip(named, servers, strict=True) if server == servers[0]]
    return here if len(here) > 1 else [f"{servers[0]}-{rank}" for rank in range(2)]
