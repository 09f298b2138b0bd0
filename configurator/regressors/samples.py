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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from math import inf, log2, sqrt
from statistics import fmean
from typing import ClassVar, NamedTuple

import numpy as np

from csps.configurator.model.phase_times import Amounts
from csps.configurator.model.scaling_information_base import AccuracyRow, SpreadRow
from csps.configurator.search.space import LARGEST_RATIO, LayerGroups
from csps.protocols.attention.csa import CsaSettings, Ratios, halving, kept_tokens, parse_ratios
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


class DropCell(NamedTuple):
    """What one KV head of one layer drops."""

    ratio: float
    """Ratio of level 2."""
    dropped: float
    """Share of all pairs of tokens that are dropped."""
    kept: float
    """Logarithm of the tokens that are kept of the first SPT at the farthest level, apart from
    sinks: a question or a fact takes as many tokens, whatever the length of the prompt. Infinite
    if nothing is dropped."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A configuration on a group."""

    tokens: int
    locations: tuple[str, ...]
    """Rack-Server-GPU id of each instance, ascending."""
    layers: int
    """Number of layers of the model."""
    csa: CsaSettings

    @cached_property
    def levels(self) -> int:
        """Number of levels on this group."""
        plan = self.csa.for_group(self.locations, layers=1, longest_spt=self.tokens)
        return plan.levels

    @cached_property
    def cells(self) -> list[list[DropCell]]:
        """A cell for each layer that may drop, and for each KV head or for all of them.

        There is always one layer. The first and the last layer never drop, so their ratios do not
        count.
        """
        ratios, layers = self.csa.drop_ratios, range(1, max(2, self.layers - 1))
        cell = cache(self._cell)
        return [[cell(ratio) for ratio in ratios[min(layer, len(ratios) - 1)]] for layer in layers]

    def _cell(self, ratio: float) -> DropCell:
        by_level = [of_level[0] for of_level in halving(ratio, self.levels)]
        if not any(by_level):
            return DropCell(0.0, 0.0, inf)
        shares = pairs_by_level(self.locations, self.levels)[1:]
        dropped = sum(share * of_level for share, of_level in zip(shares, by_level, strict=True))
        spt = self.tokens // len(self.locations)
        kept = max(0, kept_tokens(spt, by_level[-1]) - self.csa.sinks)
        return DropCell(ratio, dropped, log2(1 + kept))

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
    cells = setting.cells
    return (
        log2(setting.tokens),
        float(levels),
        eligible_pairs(setting.locations, levels),
        fmean(fmean(cell.dropped for cell in of_layer) for of_layer in cells),
        fmean(fmean(cell.ratio for cell in of_layer) for of_layer in cells),
        max(cell.ratio for of_layer in cells for cell in of_layer),
        float(csa.importance_layer == "same"),
        log2(csa.importance_window or setting.tokens),
        float(setting.drops_queries),
        min(min(cell.kept, _all_kept(setting)) for of_layer in cells for cell in of_layer),
    )


GRADED = "log2 anchor"
"""Feature of models whose layers or heads differ: the largest ratio if all relate as measured and
drop as much."""
OF_GROUP = ("dropped pairs", "largest ratio")
"""Features of each layer group, where layers form several. All further features are monotone."""
LARGEST_ANCHOR = 128.0


def feature_names(groups: LayerGroups | None) -> tuple[str, ...]:
    """Return the names of the features, for layer groups or for layers of which nothing is
    known."""
    if groups is None or groups.all_alike:
        return FEATURES
    return (
        *FEATURES,
        GRADED,
        *(
            f"{name} of layer group {index}"
            for index in range(len(groups.members) if len(groups.members) > 1 else 0)
            for name in OF_GROUP
        ),
    )


def feature_matrix(settings: Sequence[Setting], groups: LayerGroups | None = None) -> Amounts:
    """Return the features of all settings, (n, features), in the order of `feature_names`."""
    further = groups if groups is not None and not groups.all_alike else None
    rows = [
        (*features(setting), *(_of_layers(setting, further) if further else ()))
        for setting in settings
    ]
    return np.array(rows, float).reshape(-1, len(feature_names(groups)))


def _of_layers(setting: Setting, groups: LayerGroups) -> Iterator[float]:
    """Yield the features of models whose layers or heads differ."""
    same_model = setting.layers == groups.layers
    yield log2(1 + min(_anchor(setting, groups if same_model else None), LARGEST_ANCHOR))
    for members in groups.members if len(groups.members) > 1 else ():
        # A model with other layers than those measured has the same features for all groups.
        own = [
            cell
            for layer, of_layer in enumerate(setting.cells, start=1)
            if not same_model or layer in members
            for cell in of_layer
        ]
        yield fmean(cell.dropped for cell in own) if own else 0.0
        yield max((cell.ratio for cell in own), default=0.0)


def _anchor(setting: Setting, groups: LayerGroups | None) -> float:
    of_layers = [[cell.ratio for cell in of_layer] for of_layer in setting.cells]
    if groups is None:
        return max(map(max, of_layers))
    return max(
        groups.smallest_anchor(layer, ratios) for layer, ratios in enumerate(of_layers, start=1)
    )


def _all_kept(setting: Setting) -> float:
    spt = setting.tokens // len(setting.locations)
    return log2(1 + max(0, spt - setting.csa.sinks))


def fingerprint(samples: Sequence[AccuracySample]) -> str:
    """Return the SHA-256 of a training set, independent of its order."""
    lines = sorted(json.dumps(asdict(sample), sort_keys=True) for sample in samples)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


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


def row_ratios(row: AccuracyRow) -> Ratios:
    """Return the ratios of a row by layer."""
    return parse_ratios(row.drop_ratios) if row.drop_ratios else ((row.drop_ratio,),)


def _setting(row: AccuracyRow, layers: int) -> Setting:
    return Setting(
        tokens=row.tokens,
        locations=places_of(row.group_shape),
        layers=layers,
        csa=CsaSettings(
            levels=row.levels,
            drop_ratios=row_ratios(row),
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


TOLERABLE = 0.02
"""Loss up to which a layer tolerates a ratio: at most one of the 80 questions that are asked of
one layer."""


def measured_groups(
    spreads: Iterable[SpreadRow], samples: Iterable[AccuracySample], *, layers: int
) -> LayerGroups:
    """Group layers by what was measured of each; without measurements of all, return one group.

    The trend of a layer is the largest ratio that it tolerates if it alone drops, or, if that was
    not measured, the standard deviation of its attention scores (CSPS App. B). KV heads share the
    ratio of their layer as their standard deviations relate. The shortest prompts with spreads
    count, so longer ones that are measured later change nothing.

    Args:
        samples: samples, of which those that drop in one layer count.
        layers: number of layers of the model.
    """
    rows = list(spreads)
    shortest = min((row.tokens for row in rows), default=0)
    by_layer: dict[int, list[float]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.layer, row.kv_head)):
        if row.tokens == shortest:
            by_layer[row.layer].append(row.spread)
    # The first and the last layer drop nothing, and go with their neighbors.
    dropping = range(1, layers - 1)
    if not dropping or not all(max(by_layer[layer], default=0) > 0 for layer in dropping):
        return LayerGroups.alike(layers)
    sources = [min(max(layer, dropping.start), dropping.stop - 1) for layer in range(layers)]
    tolerated = tolerated_ratios(sample for sample in samples if sample.setting.tokens == shortest)
    if all(layer in tolerated for layer in dropping):
        trends = [tolerated[layer] for layer in sources]
    else:
        trends = [max(by_layer[layer]) for layer in sources]
    shares = [[each / max(by_layer[layer]) for each in by_layer[layer]] for layer in sources]
    return LayerGroups.similar(trends, shares)


def tolerated_ratios(samples: Iterable[AccuracySample]) -> dict[int, float]:
    """Return the largest ratio that each layer tolerates if it alone drops.

    It is a mean over prompts and groups, by the scoring with which layers tolerate most. If a layer
    tolerates no measured ratio, half of the smallest counts.
    """
    found: dict[tuple[object, ...], dict[int, list[AccuracySample]]] = {}
    for sample in samples:
        layer, csa = only_layer(sample.setting), sample.setting.csa
        if layer is not None:
            scoring = csa.strategy, csa.importance_layer, csa.importance_window
            found.setdefault(scoring, defaultdict(list))[layer].append(sample)
    by_scoring = [
        {layer: _tolerated(of_layer) for layer, of_layer in of_scoring.items()}
        for of_scoring in found.values()
    ]
    return max(
        by_scoring, key=lambda tolerated: (len(tolerated), sum(tolerated.values())), default={}
    )


def only_layer(setting: Setting) -> int | None:
    """Return the layer that alone drops, or None if several do."""
    dropping = [
        layer
        for layer, cells in enumerate(setting.cells, start=1)
        if any(cell.ratio for cell in cells)
    ]
    return dropping[0] if len(dropping) == 1 else None


def _tolerated(samples: Iterable[AccuracySample]) -> float:
    branches: dict[tuple[object, ...], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        setting = sample.setting
        ratio = max(cell.ratio for of_layer in setting.cells for cell in of_layer)
        branches[setting.tokens, setting.locations, setting.levels].append((ratio, sample.loss))
    return fmean(_largest_tolerated(sorted(branch)) for branch in branches.values())


def _largest_tolerated(losses: Sequence[tuple[float, float]]) -> float:
    """Return the largest of ascending ratios up to which no loss is too large."""
    tolerated = losses[0][0] / 2
    for ratio, loss in losses:
        if loss > TOLERABLE:
            break
        tolerated = ratio
    return min(tolerated, LARGEST_RATIO)
