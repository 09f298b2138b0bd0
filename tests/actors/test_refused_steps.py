"""A step that no strategy can run is refused when it arrives; the gang goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gang_driver import GREEDY, Cell, Request, even_slices, laid_out, prefill_step, prompt_of
from gang_threads import elastic_cell, thread_cell
from greedy_reference import greedy_tokens

from csps.protocols.attention.csa import CsaPlan, LayerGroup
from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.messages import PrefillDone, RequestFailed
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.schema import pack

GROUP = (0, 1)
UNKNOWN = "unknown strategy 'ulises'; did you mean 'ulysses'?"
NO_PLAN = (
    "strategy 'ulysses' is exact and takes no sparse attention plan; strategies that take one "
    "are csa"
)
RATIOS = "3 drop_ratios of one level; allowed are one for all KV heads, or 2, one per KV head"

CONTIGUOUS = (
    "needs contiguous rows, cut at the bounds of the step; strategies that take any rows are "
    "gathered_weights, ring_kv, ring_q, ulysses"
)


def request(sequence_id: int) -> Request:
    return Request(
        sequence_id=sequence_id, prompt=prompt_of(40, sequence_id), slices=even_slices(40, [0])
    )


def plan(*drop_ratios: float) -> CsaPlan:
    """Return a plan for layer 1 at level 2, by KV head."""
    group = LayerGroup(first=1, stop=2, drop_ratios=(drop_ratios,))
    return CsaPlan(locations=("0-0-0", "0-0-1"), levels=2, layer_groups=(group,))


def bad_steps(request: Request) -> list[tuple[PrefillStep, str]]:
    """Return well-formed messages that ask for the impossible, each with its error."""
    chunks = [request.chunk()]
    striped = [request.chunk(rows=laid_out("striped", 0, 40, GROUP))]
    return [
        (prefill_step(chunks, GROUP, strategy="ulises"), UNKNOWN),
        (prefill_step(chunks, GROUP, strategy="ulysses", csa=plan(0.5)), NO_PLAN),
        (
            prefill_step(chunks, GROUP, strategy="gathered_weights", csa=plan(0.5)),
            "is exact and takes",
        ),
        (prefill_step(chunks, GROUP, strategy="csa", csa=plan(0.5, 0.5, 0.5)), RATIOS),
        (prefill_step(chunks, GROUP, strategy="sp_tp", csa=plan(0.5, 0.5, 0.5)), RATIOS),
        (
            prefill_step(striped, GROUP, strategy="csa", csa=plan(0.5)),
            f"strategy 'csa' {CONTIGUOUS}",
        ),
        (prefill_step(striped, GROUP, strategy="sp_tp"), f"strategy 'sp_tp' {CONTIGUOUS}"),
    ]


async def test_a_step_that_no_strategy_can_run_is_refused(tiny_llama: Path) -> None:
    async with thread_cell(tiny_llama, prefill=2, decode=1) as cell:
        cell.failures_expected = True
        for sequence_id, (_, what) in enumerate(bad_steps(request(1)), start=1):
            sequence = request(sequence_id)
            step, _ = bad_steps(sequence)[sequence_id - 1]
            await check_asked(cell, step, what)
            await check_reported(cell, sequence, step, what)
        await check_serves(cell, tiny_llama)


async def test_an_elastic_gang_refuses_to_drop_tokens(tiny_llama: Path) -> None:
    async with elastic_cell(tiny_llama, 2) as cell:
        cell.failures_expected = True
        sequence = request(1)
        step = prefill_step(
            [sequence.chunk()], GROUP, strategy="csa", csa=replace(plan(0.5), decode_kept_only=True)
        )
        await check_asked(cell, step, "an elastic gang decodes without a transfer")


async def check_asked(cell: Cell, step: PrefillStep, what: str) -> None:
    """Check that a call is answered with an error."""
    for rank in range(cell.prefill.world_size):
        with pytest.raises(ConfigError) as refused:
            await cell.prefill.call(rank, "prefill", pack(step))
        assert what in str(refused.value)


async def check_reported(cell: Cell, request: Request, step: PrefillStep, what: str) -> None:
    """Check that the router learns why its step is over; steps are notifications without an
    answer."""
    await cell.reserve(request)
    step_id = cell.submit(step, request.prompt)
    await cell.prefilled(step_id)
    assert all(done.cancelled for done in cell.about(PrefillDone, step_id=step_id))
    failures = cell.about(RequestFailed, sequence_id=request.sequence_id)
    assert {(failed.rank, failed.code) for failed in failures} == {
        (rank, "ConfigError") for rank in GROUP
    }
    assert all(what in failed.message for failed in failures)
    cell.cancel(request.sequence_id)
    await cell.freed(request.sequence_id)


async def check_serves(cell: Cell, model: Path) -> None:
    """Check that neither a rank nor a slot is lost."""
    sequence = request(99)
    answers = await cell.generate(sequence, group=GROUP)
    assert answers == [greedy_tokens(model, sequence.prompt.tolist(), GREEDY.max_tokens)]
    await cell.freed(99)
    await cell.prefilled(max(cell.steps))
    assert await cell.used_slots() == {0}
