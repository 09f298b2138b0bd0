"""A step that all members have prepared, held where its leader begins it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from gang_cell import ANSWER_S, Cell

from csps.actors.engine.step_run import StepRun


class HeldSteps:
    """No leader in this process computes anything of its first step before `go_on` is set. What
    the conductor learns meanwhile is too late for the parts that the step was let run to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self._begun = threading.Event()
        compute = StepRun.compute

        def held(run: StepRun, *arguments: Any) -> None:
            if run.leads:
                self._begun.set()
                assert self.go_on.wait(ANSWER_S), "nobody let the step go on"
            compute(run, *arguments)

        patch.setattr(StepRun, "compute", held)

    async def begun(self) -> None:
        """Wait for a leader to come to its step."""
        assert await asyncio.to_thread(self._begun.wait, ANSWER_S)

    async def meanwhile_cancel(self, cell: Cell, rid: int) -> None:
        """All ranks know that a request is cancelled, and begin its step nevertheless."""
        await self.begun()
        cell.cancel(rid)
        await cell.prefill.stats()
        self.go_on.set()
