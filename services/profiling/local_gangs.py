"""Run a prefill gang and a decode gang as child processes, without Ray, step by step.

`open_local_gangs` starts `RankProcesses` for both, and yields `LocalGangs`, which commands them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from csps.actors.worker.rank_config import RankConfig
from csps.protocols.core.errors import DeadlineExceeded, FaultError
from csps.protocols.gang.client import GangClient, together
from csps.protocols.gang.members import GangMembers, GangRole, RankAddress
from csps.protocols.gang.messages import (
    CancelSequence,
    ConnectKv,
    PrefillDone,
    RankKvReceived,
    RequestFailed,
    SampledTokens,
    SlotsFreed,
)
from csps.protocols.rpc.schema import pack, unpack
from csps.services.planning.memory import kv_slots, window_slots
from csps.services.settings.devices import resolve_device
from csps.services.settings.settings import Settings

_log = logging.getLogger(__name__)

START_S = 300.0
"""Limit for a rank to load its weights and find the others."""
END_S = 10.0
"""Time for a rank to end after its standard input has; then it is killed."""


class RankProcesses:
    """One gang whose ranks are processes that end with this one."""

    def __init__(self) -> None:
        self._processes: list[Process] = []

    async def start(self, configs: Sequence[RankConfig], secret: bytes) -> GangMembers:
        """Start all ranks and wait until the gang has formed.

        Args:
            configs: configurations of the ranks, in order.

        Raises:
            FaultError: a rank ended.
            DeadlineExceeded: a rank does not start in time.
        """
        first = await self._spawn({**vars(configs[0])}, secret)
        # Rank 0 hosts the gang's store and prints its address before it waits for the others.
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
            # Ctrl-C must reach only this process, which then ends the ranks.
            start_new_session=True,
        )
        _log.debug("started rank %s of %s: pid %d", fields["rank"], fields["gang_id"], process.pid)
        self._processes.append(process)
        return process

    async def close(self) -> None:
        """End all ranks."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        await asyncio.gather(*map(_end, self._processes))


async def _fact(process: Process) -> dict[str, Any]:
    """Return the next JSON line of a rank."""
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


CALL_S = 60.0
"""Limit for the ranks of both gangs to answer, and to connect to each other."""
STEP_S = 600.0
"""Limit for one step, or for the transfer of a batch's KV."""


class LocalGangs:
    """Two gangs and their notifications. Create it with `open_local_gangs`."""

    def __init__(self) -> None:
        self.prefill: GangClient
        self.decode: GangClient
        self.epoch = f"profile-{secrets.token_hex(4)}"
        self.first_tokens: dict[int, int] = {}
        """Token sampled at the end of prefill, by sequence."""
        self.generated: Counter[int] = Counter()
        """Number of tokens decoded, by sequence."""
        self.done: Counter[int] = Counter()
        """Number of ranks that finished, by step."""
        self.received: Counter[int] = Counter()
        """Number of ranks that have received their KV slice, by sequence."""
        self.freed: Counter[int] = Counter()
        """Number of decode ranks that have freed all slots, by sequence."""
        self.ids = itertools.count(1)
        """Ids of steps and sequences; each only has to be new."""
        self._failure = ""
        self._changed = asyncio.Event()

    async def attach(self, prefill: GangMembers, decode: GangMembers, secret: bytes) -> None:
        """Attach to both gangs and connect them to each other."""
        self.prefill = GangClient("prefill", prefill, self._notified, deadline_s=CALL_S)
        self.decode = GangClient("decode", decode, self._notified, deadline_s=CALL_S)
        gangs = (self.prefill, self.decode)
        for gang in gangs:
            gang.lost.add_done_callback(lambda _: self._changed.set())
        await together(gang.connect(secret=secret, router_id="profile") for gang in gangs)
        await together(gang.attach(generation=1) for gang in gangs)
        store = self.decode.descriptions[0]
        connection = pack(
            ConnectKv(
                epoch=self.epoch,
                store_host=store.store_host,
                store_port=store.store_port,
                prefill_ranks=self.prefill.world_size,
                decode_ranks=self.decode.world_size,
                prefill_tp=self.prefill.tp,
                decode_tp=self.decode.tp,
            )
        )
        await together(gang.call_all("connect_kv", connection) for gang in gangs)

    async def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until notifications make a condition true.

        Raises:
            FaultError: a rank failed, or was lost.
            DeadlineExceeded: the condition is not true in time; `what` names it.
        """
        try:
            async with asyncio.timeout(STEP_S):
                while not condition():
                    self._check()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(what, STEP_S) from None

    def _check(self) -> None:
        lost = [gang.lost.result() for gang in (self.prefill, self.decode) if gang.lost.done()]
        if self._failure or lost:
            raise FaultError(self._failure or lost[0])

    async def cancel_requests(self, sequence_ids: Sequence[int]) -> None:
        """Make both gangs free the slots of sequences, and wait until they have."""
        for sequence_id in sequence_ids:
            cancel = pack(CancelSequence(sequence_id=sequence_id))
            self.prefill.notify_all("cancel", cancel)
            self.decode.notify_all("cancel", cancel)
        await self.wait_freed(sequence_ids)
        await self.prefill.stats()  # answered after it has handled the cancels

    async def wait_freed(self, sequence_ids: Sequence[int]) -> None:
        """Wait until no decode rank has slots of these sequences."""
        ranks = self.decode.world_size
        await self.wait_until(
            lambda: all(self.freed[sequence_id] >= ranks for sequence_id in sequence_ids),
            "freeing of slots",
        )

    def _notified(self, _gang: GangClient, _rank: int, method: str, payload: Any) -> None:
        match method:
            case "tokens":
                self._count_tokens(unpack(SampledTokens, payload))
            case "prefill_done":
                self.done[unpack(PrefillDone, payload).step_id] += 1
            case "received":
                self.received[unpack(RankKvReceived, payload).sequence_id] += 1
            case "freed":
                self.freed[unpack(SlotsFreed, payload).sequence_id] += 1
            case "failed":
                failure = unpack(RequestFailed, payload)
                self._failure = f"rank {failure.rank}: {failure.code}: {failure.message}"
        self._changed.set()

    def _count_tokens(self, frame: SampledTokens) -> None:
        for sequence_id, index, token in zip(
            frame.sequence_ids, frame.indices, frame.tokens, strict=True
        ):
            if index == 0:
                self.first_tokens[sequence_id] = token
            else:
                self.generated[sequence_id] += 1


@asynccontextmanager
async def open_local_gangs(settings: Settings) -> AsyncIterator[LocalGangs]:
    """Start both gangs as the settings describe them; end them with the block.

    Raises:
        FaultError: a rank does not start.
    """
    secret = secrets.token_hex(16).encode()
    prefill, decode, gangs = RankProcesses(), RankProcesses(), LocalGangs()
    try:
        prefill_members, decode_members = await together(
            processes.start(_rank_configs(role, settings), secret)
            for role, processes in _by_role(prefill, decode)
        )
        await gangs.attach(prefill_members, decode_members, secret)
        yield gangs
        await together(gang.close() for gang in (gangs.prefill, gangs.decode))
    finally:
        await asyncio.gather(prefill.close(), decode.close())


def _by_role(
    prefill: RankProcesses, decode: RankProcesses
) -> tuple[tuple[GangRole, RankProcesses], ...]:
    return ("prefill", prefill), ("decode", decode)


def _rank_configs(role: GangRole, settings: Settings) -> list[RankConfig]:
    """Return configurations as Serve's replicas get them, all on one server. Of an elastic gang,
    each role gets its own gang."""
    section = settings.decoding if role == "decode" else settings.prefilling
    configured = settings.decoding_role if role == "decode" else settings.prefilling_role
    gang_id = f"{role}-{secrets.token_hex(4)}"
    # On GPUs the rank's location is its GPU's; the decode gang's GPUs follow the prefill gang's.
    first = settings.prefilling.ranks if role == "decode" else 0
    return [
        RankConfig(
            model_dir=str(settings.model_dir),
            model_overrides=settings.model_overrides,
            role=role,
            rank=rank,
            world_size=section.ranks,
            tp=section.tp,
            gang_id=gang_id,
            kv_slots=kv_slots(configured, settings),
            window_slots=window_slots(configured, settings),
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            weight_dtype=settings.weight_dtype,
            device=resolve_device(settings.device, section.num_gpus),
            threads=section.threads,
            location=f"0-0-{first + rank}",
            max_positions=settings.max_positions,
            kv_in_flight_bytes=settings.kv_transfer.in_flight_bytes,
            kv_receiving_backends=settings.kv_transfer.receiving_backends,
            kv_checksum=settings.kv_transfer.checksum,
            quantum_ms=settings.quantum_ms,
        )
        for rank in range(section.ranks)
    ]
