"""Predicted ends after steps took another time than predicted, against a simulation of the steps
that are left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from timed_gangs import MS, RunningStep, TimedCell

from csps.configurator.costs.cost_table import Unmeasured
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.events import index_of
from csps.services.scheduling.policies.registry import make_policy

LATENCIES = Unmeasured(step_ns=2 * MS, token_ns=MS, pair_ns=0, iteration_time_ns=5 * MS)
OPTIONS: dict[str, dict[str, object]] = {
    "csps": {"spt_tokens": 400, "short_tokens": 50},
    "fixed_sp": {"sp": 2},
    "tetris": {"improvement_rate": 0.05, "min_chunk": 1},
}


class Predicting(TimedCell):
    """Gangs whose steps take a multiple of what was predicted. Each instance reports with a delay
    of its own, as if KV were sent meanwhile.

    `checked` counts the steps whose predicted ends were compared.
    """

    def __init__(self, policy: str, prefill: list[int], measured: float, delay_ns: int) -> None:
        made = make_policy(policy, OPTIONS[policy])
        super().__init__(made, prefill, [100_000], LATENCIES, measured=measured)
        self._delay_ns = delay_ns
        self._began_ns: dict[int, int] = {}
        self._unreported: dict[int, tuple[RunningStep, list[int]]] = {}
        """Steps and the instances that have not reported them."""
        self._reports: list[tuple[int, ev.StepDone]] = []
        """Reports to come, with their times."""
        self._some_reported = False
        self.checked = 0

    def _carry_out(self, command: cmd.AnyCommand) -> None:
        super()._carry_out(command)
        if isinstance(command, cmd.RunStep):
            step = command.step
            self._unreported[step.step_id] = self.steps[step.step_id], list(step.group)
            # The scheduler learns when a step ends how late it was, and that others are.
            if self._some_reported or not self._any_is_late():
                assert command.ends_ns == self._expected_end_ns(step.step_id)
                self.checked += 1

    def _next_ends(self) -> Iterator[int]:
        yield from super()._next_ends()
        yield from (at_ns for at_ns, _ in self._reports)

    def _pass(self, ns: int) -> None:
        for step in self._at_work():
            self._began_ns.setdefault(step.command.step.step_id, self.now_ns)
        super()._pass(ns)
        due = [report for at_ns, report in self._reports if at_ns <= self.now_ns]
        self._reports = [(at_ns, it) for at_ns, it in self._reports if at_ns > self.now_ns]
        for report in due:
            _, instances = self._unreported[report.step_id]
            instances.remove(report.instance)
            if not instances:
                del self._unreported[report.step_id]
        self._events += due
        self._some_reported = bool(due)

    def _end_step(self, step: RunningStep) -> None:
        others = len(self._events)
        super()._end_step(step)
        events = self._events[others:]
        self._events[others:] = [it for it in events if not isinstance(it, ev.StepDone)]
        self._reports += [
            (self.now_ns + self._delay_ns * (index_of(it.instance) % 3), it)
            for it in events
            if isinstance(it, ev.StepDone)
        ]

    def _any_is_late(self) -> bool:
        """Return whether a step was not reported by its predicted end."""
        return any(
            self._began_ns[step_id] + self.predicted_ns(step.command.step) < self.now_ns
            for step_id, (step, _) in self._unreported.items()
            if step_id in self._began_ns
        )

    def _expected_end_ns(self, wanted: int) -> int:
        """Let the steps run to their ends in virtual time, each as long as predicted. A step has
        begun, as far as is known, if all before it were reported."""
        queues: dict[int, list[int]] = {}
        for step_id, (_, instances) in self._unreported.items():
            for instance in instances:
                queues.setdefault(instance, []).append(step_id)
        left_ns: dict[int, int] = {}
        for step_id, (step, _) in self._unreported.items():
            ran_ns = 0
            if all(queue[0] == step_id for queue in queues.values() if step_id in queue):
                ran_ns = self.now_ns - self._began_ns.get(step_id, self.now_ns)
            left_ns[step_id] = max(0, self.predicted_ns(step.command.step) - ran_ns)
        now_ns = self.now_ns
        while wanted in left_ns:
            heads = {queue[0] for queue in queues.values() if queue}
            running = [
                step_id
                for step_id in heads
                if all(queue[0] == step_id for queue in queues.values() if step_id in queue)
            ]
            pass_ns = min(left_ns[step_id] for step_id in running)
            now_ns += pass_ns
            for step_id in running:
                left_ns[step_id] -= pass_ns
                if not left_ns[step_id]:
                    del left_ns[step_id]
                    for queue in queues.values():
                        if step_id in queue:
                            queue.remove(step_id)
        return now_ns


def arrivals(shortest: int, longest: int, within_ms: int) -> st.SearchStrategy[Any]:
    times = st.integers(0, within_ms).map(lambda ms: ms * MS)
    requests = st.tuples(times, st.integers(shortest, longest), st.just(1))
    return st.lists(requests, min_size=4, max_size=15).map(sorted)


@pytest.mark.parametrize(
    ("policy", "prompts", "measured", "delay_ms"),
    [
        ("csps", (51, 900, 1500), 0.5, 0),
        ("csps", (51, 900, 1500), 0.7, 60),
        ("csps", (51, 900, 1500), 1.5, 0),
        ("csps", (1, 50, 100), 0.5, 0),
        ("fixed_sp", (51, 900, 1500), 0.5, 60),
        ("fixed_sp", (51, 900, 1500), 1.5, 0),
        ("tetris", (1, 900, 1500), 0.5, 0),
        ("tetris", (1, 900, 1500), 1.5, 0),
    ],
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), prefill=st.lists(st.integers(1000, 3000), min_size=1, max_size=4))
def test_predicted_ends_follow_from_how_long_earlier_steps_took(
    policy: str,
    prompts: tuple[int, int, int],
    measured: float,
    delay_ms: int,
    data: Any,
    prefill: list[int],
) -> None:
    """Prompts are all long, or all short: where high-priority steps run between others, nobody
    knows when."""
    coming = data.draw(arrivals(*prompts))
    played = Predicting(policy, prefill, measured, delay_ms * MS)
    played.play(coming)
    assert len(played.finished) == len(coming)
    assert played.checked
