"""The rules between ring pass-KV and pass-Q that a server starts with."""

from __future__ import annotations

from pathlib import Path

from csps.configurator.scaling_information_base import ScalingInformationBase
from csps.models.spec import ModelSpec, read_spec
from csps.protocols.errors import ConfigError
from csps.protocols.ring_choice import FittedRule, RingModel, RingRules, RingSpeeds
from csps.services.launch.settings import Settings
from csps.services.profiling.identity import identity_of
from csps.services.profiling.measured_links import BETWEEN, INSIDE
from csps.services.profiling.ring_fits import RING, fitted_rings
from csps.services.scheduling.latency import LatencyTable, in_seconds
from csps.services.scheduling.latency_shipped import SHIPPED


def ring_rules(settings: Settings, table: LatencyTable) -> RingRules:
    """What was fitted here, and thresholds from measured compute and bandwidth for the rest.

    Args:
        table: latencies in force.

    Raises:
        ConfigError: the scaling information base is of another model or machine, or damaged.
    """
    spec = read_spec(settings.model_dir)
    path = Path(settings.scaling_information_base)
    base = ScalingInformationBase.read(path, identity_of(settings)) if path.is_file() else None
    fitted: tuple[FittedRule, ...] = ()
    if base is not None:
        with base:
            fitted = fitted_rings(base.latest_fit(RING))
    flops = _flops(spec, table, settings.prefilling.tp)
    inside = _bytes_per_s(table, INSIDE)
    try:
        between = _bytes_per_s(table, BETWEEN)
    except ConfigError:  # not measured: as the operator has said
        between = inside / settings.topology.link_ratio
    return RingRules(
        model=RingModel(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            element_bytes=settings.element_bytes,
        ),
        inside=RingSpeeds(flops=flops, bytes_per_s=inside),
        between=RingSpeeds(flops=flops, bytes_per_s=between),
        fitted=fitted,
    )


def _flops(spec: ModelSpec, table: LatencyTable, tp: int) -> float:
    """Operations of attention that a rank does a second: a token attends to one of its history in
    every layer but the last, by two products of all query heads."""
    try:
        step = table.step(1, tp)
    except ConfigError:  # nobody has measured instances of so many ranks
        return _flops(spec, table, 1)
    _, _, history_ns, pair_ns = step.in_ns
    if not (pair_s := (history_ns or 2 * pair_ns) * 1e-9):
        return _flops(spec, SHIPPED, 1)
    return 4 * spec.heads * spec.head_dim * max(1, spec.layers - 1) / pair_s / tp


def _bytes_per_s(table: LatencyTable, kind: str) -> float:
    """Of a kind of link.

    Raises:
        ConfigError: none was measured, and none between servers comes with csps.
    """
    try:
        link = table.link(kind)
    except ConfigError:
        link = SHIPPED.link(kind)
    return 1 / in_seconds(link.b) if link.b else 1 / in_seconds(SHIPPED.link(INSIDE).b)
