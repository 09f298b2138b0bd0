"""The clock of a step adds its times up."""

from __future__ import annotations

import time

import pytest

from csps.actors.timing.timeline import StepClock


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, in one cell that a test sets."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_times_add_up(seconds: list[float]) -> None:
    clock = StepClock(received=seconds[0])
    seconds[0] = 103.0
    clock.started = seconds[0]
    with clock.communicating():
        seconds[0] += 2.0
    with clock.yielding():
        seconds[0] += 5.0
    with clock.communicating():
        seconds[0] += 0.5
    seconds[0] += 10.0
    clock.finished = seconds[0]
    assert clock.queue_s == 3.0
    assert clock.communication_s == 2.5
    assert clock.yielded_s == 5.0
    assert clock.compute_s == 10.0


def test_the_last_layer_is_timed_without_pauses(seconds: list[float]) -> None:
    clock = StepClock()
    with clock.yielding():
        seconds[0] += 5.0
    clock.begin_last_layer()
    seconds[0] += 2.0
    with clock.yielding():
        seconds[0] += 7.0
    seconds[0] += 1.0
    clock.end_last_layer()
    assert clock.last_layer_s == 3.0


def test_a_failed_exchange_is_counted(seconds: list[float]) -> None:
    clock = StepClock()

    def lose_the_peer() -> None:
        with clock.communicating():
            seconds[0] += 1.0
            raise RuntimeError("peer lost")

    with pytest.raises(RuntimeError, match="peer lost"):
        lose_the_peer()
    assert clock.communication_s == 1.0
