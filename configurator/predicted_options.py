"""What requests may choose from, by regressors and the pipeline simulator.

For a bucket of the cost table there are the best configurations for each bucket of bounds, with
their times relative to exact attention that is not cut, and what they lose. A request's own bounds
are applied to these when its place is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from csps.configurator.answering import Answerer, exact_seconds
from csps.configurator.enumeration import Loss
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.configurator.search import Found, Question, chosen, compared
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.options import option_name
from csps.protocols.plans import (
    ENGINE_NAMES,
    EXACT,
    LEVELS,
    SPARSE,
    Objective,
    StrategyChoice,
    StrategyQuestion,
)

RESOLUTION = 1 / 800
"""A loss of less than half a question of the 400 that a measured point has is none."""
MOST_INSTANCES = 16
"""Of groups that are simulated while serving: larger ones would take minutes."""
PAYS = 0.98
"""Exact attention is cut and pipelined if it then takes no more than this of its time."""


@dataclass(frozen=True, kw_only=True)
class PredictedOptions:
    """For one model on one machine.

    Args:
        group_of: the group of so many instances on each server.
    """

    answerer: Answerer
    accuracy: AccuracyModel
    group_of: Callable[[Sequence[int], int], SimulatedGroup]

    def options(self, asked: StrategyQuestion) -> tuple[StrategyChoice, ...]:
        """Of a class that has bounds, the least loss first; none if the client has fixed what
        nothing can be found with."""
        group, tokens, loss = self._asked(asked)
        given = {name: getattr(asked.csa, name) for name in asked.given}
        exact_s = exact_seconds(group, tokens)
        found = self.answerer.answers(group, tokens, loss, given)
        return tuple(
            self._choice(it, exact_s, given)
            for it in sorted(found, key=lambda it: (it.loss, it.seconds))
        )

    def exact(self, asked: StrategyQuestion) -> StrategyChoice | None:
        """Exact attention over levels where it pays, in micro-partitions that fit the links; None
        where it does not."""
        group, tokens, loss = self._asked(asked)
        candidates = [
            it for it in self.answerer.space.exact(group.locations) if it.strategy == "ntp"
        ]
        question = Question(group=group, tokens=tokens, objective=Objective())
        best = chosen(question, compared(question, candidates, loss)).best
        exact_s = exact_seconds(group, tokens)
        return self._choice(best, exact_s, {}) if best.seconds < PAYS * exact_s else None

    def can_answer(self, asked: StrategyQuestion) -> bool:
        """Whether the group is small enough, and has work for all."""
        instances = sum(asked.servers)
        return instances <= min(MOST_INSTANCES, asked.tokens)

    def _asked(self, asked: StrategyQuestion) -> tuple[SimulatedGroup, int, Loss]:
        group = self.group_of(asked.servers, asked.tp)
        loss = self.accuracy.of_group(
            group.locations, layers=group.shape.layers, tokens=asked.tokens
        )
        return group, asked.tokens, lambda configurations: _told_apart(loss(configurations))

    def _choice(self, found: Found, exact_s: float, given: Mapping[str, Any]) -> StrategyChoice:
        settings = found.settings
        name = _engine_name(settings, bool(given))
        told = None if name == EXACT else settings
        return StrategyChoice(
            strategy=option_name(name, told),
            permille=max(1, round(1000 * found.seconds / exact_s)),
            loss=found.loss,
            reason=(
                f"'{name}', predicted to take {found.seconds / exact_s:.0%} of the time of exact "
                f"attention that is not cut, and to lose {found.loss:.1%} of accuracy"
            ),
        )


def predicted_loss(accuracy: AccuracyModel, asked: StrategyQuestion, layers: int) -> float:
    """Of a class whose drop ratios the client has fixed.

    Args:
        layers: of the model.
    """
    assert asked.csa is not None, "nothing is dropped"
    loss = accuracy.of_group(asked.places, layers=layers, tokens=asked.tokens)
    (predicted,) = _told_apart(loss([asked.csa]))
    return predicted


def _told_apart(losses: Sequence[float]) -> list[float]:
    return [it if it >= RESOLUTION else 0.0 for it in losses]


def _engine_name(settings: CsaSettings, asked_for: bool) -> str:
    """By the engine's names; what the client has asked for by parts runs by parts."""
    if settings.strategy in ("tp", "tp_flat"):
        return ENGINE_NAMES[settings.strategy]
    if asked_for or not settings.lossless:
        return SPARSE
    return EXACT if settings == WHOLE else LEVELS
