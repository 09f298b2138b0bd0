"""Senders take turns when receivers are few: prompts in chunks on growing groups, with one backend
on each decode rank; a cancelled sequence frees its slot."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from gang_driver import GREEDY, Request, even_slices, prefill_step, prompt_of
from gang_threads import ThreadCell, eventually, thread_cell
from greedy_reference import greedy_tokens

from csps.actors.kv_transfer.reservation import TransferSlot, TransferSlots
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import RankKvReceived

FIRST, LENGTH = 30, 70
"""Tokens of a prompt's first chunk, which one rank computes, and of all of it."""


def request(sequence_id: int, decode: int = 2) -> Request:
    slices = even_slices(LENGTH, range(decode))
    return Request(
        sequence_id=sequence_id,
        prompt=prompt_of(LENGTH, sequence_id),
        slices=slices,
        master=sequence_id % decode,
    )


def begin(cell: ThreadCell, request: Request) -> int:
    """Submit the first chunk of a request, on one of two ranks."""
    return cell.submit(
        prefill_step([request.chunk(0, FIRST)], [request.sequence_id % 2]), request.prompt[:FIRST]
    )


def go_on(cell: ThreadCell, request: Request) -> int:
    """Submit the second chunk of a request, on both ranks."""
    history = (KvSlice(request.sequence_id % 2, 0, FIRST),)
    chunk = request.chunk(FIRST, LENGTH, history=history)
    return cell.submit(prefill_step([chunk], [0, 1]), request.prompt[FIRST:])


def expected(model: Path, requests: Sequence[Request]) -> list[list[int]]:
    return [
        greedy_tokens(model, request.prompt.tolist(), GREEDY.max_tokens) for request in requests
    ]


async def whole(cell: ThreadCell, model: Path, requests: Sequence[Request]) -> None:
    """Check that all requests are answered and nothing is left."""
    assert await cell.answer(*requests) == expected(model, requests)
    await cell.freed(*(request.sequence_id for request in requests))
    await cell.prefilled(*cell.steps)
    cell.check_idle()


def slots_of_ranks(cell: ThreadCell) -> list[TransferSlots]:
    """Return the transfer slots of both decode ranks."""
    receivers = [rank._kv_link._receiver for rank in cell.decode_gang.ranks]
    return [receiver.transfer_slots for receiver in receivers if receiver is not None]


@pytest.mark.parametrize(
    ("decode_tp", "processes"), [(1, ()), (2, ()), pytest.param(1, (1,), marks=pytest.mark.slow)]
)
async def test_one_backend_serves_many_requests_in_chunks(
    tiny_llama: Path, decode_tp: int, processes: Sequence[int]
) -> None:
    """The order of chunks is random: second chunks wait behind others' first ones, and both ranks
    of a group want the one slot. Small instances prefill, and larger ones may decode; the second
    rank of each gang may be a process."""
    rng, decode = random.Random(0), 2 // decode_tp
    async with thread_cell(
        tiny_llama,
        prefill=2,
        decode=decode,
        decode_tp=decode_tp,
        kv_receiving_backends=1,
        prefill_processes=processes,
        decode_processes=processes,
    ) as cell:
        requests = [request(sequence_id, decode) for sequence_id in range(5)]
        for sequence in requests:
            await cell.reserve(sequence)
        left = [sequence for sequence in requests for _ in range(2)]
        rng.shuffle(left)
        for number, sequence in enumerate(left):
            (begin if sequence not in left[:number] else go_on)(cell, sequence)
        await whole(cell, tiny_llama, requests)


async def test_a_sequence_cancelled_between_chunks_frees_its_slot(
    tiny_llama: Path,
) -> None:
    """No step waits for it: both are computed while one has the backends of both ranks."""
    async with thread_cell(tiny_llama, prefill=2, decode=2, kv_receiving_backends=1) as cell:
        holder, other = request(0), request(1)
        for sequence in (holder, other):
            await cell.reserve(sequence)
        begin(cell, holder)
        await eventually(lambda: not slots_of_ranks(cell)[0]._backends.free)
        await cell.prefilled(*cell.steps)
        begin(cell, other)
        go_on(cell, other)
        await cell.until(lambda: cell.tokens(other.sequence_id))
        await cell.until_received(
            1, RankKvReceived, sequence_id=other.sequence_id, rank=1
        )  # nothing of the first one goes there
        assert not cell.about(RankKvReceived, sequence_id=other.sequence_id, rank=0)
        cell.cancel(holder.sequence_id)
        await whole(cell, tiny_llama, [other])
        (received,) = cell.about(RankKvReceived, sequence_id=other.sequence_id, rank=0)
        assert received.waited > 0


@pytest.fixture
def told() -> list[tuple[int, TransferSlot, bool]]:
    return []


@pytest.fixture
def expecting(
    told: list[tuple[int, TransferSlot, bool]],
) -> tuple[TransferSlots, dict[int, object]]:
    """Return slots with one backend, and the requests that are expected."""
    found: dict[int, object] = {
        sequence_id: SimpleNamespace(closed=False, waited=0.0, release_transfer_slots=None)
        for sequence_id in (1, 2)
    }
    made = TransferSlots(1, found.get, lambda *word: told.append(word))  # type: ignore[arg-type]
    return made, found


def test_an_unknown_sequence_gets_no_slot(
    expecting: tuple[TransferSlots, dict[int, object]], told: list[tuple[int, TransferSlot, bool]]
) -> None:
    made, _ = expecting
    made.ask(0, TransferSlot(3, 1))
    assert told == [(0, TransferSlot(3, 1), False)]
    made.end(0, TransferSlot(3, 1))
    assert made.idle


def test_a_sender_waiting_for_a_sequence_that_left_is_notified(
    expecting: tuple[TransferSlots, dict[int, object]], told: list[tuple[int, TransferSlot, bool]]
) -> None:
    """The next sender gets the slot."""
    made, found = expecting
    for peer, sequence_id in ((0, 1), (1, 1), (2, 2)):
        made.ask(peer, TransferSlot(sequence_id, 7))
    assert told == [(0, TransferSlot(1, 7), True)]
    left = found.pop(1)
    left.release_transfer_slots()  # type: ignore[attr-defined]
    assert told[1:] == [(1, TransferSlot(1, 7), False), (2, TransferSlot(2, 7), True)]
    made.end(0, TransferSlot(1, 7))
    made.release(2)
    assert made.idle


def test_a_sender_that_gives_up_leaves_the_queue(
    expecting: tuple[TransferSlots, dict[int, object]], told: list[tuple[int, TransferSlot, bool]]
) -> None:
    made, _ = expecting
    made.ask(0, TransferSlot(1, 1))
    made.ask(1, TransferSlot(2, 1))
    made.end(1, TransferSlot(2, 1))
    made.release(1)
    assert told == [(0, TransferSlot(1, 1), True)]
    assert made.idle
