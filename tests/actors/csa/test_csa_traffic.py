"""Bytes and messages of sparse attention, counted at the sender."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from csa_cases import DIM, CsaCase, on_ranks
from rank_world import RankWorld
from torch import Tensor
from trace_slices import crossings, rank_trace

from csps.actors.comm.mesh import BegunExchange, Mesh, Tag
from csps.actors.timing.timeline import TRANSFERS, PhaseTimeline, StepClock
from csps.protocols.attention.csa import ALL_QUERIES, CsaPlan, LayerGroup, Ratios, squaring

SPT, HEADS, KV_HEADS, WINDOW = 64, 8, 4, 4
FP64 = 8


def two_servers(drop_ratios: Ratios, *, micro: int = 1, levels: int = 3) -> CsaCase:
    group = LayerGroup(first=0, stop=3, drop_ratios=drop_ratios, micro_partitions=(micro,) * levels)
    plan = CsaPlan(
        locations=("0-0-0", "0-0-1", "0-1-0", "0-1-1"),
        levels=levels,
        layer_groups=(group,),
        importance_window=WINDOW,
        sinks=0,
        tail=0,
    )
    bounds = tuple(range(0, 4 * SPT + 1, SPT))
    return CsaCase(
        plan=plan, lengths=(4 * SPT,), bounds=bounds, heads=HEADS, kv_heads=KV_HEADS, layers=3
    )


def sent(world: RankWorld, case: CsaCase) -> list[list[int]]:
    """Return the bytes from member to member over both layers."""
    before = [list(mesh.bytes_sent) for mesh in world.meshes]
    on_ranks(world, case)
    return [
        [now - then for now, then in zip(mesh.bytes_sent, old, strict=True)][: case.members]
        for mesh, old in zip(world.meshes[: case.members], before, strict=False)
    ]


def between_servers(traffic: list[list[int]]) -> tuple[int, int]:
    """Return the bytes from the first server to the second, and back."""
    there = sum(traffic[a][b] for a in (0, 1) for b in (2, 3))
    back = sum(traffic[a][b] for a in (2, 3) for b in (0, 1))
    return there, back


QUERIES = SPT * HEADS * DIM * FP64
KEYS = 2 * SPT * KV_HEADS * DIM * FP64
OUTPUTS = SPT * HEADS * (DIM + 1) * FP64


def test_exact_sparse_attention_sends_keys_one_way_and_queries_the_other(
    world: RankWorld,
) -> None:
    """Each SPT sends its data for the half of the heads that the other server owns."""
    there, back = between_servers(sent(world, two_servers(())))
    assert there == 2 * (2 * KEYS / 2 + 2 * OUTPUTS / 2)
    assert back == 2 * (2 * QUERIES / 2)


def test_dropping_shrinks_every_message_by_what_it_drops(world: RankWorld) -> None:
    """The second layer drops. In the first, the last member sends its window of queries, and all
    members send all others the LSEs over their keys."""
    there, back = between_servers(sent(world, two_servers(((0.5,), (0.75,)))))
    queries, lses = 2 * WINDOW * HEADS * DIM * FP64, 4 * WINDOW * HEADS * FP64
    assert there == (1 + 0.25) * (KEYS + OUTPUTS) + lses
    assert back == (1 + 0.25) * QUERIES + queries + lses


def test_bytes_fall_with_the_coverage(world: RankWorld) -> None:
    """Counting costs each member one small message to each other, whatever it covers."""
    counts_bytes = 4 * KV_HEADS * 2
    totals, exact = [], sum(map(sum, sent(world, two_servers(()))))
    for share in (0.999, 0.9, 0.6, 0.2, 0.01):
        case = two_servers(())
        (group,) = case.plan.layer_groups
        covering = replace(group, coverages=squaring(share, 3))
        traffic = sent(world, case.with_plan(layer_groups=(covering,)))
        totals.append(sum(map(sum, traffic)))
    lses, queries = 4 * 3 * WINDOW * HEADS * FP64, 3 * WINDOW * HEADS * DIM * FP64
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(totals)
    assert totals[0] <= exact + lses + queries + 4 * 3 * counts_bytes
    # Of 64 tokens, the best one alone has more than a hundredth of the attention.
    least = two_servers(((1 - 1 / 64,), (1 - 1 / 64,)))
    assert totals[-1] == sum(map(sum, sent(world, least))) + 4 * 3 * counts_bytes


def test_cutting_into_micro_partitions_sends_nothing_more(world: RankWorld) -> None:
    ratios = ((0.5,), (0.75,))
    assert sent(world, two_servers(ratios)) == sent(world, two_servers(ratios, micro=5))


def test_one_level_sends_what_exact_attention_over_heads_sends(world: RankWorld) -> None:
    """Plain SP-NTP sends a quarter of the heads to each other member and back, and the LSEs."""
    traffic = sent(world, two_servers((), levels=1))
    quarter = (QUERIES + OUTPUTS + KEYS) / 4
    expected = [[0 if a == b else 2 * quarter for b in range(4)] for a in range(4)]
    assert traffic == expected


@pytest.mark.parametrize("pipelined", [False, True])
def test_the_timeline_shows_every_phase_by_layer_level_and_micro_partition(
    gloo_world: RankWorld, pipelined: bool
) -> None:
    case = two_servers(((0.5,), (0.75,)), micro=2).with_plan(pipelined=pipelined)
    clocks = {rank: StepClock(timeline=PhaseTimeline(on=True)) for rank in range(case.members)}
    on_ranks(gloo_world, case, clocks)
    cuts = range(2) if pipelined else range(1)
    for clock in clocks.values():
        seen = {(e.name, e.layer, e.level, e.micro) for e in clock.timeline.events}
        for layer in range(2):
            assert {("attention", layer, 1, micro) for micro in cuts} <= seen
            for level in (2, 3):
                for micro in cuts:
                    for phase in ("attention", "second all-to-all", "merge"):
                        assert (phase, layer, level, micro) in seen
                    # Without overlap all levels are one exchange.
                    sent = (level, micro) if pipelined else (None, None)
                    assert ("first all-to-all", layer, *sent) in seen
        assert ("importance", 0, None, None) in seen
        assert ("select", 1, None, None) in seen
        assert all(event.start_ns <= event.end_ns for event in clock.timeline.events)
        assert clock.exchange_s > 0
        assert (clock.hidden == 0) or pipelined


def test_every_exchange_of_a_pipelined_step_can_be_drawn(gloo_world: RankWorld) -> None:
    """Exchanges of a kind are under way together, and end one after the other."""
    case = two_servers(((0.5,), (0.75,)), micro=3)
    clocks = {rank: StepClock(timeline=PhaseTimeline(on=True)) for rank in range(case.members)}
    on_ranks(gloo_world, case, clocks)
    for clock in clocks.values():
        trace = rank_trace(clock.timeline.events)
        assert crossings(trace) == []
        assert sum(entry["ph"] == "X" for entry in trace) == len(clock.timeline.events)


def first_messages(
    world: RankWorld, case: CsaCase, patch: pytest.MonkeyPatch
) -> dict[int, list[Counter[int]]]:
    """Count the messages to each peer in each exchange of the first all-to-alls, by sender."""
    exchanges: dict[int, list[Counter[int]]] = defaultdict(list)
    start = Mesh.start_exchange

    def counted(
        mesh: Mesh,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: Tag,
    ) -> BegunExchange:
        if tag is Tag.FIRST_EXCHANGE:
            messages = Counter(peer for peer, tensor in sends if tensor.numel())
            exchanges[mesh.rank].append(messages)
        return start(mesh, sends, recvs, tag)

    patch.setattr(Mesh, "start_exchange", counted)
    on_ranks(world, case)
    return exchanges


@pytest.mark.parametrize("pipelined", [False, True])
def test_an_exchange_is_one_message_per_destination(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, pipelined: bool
) -> None:
    """Cover exchanges with several levels, prompts and blocks of heads."""
    case = two_servers(((0.0, 0.5, 0.5, 0.75), (0.5, 0.75, 0.75, 0.75)), micro=2)
    case = replace(case.with_plan(pipelined=pipelined), lengths=(100, 156))
    for exchanges in first_messages(world, case, monkeypatch).values():
        assert all(count == 1 for messages in exchanges for count in messages.values())
        # Pipelined, by level: the first queries with the first keys, other keys, other queries.
        assert len(exchanges) == 2 * (2 * 3 if pipelined else 1)


@pytest.mark.parametrize("window", [ALL_QUERIES, WINDOW])
@pytest.mark.parametrize("pipelined", [False, True])
def test_computing_is_in_one_phase_at_a_time(
    world: RankWorld, pipelined: bool, window: int
) -> None:
    """Sums over phases count neither another phase nor a high-priority step twice."""
    case = two_servers(((0.5,), (0.75,)), micro=3)
    case = case.with_plan(pipelined=pipelined, importance_window=window)
    clocks = {rank: _PointClock(timeline=PhaseTimeline(on=True)) for rank in range(case.members)}
    on_ranks(world, case, clocks, part=lambda rank, number: clocks[rank].pass_point())
    for clock in clocks.values():
        computing = [e for e in clock.timeline.events if e.name not in TRANSFERS]
        spans = sorted((e.start_ns, e.end_ns) for e in computing)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert clock.points_ns, "no high-priority step could have run"
        assert not any(begin < now < end for now in clock.points_ns for begin, end in spans)
        assert {e.layer for e in computing if e.name == "importance"} == {0}


@dataclass
class _PointClock(StepClock):
    """Records when a member passed a point, which it must not while its time counts as waiting."""

    counting: int = 0
    points_ns: list[int] = field(default_factory=list)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self.counting += 1
        with super().waiting():
            yield
        self.counting -= 1

    def pass_point(self) -> None:
        assert not self.counting
        self.points_ns.append(time.time_ns())


def test_levels_and_second_all_to_alls_are_in_order(gloo_world: RankWorld) -> None:
    case = two_servers(((0.5,), (0.75,)), micro=3)
    clocks = {rank: StepClock(timeline=PhaseTimeline(on=True)) for rank in range(case.members)}
    on_ranks(gloo_world, case, clocks)
    for clock in clocks.values():
        returns = [e for e in clock.timeline.events if e.name == "second all-to-all"]
        returns.sort(key=lambda event: event.start_ns)
        order = [(event.layer, event.level, event.micro) for event in returns]
        assert order == sorted(order)
        attention = [
            (e.layer, e.level)
            for e in clock.timeline.events
            if e.name == "attention" and e.level != 1  # which fills the gaps
        ]
        assert attention == sorted(attention)
