"""Where the ranks of a gang answer, as a registry tells whoever wants to reach them.

Which router commands a rank: one at a time, and never an older one again.

Routers have generations, each larger than all that were handed out before it. A rank obeys the
newest that has attached. A newer one waits while the holder is alive, so that a router which is
replaced can let its streams end; a holder that is gone, or silent for `LIVENESS_TIMEOUT_S`, is superseded.
No timer belongs to this: a silent holder keeps what nobody else asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from csps.protocols.core.errors import RanksHeld, Superseded

GangRole = Literal["prefill", "decode", "elastic"]
"""What a gang may do: compute prompts, draw tokens, or both."""


@dataclass(frozen=True, kw_only=True)
class RankAddress:
    """Where one rank answers RPC."""

    rank: int
    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class GangMembers:
    """A complete gang: every rank 0 .. world_size - 1 has registered."""

    gang_id: str
    ranks: tuple[RankAddress, ...]
    """In rank order."""
    incarnation: int = 0
    """Larger than that of every gang which this one replaces; 0 where nobody counts."""

    def __post_init__(self) -> None:
        if [address.rank for address in self.ranks] != list(range(len(self.ranks))):
            raise ValueError(f"gang {self.gang_id} is not complete, or not in rank order")
        if not self.ranks:
            raise ValueError(f"gang {self.gang_id} has no ranks")


LIVENESS_TIMEOUT_S = 3.0
"""Silence of a holder after which a newer router may take over."""
KEEP_ALIVE_S = 1.0
"""Between two `keep_alive` notifications of a holder."""


class Fence:
    """One rank's side. Times are `time.monotonic()`."""

    def __init__(self) -> None:
        self.generation = 0
        """Of the newest router that has attached; 0 before the first."""
        self._last_heartbeat: float | None = None
        """When the holder was heard last; None while there is no holder."""

    def lapsed(self, now: float) -> bool:
        """Whether there is a holder, and it was silent for too long."""
        return self._last_heartbeat is not None and now - self._last_heartbeat > LIVENESS_TIMEOUT_S

    def check(self, generation: int, now: float) -> None:
        """Whether a router of this generation may attach now. A holder may do so again.

        Raises:
            Superseded: a newer router has attached, some time or other.
            RanksHeld: an older router holds the rank, and is alive.
        """
        if generation < self.generation:
            raise Superseded(
                f"router generation {generation} is older than {self.generation}, which has "
                "attached to this rank"
            )
        held = self._last_heartbeat is not None and not self.lapsed(now)
        if held and generation > self.generation:
            raise RanksHeld(f"the router of generation {self.generation} holds this rank")

    def take(self, generation: int, now: float) -> None:
        """Make a router the holder; raises as `check` does."""
        self.check(generation, now)
        self.generation, self._last_heartbeat = generation, now

    def heartbeat(self, now: float) -> None:
        """The holder is alive."""
        self._last_heartbeat = now

    def release(self) -> None:
        """The holder has hung up."""
        self._last_heartbeat = None
