"""F_Ad: a configuration's loss of accuracy, learned from measurements (CSPS §3.2.6).

F_Ad depends on the model alone. So it ships for the included models, in `shipped/DIGEST` by the
first digits of the weights' digest, as `csps train --out` wrote it; times are profiled on site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import lightgbm
import numpy as np
from msgspec import ValidationError, convert, to_builtins

from csps.configurator.model.phase_times import Amounts
from csps.configurator.regressors.samples import (
    MONOTONE,
    AccuracySample,
    Setting,
    feature_matrix,
    feature_names,
    fingerprint,
)
from csps.configurator.regressors.saved import REPRODUCIBLE, Description, load, save
from csps.configurator.regressors.support import Support
from csps.configurator.search.space import LayerGroups
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.core.errors import ConfigError

KIND = "accuracy"
MEASURED = "measured"
"""Key of the description under which the support is stored."""
GROUPS = "layer groups"
"""Key of the description under which layer groups are stored."""
HELD_OUT = 5
"""Folds of cross-validation (the paper's 4:1): each sample is held out once."""
BOUNDS = (0.01, 0.02, 0.05, 0.1)
"""Bounds for which the description reports how many predictions lie on the measured side."""
FEWEST = 2 * HELD_OUT
PARAMETERS = {
    "objective": "l2",
    "monotone_constraints_method": "advanced",
    "learning_rate": 0.15,
    "num_leaves": 7,
    # A sample is the mean of hundreds of questions, and losses have steps.
    "min_data_in_leaf": 1,
    **REPRODUCIBLE,
}
ROUNDS = 100
DIGITS = 3
"""Decimals to which losses are rounded. A measurement of some hundred questions resolves no
more, and a configuration that was measured without loss is then predicted without loss."""


@dataclass(frozen=True)
class AccuracyModel:
    """F_Ad of one model; losses do not fall when more is dropped."""

    description: Description
    support: Support
    _booster: lightgbm.Booster
    groups: LayerGroups | None = None
    """Layer groups of the measured model; None if nothing was measured by layer."""

    def groups_of(self, layers: int) -> LayerGroups:
        """Return the layer groups of a model with so many layers; all are alike if it is another
        model than the measured one."""
        if self.groups is None or self.groups.layers != layers:
            return LayerGroups.alike(layers)
        return self.groups

    def loss(self, settings: Sequence[Setting]) -> Amounts:
        """Return (n,) predicted losses in [0, 1]; a setting that drops nothing loses nothing."""
        exact = np.array([setting.lossless for setting in settings], bool)
        losses: Amounts = np.where(exact, 0.0, _predicted(self._booster, settings, self.groups))
        return losses

    def surely(self, settings: Sequence[Setting]) -> Amounts:
        """Return (n,) losses that a choice may rely on.

        They are predicted losses, but at least what a harder setting was measured to lose.
        """
        exact = np.array([setting.lossless for setting in settings], bool)
        losses: Amounts = np.where(
            exact, 0.0, np.maximum(self.loss(settings), self.support.losses(settings))
        )
        return losses

    @property
    def longest(self) -> int:
        """Tokens of the longest prompts that were measured."""
        return self.support.longest

    def of_group(
        self, locations: Sequence[str], *, layers: int, tokens: int
    ) -> Callable[[Sequence[CsaSettings]], list[float]]:
        """Return the reliable loss of configurations on a group, as `search` needs it.

        Args:
            locations: ids of the group's instances.
            layers: number of layers of the model.
        """
        known: dict[tuple[object, ...], float] = {}

        def loss(configurations: Sequence[CsaSettings]) -> list[float]:
            """Return the losses; micro-partitions do not change them, and are predicted once."""
            keys = [_answer_key(configuration) for configuration in configurations]
            new = {
                key: configuration
                for key, configuration in zip(keys, configurations, strict=True)
                if key not in known
            }
            asked = [
                Setting(tokens=tokens, locations=tuple(locations), layers=layers, csa=configuration)
                for configuration in new.values()
            ]
            if asked:
                known.update(zip(new, self.surely(asked).tolist(), strict=True))
            return [known[key] for key in keys]

        return loss

    def save(self, folder: Path) -> None:
        """Write the model into a folder."""
        save(folder, self.description, {KIND: self._booster})

    @classmethod
    def load(cls, folder: Path, trained_for: Mapping[str, str] | None) -> AccuracyModel:
        """Load a model from a folder.

        Args:
            trained_for: weights and dtype of this process; None accepts any.

        Raises:
            ConfigError: there is none, or it belongs to another model.
        """
        description, boosters = load(folder, KIND, (KIND,), trained_for)
        groups = _parsed_groups(description.about.get(GROUPS))
        if description.features != feature_names(groups):
            raise ConfigError(f"{folder} was trained with other features; run `csps train`")
        support = Support.of_rows(description.about.get(MEASURED))
        return cls(description, support, boosters[KIND], groups)


def _parsed_groups(found: object) -> LayerGroups | None:
    """Parse layer groups as a description holds them.

    Raises:
        ConfigError: they are invalid.
    """
    try:
        return None if found is None else convert(found, LayerGroups)
    except ValidationError as error:
        raise ConfigError(f"invalid layer groups: {error}; run `csps train`") from None


def train_accuracy(
    samples: Sequence[AccuracySample],
    trained_for: Mapping[str, str],
    groups: LayerGroups | None = None,
) -> AccuracyModel:
    """Learn F_Ad from samples weighted by their questions.

    Metrics come from regressors that have not seen the sample in question; the returned model has
    seen all samples.

    Args:
        groups: layer groups, if layers were measured one at a time.

    Raises:
        ConfigError: there are too few samples to hold some out.
    """
    if len(samples) < FEWEST:
        raise ConfigError(f"{len(samples)} measurements of accuracy; at least {FEWEST} are needed")
    support = Support.of(samples)
    description = Description(
        kind=KIND,
        trained_for=dict(trained_for),
        training_set=fingerprint(samples),
        samples=len(samples),
        features=feature_names(groups),
        held_out=_held_out(samples, groups),
        about={MEASURED: support.rows(), **({GROUPS: to_builtins(groups)} if groups else {})},
    )
    return AccuracyModel(description, support, _trained(samples, groups), groups)


def _trained(samples: Sequence[AccuracySample], groups: LayerGroups | None) -> lightgbm.Booster:
    names = feature_names(groups)
    data = lightgbm.Dataset(
        feature_matrix([sample.setting for sample in samples], groups),
        label=np.array([sample.loss for sample in samples]),
        weight=np.array([sample.questions for sample in samples], float),
        feature_name=[name.replace(" ", "_") for name in names],
        params={"feature_pre_filter": False, "verbose": -1},
    )
    # The features of layer groups are all of amounts that are dropped.
    monotone = [*MONOTONE, *(1 for _ in names[len(MONOTONE) :])]
    parameters = {**PARAMETERS, "monotone_constraints": monotone}
    return lightgbm.train(parameters, data, num_boost_round=ROUNDS)


def _held_out(samples: Sequence[AccuracySample], groups: LayerGroups | None) -> dict[str, float]:
    fold_n = np.random.default_rng(0).permutation(len(samples)) % HELD_OUT
    predicted = np.empty(len(samples))
    for fold in range(HELD_OUT):
        training = [sample for sample, own in zip(samples, fold_n, strict=True) if own != fold]
        held_out = [
            sample.setting for sample, own in zip(samples, fold_n, strict=True) if own == fold
        ]
        predicted[fold_n == fold] = _predicted(_trained(training, groups), held_out, groups)
    measured = np.array([sample.loss for sample in samples])
    low, high = np.array([sample.interval for sample in samples]).T
    right = np.array([(predicted <= bound) == (measured <= bound) for bound in BOUNDS])
    sure = np.array([(bound < low) | (high <= bound) for bound in BOUNDS])
    return {
        "mean_absolute_error": float(np.abs(predicted - measured).mean()),
        "right_side_of_bound": float(right.mean()),
        "right_side_beyond_interval": float(right[sure].mean()) if sure.any() else 1.0,
        "questions": float(np.mean([sample.questions for sample in samples])),
        "samples": float(len(samples)),
    }


def _predicted(
    booster: lightgbm.Booster, settings: Sequence[Setting], groups: LayerGroups | None
) -> Amounts:
    """Return (n,) losses in [0, 1]."""
    features_nf = feature_matrix(settings, groups)
    predicted = np.asarray(booster.predict(features_nf, num_threads=1), float)
    losses: Amounts = np.round(np.clip(predicted, 0.0, 1.0), DIGITS)
    return losses


def _answer_key(csa: CsaSettings) -> tuple[object, ...]:
    return (
        csa.strategy,
        csa.levels,
        csa.drop_ratios,
        csa.importance_layer,
        csa.importance_window,
        csa.drop_queries,
        csa.sinks,
        csa.tail,
        csa.nested,
    )


SHIPPED = Path(__file__).parent / "shipped"
DIGEST_DIGITS = 16
SHIPPED_FOR = ("float32", "bfloat16")
"""Number types in which answers of the included model were compared: nearly all are the same."""


@cache
def shipped_accuracy(model_digest: str, number_types: str = "float32") -> AccuracyModel | None:
    """Return the regressor of the model with this digest of its weights; None if none ships.

    Args:
        number_types: types of weights and KV with which the model is served.

    Raises:
        ConfigError: the shipped regressor is broken, or belongs to a digest that begins alike.
    """
    folder = SHIPPED / model_digest[:DIGEST_DIGITS] / KIND
    if number_types not in SHIPPED_FOR:
        return None
    return AccuracyModel.load(folder, {"weights": model_digest}) if folder.is_dir() else None
