"""Every prompt on a group of the same size: the baseline that papers call Fixed-SP.

The instances of a gang are cut into groups of `sp` neighbours; what is left over computes nothing.
A prompt goes to the group that will be free first, as predicted, and waits there for those before
it. Strictly first come, first served: when the oldest finds no slots, all wait. What a group has
kept of a prompt is not computed again, if that group is free soon enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from csps.protocols.group_shape import GroupShape
from csps.services.scheduling.decisions import (
    Blocked,
    Decision,
    DecodePlacement,
    PlannedPiece,
    PlannedStep,
    StartPlan,
    Trial,
)
from csps.services.scheduling.policies.decode_overlay import DecodeOptions, DecodeOverlay, Placed
from csps.services.scheduling.policies.option_checks import check_least
from csps.services.scheduling.policies.prefill_overlay import PrefillOverlay, Spot
from csps.services.scheduling.policies.reuse import Reuse, Reuses, reuse_plan
from csps.services.scheduling.ring_rows import in_zigzag
from csps.services.scheduling.shares import bounds_of, level_shares
from csps.services.scheduling.state import Line
from csps.services.scheduling.view import PairView, RequestView, View


@dataclass(frozen=True, kw_only=True)
class FixedSpOptions:
    """The baseline's only choices."""

    sp: int = 1
    """Instances of every group; all of a gang that has fewer."""
    steps_per_group: int = 2
    """Steps that a group is given at a time, one to run and others to follow without a gap."""

    def __post_init__(self) -> None:
        check_least(self, 1, "sp", "steps_per_group")


class FixedSp:
    """The policy of this module's description."""

    name = "fixed_sp"
    whole_prompts = True
    regroups = False

    def __init__(
        self, options: FixedSpOptions | None = None, decode: DecodeOptions | None = None
    ) -> None:
        self.options, self.decode_options = options or FixedSpOptions(), decode or DecodeOptions()

    def line(self, prompt_tokens: int, pairs: Sequence[PairView]) -> Line:
        """Nobody is urgent."""
        return "long"

    def decide(self, view: View) -> Sequence[Decision]:
        """Start the oldest requests until one has to wait."""
        pairs = [
            _Groups(pair, view.now_ns, self.options, self.decode_options) for pair in view.pairs
        ]
        decisions: list[Decision] = []
        for request in view.waiting("long"):
            plan = next((it for pair in pairs if (it := pair.start(request, view))), None)
            if plan is None:
                if not any(pair.open for pair in pairs):
                    break
                decisions.append(Blocked(request=request.id))
                break
            decisions.append(plan)
        return decisions

    def trial(self, pair: PairView) -> Trial:
        """On idle gangs."""
        return _Trial(_Groups(pair, 0, self.options, self.decode_options))


class _Trial:
    def __init__(self, groups: _Groups) -> None:
        self._groups = groups

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """On any of the groups, and with the decode gang to itself."""
        return self._groups.fits(prompt_tokens, output_tokens)


@dataclass(slots=True, eq=False)
class _Group:
    """Neighbours that compute together; their lines are the same."""

    spots: list[Spot]
    shape: GroupShape

    @property
    def steps(self) -> int:
        return max(it.long_steps for it in self.spots)

    @property
    def free_at_ns(self) -> int:
        return max(it.free_at_ns for it in self.spots)

    def shares(self, tokens: int) -> list[int] | None:
        """Tokens of each; None if they have no slots for so many."""
        return level_shares(tokens, [it.free for it in self.spots])


class _Queue(NamedTuple):
    """A group by the length of its line; the least is the best."""

    free_at_ns: int
    number: int


class _Groups:
    """The groups of a pair of gangs in a round."""

    def __init__(
        self, pair: PairView, now_ns: int, options: FixedSpOptions, decode: DecodeOptions
    ) -> None:
        self._options, self._max_positions = options, pair.max_positions
        self._gang, self._decoding = pair.prefill.id, pair.decode.id
        self._prefill = PrefillOverlay(pair.prefill, now_ns)
        self._decode = DecodeOverlay(pair.decode, decode)
        self._groups = list(self._cut(self._prefill.spots))
        self._queues = [
            _Queue(it.free_at_ns, number)
            for number, it in enumerate(self._groups)
            if it.steps < options.steps_per_group
        ]
        heapq.heapify(self._queues)

    def _cut(self, spots: Sequence[Spot]) -> Iterator[_Group]:
        sp = min(self._options.sp, len(spots))
        neighbours = sorted(spots, key=lambda it: it.order)
        for start in range(0, len(spots) - sp + 1, sp):
            group = neighbours[start : start + sp]
            yield _Group(group, self._prefill.shape(group))

    @property
    def open(self) -> bool:
        """Some group's line is not full."""
        return bool(self._queues)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether anything of the groups and of decode is enough for a request."""
        if not self._decode.has_room(prompt_tokens, output_tokens):
            return False
        return any(it.shares(prompt_tokens) is not None for it in self._groups)

    def start(self, request: RequestView, view: View) -> StartPlan | None:
        """Give the request to the group that will be free first."""
        if request.prompt_tokens + request.output_tokens > self._max_positions:
            return None  # another pair may serve it
        kept = view.cached(request, self._decoding)
        placed = self._decode.place_behind(kept, request.prompt_tokens, request.output_tokens)
        if placed is None:
            return None
        if (number := self._reusing(request, view)) is not None:
            return self._plan_reuse(request, *number, placed)
        full: list[_Queue] = []
        plan = None
        while self._queues and plan is None:
            queue = heapq.heappop(self._queues)
            group = self._groups[queue.number]
            shares = group.shares(request.prompt_tokens)
            if shares is None:
                full.append(queue)
            else:
                plan = self._plan(request, view, group, shares, placed)
                if group.steps < self._options.steps_per_group:
                    heapq.heappush(self._queues, _Queue(group.free_at_ns, queue.number))
        for queue in full:
            heapq.heappush(self._queues, queue)
        return plan

    def _reusing(self, request: RequestView, view: View) -> tuple[int, Reuse] | None:
        """The group that has kept some of the prompt, if that makes its answer begin sooner."""
        cached = view.cached(request, self._gang)
        if cached is None:
            return None
        reuses, held = Reuses(self._prefill, view.cost), {it.instance for it in cached.shares}
        for queue in self._queues:
            group = self._groups[queue.number]
            if held <= {it.id for it in group.spots}:
                reuse = reuses.on(request, cached, group.spots)
                soonest = self._groups[self._queues[0].number]
                whole = view.cost.best(request.cls, soonest.shape, 0, request.prompt_tokens)
                if reuse and reuse.ends_ns <= soonest.free_at_ns + whole.time_ns:
                    reuses.take(reuse)
                    return queue.number, reuse
        return None

    def _plan_reuse(
        self, request: RequestView, number: int, reuse: Reuse, placed: Placed
    ) -> StartPlan:
        self._prefill.start_long(request, reuse.spots, reuse.shares, reuse.time_ns)
        self._decode.take(placed, request.output_tokens)
        group = self._groups[number]
        queues = [it for it in self._queues if it.number != number]
        if group.steps < self._options.steps_per_group:
            queues.append(_Queue(group.free_at_ns, number))
        heapq.heapify(queues)
        self._queues = queues
        return reuse_plan(request, reuse, placed)

    def _plan(
        self, request: RequestView, view: View, group: _Group, shares: list[int], placed: Placed
    ) -> StartPlan:
        waited_ns = max(group.free_at_ns, view.now_ns) - request.submitted_ns
        choice = view.cost.best(request.cls, group.shape, 0, request.prompt_tokens, waited_ns)
        self._prefill.start_long(request, group.spots, shares, choice.time_ns)
        self._decode.take(placed, request.output_tokens)
        used = [(spot.id, share) for spot, share in zip(group.spots, shares, strict=True) if share]
        step = PlannedStep(
            group=tuple([spot for spot, _ in used]),
            bounds=bounds_of([share for _, share in used]),
            pieces=(PlannedPiece(request.id, 0, request.prompt_tokens),),
            strategy=choice.strategy,
            predicted_ns=choice.time_ns,
        )
        decode = (DecodePlacement(request.id, placed.shares, placed.master),)
        return StartPlan(steps=(in_zigzag(step),), decode=decode)
