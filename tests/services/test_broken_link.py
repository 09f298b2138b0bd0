"""The KV-transfer connection breaks between two living gangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from broken_sockets import break_between
from gang_cell import ANSWER_S, START_S, GangPlan, prompt_of
from gang_processes import ProcessGang
from gang_threads import eventually
from linked import linked
from router_process import greedy, make_router
from tiny_checkpoints import reference_tokens

from csps.services.cluster.attachment import Cluster
from csps.services.router.running import Running
from csps.services.router.service import RequestService

PROMPT = prompt_of(40, 1).tolist()
LONG = prompt_of(600, 2).tolist()
"""For both prefill ranks."""


@asynccontextmanager
async def served(model: Path, folder: Path) -> AsyncIterator[tuple[Cluster, RequestService]]:
    gangs = [
        ProcessGang(GangPlan(model_dir=str(model), role=role, instances=2, kv_slots=20_000))
        for role in ("prefill", "decode")
    ]
    try:
        prefill, decode = await asyncio.gather(*(gang.start() for gang in gangs))
        cluster, service = make_router(prefill, decode, folder / "generations")
        await service.start()
        try:
            await linked(cluster, START_S)
            yield cluster, service
        finally:
            await service.close(0.0)
    finally:
        for gang in gangs:
            gang.close()


async def answer(running: Running) -> list[int]:
    async with asyncio.timeout(ANSWER_S):
        return [token.token async for token in running]


async def test_a_broken_link_is_noticed_and_made_anew_while_decoding_goes_on(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with served(tiny_llama, tmp_path) as (cluster, service):
        decoding = greedy(service, PROMPT, 16_000)
        await anext(decoding)
        await anext(decoding)
        link = cluster.link
        assert link is not None
        pids = [[it.pid for it in gang.descriptions] for gang in (link.prefill, link.decode)]
        stores = [gang.descriptions[0].store_port for gang in (link.prefill, link.decode)]
        assert break_between(*pids, keep=stores) == 4, "from each rank to each"
        await eventually(lambda: cluster.link is not link)
        again = greedy(service, LONG, 6)
        assert await answer(again) == reference_tokens(tiny_llama, LONG, 6)
        assert cluster.link is not None
        assert cluster.link.prefill is link.prefill
        assert cluster.link.decode is link.decode
        assert cluster.link.epoch != link.epoch
        drawn = decoding.timings.tokens
        await eventually(lambda: decoding.timings.tokens > drawn)
        decoding.cancel()
        await eventually(lambda: not service.counts.decode_kv)
        service.check_integrity()
        service.check_health()
