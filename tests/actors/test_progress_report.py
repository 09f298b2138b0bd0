"""Ranks at work speak at every layer, and not so often that the router would notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from gang_driver import Request, even_slices, prefill_step, prompt_of
from gang_threads import elastic_cell, thread_cell
from piggyback_requests import piggyback, reserve_piggybacked

from csps.actors.engine import step_reports
from csps.actors.engine.step_reports import REPORT_S, ProgressReport
from csps.protocols.gang.messages import PrefillProgress


def test_progress_is_reported_at_most_once_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    began = 100.0
    times = [100.1, 100.9, began + REPORT_S, 101.5, began + 2 * REPORT_S]
    clock = Mock(side_effect=[began, *times])
    monkeypatch.setattr(step_reports, "time", Mock(monotonic=clock))
    told: list[tuple[str, Any]] = []
    report = ProgressReport(lambda *word: told.append(word), rank=3, step_id=8)
    for _ in times:
        report.step()
    assert told == [("prefill_progress", PrefillProgress(rank=3, step_id=8))] * 2


async def test_every_rank_of_a_group_reports_at_every_layer(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_reports, "REPORT_S", 0.0)
    async with thread_cell(tiny_llama, prefill=3, decode=1) as cell:
        request = Request(sequence_id=1, prompt=prompt_of(40), slices=even_slices(40, [0]))
        await cell.reserve(request)
        step_id = cell.submit(prefill_step([request.chunk()], [2, 0]), request.prompt)
        await cell.prefilled(step_id)
        spoken = [len(cell.about(PrefillProgress, rank=rank, step_id=step_id)) for rank in range(3)]
        layers = cell.prefill_gang.ranks[0].engine.spec.layers
        assert min(spoken[0], spoken[2]) >= layers
        assert spoken[1] == 0


async def test_every_rank_reports_during_piggybacked_prefill(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tokens show progress yet."""
    monkeypatch.setattr(step_reports, "REPORT_S", 0.0)
    async with elastic_cell(tiny_llama, 2) as cell:
        request = Request(sequence_id=1, prompt=prompt_of(40), slices=even_slices(40, [0, 1]))
        await reserve_piggybacked(cell, request)
        piggyback(cell, request, budget=4)
        await cell.until(lambda: cell.finished(1))
        await cell.freed(1)
        spoken = [len(cell.about(PrefillProgress, rank=rank)) for rank in range(2)]
        assert spoken == [40 // 4] * 2, "once for every piece"
