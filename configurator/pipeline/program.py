"""Programs of the pipeline simulator: what the ranks of a group do in one layer, and on what links.

A rank computes, begins exchanges and waits for them in a fixed order. Besides that it has *filler*:
level 1 of sparse attention, which needs no other rank and is computed wherever the rank would wait.

All members begin an *exchange* together, such as one micro-partition of an all-to-all. The part of
it that uses one wire leaves as a whole, as soon as its senders and receivers have begun it and the
wire has carried the exchanges of lower number. A *wire* is a link in one direction (the paper's B),
of one pair of ranks or shared by several pairs.

Shape suffixes: c configurations, r ranks or receivers, s senders, p places of a program, k columns
of computing, f parts of filler, e exchanges, w wires, d sets of cores.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from csps.protocols.core.errors import ConfigError

Seconds = NDArray[np.float64]
Numbers = NDArray[np.int64]
Mask = NDArray[np.bool_]


class Op(IntEnum):
    """Operation at a place of a program."""

    COMPUTE = 0
    """Compute; the argument is a column of `Durations.compute_crk`."""
    POST = 1
    """Begin an exchange."""
    WAIT = 2
    """Wait until an exchange has arrived; compute filler meanwhile."""
    BLOCK = 3
    """Wait until an exchange has arrived and what this rank sends of it has left, without
    filler."""
    FILL = 4
    """Compute all remaining filler; no argument."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Program of all configurations; operations that one of them lacks take no time there."""

    ops_rp: Numbers
    arguments_rp: Numbers
    senders_ewr: Mask
    receivers_ewr: Mask
    after_e: Numbers
    """Exchange that must have arrived at a sender before it sends this one, which relays it; -1
    is none."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Durations of a program's operations; those that take no time are skipped."""

    compute_crk: Seconds
    """Seconds on a core of one's own."""
    filler_crf: Seconds
    wires_cwe: Seconds
    """Seconds on the wire, without its latency."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware of a program: a computing thread per rank, wires, and cores."""

    latency_w: Seconds
    """Time to arrival after an exchange has left the wire, which is free by then."""
    cores_of_r: Numbers
    """Set of cores on which a rank computes."""
    cores_d: Seconds
    """Cores of each set; ranks that compute share them equally, none has more than one."""
    loads_wr: Seconds
    """Cores of each rank's set that a wire takes while it carries something."""
    crowding: float = 1.0
    """Core seconds for each second of use, where more is wanted of a set than there is; at least
    1."""


@dataclass(frozen=True, kw_only=True)
class PipelineOutcome:
    """End times of ranks and exchanges."""

    ranks_cr: Seconds
    wires_cwe: Seconds
    """Time at which a wire had carried an exchange; NaN where there was nothing to carry."""
    work_c: Seconds
    """Core seconds of all ranks together."""

    @property
    def makespan_c(self) -> Seconds:
        """Time at which the last rank ended."""
        spans: Seconds = self.ranks_cr.max(axis=1)
        return spans


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """A kind of link, in one direction."""

    bytes_per_s: float
    latency_s: float = 0.0
    shared: bool = False
    """True if all pairs share one wire: inside, per server; otherwise, for the whole group.
    If not, each pair of ranks (inside) or of servers has its own in each direction."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.latency_s < 0:
            raise ConfigError(
                f"a link of {self.bytes_per_s} bytes/s and {self.latency_s} s of latency; allowed "
                "are more than 0 bytes/s and 0 s or more"
            )


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Bandwidth between all pairs of ranks."""

    wire_sr: Numbers
    """Wire of each pair; -1 from a rank to itself."""
    seconds_per_byte_sr: Seconds
    latency_w: Seconds

    @classmethod
    def of_servers(
        cls,
        servers: Sequence[tuple[int, int]],
        *,
        inside: LinkSpeed,
        between: LinkSpeed,
        racks: LinkSpeed | None = None,
    ) -> Wiring:
        """Connect ranks by links inside servers, between servers of a rack, and between racks.

        Args:
            servers: rack and server of each rank.
            racks: link between servers of two racks; None: as between servers of one.
        """
        ranks = range(len(servers))
        numbers: dict[tuple[Hashable, ...], int] = {}
        ends: tuple[Hashable, ...]
        latencies: list[float] = []
        wire_sr = np.full((len(ranks), len(ranks)), -1)
        cost_sr = np.zeros((len(ranks), len(ranks)))
        for s in ranks:
            for r in ranks:
                if s == r:
                    continue
                kind, link = "inside", inside
                if servers[s] != servers[r]:
                    kind, link = "between", between
                    if servers[s][0] != servers[r][0] and racks is not None:
                        kind, link = "racks", racks
                ends = (s, r) if kind == "inside" else (servers[s], servers[r])
                if link.shared:
                    ends = (servers[s],) if kind == "inside" else ()
                key = kind, *ends
                if key not in numbers:
                    numbers[key] = len(numbers)
                    latencies.append(link.latency_s)
                wire_sr[s, r] = numbers[key]
                cost_sr[s, r] = 1.0 / link.bytes_per_s
        return cls(
            wire_sr=wire_sr,
            seconds_per_byte_sr=cost_sr,
            latency_w=np.array(latencies or [0.0], float),  # a single rank has an unused wire
        )

    @property
    def wires(self) -> int:
        """Number of wires."""
        return len(self.latency_w)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.wire_sr)

    def seconds(self, bytes_csr: Seconds) -> Seconds:
        """Return (c, w) seconds of each wire for what an exchange sends over it."""
        seconds_cw = np.zeros((len(bytes_csr), self.wires))
        # Summing pair by pair makes results independent of the number of configurations.
        for s, r in zip(*np.nonzero(self.wire_sr >= 0), strict=True):
            seconds_cw[:, self.wire_sr[s, r]] += bytes_csr[:, s, r] * self.seconds_per_byte_sr[s, r]
        return seconds_cw

    def carried(self, seconds_per_byte: float) -> Wiring:
        """Return the wiring if a thread at each end needs at least `seconds_per_byte` for a
        byte."""
        return replace(
            self, seconds_per_byte_sr=np.maximum(self.seconds_per_byte_sr, seconds_per_byte)
        )

    def loads(self, seconds_per_byte: float) -> Seconds:
        """Return (w, r) cores that each wire takes at its ends while it carries something.

        Args:
            seconds_per_byte: time of a thread at each end for a byte. A wire of several pairs
                takes the mean.
        """
        loads_wr, pairs_w = np.zeros((self.wires, self.ranks)), np.zeros(self.wires)
        for s, r in zip(*np.nonzero(self.wire_sr >= 0), strict=True):
            wire = self.wire_sr[s, r]
            pairs_w[wire] += 1
            loads_wr[wire, [s, r]] += seconds_per_byte / self.seconds_per_byte_sr[s, r]
        mean: Seconds = loads_wr / np.maximum(pairs_w, 1)[:, None]
        return mean

    def members(self, pairs_sr: Mask) -> tuple[Mask, Mask]:
        """Return (w, s) and (w, r) masks of senders and receivers over each wire, for pairs that
        exchange."""
        senders_ws = np.zeros((self.wires, self.ranks), np.bool_)
        receivers_wr = np.zeros((self.wires, self.ranks), np.bool_)
        for s, r in zip(*np.nonzero(pairs_sr & (self.wire_sr >= 0)), strict=True):
            senders_ws[self.wire_sr[s, r], s] = True
            receivers_wr[self.wire_sr[s, r], r] = True
        return senders_ws, receivers_wr
