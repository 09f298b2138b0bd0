"""Choice of a strategy for a class of requests on a group: the one that moves least (CSPS §3.2.2).

`exact_options` and `sparse_options` count what this engine sends with each strategy, and `least`
chooses. Exact attention loses nothing with any strategy. What a client fixes of sparse attention is
respected; an architecture that is left open is the one that moves least.

App. A has one SP-NTP; with tensor parallelism the engine has two. Either the heads are split over
an instance's ranks, as its weights are, or weights are gathered, as in the paper. The MLP's weights
stay sharded, so all ranks of an instance need its rows. With split heads they have them, but must
sum the output projection; with gathered weights they must gather them. App. A leaves that out. In
SP-TP it is a part of the gather that is counted anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.model.traffic import (
    Traffic,
    csa_traffic,
    gathered_weights_traffic,
    levels_traffic,
    sp_tp_traffic,
    ulysses_traffic,
)
from csps.configurator.plan.predicted_options import PredictedOptions, predicted_loss
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.protocols.attention.csa import CsaPlan, CsaSettings
from csps.protocols.attention.plan import (
    ENGINE_NAMES,
    SPARSE,
    StrategyChoice,
    StrategyChoices,
    StrategyQuestion,
    StrategyQuestions,
)
from csps.protocols.core.topology import GroupShape, Topology

Strategy = Literal["ulysses", "gathered_weights", "levels", "csa", "sp_tp"]
"""Engine's name of a strategy (`actors/attention/choice.py`)."""

LEVELS_LINK_RATIO = 8.0
"""Ratio of link speeds from which exact attention with levels is compared.

It halves what two servers send each other, with more and shorter messages and calls of attention.
Over equal links those took 15 % of the time, at a ratio of 13 nothing
(benchmarks/results/two-servers-2026-11-21.md, `sp_ntp/exact`, pipelined against not).
"""

ROUNDING = 1e-9
"""Relative difference below which costs are equal."""


def exact_options(
    shape: AttentionShape, group: GroupShape, tokens: int, *, link_ratio: float = 1.0
) -> dict[Strategy, Traffic]:
    """Count what exact attention of a prompt moves in a layer with each strategy.

    Args:
        tokens: number of tokens, at least one for each instance.
    """
    options: dict[Strategy, Traffic] = {"ulysses": ulysses_traffic(shape, group, tokens)}
    if group.tp > 1:  # otherwise there are no weights to gather
        options["gathered_weights"] = gathered_weights_traffic(shape, group, tokens)
    if len(group.servers) > 1 and link_ratio >= LEVELS_LINK_RATIO:
        options["levels"] = levels_traffic(shape, group, tokens)
    options["sp_tp"] = sp_tp_traffic(shape, group, tokens)
    return options


def sparse_options(
    shape: AttentionShape, plan: CsaPlan, *, tp: int, spts: Sequence[int]
) -> dict[Strategy, Traffic]:
    """Count what a plan of sparse attention moves, in an average layer of those that exchange.

    Only SP-NTP sends less if tokens are dropped. It has no variant that gathers weights.

    Args:
        spts: tokens of each member.
    """
    return {
        "csa": csa_traffic(shape, plan, tp=tp, spts=spts),
        "sp_tp": sp_tp_traffic(shape, GroupShape.of(plan.topology.locations, tp), sum(spts)),
    }


def least(options: Mapping[Strategy, Traffic], *, link_ratio: float = 1.0) -> Strategy:
    """Return the strategy that moves least; the first one if several do.

    Args:
        link_ratio: time of an element between servers over that inside one; 1 counts as App. A
            does.

    Raises:
        ValueError: the ratio is below 1.
    """
    if link_ratio < 1:
        raise ValueError(f"link ratio {link_ratio}: allowed are 1 and more")
    costs = {name: traffic.cost(link_ratio) for name, traffic in options.items()}
    enough = min(costs.values()) * (1 + ROUNDING)
    return next(name for name, cost in costs.items() if cost <= enough)


MANY = "no group of so many instances, or of so few tokens, was simulated"
NOTHING = "nothing that was compared has what the client has fixed"


class StrategyRules:
    """Rules by which the configurator answers questions about strategies.

    Args:
        shape: the model's attention, which determines what each strategy moves.
        link_ratio: time of an element between servers over that inside one.
        accuracy: losses of sparse attention; None if they were never measured.
        predicted: options for trading accuracy, or a reason why there are none, for people. None
            while they are being prepared.
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
        """True while predicted options are being prepared."""
        return self._predicted is None

    def answer(self, questions: StrategyQuestions) -> StrategyChoices:
        """Return the choices of buckets of the cost table; empty ones while options are being
        prepared."""
        return StrategyChoices(chosen=tuple(map(self._answer, questions.asked)))

    def _answer(self, asked: StrategyQuestion) -> tuple[StrategyChoice, ...]:
        usual = self._usual(asked)
        if asked.csa is not None and not asked.bounded:
            return (replace(usual, loss=self._loss(asked)),)
        if len(asked.places) == 1:
            return (usual,)  # one instance always attends exactly
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
        """Return the loss of drop ratios that the client has fixed; of coverages none is known."""
        if asked.csa is None or asked.csa.lossless or len(asked.places) == 1:
            return 0.0
        if self._accuracy is None or asked.csa.coverages is not None:
            return None
        return predicted_loss(self._accuracy, asked, self._shape.layers)

    def _usual(self, asked: StrategyQuestion) -> StrategyChoice:
        """Return the choice that moves least."""
        places = asked.places
        # A group may have fewer tokens than instances only if it is empty there.
        tokens = max(asked.tokens, len(places))
        return self.choose(asked.csa, group=Topology.of(places), tp=asked.tp, tokens=tokens)

    def choose(
        self, csa: CsaSettings | None, *, group: Topology, tp: int, tokens: int
    ) -> StrategyChoice:
        """Return the strategy of a prompt of so many tokens.

        Args:
            csa: sparse attention that was asked for; None is exact.
            group: locations of the instances, in ascending order.
            tp: ranks of each instance.
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
        if csa.coverages is not None and not csa.lossless:
            reason = "SP-NTP, where a coverage saves bytes; how many is known when it is computed"
            return StrategyChoice(strategy=SPARSE, reason=reason)
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
        """Return the choice that moves least, with the amounts of all options as the reason."""
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
    """Return exact attention, with the reason why no option trades accuracy."""
    return replace(usual, reason=f"exact, because {why}; {usual.reason}")


def even_spts(tokens: int, members: int) -> list[int]:
    """Return the tokens of each member, longer ones first, as policies level them."""
    return [tokens // members + (member < tokens % members) for member in range(members)]
