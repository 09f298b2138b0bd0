"""Real gangs in real processes, without Ray, and a small driver that stands in for the router.

The driver talks to the ranks directly, so that a test names every group, bound and placement
itself; the dispatcher has tests of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from csps.protocols import schema
from csps.protocols.messages import (
    Attach,
    CancelRequest,
    ConnectBridge,
    JoinBatch,
    KvShare,
    PrefillJob,
    PrefillPiece,
    RankDescription,
    RankStats,
    Reserve,
    Sampling,
    Span,
    TokenDrawn,
)
from csps.protocols.rpc_client import RpcClient

SECRET = b"only for tests"
START_S = 90.0
ANSWER_S = 60.0


@dataclass
class Gang:
    """Processes of one gang and a connection to each."""

    processes: list[subprocess.Popen[str]]
    clients: list[RpcClient]
    ranks: list[RankDescription]

    @property
    def tp(self) -> int:
        return self.ranks[0].tp


@dataclass
class Cell:
    """A prefill gang, a decode gang, and what they have said so far."""

    prefill: Gang
    decode: Gang
    said: asyncio.Condition = field(default_factory=asyncio.Condition)
    log: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    epoch: str = "test"
    jobs: int = 0

    def heard(self, method: str, payload: dict[str, Any]) -> None:
        self.log[method].append(payload)
        asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        async with self.said:
            self.said.notify_all()

    async def until(self, condition: Any) -> Any:
        """Wait until condition() is true; failures reported by ranks end the wait."""

        def met() -> bool:
            assert not self.log["failed"], self.log["failed"]
            return bool(condition())

        async with self.said:
            await asyncio.wait_for(self.said.wait_for(met), ANSWER_S)
        return condition()

    def tokens(self, rid: int) -> list[int]:
        drawn = [schema.unpack(TokenDrawn, m) for m in self.log["token"] if m["rid"] == rid]
        drawn.sort(key=lambda d: d.index)
        assert [d.index for d in drawn] == list(range(len(drawn)))
        return [d.token for d in drawn]

    def finished(self, rid: int) -> bool:
        return any(m["rid"] == rid and m["finish_reason"] for m in self.log["token"])

    async def connect(self, epoch: str = "test") -> None:
        self.epoch = epoch
        first = self.decode.ranks[0]
        message = schema.pack(
            ConnectBridge(
                epoch=epoch,
                store_host=first.store_host,
                store_port=first.store_port,
                prefill_ranks=len(self.prefill.ranks),
                decode_ranks=len(self.decode.ranks),
                prefill_tp=self.prefill.tp,
                decode_tp=self.decode.tp,
            )
        )
        clients = self.prefill.clients + self.decode.clients
        await asyncio.gather(
            *(client.call("connect_bridge", message, deadline_s=START_S) for client in clients)
        )

    async def reserve(self, request: Reserve) -> None:
        await asyncio.gather(
            *(
                client.call("reserve", schema.pack(request), deadline_s=ANSWER_S)
                for client in self.decode.clients
            )
        )

    def submit(self, job: PrefillJob, tokens: np.ndarray) -> None:
        """Send a job to every prefill rank, each with its own share of the tokens."""
        for client, rank in zip(self.prefill.clients, self.prefill.ranks, strict=True):
            instance, share = rank.rank // rank.tp, b""
            if instance in job.group:
                member = job.group.index(instance)
                share = tokens[job.bounds[member] : job.bounds[member + 1]].tobytes()
            client.notify("prefill", schema.pack(replace(job, tokens=share)))

    def next_job(self) -> int:
        self.jobs += 1
        return self.jobs

    async def prefilled(self, job_id: int) -> None:
        group = next(j for j in self.log["_jobs"] if j["job_id"] == job_id)["ranks"]
        await self.until(
            lambda: sum(m["job_id"] == job_id for m in self.log["prefill_done"]) == group
        )

    def cancel(self, rid: int) -> None:
        for client in self.prefill.clients + self.decode.clients:
            client.notify("cancel", schema.pack(CancelRequest(rid=rid)))

    async def stats(self) -> list[RankStats]:
        clients = self.prefill.clients + self.decode.clients
        answers = [await c.call("stats", None, deadline_s=ANSWER_S) for c in clients]
        return [schema.unpack(RankStats, answer) for answer in answers]

    async def used_slots(self) -> list[int]:
        return [stats.kv_used for stats in await self.stats()]

    async def generate(
        self,
        requests: Sequence[tuple[int, np.ndarray, Sampling]],
        *,
        group: Sequence[int],
        bounds: Sequence[int] | None = None,
        decode_shares: Sequence[Sequence[KvShare]],
        masters: Sequence[int],
    ) -> list[list[int]]:
        """One prefill job for all requests (rid, prompt, sampling), then decode to the end."""
        pieces = []
        for (rid, prompt, sampling), shares, master in zip(
            requests, decode_shares, masters, strict=True
        ):
            penalised = np.unique(prompt).astype("<i4").tobytes()
            await self.reserve(
                Reserve(
                    rid=rid,
                    epoch=self.epoch,
                    shares=tuple(shares),
                    master=master,
                    prompt_length=len(prompt),
                    sampling=sampling,
                    prompt_tokens=penalised,
                )
            )
            pieces.append(
                PrefillPiece(
                    rid=rid,
                    start=0,
                    length=len(prompt),
                    destinations=tuple(shares),
                    sampling=sampling,
                    prompt_tokens=penalised,
                )
            )
        tokens = np.concatenate([prompt for _, prompt, _ in requests]).astype("<i4")
        job = PrefillJob(
            job_id=self.next_job(),
            group=tuple(group),
            bounds=tuple(bounds or even_bounds(len(tokens), len(group))),
            pieces=tuple(pieces),
        )
        self.submit(job, tokens)
        for (rid, _, _), shares in zip(requests, decode_shares, strict=True):
            await self._join(rid, shares)
        for rid, _, _ in requests:
            await self.until(lambda rid=rid: self.finished(rid))
        return [self.tokens(rid) for rid, _, _ in requests]

    async def _join(self, rid: int, shares: Sequence[KvShare]) -> None:
        holders = {s.instance for s in shares if s.span.length}
        expected = len(holders) * self.decode.tp
        await self.until(lambda: sum(m["rid"] == rid for m in self.log["landed"]) == expected)
        await self.until(lambda: self.tokens(rid))
        if not self.finished(rid):
            join = JoinBatch(rid=rid, first_token=self.tokens(rid)[0])
            self.decode.clients[0].notify("join", schema.pack(join))


def even_bounds(total: int, parts: int) -> list[int]:
    return [index * total // parts for index in range(parts + 1)]


def even_shares(length: int, instances: Sequence[int]) -> list[KvShare]:
    bounds = even_bounds(length, len(instances))
    return [
        KvShare(instance=instance, span=Span(start=bounds[i], stop=bounds[i + 1]))
        for i, instance in enumerate(instances)
    ]


@asynccontextmanager
async def running_cell(
    model_dir: Path, *, prefill: int, decode: int, prefill_tp: int = 1, decode_tp: int = 1
) -> AsyncIterator[Cell]:
    """Gangs of so many instances, connected; ended by their own processes' pids."""
    started: list[subprocess.Popen[str]] = []
    cell: Cell | None = None

    def heard(method: str, payload: Any) -> None:
        assert cell is not None
        cell.heard(method, payload)

    try:
        gangs = await asyncio.gather(
            start_gang(model_dir, "prefill", prefill * prefill_tp, prefill_tp, started, heard),
            start_gang(model_dir, "decode", decode * decode_tp, decode_tp, started, heard),
        )
        cell = Cell(*gangs)
        await cell.connect()
        yield cell
        for client in cell.prefill.clients + cell.decode.clients:
            await client.close()
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


async def start_gang(
    model_dir: Path,
    role: str,
    ranks: int,
    tp: int,
    started: list[subprocess.Popen[str]],
    heard: Any,
    *,
    kv_slots: int = 65536,
    gang_id: str | None = None,
) -> Gang:
    """Start a gang's processes and attach to them."""
    fields = {
        "model_dir": str(model_dir),
        "role": role,
        "world_size": ranks,
        "tp": tp,
        "gang_id": gang_id or f"{role}-{os.urandom(4).hex()}",
        "kv_slots": kv_slots,
    }
    processes = [_spawn({**fields, "rank": 0}, started)]
    store = (await _line(processes[0]))["store"]
    processes += [_spawn({**fields, "rank": r, "store": store}, started) for r in range(1, ranks)]
    addresses = [(await _line(process))["rpc"] for process in processes]
    clients = [
        await RpcClient.connect(
            host, port, secret=SECRET, name="test", on_notification=heard, deadline_s=START_S
        )
        for host, port in addresses
    ]
    attach = schema.pack(Attach(router_id="test"))
    answers = [await c.call("attach", attach, deadline_s=START_S) for c in clients]
    return Gang(processes, clients, [schema.unpack(RankDescription, answer) for answer in answers])


def _spawn(fields: dict[str, Any], started: list[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "csps.actors.host_rank", json.dumps(fields)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CSPS_CLUSTER_SECRET": SECRET.decode(), "OMP_NUM_THREADS": "1"},
    )
    started.append(process)
    return process


async def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
    assert line, f"rank process {process.pid} ended with {process.poll()}"
    fact: dict[str, Any] = json.loads(line)
    return fact
