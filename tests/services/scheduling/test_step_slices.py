"""Plans whose rows, KV and answers are laid out anyhow, against positions one by one."""

from __future__ import annotations

import pytest
from arbitrary_layout_policy import AnyLayout, lay, rows_of
from random_executor import RandomCell

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.events.limits import QueueLimits


class LayoutCell(RandomCell):
    """Ranks that know of every position where its KV is stored."""

    PROMPTS = (1, 3, 90, 100, 400)

    def __init__(self, scheduler: Scheduler, seed: int, *, faults: float, elastic: bool) -> None:
        super().__init__(scheduler, seed, faults=faults, elastic=elastic)
        self._elastic = elastic
        self._stored: dict[int, dict[int, InstanceId]] = {}

    def _run_step(self, command: cmd.RunStep) -> None:
        super()._run_step(command)
        step = command.step
        for chunk in step.chunks:
            stored = self._stored.setdefault(chunk.sequence_id, {})
            assert sorted(stored) == list(range(chunk.start)), "chunks follow one upon another"
            named = [
                (p, kv_slice.instance)
                for kv_slice in chunk.history
                for p in kv_slice.span.positions
            ]
            assert sorted(named) == sorted(stored.items()), "history is not where it was left"
            computed = sorted(rows_of(step, chunk))
            positions = range(chunk.start, chunk.start + chunk.length)
            assert [p for p, _ in computed] == list(positions), "not each position once"
            reserve = self.sequences[chunk.sequence_id].reserve
            lay(stored, chunk, step, reserve.message if self._elastic else None)
            assert set(stored.values()) | {instance for _, instance in computed} <= set(step.group)


@pytest.mark.parametrize("seed", range(12))
def test_any_layout_goes_through_checks_ledger_and_faults(seed: int) -> None:
    storm(seed)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(5))
def test_any_layout_goes_through_five_hundred_storms(hundred: int) -> None:
    for seed in range(hundred * 100, hundred * 100 + 100):
        storm(seed)


def storm(seed: int) -> None:
    scheduler = Scheduler(
        AnyLayout(seed),  # type: ignore[arg-type]
        Costs(CostTable(latencies=Unmeasured())),
        limits=QueueLimits(max_waiting=8, max_waiting_tokens=30_000),
    )
    cell = LayoutCell(scheduler, seed, faults=(0.0, 0.1)[seed % 2], elastic=seed % 3 == 0)
    cell.play(requests=8, turns=50)
    assert not any(scheduler.counts)
