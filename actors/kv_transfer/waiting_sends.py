"""What is to go to one receiver, step by step and request by request, until its turn has come."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from csps.actors.kv_transfer.delivery import Delivery
from csps.actors.kv_transfer.sending import Sending
from csps.actors.kv_transfer.turns import Turn


@dataclass(eq=False, slots=True)
class _Sends:
    """Of a step and a request: asked for once, sent when its turn has come."""

    delivery: Delivery
    turn: Turn
    waiting: deque[Sending] = field(default_factory=deque)
    asked: bool = False
    begun: bool = False
    """The receiver has said that the turn has come."""
    unwanted: bool = False
    """The receiver has said that nobody expects it."""
    last: bool = False
    """Nothing more will be posted."""

    @property
    def over(self) -> bool:
        """The turn is, or will never be."""
        return self.last and not self.waiting

    def empty(self) -> list[Sending]:
        """Nothing of what waits is sent."""
        gone = list(self.waiting)
        self.waiting.clear()
        return gone


class WaitingSends:
    """Not thread-safe. Those whose turn it is go message by message, one after the other."""

    def __init__(self) -> None:
        self._sends: OrderedDict[tuple[Delivery, int], _Sends] = OrderedDict()
        self._numbers = count(1)

    def post(self, sending: Sending) -> bool:
        """Take it in; false if nobody wants it."""
        key = (sending.delivery, sending.rid)
        if key not in self._sends:
            self._sends[key] = _Sends(sending.delivery, Turn(sending.rid, next(self._numbers)))
        sends = self._sends[key]
        if not sends.unwanted:
            sends.waiting.append(sending)
        return not sends.unwanted

    def finish(self, delivery: Delivery) -> None:
        """Nothing more of a step will be posted."""
        for it in self._sends.values():
            if it.delivery is delivery:
                it.last = True

    def withdraw(self, rid: int) -> list[Sending]:
        """Nobody wants a request. Returns what of it is not sent."""
        return [gone for it in self._sends.values() if it.turn.rid == rid for gone in it.empty()]

    def clear(self) -> list[Sending]:
        """Nothing is sent any more. Returns what is not."""
        gone = [sending for it in self._sends.values() for sending in it.empty()]
        self._sends.clear()
        return gone

    def answer(self, turn: Turn, wanted: bool) -> list[Sending]:
        """The receiver has answered. Returns what is not sent."""
        for it in self._sends.values():
            if it.turn == turn:
                it.begun, it.unwanted = wanted, not wanted
                return [] if wanted else it.empty()
        return []

    def to_ask(self) -> Turn | None:
        """A turn for which the receiver is to be asked now, once."""
        for it in self._sends.values():
            if it.waiting and not it.asked:
                it.asked = True
                return it.turn
        return None

    def to_end(self) -> Turn | None:
        """A turn that is over, of which the receiver is to hear now, once."""
        for key, it in list(self._sends.items()):
            if it.over:
                del self._sends[key]
                if it.asked and not it.unwanted:
                    return it.turn
        return None

    @property
    def has_word(self) -> bool:
        """`to_ask` or `to_end` may have something to say."""
        return any(it.over or (it.waiting and not it.asked) for it in self._sends.values())

    @property
    def may_be_sent(self) -> bool:
        """Something has its turn, whether the pool has it yet or not."""
        return any(it.begun and it.waiting for it in self._sends.values())

    @property
    def next(self) -> Sending | None:
        """The first one that has its turn and that the pool has."""
        heads = (it.waiting[0] for it in self._sends.values() if it.begun and it.waiting)
        return next((it for it in heads if it.ready is None or it.ready.query()), None)

    def take(self, sending: Sending, rows: int) -> Sending:
        """So many tokens of `next` are sent now; what is left waits for the others."""
        key = (sending.delivery, sending.rid)
        first, rest = sending.split(rows)
        waiting = self._sends[key].waiting
        waiting.popleft()
        if rest is not None:
            waiting.appendleft(rest)
        self._sends.move_to_end(key)
        return first

    def told_to_wait(self) -> Iterator[Delivery]:
        """Those that have asked and have no turn yet."""
        return (it.delivery for it in self._sends.values() if it.asked and not it.begun)
