"""When a prefill rank lets go of a request's KV."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from property_examples import examples

from csps.actors.engine.kv_lifetime import KvLifetime
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

AWAY = (KvSlice(instance=0, span=Span(start=0, stop=1)),)


def job(
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
    book, step = KvLifetime(), job(1, 7, 8)
    book.enter(step)
    assert book.finalize(step, cancelled=False) == [7, 8]


def test_a_chunk_remains_until_the_last_one_is_sent() -> None:
    book, first, second = KvLifetime(), job(1, 7, last=False), job(2, 7)
    book.enter(first)
    book.enter(second)
    assert book.finalize(first, cancelled=False) == []
    assert book.finalize(second, cancelled=False) == [7]


def test_an_earlier_chunk_may_be_sent_after_the_last() -> None:
    book, first, second = KvLifetime(), job(1, 7, last=False), job(2, 7)
    book.enter(first)
    book.enter(second)
    assert book.finalize(second, cancelled=False) == []
    assert book.finalize(first, cancelled=False) == [7]


def test_a_cancelled_sequence_has_its_history_while_a_step_may_read_it() -> None:
    book, first, second = KvLifetime(), job(1, 7, last=False), job(2, 7, 8)
    book.enter(first)
    book.enter(second)
    assert not book.cancel(7)
    assert book.finalize(first, cancelled=True) == []
    assert book.finalize(second, cancelled=False) == [7, 8]


def test_idle_kv_is_freed_when_it_is_cancelled() -> None:
    book, first = KvLifetime(), job(1, 7, last=False)
    book.enter(first)
    book.finalize(first, cancelled=False)
    assert book.cancel(7)
    assert not book.cancel(7)


def test_an_unknown_sequence_has_nothing_to_free() -> None:
    """Its KV may be the stream's, on a rank that does both."""
    assert not KvLifetime().cancel(7)


def test_a_step_dropped_before_its_cancellation_arrives_frees_its_kv() -> None:
    book, first, second = KvLifetime(), job(1, 7, last=False), job(2, 7)
    book.enter(first)
    book.enter(second)
    assert book.finalize(first, cancelled=True) == []
    assert book.finalize(second, cancelled=False) == [7], "it was given up before"


def test_cancelling_everything_frees_what_no_step_needs() -> None:
    book, kept, waiting = KvLifetime(), job(1, 7, sent=False), job(2, 8)
    book.enter(kept)
    book.finalize(kept, cancelled=False)
    book.enter(waiting)
    assert book.cancel_all() == {7}
    assert book.finalize(waiting, cancelled=True) == [8]


def test_a_sequence_that_leaves_the_batch_during_a_step_is_freed_with_it() -> None:
    """And then it is told, once."""
    book, first, second = KvLifetime(), job(1, 7, sent=False), job(2, 7, sent=False)
    book.enter(first)
    book.enter(second)
    assert not book.leave_batch(7)
    assert book.finalize(first, cancelled=False) == []
    assert book.finalize(second, cancelled=True) == [7]
    assert book.pop_left(7)
    assert not book.pop_left(7)


def test_a_sequence_that_leaves_the_batch_after_its_last_step_is_freed_at_once() -> None:
    book, step = KvLifetime(), job(1, 7, sent=False)
    book.enter(step)
    assert book.finalize(step, cancelled=False) == []
    assert book.leave_batch(7)
    assert not book.pop_left(7)
    assert book.cancel_all() == set()


def test_retained_kv_is_freed_when_it_is_cancelled() -> None:
    book, step = KvLifetime(), job(1, 7, retain=True)
    book.enter(step)
    assert not book.is_retained(7)
    assert book.finalize(step, cancelled=False) == []
    assert book.is_retained(7)
    book.unretain(7)
    assert not book.is_retained(7)
    assert book.cancel(7)


def test_retained_kv_of_a_dropped_step_is_freed_with_it() -> None:
    book, step = KvLifetime(), job(1, 7, 8, retain=True)
    book.enter(step)
    book.unretain(7)
    assert not book.cancel(7)
    assert book.finalize(step, cancelled=False) == [7]
    assert book.is_retained(8)
    assert book.cancel_all() == {8}


def test_retained_kv_remains_after_its_sequence_leaves_the_batch() -> None:
    book = KvLifetime()
    book.retain_at_end(7)
    assert not book.leave_batch(7)
    assert book.is_retained(7)
    assert book.evict(7, (Span(0, 1),))
    book.discard(7)
    assert book.leave_batch(7), "nothing of it is known any more"


def test_a_sequence_that_leaves_with_a_pending_step_was_cancelled() -> None:
    """The log may say so before the router does."""
    book, step = KvLifetime(), job(1, 7)
    book.retain_at_end(7)
    book.enter(step)
    assert not book.leave_batch(7)
    book.unretain(7)
    assert not book.cancel(7)
    assert book.finalize(step, cancelled=True) == [7]
    assert book.pop_left(7)


def test_kv_evicted_too_early_is_freed_after_the_last_step() -> None:
    book, step = KvLifetime(), job(1, 7, retain=True)
    book.enter(step)
    assert not book.evict(7, (Span(0, 1),))
    assert book.due_evictions(7) == ()
    assert book.finalize(step, cancelled=False) == []
    assert book.due_evictions(7) == (Span(0, 1),)
    assert book.due_evictions(7) == ()


class Lifetimes(RuleBasedStateMachine):
    """Any order of events: each request's KV goes once, and never while a job has it."""

    def __init__(self) -> None:
        super().__init__()
        self.book = KvLifetime()
        self.line: list[PrefillStep] = []
        self.held: set[int] = set()
        self.unwanted: set[int] = set()
        self.ids = iter(range(1, 10_000))

    @rule(
        sequence_ids=st.sets(st.integers(0, 3), min_size=1), last=st.booleans(), sent=st.booleans()
    )
    def enter(self, sequence_ids: set[int], last: bool, sent: bool) -> None:
        step = job(next(self.ids), *sequence_ids, last=last, sent=sent)
        self.book.enter(step)
        self.line.append(step)
        self.held |= sequence_ids

    @rule(cancelled=st.booleans())
    def settle(self, cancelled: bool) -> None:
        if self.line:
            step = self.line.pop(0)
            sequence_ids = {chunk.sequence_id for chunk in step.chunks}
            cancelled = cancelled or sequence_ids <= self.unwanted
            if cancelled:
                self.unwanted |= sequence_ids
            self.let_go(self.book.finalize(step, cancelled=cancelled))

    @rule(sequence_id=st.integers(0, 3))
    def cancel(self, sequence_id: int) -> None:
        if self.book.cancel(sequence_id):
            self.let_go([sequence_id])
        elif sequence_id in self.in_line:
            self.unwanted.add(sequence_id)

    @rule()
    def cancel_all(self) -> None:
        self.let_go(list(self.book.cancel_all()))
        self.unwanted |= self.in_line

    @property
    def in_line(self) -> set[int]:
        return {chunk.sequence_id for step in self.line for chunk in step.chunks}

    def let_go(self, sequence_ids: list[int]) -> None:
        assert len(sequence_ids) == len(set(sequence_ids))
        assert set(sequence_ids) <= self.held
        self.held -= set(sequence_ids)
        self.unwanted -= set(sequence_ids)
        assert not set(sequence_ids) & self.in_line

    @invariant()
    def what_nobody_wants_is_held_for_its_steps_only(self) -> None:
        assert self.unwanted <= self.in_line

    def teardown(self) -> None:
        while self.line:
            self.settle(cancelled=True)
        self.cancel_all()
        assert not self.held


TestLifetimes = Lifetimes.TestCase
TestLifetimes.settings = settings(max_examples=examples(50))
