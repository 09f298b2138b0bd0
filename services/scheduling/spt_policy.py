"""Prompts cut into sequence partitions (SPTs) over as many instances as they fill (CSPS §3.2).

First come, first served, with these exceptions, each of them bounded:

1. A *short* prompt (at most `short_tokens`) starts at once, on the instance where it will wait
   least, as an *urgent* job that ranks let run inside a long one.
2. Longer prompts that would otherwise wait fill up the slack of the last SPT of a starting job.

**Nobody starves.** What overtakes a long prompt never exceeds `overtaking` times its own tokens:

- while its job is outstanding, on each of its instances, urgent tokens sent there afterwards are
  counted against its tokens there. When they are used up, short prompts go elsewhere or wait for
  the job. Work per token does not shrink with length, so with the default of 1 a stream of short
  prompts at most doubles the time of a long one;
- while a request waits for KV slots, those that find a place past it are counted against its
  size. When that is used up nobody passes, and running requests end some day.

An instance is given at most `jobs_per_instance` long jobs at a time, one to run and one to follow
without a gap: what is not yet sent can still be decided otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from csps.protocols.near_places import near_places
from csps.services.scheduling.decode_placement import DecodeRules, place_decode
from csps.services.scheduling.policy import DecodePlacement, JobDecision, JobMember
from csps.services.scheduling.shares import bounds_of, level_shares
from csps.services.scheduling.state import (
    ClusterState,
    LongJob,
    PrefillInstance,
    WaitingRequest,
    topology_order,
)


@dataclass(frozen=True, kw_only=True)
class SptRules:
    """Sizes in tokens."""

    spt_tokens: int = 4096
    """Target length of a sequence partition; less where an instance has fewer free slots."""
    short_tokens: int = 1024
    """Longest prompt that is urgent."""
    urgent_batch_tokens: int = 2048
    """Longest urgent job: the first token of a batch comes when all of it is computed."""
    jobs_per_instance: int = 2
    overtaking: float = 1.0
    """Tokens that may overtake a request, per token of its own."""

    def __post_init__(self) -> None:
        if min(self.spt_tokens, self.urgent_batch_tokens, self.jobs_per_instance) < 1:
            raise ValueError(f"rules must be positive: {self}")
        if self.short_tokens < 0 or self.overtaking < 0:
            raise ValueError(f"rules must not be negative: {self}")


class SptPolicy:
    """The policy of this module's description."""

    def __init__(self, rules: SptRules | None = None, decode: DecodeRules | None = None) -> None:
        self.rules = rules or SptRules()
        self.decode_rules = decode or DecodeRules()

    def decide(self, state: ClusterState) -> Sequence[JobDecision]:
        """One pass over the line, in order of admission."""
        scheduling_round = _Round(state, self.rules, self.decode_rules)
        for request in state.waiting:
            scheduling_round.consider(request)
        return scheduling_round.jobs


class _Round:
    """One pass: a picture that is updated as jobs are decided on."""

    def __init__(self, state: ClusterState, rules: SptRules, decode_rules: DecodeRules) -> None:
        self.jobs: list[JobDecision] = []
        self._rules, self._decode_rules = rules, decode_rules
        self._waiting = state.waiting
        self._prefill = {instance.instance: instance for instance in state.prefill}
        self._decode = {instance.instance: instance for instance in state.decode}
        self._placed: set[int] = set()
        self._passing = math.inf
        """Tokens that may still pass the requests that wait for slots."""
        self._long_line = False
        """A longer prompt waits: the ones behind it do, too."""

    def consider(self, request: WaitingRequest) -> None:
        """Start the request if its turn has come and there is room."""
        if request.number in self._placed:
            return
        if request.tokens > self._passing:
            self._long_line = True
        elif request.prompt_tokens <= self._rules.short_tokens:
            self._start_urgent(request)
        elif not self._long_line:
            self._start_long(request)

    # --- short prompts ---

    def _start_urgent(self, request: WaitingRequest) -> None:
        tokens = request.prompt_tokens
        roomy = [it for it in self._prefill.values() if it.free_slots >= tokens]
        placement = self._place(request)
        if placement is None or not roomy:
            self._waits_for_slots(request)
            return
        if (instance := self._least_wait(roomy, tokens)) is None:
            return  # the long jobs were overtaken enough
        self._reserve(request, placement)
        self._occupy({instance: tokens}, urgent=True)
        self._join_batch(instance, request, placement)

    def _least_wait(self, roomy: list[PrefillInstance], tokens: int) -> int | None:
        """Where an urgent prompt waits least: behind other urgent ones, and for a part of a layer.

        A part of a long job costs about as much as a short prompt, so it counts as one. Of equal
        instances the one whose long jobs were overtaken less: what they share waits for the last
        of its members, so that it is held up least when all give way alike.
        """
        rules = self._rules
        candidates = [it for it in roomy if _spare(it, rules.overtaking) >= tokens]
        if not candidates:
            return None
        best = min(
            candidates,
            key=lambda it: (
                it.urgent_tokens + bool(it.long_jobs) * rules.short_tokens,
                sum(job.overtaken_tokens for job in it.long_jobs),
                it.outstanding_tokens,
                topology_order(it.location),
            ),
        )
        return best.instance

    def _join_batch(
        self, instance: int, request: WaitingRequest, placement: DecodePlacement
    ) -> None:
        """Add to the urgent job that this round starts on the instance, or begin another."""
        member = _member(request, placement)
        for index in range(len(self.jobs) - 1, -1, -1):
            job = self.jobs[index]
            if not job.urgent or job.group != (instance,) or job.method != request.method:
                continue
            total = job.bounds[-1] + member.prompt_tokens
            if total > self._rules.urgent_batch_tokens:
                break
            self.jobs[index] = replace(job, bounds=(0, total), members=(*job.members, member))
            return
        self.jobs.append(_job(request, [member], {instance: member.prompt_tokens}, urgent=True))

    # --- longer prompts ---

    def _start_long(self, request: WaitingRequest) -> None:
        placement = self._place(request)
        room = self._room(request.prompt_tokens)
        if placement is None or room is None:
            self._long_line = True
            if placement is None or not self._fits_once_open(request.prompt_tokens):
                self._waits_for_slots(request)
            return
        self._reserve(request, placement)
        members = [_member(request, placement), *self._fillers(request, room)]
        shares = level_shares(sum(member.prompt_tokens for member in members), list(room.values()))
        assert shares is not None, "fillers exceed the slack"
        by_instance = {it: share for it, share in zip(room, shares, strict=True) if share}
        self._occupy(by_instance, urgent=False)
        self.jobs.append(_job(request, members, by_instance, urgent=False))

    def _room(self, tokens: int) -> dict[int, int] | None:
        """The group for a prompt among instances whose line is not full yet."""
        limit = self._rules.jobs_per_instance
        return self._group(
            [it for it in self._prefill.values() if len(it.long_jobs) < limit], tokens
        )

    def _fits_once_open(self, tokens: int) -> bool:
        """Whether there are slots enough, so that only outstanding jobs are in the way."""
        return self._group(list(self._prefill.values()), tokens) is not None

    def _group(self, candidates: list[PrefillInstance], tokens: int) -> dict[int, int] | None:
        """The smallest group whose SPTs hold the prompt: most tokens of each, in topology order.

        On as few servers as have room, there the instances with the most free slots first. A prompt
        longer than an SPT on every instance of the gang takes all of them, with longer SPTs.
        """
        # Of several such servers the one whose instances have the least to finish, not the one with
        # more that have room: they have it long before their jobs end, and all wait for the last.
        freest = sorted(
            candidates,
            key=lambda it: (-it.free_slots, it.outstanding_tokens, topology_order(it.location)),
        )
        spt = self._rules.spt_tokens
        by_place = {topology_order(it.location): it for it in freest}
        near = near_places({at: min(spt, it.free_slots) for at, it in by_place.items()}, tokens)
        group = [by_place[at] for at in sorted(by_place if near is None else near)]
        if len(group) == len(self._prefill):
            spt = tokens
        room = {it.instance: min(spt, it.free_slots) for it in group}
        return room if sum(room.values()) >= tokens else None

    def _fillers(self, first: WaitingRequest, room: dict[int, int]) -> list[JobMember]:
        """Younger prompts for the slack of the last SPT, if they would otherwise wait."""
        spt = min(self._rules.spt_tokens, *room.values())
        slack = len(room) * spt - first.prompt_tokens
        if any(it not in room and not self._prefill[it].long_jobs for it in self._prefill):
            return []  # an idle instance serves them sooner
        fillers = []
        for request in self._waiting:
            if not self._may_fill(request, first, slack):
                continue
            if (placement := self._place(request)) is not None:
                slack -= request.prompt_tokens
                self._reserve(request, placement)
                fillers.append(_member(request, placement))
        return fillers

    def _may_fill(self, request: WaitingRequest, first: WaitingRequest, slack: int) -> bool:
        return (
            request.number > first.number
            and request.number not in self._placed
            and self._rules.short_tokens < request.prompt_tokens <= slack
            and request.method == first.method
            and request.tokens <= self._passing
        )

    # --- the picture ---

    def _place(self, request: WaitingRequest) -> DecodePlacement | None:
        return place_decode(request, list(self._decode.values()), self._decode_rules)

    def _waits_for_slots(self, request: WaitingRequest) -> None:
        """From here on, whoever is placed passes `request`."""
        credit = self._rules.overtaking * request.tokens - request.overtaken_tokens
        self._passing = min(self._passing, credit)

    def _reserve(self, request: WaitingRequest, placement: DecodePlacement) -> None:
        self._placed.add(request.number)
        self._passing -= request.tokens
        for instance, slots in placement.slots.items():
            held = self._decode[instance]
            self._decode[instance] = replace(
                held,
                free_slots=held.free_slots - slots,
                requests=held.requests + (instance == placement.master),
            )

    def _occupy(self, shares: dict[int, int], *, urgent: bool) -> None:
        for instance, tokens in shares.items():
            self._prefill[instance] = _occupied(self._prefill[instance], tokens, urgent)


def _spare(instance: PrefillInstance, overtaking: float) -> float:
    """Urgent tokens that may still be sent to the instance before one of its long jobs ends."""
    credits = (overtaking * job.tokens - job.overtaken_tokens for job in instance.long_jobs)
    return min(credits, default=math.inf)


def _occupied(instance: PrefillInstance, tokens: int, urgent: bool) -> PrefillInstance:
    free = instance.free_slots - tokens
    if not urgent:
        job = LongJob(tokens=tokens, overtaken_tokens=0)
        return replace(instance, free_slots=free, long_jobs=(*instance.long_jobs, job))
    overtaken = tuple(
        replace(job, overtaken_tokens=job.overtaken_tokens + tokens) for job in instance.long_jobs
    )
    return replace(
        instance,
        free_slots=free,
        long_jobs=overtaken,
        urgent_tokens=instance.urgent_tokens + tokens,
    )


def _member(request: WaitingRequest, placement: DecodePlacement) -> JobMember:
    return JobMember(
        number=request.number, prompt_tokens=request.prompt_tokens, placement=placement
    )


def _job(
    first: WaitingRequest, members: Sequence[JobMember], shares: dict[int, int], *, urgent: bool
) -> JobDecision:
    return JobDecision(
        group=tuple(shares),
        bounds=bounds_of(list(shares.values())),
        members=tuple(members),
        strategy=first.strategy,
        csa=first.csa,
        urgent=urgent,
    )
