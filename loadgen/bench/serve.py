"""`csps bench serve`: a load test of any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import platform
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from csps.loadgen.bench import options
from csps.loadgen.bench.chosen import Chosen, choose
from csps.loadgen.bench.load import Load
from csps.loadgen.bench.printout import lines
from csps.loadgen.bench.progress import progress
from csps.loadgen.client.api import ENDPOINTS, Api
from csps.loadgen.client.asker import Asker
from csps.loadgen.client.server import Server
from csps.loadgen.results.files import write_result
from csps.loadgen.results.result import Result, Run, summarize
from csps.loadgen.results.slo import Slo
from csps.protocols.errors import ConfigError, FaultError

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
        chosen = choose(arguments, chat=target.api.chat, positions=target.positions)
        await target.warm_up(arguments)
        return await measure(target, arguments, chosen, run_of(target, arguments, slo))
    finally:
        target.server.close()


@dataclass(frozen=True, kw_only=True)
class Target:
    """A server that has been asked what it serves."""

    server: Server
    api: Api
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
        api = Api(
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
        chosen = choose(others, chat=self.api.chat, positions=self.positions)
        asker = Asker(self.server, self.api, request_timeout_s=arguments.request_timeout)
        users = min(arguments.max_concurrency or WARMUP_USERS, arguments.num_warmups)
        await Load(asker, chosen.requests, users=users).run()
        if asker.counts.completed == 0:
            raise FaultError(f"no warm-up request succeeded: {asker.records[0].error}")


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
    target: Target, arguments: argparse.Namespace, chosen: Chosen, run: Run
) -> Result:
    """Send the requests and sum up."""
    closed = closed_loop(arguments)
    asker = Asker(
        target.server,
        target.api,
        max_concurrency=None if closed else arguments.max_concurrency,
        request_timeout_s=arguments.request_timeout,
    )
    load = Load(
        asker,
        chosen.requests,
        users=arguments.max_concurrency if closed else None,
        max_duration_s=arguments.max_duration,
    )
    shown = progress(asker.counts, len(chosen.requests))
    cpu_s = time.process_time()
    async with nullcontext() if arguments.disable_tqdm else shown:
        await _stoppable(load)
    cpu_s = time.process_time() - cpu_s
    records = sorted(asker.records, key=lambda record: record.scheduled_ns)
    facts = chosen.facts | {
        "not_sent": len(chosen.requests) - len(records),
        "client_cpu_s": round(cpu_s, 4),
        "client_cpu_ms_per_request": round(1000 * cpu_s / max(1, len(records)), 4),
    }
    return summarize(records, replace(run, facts=run.facts | facts))


async def _stoppable(load: Load) -> None:
    """Ctrl-C ends the run, not the report."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, load.stop)
    try:
        await load.run()
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def run_of(target: Target, arguments: argparse.Namespace, slo: Slo) -> Run:
    """What the arguments say about the run."""
    return Run(
        kind="live",
        label=arguments.label or arguments.backend,
        model_id=target.api.model,
        request_rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        max_concurrency=arguments.max_concurrency,
        slo=slo,
        percentiles=arguments.metric_percentiles,
        metrics=arguments.percentile_metrics,
        length_buckets=[int(it) for it in arguments.length_buckets],
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
