"""A step that all members have prepared, held where its leader begins it.

A rank's stream that stands still before one of its iterations.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from gang_driver import ANSWER_S, Cell

from csps.actors.engine.decode_batch import DecodeBatch
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

    async def meanwhile_cancel(self, cell: Cell, sequence_id: int) -> None:
        """All ranks know that a request is cancelled, and begin its step nevertheless."""
        await self.begun()
        cell.cancel(sequence_id)
        await cell.prefill.stats()
        self.go_on.set()


class HeldStream:
    """From so many further iterations on, the stream has no other one before `go_on` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, stream: DecodeBatch, *, after: int = 0) -> None:
        self.go_on = threading.Event()
        iterate, last = DecodeBatch.iterate, stream.iterations + after

        def held(this: DecodeBatch, group: Sequence[int] = ()) -> list[int]:
            if this is stream and this.iterations >= last:
                assert self.go_on.wait(ANSWER_S), "nobody let the stream go on"
            return iterate(this, group)

        patch.setattr(DecodeBatch, "iterate", held)
