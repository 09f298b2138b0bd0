"""Bytes that a step sends, without those that its rank sends while the step is paused."""

from __future__ import annotations

from csps.actors.timing.timeline import SentBytes


def test_bytes_sent_during_a_pause_do_not_count() -> None:
    sent = [100, 100, 100]
    step = SentBytes(sent)
    sent[1] += 5
    for _ in range(2):
        with step.paused():
            high_priority = SentBytes(sent)
            sent[1] += 70
            with high_priority.paused():
                sent[2] += 900
            assert high_priority.by_rank == (0, 70, 0)
    sent[2] += 3
    assert step.by_rank == (0, 5, 3)
