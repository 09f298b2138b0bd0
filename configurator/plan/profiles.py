"""Conversion of profiled rows to phase times and links for the pipeline simulator.

A row of phases has its amount of work in `tokens` and, where two kinds of tokens meet, `keys`; for
copies in `bytes`. Causal attention of rows among themselves has `keys` -1.

Phases are timed one by one, with warm memory. A real step also allocates, stores KV, plans, and
begins, awaits and merges exchanges. `with_overheads` fits these overheads by non-negative least
squares to the processor time of whole steps whose strategies cut their exchanges differently.
Threads beside the one that computes move messages meanwhile and are fitted separately: over a slow
link their time is hidden unless something computes. Crowding is the wall time of steps, times
cores, over their processor time, where ranks outnumber cores; the median over steps of one server
counts. Bytes cost more core time over slow links and in small messages, so groups over several
servers are predicted best where they were measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from csps.configurator.model.fits import nonnegative_fit
from csps.configurator.model.phase_times import (
    AttentionTimes,
    ExchangeTimes,
    LinearTime,
    PhaseTimes,
    StepTimes,
)
from csps.configurator.model.scaling_information_base import LinkRow, PhaseRow
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, work_seconds
from csps.configurator.pipeline.program import LinkSpeed, Wiring
from csps.configurator.regressors.samples import places_of
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import parse_option
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import Topology

CAUSAL = -1
"""`PhaseRow.keys` of attention of rows among themselves."""
STRATEGY = "any"
"""`PhaseRow.strategy` and `group_shape` of phases of a single rank."""
NEEDED = ("qkv", "attention", "linear", "mlp")


def fit_phases(rows: Iterable[PhaseRow], *, heads: int, kv_heads: int, tp: int) -> PhaseTimes:
    """Fit the phases of a rank with its share of the heads.

    Args:
        heads, kv_heads: of the whole model.

    Raises:
        ConfigError: a phase that every prediction needs was not measured.
    """
    by_phase: dict[str, list[PhaseRow]] = defaultdict(list)
    for row in _least(row for row in rows if row.strategy == STRATEGY and row.tp == tp):
        by_phase[row.phase].append(row)
    if missing := [phase for phase in NEEDED if not by_phase[phase]]:
        raise ConfigError(
            f"phases of instances of {tp} ranks were not measured: {', '.join(missing)}; run "
            "`csps profile phases`"
        )
    own_heads, own_kv_heads = heads // tp, kv_heads // tp
    return PhaseTimes(
        qkv=_linear_time(by_phase["qkv"], 1),
        attention=_attention(by_phase["attention"], own_heads),
        linear=_linear_time(by_phase["linear"], 1),
        rest=_linear_time(by_phase["mlp"], 1),
        select=_linear_time(by_phase["select"], own_kv_heads),
        importance=_fitted(
            by_phase["importance"],
            [own_heads * row.tokens * row.keys for row in by_phase["importance"]],
        ),
        merge=_linear_time(by_phase["merge"], own_heads),
        copy=_fitted(by_phase["copy"], [row.bytes for row in by_phase["copy"]]),
    )


def link_speed(rows: Iterable[LinkRow], kind: str, *, shared: bool = False) -> LinkSpeed:
    """Fit a kind of link to the medians of its messages.

    Raises:
        ConfigError: the kind was not measured.
    """
    by_size: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.kind == kind:
            by_size[row.bytes].append(row.seconds)
    if not by_size:
        raise ConfigError(f"links {kind} a server were not measured; run `csps profile links`")
    sizes = np.array(list(by_size), float)
    seconds = np.array([max(median(taken), 1e-9) for taken in by_size.values()])
    latency, each = nonnegative_fit(np.stack([np.ones_like(sizes), sizes], axis=1), seconds)
    return LinkSpeed(
        bytes_per_s=1 / each if each else 1e15, latency_s=float(latency), shared=shared
    )


def _least(rows: Iterable[PhaseRow]) -> list[PhaseRow]:
    """Return the fastest measurement of each point: disturbances only slow measurements down."""
    found: dict[tuple[object, ...], PhaseRow] = {}
    for row in rows:
        key = row.phase, row.tokens, row.keys, row.bytes
        if key not in found or row.seconds < found[key].seconds:
            found[key] = row
    return list(found.values())


def _linear_time(rows: Sequence[PhaseRow], each: int) -> LinearTime:
    return _fitted(rows, [each * row.tokens for row in rows])


def _fitted(rows: Sequence[PhaseRow], amounts: Sequence[float]) -> LinearTime:
    if not rows:
        return LinearTime()
    features = np.stack([np.ones(len(rows)), np.array(amounts, float)], axis=1)
    fixed, slope = nonnegative_fit(features, np.array([row.seconds for row in rows]))
    return LinearTime(fixed=float(fixed), each=float(slope))


def _attention(rows: Sequence[PhaseRow], heads: int) -> AttentionTimes:
    features = np.array([[1.0, heads * row.tokens, heads * _pairs(row)] for row in rows], float)
    call, row, pair = nonnegative_fit(features, np.array([row.seconds for row in rows]))
    return AttentionTimes(call=float(call), row=float(row), pair=float(pair))


def _pairs(row: PhaseRow) -> int:
    if row.keys == CAUSAL:
        return row.tokens * (row.tokens + 1) // 2
    return row.tokens * row.keys


STEP = "step"
"""`PhaseRow.phase` of whole steps: processor time of all threads of all ranks together. The
strategy of such rows is an option."""
BESIDE = "step, beside"
"""Portion of `STEP` that threads beside those that compute took."""
CROWDING = "step, crowding"
"""Core seconds for each second that ranks used, where they outnumbered the cores."""
LEAST = 0.02
"""Fraction of a step's time that counts as overhead where phases explain all of it."""


def with_overheads(group: SimulatedGroup, rows: Iterable[PhaseRow]) -> PhaseTimes:
    """Return phase times with the overheads of steps; the group's own times if no step was
    measured.

    Args:
        group: any group of the model, with phase times alone.
        rows: rows of all phases; the steps that count have the newest measured group shape.
    """
    own = [row for row in rows if row.tp == group.tp]
    steps = [row for row in own if row.phase == STEP]
    if not steps:
        return group.times
    shape = steps[-1].group_shape
    group = _measured_on(group, shape)
    steps = [row for row in steps if row.group_shape == shape]
    beside = {_step_of(row): row.seconds for row in own if row.phase == BESIDE}
    beside_n = np.array([beside.get(_step_of(row), 0.0) for row in steps])
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
        rest=LinearTime(fixed=rest.fixed, each=rest.each + token),
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
    """Return the core seconds for each second that so many instances use; 1 if it was not
    measured."""
    measured = [
        row.seconds
        for row in rows
        if row.phase == CROWDING and row.tp == tp and len(places_of(row.group_shape)) == instances
    ]
    return max(1.0, median(measured or [1.0]))


def _step_of(row: PhaseRow) -> tuple[object, ...]:
    """Return what the phases of one step have in common."""
    return row.strategy, row.group_shape, row.tokens, row.date


def _coefficients(
    features: Sequence[np.ndarray], seconds_n: np.ndarray, whole_n: np.ndarray
) -> list[float]:
    """Fit coefficients to steps that took any time.

    Args:
        whole_n: times to which errors are relative; `seconds_n` are a part of them.
    """
    some_n = seconds_n > 0
    if not some_n.any():
        return [0.0] * len(features)
    found: list[float] = nonnegative_fit(
        np.stack(features, axis=1)[some_n], seconds_n[some_n], whole_n[some_n]
    ).tolist()
    return found


def _measured_on(group: SimulatedGroup, shape: str) -> SimulatedGroup:
    """Return a group on the servers that were measured; its computing does not depend on links."""
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
    """Return, for each step, its ranks and their layers that drop."""
    # The work that a coefficient of one second adds is the feature's value.
    return _added(group, rows, work_n, [StepTimes(fixed=1.0), StepTimes(dropping=1.0)])


def _exchange_features(
    group: SimulatedGroup, rows: Sequence[PhaseRow], work_n: np.ndarray
) -> list[np.ndarray]:
    """Return, for each step, its exchanges, messages, bytes, and bytes of pipelined SP-NTP."""
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
    """Return the simulator's settings for an option of a measured step."""
    name, csa = parse_option(option)
    if csa is None:
        assert name == "ulysses", f"strategy '{name}' cannot be simulated"
        return WHOLE
    return csa
