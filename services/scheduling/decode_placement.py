"""Where a request's KV goes on the decode side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from csps.protocols.messages import KvShare, Span
from csps.services.scheduling.policy import DecodePlacement
from csps.services.scheduling.shares import bounds_of, level_shares
from csps.services.scheduling.state import DecodeInstance, WaitingRequest, topology_order


@dataclass(frozen=True, kw_only=True)
class DecodeRules:
    """How decode instances are shared."""

    spread_tokens: int = 8192
    """A prompt is spread over one instance for every so many tokens: reading a long KV cache is
    what a decode step waits for, so several instances read parts of it."""
    max_batch: int = 64
    """Requests on the decode gang at the same time, landing ones included."""

    def __post_init__(self) -> None:
        if self.spread_tokens < 1 or self.max_batch < 1:
            raise ValueError(f"rules must be positive: {self}")


def place_decode(
    request: WaitingRequest, instances: Sequence[DecodeInstance], rules: DecodeRules
) -> DecodePlacement | None:
    """Choose the holders of a request's KV and its master; None while there is no room.

    As few instances as `spread_tokens` asks for, the freest first; more if those have no room.
    """
    if sum(instance.requests for instance in instances) >= rules.max_batch:
        return None
    freest = sorted(instances, key=lambda instance: (-instance.freeness, instance.instance))
    wanted = -(-request.prompt_tokens // rules.spread_tokens)
    for count in range(min(wanted, len(freest)), len(freest) + 1):
        if (placement := _place_on(freest[:count], request)) is not None:
            return placement
    return None


def _place_on(
    considered: Sequence[DecodeInstance], request: WaitingRequest
) -> DecodePlacement | None:
    """Spread the prompt evenly, with the answer on the least busy instance that has room for it."""
    roomy = [instance for instance in considered if instance.free_slots >= request.output_tokens]
    if not roomy:
        return None
    master = min(roomy, key=lambda it: (it.requests, -it.free_slots, it.instance))
    holders = sorted(considered, key=lambda it: (topology_order(it.location), it.instance))
    limits = [it.free_slots - (request.output_tokens if it is master else 0) for it in holders]
    shares = level_shares(request.prompt_tokens, limits)
    if shares is None:
        return None
    return DecodePlacement(
        shares=_spans([it.instance for it in holders], shares),
        master=master.instance,
        output_tokens=request.output_tokens,
    )


def _spans(instances: Sequence[int], shares: Sequence[int]) -> tuple[KvShare, ...]:
    starts = bounds_of(shares)
    return tuple(
        KvShare(instance=instance, span=Span(start=start, stop=start + share))
        for instance, start, share in zip(instances, starts, shares, strict=False)
        if share
    )
