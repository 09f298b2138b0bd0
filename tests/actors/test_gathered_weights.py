"""SP-NTP with gathered weights against the forward pass of one member that has everything."""

from __future__ import annotations

import pytest
import torch
from small_blocks import blocks_of
from strategy_ranks import LAYERS, Gangs, check_scattered_history, step_of

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.sp_tp.gathered_weights import GatheredLayers, GatheredWeights
from csps.actors.comm.transfers import Transfers
from csps.actors.timing.timeline import PhaseTimeline, StepClock

MODELS = ("gqa", "mqa", "biased", "qk-norm", "experts")
ATTENTION = ("input_norm", "qkv", "qkv_bias", "output", "output_bias", "query_norm", "key_norm")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gathered_layers_are_the_whole_ones(gangs: Gangs, model: str, tp: int) -> None:
    gang = gangs(model, 1, tp)

    def weights(rank: int) -> list[dict[str, torch.Tensor | None]]:
        engine = gang.engines[rank]
        with Transfers(engine.mesh, StepClock()) as transfers:
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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("instances", "tp"), [(1, 2), (2, 2), (1, 4), (2, 1)])
def test_equals_one_member(gangs: Gangs, model: str, instances: int, tp: int) -> None:
    gang = gangs(model, instances, tp)
    step = step_of([0, 21, 48] if instances == 2 else [0, 48], [5, 40, 3])
    gang.check(step, gang.run(step, GatheredWeights), gang.forwards(step))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", [1, 7])
def test_equals_one_member_in_blocks_of_queries(gangs: Gangs, model: str, rows: int) -> None:
    gang, step = gangs(model, 2, 2), step_of([0, 21, 48], [5, 40, 3])
    with blocks_of(rows):
        gang.check(step, gang.run(step, GatheredWeights), gang.forwards(step))


def test_instance_without_rows_and_more_ranks_than_heads(gangs: Gangs) -> None:
    gang = gangs("gqa", 3, 2)
    step = step_of([0, 30, 30, 33], [33])
    gang.check(step, gang.run(step, GatheredWeights), gang.forwards(step))


@pytest.mark.parametrize("tp", [2, 4])
def test_history_may_be_on_any_instance(gangs: Gangs, tp: int) -> None:
    check_scattered_history(gangs("gqa", 2, tp), GatheredWeights)


@pytest.mark.parametrize(("instances", "tp"), [(1, 2), (2, 2)])
def test_weights_travel_while_the_layer_before_computes(
    gloo_gangs: Gangs, instances: int, tp: int
) -> None:
    def with_timeline(group: SpGroup, engine: Engine) -> GatheredWeights:
        group.clock.timeline = PhaseTimeline(on=True)
        return GatheredWeights(group, engine)

    step = step_of([0, 21, 48] if instances == 2 else [0, 48], [5, 40, 3])
    for result in gloo_gangs("gqa", instances, tp).run(step, with_timeline):
        events = result.clock.timeline.events
        gathers = {e.layer: e.start_ns for e in events if e.name == "all-gather"}
        # No weights are gathered for the last layer, which a rank computes without a strategy.
        for layer in range(LAYERS - 2):
            attentions = [e for e in events if (e.name, e.layer) == ("attention", layer)]
            assert gathers[layer + 1] < min(e.end_ns for e in attentions)
