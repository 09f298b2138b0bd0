"""What steps take of the ranks' cores beside the phases that were timed one by one.

Phases are timed with warm memory and nothing else to do. A rank that runs a step allocates, keeps
KV, plans, begins exchanges, waits for them and merges what they bring: so much for each token and
layer, and so much for each exchange, message and byte. With the seconds of processor time that real
steps took, of strategies that differ in how they cut their exchanges, that is a linear problem. On
processors it decides from which M on pipelining costs more than it hides.

Rows are `PhaseRow`s of phase `step`, whose strategy is an option and whose seconds are those of all
ranks together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from csps.configurator.nonnegative_fit import nonnegative_fit
from csps.configurator.phase_times import ExchangeTimes, Line, PhaseTimes
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, work_seconds
from csps.configurator.pipeline.wiring import LinkSpeed, Wiring
from csps.configurator.scaling_information_base import PhaseRow
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.options import parse_option

STEP = "step"
"""`PhaseRow.phase` of whole steps."""
LEAST = 0.02
"""Share of a step's time that is taken for overhead where phases explain all of it."""


def with_overheads(group: SimulatedGroup, rows: Iterable[PhaseRow]) -> PhaseTimes:
    """Phase times with what steps took besides; those of the group, where no step was measured.

    Args:
        group: any of the model, with the times of its phases alone.
        rows: of all phases; steps count that were measured last on so many instances.
    """
    rows = [row for row in rows if row.phase == STEP and row.tp == group.tp]
    if not rows:
        return group.times
    rows = [row for row in rows if row.group_shape == rows[-1].group_shape]
    group = _measured_on(group, int(rows[-1].group_shape))
    taken = np.array([row.seconds for row in rows])
    work = np.array([_work(group, row) for row in rows])
    left = np.maximum(taken - work, LEAST * taken)
    features = np.stack([*_exchange_features(group, rows, work), _tokens(group, rows)], axis=1)
    call, message, byte, token = map(float, nonnegative_fit(features, left))
    rest = group.times.rest
    return replace(
        group.times,
        rest=Line(fixed=rest.fixed, each=rest.each + token),
        exchange=ExchangeTimes(call=call, message=message, byte=byte),
    )


def _measured_on(group: SimulatedGroup, instances: int) -> SimulatedGroup:
    """So many instances on one server; what they compute depends on no link."""
    link = LinkSpeed(bytes_per_s=1e9)
    return replace(
        group,
        locations=tuple(f"0-0-{number}" for number in range(instances)),
        wiring=Wiring.of_servers([0] * instances, inside=link, between=link),
        cores_of=None,
        cores=(),
    )


def _exchange_features(
    group: SimulatedGroup, rows: Sequence[PhaseRow], work: np.ndarray
) -> list[np.ndarray]:
    """How many exchanges, messages and bytes each step has: what they would add at a second each,
    so that a byte's second is one of the same size."""
    units = ExchangeTimes(call=1.0), ExchangeTimes(message=1.0), ExchangeTimes(byte=1.0)
    groups = [replace(group, times=replace(group.times, exchange=unit)) for unit in units]
    return [np.array([_work(one, row) for row in rows]) - work for one in groups]


def _tokens(group: SimulatedGroup, rows: Sequence[PhaseRow]) -> np.ndarray:
    return np.array([group.tp * group.shape.layers * row.tokens for row in rows], float)


def _work(group: SimulatedGroup, row: PhaseRow) -> float:
    (seconds,) = work_seconds(group, [measured_settings(row.strategy)], row.tokens).tolist()
    return float(group.tp * seconds)


def measured_settings(option: str) -> CsaSettings:
    """What the simulator takes for an option of a measured step."""
    name, csa = parse_option(option)
    if csa is None:
        assert name == "ulysses", f"not simulated: {name}"
        return WHOLE
    return csa
