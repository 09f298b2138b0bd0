"""Run `csps profile accuracy`: measure the right answers that each configuration loses (CSPS App.
B).

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

from csps.configurator.model.scaling_information_base import AccuracyRow, ScalingInformationBase
from csps.configurator.regressors.samples import (
    PLAIN_TEXT,
    AccuracySample,
    NextTokenSample,
    accuracy_samples,
    loss_interval,
    losses_by_category,
    places_of,
)
from csps.configurator.search.space import ImportanceScoring, Space
from csps.models.network.spec import ModelSpec
from csps.protocols.attention.csa import CsaSettings
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
    drop_ratio: float

    @property
    def settings(self) -> CsaSettings:
        """The settings by which a request would ask for it."""
        branch = self.branch
        return CsaSettings(
            levels=branch.levels,
            drop_ratios=((self.drop_ratio,),),
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
        return cls(branch=branch, drop_ratio=row.drop_ratio)


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

    def points(self, tokens: int) -> Iterator[Point]:
        """Yield the points of one length, those that drop least first."""
        for ratio, branch in product(self.drop_ratios, self._branches(tokens)):
            yield Point(branch=branch, drop_ratio=ratio)

    def _branches(self, tokens: int) -> Sequence[Branch]:
        return [
            Branch(
                tokens=tokens,
                group_shape=shape,
                strategy=strategy,
                levels=levels,
                scoring=scoring,
            )
            for strategy, scoring in self.scoring
            for shape in self.group_shapes
            for levels in Space.level_counts(places_of(shape))
            if levels > 1
        ]


QUICK = Enumeration(
    lengths=(1_024,),
    group_shapes=("2", "2+2"),
    scoring=(("ntp", ImportanceScoring("same", 64)), ("ntp", ImportanceScoring("previous", 64))),
    drop_ratios=(0.3, 0.6, 0.9),
)


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
        most = self.model.network.spec.max_positions
        for tokens in (length for length in self.enumeration.lengths if length <= most):
            points = list(self.enumeration.points(tokens))
            kinds = answered_kinds(QUESTION_KINDS, self.model, tokens, self._exactly(tokens))
            for round_index in range(min(self.rounds, max(kind.rounds for kind in kinds))):
                for kind in kinds:
                    if time.monotonic() > end:
                        return
                    self._round(kind, tokens, round_index, points)

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
        if round_index >= kind.rounds or rounds > round_index or self._hopeless(point):
            return False
        return not (rounds and (self._outdone(point, kind) or self._harmless(point, kind)))

    def _hopeless(self, point: Point) -> bool:
        """Return True if a point of the branch that drops less has lost too much."""
        return any(
            other.drop_ratio < point.drop_ratio and self._surely_lost(other) > HOPELESS
            for other in self._branch(point)
        )

    def _harmless(self, point: Point, kind: QuestionKind) -> bool:
        """Return True if a point of the branch that drops more has lost nothing; that one
        continues."""
        beyond = (other for other in self._branch(point) if other.drop_ratio > point.drop_ratio)
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


def _row(point: Point, kind: QuestionKind, scores: Iterable[Score]) -> AccuracyRow:
    branch, all_scores = point.branch, list(scores)
    questions = sum(score.questions for score in all_scores)
    return AccuracyRow(
        kind=kind.name,
        tokens=branch.tokens,
        strategy=branch.strategy,
        levels=branch.levels,
        drop_ratio=point.drop_ratio,
        importance_layer=branch.scoring.layer,
        importance_window=branch.scoring.window,
        group_shape=branch.group_shape,
        questions=questions,
        right_exact=sum(score.right_exact for score in all_scores),
        right=sum(score.right for score in all_scores),
        divergence=sum(score.questions * score.divergence for score in all_scores) / questions,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
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
            f"{csa.drop_ratios[0][0]:>10.2f}  {sample.loss:.1%} [{low:.1%}, {high:.1%}] "
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
