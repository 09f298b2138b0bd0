"""The link between the two servers: its rate and delay."""

from __future__ import annotations

import re
from dataclasses import dataclass

_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-z]+)")

UNLIMITED = "unlimited"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of the link; both directions are alike and independent."""

    rate_bits: float | None = None
    """Bits per second, headers included. None: as fast as the machine copies."""
    delay_s: float = 0.0
    """Delay in one direction."""

    @classmethod
    def parse(cls, rate: str = UNLIMITED, delay: str = "0ms") -> Link:
        """Parse the units of `tc`: rates in kbit, mbit, gbit or "unlimited", delays in us, ms, s.

        Raises:
            ValueError: the text is no such quantity, or not a positive rate.
        """
        bits = None if rate == UNLIMITED else _quantity(rate, _RATE_UNITS)
        if bits == 0:
            raise ValueError(f"a link of {rate} carries nothing; say {UNLIMITED!r} for no limit")
        return cls(rate_bits=bits, delay_s=_quantity(delay, _TIME_UNITS))

    @property
    def bytes_per_s(self) -> float | None:
        """Return the rate in bytes per second."""
        return None if self.rate_bits is None else self.rate_bits / 8


def _quantity(text: str, units: dict[str, float]) -> float:
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or match[2] not in units:
        raise ValueError(f"{text!r} is not a number with one of the units {', '.join(units)}")
    return float(match[1]) * units[match[2]]
