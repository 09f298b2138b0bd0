"""What plans go on from, and do not compute."""

from __future__ import annotations

from collections.abc import Iterable

from csps.services.scheduling.commands import Share
from csps.services.scheduling.decisions import DecodePlacement, Ride, StartPlan
from csps.services.scheduling.ids import GangId, RequestId, gang_of
from csps.services.scheduling.prefix.index import PrefixIndex
from csps.services.scheduling.shares import same
from csps.services.scheduling.state import Cached, Pair, Request

Live = dict[RequestId, Request]
Reused = dict[RequestId, Cached]
"""By request; those that compute all of their prompts are not in it."""


def reused_by_plan(plan: StartPlan, pair: Pair, live: Live, prefix: PrefixIndex) -> Reused:
    """A request whose first piece begins behind its prompt's beginning has the KV before it where
    it is computed."""
    begins: dict[RequestId, int] = {}
    for step in plan.steps:
        for piece in step.pieces:
            begins.setdefault(piece.request, piece.start)
    reused = {
        number: _kept(live, number, pair.prefill.id, start, prefix)
        for number, start in begins.items()
        if start
    }
    if pair.in_place:
        for placement in plan.decode:
            here = reused.get(placement.request)
            _check_named(_named(placement), here.shares if here else ())
    return reused


def held_by_plan(plan: StartPlan, pair: Pair, live: Live, prefix: PrefixIndex) -> Reused:
    """A gang that decodes only may have kept more of a prompt than the one that computes it, or
    less: a placement names what is not to be sent. Nothing is read there where nothing is decoded,
    because the step draws all."""
    held: Reused = {}
    for placement in () if pair.in_place else plan.decode:
        named, number = _named(placement), placement.request
        if named and number in live and live[number].output_tokens > 1:
            held[number] = _kept(live, number, pair.decode.id, _tokens(named), prefix)
            _check_named(named, held[number].shares)
    return held


def reused_by_ride(ride: Ride, live: Live, prefix: PrefixIndex) -> Reused:
    """A rider says itself what it has where it is computed."""
    placement = ride.placement
    named = _named(placement)
    if not named:
        return {}
    gang = gang_of(placement.master)
    cached = _kept(live, placement.request, gang, _tokens(named), prefix)
    _check_named(named, cached.shares)
    return {placement.request: cached}


def _check_named(named: tuple[Share, ...], lie: tuple[Share, ...]) -> None:
    """A plan of the same round may have cut a segment since the decision was taken."""
    assert named == lie or same(named, lie), "what is reused lies elsewhere"


def _kept(live: Live, number: RequestId, gang: GangId, tokens: int, prefix: PrefixIndex) -> Cached:
    request = live.get(number)
    assert request is not None, f"request {number} is over"
    cached = prefix.longest(request, gang)
    assert cached is not None, "pieces out of order: nothing is kept of what comes before"
    if cached.tokens > tokens:
        cached = prefix.beginning(request, gang, tokens)
    assert cached is not None, "pieces out of order: nothing is kept of what comes before"
    assert cached.tokens == tokens, "pieces out of order: less is kept than is reused"
    return cached


def _named(placement: DecodePlacement) -> tuple[Share, ...]:
    return tuple([it for it in placement.shares if it.origin])


def _tokens(shares: Iterable[Share]) -> int:
    return sum(it.tokens for it in shares)
