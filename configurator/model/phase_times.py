"""Times of a rank for the phases of a layer, as linear functions of the amount of work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Amounts = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LinearTime:
    """Seconds as a linear function of an amount; nothing takes no time.

    Raises:
        ValueError: a coefficient is negative.
    """

    fixed: float = 0.0
    each: float = 0.0

    def __post_init__(self) -> None:
        if self.fixed < 0 or self.each < 0:
            raise ValueError(f"seconds must not be negative: {self}")

    def seconds(self, amounts: Amounts) -> Amounts:
        """Return the seconds of each amount."""
        taken: Amounts = np.where(amounts > 0, self.fixed + self.each * amounts, 0.0)
        return taken


@dataclass(frozen=True, kw_only=True)
class AttentionTimes:
    """Seconds of attention; rows and pairs are counted once for each query head."""

    call: float = 0.0
    row: float = 0.0
    """Seconds to read a query and write its output."""
    pair: float = 0.0
    """Seconds of a query and a key that it attends to."""

    def __post_init__(self) -> None:
        if min(self.call, self.row, self.pair) < 0:
            raise ValueError(f"seconds must not be negative: {self}")

    def seconds(self, calls: Amounts, rows: Amounts, pairs: Amounts) -> Amounts:
        """Return the seconds of calls with so many rows and pairs in all."""
        taken: Amounts = self.call * calls + self.row * rows + self.pair * pairs
        return taken


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """Seconds of a rank's core that an exchange takes, besides its time on a wire.

    Processors move their own messages. The coefficients are 0 where a device has copy engines.
    """

    call: float = 0.0
    """Seconds to begin an exchange and wait for it."""
    message: float = 0.0
    """Seconds of each message that is sent or received."""
    byte: float = 0.0
    """Seconds of each byte that is sent or received."""
    beside: float = 0.0
    """Additional seconds of each byte in transfer, spent by threads beside the one that
    computes."""
    overlapped: float = 0.0
    """Additional seconds of each byte in pipelined SP-NTP, where parts arrive in buffers of
    their own and are merged one by one."""

    def __post_init__(self) -> None:
        if min(self.call, self.message, self.byte, self.beside, self.overlapped) < 0:
            raise ValueError(f"seconds must not be negative: {self}")

    def seconds(self, messages: Amounts, size: Amounts) -> Amounts:
        """Return the seconds of so many messages and bytes, without `call` and `beside`."""
        taken: Amounts = self.message * messages + self.byte * size
        return taken


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Times of a prompt on each rank besides its layers' phases and exchanges."""

    fixed: float = 0.0
    """Seconds before and after the layers."""
    dropping: float = 0.0
    """Additional seconds of each layer that drops, to compute which rank gets which tokens."""
    crowding: float = 1.0
    """Seconds of the cores for each second of use, where more threads want to compute than there
    are cores: threads wake each other, and wait for each other's time slices."""

    def __post_init__(self) -> None:
        if min(self.fixed, self.dropping) < 0 or self.crowding < 1:
            raise ValueError(f"seconds must not be negative, crowding not below 1: {self}")


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Times of the phases of one layer on one rank (the paper's G); phases not measured take no
    time."""

    qkv: LinearTime
    """Time by tokens, for all heads of the rank."""
    attention: AttentionTimes
    linear: LinearTime
    """Time by tokens, for all heads of the rank."""
    rest: LinearTime
    """Time by tokens, for everything but attention. The paper's R is this, of all layers."""
    select: LinearTime = LinearTime()
    """Time by tokens, once for each KV head."""
    importance: LinearTime = LinearTime()
    """Time by pairs of a query of the window and a key, once for each query head."""
    merge: LinearTime = LinearTime()
    """Time by rows, once for each query head."""
    copy: LinearTime = LinearTime()
    """Time by bytes that are gathered for an exchange."""
    exchange: ExchangeTimes = ExchangeTimes()
    step: StepTimes = StepTimes()
