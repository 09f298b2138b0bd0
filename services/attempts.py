"""One attempt at a request, and one prefill job, as the router keeps track of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from csps.protocols.messages import PrefillDone
from csps.services.cluster import KvLink
from csps.services.running import Running
from csps.services.scheduling.policy import DecodePlacement, JobDecision


@dataclass(eq=False, slots=True)
class Attempt:
    """One try at a request on one pair of gangs.

    It outlives its request until every decode rank has freed what it holds (`unfreed`).
    """

    rid: int
    running: Running
    link: KvLink
    placement: DecodePlacement
    unlanded: dict[int, int]
    """Decode ranks whose share of the KV has not landed yet: tokens of the share."""
    unfreed: set[int]
    """Decode ranks that hold slots, or may."""
    reserved: bool = False
    """Every decode rank has answered `reserve`, one way or the other."""
    launched: bool = False
    """The prefill job was sent."""
    over: bool = False
    """Serves its request no more; what it holds is on its way back."""
    joined_at: float | None = None
    """`time.monotonic()` when decode took over."""
    owed_since: float | None = None
    """When decode began to owe something: tokens, or slots."""
    first_token_at: float | None = None
    next_index: int = 0
    """Index of the token to come."""
    first_token: int = -1


@dataclass(eq=False, slots=True)
class Job:
    """A prefill job from the policy's decision until every rank of its group is done."""

    ticket: int
    decision: JobDecision
    link: KvLink
    attempts: list[Attempt]
    """In the order of the decision's members."""
    undone: dict[int, set[int]] = field(default_factory=dict)
    """Ranks that have not reported, by instance of the group."""
    launched_at: float = 0.0
    figures: list[PrefillDone] = field(default_factory=list)
    """What its ranks have measured."""

    def launched(self) -> None:
        """The job was sent to every rank."""
        self.launched_at = time.monotonic()
        gang = self.link.prefill
        self.undone = {instance: set(gang.ranks_of(instance)) for instance in self.decision.group}

    def leave(self, attempt: Attempt) -> None:
        """The attempt is not part of the job any more; only before the job is sent."""
        self.attempts.remove(attempt)
        if self.attempts:
            self.decision = self.decision.without_member(attempt.running.number)

    def rank_done(self, rank: int, instance: int) -> bool:
        """A rank has reported; true if it was the last one of its instance."""
        ranks = self.undone.get(instance, set())
        ranks.discard(rank)
        return not ranks and self.undone.pop(instance, None) is not None


def new_attempt(rid: int, running: Running, link: KvLink, placement: DecodePlacement) -> Attempt:
    """An attempt that has not asked anyone for anything yet."""
    decode = link.decode
    return Attempt(
        rid=rid,
        running=running,
        link=link,
        placement=placement,
        unlanded={
            rank: share.span.length
            for share in placement.shares
            for rank in decode.ranks_of(share.instance)
        },
        unfreed={rank for instance in placement.slots for rank in decode.ranks_of(instance)},
    )
