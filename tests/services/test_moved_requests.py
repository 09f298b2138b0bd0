"""Requests that end while they move, as the router sees them.

Ranks report over connections of their own, so in any order, and every slot must come back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fake_gangs import FakeCell, FakeGang, fake_cell, loop_iterations, until
from scripted_policies import OneMove

from csps.protocols.gang.messages import SampledToken, SampledTokens, SlotsFreed
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


async def test_a_token_of_the_new_master_may_arrive_before_one_of_the_old() -> None:
    """And a sequence that has moved is forgotten when its new instances have freed it."""
    async with decoding() as (cell, handle, sequence_id):
        assert cell.decode.leader.joined[0].instances == (0, 1)
        other = cell.submit()  # for whose sake the policy moves
        ranks = cell.decode.ranks
        await until(lambda: all(rank.moves for rank in ranks))
        for index in (2, 1):  # each over a connection of its own
            token = SampledToken(sequence_id=sequence_id, index=index, token=7)
            ranks[index].notify("tokens", SampledTokens.of([token]))
            await loop_iterations()
        await until(lambda: handle.timings.tokens == 3)
        assert [(await anext(handle)).index for _ in range(3)] == [0, 1, 2]
        for rank in (0, 1, 2):
            moved(cell, rank, sequence_id)
        ranks[0].reserved.pop(sequence_id)
        last = SampledToken(sequence_id=sequence_id, index=3, token=7, finish_reason="length")
        await until(lambda: cell.service._requests.sequences[sequence_id].move is None)
        ranks[2].notify("tokens", SampledTokens.of([last]))
        assert len([token async for token in handle]) == 1
        for rank in (1, 2):
            ranks[rank].free_cancelled(sequence_id)
            ranks[rank].notify("freed", SlotsFreed(sequence_id=sequence_id, rank=rank))
        await until(lambda: sequence_id not in cell.service._requests.sequences)
        async with other:
            pass
