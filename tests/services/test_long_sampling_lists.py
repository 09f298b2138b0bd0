"""Requests with lists as long as a vocabulary: no message and no rank gets more than it needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_gangs import FakeCell, FakeGang, fake_cell, request_spec, until

from csps.protocols.core.errors import ProtocolError
from csps.protocols.gang.messages import SamplerInputs, Sampling
from csps.protocols.rpc.schema import decode
from csps.protocols.rpc.wire import RpcLimits
from csps.services.requests.request_handle import RequestHandle

VOCABULARY = 151_936
REQUESTS = 64
EVERY_TOKEN = Sampling(
    max_tokens=2,
    logit_bias=dict.fromkeys(range(VOCABULARY), 1.0),
    stop_token_ids=tuple(range(VOCABULARY)),
)


def submit(cell: FakeCell, sampling: Sampling) -> RequestHandle:
    return cell.service.submit(replace(request_spec(30), sampling=sampling))


async def test_a_step_of_many_such_requests_stays_below_the_limit_of_a_message() -> None:
    async with fake_cell(prefill=FakeGang("prefill", "p1", instances=1, tp=2)) as cell:
        cell.run_by_itself()
        handles = [submit(cell, EVERY_TOKEN) for _ in range(REQUESTS)]
        await until(lambda: all(handle.ended for handle in handles))
        assert {handle.finish_reason for handle in handles} == {"length"}
        sampling, other = cell.prefill.ranks
        await until(lambda: sampling.steps)  # its messages are long: the other one was first
        batch = max(len(step.chunks) for step in sampling.steps)
        packed = [len(inputs) for inputs in sampling.samplers.values()]
        assert batch * min(packed) > RpcLimits().max_frame_bytes, "it would fit in one message"
        assert len(packed) == REQUESTS
        assert not other.samplers
        await cell.wait_until_free()


async def test_only_the_ranks_that_sample_get_the_parameters() -> None:
    sampling = Sampling(max_tokens=3, logit_bias={5: 1.0}, stop_token_ids=(1, 2))
    cell_of = fake_cell(
        prefill=FakeGang("prefill", "p1", instances=2, tp=2),
        decode=FakeGang("decode", "d1", instances=2, tp=2),
    )
    async with cell_of as cell:
        handle = cell.service.submit(replace(request_spec(2000), sampling=sampling))
        sequence_id = await cell.decoding(handle)
        (chunk,) = cell.prefill.leader.steps[0].chunks
        assert len(cell.prefill.leader.steps[0].group) == 2
        last = cell.prefill.leader.steps[0].group[-1]
        first_sampler = [2 * last]
        assert [rank.rank for rank in cell.prefill.ranks if rank.samplers] == first_sampler
        assert not any(rank.steps[0].samplers for rank in cell.prefill.ranks)
        assert chunk.last
        master = cell.decode.leader.reserved[sequence_id].master
        decoding = {
            rank.rank: rank.reserved[sequence_id].sampler
            for rank in cell.decode.ranks
            if rank.reserved[sequence_id].sampler
        }
        assert list(decoding) == [2 * master, 2 * master + 1]
        packed = [cell.prefill.ranks[2 * last].samplers[sequence_id], *decoding.values()]
        assert {decode(SamplerInputs, inputs).sampling.max_tokens for inputs in packed} == {3}
        assert all(decode(SamplerInputs, inputs).sampling == sampling for inputs in packed)
        cell.finish(sequence_id, 3)
        await until(lambda: handle.ended)


async def test_a_step_that_cannot_be_sent_fails_its_requests_and_not_the_router() -> None:
    async with fake_cell() as cell:
        small = replace(RpcLimits(), max_frame_bytes=1 << 16)
        (prefill,) = (
            gang for gang in cell.service._gangs._by_number.values() if gang.role == "prefill"
        )
        for client in prefill._clients.values():
            client._limits = small
        handle = submit(cell, EVERY_TOKEN)
        with pytest.raises(ProtocolError, match="message too long"):
            await handle.pending()
        await cell.wait_until_free()
        other = cell.submit(tokens=3, max_tokens=4)
        sequence_id = await cell.decoding(other)
        cell.finish(sequence_id, 4)
        await until(lambda: other.ended)
        assert other.finish_reason == "length"
        cell.service.check_health()
