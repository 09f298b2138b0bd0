from __future__ import annotations

import json

from csps.actors.timeline import Event, Timeline, chrome_trace


def test_a_timeline_that_is_off_keeps_nothing() -> None:
    timeline = Timeline(on=False)
    with timeline.phase("attention", layer=1) as phase, timeline.phase("merge") as other:
        assert phase is other is None
    timeline.add(Event("wait", 0, 1))
    assert timeline.events == []
    assert timeline.phase("attention", layer=1) is timeline.phase("merge")


def test_phases_become_events_in_the_order_in_which_they_end() -> None:
    timeline = Timeline(on=True)
    with timeline.phase("attention", layer=1, level=2, micro=3), timeline.phase("wait"):
        pass
    inner, outer = timeline.events
    assert (inner.name, outer.name) == ("wait", "attention")
    assert (outer.layer, outer.level, outer.micro) == (1, 2, 3)
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_a_trace_has_a_row_for_computing_and_for_each_kind_of_transfer() -> None:
    events = [
        Event("attention", 2_000, 5_000, 1, 2, 3),
        Event("first all-to-all", 1_000, 4_000, 1, 2, 0),
        Event("wait", 5_000, 6_000),
    ]
    trace = json.loads(json.dumps(chrome_trace(events, rank=7)))
    assert {row["pid"] for row in trace} == {7}
    names = {row["tid"]: row["args"]["name"] for row in trace if row["name"] == "thread_name"}
    phases = [row for row in trace if row["ph"] == "X"]
    assert [names[row["tid"]] for row in phases] == ["compute", "first all-to-all", "compute"]
    assert [(row["ts"], row["dur"]) for row in phases] == [(2.0, 3.0), (1.0, 3.0), (5.0, 1.0)]
    assert phases[0]["args"] == {"layer": 1, "level": 2, "micro": 3}
