"""Transfer slots of a decode instance, for when many senders want to send KV (Tetris §4.2).

A *backend* is whatever an instance needs to receive from one sender: buffers, a connection. A
sender shakes hands before it sends, and sends when it is granted a backend. If there are not
enough, requests are served in the order of their first handshakes, and a request keeps its backends
until all its chunks have been received. Otherwise several incomplete requests could hold all
backends, each waiting for one that the others never free. A request with a single backend can
always finish, one sender after the other. So with at least one backend no request starves, in
whatever order senders come, as long as no step waits for a send.

Pure: the receiving ranks and the simulator share it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class ChunkTransfer(NamedTuple):
    """Transfer of a chunk of a request from one sender."""

    request: int
    chunk: int
    sender: int


@dataclass(eq=False, slots=True)
class _RequestBackends:
    """Backends and transfers of a request."""

    waiting: deque[ChunkTransfer] = field(default_factory=deque)
    sending: dict[ChunkTransfer, None] = field(default_factory=dict)
    idle: int = 0
    """Backends that wait for the request's next chunks."""

    @property
    def backends(self) -> int:
        return len(self.sending) + self.idle


class ReceivingBackends:
    """Backends of an instance, and the requests that want them.

    Args:
        backends: how many there are, at least one.
    """

    def __init__(self, backends: int) -> None:
        assert backends >= 1, f"{backends} backends: no sender could ever send"
        self.total = self.free = backends
        self._requests: dict[int, _RequestBackends] = {}
        """Requests in the order of their first handshakes."""

    def handshake(self, transfer: ChunkTransfer) -> list[ChunkTransfer]:
        """Queue a transfer; return the transfers that may begin now."""
        backends_of = self._requests.setdefault(transfer.request, _RequestBackends())
        assert transfer not in backends_of.sending, f"{transfer} was granted a backend already"
        assert transfer not in backends_of.waiting, f"{transfer} waits already"
        backends_of.waiting.append(transfer)
        return self._grant()

    def received(self, transfer: ChunkTransfer) -> list[ChunkTransfer]:
        """End a transfer that is complete or cancelled; return the transfers that may begin now.

        If the transfer had a backend, its request keeps that.
        """
        backends_of = self._requests.get(transfer.request)
        if backends_of is None:
            return []  # it was released meanwhile
        if transfer in backends_of.waiting:
            backends_of.waiting.remove(transfer)
        elif transfer in backends_of.sending:
            del backends_of.sending[transfer]
            backends_of.idle += 1
        return self._grant()

    def release(self, request: int) -> list[ChunkTransfer]:
        """Free the backends of a request that is complete or cancelled.

        Returns:
            Transfers of other requests that may begin now.
        """
        backends_of = self._requests.pop(request, None)
        if backends_of is not None:
            self.free += backends_of.backends
        return self._grant()

    def waiting_of(self, request: int) -> list[ChunkTransfer]:
        """Return the transfers of a request that have no backend."""
        backends_of = self._requests.get(request)
        return [] if backends_of is None else list(backends_of.waiting)

    def _grant(self) -> list[ChunkTransfer]:
        """Grant a request's idle backends to its own transfers, and free ones to the oldest
        request."""
        granted = []
        for backends_of in self._requests.values():
            while backends_of.waiting and (backends_of.idle or self.free):
                if backends_of.idle:
                    backends_of.idle -= 1
                else:
                    self.free -= 1
                transfer = backends_of.waiting.popleft()
                backends_of.sending[transfer] = None
                granted.append(transfer)
        return granted

    def check_integrity(self) -> None:
        """Assert that no backend is lost, granted twice, or free while a request waits."""
        in_use = sum(request.backends for request in self._requests.values())
        assert self.free >= 0, f"{-self.free} more backends granted than the {self.total} there are"
        assert in_use + self.free == self.total, (
            f"{in_use} backends in use and {self.free} free, of {self.total}"
        )
        for request in self._requests.values():
            assert not (request.waiting and (request.idle or self.free)), (
                "a backend is free while a transfer is waiting"
            )
