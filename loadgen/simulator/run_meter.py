"""Count what happened in a simulation: how often each mechanism ran, how busy instances were, and
how many KV slots were given away over time.

A policy's latencies say nothing about why they are what they are. A margin of elastic groups over
fixed ones, for instance, means little where nearly all prompts ran on one instance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from csps.loadgen.simulator.cluster import ClusterModel
from csps.protocols.gang.messages import EvictKv, JoinBatch
from csps.protocols.gang.step_messages import MoveSequence, PrefillStep
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events.commands import AnyCommand, Restart, RunStep, ToGang
from csps.services.scheduling.events.events import AnyEvent, Finished, StepDone

KV_SAMPLES = 600
"""Most samples of used slots. When there are more, every second one goes."""
FIRST_STEP_NS = 1_000_000
PROGRESS_ROUNDS = 256
"""Rounds of the scheduler between two reports of progress."""


class RunMeter:
    """Observer of a simulation's rounds.

    Args:
        cluster: the simulated cluster.
        progress: called now and then with the number of ended requests.
    """

    def __init__(
        self, cluster: ClusterModel, progress: Callable[[int], None] | None = None
    ) -> None:
        self._cluster, self._progress = cluster, progress
        self._scheduler: Scheduler | None = None
        self._groups: Counter[int] = Counter()
        self._prompts: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._busy_ns = 0
        self._rounds = 0
        self._samples: list[tuple[int, float, float]] = []
        """Times, and shares of the prefill and the decode gang's slots."""
        self._step_ns = FIRST_STEP_NS
        self._now_ns = 0

    def watch(self, scheduler: Scheduler) -> None:
        """Sample the slots that this scheduler has given away, as its metrics show them live."""
        self._scheduler = scheduler

    def __call__(
        self, now_ns: int, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]
    ) -> None:
        """Observe a round."""
        self._rounds += 1
        self._now_ns = now_ns
        for event in events:
            if isinstance(event, StepDone):
                self._busy_ns += event.took_ns
            elif isinstance(event, Finished):
                self._counts["finished"] += 1
        steps = 0
        for command in commands:
            if isinstance(command, RunStep):
                steps += 1
                self._note_step(command.step)
            elif isinstance(command, ToGang):
                self._note_message(command.message)
            elif isinstance(command, Restart):
                self._counts["restarts"] += 1
        if steps > 1:
            self._counts["rounds_with_several_steps"] += 1
        self._sample(now_ns)
        if self._progress is not None and self._rounds % PROGRESS_ROUNDS == 0:
            self._progress(self._counts["finished"])

    def _note_step(self, step: PrefillStep) -> None:
        self._groups[len(step.group)] += 1
        self._prompts[len(step.chunks)] += 1
        self._counts["later_chunks"] += sum(chunk.start > 0 for chunk in step.chunks)
        self._counts["high_priority_steps"] += step.high_priority

    def _note_message(self, message: object) -> None:
        if isinstance(message, MoveSequence):
            self._counts["moves"] += 1
            before = {each.instance: each.span.length for each in message.before.slices}
            for each in message.after.slices:
                grown = each.span.length - before.get(each.instance, 0)
                self._counts["moved_tokens"] += max(0, grown)
        elif isinstance(message, JoinBatch):
            self._counts["piggybacked"] += 1
        elif isinstance(message, EvictKv):
            self._counts["evictions"] += 1

    def _sample(self, now_ns: int) -> None:
        last_ns = self._samples[-1][0] if self._samples else -self._step_ns
        if self._scheduler is None or now_ns - last_ns < self._step_ns:
            return
        counts = self._scheduler.counts
        self._samples.append((now_ns, counts.prefill_kv, counts.decode_kv))
        if len(self._samples) > KV_SAMPLES:
            self._samples = self._samples[::2]
            self._step_ns *= 2

    @property
    def fields(self) -> dict[str, Any]:
        """Return the counts as fields of a result."""
        cluster = self._cluster
        gangs = {"elastic": 2} if cluster.in_place else {"prefill": 1, "decode": 2}
        instance_ns = len(cluster.prefill.instances) * self._now_ns
        return {
            "mechanisms": {
                "steps": sum(self._groups.values()),
                "steps_by_instances": _by_size(self._groups),
                "steps_by_prompts": _by_size(self._prompts),
                **{
                    name: self._counts[name]
                    for name in (
                        "rounds_with_several_steps",
                        "later_chunks",
                        "high_priority_steps",
                        "piggybacked",
                        "moves",
                        "moved_tokens",
                        "evictions",
                        "restarts",
                    )
                },
            },
            "prefill_utilization": round(self._busy_ns / instance_ns, 6) if instance_ns else None,
            "kv_use": {
                "times_s": [round(sample[0] / 1e9, 6) for sample in self._samples],
                **{
                    gang: [round(sample[column], 6) for sample in self._samples]
                    for gang, column in gangs.items()
                },
            },
        }


def _by_size(counts: Counter[int]) -> dict[str, int]:
    return {str(size): counts[size] for size in sorted(counts)}
