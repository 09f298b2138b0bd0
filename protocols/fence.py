"""Which router commands a rank: one at a time, and never an older one again.

Routers have generations, each larger than all that were handed out before it. A rank obeys the
newest that has attached. A newer one waits while the holder is alive, so that a router which is
replaced can let its streams end; a holder that is gone, or silent for `LEASE_S`, is superseded.
No timer belongs to this: a silent holder keeps what nobody else asks for.
"""

from __future__ import annotations

from csps.protocols.errors import RanksHeld, Superseded

LEASE_S = 3.0
"""Silence of a holder after which a newer router may take over."""
KEEP_ALIVE_S = 1.0
"""Between two `keep_alive` notifications of a holder."""


class Fence:
    """One rank's side. Times are `time.monotonic()`."""

    def __init__(self) -> None:
        self.generation = 0
        """Of the newest router that has attached; 0 before the first."""
        self._heard: float | None = None
        """When the holder was heard last; None while there is no holder."""

    def lapsed(self, now: float) -> bool:
        """Whether there is a holder, and it was silent for too long."""
        return self._heard is not None and now - self._heard > LEASE_S

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
        held = self._heard is not None and not self.lapsed(now)
        if held and generation > self.generation:
            raise RanksHeld(f"the router of generation {self.generation} holds this rank")

    def take(self, generation: int, now: float) -> None:
        """Make a router the holder; raises as `check` does."""
        self.check(generation, now)
        self.generation, self._heard = generation, now

    def heard(self, now: float) -> None:
        """The holder is alive."""
        self._heard = now

    def release(self) -> None:
        """The holder has hung up."""
        self._heard = None
