"""Bytes between the servers and inside them, by the kernel's own counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from testbed import iproute


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes sent, with TCP/IP headers and acknowledgements.

    A virtual device counts the packets that TCP hands it, of up to 64 KiB, so these figures contain
    fewer headers than on a real wire.
    """

    between_bytes: int
    """Bytes sent by either server to the other."""
    inside_bytes: int
    """Bytes sent over the servers' loopback devices."""

    @classmethod
    def of(cls, namespaces: Sequence[str]) -> Traffic:
        """Return the summed counters of these servers."""
        return cls(between_bytes=_sent(namespaces, "eth0"), inside_bytes=_sent(namespaces, "lo"))

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(
            between_bytes=self.between_bytes - earlier.between_bytes,
            inside_bytes=self.inside_bytes - earlier.inside_bytes,
        )


def _sent(namespaces: Sequence[str], device: str) -> int:
    return sum(iproute.link_statistics(n, device)["tx"]["bytes"] for n in namespaces)
