"""Groups and layers to simulate: the differences between the configurations of one call, as arrays.

Shape suffixes: c configurations, p parts (one per member), g KV heads, v levels (level 1 first).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from csps.configurator.model.attention_shape import AttentionShape
from csps.configurator.model.phase_times import PhaseTimes
from csps.configurator.pipeline.program import Mask, Numbers, Seconds, Wiring
from csps.protocols.core.topology import Segments, Topology

LSE_BYTES = 4
ROUNDING = 1e-9
"""Tolerance of `csps.protocols.attention.csa.kept_tokens`."""


@dataclass(frozen=True, kw_only=True)
class SimulatedGroup:
    """A group that computes a prompt, and its hardware.

    Of instances with several ranks, those of equal place are simulated, with their share of the
    heads: the others do the same at the same time.
    """

    shape: AttentionShape
    """Attention of the whole model."""
    locations: tuple[str, ...]
    """Rack-Server-GPU id of each instance, ascending."""
    tp: int = 1
    times: PhaseTimes
    """Phase times of a rank with its share of the heads."""
    wiring: Wiring
    """Links between ranks of equal place."""
    itemsize: int = 4
    """Bytes of an element of the model's dtype."""
    cores_of: tuple[int, ...] | None = None
    """Set of cores of each rank; None gives each rank a core of its own."""
    cores: tuple[float, ...] = ()
    """Number of cores of each set."""

    @property
    def members(self) -> int:
        """Number of parts into which a prompt is cut."""
        return len(self.locations)

    @property
    def heads(self) -> int:
        """Query heads of a rank."""
        return self.shape.heads // self.tp

    @property
    def kv_heads(self) -> int:
        """KV heads of a rank."""
        return self.shape.kv_heads // self.tp

    @property
    def slowed(self) -> float:
        """Slowdown of the ranks that share the fewest cores when all compute; at least 1."""
        cores_of, cores, crowding = self.machine()
        used = np.bincount(np.array(cores_of), minlength=len(cores))
        most = float((used / np.array(cores)).max())
        return most * crowding if most > 1 else 1.0

    def segments(self, levels: int) -> tuple[Segments, ...]:
        """Return the segments of `levels` levels, level 1 first.

        Raises:
            ConfigError: there are more levels than the locations distinguish.
        """
        return Topology.of(self.locations).levels(levels)

    def machine(self) -> tuple[Sequence[int], Sequence[float], float]:
        """Return the set of cores of each rank, the cores of each set, and the cost of crowding."""
        crowding = self.times.step.crowding
        if self.cores_of is None:
            return range(self.members), [1.0] * self.members, crowding
        return self.cores_of, self.cores, crowding


@dataclass(frozen=True, kw_only=True)
class LayerCases:
    """One layer of each configuration; all have the same number of levels."""

    levels: int
    ratios_cgv: Seconds
    """Drop ratios; 0 at level 1, and everywhere in a layer that drops nothing."""
    micro_cv: Numbers
    """M of each level."""
    scores_c: Mask
    """True if this layer scores importance for the next one."""
    same_c: Mask
    """True if this layer scores importance for itself."""
    window_c: Numbers
    """Number of last queries that score."""
    sinks_c: Numbers
    tail_c: Numbers
    seen: int | None = None
    """Positions that a row sees, its own included, in a layer with a sliding window; None: all."""
    drop_queries: bool = True
    pipelined: bool = True

    def __post_init__(self) -> None:
        assert self.ratios_cgv.shape[2] == self.micro_cv.shape[1] == self.levels, (
            f"ratios of shape {self.ratios_cgv.shape} and M of shape {self.micro_cv.shape} for "
            f"{self.levels} levels"
        )
        assert not self.ratios_cgv[:, :, 0].any(), "level 1 must not drop"

    def __len__(self) -> int:
        return len(self.micro_cv)

    @property
    def drops_c(self) -> Mask:
        """True if a layer drops anything."""
        return np.asarray(self.ratios_cgv.any(axis=(1, 2)))

    def kept(self, spts: Sequence[int]) -> Numbers:
        """Return (c, p, g, v) tokens of each part that are kept at each level.

        Args:
            spts: tokens of each member.
        """
        lengths_p = np.array(spts)
        # A ratio of 0 keeps all tokens, including those that are never dropped.
        share_cpgv = (1.0 - self.ratios_cgv[:, None]) * lengths_p[None, :, None, None]
        kept_cpgv = np.ceil(share_cpgv - ROUNDING).astype(np.int64)
        kept: Numbers = np.maximum(kept_cpgv, self._always(lengths_p)[:, :, None, None])
        return kept

    def _always(self, lengths_p: Numbers) -> Numbers:
        """Return (c, p) tokens that are never dropped."""
        stops_p = np.cumsum(lengths_p)
        starts_p = stops_p - lengths_p
        sinks_cp = np.clip(self.sinks_c[:, None] - starts_p, 0, lengths_p)
        first_c = stops_p[-1] - self.tail_c
        tail_begins_cp = np.maximum(first_c[:, None] - starts_p, sinks_cp)
        always: Numbers = sinks_cp + np.maximum(lengths_p - tail_begins_cp, 0)
        return always

    def windows(self, spts: Sequence[int]) -> Numbers:
        """Return (c, p) queries of each part that score."""
        lengths_p = np.array(spts)
        after_p = lengths_p.sum() - np.cumsum(lengths_p)
        rows: Numbers = np.clip(self.window_c[:, None] - after_p, 0, lengths_p)
        return rows


def even_lengths(total: Numbers, parts: Numbers, index: int) -> Numbers:
    """Apply `placement.even_share` to arrays: tokens of part `index`, 0 where there are fewer
    parts."""
    length = (index + 1) * total // parts - index * total // parts
    lengths: Numbers = np.where(index < parts, length, 0)
    return lengths


def pairs_in_window(first: Numbers, rows: Numbers, keys: int, window: int) -> Numbers:
    """Count the pairs of rows and keys that see each other in a layer with a sliding window.

    Args:
        first: position of the first of `rows` rows.
        keys: keys at the positions 0, 1, ...
        window: positions that a row sees, its own included.
    """

    def up_to(position: Numbers) -> Numbers:
        """Count pairs of the rows from 0 on that precede a position, and keys up to each."""
        inside = np.clip(position, 0, keys)
        pairs: Numbers = inside * (inside + 1) // 2 + np.maximum(position - keys, 0) * keys
        return pairs

    def pairs(shift: int) -> Numbers:
        return up_to(first + rows - shift) - up_to(first - shift)

    return pairs(0) - pairs(window)
