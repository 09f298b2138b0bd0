"""Options that requests with bounds may choose from, found by regressors and the pipeline
simulator.

The direct regressors start. Their predictions are adjusted to configurations that the space and
the group allow. Ratios are lowered until F_Ad meets the bound on the loss, or all tried where the
bound is on TTFT. The simulator compares these with their neighbors and exact attention. So a wrong
prediction costs quality, never validity: an answer meets the bound as far as F_Ad and the simulator
know, or is the closest and says so.

For a bucket of the cost table, `PredictedOptions` has the fastest configuration within each bound
on the loss, and steps in time between exact attention and the fastest of these, with their relative
times and losses. A request's own bounds select among them when the request is placed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from csps.configurator.costs.cost_table import dropped_share
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import (
    WHOLE,
    can_simulate,
    prefill_seconds,
    ring_seconds,
)
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.configurator.regressors.direct import DirectModel, Predicted
from csps.configurator.regressors.samples import Setting
from csps.configurator.regressors.support import UNKNOWN
from csps.configurator.search.search import (
    Found,
    SearchProblem,
    SearchResult,
    chosen,
    compared,
    tuned,
)
from csps.configurator.search.space import (
    LARGEST_RATIO,
    LOSSES,
    ImportanceScoring,
    LayerGroups,
    Loss,
    Space,
    objectives,
)
from csps.protocols.attention.csa import CsaSettings, Ratios
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
"""Steps of ratios from nothing to the prediction, and from there to the largest allowed."""
TIME_STEPS = 8
"""Steps in time from exact attention to the fastest option of a bucket."""
ROUNDING = 1e-9
"""Relative difference below which times are equal."""


def answered_space(groups: LayerGroups) -> Space:
    """Return the space in which answers are searched, and from which regressors learn.

    Args:
        groups: layer groups of the model.
    """
    # Coarser than what `csps plan` compares, because neighbors of predictions are tried.
    return Space(
        groups=groups,
        step=0.1,
        rungs=(0.02, *(number / 10 for number in range(1, 10)), LARGEST_RATIO),
        micro_partitions=((4, 8, 16), (1, 4), (1, 2)),
        scoring=(ImportanceScoring("same", 64), ImportanceScoring("previous", 64)),
    )


@dataclass(frozen=True, kw_only=True)
class DirectAnswerer:
    """Solver for search problems of one space."""

    space: Space
    models: Mapping[ObjectiveKind, DirectModel]

    def answer(self, problem: SearchProblem, loss: Loss) -> SearchResult:
        """Return the best configuration near the regressors' prediction."""
        exact_s = exact_seconds(problem.group, problem.tokens)
        candidates = dict.fromkeys(self._near_prediction(problem, exact_s, loss))
        result = chosen(problem, compared(problem, list(candidates), loss))
        return replace(result, best=self._tuned(problem, [result.best], loss)[0])

    def answers(
        self, group: SimulatedGroup, tokens: int, loss: Loss, given: Mapping[str, Any] | None = None
    ) -> list[Found]:
        """Return the fastest configuration within each bound on the loss, and steps in time from
        exact attention to the fastest one that loses no more than the widest bound.

        Each appears once. The fastest one that is exact for certain comes first.

        Args:
            given: fields that must not change.
        """
        exact_s = exact_seconds(group, tokens)
        asked = [
            SearchProblem(group=group, tokens=tokens, objective=objective)
            for kind in self.models
            for objective in objectives(kind, exact_s)
        ]
        candidates = dict.fromkeys(
            candidate
            for problem in asked
            for candidate in self._near_prediction(problem, exact_s, loss)
        )
        allowed = list(dict.fromkeys(_with_given(candidates, given or {})))
        found = compared(asked[0], allowed, loss) if allowed else []
        # All candidates are compared for each bound. Otherwise a wider bound might be answered by a
        # slower configuration.
        answers = [
            chosen(problem, found)
            for problem in (asked if found else ())
            if problem.objective.kind == "ttft"
        ]
        exact = sorted(
            (option for option in found if option.settings.lossless),
            key=lambda option: option.seconds,
        )
        within = list(dict.fromkeys(answer.best for answer in answers if answer.met))
        best = list(dict.fromkeys([*exact[:1], *within, *time_steps(found)]))
        return best if given else list(dict.fromkeys(self._tuned(asked[0], best, loss)))

    def _tuned(self, problem: SearchProblem, found: Sequence[Found], loss: Loss) -> list[Found]:
        """Return answers with M of their own for each layer group; nothing else of them changes."""
        settings = [option.settings for option in found]
        by_group = list(tuned(problem, self.space, settings))
        changed = [each for each, before in zip(by_group, settings, strict=True) if each != before]
        better = dict(zip(changed, compared(problem, changed, loss), strict=True))
        return [better.get(each, option) for each, option in zip(by_group, found, strict=True)]

    def _near_prediction(
        self, problem: SearchProblem, exact_s: float, loss: Loss
    ) -> Iterator[CsaSettings]:
        prediction = self.models[problem.objective.kind].predict(problem, exact_s)
        yield from self._exact(problem, prediction)
        yield from self._within_bounds(problem, prediction, loss)

    def _exact(self, problem: SearchProblem, prediction: Predicted) -> Iterator[CsaSettings]:
        """Yield exact attention with micro-partitions near those predicted."""
        yield WHOLE
        for levels in self.space.level_counts(problem.group.locations):
            for micro in self._near(prediction.micro, levels):
                yield CsaSettings(levels=levels, micro_partitions=(micro,), strategy="ntp")
        if "tp" in self.space.strategies:
            for micro in self._near(prediction.micro, 1):
                yield CsaSettings(levels=1, micro_partitions=(micro,), strategy="tp")

    def _within_bounds(
        self, problem: SearchProblem, prediction: Predicted, loss: Loss
    ) -> Iterator[CsaSettings]:
        for strategy, levels, scoring in self.space.variants(problem.group.locations):
            if (strategy == "tp") != (prediction.tensor_parallel > 0.5):
                continue
            # Each in descending order of what it drops.
            rays = [list(self._ray(prediction)), *(each[::-1] for each in self.space.ladders())]
            for ray in rays:
                tried = [self.space.settings(strategy, levels, scoring, ratios) for ratios in ray]
                within = [
                    settings
                    for settings, lost in zip(tried, loss(tried), strict=True)
                    if lost <= problem.most_loss and not settings.lossless
                ]
                if problem.objective.kind == "ttft":
                    within = within[:1]
                for settings in within:
                    yield from self._cut(settings, prediction, levels, scoring)

    def _ray(self, prediction: Predicted) -> Iterator[Ratios]:
        """Yield ratios from most to least: from the largest over the predicted ones to nothing."""
        groups = self.space.groups
        most = groups.centers(LARGEST_RATIO)
        predicted = [
            min(max(ratio, 0.0), top) for ratio, top in zip(prediction.ratios, most, strict=True)
        ]
        for step in range(2 * STEPS, 0, -1):
            beyond = max(0, step - STEPS) / STEPS
            yield groups.by_layer(
                [
                    round(ratio * min(1.0, step / STEPS) + (top - ratio) * beyond, 4)
                    for ratio, top in zip(predicted, most, strict=True)
                ]
            )

    def _cut(
        self, settings: CsaSettings, prediction: Predicted, levels: int, scoring: ImportanceScoring
    ) -> Iterator[CsaSettings]:
        """Yield a configuration that waits for every exchange, and with M near those predicted."""
        waiting = CsaSettings(
            levels=levels,
            drop_ratios=settings.drop_ratios,
            strategy=settings.strategy,
            importance_layer=settings.importance_layer,
            importance_window=scoring.window,
            pipelined=False,
        )
        yield waiting
        for micro in self._near(prediction.micro, levels):
            yield replace(waiting, micro_partitions=(micro,), pipelined=True)

    def _near(self, prediction: Sequence[float], levels: int) -> Iterator[tuple[int, ...]]:
        """Yield the nearest numbers of the space, and each level's neighbors of them."""
        last = len(self.space.micro_partitions) - 1
        allowed = [self.space.micro_partitions[min(level, last)] for level in range(levels)]
        places = [
            _nearest(of_level, wish) for wish, of_level in zip(prediction, allowed, strict=False)
        ]
        yield tuple(of_level[n] for n, of_level in zip(places, allowed, strict=True))
        for level, of_level in enumerate(allowed):
            for place in (places[level] - 1, places[level] + 1):
                if 0 <= place < len(of_level):
                    moved = [*places[:level], place, *places[level + 1 :]]
                    yield tuple(a[n] for n, a in zip(moved, allowed, strict=True))


def time_steps(found: Sequence[Found]) -> list[Found]:
    """Return the configurations that lose least within evenly spaced times.

    The times lie between the fastest exact configuration and the fastest one of all that loses no
    more than the widest bound. Among equal losses the one that drops least wins, since dropping
    less loses no more. So a bound on TTFT buys as little dropping as it needs.
    """
    offered = [option for option in found if option.loss <= LOSSES[-1]]
    exact = [option.seconds for option in offered if option.settings.lossless]
    if not offered:
        return []
    slowest_s = min(exact) if exact else max(option.seconds for option in offered)
    fastest_s = min(option.seconds for option in offered)
    steps = []
    for step in range(TIME_STEPS + 1):
        most_s = slowest_s + (fastest_s - slowest_s) * step / TIME_STEPS
        in_time = [option for option in offered if option.seconds <= most_s * (1 + ROUNDING)]
        if in_time:
            steps.append(min(in_time, key=_by_loss))
    return steps


def _by_loss(option: Found) -> tuple[float, float, float]:
    return option.loss, dropped_share(option.settings), option.seconds


def exact_seconds(group: SimulatedGroup, tokens: int) -> float:
    """Return the time of a prompt with exact SP-NTP without micro-partitions."""
    return float(prefill_seconds(group, [WHOLE], tokens)[0])


def _with_given(
    candidates: Iterable[CsaSettings], given: Mapping[str, Any]
) -> Iterator[CsaSettings]:
    """Yield candidates with the given fields replaced, where the result can be simulated."""
    for candidate in candidates:
        try:
            changed = replace(candidate, **given)
        except ConfigError:
            continue
        # Without a pipeline M means nothing, so that a client's would be ignored.
        cut = changed.pipelined or "pipelined" in given or "micro_partitions" not in given
        if can_simulate(changed) and cut:
            yield changed


def _nearest(numbers: Sequence[int], wish: float) -> int:
    """Return the index of the nearest number."""
    return min(range(len(numbers)), key=lambda place: abs(numbers[place] - wish))


RESOLUTION = 1 / 800
"""Loss below which nothing is lost: half of one of the 400 questions of a measured point."""
MOST_INSTANCES = 16
"""Instances of the largest group that is simulated while serving; larger ones would take
minutes."""
MOST_SP_TP = 4
"""Instances of the largest group whose exact SP-TP is simulated while serving."""
PAYS = 0.98
"""Fraction of the default's time at or below which another exact strategy is chosen."""
SIMULATED = (EXACT, LEVELS, *ENGINE_NAMES.values())
"""Simulated strategies. A strategy that moves less than all of these takes no more time than
exact SP-NTP without micro-partitions, and is offered in its place."""
NOT_QUICKER = "as nothing else that is exact is predicted to take at least 2 % less"


@dataclass(frozen=True, kw_only=True)
class PredictedOptions:
    """Options for one model on one machine.

    Args:
        group_of: function that returns the group of instances at Rack-Server-GPU ids.
        beyond_measured: False keeps prompts exact that are longer than any measured.
    """

    answerer: DirectAnswerer
    accuracy: AccuracyModel
    group_of: Callable[[Sequence[str]], SimulatedGroup]
    beyond_measured: bool = True

    def options(self, asked: StrategyQuestion, usual: StrategyChoice) -> tuple[StrategyChoice, ...]:
        """Return the options of a class that has bounds, the least loss first.

        They are empty if the client has fixed fields for which there is no configuration.

        Args:
            usual: choice that moves least, offered instead of exact SP-NTP without micro-partitions
                if it was not simulated.
        """
        group, tokens, loss = self._asked(asked)
        given = {name: getattr(asked.csa, name) for name in asked.given}
        exact_s = exact_seconds(group, tokens)
        found = self.answerer.answers(group, tokens, loss, given)
        if not found:
            return ()
        why_exact = self._refused(tokens) or _why_exact(found)
        rings = [] if given else self._rings(group, tokens, exact_s, found)
        choices = [
            _choice(option, exact_s, bool(given), why_exact, self._unseen(tokens))
            for option in sorted(found, key=lambda option: (option.loss, option.seconds))
        ]
        if not given and usual.strategy not in SIMULATED:
            why = usual.reason + why_exact
            less = replace(usual, reason=why)
            choices = [less if choice.strategy == EXACT else choice for choice in choices]
        return (*rings, *choices)

    def _unseen(self, tokens: int) -> str:
        """Return a note for options that drop tokens, if the bucket's prompts exceed the
        measured lengths."""
        longest = self.accuracy.longest
        if bucket_ends(tokens)[1] <= longest:
            return ""
        return f", as far as prompts of {longest} tokens tell, the longest that were measured"

    def _refused(self, tokens: int) -> str:
        """Return why the bucket's prompts stay exact, if the operator has it so."""
        if self.beyond_measured or not self._unseen(tokens):
            return ""
        longest = self.accuracy.longest
        return (
            f"; losses were measured up to {longest} tokens (configurator.beyond_measured: false)"
        )

    def _rings(
        self, group: SimulatedGroup, tokens: int, exact_s: float, found: Sequence[Found]
    ) -> list[StrategyChoice]:
        """Return the better ring, unless another exact strategy takes as little time."""
        exact = min([exact_s, *(option.seconds for option in found if option.settings.lossless)])
        seconds, ring = min((ring_seconds(group, ring, tokens), ring) for ring in RINGS)
        if seconds >= PAYS * exact:
            return []
        return [_exact_choice(ring, ring, seconds / exact_s, _why_exact(found))]

    def exact(self, asked: StrategyQuestion, usual: StrategyChoice) -> StrategyChoice:
        """Return the best exact choice: SP-NTP, levels or SP-TP in micro-partitions, or a ring.

        With history, SP-TP is not compared.

        Args:
            usual: choice that moves least, returned if it was not compared and nothing is better.
        """
        group, tokens, history = self._group_of(asked), asked.tokens, asked.history
        candidates = exact_candidates(self.answerer.space, group, history)
        seconds = prefill_seconds(group, candidates, tokens, history).tolist()
        exact_s = seconds[candidates.index(WHOLE)]
        found = [
            (taken, _engine_name(settings, asked_for=False), settings)
            for taken, settings in zip(seconds, candidates, strict=True)
        ]
        rings = [(ring_seconds(group, ring, tokens, history), ring, None) for ring in RINGS]
        best_s, name, settings = min([*found, *rings], key=lambda option: option[0])
        if best_s < PAYS * exact_s:
            return _exact_choice(option_name(name, settings), name, best_s / exact_s)
        if usual.strategy not in {name for _, name, _ in found}:
            return usual
        return StrategyChoice(strategy=EXACT, reason=f"'{EXACT}', {NOT_QUICKER}")

    def can_answer(self, asked: StrategyQuestion) -> bool:
        """Return True if the group is small enough, and each instance has a token."""
        instances = sum(asked.servers)
        return instances <= min(MOST_INSTANCES, asked.tokens)

    def _asked(self, asked: StrategyQuestion) -> tuple[SimulatedGroup, int, Loss]:
        group = self._group_of(asked)
        shortest, longest = (
            self.accuracy.of_group(group.locations, layers=group.shape.layers, tokens=tokens)
            for tokens in bucket_ends(asked.tokens)
        )

        refused = bool(self._refused(asked.tokens))

        def loss(configurations: Sequence[CsaSettings]) -> list[float]:
            """Return the larger losses of the bucket's shortest and longest prompts."""
            if refused:
                return [0.0 if settings.lossless else UNKNOWN for settings in configurations]
            return _resolved(list(map(max, shortest(configurations), longest(configurations))))

        return group, asked.tokens, loss

    def _group_of(self, asked: StrategyQuestion) -> SimulatedGroup:
        return self.group_of(asked.places)


def exact_candidates(space: Space, group: SimulatedGroup, history: int) -> list[CsaSettings]:
    """Return the exact strategies that are compared, rings apart.

    Of SP-TP only the one with fewest micro-partitions is compared, and none with history.
    """
    found = space.exact(group.locations)
    by_tp = [settings for settings in found if settings.strategy == "tp"]
    few = by_tp[:1] if not history and group.members <= MOST_SP_TP else []
    return [settings for settings in found if settings.strategy == "ntp"] + few


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
    """Return the choice of an exact strategy.

    Args:
        share: its time as a fraction of the time of exact SP-NTP without micro-partitions.
        why: reason why nothing is dropped, appended to the choice's reason.
    """
    return StrategyChoice(
        strategy=option, permille=_permille(share), reason=_takes(name, share) + why
    )


def _takes(name: str, share: float) -> str:
    return f"'{name}', predicted to take {share:.0%} of the time of exact attention that is not cut"


def _permille(share: float) -> int:
    return max(1, round(1000 * share))


def _why_exact(found: Sequence[Found]) -> str:
    """Return a reason why requests with small bounds drop nothing; empty if some option does."""
    losses = [option.loss for option in found if not option.settings.lossless]
    if not losses:
        return f"; nothing that drops tokens is quicker and known to lose {LOSSES[-1]:.0%} or less"
    least = min(losses)
    return f"; of what drops tokens, the least loss that is offered is {least:.2%}" if least else ""


def predicted_loss(accuracy: AccuracyModel, asked: StrategyQuestion, layers: int) -> float:
    """Return the loss of a class whose drop ratios the client has fixed.

    Args:
        layers: number of layers of the model.
    """
    assert asked.csa is not None, "a class without sparse attention has no loss"
    setting = Setting(tokens=asked.tokens, locations=asked.places, layers=layers, csa=asked.csa)
    (predicted,) = _resolved(accuracy.loss([setting]).tolist())
    return predicted


def bucket_ends(tokens: int) -> tuple[int, int]:
    """Return the lengths of the shortest and the longest prompt in the bucket of `tokens`."""
    exponent = tokens.bit_length() - 1
    return 1 << exponent, (2 << exponent) - 1


def _resolved(losses: Sequence[float]) -> list[float]:
    return [loss if loss >= RESOLUTION else 0.0 for loss in losses]


def _engine_name(settings: CsaSettings, asked_for: bool) -> str:
    """Return the engine's name of a strategy; a client that asked for sparse attention gets its
    engine."""
    if settings.strategy in ("tp", "tp_flat"):
        return ENGINE_NAMES[settings.strategy]
    if asked_for or not settings.lossless:
        return SPARSE
    return EXACT if settings == WHOLE else LEVELS
