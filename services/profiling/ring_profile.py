"""`csps profile ring`: both variants of context parallelism's ring over miss rates."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime

from csps.configurator.scaling_information_base import ScalingInformationBase, StepRow
from csps.models.spec import read_spec
from csps.services.launch.settings import Settings
from csps.services.profiling.cell import open_cell
from csps.services.profiling.plan import Limits, RingRun, ring_runs
from csps.services.profiling.step_profile import Effort, Say
from csps.services.profiling.steps import measure_ring


class RingProfile:
    """One run of the command. Measurements are steps of the scaling information base."""

    def __init__(
        self, base: ScalingInformationBase, settings: Settings, effort: Effort, say: Say
    ) -> None:
        self._base, self._settings = base, settings
        self._effort, self._say = effort, say
        self._deadline = time.monotonic() + effort.limit_s

    async def run(self) -> None:
        """Measure; every prompt's chunks are kept at once."""
        runs = self._open_runs()
        self._say(f"{len(runs)} prompts to do; measurements are kept in {self._base.path}")
        if not runs:
            return
        self._say("starting ranks ...")
        async with open_cell(self._settings) as cell:
            for run in {(run.sp, run.strategy): run for run in reversed(runs)}.values():
                await measure_ring(cell, run)  # not kept: allocators and caches warm up
            for number, run in enumerate(runs, start=1):
                if time.monotonic() > self._deadline:
                    self._say("out of time; the same command goes on from here")
                    return
                load = os.getloadavg()[0]
                await asyncio.sleep(self._effort.pause_s)
                rows = self._rows(run, await measure_ring(cell, run), load)
                for row in rows:
                    self._base.add(row)
                took = ", ".join(f"{row.seconds * 1e3:.1f}" for row in rows)
                self._say(
                    f"[{number}/{len(runs)}] {run.strategy} on {run.sp}, chunks of "
                    f"{', '.join(map(str, run.chunks))} tokens: {took} ms"
                )

    def _open_runs(self) -> list[RingRun]:
        """Everything once, then everything again, as `StepProfile` does."""
        settings = self._settings
        longest = read_spec(settings.model_dir).max_positions
        limits = Limits(
            instances=settings.prefilling.instances,
            kv_slots=settings.prefilling.kv_slots,
            max_positions=min(longest, settings.max_positions or longest),
        )
        kept = [] if self._effort.again else self._base.rows(StepRow)
        known = Counter((row.strategy, row.group_shape, row.tokens, row.history) for row in kept)
        runs = ring_runs(limits, quick=self._effort.quick)
        return [
            run
            for number in range(1, self._effort.rounds + 1)
            for run in runs
            if known[run.strategy, str(run.sp), *_last(run)] < number
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
    """(tokens, history) of the chunk that a run ends with."""
    return run.chunks[-1], run.longest - run.chunks[-1]
