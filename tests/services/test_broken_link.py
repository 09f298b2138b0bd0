"""The KV-transfer connection breaks between two living gangs.

`break_between` shuts connections of other processes down, as a network does: neither process is
asked.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from cluster_waits import linked
from gang_driver import ANSWER_S, START_S, GangPlan, prompt_of
from gang_processes import ProcessGang
from gang_threads import eventually
from router_process import greedy, make_router
from tiny_checkpoints import reference_tokens

from csps.services.cluster.attachment import Cluster
from csps.services.requests.request_handle import RequestHandle
from csps.services.router.service import RequestService

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def break_between(ones: Sequence[int], others: Sequence[int], *, keep: Sequence[int]) -> int:
    """Shut down all TCP connections between two sets of processes; return their number.

    Args:
        keep: ports whose connections stay.
    """
    theirs = {
        (connection.laddr, connection.raddr) for pid in others for connection in _connections(pid)
    }
    broken = 0
    for pid in ones:
        for connection in _connections(pid):
            if (connection.raddr, connection.laddr) in theirs and not {
                connection.laddr.port,
                connection.raddr.port,
            } & set(keep):
                _shut_down(pid, connection.fd)
                broken += 1
    return broken


def _connections(pid: int) -> Iterator[psutil._common.pconn]:
    found = psutil.Process(pid).net_connections("tcp")
    return (connection for connection in found if connection.status == psutil.CONN_ESTABLISHED)


def _shut_down(pid: int, fd: int) -> None:
    """Shut a socket down; that also ends it for the process that owns it."""
    process = os.pidfd_open(pid)
    try:
        copied = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), "pidfd_getfd")
        with socket.socket(fileno=copied) as shared:
            shared.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(process)


PROMPT = prompt_of(40, 1).tolist()
LONG = prompt_of(600, 2).tolist()
"""Prompt length that needs both prefill ranks."""


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


async def answer(handle: RequestHandle) -> list[int]:
    async with asyncio.timeout(ANSWER_S):
        return [token.token async for token in handle]


async def test_a_broken_link_is_reconnected_while_decoding_continues(
    tiny_llama: Path, tmp_path: Path
) -> None:
    async with served(tiny_llama, tmp_path) as (cluster, service):
        decoding = greedy(service, PROMPT, 16_000)
        await anext(decoding)
        await anext(decoding)
        link = cluster.link
        assert link is not None
        pids = [
            [description.pid for description in gang.descriptions]
            for gang in (link.prefill, link.decode)
        ]
        stores = [gang.descriptions[0].store_port for gang in (link.prefill, link.decode)]
        assert break_between(*pids, keep=stores) == 4, "from each rank to each"
        await eventually(lambda: cluster.link is not link)
        again = greedy(service, LONG, 6)
        assert await answer(again) == reference_tokens(tiny_llama, LONG, 6)
        assert cluster.link is not None
        assert cluster.link.prefill is link.prefill
        assert cluster.link.decode is link.decode
        assert cluster.link.epoch != link.epoch
        generated = decoding.timings.tokens
        await eventually(lambda: decoding.timings.tokens > generated)
        decoding.cancel()
        await eventually(lambda: not service.counts.decode_kv)
        service.check_integrity()
        service.check_health()
