"""One hardware file for every system, and the papers' baselines."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from csps.configurator.costs.latency import StepCost
from csps.loadgen.simulator.cluster_file import Arrangement, load_cluster, parse_cluster
from csps.loadgen.simulator.kernel import SimulationResult
from csps.loadgen.simulator.simulate import main, simulate
from csps.loadgen.simulator.systems import SYSTEMS, cluster_for, system_named
from csps.loadgen.workloads.generate import Arrivals, generate
from csps.loadgen.workloads.named import workload
from csps.loadgen.workloads.request import FittedRequests, WorkloadRequest
from csps.protocols.core.errors import ConfigError

POLICIES = ("chunked_prefill", "context_parallel", "csps", "fixed_sp", "loongserve", "tetris")
S = 1_000_000_000


def run(name: str, requests: FittedRequests, **options: object) -> SimulationResult:
    system = system_named(name)
    cluster = cluster_for(system, "a800-8")
    return simulate(cluster, system.policy, system.options_on(cluster, options), requests)


@pytest.mark.parametrize("name", [*POLICIES, *SYSTEMS])
def test_every_system_runs_on_the_same_gpus(name: str) -> None:
    options = {"max_batch": 64} if name == "chunked_prefill" else {}
    requests = generate(workload("l-eval"), 30, arrivals=Arrivals(rate=0.5), seed=3)
    found = run(name, requests, **options)
    assert not any(outcome.error for outcome in found.outcomes)
    ranks = {
        (gang.tp, len(gang.instances))
        for gang in (
            cluster_for(system_named(name), "a800-8").gang(role)
            for role in cluster_for(system_named(name), "a800-8").roles
        )
    }
    assert all(tp * instances <= 8 for tp, instances in ranks)


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("loongserve", (4, 2), None),
        ("tetris", (2, 2), (2, 2)),
        ("vllm_like", (1, 8), None),
        ("distserve", (1, 4), (1, 4)),
        ("replicas", (4, 2), None),
    ],
)
def test_gangs_of_a_system(
    name: str, prefill: tuple[int, int], decode: tuple[int, int] | None
) -> None:
    cluster = cluster_for(system_named(name), "a800-8")
    assert (len(cluster.prefill.instances), cluster.prefill.tp) == prefill
    assert cluster.in_place == (decode is None)
    if decode is not None:
        assert (len(cluster.decode.instances), cluster.decode.tp) == decode


def test_gangs_of_gpus_are_those_of_the_paper() -> None:
    """The slots of the released scripts, and no GPU in two instances."""
    elastic = load_cluster("a800-8", Arrangement.parse("4x2"))
    assert elastic.prefill.kv_slots == pytest.approx([210_000] * 4, rel=1e-4)
    pair = load_cluster("a800-8", Arrangement.parse("2x2+1x4"))
    places = [each.location for gang in (pair.prefill, pair.decode) for each in gang.instances]
    assert places == ["0-0-0", "0-0-2", "0-0-4"]


@pytest.mark.parametrize(
    ("gangs", "message"),
    [
        ("4x4", "no room for 2 instances of 4"),
        ("8x1", "no times of instances with 1 ranks"),
        ("4", "expected INSTANCESxRANKS"),
        ("0x2", "expected INSTANCESxRANKS"),
    ],
)
def test_gangs_that_do_not_fit_are_refused(gangs: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_cluster("a800-8", Arrangement.parse(gangs))


def test_gpus_need_gangs_and_gangs_gpus() -> None:
    with pytest.raises(ConfigError, match="name the gangs"):
        load_cluster("a800-8")
    with pytest.raises(ConfigError, match="nothing to arrange"):
        load_cluster("tetris-16", Arrangement.parse("4x2"))
    with pytest.raises(ConfigError, match="one of servers and gpus"):
        parse_cluster({"latency": {}, "links": {}}, name="none")


def alone(lengths: list[int], output: int, gap_s: float) -> FittedRequests:
    requests = [
        WorkloadRequest(
            arrival_ns=round(number * gap_s * S), input_length=length, output_length=output
        )
        for number, length in enumerate(lengths)
    ]
    return FittedRequests(requests=tuple(requests), cut=0)


def test_vllm_prefills_whole_prompts_before_it_decodes_on() -> None:
    """A second prompt stops the first one's answer for as long as it takes; chunks do not."""
    requests = alone([1000, 100_000], 200, 0.5)
    gaps = {}
    for name in ("vllm_like", "sarathi"):
        first = run(name, requests).outcomes[0].token_ns
        gaps[name] = max(b - a for a, b in pairwise(first))
    whole_ns = load_cluster("a800-8", Arrangement.parse("1x8")).table.step(1, 8).predict_ns(100_000)
    assert gaps["vllm_like"] >= whole_ns > 4 * gaps["sarathi"]


def test_single_requests_are_not_batched() -> None:
    """Short prompts that arrive together begin together, unless one starts at a time."""
    requests = alone([200] * 12, 2, 0.0)
    begins = {
        name: len({outcome.started_ns for outcome in run(name, requests).outcomes})
        for name in ("loongserve", "loongserve_single")
    }
    assert begins["loongserve_single"] > begins["loongserve"]


def test_a_pipeline_takes_as_long_as_its_stages_do() -> None:
    """Against a simulation of stages and chunks."""
    chunk, stages = 4096, 2
    flat = load_cluster("a800-8", Arrangement.parse("2x2+2x2"))
    piped = cluster_for(system_named("pipeline"), "a800-8")
    cost: StepCost = flat.table.step(1, 2)
    for chunks in (1, 2, 7, 40):
        ends_s = [0.0] * stages
        for number in range(chunks):
            begin_s = 0.0
            for stage in range(stages):
                begin_s = max(begin_s, ends_s[stage])
                begin_s += cost.predict_ns(chunk, number * chunk) / stages
                ends_s[stage] = begin_s
        predicted = piped.table.step(2, 2).predict_ns(chunks * chunk)
        assert predicted == pytest.approx(ends_s[-1], rel=1e-3)
    assert piped.table.step(1, 2) == cost


def test_the_command_knows_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "a800-8", "--workload", "sharegpt", "--rate", "1", "--requests", "5"]
    assert main(["--policy", "distserve", *words]) == 0
    assert "distserve sharegpt at 1 requests/s" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="unknown scheduling policy"):
        main(["--policy", "distserv", *words])
