"""A configurator that goes by rules: exact unless asked for sparse attention, and no predictions.

What the client fixes is done; what it leaves open is decided so that nothing is lost that it did
not give away: no token is dropped without a drop ratio.
"""

from __future__ import annotations

from dataclasses import replace

from csps.configurator.csa_limits import check_csa, ntp_only, ordered_topology
from csps.configurator.strategy_choice import (
    AttentionShape,
    GroupShape,
    choose_strategy,
    ntp_traffic,
    sp_tp_traffic,
)
from csps.protocols.csa_template import CsaTemplate
from csps.protocols.plans import Architecture, Plan, PlanRequest

MICRO_PARTITIONS = 4
"""M if the client names none: enough to hide most of an exchange, and few messages."""
MAX_LEVELS = 4
"""SPT, server, rack and all."""

_ENGINE_NAMES: dict[Architecture, str] = {"ntp": "csa", "tp": "sp_tp", "tp_flat": "sp_tp_flat"}


class RuleConfigurator:
    """See the module.

    Parameters
    ----------
    shape
        The model's attention, for the choice between SP-NTP and SP-TP.
    """

    def __init__(self, shape: AttentionShape) -> None:
        self._shape = shape

    def plan(self, request: PlanRequest) -> Plan:
        """The plan for one request.

        Raises:
            InvalidRequest: it asks for sparse attention that the gang or the prompt cannot have.
        """
        check_csa(request)
        if request.attention == "csa":
            return self._sparse(request)
        return Plan(attention="exact", predicted_accuracy_loss=0.0, reason=_why_exact(request))

    def _sparse(self, request: PlanRequest) -> Plan:
        architecture, why = self._architecture(request)
        template = _template(request, architecture)
        lossless = template.drop_ratio == 0 and not template.variant.nested
        return Plan(
            attention="csa",
            strategy=_ENGINE_NAMES[architecture],
            csa=template,
            predicted_accuracy_loss=0.0 if lossless else None,
            reason=f"the client asked for sparse attention; {why}{_bounds_not_predicted(request)}",
        )

    def _architecture(self, request: PlanRequest) -> tuple[Architecture, str]:
        """SP-NTP or SP-TP, and why."""
        if request.csa.strategy is not None:
            return request.csa.strategy, f"strategy '{request.csa.strategy}' as asked"
        if only := ntp_only(request.csa.variant):
            return "ntp", f"SP-NTP, which {only} needs"
        if request.tp > 1:
            # The formula's SP-NTP gathers weights over an instance, which only exact attention can.
            return "ntp", "SP-NTP, because traffic is only compared without tensor parallelism"
        if not request.locations:
            return "ntp", "SP-NTP, because no prefill gang is there whose traffic to compare"
        return self._less_traffic(request)

    def _less_traffic(self, request: PlanRequest) -> tuple[Architecture, str]:
        # The policy has not chosen the group yet; the whole gang stands for it.
        shape, group, tokens = self._shape, _gang_shape(request), request.prompt_tokens
        ntp, tp = ntp_traffic(shape, group, tokens), sp_tp_traffic(shape, group, tokens)
        less, more = sorted((ntp.cost(1.0), tp.cost(1.0)))
        figures = (
            f"{less / 1e6:.3g} million elements a layer against {more / 1e6:.3g}, over all "
            f"{len(request.locations)} instances with nothing dropped"
        )
        if choose_strategy(shape, group, tokens) == "sp_tp":
            return "tp", f"SP-TP, which moves less than SP-NTP: {figures}"
        return "ntp", f"SP-NTP, which moves no more than SP-TP: {figures}"


def _template(request: PlanRequest, architecture: Architecture) -> CsaTemplate:
    asked, variant = request.csa, request.csa.variant
    if architecture != "ntp":
        variant = replace(variant, drop_queries=False)  # SP-TP computes every query
    return CsaTemplate(
        levels=asked.levels if asked.levels is not None else _all_levels(request),
        drop_ratio=asked.drop_ratio or 0.0,
        micro_partitions=asked.micro_partitions or min(MICRO_PARTITIONS, request.prompt_tokens),
        variant=variant,
    )


def _all_levels(request: PlanRequest) -> int:
    if not request.locations:
        return MAX_LEVELS
    return len(ordered_topology(request).granularities)


def _gang_shape(request: PlanRequest) -> GroupShape:
    """The whole gang as one group."""
    runs = ordered_topology(request).servers
    servers = (number for number, run in enumerate(runs) for _ in run)
    return GroupShape(servers=tuple(servers), tp=request.tp)


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
