"""A request can be withdrawn at every stage: all slots come back and the gangs go on."""

from __future__ import annotations

import pkgutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from gang_driver import GREEDY, Request, even_slices, prefill_step, prompt_of
from gang_threads import ThreadCell, eventually, thread_cell
from greedy_reference import greedy_tokens
from paused_ranks import PausedSteps

from csps.protocols.core.errors import Cancelled, InvalidRequest, ProtocolError, TransferError
from csps.protocols.gang.messages import (
    JoinBatch,
    PrefillDone,
    RankKvReceived,
    RequestFailed,
    Sampling,
)
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.schema import pack

VICTIM, BYSTANDER = 1, 2
ENDLESS = Sampling(temperature=0, max_tokens=1500)


@asynccontextmanager
async def cell_of(model: Path) -> AsyncIterator[ThreadCell]:
    async with thread_cell(model, prefill=2, decode=2) as cell:
        yield cell


def request(sequence_id: int, length: int = 40, sampling: Sampling = GREEDY) -> Request:
    return Request(
        sequence_id=sequence_id,
        prompt=prompt_of(length, sequence_id),
        slices=even_slices(length, [0, 1]),
        master=sequence_id % 2,
        sampling=sampling,
    )


def step_of(*requests: Request) -> PrefillStep:
    return prefill_step([request.chunk() for request in requests], [0, 1])


def spied(monkeypatch: pytest.MonkeyPatch, name: str) -> Mock:
    """Replace a function by one that does the same and records its calls."""
    spy = Mock(wraps=pkgutil.resolve_name(name))
    monkeypatch.setattr(name, spy)
    return spy


async def check_goes_on(cell: ThreadCell, model: Path) -> None:
    """Check that all slots are free and a new request is answered."""
    await cell.freed(VICTIM)
    await cell.prefilled(*cell.steps)
    await cell.prefill.stats()  # the cancellation came before it on every connection
    cell.check_idle()
    late = request(99)
    answers = await cell.generate(late, group=[1, 0])
    assert answers == [greedy_tokens(model, late.prompt.tolist(), GREEDY.max_tokens)]
    await cell.freed(99)
    await cell.prefilled(*cell.steps)
    cell.check_idle()


async def test_a_reserved_sequence_is_cancelled(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        await cell.reserve(request(VICTIM))
        cell.cancel(VICTIM)
        await check_goes_on(cell, tiny_llama)


async def test_an_unknown_sequence_is_cancelled(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        cell.cancel(VICTIM)
        await check_goes_on(cell, tiny_llama)


async def test_a_queued_sequence_is_cancelled(tiny_llama: Path) -> None:
    """The sequence waits behind a step that is paused because one rank has not received it."""
    async with cell_of(tiny_llama) as cell:
        victim, other = request(VICTIM), request(BYSTANDER)
        await cell.reserve(victim)
        await cell.reserve(other)
        first = cell.submit(step_of(other), other.prompt, ranks=[0])
        cell.submit(step_of(victim), victim.prompt, ranks=[0])
        cell.cancel(VICTIM)
        await cell.prefill.stats()
        cell.submit(cell.steps[first], other.prompt, ranks=[1])
        cell.submit(cell.steps[first + 1], victim.prompt, ranks=[1])
        await cell.answer(other)
        await cell.prefilled(first + 1)
        assert all(done.cancelled for done in cell.about(PrefillDone, step_id=first + 1))
        assert not cell.tokens(VICTIM)
        await cell.freed(BYSTANDER)
        await check_goes_on(cell, tiny_llama)


async def test_a_step_that_not_all_members_have_is_cancelled(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        victim = request(VICTIM)
        await cell.reserve(victim)
        step_id = cell.submit(step_of(victim), victim.prompt, ranks=[0])
        await cell.prefill.stats()
        cell.cancel(VICTIM)
        await cell.prefill.stats()  # rank 0 waits for the other one, and knows
        cell.submit(cell.steps[step_id], victim.prompt, ranks=[1])
        await cell.prefilled(step_id)
        assert all(done.cancelled for done in cell.about(PrefillDone, step_id=step_id))
        await check_goes_on(cell, tiny_llama)


async def test_a_running_step_is_cancelled(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = PausedSteps(monkeypatch)
    async with cell_of(tiny_llama) as cell:
        victim = request(VICTIM)
        await cell.reserve(victim)
        step_id = cell.submit(step_of(victim), victim.prompt)
        await steps.meanwhile_cancel(cell, VICTIM)
        await cell.prefilled(step_id)
        assert all(done.cancelled for done in cell.about(PrefillDone, step_id=step_id))
        assert not cell.about(
            RankKvReceived, sequence_id=VICTIM
        )  # the last layer was never computed
        await check_goes_on(cell, tiny_llama)


async def test_one_sequence_of_a_batch_is_cancelled(tiny_llama: Path) -> None:
    """The step runs to its end for the others, and only then are the slots freed. Rank 1 does not
    know the victim when it is cancelled; the leader tells it, so this makes no difference."""
    async with cell_of(tiny_llama) as cell:
        victim, other = request(VICTIM), request(BYSTANDER, 7)
        await cell.reserve(victim)
        await cell.reserve(other)
        both = step_of(victim, other)
        tokens = np.concatenate([victim.prompt, other.prompt])
        step_id = cell.submit(both, tokens, ranks=[0])
        cell.cancel(VICTIM)
        await cell.prefill.stats()
        cell.submit(cell.steps[step_id], tokens, ranks=[1])
        answers = await cell.answer(other)
        assert answers == [greedy_tokens(tiny_llama, other.prompt.tolist(), GREEDY.max_tokens)]
        assert not cell.tokens(VICTIM)  # the last layer was computed without it
        await cell.freed(BYSTANDER)
        await check_goes_on(cell, tiny_llama)


@pytest.mark.parametrize("strategy", ["ulysses", "sp_tp"])
async def test_one_sequence_of_a_batch_is_cancelled_before_its_first_layer(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Nothing of the cancelled sequence is computed or sent except along with its neighbors'
    rows."""
    module = "ulysses" if strategy == "ulysses" else "sp_tp.head_attention"
    attended = spied(monkeypatch, f"csps.actors.attention.{module}.attention")
    sent = spied(monkeypatch, "csps.actors.kv_transfer.sender.destinations_of")
    async with cell_of(tiny_llama) as cell:
        ahead, victim, other = request(3, 5), request(VICTIM), request(BYSTANDER, 7)
        for sequence in (ahead, victim, other):
            await cell.reserve(sequence)
        first = cell.submit(step_of(ahead), ahead.prompt, ranks=[0])  # stands still
        tokens = np.concatenate([victim.prompt, other.prompt])
        both = cell.submit(
            msgspec.structs.replace(step_of(victim, other), strategy=strategy), tokens, ranks=[0]
        )
        cell.cancel(VICTIM)
        await cell.prefill.stats()
        cell.submit(cell.steps[first], ahead.prompt, ranks=[1])
        cell.submit(cell.steps[both], tokens, ranks=[1])
        for sequence, answer in zip((ahead, other), await cell.answer(ahead, other), strict=True):
            assert answer == greedy_tokens(tiny_llama, sequence.prompt.tolist(), GREEDY.max_tokens)
        assert max(len(call.args[0]) for call in attended.call_args_list) == len(other.prompt)
        assert {call.args[3].chunk.sequence_id for call in sent.call_args_list} == {3, BYSTANDER}
        await cell.freed(3, BYSTANDER)
        await check_goes_on(cell, tiny_llama)


async def test_a_sequence_is_cancelled_during_its_kv_transfer(tiny_llama: Path) -> None:
    """A decode rank is blocked while it writes, so that the prefill gang cannot send on."""
    async with cell_of(tiny_llama) as cell:
        victim = request(VICTIM)
        await cell.reserve(victim)
        receiver = cell.decode_gang.ranks[1]
        reservation = receiver.loop.decode_batch.reservations.find(VICTIM)
        assert reservation is not None
        with reservation.lock:
            cell.submit(step_of(victim), victim.prompt)
            await cell.until(lambda: cell.tokens(VICTIM))  # computed
            await cell.until(lambda: cell.about(RankKvReceived, sequence_id=VICTIM, rank=0))
            assert not cell.about(RankKvReceived, sequence_id=VICTIM, rank=1)
            cell.cancel(VICTIM)
            await eventually(lambda: receiver.loop.decode_batch.reservations.find(VICTIM) is None)
            assert receiver.engine.pool.slots.used > 0  # it waits for who is writing
        await check_goes_on(cell, tiny_llama)
        assert not cell.about(RankKvReceived, sequence_id=VICTIM, rank=1)


async def test_a_sequence_is_cancelled_after_its_kv_transfer(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        victim = request(VICTIM)
        await cell.reserve(victim)
        cell.submit(step_of(victim), victim.prompt)
        await cell.until_received(2, RankKvReceived, sequence_id=VICTIM)
        cell.cancel(VICTIM)
        await check_goes_on(cell, tiny_llama)


async def test_a_decoding_sequence_is_cancelled_beside_another(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        some = Sampling(temperature=0, max_tokens=30)
        victim, other = request(VICTIM, sampling=ENDLESS), request(BYSTANDER, sampling=some)
        await cell.reserve(victim)
        await cell.reserve(other)
        for sequence in (victim, other):
            cell.submit(step_of(sequence), sequence.prompt)
            await cell.join(sequence)
        await cell.until(lambda: len(cell.tokens(VICTIM)) > 2 and len(cell.tokens(BYSTANDER)) > 2)
        cell.cancel(VICTIM)
        await cell.freed(VICTIM)
        sampled = len(cell.tokens(VICTIM))
        assert sampled < ENDLESS.max_tokens
        await cell.until(lambda: cell.finished(BYSTANDER))
        assert cell.tokens(BYSTANDER) == greedy_tokens(tiny_llama, other.prompt.tolist(), 30)
        assert len(cell.tokens(VICTIM)) == sampled  # nothing came after `freed`
        await cell.freed(BYSTANDER)
        await check_goes_on(cell, tiny_llama)


async def test_a_finished_sequence_is_cancelled(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        await cell.generate(request(VICTIM), group=[0, 1])
        cell.cancel(VICTIM)
        await check_goes_on(cell, tiny_llama)


# --- what is refused -----------------------------------------------------------------------


async def test_a_reservation_after_its_cancellation_is_refused(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        cell.cancel(VICTIM)
        await cell.freed(VICTIM)
        with pytest.raises(Cancelled):
            await cell.reserve(request(VICTIM))
        await check_goes_on(cell, tiny_llama)


async def test_a_join_after_its_cancellation_is_ignored(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        victim = request(VICTIM)
        await cell.reserve(victim)
        cell.submit(step_of(victim), victim.prompt)
        await cell.until_received(2, RankKvReceived, sequence_id=VICTIM)
        cell.cancel(VICTIM)
        cell.decode.notify(0, "join", pack(JoinBatch(sequence_id=VICTIM, first_token=1)))
        await check_goes_on(cell, tiny_llama)


async def test_a_second_reservation_is_refused(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        await cell.reserve(request(VICTIM))
        with pytest.raises(ProtocolError, match="reserved already"):
            await cell.reserve(request(VICTIM))
        cell.cancel(VICTIM)
        await check_goes_on(cell, tiny_llama)


async def test_a_token_bias_outside_the_vocabulary_is_refused(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        biased = Sampling(temperature=0, logit_bias={10_000: 1.0})
        with pytest.raises(InvalidRequest, match="logit_bias"):
            await cell.reserve(request(VICTIM, sampling=biased))
        cell.cancel(VICTIM)
        await check_goes_on(cell, tiny_llama)


async def test_a_bias_that_only_prefill_sees_fails_its_request_alone(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        cell.failures_expected = True
        victim = request(VICTIM, sampling=Sampling(temperature=0, logit_bias={10_000: 1.0}))
        cell.submit(step_of(victim), victim.prompt)
        await cell.until(lambda: cell.about(RequestFailed, sequence_id=VICTIM))
        assert cell.received[RequestFailed][0].code == "InvalidRequest"
        cell.cancel(VICTIM)
        await check_goes_on(cell, tiny_llama)


async def test_kv_without_a_connection_fails_its_sequence(tiny_llama: Path) -> None:
    async with cell_of(tiny_llama) as cell:
        cell.failures_expected = True
        for rank in cell.prefill_gang.ranks:
            rank._kv_link.leave()
        victim = request(VICTIM)
        await cell.reserve(victim)
        cell.submit(step_of(victim), victim.prompt)
        await cell.until_received(2, RequestFailed, sequence_id=VICTIM)
        assert {failure.code for failure in cell.received[RequestFailed]} == {
            TransferError.__name__
        }
        cell.cancel(VICTIM)
        await cell.connect()
        await check_goes_on(cell, tiny_llama)


# --- numbers that are no numbers -----------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_logits_that_are_nan_fail_the_request(tiny_llama: Path, role: str) -> None:
    async with cell_of(tiny_llama) as cell:
        cell.failures_expected = True
        gang = cell.prefill_gang if role == "prefill" else cell.decode_gang
        heads = [rank.engine.network.head_vd for rank in gang.ranks]
        saved = [head[7, 0].item() for head in heads]
        for head in heads:
            head[7, 0] = float("nan")
        victim = request(VICTIM)
        await cell.reserve(victim)
        cell.submit(step_of(victim), victim.prompt)
        if role == "decode":
            await cell.join(victim)
        await cell.until(lambda: cell.about(RequestFailed, sequence_id=VICTIM))
        assert cell.received[RequestFailed][0].code == "BadLogits"
        assert len(cell.tokens(VICTIM)) == (role == "decode")
        cell.cancel(VICTIM)
        for head, value in zip(heads, saved, strict=True):
            head[7, 0] = value
        await check_goes_on(cell, tiny_llama)
