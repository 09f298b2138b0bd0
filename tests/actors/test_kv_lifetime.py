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


def test_what_is_sent_whole_goes_with_its_job() -> None:
    book, it = KvLifetime(), job(1, 7, 8)
    book.enter(it)
    assert book.finalize(it, cancelled=False) == [7, 8]


def test_a_chunk_stays_until_the_last_one_is_sent() -> None:
    book, first, second = KvLifetime(), job(1, 7, last=False), job(2, 7)
    book.enter(first)
    book.enter(second)
    assert book.finalize(first, cancelled=False) == []
    assert book.finalize(second, cancelled=False) == [7]


def test_an_earlier_chunk_may_take_longer_to_leave_than_the_last() -> None:
    book, first, second = KvLifetime(), job(1, 7, last=False), job(2, 7)
    book.enter(first)
    book.enter(second)
    assert book.finalize(second, cancelled=False) == []
    assert book.finalize(first, cancelled=False) == [7]


def test_a_cancelled_request_keeps_its_history_as_long_as_a_job_may_read_it() -> None:
    book, first, second = KvLifetime(), job(1, 7, last=False), job(2, 7, 8)
    book.enter(first)
    book.enter(second)
    assert not book.cancel(7)
    assert book.finalize(first, cancelled=True) == []
    assert book.finalize(second, cancelled=False) == [7, 8]


def test_what_lies_between_two_chunks_goes_when_it_is_cancelled() -> None:
    book, first = KvLifetime(), job(1, 7, last=False)
    book.enter(first)
    book.finalize(first, cancelled=False)
    assert book.cancel(7)
    assert not book.cancel(7)


def test_a_request_that_was_never_here_is_nobodys() -> None:
    """Its KV may be the stream's, on a rank that does both."""
    assert not KvLifetime().cancel(7)


def test_a_job_that_its_group_gave_up_before_this_rank_was_told() -> None:
    book, first, second = KvLifetime(), job(1, 7, last=False), job(2, 7)
    book.enter(first)
    book.enter(second)
    assert book.finalize(first, cancelled=True) == []
    assert book.finalize(second, cancelled=False) == [7], "it was given up before"


def test_cancelling_everything_frees_what_no_job_needs() -> None:
    book, kept, waiting = KvLifetime(), job(1, 7, sent=False), job(2, 8)
    book.enter(kept)
    book.finalize(kept, cancelled=False)
    book.enter(waiting)
    assert book.cancel_all() == {7}
    assert book.finalize(waiting, cancelled=True) == [8]


def test_a_sequence_that_the_stream_leaves_while_it_has_a_step_goes_with_it() -> None:
    """And then it is told, once."""
    book, first, second = KvLifetime(), job(1, 7, sent=False), job(2, 7, sent=False)
    book.enter(first)
    book.enter(second)
    assert not book.leave_batch(7)
    assert book.finalize(first, cancelled=False) == []
    assert book.finalize(second, cancelled=True) == [7]
    assert book.pop_left(7)
    assert not book.pop_left(7)


def test_a_sequence_that_the_stream_leaves_after_its_last_step_goes_at_once() -> None:
    book, it = KvLifetime(), job(1, 7, sent=False)
    book.enter(it)
    assert book.finalize(it, cancelled=False) == []
    assert book.leave_batch(7)
    assert not book.pop_left(7)
    assert book.cancel_all() == set()


def test_what_stays_goes_when_it_is_cancelled() -> None:
    book, it = KvLifetime(), job(1, 7, retain=True)
    book.enter(it)
    assert not book.is_retained(7)
    assert book.finalize(it, cancelled=False) == []
    assert book.is_retained(7)
    book.unretain(7)
    assert not book.is_retained(7)
    assert book.cancel(7)


def test_what_stays_and_is_given_up_goes_with_its_step() -> None:
    book, it = KvLifetime(), job(1, 7, 8, retain=True)
    book.enter(it)
    book.unretain(7)
    assert not book.cancel(7)
    assert book.finalize(it, cancelled=False) == [7]
    assert book.is_retained(8)
    assert book.cancel_all() == {8}


def test_what_the_stream_leaves_and_is_kept_stays() -> None:
    book = KvLifetime()
    book.retain_at_end(7)
    assert not book.leave_batch(7)
    assert book.is_retained(7)
    assert book.evict(7, (Span(0, 1),))
    book.discard(7)
    assert book.leave_batch(7), "nothing of it is known any more"


def test_what_leaves_with_a_step_in_line_was_given_up() -> None:
    """The log may say so before the router does."""
    book, it = KvLifetime(), job(1, 7)
    book.retain_at_end(7)
    book.enter(it)
    assert not book.leave_batch(7)
    book.unretain(7)
    assert not book.cancel(7)
    assert book.finalize(it, cancelled=True) == [7]
    assert book.pop_left(7)


def test_what_is_released_too_early_goes_after_the_last_step() -> None:
    book, it = KvLifetime(), job(1, 7, retain=True)
    book.enter(it)
    assert not book.evict(7, (Span(0, 1),))
    assert book.due_evictions(7) == ()
    assert book.finalize(it, cancelled=False) == []
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
        it = job(next(self.ids), *sequence_ids, last=last, sent=sent)
        self.book.enter(it)
        self.line.append(it)
        self.held |= sequence_ids

    @rule(cancelled=st.booleans())
    def settle(self, cancelled: bool) -> None:
        if self.line:
            it = self.line.pop(0)
            sequence_ids = {chunk.sequence_id for chunk in it.chunks}
            cancelled = cancelled or sequence_ids <= self.unwanted
            if cancelled:
                self.unwanted |= sequence_ids
            self.let_go(self.book.finalize(it, cancelled=cancelled))

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
        return {chunk.sequence_id for it in self.line for chunk in it.chunks}

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
