"""Load the measured inputs of a server's scheduler: latencies, ring rules, improvement rates."""

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
from csps.services.measured.measured_groups import BETWEEN, INSIDE, RACKS
from csps.services.scheduling.policies.tetris.options import AUTO, FIT
from csps.services.settings.settings import Settings

LATENCY = "latency"
"""Name of the fits that hold a `LatencyTable`."""
_log = logging.getLogger(__name__)


def latency_table(settings: Settings) -> LatencyTable:
    """Return the profiled latencies of this model; without any, warn and return the shipped ones.

    Raises:
        ConfigError: the scaling information base is of another model or machine, or damaged.
    """
    path = Path(settings.scaling_information_base)
    base = ScalingInformationBase.read(path, identity_of(settings)) if path.is_file() else None
    if base is None:
        return _shipped(f"{path} does not exist")
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
    """Return the fitted rules, with thresholds from compute and bandwidth for other group sizes.

    Args:
        table: latencies in force.

    Raises:
        ConfigError: the scaling information base is of another model or machine, or damaged.
    """
    spec = read_spec(settings.model_dir, settings.model_overrides)
    path = Path(settings.scaling_information_base)
    base = ScalingInformationBase.read(path, identity_of(settings)) if path.is_file() else None
    fitted: tuple[FittedRule, ...] = ()
    if base is not None:
        with base:
            fitted = fitted_rings(base.latest_fit(RING))
    flops = _flops(spec, table, settings.prefilling.tp)
    inside = _bytes_per_s(table, INSIDE)
    kinds = {kind for kind, _ in table.links}
    far = next((kind for kind in (BETWEEN, RACKS) if kind in kinds), None)
    # Where none was measured, the operator's ratio counts.
    between = inside / settings.topology.link_ratio if far is None else _bytes_per_s(table, far)
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
    """Return the attention FLOP/s of a rank, from its measured time per token of history.

    A token attends to one of its history in every layer but the last, by two products of all query
    heads.
    """
    try:
        step = table.step(1, tp)
    except ConfigError:  # instances with this tp were not measured
        return _flops(spec, table, 1)
    _, _, history_ns, pair_ns = step.in_ns
    if not (pair_s := (history_ns or 2 * pair_ns) * 1e-9):
        return _flops(spec, SHIPPED, 1)
    return 4 * spec.heads * spec.head_dim * max(1, spec.layers - 1) / pair_s / tp


def _bytes_per_s(table: LatencyTable, kind: str) -> float:
    """Return the bandwidth of a kind of link.

    Raises:
        ConfigError: the link was not measured, and csps ships no figure for it.
    """
    try:
        link = table.link(kind)
    except ConfigError:
        link = SHIPPED.link(kind)
    return 1 / in_seconds(link.b) if link.b else 1 / in_seconds(SHIPPED.link(INSIDE).b)


def scheduling_options(settings: Settings) -> dict[str, Any]:
    """Return the policy's options, with the improvement rates that `csps rates` has computed.

    Rates are added if the policy uses them and the settings give none. They are then in the header
    of the decision log, which can be replayed without the scaling information base.

    Raises:
        ConfigError: the scaling information base is of another model or machine, or damaged.
    """
    options = settings.policy_options
    wanted = options.get("improvement_rate", AUTO) == AUTO and "improvement_rates" not in options
    path = Path(settings.scaling_information_base)
    if settings.scheduling.policy != "tetris" or not wanted or not path.is_file():
        return options
    base = ScalingInformationBase.read(path, identity_of(settings))
    assert base is not None, f"{path} vanished while it was read"
    with base:
        fit = base.latest_fit(FIT)
    if fit is None:
        return options
    return {**options, "improvement_rates": json.loads(fit.canonical)}
