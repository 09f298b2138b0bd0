"""Slots of sequences: where they lie, what is refused, and what several sequences share."""

from __future__ import annotations

import pytest

from csps.actors.kv_cache.sequence_slots import SlotRows
from csps.actors.kv_cache.slot_allocator import NotHeld, OutOfSlots, SlotAllocator
from csps.protocols.core.errors import from_wire, to_wire
from csps.protocols.core.placement import Span


def span(start: int, stop: int) -> Span:
    return Span(start=start, stop=stop)


# --- layout --------------------------------------------------------------------------------


def test_prompt_and_answer_of_one_call_are_one_slice() -> None:
    slots = SlotAllocator(100)
    slots.allocate(1, [span(0, 30)])
    slots.allocate(2, [span(0, 20), span(20, 40)])
    assert slots.runs(2) == [range(30, 70)]
    assert slots.runs(2, span(0, 21)) == [range(30, 51)]


def test_request_grows_next_to_what_it_has() -> None:
    slots = SlotAllocator(100)
    slots.allocate(1, [span(0, 10)])
    slots.allocate(2, [span(0, 5)])
    slots.allocate(3, [span(0, 10)])
    slots.free_sequence(2)  # leaves the tighter run, which best fit alone would take
    slots.allocate(3, [span(10, 15)])
    assert len(slots.runs(3)) == 1


def test_best_fit_takes_the_tightest_run() -> None:
    slots = SlotAllocator(100)
    for sequence_id, length in enumerate([10, 1, 6, 1, 8, 1]):
        slots.allocate(sequence_id, [span(0, length)])
    tight = slots.runs(2)
    for sequence_id in (0, 2, 4):
        slots.free_sequence(sequence_id)
    slots.allocate(9, [span(0, 6)])
    assert slots.runs(9) == tight


def test_freed_neighbours_coalesce() -> None:
    slots = SlotAllocator(30)
    for sequence_id in range(3):
        slots.allocate(sequence_id, [span(0, 10)])
    for sequence_id in (0, 2, 1):
        assert slots.free_sequence(sequence_id) == 10
    slots.allocate(5, [span(0, 30)])
    assert slots.runs(5) == [range(30)]


def test_tokens_of_a_striped_request_are_one_slice_with_gaps_in_its_positions() -> None:
    slots = SlotAllocator(16)
    slots.allocate(1, [span(position, position + 1) for position in range(0, 24, 3)])
    assert slots.runs(1) == [range(8)]
    assert slots.runs(1, span(0, 13)) == [range(5)]
    assert slots.by_position(1, Span(3, 22, 6)).tolist() == [1, 3, 5, 7]


def test_every_fourth_token_of_a_run_belongs_into_one_place() -> None:
    slots = SlotAllocator(100)
    slots.allocate(7, [span(0, 10)])
    slots.allocate(1, [span(0, 64)])
    with slots.places(1, Span(3, 64, 4)) as places:
        assert places == [SlotRows(slots=slice(13, 74, 4), rows=slice(0, 16, 1))]
    assert places[0].tokens == 16


def test_a_request_that_is_freed_while_it_is_written_is_noticed() -> None:
    slots = SlotAllocator(64)
    slots.allocate(1, [span(0, 64)])
    with (
        pytest.raises(AssertionError, match="sequence 1 was freed while being written"),
        slots.places(1, Span(3, 64, 4)),
    ):
        slots.free_span(1, span(40, 64))


def test_span_looked_up_before_is_right_after_a_change() -> None:
    slots = SlotAllocator(16)
    slots.allocate(1, [span(0, 4)])
    wide = span(0, 6)
    assert slots.runs(1, wide) == [range(4)]
    slots.allocate(1, [span(4, 6)])
    assert slots.runs(1, wide) == [range(6)]
    slots.free_span(1, span(1, 3))
    assert slots.runs(1, wide) == [range(1), range(3, 6)]
    slots.free_sequence(1)
    assert slots.runs(1, wide) == []


def test_an_unknown_sequence_has_no_slots() -> None:
    slots = SlotAllocator(4)
    assert slots.free_sequence(7) == 0
    assert slots.free_span(7, span(0, 9)) == 0
    assert slots.tokens(7) == 0
    assert slots.runs(7) == []


# --- refusals --------------------------------------------------------------------------------


def test_allocation_is_all_or_nothing() -> None:
    slots = SlotAllocator(10)
    slots.allocate(1, [span(0, 6)])
    with pytest.raises(OutOfSlots, match="5 needed, 4 free") as caught:
        slots.allocate(2, [span(0, 3), span(5, 7)])
    assert (caught.value.needed, caught.value.free) == (5, 4)
    assert slots.tokens(2) == 0
    assert slots.free == 4
    slots.check_integrity()


def test_out_of_slots_crosses_the_wire() -> None:
    error = from_wire(to_wire(OutOfSlots(needed=5, free=4)))
    assert isinstance(error, OutOfSlots)
    assert (error.needed, error.free) == (5, 4)


@pytest.mark.parametrize(
    "spans", [[span(3, 5)], [span(0, 9)], [span(8, 9), span(4, 5)], [span(6, 8), span(7, 9)]]
)
def test_same_position_twice_is_refused(spans: list[Span]) -> None:
    slots = SlotAllocator(32)
    slots.allocate(1, [span(2, 6)])
    with pytest.raises(AssertionError, match="position"):
        slots.allocate(1, spans)
    assert slots.used == 4
    slots.check_integrity()


def test_integrity_check_names_a_shared_and_a_lost_slot() -> None:
    slots = SlotAllocator(8)
    slots.allocate(1, [span(0, 2)])
    slots._free.add(range(1, 2))
    with pytest.raises(AssertionError, match=r"slots \[1\] have other owners"):
        slots.check_integrity()
    slots._free.remove(range(3))
    with pytest.raises(AssertionError, match=r"slots \[2\] have other owners"):
        slots.check_integrity()


# --- what several begin with -----------------------------------------------------------------


def test_slots_that_are_not_there_are_not_shared() -> None:
    slots = SlotAllocator(16)
    slots.allocate(1, [span(0, 4)])
    for source, wanted in ((1, span(2, 5)), (3, span(0, 1))):
        with pytest.raises(NotHeld, match="does not have it"):
            slots.share_slots(2, source, wanted)
    slots.allocate(2, [span(3, 4)])
    with pytest.raises(NotHeld, match="has other slots for it"):
        slots.share_slots(2, 1, span(0, 4))
    assert slots.tokens(2) == 1
    slots.check_integrity()


def test_more_of_a_sequence_may_be_shared_later() -> None:
    slots = SlotAllocator(16)
    slots.allocate(1, [span(0, 8)])
    slots.share_slots(2, 1, span(0, 4))
    slots.share_slots(2, 1, span(2, 6))
    assert slots.tokens(2) == 6
    slots.check_integrity()
    slots.free_sequence(1)
    assert slots.used == 6
    slots.free_sequence(2)
    assert slots.used == 0
    slots.check_integrity()


def test_pinned_slots_are_free_when_the_last_pin_is_gone() -> None:
    slots = SlotAllocator(16)
    slots.allocate(1, [span(0, 8)])
    pins = [slots.pin(1, span(0, 4)), slots.pin(1, span(2, 6))]
    slots.free_sequence(1)
    assert slots.used == 6
    slots.check_integrity()
    slots.unpin(pins[0])
    assert slots.used == 4
    slots.unpin(pins[1])
    assert slots.used == 0
    slots.check_integrity()


def test_spans_are_pinned_together_or_not_at_all() -> None:
    slots = SlotAllocator(16)
    slots.allocate(1, [span(0, 8)])
    assert slots.pin_held(1, [span(0, 4), span(6, 10)]) is None
    assert slots.pin_held(2, [span(0, 4)]) is None
    slots.check_integrity()
    pins = slots.pin_held(1, [span(0, 4), span(6, 8)])
    assert pins is not None
    slots.free_sequence(1)
    assert slots.used == 6
    slots.check_integrity()
    for pin in pins:
        slots.unpin(pin)
    assert slots.used == 0
    slots.check_integrity()
