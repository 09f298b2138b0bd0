"""The configurator that does not approximate."""

from __future__ import annotations

from typing import ClassVar

from csps.protocols.errors import InvalidRequest
from csps.protocols.plans import Attention, Plan, PlanRequest


class ExactConfigurator:
    """Answers every request with exact attention, which meets every accuracy bound.

    It predicts nothing: a time-to-first-token bound is taken note of in `Plan.reason`, not
    promised.
    """

    attentions: ClassVar[frozenset[Attention]] = frozenset({"auto", "exact"})
    """What clients may ask for."""

    def plan(self, request: PlanRequest) -> Plan:
        """The plan for one request.

        Raises:
            InvalidRequest: the client insists on sparse attention.
        """
        if request.attention not in self.attentions:
            raise refusal(request.attention)
        return Plan(attention="exact", predicted_accuracy_loss=0.0, reason=_reason(request))


def refusal(attention: Attention) -> InvalidRequest:
    """What to tell a client who asks for attention that this server does not have."""
    return InvalidRequest(
        f"csps.attention: this server cannot run '{attention}'; use 'auto' or 'exact'",
        param="csps.attention",
    )


def _reason(request: PlanRequest) -> str:
    if request.attention == "exact":
        return "the client asked for exact attention"
    if request.objective.max_ttft_ms is not None:
        return (
            "only exact attention is available; whether it meets the TTFT bound was not predicted"
        )
    return "only exact attention is available"
