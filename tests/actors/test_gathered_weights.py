"""SP-NTP with gathered weights against the forward pass of one member that has everything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from strategy_ranks import StrategyRanks, job_of, strategy_ranks
from tiny_checkpoints import make_checkpoint

from csps.actors.job_clock import JobClock
from csps.actors.strategies.gathered_layers import GatheredLayers
from csps.actors.strategies.gathered_weights import GatheredWeights
from csps.actors.transfers import Transfers
from csps.protocols.messages import KvShare, Span

MODELS: dict[str, dict[str, Any]] = {
    "gqa": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "mqa": {"num_attention_heads": 4, "num_key_value_heads": 1},
    "biased": {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True},
    "qk-norm": {"family": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2},
}

Gangs = Callable[[str, int, int], StrategyRanks]


@pytest.fixture(scope="module")
def gangs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gangs]:
    """Starts each gang once."""
    started: dict[tuple[str, int, int], StrategyRanks] = {}
    with ExitStack() as stack:

        def gang(model: str, instances: int, tp: int) -> StrategyRanks:
            key = model, instances, tp
            if key not in started:
                config = {"num_hidden_layers": 3, **MODELS[model]}
                path = make_checkpoint(tmp_path_factory.mktemp(model), **config)
                started[key] = stack.enter_context(strategy_ranks(path, instances=instances, tp=tp))
            return started[key]

        yield gang


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gathered_layers_are_the_whole_ones(gangs: Gangs, model: str, tp: int) -> None:
    gang = gangs(model, 1, tp)

    def weights(rank: int) -> list[dict[str, torch.Tensor | None]]:
        engine = gang.engines[rank]
        with Transfers(engine.mesh, JobClock()) as transfers:
            layers = GatheredLayers(engine, transfers)
            layers.prefetch(1)
            whole = [layers.layer(1), layers.layer(0)]
        return [{name: vars(w.weights)[name] for name in ATTENTION} for w in whole]

    for gathered in gang.world.each(tp, weights):
        for index, parameters in zip((1, 0), gathered, strict=True):
            for name, actual in parameters.items():
                expected = vars(gang.network.layers[index].weights)[name]
                assert (actual is None) == (expected is None)
                assert actual is None or torch.equal(actual, expected), name


ATTENTION = ("input_norm", "qkv", "qkv_bias", "output", "output_bias", "query_norm", "key_norm")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("instances", "tp"), [(1, 2), (2, 2), (1, 4), (2, 1)])
def test_equals_one_member(gangs: Gangs, model: str, instances: int, tp: int) -> None:
    gang = gangs(model, instances, tp)
    job = job_of([0, 21, 48] if instances == 2 else [0, 48], [5, 40, 3])
    gang.check(job, gang.run(job, GatheredWeights), gang.forwards(job))


def test_instance_without_rows_and_more_ranks_than_heads(gangs: Gangs) -> None:
    gang = gangs("gqa", 3, 2)
    job = job_of([0, 30, 30, 33], [33])
    gang.check(job, gang.run(job, GatheredWeights), gang.forwards(job))


@pytest.mark.parametrize("tp", [2, 4])
def test_history_wherever_it_lies(gangs: Gangs, tp: int) -> None:
    gang = gangs("gqa", 2, tp)
    shares = [
        KvShare(instance=1, span=Span(start=0, stop=7)),
        KvShare(instance=0, span=Span(start=7, stop=19)),
        KvShare(instance=1, span=Span(start=19, stop=20)),
    ]
    job = job_of([0, 12, 25], [4, 15, 6], starts=[0, 20, 0], history=[[], shares, []])
    forwards = gang.forwards(job)
    gang.hold_history(job, forwards)
    try:
        gang.check(job, gang.run(job, GatheredWeights), forwards)
    finally:
        for engine in gang.engines:
            engine.pool.free_request(1)
