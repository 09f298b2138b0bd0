"""A prefill gang and a decode gang of one's own, commanded step by step."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from csps.actors.rank_config import RankConfig
from csps.protocols.errors import DeadlineExceeded, FaultError
from csps.protocols.gang_client import GangClient, together
from csps.protocols.gang_members import GangMembers, GangRole
from csps.protocols.messages import (
    CancelRequest,
    ConnectKv,
    KvLanded,
    PrefillDone,
    RequestFailed,
    SlotsFreed,
)
from csps.protocols.schema import pack, unpack
from csps.protocols.tokens import Tokens
from csps.services.cluster.gangs import resolve_device
from csps.services.launch.settings import Settings
from csps.services.profiling.rank_processes import RankProcesses

CALL_S = 60.0
"""For the ranks of both gangs to answer, and to connect to each other."""
STEP_S = 600.0
"""For one step, or for the KV of a batch to land."""


class Cell:
    """Two gangs, and what they have said. Make it with `open_cell`."""

    def __init__(self) -> None:
        self.prefill: GangClient
        self.decode: GangClient
        self.epoch = f"profile-{secrets.token_hex(4)}"
        self.first_tokens: dict[int, int] = {}
        """Drawn at the end of prefill, by request."""
        self.drawn: Counter[int] = Counter()
        """Tokens drawn by decoding, by request."""
        self.done: Counter[int] = Counter()
        """Ranks that are done, by job."""
        self.landed: Counter[int] = Counter()
        """Ranks that have their part of the KV, by request."""
        self.freed: Counter[int] = Counter()
        """Decode ranks that hold nothing any more, by request."""
        self.numbers = itertools.count(1)
        """Of jobs and requests: each only has to be new."""
        self._failure = ""
        self._news = asyncio.Event()

    async def attach(self, prefill: GangMembers, decode: GangMembers, secret: bytes) -> None:
        """Take both gangs over and connect them to each other."""
        self.prefill = GangClient("prefill", prefill, self._hear, deadline_s=CALL_S)
        self.decode = GangClient("decode", decode, self._hear, deadline_s=CALL_S)
        gangs = (self.prefill, self.decode)
        for gang in gangs:
            gang.lost.add_done_callback(lambda _: self._news.set())
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

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the ranks have said so.

        Raises:
            FaultError: a rank failed, or is gone.
            DeadlineExceeded: they did not say so in time.
        """
        try:
            async with asyncio.timeout(STEP_S):
                while not condition():
                    self._check()
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise DeadlineExceeded(what, STEP_S) from None

    def _check(self) -> None:
        lost = [gang.lost.result() for gang in (self.prefill, self.decode) if gang.lost.done()]
        if self._failure or lost:
            raise FaultError(self._failure or lost[0])

    async def forget(self, rids: Sequence[int]) -> None:
        """Make both gangs give back what they hold of requests."""
        for rid in rids:
            cancel = pack(CancelRequest(rid=rid))
            self.prefill.notify_all("cancel", cancel)
            self.decode.notify_all("cancel", cancel)
        await self.freed_everywhere(rids)
        await self.prefill.stats()  # answered after the cancellations

    async def freed_everywhere(self, rids: Sequence[int]) -> None:
        """Wait until no decode rank holds anything of requests."""
        ranks = self.decode.world_size
        await self.until(lambda: all(self.freed[rid] >= ranks for rid in rids), "freeing of slots")

    def _hear(self, _gang: GangClient, _rank: int, method: str, payload: Any) -> None:
        match method:
            case "tokens":
                self._drawn(unpack(Tokens, payload))
            case "prefill_done":
                self.done[unpack(PrefillDone, payload).job_id] += 1
            case "landed":
                self.landed[unpack(KvLanded, payload).rid] += 1
            case "freed":
                self.freed[unpack(SlotsFreed, payload).rid] += 1
            case "failed":
                failure = unpack(RequestFailed, payload)
                self._failure = f"rank {failure.rank}: {failure.code}: {failure.message}"
        self._news.set()

    def _drawn(self, frame: Tokens) -> None:
        for rid, index, token in zip(frame.rids, frame.indices, frame.tokens, strict=True):
            if index == 0:
                self.first_tokens[rid] = token
            else:
                self.drawn[rid] += 1


@asynccontextmanager
async def open_cell(settings: Settings) -> AsyncIterator[Cell]:
    """Start both gangs as the settings describe them; they end with the block.

    Raises:
        FaultError: a rank does not start.
    """
    secret = secrets.token_hex(16).encode()
    prefill, decode, cell = RankProcesses(), RankProcesses(), Cell()
    try:
        prefill_members, decode_members = await together(
            processes.start(_rank_configs(role, settings), secret)
            for role, processes in _by_role(prefill, decode)
        )
        await cell.attach(prefill_members, decode_members, secret)
        yield cell
        await together(gang.close() for gang in (cell.prefill, cell.decode))
    finally:
        await asyncio.gather(prefill.close(), decode.close())


def _by_role(
    prefill: RankProcesses, decode: RankProcesses
) -> tuple[tuple[GangRole, RankProcesses], ...]:
    return ("prefill", prefill), ("decode", decode)


def _rank_configs(role: GangRole, settings: Settings) -> list[RankConfig]:
    """As Serve's replicas are told, all on one server; of an elastic gang, each half by itself."""
    section = settings.decoding if role == "decode" else settings.prefilling
    gang_id = f"{role}-{secrets.token_hex(4)}"
    # On GPUs a rank's number is that of its GPU; the decode gang's come after the prefill gang's.
    first = settings.prefilling.ranks if role == "decode" else 0
    return [
        RankConfig(
            model_dir=str(settings.model_dir),
            role=role,
            rank=rank,
            world_size=section.ranks,
            tp=section.tp,
            gang_id=gang_id,
            kv_slots=section.kv_slots,
            dtype=settings.dtype,
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
