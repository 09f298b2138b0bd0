"""Choices rest on measurements: none supports more than it has shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.configurator.regressors.accuracy import train_accuracy
from csps.configurator.regressors.samples import (
    ENOUGH,
    AccuracySample,
    Setting,
    eligible_pairs,
    places_of,
)
from csps.configurator.regressors.support import UNKNOWN, Support
from csps.protocols.attention.csa import CsaSettings, Ratios, halving, kept_tokens, shortened
from csps.protocols.core.errors import ConfigError

SHAPES = ("2", "4", "2+2", "4+4", "8+8")


def setting(ratio: float, tokens: int = 4_096, shape: str = "2+2", **csa: object) -> Setting:
    asked = {"importance_layer": "same", "drop_ratios": ((ratio,),), **csa}
    return Setting(
        tokens=tokens,
        locations=places_of(shape),
        layers=4,
        csa=CsaSettings(**asked),  # type: ignore[arg-type]
    )


def sample(of: Setting, loss: float, questions: int = ENOUGH) -> AccuracySample:
    right = questions - round(loss * questions)
    return AccuracySample(setting=of, questions=questions, right_exact=questions, right=right)


def planted(of: Setting) -> float:
    """Return 1 where only sinks are kept; else a loss that grows with what is dropped."""
    ((ratio,),) = of.csa.drop_ratios
    farthest = halving(ratio, of.levels)[-1][0]
    if kept_tokens(of.tokens // len(of.locations), farthest) <= of.csa.sinks:
        return 1.0
    return round(eligible_pairs(of.locations, of.levels) * max(0.0, ratio - 0.5), 2)


settings = st.builds(
    setting,
    st.sampled_from([0.3, 0.5, 0.6, 0.75, 0.9, 0.96, 0.98]),
    st.sampled_from([512, 1_000, 1_024, 4_096, 9_000]),
    st.sampled_from(SHAPES),
    levels=st.sampled_from([2, 3, None]),
    strategy=st.sampled_from(["ntp", "tp"]),
)


@given(st.lists(settings, min_size=1, max_size=12, unique=True), settings)
def test_supported_losses_are_upper_bounds(measured: list[Setting], asked: Setting) -> None:
    support = Support.of(
        [sample(measured_setting, planted(measured_setting)) for measured_setting in measured]
    )
    longest = max(measured_setting.tokens for measured_setting in measured)
    if asked.tokens <= longest:
        assert support.losses([asked])[0] >= planted(asked) - 1e-9
    for measured_setting in measured:
        assert support.losses([measured_setting])[0] <= planted(measured_setting) + 1e-9
    again = Support.of_rows(support.rows())
    assert again.losses([asked]) == support.losses([asked])


def test_larger_ratios_than_measured_are_not_chosen_whatever_is_predicted() -> None:
    safe = [sample(setting(ratio / 100), 0.0) for ratio in range(40, 81, 4)]
    model = train_accuracy(safe, {})
    less, most, beyond = setting(0.42), setting(0.8), setting(0.9)
    assert model.loss([less, most, beyond]).tolist() == [0.0, 0.0, 0.0]
    assert model.surely([less, most, beyond]).tolist() == [0.0, 0.0, UNKNOWN]


def test_few_questions_support_wide_bounds_only() -> None:
    support = Support.of([sample(setting(0.9), 0.0, questions=80), sample(setting(0.8), 0.0)])
    assert support.losses([setting(0.8), setting(0.85)]) == pytest.approx([0.0, 0.0458], abs=1e-4)


def test_few_questions_about_a_harder_setting_offset_no_loss() -> None:
    measured = [sample(setting(0.8), 0.06), sample(setting(0.9), 0.0, questions=80)]
    losses = Support.of(measured).losses([setting(0.7), setting(0.8), setting(0.85)])
    assert losses == pytest.approx([0.06, 0.06, 0.06], abs=1e-4)


def test_a_harder_setting_offsets_no_loss() -> None:
    """Whichever was asked more questions, and of another group it says nothing at all."""
    measured = [sample(setting(0.8), 0.01), sample(setting(0.9), 0.0, questions=4 * ENOUGH)]
    asked = [setting(ratio) for ratio in (0.7, 0.8, 0.85, 0.9)]
    assert Support.of(measured).losses(asked).tolist() == [0.01, 0.01, 0.01, 0.01]
    smaller = [setting(ratio, shape="2") for ratio in (0.7, 0.9)]
    assert Support.of(measured).losses(smaller).tolist() == [0.01, 0.0]


@given(
    st.lists(st.tuples(st.integers(1, 19), st.sampled_from([0.0, 0.01, 0.06, 0.5]), st.booleans())),
    st.sampled_from(["2", "2+2"]),
)
def test_no_ratio_loses_less_than_a_smaller_one(
    measured: list[tuple[int, float, bool]], shape: str
) -> None:
    """Whatever was measured of the same prompts and group, and of how many questions."""
    support = Support.of(
        [
            sample(setting(ratio / 20, shape=shape), loss, questions=ENOUGH if enough else 80)
            for ratio, loss, enough in measured
        ]
    )
    losses = support.losses([setting(ratio / 40, shape=shape) for ratio in range(1, 40)])
    surely = [number for number, (_, _, enough) in enumerate(measured) if enough]
    assert (losses[1:] >= losses[:-1]).all() or len(surely) < len(measured)
    for number in surely:
        ratio, loss, _ = measured[number]
        assert (losses[2 * ratio - 1 :] >= loss).all()


vectors = st.lists(
    st.lists(st.sampled_from([0.0, 0.3, 0.9]), min_size=2, max_size=2).map(tuple),
    min_size=4,
    max_size=4,
).map(tuple)


def by_vector(ratios: Ratios) -> Setting:
    """Return a setting of two layers that drop, and of two KV heads."""
    return setting(0.0, drop_ratios=shortened(ratios))


@given(st.lists(vectors, min_size=1, max_size=8, unique=True), vectors)
def test_a_vector_is_as_hard_as_a_measured_one_if_every_layer_and_head_is(
    measured: list[Ratios], asked: Ratios
) -> None:
    """Held to a comparison of all pairs of numbers; the first and the last layer never drop."""

    def at_most(one: Ratios, other: Ratios) -> bool:
        return all(one[layer][head] <= other[layer][head] for layer in (1, 2) for head in (0, 1))

    def lost(ratios: Ratios) -> float:
        return round(sum(sum(ratios[layer]) for layer in (1, 2)) / 4, 2)

    support = Support.of([sample(by_vector(ratios), lost(ratios)) for ratios in measured])
    harder = [ratios for ratios in measured if at_most(asked, ratios)]
    nearest = [
        lost(ratios)
        for ratios in harder
        if all(at_most(ratios, other) or not at_most(other, ratios) for other in harder)
    ]
    easier = [lost(ratios) for ratios in measured if at_most(ratios, asked)]
    expected = max([max(nearest, default=UNKNOWN), *easier])
    for again in (support, Support.of_rows(support.rows())):
        assert again.losses([by_vector(asked)]) == pytest.approx([expected])


def test_a_layer_that_alone_was_measured_supports_itself_and_no_other() -> None:
    nothing = (0.0, 0.0)
    alone = by_vector((nothing, (0.9, 0.9), nothing, nothing))
    asked = [
        by_vector((nothing, (0.9, 0.3), nothing, nothing)),
        by_vector((nothing, nothing, (0.3, 0.3), nothing)),
        setting(0.3),
    ]
    assert Support.of([sample(alone, 0.0)]).losses(asked).tolist() == [0.0, UNKNOWN, UNKNOWN]
    lossy = Support.of([sample(alone, 0.06), sample(setting(0.9), 0.0)])
    assert lossy.losses([setting(0.9)]).tolist() == [0.06]


def test_smaller_groups_are_easier_and_larger_ones_are_not() -> None:
    support = Support.of([sample(setting(0.9, shape="4+4"), 0.0)])
    losses = support.losses([setting(0.9, shape=shape) for shape in SHAPES])
    assert losses.tolist() == [0.0, 0.0, 0.0, 0.0, UNKNOWN]


def test_no_other_length_supports_a_setting_that_keeps_fewer_tokens() -> None:
    support = Support.of([sample(setting(0.98, 8_192), 0.0), sample(setting(0.9, 1_024), 0.0)])
    shorter, between = setting(0.98, 4_096), setting(0.9, 2_048)
    assert support.losses([shorter, between]).tolist() == [UNKNOWN, 0.0]


def test_prompts_longer_than_any_count_as_the_longest() -> None:
    support = Support.of([sample(setting(0.9), 0.0)])
    assert support.losses([setting(0.9, 1 << 17), setting(0.92, 1 << 17)]).tolist() == [0, UNKNOWN]
    assert support.longest == 4_096


@pytest.mark.parametrize(
    "other",
    [
        {"tail": 16},
        {"sinks": 0},
        {"nested": True},
        {"decode_kept_only": True},
        {"importance_layer": "previous"},
        {"importance_window": 16},
        {"strategy": "tp"},
    ],
    ids=str,
)
def test_settings_unlike_the_measured_ones_have_no_support(other: dict[str, object]) -> None:
    support = Support.of([sample(setting(0.9), 0.0)])
    asked = [setting(0.5), setting(0.5, sinks=8, tail=100), setting(0.5, **other)]
    assert support.losses(asked).tolist() == [0.0, 0.0, UNKNOWN]


def test_without_measurements_nothing_has_support() -> None:
    assert Support.of([]).losses([setting(0.5)]).tolist() == [UNKNOWN]
    assert Support.of([]).losses([]).tolist() == []
    assert Support.of([]).longest == 0


@pytest.mark.parametrize("rows", [None, "x", ["1.0 2.0"], [1.0], ["a"]])
def test_invalid_support_is_refused(rows: object) -> None:
    with pytest.raises(ConfigError, match="run `csps train`"):
        Support.of_rows(rows)
