"""A configurator that goes by rules: exact unless asked for sparse attention, and no predictions.

What the client fixes is done; what it leaves open is decided so that nothing is lost that it did
not give away: no token is dropped without a drop ratio. How a prompt's attention is spread over
ranks loses nothing either way, and is what moves least (`csps.configurator.strategy_choice`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from csps.configurator.csa_limits import check_csa, check_model, ntp_only, ordered_topology
from csps.configurator.expected_group import PartitionSizes, even_spts
from csps.configurator.shapes import AttentionShape, GroupShape
from csps.configurator.strategy_choice import Strategy, exact_options, least, sparse_options
from csps.configurator.traffic import Traffic
from csps.protocols.csa_template import CsaTemplate
from csps.protocols.plans import Architecture, Plan, PlanRequest
from csps.protocols.topology import MAX_LEVELS

MICRO_PARTITIONS = 4
"""M if the client names none: enough to hide most of an exchange, and few messages."""

_ENGINE_NAMES: dict[Architecture, str] = {"ntp": "csa", "tp": "sp_tp", "tp_flat": "sp_tp_flat"}


class RuleConfigurator:
    """See the module.

    Parameters
    ----------
    shape
        The model's attention, for what each strategy moves.
    sizes
        The policy's, for the group that a prompt will run on.
    link_ratio
        How much longer an element takes between servers than inside one.
    """

    def __init__(
        self,
        shape: AttentionShape,
        *,
        sizes: PartitionSizes | None = None,
        link_ratio: float = 1.0,
    ) -> None:
        self._shape = shape
        self._sizes = sizes or PartitionSizes()
        self._link_ratio = link_ratio

    def plan(self, request: PlanRequest) -> Plan:
        """The plan for one request.

        Raises:
            InvalidRequest: it asks for sparse attention that the gang, the model or the prompt
                cannot have.
        """
        check_csa(request)
        if request.attention == "csa":
            check_model(request, self._shape)
            return self._sparse(request)
        return self._exact(request)

    # --- exact ---------------------------------------------------------------------------------

    def _exact(self, request: PlanRequest) -> Plan:
        strategy, why = self._exact_strategy(request)
        return Plan(
            attention="exact",
            strategy=strategy,
            csa=_where_it_stands() if strategy == "sp_tp" else None,
            predicted_accuracy_loss=0.0,
            reason=f"{_why_exact(request)}; {why}",
        )

    def _exact_strategy(self, request: PlanRequest) -> tuple[Strategy, str]:
        if not request.locations:
            return "ulysses", "'ulysses', because no prefill gang is there whose traffic to compare"
        group = GroupShape.of(self._sizes.expected(request), request.tp)
        options = exact_options(self._shape, group, request.prompt_tokens)
        return self._least(options, group.instances)

    # --- sparse --------------------------------------------------------------------------------

    def _sparse(self, request: PlanRequest) -> Plan:
        template = _template(request)
        strategy, why = self._sparse_strategy(request, template)
        if strategy != "csa":  # SP-TP computes every query
            variant = replace(template.variant, drop_queries=False)
            template = replace(template, variant=variant)
        return Plan(
            attention="csa",
            strategy=strategy,
            csa=template,
            predicted_accuracy_loss=0.0 if template.lossless else None,
            reason=f"the client asked for sparse attention; {why}{_bounds_not_predicted(request)}",
        )

    def _sparse_strategy(self, request: PlanRequest, template: CsaTemplate) -> tuple[str, str]:
        """The engine's name of SP-NTP or SP-TP, and why."""
        if (asked := request.csa.strategy) is not None:
            return _ENGINE_NAMES[asked], f"strategy '{asked}' as asked"
        if only := ntp_only(request.csa.variant):
            return "csa", f"SP-NTP, which {only} needs"
        if not request.locations:
            return "csa", "SP-NTP, because no prefill gang is there whose traffic to compare"
        places = self._sizes.expected(request).locations
        spts = even_spts(request.prompt_tokens, len(places))
        plan = template.for_group(
            [str(place) for place in places], layers=self._shape.layers, longest_spt=spts[0]
        )
        return self._least(sparse_options(self._shape, plan, tp=request.tp, spts=spts), len(places))

    def _least(self, options: Mapping[Strategy, Traffic], instances: int) -> tuple[Strategy, str]:
        """What moves least, and what all of them move."""
        chosen = least(options, link_ratio=self._link_ratio)
        if not any(traffic.cost(1.0) for traffic in options.values()):
            return chosen, f"'{chosen}', which on one instance exchanges nothing"
        figures = ", ".join(
            f"'{name}' {traffic.cost(self._link_ratio) / 1e6:.3g}"
            for name, traffic in options.items()
        )
        counted = "" if self._link_ratio == 1 else f", one between servers as {self._link_ratio:g}"
        return chosen, (
            f"'{chosen}', because nothing moves less, in million elements a layer on "
            f"{instances} instance{'s' * (instances > 1)}{counted}: {figures}"
        )


def _where_it_stands() -> CsaTemplate:
    """Exact attention, with the locations that hierarchical collectives go by."""
    return CsaTemplate(levels=1, micro_partitions=((MICRO_PARTITIONS,),))


def _template(request: PlanRequest) -> CsaTemplate:
    asked = request.csa
    return CsaTemplate(
        levels=asked.levels if asked.levels is not None else _all_levels(request),
        drop_ratios=asked.drop_ratios or ((0.0,),),
        micro_partitions=asked.micro_partitions
        or ((min(MICRO_PARTITIONS, request.prompt_tokens),),),
        variant=asked.variant,
    )


def _all_levels(request: PlanRequest) -> int:
    if not request.locations:
        return MAX_LEVELS
    return len(ordered_topology(request).granularities)


def _bounds_not_predicted(request: PlanRequest) -> str:
    objective = request.objective
    if objective.max_accuracy_loss is None and objective.max_ttft_ms is None:
        return ""
    return "; whether it meets the bounds was not predicted"


def _why_exact(request: PlanRequest) -> str:
    if request.attention == "exact":
        return "the client asked for exact attention"
    if request.objective.max_ttft_ms is not None:
        return "exact attention loses nothing; whether it meets the TTFT bound was not predicted"
    return "exact attention loses nothing"
