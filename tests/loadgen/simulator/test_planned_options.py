"""Bounds and sparse attention in simulations: options as a configurator plans them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from csps.configurator.costs.cost_table import ERROR_PERMILLE, Allowed, Bucket
from csps.configurator.pipeline.prefill import WHOLE, prefill_seconds
from csps.configurator.search.space import LayerGroups
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import parse_cluster
from csps.loadgen.simulator.kernel import Simulator
from csps.loadgen.simulator.planned_options import PlannedOptions
from csps.loadgen.simulator.requests import Arrival
from csps.loadgen.simulator.simulate import main, scheduler_of
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import AUTO, BOUNDED, Objective, RequestClass, parse_option
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import GroupShape

TOKENS = 24_576
"""The middle of a bucket."""
SHAPE = GroupShape((2, 2))


def data(gbps: float = 25) -> dict[str, Any]:
    steps = {size: [0.005, 2e-5 / size, 2e-10 / size, 1e-10 / size] for size in (1, 2, 4)}
    return {
        "servers": [
            {"count": 2, "instances": 2, "permissions": ["prefill"], "kv_slots": 400_000},
            {"instances": 2, "permissions": ["decode"], "kv_slots": 400_000},
        ],
        "links": {
            "inside": {"gbps": 800, "latency_us": 5},
            "between": {"gbps": gbps, "latency_us": 20},
        },
        "latency": {"steps": steps, "decode": {1: [0.005, 1e-9, 1e-4]}},
        "model": {
            "hidden": 1024,
            "heads": 8,
            "kv_heads": 2,
            "head_dim": 128,
            "layers": 4,
            "intermediate": 4096,
        },
        "rank": {
            "product_tflops": 20,
            "attention_tflops": 15,
            "memory_gb_s": 500,
            "call_us": 10,
        },
    }


def planned(gbps: float = 25) -> PlannedOptions:
    options = parse_cluster(data(gbps), name="test").options
    assert options is not None
    return options


class PlantedLosses:
    """Losses that grow with the ratio; without sparse levels there is none."""

    def groups_of(self, layers: int) -> LayerGroups:
        return LayerGroups.alike(layers)

    def of_group(self, *_: Any, **__: Any) -> Callable[[Sequence[CsaSettings]], list[float]]:
        return lambda settings: [0.05 * max(map(max, each.drop_ratios)) for each in settings]


@cache
def with_losses() -> ClusterModel:
    model = parse_cluster(data(), name="test")
    assert model.options is not None
    losses: Any = PlantedLosses()
    model.options.measured(losses)
    return model


def fixed(ratio: float) -> RequestClass:
    return RequestClass(csa=CsaSettings(drop_ratios=((ratio,),)))


def ttft_ns(model: ClusterModel, cls: str, tokens: int = TOKENS) -> int:
    """Return the time of a prompt on all instances."""
    scheduler = scheduler_of(model, "fixed_sp", {"sp": 4})
    arrivals = [Arrival(at_ns=0, prompt_tokens=tokens, output_tokens=1, cls=cls)]
    simulator = Simulator(scheduler, model, arrivals)
    (outcome,) = simulator.run().outcomes
    simulator.gangs.check_idle()
    assert not outcome.error
    return outcome.ttft_ns


def test_options_have_the_pipeline_simulators_times() -> None:
    options = planned()
    cls = fixed(0.8)
    options.add(cls)
    ((name, permille, _),) = options[Bucket(cls.row, SHAPE, 14)]
    group = options._group(SHAPE)
    settings = parse_option(name).csa
    assert settings is not None
    exact_s, sparse_s = prefill_seconds(group, [WHOLE, settings], TOKENS)
    exact = options.permille("ulysses", SHAPE, 0, TOKENS)
    assert permille / exact == pytest.approx(sparse_s / exact_s, abs=0.002)
    assert permille < exact > 1000
    assert options.permille(name, SHAPE, 0, TOKENS) == permille


def test_sparse_attention_takes_its_share_of_exact_attention() -> None:
    """The more is dropped the sooner, also in `csps simulate`."""
    model = parse_cluster(data(), name="test")
    assert model.options is not None
    exact_ns = ttft_ns(model, "exact")
    times = []
    for ratio in (0.0, 0.5, 0.9):
        cls = fixed(ratio)
        model.options.add(cls)
        times.append(ttft_ns(model, cls.key))
        ((_, permille, _),) = model.options[Bucket(cls.row, SHAPE, 14)]
        exact = model.options.permille("ulysses", SHAPE, 0, TOKENS)
        assert times[-1] == pytest.approx(exact_ns * permille / exact, rel=0.01)
    assert times == sorted(times, reverse=True)
    assert times[-1] < exact_ns


def test_exact_attention_is_the_fastest_that_loses_nothing() -> None:
    """Slow links between servers make a better order of exchanges pay."""
    options = planned(gbps=2)
    (option,) = options[Bucket(AUTO, SHAPE, 14)]
    assert option.permille < 0.9 * options.permille("ulysses", SHAPE, 0, TOKENS)
    settings = parse_option(option.strategy).csa
    assert settings is None or settings.lossless
    model = parse_cluster(data(gbps=2), name="test")
    assert ttft_ns(model, AUTO) < 0.95 * ttft_ns(model, "exact")


def test_bounds_choose_among_what_loses_little_enough() -> None:
    model = with_losses()
    times = []
    for bound in (0.0, 0.01, 0.03, 0.049):
        cls = RequestClass(objective=Objective(max_accuracy_loss=bound))
        times.append(ttft_ns(model, cls.key))
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]
    error = 1 + ERROR_PERMILLE / 1000  # for which bounds leave room
    slack_ms = error * times[0] / 1e6 + 1
    relaxed = RequestClass(objective=Objective(kind="accuracy", max_ttft_ms=slack_ms))
    hurried = RequestClass(
        objective=Objective(kind="accuracy", max_ttft_ms=error * times[2] / 1e6 + 1)
    )
    assert ttft_ns(model, relaxed.key) == times[0], "least loss first"
    assert times[0] > ttft_ns(model, hurried.key) >= times[3]


def test_nothing_is_dropped_where_no_loss_was_measured() -> None:
    cls = RequestClass(objective=Objective(max_accuracy_loss=0.5))
    options = planned()[Bucket(BOUNDED, SHAPE, 14)]
    assert all(isinstance(option, Allowed) and not option.loss_ppm for option in options)
    model = parse_cluster(data(), name="test")
    assert ttft_ns(model, cls.key) == ttft_ns(model, AUTO)


def test_a_slower_link_never_makes_an_option_faster() -> None:
    cls = fixed(0.5)
    for name in ("exact", AUTO, cls.key):
        times = []
        for gbps in (100, 25, 5):
            model = parse_cluster(data(gbps), name="test")
            assert model.options is not None
            model.options.add(cls)
            times.append(ttft_ns(model, name))
        assert times == sorted(times)


@pytest.mark.parametrize(
    "csa", [CsaSettings(nested=True), CsaSettings(importance_window=0, drop_ratios=((0.5,),))]
)
def test_what_the_pipeline_simulator_cannot_price_is_refused(csa: CsaSettings) -> None:
    with pytest.raises(ConfigError, match="cannot be simulated"):
        planned().add(RequestClass(csa=csa))
    with pytest.raises(ConfigError, match="not both"):
        planned().add(RequestClass(csa=CsaSettings(), objective=Objective()))


def test_a_rank_needs_a_model() -> None:
    without = {name: value for name, value in data().items() if name != "model"}
    with pytest.raises(ConfigError, match="rank: needs the sizes of `model`"):
        parse_cluster(without, name="test")


# --- the command -------------------------------------------------------------------------------


def test_the_command_takes_the_csps_object_of_the_api(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, result = tmp_path / "cluster.yaml", tmp_path / "result.json"
    path.write_text(yaml.safe_dump(data()))
    command = ["--cluster", str(path), "--workload", "tetris-short", "--rate", "0.2"]
    command += ["--requests", "4", "--output-len", "2", "--json", str(result)]
    ttfts = {}
    for csps in ("", "{}", '{"attention": "csa", "drop_ratio": 0.9}', '{"max_accuracy_loss": 0}'):
        assert main([*command, *(["--csps", csps] if csps else [])]) == 0
        ttfts[csps] = json.loads(result.read_text())["mean_ttft_ms"]
    exact, nothing_asked, sparse, bounded = ttfts.values()
    assert sparse < exact == nothing_asked == bounded
    capsys.readouterr()


@pytest.mark.parametrize(
    ("csps", "cluster", "message"),
    [
        ('{"attention": "csa"}', "tetris-16", "give it the speed of a rank"),
        ('{"max_accuracy_loss": 0.1}', "tetris-16", "give it the speed of a rank"),
        ('{"drop_ratio": 0.5}', "tetris-16", "drop_ratio"),
        ("[", "tetris-16", "--csps"),
    ],
)
def test_attention_that_cannot_be_simulated_is_refused(
    csps: str, cluster: str, message: str
) -> None:
    command = ["--cluster", cluster, "--workload", "tetris-short", "--rate", "1"]
    with pytest.raises(ConfigError, match=message):
        main([*command, "--requests", "2", "--csps", csps])
