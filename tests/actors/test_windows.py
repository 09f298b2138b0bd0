"""Models with sliding windows and attention sinks, under every strategy, against dense passes."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from property_examples import examples
from small_blocks import blocks_of
from strategy_ranks import Gangs
from test_history import on_gangs, steps
from test_yield_points import run

several = settings(max_examples=examples(12), suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(
    ("strategy", "members", "tp"),
    on_gangs((1, 1), (3, 1), (4, 1), (1, 2), (2, 2), rings=((3, 1), (2, 2))),
)
@several
@given(data=st.data())
def test_every_strategy_sees_the_window(
    gangs: Gangs, strategy: str, members: int, tp: int, data: st.DataObject
) -> None:
    """Both ends of every message are begun between the same yield points."""
    model = data.draw(st.sampled_from(("near", "near-far", "far-near")))
    gang, step = gangs(model, members, tp), data.draw(steps(strategy, members))
    with blocks_of(data.draw(st.integers(3, 30))):
        run(gang, step).check(step)
