"""Pictures of gangs that retain beginnings of prompts.

What counts of a prompt is what is left to compute: short suffixes, and where they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_view import TOKEN_NS, Busy, Picture, group, numbers, plans, waiting
from property_examples import examples
from test_preemption import LATENCIES, OVERTAKING_NS, cell, check_altogether
from timed_gangs import MS, TimedCell

from csps.protocols.core.errors import ConfigError
from csps.protocols.core.placement import KvSlice
from csps.services.scheduling.deciding.decisions import Decision, PiggybackPlan
from csps.services.scheduling.events.events import gang_of, index_of, instance_id
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state.state import Cached, Request


def prefix(gang: int, tokens: int, *indices: int) -> Cached:
    """On these instances in equal parts, and in nobody's use."""
    cuts = [tokens * at // len(indices) for at in range(len(indices) + 1)]
    slices = tuple(
        KvSlice(instance_id(gang, index), start, stop, source=9)
        for index, start, stop in zip(indices, cuts, cuts[1:], strict=False)
    )
    return Cached(tokens, slices, {kv_slice.instance: kv_slice.tokens for kv_slice in slices})


@dataclass
class CachedPicture(Picture):
    """Of some requests, by their numbers and gangs (1 prefills, 2 decodes)."""

    prefixes: dict[tuple[int, int], Cached] = field(default_factory=dict)

    def cached(self, request: Request, gang: int) -> Cached | None:
        return self.prefixes.get((request.id, gang))


OPTIONS: dict[str, dict[str, Any]] = {
    "csps": {"spt_tokens": 1000, "short_tokens": 100, "jobs_per_instance": 1},
    "context_parallel": {"short_tokens": 100, "jobs_per_instance": 1},
}
LONG = ((9000, 0),)


def ask(picture: Picture, policy: str, **options: object) -> list[Decision]:
    return picture.ask(make_policy(policy, {**OPTIONS[policy], **options}))


def piggybacks(decisions: list[Decision]) -> list[PiggybackPlan]:
    return [decision for decision in decisions if isinstance(decision, PiggybackPlan)]


policies = pytest.mark.parametrize("policy", OPTIONS)


@policies
def test_a_short_end_does_not_wait_in_the_line_of_long_prompts(policy: str) -> None:
    """All instances have as many long steps as they may; two of them retain the third's."""
    requests = [waiting(1, 4000), waiting(2, 3000), waiting(3, 5000), waiting(4, 50)]
    picture = CachedPicture(requests, [Busy(9000, long=LONG) for _ in range(3)])
    picture.prefixes = {(2, 1): prefix(1, 2500, 0), (3, 1): prefix(1, 4950, 0, 2)}
    found = sorted(plans(ask(picture, policy)), key=numbers)
    assert [numbers(plan) for plan in found] == [[3], [4]]
    end = found[0].steps[0]
    assert end.high_priority
    assert group(found[0]) == [0, 2], "who holds the rest"
    (chunk,) = end.chunks
    assert (chunk.start, chunk.length) == (4950, 50)


@policies
def test_a_short_end_waits_where_its_holders_may_not_be_interrupted(policy: str) -> None:
    """Each by 70 us more; 40 us of both count twice, because a step may be on both."""
    busy = Busy(9000, long=((9000, 8930),))
    picture = CachedPicture([waiting(1, 5000)], [busy, busy])
    picture.prefixes = {(1, 1): prefix(1, 4920, 0, 1)}
    assert not plans(ask(picture, policy, overtaking_s=0.0))
    picture.prefixes = {(1, 1): prefix(1, 4940, 0, 1)}
    assert len(plans(ask(picture, policy, overtaking_s=0.0))) == 1


@policies
def test_a_gang_that_decodes_computes_an_end_if_it_is_done_sooner(policy: str) -> None:
    picture = CachedPicture([waiting(1, 5000)], [Busy(9000, high_priority=2000) for _ in range(2)])
    picture.prefixes = {(1, 1): prefix(1, 4000, 0), (1, 2): prefix(2, 4960, 0, 1)}
    assert not piggybacks(ask(picture, policy)), "nobody has allowed it"
    assert not piggybacks(ask(picture, policy, prefill_tokens_max=39)), "it is too long"
    (piggyback,) = piggybacks(ask(picture, policy, prefill_tokens_max=40))
    assert piggyback.budget == 64 + 40
    placement = piggyback.placement
    assert gang_of(placement.master) == 2
    assert sum(kv_slice.tokens for kv_slice in placement.slices if kv_slice.source) == 4960
    picture.prefixes[1, 1] = prefix(1, 4970, 0)
    picture.prefill[0].high_priority = 0
    picture.__post_init__()
    assert not piggybacks(ask(picture, policy, prefill_tokens_max=40)), "30 tokens, at once"


@policies
def test_whoever_rides_waits_for_those_that_ride_already(policy: str) -> None:
    """40 tokens an iteration take as long as the 200 before them on the other gang, if four are
    before them."""
    requests = [waiting(number, 5000) for number in range(1, 8)]
    picture = CachedPicture(requests, [Busy(90_000, high_priority=130)], [Busy(90_000)])
    picture.prefixes = {(request.id, 1): prefix(1, 4960, 0) for request in requests}
    picture.prefixes |= {(request.id, 2): prefix(2, 4960, 0) for request in requests}
    found = ask(picture, policy, prefill_tokens_max=40)
    assert 3 <= len(piggybacks(found)) < 7
    assert len(piggybacks(found)) + len(plans(found)) == 7


@policies
def test_an_end_that_is_not_short_rides_only_if_it_would_begin_later_elsewhere(policy: str) -> None:
    """400 tokens take an idle instance a microsecond less than the gang that decodes."""
    picture = CachedPicture([waiting(1, 5000)], [Busy(9000)], [Busy(90_000)])
    picture.prefixes = {(1, 1): prefix(1, 4600, 0), (1, 2): prefix(2, 4600, 0)}
    found = ask(picture, policy, prefill_tokens_max=400)
    (plan,) = plans(found)
    assert not piggybacks(found)
    assert plan.steps[0].chunks[0].start == 4600
    picture.prefill[0].long = LONG
    picture.__post_init__()
    assert len(piggybacks(ask(picture, policy, prefill_tokens_max=400, jobs_per_instance=2))) == 1


def test_a_gang_decodes_no_prompt_of_which_it_has_nothing() -> None:
    picture = CachedPicture([waiting(1, 40)], [Busy(9000, high_priority=2000)])
    assert not piggybacks(ask(picture, "csps", prefill_tokens_max=40))


@pytest.mark.parametrize("policy", ["chunked_prefill", "fixed_sp", "loongserve", "tetris"])
def test_other_policies_refuse_ends_where_they_are_decoded(policy: str) -> None:
    supported = r"prefill_tokens_max \(supported: context_parallel, csps\)"
    with pytest.raises(ConfigError, match=supported):
        make_policy(policy, {"prefill_tokens_max": 40})


@pytest.mark.parametrize(("tokens", "holders", "begins"), [(7900, (0, 1), 7900), (2000, (2, 3), 0)])
def test_tetris_goes_on_from_what_was_kept_if_that_is_sooner(
    tokens: int, holders: tuple[int, ...], begins: int
) -> None:
    """Instances are free after 0, 2, 4 and 6 ms, and all of the prompt takes one of them 8 ms."""
    busy = [Busy(9000, long=((2000 * at, 0),)) for at in range(4)]
    picture = CachedPicture([waiting(1, 8000)], busy)
    picture.prefixes = {(1, 1): prefix(1, tokens, *holders)}
    (plan,) = plans(picture.ask(make_policy("tetris", {"improvement_rate": 0.05})))
    chunks = [step.chunks[0] for step in plan.steps]
    assert chunks[0].start == begins
    assert sum(chunk.length for chunk in chunks) == 8000 - begins
    for step in plan.steps:
        assert not begins or set(holders) <= {index_of(instance) for instance in step.group}


@policies
def test_short_prompts_that_start_together_share_a_step(policy: str) -> None:
    """An instance is given one urgent step at a time here; four prompts fit into one."""
    requests = [waiting(number, 50) for number in range(1, 12)]
    decisions = ask(CachedPicture(requests, [Busy(), Busy()]), policy, urgent_batch_tokens=200)
    found = plans(decisions)
    assert sorted(n for plan in found for n in numbers(plan)) == list(range(1, 9))
    assert sorted(group(plan) for plan in found) == [[0], [1]]
    for plan in found:
        (step,) = plan.steps
        assert step.bounds == (0, 200)
        assert step.predicted_ns == 200 * TOKEN_NS
        assert [placed.request_id for placed in plan.decode] == numbers(plan)


@policies
def test_a_short_prompt_does_not_pass_in_a_step_from_before_the_long_one(policy: str) -> None:
    """What it costs the long step would not be counted."""
    requests = [waiting(1, 50), waiting(2, 3000), waiting(3, 50)]
    found = plans(ask(CachedPicture(requests, [Busy()]), policy, jobs_per_instance=2))
    assert [numbers(plan) for plan in found] == [[1], [2], [3]]
    assert [plan.steps[0].high_priority for plan in found] == [True, False, True]


# --- nobody starves --------------------------------------------------------------------------


def test_an_end_runs_inside_of_a_long_step() -> None:
    played = cell([4000], [100_000], block=8)
    names = tuple(b"%d" % at for at in range(30))
    arrivals = [(0, 200, 1), (300 * MS, 600, 1), (310 * MS, 240, 1), (320 * MS, 252, 1)]
    played.play(arrivals, [names[:25], (), names, names[:25]])
    first, long, end, whole = (played.finished[number] for number in (1, 2, 3, 4))
    assert end < long < whole, "52 tokens of the last one are new"
    assert first < end


CONVERSATIONS = st.lists(
    st.tuples(
        st.integers(0, 30).map(lambda gap: gap * MS),
        st.one_of(st.integers(1, 50), st.integers(51, 300), st.integers(51, 300)),
        st.just(1),
        st.integers(0, 3),
    ),
    min_size=10,
    max_size=80,
)


Turns = list[tuple[int, int, int, int]]


def play(played: TimedCell, turns: Turns) -> list[tuple[int, int, int]]:
    """Every conversation's prompts go on from one another, so that many are nearly done. Returns
    the arrivals."""
    at_ns, arrivals, hashes = 0, [], []
    for gap_ns, prompt, output, conversation in turns:
        at_ns += gap_ns
        arrivals.append((at_ns, prompt, output))
        hashes.append(tuple(b"%d %d" % (conversation, at) for at in range(prompt // 8)))
    played.play(arrivals, hashes)
    assert len(played.finished) == len(arrivals)
    for step in played.ended_steps:
        if not step.command.step.high_priority:
            bound_ns = max(OVERTAKING_NS, played.predicted_ns(step.command.step))
            assert step.delayed_ns <= bound_ns
    return arrivals


PATIENT = settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@given(CONVERSATIONS, st.integers(1, 3))
@PATIENT
def test_short_ends_hold_nobody_up_for_longer(turns: Turns, instances: int) -> None:
    played = cell([4000] * instances, [100_000], block=8)
    check_altogether(played, play(played, turns))


@given(CONVERSATIONS, st.integers(1, 3))
@PATIENT
def test_short_ends_hold_no_step_up_for_longer(turns: Turns, instances: int) -> None:
    options = {"short_tokens": 50, "overtaking_s": OVERTAKING_NS / 1e9, "urgent_batch_tokens": 100}
    policy = make_policy("context_parallel", options)
    play(TimedCell(policy, [4000] * instances, [100_000], LATENCIES, block=8), turns)
