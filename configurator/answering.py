"""From an objective to a configuration without a search: regressors, repair, check.

The regressors of `direct` begin; what they say becomes a configuration that the space and the group
allow; its ratios go down until F_Ad keeps the bound, or are tried all the way where the bound is on
TTFT; and everything is checked with the pipeline simulator, beside its neighbours and exact
attention. So a bad prediction costs quality, never validity: what is answered keeps the bound as
far as F_Ad and simulator know, or is the nearest and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from csps.configurator.bound_buckets import objectives
from csps.configurator.enumeration import Judging, Loss, Ratios, Space
from csps.configurator.layer_groups import LARGEST_RATIO, LayerGroups
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, prefill_seconds
from csps.configurator.regressors.direct import DirectModel, Predicted
from csps.configurator.search import Answer, Found, Question, chosen, compared
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.errors import ConfigError
from csps.protocols.plans import ObjectiveKind

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
        judging=(Judging("same", 64), Judging("previous", 64)),
    )


@dataclass(frozen=True, kw_only=True)
class Answerer:
    """Answers questions of one space."""

    space: Space
    models: Mapping[ObjectiveKind, DirectModel]

    def answer(self, question: Question, loss: Loss) -> Answer:
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
            Question(group=group, tokens=tokens, objective=objective)
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
        return list(dict.fromkeys([*exact[:1], *(it.best for it in answers if it.met)]))

    def _near_said(self, question: Question, exact_s: float, loss: Loss) -> Iterator[CsaSettings]:
        said = self.models[question.objective.kind].predict(question, exact_s)
        yield from self._exact(question, said)
        yield from self._repaired(question, said, loss)

    def _exact(self, question: Question, said: Predicted) -> Iterator[CsaSettings]:
        """Exact attention with micro-partitions near those that were said."""
        yield WHOLE
        for levels in self.space.level_counts(question.group.locations):
            for micro in self._near(said.micro, levels):
                yield CsaSettings(levels=levels, micro_partitions=(micro,), strategy="ntp")
        if "tp" in self.space.strategies:
            for micro in self._near(said.micro, 1):
                yield CsaSettings(levels=1, micro_partitions=(micro,), strategy="tp")

    def _repaired(self, question: Question, said: Predicted, loss: Loss) -> Iterator[CsaSettings]:
        for strategy, levels, judging in self.space.variants(question.group.locations):
            if (strategy == "tp") != (said.tensor_parallel > 0.5):
                continue
            tried = [
                self.space.settings(strategy, levels, judging, ratios) for ratios in self._ray(said)
            ]
            within = [
                it
                for it, lost in zip(tried, loss(tried), strict=True)
                if lost <= question.most_loss and not it.lossless
            ]
            if question.objective.kind == "ttft":
                within = within[:1]  # what drops most
            for it in within:
                yield from self._cut(it, said, levels, judging)

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
        self, settings: CsaSettings, said: Predicted, levels: int, judging: Judging
    ) -> Iterator[CsaSettings]:
        for micro in self._near(said.micro, levels):
            yield CsaSettings(
                levels=levels,
                drop_ratios=settings.drop_ratios,
                micro_partitions=(micro,),
                strategy=settings.strategy,
                importance_layer=settings.importance_layer,
                importance_window=judging.window,
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
