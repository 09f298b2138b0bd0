"""A pair of gangs in virtual time, whose steps take exactly what was planted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from random_executor import gang_up

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.loadgen.simulator.kv_slots import SimulatedPrefixCache, Slots
from csps.protocols.core.placement import KvSlice, own
from csps.protocols.core.topology import GroupShape
from csps.protocols.gang.messages import EvictKv, RetainKv
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.decisions import (
    Blocked,
    Decision,
    Policy,
    SchedulerView,
    StartPlan,
)
from csps.services.scheduling.deciding.step_layout import rows_of
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.limits import (
    BLOCK_TOKENS,
    QueueLimits,
    ReuseSettings,
    SchedulerDeadlines,
)
from csps.services.scheduling.state.state import GangPair, Priority

MS = 1_000_000
FOREVER = SchedulerDeadlines(prefill_liveness_ns=1 << 60, decode_liveness_ns=1 << 60)


class Watched:
    """A policy whose decisions are noted with their times."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name
        self.options, self.decode_options = policy.options, policy.decode_options
        self.whole_prompts = policy.whole_prompts
        self.regroups = policy.regroups
        self.blocked: dict[int, int] = {}
        """Time at which a request was first found to be blocked."""
        self.started: dict[int, int] = {}

    def priority(self, prompt_tokens: int, pairs: Sequence[GangPair]) -> Priority:
        return self._policy.priority(prompt_tokens, pairs)

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        return self._policy.fits(pair, prompt_tokens, output_tokens)

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        decisions = self._policy.decide(view)
        for decision in decisions:
            if isinstance(decision, Blocked):
                self.blocked.setdefault(decision.request_id, view.now_ns)
            elif isinstance(decision, StartPlan):
                self.started.update((placed.request_id, view.now_ns) for placed in decision.decode)
        return decisions


@dataclass(eq=False)
class RunningStep:
    """A step on the ranks."""

    command: cmd.RunStep
    left_ns: int
    undone: list[int] = field(default_factory=list)
    delayed_ns: int = 0
    """Time of high-priority steps on its instances since its launch, summed over them."""
    launched_ns: int = 0
    ended_ns: int = 0


class TimedCell:
    """Plays requests that arrive at set times, to the end.

    An instance runs high-priority steps first, in order, then the oldest other; such a step goes on
    while all its instances are at it. Every token takes `iteration_ns`.
    """

    def __init__(
        self,
        policy: Policy,
        prefill: list[int],
        decode: list[int],
        latencies: Unmeasured,
        *,
        measured: float = 1.0,
        block: int = 0,
    ) -> None:
        """Prepare the gangs; with `block`, KV is retained in multiples of it."""
        self.policy, self.latencies, self._measured = Watched(policy), latencies, measured
        self.scheduler = Scheduler(
            self.policy,
            Costs(CostTable(latencies=latencies)),
            limits=QueueLimits(max_waiting=10_000, max_waiting_tokens=1 << 40),
            deadlines=FOREVER,
            reuse=ReuseSettings(enabled=block > 0, block_tokens=block or BLOCK_TOKENS),
        )
        self._prefix_caches = {
            gang: SimulatedPrefixCache(Slots([1 << 40] * len(slots)))
            for gang, slots in ((1, prefill), (2, decode))
        }
        self._instances = {1: len(prefill), 2: len(decode)}
        self.now_ns = 0
        self.steps: dict[int, RunningStep] = {}
        self.ended_steps: list[RunningStep] = []
        self.finished: dict[int, int] = {}
        """Time of each request's last token."""
        self._reserved: dict[int, cmd.Reserve] = {}
        self._answers: dict[int, int] = {}
        self._events: list[ev.AnyEvent] = [
            gang_up(1, prefill, prefill=True),
            gang_up(2, decode, decode=True),
            ev.LinkUp(prefill=1, decode=2),
        ]

    def requests_of(self, step: RunningStep) -> list[int]:
        """Return the requests whose tokens a step computes, in its order."""
        return [self._reserved[chunk.sequence_id].request_id for chunk in step.command.step.chunks]

    def predicted_ns(self, step: PrefillStep) -> int:
        """Return the time that the policy predicts."""
        shape = GroupShape((len(step.group),))
        table, history = CostTable(latencies=self.latencies), step.chunks[0].start
        return table.best("exact", shape, history, step.bounds[-1]).time_ns

    def play(
        self, arrivals: list[tuple[int, int, int]], hashes: Sequence[tuple[bytes, ...]] = ()
    ) -> None:
        """Play requests 1, 2, ...: (time in ns, prompt, output), with the hashes of their
        prompts.
        """
        coming = [
            (
                at_ns,
                ev.Submitted(
                    request_id=number,
                    prompt_tokens=prompt,
                    output_tokens=output,
                    hashes=hashes[number - 1] if hashes else (),
                ),
            )
            for number, (at_ns, prompt, output) in enumerate(arrivals, 1)
        ]
        wake_at_ns: int | None = None
        while True:
            while coming and coming[0][0] <= self.now_ns:
                self._events.append(coming.pop(0)[1])
            if wake_at_ns is not None and wake_at_ns <= self.now_ns:
                self._events.append(ev.Wake())
            events, self._events = self._events, []
            outcome = self.scheduler.handle(events, self.now_ns)
            for command in outcome.commands:
                self._carry_out(command)
            wake_at_ns = outcome.wake_at_ns
            times = [at_ns for at_ns, _ in coming[:1]] + list(self._next_ends())
            if self._events or wake_at_ns == self.now_ns:
                continue
            if not times:
                break
            self._pass(max(0, min(times) - self.now_ns))

    def _carry_out(self, command: cmd.AnyCommand) -> None:
        if isinstance(command, cmd.Reserve):
            self._reserved[command.message.sequence_id] = command
        elif isinstance(command, cmd.RunStep):
            sent = command.step
            left_ns = max(1, round(self.predicted_ns(sent) * self._measured))
            step = RunningStep(command, left_ns, list(sent.group), launched_ns=self.now_ns)
            self.steps[sent.step_id] = step
        elif isinstance(command, cmd.SetGroup):
            for sequence in command.joined:
                tokens = self._reserved[sequence].message.output_tokens - 1
                self._answers[sequence] = self.now_ns + tokens * self.latencies.iteration_time_ns
        elif isinstance(command, cmd.ToGang):
            assert isinstance(command.message, RetainKv | EvictKv), command
            self._retain_or_evict(command.gang, command.message)
        else:
            assert isinstance(command, cmd.Cancel), command  # of an answer of one token
            self._free(command.sequence_id)

    def _retain_or_evict(self, gang: int, message: RetainKv | EvictKv) -> None:
        cache = self._prefix_caches[gang]
        if isinstance(message, RetainKv):
            reserve = self._reserved[message.sequence_id]
            stop = reserve.message.prompt_tokens + reserve.message.output_tokens
            answer = reserve.message.answer or (
                KvSlice(reserve.message.master, reserve.message.prompt_tokens, stop),
            )
            cache.share(message.sequence_id, reserve.message.slices)
            cache.add(message.sequence_id, (*own(reserve.message.slices), *answer))
        self._events += cache.apply(gang, message)

    def _at_work(self) -> Iterator[RunningStep]:
        """Yield the steps that progress: those at the head of the queues of all their instances."""
        heads: dict[int, RunningStep] = {}
        for high_priority in (True, False):
            for step in self.steps.values():
                if step.command.step.high_priority == high_priority:
                    for instance in step.undone:
                        heads.setdefault(instance, step)
        for step in self.steps.values():
            if all(heads[instance] is step for instance in step.undone):
                yield step

    def _next_ends(self) -> Iterator[int]:
        yield from (self.now_ns + step.left_ns for step in self._at_work())
        yield from self._answers.values()

    def _pass(self, ns: int) -> None:
        working = list(self._at_work())
        self.now_ns += ns
        for step in working:
            step.left_ns -= ns
            if step.command.step.high_priority:
                self._delay(step, ns)
        for step in working:
            if step.left_ns == 0:
                self._end_step(step)
        for sequence, at_ns in list(self._answers.items()):
            if at_ns <= self.now_ns:
                del self._answers[sequence]
                self._end(sequence)

    def _delay(self, high_priority: RunningStep, ns: int) -> None:
        for other in self.steps.values():
            if (
                not other.command.step.high_priority
                and other.command.step.step_id < high_priority.command.step.step_id
            ):
                other.delayed_ns += ns * len(set(other.undone) & set(high_priority.undone))

    def _end_step(self, step: RunningStep) -> None:
        del self.steps[step.command.step.step_id]
        self.ended_steps.append(step)
        step.ended_ns = self.now_ns
        took_ns = round(self.predicted_ns(step.command.step) * self._measured)
        for chunk, rows in zip(step.command.step.chunks, rows_of(step.command.step), strict=True):
            reserve = self._reserved[chunk.sequence_id]
            if chunk.retain:
                self._prefix_caches[1].add(chunk.sequence_id, rows)
                self._prefix_caches[1].share(chunk.sequence_id, chunk.history)
            self._events.append(ev.FirstToken(sequence_id=chunk.sequence_id))
            self._events += [
                ev.KvReceived(
                    sequence_id=chunk.sequence_id,
                    instance=kv_slice.instance,
                    tokens=kv_slice.stop - kv_slice.start,
                )
                for kv_slice in own(reserve.message.slices)
            ]
            if reserve.message.output_tokens == 1:
                self.finished[reserve.request_id] = self.now_ns
                self._events.append(ev.Finished(sequence_id=chunk.sequence_id, generated_tokens=1))
        self._events += [
            ev.StepDone(step_id=step.command.step.step_id, instance=instance, took_ns=took_ns)
            for instance in step.undone
        ]

    def _end(self, sequence: int) -> None:
        reserve = self._reserved[sequence]
        self.finished[reserve.request_id] = self.now_ns
        self._events.append(
            ev.Finished(sequence_id=sequence, generated_tokens=reserve.message.output_tokens)
        )
        if not reserve.message.retain:
            self._free(sequence)

    def _free(self, sequence: int) -> None:
        reserve = self._reserved[sequence]
        holders = sorted(
            {kv_slice.instance for kv_slice in reserve.message.slices} | {reserve.message.master}
        )
        self._events += [ev.Freed(sequence_id=sequence, instance=holder) for holder in holders]
