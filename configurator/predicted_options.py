"""What requests may choose from, by regressors and the pipeline simulator.

For a bucket of the cost table there are the best configurations for each bucket of bounds, with
their times relative to exact attention that is not cut, and what they lose. A request's own bounds
are applied to these when its place is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from csps.configurator.answering import Answerer, exact_seconds
from csps.configurator.bound_buckets import LOSSES
from csps.configurator.enumeration import Loss, Space
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, prefill_seconds, ring_seconds
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.configurator.regressors.samples import Setting
from csps.configurator.search import Found
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.options import option_name
from csps.protocols.plans import (
    ENGINE_NAMES,
    EXACT,
    LEVELS,
    RINGS,
    SPARSE,
    StrategyChoice,
    StrategyQuestion,
)

RESOLUTION = 1 / 800
"""A loss of less than half a question of the 400 that a measured point has is none."""
MOST_INSTANCES = 16
"""Of groups that are simulated while serving: larger ones would take minutes."""
MOST_SP_TP = 4
"""Instances of groups whose exact SP-TP is simulated while serving: the others would take long."""
PAYS = 0.98
"""Another exact strategy is taken if it takes no more than this of the time."""
SIMULATED = (EXACT, LEVELS, *ENGINE_NAMES.values())
"""What else moves less than all of these takes no more time than exact SP-NTP that is not cut, on
whose place it is offered."""
NOT_QUICKER = "as nothing else that is exact is predicted to take at least 2 % less"


@dataclass(frozen=True, kw_only=True)
class PredictedOptions:
    """For one model on one machine.

    Args:
        group_of: the group of so many instances on each server.
    """

    answerer: Answerer
    accuracy: AccuracyModel
    group_of: Callable[[Sequence[int], int], SimulatedGroup]

    def options(self, asked: StrategyQuestion, usual: StrategyChoice) -> tuple[StrategyChoice, ...]:
        """Of a class that has bounds, the least loss first; none if the client has fixed what
        nothing can be found with.

        Args:
            usual: what moves least, which is offered for exact SP-NTP that is not cut if it was not
                simulated.
        """
        group, tokens, loss = self._asked(asked)
        given = {name: getattr(asked.csa, name) for name in asked.given}
        exact_s = exact_seconds(group, tokens)
        found = self.answerer.answers(group, tokens, loss, given)
        if not found:
            return ()
        rings = [] if given else self._rings(group, tokens, exact_s, found)
        choices = [
            _choice(it, exact_s, bool(given), _why_exact(found), self._unseen(tokens))
            for it in sorted(found, key=lambda it: (it.loss, it.seconds))
        ]
        if not given and usual.strategy not in SIMULATED:
            why = usual.reason + _why_exact(found)
            less = replace(usual, reason=why)
            choices = [less if it.strategy == EXACT else it for it in choices]
        return (*rings, *choices)

    def _unseen(self, tokens: int) -> str:
        """Behind the reason for what drops tokens, where prompts of the bucket are longer than any
        that was measured."""
        longest = self.accuracy.longest
        if bucket_ends(tokens)[1] <= longest:
            return ""
        return f", as far as prompts of {longest} tokens tell, the longest that were measured"

    def _rings(
        self, group: SimulatedGroup, tokens: int, exact_s: float, found: Sequence[Found]
    ) -> list[StrategyChoice]:
        """The better ring, if nothing else that is exact takes as little time."""
        exact = min([exact_s, *(it.seconds for it in found if it.settings.lossless)])
        seconds, ring = min((ring_seconds(group, it, tokens), it) for it in RINGS)
        if seconds >= PAYS * exact:
            return []
        return [_exact_choice(ring, ring, seconds / exact_s, _why_exact(found))]

    def exact(self, asked: StrategyQuestion, usual: StrategyChoice) -> StrategyChoice:
        """Whatever exact way is better than SP-NTP that is not cut: over levels, SP-TP, both in
        micro-partitions that fit the links, or around a ring. Behind history SP-TP is not compared.

        Args:
            usual: what moves least, which is taken if it was not compared and nothing is better.
        """
        group, tokens, history = self._group_of(asked), asked.tokens, asked.history
        candidates = exact_candidates(self.answerer.space, group, history)
        seconds = prefill_seconds(group, candidates, tokens, history).tolist()
        exact_s = seconds[candidates.index(WHOLE)]
        found = [
            (taken, _engine_name(settings, asked_for=False), settings)
            for taken, settings in zip(seconds, candidates, strict=True)
        ]
        rings = [(ring_seconds(group, it, tokens, history), it, None) for it in RINGS]
        best_s, name, settings = min([*found, *rings], key=lambda it: it[0])
        if best_s < PAYS * exact_s:
            return _exact_choice(option_name(name, settings), name, best_s / exact_s)
        if usual.strategy not in {name for _, name, _ in found}:
            return usual
        return StrategyChoice(strategy=EXACT, reason=f"'{EXACT}', {NOT_QUICKER}")

    def can_answer(self, asked: StrategyQuestion) -> bool:
        """Whether the group is small enough, and has work for all."""
        instances = sum(asked.servers)
        return instances <= min(MOST_INSTANCES, asked.tokens)

    def _asked(self, asked: StrategyQuestion) -> tuple[SimulatedGroup, int, Loss]:
        group = self._group_of(asked)
        shortest, longest = (
            self.accuracy.of_group(group.locations, layers=group.shape.layers, tokens=tokens)
            for tokens in bucket_ends(asked.tokens)
        )

        def loss(configurations: Sequence[CsaSettings]) -> list[float]:
            """Whatever of the bucket's prompts is asked for."""
            return _told_apart(list(map(max, shortest(configurations), longest(configurations))))

        return group, asked.tokens, loss

    def _group_of(self, asked: StrategyQuestion) -> SimulatedGroup:
        return self.group_of(asked.servers, asked.tp)


def exact_candidates(space: Space, group: SimulatedGroup, history: int) -> list[CsaSettings]:
    """Of exact strategies that are not rings those that are compared: of SP-TP the one that is cut
    into least, and none behind history."""
    found = space.exact(group.locations)
    by_tp = [it for it in found if it.strategy == "tp"]
    few = by_tp[:1] if not history and group.members <= MOST_SP_TP else []
    return [it for it in found if it.strategy == "ntp"] + few


def _choice(
    found: Found, exact_s: float, asked_for: bool, why_exact: str, unseen: str
) -> StrategyChoice:
    settings, share = found.settings, found.seconds / exact_s
    name = _engine_name(settings, asked_for)
    option = option_name(name, None if name == EXACT else settings)
    if settings.lossless:
        return _exact_choice(option, name, share, why_exact)
    return StrategyChoice(
        strategy=option,
        permille=_permille(share),
        loss=found.loss,
        reason=f"{_takes(name, share)}, and to lose {found.loss:.2%} of accuracy{unseen}",
    )


def _exact_choice(option: str, name: str, share: float, why: str = "") -> StrategyChoice:
    """
    Args:
        share: of the time of exact SP-NTP that is not cut.
        why: nothing is dropped, behind the rest of the reason.
    """
    return StrategyChoice(
        strategy=option, permille=_permille(share), reason=_takes(name, share) + why
    )


def _takes(name: str, share: float) -> str:
    return f"'{name}', predicted to take {share:.0%} of the time of exact attention that is not cut"


def _permille(share: float) -> int:
    return max(1, round(1000 * share))


def _why_exact(found: Sequence[Found]) -> str:
    """What keeps requests of small bounds from dropping anything; nothing, if nothing does."""
    losses = [it.loss for it in found if not it.settings.lossless]
    if not losses:
        return f"; nothing that drops tokens is quicker and known to lose {LOSSES[-1]:.0%} or less"
    least = min(losses)
    return f"; of what drops tokens, the least loss that is offered is {least:.2%}" if least else ""


def predicted_loss(accuracy: AccuracyModel, asked: StrategyQuestion, layers: int) -> float:
    """Of a class whose drop ratios the client has fixed.

    Args:
        layers: of the model.
    """
    assert asked.csa is not None, "nothing is dropped"
    setting = Setting(tokens=asked.tokens, locations=asked.places, layers=layers, csa=asked.csa)
    (predicted,) = _told_apart(accuracy.loss([setting]).tolist())
    return predicted


def bucket_ends(tokens: int) -> tuple[int, int]:
    """The shortest and the longest prompts of the bucket that one of so many tokens is in."""
    exponent = tokens.bit_length() - 1
    return 1 << exponent, (2 << exponent) - 1


def _told_apart(losses: Sequence[float]) -> list[float]:
    return [it if it >= RESOLUTION else 0.0 for it in losses]


def _engine_name(settings: CsaSettings, asked_for: bool) -> str:
    """By the engine's names; what the client has asked for by parts runs by parts."""
    if settings.strategy in ("tp", "tp_flat"):
        return ENGINE_NAMES[settings.strategy]
    if asked_for or not settings.lossless:
        return SPARSE
    return EXACT if settings == WHOLE else LEVELS
