"""Which strategy a class of requests takes on a group: what moves least, and why.

Exact attention loses nothing by any strategy. What a client fixes of sparse attention is done; how
it is spread over ranks, if left open, is what moves least as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from csps.configurator.predicted_options import PredictedOptions, predicted_loss
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.configurator.shapes import AttentionShape
from csps.configurator.strategy_choice import Strategy, exact_options, least, sparse_options
from csps.configurator.traffic import Traffic
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.group_shape import GroupShape
from csps.protocols.plans import (
    ENGINE_NAMES,
    SPARSE,
    StrategyChoice,
    StrategyChoices,
    StrategyQuestion,
    StrategyQuestions,
)
from csps.protocols.topology import Topology

MANY = "no group of so many instances, or of so few tokens, was simulated"
NOTHING = "nothing that was compared has what the client has fixed"


class StrategyRules:
    """See the module.

    Args:
        shape: the model's attention, for what each strategy moves.
        link_ratio: how much longer an element takes between servers than inside one.
        accuracy: what sparse attention loses; None if that was never measured.
        predicted: what accuracy may be traded for; or why there is nothing, for people; or None
            while that is still to be found out.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        link_ratio: float = 1.0,
        accuracy: AccuracyModel | None = None,
        predicted: PredictedOptions | str | None = "nothing was compared",
    ) -> None:
        self._shape, self._link_ratio = shape, link_ratio
        self._accuracy, self._predicted = accuracy, predicted

    @property
    def waits(self) -> bool:
        """Whether something is still to be found out."""
        return self._predicted is None

    def answer(self, questions: StrategyQuestions) -> StrategyChoices:
        """What requests of buckets of the cost table may choose from; nothing yet, if that is still
        to be found out."""
        return StrategyChoices(chosen=tuple(map(self._answer, questions.asked)))

    def _answer(self, asked: StrategyQuestion) -> tuple[StrategyChoice, ...]:
        usual = self._usual(asked)
        if asked.csa is not None and not asked.bounded:
            return (replace(usual, loss=self._loss(asked)),)
        if len(asked.places) == 1:
            return (usual,)  # exact whatever is asked for
        predicted = self._predicted
        if predicted is None:
            return () if asked.bounded else (usual,)
        if isinstance(predicted, str):
            return (_without(usual, predicted) if asked.bounded else usual,)
        if not predicted.can_answer(asked):
            return (_without(usual, MANY) if asked.bounded else usual,)
        if asked.bounded:
            return predicted.options(asked, usual) or (_without(usual, NOTHING),)
        return (predicted.exact(asked, usual),)

    def _loss(self, asked: StrategyQuestion) -> float | None:
        """Of drop ratios that the client has fixed."""
        if asked.csa is None or asked.csa.lossless or len(asked.places) == 1:
            return 0.0
        if self._accuracy is None:
            return None
        return predicted_loss(self._accuracy, asked, self._shape.layers)

    def _usual(self, asked: StrategyQuestion) -> StrategyChoice:
        """What moves least."""
        places = asked.places
        # A group may have fewer tokens than instances only if it is empty there.
        tokens = max(asked.tokens, len(places))
        return self.choose(asked.csa, group=Topology.of(places), tp=asked.tp, tokens=tokens)

    def choose(
        self, csa: CsaSettings | None, *, group: Topology, tp: int, tokens: int
    ) -> StrategyChoice:
        """The strategy of a prompt of so many tokens.

        Args:
            csa: sparse attention as asked for; None is exact.
            group: where the instances stand, in ascending order.
            tp: ranks of each.
        """
        if csa is None:
            shape = GroupShape.of(group.locations, tp)
            options = exact_options(self._shape, shape, tokens, link_ratio=self._link_ratio)
            return self._least(options, len(group.locations))
        if csa.strategy is not None:
            return StrategyChoice(
                strategy=ENGINE_NAMES[csa.strategy], reason=f"strategy '{csa.strategy}' as asked"
            )
        if csa.ntp_only:
            return StrategyChoice(strategy=SPARSE, reason=f"SP-NTP, which {csa.ntp_only} needs")
        return self._sparse(csa, group, tp, tokens)

    def _sparse(self, csa: CsaSettings, group: Topology, tp: int, tokens: int) -> StrategyChoice:
        members = len(group.locations)
        spts = even_spts(tokens, members)
        plan = csa.for_group(
            [str(place) for place in group.locations],
            layers=self._shape.layers,
            longest_spt=spts[0],
        )
        return self._least(sparse_options(self._shape, plan, tp=tp, spts=spts), members)

    def _least(self, options: Mapping[Strategy, Traffic], instances: int) -> StrategyChoice:
        """What moves least, and what all of them move."""
        chosen = least(options, link_ratio=self._link_ratio)
        if not any(traffic.cost(1.0) for traffic in options.values()):
            return StrategyChoice(
                strategy=chosen, reason=f"'{chosen}', which on one instance exchanges nothing"
            )
        figures = ", ".join(
            f"'{name}' {traffic.cost(self._link_ratio) / 1e6:.3g}"
            for name, traffic in options.items()
        )
        counted = "" if self._link_ratio == 1 else f", one between servers as {self._link_ratio:g}"
        return StrategyChoice(
            strategy=chosen,
            reason=(
                f"'{chosen}', because nothing moves less, in million elements a layer on "
                f"{instances} instance{'s' * (instances > 1)}{counted}: {figures}"
            ),
        )


def _without(usual: StrategyChoice, why: str) -> StrategyChoice:
    """Exact attention, as nothing is known to trade accuracy for."""
    return replace(usual, reason=f"exact, as {why}; {usual.reason}")


def even_spts(tokens: int, members: int) -> list[int]:
    """Tokens of each member, longer ones first, as policies level them."""
    return [tokens // members + (member < tokens % members) for member in range(members)]
