"""What of sparse attention a deployment and a prompt allow."""

from __future__ import annotations

from csps.protocols.csa import ALL_QUERIES
from csps.protocols.csa_template import CsaVariant
from csps.protocols.errors import ConfigError, InvalidRequest
from csps.protocols.plans import PlanRequest
from csps.protocols.topology import Topology


def check_csa(request: PlanRequest) -> None:
    """Refuse what no group of the gang could do for the prompt; other attention always passes.

    Raises:
        InvalidRequest: more levels than the gang's locations tell apart, more micro-partitions
            than the prompt has tokens, or options that exclude each other.
    """
    if request.attention != "csa":
        return
    _check_levels(request)
    _check_micro_partitions(request)
    _check_importance(request.csa.variant)
    _check_strategy(request)


def check_layers(request: PlanRequest, layers: int) -> None:
    """Refuse more drop ratios than the model has layers.

    Raises:
        InvalidRequest: so many were asked for.
    """
    if (ratios := request.csa.drop_ratios) is not None and len(ratios) > layers:
        raise InvalidRequest(
            f"csps.drop_ratio: must be at most {layers} by layer, as the model has no more, "
            f"not {len(ratios)}",
            param="csps.drop_ratio",
        )


def ntp_only(variant: CsaVariant) -> str | None:
    """The option, if there is one, that SP-TP does not have."""
    if variant.nested:
        return "'nested'"
    if variant.decode_kept_only:
        return "'decode_kept_only'"
    return "'importance_layer': 'same'" if variant.importance_layer == "same" else None


def ordered_topology(request: PlanRequest) -> Topology:
    """Where the gang's instances stand, in the order of their ids; there must be some."""
    topology = Topology.of(request.locations)
    return topology.subset(topology.order)


def _check_levels(request: PlanRequest) -> None:
    # Without a gang nobody knows: the group that comes has as many levels as it tells apart.
    if request.csa.levels is None or not request.locations:
        return
    topology = ordered_topology(request)
    try:
        topology.levels(request.csa.levels)
    except ConfigError as error:
        what = str(error).removeprefix("levels ")
        raise InvalidRequest(f"csps.levels: {what}", param="csps.levels") from None


def _check_micro_partitions(request: PlanRequest) -> None:
    counts, tokens = request.csa.micro_partitions or (), request.prompt_tokens
    for count in counts:
        if count > tokens:
            raise InvalidRequest(
                f"csps.micro_partitions: must be 1 to {tokens}, the tokens of the prompt, "
                f"not {count}",
                param="csps.micro_partitions",
            )
    if request.csa.levels is None and request.locations:
        levels = len(ordered_topology(request).granularities)
        if len(counts) > levels:
            raise InvalidRequest(
                f"csps.micro_partitions: must be at most {levels} by level, which is all that the "
                f"gang's locations tell apart, not {len(counts)}",
                param="csps.micro_partitions",
            )


def _check_importance(variant: CsaVariant) -> None:
    if variant.importance_layer == "same" and variant.importance_window == ALL_QUERIES:
        raise InvalidRequest(
            "csps.importance_window: must be 1 or more with 'importance_layer': 'same', because "
            "what all queries attend to is known only when the layer is over",
            param="csps.importance_window",
        )


def _check_strategy(request: PlanRequest) -> None:
    strategy = request.csa.strategy
    only = ntp_only(request.csa.variant)
    if strategy in ("tp", "tp_flat") and only is not None:
        raise InvalidRequest(
            f"csps.strategy: must be 'ntp' with {only}, not '{strategy}'", param="csps.strategy"
        )
