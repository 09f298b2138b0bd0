"""Measure the links between all pairs of ranks."""

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
from csps.services.settings.credentials import SECRET_VARIABLE, ClusterSecret
from csps.services.settings.devices import resolve_device
from csps.services.settings.settings import Settings

SIZES = (8, 1_024, 16_384, 262_144, 1_048_576, 4_194_304, 16_777_216)
QUICK_SIZES = (8, 65_536, 4_194_304)
ROUNDS = 20
PAIR_S = 120.0
"""Limit for a pair to be measured, and for all ranks to start."""
LOOPBACK = "127.0.0.1"
RecordPair = Callable[[int, int, dict[int, float]], None]
"""Function that takes sender, receiver, and seconds by size."""


class LinkProbe(Protocol):
    """Process of a rank that takes part in measuring."""

    async def start(self, gpu: int, arguments: Sequence[str]) -> None:
        """Start the process.

        Args:
            gpu: index of the GPU on its machine, if ranks have GPUs.
            arguments: arguments of `csps.actors.link_probe`, without the device.
        """
        ...

    async def line(self) -> str:
        """Return its next line; empty when it has ended."""
        ...

    async def stop(self) -> None:
        """End the process."""
        ...


class LocalLinkProbe:
    """Probe on this machine."""

    def __init__(self, device: str, num_gpus: float, secret: ClusterSecret) -> None:
        """Create a probe that has not started.

        Args:
            device, num_gpus: as in the settings; this machine resolves `auto`.
            secret: the same for all probes that measure together.
        """
        self._device, self._num_gpus, self._secret = device, num_gpus, secret
        self._process: Process | None = None

    async def start(self, gpu: int, arguments: Sequence[str]) -> None:
        device = resolve_device(self._device, self._num_gpus)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "csps.actors.link_probe", *arguments, device),
            stdout=PIPE,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": str(gpu),
                SECRET_VARIABLE: self._secret.value.hex(),
            },
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
    probes: Sequence[LinkProbe],
    hosts: Sequence[str],
    sizes: tuple[int, ...],
    record_pair: RecordPair,
) -> None:
    """Measure the seconds of a message of each size, one way, for one pair of ranks after another.

    They are medians. Half of the shortest round trip is subtracted for the way back.

    Args:
        hosts: the interface that each probe listens on.
        record_pair: called for each pair once it was measured.

    Raises:
        FaultError: a probe failed.
        DeadlineExceeded: a probe does not answer in time.
    """
    try:
        await _start(probes, hosts, sizes)
        for sender, receiver in combinations(range(len(probes)), 2):
            rounds = [statistics.median(load) for load in json.loads(await _line(probes, receiver))]
            one_way = [seconds - min(rounds) / 2 for seconds in rounds]
            record_pair(sender, receiver, dict(zip(sizes, one_way, strict=True)))
    finally:
        await asyncio.gather(*(probe.stop() for probe in probes))


async def _start(probes: Sequence[LinkProbe], hosts: Sequence[str], sizes: tuple[int, ...]) -> None:
    options = (",".join(map(str, sizes)), str(ROUNDS))
    store = "-"
    for rank, (probe, host) in enumerate(zip(probes, hosts, strict=True)):
        gpu = hosts[:rank].count(host)
        await probe.start(gpu, (str(rank), str(len(probes)), host, store, *options))
        if rank == 0:
            store = json.loads(await _line(probes, 0))


async def _line(probes: Sequence[LinkProbe], rank: int) -> str:
    try:
        async with asyncio.timeout(PAIR_S):
            line = await probes[rank].line()
    except TimeoutError:
        raise DeadlineExceeded("measuring a link", PAIR_S) from None
    if not line:
        raise FaultError(f"the link probe of rank {rank} has ended")
    return line


def ranks_here(settings: Settings) -> list[str]:
    """Return Rack-Server-GPU ids of the ranks that compute prompts on one server, the first.

    If a server has one rank, return two, as of two instances.
    """
    named = settings.topology.of(settings.prefilling_role)
    if not named:
        return [f"0-0-{rank}" for rank in range(max(2, settings.prefilling.ranks))]
    servers = [place.rpartition("-")[0] for place in named]
    here = [place for place, server in zip(named, servers, strict=True) if server == servers[0]]
    return here if len(here) > 1 else [f"{servers[0]}-{rank}" for rank in range(2)]
