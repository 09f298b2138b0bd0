"""Search for the best configuration for an objective: enumeration as in CSPS App. B, and
exhaustion.

Both have one interface. Enumeration stops where bounds allow, and finds no worse a configuration.
Exhaustive search compares everything, and is the oracle for other answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from typing import NamedTuple

from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, prefill_seconds, ring_seconds
from csps.configurator.search.space import Loss, Space
from csps.protocols.attention.csa import Architecture, CsaSettings, Ratios
from csps.protocols.attention.plan import RINGS, Objective, Ring

AT_ONCE = 2_048
"""Number of configurations that are simulated together."""
SAME = 1e-9
"""Difference of losses or times below which they are equal."""


class Found(NamedTuple):
    """A configuration with its predicted time and loss."""

    settings: CsaSettings
    seconds: float
    """TTFT without queueing."""
    loss: float
    ring: Ring | None = None
    """Ring that computes the prompt instead; it has no settings."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search."""

    best: Found
    met: bool
    """True if the bound is met; otherwise `best` is the closest configuration."""
    runners_up: tuple[Found, ...]
    compared: int
    """Number of configurations whose time was predicted."""


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """A prompt on a group, and the objective."""

    group: SimulatedGroup
    tokens: int
    objective: Objective

    @property
    def most_loss(self) -> float:
        """Bound on the loss of accuracy."""
        return self.objective.most_loss

    @property
    def most_seconds(self) -> float:
        """Bound on TTFT."""
        bound = self.objective.max_ttft_ms
        return float("inf") if bound is None else bound / 1000

    def order(self, found: Found) -> tuple[float, float]:
        """Return a sort key; better configurations come first."""
        if self.objective.kind == "ttft":
            return found.seconds, found.loss
        return found.loss, found.seconds

    def excess(self, found: Found) -> float:
        """Return how far bounds are exceeded, relatively; 0 where both are met."""
        late = max(0.0, found.seconds / self.most_seconds - 1)
        return late + max(0.0, found.loss - self.most_loss)


def enumerated(problem: SearchProblem, space: Space, loss: Loss) -> SearchResult:
    """Search by enumeration, without branches that exceed the bound on the loss."""
    # For the least loss, configurations are compared in the order of their loss, up to the first
    # that is fast enough.
    if problem.objective.kind == "accuracy":
        return _least_loss(problem, space, loss)
    within = tuned(problem, space, admissible(problem, space, loss))
    return chosen(problem, compared(problem, within, loss))


def exhaustive(problem: SearchProblem, space: Space, loss: Loss) -> SearchResult:
    """Search everything, whatever it loses (the oracle)."""
    return chosen(problem, compared(problem, _everything(problem, space), loss))


def _least_loss(problem: SearchProblem, space: Space, loss: Loss) -> SearchResult:
    candidates = list(admissible(problem, space, loss))
    losses = dict(zip(candidates, loss(candidates), strict=True))
    in_order = sorted(candidates, key=losses.__getitem__)
    found: list[Found] = []
    for begin in range(0, len(in_order), AT_ONCE):
        batch = in_order[begin : begin + AT_ONCE]
        found += compared(problem, tuned(problem, space, batch), loss)
        fast = [candidate.loss for candidate in found if not problem.excess(candidate)]
        after = in_order[begin + AT_ONCE : begin + AT_ONCE + 1]
        if fast and (not after or losses[after[0]] > min(fast) + SAME):
            break
    return chosen(problem, found)


def with_rings(problem: SearchProblem, result: SearchResult) -> SearchResult:
    """Compare a result with exact attention in either ring."""
    group = problem.group
    rings = [
        Found(WHOLE, ring_seconds(group, ring, problem.tokens), 0.0, ring)
        for ring in (RINGS if group.members > 1 else ())
    ]
    return chosen(problem, [result.best, *result.runners_up, *rings])


def admissible(problem: SearchProblem, space: Space, loss: Loss) -> Iterator[CsaSettings]:
    """Yield exact attention, and all configurations within the bound on the loss.

    M is the same in all layers. If these form several groups, only M of level 1 differs between
    configurations, because `tuned` finds the others.
    """
    locations = problem.group.locations
    yield from space.exact(locations)
    for strategy, levels, scoring in space.variants(locations):
        of_ratios = partial(space.settings, strategy, levels, scoring)
        for ratios in space.admissible(of_ratios, loss, problem.most_loss):
            for micro in _started(space, levels):
                yield of_ratios(ratios, [micro] * len(space.groups.members))


def _started(space: Space, levels: int) -> list[tuple[int, ...]]:
    """Return M from which `tuned` starts: all of it if it has nothing to do."""
    micros = space.micros(levels)
    if len(space.groups.members) == 1:
        return micros
    return [next(alike) for _, alike in groupby(micros, key=lambda micro: micro[0])]


def tuned(
    problem: SearchProblem, space: Space, candidates: Iterable[CsaSettings]
) -> Iterator[CsaSettings]:
    """Yield candidates with the M of farther levels that takes least, for each group of layers.

    The time of a prompt is the sum over its layers. So the best M of a group depends on the ratios
    of its own layers, not on those of other groups.
    """
    known: dict[_GroupKey, tuple[int, ...]] = {}
    rest = iter(candidates)
    while batch := list(islice(rest, AT_ONCE)):
        asked = {
            key: candidate
            for candidate in batch
            for key in _group_keys(space, candidate)
            if key not in known
        }
        options = [
            (key, micro, _with_micro(space, candidate, key.group, micro))
            for key, candidate in asked.items()
            for micro in space.micros(key.levels)
            if micro[0] == key.first
        ]
        found = [settings for _, _, settings in options]
        seconds = prefill_seconds(problem.group, found, problem.tokens).tolist() if found else []
        timed = zip(seconds, options, strict=True)
        for _, (key, micro, _) in sorted(timed, key=lambda option: option[0]):
            known.setdefault(key, micro)
        for candidate in batch:
            keys = _group_keys(space, candidate)
            if keys:
                by_layer = space.by_layer([known[key] for key in keys])
                candidate = replace(candidate, micro_partitions=by_layer)
            yield candidate


class _GroupKey(NamedTuple):
    """A group of layers, and on what its best M depends."""

    group: int
    strategy: Architecture | None
    levels: int
    layer: str
    window: int
    first: int
    """M of level 1."""
    ratios: Ratios
    """Ratios of its layers."""


def _group_keys(space: Space, settings: CsaSettings) -> list[_GroupKey]:
    """Return the groups whose M is to be chosen."""
    groups, micros = space.groups.members, settings.micro_partitions
    if len(groups) == 1 or settings.lossless or micros is None or settings.levels is None:
        return []
    last = len(settings.drop_ratios) - 1
    return [
        _GroupKey(
            group=index,
            strategy=settings.strategy,
            levels=settings.levels,
            layer=settings.importance_layer,
            window=settings.importance_window,
            first=micros[0][0],
            ratios=tuple(settings.drop_ratios[min(layer, last)] for layer in members),
        )
        for index, members in enumerate(groups)
    ]


def _with_micro(
    space: Space, settings: CsaSettings, group: int, micro: tuple[int, ...]
) -> CsaSettings:
    assert settings.micro_partitions is not None
    alike = settings.micro_partitions[0]
    of_groups = [micro if index == group else alike for index in range(len(space.groups.members))]
    return replace(settings, micro_partitions=space.by_layer(of_groups))


def _everything(problem: SearchProblem, space: Space) -> Iterator[CsaSettings]:
    locations = problem.group.locations
    yield from space.exact(locations)
    for strategy, levels, scoring in space.variants(locations):
        for ratios in space.ratios():
            for micros in space.group_micros(levels):
                yield space.settings(strategy, levels, scoring, ratios, micros)


def compared(problem: SearchProblem, candidates: Iterable[CsaSettings], loss: Loss) -> list[Found]:
    """Return candidates with their predicted times and losses."""
    found: list[Found] = []
    rest = iter(candidates)
    while batch := list(islice(rest, AT_ONCE)):
        seconds = prefill_seconds(problem.group, batch, problem.tokens).tolist()
        found += map(Found, batch, seconds, loss(batch))
    return found


def chosen(problem: SearchProblem, found: Sequence[Found]) -> SearchResult:
    """Return the best candidate, and the others in order."""
    within = sorted(
        (candidate for candidate in found if not problem.excess(candidate)), key=problem.order
    )
    nearest = sorted(
        found, key=lambda candidate: (problem.excess(candidate), *problem.order(candidate))
    )
    ranked = list(chain(within, (candidate for candidate in nearest if problem.excess(candidate))))
    return SearchResult(
        best=ranked[0], met=bool(within), runners_up=tuple(ranked[1:]), compared=len(found)
    )
