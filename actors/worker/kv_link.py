"""A rank's end of the KV connection between two gangs, from one `connect_kv` to the next."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from functools import partial

from csps.actors.attention.base.engine import Engine
from csps.actors.comm.rendezvous import RendezvousStore, StoreAddress
from csps.actors.engine.loop import EngineLoop
from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.kv_transfer.receiver import KvReceiver
from csps.actors.kv_transfer.sender import KvSender
from csps.actors.worker.rank_config import RankConfig
from csps.protocols.core.errors import Cancelled
from csps.protocols.gang.messages import ConnectKv, LinkBroken, Notify

_log = logging.getLogger(__name__)

ENDED_S = 5.0
"""Time for the threads of a closed connection to end. Later ones keep it for a while."""


class KvLinkEnd:
    """Sender of a rank that prefills, or receiver of a rank that decodes."""

    def __init__(
        self,
        config: RankConfig,
        join_store: Callable[[StoreAddress], RendezvousStore],
        engine: Engine,
        loop: EngineLoop,
        notify: Notify,
        on_broken: Callable[[BaseException], None],
    ) -> None:
        """Args:
        join_store: connects to the other gang's rendezvous store.
        on_broken: called when this rank can no longer send or receive through its own fault.
        """
        self._config, self._engine, self._loop = config, engine, loop
        self._join_store = join_store
        self._notify, self._on_broken = notify, on_broken
        self._epoch = ""
        self._sender: KvSender | None = None
        self._receiver: KvReceiver | None = None

    @property
    def threads(self) -> list[threading.Thread]:
        """Return the threads that wait for the network."""
        ends = (self._sender, self._receiver)
        return [thread for end in ends if end is not None for thread in end.threads]

    def begin(self, epoch: str) -> None:
        """Close the present connection and expect the one of another epoch."""
        self.leave()
        self._epoch = epoch

    def join(self, message: ConnectKv) -> KvConnection:
        """Open the connection; blocks until all ranks of both gangs have joined."""
        store = self._join_store(StoreAddress(message.store_host, message.store_port))
        try:
            return KvConnection(
                store,
                message,
                rank=self._config.rank,
                is_decode=self._config.may_decode,
                host=self._config.host,
            )
        finally:
            store.close()

    def use(self, connection: KvConnection, epoch: str) -> None:
        """Send or receive over a connection from now on.

        Raises:
            Cancelled: another epoch has begun meanwhile; the connection is closed.
        """
        if self._epoch != epoch:
            connection.close()
            raise Cancelled(f"KV connection {epoch} was replaced by {self._epoch}")

        _log.info("rank %d: KV connection %s is ready", self._config.rank, epoch)

        def lost(reason: str) -> None:
            _log.warning("rank %d: KV connection %s is lost: %s", self._config.rank, epoch, reason)
            message = LinkBroken(epoch=epoch, rank=self._config.rank, reason=reason)
            self._notify("link_broken", message)

        if not self._config.may_decode:
            self._sender = KvSender(
                connection,
                self._engine.pool,
                self._engine.spec,
                rank=self._config.rank,
                in_flight_bytes=self._config.kv_in_flight_bytes,
                checked=self._config.kv_checksum,
                on_lost=lost,
                on_broken=self._on_broken,
            )
            self._loop.outgoing_transfers.use(self._sender)
        else:
            self._receiver = KvReceiver(
                connection,
                self._engine.pool,
                rank=self._config.rank,
                in_flight_bytes=self._config.kv_in_flight_bytes,
                backends=self._config.kv_receiving_backends,
                find=self._loop.decode_batch.reservations.find,
                on_received=partial(self._notify, "received"),
                on_failed=partial(self._notify, "failed"),
                on_lost=lost,
                on_broken=self._on_broken,
            )

    def leave(self) -> None:
        """Close the connection, if there is one; what was under way is lost."""
        if self._sender is None and self._receiver is None:
            return
        self._loop.outgoing_transfers.use(None)
        self._close()
        # Errors and callbacks refer to the ends in circles, and so keep gloo's threads and sockets
        # until Python looks for circles in all of the process, which may take hours.
        gc.collect()

    def _close(self) -> None:
        ends = [end for end in (self._sender, self._receiver) if end is not None]
        self._sender = self._receiver = None
        for end in ends:
            end.close()
        for thread in (thread for end in ends for thread in end.threads):
            thread.join(ENDED_S)
