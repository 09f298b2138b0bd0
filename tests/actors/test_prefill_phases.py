"""A step's timeline accounts for every layer from QKV to MLP, and for the last layer's few rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from gang_driver import Request, even_slices, prefill_step, prompt_of
from gang_threads import thread_cell
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch._subclasses.fake_tensor import FakeTensorMode

from csps.actors.attention import step_points
from csps.actors.engine.step_run import StepRun
from csps.actors.timing.timeline import LAYER, PHASE, StepClock
from csps.models.network.network import Layer

TIMELINE = {
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tracestate": "csps=timeline",
}


@pytest.mark.parametrize(("tp", "blocks"), [(1, 3), (2, 1)])
async def test_the_mlp_and_the_last_rows_are_timed(
    tiny_llama: Path,
    exported: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    tp: int,
    blocks: int,
) -> None:
    """The MLP runs in blocks of rows, except where ranks sum their parts."""
    monkeypatch.setattr(step_points, "MLP_ROWS", 10)
    request = Request(sequence_id=1, prompt=prompt_of(30), slices=even_slices(30, [0]))
    async with thread_cell(tiny_llama, prefill=1, prefill_tp=tp, decode=1) as cell:
        await cell.reserve(request)
        cell.submit(prefill_step([request.chunk()], [0], trace=TIMELINE), request.prompt)
        await cell.answer(request)
        await cell.freed(1)
    phases = Counter(
        (get_finished_span.attributes[PHASE], get_finished_span.attributes[LAYER])
        for get_finished_span in exported.get_finished_spans()
        if get_finished_span.attributes and LAYER in get_finished_span.attributes
    )
    for layer in (0, 1):  # leaves beside them
        assert phases.pop(("kv transfer", layer)) == tp
    per_rank = {key: count / tp for key, count in phases.items()}
    once = {(phase, 0): 1 for phase in ("qkv", "attention", "linear")}
    assert per_rank == {**once, ("mlp", 0): blocks, ("qkv", 1): 1, ("last rows", 1): 1}


@pytest.mark.parametrize(("device", "blocks"), [("cpu", [10, 10, 5]), ("cuda", [25])])
def test_a_gpu_gets_the_mlp_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, device: str, blocks: list[int]
) -> None:
    monkeypatch.setattr(step_points, "MLP_ROWS", 10)
    layer, run = Mock(spec=Layer, all_reduce=None), Mock(clock=StepClock())
    layer.mlp.side_effect = torch.clone
    with FakeTensorMode():
        StepRun._mlp(run, 0, layer, torch.empty(25, 8, device=device))
    assert [len(call.args[0]) for call in layer.mlp.call_args_list] == blocks
