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
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

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
class Outcome:
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
