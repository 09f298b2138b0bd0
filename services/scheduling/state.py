"""What a policy sees: an immutable picture of the queue and of both gangs.

Sizes are tokens; one token occupies one KV slot of an instance.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from csps.protocols.csa_template import CsaTemplate
from csps.protocols.topology import Location


@dataclass(frozen=True, kw_only=True)
class WaitingRequest:
    """An admitted and planned request without a place."""

    number: int
    """Order of admission."""
    prompt_tokens: int
    output_tokens: int
    """The most it may generate: admission counts KV that does not exist yet."""
    strategy: str = "ulysses"
    csa: CsaTemplate | None = None
    """How its prefill attends sparsely, if it does."""
    overtaken_tokens: int = 0
    """`tokens` of younger requests that found a place while this one waited."""

    @property
    def tokens(self) -> int:
        """All KV that the request will ever need on decode instances."""
        return self.prompt_tokens + self.output_tokens

    @property
    def method(self) -> tuple[str, CsaTemplate | None]:
        """How its prefill attends: requests of different methods cannot share a job."""
        return self.strategy, self.csa


@dataclass(frozen=True, kw_only=True)
class LongJob:
    """An instance's part of an outstanding prefill job that is not urgent."""

    tokens: int
    overtaken_tokens: int
    """Urgent tokens sent to the instance since: they run, or ran, before this job's end."""


@dataclass(frozen=True, kw_only=True)
class PrefillInstance:
    """One copy of the weights that computes prompts."""

    instance: int
    location: str
    """Rack-Server-GPU id."""
    free_slots: int
    long_jobs: tuple[LongJob, ...] = ()
    """Outstanding jobs that are not urgent, running or queued."""
    urgent_tokens: int = 0
    """Tokens of outstanding urgent jobs."""

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that the instance has yet to finish."""
        return self.urgent_tokens + sum(job.tokens for job in self.long_jobs)


@dataclass(frozen=True, kw_only=True)
class DecodeInstance:
    """One copy of the weights that draws tokens."""

    instance: int
    location: str
    free_slots: int
    requests: int = 0
    """Requests that it masters, landing ones included."""

    @property
    def freeness(self) -> float:
        """Free slots per request, the new one included (Tetris §5: slots over batch size)."""
        return self.free_slots / (self.requests + 1)


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """The whole picture at one moment."""

    waiting: tuple[WaitingRequest, ...]
    """In order of admission."""
    prefill: tuple[PrefillInstance, ...]
    decode: tuple[DecodeInstance, ...]


@functools.cache  # a gang has few locations, and every round compares them over and over
def topology_order(location: str) -> Location:
    """Sort key of a Rack-Server-GPU id: neighbours in this order are near each other (CSPS §3.2).

    >>> sorted(["0-10-0", "0-9-1"], key=topology_order)
    ['0-9-1', '0-10-0']

    Raises:
        ConfigError: it is none; those of an attached gang have been checked.
    """
    return Location.parse(location)
