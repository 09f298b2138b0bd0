"""`csps profile accuracy`: how many right answers each configuration loses.

All configurations are asked the same questions, one prompt after another, because what they have in
common of a prompt is computed once for all. A round of a kind's questions is a row of the scaling
information base for each configuration, so that a run that was interrupted goes on where it was.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch

from csps.configurator.regressors.measured import PLAIN_TEXT
from csps.configurator.regressors.samples import loss_interval
from csps.configurator.scaling_information_base import AccuracyRow, ScalingInformationBase
from csps.protocols.csa import CsaPlan
from csps.services.evaluation.local_model import LocalModel
from csps.services.profiling.accuracy.emulated_group import EmulatedGroup
from csps.services.profiling.accuracy.points import Enumeration, Point
from csps.services.profiling.accuracy.questions import KINDS, Asked, QuestionKind, Score

HOPELESS = 0.5
"""A branch ends where more answers are lost than this: who drops more loses no fewer."""


@dataclass
class Tally:
    """What is known of a point and a kind of questions."""

    rounds: int = 0
    questions: int = 0
    right_exact: int = 0
    right: int = 0

    def add(self, answers: AccuracyRow | Score) -> None:
        """One round more."""
        self.rounds += 1
        self.questions += answers.questions
        self.right_exact += answers.right_exact
        self.right += answers.right

    @property
    def lost_nothing(self) -> bool:
        """Of what was asked."""
        return self.rounds > 0 and self.right >= self.right_exact

    @property
    def interval(self) -> tuple[float, float]:
        """Of the loss."""
        if not self.questions:
            return 0.0, 1.0
        return loss_interval(self.questions, self.right_exact, self.right)


@dataclass
class AccuracyProfile:
    """Measures what is not in the base yet."""

    base: ScalingInformationBase
    model: LocalModel
    enumeration: Enumeration
    say: Callable[[str], None]
    limit_s: float = float("inf")
    """Begin no round after so long."""
    _tallies: defaultdict[Point, defaultdict[str, Tally]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(Tally))
    )

    @torch.inference_mode()
    def run(self) -> None:
        """All lengths, short ones first."""
        end = time.monotonic() + self.limit_s
        for row in self.base.rows(AccuracyRow):
            self._tallies[Point.of_row(row)][row.kind].add(row)
        most = self.model.network.spec.max_positions
        for tokens in (it for it in self.enumeration.lengths if it <= most):
            points = list(self.enumeration.points(tokens))
            for number in range(max(kind.rounds for kind in KINDS)):
                for kind in KINDS:
                    if time.monotonic() > end:
                        return
                    self._round(kind, tokens, number, points)

    def _round(self, kind: QuestionKind, tokens: int, number: int, points: Sequence[Point]) -> None:
        wanting = [point for point in points if self._wants(point, kind, number)]
        if not wanting:
            return
        begin = time.monotonic()
        scores: dict[Point, list[Score]] = {point: [] for point in wanting}
        for asked in kind.asked(self.model, tokens, number):
            for point, score in answered(self.model, asked, wanting).items():
                scores[point].append(score)
        for point in wanting:
            row = _row(point, kind, scores[point])
            self.base.add(row)
            self._tallies[point][kind.name].add(row)
        self.say(
            f"{tokens:>6} tokens, {kind.name}: round {number + 1} of {kind.rounds}, "
            f"{len(wanting)} configurations ({time.monotonic() - begin:.0f} s)"
        )

    # --- what is worth asking ------------------------------------------------------------------

    def _wants(self, point: Point, kind: QuestionKind, number: int) -> bool:
        rounds = self._tallies[point][kind.name].rounds
        if number >= kind.rounds or rounds > number or self._hopeless(point):
            return False
        return not (rounds and (self._outdone(point, kind) or self._harmless(point, kind)))

    def _hopeless(self, point: Point) -> bool:
        """One of the branch that drops less has lost too much."""
        return any(
            other.drop_ratio < point.drop_ratio and self._surely_lost(other) > HOPELESS
            for other in self._branch(point)
        )

    def _harmless(self, point: Point, kind: QuestionKind) -> bool:
        """One of the branch that drops more has lost nothing, and is asked on."""
        beyond = (it for it in self._branch(point) if it.drop_ratio > point.drop_ratio)
        return any(self._tallies[it][kind.name].lost_nothing for it in beyond)

    def _branch(self, point: Point) -> Iterator[Point]:
        """All that is known of it."""
        return (it for it in self._tallies if it.branch == point.branch)

    def _outdone(self, point: Point, kind: QuestionKind) -> bool:
        """Another kind of questions surely loses more, which is what counts."""
        if kind.name == PLAIN_TEXT:
            return False
        return self._tallies[point][kind.name].interval[1] < self._surely_lost(point)

    def _surely_lost(self, point: Point) -> float:
        tallies = self._tallies[point]
        return max(
            (it.interval[0] for kind, it in tallies.items() if kind != PLAIN_TEXT), default=0.0
        )


def answered(model: LocalModel, asked: Asked, points: Iterable[Point]) -> dict[Point, Score]:
    """A prompt by each configuration."""
    spec = model.network.spec
    group = EmulatedGroup(
        spec=spec, plan=CsaPlan(locations=("0-0-0",), levels=1), tokens=asked.tokens
    )
    exact_sv = asked.prompt.logits(group)
    return {
        point: asked.score(exact_sv, asked.prompt.logits(point.group(spec, asked.tokens)))
        for point in points
    }


def _row(point: Point, kind: QuestionKind, scores: Iterable[Score]) -> AccuracyRow:
    branch, all_scores = point.branch, list(scores)
    questions = sum(it.questions for it in all_scores)
    return AccuracyRow(
        kind=kind.name,
        tokens=branch.tokens,
        strategy=branch.strategy,
        levels=branch.levels,
        drop_ratio=point.drop_ratio,
        importance_layer=branch.judging.layer,
        importance_window=branch.judging.window,
        group_shape=branch.group_shape,
        questions=questions,
        right_exact=sum(it.right_exact for it in all_scores),
        right=sum(it.right for it in all_scores),
        divergence=sum(it.questions * it.divergence for it in all_scores) / questions,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
