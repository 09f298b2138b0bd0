"""Short jobs run inside a long one: before it, between two layers, or between two parts of a layer.

Nothing here is a matter of time: a job that one member of its group has not received stands still
before its first layer, so a test decides what arrives before it goes on. `Doors` hold a job in the
middle of a layer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from gang_cell import ANSWER_S, Request, even_shares, job_of, prompt_of
from gang_threads import ThreadCell, eventually, thread_cell
from greedy_reference import greedy_tokens
from torch import Tensor

from csps.actors import prefill
from csps.actors.kv_transfer.send_queue import SendQueue
from csps.actors.kv_transfer.sending import Sending
from csps.actors.strategies import query_blocks, ulysses
from csps.protocols.messages import PrefillDone, PrefillJob, Span, TokenDrawn

RESERVED = 10**6
"""A request of no job."""


class Line:
    """Jobs of one request each, numbered alike, that are sent rank by rank."""

    def __init__(self, cell: ThreadCell) -> None:
        self.cell = cell
        self.requests: list[Request] = []
        self.jobs: list[PrefillJob] = []

    async def add(self, length: int, group: Sequence[int], *, urgent: bool = False) -> int:
        """The next job in the order, not sent yet; returns its number."""
        number = len(self.jobs) + 1
        request = Request(
            rid=number, prompt=prompt_of(length, number), shares=even_shares(length, [0])
        )
        await self.cell.reserve(request)
        self.requests.append(request)
        self.jobs.append(replace(job_of([request.piece()], group, urgent=urgent), job_id=number))
        return number

    def post(self, numbers: Sequence[int], ranks: Sequence[int]) -> None:
        """Send jobs to some ranks."""
        for number in numbers:
            self.cell.submit(self.jobs[number - 1], self.requests[number - 1].prompt, ranks=ranks)

    async def send(self, numbers: Sequence[int], ranks: Sequence[int]) -> None:
        """And wait until they have them."""
        self.post(numbers, ranks)
        await self.cell.prefill.stats()

    def done(self, number: int) -> list[PrefillDone]:
        """Reports of the ranks of a job's group."""
        return self.cell.about(PrefillDone, job_id=number)

    def drawn_order(self) -> list[int]:
        """Requests in the order of their first tokens."""
        return [it.rid for it in self.cell.order if isinstance(it, TokenDrawn) and it.index == 0]

    async def finish(self, model: Path) -> None:
        """All answers are right and nothing is left behind."""
        answers = await self.cell.answer(*self.requests)
        for request, answer in zip(self.requests, answers, strict=True):
            assert answer == greedy_tokens(model, request.prompt.tolist(), len(answer))
        await self.cell.freed(*(request.rid for request in self.requests))
        await self.cell.prefilled(*self.cell.jobs)
        self.cell.check_idle()


@asynccontextmanager
async def line(
    model: Path, prefill: int, tp: int = 1, processes: Sequence[int] = ()
) -> AsyncIterator[Line]:
    async with thread_cell(
        model, prefill=prefill, decode=1, prefill_tp=tp, prefill_processes=processes
    ) as cell:
        yield Line(cell)


class Doors:
    """Before the second and before the third block of queries of a layer's attention."""

    def __init__(self, patch: pytest.MonkeyPatch, *, rows: int) -> None:
        """Blocks have so many rows from now on; jobs of fewer rows meet no door."""
        self.second, self.third = threading.Event(), threading.Event()
        self.ranks_waiting = threading.Semaphore(0)
        self._blocks = query_blocks.query_blocks
        patch.setattr(query_blocks, "BLOCK_PRODUCTS", 0)
        patch.setattr(query_blocks, "MIN_BLOCK_ROWS", rows)
        patch.setattr(ulysses, "query_blocks", self._held)

    def _held(self, q_thd: Tensor, keys: int) -> Iterator[slice]:
        for number, rows in enumerate(self._blocks(q_thd, keys)):
            if number:
                door = self.second if number == 1 else self.third
                self.ranks_waiting.release()
                assert door.wait(ANSWER_S), "the door stayed closed"
            yield rows


async def test_an_urgent_job_of_one_rank_runs_inside_a_layer(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors = Doors(monkeypatch, rows=30)
    async with line(tiny_llama, 2) as it:
        long = await it.add(80, [0, 1])
        shared = await it.add(5, [0, 1], urgent=True)
        alone = [await it.add(5, [rank], urgent=True) for rank in (1, 0)]
        await it.send([long], [0, 1])
        for _ in (0, 1):
            assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        await it.send([shared, *alone], [0, 1])
        doors.second.set()
        await eventually(lambda: set(it.drawn_order()) == set(alone))
        doors.third.set()
        await it.finish(tiny_llama)
        assert it.drawn_order()[2:] == [shared, long]
        assert all(done.yielded_s > 0 for done in it.done(long))


async def test_an_urgent_job_that_finds_no_room_does_not_wait_inside_another(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots that it would wait for may be those of the job around it."""
    doors = Doors(monkeypatch, rows=30)
    async with line(tiny_llama, 1) as it:
        pool = it.cell.prefill_gang.ranks[0].engine.pool
        long = await it.add(80, [0])
        urgent = await it.add(5, [0], urgent=True)
        await it.send([long], [0])
        assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        pool.allocate(RESERVED, [Span(start=0, stop=pool.free)])
        await it.send([urgent], [0])
        doors.second.set()
        assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        assert not it.drawn_order()
        pool.free_request(RESERVED)
        doors.third.set()
        await it.finish(tiny_llama)
        assert set(it.drawn_order()) == {long, urgent}


@pytest.fixture
def sending_goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Until it is set nobody hears that KV has left, and no slots come back."""
    allowed, send = threading.Event(), SendQueue._send

    def held(queue: SendQueue, sending: Sending) -> None:
        assert allowed.wait(ANSWER_S), "sending was never allowed"
        send(queue, sending)

    monkeypatch.setattr(SendQueue, "_send", held)
    return allowed


async def test_urgent_jobs_that_have_room_for_one(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, sending_goes_on: threading.Event
) -> None:
    """Each would fit alone: the second does not wait inside the long job for the first."""
    doors = Doors(monkeypatch, rows=30)
    monkeypatch.setattr(prefill, "SLOTS_BACK_S", 0.1)  # a rank that waits so long is broken
    async with line(tiny_llama, 1) as it:
        pool = it.cell.prefill_gang.ranks[0].engine.pool
        long = await it.add(80, [0])
        urgent = [await it.add(5, [0], urgent=True) for _ in (0, 1)]
        await it.send([long], [0])
        assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        pool.allocate(RESERVED, [Span(start=0, stop=pool.free - 7)])
        await it.send(urgent, [0])
        doors.second.set()
        assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        assert pool.free == 2
        pool.free_request(RESERVED)
        sending_goes_on.set()
        doors.third.set()
        await it.finish(tiny_llama)
        assert it.drawn_order() == [*urgent, long]


async def test_urgent_jobs_do_not_wait_for_a_job_of_others(tiny_llama: Path) -> None:
    """Whose members wait for one that is busy, be they its leader or not."""
    async with line(tiny_llama, 3, processes=[1]) as it:
        busy = it.cell.prefill_gang.process(1)
        busy.stop()
        foreign = await it.add(70, [1])
        led_elsewhere, led_here = await it.add(80, [1, 2]), await it.add(60, [0, 1])
        urgent = [await it.add(5, [rank], urgent=True) for rank in (2, 0, 2)]
        it.post([foreign, led_elsewhere, led_here, *urgent], [0, 1, 2])
        await it.cell.until(lambda: set(it.drawn_order()) == set(urgent))
        busy.go_on()
        await it.finish(tiny_llama)
        waited = it.done(led_elsewhere) + it.done(led_here)
        assert all(done.yielded_s == 0 for done in waited), "none had begun"


async def test_an_urgent_job_runs_as_soon_as_there_is_room(tiny_llama: Path) -> None:
    async with line(tiny_llama, 2) as it:
        loop = it.cell.prefill_gang.ranks[0]._prefill_loop
        pool = it.cell.prefill_gang.ranks[0].engine.pool
        pool.allocate(RESERVED, [Span(start=0, stop=pool.free - 4)])
        long = await it.add(80, [0, 1])
        too_long, short = await it.add(5, [0], urgent=True), await it.add(3, [0], urgent=True)
        await it.send([long, too_long, short], [0])
        await it.cell.until(lambda: it.drawn_order() == [short])
        loop._free(RESERVED)
        await it.cell.until(lambda: it.drawn_order() == [short, too_long])
        await it.send([long, too_long, short], [1])
        await it.finish(tiny_llama)


async def test_the_ranks_of_an_instance_run_an_urgent_job_together(tiny_llama: Path) -> None:
    async with line(tiny_llama, 1, tp=2) as it:
        long = await it.add(80, [0])
        urgent = await it.add(5, [0], urgent=True)
        await it.send([long, urgent], [0])
        await it.send([long, urgent], [1])
        await it.finish(tiny_llama)
        assert it.drawn_order() == [urgent, long]


async def test_an_urgent_job_runs_inside_a_long_one(tiny_llama: Path) -> None:
    async with line(tiny_llama, 2) as it:
        long = await it.add(80, [0, 1])
        ordinary = await it.add(8, [0, 1])
        urgent = await it.add(5, [0, 1], urgent=True)
        await it.send([long, ordinary, urgent], [0])  # stands still before its first layer
        await it.send([long, ordinary, urgent], [1])
        await it.finish(tiny_llama)
        assert it.drawn_order() == [urgent, long, ordinary]
        assert all(done.yielded_s > 0 for done in it.done(long))
        assert all(done.yielded_s == 0 for done in it.done(ordinary) + it.done(urgent))


async def test_an_urgent_job_of_one_member_holds_up_only_its_group(tiny_llama: Path) -> None:
    async with line(tiny_llama, 3) as it:
        long = await it.add(80, [2, 0, 1])
        urgent = await it.add(5, [1], urgent=True)
        outside = await it.add(5, [1], urgent=True)
        await it.send([long, urgent, outside], [0, 2])
        await it.send([long, urgent, outside], [1])
        await it.finish(tiny_llama)
        assert it.drawn_order() == [urgent, outside, long]


async def test_an_urgent_job_that_needs_others_waits_its_turn(tiny_llama: Path) -> None:
    """Its group is not inside the long one's, whose leader therefore may not let it run."""
    async with line(tiny_llama, 3) as it:
        long = await it.add(80, [0, 1])
        urgent = await it.add(5, [1, 2], urgent=True)
        await it.send([long, urgent], [0, 2])
        await it.send([long, urgent], [1])
        await it.finish(tiny_llama)
        assert it.drawn_order() == [long, urgent]
        assert all(done.yielded_s == 0 for done in it.done(long))


async def test_an_urgent_job_does_not_yield_to_another(tiny_llama: Path) -> None:
    async with line(tiny_llama, 2) as it:
        first = await it.add(30, [0, 1], urgent=True)
        second = await it.add(5, [0, 1], urgent=True)
        await it.send([first, second], [0])
        await it.send([first, second], [1])
        await it.finish(tiny_llama)
        assert it.drawn_order() == [first, second]


async def test_a_member_waits_for_an_urgent_job_that_its_leader_has_already(
    tiny_llama: Path,
) -> None:
    async with line(tiny_llama, 2) as it:
        long = await it.add(80, [0, 1])
        urgent = await it.add(5, [0, 1], urgent=True)
        await it.send([long, urgent], [0])
        await it.send([long], [1])  # told to run a job that it does not have
        assert not it.drawn_order()
        await it.send([urgent], [1])
        await it.finish(tiny_llama)
        assert it.drawn_order() == [urgent, long]


async def test_more_urgent_jobs_than_fit_into_one_order(tiny_llama: Path) -> None:
    """The leader names six at a time; the others follow at the next layer."""
    async with line(tiny_llama, 2) as it:
        long = await it.add(80, [0, 1])
        short = [await it.add(3, [0, 1], urgent=True) for _ in range(9)]
        await it.send([long, *short], [0])
        await it.send([long, *short], [1])
        await it.finish(tiny_llama)
        assert it.drawn_order().index(long) >= 6


async def test_leaders_of_two_long_jobs_name_one_urgent_job(tiny_llama: Path) -> None:
    """Two members run it inside the first; the second's leader, who was not there, still has it."""
    async with line(tiny_llama, 4) as it:
        first = await it.add(60, [0, 1, 2])
        second = await it.add(60, [3, 1, 2])
        urgent = await it.add(4, [1, 2], urgent=True)
        everything = [first, second, urgent]
        await it.send(everything, [0, 2, 3])
        await it.send(everything, [1])
        await it.finish(tiny_llama)
        assert it.drawn_order() == [urgent, first, second]


async def test_jobs_on_overlapping_groups_do_not_deadlock(tiny_llama: Path) -> None:
    groups = [[0, 1], [1, 2], [2, 0], [1], [0, 1, 2], [2, 1], [0]]
    async with line(tiny_llama, 3) as it:
        numbers = [
            await it.add(10 + n, group, urgent=n % 3 == 2 or group == [1])
            for n, group in enumerate(groups * 2)
        ]
        for rank in (2, 0, 1):
            await it.send(numbers, [rank])
        await it.finish(tiny_llama)
