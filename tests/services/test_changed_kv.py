"""Corrupted KV is never decoded if checksums are on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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
from csps.protocols.core.errors import TransferError
from csps.protocols.gang.members import GangRole
from csps.services.requests.request_handle import RequestHandle
from csps.services.router.service import RequestService

PROMPT = prompt_of(40, 1).tolist()
WORDS = 6


class Wire:
    """Flips a bit of some messages on their way from sender to receiver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.to_spoil = 0
        """Messages still to be corrupted."""
        self.spoilt: set[int] = set()
        """Attempts of which a message was corrupted."""
        send = KvConnection.send

        def changed(end: KvConnection, peer: int, header: KvHeader, body: KvBody) -> Pending:
            if self.to_spoil and header.sequence_id not in self.spoilt:
                self.to_spoil -= 1
                self.spoilt.add(header.sequence_id)
                body = replace(body, v=body.v.clone())
                body.v.view(torch.int32).view(-1)[7] ^= 1 << 30
            return send(end, peer, header, body)

        monkeypatch.setattr(KvConnection, "send", changed)


@asynccontextmanager
async def served(model: Path, folder: Path) -> AsyncIterator[RequestService]:
    def plan(role: GangRole) -> GangPlan:
        return GangPlan(model_dir=str(model), role=role, instances=2, kv_checksum=1.0)

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
