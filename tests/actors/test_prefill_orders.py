"""What a leader tells its group is what the group hears."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from csps.actors.prefill_orders import MAX_URGENT, PrefillOrders
from csps.protocols.messages import PrefillJob, PrefillPiece


@given(
    pieces=st.dictionaries(st.integers(0, 2**62), st.booleans(), min_size=1, max_size=200),
    urgent=st.lists(st.integers(0, 2**62), max_size=MAX_URGENT),
)
def test_orders_survive_the_wire(pieces: dict[int, bool], urgent: list[int]) -> None:
    job = PrefillJob(
        job_id=1,
        group=(0,),
        bounds=(0, len(pieces)),
        pieces=tuple(PrefillPiece(rid=rid, start=0, length=1) for rid in pieces),
    )
    withdrawn = frozenset(rid for rid, unwanted in pieces.items() if unwanted)
    orders = PrefillOrders(withdrawn=withdrawn, urgent=tuple(urgent))
    words = orders.pack(job)
    room = PrefillOrders.room(job)
    assert (words.shape, words.dtype) == (room.shape, room.dtype)
    assert PrefillOrders.unpack(words, job) == orders
