"""Records the streams again: by hand only, from the repository's root.

    PYTHONPATH=src:tests:tests/services/scheduling \\
        python tests/services/scheduling/record_streams.py [NAME ...]

It runs every workload of `recorded_workloads.py`, in the simulator or among random gangs that also
break links, fail, fall silent and get new cost tables, and writes recorded_streams/NAME.jsonl.gz.
Then it prints what the streams of every policy contain. A commit that is meant to change decisions
records the streams that it changes, and says so; no other commit does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from canonical_streams import Canonical, Turn, canonical_command, canonical_event, write_stream
from random_executor import RandomCell
from recorded_workloads import LATER, WORKLOADS, Workload
from test_prefix_storms import RetainingCell

from csps.services.scheduling.core.scheduler import RoundResult, Scheduler
from csps.services.scheduling.deciding.decisions import Decision, Policy, SchedulerView
from csps.services.scheduling.events.commands import ResetGang
from csps.services.scheduling.events.events import AnyEvent, CostTableUpdated, Drain

HERE = Path(__file__).parent / "recorded_streams"
FULL = 500
"""Commands of a stream that are kept in full."""
CROWDED, CALIBRATED, DRAINED = 40, 150, 550
"""Turns of a storm before which the scheduler is told so."""


class Recorder:
    """Scheduler whose rounds are recorded."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.turns: list[Turn] = []
        self.commands: list[tuple[int, Canonical]] = []

    def handle(self, events: Sequence[AnyEvent], now_ns: int) -> RoundResult:
        """Decide, and note it."""
        told = [canonical_event(event) for event in events]
        outcome = self._scheduler.handle(events, now_ns)
        number = len(self.turns)
        self.commands += [(number, canonical_command(command)) for command in outcome.commands]
        self.turns.append(Turn(now_ns, told, outcome.wake_at_ns, len(outcome.commands)))
        return outcome

    def check_invariants(self) -> None:
        """Pass the cell's question on."""
        self._scheduler.check_invariants()


class Watched:
    """Policy whose decisions are counted by kind."""

    def __init__(self, policy: Policy, counts: Counter[str]) -> None:
        self._policy, self._counts = policy, counts

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        """Ask the policy."""
        decisions = self._policy.decide(view)
        self._counts.update(type(decision).__name__ for decision in decisions)
        return decisions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


class _Announced(RandomCell):
    """Random gangs; in set turns the scheduler gets a new cost table, and has to refuse.

    Who is hung up on dies a turn later: what is still told to it is lost with it.
    """

    _hung_up: tuple[int, ...] = ()

    def turn(self) -> None:
        for gang in self._hung_up:
            if gang in self.gangs:
                self._gang_dies(gang)
        self._hung_up = ()
        if self.turns == CALIBRATED:
            self._pending.append(CostTableUpdated(digest=LATER))
        if self.turns == DRAINED:
            self._pending.append(Drain())
        super().turn()

    def _reset(self, command: ResetGang) -> None:
        self._hung_up += (command.gang,)


class _Crowded(_Announced):
    """Short prompts, of which more come at once than a round starts."""

    PROMPTS = (1, 3, 9)

    def turn(self) -> None:
        if self.turns == CROWDED:
            for _ in range(200):
                self._submit()
        super().turn()


class _Keeping(_Announced, RetainingCell):
    """The same of gangs that keep KV."""


def play(name: str, workload: Workload, recorder: Recorder) -> None:
    """Let a workload happen."""
    if workload.simulation is not None:
        workload.simulation().play(recorder)
        return
    elastic = "elastic" in name or workload.policy == "loongserve"
    elastic = elastic or name == "chunked_prefill-keeping"
    cell = _Keeping if workload.reuse.enabled else _Announced
    cell = _Crowded if name.endswith("crowd") else cell
    seed = sorted(WORKLOADS).index(name)
    made = cell(recorder, seed, faults=0.06, elastic=elastic)  # type: ignore[arg-type]
    made.play(requests=250, turns=600)


def record(name: str) -> tuple[Recorder, Counter[str]]:
    """Run a workload and write its stream."""
    decisions: Counter[str] = Counter()
    workload = WORKLOADS[name]
    scheduler = workload.scheduler(partial(Watched, counts=decisions))  # type: ignore[arg-type]
    recorder = Recorder(scheduler)
    play(name, workload, recorder)
    scheduler.check_invariants()
    write_stream(HERE / f"{name}.jsonl.gz", recorder.turns, recorder.commands, FULL)
    return recorder, decisions


def main(names: Sequence[str]) -> None:
    """Record the streams of these names, or all, and print what is in them."""
    kinds: dict[str, tuple[Counter[str], Counter[str], Counter[str]]] = {}
    for name in names or WORKLOADS:
        recorder, decisions = record(name)
        commands = Counter(command["command"] for _, command in recorder.commands)
        events = Counter(event["event"] for turn in recorder.turns for event in turn.events)
        size = (HERE / f"{name}.jsonl.gz").stat().st_size
        turns = len(recorder.turns)
        print(f"{name}: {turns} turns, {commands.total()} commands, {size} bytes", flush=True)
        of_policy = kinds.setdefault(WORKLOADS[name].policy, (Counter(), Counter(), Counter()))
        for counter, more in zip(of_policy, (commands, decisions, events), strict=True):
            counter.update(more)
    for policy, of_policy in kinds.items():
        for what, counter in zip(("commands", "decisions", "events"), of_policy, strict=True):
            listed = ", ".join(f"{kind} {count}" for kind, count in sorted(counter.items()))
            print(f"{policy} {what}: {listed}")


if __name__ == "__main__":
    main(sys.argv[1:])
