"""Phases of a rank are recorded, and only if somebody asked for them."""

from __future__ import annotations

from csps.actors.timing.timeline import PhaseEvent, PhaseTimeline


def test_a_timeline_that_is_off_records_nothing() -> None:
    timeline = PhaseTimeline(on=False)
    with timeline.phase("attention", layer=1) as phase, timeline.phase("merge") as other:
        assert phase is other is None
    timeline.add(PhaseEvent("wait", 0, 1))
    assert timeline.events == []
    assert timeline.phase("attention", layer=1) is timeline.phase("merge")


def test_phases_become_events_in_the_order_in_which_they_end() -> None:
    timeline = PhaseTimeline(on=True)
    with timeline.phase("attention", layer=1, level=2, micro=3), timeline.phase("wait"):
        pass
    inner, outer = timeline.events
    assert (inner.name, outer.name) == ("wait", "attention")
    assert (outer.layer, outer.level, outer.micro) == (1, 2, 3)
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
