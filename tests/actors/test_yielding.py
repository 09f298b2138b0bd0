"""Short steps run inside a long one, as the gang's log says: between two of its parts.

Nothing here is a matter of time: a step that one member has not received does not begin,
`PausedSteps` hold one that has begun, and `Doors` one in the middle of a layer.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import pytest
from gang_driver import ANSWER_S, Request, even_slices, prefill_step, prompt_of
from gang_threads import ThreadCell, eventually, thread_cell
from greedy_reference import greedy_tokens
from paused_ranks import PausedSteps
from torch import Tensor

from csps.actors.attention import ulysses
from csps.actors.attention.base import yield_points
from csps.actors.engine.step_run import StepRun
from csps.actors.kv_transfer.sender import SendQueue
from csps.actors.kv_transfer.transfer_tracker import Sending
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import PrefillDone, SampledToken
from csps.protocols.gang.step_messages import PrefillStep

RESERVED = 10**6
"""A request of no step."""


class StepFeed:
    """Steps of one request each, numbered alike, that are sent rank by rank."""

    def __init__(self, cell: ThreadCell) -> None:
        self.cell = cell
        self.requests: list[Request] = []
        self.steps: list[PrefillStep] = []

    async def add(self, length: int, group: Sequence[int], *, high_priority: bool = False) -> int:
        """Add the next step, not sent yet; return its id."""
        number = len(self.steps) + 1
        request = Request(
            sequence_id=number, prompt=prompt_of(length, number), slices=even_slices(length, [0])
        )
        await self.cell.reserve(request)
        self.requests.append(request)
        self.steps.append(
            msgspec.structs.replace(
                prefill_step([request.chunk()], group, high_priority=high_priority), step_id=number
            )
        )
        return number

    def post(self, numbers: Sequence[int], ranks: Sequence[int]) -> None:
        """Send steps to some ranks."""
        for number in numbers:
            self.cell.submit(self.steps[number - 1], self.requests[number - 1].prompt, ranks=ranks)

    async def send(self, numbers: Sequence[int], ranks: Sequence[int]) -> None:
        """Send steps and wait until the ranks have them."""
        self.post(numbers, ranks)
        await self.cell.prefill.stats()

    async def prepared(self, *but: int) -> None:
        """Wait until the sequencer knows that all sent steps are prepared."""
        await eventually(lambda: self._unprepared() == but)

    def _unprepared(self) -> tuple[int, ...]:
        told: SimpleQueue[tuple[int, ...]] = SimpleQueue()
        self.cell.prefill_gang.conduct(lambda sequencer: told.put(sequencer.unprepared))
        return told.get(timeout=ANSWER_S)

    def done(self, number: int) -> list[PrefillDone]:
        """Return the reports of the ranks of a step's group."""
        return self.cell.about(PrefillDone, step_id=number)

    def sampled_order(self) -> list[int]:
        """Return the requests in the order of their first tokens."""
        return [
            notification.sequence_id
            for notification in self.cell.order
            if isinstance(notification, SampledToken) and notification.index == 0
        ]

    async def finish(self, model: Path) -> None:
        """Check that all answers are right and nothing is left behind."""
        answers = await self.cell.answer(*self.requests)
        for request, answer in zip(self.requests, answers, strict=True):
            assert answer == greedy_tokens(model, request.prompt.tolist(), len(answer))
        await self.cell.freed(*(request.sequence_id for request in self.requests))
        await self.cell.prefilled(*self.cell.steps)
        self.cell.check_idle()


@asynccontextmanager
async def step_feed(
    model: Path, prefill: int, tp: int = 1, processes: Sequence[int] = ()
) -> AsyncIterator[StepFeed]:
    async with thread_cell(
        model,
        prefill=prefill,
        decode=1,
        prefill_tp=tp,
        prefill_processes=processes,
        quantum_ms=0.0,  # a part at a time
    ) as cell:
        yield StepFeed(cell)


class Ended:
    """Steps that each rank has finished, in its order; tokens of two ranks arrive in any."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.on: dict[int, list[int]] = defaultdict(list)
        compute = StepRun.compute

        def noted(run: StepRun, *arguments: Any) -> None:
            compute(run, *arguments)
            self.on[run.group.mesh.rank].append(run.step_id)

        patch.setattr(StepRun, "compute", noted)


class Doors:
    """Before the second and before the seventh block of queries of a layer's attention: a step is
    let run two quanta ahead, so that there are some parts between."""

    def __init__(self, patch: pytest.MonkeyPatch, *, rows: int) -> None:
        """Set blocks to this many rows from now on; steps of fewer rows meet no door."""
        self.second, self.seventh = threading.Event(), threading.Event()
        self.ranks_waiting = threading.Semaphore(0)
        self._blocks = yield_points.query_blocks
        patch.setattr(yield_points, "BLOCK_PRODUCTS", 0)
        patch.setattr(yield_points, "MIN_BLOCK_ROWS", rows)
        patch.setattr(ulysses, "query_blocks", self._blocks_with_doors)

    def _blocks_with_doors(self, q_thd: Tensor, keys: int) -> Iterator[slice]:
        for number, rows in enumerate(self._blocks(q_thd, keys)):
            if number in (1, 6):
                door = self.second if number == 1 else self.seventh
                self.ranks_waiting.release()
                assert door.wait(ANSWER_S), "the door stayed closed"
            yield rows


async def test_a_high_priority_step_of_one_rank_runs_inside_a_layer(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors = Doors(monkeypatch, rows=10)
    async with step_feed(tiny_llama, 2) as feed:
        long = await feed.add(80, [0, 1])
        shared = await feed.add(5, [0, 1], high_priority=True)
        alone = [await feed.add(5, [rank], high_priority=True) for rank in (1, 0)]
        await feed.send([long], [0, 1])
        for _ in (0, 1):
            assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        await feed.send([shared, *alone], [0, 1])
        await feed.prepared()
        doors.second.set()
        await eventually(lambda: set(feed.sampled_order()) == {shared, *alone})
        doors.seventh.set()
        await feed.finish(tiny_llama)
        assert feed.sampled_order()[3:] == [long]
        assert all(done.yielded_s > 0 for done in feed.done(long))


async def test_a_high_priority_step_without_slots_does_not_wait_inside_another(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slots for which it would wait may be those of the step around it."""
    doors = Doors(monkeypatch, rows=10)
    async with step_feed(tiny_llama, 1) as feed:
        rank = feed.cell.prefill_gang.ranks[0]
        long = await feed.add(80, [0])
        high_priority = await feed.add(5, [0], high_priority=True)
        await feed.send([long], [0])
        assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        rank.engine.pool.slots.allocate(RESERVED, [Span(start=0, stop=rank.engine.pool.slots.free)])
        await feed.send([high_priority], [0])
        doors.second.set()
        assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        assert not feed.sampled_order()
        rank.loop._kv._free([RESERVED])
        doors.seventh.set()
        await feed.finish(tiny_llama)
        assert set(feed.sampled_order()) == {long, high_priority}


@pytest.fixture
def sending_goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event; until it is set no KV counts as sent, and no slots are freed."""
    allowed, send = threading.Event(), SendQueue._send

    def held(queue: SendQueue, sending: Sending) -> None:
        assert allowed.wait(ANSWER_S), "sending was never allowed"
        send(queue, sending)

    monkeypatch.setattr(SendQueue, "_send", held)
    return allowed


async def test_high_priority_steps_with_slots_for_one_run_one_after_the_other(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, sending_goes_on: threading.Event
) -> None:
    """Each would fit alone: the second does not wait inside the low-priority step for the first."""
    doors = Doors(monkeypatch, rows=10)
    async with step_feed(tiny_llama, 1) as feed:
        rank = feed.cell.prefill_gang.ranks[0]
        pool = rank.engine.pool
        long = await feed.add(80, [0])
        high_priority = [await feed.add(5, [0], high_priority=True) for _ in (0, 1)]
        await feed.send([long], [0])
        assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        pool.slots.allocate(RESERVED, [Span(start=0, stop=pool.slots.free - 7)])
        await feed.send(high_priority, [0])
        await feed.prepared(high_priority[1])
        doors.second.set()
        await feed.cell.until(lambda: feed.sampled_order() == high_priority[:1])
        assert await asyncio.to_thread(doors.ranks_waiting.acquire, timeout=ANSWER_S)
        assert pool.slots.free == 2
        rank.loop._kv._free([RESERVED])
        sending_goes_on.set()
        doors.seventh.set()
        await feed.finish(tiny_llama)
        assert sorted(feed.sampled_order()) == [long, *high_priority]


async def test_high_priority_steps_do_not_wait_for_a_step_of_others(tiny_llama: Path) -> None:
    """The others' members wait for a busy one, whether it is their leader or not."""
    async with step_feed(tiny_llama, 3, processes=[1]) as feed:
        busy = feed.cell.prefill_gang.process(1)
        busy.stop()
        foreign = await feed.add(70, [1])
        led_elsewhere, led_here = await feed.add(80, [1, 2]), await feed.add(60, [0, 1])
        high_priority = [await feed.add(5, [rank], high_priority=True) for rank in (2, 0, 2)]
        feed.post([foreign, led_elsewhere, led_here, *high_priority], [0, 1, 2])
        await feed.cell.until(lambda: set(feed.sampled_order()) == set(high_priority))
        busy.go_on()
        await feed.finish(tiny_llama)


async def test_a_step_begins_as_soon_as_there_are_slots(tiny_llama: Path) -> None:
    async with step_feed(tiny_llama, 2) as feed:
        rank = feed.cell.prefill_gang.ranks[0]
        pool = rank.engine.pool
        pool.slots.allocate(RESERVED, [Span(start=0, stop=pool.slots.free - 4)])
        long = await feed.add(80, [0, 1])
        too_long, short = (
            await feed.add(5, [0], high_priority=True),
            await feed.add(3, [0], high_priority=True),
        )
        await feed.send([long, too_long, short], [0, 1])
        await feed.cell.until(lambda: feed.sampled_order() == [short])
        rank.loop._kv._free([RESERVED])
        await feed.finish(tiny_llama)


async def test_steps_that_one_member_has_not_received_delay_no_other(tiny_llama: Path) -> None:
    async with step_feed(tiny_llama, 2) as feed:
        first = await feed.add(80, [0, 1])
        high_priority = await feed.add(5, [0, 1], high_priority=True)
        second = await feed.add(60, [1, 0])
        await feed.send([first, high_priority, second], [0])
        await feed.send([second], [1])
        await feed.cell.until(lambda: feed.sampled_order() == [second])
        await feed.send([first, high_priority], [1])
        await feed.finish(tiny_llama)


@pytest.mark.parametrize(("prefill", "tp"), [(1, 2), (2, 1), (2, 2)])
async def test_a_high_priority_step_runs_inside_a_low_priority_one(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, prefill: int, tp: int
) -> None:
    steps, group = PausedSteps(monkeypatch), list(range(prefill))
    async with step_feed(tiny_llama, prefill, tp=tp) as feed:
        long = await feed.add(80, group)
        ordinary = await feed.add(8, group)
        high_priority = [await feed.add(5, group, high_priority=True) for _ in range(9)]
        await feed.send([long, ordinary, *high_priority], range(prefill * tp))
        await feed.prepared()
        steps.go_on.set()
        await feed.finish(tiny_llama)
        assert feed.sampled_order() == [*high_priority, long, ordinary]
        assert all(done.yielded_s > 0 for done in feed.done(long))


async def test_a_high_priority_step_of_one_member_delays_only_its_group(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = PausedSteps(monkeypatch)
    async with step_feed(tiny_llama, 3) as feed:
        long = await feed.add(400, [2, 0, 1])
        high_priority = await feed.add(5, [1], high_priority=True)
        outside = await feed.add(5, [1], high_priority=True)
        await feed.send([long, high_priority, outside], [0, 1, 2])
        await feed.prepared()
        steps.go_on.set()
        await feed.finish(tiny_llama)
        assert feed.sampled_order() == [high_priority, outside, long]


async def test_a_high_priority_step_runs_inside_a_step_that_not_all_its_members_have(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, ended = PausedSteps(monkeypatch), Ended(monkeypatch)
    async with step_feed(tiny_llama, 3) as feed:
        long = await feed.add(80, [0, 1])
        high_priority = await feed.add(5, [1, 2], high_priority=True)
        await feed.send([long, high_priority], [0, 1, 2])
        await feed.prepared()
        steps.go_on.set()
        await feed.finish(tiny_llama)
        assert ended.on == {0: [long], 1: [high_priority, long], 2: [high_priority]}


async def test_a_high_priority_step_does_not_yield_to_another(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = PausedSteps(monkeypatch)
    async with step_feed(tiny_llama, 2) as feed:
        first = await feed.add(30, [0, 1], high_priority=True)
        second = await feed.add(5, [0, 1], high_priority=True)
        await feed.send([first, second], [0, 1])
        await feed.prepared()
        steps.go_on.set()
        await feed.finish(tiny_llama)
        assert feed.sampled_order() == [first, second]


async def test_a_high_priority_step_runs_inside_two_low_priority_ones(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of its members are in the first, the third in the second."""
    steps, ended = PausedSteps(monkeypatch), Ended(monkeypatch)
    async with step_feed(tiny_llama, 4) as feed:
        first, second = await feed.add(80, [0, 1, 2]), await feed.add(80, [3])
        high_priority = await feed.add(4, [1, 2, 3], high_priority=True)
        await feed.send([first, second, high_priority], [0, 1, 2, 3])
        await feed.prepared()
        steps.go_on.set()
        await feed.finish(tiny_llama)
        inside = [high_priority, first]
        assert ended.on == {0: [first], 1: inside, 2: inside, 3: [high_priority, second]}


async def test_steps_on_overlapping_groups_do_not_deadlock(tiny_llama: Path) -> None:
    groups = [[0, 1], [1, 2], [2, 0], [1], [0, 1, 2], [2, 1], [0]]
    async with step_feed(tiny_llama, 3) as feed:
        numbers = [
            await feed.add(10 + n, group, high_priority=n % 3 == 2 or group == [1])
            for n, group in enumerate(groups * 2)
        ]
        for rank in (2, 0, 1):
            await feed.send(numbers, [rank])
        await feed.finish(tiny_llama)
