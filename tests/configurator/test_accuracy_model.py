"""F_Ad learns a planted function, keeps to physics, and is refused where it does not belong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_groups import PLACES, TWO_SERVERS

from csps.configurator.regressors.accuracy import AccuracyModel, train_accuracy
from csps.configurator.regressors.samples import (
    AccuracySample,
    Setting,
    eligible_pairs,
    fingerprint,
    pairs_by_level,
)
from csps.configurator.regressors.saved import DESCRIPTION
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.core.errors import ConfigError

HERE = {"weights": "w1", "dtype": "float32"}
LAYERS = 6


def setting(
    ratio: float,
    *,
    tokens: int = 16_384,
    locations: tuple[str, ...] = TWO_SERVERS,
    same: bool = True,
    levels: int | None = None,
) -> Setting:
    csa = CsaSettings(
        drop_ratios=((ratio,),),
        importance_layer="same" if same else "previous",
        levels=levels,
    )
    return Setting(tokens=tokens, locations=locations, layers=LAYERS, csa=csa)


def planted(setting: Setting) -> float:
    """Return a loss that begins at a ratio of 0.8 if the same layer scores, else at 0.2."""
    ((ratio,),) = setting.csa.drop_ratios
    beyond = max(0.0, ratio - (0.8 if setting.csa.importance_layer == "same" else 0.2))
    return beyond * eligible_pairs(setting.locations, setting.levels)


@pytest.fixture(scope="module")
def samples() -> list[AccuracySample]:
    rng = np.random.default_rng(1)
    settings = [
        setting(float(ratio), tokens=tokens, locations=places, same=same)
        for ratio in np.linspace(0.02, 0.98, 25)
        for tokens in (4_096, 32_768)
        for places in PLACES[1:]
        for same in (False, True)
    ]
    questions = 1_000
    return [
        AccuracySample(
            setting=setting,
            questions=questions,
            right_exact=990,
            right=990 - int(rng.binomial(questions, planted(setting))),
        )
        for setting in settings
    ]


@pytest.fixture(scope="module")
def model(samples: list[AccuracySample]) -> AccuracyModel:
    return train_accuracy(samples, HERE)


def test_planted_function_is_recovered(model: AccuracyModel) -> None:
    metrics = model.description.held_out
    assert metrics["mean_absolute_error"] < 0.015
    assert metrics["right_side_of_bound"] > 0.96
    asked = [setting(ratio, same=same) for ratio in (0.5, 0.7, 0.97) for same in (True, False)]
    assert model.loss(asked) == pytest.approx([planted(setting) for setting in asked], abs=0.04)


@given(st.floats(0.01, 0.97), st.floats(0.01, 0.97), st.booleans())
def test_dropping_more_never_loses_less(
    model: AccuracyModel, one: float, other: float, same: bool
) -> None:
    less, more = sorted((one, other))
    lost = model.loss([setting(less, same=same), setting(more, same=same)])
    assert 0.0 <= lost[0] <= lost[1] <= 1.0


def test_settings_that_drop_nothing_lose_nothing(model: AccuracyModel) -> None:
    assert model.loss([setting(0.0), setting(0.9, levels=1)]).tolist() == [0.0, 0.0]


def test_search_asks_for_answers_not_for_micro_partitions(model: AccuracyModel) -> None:
    loss = model.of_group(TWO_SERVERS, layers=LAYERS, tokens=16_384)
    alike = [
        CsaSettings(drop_ratios=((0.9,),), importance_layer="same", micro_partitions=((m,),))
        for m in (1, 4)
    ]
    assert loss(alike) == [model.surely([setting(0.9)])[0]] * 2


def test_it_comes_back_from_disk_as_it_was(model: AccuracyModel, tmp_path: Path) -> None:
    model.save(tmp_path / "made")
    again = AccuracyModel.load(tmp_path / "made", HERE)
    asked = [setting(ratio) for ratio in (0.1, 0.5, 0.9)]
    assert again.loss(asked).tolist() == model.loss(asked).tolist()
    assert again.surely(asked).tolist() == model.surely(asked).tolist()
    assert again.description == model.description


def test_another_model_is_refused(model: AccuracyModel, tmp_path: Path) -> None:
    model.save(tmp_path)
    with pytest.raises(ConfigError, match="trained for weights w1, here it is w2"):
        AccuracyModel.load(tmp_path, {**HERE, "weights": "w2"})
    with pytest.raises(ConfigError, match="no regressors in"):
        AccuracyModel.load(tmp_path / "nowhere", HERE)


@pytest.mark.parametrize("broken", ["", "{}", '{"version": 1, "kind": "other"}'])
def test_a_broken_folder_is_refused(model: AccuracyModel, tmp_path: Path, broken: str) -> None:
    model.save(tmp_path)
    (tmp_path / DESCRIPTION).write_text(broken)
    with pytest.raises(ConfigError, match="run `csps train`"):
        AccuracyModel.load(tmp_path, HERE)


def test_another_kind_is_refused(model: AccuracyModel, tmp_path: Path) -> None:
    model.save(tmp_path)
    description = json.loads((tmp_path / DESCRIPTION).read_text())
    (tmp_path / DESCRIPTION).write_text(json.dumps({**description, "kind": "other"}))
    with pytest.raises(ConfigError, match="'other'"):
        AccuracyModel.load(tmp_path, HERE)


def test_a_training_sets_fingerprint_is_of_its_samples(samples: list[AccuracySample]) -> None:
    assert fingerprint(samples) == fingerprint(samples[::-1])
    assert fingerprint(samples) != fingerprint(samples[1:])


def test_too_few_measurements_are_refused(samples: list[AccuracySample]) -> None:
    with pytest.raises(ConfigError, match="at least 10 are needed"):
        train_accuracy(samples[:9], HERE)


def test_eligible_pairs_are_half_with_two_instances_and_most_with_sixteen() -> None:
    assert eligible_pairs(("0-0-0", "0-0-1"), 2) == 0.5
    sixteen = tuple(f"0-{server}-{gpu}" for server in range(2) for gpu in range(8))
    assert eligible_pairs(sixteen, 3) == 0.9375
    assert pairs_by_level(sixteen, 3) == (0.0625, 0.4375, 0.5)
