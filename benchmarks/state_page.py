"""Cost of an open page: processor time of a snapshot of the server's state, as JSON.

    python benchmarks/state_page.py [--instances 64] [--streams 64] [--waiting 256] [--json FILE]

A scheduler with that many instances serves the streams, and further requests wait. `snapshot_us` is
the processor time of one snapshot, `kib` its size. A page asks once a second, and the router makes
at most `per_s` snapshots, however many pages are open: `core_percent` is the worst of that.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np
import report

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.protocols.gang.messages import Sampling
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import RequestSpec, SloBounds
from csps.services.router.cluster_state import PERIOD_S, StateSnapshots
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.commands import Reserve, RunStep
from csps.services.scheduling.events.limits import QueueLimits
from csps.services.scheduling.policies.registry import make_policy

SLOTS = 200_000
REPEATS = 200


class Handles(dict[int, RequestHandle]):
    """Live requests and running steps, as the router has them."""

    elastic = ()

    def __init__(self) -> None:
        super().__init__()
        self.commands: dict[int, RunStep] = {}

    def submit(self, number: int, tokens: int) -> ev.Submitted:
        """Make a request and the event of it."""
        spec = RequestSpec(
            client_request_id=f"chatcmpl-{number:032x}",
            prompt=np.zeros(tokens, np.int32),
            sampling=Sampling(max_tokens=500),
            slo=SloBounds(ttft_ms=30_000.0 if number % 2 else None),
        )
        self[number] = RequestHandle(spec, request_id=number, on_cancel=lambda handle: None)
        return ev.Submitted(
            request_id=number,
            prompt_tokens=tokens,
            output_tokens=500,
            promise=spec.slo.promise,
        )

    def command_of(self, step_id: int) -> RunStep | None:
        """Return the command of a running step."""
        return self.commands.get(step_id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--waiting", type=int, default=256)
    args = report.with_json_option(parser).parse_args()
    handles, scheduler = Handles(), _scheduler()
    now_ns = time.monotonic_ns()
    scheduler.handle(_gangs(args.instances // 2), now_ns)
    _decode(scheduler, handles, args.streams, now_ns)
    first = args.streams + 1
    events = [
        handles.submit(number, 4000 + number) for number in range(first, first + 2 * args.waiting)
    ]
    for command in scheduler.handle(events, now_ns).commands:
        if isinstance(command, RunStep):
            handles.commands[command.step.step_id] = command
    snapshots = StateSnapshots(
        scheduler,
        handles,
        handles,
        lambda: {"ttft": (3, 4)},  # type: ignore[arg-type]
    )
    times_us, size = [], 0
    for _ in range(REPEATS):
        snapshots.expire()
        began_ns = time.thread_time_ns()
        size = len(snapshots.encoded())
        times_us.append((time.thread_time_ns() - began_ns) / 1e3)
    counts = scheduler.counts
    snapshot_us = statistics.median(times_us)
    row = {
        "instances": args.instances,
        "running": counts.running,
        "waiting": counts.waiting,
        "snapshot_us": round(snapshot_us),
        "kib": round(size / 1024, 1),
        "per_s": 1 / PERIOD_S,
        "core_percent": round(snapshot_us / 1e4 / PERIOD_S, 2),
    }
    report.publish({"benchmark": "state_page"}, [row], args.json)


def _scheduler() -> Scheduler:
    limits = QueueLimits(max_waiting=1 << 20, max_waiting_tokens=1 << 40)
    policy = make_policy("csps", {"max_batch": 1 << 20})
    return Scheduler(policy, Costs(CostTable(latencies=Unmeasured())), limits=limits)


def _gangs(instances: int) -> Iterator[ev.AnyEvent]:
    up = tuple(
        ev.InstanceUp(location=f"0-{number // 8}-{number % 8}", kv_slots=SLOTS)
        for number in range(instances)
    )
    for gang, prefills in ((1, True), (2, False)):
        yield ev.GangUp(
            gang=gang,
            generation=1,
            may_prefill=prefills,
            may_decode=not prefills,
            tp=1,
            instances=up,
            max_positions=1 << 20,
        )
    yield ev.LinkUp(prefill=1, decode=2)


def _decode(scheduler: Scheduler, handles: Handles, streams: int, now_ns: int) -> None:
    """Bring so many requests to decoding."""
    events: list[ev.AnyEvent] = [
        handles.submit(number, 4000 + number) for number in range(1, streams + 1)
    ]
    while events:
        now_ns += 1
        commands, events = scheduler.handle(events, now_ns).commands, []
        for command in commands:
            if isinstance(command, Reserve):
                handles[command.request_id].state = "decoding"
                sequence = command.message.sequence_id
                events.append(ev.FirstToken(sequence_id=sequence))
                events += [
                    ev.KvReceived(
                        sequence_id=sequence, instance=kv_slice.instance, tokens=kv_slice.tokens
                    )
                    for kv_slice in command.message.slices
                ]
            elif isinstance(command, RunStep):
                step = command.step
                events += [
                    ev.StepDone(step_id=step.step_id, instance=instance, took_ns=1)
                    for instance in step.group
                ]


if __name__ == "__main__":
    main()
