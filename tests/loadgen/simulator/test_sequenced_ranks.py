"""Steps and a decode batch on the same ranks, in the order of a sequencer."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from single_group_scheduler import SingleGroupScheduler, cluster
from small_cluster import cluster as elastic_cluster
from small_cluster import options_of

from csps.configurator.costs.latency import DecodeCost, HybridCost, LinearDecodeCost, StepCost
from csps.loadgen.simulator import decode_gang
from csps.loadgen.simulator.cluster import ClusterModel, GangModel, InstanceModel
from csps.loadgen.simulator.decode_batch import IterationCost, Jump, SimulatedMember
from csps.loadgen.simulator.kernel import Abandoned, GangFault, Simulator
from csps.loadgen.simulator.requests import Arrival
from csps.loadgen.simulator.sequenced_ranks import YIELD_POINT_NS, SequencedRanks
from csps.loadgen.simulator.simulate import scheduler_of
from csps.loadgen.simulator.step_order import SimulatedStep
from csps.loadgen.simulator.timeline import Cores, EventTimeline
from csps.services.scheduling.events.limits import ReuseSettings

MS = 1_000_000
QUANTUM_NS = 50 * MS
ITERATION_NS = 10 * MS
LINE = LinearDecodeCost.of_seconds(ITERATION_NS / 1e9, 0.0, 0.0)
STEP = StepCost.of_seconds(0.0, 1e-3, 0.0, 0.0)
HYBRID = HybridCost(step=STEP, decode=DecodeCost(small=LINE, large=LINE, tipping_batch=1))


def _gang(instances: int, cores: int | None) -> GangModel:
    return GangModel(
        instances=tuple(
            InstanceModel(location=f"0-0-{index}", kv_slots=1, cores=cores)
            for index in range(instances)
        ),
        tp=1,
    )


class Ranks:
    """A gang whose steps and rows are noted."""

    def __init__(self, instances: int = 2, cores: int | None = None) -> None:
        self.clock = EventTimeline()
        self.finished: dict[int, int] = {}
        self.prefilled: dict[int, int] = {}
        self.started: dict[int, int] = {}
        self.ended: dict[int, list[int]] = {}
        self.left: list[int] = []
        self.tokens: dict[int, list[int]] = {}
        self.gang = SequencedRanks(
            self.clock,
            instances,
            cost=lambda _: IterationCost(decode=HYBRID.decode, hybrid=HYBRID),
            quantum_ns=QUANTUM_NS,
            compute=Cores(self.clock, _gang(instances, cores)).compute,
            finished=lambda member: self._note(self.finished, member.sequence),
            prefilled=lambda member: self._note(self.prefilled, member.sequence),
            sampled=self._sampled,
        )

    def _note(self, book: dict[int, int], key: int) -> None:
        assert key not in book, "reported twice"
        book[key] = self.clock.now_ns

    def _sampled(self, batch_members: list[SimulatedMember]) -> None:
        for member in batch_members:
            self.tokens.setdefault(member.sequence, []).append(self.clock.now_ns)

    def task(
        self, number: int, members: tuple[int, ...], work_ns: int, **more: bool
    ) -> SimulatedStep:
        task = SimulatedStep(
            members=members,
            work_ns=work_ns,
            high_priority=more.get("high_priority", False),
            started=lambda: self._note(self.started, number),
            ended=lambda: self.ended.setdefault(number, []).append(self.clock.now_ns),
            sequences=(number,),
        )
        self.gang.submit(task)
        return task

    def member(self, number: int, tokens: int) -> SimulatedMember:
        member = SimulatedMember(sequence=number, context=1, tokens=tokens)
        self.gang.join(member)
        return member

    def run(self, until_ns: int = 1 << 62) -> None:
        while not self.clock.empty and self.clock.next_ns <= until_ns:
            self.clock.step()


def test_a_step_alone_takes_its_time() -> None:
    ranks = Ranks()
    ranks.task(1, (0, 1), 333 * MS + 7)
    ranks.run()
    assert (ranks.started, ranks.ended) == ({1: 0}, {1: [333 * MS + 7]})


def test_rows_alone_are_iterated_without_a_pause() -> None:
    ranks = Ranks()
    ranks.member(1, 30)
    ranks.run()
    assert ranks.tokens[1] == [ITERATION_NS * number for number in range(1, 31)]
    assert ranks.finished == {1: 30 * ITERATION_NS}


def test_a_row_beside_a_long_step_waits_for_three_quanta_at_most() -> None:
    ranks = Ranks()
    ranks.member(1, 100)
    ranks.run(195 * MS)
    ranks.task(2, (0, 1), 3000 * MS)
    ranks.run()
    gaps = [stop - start for start, stop in pairwise(ranks.tokens[1])]
    assert max(gaps) <= ITERATION_NS + 3 * QUANTUM_NS
    assert sum(gap > ITERATION_NS for gap in gaps) > 20, "the step was not beside it"
    # Nothing is lost: both together take the time of both.
    assert max(ranks.ended[2][0], ranks.finished[1]) == 3000 * MS + 100 * ITERATION_NS


def test_groups_that_share_cores_slow_each_other() -> None:
    ranks = Ranks(4, cores=2)
    pair, member = (
        ranks.task(1, (0, 1), 300 * MS),
        SimulatedMember(sequence=2, context=1, tokens=10),
    )
    member.ranks = (2,)
    ranks.gang.join(member)
    ranks.run()
    # Three ranks on two cores: the row's ten iterations take half as long again, and the pair loses
    # a third of its speed for so long.
    assert ranks.finished[2] == pytest.approx(15 * ITERATION_NS, abs=100)
    assert ranks.ended[1][0] == pytest.approx(350 * MS, abs=100)
    assert pair.slowdown_ns == ranks.ended[1][0] - 300 * MS


def test_an_urgent_step_is_computed_inside_a_long_one() -> None:
    ranks = Ranks()
    ranks.task(1, (0, 1), 2000 * MS)
    ranks.run(500 * MS)
    ranks.task(2, (0,), 20 * MS, high_priority=True)
    ranks.run()
    waited_ns = ranks.started[2] - 500 * MS
    assert waited_ns <= 3 * QUANTUM_NS
    assert ranks.ended[2] == [ranks.started[2] + 20 * MS]
    assert ranks.ended[1] == [2020 * MS]


def test_a_step_that_nobody_wants_ends_early_or_never_begins() -> None:
    ranks = Ranks()
    running, waiting = ranks.task(1, (0, 1), 2000 * MS), ranks.task(2, (0,), 500 * MS)
    ranks.run(300 * MS)
    ranks.gang.cancel_step(waiting)
    ranks.gang.cancel_step(running)
    ranks.run()
    assert [len(ends) for ends in ranks.ended.values()] == [1, 1]
    assert ranks.ended[1][0] <= 300 * MS + 3 * QUANTUM_NS
    assert 2 not in ranks.started


@pytest.mark.parametrize("seed", range(60))
def test_in_random_worlds_everything_ends_once(seed: int) -> None:
    """Steps, decoding and piggybacked sequences come and are cancelled at any time."""
    chance = random.Random(seed)
    ranks = Ranks(instances := chance.randint(1, 4))
    tasks: dict[int, SimulatedStep] = {}
    batch_members: dict[int, SimulatedMember] = {}
    for number in range(40):
        ranks.run(ranks.clock.now_ns + chance.choice([0, MS, 40 * MS, 400 * MS]))
        kind = chance.random()
        if kind < 0.35:
            members = tuple(sorted(chance.sample(range(instances), chance.randint(1, instances))))
            work_ns = chance.choice([1, YIELD_POINT_NS, 30 * MS, 700 * MS])
            tasks[number] = ranks.task(
                number, members, work_ns, high_priority=chance.random() < 0.3
            )
        elif kind < 0.75:
            member = SimulatedMember(sequence=number, context=1, tokens=chance.randint(1, 30))
            if chance.random() < 0.5:
                member.prompt, member.master = chance.randint(1, 90), chance.randrange(instances)
                member.tokens -= 1
            batch_members[number] = member
            ranks.gang.piggyback(member, 48)
        elif tasks and chance.random() < 0.4:
            ranks.gang.cancel_step(tasks[chance.choice(list(tasks))])
        elif batch_members:
            victim = chance.choice(list(batch_members))
            ranks.gang.leave(victim, lambda victim=victim: ranks.left.append(victim))
    ranks.run()
    assert dict.fromkeys(tasks, 1) == {rank: len(ranks.ended[rank]) for rank in ranks.ended}
    assert len(ranks.gang) == 0
    for number, member in batch_members.items():
        sampled = len(ranks.tokens.get(number, ()))
        whole = member.tokens + (member.prompt > 0)
        assert sampled == whole or number in ranks.left, f"row {number} was lost"
        assert sampled <= whole
        assert (number in ranks.finished) == (sampled == whole and member.tokens > 0)


# --- in the simulator ------------------------------------------------------------------------


def elastic(**options: int) -> ClusterModel:
    pair = cluster(instances=3, decode=3, step=STEP, regime=LINE, **options)
    return ClusterModel(**{**vars(pair), "prefill": pair.decode})


def crowd() -> list[Arrival]:
    chance = random.Random(5)
    return [
        Arrival(
            at_ns=int(number * 40 * MS * chance.random()),
            prompt_tokens=chance.randint(1, 400),
            output_tokens=chance.randint(1, 20),
            max_tokens=20,
        )
        for number in range(40)
    ]


def test_an_elastic_gang_prefills_and_decodes() -> None:
    arrivals = sorted(crowd(), key=lambda arrival: arrival.at_ns)
    simulator = Simulator(SingleGroupScheduler(sp=3), elastic(quantum_ns=QUANTUM_NS), arrivals)
    found = simulator.run()
    simulator.gangs.check_idle()
    assert not any(outcome.error for outcome in found.outcomes)
    assert [len(outcome.token_ns) for outcome in found.outcomes] == [
        arrival.output_tokens for arrival in arrivals
    ]
    assert found.decoded == sum(arrival.output_tokens - 1 for arrival in arrivals)


def test_requests_are_recomputed_after_their_elastic_gang_dies() -> None:
    faults = [
        GangFault(at_ns=900 * MS, role="elastic"),
        GangFault(at_ns=1500 * MS, role="elastic", up=True),
    ]
    arrivals = sorted(crowd(), key=lambda arrival: arrival.at_ns)
    simulator = Simulator(
        SingleGroupScheduler(sp=2),
        elastic(quantum_ns=QUANTUM_NS),
        arrivals,
        faults=faults,
        abandoned=[Abandoned(at_ns=1700 * MS, request=20)],
    )
    found = simulator.run()
    simulator.gangs.check_idle()
    assert {outcome.error for outcome in found.outcomes} <= {"", "Cancelled"}
    assert any(outcome.sequences == 2 for outcome in found.outcomes)
    for outcome in found.outcomes:
        if not outcome.error:
            assert len(outcome.token_ns) == outcome.arrival.output_tokens


@pytest.mark.parametrize(
    ("policy", "reuse"),
    [("loongserve", False), ("context_parallel", True), ("chunked_prefill", False)],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_runs_of_grants_and_quanta_change_nothing(
    policy: str, reuse: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every decision and every token comes at the time of single grants and quanta."""
    model, rng = elastic_cluster(elastic=True, quantum_ms=20), random.Random(seed)
    at_ns = 0
    arrivals = []
    for _ in range(40):
        at_ns += round(rng.expovariate(4.0) * 1e9)
        long = rng.random() < 0.3
        prompt = rng.randint(20_000, 120_000) if long else rng.randint(16, 4_000)
        answer = rng.randint(1, 400)
        arrivals.append(
            Arrival(at_ns=at_ns, prompt_tokens=prompt, output_tokens=answer, max_tokens=400)
        )
    gone = [
        Abandoned(at_ns=arrivals[index].at_ns + 700_000_000, request=index + 1)
        for index in range(3, 40, 7)
    ]
    faults = [
        GangFault(at_ns=at_ns // 2, role="elastic"),
        GangFault(at_ns=at_ns // 2 + 500_000_000, role="elastic", up=True),
    ]
    settings = ReuseSettings(enabled=True, max_share=0.5) if reuse else None

    def run() -> tuple[list[str], list[list[int]], int]:
        rounds: list[str] = []

        def observe(now_ns: int, events: object, commands: object) -> None:
            rounds.append(f"{now_ns} {events} {commands}")

        scheduler = scheduler_of(model, policy, options_of(policy), settings)
        simulator = Simulator(
            scheduler, model, arrivals, faults=faults, abandoned=gone, observer=observe
        )
        with monkeypatch.context() as patched:
            jumps = 0
            with_chunks = IterationCost.with_chunks

            def counted(*args: Any) -> Jump:
                nonlocal jumps
                jumps += 1
                return with_chunks(*args)

            patched.setattr(IterationCost, "with_chunks", counted)
            found = simulator.run()
        return rounds, [outcome.token_ns for outcome in found.outcomes], jumps

    together = run()
    # Ranks whose every token is wanted execute grants and quanta one by one.
    watched = partial(SequencedRanks, sampled=lambda _: None)
    monkeypatch.setattr(decode_gang, "SequencedRanks", watched)
    single = run()
    assert together[:2] == single[:2]
    assert together[2] < single[2] / 2, "hardly any iterations were run together"
