"""Measure steps and decode iterations on local gangs.

`CpuTime` reads the CPU time of other processes and their threads. With more ranks than cores,
wall-clock time also counts the work of neighbors; CPU time does not.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from csps.protocols.attention.csa import CsaPlan
from csps.protocols.attention.plan import parse_option
from csps.protocols.core.placement import KvSlice, Span, place, zigzag_of
from csps.protocols.gang.messages import JoinBatch, ReserveKv, SamplerInputs, Sampling
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.protocols.rpc.schema import encode, pack
from csps.services.measured.fits import EXACT
from csps.services.profiling.local_gangs import LocalGangs
from csps.services.profiling.runs import DecodeRun, PrefillRun, RingRun

_CPUCLOCK_SCHED = 2


@dataclass(frozen=True, kw_only=True)
class CpuTime:
    """Seconds of a process on a core so far; subtract two of them."""

    process_s: float
    """Seconds of all threads, ended ones included."""
    threads_s: Mapping[int, float]
    """Seconds of each living thread, by its id."""

    @classmethod
    def of(cls, pid: int) -> CpuTime:
        """Read the time that a process has used until now."""
        # The clock's id as clock_getcpuclockid(3) builds it, which Python does not offer.
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
        """Sum the seconds of the busiest threads: of a rank, those that compute."""
        return sum(sorted(self.threads_s.values())[-threads:])


def _threads_s(pid: int) -> dict[int, float]:
    seconds = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            # schedstat: nanoseconds on a core, nanoseconds waiting for one, time slices.
            seconds[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return seconds


STEP_TOKENS = 16_384
"""About the tokens of a step for prompts that are prefilled only to be decoded."""
GREEDY = encode(SamplerInputs(sampling=Sampling(temperature=0.0, max_tokens=1)))
Slices = tuple[KvSlice, ...]


async def measure_step(gangs: LocalGangs, run: PrefillRun) -> list[float]:
    """Measure the seconds of each chunk, from sending it until all ranks are done."""
    sequence_ids = [next(gangs.ids) for _ in range(run.batch)]
    histories: list[Slices] = [()] * run.batch
    seconds = []
    try:
        for index in range(run.chunks):
            start = index * run.tokens
            chunks = [
                PrefillChunk(
                    sequence_id=sequence_id,
                    start=start,
                    length=run.tokens,
                    history=history,
                    last=index == run.chunks - 1,
                    decoded=False,
                )
                for sequence_id, history in zip(sequence_ids, histories, strict=True)
            ]
            seconds.append(await _prefill(gangs, chunks, run.sp, EXACT))
            histories = [
                (*history, *_computed(chunk, place_in_step, run))
                for place_in_step, (chunk, history) in enumerate(
                    zip(chunks, histories, strict=True)
                )
            ]
    finally:
        await gangs.cancel_requests(sequence_ids)
    return seconds


async def measure_ring(gangs: LocalGangs, run: RingRun) -> list[float]:
    """Measure the seconds of each chunk with rows in zigzag and KV where it was computed."""
    sequence_id = next(gangs.ids)
    history: Slices = ()
    seconds, start = [], 0
    try:
        for length in run.chunks:
            bounds = even_bounds(length, run.sp)
            layout = zigzag_of([stop - begin for begin, stop in itertools.pairwise(bounds)])
            rows = place(range(run.sp), layout, start=start)
            chunk = PrefillChunk(
                sequence_id=sequence_id,
                start=start,
                length=length,
                rows=rows,
                history=history,
                last=start + length == run.longest,
                decoded=False,
            )
            seconds.append(await _prefill(gangs, [chunk], run.sp, run.strategy))
            history, start = (*history, *rows), start + length
    finally:
        await gangs.cancel_requests([sequence_id])
    return seconds


def even_bounds(total: int, parts: int) -> tuple[int, ...]:
    """Return the bounds of parts whose sizes differ by one at most."""
    return tuple(index * total // parts for index in range(parts + 1))


def even_slices(length: int, instances: int) -> Slices:
    """Return the slices of a prompt laid over instances in equal spans."""
    return tuple(
        KvSlice(instance, start, stop)
        for instance, (start, stop) in enumerate(itertools.pairwise(even_bounds(length, instances)))
        if start < stop
    )


def _computed(chunk: PrefillChunk, place_in_step: int, run: PrefillRun) -> Slices:
    """Return the slices of a chunk's KV after its step, on the instances that computed it."""
    offset = place_in_step * run.tokens
    own = Span(start=offset, stop=offset + run.tokens)
    slices = even_slices(run.tokens * run.batch, run.sp)
    overlaps = [(kv_slice.instance, own.intersection(kv_slice.span)) for kv_slice in slices]
    return tuple(
        KvSlice(instance, chunk.start + overlap.start - offset, chunk.start + overlap.stop - offset)
        for instance, overlap in overlaps
        if overlap.length
    )


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Seconds that a step takes."""

    processor_s: float
    """CPU time of all threads of all ranks."""
    computing_s: float
    """Portion of it spent by threads that compute."""
    took_s: float
    """Wall-clock time from sending the step until all ranks are done."""


async def measure_work(
    gangs: LocalGangs, sp: int, threads: int, tokens: int, option: str
) -> StepWork:
    """Measure the work of the gang's ranks for a prompt by an option.

    Args:
        sp: number of instances.
        threads: number of a rank's threads that compute.
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
    chunk = PrefillChunk(sequence_id, 0, tokens, decoded=False)
    processes = {rank.pid for rank in gangs.prefill.descriptions}
    try:
        before = {pid: CpuTime.of(pid) for pid in processes}
        took_s = await _prefill(gangs, [chunk], sp, strategy, csa)
        used = [CpuTime.of(pid) - earlier for pid, earlier in before.items()]
    finally:
        await gangs.cancel_requests([sequence_id])
    return StepWork(
        processor_s=sum(cpu_time.process_s for cpu_time in used),
        computing_s=sum(cpu_time.busiest_s(threads) for cpu_time in used),
        took_s=took_s,
    )


async def _prefill(
    gangs: LocalGangs,
    chunks: Sequence[PrefillChunk],
    sp: int,
    strategy: str,
    csa: CsaPlan | None = None,
) -> float:
    """Run one step on the first `sp` instances, divided evenly; return its seconds."""
    total = sum(chunk.length for chunk in chunks)
    tokens = np.random.default_rng(total).integers(3, 256, total).astype("<i4")
    step = PrefillStep(
        step_id=next(gangs.ids),
        group=tuple(range(sp)),
        bounds=even_bounds(total, sp),
        chunks=tuple(chunks),
        strategy=strategy,
        csa=csa,
        samplers={chunk.sequence_id: GREEDY for chunk in chunks if chunk.last},
    )
    messages = [
        pack(msgspec.structs.replace(step, tokens=tokens[start:stop].tobytes()))
        for start, stop in itertools.pairwise(step.bounds)
    ]
    bystander = pack(step)
    begin = time.perf_counter()
    for rank in range(gangs.prefill.world_size):
        instance = gangs.prefill.instance_of(rank)
        gangs.prefill.notify(rank, "prefill", messages[instance] if instance < sp else bystander)
    ranks = sp * gangs.prefill.tp
    await gangs.wait_until(lambda: gangs.done[step.step_id] >= ranks, f"a step of {total} tokens")
    return time.perf_counter() - begin


async def measure_iterations(gangs: LocalGangs, run: DecodeRun, iterations: int) -> float:
    """Measure the seconds of an iteration of the run's requests, mean over their answers."""
    # By the first rank's own clock, its orders to the others included: tokens of many iterations
    # arrive here at once if ranks and this process share cores. Joining and finishing takes a few
    # iterations, which some requests miss.
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
            "decoding of a batch",
        )
        # Only now: finished requests leave in an order of their own, and no iteration follows.
        await gangs.wait_freed(sequence_ids)
        after = (await gangs.decode.stats())[0]
    finally:
        await gangs.cancel_requests(sequence_ids)
    return (after.iterating_s - before.iterating_s) / (after.iterations - before.iterations)


async def _fill(
    gangs: LocalGangs, run: DecodeRun, sequence_ids: Sequence[int], sampling: Sampling
) -> None:
    """Prefill the run's prompts and transfer their KV to its instances, which are masters in
    turn."""
    slices = even_slices(run.context, run.sp)
    for position, sequence_id in enumerate(sequence_ids):
        request = ReserveKv(
            sequence_id=sequence_id,
            epoch=gangs.epoch,
            slices=slices,
            master=position % run.sp,
            prompt_tokens=run.context,
            output_tokens=sampling.max_tokens,
            sampler=encode(SamplerInputs(sampling=sampling)),
        )
        await gangs.decode.call_all("reserve", pack(request))
    chunks = [
        PrefillChunk(
            sequence_id,
            0,
            run.context,
            destinations=slices,
            near_to=position % run.sp if gangs.decode.window else None,
        )
        for position, sequence_id in enumerate(sequence_ids)
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
        "transfer of a batch's KV",
    )
