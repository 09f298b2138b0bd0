"""What the ranks of a group do in one layer, as a program that `simulate` executes.

A rank computes, begins exchanges and waits for them in a fixed order. What it does beside that
order is its *filler*: level 1 of sparse attention, which needs nobody and is computed wherever the
rank would wait.

An *exchange* is what all members begin together, such as one micro-partition of an all-to-all. What
of it goes over one wire leaves as a whole, as soon as those who send or receive it there have begun
it and the wire has carried the exchanges of lower number. A *wire* is a link in one direction, of a
pair of ranks or shared by several pairs.

Shape suffixes: c configurations, r ranks, p places of a program, k columns of computing, f pieces
of filler, e exchanges, w wires, d sets of cores.

Links between the ranks of a group: the paper's B, and which pairs share a wire.

Shape suffixes: s senders, r receivers, both ranks; w wires; c configurations.
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
    """What stands at a place of a program, and what its argument is."""

    COMPUTE = 0
    """A column of `Durations.compute_crk`."""
    POST = 1
    """An exchange is begun."""
    WAIT = 2
    """Until an exchange has arrived; filler meanwhile."""
    STAND = 3
    """Until an exchange has arrived and what this rank sends of it has left; nothing meanwhile."""
    FILL = 4
    """All filler that is left; no argument."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Alike for all configurations: what one of them lacks takes no time there."""

    ops_rp: Numbers
    arguments_rp: Numbers
    senders_ewr: Mask
    receivers_ewr: Mask
    after_e: Numbers
    """The exchange that must have arrived at a sender before it sends this one, beside its having
    begun it: what is passed on. -1 is none."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Of a program's parts; what takes no time is skipped."""

    compute_crk: Seconds
    """On a core of one's own."""
    filler_crf: Seconds
    wires_cwe: Seconds
    """On the wire, without its latency."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a program runs on: a stream of computing per rank, wires, and cores."""

    latency_w: Seconds
    """After what travels has left the wire, which is free by then."""
    cores_of_r: Numbers
    """The set of cores that a rank computes on."""
    cores_d: Seconds
    """How many there are; ranks that compute share them equally, none has more than one."""
    loads_wr: Seconds
    """Cores that a wire takes of each rank's set while it carries something."""
    crowding: float = 1.0
    """What passes of a set of cores for each second that is used, where more is wanted of it than
    there is; at least 1."""


@dataclass(frozen=True, kw_only=True)
class PipelineOutcome:
    """When what ended."""

    ranks_cr: Seconds
    wires_cwe: Seconds
    """When a wire had carried an exchange; NaN where there was nothing to carry."""
    work_c: Seconds
    """What all ranks together have computed."""

    @property
    def makespan_c(self) -> Seconds:
        """When the last rank was through."""
        spans: Seconds = self.ranks_cr.max(axis=1)
        return spans


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """A kind of link, in one direction."""

    bytes_per_s: float
    latency_s: float = 0.0
    shared: bool = False
    """One wire for all: inside, of a server; between, of the whole group. Otherwise each pair of
    ranks (inside) or of servers (between) has its own in each direction."""

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0 or self.latency_s < 0:
            raise ConfigError(
                f"a link of {self.bytes_per_s} bytes/s and {self.latency_s} s of latency; allowed "
                "are more than 0 bytes/s and 0 s or more"
            )


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Available bandwidth between all pairs of ranks."""

    wire_sr: Numbers
    """The wire of each pair; -1 from a rank to itself."""
    seconds_per_byte_sr: Seconds
    latency_w: Seconds

    @classmethod
    def of_servers(
        cls, servers: Sequence[Hashable], *, inside: LinkSpeed, between: LinkSpeed
    ) -> Wiring:
        """Of two kinds of links.

        Args:
            servers: of each rank; equal ones are the same server.
        """
        ranks = range(len(servers))
        numbers: dict[tuple[Hashable, ...], int] = {}
        latencies: list[float] = []
        wire_sr = np.full((len(ranks), len(ranks)), -1)
        cost_sr = np.zeros((len(ranks), len(ranks)))
        for s in ranks:
            for r in ranks:
                if s == r:
                    continue
                near = servers[s] == servers[r]
                link = inside if near else between
                key = _key(link, near, servers[s], servers[r], s, r)
                if key not in numbers:
                    numbers[key] = len(numbers)
                    latencies.append(link.latency_s)
                wire_sr[s, r] = numbers[key]
                cost_sr[s, r] = 1.0 / link.bytes_per_s
        return cls(
            wire_sr=wire_sr,
            seconds_per_byte_sr=cost_sr,
            latency_w=np.array(latencies or [0.0], float),  # one that nobody uses, for one rank
        )

    @property
    def wires(self) -> int:
        """How many there are."""
        return len(self.latency_w)

    @property
    def ranks(self) -> int:
        """How many they connect."""
        return len(self.wire_sr)

    def seconds(self, bytes_csr: Seconds) -> Seconds:
        """(c, w) that each wire takes for what an exchange sends over it."""
        seconds_cw = np.zeros((len(bytes_csr), self.wires))
        # Pair by pair, so that no sum depends on how many configurations there are.
        for s, r in zip(*np.nonzero(self.wire_sr >= 0), strict=True):
            seconds_cw[:, self.wire_sr[s, r]] += bytes_csr[:, s, r] * self.seconds_per_byte_sr[s, r]
        return seconds_cw

    def carried(self, seconds_per_byte: float) -> Wiring:
        """The same, if a thread at each end is so long busy with a byte, which may be longer than
        the wire is."""
        return replace(
            self, seconds_per_byte_sr=np.maximum(self.seconds_per_byte_sr, seconds_per_byte)
        )

    def loads(self, seconds_per_byte: float) -> Seconds:
        """(w, r) share of a core that each wire takes of its ends while it carries something, if
        a thread at each is so long busy with a byte; of several pairs the mean."""
        loads_wr, pairs_w = np.zeros((self.wires, self.ranks)), np.zeros(self.wires)
        for s, r in zip(*np.nonzero(self.wire_sr >= 0), strict=True):
            wire = self.wire_sr[s, r]
            pairs_w[wire] += 1
            loads_wr[wire, [s, r]] += seconds_per_byte / self.seconds_per_byte_sr[s, r]
        mean: Seconds = loads_wr / np.maximum(pairs_w, 1)[:, None]
        return mean

    def members(self, pairs_sr: Mask) -> tuple[Mask, Mask]:
        """(w, s) and (w, r): who sends and who receives over each wire, of pairs that exchange."""
        senders_ws = np.zeros((self.wires, self.ranks), np.bool_)
        receivers_wr = np.zeros((self.wires, self.ranks), np.bool_)
        for s, r in zip(*np.nonzero(pairs_sr & (self.wire_sr >= 0)), strict=True):
            senders_ws[self.wire_sr[s, r], s] = True
            receivers_wr[self.wire_sr[s, r], r] = True
        return senders_ws, receivers_wr


def _key(
    link: LinkSpeed, near: bool, sender: Hashable, receiver: Hashable, s: int, r: int
) -> tuple[Hashable, ...]:
    """What says of two pairs whether they share a wire."""
    if near:
        return ("inside", sender) if link.shared else ("inside", s, r)
    return ("between",) if link.shared else ("between", sender, receiver)
