"""A rank's stream that stands still before one of its iterations."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from gang_cell import ANSWER_S

from csps.actors.engine.stream import Stream


class HeldStream:
    """From so many further iterations on, the stream has no other one before `go_on` is set."""

    def __init__(self, patch: pytest.MonkeyPatch, stream: Stream, *, after: int = 0) -> None:
        self.go_on = threading.Event()
        iterate, last = Stream.iterate, stream.iterations + after

        def held(this: Stream, group: Sequence[int] = ()) -> list[int]:
            if this is stream and this.iterations >= last:
                assert self.go_on.wait(ANSWER_S), "nobody let the stream go on"
            return iterate(this, group)

        patch.setattr(Stream, "iterate", held)
