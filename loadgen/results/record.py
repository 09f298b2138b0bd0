"""What became of one request: the same whether a server or the simulator answered it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from csps.loadgen.workloads.request import Objective

Status = Literal["completed", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """Times are nanoseconds from the start of the run; latencies count from `scheduled_ns`.

    A client that falls behind would otherwise hide what its requests would have waited
    (coordinated omission).
    """

    scheduled_ns: int
    """When it was to be sent."""
    sent_ns: int
    """When it was."""
    chunk_ns: tuple[int, ...]
    """When each piece of the answer came."""
    finished_ns: int
    """When its last token came, with or without text, or what ended it instead."""
    input_tokens: int
    output_tokens: int
    status: Status = "completed"
    """`failed`: the server refused it, broke off or took too long. `cancelled`: the client withdrew
    it, or never sent it because the turn before had failed."""
    error: str = ""
    """Why it has not completed."""
    correct: bool | None = None
    """Whether the answer was right; None where nobody knows."""
    objective: Objective | None = None
    text: str = ""
    """Of the answer."""

    def __post_init__(self) -> None:
        assert self.status != "completed" or self.chunk_ns, "an answer comes in pieces"

    @property
    def completed(self) -> bool:
        """Whether the whole answer came; the latencies are of such requests only."""
        return self.status == "completed"

    @property
    def late_s(self) -> float:
        """From its scheduled start until it was sent."""
        return (self.sent_ns - self.scheduled_ns) / 1e9

    @property
    def ttft_s(self) -> float:
        """To the first piece of the answer."""
        return (self.chunk_ns[0] - self.scheduled_ns) / 1e9

    @property
    def e2el_s(self) -> float:
        """To its end."""
        return (self.finished_ns - self.scheduled_ns) / 1e9

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first one; None of a single token."""
        if self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Between pieces."""
        return [(b - a) / 1e9 for a, b in zip(self.chunk_ns, self.chunk_ns[1:], strict=False)]
