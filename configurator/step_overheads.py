"""What steps take of the ranks' cores beside the phases that were timed one by one.

Phases are timed with warm memory and nothing else to do. A rank that runs a step allocates, keeps
KV, plans, begins exchanges, waits for them and merges what they bring: so much for each step, each
layer that drops, each token and layer, and each exchange, message and byte. With the seconds of
processor time that real steps took, of strategies that differ in how they cut their exchanges, that
is a linear problem. Threads beside the one that computes move messages while it goes on, and are
told apart: where a link is slow, what they take is hidden unless something is computed meanwhile.
On processors all this decides from which M on pipelining costs more than it hides.

Where more ranks compute than there are cores, more time passes of these than the ranks use: that is
measured as well, as the time that steps took, times cores, over their processor time, on one server
whose links hold nobody up; the median counts.

Bytes take more of the cores that send and receive them where the link is slow and they come in
small pieces: groups over several servers are known best where they were measured as such.

Rows are `PhaseRow`s whose strategy is an option and whose seconds are those of all ranks together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from csps.configurator.nonnegative_fit import nonnegative_fit
from csps.configurator.phase_times import ExchangeTimes, Line, PhaseTimes, StepTimes
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, work_seconds
from csps.configurator.pipeline.wiring import LinkSpeed, Wiring
from csps.configurator.regressors.measured import places_of
from csps.configurator.scaling_information_base import PhaseRow
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.options import parse_option
from csps.protocols.topology import Topology

STEP = "step"
"""`PhaseRow.phase` of whole steps: processor time of all threads."""
BESIDE = "step, beside"
"""Of these, of the threads beside those that compute."""
CROWDING = "step, crowding"
"""What passed of the cores for each second that ranks used, where they had too few."""
LEAST = 0.02
"""Share of a step's time that is taken for overhead where phases explain all of it."""


def with_overheads(group: SimulatedGroup, rows: Iterable[PhaseRow]) -> PhaseTimes:
    """Phase times with what steps took besides; those of the group, where no step was measured.

    Args:
        group: any of the model, with the times of its phases alone.
        rows: of all phases; steps count that were measured last on so many instances.
    """
    own = [row for row in rows if row.tp == group.tp]
    steps = [row for row in own if row.phase == STEP]
    if not steps:
        return group.times
    shape = steps[-1].group_shape
    group = _measured_on(group, shape)
    steps = [row for row in steps if row.group_shape == shape]
    beside = {_which(row): row.seconds for row in own if row.phase == BESIDE}
    beside_n = np.array([beside.get(_which(row), 0.0) for row in steps])
    computing_n = np.array([row.seconds for row in steps]) - beside_n
    work_n = np.array([_work(group, row) for row in steps])
    ranks, dropping_layers = _step_features(group, steps, work_n)
    exchanged = _exchange_features(group, steps, work_n)
    fixed, dropping, token, call, message, byte, overlapped = _coefficients(
        [ranks, dropping_layers, _tokens(group, steps), *exchanged],
        np.maximum(computing_n - work_n, LEAST * computing_n),
        computing_n,
    )
    fixed_beside, call_beside, message_beside, byte_beside = _coefficients(
        [ranks, *exchanged[:3]], beside_n, beside_n + computing_n
    )
    rest = group.times.rest
    return replace(
        group.times,
        rest=Line(fixed=rest.fixed, each=rest.each + token),
        exchange=ExchangeTimes(
            call=call + call_beside,
            message=message + message_beside,
            byte=byte,
            beside=byte_beside,
            overlapped=overlapped,
        ),
        step=StepTimes(
            fixed=fixed + fixed_beside,
            dropping=dropping,
            crowding=crowding(own, group.members, group.tp),
        ),
    )


def crowding(rows: Iterable[PhaseRow], instances: int, tp: int) -> float:
    """What passes of cores for each second that so many instances use of them, where they have too
    few; 1 if that was not measured."""
    measured = [
        row.seconds
        for row in rows
        if row.phase == CROWDING and row.tp == tp and len(places_of(row.group_shape)) == instances
    ]
    return max(1.0, median(measured or [1.0]))


def _which(row: PhaseRow) -> tuple[object, ...]:
    """What the phases of one step have in common."""
    return row.strategy, row.group_shape, row.tokens, row.date


def _coefficients(
    features: Sequence[np.ndarray], seconds_n: np.ndarray, whole_n: np.ndarray
) -> list[float]:
    """Of those that took any time, which was a part of the whole."""
    some_n = seconds_n > 0
    if not some_n.any():
        return [0.0] * len(features)
    found: list[float] = nonnegative_fit(
        np.stack(features, axis=1)[some_n], seconds_n[some_n], whole_n[some_n]
    ).tolist()
    return found


def _measured_on(group: SimulatedGroup, shape: str) -> SimulatedGroup:
    """The instances of the servers that were measured; what they compute depends on no link."""
    link, places = LinkSpeed(bytes_per_s=1e9), places_of(shape)
    servers = [place.server_id for place in Topology.of(places).locations]
    return replace(
        group,
        locations=places,
        wiring=Wiring.of_servers(servers, inside=link, between=link),
        cores_of=None,
        cores=(),
    )


def _step_features(
    group: SimulatedGroup, rows: Sequence[PhaseRow], work_n: np.ndarray
) -> list[np.ndarray]:
    """Ranks of each step, and their layers that drop: what each would add at a second."""
    return _added(group, rows, work_n, [StepTimes(fixed=1.0), StepTimes(dropping=1.0)])


def _exchange_features(
    group: SimulatedGroup, rows: Sequence[PhaseRow], work_n: np.ndarray
) -> list[np.ndarray]:
    """How many exchanges, messages and bytes each step has, and of these those of pipelined SP-NTP:
    what they would add at a second each, so that a byte's second is one of the same size."""
    units = [
        ExchangeTimes(call=1.0),
        ExchangeTimes(message=1.0),
        ExchangeTimes(byte=1.0),
        ExchangeTimes(overlapped=1.0),
    ]
    return _added(group, rows, work_n, units)


def _added(
    group: SimulatedGroup,
    rows: Sequence[PhaseRow],
    work_n: np.ndarray,
    units: Sequence[StepTimes | ExchangeTimes],
) -> list[np.ndarray]:
    found = []
    for unit in units:
        if isinstance(unit, StepTimes):
            times = replace(group.times, step=unit)
        else:
            times = replace(group.times, exchange=unit)
        one = replace(group, times=times)
        found.append(np.array([_work(one, row) for row in rows]) - work_n)
    return found


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
