"""What of sparse attention a deployment and a prompt allow."""

from __future__ import annotations

from csps.configurator.shapes import AttentionShape
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


def check_model(request: PlanRequest, shape: AttentionShape) -> None:
    """Refuse numbers for other layers and KV heads than the model's.

    Raises:
        InvalidRequest: such were asked for.
    """
    ratios, micro_partitions = request.csa.drop_ratios or (), request.csa.micro_partitions or ()
    for name, numbers in (("drop_ratio", ratios), ("micro_partitions", micro_partitions)):
        if len(numbers) > shape.layers:
            raise InvalidRequest(
                f"csps.{name}: must be at most {shape.layers} by layer, as the model has no more, "
                f"not {len(numbers)}",
                param=f"csps.{name}",
            )
    for of_heads in ratios:
        if len(of_heads) not in (1, shape.kv_heads):
            raise InvalidRequest(
                f"csps.drop_ratio: must be one a layer, or {shape.kv_heads}, one per KV head of "
                f"the model, not {len(of_heads)}",
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
    if not (by_layer := request.csa.micro_partitions):
        return
    tokens, most = request.prompt_tokens, max(map(max, by_layer))
    if most > tokens:
        raise InvalidRequest(
            f"csps.micro_partitions: must be 1 to {tokens}, the tokens of the prompt, not {most}",
            param="csps.micro_partitions",
        )
    if request.csa.levels is None and request.locations:
        levels, longest = len(ordered_topology(request).granularities), max(map(len, by_layer))
        if longest > levels:
            raise InvalidRequest(
                f"csps.micro_partitions: must be at most {levels} by level, which is all that the "
                f"gang's locations tell apart, not {longest}",
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
