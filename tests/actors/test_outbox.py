"""What jobs send is waited for in order, and what fails is told once."""

from __future__ import annotations

from datetime import timedelta

from csps.actors.mesh import PEER_DEADLINE, Pending
from csps.actors.outbox import Outbox


class Sending(Pending):
    """A sending that notes when it was waited for, and may fail."""

    def __init__(self, name: str, log: list[object], error: RuntimeError | None = None) -> None:
        super().__init__([], [])
        self._name, self._log, self._error = name, log, error

    def wait(self, deadline: timedelta = PEER_DEADLINE) -> None:
        self._log.append(self._name)
        if self._error is not None:
            raise self._error


def test_what_has_left_is_a_step_and_what_failed_is_none() -> None:
    log: list[object] = []
    steps: list[str] = []
    outbox: Outbox[str] = Outbox(lambda job, failure: None, on_step=steps.append)
    outbox.post("a", Sending("a1", log))
    outbox.post("b", Sending("b1", log, RuntimeError()))
    outbox.post("a", Sending("a2", log))
    outbox.close()
    outbox.run()
    assert steps == ["a", "a"]


def test_jobs_are_done_in_order_with_their_first_failure() -> None:
    log: list[object] = []
    outbox: Outbox[str] = Outbox(lambda job, failure: log.append((job, failure)))
    first, second = RuntimeError("first"), RuntimeError("second")
    outbox.post("a", Sending("a1", log, first))
    outbox.post("b", Sending("b1", log))
    outbox.post("a", Sending("a2", log, second))
    outbox.finish("b")
    outbox.post("a", Sending("a3", log))
    outbox.finish("a")
    outbox.finish("c")
    outbox.close()
    outbox.run()
    assert log == ["a1", "b1", "a2", ("b", None), "a3", ("a", first), ("c", None)]
