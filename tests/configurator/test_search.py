"""Enumeration as in App. B, and that stopping early loses nothing against looking at everything."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_groups import TWO_SERVERS, group
from property_examples import examples

from csps.configurator.search import search
from csps.configurator.search.search import SearchProblem, SearchResult, enumerated, exhaustive
from csps.configurator.search.space import ImportanceScoring, LayerGroups, Loss, Space
from csps.protocols.attention.csa import CsaSettings, Ratios
from csps.protocols.attention.plan import Objective
from csps.protocols.core.errors import ConfigError

GROUPS = LayerGroups(members=((0, 1), (2, 3, 4)), trends=(0.5, 1.0))
SMALL = Space(
    groups=GROUPS,
    anchors=(0.5,),
    step=0.1,
    reach=0.2,
    rungs=(0.2, 0.6, 0.9),
    micro_partitions=((2, 4), (1, 2), (1,)),
    scoring=(ImportanceScoring("same", 8), ImportanceScoring("previous", 8)),
)


def test_layers_with_near_trends_share_a_ratio_wherever_they_are() -> None:
    found = LayerGroups.similar([0.1, 0.11, 0.3, 0.31, 0.12])
    assert found.members == ((0, 1, 4), (2, 3))
    low, high = found.centers(0.6)
    assert low / high == pytest.approx(0.11 / 0.305)
    assert high == pytest.approx(0.6)
    assert found.by_layer([0.2, 0.6]) == ((0.2,), (0.2,), (0.6,), (0.6,), (0.2,))


def test_the_nearest_groups_are_joined_where_there_are_too_many() -> None:
    found = LayerGroups.similar([0.1, 0.2, 0.35, 0.9], most=3)
    assert found.members == ((0,), (1, 2), (3,))
    assert LayerGroups.similar([0.1, 0.2, 0.35, 0.9], most=1).members == ((0, 1, 2, 3),)


def test_heads_have_their_share_of_the_ratio_of_their_layer() -> None:
    shares = [[1.0, 1.0], [0.25, 1.0], [1.0, 0.5], [1.0, 1.0]]
    found = LayerGroups.similar([0.5, 0.5, 1.0, 1.0], shares)
    assert found.by_layer([0.4, 0.8]) == ((0.4,), (0.1, 0.4), (0.8, 0.4), (0.8,))
    assert found.graded(0.8) == found.by_layer([0.4, 0.8])
    assert not found.all_alike
    assert LayerGroups.similar([0.5, 0.5], [[1.0], [1.0]]).all_alike


def test_layers_that_are_in_no_group_are_refused() -> None:
    with pytest.raises(ConfigError, match="each layer from 0 on must be in one layer group"):
        LayerGroups(members=((1,),), trends=(1.0,))


@pytest.mark.parametrize(
    ("locations", "counts"),
    [
        (("0-0-0", "0-0-1"), [1, 2]),
        (TWO_SERVERS, [2, 3]),
        (("0-0-0", "0-1-0"), [2]),
        (("0-0-0", "0-0-1", "0-1-0", "1-0-0", "1-0-1"), [3, 4]),
        (("0-0-0",), [1]),
    ],
)
def test_number_of_levels(locations: tuple[str, ...], counts: list[int]) -> None:
    assert list(Space.level_counts(locations)) == counts


def test_ratios_are_steps_around_centers_that_relate_as_spreads_do() -> None:
    low, high = Space(groups=GROUPS, anchors=(0.6,)).grids(0.6)
    assert low == [pytest.approx(0.1 + 0.02 * n) for n in range(21)]
    assert high == [pytest.approx(0.4 + 0.02 * n) for n in range(21)]
    everything = list(Space(groups=GROUPS, anchors=(0.6,)).ratios())
    grid = {(near, near, far, far, far) for near in low for far in high}
    rungs = [rung / 50 for rung in range(1, 50)]
    graded = {(rung / 2, rung / 2, rung, rung, rung) for rung in rungs}
    alike = {(rung,) * 5 for rung in rungs}
    assert {rounded(ratios) for ratios in everything} == {
        tuple(round(ratio, 6) for ratio in ratios) for ratios in grid | graded | alike
    }
    assert len(everything) == len(set(everything))


def rounded(ratios: Ratios) -> tuple[float, ...]:
    """Return ratios of all five layers, each with one for all heads."""
    return tuple(round(ratios[min(layer, len(ratios) - 1)][0], 6) for layer in range(5))


def test_ratios_stay_ratios() -> None:
    low, high = Space(groups=GROUPS, anchors=(0.95,), step=0.05).grids(0.95)
    assert all(0 <= p < 1 for p in low + high)
    assert len(high) == len(set(high))


def loss_of(weights: tuple[float, float], curvature: float) -> Loss:
    """A loss that does not fall when any ratio rises."""

    def loss(configurations: Sequence[CsaSettings]) -> list[float]:
        lost = []
        for configuration in configurations:
            near = configuration.drop_ratios[0]
            far = configuration.drop_ratios[min(2, len(configuration.drop_ratios) - 1)]
            worse = 1.5 if configuration.importance_layer == "previous" else 1.0
            lost.append(
                worse
                * sum(w * p[0] ** curvature for w, p in zip(weights, (near, far), strict=True))
            )
        return lost

    return loss


losses = st.builds(
    loss_of,
    st.tuples(st.floats(0, 0.2), st.floats(0, 0.2)),
    st.floats(0.5, 4.0),
)
objectives = st.one_of(
    st.builds(
        lambda bound: Objective(kind="ttft", max_accuracy_loss=bound),
        st.sampled_from([None, 0.0, 0.02, 0.05, 0.2]),
    ),
    st.builds(
        lambda bound: Objective(kind="accuracy", max_ttft_ms=bound),
        st.sampled_from([1.0, 250.0, 400.0, 600.0, 5_000.0]),
    ),
)


def planted_seconds(of: object, configurations: Sequence[CsaSettings], tokens: int) -> np.ndarray:
    """Return arbitrary times of layers, mostly lower where more is dropped, instead of simulated
    ones; as in the simulator, a prompt takes their sum."""
    return np.array([sum(map(partial(layer_seconds, each), range(5))) for each in configurations])


@cache
def layer_seconds(configuration: CsaSettings, layer: int) -> float:
    ratios = configuration.drop_ratios
    ratio = ratios[min(layer, len(ratios) - 1)][0]
    micros = configuration.micro_partitions or ((1,),)
    micro = micros[min(layer, len(micros) - 1)]
    arbitrary = hash((micro, configuration.levels, ratio)) % 97 / 5e2
    return 0.1 - 0.08 * ratio + arbitrary


@settings(max_examples=examples(40), deadline=None)
@given(objectives, losses)
def test_stopping_early_finds_the_same_as_comparing_everything(
    objective: Objective, loss: Loss
) -> None:
    problem = SearchProblem(group=group(layers=5, kv_heads=1), tokens=2_048, objective=objective)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "prefill_seconds", planted_seconds)
        patch.setattr(search, "AT_ONCE", 64)
        quick = enumerated(problem, SMALL, loss)
        oracle = exhaustive(problem, SMALL, loss)
    assert quick.met == oracle.met
    assert quick.compared <= oracle.compared
    if oracle.met:
        assert problem.order(quick.best) == problem.order(oracle.best)


def test_early_stop_skips_branches_beyond_the_bound() -> None:
    """The search asks for the loss of at most one configuration beyond the bound in each branch."""
    asked: list[CsaSettings] = []

    def loss(configurations: Sequence[CsaSettings]) -> list[float]:
        asked.extend(configurations)
        return [float(max(map(max, configuration.drop_ratios))) for configuration in configurations]

    space = Space(groups=GROUPS, anchors=(0.5,))
    of_ratios = partial(space.settings, "ntp", 3, ImportanceScoring())
    found = list(space.admissible(of_ratios, loss, 0.4))
    everything = list(space.ratios())
    expected = [r for r in everything if max(map(max, r)) <= 0.4]
    assert found == expected
    assert len(asked) < len(everything)


TINY = Space(
    groups=LayerGroups.alike(3),
    anchors=(0.5,),
    step=0.4,
    reach=0.4,
    micro_partitions=((4,), (1, 2), (1,)),
    scoring=(ImportanceScoring("same", 8),),
)
"""Few enough to be simulated in a test: without drop, 0.5 and 0.9."""


def answer(objective: Objective) -> SearchResult:
    problem = SearchProblem(group=group(layers=3, kv_heads=1), tokens=4_096, objective=objective)
    return enumerated(problem, TINY, loss_of((0.1, 0.1), 1.0))


def test_bounds_are_met_and_wider_ones_are_used() -> None:
    strict, wide = (answer(Objective(max_accuracy_loss=bound)) for bound in (None, 0.2))
    assert strict.met
    assert wide.met
    assert strict.best.settings.lossless
    assert not wide.best.settings.lossless
    assert wide.best.seconds < strict.best.seconds
    within = answer(Objective(kind="accuracy", max_ttft_ms=1000 * wide.best.seconds))
    assert within.best.seconds <= wide.best.seconds
    assert within.best.loss <= wide.best.loss


def test_a_bound_that_cannot_be_met_gives_the_nearest_and_says_so() -> None:
    found = answer(Objective(kind="accuracy", max_ttft_ms=0.001))
    assert not found.met
    assert found.best.seconds == min(
        candidate.seconds for candidate in (*found.runners_up, found.best)
    )
