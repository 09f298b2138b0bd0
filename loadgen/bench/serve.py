"""The command `csps bench serve`: a load test of any OpenAI-compatible server.

Open loop: a request is sent when it is due, regardless of requests under way. Closed loop: a
request is sent when one of a fixed number of users is free. Latencies count from that moment, even
if the client sends later.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import math
import os
import platform
import signal
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from csps.loadgen.bench import options
from csps.loadgen.bench.console import lines, progress
from csps.loadgen.bench.requests import (
    LoadRequests,
    load_requests,
    probe_request,
    token_count,
)
from csps.loadgen.bench.server_metrics import between, totals
from csps.loadgen.client.client import ENDPOINTS, LoadClient, RequestFormat, Transcript
from csps.loadgen.client.connection import Server
from csps.loadgen.results.result import Result, RunDescription, summarize, write_result
from csps.loadgen.workloads.request import Slo, WorkloadRequest
from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError, FaultError

_log = logging.getLogger(__name__)

READY_POLL_S = 0.5
_EARLY_NS = 500_000
"""Time by which a request may leave early. Timers have a resolution of a millisecond. Aimed at the
due time, they would fire half a millisecond late on average, and all latencies would grow.
"""


class LoadDriver:
    """Sends the requests of one run, each at its time."""

    def __init__(
        self,
        load_client: LoadClient,
        requests: Sequence[WorkloadRequest],
        *,
        users: int | None = None,
        max_duration_s: float | None = None,
    ) -> None:
        """Prepare a run.

        Args:
            load_client: sends requests and collects records.
            requests: the requests, in any order.
            users: number of users in a closed loop, who ignore arrival times. None: open loop.
            max_duration_s: time after which the run stops.
        """
        self._load_client, self._users = load_client, users
        self._max_duration_s = max_duration_s
        self._conversations = conversations(requests)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Send nothing more, and cancel requests under way."""
        self._stopped.set()

    async def run(self) -> None:
        """Send until the last answer, the time limit, or `stop`; `LoadClient` has the records."""
        # Encode before the run: encoding 100K tokens takes a millisecond.
        payloads = [
            self._load_client.encode(entry[0], number) for number, entry in self._numbered()
        ]
        gc.collect()
        gc.freeze()
        self._load_client.start_clock()
        loop = self._open_loop(payloads) if self._users is None else self._closed_loop(payloads)
        tasks = [asyncio.create_task(coroutine) for coroutine in (loop, self._stopped.wait())]
        try:
            await asyncio.wait(
                tasks, timeout=self._max_duration_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            gc.unfreeze()
        if isinstance(outcomes[0], Exception):
            raise outcomes[0]

    def _numbered(self) -> Iterable[tuple[int, list[WorkloadRequest]]]:
        return enumerate(self._conversations)

    async def _open_loop(self, payloads: list[bytes]) -> None:
        async with asyncio.TaskGroup() as group:
            for number, turns in self._numbered():
                due_ns = turns[0].arrival_ns
                await self._until(due_ns)
                group.create_task(self._converse(turns, number, due_ns, payloads[number]))

    async def _closed_loop(self, payloads: list[bytes]) -> None:
        assert self._users is not None
        waiting = iter(self._numbered())

        async def user() -> None:
            for number, turns in waiting:
                await self._converse(turns, number, self._load_client.now_ns(), payloads[number])

        async with asyncio.TaskGroup() as group:
            for _ in range(self._users):
                group.create_task(user())

    async def _until(self, due_ns: int) -> None:
        """Wait until an absolute time, so that one late timer does not delay the next request."""
        while (left_ns := due_ns - self._load_client.now_ns()) > _EARLY_NS:  # noqa: ASYNC110 (a clock)
            await asyncio.sleep((left_ns - _EARLY_NS) / 1e9)

    async def _converse(
        self, turns: list[WorkloadRequest], number: int, due_ns: int, payload: bytes
    ) -> None:
        transcript = Transcript()
        for turn, request in enumerate(turns):
            if turn:
                due_ns = max(request.arrival_ns, self._load_client.now_ns() + request.delay_ns)
                payload = self._load_client.encode(request, number, transcript)
                await self._until(due_ns)
            record = await self._load_client.ask(request, due_ns, payload)
            if not record.completed:
                for skipped in turns[turn + 1 :]:
                    self._load_client.skip(skipped)
                return
            transcript.turns.append((request.prompt or "", record.text))


def conversations(requests: Sequence[WorkloadRequest]) -> list[list[WorkloadRequest]]:
    """Return the turns of each conversation in one list, by arrival of the first turn."""
    grouped: dict[str, list[WorkloadRequest]] = {}
    alone: list[list[WorkloadRequest]] = []
    for request in requests:
        if request.conversation is None:
            alone.append([request])
        else:
            grouped.setdefault(request.conversation, []).append(request)
    return sorted([*alone, *grouped.values()], key=lambda turns: turns[0].arrival_ns)


WARMUP_USERS = 4
SEED_STEP = 1_000_003
"""Distance between the seeds of runs whose prompts must differ. It is large, so that users who
count seeds up do not reach them.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 1 if no request completed."""
    arguments = parse(argv)
    result = uvloop.run(_whole(arguments))
    print("\n".join(lines(result)))
    if arguments.save_result or arguments.save_detailed:
        path = result_path(arguments, result)
        write_result(result, path)
        print(f"result: {path}")
    return 0 if result["completed"] else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's arguments."""
    parser = CommandParser(
        prog="csps bench serve", description="Load test of an OpenAI-compatible server."
    )
    for add in (
        options.add_server_options,
        options.add_workload_options,
        options.add_load_options,
        options.add_result_options,
    ):
        add(parser)
    return parser.parse_args(argv)


async def _whole(arguments: argparse.Namespace) -> Result:
    slo = Slo.parse(arguments.goodput)
    target = await Target.reach(arguments)
    try:
        selected = load_requests(arguments, chat=target.api.chat, positions=target.positions)
        await target.warm_up(arguments)
        return await measure(target, arguments, selected, run_of(target, arguments, slo))
    finally:
        target.server.close()


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server, its model and its request format."""

    server: Server
    api: RequestFormat
    url: str
    positions: int | None
    """Most tokens of prompt and answer together. None: unknown."""

    @classmethod
    async def reach(cls, arguments: argparse.Namespace) -> Target:
        """Ask the server for its models.

        Raises:
            FaultError: the server cannot be reached.
            ConfigError: the server does not serve the requested model.
        """
        url = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
        server = Server(url, options.headers(arguments))
        try:
            listed = await _listed(server, arguments.ready_check_timeout_sec)
            model = _model(listed, arguments.served_model_name or arguments.model)
        except FaultError as error:
            raise FaultError(f"{url}: {error}") from None
        api = RequestFormat(
            model=model["id"],
            endpoint=arguments.endpoint or ENDPOINTS[arguments.backend],
            ignore_eos=arguments.ignore_eos,
            temperature=arguments.temperature,
            extra_body=options.sampling(arguments),
        )
        positions = arguments.max_model_len or model.get("max_model_len")
        _log.info("%s serves model %s with %s positions", url, api.model, positions)
        return cls(server=server, api=api, url=url, positions=positions)

    async def warm_up(self, arguments: argparse.Namespace) -> None:
        """Send unmeasured requests with other texts of the same lengths, so that no cache is
        filled.
        """
        if not arguments.num_warmups:
            return
        others = argparse.Namespace(**vars(arguments))
        others.seed = arguments.seed + SEED_STEP
        others.num_prompts, others.save_trace, others.turns = arguments.num_warmups, None, 1
        selected = load_requests(others, chat=self.api.chat, positions=self.positions)
        load_client = LoadClient(self.server, self.api, request_timeout_s=arguments.request_timeout)
        users = min(arguments.max_concurrency or WARMUP_USERS, arguments.num_warmups)
        await LoadDriver(load_client, selected.requests, users=users).run()
        completed = load_client.counts.completed
        _log.info("warm-up: %d of %d requests completed", completed, arguments.num_warmups)
        if completed == 0:
            raise FaultError(f"no warm-up request succeeded: {load_client.records[0].error}")


async def _listed(server: Server, patience_s: float) -> Any:
    """Return the server's models, as soon as it lists them."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return await server.ask("/v1/models")
        except FaultError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(READY_POLL_S)


def _model(answer: Any, name: str | None) -> dict[str, Any]:
    served = {model["id"]: model for model in answer.get("data", ())}
    if not served:
        raise FaultError("/v1/models lists no model")
    if name is None:
        name = next(iter(served))
    if name not in served:
        raise ConfigError(f"the server has no model '{name}'; it serves {', '.join(served)}")
    model: dict[str, Any] = served[name]
    return model


class Probes:
    """Sends short requests beside a load, at a fixed rate: what others notice of it."""

    def __init__(self, target: Target, arguments: argparse.Namespace) -> None:
        self._arguments, self._chat = arguments, target.api.chat
        self._count = token_count(arguments.tokenizer)
        # Of no slots: a probe does not wait for the load's.
        self._load_client = LoadClient(
            target.server, target.api, request_timeout_s=arguments.request_timeout, name="probe"
        )

    async def send(self) -> None:
        """Send until this task is cancelled; probes under way end with it."""
        self._load_client.start_clock()
        async with asyncio.TaskGroup() as group:
            for number in itertools.count():
                due_ns = round(number * 1e9 / self._arguments.probe_request_rate)
                await asyncio.sleep(max(0, due_ns - self._load_client.now_ns()) / 1e9)
                request = probe_request(
                    number, seed=self._arguments.seed, chat=self._chat, count=self._count
                )
                payload = self._load_client.encode(request, number)
                group.create_task(self._load_client.ask(request, due_ns, payload))

    def figures(self) -> dict[str, Any]:
        """Return vLLM's figures of probes, and their times to the first token."""
        records = self._load_client.records
        done = [record for record in records if record.completed]
        failed = sum(record.status == "failed" for record in records)
        figures: dict[str, Any] = {
            "probe_request_rate": self._arguments.probe_request_rate,
            "probe_completed": len(done),
            "probe_failed": failed,
        }
        for name in ("e2el", "ttft"):
            times = [1e3 * getattr(record, f"{name}_s") for record in done]
            values = np.percentile(times, (50, 99, 100)) if times else [None] * 3
            for part, value in zip(("median", "p99", "max"), values, strict=True):
                figures[f"probe_{part}_{name}_ms"] = None if value is None else round(value, 3)
        return figures


@asynccontextmanager
async def probing(target: Target, arguments: argparse.Namespace) -> AsyncIterator[Probes]:
    """Send probes while the body runs, if they are asked for."""
    probes = Probes(target, arguments)
    if not arguments.probe_request_rate:
        yield probes
        return
    task = asyncio.create_task(probes.send())
    try:
        yield probes
    finally:
        task.cancel()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(outcome, Exception):
        raise outcome


def closed_loop(arguments: argparse.Namespace) -> bool:
    """Return whether users wait for their answers: a number of users is given, but no rate."""
    timed = arguments.dataset_path or arguments.ramp_up_strategy
    unlimited = math.isinf(arguments.request_rate) and not timed
    return unlimited and arguments.max_concurrency is not None


async def measure(
    target: Target, arguments: argparse.Namespace, selected: LoadRequests, run: RunDescription
) -> Result:
    """Send the requests and return the result."""
    closed = closed_loop(arguments)
    load_client = LoadClient(
        target.server,
        target.api,
        max_concurrency=None if closed else arguments.max_concurrency,
        request_timeout_s=arguments.request_timeout,
    )
    load = LoadDriver(
        load_client,
        selected.requests,
        users=arguments.max_concurrency if closed else None,
        max_duration_s=arguments.max_duration,
    )
    shown = progress(load_client.counts, len(selected.requests))
    before = await totals(target.server)
    cpu_s = time.process_time()
    async with (
        nullcontext() if arguments.disable_tqdm else shown,
        probing(target, arguments) as probes,
    ):
        await _stoppable(load)
    cpu_s = time.process_time() - cpu_s
    records = sorted(load_client.records, key=lambda record: record.scheduled_ns)
    facts = selected.facts | {
        "not_sent": len(selected.requests) - len(records),
        "client_cpu_s": round(cpu_s, 4),
        "client_cpu_ms_per_request": round(1000 * cpu_s / max(1, len(records)), 4),
    }
    facts |= between(before, await totals(target.server))
    if arguments.probe_request_rate:
        facts |= probes.figures()
    return summarize(records, replace(run, facts=run.facts | facts))


async def _stoppable(load: LoadDriver) -> None:
    """Run the load; Ctrl-C ends the run, not the report."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, load.stop)
    try:
        await load.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def run_of(target: Target, arguments: argparse.Namespace, slo: Slo) -> RunDescription:
    """Return the run's description from the arguments."""
    return RunDescription(
        kind="live",
        label=arguments.label or arguments.backend,
        model_id=target.api.model,
        request_rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        max_concurrency=arguments.max_concurrency,
        slo=slo,
        percentiles=arguments.metric_percentiles,
        metrics=arguments.percentile_metrics,
        length_buckets=[int(bucket) for bucket in arguments.length_buckets],
        detailed=arguments.save_detailed,
        facts={
            "backend": arguments.backend,
            "base_url": target.url,
            "endpoint": target.api.endpoint,
            "loop": "closed" if closed_loop(arguments) else "open",
            "ignore_eos": arguments.ignore_eos,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load_average": [round(load, 2) for load in os.getloadavg()],
            **options.pairs(arguments.metadata),
        },
    )


def result_path(arguments: argparse.Namespace, result: Result) -> Path:
    """Return the result's path: the user's name, or one as vLLM forms it."""
    name: str | None = arguments.result_filename
    if name is None:
        rate = f"{result['request_rate']}qps"
        name = f"{result['label']}-{rate}-{result['model_id']}-{result['date']}.json"
    folder: Path = arguments.result_dir
    return folder / name.replace("/", "_")
