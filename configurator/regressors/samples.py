"""What was measured of accuracy, as F_Ad learns from it, and the features that it learns by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log2
from statistics import fmean

import numpy as np

from csps.configurator.interval import wilson
from csps.configurator.phase_times import Amounts
from csps.configurator.regressors.pairs import pairs_by_level
from csps.protocols.csa import Ratios, halving, kept_tokens
from csps.protocols.csa_settings import CsaSettings

FEATURES = (
    "log2 tokens",
    "levels",
    "eligible pairs",
    "dropped pairs",
    "mean ratio",
    "largest ratio",
    "judged by the same layer",
    "log2 window",
    "queries dropped",
    "log2 kept beside sinks",
)
MONOTONE = (0, 0, 0, 1, 1, 1, 0, 0, 0, -1)
"""Loss does not fall when more is dropped; how it depends on the rest is for the data to say. (It
may well fall with more eligible pairs of which as many are dropped.)"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A configuration where it runs."""

    tokens: int
    locations: tuple[str, ...]
    """Rack-Server-GPU id of each instance, ascending."""
    layers: int
    """Of the model."""
    csa: CsaSettings

    @property
    def levels(self) -> int:
        """Of this group."""
        plan = self.csa.for_group(self.locations, layers=1, longest_spt=self.tokens)
        return plan.levels

    @property
    def drops_queries(self) -> bool:
        """SP-TP computes them all."""
        return self.csa.drop_queries and self.csa.strategy not in ("tp", "tp_flat")

    @property
    def lossless(self) -> bool:
        """Whether it is exact there."""
        return self.levels == 1 or self.csa.lossless or self.layers < 3


@dataclass(frozen=True, kw_only=True)
class AccuracySample:
    """Answers to the same questions, sparsely and exactly."""

    setting: Setting
    questions: int
    right_exact: int
    right: int

    @property
    def loss(self) -> float:
        """Drop of the share of right answers; noise that gains some is no gain."""
        return max(0.0, (self.right_exact - self.right) / self.questions)

    @property
    def interval(self) -> tuple[float, float]:
        """Of 95 %, within which the loss lies."""
        return loss_interval(self.questions, self.right_exact, self.right)


def loss_interval(questions: int, right_exact: int, right: int) -> tuple[float, float]:
    """Of 95 %, for answers to the same questions.

    What counts is how many answers were lost; where some others were won, which is chance, as many
    more were lost, and the interval is a little too narrow.
    """
    return wilson(max(0, right_exact - right), questions)


def features(setting: Setting) -> tuple[float, ...]:
    """In the order of `FEATURES`. Ratios of the first and the last layer do not count: these never
    drop."""
    csa, levels = setting.csa, setting.levels
    shares = pairs_by_level(setting.locations, levels)
    by_level = [halving(of_layer, levels) for of_layer in _dropping_layers(setting)]
    dropped = fmean(
        sum(share * fmean(of_heads) for share, of_heads in zip(shares[1:], ratios, strict=True))
        for ratios in by_level
    )
    of_heads = [fmean(ratios[0]) if ratios else 0.0 for ratios in by_level]
    largest = max(max(ratios[0]) if ratios else 0.0 for ratios in by_level)
    return (
        log2(setting.tokens),
        float(levels),
        1.0 - shares[0],
        dropped,
        fmean(of_heads),
        largest,
        float(csa.importance_layer == "same"),
        log2(csa.importance_window or setting.tokens),
        float(setting.drops_queries),
        log2(1 + _fewest_kept(setting, by_level)),
    )


def feature_matrix(settings: Sequence[Setting]) -> Amounts:
    """(n, features)."""
    return np.array([features(it) for it in settings], float).reshape(-1, len(FEATURES))


def fingerprint(samples: Sequence[AccuracySample]) -> str:
    """SHA-256 of a training set, whatever its order."""
    lines = sorted(json.dumps(asdict(it), sort_keys=True) for it in samples)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _fewest_kept(setting: Setting, by_level: Sequence[Ratios]) -> int:
    """Tokens of the first SPT at the farthest level, in the layer and head that keep fewest, sinks
    apart: a question or a fact takes as many, whatever the length."""
    of_layers = (max(ratios[-1]) if ratios else 0.0 for ratios in by_level)
    spt = setting.tokens // len(setting.locations)
    return max(0, kept_tokens(spt, max(of_layers)) - setting.csa.sinks)


def _dropping_layers(setting: Setting) -> list[tuple[float, ...]]:
    """Ratios of level 2 of each layer that may drop; some layer always can."""
    ratios = setting.csa.drop_ratios
    layers = range(1, max(2, setting.layers - 1))
    return [ratios[min(layer, len(ratios) - 1)] for layer in layers]
