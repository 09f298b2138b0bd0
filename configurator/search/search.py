"""The best configuration for an objective: enumerated as in CSPS App. B, and exhaustively.

Both have one interface. The first stops where bounds allow it and finds no less; the second looks
at everything, and is the Oracle that answers are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, prefill_seconds, ring_seconds
from csps.configurator.search.space import Loss, Space
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import RINGS, Objective, Ring

AT_ONCE = 2_048
"""Configurations that are simulated together."""
SAME = 1e-9
"""Losses and times that differ by less are equal."""


class Found(NamedTuple):
    """A configuration with what is predicted of it."""

    settings: CsaSettings
    seconds: float
    """TTFT, without queueing."""
    loss: float
    ring: Ring | None = None
    """Computed around it instead, which has no settings."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What was found."""

    best: Found
    met: bool
    """Whether the bound is kept; if not, `best` is what comes nearest to it."""
    runners_up: tuple[Found, ...]
    compared: int
    """Configurations whose time was predicted."""


@dataclass(frozen=True, kw_only=True)
class SearchProblem:
    """A prompt on a group, and what is to be made the best of."""

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
        """Better ones first."""
        if self.objective.kind == "ttft":
            return found.seconds, found.loss
        return found.loss, found.seconds

    def excess(self, found: Found) -> float:
        """How far bounds are broken, relatively; 0 where both are kept."""
        late = max(0.0, found.seconds / self.most_seconds - 1)
        return late + max(0.0, found.loss - self.most_loss)


def enumerated(question: SearchProblem, space: Space, loss: Loss) -> SearchResult:
    """Branches that break the bound on the loss are not followed. With the objective of least loss
    configurations are compared in the order of their loss, up to the first that is fast enough."""
    if question.objective.kind == "accuracy":
        return _least_loss(question, space, loss)
    return chosen(question, compared(question, admissible(question, space, loss), loss))


def exhaustive(question: SearchProblem, space: Space, loss: Loss) -> SearchResult:
    """The Oracle: everything, whatever it loses."""
    return chosen(question, compared(question, _everything(question, space), loss))


def _least_loss(question: SearchProblem, space: Space, loss: Loss) -> SearchResult:
    candidates = list(admissible(question, space, loss))
    losses = dict(zip(candidates, loss(candidates), strict=True))
    in_order = sorted(candidates, key=losses.__getitem__)
    found: list[Found] = []
    for begin in range(0, len(in_order), AT_ONCE):
        found += compared(question, in_order[begin : begin + AT_ONCE], loss)
        fast = [it.loss for it in found if not question.excess(it)]
        after = in_order[begin + AT_ONCE : begin + AT_ONCE + 1]
        if fast and (not after or losses[after[0]] > min(fast) + SAME):
            break
    return chosen(question, found)


def with_rings(question: SearchProblem, answer: SearchResult) -> SearchResult:
    """The same answer with exact attention around either ring compared as well."""
    group = question.group
    rings = [
        Found(WHOLE, ring_seconds(group, ring, question.tokens), 0.0, ring)
        for ring in (RINGS if group.members > 1 else ())
    ]
    return chosen(question, [answer.best, *answer.runners_up, *rings])


def admissible(question: SearchProblem, space: Space, loss: Loss) -> Iterator[CsaSettings]:
    """Exact attention, and whatever keeps the bound on the loss."""
    locations = question.group.locations
    yield from space.exact(locations)
    for strategy, levels, scoring in space.variants(locations):
        of_ratios = partial(space.settings, strategy, levels, scoring)
        for ratios in space.admissible(of_ratios, loss, question.most_loss):
            for micro in space.micros(levels):
                yield of_ratios(ratios, micro)


def _everything(question: SearchProblem, space: Space) -> Iterator[CsaSettings]:
    locations = question.group.locations
    yield from space.exact(locations)
    for strategy, levels, scoring in space.variants(locations):
        for ratios in space.ratios():
            for micro in space.micros(levels):
                yield space.settings(strategy, levels, scoring, ratios, micro)


def compared(
    question: SearchProblem, candidates: Iterator[CsaSettings] | Sequence[CsaSettings], loss: Loss
) -> list[Found]:
    """Candidates with what is predicted of them."""
    found: list[Found] = []
    rest = iter(candidates)
    while batch := list(islice(rest, AT_ONCE)):
        seconds = prefill_seconds(question.group, batch, question.tokens).tolist()
        found += map(Found, batch, seconds, loss(batch))
    return found


def chosen(question: SearchProblem, found: Sequence[Found]) -> SearchResult:
    """The best of them, and the others in order."""
    within = sorted((it for it in found if not question.excess(it)), key=question.order)
    nearest = sorted(found, key=lambda it: (question.excess(it), *question.order(it)))
    ranked = list(chain(within, (it for it in nearest if question.excess(it))))
    return SearchResult(
        best=ranked[0], met=bool(within), runners_up=tuple(ranked[1:]), compared=len(found)
    )
