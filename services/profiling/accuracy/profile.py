"""Run `csps profile accuracy`: measure what each configuration loses of the right answers, and how
attention differs between layers (CSPS App. B).

First it measures the spread of attention scores, then what configurations lose whose layers drop
alike, or one at a time, and then in the proportions that follow from both.

All configurations get the same questions, one prompt after another, because their common work on a
prompt is computed once. A round of a kind's questions is a row of the scaling information base for
each configuration, so that an interrupted run continues where it was.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import product
from typing import Literal

import torch

from csps.configurator.model.scaling_information_base import (
    AccuracyRow,
    ScalingInformationBase,
    SpreadRow,
)
from csps.configurator.regressors.samples import (
    PLAIN_TEXT,
    AccuracySample,
    NextTokenSample,
    accuracy_samples,
    loss_interval,
    losses_by_category,
    measured_groups,
    only_layer,
    places_of,
    row_ratios,
)
from csps.configurator.search.space import ImportanceScoring, LayerGroups, Space
from csps.models.network.spec import ModelSpec
from csps.protocols.attention.csa import CsaSettings, Ratios, ratios_text
from csps.services.evaluation.local_model import LocalModel
from csps.services.profiling.accuracy.emulated_attention import EmulatedGroup
from csps.services.profiling.accuracy.questions import (
    QUESTION_KINDS,
    QUESTIONS,
    ROUND,
    AskedPrompt,
    QuestionKind,
    Score,
    answered_kinds,
    exact_group,
    exact_logits,
)


@dataclass(frozen=True, kw_only=True)
class Branch:
    """Configurations that differ only in how much they drop."""

    tokens: int
    group_shape: str
    """Instances by server, such as "2" or "4+4"."""
    strategy: Literal["ntp", "tp"]
    levels: int
    scoring: ImportanceScoring


@dataclass(frozen=True, kw_only=True)
class Point:
    """One configuration."""

    branch: Branch
    drop_ratios: Ratios
    """Ratios of level 2 by layer, and by KV head where they differ, as `shortened` returns them."""

    @property
    def settings(self) -> CsaSettings:
        """The settings by which a request would ask for it."""
        branch = self.branch
        return CsaSettings(
            levels=branch.levels,
            drop_ratios=self.drop_ratios,
            strategy=branch.strategy,
            importance_layer="same" if branch.scoring.layer == "same" else "previous",
            importance_window=branch.scoring.window,
        )

    def group(self, spec: ModelSpec, tokens: int) -> EmulatedGroup:
        """Return the group for a prompt, which may be a little shorter than the branch says."""
        places, tensor_parallel = places_of(self.branch.group_shape), self.branch.strategy == "tp"
        plan = self.settings.for_group(
            places, layers=spec.layers, longest_spt=tokens, every_query=tensor_parallel
        )
        return EmulatedGroup(spec=spec, plan=plan, tokens=tokens, tensor_parallel=tensor_parallel)

    @classmethod
    def of_row(cls, row: AccuracyRow) -> Point:
        """Return the configuration of a row."""
        branch = Branch(
            tokens=row.tokens,
            group_shape=row.group_shape,
            strategy="tp" if row.strategy == "tp" else "ntp",
            levels=row.levels,
            scoring=ImportanceScoring(row.importance_layer, row.importance_window),
        )
        return cls(branch=branch, drop_ratios=row_ratios(row))

    @property
    def largest(self) -> float:
        """Largest ratio."""
        return max(map(max, self.drop_ratios))

    @property
    def only_layer(self) -> bool:
        """True if one layer alone drops, by a point of `Enumeration.points`."""
        return sum(map(any, self.drop_ratios)) == 1 and not any(self.drop_ratios[-1])

    def drops_less(self, other: Point) -> bool:
        """Return True if no layer and head of the same branch drops more, and some drop less."""
        mine, its = self.drop_ratios, other.drop_ratios
        layers = max(len(mine), len(its))
        pairs = [
            pair
            for layer in range(layers)
            for pair in _by_head(mine[min(layer, len(mine) - 1)], its[min(layer, len(its) - 1)])
        ]
        return mine != its and all(one <= two for one, two in pairs)


def _by_head(one: Sequence[float], other: Sequence[float]) -> Iterable[tuple[float, float]]:
    heads = max(len(one), len(other))
    return (
        (one[min(head, len(one) - 1)], other[min(head, len(other) - 1)]) for head in range(heads)
    )


@dataclass(frozen=True, kw_only=True)
class Enumeration:
    """All points, as far as a model supports their lengths."""

    lengths: tuple[int, ...] = (1_024, 2_048, 4_096)
    group_shapes: tuple[str, ...] = ("2", "4", "2+2", "4+4")
    scoring: tuple[tuple[Literal["ntp", "tp"], ImportanceScoring], ...] = (
        ("ntp", ImportanceScoring("same", 64)),
        ("ntp", ImportanceScoring("previous", 64)),
        ("tp", ImportanceScoring("same", 64)),
        ("tp", ImportanceScoring("previous", 64)),
        ("ntp", ImportanceScoring("same", 16)),
        ("ntp", ImportanceScoring("same", 256)),
    )
    drop_ratios: tuple[float, ...] = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
    """Drop ratios, ascending."""

    layered_shapes: tuple[str, ...] = ("2", "4+4")
    """Shapes of which layers are measured one at a time, and then in proportion."""
    layered_scoring: tuple[ImportanceScoring, ...] = (
        ImportanceScoring("same", 64),
        ImportanceScoring("previous", 64),
    )
    """Scoring with SP-NTP by which they are measured."""
    layer_ratios: tuple[float, ...] = (0.3, 0.7, 0.9, 0.98)
    """Ratios of a layer that alone drops, ascending."""

    def points(self, tokens: int) -> Iterator[Point]:
        """Yield the points of one length whose layers drop alike, those that drop least first."""
        for ratio, branch in product(self.drop_ratios, self._branches(tokens)):
            yield Point(branch=branch, drop_ratios=((ratio,),))

    def layer_points(self, tokens: int, spreads: LayerGroups) -> Iterator[Point]:
        """Yield the points of one length at which one layer alone drops, those that drop least
        first.

        Args:
            spreads: groups that follow from spreads alone, by which KV heads share a ratio.
        """
        dropping = range(1, spreads.layers - 1)
        if len(dropping) < 2:
            return
        for ratio, layer, branch in product(
            self.layer_ratios, dropping, self._layered_branches(tokens)
        ):
            yield Point(branch=branch, drop_ratios=spreads.one_layer(layer, ratio))

    def graded_points(self, tokens: int, groups: LayerGroups) -> Iterator[Point]:
        """Yield the points of one length whose ratios relate as layers and heads do, those that
        drop least first."""
        if groups.all_alike:
            return
        for ratio, branch in product(self.drop_ratios, self._layered_branches(tokens)):
            yield Point(branch=branch, drop_ratios=groups.graded(ratio))

    def _branches(self, tokens: int) -> Sequence[Branch]:
        return [
            branch
            for strategy, scoring in self.scoring
            for shape in self.group_shapes
            for branch in _of_shape(tokens, shape, strategy, scoring)
        ]

    def _layered_branches(self, tokens: int) -> Sequence[Branch]:
        """Return branches with most levels."""
        return [
            list(_of_shape(tokens, shape, "ntp", scoring))[-1]
            for scoring in self.layered_scoring
            for shape in self.layered_shapes
        ]


def _of_shape(
    tokens: int, shape: str, strategy: Literal["ntp", "tp"], scoring: ImportanceScoring
) -> Iterator[Branch]:
    """Yield the branches of a shape, those of fewest levels first."""
    for levels in Space.level_counts(places_of(shape)):
        if levels > 1:
            yield Branch(
                tokens=tokens,
                group_shape=shape,
                strategy=strategy,
                levels=levels,
                scoring=scoring,
            )


QUICK = Enumeration(
    lengths=(1_024,),
    group_shapes=("2", "2+2"),
    scoring=(("ntp", ImportanceScoring("same", 64)), ("ntp", ImportanceScoring("previous", 64))),
    drop_ratios=(0.3, 0.6, 0.9),
    layered_shapes=("2+2",),
    layered_scoring=(ImportanceScoring("same", 64),),
    layer_ratios=(0.6, 0.98),
)


LAYER_ROUNDS = 2
"""Rounds of a point at which one layer alone drops: what relates layers, not what proves a
bound."""
HOPELESS = 0.5
"""Loss beyond which a branch ends: a configuration that drops more loses no fewer answers."""


@dataclass
class AnswerTally:
    """Answers to one kind of questions at one point."""

    rounds: int = 0
    questions: int = 0
    right_exact: int = 0
    right: int = 0

    def add(self, answers: AccuracyRow | Score) -> None:
        """Add one round."""
        self.rounds += 1
        self.questions += answers.questions
        self.right_exact += answers.right_exact
        self.right += answers.right

    @property
    def lost_nothing(self) -> bool:
        """True if no answer was lost so far."""
        return self.rounds > 0 and self.right >= self.right_exact

    @property
    def interval(self) -> tuple[float, float]:
        """Confidence interval of the loss."""
        if not self.questions:
            return 0.0, 1.0
        return loss_interval(self.questions, self.right_exact, self.right)


@dataclass
class AccuracyProfile:
    """Profile that measures what is not in the base yet."""

    base: ScalingInformationBase
    model: LocalModel
    enumeration: Enumeration
    say: Callable[[str], None]
    limit_s: float = float("inf")
    """Time after which no round starts."""
    rounds: int = QUESTIONS // ROUND
    """Rounds of each kind at most."""
    _tallies: defaultdict[Point, defaultdict[str, AnswerTally]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(AnswerTally))
    )

    @torch.inference_mode()
    def run(self) -> None:
        """Measure all lengths, short ones first."""
        end = time.monotonic() + self.limit_s
        for row in self.base.rows(AccuracyRow):
            self._tallies[Point.of_row(row)][row.kind].add(row)
        spec = self.model.network.spec
        for tokens in (each for each in self.enumeration.lengths if each <= spec.max_positions):
            if time.monotonic() > end:
                return
            if not spec.near_layers:
                self._measure_spreads(tokens)
            spreads = self.base.rows(SpreadRow)
            points = list(self.enumeration.points(tokens))
            kinds = answered_kinds(QUESTION_KINDS, self.model, tokens, self._exactly(tokens))
            if tokens == min((row.tokens for row in spreads), default=None):
                by_spread = measured_groups(spreads, (), layers=spec.layers)
                points += self.enumeration.layer_points(tokens, by_spread)
            self._ask(kinds, tokens, points, end)
            samples = accuracy_samples(self.base.rows(AccuracyRow), layers=spec.layers)
            groups = measured_groups(spreads, samples, layers=spec.layers)
            graded = list(self.enumeration.graded_points(tokens, groups))
            self._ask(kinds, tokens, graded, end)

    def _ask(
        self, kinds: Sequence[QuestionKind], tokens: int, points: Sequence[Point], end: float
    ) -> None:
        for round_index in range(min(self.rounds, max(kind.rounds for kind in kinds))):
            for kind in kinds:
                if time.monotonic() > end:
                    return
                self._round(kind, tokens, round_index, points)

    def _measure_spreads(self, tokens: int) -> None:
        """Measure the spreads of a length, unless they are in the base: of the first prompt of
        each kind of questions."""
        if any(row.tokens == tokens for row in self.base.rows(SpreadRow)):
            return
        begin, spec = time.monotonic(), self.model.network.spec
        prompts = [next(iter(kind.asked(self.model, tokens, 0))) for kind in QUESTION_KINDS]
        spreads_plg = torch.stack(
            [asked.prompt.spreads(exact_group(spec, asked.tokens)) for asked in prompts]
        )
        for layer, of_layer in enumerate(spreads_plg.mean(dim=0).tolist()):
            for kv_head, spread in enumerate(of_layer):
                self.base.add(
                    SpreadRow(
                        tokens=tokens,
                        layer=layer,
                        kv_head=kv_head,
                        window=exact_group(spec, tokens).plan.importance_window,
                        prompts=len(prompts),
                        spread=spread,
                        date=_now(),
                    )
                )
        self.say(f"{tokens:>6} tokens, attention scores ({time.monotonic() - begin:.0f} s)")

    def _exactly(self, tokens: int) -> dict[str, tuple[int, int]]:
        """Return questions and right answers of exact attention at a length, by kind."""
        sums: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for point, tallies in self._tallies.items():
            if point.branch.tokens == tokens:
                for kind, tally in tallies.items():
                    questions, right = sums[kind]
                    sums[kind] = questions + tally.questions, right + tally.right_exact
        return {kind: tally for kind, tally in sums.items() if tally[0]}

    def _round(
        self, kind: QuestionKind, tokens: int, round_index: int, points: Sequence[Point]
    ) -> None:
        wanting = [point for point in points if self._wants(point, kind, round_index)]
        if not wanting:
            return
        begin = time.monotonic()
        scores: dict[Point, list[Score]] = {point: [] for point in wanting}
        for asked in kind.asked(self.model, tokens, round_index):
            for point, score in answered(self.model, asked, wanting).items():
                scores[point].append(score)
        for point in wanting:
            row = _row(point, kind, scores[point])
            self.base.add(row)
            self._tallies[point][kind.name].add(row)
        self.say(
            f"{tokens:>6} tokens, {kind.name}: round {round_index + 1} of {kind.rounds}, "
            f"{len(wanting)} configurations ({time.monotonic() - begin:.0f} s)"
        )

    def _wants(self, point: Point, kind: QuestionKind, round_index: int) -> bool:
        rounds = self._tallies[point][kind.name].rounds
        if point.only_layer and round_index >= LAYER_ROUNDS:
            return False
        if round_index >= kind.rounds or rounds > round_index or self._hopeless(point):
            return False
        return not (rounds and (self._outdone(point, kind) or self._harmless(point, kind)))

    def _hopeless(self, point: Point) -> bool:
        """Return True if a point of the branch that drops less has lost too much."""
        return any(
            other.drops_less(point) and self._surely_lost(other) > HOPELESS
            for other in self._branch(point)
        )

    def _harmless(self, point: Point, kind: QuestionKind) -> bool:
        """Return True if a point of the branch that drops more has lost nothing; that one
        continues."""
        beyond = (other for other in self._branch(point) if point.drops_less(other))
        return any(self._tallies[other][kind.name].lost_nothing for other in beyond)

    def _branch(self, point: Point) -> Iterator[Point]:
        """Return the measured points of the branch."""
        return (other for other in self._tallies if other.branch == point.branch)

    def _outdone(self, point: Point, kind: QuestionKind) -> bool:
        """Return True if another kind of questions surely loses more, which is what counts."""
        if kind.name == PLAIN_TEXT:
            return False
        return self._tallies[point][kind.name].interval[1] < self._surely_lost(point)

    def _surely_lost(self, point: Point) -> float:
        tallies = self._tallies[point]
        return max(
            (tally.interval[0] for kind, tally in tallies.items() if kind != PLAIN_TEXT),
            default=0.0,
        )


def answered(model: LocalModel, asked: AskedPrompt, points: Iterable[Point]) -> dict[Point, Score]:
    """Score a prompt by each configuration."""
    spec, exact_sv = model.network.spec, exact_logits(model, asked)
    return {
        point: asked.score(exact_sv, asked.prompt.logits(point.group(spec, asked.tokens)))
        for point in points
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _row(point: Point, kind: QuestionKind, scores: Iterable[Score]) -> AccuracyRow:
    branch, all_scores = point.branch, list(scores)
    questions = sum(score.questions for score in all_scores)
    return AccuracyRow(
        kind=kind.name,
        tokens=branch.tokens,
        strategy=branch.strategy,
        levels=branch.levels,
        drop_ratio=point.largest,
        drop_ratios=""
        if point.drop_ratios == ((point.largest,),)
        else ratios_text(point.drop_ratios),
        importance_layer=branch.scoring.layer,
        importance_window=branch.scoring.window,
        group_shape=branch.group_shape,
        questions=questions,
        right_exact=sum(score.right_exact for score in all_scores),
        right=sum(score.right for score in all_scores),
        divergence=sum(score.questions * score.divergence for score in all_scores) / questions,
        date=_now(),
    )


def accuracy_lines(rows: Sequence[AccuracyRow], *, layers: int) -> Iterator[str]:
    """Yield a line for each configuration: the loss of its worst kind of questions."""
    if not rows:
        return
    yield "tokens  group  N_v  strategy  scored by  window  drop ratio  lost of right answers"
    by_category = losses_by_category(rows, layers=layers)
    for sample in sorted(accuracy_samples(rows, layers=layers), key=_order):
        setting, (low, high) = sample.setting, sample.interval
        csa = setting.csa
        yield (
            f"{setting.tokens:>6}  {len(setting.locations):>5}  {setting.levels:>3}  "
            f"{csa.strategy:<8}  {csa.importance_layer:<9}  {csa.importance_window:>6}  "
            f"{_drops(sample):>10}  {sample.loss:.1%} [{low:.1%}, {high:.1%}] "
            f"of {sample.questions}{_remarks(sample, by_category[setting])}"
        )


def _remarks(sample: AccuracySample, by_category: Mapping[str, AccuracySample | None]) -> str:
    """Return the loss of each category, and by how much too few questions count."""
    losses = [
        f"{category} {of_category.loss:.1%}"
        f"{' of next tokens' if isinstance(of_category, NextTokenSample) else ''}"
        for category, of_category in by_category.items()
        if of_category and len(by_category) > 1
    ]
    few = [] if sample.enough else [f"few questions: counts as {sample.upper:.1%}"]
    return "".join(f"; {remark}" for remark in (*losses, *few))


def _drops(sample: AccuracySample) -> str:
    """Return the ratio of a configuration, with the layer if that alone drops."""
    ratios, layer = sample.setting.csa.drop_ratios, only_layer(sample.setting)
    if len(ratios) == len(ratios[0]) == 1:
        return f"{ratios[0][0]:.2f}"
    if layer is not None and sample.setting.layers > 3:
        return f"{max(map(max, ratios)):.2f} in layer {layer}"
    return ratios_text(ratios)


def spread_lines(rows: Sequence[SpreadRow]) -> Iterator[str]:
    """Yield the spread of each layer's attention scores, by KV head, for each length."""
    by_layer: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row.tokens, row.layer, row.kv_head)):
        by_layer[row.tokens, row.layer].append(row.spread * row.tokens)
    if by_layer:
        yield "tokens  layer  standard deviation of attention scores over their mean, by KV head"
    for (tokens, layer), spreads in by_layer.items():
        yield f"{tokens:>6}  {layer:>5}  " + "  ".join(f"{spread:.2f}" for spread in spreads)


def _order(sample: AccuracySample) -> tuple[object, ...]:
    setting, csa = sample.setting, sample.setting.csa
    return (
        setting.tokens,
        csa.strategy,
        csa.importance_layer,
        csa.importance_window,
        setting.locations,
        setting.levels,
        csa.drop_ratios,
    )
