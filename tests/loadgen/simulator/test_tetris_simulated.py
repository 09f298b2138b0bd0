"""Tetris in the simulator: its offline profile, and the order of policies at one load per trace."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from csps.configurator.model.scaling_information_base import Identity, ScalingInformationBase
from csps.loadgen.simulator.cluster import LinkModel
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.rates_command import main, planner_of, profile, sampler_of, ttfts_ns
from csps.loadgen.simulator.simulate import simulate
from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import workload
from csps.services.measured import scheduler_inputs as improvement_source
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.policies.tetris.options import FIT, WINDOW_S, ImprovementRates
from csps.services.settings.settings import Settings

CLUSTER = replace(load_cluster("tetris-16"), inside=None, between=None)
UNLIMITED = {"max_batch": 1 << 20}
IDENTITY = Identity(weights="w", dtype="f", device="d", cores=1, torch="2", ranks_per_core=1.0)


def simulated(trace: str, load: float, policy: str, requests: int, **options: object) -> list[int]:
    """Return TTFTs in nanoseconds; KV arrives at once, answers have one token."""
    size = Size(positions=CLUSTER.max_positions, longest_output=1)
    fitted = generate(workload(trace), requests, arrivals=Arrivals(rate=load), seed=7, size=size)
    run = simulate(CLUSTER, policy, {**UNLIMITED, **options}, fitted)
    return [outcome.ttft_ns for outcome in run.outcomes]


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_plans_come_true(rate: float) -> None:
    """Planned times of the profile equal those of scheduler and ranks, up to a microsecond of
    rounding for each earlier chunk.
    """
    planner = planner_of(CLUSTER, 512)
    prompts = sampler_of(workload("tetris-medium"), CLUSTER, requests=150, seed=7)(3.0)
    found = simulated("tetris-medium", 3.0, "tetris", 150, improvement_rate=rate)
    expected = ttfts_ns(planner, prompts, rate)
    assert found == pytest.approx(expected, abs=1_000_000)


def test_plans_do_not_depend_on_the_clock() -> None:
    """A rate asks for an improvement of the time from now, whatever time it is. Compared with times
    since the start, thresholds would grow with the clock and all prompts would get one instance."""
    size = Size(positions=CLUSTER.max_positions, longest_output=1)
    load = generate(workload("tetris-medium"), 80, arrivals=Arrivals(rate=3.0), seed=7, size=size)
    late_ns = 1_000_000_000_000_000
    later = tuple(
        replace(request, arrival_ns=request.arrival_ns + late_ns) for request in load.requests
    )
    options = {**UNLIMITED, "improvement_rate": 0.3}
    early, late = (
        simulate(CLUSTER, "tetris", options, replace(load, requests=requests)).outcomes
        for requests in (load.requests, later)
    )
    assert [outcome.ttft_ns for outcome in late] == [outcome.ttft_ns for outcome in early]


def test_balanced_history_takes_time() -> None:
    """With slow links between the members of growing groups, most prompts take longer."""
    slow = LinkModel(bytes_per_s=2_000_000_000, latency_ns=10_000, shared=False)
    size = Size(positions=CLUSTER.max_positions, longest_output=1)
    load = generate(workload("tetris-long"), 80, arrivals=Arrivals(rate=1.5), seed=7, size=size)
    options = {**UNLIMITED, "improvement_rate": 0.0}
    free, priced = (
        simulate(replace(CLUSTER, inside=link, between=link), "tetris", options, load).outcomes
        for link in (None, slow)
    )
    mean_ns = [statistics.fmean(each.ttft_ns for each in found) for found in (free, priced)]
    assert mean_ns[1] > 1.01 * mean_ns[0]


def test_chunks_gain_at_the_same_rate() -> None:
    whole = simulated("tetris-long", 1.5, "tetris", 200, improvement_rate=0.0, chunked=False)
    cut = simulated("tetris-long", 1.5, "tetris", 200, improvement_rate=0.0)
    assert statistics.median(cut) < statistics.median(whole)


@pytest.mark.parametrize(
    ("trace", "load"), [("tetris-short", 4.6), ("tetris-medium", 3.3), ("tetris-long", 2.0)]
)
def test_the_order_of_policies(trace: str, load: float) -> None:
    """The load is slightly too high for Fixed-SP 8."""
    medians = [
        statistics.median(simulated(trace, load, policy, 300, **options))
        for policy, options in (
            ("tetris", {"improvement_rate": 0.5}),
            ("fixed_sp", {"sp": 8}),
            ("tetris", {"improvement_rate": 0, "chunked": False}),
            ("fixed_sp", {"sp": 16}),
        )
    ]
    assert medians == sorted(medians)
    assert medians[0] * 1.15 < medians[1]


def test_the_best_rate_grows_with_the_load() -> None:
    """Within noise."""
    sampler = sampler_of(workload("tetris-long"), CLUSTER, requests=150)
    records = profile(planner_of(CLUSTER, 512), sampler, rates=(0.05, 0.25, 0.5, 0.75))
    loads, rates = zip(*records, strict=True)
    assert loads == tuple(0.5 * (index + 1) for index in range(len(loads)))
    assert rates[0] <= 0.25 < max(rates)
    assert all(later >= min(0.5, rate) - 0.25 for rate, later in pairwise(rates))


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["tetris-short", "tetris-medium", "tetris-long"])
def test_the_table_beats_every_fixed_rate_on_fresh_seeds(trace: str) -> None:
    """The margin is 5 %, over all loads that can be sustained, each with equal weight."""
    planner, rates = planner_of(CLUSTER, 512), (0.05, 0.2, 0.35, 0.5, 0.65, 0.75)
    profiled = sampler_of(workload(trace), CLUSTER, requests=400, seed=0)
    records = profile(planner, profiled, rates=rates)[:-1]
    table = ImprovementRates(records)
    fresh = [sampler_of(workload(trace), CLUSTER, requests=400, seed=seed) for seed in (1, 2, 3)]
    means = {
        (load, rate): statistics.fmean(
            ttft for sampler in fresh for ttft in ttfts_ns(planner, sampler(load), rate)
        )
        for load, _ in records
        for rate in rates
    }
    looked_up = [means[load, table.at(round(load * WINDOW_S))] for load, _ in records]
    for rate in rates:
        fixed = [means[load, rate] for load, _ in records]
        assert statistics.geometric_mean(looked_up) <= 1.05 * statistics.geometric_mean(fixed)


def test_the_command_prints_and_keeps_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "sib.sqlite"
    ScalingInformationBase.create(path, IDENTITY).close()
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 100 * n, "input_length": 30_000, "output_length": 1} for n in range(6)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    main(["--cluster", "tetris-16", "--trace", str(trace), "--sib", str(path)])
    printed = capsys.readouterr().out.removesuffix(f"stored in {path}\n")
    records = yaml.safe_load(printed)["improvement_rates"]
    make_policy("tetris", {"improvement_rates": records})
    with ScalingInformationBase.create(path, IDENTITY) as base:
        fit = base.latest_fit(FIT)
    assert fit is not None
    assert json.loads(fit.canonical) == records
    # The router finds them, where nothing else is set.
    monkeypatch.setattr(improvement_source, "identity_of", lambda settings: IDENTITY)
    for given, expected in (
        ({}, records),
        ({"improvement_rate": 0.3}, None),
        ({"improvement_rates": [[1, 0.5]]}, [[1, 0.5]]),
    ):
        settings = Settings.model_validate(
            {"scaling_information_base": str(path), "scheduling": {"policy": "tetris", **given}}
        )
        options = improvement_source.scheduling_options(settings)
        assert options.get("improvement_rates") == expected
