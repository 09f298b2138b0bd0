"""Piggybacked prefill against closed forms, a queue, and Sarathi-Serve's loop with times.

On a pair, whose decode gang has nothing else to do, a piggybacked prompt is in the next iteration.
On an elastic gang it waits for grants that the sequencer has given, as on real ranks, so times
there are bounded.
"""

from __future__ import annotations

import json
import random
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from single_group_scheduler import cluster

from csps.configurator.costs.latency import DecodeCost, HybridCost, LinearDecodeCost, StepCost
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import parse_cluster
from csps.loadgen.simulator.kernel import Abandoned, GangFault, SimulationResult, Simulator
from csps.loadgen.simulator.requests import Arrival
from csps.loadgen.simulator.simulate import main, scheduler_of
from csps.protocols.core.errors import ConfigError
from csps.protocols.sequencer.decode_batches import GRANT_ITERATIONS

US = 1e-6
STEP = StepCost.of_seconds(40 * US, 3 * US, 2e-9, 1e-9)
LINE = LinearDecodeCost.of_seconds(50 * US, 10e-9, 5 * US)
HYBRID = HybridCost(step=STEP, decode=DecodeCost(small=LINE, large=LINE, tipping_batch=1))
BUDGET = 64


def elastic(instances: int = 1, **options: Any) -> ClusterModel:
    pair = cluster(instances=instances, decode=instances, step=STEP, regime=LINE, **options)
    model = dict(vars(pair))
    model["prefill"] = model["decode"]
    return ClusterModel(**model)


def pair(instances: int = 1) -> ClusterModel:
    return cluster(instances=4, decode=instances, step=STEP, regime=LINE)


def run(
    arrivals: list[Arrival], model: ClusterModel, *, max_batch: int = BUDGET, **more: Any
) -> SimulationResult:
    options = {"token_budget": BUDGET, "max_batch": max_batch}
    scheduler = scheduler_of(model, "chunked_prefill", options)
    simulator = Simulator(scheduler, model, arrivals, **more)
    found = simulator.run()
    simulator.gangs.check_idle()
    scheduler.check_invariants()
    return found


def alone_ns(prompt: int) -> int:
    """Return the time of a prompt that has all iterations to itself."""
    starts = range(0, prompt, BUDGET)
    return sum(
        HYBRID.predict_ns([[(min(BUDGET, prompt - start), start)]], 0, 0) for start in starts
    )


# --- closed forms ----------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [1, BUDGET, BUDGET + 1, 10 * BUDGET])
@pytest.mark.parametrize("instances", [1, 4])
def test_a_prompt_alone_costs_one_more_constant_for_each_further_chunk(
    prompt: int, instances: int
) -> None:
    """If c = 2d, n chunks take T(L) + (n - 1) a, except for rounding."""
    arrivals = [Arrival(at_ns=0, prompt_tokens=prompt, output_tokens=3)]
    (outcome,) = run(arrivals, elastic(instances)).outcomes
    chunks = -(-prompt // BUDGET)
    whole_ns = STEP.predict_ns(prompt) + (chunks - 1) * STEP.predict_ns(0)
    assert outcome.ttft_ns == alone_ns(prompt)
    assert 0 <= whole_ns - outcome.ttft_ns < chunks
    first, second, third = outcome.token_ns
    assert second - first == LINE.predict_ns(1, prompt + 1)
    assert abs(third - second - LINE.predict_ns(1, prompt + 2)) <= 1


def test_a_decoding_sequence_waits_for_at_most_one_chunk() -> None:
    """An iteration costs the larger constant once, the chunk, and the decoding sequence."""
    arrivals = [
        Arrival(at_ns=0, prompt_tokens=10, output_tokens=200),
        Arrival(at_ns=1_000_000, prompt_tokens=40 * BUDGET, output_tokens=2),
    ]
    first, second = run(arrivals, pair()).outcomes
    between = [
        stamp for stamp in first.token_ns if arrivals[1].at_ns <= stamp <= second.first_token_ns
    ]
    gaps = [stop - start for start, stop in pairwise(between)]
    sampled = first.token_ns.index(between[1])
    chunk, past = BUDGET - 1, 0
    expected = []
    for number in range(len(gaps)):
        length = min(chunk, 40 * BUDGET - past)
        expected.append(HYBRID.predict_ns([[(length, past)]], 1, 10 + sampled + number))
        past += length
    assert gaps == expected
    assert past == 40 * BUDGET
    assert LINE.a > STEP.a, "the larger constant is the row's"


def test_masters_work_side_by_side() -> None:
    """Two prompts that fill an iteration each take one on two instances, and two on one."""
    arrivals = [Arrival(at_ns=0, prompt_tokens=BUDGET, output_tokens=1)] * 2
    ends = [run(arrivals, elastic(n)).outcomes[1].ttft_ns for n in (1, 2)]
    assert ends == [2 * alone_ns(BUDGET), alone_ns(BUDGET)]


def test_one_at_a_time_is_lindleys_recursion_bit_for_bit() -> None:
    """Single tokens and a batch of one: a queue with one server, first come, first served."""
    chance = random.Random(7)
    at_ns, free_ns, expected, arrivals = 0, 0, [], []
    for _ in range(400):
        at_ns += int(chance.expovariate(1 / 800_000))
        prompt = chance.randint(1, 4 * BUDGET)
        arrivals.append(Arrival(at_ns=at_ns, prompt_tokens=prompt, output_tokens=1))
        free_ns = max(free_ns, at_ns) + alone_ns(prompt)
        expected.append(free_ns)
    found = run(arrivals, elastic(), max_batch=1)
    assert [outcome.ended_ns for outcome in found.outcomes] == expected
    waits = sum(outcome.started_ns > outcome.arrival.at_ns for outcome in found.outcomes)
    assert waits > 100, "no request had to wait"


# --- Sarathi-Serve ---------------------------------------------------------------------------


def sarathi(arrivals: list[Arrival], max_batch: int) -> list[list[int]]:
    """Return the token times of Alg. 3 with the times of its iterations. Who gets the place of one
    that has just left misses the iteration that begins at that moment.
    """
    coming = deque(enumerate(arrivals))
    batch: list[int] = []
    late: list[int] = []
    done = [0] * len(arrivals)
    tokens: list[list[int]] = [[] for _ in arrivals]
    now_ns = 0

    def come() -> list[int]:
        found = []
        while coming and coming[0][1].at_ns <= now_ns and len(batch + late + found) < max_batch:
            found.append(coming.popleft()[0])
        return found

    while coming or batch or late:
        if not batch:
            batch, late = late, []
        if not batch:
            now_ns = max(now_ns, coming[0][1].at_ns)
            batch += come()
        decoding = [
            request for request in batch if done[request] == arrivals[request].prompt_tokens
        ]
        left, chunks = BUDGET - len(decoding), []
        for request in batch:
            length = min(left, arrivals[request].prompt_tokens - done[request])
            if length > 0:
                chunks.append((request, length))
                left -= length
        context = sum(
            arrivals[request].prompt_tokens + len(tokens[request]) for request in decoding
        )
        rows = [[(length, done[request]) for request, length in chunks]] if chunks else []
        now_ns += HYBRID.predict_ns(rows, len(decoding), context)
        for request, length in chunks:
            done[request] += length
        drawing = [
            request for request, _ in chunks if done[request] == arrivals[request].prompt_tokens
        ]
        for request in [*decoding, *drawing]:
            tokens[request].append(now_ns)
        batch, late = batch + late, []
        batch += come()
        batch = [
            request for request in batch if len(tokens[request]) < arrivals[request].output_tokens
        ]
        late = come()
    return tokens


@settings(max_examples=examples(150), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 600_000), st.integers(1, 200), st.integers(1, 12)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 6),
)
def test_tokens_come_at_the_times_of_sarathis_loop(
    sizes: list[tuple[int, int, int]], max_batch: int
) -> None:
    """Times agree to a nanosecond for each iteration: a jump rounds once, and iterating every
    time.
    """
    at_ns, arrivals = 0, []
    for gap_ns, prompt, output in sizes:
        at_ns += gap_ns
        arrivals.append(Arrival(at_ns=at_ns, prompt_tokens=prompt, output_tokens=output))
    found = run(arrivals, pair(), max_batch=max_batch)
    expected = sarathi(arrivals, max_batch)
    # An arrival within the rounding of an iteration's end may be an iteration earlier or later.
    starts = {arrival.at_ns for arrival in arrivals}
    near = any(abs(stamp - at) < 200 for sampled in expected for stamp in sampled for at in starts)
    if not near:
        for outcome, sampled in zip(found.outcomes, expected, strict=True):
            assert len(outcome.token_ns) == len(sampled)
            for ours, theirs in zip(outcome.token_ns, sampled, strict=True):
                assert abs(ours - theirs) < 200


# --- conservation, faults --------------------------------------------------------------------


def crowd(count: int = 80, seed: int = 3) -> list[Arrival]:
    chance, at_ns, arrivals = random.Random(seed), 0, []
    for _ in range(count):
        at_ns += int(chance.expovariate(1 / 300_000))
        arrivals.append(
            Arrival(
                at_ns=at_ns,
                prompt_tokens=chance.choice([1, 30, 200, 700]),
                output_tokens=chance.randint(1, 30),
                max_tokens=40,
            )
        )
    return arrivals


def test_every_token_is_drawn_and_every_slot_comes_back() -> None:
    arrivals = crowd()
    found = run(arrivals, elastic(3, kv_slots=2000))
    assert not any(outcome.error for outcome in found.outcomes)
    assert [outcome.generated_tokens for outcome in found.outcomes] == [
        arrival.output_tokens for arrival in arrivals
    ]
    assert found.decoded == sum(arrival.output_tokens - 1 for arrival in arrivals)
    for outcome in found.outcomes:
        assert outcome.arrival.at_ns <= outcome.started_ns < outcome.first_token_ns
        assert outcome.token_ns == sorted(outcome.token_ns)


@pytest.mark.parametrize("model", [pair(2), elastic(2)], ids=["pair", "elastic"])
def test_time_between_tokens_is_bounded_by_the_budget(model: ClusterModel) -> None:
    """Whatever the prompts: no gap is longer than an iteration that is full, with the longest
    prompt before it. Whole prompts would take many times as long."""
    arrivals = crowd(60)
    longest = max(arrival.prompt_tokens for arrival in arrivals)
    most = 16
    full_ns = HYBRID.predict_ns([[(BUDGET, longest)]], most, most * (longest + 30))
    found = run(arrivals, model, max_batch=most)
    gaps = [
        stop - start
        for outcome in found.outcomes
        for start, stop in pairwise(sorted(outcome.token_ns))
    ]
    assert max(gaps) <= full_ns
    assert STEP.predict_ns(longest) > 3 * full_ns


def test_riders_outlive_their_gang_and_clients_may_leave() -> None:
    faults = [
        GangFault(at_ns=4_000_000, role="elastic"),
        GangFault(at_ns=6_000_000, role="elastic", up=True),
    ]
    abandoned = [Abandoned(at_ns=3_000_000, request=2), Abandoned(at_ns=9_000_000, request=30)]
    found = run(crowd(), elastic(2, kv_slots=3000), faults=faults, abandoned=abandoned)
    errors = [outcome.error for outcome in found.outcomes if outcome.error]
    assert set(errors) <= {"Cancelled"}
    whole = [outcome for outcome in found.outcomes if not outcome.error]
    assert all(
        outcome.generated_tokens == len(outcome.token_ns) == outcome.arrival.output_tokens
        for outcome in whole
    )
    assert any(outcome.sequences == 2 for outcome in whole)


@pytest.mark.parametrize("model", [pair(2), elastic(2)], ids=["pair", "elastic"])
def test_a_request_cancelled_during_the_message_delay_is_never_piggybacked(
    model: ClusterModel,
) -> None:
    late = replace(model, notice_ns=1_000_000)
    arrivals = [Arrival(at_ns=0, prompt_tokens=100, output_tokens=5) for _ in range(2)]
    found = run(arrivals, late, abandoned=[Abandoned(at_ns=500_000, request=1)])
    assert [outcome.error for outcome in found.outcomes] == ["Cancelled", ""]


def test_the_past_does_not_know_the_future() -> None:
    """Other arrivals after a time change no token before it."""
    arrivals = crowd()
    cut_ns = arrivals[40].at_ns
    for model in (elastic(2), pair(2)):
        _compare(run(arrivals, model), run(arrivals[:40], model), cut_ns)


def _compare(whole: SimulationResult, part: SimulationResult, cut_ns: int) -> None:
    for one, other in zip(part.outcomes, whole.outcomes, strict=False):
        early = [stamp for stamp in one.token_ns if stamp <= cut_ns]
        assert early == other.token_ns[: len(early)]


def test_on_an_elastic_gang_piggybacked_prefill_waits_for_at_most_two_grants() -> None:
    """The times are compared with the next iteration of a pair, beside one decoding sequence."""
    arrivals = [
        Arrival(at_ns=0, prompt_tokens=10, output_tokens=400),
        Arrival(at_ns=9_000_000, prompt_tokens=BUDGET, output_tokens=5),
    ]
    at_once, leased = (run(arrivals, model).outcomes for model in (pair(), elastic()))
    iteration_ns = LINE.predict_ns(1, 410)
    late_ns = leased[1].first_token_ns - at_once[1].first_token_ns
    assert 0 < late_ns <= 2 * GRANT_ITERATIONS * iteration_ns
    # Rounded down at every iteration, or once a jump.
    decoded = (leased[0].token_ns[i + 1] - leased[0].token_ns[i] for i in range(20))
    assert all(stamp - LINE.predict_ns(1, 11 + n) in (0, 1) for n, stamp in enumerate(decoded))


# --- the command -----------------------------------------------------------------------------

FILE: dict[str, Any] = {
    "servers": [{"instances": 2, "permissions": ["prefill", "decode"], "kv_slots": 100_000}],
    "latency": {
        "steps": {1: [1e-3, 1e-5, 2e-10, 1e-10], 2: [1e-3, 5e-6, 1e-10, 5e-11]},
        "decode": {2: [2e-3, 1e-8, 1e-5]},
    },
}


def test_the_command_simulates_an_elastic_gang(tmp_path: Path) -> None:
    path, result = tmp_path / "elastic.yaml", tmp_path / "run.json"
    path.write_text(json.dumps(FILE))  # which is YAML
    words = f"--policy chunked_prefill --option token_budget=256 --cluster {path}"
    words += f" --workload tetris-short --rate 1 --requests 30 --output-len 5 --json {result}"
    assert main(words.split()) == 0
    assert json.loads(result.read_text())["completed"] == 30
    with pytest.raises(
        ConfigError, match="csps, fixed_sp and tetris need prefill and decode gangs"
    ):
        main(words.replace("chunked_prefill --option token_budget=256", "csps").split())


def test_permissions_are_those_of_all_or_of_none() -> None:
    model = parse_cluster(FILE, name="x")
    assert model.roles == ("elastic",)
    assert [instance.location for instance in model.decode.instances] == ["0-0-0", "0-0-1"]
    mixed = {
        **FILE,
        "servers": [*FILE["servers"], {**FILE["servers"][0], "permissions": ["decode"]}],
    }
    with pytest.raises(ConfigError, match="all instances have both permissions"):
        parse_cluster(mixed, name="x")
