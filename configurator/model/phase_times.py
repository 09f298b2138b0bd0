"""How long a rank takes for each phase of a layer, as linear functions of what it is about."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Amounts = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LinearTime:
    """Seconds of so much of something; nothing takes no time.

    Raises:
        ValueError: negative seconds.
    """

    fixed: float = 0.0
    each: float = 0.0

    def __post_init__(self) -> None:
        if self.fixed < 0 or self.each < 0:
            raise ValueError(f"no phase takes less than nothing: {self}")

    def seconds(self, amounts: Amounts) -> Amounts:
        """Of each of the amounts."""
        taken: Amounts = np.where(amounts > 0, self.fixed + self.each * amounts, 0.0)
        return taken


@dataclass(frozen=True, kw_only=True)
class AttentionTimes:
    """Seconds of attention; rows and pairs are counted once for each query head."""

    call: float = 0.0
    row: float = 0.0
    """Of reading a query and writing its output."""
    pair: float = 0.0
    """Of a query and a key that it sees."""

    def __post_init__(self) -> None:
        if min(self.call, self.row, self.pair) < 0:
            raise ValueError(f"no attention takes less than nothing: {self}")

    def seconds(self, calls: Amounts, rows: Amounts, pairs: Amounts) -> Amounts:
        """Of some calls with so many rows and pairs in all."""
        taken: Amounts = self.call * calls + self.row * rows + self.pair * pairs
        return taken


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """Seconds of its core that an exchange takes from a rank, wherever its messages are meanwhile:
    on processors nobody else moves them. Nothing where a device has engines for it."""

    call: float = 0.0
    """Of beginning it and waiting for it."""
    message: float = 0.0
    """Of each that is sent or received."""
    byte: float = 0.0
    """Of these."""
    beside: float = 0.0
    """More of each byte, of threads beside the one that computes, while it is on its way."""
    overlapped: float = 0.0
    """More of each byte in SP-NTP that is pipelined: what comes in parts lies in buffers of its
    own, and is merged part by part."""

    def __post_init__(self) -> None:
        if min(self.call, self.message, self.byte, self.beside, self.overlapped) < 0:
            raise ValueError(f"no exchange takes less than nothing: {self}")

    def seconds(self, messages: Amounts, size: Amounts) -> Amounts:
        """Of so many messages and bytes, without the call and what threads beside take."""
        taken: Amounts = self.message * messages + self.byte * size
        return taken


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """What a prompt takes of each rank besides its layers' phases and exchanges."""

    fixed: float = 0.0
    """Seconds before and after the layers."""
    dropping: float = 0.0
    """Seconds more of each layer that drops: finding out who gets what."""
    crowding: float = 1.0
    """What passes of cores' time for each second that is used of it, where more want to compute
    than there are cores: they wake each other, and wait for each other's slices."""

    def __post_init__(self) -> None:
        if min(self.fixed, self.dropping) < 0 or self.crowding < 1:
            raise ValueError(f"no step takes less than nothing: {self}")


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Phases of one layer on one rank, the paper's G; what is not measured takes no time."""

    qkv: LinearTime
    """Tokens, all heads of the rank."""
    attention: AttentionTimes
    linear: LinearTime
    """Tokens, all heads of the rank."""
    rest: LinearTime
    """Tokens: what of a layer is not attention. The paper's R is this, of all layers."""
    select: LinearTime = LinearTime()
    """Tokens, once for each KV head."""
    importance: LinearTime = LinearTime()
    """Pairs of a query of the window and a key, once for each query head."""
    merge: LinearTime = LinearTime()
    """Rows, once for each query head."""
    copy: LinearTime = LinearTime()
    """Bytes that are gathered for an exchange."""
    exchange: ExchangeTimes = ExchangeTimes()
    step: StepTimes = StepTimes()
