"""Sends the requests of a workload, each at its time.

Open loop: a request is sent when it is due, however many are still under way. Closed loop: when
one of a fixed number of users is free. Latencies count from that moment, not from when the client
came round to sending.

`csps bench serve`: a load test of any OpenAI-compatible server.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import platform
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from csps.loadgen.bench import options
from csps.loadgen.bench.console import lines, progress
from csps.loadgen.bench.requests import LoadRequests, load_requests
from csps.loadgen.client.client import ENDPOINTS, LoadClient, RequestFormat, Transcript
from csps.loadgen.client.connection import Server
from csps.loadgen.results.record import Slo
from csps.loadgen.results.result import Result, RunDescription, summarize, write_result
from csps.loadgen.workloads.request import WorkloadRequest
from csps.protocols.core.errors import ConfigError, FaultError

_EARLY_NS = 500_000
"""That a request may leave early. Timers have a resolution of a millisecond: aimed at the due time
they would be late by half of that on average, and all latencies with them."""


class LoadDriver:
    """One run."""

    def __init__(
        self,
        load_client: LoadClient,
        requests: Sequence[WorkloadRequest],
        *,
        users: int | None = None,
        max_duration_s: float | None = None,
    ) -> None:
        """`users` makes it a closed loop: so many ask, each again as soon as it has its answer,
        and times of arrival are ignored."""
        self._load_client, self._users = load_client, users
        self._max_duration_s = max_duration_s
        self._conversations = conversations(requests)
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Send nothing more, and withdraw what is under way."""
        self._stopped.set()

    async def run(self) -> None:
        """Until the last answer, the time limit, or `stop`; the asker has the records."""
        # Encoded before, because 100K tokens take a millisecond.
        payloads = [self._load_client.encode(it[0], number) for number, it in self._numbered()]
        gc.collect()
        gc.freeze()
        self._load_client.start_clock()
        loop = self._open_loop(payloads) if self._users is None else self._closed_loop(payloads)
        tasks = [asyncio.create_task(it) for it in (loop, self._stopped.wait())]
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
        """Absolute time: what one wait is late does not delay the next."""
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
    """Turns of one conversation together; a request of none is one of its own. By arrival."""
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
"""Between the seeds of runs whose prompts must differ: large, so that users who count seeds up do
not come upon them."""


def main(argv: Sequence[str]) -> int:
    """The command; status 1 if no request completed."""
    arguments = parse(argv)
    result = uvloop.run(_whole(arguments))
    print("\n".join(lines(result)))
    if arguments.save_result or arguments.save_detailed:
        path = result_path(arguments, result)
        write_result(result, path)
        print(f"result: {path}")
    return 0 if result["completed"] else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
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
    """A server that has been asked what it serves."""

    server: Server
    api: RequestFormat
    url: str
    positions: int | None
    """Prompt and answer at most; None where neither server nor user says."""

    @classmethod
    async def reach(cls, arguments: argparse.Namespace) -> Target:
        """Ask the server for its models.

        Raises:
            FaultError: it cannot be reached.
            ConfigError: it does not serve the model that is asked for.
        """
        url = arguments.base_url or f"http://{arguments.host}:{arguments.port}"
        server = Server(url, options.headers(arguments))
        try:
            model = _model(await server.ask("/v1/models"), arguments.model)
        except FaultError as error:
            raise FaultError(f"{url}: {error}") from None
        api = RequestFormat(
            model=model["id"],
            endpoint=arguments.endpoint or ENDPOINTS[arguments.backend],
            ignore_eos=arguments.ignore_eos,
            temperature=arguments.temperature,
            extra_body=arguments.extra_body,
        )
        positions = arguments.max_model_len or model.get("max_model_len")
        return cls(server=server, api=api, url=url, positions=positions)

    async def warm_up(self, arguments: argparse.Namespace) -> None:
        """Ask what nobody measures: other texts of the same lengths, so that no cache is filled."""
        if not arguments.num_warmups:
            return
        others = argparse.Namespace(**vars(arguments))
        others.seed = arguments.seed + SEED_STEP
        others.num_prompts, others.save_trace, others.turns = arguments.num_warmups, None, 1
        selected = load_requests(others, chat=self.api.chat, positions=self.positions)
        load_client = LoadClient(self.server, self.api, request_timeout_s=arguments.request_timeout)
        users = min(arguments.max_concurrency or WARMUP_USERS, arguments.num_warmups)
        await LoadDriver(load_client, selected.requests, users=users).run()
        if load_client.counts.completed == 0:
            raise FaultError(f"no warm-up request succeeded: {load_client.records[0].error}")


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


def closed_loop(arguments: argparse.Namespace) -> bool:
    """Whether users wait for their answers: no rate is given, but a number of users."""
    timed = arguments.dataset_path or arguments.ramp_up_strategy
    unlimited = math.isinf(arguments.request_rate) and not timed
    return unlimited and arguments.max_concurrency is not None


async def measure(
    target: Target, arguments: argparse.Namespace, selected: LoadRequests, run: RunDescription
) -> Result:
    """Send the requests and sum up."""
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
    cpu_s = time.process_time()
    async with nullcontext() if arguments.disable_tqdm else shown:
        await _stoppable(load)
    cpu_s = time.process_time() - cpu_s
    records = sorted(load_client.records, key=lambda record: record.scheduled_ns)
    facts = selected.facts | {
        "not_sent": len(selected.requests) - len(records),
        "client_cpu_s": round(cpu_s, 4),
        "client_cpu_ms_per_request": round(1000 * cpu_s / max(1, len(records)), 4),
    }
    return summarize(records, replace(run, facts=run.facts | facts))


async def _stoppable(load: LoadDriver) -> None:
    """Ctrl-C ends the run, not the report."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, load.stop)
    try:
        await load.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def run_of(target: Target, arguments: argparse.Namespace, slo: Slo) -> RunDescription:
    """What the arguments say about the run."""
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
        length_buckets=[int(length_bucket) for length_bucket in arguments.length_buckets],
        detailed=arguments.save_detailed,
        facts={
            "backend": arguments.backend,
            "base_url": target.url,
            "endpoint": target.api.endpoint,
            "loop": "closed" if closed_loop(arguments) else "open",
            "ignore_eos": arguments.ignore_eos,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load_average": [round(it, 2) for it in os.getloadavg()],
            **options.pairs(arguments.metadata),
        },
    )


def result_path(arguments: argparse.Namespace, result: Result) -> Path:
    """As vLLM names it, unless the user does."""
    name: str | None = arguments.result_filename
    if name is None:
        rate = f"{result['request_rate']}qps"
        name = f"{result['label']}-{rate}-{result['model_id']}-{result['date']}.json"
    folder: Path = arguments.result_dir
    return folder / name.replace("/", "_")
