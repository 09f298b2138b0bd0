"""A job that no strategy can run is refused when it arrives; the gang lives on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gang_driver import GREEDY, Cell, Request, even_shares, job_of, laid_out, prompt_of
from gang_threads import elastic_cell, thread_cell
from greedy_reference import greedy_tokens

from csps.protocols.attention.csa import CsaPlan, LayerGroup
from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.messages import PrefillDone, RequestFailed
from csps.protocols.gang.step_messages import PrefillStep
from csps.protocols.rpc.schema import pack

GROUP = (0, 1)
UNKNOWN = "unknown strategy 'ulises'; did you mean 'ulysses'?"
NO_PLAN = "strategy 'ulysses' is exact and takes no sparse attention plan; allowed with one are csa"
RATIOS = "3 drop ratios of one level; allowed are one for all KV heads, or 2, one per KV head"

CONTIGUOUS = (
    "takes contiguous rows, cut at the job's bounds; those that take any others are "
    "gathered_weights, ring_kv, ring_q, ulysses"
)


def request(sequence_id: int) -> Request:
    return Request(
        sequence_id=sequence_id, prompt=prompt_of(40, sequence_id), slices=even_shares(40, [0])
    )


def plan(*drop_ratios: float) -> CsaPlan:
    """Of layer 1 at level 2, by KV head."""
    group = LayerGroup(first=1, stop=2, drop_ratios=(drop_ratios,))
    return CsaPlan(locations=("0-0-0", "0-0-1"), levels=2, layer_groups=(group,))


def bad_jobs(it: Request) -> list[tuple[PrefillStep, str]]:
    """Well-formed messages that ask for what is not there, and what is said of them."""
    chunks = [it.chunk()]
    striped = [it.chunk(rows=laid_out("striped", 0, 40, GROUP))]
    return [
        (job_of(chunks, GROUP, strategy="ulises"), UNKNOWN),
        (job_of(chunks, GROUP, strategy="ulysses", csa=plan(0.5)), NO_PLAN),
        (job_of(chunks, GROUP, strategy="gathered_weights", csa=plan(0.5)), "is exact and takes"),
        (job_of(chunks, GROUP, strategy="csa", csa=plan(0.5, 0.5, 0.5)), RATIOS),
        (job_of(chunks, GROUP, strategy="sp_tp", csa=plan(0.5, 0.5, 0.5)), RATIOS),
        (job_of(striped, GROUP, strategy="csa", csa=plan(0.5)), f"strategy 'csa' {CONTIGUOUS}"),
        (job_of(striped, GROUP, strategy="sp_tp"), f"strategy 'sp_tp' {CONTIGUOUS}"),
    ]


async def test_a_job_that_no_strategy_can_run_is_refused(tiny_llama: Path) -> None:
    async with thread_cell(tiny_llama, prefill=2, decode=1) as cell:
        cell.failures_expected = True
        for sequence_id, (_, what) in enumerate(bad_jobs(request(1)), start=1):
            it = request(sequence_id)
            job, _ = bad_jobs(it)[sequence_id - 1]
            await check_asked(cell, job, what)
            await check_told(cell, it, job, what)
        await check_serves(cell, tiny_llama)


async def test_an_elastic_gang_keeps_what_decode_is_to_see_whole(tiny_llama: Path) -> None:
    async with elastic_cell(tiny_llama, 2) as cell:
        cell.failures_expected = True
        it = request(1)
        job = job_of(
            [it.chunk()], GROUP, strategy="csa", csa=replace(plan(0.5), decode_kept_only=True)
        )
        await check_asked(cell, job, "an elastic gang decodes where the prompt's KV lies")


async def check_asked(cell: Cell, job: PrefillStep, what: str) -> None:
    """A call has an error for its answer."""
    for rank in range(cell.prefill.world_size):
        with pytest.raises(ConfigError) as refused:
            await cell.prefill.call(rank, "prefill", pack(job))
        assert what in str(refused.value)


async def check_told(cell: Cell, it: Request, job: PrefillStep, what: str) -> None:
    """The router sends jobs as notifications: it learns that the job is over and why."""
    await cell.reserve(it)
    step_id = cell.submit(job, it.prompt)
    await cell.prefilled(step_id)
    assert all(done.cancelled for done in cell.about(PrefillDone, step_id=step_id))
    failures = cell.about(RequestFailed, sequence_id=it.sequence_id)
    assert {(failed.rank, failed.code) for failed in failures} == {
        (rank, "ConfigError") for rank in GROUP
    }
    assert all(what in failed.message for failed in failures)
    cell.cancel(it.sequence_id)
    await cell.freed(it.sequence_id)


async def check_serves(cell: Cell, model: Path) -> None:
    """Neither a rank nor a slot is lost."""
    it = request(99)
    answers = await cell.generate(it, group=GROUP)
    assert answers == [greedy_tokens(model, it.prompt.tolist(), GREEDY.max_tokens)]
    await cell.freed(99)
    await cell.prefilled(max(cell.jobs))
    assert await cell.used_slots() == {0}
