"""Threads that are the first to unpack a message of its kind, at once and again and again. Run as a
program: msgspec, left to itself, ends the process."""

from __future__ import annotations

import importlib
import sys
import threading

from csps.protocols.core import placement
from csps.protocols.core import placement as span
from csps.protocols.gang import messages as sampling
from csps.protocols.gang import step_messages as prefill_job
from csps.protocols.rpc.schema import pack, unpack

THREADS, ROUNDS = 2, 60


class Round:
    """Classes that nobody has unpacked."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Make all of them anew."""
        for it in (span, placement, sampling, prefill_job):  # each after those that it uses
            importlib.reload(it)
        slices = (placement.KvSlice(instance=0, span=span.Span(start=0, stop=1)),)
        chunk = prefill_job.PrefillChunk(
            sequence_id=1, start=0, length=1, history=slices, destinations=slices
        )
        self.job = prefill_job.PrefillStep(step_id=1, group=(0,), bounds=(0, 1), chunks=(chunk,))


def main() -> None:
    """Every thread unpacks a message in each round."""
    sys.setswitchinterval(1e-6)
    now = Round()
    together = threading.Barrier(THREADS, action=now.begin)

    def body() -> None:
        for _ in range(ROUNDS):
            together.wait()
            assert unpack(type(now.job), pack(now.job)) == now.job

    threads = [threading.Thread(target=body) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
