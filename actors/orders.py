"""What the leader of a decode gang tells every rank before an iteration: membership changes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from csps.actors.mesh import IDLE, PEER_DEADLINE, ControlTag, Mesh, Pending

_INLINE = 20
_WORDS = 3


class Change(IntEnum):
    """What happens to the batch."""

    JOIN = 1
    LEAVE = 2
    END_OWNER = 3
    """All requests of one owner leave, also those that have not joined; `rid` is the owner's
    digest."""
    SHUTDOWN = 4


@dataclass(frozen=True)
class Order:
    """One change; `token` is a joining request's first token."""

    change: Change
    rid: int = 0
    token: int = 0


class OrderChannel:
    """Carries orders from rank 0 to all others; most iterations need one small message."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._pending: list[Pending] = []

    def broadcast(self, orders: list[Order]) -> None:
        """Leader: send, without waiting for anyone to arrive."""
        self.flush()
        words = _packed(orders)
        messages = [words[: 1 + _INLINE * _WORDS]]
        if len(orders) > _INLINE:
            messages.append(words[1 + _INLINE * _WORDS :].clone())
        self._pending = [
            self._mesh.tell(message, rank, ControlTag.DECODE_ORDERS)
            for rank in range(1, self._mesh.world_size)
            for message in messages
        ]

    def flush(self) -> None:
        """Leader: wait until everyone has the orders."""
        for sent in self._pending:
            sent.wait()
        self._pending.clear()

    def receive(self) -> list[Order]:
        """The others: wait for the next iteration's orders."""
        head = torch.empty(1 + _INLINE * _WORDS, dtype=torch.int64)
        self._mesh.hear(head, 0, ControlTag.DECODE_ORDERS).wait(IDLE)
        count = int(head[0])
        words = head[1:]
        if count > _INLINE:
            rest = torch.empty((count - _INLINE) * _WORDS, dtype=torch.int64)
            self._mesh.hear(rest, 0, ControlTag.DECODE_ORDERS).wait(PEER_DEADLINE)
            words = torch.cat((words, rest))
        rows = words.view(-1, _WORDS)[:count].tolist()
        return [Order(Change(change), rid, token) for change, rid, token in rows]


def _packed(orders: list[Order]) -> Tensor:
    """[count, change, rid, token, ...], padded to the length of the inline message."""
    words = torch.zeros(1 + max(len(orders), _INLINE) * _WORDS, dtype=torch.int64)
    words[0] = len(orders)
    for index, order in enumerate(orders):
        at = 1 + index * _WORDS
        words[at : at + _WORDS] = torch.tensor((order.change, order.rid, order.token))
    return words
