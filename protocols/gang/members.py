"""Members of a gang, and the fence that lets one router at a time command a rank.

Routers have generations, each larger than all before it. A rank obeys the newest router that has
attached. A newer router waits while the present one is alive, so that a router which is replaced
can finish its streams. A router that has disconnected, or was silent for `LIVENESS_TIMEOUT_S`, is
superseded. The fence has no timer: a silent router keeps ranks that no other router asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from csps.protocols.core.errors import RanksHeld, Superseded

GangRole = Literal["prefill", "decode", "elastic"]
"""Role of a gang: compute prompts, decode, or both."""


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """Address of one rank's RPC server."""

    rank: int
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class GangMembers:
    """A complete gang: every rank 0 .. world_size - 1 has registered."""

    gang_id: str
    ranks: tuple[RankAddress, ...]
    """Addresses in rank order."""
    incarnation: int = 0
    """Number larger than that of every gang which this one replaces; 0 where gangs are not
    counted."""

    def __post_init__(self) -> None:
        if [address.rank for address in self.ranks] != list(range(len(self.ranks))):
            found = [address.rank for address in self.ranks]
            raise ValueError(f"gang {self.gang_id} is not complete, or not in rank order: {found}")
        if not self.ranks:
            raise ValueError(f"gang {self.gang_id} has no ranks")


LIVENESS_TIMEOUT_S = 3.0
"""Silence of the present router after which a newer one may take over."""
KEEP_ALIVE_S = 1.0
"""Time between two `keep_alive` notifications of the present router, each with a ping."""
LATE_PINGS = 2
"""Unanswered pings that a rank may have and still count as answering; with more of them, requests
may wait in vain for it."""
SILENT_PINGS = 4
"""Unanswered pings after which the router gives a gang up: four to five seconds of silence.

A rank answers on a thread that only queues work, while the engine's thread computes without the
interpreter's lock, so an answer takes milliseconds. What may delay it is a long message, which is
decoded in less than half a second, or a machine that is busy with something else. Half of the 15 s
in which a frozen rank is to be replaced are needed to start its gang again.
"""


class Fence:
    """One rank's record of the router that commands it. Times are `time.monotonic()`."""

    def __init__(self) -> None:
        self.generation = 0
        """Generation of the newest router that has attached; 0 before the first."""
        self._last_heartbeat: float | None = None
        """Time of the router's last message; None while no router is attached."""

    def lapsed(self, now: float) -> bool:
        """Return True if a router is attached and was silent for too long."""
        return self._last_heartbeat is not None and now - self._last_heartbeat > LIVENESS_TIMEOUT_S

    def check(self, generation: int, now: float) -> None:
        """Check that a router of this generation may attach now. The present router may do so
        again.

        Raises:
            Superseded: a newer router has attached before.
            RanksHeld: an older router is attached and alive.
        """
        if generation < self.generation:
            raise Superseded(
                f"router generation {generation} is older than {self.generation}, which has "
                "attached to this rank"
            )
        alive = self._last_heartbeat is not None and not self.lapsed(now)
        if alive and generation > self.generation:
            raise RanksHeld(
                f"router generation {self.generation} still commands this rank; generation "
                f"{generation} has to wait"
            )

    def take(self, generation: int, now: float) -> None:
        """Attach a router.

        Raises:
            Superseded, RanksHeld: as in `check`.
        """
        self.check(generation, now)
        self.generation, self._last_heartbeat = generation, now

    def heartbeat(self, now: float) -> None:
        """Record that the attached router is alive."""
        self._last_heartbeat = now

    def release(self) -> None:
        """Record that the attached router has disconnected."""
        self._last_heartbeat = None
