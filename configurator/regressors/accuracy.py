"""F_Ad: what a configuration loses of accuracy, learned from what was measured (CSPS §3.2.6)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import lightgbm
import numpy as np

from csps.configurator.phase_times import Amounts
from csps.configurator.regressors.reproducible import REPRODUCIBLE
from csps.configurator.regressors.samples import (
    FEATURES,
    MONOTONE,
    AccuracySample,
    Setting,
    feature_matrix,
    fingerprint,
)
from csps.configurator.regressors.saved import Description, load, save
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.errors import ConfigError

KIND = "accuracy"
HELD_OUT = 5
"""One sample in so many is not trained with: the paper's 4:1."""
BOUNDS = (0.01, 0.02, 0.05, 0.1)
"""For how many samples predictions and measurements lie on the same side of these."""
FEWEST = 2 * HELD_OUT
PARAMETERS = {
    "objective": "l2",
    "monotone_constraints": list(MONOTONE),
    "monotone_constraints_method": "advanced",
    "learning_rate": 0.15,
    "num_leaves": 7,
    # A sample is the mean of hundreds of questions, and losses have steps.
    "min_data_in_leaf": 1,
    **REPRODUCIBLE,
}
ROUNDS = 100
DIGITS = 3
"""To which losses are rounded: a measurement of some hundred questions tells no less apart, and
what is measured to lose nothing is then said to lose nothing."""


@dataclass(frozen=True)
class AccuracyModel:
    """F_Ad of one model; losses do not fall when more is dropped."""

    description: Description
    _booster: lightgbm.Booster

    def loss(self, settings: Sequence[Setting]) -> Amounts:
        """(n,) predicted losses in [0, 1]; what drops nothing loses nothing."""
        exact = np.array([it.lossless for it in settings], bool)
        losses: Amounts = np.where(exact, 0.0, _predicted(self._booster, settings))
        return losses

    def of_group(
        self, locations: Sequence[str], *, layers: int, tokens: int
    ) -> Callable[[Sequence[CsaSettings]], list[float]]:
        """As `search` wants it.

        Args:
            locations: of the group's instances.
            layers: of the model.
        """
        known: dict[tuple[object, ...], float] = {}

        def loss(configurations: Sequence[CsaSettings]) -> list[float]:
            """Micro-partitions change no answer: they are not asked for again."""
            keys = [_answer_key(it) for it in configurations]
            new = {
                key: it for key, it in zip(keys, configurations, strict=True) if key not in known
            }
            asked = [
                Setting(tokens=tokens, locations=tuple(locations), layers=layers, csa=it)
                for it in new.values()
            ]
            if asked:
                known.update(zip(new, self.loss(asked).tolist(), strict=True))
            return [known[key] for key in keys]

        return loss

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        save(folder, self.description, {KIND: self._booster})

    @classmethod
    def load(cls, folder: Path, trained_for: Mapping[str, str] | None) -> AccuracyModel:
        """From a folder.

        Args:
            trained_for: weights and dtype of this process; None takes whatever is there.

        Raises:
            ConfigError: there is none, or it is of another model.
        """
        description, boosters = load(folder, KIND, (KIND,), trained_for)
        if description.features != FEATURES:
            raise ConfigError(f"{folder} was trained with other features; run `csps train`")
        return cls(description, boosters[KIND])


def train_accuracy(
    samples: Sequence[AccuracySample], trained_for: Mapping[str, str]
) -> AccuracyModel:
    """Learn F_Ad. Samples are weighted by their questions; the metrics are of a fifth of them, the
    regressor of all.

    Raises:
        ConfigError: too few samples to hold some out.
    """
    if len(samples) < FEWEST:
        raise ConfigError(f"{len(samples)} measurements of accuracy; at least {FEWEST} are needed")
    mixed = [samples[index] for index in np.random.default_rng(0).permutation(len(samples))]
    held, kept = mixed[::HELD_OUT], [it for n, it in enumerate(mixed) if n % HELD_OUT]
    description = Description(
        kind=KIND,
        trained_for=dict(trained_for),
        training_set=fingerprint(samples),
        samples=len(samples),
        features=FEATURES,
        held_out=_metrics(_trained(kept), held),
    )
    return AccuracyModel(description, _trained(samples))


def _trained(samples: Sequence[AccuracySample]) -> lightgbm.Booster:
    data = lightgbm.Dataset(
        feature_matrix([it.setting for it in samples]),
        label=np.array([it.loss for it in samples]),
        weight=np.array([it.questions for it in samples], float),
        feature_name=[name.replace(" ", "_") for name in FEATURES],
        params={"feature_pre_filter": False, "verbose": -1},
    )
    return lightgbm.train(PARAMETERS, data, num_boost_round=ROUNDS)


def _metrics(booster: lightgbm.Booster, held: Sequence[AccuracySample]) -> dict[str, float]:
    predicted = _predicted(booster, [it.setting for it in held])
    measured = np.array([it.loss for it in held])
    low, high = np.array([it.interval for it in held]).T
    right = np.array([(predicted <= bound) == (measured <= bound) for bound in BOUNDS])
    sure = np.array([(bound < low) | (high <= bound) for bound in BOUNDS])
    return {
        "mean_absolute_error": float(np.abs(predicted - measured).mean()),
        "right_side_of_bound": float(right.mean()),
        "right_side_beyond_interval": float(right[sure].mean()) if sure.any() else 1.0,
        "questions": float(np.mean([it.questions for it in held])),
        "samples": float(len(held)),
    }


def _predicted(booster: lightgbm.Booster, settings: Sequence[Setting]) -> Amounts:
    """(n,) losses in [0, 1]."""
    predicted = np.asarray(booster.predict(feature_matrix(settings), num_threads=1), float)
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
