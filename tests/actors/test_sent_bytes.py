"""Bytes that a step sends, without those that its rank sends while the step is paused."""

from __future__ import annotations

from csps.actors.engine.step_trace import SentBytes


class CountingMesh:
    def __init__(self) -> None:
        self.bytes_sent = [100, 100, 100]


def test_bytes_sent_during_a_pause_do_not_count() -> None:
    mesh = CountingMesh()
    step = SentBytes(mesh)  # type: ignore[arg-type]
    mesh.bytes_sent[1] += 5
    for _ in range(2):
        with step.paused():
            high_priority = SentBytes(mesh)  # type: ignore[arg-type]
            mesh.bytes_sent[1] += 70
            with high_priority.paused():
                mesh.bytes_sent[2] += 900
            assert high_priority.by_rank == (0, 70, 0)
    mesh.bytes_sent[2] += 3
    assert step.by_rank == (0, 5, 3)
