"""The latencies that a server starts with.

The rules between ring pass-KV and pass-Q that a server starts with.

The rates of improvement that Tetris starts with.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from csps.configurator.costs.latency import LatencyTable, in_seconds, parse_table
from csps.configurator.costs.latency_tables import SHIPPED
from csps.configurator.model.scaling_information_base import ScalingInformationBase
from csps.models.network.spec import ModelSpec, read_spec
from csps.protocols.attention.ring_choice import FittedRule, RingModel, RingRules, RingSpeeds
from csps.protocols.core.errors import ConfigError
from csps.services.measured.fits import RING, fitted_rings
from csps.services.measured.identity import identity_of
from csps.services.measured.measured_groups import BETWEEN, INSIDE
from csps.services.scheduling.policies.tetris.options import AUTO, FIT
from csps.services.settings.settings import Settings

LATENCY = "latency"
"""Name of the fits that hold a `LatencyTable`."""
_log = logging.getLogger(__name__)


def latency_table(settings: Settings) -> LatencyTable:
    """What was profiled here with this model; the shipped coefficients, with a warning, where
    nothing was.

    Raises:
        ConfigError: the scaling information base is of another model or machine, or damaged.
    """
    path = Path(settings.scaling_information_base)
    base = ScalingInformationBase.read(path, identity_of(settings)) if path.is_file() else None
    if base is None:
        return _shipped(f"there is no {path}")
    with base:
        fit = base.latest_fit(LATENCY)
    if fit is None:
        return _shipped(f"{path} has no fitted latencies yet")
    return parse_table(fit.canonical)


def _shipped(reason: str) -> LatencyTable:
    _log.warning(
        "%s; predicting with shipped latencies (%s): run `csps profile steps`", reason, SHIPPED.name
    )
    return SHIPPED


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


def scheduling_options(settings: Settings) -> dict[str, Any]:
    """The policy's options as the settings have them, with what `csps rates` has found where the
    policy looks up rates of improvement and the settings name none. So they are in the header of
    the decision log, which can be replayed without the scaling information base.

    Raises:
        ConfigError: the scaling information base is of another model or machine, or damaged.
    """
    options = settings.policy_options
    wanted = options.get("improvement_rate", AUTO) == AUTO and "improvement_rates" not in options
    path = Path(settings.scaling_information_base)
    if settings.scheduling.policy != "tetris" or not wanted or not path.is_file():
        return options
    base = ScalingInformationBase.read(path, identity_of(settings))
    assert base is not None, "the file was there"
    with base:
        fit = base.latest_fit(FIT)
    if fit is None:
        return options
    return {**options, "improvement_rates": json.loads(fit.canonical)}
