"""Yield points of a step: at each point, all members have begun the same exchanges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from small_blocks import blocks_of
from strategy_ranks import LAYERS, Gangs, StrategyRanks, step_of
from test_cancelled_steps import BOUNDS, CASES, LENGTHS
from test_history import STRATEGIES, on_gangs, steps
from torch import Tensor
from uniform_plan import uniform_plan

from csps.actors.attention.base.engine import Engine
from csps.actors.attention.base.group import SpGroup
from csps.actors.attention.base.strategy import Strategy
from csps.actors.attention.base.yield_points import StepPoints, YieldPoints
from csps.actors.attention.choice import strategy_of
from csps.actors.attention.step_points import ModelShape, step_points
from csps.actors.comm.mesh import Mesh, Tag
from csps.protocols.core.placement import KvSlice
from csps.protocols.gang.step_messages import PrefillStep

several = settings(max_examples=examples(6), suppress_health_check=list(HealthCheck))

PASSED_ON = {Tag.RELAYED_ROWS, Tag.SUMS_TO_RELAY, Tag.ROW_SUMS}
"""Tags of data that relay ranks pass on: with gloo as soon as it has arrived, so that both ends may
begin at different points (`YieldPoints.before_pause`)."""

Message = tuple[int, int, Tag]
"""(sender, receiver, tag)."""


class PointLog:
    """Records the last point that each rank had passed when it began its end of each message."""

    def __init__(self, gang: StrategyRanks) -> None:
        self._gang = gang
        self.passed: dict[int, list[int]] = defaultdict(list)
        self.sent: dict[Message, list[int]] = defaultdict(list)
        self.received: dict[Message, list[int]] = defaultdict(list)

    def pass_point(self, rank: int, number: int) -> None:
        self.passed[rank].append(number)

    def check(self, step: PrefillStep) -> None:
        points = self._gang.points(step, 0, self.pass_point)._step_points
        assert points is not None
        for passed in self.passed.values():
            assert all(before <= after for before, after in pairwise(passed))
            assert passed[-1] < points.total
        for message, sent_at in self.sent.items():
            assert len(sent_at) == len(self.received[message])
            passed_on = step.strategy == "sp_tp" and message[2] in PASSED_ON
            if self._gang.engines[0].mesh.in_order or not passed_on:
                assert sent_at == self.received[message], message

    @contextmanager
    def on_meshes(self) -> Iterator[None]:
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for engine in self._gang.engines:
                patch.setattr(engine.mesh, "start_exchange", self._recording(engine.mesh))
            yield

    def _recording(self, mesh: Mesh) -> Callable[..., Any]:
        start = mesh.start_exchange

        def recording(
            sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: Tag
        ) -> Any:
            last = self.passed[mesh.rank][-1]
            for peer, tensor in sends:
                if tensor.numel():
                    self.sent[mesh.rank, peer, tag].append(last)
            for peer, tensor in recvs:
                if tensor.numel():
                    self.received[peer, mesh.rank, tag].append(last)
            return start(sends, recvs, tag)

        return recording


def run(gang: StrategyRanks, step: PrefillStep) -> PointLog:
    log, forwards = PointLog(gang), gang.forwards(step)
    gang.hold_history(step, forwards)
    try:
        with log.on_meshes():
            gang.check(step, gang.run(step, strategy_of, log.pass_point), forwards)
    finally:
        for engine in gang.engines:
            for chunk in step.chunks:
                engine.pool.slots.free_sequence(chunk.sequence_id)
    return log


@pytest.fixture(scope="module", params=["strict", pytest.param("gloo", marks=pytest.mark.slow)])
def gangs(request: pytest.FixtureRequest, gangs: Gangs, gloo_gangs: Gangs) -> Gangs:
    return gangs if request.param == "strict" else gloo_gangs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "members", "tp"), on_gangs((1, 1), (3, 1), (4, 1), (2, 2), rings=((3, 1), (2, 2)))
)
@several
@given(data=st.data())
def test_both_ends_of_a_message_are_begun_between_the_same_points(
    gangs: Gangs, strategy: str, members: int, tp: int, data: st.DataObject
) -> None:
    gang, step = gangs("gqa", members, tp), data.draw(steps(strategy, members))
    with blocks_of(data.draw(st.integers(3, 30))):
        run(gang, step).check(step)


@pytest.mark.parametrize(
    ("strategy", "planned"),
    [
        ("ulysses", False),
        ("levels", True),
        ("sp_tp", True),
        ("sp_tp", False),
        ("sp_tp_flat", True),
        ("sp_tp_flat", False),
    ],
)
def test_the_same_with_members_that_have_no_heads(
    gangs: Gangs, strategy: str, planned: bool
) -> None:
    locations = tuple(f"0-{member // 2}-{member % 2}" for member in range(6))
    plan = uniform_plan(locations, levels=2, layers=LAYERS, micro_partitions=2)
    slices = [KvSlice(5, 0, 9)]
    step = step_of(
        [0, 9, 14, 30, 30, 40, 48],
        [48],
        starts=[9],
        history=[slices],
        strategy=strategy,
        csa=plan if planned else None,
    )
    with blocks_of(4):
        run(gangs("gqa", 6, 1), step).check(step)


@pytest.mark.parametrize("case", [name for name in CASES if "sparse" in name or "csa" in name])
def test_the_same_of_sparse_attention(gangs: Gangs, case: str) -> None:
    strategy, plan = CASES[case]
    gang, step = gangs("gqa", 4, 1), step_of(BOUNDS, LENGTHS, strategy=strategy, csa=plan)
    log = PointLog(gang)
    with blocks_of(4), log.on_meshes():
        gang.run(step, strategy_of, log.pass_point, cancelled=(2,))
        log.check(step)


@pytest.mark.parametrize(
    ("strategy", "members", "tp"),
    [("ulysses", 3, 1), ("gathered_weights", 2, 2), ("ring_kv", 3, 1), ("ring_q", 3, 1)],
)
def test_the_member_with_most_blocks_has_a_point_for_each(
    gangs: Gangs, strategy: str, members: int, tp: int
) -> None:
    gang = gangs("gqa", members, tp)
    bounds = [0, *[20] * (members - 1), 48]
    step = step_of(bounds, [5, 40, 3], strategy=strategy)
    with blocks_of(4):
        passed = run(gang, step).passed[0]
    assert max(map(passed.count, passed)) <= 2, "the last block's, and the end of its phase"


class Stopped(Exception):
    """Raised to stop a step at a point."""


class Stopping:
    """A strategy that all members leave at a given point."""

    def __init__(self, inner: AbstractContextManager[Strategy]) -> None:
        self._inner = inner

    def __enter__(self) -> Strategy:
        return self._inner.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        stopped = kind is Stopped
        self._inner.__exit__(*((None, None, None) if stopped else (kind, error, trace)))
        return stopped


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("members", "tp"), [(3, 1), (2, 2)])
@several
@given(data=st.data())
def test_a_step_may_be_stopped_at_any_point(
    gangs: Gangs, strategy: str, members: int, tp: int, data: st.DataObject
) -> None:
    """The next step receives nothing of the stopped one."""
    gang, step = gangs("gqa", members, tp), data.draw(steps(strategy, members))
    points: dict[int, YieldPoints] = {}

    def make(group: SpGroup, engine: Engine) -> Stopping:
        points[engine.rank] = group.points
        return Stopping(strategy_of(group, engine))

    def stop_at_last(rank: int, number: int) -> None:
        if rank in points and number >= last:
            points[rank].before_pause()
            raise Stopped

    forwards = gang.forwards(step)
    gang.hold_history(step, forwards)
    try:
        with blocks_of(data.draw(st.integers(3, 30))):
            all_points = gang.points(step, 0, stop_at_last)._step_points
            assert all_points is not None
            last = data.draw(st.integers(1, all_points.total))
            gang.run(step, make, stop_at_last)
            gang.check(step, gang.run(step, strategy_of), forwards)
    finally:
        for engine in gang.engines:
            for chunk in step.chunks:
                engine.pool.slots.free_sequence(chunk.sequence_id)


def test_points_follow_from_the_step_alone() -> None:
    shape = ModelShape(layers=3, heads=4, kv_heads=2, head_dim=8, vocab=64, tp=1)
    with blocks_of(4):
        points = step_points(step_of([0, 8, 20], [20], strategy="ulysses"), shape)
    assert points == StepPoints(((1, 5, 1), (1, 5, 1), (1,)))
    assert points.total == 15
    assert points.numbers(1, 1) == range(8, 13)
    assert (
        step_points(
            step_of([0, 20], [20]),
            ModelShape(layers=3, heads=4, kv_heads=2, head_dim=8, vocab=64, tp=1, whole=True),
        ).total
        == 7
    )


def test_a_layer_ends_in_its_mlp() -> None:
    points = YieldPoints(StepPoints(((1, 2, 1), (1,))))
    points.begin_layer(0)
    points.point()
    with pytest.raises(AssertionError, match="layer 0 ends in phase 1"):
        points.begin_layer(1)


def test_points_without_a_number_of_their_own_pass_the_last_one() -> None:
    passed: list[int] = []
    points = YieldPoints(StepPoints(((1, 2, 1), (1,))), passed.append)
    points.begin_layer(0)
    for _ in range(4):
        points.point()
    points.close()
    points.begin_layer(1)
    assert passed == [0, 1, 2, 2, 2, 2, 4]
