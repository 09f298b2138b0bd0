"""Scheduler under test: events in, commands out, in one line of a test each."""

from __future__ import annotations

import itertools
from typing import TypeVar

from random_executor import gang_up

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.protocols.core.placement import own, tokens_on
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.decisions import Policy
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.limits import QueueLimits, ReuseSettings, SchedulerDeadlines
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state.ledger import decode_slots

MS = 1_000_000
SECOND = 1000 * MS
SMALL = {"spt_tokens": 1000, "short_tokens": 100, "spread_tokens": 2000}

Kind = TypeVar("Kind", bound=cmd.Command)


class SchedulerHarness:
    """Hands events over a millisecond apart, unless told the time, and checks the invariants."""

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        limits: QueueLimits | None = None,
        deadlines: SchedulerDeadlines | None = None,
        table: CostTable | None = None,
        reuse: ReuseSettings | None = None,
    ) -> None:
        costs = Costs(table or CostTable(latencies=Unmeasured()))
        self.scheduler = Scheduler(
            policy or make_policy("csps", SMALL),
            costs,
            limits=limits,
            deadlines=deadlines,
            reuse=reuse,
        )
        self.now_ns = 0
        self.wake_at_ns: int | None = None
        self._requests = itertools.count(1)

    def turn(self, *events: ev.AnyEvent, after_ns: int = MS) -> list[cmd.AnyCommand]:
        """Handle the events in one round and return the commands."""
        self.now_ns += after_ns
        outcome = self.scheduler.handle(events, self.now_ns)
        self.wake_at_ns = outcome.wake_at_ns
        self.scheduler.check_invariants()
        return outcome.commands

    def wait(self, *, until_ns: int | None = None) -> list[cmd.AnyCommand]:
        """Wake the scheduler when it asks for it: once, or until a time has come."""
        if until_ns is None:
            assert self.wake_at_ns is not None, "nothing is waited for"
            return self.turn(ev.Wake(), after_ns=max(0, self.wake_at_ns - self.now_ns))
        commands: list[cmd.AnyCommand] = []
        while self.wake_at_ns is not None and self.wake_at_ns <= until_ns:
            commands += self.wait()
        self.now_ns = until_ns
        return commands

    # --- gangs ---

    def prefill(self, gang: int = 1, *slots: int, **options: object) -> ev.GangUp:
        """Make the event of a prefill gang that comes up."""
        return gang_up(gang, list(slots or (4000, 4000)), prefill=True, **options)  # type: ignore[arg-type]

    def decode(self, gang: int = 2, *slots: int, **options: object) -> ev.GangUp:
        """Make the event of a decode gang that comes up."""
        return gang_up(gang, list(slots or (9000, 9000)), decode=True, **options)  # type: ignore[arg-type]

    def ready(self) -> SchedulerHarness:
        """Bring gangs 1 and 2 up and link them."""
        self.turn(self.prefill(), self.decode(), LINK)
        return self

    # --- requests ---

    def submit(
        self, prompt: int = 500, output: int = 10, *, cls: str = "exact", **more: int
    ) -> ev.Submitted:
        """Make the event of the next request."""
        return ev.Submitted(
            request_id=next(self._requests),
            prompt_tokens=prompt,
            output_tokens=output,
            cls=cls,
            deadline_ns=more.get("deadline_ns"),
            tenant=more.get("tenant", 0),
        )

    def start(self, prompt: int = 500, output: int = 10) -> Sent:
        """Submit a request that starts at once."""
        return sent(self.turn(self.submit(prompt, output)))


LINK = ev.LinkUp(prefill=1, decode=2)


class Sent:
    """Plan of one request and one step, and the events that can follow."""

    def __init__(self, reserve: cmd.Reserve, run: cmd.RunStep) -> None:
        self.reserve, self.run, self.step = reserve, run, run.step
        self.request, self.sequence = reserve.request_id, reserve.message.sequence_id

    @property
    def first_token(self) -> ev.FirstToken:
        return ev.FirstToken(sequence_id=self.sequence)

    def kv_received(self, more: int = 0) -> list[ev.AnyEvent]:
        """Make the events of all received slices."""
        return [
            ev.KvReceived(sequence_id=self.sequence, instance=instance, tokens=tokens + more)
            for instance, tokens in tokens_on(own(self.reserve.message.slices)).items()
        ]

    def steps_done(self, took_ns: int = 20 * MS) -> list[ev.AnyEvent]:
        """Make the events of a step that is done on all instances."""
        return [
            ev.StepDone(step_id=self.step.step_id, instance=instance, took_ns=took_ns)
            for instance in self.step.group
        ]

    @property
    def holders(self) -> list[int]:
        return sorted(decode_slots(self.reserve.message, self.reserve.message.output_tokens))

    def freed(self) -> list[ev.AnyEvent]:
        """Make the events of all decode instances that free the sequence."""
        return [ev.Freed(sequence_id=self.sequence, instance=holder) for holder in self.holders]

    def finished(self, generated: int = 10) -> ev.Finished:
        return ev.Finished(sequence_id=self.sequence, generated_tokens=generated)

    def failed(self, generated: int = 0, *, retryable: bool = True) -> ev.Failed:
        error = ev.WireError("TransferError", "bad KV")
        return ev.Failed(
            sequence_id=self.sequence, generated_tokens=generated, error=error, retryable=retryable
        )

    def prefilled(self) -> list[ev.AnyEvent]:
        return [self.first_token, *self.steps_done()]

    def joined(self) -> list[ev.AnyEvent]:
        """Make all events that are needed before decoding."""
        return [*self.prefilled(), *self.kv_received()]


def sent(commands: list[cmd.AnyCommand]) -> Sent:
    """Return the only plan among commands."""
    (reserve,), (run,) = only(commands, cmd.Reserve), only(commands, cmd.RunStep)
    return Sent(reserve, run)


def steps_of(commands: list[cmd.AnyCommand]) -> list[PrefillStep]:
    """Return the steps among commands."""
    return [command.step for command in only(commands, cmd.RunStep)]


def messages(commands: list[cmd.AnyCommand], kind: type[Kind]) -> list[Kind]:
    """Return the messages of a kind that commands send to gangs."""
    sent_to_gangs = only(commands, cmd.ToGang)
    return [command.message for command in sent_to_gangs if isinstance(command.message, kind)]


def only(commands: list[cmd.AnyCommand], kind: type[Kind]) -> list[Kind]:
    """Return the commands of a kind."""
    return [command for command in commands if isinstance(command, kind)]
