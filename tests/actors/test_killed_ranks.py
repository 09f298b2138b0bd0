"""A rank is killed: its gang is lost, the other one lives on and works with the next."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from gang_driver import (
    GREEDY,
    Cell,
    GangPlan,
    Request,
    even_slices,
    in_threads,
    members_of,
    prefill_step,
    prompt_of,
)
from gang_processes import RankProcess, process_cell
from gang_threads import eventually, is_broken, thread_cell, thread_gang
from greedy_reference import greedy_tokens
from paused_ranks import PausedSteps

from csps.protocols.gang.messages import RequestFailed, Sampling
from csps.protocols.gang.step_messages import PrefillStep

LASTING = Sampling(temperature=0, max_tokens=300)
ENDLESS = Sampling(temperature=0, max_tokens=1500)


def request(sequence_id: int, sampling: Sampling = GREEDY, length: int = 40) -> Request:
    return Request(
        sequence_id=sequence_id,
        prompt=prompt_of(length, sequence_id),
        slices=even_slices(length, [0, 1]),
        master=sequence_id % 2,
        sampling=sampling,
    )


def step_of(request: Request) -> PrefillStep:
    return prefill_step([request.chunk()], [0, 1])


async def check_serves(cell: Cell, model: Path, sequence_id: int) -> None:
    sequence = request(sequence_id)
    answers = await cell.generate(sequence, group=[0, 1])
    assert answers == [greedy_tokens(model, sequence.prompt.tolist(), GREEDY.max_tokens)]
    await cell.freed(sequence_id)
    await cell.prefilled(max(cell.steps))


@pytest.mark.parametrize("begun", [False, True])
async def test_a_prefill_rank_is_killed_before_or_during_a_step(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    async with (
        AsyncExitStack() as later,
        thread_cell(tiny_llama, prefill=2, decode=2, prefill_processes=[1]) as cell,
    ):
        decoding, victim = request(1, LASTING), request(2)
        await cell.reserve(decoding)
        await cell.reserve(victim)
        cell.submit(step_of(decoding), decoding.prompt)
        await cell.join(decoding)
        steps = PausedSteps(monkeypatch)
        cell.submit(step_of(victim), victim.prompt, ranks=[0, 1] if begun else [0])
        await (steps.begun() if begun else cell.prefill.stats())  # or it waits for rank 1

        cell.prefill_gang.process(1).kill()
        steps.go_on.set()
        survivor = cell.prefill_gang.ranks[0]
        await eventually(lambda: is_broken(survivor))
        await cell.prefill.lost

        plan = GangPlan(model_dir=str(tiny_llama), role="prefill", instances=2)
        cell.prefill_gang = await later.enter_async_context(thread_gang(plan))
        cell.prefill = await cell.attach(cell.prefill_gang.members, "prefill")
        await cell.connect()
        cell.cancel(2)
        await cell.freed(2)
        await check_serves(cell, tiny_llama, sequence_id=3)
        await cell.until(lambda: cell.finished(1))  # decode did not care
        assert cell.tokens(1) == greedy_tokens(
            tiny_llama, decoding.prompt.tolist(), LASTING.max_tokens
        )
        await cell.freed(1)
        cell.check_idle()


async def test_a_decode_rank_is_killed_while_kv_is_on_its_way(tiny_llama: Path) -> None:
    async with (
        AsyncExitStack() as later,
        thread_cell(tiny_llama, prefill=2, decode=2, decode_processes=[1]) as cell,
    ):
        cell.failures_expected = True
        decoding, sending, late = request(1, ENDLESS), request(2), request(3)
        for sequence in (decoding, sending, late):
            await cell.reserve(sequence)
        cell.submit(step_of(decoding), decoding.prompt)
        await cell.join(decoding)
        await cell.until(lambda: len(cell.tokens(1)) > 2)
        victim = cell.decode_gang.process(1)
        victim.stop()  # takes nothing any more
        sent = cell.submit(step_of(sending), sending.prompt)
        await cell.until(lambda: cell.tokens(2))  # prefill is done with computing

        victim.kill()
        await cell.until(lambda: cell.about(RequestFailed, sequence_id=2, code="TransferError"))
        await eventually(lambda: is_broken(cell.decode_gang.ranks[0]))  # it was decoding
        await cell.prefilled(sent)
        after = cell.submit(step_of(late), late.prompt)  # the router may not know yet
        await cell.until(lambda: cell.about(RequestFailed, sequence_id=3, code="TransferError"))
        await cell.prefilled(after)
        for rank in cell.prefill_gang.ranks:
            rank.check_health()
            rank.engine.pool.slots.check_integrity()
            assert rank.engine.pool.slots.used == 0

        plan = GangPlan(model_dir=str(tiny_llama), role="decode", instances=2)
        cell.decode_gang = await later.enter_async_context(thread_gang(plan))
        cell.decode = await cell.attach(cell.decode_gang.members, "decode")
        await cell.connect()
        await check_serves(cell, tiny_llama, sequence_id=4)
        cell.check_idle()


@pytest.mark.slow
async def test_processes_end_when_they_are_asked_to(tiny_llama: Path) -> None:
    """The processes are idle, or in a step whose other half no rank will compute."""
    plan = GangPlan(model_dir=str(tiny_llama), role="prefill", instances=2)
    members = [RankProcess(plan.rank_fields(0))]
    try:
        [store] = await in_threads([members[0].store])
        members.append(RankProcess(plan.rank_fields(1), store))
        cell = Cell()
        addresses = await in_threads([member.start for member in members])
        cell.prefill = await cell.attach(members_of(plan, addresses), "prefill")
        sequence = request(1)
        cell.submit(step_of(sequence), sequence.prompt, ranks=[0])
        await cell.prefill.stats()
        assert await in_threads([member.end for member in members]) == [0, 0]
    finally:
        for member in members:
            member.close()


@pytest.mark.slow
async def test_gangs_of_processes_answer_as_gangs_of_threads_do(tiny_llama: Path) -> None:
    async with process_cell(tiny_llama, prefill=2, decode=2) as cell:
        await check_serves(cell, tiny_llama, sequence_id=1)
        assert await cell.used_slots() == {0}
