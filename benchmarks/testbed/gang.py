"""A prefill gang over both servers, without Ray, and a driver for its jobs.

The driver replaces the router: it speaks to the ranks itself, so that a benchmark names every
group, bound and strategy. It must run on one of the servers (`iproute.entered`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from csps.actors.comm.layout import computed_by
from csps.protocols.attention.csa import CsaPlan
from csps.protocols.core.placement import LAYOUTS, KvSlice, place
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.members import GangMembers, RankAddress
from csps.protocols.gang.messages import (
    CancelSequence,
    PrefillDone,
    RequestFailed,
    SampledTokens,
    SamplerInputs,
    Sampling,
)
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.protocols.rpc import schema
from csps.services.profiling.steps import CpuTime
from testbed.network import Testbed
from testbed.traffic import Traffic

START_S = 120.0
"""Time limit for all ranks to load the model and form the gang."""
JOB_S = 600.0
"""Time limit of one prefill job."""
CLOSE_S = 10.0
"""Time limit for a rank to end by itself."""
TRACED_RANK = Path(__file__).with_name("traced_rank.py")
T = TypeVar("T", SampledTokens, PrefillDone)
_KINDS: dict[str, type] = {
    "tokens": SampledTokens,
    "prefill_done": PrefillDone,
    "failed": RequestFailed,
}
GREEDY = schema.encode(SamplerInputs(sampling=Sampling(temperature=0.0, max_tokens=1)))


class JobFailedError(RuntimeError):
    """A rank cannot do the job, or is gone."""


@dataclass(frozen=True, kw_only=True)
class GangOptions:
    """Options of the ranks besides their location."""

    model_dir: Path
    ranks_per_server: int = 2
    kv_slots: int = 40_960
    """Per rank."""
    dtype: str = "float32"
    spans_dir: Path | None = None
    """Folder to which ranks write the spans of their jobs. None: no tracing."""


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """Figures of one prefill job; per-rank lists are in rank order."""

    token: int
    """The first token of the answer."""
    trace_id: str
    """Trace id of the job's spans, if spans are written."""
    ttft_s: float
    """Time from sending the job to the ranks until its token."""
    done: tuple[PrefillDone, ...]
    traffic: Traffic
    """Traffic by the kernel's counters: tokens, control and headers included."""
    cpu_s: tuple[float, ...]
    """CPU time of each rank's process, network threads included."""
    compute_cpu_s: tuple[float, ...]
    """CPU time of each rank's busiest thread, which is the computing one."""


class Gang:
    """Rank processes on both servers, and the client that commands them."""

    def __init__(self, bed: Testbed) -> None:
        self._bed = bed
        self.processes: list[subprocess.Popen[str]] = []
        self._messages: dict[type, asyncio.Queue[Any]] = {
            kind: asyncio.Queue() for kind in _KINDS.values()
        }
        self._jobs = 0
        self._client: GangClient | None = None

    @property
    def client(self) -> GangClient:
        """Return the client of the started gang."""
        assert self._client is not None, "the gang has not started"
        return self._client

    @property
    def locations(self) -> tuple[str, ...]:
        """Return the Rack-Server-GPU ids in rank order."""
        return self.client.locations

    # --- life ------------------------------------------------------------------------------

    async def start(self, options: GangOptions) -> None:
        """Start all ranks, servers in order, and connect to them."""
        secret = os.urandom(16).hex()
        configs = _rank_configs(self._bed, options)
        first = self._spawn(configs[0], options.spans_dir, secret)
        # Rank 0 hosts the gang's store and says where before it waits for the others.
        store = (await _line(first))["store"]
        for config in configs[1:]:
            self._spawn({**config, "store": store}, options.spans_dir, secret)
        found = [(await _line(process))["rpc"] for process in self.processes]
        addresses = (
            RankAddress(rank=rank, host=host, port=port) for rank, (host, port) in enumerate(found)
        )
        members = GangMembers(gang_id=configs[0]["gang_id"], ranks=tuple(addresses))
        self._client = GangClient("prefill", members, self._receive, deadline_s=START_S)
        await self._client.connect(secret=secret.encode(), router_id="testbed")
        await self._client.attach(generation=1)

    def _spawn(
        self, config: dict[str, Any], spans_dir: Path | None, secret: str
    ) -> subprocess.Popen[str]:
        (server,) = (server for server in self._bed.servers if server.address == config["host"])
        process = subprocess.Popen(
            server.command(*_host(config, spans_dir)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CSPS_CLUSTER_SECRET": secret, "OMP_NUM_THREADS": "1"},
        )
        self.processes.append(process)
        return process

    async def close(self) -> None:
        """Close the connections and end the processes, which then have written their spans."""
        if self._client is not None:
            await self._client.close()
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
        await asyncio.gather(*(asyncio.to_thread(_end, process) for process in self.processes))

    # --- jobs ------------------------------------------------------------------------------

    async def prefill(
        self,
        tokens: np.ndarray,
        *,
        strategy: str = "ulysses",
        csa: CsaPlan | None = None,
        layout: str = "contiguous",
        cached: int = 0,
    ) -> JobResult:
        """Prefill one prompt over all ranks, evenly cut, and sample its first token greedily.

        Args:
            tokens: (L,) int32.
            strategy, csa: as in `PrefillStep`.
            layout: layout of the rows (`protocols.core.placement.LAYOUTS`).
            cached: number of tokens that are computed before, and are not measured.
        """
        sequence_id = self._jobs + 1
        job = self._job(sequence_id, 0, cached or len(tokens), (), layout)
        if cached:
            begin = msgspec.structs.replace(job.chunks[0], last=False)
            job = msgspec.structs.replace(job, chunks=(begin,), strategy=strategy)
            await self._cached(job, tokens[:cached].astype("<i4"))
            history = _computed(job)
            job = self._job(sequence_id, cached, len(tokens) - cached, history, layout)
        traced = {"traceparent": f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"}
        job = msgspec.structs.replace(job, strategy=strategy, csa=csa, trace=traced)
        return await self._measured(job, tokens[cached:].astype("<i4"))

    def _job(
        self, sequence_id: int, start: int, length: int, history: tuple[KvSlice, ...], layout: str
    ) -> PrefillStep:
        self._jobs += 1
        group = tuple(range(self.client.world_size))
        parts = LAYOUTS[layout](length, len(group))
        rows = () if layout == "contiguous" else place(group, parts, start=start)
        chunk = PrefillChunk(
            sequence_id=sequence_id,
            start=start,
            length=length,
            rows=rows,
            history=history,
            decoded=False,
        )
        counts = (sum(span.length for span in spans) for spans in parts)
        bounds = tuple(itertools.accumulate(counts, initial=0))
        return PrefillStep(
            step_id=self._jobs,
            group=group,
            bounds=bounds,
            chunks=(chunk,),
            samplers={sequence_id: GREEDY},
        )

    async def _cached(self, job: PrefillStep, tokens: np.ndarray) -> None:
        self._submit(job, tokens)
        for _ in range(self.client.world_size):
            await self._next(PrefillDone)

    async def _measured(self, job: PrefillStep, tokens: np.ndarray) -> JobResult:
        pids = [rank.pid for rank in self.client.descriptions]
        traffic, before = self._bed.traffic(), [CpuTime.of(pid) for pid in pids]
        begin = time.perf_counter()
        self._submit(job, tokens)
        sampled = await self._next(SampledTokens)
        ttft_s = time.perf_counter() - begin
        done = [await self._next(PrefillDone) for _ in pids]
        used = [CpuTime.of(pid) - then for pid, then in zip(pids, before, strict=True)]
        self._free(job)
        return JobResult(
            token=sampled.tokens[0],
            trace_id=job.trace["traceparent"].split("-")[1],
            ttft_s=ttft_s,
            done=tuple(sorted(done, key=lambda d: d.rank)),
            traffic=self._bed.traffic() - traffic,
            cpu_s=tuple(cpu.process_s for cpu in used),
            compute_cpu_s=tuple(cpu.busiest_s() for cpu in used),
        )

    def _submit(self, job: PrefillStep, tokens: np.ndarray) -> None:
        start = job.chunks[0].start
        for member in range(self.client.world_size):
            rows = [np.array(part.span.positions) - start for part in computed_by(job, member)]
            own_tokens = tokens[np.concatenate(rows)].tobytes() if rows else b""
            own = msgspec.structs.replace(job, tokens=own_tokens)
            self.client.notify(member, "prefill", schema.pack(own))

    def _free(self, job: PrefillStep) -> None:
        """Free the KV slots of a job that has ended."""
        self.client.notify_all(
            "cancel", schema.pack(CancelSequence(sequence_id=job.chunks[0].sequence_id))
        )

    # --- what the ranks say ----------------------------------------------------------------

    def _receive(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        if kind := _KINDS.get(method):
            self._messages[kind].put_nowait(schema.unpack(kind, payload))

    async def _next(self, kind: type[T]) -> T:
        """Return the next message of a kind.

        Raises:
            JobFailedError: a rank gives up or is gone.
        """
        failure = asyncio.ensure_future(self._messages[RequestFailed].get())
        message = asyncio.ensure_future(self._messages[kind].get())
        waited_for = [message, failure, self.client.lost]
        try:
            await asyncio.wait(waited_for, timeout=JOB_S, return_when=asyncio.FIRST_COMPLETED)
            if message.done():
                return cast(T, message.result())
            gone = [str(future.result()) for future in waited_for[1:] if future.done()]
            raise JobFailedError("; ".join(gone) or f"no {kind.__name__} within {JOB_S:g} s")
        finally:
            message.cancel()
            failure.cancel()


@asynccontextmanager
async def prefill_gang(bed: Testbed, options: GangOptions) -> AsyncIterator[Gang]:
    """Run a gang over both servers for the duration of a block."""
    gang = Gang(bed)
    try:
        await gang.start(options)
        yield gang
    finally:
        await gang.close()


def _computed(job: PrefillStep) -> tuple[KvSlice, ...]:
    """Return where the KV of a step is: where it was computed."""
    return tuple(
        KvSlice.of(instance, part.span)
        for member, instance in enumerate(job.group)
        for part in computed_by(job, member)
    )


def _rank_configs(bed: Testbed, options: GangOptions) -> list[dict[str, Any]]:
    """Return the fields of `RankConfig` for each rank."""
    places = [
        {"host": server.address, "location": location}
        for server in bed.servers
        for location in server.locations(options.ranks_per_server)
    ]
    common = {
        "model_dir": str(options.model_dir),
        "role": "prefill",
        "world_size": len(places),
        "gang_id": f"testbed-{os.urandom(4).hex()}",
        "kv_slots": options.kv_slots,
        "dtype": options.dtype,
    }
    return [{**common, **place, "rank": rank} for rank, place in enumerate(places)]


def _host(config: dict[str, Any], spans_dir: Path | None) -> list[str]:
    """Return the command that hosts a rank."""
    if spans_dir is None:
        return [sys.executable, "-m", "csps.actors.host_rank", json.dumps(config)]
    return [sys.executable, str(TRACED_RANK), str(spans_dir), json.dumps(config)]


def _end(process: subprocess.Popen[str]) -> None:
    """End a rank by closing its standard input, or kill it after a time limit."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(CLOSE_S)
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


async def _line(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
    if not line:
        raise JobFailedError(f"rank process {process.pid} ended with {process.poll()}")
    fact: dict[str, Any] = json.loads(line)
    return fact
