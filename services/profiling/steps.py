"""Measuring steps and iterations on a cell."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from csps.protocols.csa import CsaPlan
from csps.protocols.messages import JoinBatch, Reserve
from csps.protocols.options import parse_option
from csps.protocols.placement import KvShare, place, zigzag_of
from csps.protocols.prefill_job import PrefillJob, PrefillPiece
from csps.protocols.sampling import Sampling
from csps.protocols.schema import pack
from csps.protocols.span import Span
from csps.services.profiling.cell import Cell
from csps.services.profiling.cpu_time import CpuTime
from csps.services.profiling.fitting import EXACT
from csps.services.profiling.plan import DecodeRun, RingRun, StepRun

JOB_TOKENS = 16_384
"""Prompts that are prefilled only to be decoded go in jobs of about so many."""
GREEDY = Sampling(temperature=0.0, max_tokens=1)
Shares = tuple[KvShare, ...]


async def measure_step(cell: Cell, run: StepRun) -> list[float]:
    """Seconds of each chunk, from sending it to all ranks being done, as a scheduler sees it."""
    rids = [next(cell.numbers) for _ in range(run.batch)]
    histories: list[Shares] = [()] * run.batch
    seconds = []
    try:
        for chunk in range(run.chunks):
            start = chunk * run.tokens
            pieces = [
                PrefillPiece(
                    rid=rid,
                    start=start,
                    length=run.tokens,
                    history=history,
                    last=chunk == run.chunks - 1,
                    sampling=GREEDY,
                )
                for rid, history in zip(rids, histories, strict=True)
            ]
            seconds.append(await _prefill(cell, pieces, run.sp, EXACT))
            histories = [
                (*history, *_computed(piece, number, run))
                for number, (piece, history) in enumerate(zip(pieces, histories, strict=True))
            ]
    finally:
        await cell.forget(rids)
    return seconds


async def measure_ring(cell: Cell, run: RingRun) -> list[float]:
    """Seconds of each chunk, as `measure_step`; rows in zigzag, KV where it was computed."""
    rid = next(cell.numbers)
    history: Shares = ()
    seconds, start = [], 0
    try:
        for chunk in run.chunks:
            bounds = even_bounds(chunk, run.sp)
            layout = zigzag_of([stop - begin for begin, stop in itertools.pairwise(bounds)])
            rows = place(range(run.sp), layout, start=start)
            piece = PrefillPiece(
                rid=rid,
                start=start,
                length=chunk,
                rows=rows,
                history=history,
                last=start + chunk == run.longest,
                sampling=GREEDY,
            )
            seconds.append(await _prefill(cell, [piece], run.sp, run.strategy))
            history, start = (*history, *rows), start + chunk
    finally:
        await cell.forget([rid])
    return seconds


def even_bounds(total: int, parts: int) -> tuple[int, ...]:
    """Cut points of parts that differ by one at most."""
    return tuple(index * total // parts for index in range(parts + 1))


def even_shares(length: int, instances: int) -> Shares:
    """A prompt laid over instances in equal spans."""
    return tuple(
        KvShare(instance=instance, span=Span(start=start, stop=stop))
        for instance, (start, stop) in enumerate(itertools.pairwise(even_bounds(length, instances)))
        if start < stop
    )


def _computed(piece: PrefillPiece, number: int, run: StepRun) -> Shares:
    """Where a piece's KV is after its step: with whoever computed it."""
    offset = number * run.tokens
    own = Span(start=offset, stop=offset + run.tokens)
    shares = even_shares(run.tokens * run.batch, run.sp)
    parts = [(share.instance, own.intersection(share.span)) for share in shares]
    return tuple(
        KvShare(
            instance=instance,
            span=Span(
                start=piece.start + part.start - offset, stop=piece.start + part.stop - offset
            ),
        )
        for instance, part in parts
        if part.length
    )


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step takes, in seconds."""

    processor_s: float
    """Of all threads of all ranks."""
    computing_s: float
    """Of these, of those that compute."""
    took_s: float
    """From sending it to the ranks until all are done."""


async def measure_work(cell: Cell, sp: int, threads: int, tokens: int, option: str) -> Work:
    """What the gang's ranks take for a prompt by an option.

    Args:
        sp: instances.
        threads: of a rank, that compute.
    """
    strategy, settings = parse_option(option)
    locations = cell.prefill.locations[: sp * cell.prefill.tp : cell.prefill.tp]
    csa = None
    if settings is not None:
        csa = settings.for_group(
            locations,
            layers=cell.prefill.descriptions[0].layers,
            longest_spt=-(-tokens // sp),
            every_query=strategy == "sp_tp",
        )
    rid = next(cell.numbers)
    piece = PrefillPiece(rid=rid, start=0, length=tokens, sampling=GREEDY)
    processes = {rank.pid for rank in cell.prefill.descriptions}
    try:
        before = {pid: CpuTime.of(pid) for pid in processes}
        took_s = await _prefill(cell, [piece], sp, strategy, csa)
        used = [CpuTime.of(pid) - then for pid, then in before.items()]
    finally:
        await cell.forget([rid])
    return Work(
        processor_s=sum(it.process_s for it in used),
        computing_s=sum(it.busiest_s(threads) for it in used),
        took_s=took_s,
    )


async def _prefill(
    cell: Cell,
    pieces: Sequence[PrefillPiece],
    sp: int,
    strategy: str,
    csa: CsaPlan | None = None,
) -> float:
    """Run one job on the first `sp` instances, cut evenly; returns its seconds."""
    total = sum(piece.length for piece in pieces)
    tokens = np.random.default_rng(total).integers(3, 256, total).astype("<i4")
    job = PrefillJob(
        job_id=next(cell.numbers),
        group=tuple(range(sp)),
        bounds=even_bounds(total, sp),
        pieces=tuple(pieces),
        strategy=strategy,
        csa=csa,
    )
    messages = [
        pack(replace(job, tokens=tokens[start:stop].tobytes()))
        for start, stop in itertools.pairwise(job.bounds)
    ]
    bystander = pack(job)
    begin = time.perf_counter()
    for rank in range(cell.prefill.world_size):
        instance = cell.prefill.instance_of(rank)
        cell.prefill.notify(rank, "prefill", messages[instance] if instance < sp else bystander)
    ranks = sp * cell.prefill.tp
    await cell.until(lambda: cell.done[job.job_id] >= ranks, f"a step of {total} tokens")
    return time.perf_counter() - begin


async def measure_iterations(cell: Cell, run: DecodeRun, iterations: int) -> float:
    """Seconds of an iteration of the run's requests, mean over their answers.

    By the first rank's own clock, the orders to the others included: tokens of many iterations
    arrive here at once where ranks and this process share cores. Joining and finishing takes a
    few iterations, which some requests miss.
    """
    sampling = Sampling(temperature=0.0, max_tokens=iterations + 1)
    rids = [next(cell.numbers) for _ in range(run.batch)]
    try:
        await _fill(cell, run, rids, sampling)
        before = (await cell.decode.stats())[0]
        for rid in rids:
            join = JoinBatch(rid=rid, first_token=cell.first_tokens.pop(rid))
            cell.decode.notify(0, "join", pack(join))
        await cell.until(
            lambda: all(cell.drawn[rid] >= iterations for rid in rids), "a batch's decoding"
        )
        # Finished requests leave in an order of their own, after which nothing is counted.
        await cell.freed_everywhere(rids)
        after = (await cell.decode.stats())[0]
    finally:
        await cell.forget(rids)
    return (after.iterating_s - before.iterating_s) / (after.iterations - before.iterations)


async def _fill(cell: Cell, run: DecodeRun, rids: Sequence[int], sampling: Sampling) -> None:
    """Prefill the run's prompts and land their KV on its instances, mastered in turns."""
    shares = even_shares(run.context, run.sp)
    for number, rid in enumerate(rids):
        request = Reserve(
            rid=rid,
            epoch=cell.epoch,
            shares=shares,
            master=number % run.sp,
            prompt_length=run.context,
            sampling=sampling,
        )
        await cell.decode.call_all("reserve", pack(request))
    pieces = [
        PrefillPiece(rid=rid, start=0, length=run.context, destinations=shares, sampling=sampling)
        for rid in rids
    ]
    fits = sum(cell.prefill.capacities) - cell.prefill.instances
    at_once = max(1, min(JOB_TOKENS, fits) // run.context)
    for first in range(0, len(pieces), at_once):
        await _prefill(cell, pieces[first : first + at_once], cell.prefill.instances, EXACT)
    ranks = len(shares) * cell.decode.tp
    await cell.until(
        lambda: all(cell.landed[rid] >= ranks and rid in cell.first_tokens for rid in rids),
        "landing of a batch's KV",
    )
