"""The router that commands a rank: one at a time, and never an older one again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from csps.actors.name_digest import name_digest
from csps.protocols import schema
from csps.protocols.errors import ConnectionLost, ProtocolError, Superseded
from csps.protocols.fence import Fence
from csps.protocols.messages import Attach
from csps.protocols.rpc_server import Peer

CATCH_UP_S = 0.05
"""For reading what a holder has sent that seems silent: it may be this process that stood still."""


class RouterAttachment:
    """Of one rank; used on its RPC loop."""

    def __init__(self) -> None:
        self.on_end: Callable[[int], None] = lambda owner: None
        """Told the owner whose work is to be dropped: its router is gone, or another one has
        replaced it."""
        self._fence = Fence()
        self._router: Peer | None = None
        self._router_id = ""

    @property
    def attached(self) -> bool:
        """A router uses this rank."""
        return self._router is not None

    @property
    def owner(self) -> int:
        """The present router's attachment, as the log names it."""
        return name_digest(self._router_id)

    async def may_attach(self, generation: int) -> None:
        """Whether a router may attach now; raises as `Fence.check`."""
        if self._fence.lapsed(time.monotonic()):
            await asyncio.sleep(CATCH_UP_S)
        self._fence.check(generation, time.monotonic())

    async def attach(self, message: Attach, peer: Peer) -> None:
        """Obey a router from now on; raises as `Fence.check`."""
        await self.may_attach(message.generation)
        # From here on without giving the loop away: another router may be attaching as well.
        self._fence.check(message.generation, time.monotonic())
        if (former := self._router) is not peer:
            self._end()
            if former is not None:
                former.refuse(Superseded(f"router generation {message.generation} has taken over"))
            self._router, self._router_id = peer, message.router_id
        self._fence.take(message.generation, time.monotonic())

    def heard(self, peer: Peer) -> None:
        """Somebody says that it is alive."""
        if peer is self._router:
            self._fence.heard(time.monotonic())

    def gone(self, peer: Peer) -> None:
        """Somebody has hung up."""
        if peer is self._router:
            self._end()

    def _end(self) -> None:
        if self._router is None:
            return
        self._router = None
        self._fence.release()
        self.on_end(self.owner)

    def require(self, peer: Peer) -> None:
        """Two routers at once would be two sequencers.

        Raises:
            ProtocolError: it is not the one that is attached.
        """
        if peer is not self._router:
            raise ProtocolError(f"{peer.identity} is not, or no longer, attached to this rank")

    def tell(self, method: str, message: Any) -> None:
        """Notify the router; what nobody listens to is dropped, as its work was cancelled."""
        if self._router is not None and not self._router.closed.done():
            self._router.notify(method, schema.pack(message))

    def hang_up(self, why: str) -> None:
        """The router is not to wait for this rank."""
        if self._router is not None:
            self._router.end(ConnectionLost(why))
