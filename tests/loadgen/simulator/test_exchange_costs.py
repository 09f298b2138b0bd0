"""What instances exchange takes time: nothing is free, and worse hardware never helps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from ring_traffic import ring_kv_traffic
from small_cluster import MODEL, cluster

from csps.configurator.model.traffic import Traffic, sp_tp_traffic, ulysses_traffic
from csps.loadgen.simulator.cluster import ClusterModel, GangModel, LinkModel
from csps.loadgen.simulator.decode_batch import SimulatedMember
from csps.loadgen.simulator.decode_gang import DecodeGang
from csps.loadgen.simulator.exchanges import StepPricer, iteration_costs
from csps.loadgen.simulator.kernel import Simulator
from csps.loadgen.simulator.requests import Arrival
from csps.loadgen.simulator.simulate import scheduler_of
from csps.loadgen.simulator.step_order import SimulatedStep, StepOrder
from csps.loadgen.simulator.timeline import EventTimeline, SimulatedNetwork
from csps.protocols.core.placement import KvSlice
from csps.protocols.core.topology import GroupShape
from csps.protocols.gang.messages import ReserveKv
from csps.protocols.gang.step_messages import (
    MoveSequence,
    PrefillChunk,
    PrefillStep,
    SequencePlacement,
)
from csps.services.scheduling.events.commands import Reserve, SetGroup
from csps.services.scheduling.events.events import AnyEvent, Moved

TOKENS = 1 << 16


def slower(link: LinkModel | None, factor: int) -> LinkModel:
    assert link is not None
    return replace(
        link, bytes_per_s=link.bytes_per_s // factor, latency_ns=link.latency_ns * factor
    )


def step_of(
    group: Sequence[int], strategy: str = "ulysses", tokens: int = TOKENS, **chunk: Any
) -> PrefillStep:
    bounds = [tokens * number // len(group) for number in range(len(group) + 1)]
    start = chunk.pop("start", 0)
    return PrefillStep(
        step_id=1,
        group=tuple(group),
        bounds=tuple(bounds),
        chunks=(PrefillChunk(1, start, tokens, **chunk),),
        strategy=strategy,
    )


def taken_ns(model: ClusterModel, *steps: PrefillStep) -> int:
    """Return the time until steps that begin together have ended, on groups of their own."""
    timeline = EventTimeline()
    times = StepPricer(model, SimulatedNetwork(timeline, model))
    order = StepOrder(timeline, len(model.prefill.instances))
    ended: list[int] = []
    for step in steps:
        time = times.of(step)
        order.submit(
            SimulatedStep(
                members=step.group,
                work_ns=time.work_ns,
                beside=time.beside,
                after=time.after,
                high_priority=False,
                started=lambda: None,
                ended=lambda: ended.append(timeline.now_ns),
            )
        )
    while not timeline.empty:
        timeline.step()
    assert len(ended) == len(steps)
    return max(ended)


NEAR, FAR = (0, 1, 2, 3), (0, 1, 4, 5)
HISTORY = tuple(KvSlice(index, 20_000 * index, 20_000 * (index + 1)) for index in (0, 1))
BALANCED = (KvSlice(2, 10_000, 20_000), KvSlice(3, 30_000, 40_000))


def with_history(moves: tuple[KvSlice, ...], group: Sequence[int] = NEAR) -> PrefillStep:
    """Return a chunk of ring attention after 40,000 tokens on two of four members."""
    step = step_of(group, "ring_kv", 4_000, start=40_000, history=HISTORY)
    if not moves:
        return step
    bounds = pairwise(step.bounds)
    rows = [
        KvSlice(member, 40_000 + first, 40_000 + stop)
        for member, (first, stop) in zip(group, bounds, strict=True)
    ]
    chunk = msgspec.structs.replace(step.chunks[0], placement=(*rows, *moves))
    return msgspec.structs.replace(step, chunks=(chunk,))


# --- bytes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [NEAR, FAR, tuple(range(8)), (0, 1, 2, 4)])
@pytest.mark.parametrize("strategy", ["ring_kv", "ulysses", "sp_tp"])
def test_a_step_sends_what_the_engine_sends(group: tuple[int, ...], strategy: str) -> None:
    """Over links that all share, so that each kind of link has all of its bytes."""
    model = cluster()
    assert model.inside is not None
    assert model.between is not None
    model = replace(
        model,
        inside=replace(model.inside, shared=True),
        between=replace(model.between, shared=True),
    )
    network = SimulatedNetwork(EventTimeline(), model)
    time = StepPricer(model, network).of(step_of(group, strategy))
    far = network.between(model.prefill.instances[0], model.prefill.instances[4])
    sent = {True: 0, False: 0}
    for link, size in (*time.beside, *time.after):
        sent[link is far] += size
    expected = expected_traffic(model, group, strategy)
    layers, element = MODEL["layers"], 2
    assert sent[True] == pytest.approx(expected.between * element * layers, rel=1e-6)
    assert sent[False] == pytest.approx(expected.inside * element * layers, rel=1e-6)


def expected_traffic(model: ClusterModel, group: Sequence[int], strategy: str) -> Traffic:
    count = defaultdict[str, int](int)
    for index in group:
        count[model.prefill.instances[index].server] += 1
    shape = GroupShape(tuple(count.values()))
    assert model.attention is not None
    traffic_of = {
        "ring_kv": ring_kv_traffic,
        "ulysses": ulysses_traffic,
        "sp_tp": sp_tp_traffic,
    }[strategy]
    return traffic_of(model.attention, shape, TOKENS)


def test_measured_times_hold_their_own_exchanges() -> None:
    """On the link on which it was measured, a step takes its measured time."""
    link = {"gbps": 800, "latency_us": 5}
    model = cluster(latency={"measured": link})
    alone_ns = model.step_ns(step_of(NEAR))
    assert taken_ns(model, step_of(NEAR)) == alone_ns
    slow = replace(model, inside=slower(model.inside, 2))
    assert taken_ns(slow, step_of(NEAR)) > alone_ns
    assert taken_ns(cluster(), step_of(NEAR)) > alone_ns, "these hold none"
    costs = iteration_costs(model)
    assert (costs((0, 1)).exchange, costs((0, 1)).far_row) == (0, 0)
    assert costs((0, 2)).exchange > 0, "those servers are far from each other"


# --- nothing is free ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "without"),
    [
        pytest.param(step_of(NEAR), None, id="all-to-all"),
        pytest.param(step_of(NEAR, "sp_tp"), None, id="SP-TP"),
        pytest.param(step_of(NEAR, "levels"), None, id="levels"),
        pytest.param(step_of(FAR), step_of(NEAR), id="all-to-all between servers"),
        pytest.param(step_of(FAR, "levels"), step_of(NEAR, "levels"), id="levels of two servers"),
        pytest.param(with_history(BALANCED), with_history(()), id="balanced history"),
        pytest.param(
            step_of(NEAR, "ring_kv", placement=(KvSlice(0, 0, TOKENS),)),
            step_of(NEAR, "ring_kv"),
            id="KV that one member keeps",
        ),
    ],
)
def test_each_exchange_of_a_step_takes_time(step: PrefillStep, without: PrefillStep | None) -> None:
    """More than without it, or than on links that are free."""
    model = cluster()
    free = replace(model, inside=None, between=None)
    assert taken_ns(free, step) == model.step_ns(step)
    assert taken_ns(model, step) > taken_ns(free if without is None else model, without or step)


def test_a_ring_takes_time_where_computing_does_not_hide_it() -> None:
    model = cluster(latency={"strategy": "ring_kv"})
    step = step_of(FAR)
    alone_ns = model.step_ns(step)
    assert taken_ns(model, step) == alone_ns
    slow = replace(model, between=slower(model.between, 20))
    assert slow.between is not None
    share = TOKENS / 4 * 2 * 2 * 128 * 2 * 8  # keys and values of a member's tokens
    hop_ns = 3 * share / slow.between.bytes_per_s * 1e9
    waits_ns = 3 * 8 * slow.between.latency_ns
    assert taken_ns(slow, step) == pytest.approx(hop_ns + waits_ns, rel=0.01)
    assert taken_ns(slow, step_of(NEAR)) == alone_ns


@pytest.mark.parametrize("strategy", ["ulysses", "ring_kv", "sp_tp"])
def test_two_steps_share_the_link_between_their_servers(strategy: str) -> None:
    model = cluster(latency={"strategy": "ring_kv"} if strategy == "ring_kv" else {})
    model = replace(model, between=slower(model.between, 20))
    one, other = step_of((0, 1, 4, 5), strategy), step_of((2, 3, 6, 7), strategy)
    alone_ns = taken_ns(model, one)
    assert taken_ns(model, one, other) > 1.3 * alone_ns


def test_queries_of_rows_on_several_instances_take_time() -> None:
    """A sequence on two instances: more on two servers, more with each sequence."""
    model = cluster()
    costs = iteration_costs(model)

    def iteration(instances: tuple[int, ...], sequences: int, holders: int) -> int:
        rows = [
            SimulatedMember(
                sequence=number,
                context=0,
                tokens=1,
                master=instances[number % len(instances)],
                ranks=instances[:holders],
            )
            for number in range(sequences)
        ]
        return costs(instances).with_chunks(0, (), rows, 0, 0).end_ns(1)

    whole, spread = iteration((0, 1), 2, 1), iteration((0, 1), 2, 2)
    assert spread > whole
    assert iteration((0, 2), 2, 2) > spread
    more, base = iteration((0, 1), 4, 2), iteration((0, 1), 4, 1)
    assert more - base > spread - whole


def test_the_busiest_master_counts() -> None:
    """Masters share what each sequence costs; a single one computes for all."""
    costs = iteration_costs(cluster())((0, 1))
    rows = [
        SimulatedMember(sequence=n, context=9, tokens=1, master=n % 2, ranks=(0, 1))
        for n in range(8)
    ]
    single = [replace(row, master=0) for row in rows]
    even_ns, single_ns = (
        costs.with_chunks(0, (), batch, 72, 0).end_ns(1) for batch in (rows, single)
    )
    assert single_ns - even_ns == pytest.approx(4 * 2 * 0.5e5, abs=2)  # 4 more of 2 x C / 2


# --- moves -------------------------------------------------------------------------------------


class _Listener:
    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def post_event(self, event: AnyEvent) -> None:
        self.events.append(event)

    post_rank_event = post_event

    def started(self, *_: Any) -> None: ...
    def prefilled(self, *_: Any) -> None: ...
    def decoded(self, *_: Any) -> None: ...
    def finished(self, *_: Any) -> None: ...


def moved_ns(model: ClusterModel, *moves: tuple[int, int]) -> int:
    """Return the time until sequences of 100,000 tokens have moved between these instances."""
    timeline, listener = EventTimeline(), _Listener()
    network = SimulatedNetwork(timeline, model)
    gang = DecodeGang(0, timeline, model, network, listener)
    for number, (source, target) in enumerate(moves, 1):
        before, after = (
            SequencePlacement(slices=(KvSlice(instance, 0, 100_000),), master=instance)
            for instance in (source, target)
        )
        message = ReserveKv(
            sequence_id=number,
            slices=before.slices,
            master=source,
            prompt_tokens=100_000,
            output_tokens=50_000,
        )
        gang.sequences.reserve(
            Reserve(request_id=number, message=message, deadline_ns=1), before=0, left=50_000
        )
        gang.sequences[number].missing.clear()
        gang.join(SetGroup(gang=0, joined=(number,)))
        gang.receive(
            MoveSequence(
                step_id=number,
                sequence_id=number,
                prompt_tokens=100_000,
                stop=150_000,
                before=before,
                after=after,
            )
        )
    while sum(isinstance(event, Moved) for event in listener.events) < len(moves):
        timeline.step()
    return timeline.now_ns


def test_moves_take_the_links_between_their_servers() -> None:
    model = cluster(elastic=True, quantum_ms=1000)  # nothing runs between the blocks
    free_ns = moved_ns(replace(model, inside=None, between=None), (0, 1))
    near_ns, far_ns = moved_ns(model, (0, 1)), moved_ns(model, (0, 4))
    assert free_ns < near_ns < far_ns
    slow = replace(model, between=slower(model.between, 4))
    assert moved_ns(slow, (0, 1)) == near_ns
    assert moved_ns(slow, (0, 4)) > 2 * far_ns
    both_ns = moved_ns(model, (0, 4), (1, 5))
    assert both_ns > 1.5 * far_ns, "they share the link between the servers"


# --- worse hardware never helps ----------------------------------------------------------------

PAIR_POLICIES = ("csps", "fixed_sp", "tetris", "context_parallel", "chunked_prefill")
ELASTIC_POLICIES = ("loongserve", "context_parallel", "chunked_prefill")


def token_ns(
    model: ClusterModel, policy: str, arrivals: Sequence[Arrival], **options: Any
) -> list[list[int]]:
    """Return the times of all tokens; the policy predicts with the same table on every model."""
    if policy == "chunked_prefill":
        options["token_budget"] = 2048
    scheduler = scheduler_of(model, policy, options)
    simulator = Simulator(scheduler, model, arrivals)
    outcomes = simulator.run().outcomes
    simulator.gangs.check_idle()
    return [outcome.token_ns for outcome in outcomes]


def none_earlier(fast: list[list[int]], slow: list[list[int]]) -> bool:
    return all(
        a <= b
        for fast_times, slow_times in zip(fast, slow, strict=True)
        for a, b in zip(fast_times, slow_times, strict=True)
    )


requests = st.lists(
    st.tuples(st.integers(1, 200_000), st.integers(1, 30)), min_size=1, max_size=3
).map(
    # A minute apart: with requests that overlap, other decisions may be luckier ones.
    lambda sizes: [
        Arrival(at_ns=number * 60_000_000_000, prompt_tokens=tokens, output_tokens=output)
        for number, (tokens, output) in enumerate(sizes)
    ]
)
gangs = st.sampled_from(
    [(name, False) for name in PAIR_POLICIES] + [(name, True) for name in ELASTIC_POLICIES]
)


@settings(max_examples=examples(100), deadline=None)
@given(gangs, requests, st.sampled_from(["ulysses", "ring_kv"]), st.integers(2, 100), st.data())
def test_a_slower_link_never_gives_an_earlier_token(
    policy: tuple[str, bool],
    arrivals: list[Arrival],
    strategy: str,
    factor: int,
    data: st.DataObject,
) -> None:
    name, elastic = policy
    model = cluster(elastic=elastic, latency={"strategy": strategy})
    kind = data.draw(st.sampled_from(["inside", "between"]))
    worse = replace(model, **{kind: slower(getattr(model, kind), factor)})
    free = replace(model, **{kind: None})
    times = [token_ns(each, name, arrivals) for each in (free, model, worse)]
    assert none_earlier(times[0], times[1])
    assert none_earlier(times[1], times[2])


@pytest.mark.parametrize("strategy", ["ring_kv", "ulysses", "sp_tp"])
def test_servers_in_two_racks_exchange_over_the_link_between_these(strategy: str) -> None:
    """As two servers of one rack do whose link is as slow."""
    model = cluster()
    slow = slower(model.between, 20)
    elsewhere = tuple(
        replace(instance, location=f"1-0-{number}") if number >= 4 else instance
        for number, instance in enumerate(model.prefill.instances)
    )
    apart = replace(model, prefill=replace(model.prefill, instances=elsewhere), racks=slow)
    alike = replace(model, between=slow)
    for group in (NEAR, FAR):
        step = step_of(group, strategy)
        assert taken_ns(apart, step) == taken_ns(alike, step)
    assert taken_ns(apart, step) > taken_ns(replace(apart, racks=None), step)
    assert iteration_costs(elastic_of(apart))(FAR) == iteration_costs(elastic_of(alike))(FAR)
    assert iteration_costs(elastic_of(apart))(FAR) != iteration_costs(elastic_of(model))(FAR)


def elastic_of(model: ClusterModel) -> ClusterModel:
    """Return the cluster whose prefill gang decodes as well."""
    return replace(model, decode=model.prefill)


def moved(gang: GangModel, servers: int) -> GangModel:
    """Return the gang with its instances on so many servers."""
    each = len(gang.instances) // servers
    return replace(
        gang,
        instances=tuple(
            replace(instance, location=f"{instance.location[0]}-{index // each}-{index % each}")
            for index, instance in enumerate(gang.instances)
        ),
    )


@settings(max_examples=examples(30), deadline=None)
@given(requests, st.sampled_from(["ulysses", "ring_kv"]), st.sampled_from([2, 4, 8]))
def test_a_farther_server_never_gives_an_earlier_first_token(
    arrivals: list[Arrival], strategy: str, servers: int
) -> None:
    """Eight instances on one server, or on several. Later tokens may come sooner: KV leaves several
    servers over more links."""
    model = cluster(latency={"strategy": strategy})
    near = replace(model, prefill=moved(model.prefill, 1))
    far = replace(model, prefill=moved(model.prefill, servers))
    fast, slow = (token_ns(each, "fixed_sp", arrivals, sp=8) for each in (near, far))
    assert all(a[0] <= b[0] for a, b in zip(fast, slow, strict=True))
    if strategy == "ulysses" and arrivals[0].prompt_tokens > 1_000:
        assert slow[0][0] > fast[0][0]


@settings(max_examples=examples(30), deadline=None)
@given(
    st.sampled_from(PAIR_POLICIES[:3]),
    st.lists(st.integers(100, 20_000), min_size=2, max_size=8),
    st.integers(21_000, 60_000),
)
def test_a_smaller_pool_never_gives_an_earlier_first_token(
    policy: str, lengths: list[int], slots: int
) -> None:
    """All come at once; later tokens may come sooner, because fewer are decoded together."""
    arrivals = [Arrival(at_ns=0, prompt_tokens=tokens, output_tokens=50) for tokens in lengths]
    model = cluster()
    instances = tuple(replace(each, kv_slots=slots) for each in model.decode.instances[:1])
    roomy = tuple(replace(each, kv_slots=1 << 30) for each in instances)
    small, large = (
        replace(model, decode=replace(model.decode, instances=each)) for each in (instances, roomy)
    )
    fast, slow = (token_ns(each, policy, arrivals) for each in (large, small))
    assert max(times[0] for times in fast) <= max(times[0] for times in slow)


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from(ELASTIC_POLICIES), requests, st.integers(1, 7))
def test_fewer_cores_never_give_an_earlier_token(
    policy: str, arrivals: list[Arrival], cores: int
) -> None:
    model = cluster(elastic=True)

    def with_cores(count: int) -> ClusterModel:
        gang = replace(
            model.decode,
            instances=tuple(replace(each, cores=count) for each in model.decode.instances),
        )
        return replace(model, prefill=gang, decode=gang)

    fast, slow = (token_ns(with_cores(count), policy, arrivals) for count in (8, cores))
    assert none_earlier(fast, slow)
