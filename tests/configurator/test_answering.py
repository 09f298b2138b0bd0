"""Regressors begin, repair and check end: answers are valid whatever was predicted, and near to
what the search finds. Times come from a formula here, not from the simulator, which is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_groups import PLACES, group
from property_examples import examples

from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE
from csps.configurator.plan import predicted_options
from csps.configurator.plan.predicted_options import DirectAnswerer
from csps.configurator.regressors.direct import (
    DirectModel,
    Predicted,
    fingerprint,
    output_names,
    problem_features,
    sample_of,
    train_direct,
)
from csps.configurator.regressors.samples import eligible_pairs
from csps.configurator.search import search
from csps.configurator.search.search import SearchProblem, enumerated
from csps.configurator.search.space import ImportanceScoring, LayerGroups, Space
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import Objective, ObjectiveKind
from csps.protocols.core.errors import ConfigError

HERE = {"weights": "w1", "device": "cpu"}
SPACE = Space(
    groups=LayerGroups(members=((0, 1), (2, 3, 4)), trends=(0.5, 1.0)),
    anchors=(0.3, 0.7),
    step=0.2,
    rungs=(0.2, 0.6, 0.9),
    micro_partitions=((4, 8, 16), (1, 4), (1,)),
    scoring=(ImportanceScoring("same", 64),),
)


def formula(of: SimulatedGroup, configurations: Sequence[CsaSettings], tokens: int) -> np.ndarray:
    """Less where more is dropped, most of all over slow links; an optimal M; SP-TP never pays."""
    slow = of.wiring.seconds_per_byte_sr.max() * 1e8
    seconds = []
    for configuration in configurations:
        kept = 1.0 - (0.0 if configuration.lossless else float(np.mean(configuration.drop_ratios)))
        micro = configuration.micro_partitions[0] if configuration.micro_partitions else (1,)
        uneven = sum(abs(np.log2(m / (8 / 2**v))) for v, m in enumerate(micro))
        seconds.append(
            tokens
            * 1e-5
            * (0.4 + slow * kept)
            * (1 + 0.02 * uneven)
            * (1.3 if configuration.strategy == "tp" else 1.0)
            * (1.2 if not configuration.pipelined else 1.0)
        )
    return np.array(seconds)


def loss(configurations: Sequence[CsaSettings]) -> list[float]:
    return [
        0.0
        if configuration.lossless
        else float(np.mean([p**3 for (p,) in configuration.drop_ratios])) * 0.2
        for configuration in configurations
    ]


@pytest.fixture(scope="module", autouse=True)
def planted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "prefill_seconds", formula)
        patch.setattr(predicted_options, "prefill_seconds", formula)
        yield


@cache
def group_of(places: tuple[str, ...], slower: float) -> SimulatedGroup:
    made = group(places, layers=5, kv_heads=1)
    wiring = made.wiring
    return replace(
        made, wiring=replace(wiring, seconds_per_byte_sr=wiring.seconds_per_byte_sr * slower)
    )


def problem(
    kind: ObjectiveKind, bound: float, tokens: int, slower: float, place: int
) -> SearchProblem:
    of = group_of(PLACES[1 + place % 3], slower)
    if kind == "ttft":
        objective = Objective(kind=kind, max_accuracy_loss=bound)
    else:
        exact = float(formula(of, [WHOLE], tokens)[0])
        objective = Objective(kind=kind, max_ttft_ms=1000 * exact * (0.5 + 5 * bound))
    return SearchProblem(group=of, tokens=tokens, objective=objective)


def exact_seconds(asked: SearchProblem) -> float:
    return float(formula(asked.group, [WHOLE], asked.tokens)[0])


@pytest.fixture(scope="module")
def trained(planted: None) -> Callable[[ObjectiveKind], DirectModel]:
    @cache
    def make(kind: ObjectiveKind) -> DirectModel:
        asked = [
            problem(kind, bound, tokens, slower, place)
            for bound in (0.0, 0.01, 0.03, 0.06, 0.1)
            for tokens in (2_048,)
            for slower in (0.3, 1.0)
            for place in range(3)
        ]
        samples = [
            sample_of(
                configuration,
                enumerated(configuration, SPACE, loss).best,
                exact_seconds(configuration),
                SPACE.groups,
            )
            for configuration in asked
        ]
        return train_direct(kind, samples, HERE, training_set=fingerprint(samples))

    return make


@pytest.mark.parametrize("kind", ["ttft", "accuracy"])
def test_answers_keep_the_bound_and_are_near_the_searchs(
    kind: ObjectiveKind, trained: Callable[[ObjectiveKind], DirectModel]
) -> None:
    answerer = DirectAnswerer(space=SPACE, models={kind: trained(kind)})
    gaps = []
    for bound in (0.0, 0.02, 0.05):
        for place in range(3):
            asked = problem(kind, bound, 8_192, 0.6, place)
            found, best = answerer.answer(asked, loss), enumerated(asked, SPACE, loss)
            assert found.met == best.met
            assert found.compared <= 400
            if best.met:
                assert not asked.excess(found.best)
                first = 0 if kind == "ttft" else 1
                ours, theirs = asked.order(found.best)[0], asked.order(best.best)[0]
                gaps.append(ours / theirs - 1 if first == 0 else ours - theirs)
    assert np.median(gaps) <= 0.02, gaps
    assert max(gaps) <= 0.1, gaps


class _Says:
    """Regressors that make a given prediction."""

    def __init__(self, said: Predicted) -> None:
        self._said = said

    def predict(self, problem: SearchProblem, exact_seconds: float) -> Predicted:
        return self._said


anything = st.builds(
    Predicted,
    tensor_parallel=st.floats(-1, 2),
    whole=st.floats(-1, 2),
    levels=st.floats(-3, 9),
    ratios=st.tuples(st.floats(-1, 2), st.floats(-1, 2)),
    micro=st.tuples(*[st.floats(0.01, 1000)] * 4),
)


@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(anything, st.floats(0, 0.2), st.integers(0, 2), st.sampled_from(["ttft", "accuracy"]))
def test_a_bad_prediction_costs_quality_and_never_validity(
    said: Predicted, bound: float, place: int, kind: ObjectiveKind
) -> None:
    asked = problem(kind, bound, 4_096, 1.0, place)
    answerer = DirectAnswerer(space=SPACE, models={kind: _Says(said)})  # type: ignore[dict-item]
    found = answerer.answer(asked, loss)
    assert found.met == (not asked.excess(found.best))
    if kind == "ttft":
        assert found.met  # exact attention always keeps a bound on the loss
    levels = found.best.settings.levels
    assert levels is not None
    assert levels <= max(1, *Space.level_counts(asked.group.locations))


@given(st.floats(0, 0.1), st.floats(0, 0.1))
@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_wider_bounds_never_drop_less(
    trained: Callable[[ObjectiveKind], DirectModel], one: float, other: float
) -> None:
    model = trained("ttft")
    strict, wide = (
        model.predict(asked, exact_seconds(asked))
        for asked in (problem("ttft", bound, 8_192, 1.0, 1) for bound in sorted((one, other)))
    )
    assert all(a <= b + 1e-9 for a, b in zip(strict.ratios, wide.ratios, strict=True))


def test_they_come_back_from_disk_and_are_refused_elsewhere(
    trained: Callable[[ObjectiveKind], DirectModel], tmp_path: Path
) -> None:
    model = trained("ttft")
    model.save(tmp_path)
    again = DirectModel.load(tmp_path, "ttft", 2, HERE)
    asked = problem("ttft", 0.02, 4_096, 1.0, 1)
    assert again.predict(asked, 1.0) == model.predict(asked, 1.0)
    assert set(again.description.held_out) == {
        f"mean_absolute_error_{name}" for name in output_names(2)
    }
    with pytest.raises(ConfigError, match="trained for device cpu, here it is gpu"):
        DirectModel.load(tmp_path, "ttft", 2, {"device": "gpu"})
    with pytest.raises(ConfigError, match="holds regressors 'ttft'"):
        DirectModel.load(tmp_path, "accuracy", 2, HERE)


def test_the_groups_shape_is_among_the_features() -> None:
    asked = problem("ttft", 0.0, 4_096, 1.0, 1)
    assert eligible_pairs(asked.group.locations, 3) in problem_features(asked, 1.0)
