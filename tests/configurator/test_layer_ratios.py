"""A model whose layers lose very differently gets very different ratios, in the search and live."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from pipeline_groups import group

from csps.configurator.model.scaling_information_base import SpreadRow
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.program import LinkSpeed
from csps.configurator.plan.predicted_options import (
    DirectAnswerer,
    PredictedOptions,
    answered_space,
)
from csps.configurator.plan.strategy_rules import StrategyRules
from csps.configurator.regressors.accuracy import AccuracyModel, train_accuracy
from csps.configurator.regressors.direct import Predicted
from csps.configurator.regressors.samples import (
    AccuracySample,
    Setting,
    measured_groups,
    places_of,
)
from csps.configurator.search.search import SearchProblem, compared, enumerated, tuned
from csps.configurator.search.space import ImportanceScoring, LayerGroups, Space
from csps.protocols.attention.csa import CsaSettings, Ratios
from csps.protocols.attention.plan import (
    Objective,
    StrategyChoices,
    StrategyQuestion,
    StrategyQuestions,
    parse_option,
)
from csps.protocols.core.topology import GroupShape
from csps.protocols.rpc.schema import pack, unpack

LAYERS, KV_HEADS, TOKENS, SHAPE = 8, 2, 8_192, "2+2"
TOLERATED = {1: 0.98, 2: 0.3, 3: 0.98, 4: 0.3, 5: 0.98, 6: 0.98}
"""Ratio beyond which each layer loses answers."""
SPREADS = [
    SpreadRow(tokens=1_024, layer=layer, kv_head=head, window=64, prompts=6, spread=1.0, date="d")
    for layer in range(LAYERS)
    for head in range(KV_HEADS)
]
ANCHORS = (0.1, 0.3, 0.5, 0.7, 0.9, 0.98)


def sample(ratios: Ratios, tokens: int) -> AccuracySample:
    csa = CsaSettings(drop_ratios=ratios, importance_layer="same", strategy="ntp")
    setting = Setting(tokens=tokens, locations=places_of(SHAPE), layers=LAYERS, csa=csa)
    of_layers = largest(ratios)
    lost = sum(max(0.0, of_layers[layer] - most) for layer, most in TOLERATED.items())
    right = max(0, 400 - round(200 * lost))
    return AccuracySample(setting=setting, questions=400, right_exact=400, right=right)


def largest(ratios: Ratios) -> dict[int, float]:
    return {layer: max(ratios[min(layer, len(ratios) - 1)]) for layer in TOLERATED}


@pytest.fixture(scope="module")
def learned() -> AccuracyModel:
    by_spread = LayerGroups.alike(LAYERS)
    samples = [
        sample(by_spread.one_layer(layer, ratio), 1_024)
        for layer in TOLERATED
        for ratio in (0.3, 0.7, 0.9, 0.98)
    ]
    groups = measured_groups(SPREADS, samples, layers=LAYERS)
    for tokens in (1_024, 16_384):
        samples += [sample(((anchor,),), tokens) for anchor in ANCHORS]
        samples += [sample(groups.graded(anchor), tokens) for anchor in ANCHORS]
    return train_accuracy(samples, {}, groups)


TWO_BY_TWO = GroupShape((2, 2)).places


def group_of(places: Sequence[str]) -> SimulatedGroup:
    slow = LinkSpeed(bytes_per_s=2e7, latency_s=2e-4)
    return group(tuple(places), layers=LAYERS, kv_heads=KV_HEADS, between=slow)


def test_layers_that_tolerate_alike_share_a_ratio(learned: AccuracyModel) -> None:
    assert learned.groups is not None
    assert learned.groups.members == ((0, 1, 3, 5, 6, 7), (2, 4))
    assert learned.groups_of(32).all_alike, "another model"


def test_without_losses_of_layers_their_spreads_relate_ratios() -> None:
    spreads = [0.9, 0.8, 0.2, 0.4, 0.4, 0.4, 0.8, 0.9]
    rows = [
        SpreadRow(tokens=1, layer=layer, kv_head=head, window=64, prompts=1, spread=each, date="d")
        for layer, of_layer in enumerate(spreads)
        for head, each in enumerate((of_layer, of_layer / 4))
    ]
    found = measured_groups(rows, (), layers=LAYERS)
    assert found.members == ((0, 1, 6, 7), (2,), (3, 4, 5))
    assert found.graded(0.8)[:4] == ((0.8, 0.2), (0.8, 0.2), (0.2, 0.05), (0.4, 0.1))
    longer = [SpreadRow(**{**vars(row), "tokens": 2, "spread": 1.0}) for row in rows]
    assert measured_groups([*longer, *rows], (), layers=LAYERS) == found
    assert measured_groups(rows[:6], (), layers=LAYERS).all_alike, "not all layers were measured"


def test_the_search_drops_where_nothing_is_lost(learned: AccuracyModel) -> None:
    of = group_of(TWO_BY_TWO)
    problem = SearchProblem(group=of, tokens=TOKENS, objective=Objective(max_accuracy_loss=0.0))
    loss = learned.of_group(of.locations, layers=LAYERS, tokens=TOKENS)

    def best(groups: LayerGroups) -> tuple[float, Ratios]:
        space = Space(
            groups=groups,
            step=0.1,
            scoring=(ImportanceScoring("same", 64),),
            strategies=("ntp",),
            micro_partitions=((4, 8), (1, 2)),
        )
        found = enumerated(problem, space, loss).best
        return found.seconds, found.settings.drop_ratios

    seconds, ratios = best(learned.groups_of(LAYERS))
    assert_dropped_where_nothing_is_lost(ratios)
    alike_seconds, alike = best(LayerGroups.alike(LAYERS))
    assert max(largest(alike).values()) <= 0.3
    assert seconds < alike_seconds


def assert_dropped_where_nothing_is_lost(ratios: Ratios) -> None:
    chosen = largest(ratios)
    assert all(chosen[layer] >= 0.9 for layer in (1, 3, 5, 6)), ratios
    assert all(0.2 <= chosen[layer] <= 0.3 for layer in (2, 4)), ratios


class Says:
    """Regressors that predict something."""

    def predict(self, problem: SearchProblem, exact_seconds: float) -> Predicted:
        return Predicted(
            tensor_parallel=0.0, whole=0.0, levels=3.0, ratios=(0.5, 0.5), micro=(4, 2, 1, 1)
        )


def test_the_live_configurator_offers_ratios_by_layer(learned: AccuracyModel) -> None:
    options = PredictedOptions(
        answerer=DirectAnswerer(
            space=answered_space(learned.groups_of(LAYERS)),
            models={"ttft": Says(), "accuracy": Says()},  # type: ignore[dict-item]
        ),
        accuracy=learned,
        group_of=group_of,
    )
    rules = StrategyRules(group_of(TWO_BY_TWO).shape, predicted=options, accuracy=learned)
    asked = StrategyQuestion(csa=None, bounded=True, servers=(2, 2), tp=1, tokens=TOKENS)
    answer = unpack(StrategyChoices, pack(rules.answer(StrategyQuestions(asked=(asked,)))))
    (choices,) = answer.chosen
    lossless = [
        settings
        for choice in sorted(choices, key=lambda choice: choice.permille)
        if choice.loss == 0.0
        and (settings := parse_option(choice.strategy).csa) is not None
        and not settings.lossless
    ]
    assert lossless
    assert_dropped_where_nothing_is_lost(lossless[0].drop_ratios)


def test_each_layer_group_has_the_micro_partitions_that_take_least(learned: AccuracyModel) -> None:
    """Held to every combination, by the simulator."""
    of = group_of(TWO_BY_TWO)
    problem = SearchProblem(group=of, tokens=TOKENS, objective=Objective(max_accuracy_loss=0.1))
    space = Space(groups=learned.groups_of(LAYERS), micro_partitions=((4, 8), (1, 2, 8), (1, 4)))
    scoring, ratios = ImportanceScoring("same", 64), space.groups.by_layer((0.98, 0.02))
    start = [space.settings("ntp", 3, scoring, ratios, [(first, 1, 1)] * 2) for first in (4, 8)]

    def least(candidates: Sequence[CsaSettings]) -> float:
        found = compared(problem, candidates, lambda each: [0.0] * len(each))
        return min(candidate.seconds for candidate in found)

    everything = [
        space.settings("ntp", 3, scoring, ratios, micros) for micros in space.group_micros(3)
    ]
    best = list(tuned(problem, space, start))
    assert least(best) == pytest.approx(least(everything))
    assert least(best) < least(start)
