"""Shows the decode gang that its connection to this prefill rank still carries something.

Nothing else would: between two long prompts no KV is sent, and a connection that a router or a
firewall has forgotten fails only who uses it next. A thread for each receiver, because a beat waits
behind the KV that is on its way there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.mesh import IDLE, PeerLost

BEAT_S = 1.0
"""Between two beats; `connection.SILENCE` is the longest that a receiver goes without one."""


class LinkHeartbeat:
    """Beats to every decode rank until closed, or until one cannot be reached."""

    def __init__(self, connection: KvConnection, on_lost: Callable[[str], None]) -> None:
        """Start beating.

        Args:
            on_lost: a decode rank cannot be reached; why.
        """
        self._connection, self._on_lost = connection, on_lost
        self._closed = threading.Event()
        for peer in range(connection.decode.world_size):
            threading.Thread(
                target=self._beat, args=(peer,), name=f"beat-to-{peer}", daemon=True
            ).start()

    def close(self) -> None:
        """Stop; the connection is closed by whoever opened it."""
        self._closed.set()

    def _beat(self, decode_rank: int) -> None:
        try:
            while not self._closed.wait(BEAT_S):
                self._connection.beat(decode_rank).wait(IDLE)
        except PeerLost as exc:
            if not self._closed.is_set():
                self._on_lost(f"decode rank {decode_rank}: {exc}")
