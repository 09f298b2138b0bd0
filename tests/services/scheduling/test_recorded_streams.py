"""Recorded streams: the scheduler answers recorded events with the recorded commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import canonical_streams
import msgspec
import pytest
from canonical_streams import (
    Follower,
    Stream,
    canonical_command,
    canonical_event,
    event_of,
    read_stream,
    write_stream,
)
from recorded_workloads import WORKLOADS

from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.messages import EvictKv
from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep
from csps.services.scheduling.core.scheduler import RoundResult, Scheduler
from csps.services.scheduling.events.commands import (
    AnyCommand,
    Fail,
    RunStep,
    ToGang,
)
from csps.services.scheduling.events.events import (
    AnyEvent,
    Failed,
    GangUp,
    InstanceUp,
    Submitted,
    WireError,
)

STREAMS = Path(__file__).parent / "recorded_streams"
SIMULATED = ("csps-riding", "loongserve-static", "tetris-replanning")
"""Streams that are also simulated from end to end: their events follow from the commands again."""


def stream_of(name: str) -> Stream:
    return read_stream(STREAMS / f"{name}.jsonl.gz")


@pytest.mark.parametrize("name", WORKLOADS)
def test_recorded_events_lead_to_the_recorded_commands(name: str) -> None:
    replay(name, stream_of(name), WORKLOADS[name].scheduler())


@pytest.mark.parametrize("name", SIMULATED)
def test_a_simulation_takes_the_recorded_course(name: str) -> None:
    workload, following = WORKLOADS[name], Following(name)
    assert workload.simulation is not None
    workload.simulation().play(following)
    following.follower.end()


def replay(name: str, stream: Stream, scheduler: Scheduler) -> None:
    """Feed the recorded events to a scheduler, and compare what it answers."""
    follower = Follower(name, stream)
    for turn in stream.turns:
        try:
            outcome = scheduler.handle([event_of(event) for event in turn.events], turn.now_ns)
        except Exception as error:
            error.add_note(f"{follower.place}: all commands before it are the recorded ones")
            raise
        follower.commands(outcome.commands, outcome.wake_at_ns)
    follower.end()
    scheduler.check_invariants()


class Following:
    """Scheduler whose executor takes it along a recorded stream."""

    def __init__(self, name: str) -> None:
        self._scheduler = WORKLOADS[name].scheduler()
        self.follower = Follower(name, stream_of(name))

    def handle(self, events: Sequence[AnyEvent], now_ns: int) -> RoundResult:
        """Compare events, decide, compare commands."""
        self.follower.events(now_ns, events)
        outcome = self._scheduler.handle(events, now_ns)
        self.follower.commands(outcome.commands, outcome.wake_at_ns)
        return outcome


# --- what a comparison finds ---------------------------------------------------------------------


EVICT = ToGang(gang=2, message=EvictKv(sequence_id=5, start=0, stop=64))
STEP = RunStep(
    step=PrefillStep(
        step_id=9,
        group=(65536,),
        bounds=(0, 100),
        chunks=(PrefillChunk(5, 0, 100, rows=(KvSlice(65536, 0, 100),)),),
    ),
    cls="exact",
    ends_ns=7,
)


def follower_of(tmp_path: Path, commands: Sequence[AnyCommand], full: int) -> Follower:
    """Record one round with these commands and one without any."""
    turns = [
        canonical_streams.Turn(10, [{"event": "wake"}], 50, len(commands)),
        canonical_streams.Turn(50, [], None, 0),
    ]
    path = tmp_path / "stream.jsonl.gz"
    write_stream(path, turns, [(0, canonical_command(command)) for command in commands], full)
    return Follower("named", read_stream(path))


@pytest.mark.parametrize("full", [0, 1, 2])
def test_the_recorded_commands_are_followed(tmp_path: Path, full: int) -> None:
    follower = follower_of(tmp_path, [STEP, EVICT], full)
    follower.commands([STEP, EVICT], 50)
    follower.commands([], None)
    follower.end()


def test_the_first_other_field_is_named(tmp_path: Path) -> None:
    follower = follower_of(tmp_path, [STEP, EVICT], 2)
    late = ToGang(gang=2, message=EvictKv(sequence_id=5, start=32, stop=64))
    expected = r"named: turn 0 at 10 ns \(told: wake\): command 1 differs(?s:.*)\.start: 0, now 32"
    with pytest.raises(AssertionError, match=expected):
        follower.commands([STEP, late], 50)


def test_a_field_of_a_nested_structure_is_named(tmp_path: Path) -> None:
    follower = follower_of(tmp_path, [STEP], 2)
    shorter = PrefillChunk(5, 0, 100, rows=(KvSlice(65536, 0, 99),))
    step = msgspec.structs.replace(STEP.step, chunks=(shorter,))
    other = msgspec.structs.replace(STEP, step=step)
    with pytest.raises(AssertionError, match=r"\.pieces\[0\]\.rows\[0\]\.stop: 100, now 99"):
        follower.commands([other], 50)


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ([EVICT], r"command 0 differs(?s:.*)present: .\"command\":\"release\""),
        ([STEP], r"command 1 is missing(?s:.*)missing: .\"command\":\"release\""),
        ([STEP, EVICT, EVICT], r"3 commands, recorded 2"),
    ],
)
def test_a_command_too_few_or_too_many_is_found(
    tmp_path: Path, commands: list[AnyCommand], expected: str
) -> None:
    with pytest.raises(AssertionError, match=expected):
        follower_of(tmp_path, [STEP, EVICT], 2).commands(commands, 50)


def test_another_wake_time_is_found(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="wakes at 51 ns, recorded 50 ns"):
        follower_of(tmp_path, [STEP], 1).commands([STEP], 51)


def test_a_difference_behind_the_full_commands_is_found_by_their_digest(tmp_path: Path) -> None:
    follower = follower_of(tmp_path, [STEP, EVICT, STEP], 1)
    follower.commands([STEP, EVICT, EVICT], 50)
    follower.commands([], None)
    with pytest.raises(AssertionError, match="2 commands from 1 on differs, in turns 0 to 0"):
        follower.end()


def test_a_run_that_ends_too_early_is_found(tmp_path: Path) -> None:
    follower = follower_of(tmp_path, [STEP], 1)
    follower.commands([STEP], 50)
    with pytest.raises(AssertionError, match="the run ends, the recording has 2 turns"):
        follower.end()


# --- the vocabulary ------------------------------------------------------------------------------

EVENTS: list[AnyEvent] = [
    Submitted(request_id=1, prompt_tokens=5, output_tokens=3, hashes=(b"a", b"bc")),
    Submitted(request_id=2, prompt_tokens=5, output_tokens=3, deadline_ns=1 << 60),
    Failed(
        sequence_id=1,
        generated_tokens=1,
        error=WireError("GangLost", "x", {"a": 1}),
        retryable=True,
    ),
    GangUp(
        gang=1,
        generation=2,
        may_prefill=True,
        may_decode=False,
        tp=2,
        instances=(InstanceUp(location="0-0-0", kv_slots=10),),
        max_positions=100,
    ),
]


@pytest.mark.parametrize("event", EVENTS)
def test_events_come_back_from_their_canonical_form(event: AnyEvent) -> None:
    assert event_of(canonical_event(event)) == event


def test_present_names_are_read_as_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = canonical_streams.RENAMED | {
        "EvictKv": "give",
        "EvictKv.start": "begin",
        "KvSlice.stop": "end",
        "tp": "ranks",
    }
    renamed |= {"submitted": "arrived", "hashes": "blocks", "generation": ""}
    monkeypatch.setattr(canonical_streams, "RENAMED", renamed)
    canonical_streams.forget_names()
    try:
        assert canonical_command(EVICT) == {
            "command": "give",
            "gang": 2,
            "sequence": 5,
            "begin": 0,
            "stop": 64,
        }
        (chunk,) = canonical_command(STEP)["pieces"]
        assert (chunk["rows"][0]["end"], chunk["start"]) == (100, 0)
        told = canonical_event(EVENTS[0])
        assert (told["event"], told["blocks"]) == ("arrived", ["61", "6263"])
        assert event_of(told) == EVENTS[0]
        up = canonical_event(EVENTS[3])
        assert up["ranks"] == 2
        assert "generation" not in up
    finally:
        canonical_streams.forget_names()


def test_present_texts_are_read_as_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canonical_streams, "REWORDED", {r"no room for (\d+)": r"\1 do not fit"})
    refused = Fail(request_id=1, error=WireError("TooLong", "no room for 7 tokens", {"tokens": 7}))
    assert canonical_command(refused)["error"] == {
        "code": "TooLong",
        "message": "7 do not fit tokens",
        "data": {"tokens": 7},
    }
