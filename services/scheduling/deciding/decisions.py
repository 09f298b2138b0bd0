"""What a policy sees, what it is and decides, and the check of what fits the gangs at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import Protocol

import msgspec

from csps.configurator.costs.cost_table import Costs
from csps.protocols.core.errors import ContextLengthExceeded
from csps.protocols.core.placement import KvSlice
from csps.services.scheduling.events.events import GangId, InstanceId, RequestId, SequenceId
from csps.services.scheduling.state.state import (
    Cached,
    Gang,
    GangPair,
    Priority,
    Request,
    Sequence,
)


class SchedulerView(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """The state, costs and time of one round: all that a policy decides on.

    All objects are the scheduler's own and are valid until `decide` returns. A policy reads them
    and changes none of them, as `test_policies_change_nothing.py` checks. A policy that tries
    things out keeps the differences in overlays (`policies/rounds`).
    """

    # Nothing is copied: a copy of ten thousand waiting requests costs 20 ms.

    now_ns: int
    cost: Costs
    pairs: Many[GangPair]
    """Pairs of gangs on which something can start, the oldest first."""
    queues: Mapping[Priority, Many[Request]]
    """Waiting requests that may start, in order (`state.order_key`). A queue may be very long: no
    policy reads all of it in every round."""
    planned: Many[Sequence]
    """Sequences with unsent steps, in the order of their start."""
    blocked: Many[Request]
    """Waiting requests that were found to be blocked (`Blocked`), in order. A request
    that finds slots but no instance may be blocked again later."""
    blocked_ns: Callable[[Request], int]
    """Function that returns since when a request counts as blocked; now, if it was not blocked
    before. Time since then counts against whoever passes the request."""
    cached: Callable[[Request, GangId], Cached | None]
    """Function that returns the longest beginning of a prompt in a gang's prefix cache. The first
    chunk of a plan may start behind it or behind less of it (`PlannedChunk.start`). What lies
    where it is decoded need not be sent (`DecodePlacement.slices`)."""
    rate_30s: int
    """Requests submitted in the last 30 s."""
    shared: bool = False
    """True if several tenants were served lately: nothing may start long before it can be computed,
    because a modest tenant's request would wait behind it (`queue.RecentTokens`)."""

    def waiting(self, priority: Priority) -> Many[Request]:
        """Return the requests of a queue in order."""
        return self.queues[priority]


class Planned(msgspec.Struct, frozen=True, gc=False):
    """Base of all parts of decisions: as cheap as a tuple."""


class PlannedChunk(Planned, frozen=True):
    """Positions [start, start + length) of a waiting request.

    The first chunk of a request begins at 0, or behind the prefix that the gang has cached
    (`SchedulerView.cached`).
    """

    request_id: RequestId
    start: int
    length: int
    rows: tuple[KvSlice, ...] = ()
    """Positions that each instance computes (`placement.place`), each once; set in all chunks of a
    step or in none. Empty: cut at the step's bounds. Not every strategy takes rows."""
    placement: tuple[KvSlice, ...] = ()
    """Holders of the chunk's KV from this step on; empty: the instances that compute it. It may
    also name earlier positions, whose KV moves there. A gang that decodes in place stores KV where
    `DecodePlacement.slices` names, and nowhere else."""


class PlannedStep(Planned, frozen=True, kw_only=True):
    """Step to launch. Its chunks are laid end to end and cut at `bounds`, or have rows."""

    group: tuple[InstanceId, ...]
    """Instances of one prefill gang in topology order: all that compute something or that hold KV
    of its chunks, before or after."""
    bounds: tuple[int, ...]
    """Cuts: instance `group[i]` computes tokens [bounds[i], bounds[i+1]), or as many by its rows.
    """
    chunks: tuple[PlannedChunk, ...]
    strategy: str
    predicted_ns: int
    high_priority: bool = False


class DecodePlacement(Planned, frozen=True):
    """Placement of a request's KV, and its master."""

    request_id: RequestId
    slices: tuple[KvSlice, ...]
    """Placement of the prompt's KV: each position once. Cached KV on the decode gang may be named
    as it lies there (`SchedulerView.cached`), with its source: it takes no slots and is not sent.
    If the prompt is computed there as well, reused KV has to be named so."""
    master: InstanceId
    """Instance that samples. Slots for all tokens to come are reserved there, unless `answer` names
    others."""
    answer: tuple[KvSlice, ...] = ()
    """Placement of the KV of tokens to come, positions from the prompt's end on: each once."""


class StartPlan(Planned, frozen=True, kw_only=True):
    """Start these requests now: reserve all slots, launch all steps.

    Several requests may share a step (a batch, fillers), and one request may have several steps
    (chunks, in order). The scheduler derives where the KV of earlier chunks lies.
    """

    steps: tuple[PlannedStep, ...]
    decode: tuple[DecodePlacement, ...]
    """Placement of each request that has a chunk in a step."""
    ahead_ns: int | None = None
    """Time before their predicted begin at which steps are sent to the ranks; until then they may
    be planned again (`Replan`). None: send all at once. Only for a plan of one request."""


class Replan(Planned, frozen=True, kw_only=True):
    """Replace the unsent steps of a sequence by others, in the same place of the queue. The new
    steps need free slots beside those of the old ones."""

    sequence_id: SequenceId
    version: int
    """Version of the plan that this one was made from."""
    steps: tuple[PlannedStep, ...]
    """Replacement steps. If empty, keep the old steps and only refresh their predictions."""


class PiggybackPlan(Planned, frozen=True, kw_only=True):
    """Start this request in a gang's decode batch: iterations compute its prompt in chunks, where
    its tokens will be sampled."""

    placement: DecodePlacement
    budget: int
    """Tokens that an iteration of the gang may compute on each master."""


class MovePlan(Planned, frozen=True, kw_only=True):
    """Move a decoding sequence with its KV to other instances of its gang."""

    sequence_id: SequenceId
    placement: DecodePlacement
    """New placement of the same positions, those of the answer named in full."""


class Blocked(Planned, frozen=True, kw_only=True):
    """A request at the head of its queue finds no slots. Requests that pass it from now on must end
    within the preemption budget."""

    request_id: RequestId


class Bypassed(Planned, frozen=True, kw_only=True):
    """Younger requests have started before this one in this round."""

    request_id: RequestId


class WakeAt(Planned, frozen=True, kw_only=True):
    """Decide again at this time, although nothing may have changed."""

    at_ns: int


Decision = StartPlan | Replan | PiggybackPlan | MovePlan | Blocked | Bypassed | WakeAt


class Policy(Protocol):
    """Decides which requests start, where, and together with which others.

    A policy keeps no state between rounds: what it must remember is state of the scheduler. So the
    router and the simulator drive the same object, and a log can be replayed. It reads the
    scheduler's state and changes none of it.
    """

    @property
    def name(self) -> str:
        """Name in `scheduling: {policy: NAME}`."""
        ...

    @property
    def options(self) -> object:
        """Frozen dataclass of the policy's options."""
        ...

    @property
    def decode_options(self) -> object:
        """Options of decoding, which all policies have."""
        ...

    def priority(self, prompt_tokens: int, pairs: Many[GangPair]) -> Priority:
        """Return the queue in which a request waits. Asked again when gangs come up."""
        ...

    def decide(self, view: SchedulerView) -> Many[Decision]:
        """Decide what to do now; requests in no plan go on waiting.

        Asked whenever something has changed. All plans together must fit into the free slots.
        """
        ...

    @property
    def whole_prompts(self) -> bool:
        """True if a prompt is computed at once and by the strategies of its class: what sparse
        attention needs."""
        ...

    @property
    def regroups(self) -> bool:
        """True if it decides although nothing waits: where running sequences are decoded
        (`MovePlan`)."""
        ...

    def fits(self, pair: GangPair, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether `decide` would start such a request if both gangs were idle and no other
        request waited. Admission asks it for every request.

        More tokens never fit where fewer do not.
        """
        ...


def digest_of(policy: Policy) -> str:
    """Return the digest of a policy's options, which every log contains."""
    return f"{policy.options} {policy.decode_options}"


class CapacityCheck:
    """Says which requests the gangs could ever serve. A request that no round can place would wait
    forever and block all behind it. Without gangs, every request fits.

    It asks the policy's `fits`, because `decide` on an idle copy of the gangs takes ten times as
    long and more.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._pairs: list[GangPair] = []

    def use(self, pairs: Many[GangPair]) -> None:
        """Use these gangs; if there are none, go on with the previous ones."""
        if pairs:
            self._pairs = list(pairs)

    @property
    def known(self) -> bool:
        """True if there has been a pair of gangs."""
        return bool(self._pairs)

    @property
    def promised(self) -> int:
        """Tokens of the longest request, whichever way prompt and answer share them, as far as
        the answer fits on one instance."""
        limits = (min(_context_limit(pair), pair.prefill.capacity) for pair in self._pairs)
        return max(limits, default=0)

    def decode_share(self, requests: int) -> int:
        """Return the KV slots that each of so many requests may take to have room side by side on
        every gang that decodes, none of them on more than one instance; 0 without gangs."""
        return min((_share(pair.decode, requests) for pair in self._pairs), default=0)

    @property
    def decode_slots(self) -> int:
        """KV slots of all gangs that decode; 0 without gangs."""
        return sum({pair.decode.id: pair.decode.capacity for pair in self._pairs}.values())

    def longest_answer(self, prompt_tokens: int) -> int:
        """Return the most tokens that may follow a prompt; 0 or less if the prompt has no room."""
        return max((self._longest_answer(pair, prompt_tokens) for pair in self._pairs), default=0)

    def fits(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Return whether the policy would start the request if there were no other."""
        total = prompt_tokens + output_tokens
        return not self._pairs or any(
            total <= pair.max_positions and self._policy.fits(pair, prompt_tokens, output_tokens)
            for pair in self._pairs
        )

    def rejection(self, prompt_tokens: int, output_tokens: int) -> ContextLengthExceeded | None:
        """Return the error for a request that does not fit, with the limit; None if it fits."""
        if self.fits(prompt_tokens, output_tokens):
            return None
        longest = self.longest_answer(prompt_tokens)
        return ContextLengthExceeded(
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            limit=prompt_tokens + longest if longest > 0 else self.promised,
        )

    def _longest_answer(self, pair: GangPair, prompt_tokens: int) -> int:
        most = min(_context_limit(pair) - prompt_tokens, pair.decode.largest)
        if most <= 0 or self._policy.fits(pair, prompt_tokens, most):
            return most
        fits, too_long = 0, most
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self._policy.fits(pair, prompt_tokens, middle):
                fits = middle
            else:
                too_long = middle
        return fits


def _share(gang: Gang, requests: int) -> int:
    on_an_instance = math.ceil(requests / len(gang.slots_by_order))
    return min(gang.capacity // requests, min(gang.slots_by_order) // on_an_instance)


def _context_limit(pair: GangPair) -> int:
    return min(pair.max_positions, pair.decode.capacity)
