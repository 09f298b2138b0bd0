"""From an objective to a configuration without a search: regressors, repair, check.

The regressors of `direct` begin; what they say becomes a configuration that the space and the group
allow; its ratios go down until F_Ad keeps the bound, or are tried all the way where the bound is on
TTFT; and everything is checked with the pipeline simulator, beside its neighbours and exact
attention. So a bad prediction costs quality, never validity: what is answered keeps the bound as
far as F_Ad and simulator know, or is the nearest and says so.

What requests may choose from, by regressors and the pipeline simulator.

For a bucket of the cost table there are the best configurations for each bucket of bounds, with
their times relative to exact attention that is not cut, and what they lose. A request's own bounds
are applied to these when its place is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, prefill_seconds, ring_seconds
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.configurator.regressors.direct import DirectModel, Predicted
from csps.configurator.regressors.samples import Setting
from csps.configurator.search.search import Found, SearchProblem, SearchResult, chosen, compared
from csps.configurator.search.space import (
    LARGEST_RATIO,
    LOSSES,
    ImportanceScoring,
    LayerGroups,
    Loss,
    Ratios,
    Space,
    objectives,
)
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import (
    ENGINE_NAMES,
    EXACT,
    LEVELS,
    RINGS,
    SPARSE,
    ObjectiveKind,
    StrategyChoice,
    StrategyQuestion,
    option_name,
)
from csps.protocols.core.errors import ConfigError

STEPS = 16
"""In which ratios go from nothing to what was said, and on to as much as is allowed."""


def answered_space(layers: int) -> Space:
    """What answers are looked for in, and learned from: coarser than what `csps plan` compares,
    since neighbours of what regressors say are tried.

    Args:
        layers: of the model.
    """
    return Space(
        groups=LayerGroups.alike(layers),
        step=0.1,
        micro_partitions=((4, 8, 16), (1, 4), (1, 2)),
        scoring=(ImportanceScoring("same", 64), ImportanceScoring("previous", 64)),
    )


@dataclass(frozen=True, kw_only=True)
class DirectAnswerer:
    """Answers questions of one space."""

    space: Space
    models: Mapping[ObjectiveKind, DirectModel]

    def answer(self, question: SearchProblem, loss: Loss) -> SearchResult:
        """The best of what is near to what the regressors say."""
        exact_s = exact_seconds(question.group, question.tokens)
        candidates = dict.fromkeys(self._near_said(question, exact_s, loss))
        return chosen(question, compared(question, list(candidates), loss))

    def answers(
        self, group: SimulatedGroup, tokens: int, loss: Loss, given: Mapping[str, Any] | None = None
    ) -> list[Found]:
        """The best for each bucket of bounds of both objectives that can be kept, each once. All
        are compared for each, so that a wider bound is never answered by what takes longer; and the
        quickest that is exact for certain.

        Args:
            given: fields that stay as they are.
        """
        exact_s = exact_seconds(group, tokens)
        asked = [
            SearchProblem(group=group, tokens=tokens, objective=objective)
            for kind in self.models
            for objective in objectives(kind, exact_s)
        ]
        candidates = dict.fromkeys(
            candidate
            for question in asked
            for candidate in self._near_said(question, exact_s, loss)
        )
        held = list(dict.fromkeys(_held(candidates, given or {})))
        found = compared(asked[0], held, loss) if held else []
        answers = [chosen(question, found) for question in asked] if found else []
        exact = sorted((it for it in found if it.settings.lossless), key=lambda it: it.seconds)
        return list(dict.fromkeys([*exact[:1], *(answer.best for answer in answers if answer.met)]))

    def _near_said(
        self, question: SearchProblem, exact_s: float, loss: Loss
    ) -> Iterator[CsaSettings]:
        said = self.models[question.objective.kind].predict(question, exact_s)
        yield from self._exact(question, said)
        yield from self._repaired(question, said, loss)

    def _exact(self, question: SearchProblem, said: Predicted) -> Iterator[CsaSettings]:
        """Exact attention with micro-partitions near those that were said."""
        yield WHOLE
        for levels in self.space.level_counts(question.group.locations):
            for micro in self._near(said.micro, levels):
                yield CsaSettings(levels=levels, micro_partitions=(micro,), strategy="ntp")
        if "tp" in self.space.strategies:
            for micro in self._near(said.micro, 1):
                yield CsaSettings(levels=1, micro_partitions=(micro,), strategy="tp")

    def _repaired(
        self, question: SearchProblem, said: Predicted, loss: Loss
    ) -> Iterator[CsaSettings]:
        for strategy, levels, scoring in self.space.variants(question.group.locations):
            if (strategy == "tp") != (said.tensor_parallel > 0.5):
                continue
            tried = [
                self.space.settings(strategy, levels, scoring, ratios) for ratios in self._ray(said)
            ]
            within = [
                it
                for it, lost in zip(tried, loss(tried), strict=True)
                if lost <= question.most_loss and not it.lossless
            ]
            if question.objective.kind == "ttft":
                within = within[:1]  # what drops most
            for it in within:
                yield from self._cut(it, said, levels, scoring)

    def _ray(self, said: Predicted) -> Iterator[Ratios]:
        """Most to least: from the largest ratios over what was said to nothing, each head in
        proportion to its run's widest."""
        centres = self.space.groups.centres(LARGEST_RATIO)
        most = [max(of_heads) for of_heads in centres]
        begun = [min(max(ratio, 0.0), top) for ratio, top in zip(said.ratios, most, strict=True)]
        for step in range(2 * STEPS, 0, -1):
            beyond = max(0, step - STEPS) / STEPS
            ratios = [
                wish * min(1.0, step / STEPS) + (top - wish) * beyond
                for wish, top in zip(begun, most, strict=True)
            ]
            yield tuple(
                tuple(round(ratio * head / max(of_heads), 4) for head in of_heads)
                for ratio, of_heads in zip(ratios, centres, strict=True)
            )

    def _cut(
        self, settings: CsaSettings, said: Predicted, levels: int, scoring: ImportanceScoring
    ) -> Iterator[CsaSettings]:
        for micro in self._near(said.micro, levels):
            yield CsaSettings(
                levels=levels,
                drop_ratios=settings.drop_ratios,
                micro_partitions=(micro,),
                strategy=settings.strategy,
                importance_layer=settings.importance_layer,
                importance_window=scoring.window,
            )

    def _near(self, said: Sequence[float], levels: int) -> Iterator[tuple[int, ...]]:
        """The nearest numbers of the space, and each level's neighbours of them."""
        last = len(self.space.micro_partitions) - 1
        allowed = [self.space.micro_partitions[min(level, last)] for level in range(levels)]
        places = [_nearest(of_level, wish) for wish, of_level in zip(said, allowed, strict=False)]
        yield tuple(of_level[n] for n, of_level in zip(places, allowed, strict=True))
        for level, of_level in enumerate(allowed):
            for place in (places[level] - 1, places[level] + 1):
                if 0 <= place < len(of_level):
                    moved = [*places[:level], place, *places[level + 1 :]]
                    yield tuple(a[n] for n, a in zip(moved, allowed, strict=True))


def exact_seconds(group: SimulatedGroup, tokens: int) -> float:
    """What a prompt takes with exact SP-NTP that is not cut."""
    return float(prefill_seconds(group, [WHOLE], tokens)[0])


def _held(candidates: Iterable[CsaSettings], given: Mapping[str, Any]) -> Iterator[CsaSettings]:
    """Candidates with the fields that are given, as far as the two can be had together."""
    for candidate in candidates:
        try:
            yield replace(candidate, **given)
        except ConfigError:
            continue


def _nearest(numbers: Sequence[int], wish: float) -> int:
    """Place of the number that is nearest."""
    return min(range(len(numbers)), key=lambda place: abs(numbers[place] - wish))


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

    answerer: DirectAnswerer
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
            choices = [less if choice.strategy == EXACT else choice for choice in choices]
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
    return [loss if loss >= RESOLUTION else 0.0 for loss in losses]


def _engine_name(settings: CsaSettings, asked_for: bool) -> str:
    """By the engine's names; what the client has asked for by parts runs by parts."""
    if settings.strategy in ("tp", "tp_flat"):
        return ENGINE_NAMES[settings.strategy]
    if asked_for or not settings.lossless:
        return SPARSE
    return EXACT if settings == WHOLE else LEVELS
