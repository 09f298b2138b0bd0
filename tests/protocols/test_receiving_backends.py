"""Backends over orders of arrival: all finish, first come first served, nothing is given back too
early, and cancelling gives everything back (Tetris §4.2)."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.gang.receiving_backends import ChunkTransfer, ReceivingBackends

WORLDS = st.fixed_dictionaries(
    {
        "backends": st.integers(1, 4),
        "requests": st.lists(
            st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=6
        ),
    }
)
"""(chunks, senders of each) of every request."""


class World:
    """A receiver, and senders that send their chunks in order."""

    def __init__(self, backends: int, requests: list[tuple[int, int]]) -> None:
        self.queue = ReceivingBackends(backends)
        self.to_ask = [
            [ChunkTransfer(number, chunk, sender) for chunk in range(chunks)]
            for number, (chunks, senders) in enumerate(requests)
            for sender in range(senders)
        ]
        self.left = {n: chunks * senders for n, (chunks, senders) in enumerate(requests)}
        self.first_asked: list[int] = []
        self.first_granted: list[int] = []
        self.sending: list[ChunkTransfer] = []

    def ask(self, choice: int) -> None:
        """Let some sender shake hands for its next chunk."""
        unfinished = [chunks for chunks in self.to_ask if chunks]
        transfer = unfinished[choice % len(unfinished)].pop(0)
        if transfer.request not in self.first_asked:
            self.first_asked.append(transfer.request)
        self.begin(self.queue.handshake(transfer))

    def receive(self, choice: int) -> None:
        """End some transfer."""
        transfer = self.sending.pop(choice % len(self.sending))
        self.left[transfer.request] -= 1
        before = self.backends_of(transfer.request)
        self.begin(self.queue.received(transfer))
        assert self.backends_of(transfer.request) >= before, "freed before the last chunk"
        if not self.left[transfer.request]:
            self.begin(self.queue.release(transfer.request))

    def backends_of(self, request: int) -> int:
        known = self.queue._requests.get(request)
        return 0 if known is None else known.backends

    def begin(self, granted: list[ChunkTransfer]) -> None:
        for transfer in granted:
            if transfer.request not in self.first_granted:
                self.first_granted.append(transfer.request)
        self.sending += granted
        assert len(self.sending) <= self.queue.total
        self.queue.check_integrity()

    @property
    def asking(self) -> bool:
        return any(self.to_ask)


@given(WORLDS, st.data())
def test_all_finish_in_the_order_of_their_first_handshakes(
    world: dict[str, object], data: st.DataObject
) -> None:
    made = World(**world)  # type: ignore[arg-type]
    numbers = st.integers(0, 99)
    while made.asking or made.sending:
        may = [act for act, able in ((made.ask, made.asking), (made.receive, made.sending)) if able]
        data.draw(st.sampled_from(may))(data.draw(numbers))
    assert not any(made.left.values())
    assert made.first_granted == made.first_asked
    assert made.queue.free == made.queue.total


@given(WORLDS, st.data())
def test_after_any_cancel_the_others_finish(world: dict[str, object], data: st.DataObject) -> None:
    made = World(**world)  # type: ignore[arg-type]
    numbers = st.integers(0, 99)
    cancelled = data.draw(st.sets(st.sampled_from(sorted(made.left))))
    for _ in range(data.draw(st.integers(0, 20))):
        if made.asking and data.draw(st.booleans()):
            made.ask(data.draw(numbers))
        elif made.sending:
            made.receive(data.draw(numbers))
    for number in cancelled:
        made.to_ask = [
            chunks for chunks in made.to_ask if not chunks or chunks[0].request != number
        ]
        made.sending = [transfer for transfer in made.sending if transfer.request != number]
        made.begin(made.queue.release(number))
        assert made.backends_of(number) == 0
    while made.asking or made.sending:
        (made.receive if made.sending else made.ask)(data.draw(numbers))
    assert all(not left for number, left in made.left.items() if number not in cancelled)
    assert made.queue.free == made.queue.total


def test_with_enough_backends_every_transfer_begins_at_once() -> None:
    """With as many backends as senders every handshake is granted at once, in any order."""
    queue = ReceivingBackends(6)
    for request, sender in product(range(2), range(3)):
        transfer = ChunkTransfer(request, 0, sender)
        assert queue.handshake(transfer) == [transfer]
        assert queue.waiting_of(request) == []


def test_a_later_chunk_of_an_older_request_goes_before_a_younger_request() -> None:
    queue = ReceivingBackends(1)
    first, later, younger = ChunkTransfer(1, 0, 0), ChunkTransfer(1, 1, 0), ChunkTransfer(2, 0, 1)
    assert queue.handshake(first) == [first]
    assert queue.handshake(younger) == []
    assert queue.received(first) == [], "held for the chunks that have not come yet"
    assert queue.handshake(later) == [later]
    assert queue.waiting_of(2) == [younger]
    queue.received(later)
    assert queue.release(1) == [younger]
