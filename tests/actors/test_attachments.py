"""Routers come and go: what one leaves behind is dropped, and two never command one gang."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from gang_driver import (
    ANSWER_S,
    GREEDY,
    SECRET,
    Cell,
    Request,
    even_slices,
    prefill_step,
    prompt_of,
)
from gang_threads import ThreadCell, thread_cell
from greedy_reference import greedy_tokens

from csps.actors.worker import router_connection
from csps.protocols.core.errors import Cancelled, ProtocolError, RanksHeld, Superseded
from csps.protocols.gang import members as fence
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import (
    CancelSequence,
    JoinBatch,
    PrefillDone,
    RankDescription,
    RankKvReceived,
    RankStats,
    Sampling,
)
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.client import RpcClient
from csps.protocols.rpc.schema import pack, unpack

ENDLESS = Sampling(temperature=0, max_tokens=1500)


@asynccontextmanager
async def cell_of(model: Path) -> AsyncIterator[ThreadCell]:
    async with thread_cell(model, prefill=2, decode=2, kv_slots=16384) as cell:
        yield cell


def request(sequence_id: int, sampling: Sampling = GREEDY) -> Request:
    return Request(
        sequence_id=sequence_id,
        prompt=prompt_of(40, sequence_id),
        slices=even_slices(40, [0, 1]),
        master=sequence_id % 2,
        sampling=sampling,
    )


def step_of(request: Request) -> PrefillStep:
    return prefill_step([request.chunk()], [0, 1])


async def successor(cell: ThreadCell) -> ThreadCell:
    """Attach another router to the same gangs; its generation follows the first one's."""
    other = ThreadCell()
    other.prefill_gang, other.decode_gang = cell.prefill_gang, cell.decode_gang
    other._step_ids = cell._step_ids
    other.prefill = await other.attach(cell.prefill_gang.members, "prefill")
    other.decode = await other.attach(cell.decode_gang.members, "decode")
    await other.connect()
    return other


async def check_serves(cell: ThreadCell, model: Path, sequence_id: int = 99) -> None:
    sequence = request(sequence_id)
    answers = await cell.generate(sequence, group=[0, 1])
    assert answers == [greedy_tokens(model, sequence.prompt.tolist(), GREEDY.max_tokens)]
    await cell.freed(sequence_id)
    await cell.prefilled(*cell.steps)


async def leave_work_of_every_kind(cell: ThreadCell) -> None:
    """Leave reserved, queued, running, retained, transferred and decoding sequences behind."""
    retained, transferred, decoding, under_way, queued, reserved = (
        request(r, ENDLESS) for r in range(1, 7)
    )
    for sequence in (transferred, decoding, under_way, queued, reserved):
        await cell.reserve(sequence)
    await cell.prefilled(
        cell.submit(
            prefill_step([retained.chunk(0, 20, placement=())], [0, 1]), retained.prompt[:20]
        )
    )
    for sequence in (transferred, decoding):
        cell.submit(step_of(sequence), sequence.prompt)
        await cell.until_received(2, RankKvReceived, sequence_id=sequence.sequence_id)
    await cell.join(decoding)
    await cell.until(lambda: len(cell.tokens(decoding.sequence_id)) > 2)
    first = cell.submit(step_of(under_way), under_way.prompt, ranks=[0])
    second = cell.submit(step_of(queued), queued.prompt, ranks=[0])
    cell.submit(cell.steps[first], under_way.prompt, ranks=[1])
    cell.submit(cell.steps[second], queued.prompt, ranks=[1])


async def test_work_ends_when_its_router_disconnects(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        await leave_work_of_every_kind(cell)
        await cell.disconnect()
        await cell.idle()
        await check_serves(await successor(cell), tiny_llama)
        cell.check_idle()


async def test_a_silent_router_is_superseded_and_leaves_nothing_behind(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silent router's connections are open until then; it is disconnected and never obeyed
    again."""
    async with cell_of(tiny_llama) as cell:
        await leave_work_of_every_kind(cell)
        with pytest.raises(RanksHeld, match=f"generation {cell.generation} still commands"):
            await successor(cell)
        assert not cell.prefill.lost.done()
        monkeypatch.setattr(fence, "LIVENESS_TIMEOUT_S", 0.0)
        other = await successor(cell)
        for gang in (cell.prefill, cell.decode):
            assert f"generation {other.generation} has taken over" in await gang.lost
        await check_serves(other, tiny_llama)
        await cell.idle()
        for gang, members in (("prefill", cell.prefill_gang), ("decode", cell.decode_gang)):
            with pytest.raises(Superseded, match="older"):
                await cell.attach(members.members, gang)
        await check_serves(other, tiny_llama, sequence_id=100)
        cell.check_idle()
        await other.disconnect()
        cell.check_idle()
        with pytest.raises(Superseded, match="older"):
            await cell.attach(cell.prefill_gang.members, "prefill")  # though nobody holds it now


async def test_a_router_keeps_a_rank_that_was_stalled(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router's heartbeats lie unread beside the question of a newer one."""
    said = threading.Event()

    async def from_then_on(seconds: float) -> None:
        await asyncio.to_thread(said.wait, ANSWER_S)
        await asyncio.sleep(seconds)

    monkeypatch.setattr(router_connection, "asyncio", Mock(wraps=asyncio, sleep=from_then_on))
    async with cell_of(tiny_llama) as cell:
        newer = Cell()
        gang = GangClient("prefill", cell.prefill_gang.members, ignore)
        await gang.connect(secret=SECRET, router_id="newer")
        for rank in cell.prefill_gang.ranks:
            rank._attachment._fence.heartbeat(time.monotonic() - 60.0)
        asking = asyncio.create_task(gang.check_free(newer.generation))
        await asyncio.sleep(0)
        cell.prefill.keep_alive()
        said.set()
        with pytest.raises(RanksHeld):
            await asking
        await gang.close()


def ignore(*_: object) -> None:
    """Ignore a notification."""


async def test_a_reservation_that_arrives_after_its_router_left_is_dropped(
    tiny_llama: Path,
) -> None:
    """A rank may read it after the gang has been told that the router is gone."""
    async with cell_of(tiny_llama) as cell:
        await cell.reserve(request(1))
        leader, member = cell.decode_gang.ranks
        owner = leader._attachment.owner
        cell.decode_gang.conduct(lambda sequencer: sequencer.end_owner(owner))
        await cell.freed(1)
        with pytest.raises(Cancelled):
            member.loop.decode_batch.reservations.reserve(request(2).reserve(cell.epoch), owner)
        cell.check_idle()


async def test_many_peers_may_describe_one_rank(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        address = cell.prefill_gang.members.ranks[0]
        onlooker = await RpcClient.connect(
            address.host, address.port, secret=SECRET, name="onlooker", deadline_s=ANSWER_S
        )
        answer = await onlooker.call("describe", None, deadline_s=ANSWER_S)
        assert unpack(RankDescription, answer) == cell.prefill.descriptions[0]
        answer = await onlooker.call("stats", None, deadline_s=ANSWER_S)
        assert unpack(RankStats, answer).kv_slots == 16384
        for method, message in (
            ("prefill", step_of(request(51))),
            ("cancel", CancelSequence(sequence_id=1)),
            ("reserve", request(51).reserve(cell.epoch)),
            ("join", JoinBatch(sequence_id=51, first_token=1)),
        ):
            with pytest.raises(ProtocolError, match="attached"):
                await onlooker.call(method, pack(message), deadline_s=ANSWER_S)
        await onlooker.close()
        await check_serves(cell, tiny_llama)


# --- a router that dies in the middle of sending a step -------------------------------------


async def test_a_step_that_reached_only_some_members_is_dropped(tiny_llama: Path) -> None:
    """The step began nowhere, so no rank waits for it, and its slots are freed."""
    async with cell_of(tiny_llama) as cell:
        for rank in (0, 1):
            sequence = request(1 + rank)
            await cell.reserve(sequence)
            cell.submit(step_of(sequence), sequence.prompt, ranks=[rank])
        await cell.prefill.stats()
        assert all(rank.engine.pool.slots.used for rank in cell.prefill_gang.ranks)
        await cell.disconnect()
        await cell.idle()
        await check_serves(await successor(cell), tiny_llama)


async def test_a_step_that_arrives_after_its_router_left_is_dropped(tiny_llama: Path) -> None:
    """A rank may read it after the gang has been told."""
    async with cell_of(tiny_llama) as cell:
        leader = cell.prefill_gang.ranks[0]
        owner = leader._attachment.owner
        cell.prefill_gang.conduct(lambda sequencer: sequencer.end_owner(owner))
        sequence = request(1)
        cell.submit(step_of(sequence), sequence.prompt)
        await cell.until_received(2, PrefillDone, cancelled=True)
        await cell.idle()


async def test_work_of_every_kind_ends_with_its_router(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        await leave_work_of_every_kind(cell)
        await cell.disconnect()
        await cell.idle()
        await check_serves(await successor(cell), tiny_llama)


async def test_a_step_waits_for_slots_of_a_former_router(tiny_llama: Path) -> None:
    """The former router's KV is still on its way when the next router fills the pool."""
    async with thread_cell(tiny_llama, prefill=1, decode=1, kv_slots=64) as cell:
        request = Request(sequence_id=1, prompt=prompt_of(40, 1), slices=even_slices(40, [0]))
        await cell.reserve(request)
        reservation = cell.decode_gang.ranks[0].loop.decode_batch.reservations.find(1)
        assert reservation is not None
        with reservation.lock:
            cell.submit(prefill_step([request.chunk()], [0]), request.prompt)
            await cell.until(lambda: cell.tokens(1))  # computed, and sending
            big = Request(sequence_id=2, prompt=prompt_of(60, 2), slices=even_slices(60, [0]))
            step_id = cell.submit(prefill_step([big.chunk(0, 59)], [0]), big.prompt[:59])
            await cell.prefill.stats()
            assert cell.prefill_gang.ranks[0].engine.pool.slots.used == 40
        await cell.prefilled(step_id)
        for sequence_id in (1, 2):
            cell.cancel(sequence_id)
        await cell.freed(1, 2)
        await cell.prefill.stats()
        cell.check_idle()
