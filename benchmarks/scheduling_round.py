"""Cost of a scheduling round, and its growth with the queue.

    python benchmarks/scheduling_round.py [--instances 64] [--repeats 20] [--conversation 2000]
        [--json FILE]

As many instances prefill as decode, 8 on a server. Three rounds are timed, each on schedulers of
its own: `burst`, in which everything starts for which an idle deployment has slots; `after_step`,
when one step of a full deployment is over; and `idle`, when nothing can start. `decide_us` is the
policy alone, `handle_us` the whole round with checks, state and commands; both are medians of
processor time. `bound_us` is 1 ms and 25 us for each request placed.

With `--conversation`, one conversation of so many turns runs on simulated ranks, for each policy:
`early_us` is the median of the rounds that begin a turn in the first tenth of the turns, `late_us`
in the last tenth, `late_max_us` the longest of all rounds there, and `late_max_gc_us` what the
garbage collector took of it. `slices` is the number of slices of the last reservation. `bound_us`
is 2 ms.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import report
import simulator_speed

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.loadgen.simulator.kernel import Simulator
from csps.loadgen.simulator.requests import Arrival, chained
from csps.loadgen.simulator.simulate import scheduler_of
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.deciding.decisions import Decision, Policy, SchedulerView
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.commands import AnyCommand, Reserve, RunStep
from csps.services.scheduling.events.limits import QueueLimits, ReuseSettings
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state.state import GangPair, Priority

OPTIONS: dict[str, dict[str, object]] = {
    "csps": {"max_batch": 1 << 20},
    "fixed_sp": {"sp": 8, "max_batch": 1 << 20},
}
SLOTS = 200_000
TABLE = CostTable(latencies=Unmeasured())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--conversation", type=int, metavar="TURNS")
    args = report.with_json_option(parser).parse_args()
    if args.conversation is not None:
        turns = [_conversation(*row, args.conversation) for row in CONVERSATIONS]
        about = {"benchmark": "scheduling_round", "turns": args.conversation}
        report.publish(about, turns, args.json)
        return
    rows = [
        _row(policy, waiting, args.instances, args.repeats, round_)
        for policy in OPTIONS
        for waiting in (256, 10_000)
        for round_ in ("burst", "after_step", "idle")
    ]
    report.publish({"benchmark": "scheduling_round", "instances": args.instances}, rows, args.json)


def _row(policy: str, waiting: int, instances: int, repeats: int, round_: str) -> dict[str, Any]:
    timings = [_Timed(policy, waiting, instances, seed).time(round_) for seed in range(repeats)]
    handle_us = statistics.median(timing[0] for timing in timings)
    placed = statistics.median(timing[2] for timing in timings)
    return {
        "policy": policy,
        "waiting": waiting,
        "round": round_,
        "placed": placed,
        "decide_us": statistics.median(timing[1] for timing in timings),
        "handle_us": handle_us,
        "handle_max_us": max(timing[0] for timing in timings),
        "bound_us": 1000 + 25 * placed,
    }


CONVERSATIONS: list[tuple[str, dict[str, object], bool]] = [
    ("csps", {}, False),
    ("context_parallel", {}, False),
    ("fixed_sp", {}, False),
    ("tetris", {}, False),
    ("chunked_prefill", {"token_budget": 2048}, True),
    ("context_parallel", {}, True),
    ("loongserve", {}, True),
]
"""Policies, their options, and whether they run on an elastic gang."""
BLOCK, NEW_TOKENS, ANSWER_TOKENS = 32, 64, 16


def _conversation(
    policy: str, options: dict[str, object], elastic: bool, turns: int
) -> dict[str, Any]:
    cluster = simulator_speed.cluster(4, elastic=elastic)
    hashes = chained(range(turns * NEW_TOKENS // BLOCK))
    arrivals = [
        Arrival(
            at_ns=0,
            prompt_tokens=NEW_TOKENS * turn,
            output_tokens=ANSWER_TOKENS,
            hashes=hashes[: NEW_TOKENS * turn // BLOCK],
            after=turn - 2 if turn > 1 else None,
            delay_ns=1_000_000,
        )
        for turn in range(1, turns + 1)
    ]
    reuse = ReuseSettings(enabled=True, max_share=0.9, block_tokens=BLOCK)
    clocked = _Clocked(scheduler_of(cluster, policy, options, reuse))
    gc.callbacks.append(clocked.collecting)
    try:
        Simulator(clocked, cluster, arrivals).run()
    finally:
        gc.callbacks.remove(clocked.collecting)
    tenth = max(1, turns // 10)
    late = max(clocked.rounds[-len(clocked.rounds) * tenth // turns :])
    return {
        "policy": f"{policy} {'elastic' if elastic else 'pair'}",
        "early_us": statistics.median(clocked.began[:tenth]),
        "late_us": statistics.median(clocked.began[-tenth:]),
        "late_max_us": late.took_us,
        "late_max_gc_us": late.gc_us,
        "slices": clocked.slices,
        "bound_us": 2000,
    }


class _Round(NamedTuple):
    """Processor time of a round."""

    took_us: float
    gc_us: float
    """Part of it that the garbage collector took. It goes through the simulator's objects, too."""


class _Clocked:
    """A scheduler whose rounds are timed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._gc_began_ns = self._gc_ns = 0
        self.rounds: list[_Round] = []
        self.began: list[float] = []
        """us of processor time of each round in which a turn began."""
        self.slices = 0

    def collecting(self, phase: str, _: dict[str, int]) -> None:
        """Note that the garbage collector begins or ends."""
        if phase == "start":
            self._gc_began_ns = time.thread_time_ns()
        else:
            self._gc_ns += time.thread_time_ns() - self._gc_began_ns

    def handle(
        self, events: Sequence[ev.AnyEvent], now_ns: int
    ) -> tuple[Sequence[AnyCommand], int | None]:
        begin, self._gc_ns = time.thread_time_ns(), 0
        found = self._scheduler.handle(events, now_ns)
        took_ns = time.thread_time_ns() - begin
        self.rounds.append(_Round(took_ns / 1e3, self._gc_ns / 1e3))
        for command in found.commands:
            if isinstance(command, Reserve):
                self.began.append(self.rounds[-1].took_us)
                self.slices = len(command.message.slices)
        return found


class _Gate:
    """A policy that can be switched off, with a clock."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.open, self.took_ns = policy, False, 0
        self.name = policy.name
        self.options, self.decode_options = policy.options, policy.decode_options
        self.whole_prompts = policy.whole_prompts
        self.regroups = policy.regroups

    def priority(self, prompt_tokens: int, pairs: Sequence[GangPair]) -> Priority:
        return self._policy.priority(prompt_tokens, pairs)

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        return self._policy.fits(pair, prompt_tokens, output_tokens)

    def decide(self, view: SchedulerView) -> Sequence[Decision]:
        if not self.open:
            return ()
        begin = time.thread_time_ns()
        decisions = self._policy.decide(view)
        self.took_ns = time.thread_time_ns() - begin
        return decisions


class _Timed:
    """A scheduler with a queue of requests and idle instances."""

    def __init__(self, policy: str, waiting: int, instances: int, seed: int) -> None:
        self._gate = _Gate(make_policy(policy, OPTIONS[policy]))
        self._scheduler = Scheduler(
            self._gate,
            Costs(TABLE, {TABLE.digest: TABLE}),
            limits=QueueLimits(max_waiting=1 << 20, max_waiting_tokens=1 << 50),
        )
        self._now_ns = 0
        self._round(
            _gang(1, instances, prefill=True),
            _gang(2, instances, prefill=False),
            ev.LinkUp(prefill=1, decode=2),
            *_requests(waiting, seed),
        )

    def time(self, round_: str) -> tuple[float, float, int]:
        """Return (us of the round, us of the policy, requests placed)."""
        self._gate.open = True
        if round_ == "burst":
            return self._timed()
        steps: list[PrefillStep] = []
        while started := [
            command.step for command in self._round(_CHANGED) if isinstance(command, RunStep)
        ]:
            steps += started
        if round_ == "idle":
            return self._timed()
        step = next(step for step in steps if not step.high_priority)
        done = [
            ev.StepDone(step_id=step.step_id, instance=instance, took_ns=1)
            for instance in step.group
        ]
        return self._timed(*done)

    def _timed(self, *events: ev.AnyEvent) -> tuple[float, float, int]:
        gc.collect()
        gc.freeze()
        begin = time.thread_time_ns()
        commands = self._round(_CHANGED, *events)
        took_ns = time.thread_time_ns() - begin
        placed = sum(isinstance(command, Reserve) for command in commands)
        return took_ns / 1e3, self._gate.took_ns / 1e3, placed

    def _round(self, *events: ev.AnyEvent) -> list[AnyCommand]:
        self._now_ns += 1_000_000
        return self._scheduler.handle(events, self._now_ns).commands


_CHANGED = ev.CostTableUpdated(digest=TABLE.digest)
"""A free event after which the policy is asked."""


def _gang(gang: int, instances: int, *, prefill: bool) -> ev.GangUp:
    return ev.GangUp(
        gang=gang,
        generation=1,
        may_prefill=prefill,
        may_decode=not prefill,
        tp=1,
        instances=tuple(
            ev.InstanceUp(location=f"{i // 32}-{gang}{i // 8}-{i % 8}", kv_slots=SLOTS)
            for i in range(instances)
        ),
        max_positions=1 << 20,
    )


def _requests(count: int, seed: int) -> list[ev.AnyEvent]:
    """Return requests, a third of them short, the others with evenly spread log lengths."""
    draw = random.Random(seed)
    return [
        ev.Submitted(
            request_id=number,
            prompt_tokens=draw.randint(50, 1000)
            if draw.random() < 1 / 3
            else round(1024 * 2 ** (6 * draw.random())),
            output_tokens=draw.randint(16, 1024),
        )
        for number in range(1, count + 1)
    ]


if __name__ == "__main__":
    main()
