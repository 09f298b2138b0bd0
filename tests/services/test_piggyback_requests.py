"""The life of a piggybacked request over gangs that do as a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fake_gangs import FakeCell, FakeGang, fake_cell, loop_iterations, until

from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import ASKED_RINGS, AskedRing
from csps.protocols.core.errors import GangLost, InvalidRequest, TransferError
from csps.protocols.gang.members import GangRole
from csps.protocols.gang.messages import JoinBatch
from csps.services.requests.request_handle import RequestHandle

RIDING = {"token_budget": 100, "max_batch": 8}


@asynccontextmanager
async def chunked_cell(elastic: FakeGang | None = None, **more: Any) -> AsyncIterator[FakeCell]:
    gang = elastic or FakeGang("elastic", "e1")
    async with fake_cell(elastic=gang, policy="chunked_prefill", options=RIDING, **more) as cell:
        yield cell


async def joined(cell: FakeCell, handle: RequestHandle) -> int:
    """Wait until the request has joined the decode batch; return its sequence_id."""
    await until(lambda: handle.state == "prefill")
    sequence_id = cell.sequence_id_of(handle)
    await until(lambda: cell.decode.has_joined(sequence_id))
    return sequence_id


async def test_a_piggybacked_request_runs_from_submission_to_its_last_token() -> None:
    async with chunked_cell() as cell:
        handle = cell.submit(tokens=300, max_tokens=3)
        sequence_id = await joined(cell, handle)
        master = cell.decode.leader.reserved[sequence_id].master
        assert cell.decode.leader.joined == [
            JoinBatch(sequence_id=sequence_id, first_token=None, budget=100, instances=(master,))
        ]
        assert cell.decode.leader.methods == ["reserve", "join"], "no link, and no step"
        cell.decode.sample(sequence_id, 0, token=42)
        assert (await anext(handle)).token == 42
        assert handle.state == "decoding"
        cell.finish(sequence_id, 3)
        assert [token.token async for token in handle] == [101, 102]
        await cell.wait_until_free()
        for name in ("plan_s", "queue_s", "prefill_s", "transfer_s", "decode_s", "ttft_s"):
            assert getattr(handle.timings, name) >= 0
        plan, placement = handle.explain()["plan"], handle.explain()["placement"]
        assert plan["strategy"] == "ride"
        assert "100 tokens an iteration" in plan["reason"]
        assert placement["bounds"] == (0, 300)
        assert placement["group"] == (placement["master"],)


async def test_the_prompt_goes_to_the_ranks_of_the_master_only() -> None:
    async with chunked_cell(FakeGang("elastic", "e1", instances=3, tp=2)) as cell:
        handle = cell.submit(tokens=300)
        sequence_id = await joined(cell, handle)
        reserved = [rank.reserved[sequence_id] for rank in cell.decode.ranks]
        prompt = handle.spec.prompt.astype("<i4").tobytes()
        for rank, request in enumerate(reserved):
            assert request.prompt == (prompt if rank // 2 == request.master else b"")
        await finish(cell, handle, sequence_id)


@pytest.mark.parametrize("role", ["elastic", "decode"])
async def test_piggybacked_requests_tie_no_other_instances_to_their_iterations(
    role: GangRole,
) -> None:
    """Each names the instances that it needs."""
    gangs: dict[str, Any] = {role: FakeGang(role, "g1", instances=2)}
    async with fake_cell(**gangs, policy="chunked_prefill", options=RIDING) as cell:
        handles = [cell.submit(tokens=300), cell.submit(tokens=200)]
        sequence_ids = [await joined(cell, handle) for handle in handles]
        named = {message.sequence_id: message.instances for message in cell.decode.leader.joined}
        masters = {at: cell.decode.leader.reserved[at].master for at in sequence_ids}
        assert set(masters.values()) == {0, 1}
        assert named == {at: (master,) for at, master in masters.items()}
        for handle, sequence_id in zip(handles, sequence_ids, strict=True):
            cell.finish(sequence_id, 4, first=0)
            assert [token async for token in handle][-1].finish_reason == "length"
        await cell.wait_until_free()


async def test_a_piggybacked_request_joins_once_every_rank_has_reserved() -> None:
    async with chunked_cell() as cell:
        cell.decode.may_reserve.clear()
        handle = cell.submit()
        await until(lambda: all("reserve" in rank.methods for rank in cell.decode.ranks))
        await loop_iterations()
        assert handle.state == "reserving"
        assert not cell.decode.leader.joined
        cell.decode.may_reserve.set()
        await finish(cell, handle, await joined(cell, handle))


async def test_a_request_cancelled_while_slots_are_reserved_never_joins() -> None:
    async with chunked_cell() as cell:
        cell.decode.may_reserve.clear()
        handle = cell.submit()
        await until(lambda: all("reserve" in rank.methods for rank in cell.decode.ranks))
        handle.cancel()
        await loop_iterations()
        cell.decode.may_reserve.set()
        await cell.wait_until_free()
        assert not cell.decode.leader.joined
        assert all(rank.cancelled for rank in cell.decode.ranks)


@pytest.mark.parametrize("generated", [0, 1, 2])
async def test_a_request_cancelled_while_it_runs_frees_everything(generated: int) -> None:
    async with chunked_cell() as cell:
        handle = cell.submit(max_tokens=5)
        sequence_id = await joined(cell, handle)
        for index in range(generated):
            cell.decode.sample(sequence_id, index)
        await until(lambda: handle.timings.tokens == generated)
        handle.cancel()
        await cell.wait_until_free()


async def test_when_the_gang_dies_prompt_and_tokens_are_computed_again() -> None:
    async with chunked_cell() as cell:
        handle = cell.submit(tokens=50, max_tokens=4)
        sequence_id = await joined(cell, handle)
        cell.decode.sample(sequence_id, 0, token=5)
        cell.decode.sample(sequence_id, 1, token=6)
        await until(lambda: handle.timings.tokens == 2)
        await cell.decode.kill(1)
        await until(lambda: not cell.service.ready)
        assert cell.service.trouble == "waiting for an elastic gang"
        await cell.replace(FakeGang("elastic", "e2"))
        again = await joined(cell, handle)
        (request,) = [
            reserved for rank in cell.decode.ranks if (reserved := rank.reserved[again]).prompt
        ]
        tokens = np.frombuffer(request.prompt, "<i4")
        assert tokens.tolist() == [*range(50), 5, 6]
        assert (request.prompt_tokens, request.first_index) == (52, 2)
        cell.finish(again, 4, first=2)
        assert [token.token async for token in handle] == [5, 6, 102, 103]
        await cell.wait_until_free()


async def test_a_request_whose_slots_are_refused_is_retried_and_joins_once() -> None:
    async with chunked_cell() as cell:
        cell.decode.refuses = TransferError("full")
        handle = cell.submit()
        await until(lambda: handle.timings.attempts == 2)
        cell.decode.refuses = None
        sequence_id = await joined(cell, handle)
        assert [message.sequence_id for message in cell.decode.leader.joined] == [sequence_id]
        await finish(cell, handle, sequence_id)


async def test_a_request_alone_on_two_dying_gangs_fails() -> None:
    async with chunked_cell() as cell:
        handle = cell.submit()
        await joined(cell, handle)
        await cell.decode.kill(0)
        await cell.replace(FakeGang("elastic", "e2"))
        await until(lambda: handle.timings.attempts == 2)
        await joined(cell, handle)
        await cell.decode.kill(0)
        with pytest.raises(GangLost):
            await anext(handle)


async def test_a_pairs_decode_gang_prefills_short_ends() -> None:
    async with fake_cell(policy="chunked_prefill", options=RIDING) as cell:
        handle = cell.submit()
        sequence_id = await joined(cell, handle)
        assert not cell.prefill.leader.steps
        await finish(cell, handle, sequence_id)


async def test_sparse_attention_is_refused_under_chunked_prefill() -> None:
    async with chunked_cell() as cell:
        with pytest.raises(InvalidRequest, match="computes all prompts exactly"):
            cell.submit(attention="csa", csa=CsaSettings())


@pytest.mark.parametrize("strategy", ASKED_RINGS)
async def test_rings_are_refused_under_chunked_prefill(strategy: AskedRing) -> None:
    async with chunked_cell() as cell:
        with pytest.raises(
            InvalidRequest, match=rf"'{strategy}' cannot .* in chunks beside decoding"
        ):
            cell.submit(strategy=strategy)


async def test_rings_are_refused_where_the_policy_chooses_them() -> None:
    async with fake_cell(elastic=FakeGang("elastic", "e1"), policy="loongserve") as cell:
        with pytest.raises(InvalidRequest, match=r"'ring_q' cannot .* that it chooses itself"):
            cell.submit(strategy="ring_q")


async def test_many_piggybacked_requests_survive_their_gang() -> None:
    """More requests than fit at a time, some of them cancelled, while the gang dies."""
    async with chunked_cell(FakeGang("elastic", "e1", kv_slots=3000)) as cell:
        requests = [cell.submit(50 + 397 * n % 2500, 1 + n % 7) for n in range(40)]
        await until(lambda: len(cell.decode.leader.joined) > 3)
        for number in (0, 3, 35):
            requests[number].cancel()
        await cell.decode.kill(1)
        await cell.replace(FakeGang("elastic", "e2", kv_slots=3000))
        cell.run_by_itself()
        for number, handle in enumerate(requests):
            generated = [token.index async for token in handle]
            if handle.finish_reason != "cancelled":
                assert generated == list(range(1 + number % 7))
        assert sum(request.timings.attempts == 2 for request in requests) >= 3
        await cell.wait_until_free()


async def finish(cell: FakeCell, handle: RequestHandle, sequence_id: int) -> None:
    cell.finish(sequence_id, handle.spec.sampling.max_tokens, first=0)
    assert [token async for token in handle][-1].finish_reason == "length"
    await cell.wait_until_free()
