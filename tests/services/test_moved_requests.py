"""Requests that are moved while they end, as the router hears of it: ranks tell over connections
of their own, so in any order, and every slot comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fake_gangs import FakeCell, FakeGang, fake_cell, turns, until
from one_move import OneMove

from csps.protocols.row_move import RowMoved
from csps.protocols.tokens import TokenDrawn, Tokens
from csps.services.router.running import Running
from csps.services.scheduling.scheduler import Scheduler

COUNT = 4


def one_move(_policy: object, *args: Any, **options: Any) -> Scheduler:
    return Scheduler(OneMove(), *args, **options)  # type: ignore[arg-type]


@asynccontextmanager
async def decoding() -> AsyncIterator[tuple[FakeCell, Running, int]]:
    """A request that instances 0 and 1 of three decode."""
    gang = FakeGang("elastic", "e1", instances=3)
    async with fake_cell(elastic=gang, make_scheduler=one_move) as cell:
        running = cell.submit(tokens=10, max_tokens=COUNT)
        yield cell, running, await cell.decoding(running)
        await cell.settled()


def draw_last(cell: FakeCell, rank: int, rid: int) -> None:
    drawn = [
        TokenDrawn(rid=rid, index=n, token=7, finish_reason="length" if n == COUNT - 1 else None)
        for n in range(1, COUNT)
    ]
    cell.decode.ranks[rank].tell("tokens", Tokens.of(drawn))


def moved(cell: FakeCell, rank: int, rid: int) -> None:
    told = RowMoved(rid=rid, rank=rank, tokens=1, sent_bytes=8, seconds=0.1)
    cell.decode.ranks[rank].tell("moved", told)


async def test_a_rank_may_free_what_another_has_not_told_to_have_moved() -> None:
    async with decoding() as (cell, running, rid):
        other = cell.submit()  # for whose sake the policy moves
        ranks = cell.decode.ranks
        await until(lambda: all(rank.moves for rank in ranks))
        for rank in (0, 1):
            moved(cell, rank, rid)
            ranks[rank].give_back(rid)
        await turns()
        moved(cell, 2, rid)
        draw_last(cell, 2, rid)
        ranks[2].give_back(rid)
        assert len([token async for token in running]) == COUNT
        async with other:
            pass


async def test_a_request_whose_last_token_is_on_its_way_is_not_moved() -> None:
    """Instance 2 has told, where nothing of it is, and would not tell again."""
    async with decoding() as (cell, running, rid):
        ranks = cell.decode.ranks
        ranks[2].give_back(rid)
        await turns()
        async with cell.submit():
            await turns()
            assert not any(rank.moves for rank in ranks)
            draw_last(cell, 0, rid)
            for rank in ranks[:2]:
                rank.give_back(rid)
            assert len([token async for token in running]) == COUNT
