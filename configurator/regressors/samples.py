"""How far a share of right answers may be from the truth.

Which share of a prompt's pairs of tokens meets at which level: what sparse attention may drop.

Pairs that a level may drop are half of all with 2 instances and 94 % with 16, so that the loss of
accuracy depends on the shape of the group as much as on the ratios; the paper's F_Ad leaves it out.

What was measured of accuracy, as F_Ad learns from it, and the features that it learns by.

From rows of the scaling information base to what F_Ad learns from.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import log2, sqrt
from statistics import fmean

import numpy as np

from csps.configurator.model.phase_times import Amounts
from csps.configurator.model.scaling_information_base import AccuracyRow
from csps.protocols.attention.csa import CsaSettings, Ratios, halving, kept_tokens
from csps.protocols.core.topology import Topology

Z_95 = 1.959963984540054
"""Standard deviations within which 95 % of a normal distribution lie."""


def wilson(right: int, questions: int) -> tuple[float, float]:
    """Wilson's score interval of 95 %, lower and upper end.

    Unlike the normal approximation it holds near 0 and 1: 50 right of 50 may be 93 %.
    """
    assert 0 <= right <= questions > 0, (right, questions)
    share = right / questions
    square = Z_95**2 / questions
    middle = share + square / 2
    spread = Z_95 * sqrt(share * (1 - share) / questions + square / (4 * questions))
    low = (middle - spread) / (1 + square) if right else 0.0
    high = (middle + spread) / (1 + square) if right < questions else 1.0
    return low, high


def pairs_by_level(locations: Sequence[str], levels: int) -> tuple[float, ...]:
    """Share of the causal pairs of a long prompt, cut evenly, that meets at levels 1, 2, …

    Raises:
        ConfigError: more levels than the locations tell apart.
    """
    members = len(locations)
    shares, nearer = [], 0.0
    for segments in Topology.of(locations).levels(levels):
        within = sum(len(segment) ** 2 for segment in segments) / members**2
        shares.append(within - nearer)
        nearer = within
    return tuple(shares)


def eligible_pairs(locations: Sequence[str], levels: int) -> float:
    """Share that is not of level 1."""
    return 1.0 - pairs_by_level(locations, levels)[0]


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
    return np.array([features(setting) for setting in settings], float).reshape(-1, len(FEATURES))


def fingerprint(samples: Sequence[AccuracySample]) -> str:
    """SHA-256 of a training set, whatever its order."""
    lines = sorted(json.dumps(asdict(sample), sort_keys=True) for sample in samples)
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


PLAIN_TEXT = "plain text"
"""The kind of questions that is none: which token comes next."""
RETRIEVES = 0.5
"""A model that answers fewer of a kind's questions rightly, with exact attention, has no answers of
that kind to lose."""


def accuracy_samples(rows: Iterable[AccuracyRow], *, layers: int) -> list[AccuracySample]:
    """One for each configuration that was measured. Of its kinds of questions the one that loses
    most counts, of equals the one most asked: a bound is to be kept whatever is asked. Plain text
    counts where the model answers none of them.

    Args:
        layers: of the model.
    """
    by_setting: dict[Setting, dict[str, list[AccuracyRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_setting[_setting(row, layers)][row.kind].append(row)
    return [
        max(_counting(setting, by_kind), key=lambda it: (it.loss, it.questions))
        for setting, by_kind in by_setting.items()
    ]


def _counting(setting: Setting, by_kind: dict[str, list[AccuracyRow]]) -> list[AccuracySample]:
    """The kinds that say what a configuration loses."""
    sums = {kind: _sum(setting, rows) for kind, rows in by_kind.items()}
    text = sums.pop(PLAIN_TEXT, None)
    answered = [it for it in sums.values() if it.right_exact >= RETRIEVES * it.questions]
    return answered or ([text] if text else list(sums.values()))


def places_of(group_shape: str) -> tuple[str, ...]:
    """Rack-Server-GPU ids of instances by server, such as "2" or "4+4", in one rack."""
    return tuple(
        f"0-{server}-{place}"
        for server, instances in enumerate(group_shape.split("+"))
        for place in range(int(instances))
    )


def _setting(row: AccuracyRow, layers: int) -> Setting:
    return Setting(
        tokens=row.tokens,
        locations=places_of(row.group_shape),
        layers=layers,
        csa=CsaSettings(
            levels=row.levels,
            drop_ratios=((row.drop_ratio,),),
            strategy="tp" if row.strategy == "tp" else "ntp",
            importance_layer="same" if row.importance_layer == "same" else "previous",
            importance_window=row.importance_window,
        ),
    )


def _sum(setting: Setting, rows: list[AccuracyRow]) -> AccuracySample:
    return AccuracySample(
        setting=setting,
        questions=sum(row.questions for row in rows),
        right_exact=sum(row.right_exact for row in rows),
        right=sum(row.right for row in rows),
    )
