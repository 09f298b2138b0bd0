"""From rows of the scaling information base to what the pipeline simulator works with.

Rows of phases name how much they were about: `tokens` and, where two kinds of tokens meet, `keys`;
`bytes` of what was copied. Attention of rows among themselves, causally, has `keys` -1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

from csps.configurator.nonnegative_fit import nonnegative_fit
from csps.configurator.phase_times import AttentionTimes, Line, PhaseTimes
from csps.configurator.pipeline.wiring import LinkSpeed
from csps.configurator.scaling_information_base import LinkRow, PhaseRow
from csps.protocols.errors import ConfigError

CAUSAL = -1
"""`PhaseRow.keys` of attention of rows among themselves."""
STRATEGY = "any"
"""`PhaseRow.strategy` and `group_shape` of phases of one rank by itself."""
NEEDED = ("qkv", "attention", "linear", "mlp")


def fit_phases(rows: Iterable[PhaseRow], *, heads: int, kv_heads: int, tp: int) -> PhaseTimes:
    """Phases of a rank with its share of the heads.

    Args:
        heads, kv_heads: of the whole model.

    Raises:
        ConfigError: what no pipeline can be predicted without was not measured.
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
        qkv=_line(by_phase["qkv"], 1),
        attention=_attention(by_phase["attention"], own_heads),
        linear=_line(by_phase["linear"], 1),
        rest=_line(by_phase["mlp"], 1),
        select=_line(by_phase["select"], own_kv_heads),
        importance=_fitted(
            by_phase["importance"],
            [own_heads * row.tokens * row.keys for row in by_phase["importance"]],
        ),
        merge=_line(by_phase["merge"], own_heads),
        copy=_fitted(by_phase["copy"], [row.bytes for row in by_phase["copy"]]),
    )


def link_speed(rows: Iterable[LinkRow], kind: str, *, shared: bool = False) -> LinkSpeed:
    """A kind of link, from the medians of its messages.

    Raises:
        ConfigError: nobody has measured it.
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
    """Of each point the quickest measurement: what disturbs one only makes it longer."""
    found: dict[tuple[object, ...], PhaseRow] = {}
    for row in rows:
        key = row.phase, row.tokens, row.keys, row.bytes
        if key not in found or row.seconds < found[key].seconds:
            found[key] = row
    return list(found.values())


def _line(rows: Sequence[PhaseRow], each: int) -> Line:
    return _fitted(rows, [each * row.tokens for row in rows])


def _fitted(rows: Sequence[PhaseRow], amounts: Sequence[float]) -> Line:
    if not rows:
        return Line()
    features = np.stack([np.ones(len(rows)), np.array(amounts, float)], axis=1)
    fixed, slope = nonnegative_fit(features, np.array([row.seconds for row in rows]))
    return Line(fixed=float(fixed), each=float(slope))


def _attention(rows: Sequence[PhaseRow], heads: int) -> AttentionTimes:
    features = np.array([[1.0, heads * row.tokens, heads * _pairs(row)] for row in rows], float)
    call, row, pair = nonnegative_fit(features, np.array([row.seconds for row in rows]))
    return AttentionTimes(call=float(call), row=float(row), pair=float(pair))


def _pairs(row: PhaseRow) -> int:
    if row.keys == CAUSAL:
        return row.tokens * (row.tokens + 1) // 2
    return row.tokens * row.keys
