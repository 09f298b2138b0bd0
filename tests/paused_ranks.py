"""A step that all members have prepared, paused where its leader begins it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from gang_driver import ANSWER_S, Cell

from csps.actors.engine.decode_batch import DecodeBatch
from csps.actors.engine.step_run import StepRun


class PausedSteps:
    """No leader in this process computes anything of its first step before `go_on` is set. What
    the sequencer learns meanwhile is too late for the parts that the step was let run to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self._begun = threading.Event()
        compute = StepRun.compute

        def paused(run: StepRun, *arguments: Any) -> None:
            if run.leads:
                self._begun.set()
                assert self.go_on.wait(ANSWER_S), "the test did not let the step go on"
            compute(run, *arguments)

        patch.setattr(StepRun, "compute", paused)

    async def begun(self) -> None:
        """Wait for a leader to come to its step."""
        assert await asyncio.to_thread(self._begun.wait, ANSWER_S)

    async def meanwhile_cancel(self, cell: Cell, sequence_id: int) -> None:
        """Let all ranks learn of a cancel and begin the request's step nevertheless."""
        await self.begun()
        cell.cancel(sequence_id)
        await cell.prefill.stats()
        self.go_on.set()


class PausedDecodeBatch:
    """A decode batch that stops after so many further iterations until `go_on` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, stream: DecodeBatch, *, after: int = 0) -> None:
        self.go_on = threading.Event()
        iterate, last = DecodeBatch.iterate, stream.iterations + after

        def paused(this: DecodeBatch, group: Sequence[int] = ()) -> list[int]:
            if this is stream and this.iterations >= last:
                assert self.go_on.wait(ANSWER_S), "the test did not let the decode batch go on"
            return iterate(this, group)

        patch.setattr(DecodeBatch, "iterate", paused)
