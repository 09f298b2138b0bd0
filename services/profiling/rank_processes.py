"""The ranks of a gang as child processes, without Ray."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from csps.actors.rank_config import RankConfig
from csps.protocols.errors import DeadlineExceeded, FaultError
from csps.protocols.gang_members import GangMembers, RankAddress

START_S = 300.0
"""For a rank to load its weights and find the others."""
END_S = 10.0
"""For a rank to end by itself when its standard input does; then it is killed."""


class RankProcesses:
    """One gang, every rank of it a process that ends with this one."""

    def __init__(self) -> None:
        self._processes: list[Process] = []

    async def start(self, configs: Sequence[RankConfig], secret: bytes) -> GangMembers:
        """Start all ranks and wait until the gang has formed.

        Args:
            configs: of the ranks, in order.

        Raises:
            FaultError: a rank ended.
            DeadlineExceeded: it takes too long.
        """
        first = await self._spawn({**vars(configs[0])}, secret)
        # Rank 0 hosts the gang's store and says where before it waits for the others.
        store = (await _fact(first))["store"]
        for config in configs[1:]:
            await self._spawn({**vars(config), "store": store}, secret)
        facts = [await _fact(process) for process in self._processes]
        return GangMembers(
            gang_id=configs[0].gang_id,
            ranks=tuple(
                RankAddress(rank=rank, host=fact["rpc"][0], port=fact["rpc"][1])
                for rank, fact in enumerate(facts)
            ),
        )

    async def _spawn(self, fields: dict[str, Any], secret: bytes) -> Process:
        environment = {
            **os.environ,
            "CSPS_CLUSTER_SECRET": secret.decode(),
            "OMP_NUM_THREADS": str(fields["threads"]),
        }
        if fields["device"] == "cuda":
            environment["CUDA_VISIBLE_DEVICES"] = fields["location"].rpartition("-")[2]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "csps.actors.host_rank", json.dumps(fields)),
            stdin=PIPE,
            stdout=PIPE,
            env=environment,
            # Ctrl-C is for this process, which then ends them.
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    async def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        await asyncio.gather(*map(_end, self._processes))


async def _fact(process: Process) -> dict[str, Any]:
    """What a rank says next."""
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
    except TimeoutError:
        raise DeadlineExceeded(f"start of rank process {process.pid}", START_S) from None
    if not line:
        raise FaultError(f"rank process {process.pid} ended with status {await process.wait()}")
    fact: dict[str, Any] = json.loads(line)
    return fact


async def _end(process: Process) -> None:
    try:
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
