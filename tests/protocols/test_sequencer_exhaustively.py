"""The sequencer in every order of events of small gangs, where test_sequencer.py draws some."""

from __future__ import annotations

import pytest
from sequencer_explorer import OWNER, Broken, Cancel, Command, Explorer, Join, SmallWorld

from csps.protocols.sequencer.log_entries import EndOwner
from csps.protocols.sequencer.sequencer import RunOrder
from csps.protocols.sequencer.steps import SequencedStep, StepSpec

SLOW_NS = 60_000_000
"""Time of a yield point that is longer than a quantum: a step needs one for each."""


def step(
    step_id: int,
    *ranks: int,
    high_priority: bool = False,
    sequences: tuple[int, ...] = (),
    yield_points: int = 3,
    places: tuple[int, ...] = (),
) -> StepSpec:
    return StepSpec(
        id=step_id,
        ranks=ranks,
        high_priority=high_priority,
        yield_points=yield_points,
        sequences=sequences,
        owner=OWNER,
        places=places,
        master=places[0] if places else 0,
    )


LOW, HIGH = step(1, 0, 1, sequences=(1,)), step(2, 1, 2, high_priority=True, sequences=(2,))
MOVE = step(3, 0, 2, high_priority=True, sequences=(9,), yield_points=1, places=(2,))
JOIN = Join(sequence=9, ranks=(0,), lives=2)

QUICK: dict[str, tuple[int, tuple[Command, ...]]] = {
    "a step above another": (2, (step(1, 0, 1), step(2, 0, 1, high_priority=True))),
    "a step beside a sequence": (2, (Join(sequence=9, ranks=(0, 1), lives=2), step(1, 0, 1))),
    "a move": (
        2,
        (JOIN, step(3, 0, 1, high_priority=True, sequences=(9,), yield_points=1, places=(1,))),
    ),
    "a cancelled sequence": (
        2,
        (
            Join(sequence=9, ranks=(0, 1), lives=3),
            step(1, 0, 1, sequences=(1,)),
            Cancel(sequence=1),
        ),
    ),
    "an owner that ends": (2, (JOIN, step(1, 0, 1, sequences=(1,)), EndOwner(OWNER))),
}
WHOLE: dict[str, tuple[Command, ...]] = {
    "three steps and a move": (JOIN, LOW, HIGH, MOVE, step(4, 0, 1, 2)),
    "cancelled beside a move": (JOIN, LOW, HIGH, MOVE, Cancel(sequence=9), Cancel(sequence=1)),
    "an owner that ends beside a move": (JOIN, LOW, HIGH, MOVE, EndOwner(OWNER)),
}


@pytest.mark.parametrize("yield_point_ns", [1_000_000, SLOW_NS])
@pytest.mark.parametrize("name", QUICK)
def test_small_gangs_keep_the_rules_in_every_order(name: str, yield_point_ns: int) -> None:
    ranks, commands = QUICK[name]
    world = SmallWorld(ranks=ranks, commands=commands, yield_point_ns=yield_point_ns)
    explorer = Explorer(world)
    states = explorer.explore(most=20_000)
    print(f"MEASURED {name}: {states} states, {explorer.ends} ends")
    assert explorer.ends


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("yield_point_ns", [1_000_000, SLOW_NS])
@pytest.mark.parametrize("name", WHOLE)
def test_three_ranks_keep_the_rules_in_every_order(name: str, yield_point_ns: int) -> None:
    """Three ranks, three steps of both priorities, a sequence, and a move of its KV."""
    explorer = Explorer(SmallWorld(ranks=3, commands=WHOLE[name], yield_point_ns=yield_point_ns))
    states = explorer.explore(most=2_000_000)
    print(f"MEASURED {name}: {states} states, {explorer.ends} ends")
    assert explorer.ends


def test_a_sequencer_that_never_lets_batches_have_their_turn_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The explorer would see a broken rule, and names the events that lead there."""

    def may_run(order: RunOrder, one: SequencedStep) -> bool:
        return order._can_continue(one) and not one.outstanding

    monkeypatch.setattr(RunOrder, "_may_run", may_run)
    commands = (Join(sequence=9, ranks=(0, 1), lives=3), step(1, 0, 1, yield_points=3))
    world = SmallWorld(ranks=2, commands=commands, yield_point_ns=SLOW_NS)
    with pytest.raises(Broken, match=r"two quanta before .* after: command, "):
        Explorer(world).explore(most=20_000)
