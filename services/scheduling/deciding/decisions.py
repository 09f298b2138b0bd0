"""The seam between deciding and doing: what a policy is, and what it decides.

What fits a cluster that has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from csps.protocols.core.errors import ContextLengthExceeded
from csps.services.scheduling.deciding.view import PairView, View
from csps.services.scheduling.events.commands import PlacedSlice
from csps.services.scheduling.events.events import InstanceId, RequestId, SequenceId
from csps.services.scheduling.state.state import Gang, GangPair, Priority, idle_copy


class Planned(msgspec.Struct, frozen=True, gc=False):
    """Base of all that decisions are made of: as cheap as a tuple."""


class PlannedChunk(Planned, frozen=True):
    """Positions [start, start + length) of a waiting request.

    The first one of a request begins at 0, or behind what the gang has kept of the prompt
    (`View.cached`).
    """

    request_id: RequestId
    start: int
    length: int
    rows: tuple[PlacedSlice, ...] = ()
    """Who computes what (`slices.laid_out`), each position once; empty cuts at the step's bounds.
    Of all pieces of a step or of none, and not every strategy takes such rows."""
    placement: tuple[PlacedSlice, ...] = ()
    """Who keeps the chunk's KV from this step on; empty: who computes it. It may also name earlier
    positions, whose KV moves there. A gang that decodes in place keeps it where
    `DecodePlacement.slices` says, and nowhere else."""


class PlannedStep(Planned, frozen=True, kw_only=True):
    """A step to be launched. Its pieces are laid end to end and cut at `bounds`, or have rows."""

    group: tuple[InstanceId, ...]
    """Of one gang that may prefill, in topology order: all that compute something, or hold or keep
    KV of its pieces."""
    bounds: tuple[int, ...]
    """Instance `group[i]` computes tokens [bounds[i], bounds[i+1]), or as many by its rows."""
    chunks: tuple[PlannedChunk, ...]
    strategy: str
    predicted_ns: int
    high_priority: bool = False


class DecodePlacement(Planned, frozen=True):
    """Where a request's KV goes and who draws its tokens."""

    request_id: RequestId
    slices: tuple[PlacedSlice, ...]
    """The prompt's KV: each position once. What was kept where it is decoded may be named as it
    lies there (`View.cached`), with its origin: then it takes no slots and is not sent. If it is
    computed there as well, what is reused is named so."""
    master: InstanceId
    """Slots for all tokens to come are set aside there, if `answer` does not name others."""
    answer: tuple[PlacedSlice, ...] = ()
    """Who keeps the KV of the tokens to come, positions from the prompt's end on: each once."""


class StartPlan(Planned, frozen=True, kw_only=True):
    """Start these requests now: reserve all slots, launch all steps.

    Several requests may share a step (a batch, fillers), one request may have several steps
    (chunks, in order). The scheduler derives where the KV of earlier chunks lies.
    """

    steps: tuple[PlannedStep, ...]
    decode: tuple[DecodePlacement, ...]
    """Of each request that has a piece in a step."""
    ahead_ns: int | None = None
    """Steps are sent to the ranks so long before they begin, as predicted, and may be planned again
    until then (`Replan`); None: all at once. Of a plan of one request."""


class Replan(Planned, frozen=True, kw_only=True):
    """Steps of a sequence that the ranks have not heard of are to be others, in the same place in
    the line. The slots of the new ones must be free beside those of the old ones."""

    sequence_id: SequenceId
    version: int
    """Of the plan that this one was made from."""
    steps: tuple[PlannedStep, ...]
    """Of all that is left; none: the old ones stay, and what is predicted of them now is what
    reality is compared with from now on."""


class PiggybackPlan(Planned, frozen=True, kw_only=True):
    """Start this request in the stream of a gang that decodes: iterations compute its prompt, in
    pieces, where its tokens will be drawn."""

    placement: DecodePlacement
    budget: int
    """Tokens that an iteration of the gang's stream may compute on each master."""


class MovePlan(Planned, frozen=True, kw_only=True):
    """Let a sequence that is decoded go on elsewhere in its gang, with its KV."""

    sequence_id: SequenceId
    placement: DecodePlacement
    """Of the same positions, those of the answer named in full."""


class Blocked(Planned, frozen=True, kw_only=True):
    """There are not slots enough for a request whose turn it is. Whoever passes it from now on
    must have ended within the bound of overtaking."""

    request_id: RequestId


class Bypassed(Planned, frozen=True, kw_only=True):
    """Younger requests have gone before this one in this round."""

    request_id: RequestId


class WakeAt(Planned, frozen=True, kw_only=True):
    """Ask again then, although nothing may have changed."""

    at_ns: int


Decision = StartPlan | Replan | PiggybackPlan | MovePlan | Blocked | Bypassed | WakeAt


class IdleCapacity(Protocol):
    """What a policy could do with two gangs that have nothing else to do."""

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether it would start such a request. More tokens never fit where fewer do not."""
        ...


class Policy(Protocol):
    """Decides which requests start, where, and together with which others.

    A policy keeps no state between rounds: what it must remember is data of the scheduler, so that
    router and simulator drive the same object and a log can be replayed.
    """

    @property
    def name(self) -> str:
        """As in `scheduling: {policy: NAME}`."""
        ...

    @property
    def options(self) -> object:
        """A frozen dataclass of what users may tell it."""
        ...

    @property
    def decode_options(self) -> object:
        """Those about decoding, which all policies have."""
        ...

    def priority(self, prompt_tokens: int, pairs: Sequence[PairView]) -> Priority:
        """Where a request waits. Asked again when gangs come up."""
        ...

    def decide(self, view: View) -> Sequence[Decision]:
        """What to do now; requests in no plan go on waiting.

        Asked whenever something has changed. All plans together must fit into the free slots.
        """
        ...

    @property
    def whole_prompts(self) -> bool:
        """A prompt is computed at once and by the strategies of its class: what sparse attention
        needs."""
        ...

    @property
    def regroups(self) -> bool:
        """It has something to decide although nothing waits: where that is decoded which has begun
        (`MovePlan`)."""
        ...

    def idle_capacity(self, pair: PairView) -> IdleCapacity:
        """Placements on a pair of gangs that have nothing to do. Admission asks it for every
        request: what it accepts, `decide` must start at the latest when everything else ended."""
        ...


def digest_of(policy: Policy) -> str:
    """Equal options, equal digests; in every log."""
    return f"{policy.options} {policy.decode_options}"


class CapacityCheck:
    """Asks the policy itself, on idle copies of the present gangs: a request that no round could
    ever place would wait for ever, and hold up all behind it. Without gangs everything fits."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._capacities: list[tuple[GangPair, IdleCapacity]] = []

    def use(self, pairs: Sequence[GangPair]) -> None:
        """Gangs have come or gone; while there are none, those that were there last count."""
        if not pairs:
            return
        idle = [_idle_pair(pair) for pair in pairs]
        self._capacities = [(pair, self._policy.idle_capacity(pair)) for pair in idle]

    @property
    def known(self) -> bool:
        """There was a pair of gangs once."""
        return bool(self._capacities)

    @property
    def promised(self) -> int:
        """Tokens up to which prompt and answer may share the room as a client likes, as far as
        the answer fits on one instance."""
        limits = (min(_context_limit(pair), _slots(pair.prefill)) for pair, _ in self._capacities)
        return max(limits, default=0)

    def longest_answer(self, prompt_tokens: int) -> int:
        """Most tokens that may follow a prompt; 0 or less if there is no room for the prompt."""
        return max(
            (
                _longest_answer(pair, idle_capacity, prompt_tokens)
                for pair, idle_capacity in self._capacities
            ),
            default=0,
        )

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether the policy would place the request if there were no other."""
        total = prompt_tokens + output_tokens
        return not self._capacities or any(
            total <= pair.max_positions and idle_capacity.fits(prompt_tokens, output_tokens)
            for pair, idle_capacity in self._capacities
        )

    def rejection(self, prompt_tokens: int, output_tokens: int) -> ContextLengthExceeded | None:
        """What is to be said about a request that does not fit, with both numbers."""
        if self.fits(prompt_tokens, output_tokens):
            return None
        longest = self.longest_answer(prompt_tokens)
        return ContextLengthExceeded(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            limit=prompt_tokens + longest if longest > 0 else self.promised,
        )


def _idle_pair(pair: GangPair) -> GangPair:
    prefill = idle_copy(pair.prefill)
    decode = prefill if pair.decode is pair.prefill else idle_copy(pair.decode)
    return GangPair(prefill=prefill, decode=decode)


def _slots(gang: Gang) -> int:
    return sum(instance.capacity for instance in gang.instances)


def _context_limit(pair: GangPair) -> int:
    return min(pair.max_positions, _slots(pair.decode))


def _longest_answer(pair: GangPair, idle_capacity: IdleCapacity, prompt_tokens: int) -> int:
    """By bisection below what slots allow; mostly that fits at once."""
    most = min(_context_limit(pair) - prompt_tokens, pair.decode.largest)
    if most <= 0 or idle_capacity.fits(prompt_tokens, most):
        return most
    fits, misfits = 0, most
    while misfits - fits > 1:
        middle = (fits + misfits) // 2
        if idle_capacity.fits(prompt_tokens, middle):
            fits = middle
        else:
            misfits = middle
    return fits
