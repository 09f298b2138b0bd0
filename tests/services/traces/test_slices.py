"""Slices in rows, as Perfetto can draw them."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st
from trace_slices import by_row, crossings, rank_trace

from csps.actors.timing.timeline import PhaseEvent
from csps.services.telemetry.traces.perfetto import Slice, process_trace

HOUR_NS = 3_600_000_000_000


def test_a_trace_has_a_row_for_computing_and_for_each_kind_of_transfer() -> None:
    events = [
        PhaseEvent("attention", 2_000, 5_000, 1, 2, 3),
        PhaseEvent("first all-to-all", 1_000, 4_000, 1, 2, 0),
        PhaseEvent("wait", 5_000, 6_000),
    ]
    trace = json.loads(json.dumps(rank_trace(events)))
    assert {row["pid"] for row in trace} == {700}
    names = {row["tid"]: row["args"]["name"] for row in trace if row["name"] == "thread_name"}
    phases = [row for row in trace if row["ph"] == "X"]
    assert [names[row["tid"]] for row in phases] == ["first all-to-all", "compute", "compute"]
    assert [(row["ts"], row["dur"]) for row in phases] == [(0.0, 3.0), (1.0, 3.0), (4.0, 1.0)]
    assert phases[1]["args"] == {"layer": 1, "level": 2, "micro": 3}


def test_exchanges_begun_together_and_ended_in_turn_have_a_row_each() -> None:
    events = [PhaseEvent("first all-to-all", begin, 7_000 + begin, 0, begin) for begin in (1, 2, 3)]
    events += [
        PhaseEvent("first all-to-all", 7_001, 8_000, 1, 1),
        PhaseEvent("all-gather", 2, 9_000, 1),
    ]
    levels = {
        row: [kv_slice["args"]["level"] for kv_slice in slices]
        for (_, row), slices in by_row(rank_trace(reversed(events))).items()
    }
    assert levels == {
        "first all-to-all": [1, 1],
        "first all-to-all 2": [2],
        "first all-to-all 3": [3],
        "all-gather": [None],
    }


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 999), st.integers(0, 999))))
@example([("a", 130, 1_240), ("a", 1_370, 1_000)])
def test_no_slices_of_a_row_cross(slices_given: list[tuple[str, int, int]]) -> None:
    """Perfetto reads what is written, late in a long request."""
    slices = [
        Slice(row, row, HOUR_NS + begin, HOUR_NS + begin + length, {"place": place})
        for place, (row, begin, length) in enumerate(slices_given)
    ]
    trace = json.loads(json.dumps(process_trace(slices, pid=3000, name="process")))
    assert crossings(trace) == []
    drawn_rows = by_row(trace)
    assert all(
        event["name"] == row.split()[0]
        for (_, row), events in drawn_rows.items()
        for event in events
    )
    places = [event["args"]["place"] for events in drawn_rows.values() for event in events]
    assert sorted(places) == list(range(len(slices_given)))
