"""Requests as the simulator sees them, and what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from csps.loadgen.simulator.decode_batch import IterationLog, Row
from csps.services.scheduling.commands import Release, Share
from csps.services.scheduling.ids import InstanceId, RequestId, SequenceId, index_of
from csps.services.scheduling.shares import own, tokens_on


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request that will come."""

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    """Tokens that it will draw: nobody knows before it has."""
    max_tokens: int | None = None
    """What it asks for, and all that the scheduler is told; None is `output_tokens`."""
    cls: str = "exact"
    hashes: tuple[bytes, ...] = ()
    """Of the prompt's blocks; none if it begins like no other one."""

    @property
    def asked_tokens(self) -> int:
        """Tokens that the scheduler has to expect."""
        return self.output_tokens if self.max_tokens is None else self.max_tokens


@dataclass(frozen=True, slots=True)
class IterationEnds:
    """Times of tokens: the ends of iterations [start, stop) of a batch, or of a row's own."""

    log: IterationLog | Row
    start: int
    stop: int


@dataclass(slots=True)
class Outcome:
    """What has become of a request. Times are in nanoseconds, -1 is never."""

    request: RequestId
    arrival: Arrival
    started_ns: int = -1
    """Its first step began to compute."""
    first_token_ns: int = -1
    ended_ns: int = -1
    drawn: int = 0
    cached: int = 0
    """Tokens of the prompt that the last attempt found computed."""
    sequences: int = 0
    """Attempts."""
    error: str = ""
    """Name of the error that it ended with; empty if it has its whole answer."""

    stamps: list[int | IterationEnds] = field(default_factory=list)
    """When tokens were drawn: by a prefill, or by iterations."""

    @property
    def token_ns(self) -> list[int]:
        """When each token was drawn."""
        times: list[int] = []
        for it in self.stamps:
            times += [it] if isinstance(it, int) else it.log.ends_ns(it.start, it.stop)
        return times

    @property
    def ttft_ns(self) -> int:
        """Time to the first token."""
        return self.first_token_ns - self.arrival.at_ns


@dataclass(eq=False, slots=True)
class Sequence:
    """One attempt at a request on the ranks."""

    sequence: SequenceId
    request: RequestId
    prompt_tokens: int
    shares: tuple[Share, ...]
    master: InstanceId
    answer: tuple[Share, ...]
    """Who keeps the KV of its tokens to come, if not the master."""
    before: int
    """Tokens that earlier sequences have drawn."""
    tokens: int
    """To be drawn by this one."""
    cached: int = 0
    """Tokens of the prompt that nothing computes."""
    stays: bool = False
    """Nothing is freed at its end until the gang is told what to keep."""
    releases: list[Release] = field(default_factory=list)
    """Of what is kept, told before that was."""
    missing: dict[InstanceId, int] = field(default_factory=dict)
    """KV that has not arrived, by decode instance."""
    row: Row | None = None
    """In the decode batch."""
    over: bool = False
    """Serves its request no more."""

    @property
    def instances(self) -> tuple[int, ...]:
        """Numbers of those that take part in decoding it."""
        named = {self.master, *(it.instance for it in (*self.shares, *self.answer))}
        return tuple(sorted(map(index_of, named)))

    @property
    def slots(self) -> dict[InstanceId, int]:
        """Of the prompt, by decode instance; what is reused has its own."""
        return tokens_on(own(self.shares))
