"""The seam between deciding and doing: what a policy is, and what it decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from csps.protocols.csa_template import CsaTemplate
from csps.protocols.messages import KvShare
from csps.services.scheduling.shares import shares_of, without
from csps.services.scheduling.state import ClusterState


@dataclass(frozen=True, kw_only=True)
class DecodePlacement:
    """Where a request's KV goes and who draws its tokens."""

    shares: tuple[KvShare, ...]
    """The prompt's KV: non-empty spans, in order, without gaps."""
    master: int
    output_tokens: int
    """Slots set aside at the master for tokens to come."""

    def __post_init__(self) -> None:
        ends = [share.span.stop for share in self.shares]
        assert [share.span.start for share in self.shares] == [0, *ends[:-1]], "gaps in the KV"
        assert all(share.span.length for share in self.shares), "an empty share"

    @property
    def slots(self) -> dict[int, int]:
        """Slots needed, by instance."""
        slots = {share.instance: share.span.length for share in self.shares}
        slots[self.master] = slots.get(self.master, 0) + self.output_tokens
        return slots


@dataclass(frozen=True, kw_only=True)
class JobMember:
    """One request in a job."""

    number: int
    prompt_tokens: int
    placement: DecodePlacement


@dataclass(frozen=True, kw_only=True)
class JobDecision:
    """Start this prefill job now: its members' prompts end to end, cut at `bounds`."""

    group: tuple[int, ...]
    bounds: tuple[int, ...]
    """Instance `group[i]` computes tokens [bounds[i], bounds[i+1]) of the concatenation."""
    members: tuple[JobMember, ...]
    strategy: str = "ulysses"
    csa: CsaTemplate | None = None
    """How it attends sparsely, if it does, whatever the group."""
    urgent: bool = False

    def __post_init__(self) -> None:
        assert len(set(self.group)) == len(self.group) == len(self.bounds) - 1, "group and bounds"
        assert self.bounds[0] == 0, "bounds miss the first token"
        assert min(self.slots.values()) > 0, "an empty part"
        assert self.bounds[-1] == sum(m.prompt_tokens for m in self.members), "bounds miss tokens"

    @property
    def slots(self) -> dict[int, int]:
        """Tokens to compute, and so slots needed, by instance."""
        return dict(zip(self.group, shares_of(self.bounds), strict=True))

    @property
    def method(self) -> tuple[str, CsaTemplate | None]:
        """How all members attend; `WaitingRequest.method`."""
        return self.strategy, self.csa

    def without_member(self, number: int) -> Self:
        """The same job after a request left it; every other token stays on its instance."""
        index = [member.number for member in self.members].index(number)
        start = sum(member.prompt_tokens for member in self.members[:index])
        bounds = without(self.bounds, start, start + self.members[index].prompt_tokens)
        shares = shares_of(bounds)
        kept = [index for index, share in enumerate(shares) if share]
        return replace(
            self,
            members=self.members[:index] + self.members[index + 1 :],
            group=tuple(self.group[index] for index in kept),
            bounds=(0, *(bounds[index + 1] for index in kept)),
        )


class Policy(Protocol):
    """Decides which requests start, where, and together with which others.

    A policy keeps no state between rounds: whatever it needs to know is in the picture, so that
    router and simulator drive the same object and a round can be replayed.
    """

    def decide(self, state: ClusterState) -> Sequence[JobDecision]:
        """The jobs to start now; requests in none of them go on waiting.

        Called whenever something has changed. All jobs together must fit into the free slots.
        """
        ...
