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


class Transfer(NamedTuple):
    """What one sender sends of one chunk of a request."""

    request: int
    chunk: int
    sender: int


@dataclass(eq=False, slots=True)
class _Held:
    """What a request has asked for and got."""

    waiting: deque[Transfer] = field(default_factory=deque)
    sending: dict[Transfer, None] = field(default_factory=dict)
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
        self._requests: dict[int, _Held] = {}
        """In the order of their first handshakes."""

    def handshake(self, transfer: Transfer) -> list[Transfer]:
        """A sender wants to send. Returns those that may begin now."""
        held = self._requests.setdefault(transfer.request, _Held())
        assert transfer not in held.sending, f"{transfer} is under way"
        assert transfer not in held.waiting, f"{transfer} waits already"
        held.waiting.append(transfer)
        return self._grant()

    def landed(self, transfer: Transfer) -> list[Transfer]:
        """A transfer is over, or will not be: nothing of it is wanted any more. If it was granted a
        backend, its request keeps that. Returns those that may begin now."""
        held = self._requests.get(transfer.request)
        if held is None:
            return []  # it was released meanwhile
        if transfer in held.waiting:
            held.waiting.remove(transfer)
        elif transfer in held.sending:
            del held.sending[transfer]
            held.idle += 1
        return self._grant()

    def release(self, request: int) -> list[Transfer]:
        """All chunks of a request have landed, or nobody wants it any more. Returns those of others
        that may begin now."""
        held = self._requests.pop(request, None)
        if held is not None:
            self.free += held.backends
        return self._grant()

    def waiting_of(self, request: int) -> list[Transfer]:
        """Transfers of a request without a backend."""
        held = self._requests.get(request)
        return [] if held is None else list(held.waiting)

    def _grant(self) -> list[Transfer]:
        """Give a request's idle backends to its own transfers, and free ones to the request that
        shook hands first."""
        granted = []
        for held in self._requests.values():
            while held.waiting and (held.idle or self.free):
                if held.idle:
                    held.idle -= 1
                else:
                    self.free -= 1
                transfer = held.waiting.popleft()
                held.sending[transfer] = None
                granted.append(transfer)
        return granted

    def check_integrity(self) -> None:
        """Assert that no backend was lost or given twice, and that none is free in vain."""
        held = sum(it.backends for it in self._requests.values())
        assert self.free >= 0, "more backends given than there are"
        assert held + self.free == self.total, "a backend was lost"
        for it in self._requests.values():
            assert not (it.waiting and (it.idle or self.free)), "a backend is free in vain"
