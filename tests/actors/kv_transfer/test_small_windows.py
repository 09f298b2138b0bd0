"""Gangs between which KV goes token by token: the same answers, and no step waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gang_cell import GREEDY, Request, even_shares, job_of, prompt_of
from gang_threads import thread_cell
from greedy_reference import greedy_tokens

from csps.protocols.messages import KvLanded, PrefillDone

IN_FLIGHT = 1200
"""Bytes for two peers, and a token's KV in one layer has 258: two are under way, one by one."""
LENGTHS = (40, 67, 1, 30)


def request(rid: int, decode: int) -> Request:
    length = LENGTHS[rid % len(LENGTHS)]
    shares = even_shares(length, range(decode))
    return Request(rid=rid, prompt=prompt_of(length, rid), shares=shares, master=rid % decode)


def expected(model: Path, requests: Sequence[Request]) -> list[list[int]]:
    return [greedy_tokens(model, it.prompt.tolist(), GREEDY.max_tokens) for it in requests]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
async def test_answers_are_the_same(tiny_llama: Path, prefill_tp: int, decode_tp: int) -> None:
    async with thread_cell(
        tiny_llama,
        prefill=2 // prefill_tp,
        prefill_tp=prefill_tp,
        decode=2 // decode_tp,
        decode_tp=decode_tp,
        kv_in_flight_bytes=IN_FLIGHT,
    ) as cell:
        requests = [request(rid, 2 // decode_tp) for rid in range(3)]
        answers = await cell.generate(*requests, group=range(2 // prefill_tp))
        assert answers == expected(tiny_llama, requests)
        await cell.freed(0, 1, 2)
        await cell.prefilled(*cell.jobs)
        cell.check_idle()


async def test_steps_go_on_while_nothing_is_taken(tiny_llama: Path) -> None:
    """A decode rank cannot store what arrives; what waits behind it is computed all the same. When
    it can again, what was cancelled meanwhile is not sent any more, and the rest lands."""
    async with thread_cell(tiny_llama, prefill=2, decode=2, kv_in_flight_bytes=IN_FLIGHT) as cell:
        stuck, *others = (request(rid, 2) for rid in range(4))
        for it in (stuck, *others):
            await cell.reserve(it)
        reservation = cell.decode_gang.ranks[1].loop.stream.reservations.find(stuck.rid)
        assert reservation is not None
        with reservation.lock:
            for it in (stuck, *others):
                cell.submit(job_of([it.piece()], [0, 1]), it.prompt)
            await cell.until(lambda: all(cell.tokens(it.rid) for it in (stuck, *others)))
            await cell.told(1, KvLanded, rid=stuck.rid, rank=0)
            assert not cell.about(PrefillDone, job_id=1, rank=1)
            cell.cancel(stuck.rid)
            await cell.prefill.stats()  # answered after the cancellation
        assert await cell.answer(*others) == expected(tiny_llama, others)
        await cell.prefilled(*cell.jobs)
        await cell.freed(*range(4))
        cell.check_idle()
        sent = sum(rank._kv_link._sender.connection.bytes_sent for rank in cell.prefill_gang.ranks)  # type: ignore[union-attr]
        tokens = sum(len(it.prompt) for it in others) + len(stuck.prompt)
        assert sent < tokens * 2 * (256 + 88), "what nobody wanted has been sent"


@pytest.mark.parametrize("seed", range(3))
async def test_some_are_cancelled_on_their_way(tiny_llama: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    async with thread_cell(tiny_llama, prefill=2, decode=2, kv_in_flight_bytes=IN_FLIGHT) as cell:
        requests = [request(rid, 2) for rid in range(8)]
        unwanted = {int(it) for it in rng.choice(8, 4, replace=False)}
        for it in requests:
            await cell.reserve(it)
        for it in requests:
            cell.submit(job_of([it.piece()], rng.permutation(2).tolist()), it.prompt)
            if it.rid in unwanted and rng.random() < 0.7:
                await cell.until(lambda rid=it.rid: cell.tokens(rid))  # type: ignore[misc]
            if it.rid in unwanted:
                cell.cancel(it.rid)
        kept = [it for it in requests if it.rid not in unwanted]
        assert await cell.answer(*kept) == expected(tiny_llama, kept)
        await cell.prefilled(*cell.jobs)
        await cell.freed(*range(8))
        cell.check_idle()
