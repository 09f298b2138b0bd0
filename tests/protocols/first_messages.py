"""Two threads unpack a message of a new class for the first time, at once and repeatedly.

It runs as a program, because msgspec alone would crash the process.
"""

from __future__ import annotations

import importlib
import sys
import threading

from csps.protocols.core import placement
from csps.protocols.gang import messages, step_messages
from csps.protocols.rpc.schema import pack, unpack

THREADS, ROUNDS = 2, 60


class Round:
    """Message classes that no thread has unpacked yet."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Create all classes again."""
        for module in (placement, messages, step_messages):  # each after those that it imports
            importlib.reload(module)
        slices = (placement.KvSlice(0, 0, 1),)
        chunk = step_messages.PrefillChunk(
            sequence_id=1, start=0, length=1, history=slices, destinations=slices
        )
        self.step = step_messages.PrefillStep(step_id=1, group=(0,), bounds=(0, 1), chunks=(chunk,))


def main() -> None:
    """Unpack a message in every thread, round by round."""
    sys.setswitchinterval(1e-6)
    current = Round()
    barrier = threading.Barrier(THREADS, action=current.begin)

    def body() -> None:
        for _ in range(ROUNDS):
            barrier.wait()
            assert unpack(type(current.step), pack(current.step)) == current.step

    threads = [threading.Thread(target=body) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
