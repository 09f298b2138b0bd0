"""A rank frees the KV of a sequence at the right time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from property_examples import examples

from csps.actors.engine.kv_lifetime import KvLifetime, KvReclaim
from csps.actors.kv_cache.slot_allocator import SlotAllocator
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

AWAY = (KvSlice(0, 0, 1),)


def step_of(
    step_id: int, *sequence_ids: int, last: bool = True, sent: bool = True, retain: bool = False
) -> PrefillStep:
    destinations = AWAY if sent else ()
    chunks = tuple(
        PrefillChunk(
            sequence_id=sequence_id,
            start=0,
            length=1,
            last=last,
            destinations=destinations,
            retain=retain,
        )
        for sequence_id in sequence_ids
    )
    return PrefillStep(step_id=step_id, group=(0,), bounds=(0, len(sequence_ids)), chunks=chunks)


def test_kv_sent_whole_is_freed_with_its_step() -> None:
    lifetime, step = KvLifetime(), step_of(1, 7, 8)
    lifetime.enter(step)
    assert lifetime.finalize(step, cancelled=False) == [7, 8]


def test_a_chunk_remains_until_the_last_one_is_sent() -> None:
    lifetime, first, second = KvLifetime(), step_of(1, 7, last=False), step_of(2, 7)
    lifetime.enter(first)
    lifetime.enter(second)
    assert lifetime.finalize(first, cancelled=False) == []
    assert lifetime.finalize(second, cancelled=False) == [7]


def test_an_earlier_chunk_may_be_sent_after_the_last() -> None:
    lifetime, first, second = KvLifetime(), step_of(1, 7, last=False), step_of(2, 7)
    lifetime.enter(first)
    lifetime.enter(second)
    assert lifetime.finalize(second, cancelled=False) == []
    assert lifetime.finalize(first, cancelled=False) == [7]


def test_a_cancelled_sequence_has_its_history_while_a_step_may_read_it() -> None:
    lifetime, first, second = KvLifetime(), step_of(1, 7, last=False), step_of(2, 7, 8)
    lifetime.enter(first)
    lifetime.enter(second)
    assert not lifetime.cancel(7)
    assert lifetime.finalize(first, cancelled=True) == []
    assert lifetime.finalize(second, cancelled=False) == [7, 8]


def test_idle_kv_is_freed_when_it_is_cancelled() -> None:
    lifetime, first = KvLifetime(), step_of(1, 7, last=False)
    lifetime.enter(first)
    lifetime.finalize(first, cancelled=False)
    assert lifetime.cancel(7)
    assert not lifetime.cancel(7)


def test_an_unknown_sequence_has_nothing_to_free() -> None:
    """The KV may belong to the decode batch, on a rank that also prefills."""
    assert not KvLifetime().cancel(7)


def test_a_step_dropped_before_its_cancellation_arrives_frees_its_kv() -> None:
    lifetime, first, second = KvLifetime(), step_of(1, 7, last=False), step_of(2, 7)
    lifetime.enter(first)
    lifetime.enter(second)
    assert lifetime.finalize(first, cancelled=True) == []
    assert lifetime.finalize(second, cancelled=False) == [7], "it was given up before"


def test_cancelling_everything_frees_what_no_step_needs() -> None:
    lifetime, kept, waiting = KvLifetime(), step_of(1, 7, sent=False), step_of(2, 8)
    lifetime.enter(kept)
    lifetime.finalize(kept, cancelled=False)
    lifetime.enter(waiting)
    assert lifetime.cancel_all() == {7}
    assert lifetime.finalize(waiting, cancelled=True) == [8]


def test_a_sequence_that_leaves_the_batch_during_a_step_is_freed_with_it() -> None:
    """The last step then reports it, once."""
    lifetime, first, second = KvLifetime(), step_of(1, 7, sent=False), step_of(2, 7, sent=False)
    lifetime.enter(first)
    lifetime.enter(second)
    assert not lifetime.leave_batch(7)
    assert lifetime.finalize(first, cancelled=False) == []
    assert lifetime.finalize(second, cancelled=True) == [7]
    assert lifetime.pop_left(7)
    assert not lifetime.pop_left(7)


def test_a_sequence_that_leaves_the_batch_after_its_last_step_is_freed_at_once() -> None:
    lifetime, step = KvLifetime(), step_of(1, 7, sent=False)
    lifetime.enter(step)
    assert lifetime.finalize(step, cancelled=False) == []
    assert lifetime.leave_batch(7)
    assert not lifetime.pop_left(7)
    assert lifetime.cancel_all() == set()


def test_a_sequence_that_is_decoded_here_is_not_over_with_its_prompt() -> None:
    """It still attends to what it shares with others."""
    lifetime, step = KvLifetime(), step_of(1, 7, sent=False)
    lifetime.retain_at_end(7)
    lifetime.enter(step)
    assert lifetime.finalize(step, cancelled=False) == []


def test_retained_kv_is_freed_when_it_is_cancelled() -> None:
    lifetime, step = KvLifetime(), step_of(1, 7, retain=True)
    lifetime.enter(step)
    assert lifetime.finalize(step, cancelled=False) == []
    lifetime.unretain(7)
    assert lifetime.cancel(7)


def test_retained_kv_of_a_dropped_step_is_freed_with_it() -> None:
    lifetime, step = KvLifetime(), step_of(1, 7, 8, retain=True)
    lifetime.enter(step)
    lifetime.unretain(7)
    assert not lifetime.cancel(7)
    assert lifetime.finalize(step, cancelled=False) == [7]
    assert lifetime.cancel_all() == {8}


def test_retained_kv_remains_after_its_sequence_leaves_the_batch() -> None:
    lifetime = KvLifetime()
    lifetime.retain_at_end(7)
    assert not lifetime.leave_batch(7)
    assert lifetime.evict(7, (Span(0, 1),))
    lifetime.discard(7)
    assert lifetime.leave_batch(7), "nothing of it is known any more"


def test_a_sequence_that_leaves_with_a_pending_step_was_cancelled() -> None:
    """The log may say so before the router does."""
    lifetime, step = KvLifetime(), step_of(1, 7)
    lifetime.retain_at_end(7)
    lifetime.enter(step)
    assert not lifetime.leave_batch(7)
    lifetime.unretain(7)
    assert not lifetime.cancel(7)
    assert lifetime.finalize(step, cancelled=True) == [7]
    assert lifetime.pop_left(7)


def test_kv_evicted_too_early_is_freed_after_the_last_step() -> None:
    lifetime, step = KvLifetime(), step_of(1, 7, retain=True)
    lifetime.enter(step)
    assert not lifetime.evict(7, (Span(0, 1),))
    assert lifetime.due_evictions(7) == ()
    assert lifetime.finalize(step, cancelled=False) == []
    assert lifetime.due_evictions(7) == (Span(0, 1),)
    assert lifetime.due_evictions(7) == ()


def test_kv_evicted_twice_too_early_is_freed_after_the_last_step() -> None:
    lifetime, step = KvLifetime(), step_of(1, 7, retain=True)
    lifetime.enter(step)
    assert not lifetime.evict(7, (Span(0, 1),))
    assert not lifetime.evict(7, (Span(2, 3),))
    lifetime.finalize(step, cancelled=False)
    assert lifetime.due_evictions(7) == (Span(0, 1), Span(2, 3))


class Lifetimes(RuleBasedStateMachine):
    """Any order of events: each sequence's KV is freed once, and never while a step has it."""

    def __init__(self) -> None:
        super().__init__()
        self.lifetime = KvLifetime()
        self.pending: list[PrefillStep] = []
        self.expected: set[int] = set()
        self.unwanted: set[int] = set()
        self.ids = iter(range(1, 10_000))

    @rule(
        sequence_ids=st.sets(st.integers(0, 3), min_size=1), last=st.booleans(), sent=st.booleans()
    )
    def enter(self, sequence_ids: set[int], last: bool, sent: bool) -> None:
        step = step_of(next(self.ids), *sequence_ids, last=last, sent=sent)
        self.lifetime.enter(step)
        self.pending.append(step)
        self.expected |= sequence_ids

    @rule(cancelled=st.booleans())
    def settle(self, cancelled: bool) -> None:
        if self.pending:
            step = self.pending.pop(0)
            sequence_ids = {chunk.sequence_id for chunk in step.chunks}
            cancelled = cancelled or sequence_ids <= self.unwanted
            if cancelled:
                self.unwanted |= sequence_ids
            self.free(self.lifetime.finalize(step, cancelled=cancelled))

    @rule(sequence_id=st.integers(0, 3))
    def cancel(self, sequence_id: int) -> None:
        if self.lifetime.cancel(sequence_id):
            self.free([sequence_id])
        elif sequence_id in self.with_step:
            self.unwanted.add(sequence_id)

    @rule()
    def cancel_all(self) -> None:
        self.free(list(self.lifetime.cancel_all()))
        self.unwanted |= self.with_step

    @property
    def with_step(self) -> set[int]:
        return {chunk.sequence_id for step in self.pending for chunk in step.chunks}

    def free(self, sequence_ids: list[int]) -> None:
        assert len(sequence_ids) == len(set(sequence_ids))
        assert set(sequence_ids) <= self.expected
        self.expected -= set(sequence_ids)
        self.unwanted -= set(sequence_ids)
        assert not set(sequence_ids) & self.with_step

    @invariant()
    def cancelled_kv_remains_for_its_steps_only(self) -> None:
        assert self.unwanted <= self.with_step

    def teardown(self) -> None:
        while self.pending:
            self.settle(cancelled=True)
        self.cancel_all()
        assert not self.expected


ORIGIN, SEQUENCE, SLOTS = 1, 2, 64
SHARED, CHUNK = Span(start=0, stop=16), 8


class Reported:
    """What a rank says of slots: the tokens that are left of each sequence."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}

    def retained(self, sequence_id: int, tokens: int) -> None:
        self.left[sequence_id] = tokens

    def freed(self, sequence_id: int) -> None:
        self.left[sequence_id] = 0


def chunk_step(
    step_id: int,
    sequence_id: int,
    span: Span,
    *,
    history: tuple[KvSlice, ...] = (),
    retain: bool,
    last: bool = True,
) -> PrefillStep:
    chunk = PrefillChunk(
        sequence_id=sequence_id,
        start=span.start,
        length=span.length,
        history=history,
        destinations=AWAY,
        retain=retain,
        last=last,
    )
    return PrefillStep(step_id=step_id, group=(0,), bounds=(0, span.length), chunks=(chunk,))


class Chunks:
    """A prompt in several chunks that may go on from another sequence's KV, on a rank that sends
    its KV to a decode gang."""

    def __init__(self, count: int, *, shares: bool, retain: bool) -> None:
        self.slots, self.reported = SlotAllocator(SLOTS), Reported()
        engine = SimpleNamespace(
            instance=0, pool=SimpleNamespace(slots=self.slots, window_slots=None)
        )
        self.kv = KvReclaim(
            cast(Any, engine),
            cast(Any, self.reported),
            reserved=lambda sequence_id: False,
            slots_freed=lambda: None,
        )
        first = SHARED.stop if shares else 0
        self.own = Span(start=first, stop=first + count * CHUNK)
        shared = (KvSlice.of(0, SHARED, ORIGIN),) if shares else ()
        if shares:
            origin = chunk_step(0, ORIGIN, SHARED, retain=True)
            self.enter(origin)
            self.kv.finalize(origin, cancelled=False)
        spans = [Span(start, start + CHUNK) for start in range(first, self.own.stop, CHUNK)]
        self.steps = [
            chunk_step(
                1 + index,
                SEQUENCE,
                span,
                history=(*shared, *(KvSlice.of(0, before) for before in spans[:index])),
                retain=retain,
                last=index + 1 == count,
            )
            for index, span in enumerate(spans)
        ]

    def enter(self, step: PrefillStep) -> None:
        """Let a step arrive and take its slots, as `PendingSteps` does."""
        self.kv.enter(step)
        (chunk,) = step.chunks
        span = Span(start=chunk.start, stop=chunk.start + chunk.length)
        self.slots.allocate(chunk.sequence_id, [span])

    def evict(self, sequence_id: int, span: Span) -> None:
        """Evict all that a sequence has computed."""
        self.kv.evict(sequence_id, (span,))


@settings(max_examples=examples(200))
@given(st.integers(1, 3), st.booleans(), st.booleans(), st.data())
def test_no_order_of_events_leaves_a_slot_taken(
    count: int, shares: bool, retain: bool, data: st.DataObject
) -> None:
    """Steps of a sequence end in any order: KV of its short last chunk may arrive first. The other
    sequence may be evicted meanwhile."""
    chunks = Chunks(count, shares=shares, retain=retain)
    to_come, pending = list(chunks.steps), list[PrefillStep]()
    cancelled, origin_left = False, shares
    while to_come or pending:
        events = ["settle"] * bool(pending)
        events += ["enter"] * bool(to_come and not cancelled)
        events += ["cancel"] * (not cancelled)
        events += ["evict origin"] * bool(origin_left and len(to_come) < count)
        if not events:
            break
        match data.draw(st.sampled_from(events)):
            case "settle":
                step = pending.pop(data.draw(st.integers(0, len(pending) - 1)))
                aborted = cancelled and data.draw(st.booleans())
                chunks.kv.finalize(step, cancelled=aborted)
            case "enter":
                pending.append(to_come.pop(0))
                chunks.enter(pending[-1])
            case "cancel":
                chunks.kv.cancel(SEQUENCE)
                cancelled = True
            case _:
                chunks.evict(ORIGIN, SHARED)
                origin_left = False
        chunks.slots.check_integrity()
    left = chunks.own.stop if retain and not cancelled else 0
    assert chunks.slots.tokens(SEQUENCE) == left, "it has other slots than those it can reuse"
    if retain:
        chunks.evict(SEQUENCE, Span(0, chunks.own.stop))
        assert chunks.reported.left[SEQUENCE] == 0
    if origin_left:
        chunks.evict(ORIGIN, SHARED)
    chunks.slots.check_integrity()
    assert chunks.slots.free == SLOTS


def test_shared_slots_survive_the_name_that_they_had_before() -> None:
    chunks = Chunks(2, shares=True, retain=True)
    for step in chunks.steps:
        chunks.enter(step)
    for step in reversed(chunks.steps):
        chunks.kv.finalize(step, cancelled=False)
    chunks.evict(ORIGIN, SHARED)
    assert chunks.slots.used == chunks.slots.tokens(SEQUENCE) == chunks.own.stop
    chunks.evict(SEQUENCE, SHARED)
    assert chunks.slots.used == chunks.own.length


@pytest.mark.parametrize("evicted", [True, False])
def test_kv_from_files_stays_until_it_is_evicted_or_all_is_cancelled(evicted: bool) -> None:
    chunks = Chunks(1, shares=False, retain=False)
    restored = 99
    chunks.kv.adopt(restored, [Span(0, 4), Span(8, 12)])
    assert chunks.slots.tokens(restored) == 8
    if evicted:
        chunks.evict(restored, Span(0, 4))
        assert chunks.slots.tokens(restored) == 4
        chunks.evict(restored, Span(8, 12))
    else:
        chunks.kv.cancel_all()
    assert chunks.slots.tokens(restored) == 0
    chunks.slots.check_integrity()


TestLifetimes = Lifetimes.TestCase
TestLifetimes.settings = settings(max_examples=examples(50))
