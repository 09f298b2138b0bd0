"""A step's transfer is reported once, when the last of its KV was received or has failed."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from csps.actors.kv_cache.slot_allocator import SlotAllocator
from csps.actors.kv_transfer.transfer_tracker import TransferTracker
from csps.protocols.core.placement import Span


@given(
    ends=st.lists(st.sampled_from(("received", "given up", "failed"))),
    finished_before=st.integers(0, 10),
    unposted=st.booleans(),
)
def test_the_end_is_reported_once_with_the_first_failure(
    ends: Sequence[str], finished_before: int, unposted: bool
) -> None:
    slots, told, steps = SlotAllocator(4), list[Exception | None](), list[None]()
    slots.allocate(1, [Span(start=0, stop=4)])
    tracker = TransferTracker(slots, told.append, lambda: steps.append(None))
    failures = [RuntimeError(str(number)) for number in range(len(ends) + 1)]
    tracker.pin(1, Span(start=0, stop=2))
    tracker.pin(1, Span(start=0, stop=2))
    tracker.pin(1, Span(start=1, stop=4))
    slots.free_sequence(1)
    for _ in ends:
        tracker.posted()
    if unposted:
        tracker.fail(failures[-1])
    for number, end in enumerate(ends):
        if number == finished_before:
            tracker.finish()
        assert not told
        assert slots.used == 4
        if end == "received":
            tracker.received()
        else:
            tracker.given_up(failures[number] if end == "failed" else None)
    if finished_before >= len(ends):
        assert not told
        tracker.finish()
    failed = [failures[-1]] if unposted else []
    failed += [failures[number] for number, end in enumerate(ends) if end == "failed"]
    assert told == [failed[0] if failed else None]
    assert tracker.failed == bool(failed)
    assert len(steps) == ends.count("received")
    assert slots.used == 0
    slots.check_integrity()
