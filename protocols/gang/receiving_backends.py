"""Who may send KV to a decode instance, where what receives it is short (Tetris §4.2).

A *backend* is whatever an instance needs to receive from one sender: buffers, a connection. A
sender shakes hands before it sends, and sends when it is granted a backend. If there are not
enough, requests are served in the order of their first handshakes, and a request keeps what it was
granted until all its chunks have landed: otherwise requests that lack their last chunk could hold
an instance full of half-landed KV, each waiting for a backend that the others never give back. One
that has a single backend can always finish, one sender after the other; so with at least one
backend nobody starves, whatever the order in which senders come, as long as no step waits for a
send.

Pure: the receiving ranks and the simulator share it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class ChunkTransfer(NamedTuple):
    """What one sender sends of one chunk of a request."""

    request: int
    chunk: int
    sender: int


@dataclass(eq=False, slots=True)
class _RequestBackends:
    """What a request has asked for and got."""

    waiting: deque[ChunkTransfer] = field(default_factory=deque)
    sending: dict[ChunkTransfer, None] = field(default_factory=dict)
    idle: int = 0
    """Backends that wait for the request's next chunks."""

    @property
    def backends(self) -> int:
        return len(self.sending) + self.idle


class ReceivingBackends:
    """The backends of an instance and the requests that want them.

    Args:
        backends: how many there are, at least one.
    """

    def __init__(self, backends: int) -> None:
        assert backends >= 1, "nobody could ever send"
        self.total = self.free = backends
        self._requests: dict[int, _RequestBackends] = {}
        """In the order of their first handshakes."""

    def handshake(self, transfer: ChunkTransfer) -> list[ChunkTransfer]:
        """A sender wants to send. Returns those that may begin now."""
        backends_of = self._requests.setdefault(transfer.request, _RequestBackends())
        assert transfer not in backends_of.sending, f"{transfer} is under way"
        assert transfer not in backends_of.waiting, f"{transfer} waits already"
        backends_of.waiting.append(transfer)
        return self._grant()

    def received(self, transfer: ChunkTransfer) -> list[ChunkTransfer]:
        """A transfer is over, or will not be: nothing of it is wanted any more. If it was granted a
        backend, its request keeps that. Returns those that may begin now."""
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
        """All chunks of a request have landed, or nobody wants it any more. Returns those of others
        that may begin now."""
        backends_of = self._requests.pop(request, None)
        if backends_of is not None:
            self.free += backends_of.backends
        return self._grant()

    def waiting_of(self, request: int) -> list[ChunkTransfer]:
        """Transfers of a request without a backend."""
        backends_of = self._requests.get(request)
        return [] if backends_of is None else list(backends_of.waiting)

    def _grant(self) -> list[ChunkTransfer]:
        """Give a request's idle backends to its own transfers, and free ones to the request that
        shook hands first."""
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
        """Assert that no backend was lost or given twice, and that none is free in vain."""
        backends_of = sum(request.backends for request in self._requests.values())
        assert self.free >= 0, "more backends given than there are"
        assert backends_of + self.free == self.total, "a backend was lost"
        for request in self._requests.values():
            assert not (request.waiting and (request.idle or self.free)), (
                "a backend is free in vain"
            )
