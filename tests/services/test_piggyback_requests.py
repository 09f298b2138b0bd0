"""The life of a request that rides, over gangs that do as the test says."""

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
from csps.protocols.gang.messages import JoinBatch
from csps.services.requests.request_handle import RequestHandle

RIDING = {"token_budget": 100, "max_batch": 8}


@asynccontextmanager
async def riding(elastic: FakeGang | None = None, **more: Any) -> AsyncIterator[FakeCell]:
    gang = elastic or FakeGang("elastic", "e1")
    async with fake_cell(elastic=gang, policy="chunked_prefill", options=RIDING, **more) as cell:
        yield cell


async def joined(cell: FakeCell, handle: RequestHandle) -> int:
    """Wait until the request rides; returns its number."""
    await until(lambda: handle.state == "prefill")
    sequence_id = cell.sequence_id_of(handle)
    await until(lambda: cell.decode.has_joined(sequence_id))
    return sequence_id


async def test_a_rider_runs_from_submission_to_its_last_token() -> None:
    async with riding() as cell:
        handle = cell.submit(tokens=300, max_tokens=3)
        sequence_id = await joined(cell, handle)
        assert cell.decode.leader.joined == [
            JoinBatch(sequence_id=sequence_id, first_token=None, budget=100)
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


async def test_the_prompt_goes_to_the_ranks_of_the_master_and_to_nobody_else() -> None:
    async with riding(FakeGang("elastic", "e1", instances=3, tp=2)) as cell:
        handle = cell.submit(tokens=300)
        sequence_id = await joined(cell, handle)
        reserved = [rank.reserved[sequence_id] for rank in cell.decode.ranks]
        prompt = handle.spec.prompt.astype("<i4").tobytes()
        for rank, request in enumerate(reserved):
            assert request.prompt == (prompt if rank // 2 == request.master else b"")
        await finish(cell, handle, sequence_id)


async def test_a_rider_joins_when_every_rank_expects_it_and_not_before() -> None:
    async with riding() as cell:
        cell.decode.may_reserve.clear()
        handle = cell.submit()
        await until(lambda: all("reserve" in rank.methods for rank in cell.decode.ranks))
        await loop_iterations()
        assert handle.state == "reserving"
        assert not cell.decode.leader.joined
        cell.decode.may_reserve.set()
        await finish(cell, handle, await joined(cell, handle))


async def test_who_is_cancelled_while_slots_are_reserved_never_joins() -> None:
    async with riding() as cell:
        cell.decode.may_reserve.clear()
        handle = cell.submit()
        await until(lambda: all("reserve" in rank.methods for rank in cell.decode.ranks))
        handle.cancel()
        await loop_iterations()
        cell.decode.may_reserve.set()
        await cell.wait_until_free()
        assert not cell.decode.leader.joined
        assert all(rank.cancelled for rank in cell.decode.ranks)


@pytest.mark.parametrize("drawn", [0, 1, 2])
async def test_who_is_cancelled_on_the_way_gives_everything_back(drawn: int) -> None:
    async with riding() as cell:
        handle = cell.submit(max_tokens=5)
        sequence_id = await joined(cell, handle)
        for index in range(drawn):
            cell.decode.sample(sequence_id, index)
        await until(lambda: handle.timings.tokens == drawn)
        handle.cancel()
        await cell.wait_until_free()


async def test_when_the_gang_dies_prompt_and_tokens_are_computed_again() -> None:
    async with riding() as cell:
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
        (request,) = [it for rank in cell.decode.ranks if (it := rank.reserved[again]).prompt]
        tokens = np.frombuffer(request.prompt, "<i4")
        assert tokens.tolist() == [*range(50), 5, 6]
        assert (request.prompt_length, len(request.generated_tokens)) == (52, 8)
        cell.finish(again, 4, first=2)
        assert [token.token async for token in handle] == [5, 6, 102, 103]
        await cell.wait_until_free()


async def test_a_refused_rider_is_tried_again_and_joins_once() -> None:
    async with riding() as cell:
        cell.decode.refuses = TransferError("full")
        handle = cell.submit()
        await until(lambda: handle.timings.attempts == 2)
        cell.decode.refuses = None
        sequence_id = await joined(cell, handle)
        assert [message.sequence_id for message in cell.decode.leader.joined] == [sequence_id]
        await finish(cell, handle, sequence_id)


async def test_a_rider_that_was_alone_in_two_dying_gangs_fails() -> None:
    async with riding() as cell:
        handle = cell.submit()
        await joined(cell, handle)
        await cell.decode.kill(0)
        await cell.replace(FakeGang("elastic", "e2"))
        await until(lambda: handle.timings.attempts == 2)
        await joined(cell, handle)
        await cell.decode.kill(0)
        with pytest.raises(GangLost):
            await anext(handle)


async def test_on_a_pair_the_gang_that_decodes_is_ridden() -> None:
    async with fake_cell(policy="chunked_prefill", options=RIDING) as cell:
        handle = cell.submit()
        sequence_id = await joined(cell, handle)
        assert not cell.prefill.leader.steps
        await finish(cell, handle, sequence_id)


async def test_sparse_attention_is_refused_where_prompts_are_computed_in_pieces() -> None:
    async with riding() as cell:
        with pytest.raises(InvalidRequest, match="computes all prompts exactly"):
            cell.submit(attention="csa", csa=CsaSettings())


@pytest.mark.parametrize("strategy", ASKED_RINGS)
async def test_rings_are_refused_there_as_well(strategy: AskedRing) -> None:
    async with riding() as cell:
        with pytest.raises(InvalidRequest, match=rf"'{strategy}' cannot .* in pieces"):
            cell.submit(strategy=strategy)


async def test_rings_are_refused_where_the_policy_chooses_them() -> None:
    async with fake_cell(elastic=FakeGang("elastic", "e1"), policy="loongserve") as cell:
        with pytest.raises(InvalidRequest, match=r"'ring_q' cannot .* that it chooses itself"):
            cell.submit(strategy="ring_q")


async def test_a_crowd_of_riders_outlives_its_gang() -> None:
    """More than fit at a time, clients that leave, and a gang that dies under them."""
    async with riding(FakeGang("elastic", "e1", kv_slots=3000)) as cell:
        requests = [cell.submit(50 + 397 * n % 2500, 1 + n % 7) for n in range(40)]
        await until(lambda: len(cell.decode.leader.joined) > 3)
        for number in (0, 3, 35):
            requests[number].cancel()
        await cell.decode.kill(1)
        await cell.replace(FakeGang("elastic", "e2", kv_slots=3000))
        cell.run_by_itself()
        for number, handle in enumerate(requests):
            drawn = [token.index async for token in handle]
            if handle.finish_reason != "cancelled":
                assert drawn == list(range(1 + number % 7))
        assert sum(request.timings.attempts == 2 for request in requests) >= 3
        await cell.wait_until_free()


async def finish(cell: FakeCell, handle: RequestHandle, sequence_id: int) -> None:
    cell.finish(sequence_id, handle.spec.sampling.max_tokens, first=0)
    assert [token async for token in handle][-1].finish_reason == "length"
    await cell.wait_until_free()
