"""The latencies that a server starts with."""

from __future__ import annotations

import logging
from pathlib import Path

from csps.configurator.scaling_information_base import ScalingInformationBase
from csps.services.launch.settings import Settings
from csps.services.profiling.identity import identity_of
from csps.services.scheduling.latency import LatencyTable, parse_table
from csps.services.scheduling.latency_shipped import SHIPPED

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
