"""Run `csps profile steps` and `csps profile ring`: measure all runs that are not stored yet.

`StepProfile` measures prefill steps and decode iterations. `RingProfile` measures both variants of
context parallelism's ring over miss rates.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest

from csps.configurator.model.scaling_information_base import ScalingInformationBase, StepRow
from csps.models.network.spec import read_spec
from csps.protocols.gang.members import GangRole
from csps.services.measured.fits import DECODE, EXACT
from csps.services.planning.memory import kv_slots, window_slots
from csps.services.profiling.local_gangs import LocalGangs, open_local_gangs
from csps.services.profiling.runs import (
    DecodeRun,
    GangLimits,
    PrefillRun,
    RingRun,
    decode_runs,
    prefill_runs,
    ring_runs,
)
from csps.services.profiling.steps import measure_iterations, measure_ring, measure_step
from csps.services.settings.settings import Settings

_log = logging.getLogger(__name__)

Say = Callable[[str], None]
Run = PrefillRun | DecodeRun
WARM_UP = 256
"""Tokens of the first step of each group, which is not stored."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Amount of measuring."""

    quick: bool = False
    again: bool = False
    """Repeat measurements that are stored."""
    rounds: int = 3
    """Measurements of each step and batch."""
    iterations: int = 32
    """Decode iterations of one measurement."""
    pause_s: float = 0.1
    """Pause before each step. On a server, a step follows other work; right after its like, with
    weights and code in the caches, it takes up to a third less."""
    limit_s: float = 600.0
    """Time after which no new run starts."""


MAX_BATCH = 64
"""Requests that decode together: the default limit of policies."""


class StepProfile:
    """One run of `csps profile steps`."""

    def __init__(
        self, base: ScalingInformationBase, settings: Settings, effort: Effort, say: Say
    ) -> None:
        self._base = base
        self._settings = settings
        self._effort = effort
        self._say = say
        self._deadline = time.monotonic() + effort.limit_s

    async def run(self) -> None:
        """Measure all open runs; store every measurement at once."""
        runs = self._open_runs()
        self._say(f"{len(runs)} runs to do; measurements are stored in {self._base.path}")
        if not runs:
            return
        self._say("starting ranks ...")
        async with open_local_gangs(self._settings) as gangs:
            for sp in sorted({run.sp for run in runs if isinstance(run, PrefillRun)}):
                await measure_step(gangs, PrefillRun(sp=sp, tokens=WARM_UP))
            for position, run in enumerate(runs, start=1):
                if time.monotonic() > self._deadline:
                    self._say("out of time; the same command continues from here")
                    return
                row = await self._measure(gangs, run)
                took = f"{row.seconds * 1e3:.2f} ms"
                self._say(f"[{position}/{len(runs)}] {_described(run)}: {took}")

    def _open_runs(self) -> list[Run]:
        """Return all runs once, then again for the next round, without those that are stored.

        A temporary disturbance then does not affect one point every time. Prefill and decode
        alternate, so that an interrupted profile has some of each.
        """
        quick, settings = self._effort.quick, self._settings
        steps = prefill_runs(self._limits(settings.prefilling_role), quick=quick)
        decodes = decode_runs(
            self._limits(settings.decoding_role),
            quick=quick,
            answer=self._effort.iterations,
            max_batch=MAX_BATCH,
            max_prompt=settings.prefilling.instances
            * (kv_slots(settings.prefilling_role, settings) - 1),
        )
        known = Counter() if self._effort.again else Counter(map(_key, self._base.rows(StepRow)))
        alternating = [
            run for pair in zip_longest(steps, decodes) for run in pair if run is not None
        ]
        return [
            run
            for needed in range(1, self._effort.rounds + 1)
            for run in alternating
            if known[self._last_key(run)] < needed
        ]

    def _limits(self, role: GangRole) -> GangLimits:
        spec = read_spec(self._settings.model_dir, self._settings.model_overrides)
        longest, apart = spec.max_positions, window_slots(role, self._settings)
        return GangLimits(
            instances=self._settings.gangs[role].instances,
            kv_slots=kv_slots(role, self._settings),
            max_positions=min(longest, self._settings.max_positions or longest),
            masters=apart // (spec.window or 1) if apart else sys.maxsize,
        )

    def _last_key(self, run: Run) -> tuple[object, ...]:
        """Return the key of the row that a run ends with."""
        if isinstance(run, PrefillRun):
            rows = self._step_rows(run, [0.0] * run.chunks, 0.0)
            return _key(rows[-1])
        return _key(self._iteration_row(run, 0.0, 0.0))

    async def _measure(self, gangs: LocalGangs, run: Run) -> StepRow:
        """Measure a run and store its rows; return the last one."""
        load = os.getloadavg()[0]
        _log.debug("measuring %s at load %.2f", _described(run), load)
        if isinstance(run, PrefillRun):
            await asyncio.sleep(self._effort.pause_s)
            rows = self._step_rows(run, await measure_step(gangs, run), load)
        else:
            seconds = await measure_iterations(gangs, run, self._effort.iterations)
            rows = [self._iteration_row(run, seconds, load)]
        for row in rows:
            self._base.add(row)
        return rows[-1]

    def _step_rows(self, run: PrefillRun, seconds: Sequence[float], load: float) -> list[StepRow]:
        return [
            StepRow(
                strategy=EXACT,
                group_shape=str(run.sp),
                tp=self._settings.prefilling.tp,
                tokens=run.tokens,
                history=chunk * run.tokens,
                batch=run.batch,
                seconds=taken,
                load=load,
                date=_now(),
            )
            for chunk, taken in enumerate(seconds)
        ]

    def _iteration_row(self, run: DecodeRun, seconds: float, load: float) -> StepRow:
        return StepRow(
            strategy=DECODE,
            group_shape=str(run.sp),
            tp=self._settings.decoding.tp,
            tokens=1,
            # Context of a request halfway through its answer.
            history=run.context + self._effort.iterations // 2,
            batch=run.batch,
            seconds=seconds,
            load=load,
            date=_now(),
        )


def _key(row: StepRow) -> tuple[object, ...]:
    return row.strategy, row.group_shape, row.tp, row.tokens, row.history, row.batch


def _described(run: Run) -> str:
    if isinstance(run, DecodeRun):
        return f"decode on {run.sp}, {run.batch} x {run.context} tokens of context"
    chunks = f" in {run.chunks} chunks" if run.chunks > 1 else ""
    return f"prefill on {run.sp}, {run.batch} x {run.longest} tokens{chunks}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class RingProfile:
    """One run of `csps profile ring`. Measurements are steps of the scaling information base."""

    def __init__(
        self, base: ScalingInformationBase, settings: Settings, effort: Effort, say: Say
    ) -> None:
        self._base, self._settings = base, settings
        self._effort, self._say = effort, say
        self._deadline = time.monotonic() + effort.limit_s

    async def run(self) -> None:
        """Measure all open runs; store the chunks of every prompt at once."""
        runs = self._open_runs()
        self._say(f"{len(runs)} prompts to do; measurements are stored in {self._base.path}")
        if not runs:
            return
        self._say("starting ranks ...")
        async with open_local_gangs(self._settings) as gangs:
            for run in {(run.sp, run.strategy): run for run in reversed(runs)}.values():
                await measure_ring(gangs, run)  # not stored: allocators and caches warm up
            for position, run in enumerate(runs, start=1):
                if time.monotonic() > self._deadline:
                    self._say("out of time; the same command continues from here")
                    return
                load = os.getloadavg()[0]
                await asyncio.sleep(self._effort.pause_s)
                rows = self._rows(run, await measure_ring(gangs, run), load)
                for row in rows:
                    self._base.add(row)
                took = ", ".join(f"{row.seconds * 1e3:.1f}" for row in rows)
                self._say(
                    f"[{position}/{len(runs)}] {run.strategy} on {run.sp}, chunks of "
                    f"{', '.join(map(str, run.chunks))} tokens: {took} ms"
                )

    def _open_runs(self) -> list[RingRun]:
        """Return all runs once, then again for the next round, as `StepProfile` does."""
        settings = self._settings
        longest = read_spec(settings.model_dir, settings.model_overrides).max_positions
        limits = GangLimits(
            instances=settings.prefilling.instances,
            kv_slots=kv_slots(settings.prefilling_role, settings),
            max_positions=min(longest, settings.max_positions or longest),
        )
        stored = [] if self._effort.again else self._base.rows(StepRow)
        known = Counter((row.strategy, row.group_shape, row.tokens, row.history) for row in stored)
        runs = ring_runs(limits, quick=self._effort.quick)
        return [
            run
            for needed in range(1, self._effort.rounds + 1)
            for run in runs
            if known[run.strategy, str(run.sp), *_last(run)] < needed
        ]

    def _rows(self, run: RingRun, seconds: Sequence[float], load: float) -> list[StepRow]:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return [
            StepRow(
                strategy=run.strategy,
                group_shape=str(run.sp),
                tp=self._settings.prefilling.tp,
                tokens=tokens,
                history=sum(run.chunks[:chunk]),
                batch=1,
                seconds=taken,
                load=load,
                date=date,
            )
            for chunk, (tokens, taken) in enumerate(zip(run.chunks, seconds, strict=True))
        ]


def _last(run: RingRun) -> tuple[int, int]:
    """Return (tokens, history) of the chunk that a run ends with."""
    return run.chunks[-1], run.longest - run.chunks[-1]
