"""A step that is stopped between two layers is no error in its trace, and its costs are traced."""

from __future__ import annotations

from pathlib import Path

import pytest
from gang_driver import Request, even_slices, prefill_step, prompt_of
from gang_threads import thread_cell
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from paused_ranks import PausedSteps
from tiny_checkpoints import make_checkpoint
from uniform_plan import uniform_plan

from csps.actors.timing.timeline import CANCELLED, EXCHANGE_S, LAYER, PHASE
from csps.protocols.gang.messages import PrefillDone

TIMELINE = {
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tracestate": "csps=timeline",
}
LAYERS, VICTIM = 4, 1
FIRST_EXCHANGE = {"sp_tp": "all-gather", "ulysses": "first all-to-all", "csa": "first all-to-all"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


@pytest.mark.parametrize(
    ("strategy", "tp"),
    [("ulysses", 1), ("csa", 1), ("sp_tp", 1), ("sp_tp", 2), ("gathered_weights", 2)],
)
async def test_a_stopped_step_is_traced(
    model: Path,
    exported: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    tp: int,
) -> None:
    steps, plan = PausedSteps(monkeypatch), None
    if strategy in ("csa", "sp_tp"):
        locations = ["0-0-0", "0-1-0"]
        plan = uniform_plan(locations, levels=2, layers=LAYERS, drop_ratio=0.5)
    request = Request(sequence_id=VICTIM, prompt=prompt_of(60), slices=even_slices(60, [0]))
    # Plain gloo tells how long exchanges took.
    async with thread_cell(model, prefill=2, prefill_tp=tp, decode=1, data_group=None) as cell:
        await cell.reserve(request)
        step = prefill_step([request.chunk()], [0, 1], strategy=strategy, csa=plan, trace=TIMELINE)
        step_id = cell.submit(step, request.prompt)
        await steps.meanwhile_cancel(cell, VICTIM)
        await cell.prefilled(step_id)
        assert all(done.cancelled for done in cell.about(PrefillDone, step_id=step_id))
        await cell.freed(VICTIM)
    spans = exported.get_finished_spans()
    computed = [span for span in spans if span.name == "prefill.compute"]
    assert len(computed) == 2 * tp
    for span in computed:
        check_stopped(span)
        phases = [phase for phase in spans if phase.parent == span.context]
        check_phases(phases, FIRST_EXCHANGE.get(strategy, "first all-to-all"))


def check_stopped(span: ReadableSpan) -> None:
    """Check that the span is neither failed nor has a stack trace."""
    assert span.attributes is not None
    assert span.status.status_code is trace.StatusCode.UNSET
    assert span.events == ()
    assert span.attributes[CANCELLED] is True
    assert float(str(span.attributes[EXCHANGE_S])) > 0


def check_phases(phases: list[ReadableSpan], exchange: str) -> None:
    """Check for phases of the one computed layer, its exchange among them, and of no other."""
    attributes = [phase.attributes for phase in phases if phase.attributes is not None]
    assert exchange in {attribute[PHASE] for attribute in attributes}
    assert {attribute[LAYER] for attribute in attributes if LAYER in attribute} <= {
        0,
        1,
    }  # 1: fetched ahead
