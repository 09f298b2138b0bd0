"""The live scheduler in the simulator: queueing theory, and what no simulation may do."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small_cluster import POLICIES, cluster
from small_cluster import options_of as policy_options

from csps.configurator.costs.latency import LatencyKey, StepCost
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.kernel import Abandoned, GangFault, SimulationResult, Simulator
from csps.loadgen.simulator.requests import Arrival
from csps.loadgen.simulator.simulate import main, scheduler_of
from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.members import GangRole
from csps.services.scheduling.events.events import AnyEvent

UNBOUNDED = {"max_batch": 1 << 30}
"""A batch limit that never delays a request."""


def run(
    cluster: ClusterModel, policy: str, options: dict[str, Any], arrivals: Sequence[Arrival]
) -> SimulationResult:
    scheduler = scheduler_of(cluster, policy, options)
    simulator = Simulator(scheduler, cluster, arrivals)
    found = simulator.run()
    simulator.gangs.check_idle()
    scheduler.check_invariants()
    return found


def poisson(rng: random.Random, requests: int, rate: float) -> list[int]:
    now, times = 0.0, []
    for _ in range(requests):
        now += rng.expovariate(rate) * 1e9
        times.append(round(now))
    return times


def prompts(rng: random.Random, requests: int, rate: float) -> list[Arrival]:
    return [
        Arrival(at_ns=at, prompt_tokens=round(rng.lognormvariate(9.8, 0.8)) + 16, output_tokens=1)
        for at in poisson(rng, requests, rate)
    ]


def chats(rng: random.Random, requests: int, rate: float) -> list[Arrival]:
    return [
        replace(prompt, output_tokens=(tokens := rng.randint(1, 120)), max_tokens=max(tokens, 64))
        for prompt in prompts(rng, requests, rate)
    ]


@pytest.mark.parametrize("rate", [0.5, 1.0, 1.5])
def test_fixed_sp_on_all_instances_is_lindleys_recursion(rate: float) -> None:
    """M/G/1, bit for bit; that its mean wait is Pollaczek and Khinchine's follows
    (`test_kernel.py` holds the same loop to it)."""
    cluster = load_cluster("tetris-16")
    arrivals = prompts(random.Random(1), 400, rate)
    outcomes = run(cluster, "fixed_sp", {"sp": 16, **UNBOUNDED}, arrivals).outcomes
    free_ns = 0
    for outcome, arrival in zip(outcomes, arrivals, strict=True):
        began = max(arrival.at_ns, free_ns)
        free_ns = began + cluster.table.step(16).predict_ns(arrival.prompt_tokens)
        assert (outcome.started_ns, outcome.first_token_ns) == (began, free_ns)


def test_two_groups_of_eight_are_a_queue_with_two_servers() -> None:
    """M/D/2, first come, first served."""
    cluster = load_cluster("tetris-16")
    work_ns = cluster.table.step(8).predict_ns(32_768)
    times = poisson(random.Random(2), 500, 1.7e9 / work_ns)
    arrivals = [Arrival(at_ns=at, prompt_tokens=32_768, output_tokens=1) for at in times]
    outcomes = run(cluster, "fixed_sp", {"sp": 8, **UNBOUNDED}, arrivals).outcomes
    servers = [0, 0]
    for outcome in outcomes:
        servers.sort()
        began = max(outcome.arrival.at_ns, servers[0])
        servers[0] = began + work_ns
        assert outcome.started_ns == began


@pytest.mark.parametrize(("policy", "elastic"), POLICIES)
def test_littles_law_and_nothing_lost(policy: str, elastic: bool) -> None:
    arrivals = chats(random.Random(3), 60, 2.0)
    model = cluster(elastic=elastic)
    found = run(model, policy, policy_options(policy), arrivals)
    steps = sorted(
        [(outcome.arrival.at_ns, 1) for outcome in found.outcomes]
        + [(outcome.ended_ns, -1) for outcome in found.outcomes]
    )
    inside = area = 0
    for (at, change), (later, _) in pairwise(steps):
        inside += change
        area += inside * (later - at)
    assert area == sum(outcome.ended_ns - outcome.arrival.at_ns for outcome in found.outcomes)
    assert [outcome.generated_tokens for outcome in found.outcomes] == [
        arrival.output_tokens for arrival in arrivals
    ]
    assert not any(outcome.error for outcome in found.outcomes)
    # Decode iterations sample every token but those that steps or prompt chunks do.
    assert found.decoded == sum(arrival.output_tokens - 1 for arrival in arrivals)
    for outcome in found.outcomes:
        assert outcome.token_ns == sorted(set(outcome.token_ns))
        assert len(outcome.token_ns) == outcome.generated_tokens
        assert outcome.arrival.at_ns <= outcome.started_ns < outcome.token_ns[0]
        assert outcome.token_ns[-1] == outcome.ended_ns


@pytest.mark.parametrize(("policy", "elastic"), POLICIES)
def test_decisions_know_nothing_of_the_future(policy: str, elastic: bool) -> None:
    """Cutting the trace, or other lengths of unfinished answers, change no earlier turn."""
    model = cluster(elastic=elastic)
    rng = random.Random(4)
    arrivals = [
        replace(prompt, output_tokens=80, max_tokens=256) for prompt in prompts(rng, 30, 2.0)
    ]
    cut_ns = arrivals[18].at_ns

    def rounds(changed: Sequence[Arrival]) -> list[str]:
        seen: list[str] = []

        def observe(now_ns: int, events: object, commands: object) -> None:
            if now_ns < cut_ns:
                seen.append(f"{now_ns} {events} {commands}")

        scheduler = scheduler_of(model, policy, policy_options(policy))
        Simulator(scheduler, model, changed, observer=observe).run()
        return seen

    whole = rounds(arrivals)
    outcomes = run(model, policy, policy_options(policy), arrivals).outcomes
    later = [
        arrival if outcome.ended_ns < cut_ns else replace(arrival, output_tokens=200)
        for arrival, outcome in zip(arrivals, outcomes, strict=True)
    ]
    assert later != arrivals
    assert len(whole) > 18
    assert whole == rounds(later)
    # A trace that ends there has no round after its last request.
    assert whole[: len(rounds(arrivals[:18]))] == rounds(arrivals[:18])


@pytest.mark.parametrize(("policy", "elastic"), POLICIES)
def test_replayed_events_lead_to_the_same_decisions(policy: str, elastic: bool) -> None:
    """A fresh scheduler answers the events of a simulation with the same commands."""
    model, arrivals = cluster(elastic=elastic), chats(random.Random(8), 40, 3.0)
    turns: list[tuple[int, list[AnyEvent], str]] = []

    def observe(now_ns: int, events: Sequence[AnyEvent], commands: object) -> None:
        turns.append((now_ns, list(events), repr(commands)))

    first, again = (scheduler_of(model, policy, policy_options(policy)) for _ in range(2))
    Simulator(first, model, arrivals, observer=observe).run()
    assert len(turns) > 40
    for now_ns, events, commands in turns:
        assert repr(again.handle(events, now_ns).commands) == commands
    again.check_invariants()


def test_a_slower_machine_with_fewer_requests_takes_its_times() -> None:
    """Coefficients times k, rates over k: all times times k, but for what was rounded down."""
    cluster = load_cluster("tetris-16")
    arrivals = prompts(random.Random(5), 200, 1.5)
    slow = replace(
        cluster,
        table=replace(
            cluster.table,
            steps=tuple((shape, _times(cost, 3)) for shape, cost in cluster.table.steps),
        ),
    )
    later = [replace(arrival, at_ns=3 * arrival.at_ns) for arrival in arrivals]
    options = {"sp": 8, **UNBOUNDED}
    once = run(cluster, "fixed_sp", options, arrivals).outcomes
    threefold = run(slow, "fixed_sp", options, later).outcomes
    for a, b in zip(once, threefold, strict=True):
        assert abs(b.first_token_ns - 3 * a.first_token_ns) < 3 * len(arrivals)


def _times(cost: StepCost, k: int) -> StepCost:
    return StepCost(a=k * cost.a, b=k * cost.b, c=k * cost.c, d=k * cost.d)


@pytest.mark.parametrize(("policy", "elastic"), POLICIES)
def test_requests_go_on_when_gangs_die(policy: str, elastic: bool) -> None:
    """Every answer is whole, every slot is freed, and cancelled requests get nothing more."""
    model = cluster(elastic=elastic)
    arrivals = chats(random.Random(6), 70, 3.0)
    first: GangRole = "elastic" if elastic else "decode"
    second: GangRole = "elastic" if elastic else "prefill"
    faults = [
        GangFault(at_ns=arrivals[20].at_ns + 50_000_000, role=first),
        GangFault(at_ns=arrivals[20].at_ns + 4_000_000_000, role=first, up=True),
        GangFault(at_ns=arrivals[55].at_ns + 50_000_000, role=second),
        GangFault(at_ns=arrivals[55].at_ns + 1_000_000_000, role=second, up=True),
    ]
    gone = [
        Abandoned(at_ns=arrivals[index].at_ns + 300_000_000, request=index + 1) for index in (5, 50)
    ]
    scheduler = scheduler_of(model, policy, policy_options(policy))
    simulator = Simulator(scheduler, model, arrivals, faults=faults, abandoned=gone)
    outcomes = simulator.run().outcomes
    simulator.gangs.check_idle()
    scheduler.check_invariants()
    assert max(outcome.sequences for outcome in outcomes) > 1
    for outcome in outcomes:
        if not outcome.error:
            assert (
                outcome.generated_tokens == outcome.arrival.output_tokens == len(outcome.token_ns)
            )
    assert {outcome.error for outcome in outcomes} <= {"", "Cancelled"}


def test_requests_that_find_no_slots_wait_for_them() -> None:
    """A lack of slots delays the first request and thereby all, but loses none."""
    cluster = load_cluster("tetris-16")
    small = replace(
        cluster,
        decode=replace(
            cluster.decode,
            instances=tuple(
                replace(instance, kv_slots=21_000) for instance in cluster.decode.instances
            ),
        ),
    )
    rng = random.Random(7)
    arrivals = [
        Arrival(at_ns=at, prompt_tokens=rng.randint(16, 20_000), output_tokens=400)
        for at in poisson(rng, 150, 3.0)
    ]
    short = run(small, "fixed_sp", {"sp": 16}, arrivals).outcomes
    roomy = run(cluster, "fixed_sp", {"sp": 16}, arrivals).outcomes
    assert [outcome.generated_tokens for outcome in short] == [400] * 150
    assert all(a.started_ns >= b.started_ns for a, b in zip(short, roomy, strict=True))
    assert sum(a.started_ns - b.started_ns for a, b in zip(short, roomy, strict=True)) > 10**9


# --- the command -------------------------------------------------------------------------------

ARGUMENTS = ["--cluster", "tetris-16", "--workload", "tetris-short", "--rate", "2"]


def test_the_same_decisions_and_times_whatever_the_hash_seed() -> None:
    """Of all policies: no set or hash decides anything."""
    here = Path(__file__).parent
    code = """
import hashlib
from test_policies_simulated import *
for policy, elastic in POLICIES:
    model, digest = cluster(elastic=elastic), hashlib.sha256()
    def observe(now_ns, events, commands):
        digest.update(f"{now_ns} {events} {commands}".encode())
    scheduler = scheduler_of(model, policy, policy_options(policy))
    arrivals = chats(random.Random(9), 15, 3.0)
    found = Simulator(scheduler, model, arrivals, observer=observe).run()
    times = [outcome.token_ns for outcome in found.outcomes]
    print(policy, elastic, digest.hexdigest(), hashlib.sha256(repr(times).encode()).hexdigest())
"""
    folders = [str(here), str(here.parents[1]), *sys.path]
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(folders)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) == len(POLICIES)


def test_the_command_prints_and_writes_what_load_tests_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    options = ["--policy", "fixed_sp", "--option", "sp=8", "--requests", "50", "--json", str(path)]
    assert main([*ARGUMENTS, *options]) == 0
    printed = capsys.readouterr().out
    assert "Mean TTFT (ms)" in printed
    result = json.loads(path.read_text())
    assert (result["schema"], result["kind"]) == ("csps.results", "simulated")
    assert result["completed"] == 50
    assert result["policy_options"] == {"sp": 8}
    assert result["mean_queue_ms"] <= result["mean_ttft_ms"]
    assert len(result["ttfts"]) == 50


def test_a_trace_is_replayed_at_a_rate_of_ones_own(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * index, "input_length": 2000, "output_length": 5} for index in range(20)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "result.json"
    arguments = ["--cluster", "local", "--trace", str(trace), "--json", str(path)]
    assert main(arguments) == 0
    recorded = json.loads(path.read_text())["start_times"]
    assert main([*arguments, "--rate", "2"]) == 0
    stretched = json.loads(path.read_text())["start_times"]
    assert recorded[-1] == pytest.approx(1.9)
    assert stretched[-1] == pytest.approx(9.5)


def test_tenants_of_a_trace_share_fairly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one whose requests came a moment later does not wait for all of the other's."""
    trace, path = tmp_path / "trace.jsonl", tmp_path / "result.json"
    rows = [
        {"timestamp": at, "input_length": 4000, "output_length": 5, "tenant": name}
        for at, name in ((0, "ada"), (1, "bob"))
        for _ in range(40)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["--cluster", "local", "--trace", str(trace), "--json", str(path)]) == 0
    tenants = json.loads(path.read_text())["tenants"]
    assert "bob: 40 completed, tokens 160,000 in, 200 out" in capsys.readouterr().out
    assert tenants["ada"]["input_tokens"] == tenants["bob"]["input_tokens"] == 160_000
    assert tenants["bob"]["mean_ttft_ms"] < 1.5 * tenants["ada"]["mean_ttft_ms"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*ARGUMENTS, "--policy", "tetriss"], "unknown scheduling policy"),
        ([*ARGUMENTS, "--option", "spt_tokens"], "expected NAME=VALUE"),
        ([*ARGUMENTS, "--option", "spt_token=3"], "did you mean 'spt_tokens'"),
        (["--cluster", "local", "--workload", "tetris", "--rate", "1"], "unknown workload"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        main([*arguments, "--requests", "2"])


def test_every_shape_of_group_has_a_time() -> None:
    """Sizes between those of Table 1 are interpolated, and larger groups are faster at length."""
    table = load_cluster("tetris-16").table
    assert LatencyKey(strategy="ring_kv", sp=16) in dict(table.steps)
    times = [table.step(sp).predict_ns(131_072) for sp in range(1, 17)]
    assert times == sorted(times, reverse=True)
