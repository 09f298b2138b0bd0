"""A bound holds in each category of questions: planted rows rule configurations out, and in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from csps.configurator.model.scaling_information_base import AccuracyRow
from csps.configurator.regressors.samples import (
    ENOUGH,
    ENOUGH_POSITIONS,
    LEAST_OF_LONG,
    LONG,
    PLAIN_TEXT,
    AccuracySample,
    accuracy_samples,
    category_of,
)
from csps.configurator.regressors.support import UNKNOWN, Support

LAYERS = 8
NEEDLES = "multi_key, question last"
TRACING = "tracing: variables"
LISTS = "aggregation: common_words"
PASSAGES = "question answering: one_passage"
CATEGORIES = (NEEDLES, TRACING, LISTS, PASSAGES)


def row(
    kind: str,
    ratio: float,
    lost: int,
    questions: int = ENOUGH,
    *,
    right_exact: int | None = None,
    tokens: int = 4_096,
    group: str = "2",
) -> AccuracyRow:
    exact = questions if right_exact is None else right_exact
    return AccuracyRow(
        kind=kind,
        tokens=tokens,
        strategy="ntp",
        levels=2,
        drop_ratio=ratio,
        importance_layer="same",
        importance_window=64,
        group_shape=group,
        questions=questions,
        right_exact=exact,
        right=exact - lost,
        divergence=0.0,
        date="2026-11-24",
    )


def known(rows: list[AccuracyRow]) -> dict[float, AccuracySample]:
    """Return the sample of each ratio."""
    samples = accuracy_samples(rows, layers=LAYERS)
    found = {sample.setting.csa.drop_ratios[0][0]: sample for sample in samples}
    assert len(found) == len(samples)
    return found


def allowed(rows: list[AccuracyRow], ratio: float) -> float:
    """Return the loss that a bound has to allow for a ratio that was measured."""
    samples = accuracy_samples(rows, layers=LAYERS)
    return float(Support.of(samples).losses([known(rows)[ratio].setting])[0])


@pytest.mark.parametrize("bad", CATEGORIES)
def test_one_bad_category_rules_a_configuration_out(bad: str) -> None:
    """The mean of the four is 2.5 %, and three of them lose nothing."""
    rows = [row(kind, 0.9, 40 if kind == bad else 0) for kind in CATEGORIES]
    assert known(rows)[0.9].loss == 0.1
    assert allowed(rows, 0.9) == 0.1


def test_a_configuration_that_is_good_in_each_category_is_supported() -> None:
    rows = [row(kind, 0.9, 0) for kind in CATEGORIES]
    assert allowed(rows, 0.9) == 0.0


def test_the_worst_category_of_each_layer_and_head_counts() -> None:
    """Layer 1 loses 2 % in tracing alone, and layer 2 nothing in any category."""
    rows = [
        replace(row(kind, 0.9, lost), drop_ratios=ratios)
        for kind in CATEGORIES
        for ratios, lost in (("0, 0.9, 0", 8 if kind == TRACING else 0), ("0, 0, 0.9, 0", 0))
    ]
    others = ("0, 0.9/0.3, 0", "0, 0, 0.9/0.3, 0", "0, 0, 0, 0.9/0.3, 0")
    asked = [
        sample.setting
        for ratios in others
        for sample in accuracy_samples(
            [replace(row(NEEDLES, 0.9, 0), drop_ratios=ratios)], layers=LAYERS
        )
    ]
    support = Support.of(accuracy_samples(rows, layers=LAYERS))
    assert support.losses(asked).tolist() == [pytest.approx(0.02), 0.0, UNKNOWN]
    alike = accuracy_samples([*rows, *(row(kind, 0.9, 0) for kind in CATEGORIES)], layers=LAYERS)
    uniform = alike[-1].setting
    assert Support.of(alike).losses([uniform]).tolist() == [pytest.approx(0.02)], "a subset lost it"


def test_few_questions_of_one_category_are_no_evidence_for_it() -> None:
    rows = [row(kind, 0.9, 0, 40 if kind == TRACING else ENOUGH) for kind in CATEGORIES]
    assert allowed(rows, 0.9) == pytest.approx(0.0876, abs=1e-4)


def test_a_larger_ratio_that_loses_nothing_answers_for_a_smaller_one() -> None:
    """The profile asks such a kind no further at the smaller ratio."""
    rows = [row(kind, 0.5, 0, 40 if kind == TRACING else ENOUGH) for kind in CATEGORIES]
    rows += [row(kind, 0.9, 0 if kind == TRACING else 8) for kind in CATEGORIES]
    assert allowed(rows, 0.5) == 0.0
    assert allowed(rows, 0.9) == pytest.approx(0.02)
    assert known(rows)[0.5].upper == 0.0
    assert known([*rows, row(TRACING, 0.9, 1, 1)])[0.5].upper > 0.08, "now it lost something"


def test_a_configuration_without_a_category_is_left_out() -> None:
    rows = [row(kind, 0.5, 0) for kind in CATEGORIES]
    rows += [row(kind, 0.9, 0) for kind in CATEGORIES if kind != PASSAGES]
    assert set(known(rows)) == {0.5}
    samples = accuracy_samples(rows, layers=LAYERS)
    (measured,) = (sample.setting for sample in samples)
    unmeasured = known([row(NEEDLES, 0.9, 0)])[0.9].setting
    assert Support.of(samples).losses([measured, unmeasured]).tolist() == [0.0, UNKNOWN]


def test_measurements_of_retrieval_alone_count_as_before() -> None:
    rows = [row(NEEDLES, 0.9, 4), row("two_hop, question first", 0.9, 2), row(PLAIN_TEXT, 0.9, 90)]
    assert allowed(rows, 0.9) == 0.01


def test_next_tokens_stand_in_for_a_category_that_the_model_fails() -> None:
    rows = [row(kind, 0.9, 0) for kind in (NEEDLES, LISTS, PASSAGES)]
    rows.append(row(TRACING, 0.9, 0, 40, right_exact=3))
    assert not known(rows), "no question of tracing could be lost"
    rows.append(row("tracing: next token", 0.9, 300, ENOUGH_POSITIONS))
    assert allowed(rows, 0.9) == 0.03


def test_next_tokens_do_not_count_beside_answers() -> None:
    rows = [row(kind, 0.9, 0) for kind in CATEGORIES]
    rows.append(row("tracing: next token", 0.9, 300, ENOUGH_POSITIONS))
    assert allowed(rows, 0.9) == 0.0


def test_fewer_positions_count_by_their_interval() -> None:
    rows = [row(kind, 0.9, 0) for kind in (NEEDLES, LISTS, PASSAGES)]
    rows.append(row("tracing: next token", 0.9, 12, ENOUGH_POSITIONS - 8))
    sample = known(rows)[0.9]
    assert not sample.enough
    assert 12 / 9_992 < allowed(rows, 0.9) == sample.interval[1] < 0.0022


@pytest.mark.parametrize("tokens", [LONG, 2 * LONG])
@pytest.mark.parametrize("questions", [100, ENOUGH])
def test_few_questions_of_very_long_prompts_support_no_tight_bound(
    tokens: int, questions: int
) -> None:
    rows = [row(kind, 0.9, 0, questions, tokens=tokens) for kind in CATEGORIES]
    few = LEAST_OF_LONG if tokens > LONG else known(rows)[0.9].interval[1]
    assert allowed(rows, 0.9) == (0.0 if questions == ENOUGH else few)
    assert known([row(NEEDLES, 0.9, 0, 100)])[0.9].interval[1] < LEAST_OF_LONG


def test_kinds_name_their_category() -> None:
    assert category_of(TRACING) == "tracing"
    assert category_of("question answering: next token") == "question answering"
    assert category_of(NEEDLES) == "retrieval"
    assert category_of(PLAIN_TEXT) is None
