"""CPU time of other processes and their threads.

With more ranks than cores, wall-clock time counts the neighbours' work too; CPU time does not.

Measuring steps and iterations on a cell.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from csps.protocols.attention.csa import CsaPlan
from csps.protocols.attention.plan import parse_option
from csps.protocols.core.placement import KvSlice, Span, place, zigzag_of
from csps.protocols.gang.messages import JoinBatch, ReserveKv, Sampling
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.protocols.rpc.schema import pack
from csps.services.measured.fits import EXACT
from csps.services.profiling.local_gangs import LocalGangs
from csps.services.profiling.runs import DecodeRun, PrefillRun, RingRun

_CPUCLOCK_SCHED = 2


@dataclass(frozen=True, kw_only=True)
class CpuTime:
    """Seconds on a core of a process so far; subtract two of them."""

    process_s: float
    """All threads, ended ones included."""
    threads_s: Mapping[int, float]
    """Each living thread, by its id."""

    @classmethod
    def of(cls, pid: int) -> CpuTime:
        """What a process has used until now."""
        # The clock's number as clock_getcpuclockid(3) builds it, which Python does not offer.
        clock = ~pid << 3 | _CPUCLOCK_SCHED
        return cls(process_s=time.clock_gettime(clock), threads_s=_threads_s(pid))

    def __sub__(self, earlier: CpuTime) -> CpuTime:
        return CpuTime(
            process_s=self.process_s - earlier.process_s,
            threads_s={
                thread: seconds - earlier.threads_s.get(thread, 0.0)
                for thread, seconds in self.threads_s.items()
            },
        )

    def busiest_s(self, threads: int = 1) -> float:
        """Seconds of so many threads: of a rank, those that compute."""
        return sum(sorted(self.threads_s.values())[-threads:])


def _threads_s(pid: int) -> dict[int, float]:
    seconds = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            # schedstat: nanoseconds on a core, nanoseconds waiting for one, time slices.
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


STEP_TOKENS = 16_384
"""Prompts that are prefilled only to be decoded go in jobs of about so many."""
GREEDY = Sampling(temperature=0.0, max_tokens=1)
Slices = tuple[KvSlice, ...]


async def measure_step(gangs: LocalGangs, run: PrefillRun) -> list[float]:
    """Seconds of each chunk, from sending it to all ranks being done, as a scheduler sees it."""
    sequence_ids = [next(gangs.ids) for _ in range(run.batch)]
    histories: list[Slices] = [()] * run.batch
    seconds = []
    try:
        for run_chunk in range(run.chunks):
            start = run_chunk * run.tokens
            chunks = [
                PrefillChunk(
                    sequence_id=sequence_id,
                    start=start,
                    length=run.tokens,
                    history=history,
                    last=run_chunk == run.chunks - 1,
                    sampling=GREEDY,
                )
                for sequence_id, history in zip(sequence_ids, histories, strict=True)
            ]
            seconds.append(await _prefill(gangs, chunks, run.sp, EXACT))
            histories = [
                (*history, *_computed(chunk, number, run))
                for number, (chunk, history) in enumerate(zip(chunks, histories, strict=True))
            ]
    finally:
        await gangs.cancel_requests(sequence_ids)
    return seconds


async def measure_ring(gangs: LocalGangs, run: RingRun) -> list[float]:
    """Seconds of each chunk, as `measure_step`; rows in zigzag, KV where it was computed."""
    sequence_id = next(gangs.ids)
    history: Slices = ()
    seconds, start = [], 0
    try:
        for run_chunk in run.chunks:
            bounds = even_bounds(run_chunk, run.sp)
            layout = zigzag_of([stop - begin for begin, stop in itertools.pairwise(bounds)])
            rows = place(range(run.sp), layout, start=start)
            chunk = PrefillChunk(
                sequence_id=sequence_id,
                start=start,
                length=run_chunk,
                rows=rows,
                history=history,
                last=start + run_chunk == run.longest,
                sampling=GREEDY,
            )
            seconds.append(await _prefill(gangs, [chunk], run.sp, run.strategy))
            history, start = (*history, *rows), start + run_chunk
    finally:
        await gangs.cancel_requests([sequence_id])
    return seconds


def even_bounds(total: int, parts: int) -> tuple[int, ...]:
    """Cut points of parts that differ by one at most."""
    return tuple(index * total // parts for index in range(parts + 1))


def even_slices(length: int, instances: int) -> Slices:
    """A prompt laid over instances in equal spans."""
    return tuple(
        KvSlice(instance=instance, span=Span(start=start, stop=stop))
        for instance, (start, stop) in enumerate(itertools.pairwise(even_bounds(length, instances)))
        if start < stop
    )


def _computed(chunk: PrefillChunk, number: int, run: PrefillRun) -> Slices:
    """Where a piece's KV is after its step: with whoever computed it."""
    offset = number * run.tokens
    own = Span(start=offset, stop=offset + run.tokens)
    slices = even_slices(run.tokens * run.batch, run.sp)
    parts = [(share.instance, own.intersection(share.span)) for share in slices]
    return tuple(
        KvSlice(
            instance=instance,
            span=Span(
                start=chunk.start + part.start - offset, stop=chunk.start + part.stop - offset
            ),
        )
        for instance, part in parts
        if part.length
    )


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a step takes, in seconds."""

    processor_s: float
    """Of all threads of all ranks."""
    computing_s: float
    """Of these, of those that compute."""
    took_s: float
    """From sending it to the ranks until all are done."""


async def measure_work(
    gangs: LocalGangs, sp: int, threads: int, tokens: int, option: str
) -> StepWork:
    """What the gang's ranks take for a prompt by an option.

    Args:
        sp: instances.
        threads: of a rank, that compute.
    """
    strategy, settings = parse_option(option)
    locations = gangs.prefill.locations[: sp * gangs.prefill.tp : gangs.prefill.tp]
    csa = None
    if settings is not None:
        csa = settings.for_group(
            locations,
            layers=gangs.prefill.descriptions[0].layers,
            longest_spt=-(-tokens // sp),
            every_query=strategy == "sp_tp",
        )
    sequence_id = next(gangs.ids)
    chunk = PrefillChunk(sequence_id=sequence_id, start=0, length=tokens, sampling=GREEDY)
    processes = {rank.pid for rank in gangs.prefill.descriptions}
    try:
        before = {pid: CpuTime.of(pid) for pid in processes}
        took_s = await _prefill(gangs, [chunk], sp, strategy, csa)
        used = [CpuTime.of(pid) - then for pid, then in before.items()]
    finally:
        await gangs.cancel_requests([sequence_id])
    return StepWork(
        processor_s=sum(it.process_s for it in used),
        computing_s=sum(it.busiest_s(threads) for it in used),
        took_s=took_s,
    )


async def _prefill(
    gangs: LocalGangs,
    chunks: Sequence[PrefillChunk],
    sp: int,
    strategy: str,
    csa: CsaPlan | None = None,
) -> float:
    """Run one job on the first `sp` instances, cut evenly; returns its seconds."""
    total = sum(chunk.length for chunk in chunks)
    tokens = np.random.default_rng(total).integers(3, 256, total).astype("<i4")
    job = PrefillStep(
        step_id=next(gangs.ids),
        group=tuple(range(sp)),
        bounds=even_bounds(total, sp),
        chunks=tuple(chunks),
        strategy=strategy,
        csa=csa,
    )
    messages = [
        pack(replace(job, tokens=tokens[start:stop].tobytes()))
        for start, stop in itertools.pairwise(job.bounds)
    ]
    bystander = pack(job)
    begin = time.perf_counter()
    for rank in range(gangs.prefill.world_size):
        instance = gangs.prefill.instance_of(rank)
        gangs.prefill.notify(rank, "prefill", messages[instance] if instance < sp else bystander)
    ranks = sp * gangs.prefill.tp
    await gangs.wait_until(lambda: gangs.done[job.step_id] >= ranks, f"a step of {total} tokens")
    return time.perf_counter() - begin


async def measure_iterations(gangs: LocalGangs, run: DecodeRun, iterations: int) -> float:
    """Seconds of an iteration of the run's requests, mean over their answers.

    By the first rank's own clock, the orders to the others included: tokens of many iterations
    arrive here at once where ranks and this process share cores. Joining and finishing takes a
    few iterations, which some requests miss.
    """
    sampling = Sampling(temperature=0.0, max_tokens=iterations + 1)
    sequence_ids = [next(gangs.ids) for _ in range(run.batch)]
    try:
        await _fill(gangs, run, sequence_ids, sampling)
        before = (await gangs.decode.stats())[0]
        for sequence_id in sequence_ids:
            join = JoinBatch(
                sequence_id=sequence_id, first_token=gangs.first_tokens.pop(sequence_id)
            )
            gangs.decode.notify(0, "join", pack(join))
        await gangs.wait_until(
            lambda: all(gangs.generated[sequence_id] >= iterations for sequence_id in sequence_ids),
            "a batch's decoding",
        )
        # Finished requests leave in an order of their own, after which nothing is counted.
        await gangs.wait_freed(sequence_ids)
        after = (await gangs.decode.stats())[0]
    finally:
        await gangs.cancel_requests(sequence_ids)
    return (after.iterating_s - before.iterating_s) / (after.iterations - before.iterations)


async def _fill(
    gangs: LocalGangs, run: DecodeRun, sequence_ids: Sequence[int], sampling: Sampling
) -> None:
    """Prefill the run's prompts and land their KV on its instances, mastered in turns."""
    slices = even_slices(run.context, run.sp)
    for number, sequence_id in enumerate(sequence_ids):
        request = ReserveKv(
            sequence_id=sequence_id,
            epoch=gangs.epoch,
            slices=slices,
            master=number % run.sp,
            prompt_length=run.context,
            sampling=sampling,
        )
        await gangs.decode.call_all("reserve", pack(request))
    chunks = [
        PrefillChunk(
            sequence_id=sequence_id,
            start=0,
            length=run.context,
            destinations=slices,
            sampling=sampling,
        )
        for sequence_id in sequence_ids
    ]
    fits = sum(gangs.prefill.capacities) - gangs.prefill.instances
    at_once = max(1, min(STEP_TOKENS, fits) // run.context)
    for first in range(0, len(chunks), at_once):
        await _prefill(gangs, chunks[first : first + at_once], gangs.prefill.instances, EXACT)
    ranks = len(slices) * gangs.decode.tp
    await gangs.wait_until(
        lambda: all(
            gangs.received[sequence_id] >= ranks and sequence_id in gangs.first_tokens
            for sequence_id in sequence_ids
        ),
        "landing of a batch's KV",
    )
