"""The life of a request over gangs that do as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_gangs import QUICK, FakeCell, FakeGang, fake_cell, loop_iterations, request_spec, until

from csps.protocols.attention.plan import StrategyChoices, StrategyQuestions
from csps.protocols.core.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    GangLost,
    QueueFull,
    RateLimited,
    TransferError,
    Unauthorized,
)
from csps.protocols.core.placement import Span
from csps.protocols.gang.messages import (
    LinkBroken,
    PrefillProgress,
    RequestFailed,
    SampledToken,
    SamplerInputs,
)
from csps.protocols.rpc.schema import decode, pack
from csps.services.requests import request_handle
from csps.services.requests.request_handle import ClientTooSlow, RequestHandle
from csps.services.requests.request_spec import ApiKey, PrefixKey, SloBounds
from csps.services.router.key_limits import KeyLimiter
from csps.services.scheduling.core.scheduler import RoundResult, Scheduler
from csps.services.scheduling.events.events import AnyEvent
from csps.services.scheduling.events.limits import BLOCK_TOKENS, QueueLimits, ReuseSettings
from csps.services.settings.settings import AuthSettings, KeyLimits
from csps.services.telemetry.metrics import Metrics


async def read(handle: RequestHandle) -> list[SampledToken]:
    return [token async for token in handle]


async def test_answers_on_several_decode_instances_name_those_that_they_need() -> None:
    """Sequences that share no instance are iterated apart, also on a gang that only decodes."""
    decode = FakeGang("decode", "d1", instances=2, tp=2)
    async with fake_cell(decode=decode, policy="fixed_sp", options={"sp": 1}) as cell:
        handles = [cell.submit(tokens=300), cell.submit(tokens=200)]
        sequence_ids = [await cell.decoding(handle) for handle in handles]
        reserved = cell.decode.leader.reserved
        masters = {at: reserved[at].master for at in sequence_ids}
        named = {message.sequence_id: message.instances for message in cell.decode.leader.joined}
        assert set(masters.values()) == {0, 1}
        assert named == {at: (master,) for at, master in masters.items()}
        for sequence_id in sequence_ids:
            cell.finish(sequence_id, 4)
        for handle in handles:
            assert len(await read(handle)) == 4
        await cell.wait_until_free()


async def test_a_request_runs_from_submission_to_its_last_token() -> None:
    async with fake_cell() as cell:
        handle = cell.submit(tokens=300, max_tokens=3)
        sequence_id = await cell.decoding(handle)
        cell.finish(sequence_id, 3)
        tokens = await read(handle)
        assert [token.index for token in tokens] == [0, 1, 2]
        assert [token.token for token in tokens] == [7, 101, 102]
        assert tokens[-1].finish_reason == handle.finish_reason == "length"
        await cell.wait_until_free()
        timings = handle.timings
        assert timings.tokens == 3
        assert timings.attempts == 1
        assert timings.compute_s == pytest.approx(0.1)
        for name in ("plan_s", "queue_s", "prefill_s", "transfer_s", "decode_s", "ttft_s"):
            assert getattr(timings, name) >= 0
        assert handle.explain()["plan"]["reason"].startswith("exact attention loses nothing; ")
        assert handle.explain()["placement"]["bounds"] == (0, 300)
        assert handle.explain()["plan"]["predicted_ttft_ms"] == pytest.approx(30 + 5, abs=5)


async def test_a_sampled_first_token_is_not_predicted_again() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        await cell.decoding(handle)
        await cell.decode.kill(0)
        await cell.replace(FakeGang("decode", "d2"))
        await until(lambda: handle.timings.attempts == 2 and handle.state == "prefill")
        assert handle.explain()["plan"]["predicted_ttft_ms"] is None


async def test_limits_of_a_key_count_until_its_requests_end() -> None:
    auth = AuthSettings(limits=KeyLimits(concurrent_requests=1, tokens_per_minute=1000))
    alice, bob = (ApiKey(name, tenant, name.encode()) for tenant, name in enumerate("ab", 1))
    now_s = 0.0
    limiter = KeyLimiter(auth, lambda: now_s)
    metrics = Metrics("m")
    async with fake_cell(limiter=limiter, observer=metrics) as cell:

        def submit(key: ApiKey) -> RequestHandle:
            cell.service.check_room(SloBounds(), key, ahead=0)
            return cell.service.submit(replace(request_spec(tokens=300), api_key=key))

        first = submit(alice)
        with pytest.raises(RateLimited, match="concurrent requests"):
            submit(alice)
        submit(bob).cancel()
        sequence_id = await cell.decoding(first)
        cell.finish(sequence_id, 3)
        await read(first)
        submit(alice).cancel()  # 300 prompt and 3 generated tokens before, and 300 now
        submit(alice).cancel()
        with pytest.raises(RateLimited, match="tokens per minute"):
            submit(alice)
        now_s = 60.0
        submit(alice).cancel()
        assert b'code="rate_limit_exceeded"' in metrics.render()


async def test_a_share_of_kv_slots_is_the_schedulers_business() -> None:
    auth = AuthSettings(overrides={"a": KeyLimits(kv_share=0.05)})
    alice, bob = (ApiKey(name, tenant, name.encode()) for tenant, name in enumerate("ab", 1))
    async with fake_cell(limiter=KeyLimiter(auth)) as cell:
        check = cell.service.capacity_check
        assert check is not None
        most = check.decode_slots // 20
        spec = request_spec(tokens=most // 2, max_tokens=4)
        async with cell.service.submit(replace(spec, api_key=alice)) as first:
            second = cell.service.submit(replace(spec, api_key=alice))
            with pytest.raises(RateLimited, match="KV slots"):  # as soon as the scheduler knows
                await read(second)
            await cell.decoding(first)
            with pytest.raises(RateLimited, match="KV slots"):
                cell.service.submit(replace(spec, api_key=alice))
            cell.service.submit(replace(spec, api_key=bob)).cancel()


async def test_the_requests_of_a_revoked_key_end() -> None:
    async with fake_cell() as cell:
        keys = [ApiKey(name, tenant, name.encode()) for tenant, name in enumerate("ab", 1)]
        ended, kept = (
            cell.service.submit(replace(request_spec(tokens=300), api_key=key)) for key in keys
        )
        await cell.decoding(ended)
        sequence_id = await cell.decoding(kept)
        cell.service.revoke({b"a"})
        with pytest.raises(Unauthorized, match="revoked"):
            await read(ended)
        cell.finish(sequence_id, 3)
        assert len(await read(kept)) == 3
        await cell.wait_until_free()


async def test_every_rank_gets_the_step_with_its_own_tokens() -> None:
    async with fake_cell(prefill=FakeGang("prefill", "p1", instances=3, tp=2)) as cell:
        await cell.prefilling(cell.submit(tokens=900))  # the first instance is busy
        handle = cell.submit(tokens=1500)
        step = await cell.prefilling(handle)
        assert step.group == (1, 2)
        tokens = [rank.steps[1].tokens for rank in cell.prefill.ranks]
        expected = handle.spec.prompt.astype("<i4")
        for instance in range(3):
            own_tokens = b""
            if instance in step.group:
                member = step.group.index(instance)
                own_tokens = expected[step.bounds[member] : step.bounds[member + 1]].tobytes()
            assert tokens[2 * instance] == tokens[2 * instance + 1] == own_tokens


async def test_slots_are_reserved_on_every_decode_rank_before_the_step_is_sent() -> None:
    async with fake_cell() as cell:
        cell.decode.may_reserve.clear()
        handle = cell.submit()
        await until(lambda: all(rank.methods[-1] == "reserve" for rank in cell.decode.ranks))
        await loop_iterations()
        assert handle.state == "reserving"
        assert not cell.prefill.leader.steps
        cell.decode.may_reserve.set()
        await cell.prefilling(handle)


async def test_decode_starts_once_all_kv_is_received() -> None:
    async with fake_cell(decode=FakeGang("decode", "d1", instances=2, tp=2)) as cell:
        handle = cell.submit(tokens=8500)
        step = await cell.prefilling(handle)
        sequence_id = step.chunks[0].sequence_id
        cell.prefill.sample(sequence_id, 0, token=42)
        assert (await anext(handle)).token == 42
        receiving_ranks = [rank for rank in cell.decode.ranks if rank.reserved[sequence_id].slices]
        assert len(receiving_ranks) == 4
        assert handle.state == "receiving"
        assert not cell.decode.leader.joined
        cell.decode.receive_kv(sequence_id)
        await until(lambda: cell.decode.leader.joined)
        assert cell.decode.leader.joined[0].first_token == 42
        assert not cell.decode.ranks[1].joined


async def test_a_wrong_number_of_received_tokens_is_an_error() -> None:
    async with fake_cell(limits=QueueLimits(max_attempts=1)) as cell:
        handle = cell.submit()
        sequence_id = (await cell.prefilling(handle)).chunks[0].sequence_id
        for rank in cell.decode.ranks:
            first = rank.reserved[sequence_id].slices[0]
            shorter = first.cut(Span(first.start, first.stop - 1))
            rank.reserved[sequence_id] = msgspec.structs.replace(
                rank.reserved[sequence_id], slices=(shorter,)
            )
        cell.decode.receive_kv(sequence_id)
        with pytest.raises(Exception, match="KV of 99 tokens, expected 100"):
            await read(handle)


async def test_an_answer_of_one_token_reserves_no_decode_slots() -> None:
    async with fake_cell() as cell:
        handle = cell.submit(max_tokens=1)
        step = await cell.prefilling(handle)
        assert not step.chunks[0].decoded, "nothing is sent"
        cell.prefill.sample(step.chunks[0].sequence_id, 0, finish="length")
        assert len(await read(handle)) == 1
        cell.prefill.finish_step(step)
        await cell.wait_until_free()
        assert all("reserve" not in rank.methods for rank in cell.decode.ranks)
        assert not any(rank.cancelled for rank in (*cell.decode.ranks, *cell.prefill.ranks))


async def test_an_answer_that_ends_early_cancels_its_reservation() -> None:
    async with fake_cell() as cell:
        handle = cell.submit(max_tokens=3)
        step = await cell.prefilling(handle)
        sequence_id = step.chunks[0].sequence_id
        cell.prefill.sample(sequence_id, 0, finish="stop")
        assert len(await read(handle)) == 1
        await until(lambda: all(sequence_id in rank.cancelled for rank in cell.decode.ranks))
        assert not cell.prefill.leader.cancelled
        cell.prefill.finish_step(step)
        await cell.wait_until_free()


async def test_all_ranks_get_all_steps_in_one_order() -> None:
    gang = FakeGang("prefill", "p1", instances=3)
    async with fake_cell(prefill=gang) as cell:
        cell.run_by_itself()
        requests = [cell.submit(tokens=50 + 397 * n % 2500) for n in range(30)]
        await asyncio.gather(*map(read, requests))
        orders = [[step.step_id for step in rank.steps] for rank in cell.prefill.ranks]
        assert orders[0] == orders[1] == orders[2]
        assert sum(len(step.chunks) for step in cell.prefill.leader.steps) == 30
        await cell.wait_until_free()


async def test_short_prompts_preempt_a_long_one_in_one_high_priority_step() -> None:
    metrics = Metrics("tiny")
    gang = FakeGang("prefill", "p1", instances=1)
    async with fake_cell(prefill=gang, observer=metrics) as cell:
        await cell.prefilling(cell.submit(tokens=3000))
        shorts = [cell.submit(tokens=100) for _ in range(3)]
        await until(lambda: all(short.state == "prefill" for short in shorts))
        await until(lambda: len(cell.prefill.leader.steps) == 2)
        first, second = cell.prefill.leader.steps
        assert not first.high_priority
        assert second.high_priority
        assert len(second.chunks) == 3
        assert 'csps:num_preemptions_total{model_name="tiny"} 1.0' in metrics.render().decode()


# --- cancellation ------------------------------------------------------------------------------


async def test_a_request_cancelled_in_the_queue_takes_no_slots() -> None:
    async with fake_cell(prefill=FakeGang("prefill", "p1", kv_slots=1000)) as cell:
        first, second = cell.submit(tokens=1900), cell.submit(tokens=1900)
        await cell.prefilling(first)
        assert second.state == "queued"
        second.cancel()
        assert await read(second) == []
        await until(lambda: cell.service.counts.waiting == 0)
        first.cancel()
        await cell.wait_until_free()


async def test_a_request_cancelled_while_slots_are_reserved_frees_them() -> None:
    async with fake_cell() as cell:
        cell.decode.may_reserve.clear()
        handle = cell.submit()
        await until(lambda: handle.state == "reserving")
        handle.cancel()
        assert await read(handle) == []
        assert cell.service.counts.decode_kv > 0
        cell.decode.may_reserve.set()
        await cell.wait_until_free()
        assert not cell.prefill.leader.steps


@pytest.mark.parametrize("policy", ["csps", "chunked_prefill"])
async def test_a_request_cancelled_just_when_its_slots_are_reserved_stays_over(
    policy: str,
) -> None:
    """Its step, or its piggybacked prompt, is sent before the scheduler hears of the end."""
    async with fake_cell(policy=policy) as cell:
        cell.decode.may_reserve.clear()
        handle = cell.submit()
        await until(lambda: handle.state == "reserving")
        (sequence,) = cell.service._requests.sequences.values()
        assert sequence.reserving is not None
        await asyncio.sleep(0)  # now something waits for the reservation, and is woken first
        sequence.reserving.add_done_callback(lambda _: handle.cancel())
        cell.decode.may_reserve.set()
        assert await read(handle) == []
        await until(lambda: cell.service.counts.running == 0)
        assert handle.state == "finished"
        handle.cancel()


async def test_a_batch_runs_without_the_request_cancelled_while_slots_were_reserved() -> None:
    async with fake_cell() as cell:
        cell.decode.may_reserve.clear()
        runs = [cell.submit(tokens=count) for count in (50, 70, 60, 40)]
        await until(lambda: all(run.state == "reserving" for run in runs))
        runs[1].cancel()
        cell.decode.may_reserve.set()
        await until(lambda: all(runs[index].state == "prefill" for index in (0, 2, 3)))
        steps = cell.prefill.leader.steps
        await until(lambda: sum(len(step.chunks) for step in steps) == 3)
        lengths = sorted(chunk.length for step in steps for chunk in step.chunks)
        assert lengths == [40, 50, 60]
        for step in steps:
            assert step.bounds[-1] == sum(chunk.length for chunk in step.chunks)
        for handle in runs:
            handle.cancel()
        await cell.wait_until_free()


@pytest.mark.parametrize("stage", ["prefill", "receiving", "decoding"])
async def test_a_running_request_that_is_cancelled_frees_its_slots_when_ranks_report_it(
    stage: str,
) -> None:
    async with fake_cell() as cell:
        cell.prefill.obeys_cancel = cell.decode.obeys_cancel = False
        handle = cell.submit()
        step = await cell.prefilling(handle)
        sequence_id = step.chunks[0].sequence_id
        if stage != "prefill":
            cell.prefill.sample(sequence_id, 0)
            await until(lambda: handle.state == "receiving")
        if stage == "decoding":
            cell.decode.receive_kv(sequence_id)
            await until(lambda: handle.state == "decoding")
        async with handle:
            pass
        assert handle.finish_reason == "cancelled"
        ranks = cell.decode.ranks if stage == "decoding" else cell.prefill.ranks + cell.decode.ranks
        await until(lambda: all(sequence_id in rank.cancelled for rank in ranks))
        cell.decode.sample(
            sequence_id, handle.timings.tokens
        )  # it crossed the cancellation on its way
        await loop_iterations()
        assert cell.service.counts.decode_kv > 0
        assert cell.service.counts.prefill_kv > 0
        for rank in ranks:
            rank.free_cancelled(sequence_id)
        if stage == "decoding":  # all KV was sent, so that there was nothing to cancel
            cell.prefill.finish_step(step)
        await cell.wait_until_free()
        assert await read(handle) == []


async def test_a_stop_string_ends_the_request_with_reason_stop() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        await cell.decoding(handle)
        handle.cancel("stop")
        assert handle.finish_reason == "stop"
        assert handle.state == "finished"
        await cell.wait_until_free()


# --- lost gangs --------------------------------------------------------------------------------


async def test_a_request_is_retried_if_prefill_dies_before_the_first_token() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        old = (await cell.prefilling(handle)).chunks[0].sequence_id
        await cell.prefill.kill(1)
        await until(lambda: handle.state == "queued")
        await until(lambda: all(old in rank.cancelled for rank in cell.decode.ranks))
        await cell.replace(FakeGang("prefill", "p2"))
        sequence_id = await cell.decoding(handle)
        assert sequence_id != old
        cell.finish(sequence_id, 4)
        assert len(await read(handle)) == 4
        assert handle.timings.attempts == 2
        await cell.wait_until_free()


async def test_a_request_continues_with_the_second_token_if_prefill_dies_after_the_first() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        cell.prefill.sample((await cell.prefilling(handle)).chunks[0].sequence_id, 0)
        await until(lambda: handle.state == "receiving")
        await cell.prefill.kill(0)
        await cell.replace(FakeGang("prefill", "p2"))
        await check_continues(cell, handle, generated_tokens=[7])


async def check_continues(
    cell: FakeCell, handle: RequestHandle, generated_tokens: list[int]
) -> None:
    """Check that the next attempt computes prompt and generated tokens, and samples the rest."""
    step = await cell.prefilling(handle)
    (chunk,) = step.chunks
    assert chunk.length == 100 + len(generated_tokens)
    assert chunk.first_index == len(generated_tokens)
    (packed,) = [
        rank.samplers[chunk.sequence_id]
        for rank in cell.prefill.ranks
        if chunk.sequence_id in rank.samplers
    ]
    inputs = decode(SamplerInputs, packed)
    assert list(np.frombuffer(inputs.generated_tokens, "<i4")) == generated_tokens
    tokens = b"".join(rank.steps[-1].tokens for rank in cell.prefill.ranks)
    assert list(np.frombuffer(tokens, "<i4")) == [*range(100), *generated_tokens]
    reserved = [rank.reserved[chunk.sequence_id] for rank in cell.decode.ranks]
    assert {(message.prompt_tokens, message.first_index) for message in reserved} == {
        (chunk.length, chunk.first_index)
    }
    assert {message.sampler for message in reserved} <= {b"", packed}
    cell.prefill.sample(chunk.sequence_id, len(generated_tokens), token=50)
    cell.decode.receive_kv(chunk.sequence_id)
    cell.prefill.finish_step(step)
    await until(lambda: cell.decode.has_joined(chunk.sequence_id))
    assert cell.decode.leader.joined[-1].first_token == 50
    cell.decode.sample(chunk.sequence_id, len(generated_tokens) + 1, token=51, finish="stop")
    cell.decode.free(chunk.sequence_id)
    tokens_read = await read(handle)
    assert [token.token for token in tokens_read] == [*generated_tokens, 50, 51]
    assert [token.index for token in tokens_read] == list(range(len(generated_tokens) + 2))
    assert handle.timings.attempts == 2
    await cell.wait_until_free()


async def test_decoding_continues_while_prefill_is_replaced() -> None:
    async with fake_cell() as cell:
        handle = cell.submit(max_tokens=5)
        sequence_id = await cell.decoding(handle)
        await cell.prefill.kill(0)
        await until(lambda: not cell.service.ready)
        cell.decode.sample(sequence_id, 1)
        assert [(await anext(handle)).index for _ in range(2)] == [0, 1]
        await cell.replace(FakeGang("prefill", "p2"))
        await until(lambda: cell.service.ready)
        cell.decode.sample(sequence_id, 2, finish="stop")
        cell.decode.free(sequence_id)
        assert len(await read(handle)) == 1
        await cell.wait_until_free()


async def test_a_request_is_retried_if_decode_dies_before_the_first_token() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        old = (await cell.prefilling(handle)).chunks[0].sequence_id
        await cell.decode.kill(1)
        await until(lambda: all(old in rank.cancelled for rank in cell.prefill.ranks))
        await cell.replace(FakeGang("decode", "d2"))
        sequence_id = await cell.decoding(handle)
        cell.finish(sequence_id, 4)
        assert len(await read(handle)) == 4
        await cell.wait_until_free()


async def test_an_answer_continues_with_the_next_token_if_decode_dies() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        sequence_id = await cell.decoding(handle)
        cell.decode.sample(sequence_id, 1, token=8)
        await until(lambda: handle.timings.tokens == 2)
        await cell.decode.kill(0)
        await cell.replace(FakeGang("decode", "d2"))
        await check_continues(cell, handle, generated_tokens=[7, 8])


async def test_a_request_is_retried_if_decode_dies_while_slots_are_reserved() -> None:
    async with fake_cell() as cell:
        cell.decode.may_reserve.clear()
        handle = cell.submit()
        await until(lambda: handle.state == "reserving")
        await cell.decode.kill(0)
        await until(lambda: handle.state == "queued")
        await until(lambda: cell.service.counts.prefill_kv == 0)
        await cell.replace(FakeGang("decode", "d2"))
        cell.finish(await cell.decoding(handle), 4)
        assert len(await read(handle)) == 4
        await cell.wait_until_free()


async def test_a_retried_request_keeps_its_place_in_the_queue() -> None:
    prefill = FakeGang("prefill", "p1", kv_slots=1000)
    async with fake_cell(prefill=prefill) as cell:
        first, second = cell.submit(tokens=1900), cell.submit(tokens=1800)
        await cell.prefilling(first)
        await cell.prefill.kill(0)
        await until(lambda: first.state == "queued")
        await cell.replace(FakeGang("prefill", "p2", kv_slots=1000))
        step = await cell.prefilling(first)
        assert step.bounds[-1] == 1900
        assert second.state == "queued"


async def test_a_request_fails_after_its_last_attempt() -> None:
    async with fake_cell(limits=QueueLimits(max_attempts=2)) as cell:
        handle = cell.submit()
        for attempt in (1, 2):
            await until(lambda attempt=attempt: handle.timings.attempts == attempt)
            step = await cell.prefilling(handle)
            cell.prefill.fail(step.chunks[0].sequence_id, "TransferError")
            await until(lambda: handle.state != "prefill")
        with pytest.raises(TransferError, match="as the test says"):
            await read(handle)
        await cell.wait_until_free()


async def test_a_request_alone_on_two_dying_gangs_fails() -> None:
    async with fake_cell(limits=QueueLimits(max_attempts=10)) as cell:
        suspect, other = cell.submit(), cell.submit(tokens=3000)
        await cell.prefilling(suspect)
        await cell.prefilling(other)
        await cell.prefill.kill(0)  # it was not alone
        await until(lambda: suspect.state == other.state == "queued")
        other.cancel()
        for gang_id in ("p2", "p3"):
            assert not suspect.ended
            await cell.replace(FakeGang("prefill", gang_id))
            await cell.prefilling(suspect)
            await cell.prefill.kill(0)
            await until(lambda: suspect.state != "prefill")
        with pytest.raises(GangLost, match="the prefill gang was lost"):
            await read(suspect)
        await until(lambda: cell.service.counts.waiting == 0)


async def test_a_dead_decode_gangs_sequences_are_forgotten() -> None:
    async with fake_cell(limits=QueueLimits(max_attempts=1)) as cell:
        handle = cell.submit()
        await cell.decoding(handle)
        await cell.decode.kill(0)
        with pytest.raises(GangLost):
            await read(handle)
        cell.service.check_integrity()


def _hang_up_on_decode(cell: FakeCell) -> None:
    assert cell.cluster.link is not None
    cell.cluster.link.decode.disconnect("as the test says")


async def test_a_request_may_be_cancelled_just_as_its_decode_gang_dies() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        await cell.decoding(handle)
        handle.cancel()
        _hang_up_on_decode(cell)
        await loop_iterations()
        cell.service.check_integrity()


async def test_prefill_cancels_a_sequence_that_fails_as_its_decode_gang_dies() -> None:
    async with fake_cell() as cell:
        sequence_id = (await cell.prefilling(cell.submit())).chunks[0].sequence_id
        link = cell.cluster.link
        assert link is not None
        failed = RequestFailed(sequence_id=sequence_id, rank=0, code="TransferError", message="no")
        cell.service.notified(link.prefill, 0, "failed", pack(failed))
        _hang_up_on_decode(cell)
        await until(lambda: all(sequence_id in rank.cancelled for rank in cell.prefill.ranks))


async def test_slots_refused_as_the_prefill_gang_dies_are_forgotten() -> None:
    async with fake_cell(limits=QueueLimits(max_attempts=1)) as cell:
        cell.decode.may_reserve.clear()
        cell.decode.refuses = TransferError("no")
        handle = cell.submit()
        await until(lambda: all("reserve" in rank.methods for rank in cell.decode.ranks))
        await cell.prefill.kill(0)
        cell.decode.may_reserve.set()
        with pytest.raises((GangLost, TransferError)):
            await read(handle)
        await loop_iterations()
        cell.service.check_integrity()


async def test_a_clients_mistake_is_not_retried() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        cell.prefill.fail((await cell.prefilling(handle)).chunks[0].sequence_id, "InvalidRequest")
        with pytest.raises(ValueError, match="as the test says"):
            await read(handle)
        assert handle.timings.attempts == 1


async def test_refused_slots_are_counted_as_free() -> None:
    async with fake_cell(limits=QueueLimits(max_attempts=1)) as cell:
        cell.decode.refuses = TransferError("no")
        with pytest.raises(TransferError):
            await read(cell.submit())
        await cell.wait_until_free()


async def test_a_request_fails_if_no_gang_comes_in_time() -> None:
    async with fake_cell(deadlines=replace(QUICK, gang_recovery_ns=50_000_000)) as cell:
        await cell.prefill.kill(0)
        await until(lambda: not cell.service.ready)
        with pytest.raises(GangLost, match=r"for 0\.05 s"):
            await read(cell.submit())


async def test_requests_submitted_before_the_gangs_are_served() -> None:
    async with fake_cell(ready=False) as cell:
        fits, never_fits = cell.submit(), cell.submit(tokens=30_000)
        cell.finish(await cell.decoding(fits), 4)
        assert len(await read(fits)) == 4
        with pytest.raises(ContextLengthExceeded):
            await read(never_fits)


async def test_a_silent_gang_is_reset() -> None:
    deadlines = replace(QUICK, prefill_liveness_ns=50_000_000)
    async with fake_cell(deadlines=deadlines, limits=QueueLimits(max_attempts=1)) as cell:
        with pytest.raises(GangLost, match="silent"):
            await read(cell.submit())
        await until(lambda: len(cell.prefill.leader.attached) == 2)
        first, second = cell.prefill.leader.attached
        assert first != second
        await until(lambda: cell.service.ready)


async def test_a_gang_that_is_reset_is_replaced() -> None:
    """It answers pings, but its engines may wait for each other for half an hour."""
    asked: list[str] = []

    async def replace_gang(gang_id: str) -> bool:
        asked.append(gang_id)
        return True

    deadlines = replace(QUICK, prefill_liveness_ns=50_000_000)
    async with fake_cell(deadlines=deadlines, limits=QueueLimits(max_attempts=1)) as cell:
        cell.directory.replace = replace_gang  # type: ignore[method-assign]
        with pytest.raises(GangLost, match="silent"):
            await read(cell.submit())
        await until(lambda: asked)
        assert asked == ["p1"]


async def test_progress_of_a_former_routers_step_is_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The ranks are attached, but still finish that step."""
    gang = FakeGang("prefill", "p1")
    gang.may_connect.clear()
    async with fake_cell(prefill=gang, ready=False) as cell:
        await until(lambda: all(rank.connections for rank in gang.ranks))
        gang.leader.notify("prefill_progress", PrefillProgress(rank=0))
        gang.may_connect.set()
        handle = cell.submit()
        cell.finish(await cell.decoding(handle), 4)
        assert len(await read(handle)) == 4
        assert not [record for record in caplog.records if record.exc_info]


async def test_reports_of_ranks_show_how_far_a_prompt_is() -> None:
    """What was shown once stays shown, although another attempt computes it again."""
    async with fake_cell() as cell:
        handle = cell.submit(tokens=200)
        assert handle.progress()["processed"] == 0
        step = await cell.prefilling(handle)
        cell.prefill.leader.notify(
            "prefill_progress", PrefillProgress(rank=0, step_id=step.step_id, computed=0.5)
        )
        await until(lambda: handle.progress()["processed"] == 100)
        await cell.replace(FakeGang("prefill", "p2"))
        await until(lambda: handle.timings.attempts == 2)
        assert handle.progress()["processed"] == 100
        cell.finish(await cell.decoding(handle), 4)
        await read(handle)
        assert handle.progress() | {"time_ms": 0} == {
            "total": 200,
            "cache": 0,
            "processed": 200,
            "time_ms": 0,
            "predicted_s": 0.0,
        }


async def test_a_prompt_can_be_reused_once_its_prefill_is_over() -> None:
    """Every rank has reported its step then, so a request that follows finds the prompt's KV."""
    make = partial(Scheduler, reuse=ReuseSettings(enabled=True))
    key = PrefixKey.of(owner=b"", salt=None, block=BLOCK_TOKENS)
    tokens = 4 * BLOCK_TOKENS
    hashes = key.hashes(np.arange(tokens, dtype=np.int32))
    async with fake_cell(make_scheduler=make) as cell:
        first = cell.submit(tokens=tokens, prefix=key, hashes=hashes)
        step = await cell.prefilling(first)
        sequence_id = cell.sequence_id_of(first)
        cell.prefill.sample(sequence_id, 0)
        cell.decode.receive_kv(sequence_id)
        await until(lambda: cell.decode.has_joined(sequence_id))
        assert not first.prefill_over.is_set(), "no rank has reported the step"
        cell.prefill.finish_step(step)
        async with asyncio.timeout(10):
            await first.prefill_over.wait()
        second = cell.submit(tokens=tokens, prefix=key, hashes=hashes)
        await until(lambda: second.sequence_id is not None)
        assert second.cached_tokens == 3 * BLOCK_TOKENS


async def test_a_broken_link_restarts_requests_without_their_kv_and_no_decoding_ones() -> None:
    async with fake_cell() as cell:
        decoding, computing = cell.submit(), cell.submit(tokens=300)
        sequence_id = await cell.decoding(decoding)
        await cell.prefilling(computing)
        leader = cell.decode.leader
        stale = LinkBroken(epoch="0.1", rank=0, reason="another one")
        leader.notify("link_broken", stale)
        cell.decode.may_connect.clear()
        leader.notify("link_broken", replace(stale, epoch=leader.connections[-1].epoch))
        await until(lambda: len(leader.connections) == 2)
        assert not cell.service.ready
        assert cell.service.trouble == "connecting the gangs"
        cell.decode.may_connect.set()
        await until(lambda: computing.timings.attempts == 2)
        cell.finish(await cell.decoding(computing), 4)
        cell.finish(sequence_id, 4)
        assert len(await read(decoding)) == len(await read(computing)) == 4
        assert decoding.timings.attempts == 1
        assert len(leader.attached) == 1
        await cell.wait_until_free()


async def test_a_decode_gang_that_frees_no_slots_is_reset() -> None:
    async with fake_cell(deadlines=replace(QUICK, decode_liveness_ns=50_000_000)) as cell:
        cell.decode.obeys_cancel = False
        handle = cell.submit()
        await cell.prefilling(handle)
        handle.cancel()
        await until(lambda: len(cell.decode.leader.attached) == 2)
        await until(lambda: cell.service.ready)
        await cell.wait_until_free()


async def test_a_step_without_a_first_token_is_retried() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        cell.prefill.finish_step(await cell.prefilling(handle))
        await until(lambda: handle.timings.attempts == 2)
        cell.finish(await cell.decoding(handle), 4)
        assert len([token async for token in handle]) == 4
        await cell.wait_until_free()


async def test_a_request_whose_kv_is_not_received_in_time_fails() -> None:
    deadlines = replace(QUICK, transfer_ns=50_000_000, transfer_token_ns=0)
    async with fake_cell(deadlines=deadlines, limits=QueueLimits(max_attempts=1)) as cell:
        handle = cell.submit()
        step = await cell.prefilling(handle)
        cell.prefill.sample(step.chunks[0].sequence_id, 0)
        with pytest.raises(DeadlineExceeded, match="KV transfer did not finish"):
            await read(handle)
        await cell.wait_until_free()


# --- admission, planning, deadlines, the end ---------------------------------------------------


def unlinked_gang() -> FakeGang:
    """Return a gang that can be attached but not linked, so nothing starts on it."""
    gang = FakeGang("prefill", "p1")
    gang.may_connect.clear()
    return gang


async def test_requests_beyond_the_queue_limit_fail_in_the_same_round() -> None:
    async with fake_cell(
        limits=QueueLimits(max_waiting=2), prefill=unlinked_gang(), ready=False
    ) as cell:
        handles = [cell.submit() for _ in range(3)]
        with pytest.raises(QueueFull):
            await anext(handles[2])
        assert [handle.state for handle in handles] == ["queued", "queued", "failed"]


async def test_a_full_queue_refuses_with_retry_after() -> None:
    async with fake_cell(
        limits=QueueLimits(max_waiting=2), prefill=unlinked_gang(), ready=False
    ) as cell:
        handle = [cell.submit(), cell.submit()]
        await loop_iterations()
        with pytest.raises(QueueFull) as refusal:
            cell.submit()
        assert 1 <= refusal.value.retry_after_s <= 60
        handle[0].cancel()
        await loop_iterations()
        cell.submit()


async def test_a_queue_full_of_tokens_refuses() -> None:
    limits = QueueLimits(max_waiting_tokens=1000)
    async with fake_cell(limits=limits, prefill=unlinked_gang(), ready=False) as cell:
        cell.submit(tokens=5000)
        await loop_iterations()
        with pytest.raises(QueueFull, match="tokens are waiting"):
            cell.submit(tokens=10)


async def test_a_request_that_never_fits_is_refused_with_both_numbers() -> None:
    async with fake_cell() as cell:
        with pytest.raises(ContextLengthExceeded) as refusal:
            cell.submit(tokens=19_990, max_tokens=20)
        assert refusal.value.prompt_tokens == 19_990
        assert refusal.value.limit == 20_000
        with pytest.raises(ContextLengthExceeded):
            cell.submit(tokens=10, max_tokens=10_001)
        cell.submit(tokens=10_000, max_tokens=10_000)


async def fails(questions: StrategyQuestions) -> StrategyChoices:
    raise LookupError("cannot connect to 10.0.0.3:41235")


async def test_no_request_waits_for_the_configurator() -> None:
    async with fake_cell(configure=fails) as cell:
        handle = cell.submit()
        await cell.prefilling(handle)
        assert handle.plan is not None
        assert (handle.plan.attention, handle.plan.strategy) == ("exact", "ulysses")
        assert "nothing was compared yet" in handle.plan.reason
        assert "10.0.0.3" not in handle.plan.reason  # clients read it: nothing of our inside


async def test_a_plan_says_that_the_policy_chose_a_ring() -> None:
    async with fake_cell(policy="context_parallel") as cell:
        handle = cell.submit()
        await cell.prefilling(handle)
        assert handle.plan is not None
        assert handle.plan.strategy == "ring_kv"
        assert "as this server's scheduling policy has it" in handle.plan.reason


async def test_a_request_with_a_deadline_fails_at_it() -> None:
    async with fake_cell() as cell:
        handle = cell.service.submit(request_spec(deadline_s=0.05))
        with pytest.raises(DeadlineExceeded):
            await read(handle)
        await cell.wait_until_free()


async def test_closing_lets_running_requests_finish_and_refuses_new_ones() -> None:
    async with fake_cell() as cell:
        handle = cell.submit()
        sequence_id = await cell.decoding(handle)
        closing = asyncio.create_task(cell.service.close(drain_s=30))
        await loop_iterations()
        with pytest.raises(QueueFull, match="shutting down"):
            cell.submit()
        assert not closing.done()
        cell.finish(sequence_id, 4)
        await closing
        assert len(await read(handle)) == 4


async def test_closing_fails_requests_that_do_not_finish_in_time() -> None:
    async with fake_cell() as cell:
        handle, queued = cell.submit(), cell.submit()
        await cell.prefilling(handle)
        await cell.service.close(drain_s=0.01)
        for live in (handle, queued):
            with pytest.raises(Cancelled, match="shutting down"):
                await read(live)


async def test_tokens_out_of_order_are_an_error() -> None:
    async with fake_cell(limits=QueueLimits(max_attempts=1)) as cell:
        handle = cell.submit()
        sequence_id = await cell.decoding(handle)
        cell.decode.sample(sequence_id, 2)
        with pytest.raises(Exception, match="token 2 arrived, expected token 1"):
            await read(handle)
        await cell.wait_until_free()


@pytest.mark.parametrize("seed", range(5))
async def test_no_request_or_slot_is_lost_in_a_storm(seed: int) -> None:
    """Requests have random lengths and are cancelled at random while gangs die."""
    import random

    rng = random.Random(seed)
    async with fake_cell() as cell:
        cell.run_by_itself()
        requests: list[RequestHandle] = []
        for event in range(60):
            requests.append(cell.submit(rng.randrange(1, 4000), rng.randrange(1, 30)))
            if rng.random() < 0.3:
                rng.choice(requests).cancel()
            if event in (20, 40):
                await _replace_one(cell, rng, event)
            await loop_iterations(rng.randrange(30))
            cell.service.check_integrity()
        ends = await asyncio.gather(*map(read, requests), return_exceptions=True)
        errors = [end for end in ends if isinstance(end, BaseException)]
        assert all(isinstance(error, GangLost) for error in errors), errors
        assert all(request.ended for request in requests)
        await cell.wait_until_free()


async def _replace_one(cell: FakeCell, rng: Any, event: int) -> None:
    if rng.random() < 0.5:
        await cell.prefill.kill(0)
        await cell.replace(FakeGang("prefill", f"p{event}"))
    else:
        await cell.decode.kill(0)
        await cell.replace(FakeGang("decode", f"d{event}"))
    cell.run_by_itself()


async def test_a_broken_scheduler_fails_the_health_check_and_refuses_requests() -> None:

    class Broken(Scheduler):
        broken = False

        def handle(self, events: Iterable[AnyEvent], now_ns: int) -> RoundResult:
            assert not self.broken, "a mistake of ours"
            return super().handle(events, now_ns)

    made: list[Broken] = []

    def scheduler(*args: Any, **options: Any) -> Scheduler:
        made.append(Broken(*args, **options))
        return made[0]

    async with fake_cell(make_scheduler=scheduler) as cell:
        assert cell.service.ready
        made[0].broken = True
        cell.submit()
        await until(lambda: not cell.service.ready)
        assert "about to be replaced" in cell.service.trouble
        with pytest.raises(QueueFull, match="about to be replaced"):
            cell.submit()
        with pytest.raises(AssertionError, match="a mistake of ours"):
            cell.service.check_health()


# --- clients that read slowly ----------------------------------------------------------------


async def test_a_request_whose_client_does_not_read_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """100,000 unread tokens with 20 alternatives took 553 MiB."""
    monkeypatch.setattr(request_handle, "MAX_UNREAD_ENTRIES", 10)
    metrics = Metrics("m")
    async with fake_cell(observer=metrics) as cell:
        handle = cell.submit(max_tokens=100)
        sequence_id = await cell.decoding(handle)
        for index in range(1, 20):
            cell.decode.sample(sequence_id, index)
        await until(lambda: handle.ended)
        await until(lambda: sequence_id in cell.decode.leader.cancelled)
        cell.decode.free(sequence_id)
        await cell.wait_until_free()
        assert not handle.unread_tokens
        with pytest.raises(ClientTooSlow, match=r"\d\d tokens were unread"):
            await handle.pending()
    assert "request r is cancelled: its client has left" in caplog.text
    counted = b'csps:requests_refused_total{code="client_too_slow",model_name="m"} 1.0'
    assert counted in metrics.render()


async def test_unread_tokens_of_all_clients_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has read almost everything is not affected."""
    monkeypatch.setattr(request_handle, "MAX_UNREAD_TOGETHER", 20)
    monkeypatch.setattr(request_handle, "SPARED_ENTRIES", 3)
    async with fake_cell() as cell:
        handles = [cell.submit(max_tokens=100) for _ in range(3)]
        ids = [await cell.decoding(handle) for handle in handles]
        for index in range(1, 9):
            cell.decode.sample(ids[0], index)
            cell.decode.sample(ids[1], index)
        cell.decode.sample(ids[2], 1)
        await until(lambda: handles[2].unread_tokens == 2)
        assert not any(handle.ended for handle in handles)
        for index in range(2, 6):
            assert (await handles[2].pending())[-1].index == index - 1
            cell.decode.sample(ids[2], index)
            cell.decode.sample(ids[0], index + 7)
            await until(lambda index=index: handles[2].unread_tokens == 1)
        await until(lambda: handles[0].ended)
        assert not handles[2].ended
        await handles[1].pending()
        assert not handles[1].ended
