"""The policy `loongserve` as the scheduler carries it out, in the simulator."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import parse_cluster
from csps.loadgen.simulator.kernel import Abandoned, GangFault, Simulator
from csps.loadgen.simulator.kernel import SimulationResult as Run
from csps.loadgen.simulator.requests import Arrival
from csps.loadgen.simulator.simulate import scheduler_of
from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.step_messages import MoveSequence, PrefillStep
from csps.services.scheduling.events.commands import AnyCommand, Reserve, RunStep, ToGang
from csps.services.scheduling.events.events import AnyEvent, index_of
from csps.services.scheduling.events.limits import ReuseSettings
from csps.services.scheduling.policies.registry import check_pairing, make_policy

MS = 1_000_000
slow = pytest.mark.slow


def cluster(
    slots: int = 20_000,
    instances: int = 4,
    exchange_ms: int = 0,
    decode: dict[int, list[float]] | None = None,
    **more: object,
) -> ClusterModel:
    """A gang that prefills 10 tokens a millisecond and an instance, and decodes in 10 ms, and
    `exchange_ms` for every other instance of a group, or as `decode` says."""
    data = {
        "servers": [
            {"instances": instances, "permissions": ["prefill", "decode"], "kv_slots": slots}
        ],
        "latency": {
            "steps": {
                sp: [2e-3 * sp, 1e-4 / sp, 2e-8 / sp, 1e-8 / sp] for sp in range(1, instances + 1)
            },
            "decode": decode
            or {
                sp: [1e-2 + exchange_ms * 1e-3 * (sp - 1), 0.0, 0.0]
                for sp in range(1, instances + 1)
            },
        },
        **more,
    }
    return parse_cluster(data, name="small")


class Watched:
    """A run whose commands are recorded, and whose books are checked in every turn."""

    def __init__(
        self,
        arrivals: Sequence[Arrival],
        model: ClusterModel | None = None,
        abandoned: Sequence[Abandoned] = (),
        faults: Sequence[GangFault] = (),
        reuse: ReuseSettings | None = None,
        **options: Any,
    ) -> None:
        self.commands: list[tuple[int, AnyCommand]] = []
        self.turns: list[tuple[tuple[AnyEvent, ...], tuple[AnyCommand, ...]]] = []
        self.held: list[float] = []
        """After each turn: the share of slots that are taken."""
        model = model or cluster()
        self._scheduler = scheduler_of(model, "loongserve", options, reuse)
        simulator = Simulator(
            self._scheduler,
            model,
            arrivals,
            abandoned=abandoned,
            faults=faults,
            observer=self._see,
        )
        self.run: Run = simulator.run()
        simulator.gangs.check_idle()
        self._scheduler.check_invariants()

    def _see(self, now_ns: int, events: Sequence[AnyEvent], commands: Sequence[AnyCommand]) -> None:
        self._scheduler.check_invariants()
        self.commands += [(now_ns, command) for command in commands]
        self.turns.append((tuple(events), tuple(commands)))
        self.held.append(self._scheduler.counts.decode_kv)

    @property
    def reserved(self) -> list[Reserve]:
        return [command for _, command in self.commands if isinstance(command, Reserve)]

    @property
    def steps(self) -> list[PrefillStep]:
        return [command.step for _, command in self.commands if isinstance(command, RunStep)]

    @property
    def moves(self) -> list[MoveSequence]:
        sent = [command.message for _, command in self.commands if isinstance(command, ToGang)]
        return [message for message in sent if isinstance(message, MoveSequence)]

    def instances(self, request: int) -> list[int]:
        """That decode a request."""
        (found,) = [command for command in self.reserved if command.request_id == request]
        named = {
            found.message.master,
            *(kv_slice.instance for kv_slice in (*found.message.slices, *found.message.answer)),
        }
        return sorted(map(index_of, named))


def arrival(at_ms: int, prompt: int, output: int, most: int | None = None) -> Arrival:
    return Arrival(
        at_ns=at_ms * MS, prompt_tokens=prompt, output_tokens=output, max_tokens=most or output
    )


def random_arrivals(seed: int, count: int, slots: int, gap_ms: int = 60) -> list[Arrival]:
    """Of all sizes up to what the gang holds; half of the answers are as long as they may be."""
    rng = random.Random(seed)
    now, found = 0, []
    for _ in range(count):
        now += round(rng.expovariate(1 / gap_ms))
        prompt = min(slots * 3, round(rng.lognormvariate(6.5, 1.6)) + 1)
        most = rng.randint(1, min(200, slots))
        output = most if rng.random() < 0.5 else rng.randint(1, most)
        found.append(arrival(now, prompt, output, most))
    return found


def test_a_long_prompt_is_prefilled_by_all_and_decoded_by_one() -> None:
    """Proactive scale-down: without a message, since KV comes by everyone in a ring."""
    watched = Watched([arrival(0, 4000, 20)])
    (step,) = watched.steps
    assert len(step.group) == 4
    assert step.strategy == "ring_kv"
    assert watched.instances(1) == [watched.instances(1)[0]]


def test_two_prompts_of_different_lengths_have_groups_of_their_own() -> None:
    watched = Watched([arrival(0, 4000, 20), arrival(0, 100, 20)], tipping_tokens=9000)
    long, short = sorted(watched.steps, key=lambda step: -step.bounds[-1])
    assert len(long.group) + len(short.group) == 4
    assert set(long.group).isdisjoint(short.group)


def test_who_decodes_is_not_held_up_by_a_prefill_elsewhere() -> None:
    """Groups iterate apart."""
    watched = Watched([arrival(0, 100, 200), arrival(500, 12_000, 2)])
    first, second = watched.run.outcomes
    assert second.started_ns < first.ended_ns
    gaps = [after - before for before, after in pairwise(first.token_ns)]
    assert max(gaps) < 25 * MS


def test_an_answer_grows_over_what_its_prompt_has_left() -> None:
    """600 tokens where 100, 200 and 400 slots are free; and the answer goes where there are more:
    nothing is evicted, and no group asked to hold it alone."""
    small = cluster(slots=400, instances=3)
    watched = Watched([arrival(0, 600, 500)], small)
    assert watched.instances(1) == [0, 1, 2]
    assert watched.run.outcomes[0].sequences == 1


def test_many_rows_have_several_masters() -> None:
    watched = Watched([arrival(0, 20, 50) for _ in range(12)], scale_up_batch=3, tipping_tokens=900)
    masters = [index_of(reserve.message.master) for reserve in watched.reserved]
    counts = sorted(masters.count(master) for master in set(masters))
    assert counts[-1] - counts[0] <= 1
    assert len(counts) > 1


@pytest.mark.parametrize("migrate", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=slow) for seed in (3, 4, 5))])
def test_nothing_is_evicted_and_nobody_is_passed_for_ever(seed: int, migrate: bool) -> None:
    """Whatever comes. Slots are checked in every turn, by the scheduler's books and by the ranks'
    own."""
    slots = (300, 2_000, 20_000)[seed % 3]
    arrivals = random_arrivals(seed, 60, slots)
    rounds = 2
    model = cluster(
        slots=slots,
        links={"inside": {"gbps": 8, "latency_us": 10}},
        kv={"bytes_per_token": 1000, "layers": 4},
    )
    watched = Watched(arrivals, model, max_num_ooe=rounds, migrate=migrate)
    moved = bool(watched.moves)
    if not migrate or slots > 300:  # where there are few, little is gained by it
        assert moved == migrate
    assert all(outcome.sequences == 1 and not outcome.error for outcome in watched.run.outcomes)
    passed = dict.fromkeys(range(1, len(arrivals) + 1), 0)
    waiting: dict[int, None] = {}
    for events, commands in watched.turns:
        waiting.update(
            (event.request_id, None) for event in events if hasattr(event, "prompt_tokens")
        )
        started = [command.request_id for command in commands if isinstance(command, Reserve)]
        for request_id in started:
            del waiting[request_id]
        for request in waiting:
            passed[request] += bool(started) and request < max(started)
    assert max(passed.values()) <= rounds


LINKS = {
    "links": {"inside": {"gbps": 0.2, "latency_us": 10}},
    "kv": {"bytes_per_token": 1000, "layers": 4},
}
"""KV of a token takes 40 microseconds: moves take their time."""


FAST = {
    "links": {"inside": {"gbps": 8, "latency_us": 10}},
    "kv": {"bytes_per_token": 1000, "layers": 4},
}
"""A microsecond."""


def test_a_group_shrinks_when_there_is_room_on_fewer_instances() -> None:
    """The last request finds 500 slots on one instance and is stored on both. When those beside it
    have ended, all of it goes to one, and its iterations take 10 ms in place of 30. The first one
    tells how long answers take."""
    two = cluster(slots=2_000, instances=2, exchange_ms=20, **FAST)
    together = [arrival(7000, 1500, 100), arrival(7000, 1500, 100), arrival(7000, 500, 300)]
    arrivals = [arrival(0, 10, 600), *together]
    watched = Watched(arrivals, two, tipping_tokens=9000)
    assert watched.instances(4) == [0, 1]
    (move,) = watched.moves
    assert len({kv_slice.instance for kv_slice in (*move.after.slices, *move.after.answer)}) == 1
    token_ns = watched.run.outcomes[3].token_ns
    gaps = [after - before for before, after in pairwise(token_ns)]
    # While it is on two, its queries take the link besides.
    assert (max(gaps[10:20]), max(gaps[-20:])) == (pytest.approx(30 * MS, rel=0.005), 10 * MS)
    retain = Watched(arrivals, two, tipping_tokens=9000, migrate=False)
    assert not retain.moves


def test_instances_without_a_batch_take_what_ends_in_time() -> None:
    """The first prompt is past the tipping point and is faster on one instance than on two. On the
    other one, a prompt that ends no later starts with it, and a longer one does not (App. A)."""
    two = cluster(instances=2)
    for length, together in ((25, True), (60, False)):
        watched = Watched([arrival(0, 30, 5), arrival(0, length, 5)], two, tipping_tokens=20)
        begun = [
            (at, command.step.group)
            for at, command in watched.commands
            if isinstance(command, RunStep)
        ]
        (first_ns, first), (second_ns, second) = begun
        assert len(first) == len(second) == 1
        assert (second_ns == first_ns and first != second) is together


def test_groups_become_one_for_a_prompt_that_waits() -> None:
    """Whose instance is free then, and who decoded there goes on beside the others."""
    two = cluster(slots=4_000, instances=2, **FAST)
    arrivals = [arrival(0, 300, 300), arrival(100, 300, 300), arrival(300, 3_000, 5)]
    watched = Watched(arrivals, two)
    (move,) = watched.moves
    (elsewhere,) = {kv_slice.instance for kv_slice in (*move.after.slices, *move.after.answer)}
    first, second, third = (reserve.message for reserve in watched.reserved)
    assert first.master != second.master == elsewhere or second.master != first.master == elsewhere
    step = watched.steps[-1]
    assert third.sequence_id in [chunk.sequence_id for chunk in step.chunks]
    assert elsewhere not in step.group
    assert all(outcome.sequences == 1 for outcome in watched.run.outcomes)


@pytest.mark.parametrize(("most", "group"), [(900, 4), (600, 1)])
def test_who_decodes_for_longer_than_anybody_knew_gives_way(most: int, group: int) -> None:
    """Nobody has told how long answers take, when four are decoded on an instance each, whose
    promised slots leave no room for any to move. Another prompt needs the slots of all, or of one:
    it starts long before they end, and so soon that they lose little."""
    arrivals = [*(arrival(50 * n, 20, most) for n in range(4)), arrival(200, 300, 20)]
    watched = Watched(arrivals, cluster(slots=1_000, **FAST), migrate=group > 1)
    *talking, late = watched.run.outcomes
    assert [len(step.group) for step in watched.steps] == [1] * 4 + [group]
    assert late.started_ns < 1500 * MS
    assert min(outcome.ended_ns for outcome in talking) > 6000 * MS
    assert all(outcome.sequences == 1 for outcome in watched.run.outcomes)


def test_an_instance_that_is_freed_counts_once_when_others_are_emptied_as_well() -> None:
    """The third has least KV, which goes to the fourth. The first has 2,570 tokens, which move in
    103 ms: less than two instances save one of them, 193 ms, and more than three save two, 63."""
    decoded = [(0, 2_500, 600), (600, 100, 3_500), (700, 50, 300), (750, 60, 300)]
    arrivals = [arrival(*numbers) for numbers in (*decoded, (800, 3_000, 5))]
    watched = Watched(arrivals, cluster(slots=10_000, **LINKS))
    first, second, third, fourth = (reserve.message.master for reserve in watched.reserved[:4])
    moves = {move.sequence_id: move.after.master for move in watched.moves}
    expected = {
        watched.reserved[0].message.sequence_id: second,
        watched.reserved[2].message.sequence_id: fourth,
    }
    assert moves == expected
    assert set(watched.steps[-1].group) == {first, third}


@pytest.mark.parametrize("given", [False, True])
def test_another_instance_samples_for_some_when_it_becomes_idle(given: bool) -> None:
    """Twelve rows on two instances, of which those of one end early: three of the six others, which
    are too many for a master, are sampled there then, by a threshold that was given or because two
    decode four rows in 13 ms, and one in 14. Their KV stays."""
    two = cluster(instances=2, **FAST)
    options = {"tipping_tokens": 900, "max_batch": 12}
    if given:
        options["scale_up_batch"] = 3
    else:
        decode = {1: [1e-2, 0.0, 1e-3], 2: [1.3e-2, 0.0, 0.0]}
        two = cluster(instances=2, decode=decode, **FAST)
    masters = [
        reserve.message.master
        for reserve in Watched([arrival(0, 20, 9)] * 12, two, **options).reserved
    ]
    ends_early = masters[0]
    arrivals = [arrival(0, 20, 20 if master == ends_early else 200) for master in masters]
    watched = Watched(arrivals, two, **options)
    moves = watched.moves
    reserved = {reserve.message.sequence_id: reserve for reserve in watched.reserved}
    assert len(moves) == 3
    for move in moves:
        before = reserved[move.sequence_id].message
        assert before.master != move.after.master == ends_early
        assert move.after.slices == before.slices
        staying = [kv_slice for kv_slice in move.after.answer if kv_slice.instance == before.master]
        assert sum(kv_slice.tokens for kv_slice in staying) >= 19, "what was generated is not moved"
    assert all(outcome.sequences == 1 for outcome in watched.run.outcomes)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=slow) for seed in (2, 3, 4, 5))])
def test_gangs_that_regroup_all_the_time_lose_nothing(seed: int) -> None:
    """Books and ranks are checked in every turn. Few rows to a master, and groups that are better
    off apart."""
    arrivals = random_arrivals(seed, 80, 1_500, gap_ms=25)
    gone = [
        Abandoned(at_ns=arrived.at_ns + 300 * MS, request=n)
        for n, arrived in enumerate(arrivals, 1)
    ]
    model = cluster(slots=1_500, exchange_ms=10, **(FAST, LINKS)[seed % 2])
    options = {"scale_up_batch": 2, "decode_iterations": 1}
    watched = Watched(arrivals, model, gone[:: 3 + seed % 3], **options)
    assert all(outcome.sequences == 1 for outcome in watched.run.outcomes if not outcome.error)
    assert len(watched.moves) > 5


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=slow) for seed in (1, 2, 3))])
def test_what_moves_may_cost_retained_kv_that_a_plan_goes_on_from(seed: int) -> None:
    """Both are decided in one round, and slots are found by giving up what is in nobody's use."""
    rng = random.Random(seed)
    arrivals = [
        turn(40 * n, rng.choice([200, 500, 900]), rng.randint(1, 120), rng.randint(1, 4))
        for n in range(60)
    ]
    model = cluster(slots=1_500, instances=3, exchange_ms=10, **FAST)
    watched = Watched(arrivals, model, reuse=RETAINS, decode_iterations=1)
    assert all(not outcome.error for outcome in watched.run.outcomes)


@pytest.mark.parametrize("after_ms", [40, 90, 300])
@pytest.mark.parametrize("migrate", [False, True])
def test_cancelling_frees_everything(migrate: bool, after_ms: int) -> None:
    """During a prefill and its scale-down, while KV moves, and while others are decoded."""
    arrivals = random_arrivals(9, 60, 4_000)
    gone = [
        Abandoned(at_ns=arrived.at_ns + after_ms * MS, request=n)
        for n, arrived in enumerate(arrivals, 1)
    ]
    model = cluster(slots=4_000, **LINKS)
    watched = Watched(arrivals, model, gone[::2], migrate=migrate)
    assert sum(not outcome.error for outcome in watched.run.outcomes) >= 30
    assert bool(watched.moves) == migrate


@pytest.mark.parametrize("seed", [2, 5])
def test_what_ends_while_messages_about_it_are_on_their_way_is_freed(seed: int) -> None:
    """Reservations, moves and their ends: when one more request comes, nothing else is held."""
    arrivals = [*random_arrivals(seed, 60, 4_000), arrival(60_000, 10, 5)]
    gone = [
        Abandoned(at_ns=arrived.at_ns + 200 * MS, request=n)
        for n, arrived in enumerate(arrivals[:-1], 1)
    ]
    model = replace(cluster(slots=4_000, **LINKS), notice_ns=15 * MS)
    watched = Watched(arrivals, model, gone[::2])
    assert bool(watched.moves)
    last = watched.reserved[-1]
    assert last.request_id == len(arrivals)
    turn = next(n for n, (_, commands) in enumerate(watched.turns) if last in commands)
    assert watched.held[turn] == 15 / (4 * 4_000)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=slow) for seed in (2, 3))])
def test_who_is_preempted_may_be_emptied_as_well(seed: int) -> None:
    """Or not, if somebody who is still prefilled is to be decoded there."""
    arrivals = random_arrivals(seed, 150, 2_000, gap_ms=8)
    watched = Watched(arrivals, cluster(slots=4_000, **LINKS))
    assert all(not outcome.error for outcome in watched.run.outcomes)


@pytest.mark.parametrize("at_ms", [200, 700, 1500])
def test_a_gang_that_dies_takes_moves_along(at_ms: int) -> None:
    """All requests go on with their next token on the next gang."""
    faults = [
        GangFault(at_ns=at_ms * MS, role="elastic"),
        GangFault(at_ns=(at_ms + 100) * MS, role="elastic", up=True),
    ]
    arrivals = random_arrivals(9, 60, 4_000)
    watched = Watched(arrivals, cluster(slots=4_000, **LINKS), faults=faults)
    assert all(not outcome.error for outcome in watched.run.outcomes)
    for served, asked in zip(watched.run.outcomes, arrivals, strict=True):
        assert served.generated_tokens == asked.output_tokens


def test_the_same_requests_are_decided_the_same() -> None:
    arrivals = random_arrivals(3, 40, 2_000)
    assert Watched(arrivals).commands == Watched(arrivals).commands


@pytest.mark.parametrize("dop", [1, 2, 4])
def test_static_groups_never_change(dop: int) -> None:
    watched = Watched(random_arrivals(5, 40, 20_000), static_dop=dop, max_batch=1000)
    for step in watched.steps:
        assert len({index_of(instance) // dop for instance in step.group}) == 1
    for reserve in watched.reserved:
        assert len({number // dop for number in watched.instances(reserve.request_id)}) == 1


def test_waiting_for_all_instances_where_that_is_sooner() -> None:
    """App. A: one of two is free for a prompt of 1.4 s there, the other one soon."""
    two = cluster(instances=2)
    warm = [arrival(0, 100, 20), arrival(1_000, 100, 20)]
    line = [*warm, arrival(1_150, 12_000, 2)]
    watched = Watched(line, two, max_delay_s=5)
    assert len(watched.steps[-1].group) == 2
    assert watched.run.outcomes[-1].started_ns >= watched.run.outcomes[1].ended_ns
    assert len(Watched(line, two).steps[-1].group) == 1


def test_its_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_ooe'"):
        make_policy("loongserve", {"max_num_oe": 3})
    with pytest.raises(ConfigError, match="normalised or sum, not sums; did you mean 'sum'"):
        make_policy("loongserve", {"objective": "sums"})
    with pytest.raises(ConfigError, match="option batching must be a word, not 3"):
        make_policy("loongserve", {"batching": 3})
    with pytest.raises(ConfigError, match="loongserve needs an elastic gang"):
        check_pairing("loongserve", "pair")


@pytest.mark.parametrize("options", [{"objective": "sum"}, {"batching": "pruned"}])
def test_both_objectives_and_the_pruned_search_serve(options: dict[str, str]) -> None:
    watched = Watched(random_arrivals(2, 30, 2_000), cluster(slots=2_000), **options)
    assert all(not outcome.error for outcome in watched.run.outcomes)


# --- retained KV -------------------------------------------------------------------------------

RETAINS = ReuseSettings(enabled=True, block_tokens=64)


def turn(at_ms: int, prompt: int, output: int, conversation: int = 0) -> Arrival:
    """One that begins as the other turns of its conversation do."""
    names = tuple(b"%d %d" % (conversation, block) for block in range(prompt // 64))
    return replace(arrival(at_ms, prompt, output), hashes=names)


def test_what_follows_upon_retained_kv_is_computed_where_that_is() -> None:
    watched = Watched([turn(0, 4000, 20), turn(2000, 4100, 20)], reuse=RETAINS)
    first, second = watched.steps
    (chunk,) = second.chunks
    assert (chunk.start, chunk.length) == (3968, 132)
    assert list(map(index_of, second.group)) == watched.instances(1)
    assert len(first.group) == 4


def test_who_decodes_gives_way_to_an_end_only_if_that_gains_more() -> None:
    """Nothing was decoded before, so that nobody knows how long the first one would take: the
    second turn is computed whole, by those that are idle."""
    watched = Watched([turn(0, 400, 2000), turn(1000, 500, 20)], reuse=RETAINS, decode_iterations=1)
    _, second = watched.steps
    assert [chunk.start for chunk in second.chunks] == [0]
    assert set(map(index_of, second.group)).isdisjoint(watched.instances(1))


def test_what_goes_on_passes_nobody_more_often_than_others_may() -> None:
    """The large one finds no slots before the first one has ended, and ends come all the time."""
    ends = [turn(200 * number, 330 + number, 5, 1) for number in range(1, 40)]
    large = arrival(950, 1250, 100)
    arrivals = sorted([arrival(0, 100, 600), *ends, large], key=lambda arrived: arrived.at_ns)
    watched = Watched(arrivals, cluster(slots=1000, instances=2), reuse=RETAINS, max_num_ooe=3)
    number = 1 + arrivals.index(large)
    order = [reserve.request_id for reserve in watched.reserved]
    before = watched.reserved[: order.index(number)]
    assert len([reserve for reserve in before if reserve.request_id > number]) == 3
    assert len([reserve for reserve in before if reserve.cached]) > 3
