"""Ranks in processes of their own, for what only a process can do: die, and compute in parallel."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gang_driver import SECRET, Cell, GangPlan, in_threads, members_of

from csps.actors.comm.rendezvous import StoreAddress
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.members import GangMembers

EXIT_S = 60.0
HOST = ("-m", "csps.actors.host_rank")


class RankProcess:
    """`python -m csps.actors.host_rank`, with the same life as a `Rank`."""

    def __init__(
        self,
        fields: dict[str, Any],
        store: StoreAddress | None = None,
        host: Sequence[str] = HOST,
    ) -> None:
        """Start the interpreter; a rank without a store hosts one, and that is rank 0.

        Args:
            host: what the interpreter runs, before the configuration.
        """
        if store is not None:
            fields = {**fields, "store": [store.host, store.port]}
        self.process = subprocess.Popen(
            [sys.executable, *host, json.dumps(fields)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CSPS_CLUSTER_SECRET": SECRET.decode(), "OMP_NUM_THREADS": "1"},
        )

    def store(self) -> StoreAddress:
        """Wait for the address of the store that rank 0 hosts."""
        return StoreAddress(*self._read_line()["store"])

    def start(self) -> tuple[str, int]:
        """Wait for the rank to be up; returns its RPC address."""
        host, port = self._read_line()["rpc"]
        return host, port

    def _read_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"rank process {self.process.pid} ended with {self.process.wait(EXIT_S)}"
        fact: dict[str, Any] = json.loads(line)
        return fact

    def stop(self) -> None:
        """Stop the process; its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continue after `stop`."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, without a word to anyone."""
        self.process.kill()
        self.process.wait(EXIT_S)

    def end(self) -> int:
        """Close its standard input, which asks it to end; returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(EXIT_S)

    def close(self) -> None:
        """Make sure that it is gone."""
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class ProcessGang:
    """One gang, every rank of it a process."""

    def __init__(self, plan: GangPlan, host: Sequence[str] = HOST) -> None:
        self.plan, self._host = plan, host
        self._ranks = [RankProcess(plan.rank_fields(0), host=host)]

    async def start(self) -> GangMembers:
        """Start the other ranks; returns where all answer."""
        [store] = await in_threads([self._ranks[0].store])
        for rank in range(1, self.plan.instances * self.plan.tp):
            self._ranks.append(RankProcess(self.plan.rank_fields(rank), store, self._host))
        addresses = await in_threads([rank.start for rank in self._ranks])
        return members_of(self.plan, addresses)

    @property
    def process_ids(self) -> list[int]:
        """Return the processes of all ranks, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    async def end(self) -> None:
        """Let all ranks end by themselves, as they do when they have said all."""
        await in_threads([rank.end for rank in self._ranks])

    def close(self) -> None:
        """End all ranks."""
        for member in self._ranks:
            member.close()


@asynccontextmanager
async def attached_processes(*plans: GangPlan) -> AsyncIterator[tuple[Cell, list[GangClient]]]:
    """Yield gangs that start together, and the cell that is attached to them."""
    gangs = [ProcessGang(plan) for plan in plans]
    try:
        started = await asyncio.gather(*(gang.start() for gang in gangs))
        cell = Cell()
        attaching = (
            cell.attach(members, plan.role) for members, plan in zip(started, plans, strict=True)
        )
        yield cell, await asyncio.gather(*attaching)
    finally:
        for gang in gangs:
            gang.close()


@asynccontextmanager
async def process_cell(
    model_dir: Path, *, prefill: int, decode: int, kv_slots: int = 65_536
) -> AsyncIterator[Cell]:
    """Yield two gangs of so many instances, attached and connected."""
    plans = [
        GangPlan(model_dir=str(model_dir), role="prefill", instances=prefill, kv_slots=kv_slots),
        GangPlan(model_dir=str(model_dir), role="decode", instances=decode, kv_slots=kv_slots),
    ]
    async with attached_processes(*plans) as (cell, gangs):
        cell.prefill, cell.decode = gangs
        await cell.connect()
        yield cell
        await cell.disconnect()
