"""How long a rank takes for each phase of a layer, as linear functions of what it is about."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Amounts = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Line:
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

    def __post_init__(self) -> None:
        if min(self.call, self.message, self.byte) < 0:
            raise ValueError(f"no exchange takes less than nothing: {self}")

    def seconds(self, messages: Amounts, size: Amounts) -> Amounts:
        """Of so many messages and bytes, without the call."""
        taken: Amounts = self.message * messages + self.byte * size
        return taken


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Phases of one layer on one rank, the paper's G; what is not measured takes no time."""

    qkv: Line
    """Tokens, all heads of the rank."""
    attention: AttentionTimes
    linear: Line
    """Tokens, all heads of the rank."""
    rest: Line
    """Tokens: what of a layer is not attention. The paper's R is this, of all layers."""
    select: Line = Line()
    """Tokens, once for each KV head."""
    importance: Line = Line()
    """Pairs of a query of the window and a key, once for each query head."""
    merge: Line = Line()
    """Rows, once for each query head."""
    copy: Line = Line()
    """Bytes that are gathered for an exchange."""
    exchange: ExchangeTimes = ExchangeTimes()
