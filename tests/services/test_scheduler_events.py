"""What the router tells the scheduler of reports that fake ranks send."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from fake_gangs import FakeGang, fake_cell, until

from csps.protocols.core.errors import TransferError
from csps.services.scheduling.core.scheduler import RoundResult, Scheduler
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import AnyEvent, index_of
from csps.services.scheduling.events.limits import QueueLimits
from csps.services.telemetry.metrics import Metrics


class Recording(Scheduler):
    """Scheduler that remembers its events."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.events: list[AnyEvent] = []

    def handle(self, events: Iterable[AnyEvent], now_ns: int) -> RoundResult:
        events = list(events)
        self.events += events
        return super().handle(events, now_ns)


def recorded(cell: Any, kind: type) -> list[Any]:
    return [event for event in cell.service._scheduler.events if isinstance(event, kind)]


@pytest.mark.parametrize("how", ["finished", "failed"])
async def test_an_end_counts_the_tokens_of_all_attempts(how: str) -> None:
    limits = QueueLimits(max_attempts=2)
    async with fake_cell(make_scheduler=Recording, limits=limits) as cell:
        handle = cell.submit(max_tokens=4)
        first = await cell.decoding(handle)
        cell.decode.sample(first, 1)
        await until(lambda: handle.timings.tokens == 2)
        await cell.decode.kill(0)
        await cell.replace(FakeGang("decode", "d2"))
        step = await cell.prefilling(handle)
        (chunk,) = step.chunks
        assert chunk.last, "the prompt ends behind the tokens of the first attempt"
        cell.prefill.sample(chunk.sequence_id, 2)
        cell.decode.receive_kv(chunk.sequence_id)
        cell.prefill.finish_step(step)
        await until(lambda: cell.decode.has_joined(chunk.sequence_id))
        if how == "finished":
            cell.decode.sample(chunk.sequence_id, 3, finish="length")
            cell.decode.free(chunk.sequence_id)
            assert len([token async for token in handle]) == 4
            (end,) = recorded(cell, ev.Finished)
            assert end.generated_tokens == 4
        else:
            cell.decode.fail(chunk.sequence_id, "TransferError")
            with pytest.raises(TransferError):
                _ = [token async for token in handle]
            (end,) = recorded(cell, ev.Failed)
            assert end.generated_tokens == 3
        assert end.sequence_id == chunk.sequence_id
        await cell.wait_until_free()


async def test_reports_of_all_ranks_of_an_instance_are_one_event() -> None:
    """Of two instances with two ranks each."""
    gangs = {role: FakeGang(role, f"{role}1", tp=2) for role in ("prefill", "decode")}  # type: ignore[arg-type]
    spread = {"spread_tokens": 8192}
    async with fake_cell(make_scheduler=Recording, options=spread, **gangs) as cell:
        handle = cell.submit(tokens=8500, max_tokens=2)
        sequence_id = await cell.decoding(handle)
        cell.finish(sequence_id, 2)
        assert len([token async for token in handle]) == 2
        await cell.wait_until_free()
        for kind in (ev.StepDone, ev.KvReceived, ev.Freed):
            told = [index_of(event.instance) for event in recorded(cell, kind)]
            assert sorted(told) == [0, 1], kind
        heard = {index_of(it) for event in recorded(cell, ev.Heartbeat) for it in event.instances}
        assert heard == {1}, "the last rank sends the tokens"


async def test_a_gang_has_as_many_positions_as_the_rank_with_fewest() -> None:
    gang = FakeGang("decode", "d1")
    describe = gang.ranks[1].describe
    gang.ranks[1].describe = lambda: replace(describe(), max_positions=500)  # type: ignore[method-assign]
    async with fake_cell(make_scheduler=Recording, decode=gang) as cell:
        positions = {up.may_decode: up.max_positions for up in recorded(cell, ev.GangUp)}
        assert positions == {True: 500, False: 1 << 20}


async def test_only_low_priority_steps_count_as_preempted() -> None:
    metrics = Metrics("tiny")
    async with fake_cell(prefill=FakeGang("prefill", "p1", instances=1), observer=metrics) as cell:
        shorts = [cell.submit(tokens=100) for _ in range(2)]
        for short in shorts:
            await cell.prefilling(short)
        more = cell.submit(tokens=100)
        await cell.prefilling(more)
        assert all(step.high_priority for step in cell.prefill.leader.steps)
        assert len(cell.prefill.leader.steps) > 1
        assert 'csps:num_preemptions_total{model_name="tiny"} 0.0' in metrics.render().decode()
