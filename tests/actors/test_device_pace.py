"""A host that runs ahead of its device tells the device's times, and is not far ahead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device_streams import Race, Races
from gang_driver import Request, even_slices, prefill_step, prompt_of
from gang_threads import ThreadCell, elastic_cell
from lagging_device import NS, LaggingDevice
from test_moving_sequences import decode, on, placed, talking
from tiny_checkpoints import make_checkpoint
from torch import Tensor

from csps.actors.engine import move_run
from csps.actors.engine.log_end import SequencerEnd
from csps.actors.engine.move_run import MoveRun
from csps.actors.engine.step_reports import ProgressReport
from csps.actors.timing.device_pace import AHEAD, DevicePace, wait_for_device
from csps.models.network.network import Layer
from csps.protocols.gang.messages import PrefillDone
from csps.protocols.gang.step_messages import SequenceMoved
from csps.protocols.sequencer.log_entries import Iterated, RanQuantum, Report

LAYERS, LAYER_NS = 12, 40_000_000
QUANTUM_MS = 100.0


class Seen:
    """What the ranks of a process launch and report, by the time of their devices."""

    def __init__(self, device: LaggingDevice, patch: pytest.MonkeyPatch) -> None:
        self.device = device
        self.lags: list[int] = []
        """How far the device was behind when a layer was begun."""
        self.reports: list[tuple[Report, int]] = []
        """Reports to the sequencer, each with the lag of the device at that time."""
        self.progress_ns: list[int] = []
        qkv, report = Layer.qkv, SequencerEnd.report

        def launched(layer: Layer, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
            self.lags.append(device.lag_ns)
            device.launch(LAYER_NS)
            return qkv(layer, *arguments)

        def noted(end: SequencerEnd, told: Report) -> None:
            self.reports.append((told, device.lag_ns))
            report(end, told)

        patch.setattr(Layer, "qkv", launched)
        patch.setattr(SequencerEnd, "report", noted)
        patch.setattr(
            ProgressReport, "step", lambda progress, *sent: self.progress_ns.append(device.now_ns)
        )

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the reports of a kind; none may be told before the device has got there."""
        told = [(report, lag) for report, lag in self.reports if isinstance(report, kind)]
        assert not any(lag for _, lag in told)
        return [report for report, _ in told]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), num_hidden_layers=LAYERS)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    device = LaggingDevice()
    device.replace(monkeypatch)
    return Seen(device, monkeypatch)


async def prefill(cell: ThreadCell, length: int = 40) -> Request:
    """Compute a prompt in a step."""
    request = Request(
        sequence_id=1, prompt=prompt_of(length), slices=even_slices(length, [0]), master=0
    )
    await cell.reserve(request)
    await cell.prefilled(cell.submit(prefill_step([request.chunk()], [0]), request.prompt))
    return request


async def test_a_steps_times_are_those_of_the_device(model: Path, seen: Seen) -> None:
    async with elastic_cell(model, 1, quantum_ms=QUANTUM_MS) as cell:
        await prefill(cell)
        (done,) = cell.about(PrefillDone)
        assert done.compute_s == pytest.approx(LAYERS * LAYER_NS / NS)
        assert done.yielded_s == 0
        quanta = seen.of(RanQuantum)
        assert sum(quantum.nanoseconds for quantum in quanta) == LAYERS * LAYER_NS


async def test_quanta_are_as_long_as_they_are_to_be_on_the_device(model: Path, seen: Seen) -> None:
    """Measured on the host they took no time, so each was twice as long as the one before."""
    async with elastic_cell(model, 1, quantum_ms=QUANTUM_MS) as cell:
        await prefill(cell)
        quanta = [quantum.nanoseconds for quantum in seen.of(RanQuantum)]
        assert max(quanta) <= QUANTUM_MS * 1e6 + LAYER_NS


async def test_the_host_is_few_layers_ahead_of_its_device(model: Path, seen: Seen) -> None:
    """Even if nothing else may run in the middle of the step."""
    async with elastic_cell(model, 1, quantum_ms=1e6) as cell:
        await prefill(cell)
        assert max(seen.lags[:LAYERS]) == (AHEAD - 1) * LAYER_NS


async def test_progress_is_told_when_the_device_gets_on(model: Path, seen: Seen) -> None:
    """A host that had launched everything would be silent until the end."""
    async with elastic_cell(model, 1, quantum_ms=1e6) as cell:
        await prefill(cell)
        told = [0, *seen.progress_ns, LAYERS * LAYER_NS]
        assert max(later - earlier for earlier, later in pairwise(told)) <= AHEAD * LAYER_NS


async def test_an_iterations_time_is_that_of_the_device(model: Path, seen: Seen) -> None:
    """Also on a rank that samples nothing, whose host never reads a token back."""
    async with elastic_cell(model, 1, quantum_ms=QUANTUM_MS) as cell:
        request = await prefill(cell)
        await cell.answer(request)
        await cell.freed(request.sequence_id)  # after its last iteration
        launched_ns = (len(seen.lags) - LAYERS) * LAYER_NS  # without the prompt's
        assert launched_ns
        assert sum(grant.nanoseconds for grant in seen.of(Iterated)) == launched_ns
        assert cell.ranks[0].loop.decode_batch.iterating_s == pytest.approx(launched_ns / NS)


async def test_a_moves_time_is_that_of_the_device(
    tiny_llama: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, exchanges = MoveRun._exchange, list[int]()

    def launched(move: MoveRun, *arguments: Any) -> None:
        seen.device.launch(LAYER_NS)
        if move.leads:
            exchanges.append(LAYER_NS)
        exchange(move, *arguments)

    monkeypatch.setattr(MoveRun, "_exchange", launched)
    monkeypatch.setattr(move_run, "BLOCK_TOKENS", 8)
    async with elastic_cell(tiny_llama, 2, quantum_ms=QUANTUM_MS) as cell:
        request = talking(1, 40, 1500, 0)
        await decode(cell, request)
        cell.move(request, placed(request), on(request, 1))
        await cell.until_received(2, SequenceMoved, sequence_id=1)
        for moved in cell.about(SequenceMoved, sequence_id=1):
            assert moved.seconds == pytest.approx(sum(exchanges) / NS)
        cell.cancel(1)
        await cell.freed(1)


# --- on CUDA's events, and without a device -------------------------------------------------------


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> Iterator[Races]:
    races = Races()
    races.replace_cuda(monkeypatch)
    with races:
        yield races


def test_the_host_waits_for_the_layer_before_the_last(races: Races) -> None:
    """A buffer of the host is read by the first layer, and may be written two layers later."""
    pace, host = DevicePace(torch.device("cuda")), races.stream()
    pinned = torch.zeros(4)
    pace.begin_layer()
    pinned + 1
    pace.begin_layer()
    pace.begin_layer()
    with races.on(host):
        pinned.fill_(1)


def test_the_host_does_not_wait_for_the_last_layer(races: Races) -> None:
    pace, host = DevicePace(torch.device("cuda")), races.stream()
    pinned = torch.zeros(4)
    pace.begin_layer()
    pinned + 1
    pace.begin_layer()
    with pytest.raises(Race, match="fill_"), races.on(host):
        pinned.fill_(1)


def test_waiting_for_the_device_waits_for_everything(races: Races) -> None:
    memory, host = torch.zeros(4), races.stream()
    memory + 1
    wait_for_device(torch.device("cuda"))
    with races.on(host):
        memory.fill_(1)


def test_a_cpu_is_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("asked"))
    pace = DevicePace(torch.device("cpu"))
    for _ in range(9):
        pace.begin_layer()
    pace.wait()
