"""The command `csps simulate`: run a scheduling policy on a simulated cluster."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from csps.configurator.costs.cost_table import Costs, CostTable
from csps.loadgen.bench.options import positive, rate
from csps.loadgen.results.result import Result, RunDescription, summarize, write_result
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import CLUSTERS, load_cluster
from csps.loadgen.simulator.kernel import SimulationResult, Simulator
from csps.loadgen.simulator.requests import arrivals_of, queue_fields, records_of, tenant_fields
from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import WORKLOADS, workload
from csps.loadgen.workloads.request import HASH_BLOCK_TOKENS, FittedRequests, fit
from csps.loadgen.workloads.traces import at_rate, read_trace
from csps.protocols.core.errors import ConfigError
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.limits import QueueLimits, ReuseSettings
from csps.services.scheduling.policies.registry import check_pairing, make_policy

DEFAULT_REQUESTS = 1000
UNLIMITED = 1 << 40
"""Queue limit of the simulated scheduler. Rejections would flatter a policy's latencies."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 1 if no request completed."""
    arguments = parse(argv)
    cluster = load_cluster(arguments.cluster)
    requests = chosen(arguments, cluster)
    began = time.perf_counter()
    reuse = reuse_of(arguments.kv_reuse)
    found = simulate(cluster, arguments.policy, options_of(arguments.option), requests, reuse)
    wall_s = time.perf_counter() - began
    result = result_of(arguments, cluster, requests, found)
    print("\n".join(lines(result)))
    print(f"simulated in {wall_s:.1f} s, {len(requests.requests) / wall_s:.0f} requests/s")
    if arguments.json is not None:
        write_result(result, arguments.json)
        print(f"result: {arguments.json}")
    return 0 if result["completed"] else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command's arguments."""
    clusters = ", ".join(sorted(path.stem for path in CLUSTERS.glob("*.yaml")))
    parser = argparse.ArgumentParser(
        prog="csps simulate",
        description="Run a scheduling policy on a simulated cluster (docs/simulator.md).",
    )
    parser.add_argument("--policy", default="csps", help="as in config.yaml (default: csps)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the policy, as in config.yaml; may be given several times",
    )
    parser.add_argument("--cluster", required=True, help=f"{clusters}, or a file")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workload", help=f"{', '.join(WORKLOADS)}, zipf:ALPHA")
    source.add_argument("--trace", type=Path, help="JSONL with lengths and times (Mooncake's)")
    parser.add_argument("--rate", type=rate, help="requests/s; of a trace: default as recorded")
    parser.add_argument(
        "--kv-reuse",
        type=share,
        metavar="SHARE",
        help="keep KV for prompts that begin alike (hash_ids), in so much of the slots (0 to 1)",
    )
    parser.add_argument("--requests", type=int, help="default: 1000, or the whole trace")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and times (0)")
    parser.add_argument("--output-len", type=int, help="answers have at most so many tokens")
    parser.add_argument(
        "--arrival-speedup-ratio", type=positive, default=1.0, help="of a trace without a rate"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    arguments = parser.parse_args(argv)
    if arguments.workload and arguments.rate is None:
        parser.error("--workload needs a --rate")
    return arguments


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
            arrivals=Arrivals(rate=arguments.rate),
            seed=arguments.seed,
            size=Size(positions=cluster.max_positions, longest_output=arguments.output_len),
        )
    requests = read_trace(arguments.trace, speedup=arguments.arrival_speedup_ratio)
    requests = requests[: arguments.requests]
    if not requests:
        raise ConfigError(f"{arguments.trace} has no requests")
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
) -> Scheduler:
    """Return the live router's scheduler, which predicts with the cluster's latencies.

    Raises:
        ConfigError: the policy or option is unknown, the policy cannot use such gangs, or
            piggybacked prefill lacks a prefix cache or measured latencies.
    """
    table = CostTable(
        latencies=cluster.table, buckets={} if cluster.options is None else cluster.options
    )
    made = scheduler_with(Costs(table), policy, options, reuse)
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
    costs: Costs, policy: str, options: dict[str, Any], reuse: ReuseSettings | None = None
) -> Scheduler:
    """Return a scheduler that predicts with `costs` and has no queue limits.

    Raises:
        ConfigError: the policy or option is unknown.
    """
    limits = QueueLimits(max_waiting=UNLIMITED, max_waiting_tokens=UNLIMITED)
    return Scheduler(make_policy(policy, options), costs, limits=limits, reuse=reuse)


def simulate(
    cluster: ClusterModel,
    policy: str,
    options: dict[str, Any],
    requests: FittedRequests,
    reuse: ReuseSettings | None = None,
) -> SimulationResult:
    """Run one simulation.

    Raises:
        ConfigError: the policy or option is unknown.
    """
    scheduler = scheduler_of(cluster, policy, options, reuse)
    simulator = Simulator(scheduler, cluster, arrivals_of(requests.requests))
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
        facts=facts,
    )
    return summarize(records_of(found.outcomes), run)


_ROWS = {
    "Requests": "num_prompts",
    "Completed": "completed",
    "Failed": "failed",
    "Prompts cut to fit": "prompts_cut",
    "Prompt tokens from cached KV": "cached_tokens",
    "Duration (s)": "duration",
    "Throughput (requests/s)": "request_throughput",
    "Prompt and answer tokens/s": "total_token_throughput",
    "Mean queue (ms)": "mean_queue_ms",
    "P99 queue (ms)": "p99_queue_ms",
    "Mean TTFT (ms)": "mean_ttft_ms",
    "P50 TTFT (ms)": "p50_ttft_ms",
    "P99 TTFT (ms)": "p99_ttft_ms",
    "Mean TPOT (ms)": "mean_tpot_ms",
    "P99 TPOT (ms)": "p99_tpot_ms",
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
    for name, served in result.get("tenants", {}).items():
        tokens = f"{served['input_tokens']:,} in, {served['output_tokens']:,} out"
        yield f"  {name or 'no name'}: {served['completed']} completed, tokens {tokens}"
    for reason, count in result["failed_by_reason"].items():
        yield f"  {count} x {reason}"
