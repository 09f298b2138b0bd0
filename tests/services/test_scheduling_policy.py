"""The default policy: what it may never do, over random states, and what it does in plain ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from csps.configurator.expected_group import PartitionSizes
from csps.protocols.csa_template import CsaTemplate
from csps.protocols.plans import PlanRequest
from csps.protocols.topology import Location
from csps.services.scheduling.decode_load import DecodeLoad
from csps.services.scheduling.decode_placement import DecodeRules, place_decode
from csps.services.scheduling.policy import JobDecision
from csps.services.scheduling.prefill_load import PrefillLoad
from csps.services.scheduling.spt_policy import SptPolicy, SptRules
from csps.services.scheduling.state import (
    ClusterState,
    DecodeInstance,
    LongJob,
    PrefillInstance,
    WaitingRequest,
    topology_order,
)
from csps.services.scheduling.waiting_queue import WaitingQueue

RULES = SptRules(spt_tokens=1000, short_tokens=100)
DECODE = DecodeRules(spread_tokens=2000)
POLICY = SptPolicy(RULES, DECODE)
PATIENT = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])


def waiting(number: int, prompt: int, output: int = 10, **options: int) -> WaitingRequest:
    return WaitingRequest(number=number, prompt_tokens=prompt, output_tokens=output, **options)


def prefill(instance: int, free: int = 10_000, **options: object) -> PrefillInstance:
    location = f"0-0-{instance}"
    return PrefillInstance(instance=instance, location=location, free_slots=free, **options)  # type: ignore[arg-type]


def standing_at(places: list[str], free: list[int] | None = None) -> list[PrefillInstance]:
    slots = free or [10_000] * len(places)
    return [
        replace(prefill(instance, slots[instance]), location=place)
        for instance, place in enumerate(places)
    ]


def decode(instance: int, free: int = 50_000, requests: int = 0) -> DecodeInstance:
    location = f"0-1-{instance}"
    return DecodeInstance(instance=instance, location=location, free_slots=free, requests=requests)


def state(
    requests: list[WaitingRequest],
    prefills: list[PrefillInstance] | None = None,
    decodes: list[DecodeInstance] | None = None,
) -> ClusterState:
    return ClusterState(
        waiting=tuple(requests),
        prefill=tuple(prefills or [prefill(i) for i in range(4)]),
        decode=tuple(decodes or [decode(i) for i in range(2)]),
    )


def numbers(job: JobDecision) -> list[int]:
    return [member.number for member in job.members]


LONG_JOBS = st.lists(
    st.builds(LongJob, tokens=st.integers(1, 5000), overtaken_tokens=st.integers(0, 5000)),
    max_size=2,
).map(tuple)
STATES = st.builds(
    lambda requests, prefills, decodes: ClusterState(
        waiting=tuple(replace(r, number=n) for n, r in enumerate(requests)),
        prefill=tuple(
            replace(p, instance=n, location=f"0-{n // 2}-{n}") for n, p in enumerate(prefills)
        ),
        decode=tuple(replace(d, instance=n, location=f"0-1-{n}") for n, d in enumerate(decodes)),
    ),
    st.lists(
        st.builds(
            WaitingRequest,
            number=st.just(0),
            prompt_tokens=st.one_of(st.integers(1, 150), st.integers(1, 9000)),
            output_tokens=st.integers(1, 500),
            strategy=st.sampled_from(["ulysses", "ulysses", "csa"]),
            csa=st.sampled_from([None, None, CsaTemplate(levels=1), CsaTemplate(levels=2)]),
            overtaken_tokens=st.integers(0, 3000),
        ),
        max_size=12,
    ),
    st.lists(
        st.builds(
            PrefillInstance,
            instance=st.just(0),
            location=st.just(""),
            free_slots=st.integers(0, 4000),
            long_jobs=LONG_JOBS,
            urgent_tokens=st.integers(0, 500),
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(
        st.builds(
            DecodeInstance,
            instance=st.just(0),
            location=st.just(""),
            free_slots=st.integers(0, 9000),
            requests=st.integers(0, 30),
        ),
        min_size=1,
        max_size=4,
    ),
)


@given(STATES)
@PATIENT
def test_decisions_are_whole_and_fit(picture: ClusterState) -> None:
    jobs = POLICY.decide(picture)
    placed = [member for job in jobs for member in job.members]
    by_number = {request.number: request for request in picture.waiting}
    assert max(Counter(member.number for member in placed).values(), default=1) == 1
    prefill_used: Counter[int] = Counter()
    decode_used: Counter[int] = Counter()
    long_jobs = Counter({it.instance: len(it.long_jobs) for it in picture.prefill})
    for job in jobs:
        prefill_used.update(job.slots)
        assert {by_number[n].method for n in numbers(job)} == {job.method}
        locations = [topology_order(picture.prefill[i].location) for i in job.group]
        assert locations == sorted(locations)
        lengths = [by_number[n].prompt_tokens for n in numbers(job)]
        assert job.bounds[0] == 0
        assert job.bounds[-1] == sum(lengths)
        assert list(job.bounds) == sorted(set(job.bounds))
        if job.urgent:
            assert len(job.group) == 1
            assert max(lengths) <= RULES.short_tokens
            assert sum(lengths) <= RULES.urgent_batch_tokens
        else:
            long_jobs.update(job.group)
            assert min(lengths) > RULES.short_tokens
    for member in placed:
        request, placement = by_number[member.number], member.placement
        assert member.prompt_tokens == request.prompt_tokens
        assert placement.output_tokens == request.output_tokens
        covered = [p for s in placement.shares for p in range(s.span.start, s.span.stop)]
        assert covered == list(range(request.prompt_tokens))
        decode_used.update(placement.slots)
    for instance in picture.prefill:
        assert prefill_used[instance.instance] <= instance.free_slots
        if prefill_used[instance.instance]:
            assert long_jobs[instance.instance] <= max(2, len(instance.long_jobs))
    for held in picture.decode:
        assert decode_used[held.instance] <= held.free_slots


@given(STATES)
@PATIENT
def test_longer_prompts_start_in_order_of_admission(picture: ClusterState) -> None:
    """The first request of every job is the oldest long one that waits."""
    left = [r.number for r in picture.waiting if r.prompt_tokens > RULES.short_tokens]
    for job in POLICY.decide(picture):
        if not job.urgent:
            assert numbers(job)[0] == left[0]
            assert numbers(job) == sorted(numbers(job))
            left = [number for number in left if number not in numbers(job)]


@given(STATES)
@PATIENT
def test_overtaking_is_bounded(picture: ClusterState) -> None:
    """Urgent tokens never exceed what each outstanding long job has left to be overtaken by."""
    urgent: Counter[int] = Counter()
    for job in POLICY.decide(picture):
        if job.urgent:
            urgent.update(job.slots)
    for instance in picture.prefill:
        if not urgent[instance.instance]:
            continue
        for long_job in instance.long_jobs:
            overtaken = long_job.overtaken_tokens + urgent[instance.instance]
            assert overtaken <= RULES.overtaking * long_job.tokens


@given(STATES, st.randoms(use_true_random=False))
@PATIENT
def test_everything_that_fits_an_idle_cluster_is_served_at_last(
    picture: ClusterState, random: object
) -> None:
    """Played to the end, whatever the order in which jobs and answers finish."""
    capacities = (4000,) * len(picture.prefill), (9000,) * len(picture.decode)
    world = World(*capacities)
    for request in picture.waiting:
        fits_prefill = request.prompt_tokens <= sum(capacities[0])
        if fits_prefill and request.tokens <= sum(capacities[1]):
            world.queue.push(replace(request, overtaken_tokens=0))
    world.play(random)
    assert not len(world.queue)


class World:
    """Books and policy without a cluster: what was started ends in any order."""

    def __init__(self, prefill: tuple[int, ...], decode: tuple[int, ...]) -> None:
        self.queue = WaitingQueue()
        self.prefill = PrefillLoad(prefill, [f"0-{i // 2}-{i}" for i in range(len(prefill))])
        self.decode = DecodeLoad(decode, [f"0-1-{i}" for i in range(len(decode))])
        self.jobs: dict[int, JobDecision] = {}
        self.answers: dict[int, list[int]] = {}
        self.started: list[JobDecision] = []

    def round(self) -> None:
        picture = ClusterState(
            waiting=self.queue.requests,
            prefill=self.prefill.snapshot(),
            decode=self.decode.snapshot(),
        )
        for job in POLICY.decide(picture):
            ticket = len(self.started)
            self.started.append(job)
            self.jobs[ticket] = job
            self.queue.take(numbers(job))
            self.prefill.start(ticket, job)
            for member in job.members:
                self.decode.reserve(member.number, member.placement)
                self.answers[member.number] = list(member.placement.slots)
        self.check()

    def end_one(self, random: object) -> None:
        """A job ends, or an answer whose job has ended."""
        pending = {n for job in self.jobs.values() for n in numbers(job)}
        ends = [("job", t) for t in self.jobs] + [
            ("answer", n) for n in self.answers if n not in pending
        ]
        kind, which = random.choice(ends)  # type: ignore[attr-defined]
        if kind == "job":
            for instance in self.jobs.pop(which).group:
                self.prefill.done(which, instance)
        else:
            for instance in self.answers.pop(which):
                self.decode.freed(which, instance)

    def play(self, random: object) -> None:
        self.round()
        while self.jobs or self.answers:
            self.end_one(random)
            self.round()
        assert self.prefill.ledger.used == (0,) * len(self.prefill.ledger.capacities)
        assert self.decode.ledger.used == (0,) * len(self.decode.ledger.capacities)

    def check(self) -> None:
        self.prefill.ledger.check_integrity()
        self.decode.ledger.check_integrity()


def test_an_endless_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    """A long prompt that waits for decode slots; short ones keep coming as others leave."""
    world = World((4000,), (3000,))
    for number in range(20):
        world.queue.push(waiting(number, 90, 50))
    world.round()
    long_number = 20
    world.queue.push(waiting(long_number, 2500, 100))
    passed = 0
    for number in range(21, 400):
        world.queue.push(waiting(number, 90, 50))
        for ticket in list(world.jobs):
            for instance in world.jobs.pop(ticket).group:
                world.prefill.done(ticket, instance)
        oldest = min(world.answers)
        for instance in world.answers.pop(oldest):
            world.decode.freed(oldest, instance)
        world.round()
        if long_number in world.answers:
            break
        passed += number in world.answers
    else:
        pytest.fail("the long prompt never started")
    assert passed * 140 <= 2600 + 140


@given(
    st.lists(
        st.builds(Location, *[st.integers(0, last) for last in (1, 1, 3)]),
        min_size=1,
        max_size=8,
        unique=True,
    ),
    st.integers(1, 9000),
)
def test_an_idle_gang_takes_the_group_that_plans_are_made_for(
    places: list[Location], tokens: int
) -> None:
    ids = [str(place) for place in places]
    (job,) = POLICY.decide(state([waiting(1, tokens)], standing_at(ids)))
    sizes = PartitionSizes(spt_tokens=RULES.spt_tokens, short_tokens=RULES.short_tokens)
    expected = sizes.expected(PlanRequest(prompt_tokens=tokens, locations=tuple(ids)))
    assert tuple(places[instance] for instance in job.group) == expected.locations


# --- plain cases -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "instances"), [(101, 1), (1000, 1), (1001, 2), (3500, 4), (20_000, 4)]
)
def test_the_spt_length_decides_how_many_instances(prompt: int, instances: int) -> None:
    (job,) = POLICY.decide(state([waiting(1, prompt)]))
    assert len(job.group) == instances
    parts = list(job.slots.values())
    assert max(parts) - min(parts) <= 1


def test_fewer_free_slots_make_shorter_spts() -> None:
    prefills = [prefill(0, 400), prefill(1, 300), prefill(2, 500), prefill(3, 10)]
    (job,) = POLICY.decide(state([waiting(1, 1200)], prefills))
    assert job.slots == {0: 400, 1: 300, 2: 500}


def test_the_freest_instances_in_topology_order() -> None:
    prefills = [prefill(0, 800), prefill(1, 2000), prefill(2, 900), prefill(3, 3000)]
    (job,) = POLICY.decide(state([waiting(1, 1500)], prefills))
    assert job.group == (1, 3)


TWO_SERVERS = ["0-0-0", "0-0-1", "0-1-0", "0-1-1"]


@pytest.mark.parametrize(
    ("free", "prompt", "group"),
    [
        ([10_000, 9_000, 10_000, 9_000], 1500, (0, 1)),
        ([10_000, 900, 1_000, 1_000], 1950, (2, 3)),
        ([10_000, 6_000, 9_000, 9_000], 1500, (2, 3)),
        ([10_000, 8_000, 9_000, 9_000], 1000, (0,)),
    ],
)
def test_a_server_that_has_room_is_enough(
    free: list[int], prompt: int, group: tuple[int, ...]
) -> None:
    (job,) = POLICY.decide(state([waiting(1, prompt)], standing_at(TWO_SERVERS, free)))
    assert job.group == group


def test_a_server_whose_instances_have_enough_to_do_has_no_room() -> None:
    full = (LongJob(tokens=900, overtaken_tokens=0),) * 2
    first, *others = standing_at(TWO_SERVERS, [10_000, 9_000, 8_000, 7_000])
    (job,) = POLICY.decide(state([waiting(1, 1500)], [replace(first, long_jobs=full), *others]))
    assert job.group == (2, 3)


@pytest.mark.parametrize(
    ("prompt", "group"), [(2000, (3, 4)), (2500, (0, 1, 2)), (3500, (0, 1, 3, 4))]
)
def test_what_no_server_holds_goes_to_the_nearest_too(prompt: int, group: tuple[int, ...]) -> None:
    """The other rack's server, although it is freer, only when there is no room in one rack."""
    places = ["0-0-0", "0-0-1", "0-1-0", "1-0-0", "1-0-1"]
    prefills = standing_at(places, [3000, 3000, 3000, 4000, 4000])
    (job,) = POLICY.decide(state([waiting(1, prompt)], prefills))
    assert job.group == group


def test_of_several_servers_the_first_is_filled_before_the_next_begins() -> None:
    places = ["0-0-0", "0-0-1", "0-1-0", "0-1-1", "0-1-2"]
    prefills = standing_at(places, [4000, 4000, 3000, 3000, 3000])
    (job,) = POLICY.decide(state([waiting(1, 4000)], prefills))
    assert job.group == (0, 2, 3, 4)


def test_slack_of_the_last_spt_is_filled_with_those_who_would_wait() -> None:
    requests = [waiting(1, 1700), waiting(2, 600), waiting(3, 250), waiting(4, 200)]
    first, *others = POLICY.decide(state(requests, [prefill(0), prefill(1)]))
    assert numbers(first) == [1, 3]
    assert first.bounds == (0, 975, 1950)
    assert [numbers(job) for job in others] == [[2, 4]]


def test_slack_is_left_alone_while_an_instance_is_idle() -> None:
    first, second = POLICY.decide(state([waiting(1, 1700), waiting(2, 200)]))
    assert numbers(first) == [1]
    assert numbers(second) == [2]
    assert set(first.group).isdisjoint(second.group)


def test_short_prompts_are_spread_and_batched() -> None:
    requests = [waiting(n, 90) for n in range(8)]
    jobs = POLICY.decide(state(requests))
    assert all(job.urgent for job in jobs)
    assert sorted(len(job.members) for job in jobs) == [2, 2, 2, 2]


def test_a_batch_of_short_prompts_has_an_end() -> None:
    jobs = POLICY.decide(state([waiting(n, 100) for n in range(25)], [prefill(0)]))
    assert [len(job.members) for job in jobs] == [20, 5]


def test_short_prompts_pass_a_queue_of_long_ones() -> None:
    busy = [prefill(i, long_jobs=(LongJob(tokens=900, overtaken_tokens=0),) * 2) for i in range(2)]
    (job,) = POLICY.decide(state([waiting(1, 1500), waiting(2, 3000), waiting(3, 50)], busy))
    assert job.urgent
    assert numbers(job) == [3]


def test_short_prompts_avoid_instances_with_long_jobs() -> None:
    prefills = [prefill(0, long_jobs=(LongJob(tokens=900, overtaken_tokens=0),)), prefill(1)]
    (job,) = POLICY.decide(state([waiting(1, 50)], prefills))
    assert job.group == (1,)


def test_members_of_a_long_job_take_turns_with_short_prompts() -> None:
    busy = [
        prefill(0, long_jobs=(LongJob(tokens=900, overtaken_tokens=50),)),
        prefill(1, long_jobs=(LongJob(tokens=901, overtaken_tokens=0),)),
    ]
    (job,) = POLICY.decide(state([waiting(1, 50)], busy))
    assert job.group == (1,)


def test_a_long_job_is_overtaken_by_its_own_size_and_no_more() -> None:
    busy = [prefill(0, long_jobs=(LongJob(tokens=900, overtaken_tokens=850),))]
    (job,) = POLICY.decide(state([waiting(1, 60), waiting(2, 40)], busy))
    assert numbers(job) == [2]


def test_whoever_waits_for_slots_is_passed_by_its_own_size_and_no_more() -> None:
    decodes = [decode(0, 300)]
    head = waiting(1, 500, 10, overtaken_tokens=400)
    jobs = POLICY.decide(
        state([head, waiting(2, 50), waiting(3, 40), waiting(4, 50)], None, decodes)
    )
    assert [numbers(job) for job in jobs] == [[2], [3]]


def test_a_long_prompt_waits_for_instances_without_closing_the_door_to_short_ones() -> None:
    full = (LongJob(tokens=900, overtaken_tokens=0),) * 2
    prefills = [prefill(0, long_jobs=full), prefill(1)]
    head = waiting(1, 1900, overtaken_tokens=10_000)
    jobs = POLICY.decide(state([head, waiting(2, 500), waiting(3, 50)], prefills))
    assert [numbers(job) for job in jobs] == [[3]]


def test_decode_takes_short_prompts_whole_and_spreads_long_ones() -> None:
    instances = [decode(0, 9000, 2), decode(1, 9000, 1), decode(2, 9000, 3)]
    short = place_decode(waiting(1, 500), instances, DECODE)
    assert short is not None
    assert short.slots == {1: 510}
    long = place_decode(waiting(1, 3001), instances, DECODE)
    assert long is not None
    assert long.master == 1
    assert long.slots == {0: 1500, 1: 1511}


def test_decode_uses_more_instances_when_few_have_no_room() -> None:
    instances = [decode(0, 300), decode(1, 400), decode(2, 300)]
    placement = place_decode(waiting(1, 900, 50), instances, DECODE)
    assert placement is not None
    assert placement.slots == {0: 300, 1: 350, 2: 300}
    assert place_decode(waiting(1, 951, 50), instances, DECODE) is None


def test_decode_needs_room_for_the_whole_answer_in_one_place() -> None:
    instances = [decode(0, 300), decode(1, 400)]
    assert place_decode(waiting(1, 10, 401), instances, DECODE) is None
    placement = place_decode(waiting(1, 10, 400), instances, DECODE)
    assert placement is not None
    assert placement.master == 1


def test_decode_batches_have_a_limit() -> None:
    rules = DecodeRules(max_batch=3)
    instances = [decode(0, requests=2), decode(1, requests=1)]
    assert place_decode(waiting(1, 10), instances, rules) is None


def test_rules_are_checked() -> None:
    with pytest.raises(ValueError, match="positive"):
        SptRules(spt_tokens=0)
    with pytest.raises(ValueError, match="negative"):
        SptRules(overtaking=-1)
    with pytest.raises(ValueError, match="positive"):
        DecodeRules(spread_tokens=0)
