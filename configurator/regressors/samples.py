"""Samples and features from which F_Ad learns a configuration's loss of accuracy.

Samples come from rows of the scaling information base. Features include the share of a prompt's
pairs of tokens at each level, which sparse attention may drop. It is half of all pairs with 2
instances and 94 % with 16, so the loss depends on the shape of the group as much as on the ratios;
the paper's F_Ad leaves it out.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log2, sqrt
from statistics import fmean
from typing import ClassVar

import numpy as np

from csps.configurator.model.phase_times import Amounts
from csps.configurator.model.scaling_information_base import AccuracyRow
from csps.protocols.attention.csa import CsaSettings, Ratios, halving, kept_tokens
from csps.protocols.core.topology import Topology

Z_95 = 1.959963984540054
"""Standard deviations within which 95 % of a normal distribution lie."""


def wilson(right: int, questions: int) -> tuple[float, float]:
    """Return Wilson's score interval of 95 %.

    Unlike the normal approximation it holds near 0 and 1: 50 right of 50 may be 93 %.
    """
    assert 0 <= right <= questions > 0, f"{right} right answers to {questions} questions"
    share = right / questions
    square = Z_95**2 / questions
    middle = share + square / 2
    spread = Z_95 * sqrt(share * (1 - share) / questions + square / (4 * questions))
    low = (middle - spread) / (1 + square) if right else 0.0
    high = (middle + spread) / (1 + square) if right < questions else 1.0
    return low, high


def pairs_by_level(locations: Sequence[str], levels: int) -> tuple[float, ...]:
    """Return the share of a long prompt's causal pairs at levels 1, 2, …, if it is cut evenly.

    Raises:
        ConfigError: there are more levels than the locations distinguish.
    """
    members = len(locations)
    shares, nearer = [], 0.0
    for segments in Topology.of(locations).levels(levels):
        within = sum(len(segment) ** 2 for segment in segments) / members**2
        shares.append(within - nearer)
        nearer = within
    return tuple(shares)


def eligible_pairs(locations: Sequence[str], levels: int) -> float:
    """Return the share of pairs beyond level 1."""
    return 1.0 - pairs_by_level(locations, levels)[0]


# Regressors that ship store these names, so they do not change.
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
"""Monotone constraints of the features: loss does not fall when more is dropped.

The data determine how it depends on the rest. (It may well fall with more eligible pairs of which
as many are dropped.)
"""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A configuration on a group."""

    tokens: int
    locations: tuple[str, ...]
    """Rack-Server-GPU id of each instance, ascending."""
    layers: int
    """Number of layers of the model."""
    csa: CsaSettings

    @property
    def levels(self) -> int:
        """Number of levels on this group."""
        plan = self.csa.for_group(self.locations, layers=1, longest_spt=self.tokens)
        return plan.levels

    @property
    def drops_queries(self) -> bool:
        """True if queries are dropped; SP-TP computes all of them."""
        return self.csa.drop_queries and self.csa.strategy not in ("tp", "tp_flat")

    @property
    def lossless(self) -> bool:
        """True if attention is exact on this group."""
        return self.levels == 1 or self.csa.lossless or self.layers < 3


ENOUGH = 400
"""Questions from which a measured loss counts as it is; with fewer, the upper end of its
interval of 95 % counts."""
ENOUGH_POSITIONS = 10_000
"""The same of next tokens, which are compared with exact attention's."""
LONG = 32_768
"""Length beyond which fewer than `ENOUGH` questions, which take hours there, support no bound below
`LEAST_OF_LONG`."""
LEAST_OF_LONG = 0.05


@dataclass(frozen=True, kw_only=True)
class AccuracySample:
    """Answers to the same questions with sparse and with exact attention."""

    setting: Setting
    questions: int
    right_exact: int
    right: int

    needed: ClassVar[int] = ENOUGH
    """Questions from which the loss counts as it is."""

    @property
    def enough(self) -> bool:
        """True if so many questions were asked."""
        return self.questions >= self.needed

    @property
    def upper(self) -> float:
        """Loss that a bound has to allow."""
        if self.enough:
            return self.loss
        least = LEAST_OF_LONG if self.setting.tokens > LONG else 0.0
        return max(least, self.interval[1])

    @property
    def loss(self) -> float:
        """Decrease of the share of right answers; an increase is noise, and counts as 0."""
        return max(0.0, (self.right_exact - self.right) / self.questions)

    @property
    def interval(self) -> tuple[float, float]:
        """Interval of 95 % for the loss."""
        return loss_interval(self.questions, self.right_exact, self.right)


class NextTokenSample(AccuracySample):
    """Next tokens that are, and are not, those of exact attention."""

    needed: ClassVar[int] = ENOUGH_POSITIONS


def loss_interval(questions: int, right_exact: int, right: int) -> tuple[float, float]:
    """Return the interval of 95 % for the loss, for answers to the same questions.

    The number of lost answers counts. Where some others were gained, which is chance, as many more
    were lost, and the interval is a little too narrow.
    """
    return wilson(max(0, right_exact - right), questions)


def features(setting: Setting) -> tuple[float, ...]:
    """Return the features in the order of `FEATURES`."""
    csa, levels = setting.csa, setting.levels
    shares = pairs_by_level(setting.locations, levels)
    # The first and the last layer never drop, so their ratios do not count.
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
    """Return the features of all settings, (n, features)."""
    return np.array([features(setting) for setting in settings], float).reshape(-1, len(FEATURES))


def fingerprint(samples: Sequence[AccuracySample]) -> str:
    """Return the SHA-256 of a training set, independent of its order."""
    lines = sorted(json.dumps(asdict(sample), sort_keys=True) for sample in samples)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _fewest_kept(setting: Setting, by_level: Sequence[Ratios]) -> int:
    """Return the tokens kept of the first SPT at the farthest level, apart from sinks.

    The layer and head that keep fewest count: a question or a fact takes as many tokens, whatever
    the length of the prompt.
    """
    of_layers = (max(ratios[-1]) if ratios else 0.0 for ratios in by_level)
    spt = setting.tokens // len(setting.locations)
    return max(0, kept_tokens(spt, max(of_layers)) - setting.csa.sinks)


def _dropping_layers(setting: Setting) -> list[tuple[float, ...]]:
    """Return the level-2 ratios of each layer that may drop; there is always one."""
    ratios = setting.csa.drop_ratios
    layers = range(1, max(2, setting.layers - 1))
    return [ratios[min(layer, len(ratios) - 1)] for layer in layers]


PLAIN_TEXT = "plain text"
"""Kind that asks no questions, but which token comes next."""
NEXT_TOKEN = "next token"
"""The same of a category's prompts."""
RETRIEVAL = "retrieval"
RETRIEVES = 0.5
"""Share of a kind's questions that a model must answer rightly with exact attention. Otherwise
it has no answers of that kind to lose."""


def kind_name(category: str, task: str) -> str:
    """Return the name of a kind of questions of a category."""
    return f"{category}: {task}"


def category_of(kind: str) -> str | None:
    """Return the category of a kind of questions; None for plain text, which has none."""
    if kind == PLAIN_TEXT:
        return None
    category, separator, _ = kind.partition(": ")
    # Needle questions were measured before there were categories.
    return category if separator else RETRIEVAL


def accuracy_samples(rows: Iterable[AccuracyRow], *, layers: int) -> list[AccuracySample]:
    """Return one sample for each configuration that was measured in each category.

    A bound holds in each category, so the one that is known to lose most counts. A configuration
    that was not measured in a category, in which others were, may lose anything there, and is left
    out.

    Args:
        layers: number of layers of the model.
    """
    measured = losses_by_category(rows, layers=layers)
    asked = {category for categories in measured.values() for category in categories}
    return [
        # Of equal samples the one with most questions.
        max((sample for sample in samples.values() if sample), key=_known_loss)
        for samples in measured.values()
        if all(samples.get(category) for category in asked)
    ]


def losses_by_category(
    rows: Iterable[AccuracyRow], *, layers: int
) -> dict[Setting, dict[str, AccuracySample | None]]:
    """Return what each configuration loses in each category that it was asked.

    A sample is None if the model answers no question of the category, and no next tokens stand in.
    """
    by_setting: dict[Setting, dict[str, list[AccuracyRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_setting[_setting(row, layers)][row.kind].append(row)
    branches: dict[Setting, dict[Setting, dict[str, AccuracySample | None]]] = defaultdict(dict)
    for setting, by_kind in by_setting.items():
        sums = {kind: _sum(setting, kind, of_kind) for kind, of_kind in by_kind.items()}
        branches[_branch(setting)][setting] = _by_category(sums)
    return {setting: _with_harder(setting, branches[_branch(setting)]) for setting in by_setting}


def _known_loss(sample: AccuracySample) -> tuple[float, float, int]:
    """Return the order of samples from the one that loses least."""
    return sample.upper, sample.loss, sample.questions


def _by_category(by_kind: Mapping[str, AccuracySample]) -> dict[str, AccuracySample | None]:
    """Return the kind of each category that loses most, of those that the model answers exactly.

    For a category of which it answers none, its next tokens stand in, and else those of plain text.
    """
    found: dict[str, AccuracySample | None] = {}
    for category in dict.fromkeys(map(category_of, by_kind)):
        if category is None:
            continue
        stand_in = kind_name(category, NEXT_TOKEN)
        counting = [
            sample
            for kind, sample in by_kind.items()
            if category_of(kind) == category
            and kind != stand_in
            and sample.right_exact >= RETRIEVES * sample.questions
        ]
        if not counting:
            counting = [by_kind[kind] for kind in (stand_in, PLAIN_TEXT) if kind in by_kind][:1]
        # Of equal kinds the one with most questions.
        found[category] = max(
            counting, key=lambda sample: (sample.loss, sample.questions), default=None
        )
    return found


def _branch(setting: Setting) -> Setting:
    """Return the setting without its ratios."""
    return replace(setting, csa=replace(setting.csa, drop_ratios=((0.0,),)))


def _with_harder(
    setting: Setting, branch: Mapping[Setting, Mapping[str, AccuracySample | None]]
) -> dict[str, AccuracySample | None]:
    """Return the samples of a setting by category.

    Where neither it nor larger ratios lost anything, the most questions count: larger ratios keep
    a subset. (The profile asks a kind further only at the largest such ratio.)
    """
    found = dict(branch[setting])
    for other, by_category in branch.items():
        if not _drops_more(other.csa.drop_ratios, setting.csa.drop_ratios):
            continue
        for category, sample in by_category.items():
            own = found.get(category)
            if own and sample and own.loss == sample.loss == 0 and own.questions < sample.questions:
                found[category] = replace(sample, setting=setting)
    return found


def _drops_more(ratios: Ratios, than: Ratios) -> bool:
    """Return True if no layer and head drops less, and one drops more.

    The last layer given counts for all behind it, and the last head for all others.
    """
    layers, heads = max(len(ratios), len(than)), max(map(len, (*ratios, *than)))
    pairs = [
        [of_layer[min(head, len(of_layer) - 1)] for of_layer in both]
        for both in (
            [by_layer[min(layer, len(by_layer) - 1)] for by_layer in (ratios, than)]
            for layer in range(layers)
        )
        for head in range(heads)
    ]
    return any(more > less for more, less in pairs) and all(more >= less for more, less in pairs)


def places_of(group_shape: str) -> tuple[str, ...]:
    """Return Rack-Server-GPU ids of instances by server, such as "2" or "4+4", in one rack."""
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


def _sum(setting: Setting, kind: str, rows: list[AccuracyRow]) -> AccuracySample:
    next_token = kind in (PLAIN_TEXT, kind_name(category_of(kind) or "", NEXT_TOKEN))
    return (NextTokenSample if next_token else AccuracySample)(
        setting=setting,
        questions=sum(row.questions for row in rows),
        right_exact=sum(row.right_exact for row in rows),
        right=sum(row.right for row in rows),
    )
