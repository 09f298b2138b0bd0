"""Corrupted KV is never decoded if checksums are on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cluster_waits import linked
from gang_driver import ANSWER_S, START_S, GangPlan, prompt_of
from gang_threads import eventually, thread_gang
from router_process import greedy, make_router
from tiny_checkpoints import reference_tokens

from csps.actors.comm.process_group import Pending
from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.kv_transfer.message import KvBody, KvHeader
from csps.models.network.spec import read_spec
from csps.protocols.core.errors import TransferError
from csps.protocols.gang.members import GangRole
from csps.services.requests.request_handle import RequestHandle
from csps.services.router.service import RequestService
from csps.services.settings.settings import KvTransferSettings

PROMPT = prompt_of(40, 1).tolist()
WORDS = 6
RANKS = 2
"""Ranks of each gang."""


class Wire:
    """Flips a bit of some messages on their way from sender to receiver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.to_spoil = 0
        """Messages still to be corrupted."""
        self.spoilt: set[int] = set()
        """Attempts of which a message was corrupted."""
        self.broken = False
        """Corrupts every message, by so little that answers are still answers."""
        send = KvConnection.send

        def changed(end: KvConnection, peer: int, header: KvHeader, body: KvBody) -> Pending:
            once = self.to_spoil and header.sequence_id not in self.spoilt
            if once or self.broken:
                self.to_spoil -= bool(once)
                self.spoilt.add(header.sequence_id)
                body = replace(body, v=body.v.clone())
                body.v.view(torch.int32).view(-1)[7] ^= 1 << 30 if once else 1
            return send(end, peer, header, body)

        monkeypatch.setattr(KvConnection, "send", changed)


@asynccontextmanager
async def served(model: Path, folder: Path, checked: float = 1.0) -> AsyncIterator[RequestService]:
    def plan(role: GangRole) -> GangPlan:
        return GangPlan(model_dir=str(model), role=role, instances=RANKS, kv_checksum=checked)

    async with thread_gang(plan("prefill")) as prefill, thread_gang(plan("decode")) as decode:
        cluster, service = make_router(prefill.members, decode.members, folder / "generations")
        await service.start()
        try:
            await linked(cluster, START_S)
            yield service
            for gang in (prefill, decode):
                for rank in gang.ranks:
                    await eventually(lambda pool=rank.engine.pool: not pool.slots.used)
        finally:
            await service.close(0.0)


async def answer(handle: RequestHandle) -> list[int]:
    async with asyncio.timeout(ANSWER_S):
        return [token.token async for token in handle]


async def test_an_attempt_whose_kv_was_changed_is_repeated(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(monkeypatch)
    async with served(tiny_llama, tmp_path) as service:
        wire.to_spoil = 2
        assert await answer(greedy(service, PROMPT, WORDS)) == reference_tokens(
            tiny_llama, PROMPT, WORDS
        )
        assert len(wire.spoilt) == 2


async def test_a_request_whose_kv_is_changed_every_time_fails(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(monkeypatch)
    async with served(tiny_llama, tmp_path) as service:
        wire.to_spoil = 1000
        with pytest.raises(TransferError, match="was changed on its way"):
            await answer(greedy(service, PROMPT, WORDS))
        assert len(wire.spoilt) == 3
        wire.to_spoil = 0
        assert await answer(greedy(service, PROMPT, WORDS)) == reference_tokens(
            tiny_llama, PROMPT, WORDS
        )


async def test_a_link_that_changes_everything_is_found_by_default(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of each sender's messages to a receiver is compared: one of the first ten."""
    wire, by_default = Wire(monkeypatch), KvTransferSettings().checksum
    assert 0 < by_default < 1
    async with served(tiny_llama, tmp_path, by_default) as service:
        wire.broken = True
        attempts, layers = 1, read_spec(tiny_llama).layers
        for _ in range(RANKS * RANKS * 10 // layers + 1):
            handle = greedy(service, PROMPT, WORDS)
            with suppress(TransferError):
                await answer(handle)
            attempts = max(attempts, handle.timings.attempts)
        assert attempts > 1
        wire.broken = False
        assert await answer(greedy(service, PROMPT, WORDS)) == reference_tokens(
            tiny_llama, PROMPT, WORDS
        )
