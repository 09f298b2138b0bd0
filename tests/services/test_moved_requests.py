"""Requests that end while they move, as the router sees them.

Ranks report over connections of their own, so in any order, and every slot must come back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fake_gangs import FakeCell, FakeGang, fake_cell, loop_iterations, until
from scripted_policies import OneMove

from csps.protocols.gang.messages import SampledToken, SampledTokens
from csps.protocols.gang.step_messages import SequenceMoved
from csps.services.requests.request_handle import RequestHandle
from csps.services.scheduling.core.scheduler import Scheduler

COUNT = 4


def one_move(_policy: object, *args: Any, **options: Any) -> Scheduler:
    return Scheduler(OneMove(), *args, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def decoding() -> AsyncIterator[tuple[FakeCell, RequestHandle, int]]:
    """Yield a request that instances 0 and 1 of three decode."""
    gang = FakeGang("elastic", "e1", instances=3)
    async with fake_cell(elastic=gang, make_scheduler=one_move) as cell:
        handle = cell.submit(tokens=10, max_tokens=COUNT)
        yield cell, handle, await cell.decoding(handle)
        await cell.wait_until_free()


def sample_last(cell: FakeCell, rank: int, sequence_id: int) -> None:
    sampled = [
        SampledToken(
            sequence_id=sequence_id,
            index=n,
            token=7,
            finish_reason="length" if n == COUNT - 1 else None,
        )
        for n in range(1, COUNT)
    ]
    cell.decode.ranks[rank].notify("tokens", SampledTokens.of(sampled))


def moved(cell: FakeCell, rank: int, sequence_id: int) -> None:
    message = SequenceMoved(sequence_id=sequence_id, rank=rank, tokens=1, sent_bytes=8, seconds=0.1)
    cell.decode.ranks[rank].notify("moved", message)


async def test_a_rank_may_free_a_sequence_before_another_acknowledges_its_move() -> None:
    async with decoding() as (cell, handle, sequence_id):
        other = cell.submit()  # for whose sake the policy moves
        ranks = cell.decode.ranks
        await until(lambda: all(rank.moves for rank in ranks))
        for rank in (0, 1):
            moved(cell, rank, sequence_id)
            ranks[rank].free_cancelled(sequence_id)
        await loop_iterations()
        moved(cell, 2, sequence_id)
        sample_last(cell, 2, sequence_id)
        ranks[2].free_cancelled(sequence_id)
        assert len([token async for token in handle]) == COUNT
        async with other:
            pass


async def test_a_request_whose_last_token_was_sampled_is_not_moved() -> None:
    """Instance 2 stores nothing of it; it reported that already and would not report again."""
    async with decoding() as (cell, handle, sequence_id):
        ranks = cell.decode.ranks
        ranks[2].free_cancelled(sequence_id)
        await loop_iterations()
        async with cell.submit():
            await loop_iterations()
            assert not any(rank.moves for rank in ranks)
            sample_last(cell, 0, sequence_id)
            for rank in ranks[:2]:
                rank.free_cancelled(sequence_id)
            assert len([token async for token in handle]) == COUNT
