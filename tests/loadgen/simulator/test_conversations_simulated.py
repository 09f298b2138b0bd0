"""Conversations, think time, closed loops, clients that give up, and bounds of single requests."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.kernel import SimulationResult
from csps.loadgen.simulator.simulate import main, simulate
from csps.loadgen.workloads.request import (
    ConversationTurns,
    FittedRequests,
    WorkloadRequest,
    converse,
)
from csps.loadgen.workloads.traces import write_trace
from csps.protocols.core.errors import ConfigError

S = 1_000_000_000


def run(requests: list[WorkloadRequest], **options: Any) -> SimulationResult:
    fitted = FittedRequests(requests=tuple(requests), cut=0)
    return simulate(load_cluster("tetris-16"), "fixed_sp", {"sp": 8}, fitted, **options)


def first_turns(count: int, seed: int = 0) -> list[WorkloadRequest]:
    rng = random.Random(seed)
    return [
        WorkloadRequest(
            arrival_ns=number * S // 4,
            input_length=rng.randint(100, 60_000),
            output_length=rng.randint(1, 50),
        )
        for number in range(count)
    ]


def test_a_turn_comes_when_its_client_has_thought_about_the_answer_before() -> None:
    turns = ConversationTurns(count=3, added_tokens=200, delay_ns=60 * S)
    requests = converse(first_turns(10), turns)
    outcomes = run(requests).outcomes
    for begin in range(0, 30, 3):
        first, *later = outcomes[begin : begin + 3]
        assert first.due_ns == requests[begin].arrival_ns
        for before, turn in zip(outcomes[begin:], later, strict=False):
            assert turn.due_ns == before.ended_ns + 60 * S
            assert turn.started_ns >= turn.due_ns
    # The scheduler's order is that of arrival: all first turns come before any second one.
    assert [outcome.request for outcome in outcomes[::3]] == list(range(1, 11))


def test_a_turn_comes_no_earlier_than_its_own_time() -> None:
    requests = [
        WorkloadRequest(
            arrival_ns=at_s * S, input_length=100, output_length=2, conversation="a", delay_ns=S
        )
        for at_s in (0, 50, 51)
    ]
    due_ns = [outcome.due_ns for outcome in run(requests).outcomes]
    assert due_ns[:2] == [0, 50 * S]
    assert due_ns[2] > 51 * S


def test_users_of_a_closed_loop_wait_for_their_answers() -> None:
    outcomes = run(first_turns(40), users=3).outcomes
    times = sorted(
        [(outcome.due_ns, 1) for outcome in outcomes] + [(each.ended_ns, -1) for each in outcomes],
        key=lambda change: (change[0], change[1]),
    )
    under_way, most = 0, 0
    for _, change in times:
        under_way += change
        most = max(most, under_way)
    assert most == 3
    ends = sorted(outcome.ended_ns for outcome in outcomes)
    assert sorted(outcome.due_ns for outcome in outcomes) == [0, 0, 0, *ends[:37]]


def test_a_client_that_gives_up_frees_its_slots_and_its_conversation_goes_on() -> None:
    requests = [
        WorkloadRequest(
            arrival_ns=0, input_length=90_000, output_length=9, conversation="a", leaves_after_ns=S
        ),
        WorkloadRequest(arrival_ns=0, input_length=100, output_length=9, conversation="a"),
    ]
    left, next_turn = run(requests).outcomes
    assert (left.error, left.ended_ns) == ("Cancelled", S)
    assert (next_turn.error, next_turn.due_ns) == ("", S)


def test_turns_behind_one_that_failed_never_arrive(tmp_path: Path) -> None:
    too_long = 3_000_000  # more than the gangs' positions
    requests = [
        WorkloadRequest(arrival_ns=S, input_length=length, output_length=2, conversation="a")
        for length in (100, too_long, 100, 100)
    ]
    answered, refused, *skipped = run(requests).outcomes
    assert not answered.error
    assert refused.error
    assert {turn.error for turn in skipped} == {"the previous turn failed"}
    assert [turn.request for turn in skipped] == [0, 0]


def simulated(tmp_path: Path, lines: list[dict[str, Any]], *words: str) -> dict[str, Any]:
    trace, result = tmp_path / "trace.jsonl", tmp_path / "result.json"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--policy", "fixed_sp", "--cluster", "tetris-16", "--json", str(result)]
    assert main([*options, "--trace", str(trace), *words]) == 0
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def test_each_request_is_judged_by_its_own_bounds(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 1000 * n, "input_length": 8000, "output_length": 3, "slo": {"ttft": bound}}
        for n, bound in enumerate((1, 1, 10_000))
    ]
    lines.append({"timestamp": 9000, "input_length": 8000, "output_length": 3})
    found = simulated(tmp_path, lines)
    assert found["slo_attainment"] == pytest.approx(0.5)  # no bound is met by all who have none
    assert simulated(tmp_path, lines, "--goodput", "ttft:1")["slo_attainment"] == pytest.approx(
        0.25
    )


def test_a_trace_of_conversations_is_simulated_as_conversations(tmp_path: Path) -> None:
    path = tmp_path / "written.jsonl"
    write_trace(converse(first_turns(4), ConversationTurns(count=2, delay_ns=60 * S)), path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = simulated(tmp_path, lines, "--kv-reuse", "0.5")
    assert found["duration"] > 60
    assert found["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("answer", "blue", "trace.jsonl:1:41: field 'answer'"),
        ("csps", {"max_accuracy_loss": 0.1}, "trace.jsonl:1:41: csps: .*all attention is exact"),
        ("cls", "csa/1234", "trace.jsonl:1:41: field 'cls'"),
        ("turn", 1, "trace.jsonl:1:41: unknown field 'turn'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    tmp_path: Path, field: str, value: object, message: str
) -> None:
    line = {"input_length": 5, "output_length": 1, field: value}
    with pytest.raises(ConfigError, match=message):
        simulated(tmp_path, [line])
    found = simulated(tmp_path, [line], "--ignore-fields", field)
    assert found["completed"] == 1


def test_an_objective_without_loss_is_exact(tmp_path: Path) -> None:
    line = {"input_length": 5000, "output_length": 1, "csps": {"max_ttft_ms": 100_000}}
    (part,) = simulated(tmp_path, [line])["by_objective"]
    assert part["ttft_bound_met"] == 1.0
