"""Gangs whose connections to the router and to the rendezvous store are encrypted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from certificates import Authority
from cluster_waits import linked
from gang_driver import ANSWER_S, SECRET, GangPlan, prompt_of
from gang_threads import eventually, thread_gang
from router_process import greedy, make_router
from tiny_checkpoints import reference_tokens

from csps.actors.comm.rendezvous import join_store
from csps.protocols.core.errors import FaultError
from csps.protocols.rpc.tls import Tls, TlsFiles
from csps.services.cluster.attachment import Cluster

PROMPT = prompt_of(600, 1).tolist()
"""Long enough for both prefill ranks."""


@pytest.fixture
def files(tmp_path: Path) -> TlsFiles:
    return Authority(tmp_path).issue()


def plan(model: Path, role: str, files: TlsFiles) -> GangPlan:
    return GangPlan(model_dir=str(model), role=role, instances=2, tls=files)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_tokens_are_those_of_the_reference_and_strangers_stay_out(
    tiny_llama: Path, tmp_path: Path, files: TlsFiles
) -> None:
    expected = reference_tokens(tiny_llama, PROMPT, 8)
    async with (
        thread_gang(plan(tiny_llama, "prefill", files)) as prefill,
        thread_gang(plan(tiny_llama, "decode", files)) as decode,
    ):
        gangs = prefill.members, decode.members
        cluster, service = make_router(*gangs, tmp_path / "generations", Tls.load(files))
        await service.start()
        try:
            await linked(cluster, ANSWER_S)
            async with asyncio.timeout(ANSWER_S):
                answer = [token.token async for token in greedy(service, PROMPT, 8)]
            assert answer == expected
        finally:
            await service.close(0.0)

        knows_the_secret = Authority(tmp_path, "strangers").issue()
        for stranger in (None, Tls.load(knows_the_secret)):
            cluster, service = make_router(*gangs, tmp_path / "others", stranger)
            await service.start()
            try:
                await eventually(lambda cluster=cluster: _refused(cluster))  # type: ignore[misc]
                assert cluster.link is None
            finally:
                await service.close(0.0)
            with pytest.raises(FaultError):
                await asyncio.to_thread(join_store, decode.hosted.address, SECRET, stranger)


def _refused(cluster: Cluster) -> bool:
    return "closed the connection" in cluster.trouble or "cannot connect" in cluster.trouble
