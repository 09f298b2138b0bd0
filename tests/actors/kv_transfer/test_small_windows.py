"""Gangs between which KV is sent token by token: the same answers, and no step waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gang_driver import GREEDY, Request, even_slices, prefill_step, prompt_of
from gang_threads import thread_cell
from greedy_reference import greedy_tokens

from csps.protocols.gang.messages import PrefillDone, RankKvReceived

IN_FLIGHT = 1200
"""Bytes for two peers, and a token's KV in one layer has 258: two are under way, one by one."""
LENGTHS = (40, 67, 1, 30)


def request(sequence_id: int, decode: int) -> Request:
    length = LENGTHS[sequence_id % len(LENGTHS)]
    slices = even_slices(length, range(decode))
    return Request(
        sequence_id=sequence_id,
        prompt=prompt_of(length, sequence_id),
        slices=slices,
        master=sequence_id % decode,
    )


def expected(model: Path, requests: Sequence[Request]) -> list[list[int]]:
    return [
        greedy_tokens(model, request.prompt.tolist(), GREEDY.max_tokens) for request in requests
    ]


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 1), (1, 2)])
async def test_answers_are_the_same_with_small_credits(
    tiny_llama: Path, prefill_tp: int, decode_tp: int
) -> None:
    async with thread_cell(
        tiny_llama,
        prefill=2 // prefill_tp,
        prefill_tp=prefill_tp,
        decode=2 // decode_tp,
        decode_tp=decode_tp,
        kv_in_flight_bytes=IN_FLIGHT,
    ) as cell:
        requests = [request(sequence_id, 2 // decode_tp) for sequence_id in range(3)]
        answers = await cell.generate(*requests, group=range(2 // prefill_tp))
        assert answers == expected(tiny_llama, requests)
        await cell.freed(0, 1, 2)
        await cell.prefilled(*cell.steps)
        cell.check_idle()


async def test_steps_go_on_while_a_receiver_stores_nothing(tiny_llama: Path) -> None:
    """A decode rank cannot store what arrives; KV that waits behind it is computed all the same.
    When it can store again, KV cancelled meanwhile is not sent, and the rest is."""
    async with thread_cell(tiny_llama, prefill=2, decode=2, kv_in_flight_bytes=IN_FLIGHT) as cell:
        stuck, *others = (request(sequence_id, 2) for sequence_id in range(4))
        for sequence in (stuck, *others):
            await cell.reserve(sequence)
        reservation = cell.decode_gang.ranks[1].loop.decode_batch.reservations.find(
            stuck.sequence_id
        )
        assert reservation is not None
        with reservation.lock:
            for sequence in (stuck, *others):
                cell.submit(prefill_step([sequence.chunk()], [0, 1]), sequence.prompt)
            await cell.until(
                lambda: all(cell.tokens(request.sequence_id) for request in (stuck, *others))
            )
            await cell.until_received(1, RankKvReceived, sequence_id=stuck.sequence_id, rank=0)
            assert not cell.about(PrefillDone, step_id=1, rank=1)
            cell.cancel(stuck.sequence_id)
            await cell.prefill.stats()  # answered after the cancellation
        assert await cell.answer(*others) == expected(tiny_llama, others)
        await cell.prefilled(*cell.steps)
        await cell.freed(*range(4))
        cell.check_idle()
        sent = sum(rank._kv_link._sender.connection.bytes_sent for rank in cell.prefill_gang.ranks)  # type: ignore[union-attr]
        tokens = sum(len(other.prompt) for other in others) + len(stuck.prompt)
        assert sent < tokens * 2 * (256 + 88), "what nobody wanted has been sent"


@pytest.mark.parametrize("seed", range(3))
async def test_requests_are_cancelled_during_their_transfer(tiny_llama: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    async with thread_cell(tiny_llama, prefill=2, decode=2, kv_in_flight_bytes=IN_FLIGHT) as cell:
        requests = [request(sequence_id, 2) for sequence_id in range(8)]
        cancelled = {int(sequence_id) for sequence_id in rng.choice(8, 4, replace=False)}
        for sequence in requests:
            await cell.reserve(sequence)
        for sequence in requests:
            cell.submit(
                prefill_step([sequence.chunk()], rng.permutation(2).tolist()), sequence.prompt
            )
            if sequence.sequence_id in cancelled and rng.random() < 0.7:
                await cell.until(lambda sequence_id=sequence.sequence_id: cell.tokens(sequence_id))  # type: ignore[misc]
            if sequence.sequence_id in cancelled:
                cell.cancel(sequence.sequence_id)
        kept = [sequence for sequence in requests if sequence.sequence_id not in cancelled]
        assert await cell.answer(*kept) == expected(tiny_llama, kept)
        await cell.prefilled(*cell.steps)
        await cell.freed(*range(8))
        cell.check_idle()
