"""The command `csps capacity`: what hardware carries under an SLO, by simulation.

    rates    policies at several request rates, one result each
    highest  the highest rate of each policy that keeps the SLO
    cells    the fewest copies of the cluster that keep it for a given load

Runs are independent and share the machine's cores, one process each. The same arguments give the
same numbers on every machine.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from csps.loadgen.bench.options import numbers, positive
from csps.loadgen.bench.sweep import ATTAINMENT, RateSearch
from csps.loadgen.report.page import write_page
from csps.loadgen.results.record import RequestRecord
from csps.loadgen.results.result import Result, RunDescription, summarize, write_result
from csps.loadgen.simulator.requests import records_of
from csps.loadgen.simulator.run_meter import RunMeter
from csps.loadgen.simulator.simulate import (
    add_trace_options,
    chosen,
    options_of,
    reuse_of,
    share,
    simulate,
)
from csps.loadgen.simulator.systems import SYSTEMS, cluster_for, system_named
from csps.loadgen.workloads.named import WORKLOADS
from csps.loadgen.workloads.request import FittedRequests, Slo, WorkloadRequest
from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError

MOST_CELLS = 1024
START_RATE = 1.0
Key = TypeVar("Key")
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One simulation, or one for each cell."""

    policy: str
    arguments: argparse.Namespace
    rate: float | None
    """Requests per second. None: those of the trace."""
    cells: int = 1

    def run(self) -> Result:
        """Run it, over all seeds. A result has the requests of all of them."""
        arguments, system = self.arguments, system_named(self.policy)
        cluster = cluster_for(system, arguments.cluster, arguments.gangs)
        options = system.options_on(cluster, options_of(arguments.option))
        records: list[RequestRecord] = []
        seconds, fields = 0.0, {}
        for seed in arguments.seeds:
            given = argparse.Namespace(**{**vars(arguments), "rate": self.rate, "seed": seed})
            for part in cells_of(chosen(given, cluster), self.cells):
                meter = RunMeter(cluster)
                reuse = reuse_of(arguments.kv_reuse)
                found = simulate(cluster, system.policy, options, part, reuse, meter=meter)
                records += records_of(part.requests, found.outcomes)
                seconds = max(seconds, found.end_ns / 1e9)
                fields = meter.fields
        run = RunDescription(
            kind="simulated",
            label=self.policy,
            model_id=cluster.name,
            request_rate=math.inf if self.rate is None else self.rate,
            duration_s=seconds * len(arguments.seeds),
            slo=Slo.parse(arguments.goodput),
            facts={
                "policy": self.policy,
                "policy_options": options,
                "cluster": cluster.name,
                "workload": arguments.workload or arguments.trace.name,
                "cells": self.cells,
                "instances": self.cells * _instances(cluster.prefill, cluster.decode),
            },
        )
        return summarize(records, run) | fields


def _instances(prefill: Any, decode: Any) -> int:
    return len(prefill.instances) + (0 if decode is prefill else len(decode.instances))


def cells_of(requests: FittedRequests, cells: int) -> Iterator[FittedRequests]:
    """Yield what each of several cells gets if requests are dealt in turns; a conversation stays
    where it began."""
    dealt: list[list[WorkloadRequest]] = [[] for _ in range(cells)]
    homes: dict[str, int] = {}
    turn = 0
    for request in requests.requests:
        name = request.conversation
        home = turn % cells if name is None else homes.get(name, turn % cells)
        if name is None or name not in homes:
            turn += 1
        if name is not None:
            homes[name] = home
        dealt[home].append(request)
    for part in dealt:
        if part:
            yield FittedRequests(requests=tuple(part), cut=0)


def met(result: Result, attainment: float) -> bool:
    """Return whether a run keeps the SLO and completes everything.

    Raises:
        ConfigError: there is nothing to keep.
    """
    if result["slo_attainment"] is None:
        raise ConfigError("nothing to keep: give --goodput, or a trace whose requests have `slo`")
    return result["failed"] == 0 and bool(result["slo_attainment"] >= attainment)


def in_parallel(
    work: Callable[[Key], Found], keys: Iterable[Key], jobs: int
) -> Iterator[tuple[Key, Found]]:
    """Yield what the function returns for each key, as soon as it does, from several processes."""
    if jobs == 1:
        yield from ((key, work(key)) for key in keys)
        return
    with ProcessPoolExecutor(jobs) as pool:
        futures = {pool.submit(work, key): key for key in keys}
        for future in as_completed(futures):
            yield futures[future], future.result()


@dataclass(frozen=True)
class HighestRate:
    """The search for the highest rate of a policy, as a function that another process can get."""

    arguments: argparse.Namespace

    def __call__(self, policy: str) -> tuple[float | None, Result | None]:
        """Return the highest rate that keeps the SLO and its result."""
        arguments = self.arguments
        search = RateSearch(start=START_RATE, tolerance=arguments.tolerance, max_runs=40)
        results: dict[float, Result] = {}
        while (rate := search.next()) is not None:
            if rate < START_RATE / 2**12:
                break
            results[rate] = Trial(policy=policy, arguments=arguments, rate=rate).run()
            search.note(rate, ok=met(results[rate], arguments.attainment))
        return search.met, None if search.met is None else results[search.met]


@dataclass(frozen=True)
class FewestCells:
    """The search for the fewest cells, as a function that another process can get."""

    arguments: argparse.Namespace

    def __call__(self, policy: str) -> tuple[int | None, Result | None]:
        """Return the fewest cells that keep the SLO, and their result."""
        arguments = self.arguments
        trial = Trial(policy=policy, arguments=arguments, rate=arguments.rate)

        def kept(cells: int) -> tuple[bool, Result]:
            result = replace(trial, cells=cells).run()
            return met(result, arguments.attainment), result

        missed, cells = 0, 1
        ok, result = kept(cells)
        while not ok:
            missed, cells = cells, 2 * cells
            if cells > arguments.most_cells:
                return None, None
            ok, result = kept(cells)
        while cells - missed > 1:
            middle = (cells + missed) // 2
            ok, tried = kept(middle)
            if ok:
                cells, result = middle, tried
            else:
                missed = middle
        return cells, result


@dataclass(frozen=True)
class _AtRate:
    arguments: argparse.Namespace

    def __call__(self, key: tuple[str, float]) -> Result:
        policy, rate = key
        return Trial(policy=policy, arguments=self.arguments, rate=rate).run()


def main(argv: Sequence[str]) -> int:
    """Run the command; return 1 if no policy keeps the SLO."""
    arguments = parse(argv)
    policies = arguments.policy or ["csps"]
    for policy in policies:  # a mistake is told before the first run
        cluster_for(system_named(policy), arguments.cluster, arguments.gangs)
    results: list[Result] = []
    found_any = False
    if arguments.question == "rates":
        keys = [(policy, rate) for policy in policies for rate in arguments.rates]
        for (policy, rate), result in in_parallel(_AtRate(arguments), keys, arguments.jobs):
            print(line(policy, f"{rate:g} requests/s", result), flush=True)
            results.append(result)
        found_any = True
    elif arguments.question == "highest":
        for policy, (rate, best) in in_parallel(HighestRate(arguments), policies, arguments.jobs):
            if rate is None or best is None:
                print(f"{policy}: no rate keeps the SLO")
                continue
            print(line(policy, f"up to {rate:.4g} requests/s", best), flush=True)
            results.append(best)
            found_any = True
    else:
        for policy, (cells, best) in in_parallel(FewestCells(arguments), policies, arguments.jobs):
            if cells is None or best is None:
                print(f"{policy}: not even {arguments.most_cells} cells keep the SLO")
                continue
            needed = f"{cells} cell{'s' * (cells > 1)}, {best['instances']} instances"
            print(line(policy, needed, best), flush=True)
            results.append(best)
            found_any = True
    results.sort(key=lambda result: (policies.index(result["policy"]), result["request_rate"]))
    if arguments.result_dir is not None:
        for result in results:
            name = f"{result['policy']}-{result['request_rate']}-{result['cells']}.json"
            write_result(result, arguments.result_dir / name.replace("/", "_"))
    if arguments.html is not None and results:
        write_page(results, arguments.html, f"Capacity of {Path(arguments.cluster).stem}")
        print(f"report: {arguments.html}")
    return 0 if found_any else 1


def line(policy: str, found: str, result: Result) -> str:
    """Return the printed line of a run."""
    share = result["slo_attainment"]
    within = "" if share is None else f", {share:.1%} within SLO"
    latencies = f"TTFT P50 {result.get('median_ttft_ms', math.nan):,.0f} ms, P99 "
    latencies += f"{result.get('p99_ttft_ms', math.nan):,.0f} ms"
    return f"{policy}: {found}{within}; {latencies}"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's arguments."""
    parser = CommandParser(
        prog="csps capacity",
        description="What hardware carries under an SLO, by simulation (docs/simulator.md).",
    )
    parser.add_argument(
        "question",
        choices=("rates", "highest", "cells"),
        help="policies at --rates; the highest rate of each; the fewest cells for a load",
    )
    parser.add_argument(
        "--cluster", required=True, help="a cluster that comes with csps, or a file"
    )
    parser.add_argument("--gangs", metavar="NxTP[+NxTP]", help="as of csps simulate")
    parser.add_argument(
        "--policy", action="append", help=f"repeatable; a policy, or one of {', '.join(SYSTEMS)}"
    )
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of all policies"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workload", help=f"{', '.join(WORKLOADS)}, zipf:ALPHA")
    add_trace_options(parser, source)
    parser.add_argument("--rates", type=numbers, metavar="R,R", help="requests/s, for `rates`")
    parser.add_argument(
        "--rate", type=positive, help="requests/s, for `cells`; of a trace: default as recorded"
    )
    parser.add_argument(
        "--goodput", nargs="+", default=[], metavar="METRIC:MS", help="ttft:2000 tpot:50 e2el:9000"
    )
    parser.add_argument(
        "--attainment", type=share, default=ATTAINMENT, help="share within the SLO (%(default)s)"
    )
    parser.add_argument("--requests", type=int, help="of each run (1000, or the whole trace)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of each run (0)")
    parser.add_argument("--output-len", type=int, help="answers have at most so many tokens")
    parser.add_argument("--kv-reuse", type=share, metavar="SHARE", help="as of csps simulate")
    parser.add_argument(
        "--tolerance", type=positive, default=0.05, help="of the highest rate (%(default)s)"
    )
    parser.add_argument(
        "--most-cells", type=int, default=MOST_CELLS, help="no more are tried (%(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes (one per core)"
    )
    parser.add_argument("--result-dir", type=Path, metavar="DIR", help="write results here")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots here")
    arguments = parser.parse_args(argv)
    if arguments.question == "rates" and not arguments.rates:
        parser.error("rates: give --rates")
    if arguments.question == "cells" and arguments.workload and arguments.rate is None:
        parser.error("cells: a --workload needs a --rate")
    if arguments.jobs < 1:
        parser.error("--jobs: at least 1")
    return arguments
