"""The command `csps simulate`: run a scheduling policy on a simulated cluster."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml
from pydantic import ValidationError

from csps.configurator.costs.cost_table import EXACT, Costs, CostTable
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.loadgen.bench.options import add_ignored_fields, positive, rate
from csps.loadgen.report.page import write_page
from csps.loadgen.results.result import Result, RunDescription, summarize, write_result
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import CLUSTERS
from csps.loadgen.simulator.kernel import SimulationResult, Simulator
from csps.loadgen.simulator.orders import FIRST_COME, ORDERS
from csps.loadgen.simulator.requests import arrivals_of, queue_fields, records_of, tenant_fields
from csps.loadgen.simulator.run_meter import RunMeter
from csps.loadgen.simulator.systems import SYSTEMS, cluster_for, system_named
from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import WORKLOADS, workload
from csps.loadgen.workloads.request import (
    HASH_BLOCK_TOKENS,
    FittedRequests,
    Slo,
    WorkloadRequest,
    fit,
)
from csps.loadgen.workloads.traces import TraceRules, at_rate, read_trace
from csps.protocols.attention.plan import RequestClass
from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError
from csps.protocols.openai.csps_options import CspsRequestOptions, request_class
from csps.services.scheduling.core.promises import LEAST_SLACK, Ordering
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.limits import QueueLimits, ReuseSettings
from csps.services.scheduling.policies.registry import check_pairing, make_policy

DEFAULT_REQUESTS = 1000
UNLIMITED = 1 << 40
"""Queue limit of the simulated scheduler. Rejections would flatter a policy's latencies."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 1 if no request completed."""
    arguments = parse(argv)
    system = system_named(arguments.policy)
    cluster = cluster_for(system, arguments.cluster, arguments.gangs)
    requests = chosen(arguments, cluster)
    asked = None if arguments.csps is None else attention(arguments.csps)
    cls = with_options(cluster, asked, arguments.accuracy)
    began = time.perf_counter()
    reuse = reuse_of(arguments.kv_reuse)
    meter = RunMeter(cluster, progress_on(sys.stderr, len(requests.requests)))
    found = simulate(
        cluster,
        system.policy,
        system.options_on(cluster, options_of(arguments.option)),
        requests,
        reuse,
        cls=cls,
        order=arguments.order,
        users=arguments.max_concurrency,
        meter=meter,
    )
    wall_s = time.perf_counter() - began
    if sys.stderr.isatty():
        print(file=sys.stderr)  # ends the line of the progress bar
    result = result_of(arguments, cluster, requests, found) | meter.fields
    print("\n".join(lines(result)))
    print(f"simulated in {wall_s:.1f} s, {len(requests.requests) / wall_s:.0f} requests/s")
    if arguments.json is not None:
        write_result(result, arguments.json)
        print(f"result: {arguments.json}")
    if arguments.html is not None:
        write_page([result], arguments.html, f"{arguments.policy} on {cluster.name}")
        print(f"report: {arguments.html}")
    return 0 if result["completed"] else 1


def progress_on(out: TextIO, total: int) -> Callable[[int], None] | None:
    """Return a function that shows progress on a terminal; None elsewhere."""
    if not out.isatty():
        return None
    begin_s = time.perf_counter()

    def show(done: int) -> None:
        filled = 40 * done // max(1, total)
        seconds = time.perf_counter() - begin_s
        bar = "#" * filled + "." * (40 - filled)
        print(f"\r[{bar}] {done}/{total} requests, {seconds:.0f} s", end="", file=out, flush=True)

    return show


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's arguments."""
    parser = CommandParser(
        prog="csps simulate",
        description="Run a scheduling policy on a simulated cluster (docs/simulator.md).",
    )
    _add_cluster_options(parser)
    _add_workload_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots here")
    arguments = parser.parse_args(argv)
    if (users := arguments.max_concurrency) is not None:
        if users < 1 or arguments.rate is not None:
            parser.error("--max-concurrency: at least 1, and no --rate beside it")
    elif arguments.workload and arguments.rate is None:
        parser.error("--workload needs a --rate or --max-concurrency")
    return arguments


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    clusters = ", ".join(sorted(path.stem for path in CLUSTERS.glob("*.yaml")))
    parser.add_argument(
        "--policy",
        default="csps",
        help=f"as in config.yaml (default: csps), or one of {', '.join(SYSTEMS)}",
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the policy, as in config.yaml; may be given several times",
    )
    parser.add_argument("--cluster", required=True, help=f"{clusters}, or a file")
    parser.add_argument(
        "--gangs",
        metavar="NxTP[+NxTP]",
        help="of a cluster file with `gpus`: an elastic gang, or prefill and decode gangs "
        "(default: as the policy needs)",
    )
    parser.add_argument(
        "--order",
        choices=list(ORDERS),
        default="least_slack",
        help="of requests with objectives; others than the first are for comparison",
    )


def _add_workload_options(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workload", help=f"{', '.join(WORKLOADS)}, zipf:ALPHA")
    add_trace_options(parser, source)
    parser.add_argument("--rate", type=rate, help="requests/s; of a trace: default as recorded")
    parser.add_argument(
        "--max-concurrency",
        type=int,
        metavar="USERS",
        help="closed loop: so many users, each of whom waits for the answer before; no --rate",
    )
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="bounds of requests that bring none: ttft:2000 tpot:50 e2el:9000",
    )
    parser.add_argument(
        "--kv-reuse",
        type=share,
        metavar="SHARE",
        help="cache KV of common prefixes (hash_ids), in so much of the slots (0 to 1)",
    )
    parser.add_argument("--requests", type=int, help="default: 1000, or the whole trace")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and times (0)")
    parser.add_argument("--output-len", type=int, help="answers have at most so many tokens")
    parser.add_argument(
        "--csps",
        metavar="JSON",
        help="the csps object of requests that bring none, as in the API; the cluster file needs "
        "a rank",
    )
    parser.add_argument(
        "--accuracy", type=Path, metavar="FOLDER", help="regressor of the loss of accuracy"
    )


def add_trace_options(
    parser: argparse.ArgumentParser, source: argparse._MutuallyExclusiveGroup
) -> None:
    """Add the options that say which trace to read, and how."""
    source.add_argument("--trace", type=Path, help="Mooncake's JSONL or Azure's CSV")
    parser.add_argument(
        "--arrival-speedup-ratio", type=positive, default=1.0, help="of a trace without a rate"
    )
    add_ignored_fields(parser)


NO_TEXT = {
    "prompt": "the simulator computes no text and counts no tokens: 'input_length' is enough",
    "answer": "the simulator computes no text, so no answer can be right or wrong",
    "cls": "the simulator has no times for attention that requests set themselves",
}
"""Reasons why fields of a trace cannot be simulated."""
EXACT_ONLY = "the cluster file has no `rank`, so all attention is exact and no accuracy is traded"


def read_simulable(arguments: argparse.Namespace, cluster: ClusterModel) -> list[WorkloadRequest]:
    """Return the requests of `--trace`, all of which the simulator can honor.

    Raises:
        ConfigError: the trace is malformed or empty, or asks for what cannot be simulated.
    """
    exact = EXACT_ONLY if cluster.options is None else ""
    rules = TraceRules(refused=NO_TEXT, exact=exact, ignored=arguments.ignore_fields)
    requests = read_trace(arguments.trace, speedup=arguments.arrival_speedup_ratio, rules=rules)
    if not requests:
        raise ConfigError(f"{arguments.trace} has no requests")
    return requests


def attention(text: str) -> RequestClass:
    """Return the class of requests with a `csps` object.

    Raises:
        ConfigError: the object is invalid.
    """
    try:
        return request_class(CspsRequestOptions.model_validate_json(text))
    except ValidationError as error:
        first = error.errors()[0]
        named = first.get("ctx", {}).get("field")
        field = ".".join([*map(str, first["loc"]), *([named] if named else [])])
        raise ConfigError(f"--csps: {field + ': ' if field else ''}{first['msg']}") from None


def with_options(cluster: ClusterModel, cls: RequestClass | None, accuracy: Path | None) -> str:
    """Plan options for requests of a class; return the class's name for the scheduler.

    Args:
        cls: class of the requests. None: they ask for nothing.
        accuracy: folder of the model's losses of accuracy.

    Raises:
        ConfigError: the cluster has no times of such attention.
    """
    if cluster.options is None:
        if cls is not None and (cls.csa is not None or cls.objective is not None):
            raise ConfigError(
                "--csps: the cluster file says nothing of sparse attention; give it the speed of "
                "a rank (docs/simulator.md)"
            )
        return EXACT if cls is None or cls.strategy is None else cls.key
    if accuracy is not None:
        cluster.options.measured(AccuracyModel.load(accuracy, None))
    cls = cls or RequestClass()
    cluster.options.add(cls)
    return cls.key


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of `NAME=VALUE` words, with values in YAML.

    Raises:
        ConfigError: a word has no value.
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"--option: expected NAME=VALUE, got '{word}'")
        options[name] = yaml.safe_load(value)
    return options


def chosen(arguments: argparse.Namespace, cluster: ClusterModel) -> FittedRequests:
    """Return the requests that the arguments ask for, cut to the model's positions.

    Raises:
        ConfigError: the workload is unknown, or the trace is malformed or empty.
    """
    if arguments.trace is None:
        return generate(
            workload(arguments.workload),
            arguments.requests or DEFAULT_REQUESTS,
            arrivals=Arrivals(rate=arguments.rate or math.inf),
            seed=arguments.seed,
            size=Size(positions=cluster.max_positions, longest_output=arguments.output_len),
        )
    requests = read_simulable(arguments, cluster)[: arguments.requests]
    if arguments.rate is not None and not math.isinf(arguments.rate):
        requests = at_rate(requests, arguments.rate)
    return fit(requests, cluster.max_positions)


def share(word: str) -> float:
    """Return a number from 0 to 1."""
    value = float(word)
    if not 0 <= value <= 1:
        raise ValueError(word)
    return value


def reuse_of(max_share: float | None) -> ReuseSettings:
    """Return the prefix cache settings, in blocks as traces have them. None: no cache."""
    if max_share is None:
        return ReuseSettings()
    return ReuseSettings(enabled=True, max_share=max_share, block_tokens=HASH_BLOCK_TOKENS)


def scheduler_of(
    cluster: ClusterModel,
    policy: str,
    options: dict[str, Any],
    reuse: ReuseSettings | None = None,
    *,
    ordering: Ordering = LEAST_SLACK,
) -> Scheduler:
    """Return the live router's scheduler, which predicts with the cluster's latencies.

    Raises:
        ConfigError: the policy or option is unknown, the policy cannot use such gangs, or
            piggybacked prefill lacks a prefix cache or measured latencies.
    """
    table = CostTable(
        latencies=cluster.table, buckets={} if cluster.options is None else cluster.options
    )
    made = scheduler_with(Costs(table), policy, options, reuse, ordering=ordering)
    check_pairing(policy, "elastic" if cluster.roles == ("elastic",) else "pair")
    piggyback_tokens = options.get("prefill_tokens_max")
    if piggyback_tokens and (reuse is None or not reuse.enabled):
        max_share = ReuseSettings().max_share
        raise ConfigError(
            f"--option prefill_tokens_max={piggyback_tokens} needs --kv-reuse: only prompts with a "
            f"cached prefix are piggybacked; try `--kv-reuse {max_share}`"
        )
    if policy == "chunked_prefill" or piggyback_tokens:
        _ = cluster.hybrid  # fail now rather than in the middle of the run
    return made


def scheduler_with(
    costs: Costs,
    policy: str,
    options: dict[str, Any],
    reuse: ReuseSettings | None = None,
    *,
    ordering: Ordering = LEAST_SLACK,
) -> Scheduler:
    """Return a scheduler that predicts with `costs` and has no queue limits.

    Raises:
        ConfigError: the policy or option is unknown.
    """
    limits = QueueLimits(max_waiting=UNLIMITED, max_waiting_tokens=UNLIMITED)
    made = make_policy(policy, options)
    return Scheduler(made, costs, limits=limits, reuse=reuse, ordering=ordering)


def simulate(
    cluster: ClusterModel,
    policy: str,
    options: dict[str, Any],
    requests: FittedRequests,
    reuse: ReuseSettings | None = None,
    *,
    cls: str = EXACT,
    order: str = "least_slack",
    users: int | None = None,
    meter: RunMeter | None = None,
) -> SimulationResult:
    """Run one simulation.

    Args:
        cls: class of the requests that ask for no attention of their own.
        order: one of `ORDERS`.
        users: number of users in a closed loop. None: requests come at their times.
        meter: counts what happens.

    Raises:
        ConfigError: the policy or option is unknown.
    """
    scheduler = scheduler_of(cluster, policy, options, reuse, ordering=ORDERS[order])
    arrivals = arrivals_of(requests.requests, cls, told=order != FIRST_COME)
    simulator = Simulator(scheduler, cluster, arrivals, users=users, observer=meter)
    if meter is not None:
        meter.watch(scheduler)
    found = simulator.run()
    simulator.gangs.check_idle()
    scheduler.check_invariants()
    return found


def result_of(
    arguments: argparse.Namespace,
    cluster: ClusterModel,
    requests: FittedRequests,
    found: SimulationResult,
) -> Result:
    """Return the result in the format of load tests."""
    source = arguments.workload or arguments.trace.name
    facts = {
        "policy": arguments.policy,
        "policy_options": options_of(arguments.option),
        "cluster": cluster.name,
        "workload": source,
        "seed": arguments.seed,
        "loop": "open" if arguments.max_concurrency is None else "closed",
        "prompts_cut": requests.cut,
        "cached_tokens": sum(outcome.cached for outcome in found.outcomes),
        **queue_fields(found.outcomes),
        **tenant_fields(requests.requests, found.outcomes),
    }
    run = RunDescription(
        kind="simulated",
        label=f"{arguments.policy} {source}",  # a report draws one curve per label, over all rates
        model_id=cluster.name,
        request_rate=arguments.rate or math.inf,
        max_concurrency=arguments.max_concurrency,
        slo=Slo.parse(arguments.goodput),
        facts=facts,
    )
    return summarize(records_of(requests.requests, found.outcomes), run)


def _worth(name: str, count: object) -> bool:
    """Return whether a mechanism is worth a word in the summary."""
    return name != "steps" and isinstance(count, int) and count > 0


_ROWS = {
    "Requests": "num_prompts",
    "Completed": "completed",
    "Failed": "failed",
    "Prompts cut to fit": "prompts_cut",
    "Prompt tokens from cached KV": "cached_tokens",
    "Duration (s)": "duration",
    "Throughput (requests/s)": "request_throughput",
    "Goodput (requests/s)": "request_goodput",
    "Within SLO (share)": "slo_attainment",
    "Prompt and answer tokens/s": "total_token_throughput",
    "Mean queue (ms)": "mean_queue_ms",
    "P99 queue (ms)": "p99_queue_ms",
    "Mean TTFT (ms)": "mean_ttft_ms",
    "P50 TTFT (ms)": "p50_ttft_ms",
    "P99 TTFT (ms)": "p99_ttft_ms",
    "Mean TPOT (ms)": "mean_tpot_ms",
    "P99 TPOT (ms)": "p99_tpot_ms",
    "Requests with an objective": "slo_requests",
    "Objectives met": "slo_met",
}


def lines(result: Result) -> Iterator[str]:
    """Yield the lines of a printed summary."""
    rate = result["request_rate"]
    load = "its own rate" if isinstance(rate, str) else f"{rate:g} requests/s"
    yield f"{result['label']} at {load} on {result['cluster']} (seed {result['seed']})"
    for title, name in _ROWS.items():
        value = result.get(name)
        if value is not None:
            shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
            yield f"  {title + ':':<30}{shown:>16}"
    mechanisms = result.get("mechanisms")
    if mechanisms:
        sizes = mechanisms["steps_by_instances"].items()
        shown = ", ".join(f"{count} on {size}" for size, count in sizes)
        yield f"  {'Steps by instances:':<30}{shown:>16}"
        others = [f"{count:,} {name}" for name, count in mechanisms.items() if _worth(name, count)]
        yield f"  {'Mechanisms:':<30}{', '.join(others).replace('_', ' ') or 'none':>16}"
        if mechanisms["steps"]:
            busy = f"{result['prefill_utilization']:.1%}"
            yield f"  {'Prefill instances busy:':<30}{busy:>16}"
        for gang, shares in result["kv_use"].items():
            if gang != "times_s" and shares:
                yield f"  {f'Most KV in the {gang} gang:':<30}{max(shares):>16.1%}"
    for name, served in result.get("tenants", {}).items():
        tokens = f"{served['input_tokens']:,} in, {served['output_tokens']:,} out"
        yield f"  {name or 'no name'}: {served['completed']} completed, tokens {tokens}"
    for reason, count in result["failed_by_reason"].items():
        yield f"  {count} x {reason}"
