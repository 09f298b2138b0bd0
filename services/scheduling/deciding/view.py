"""What a policy sees: the scheduler's live state, borrowed for one round and read-only.

Nothing is copied: a snapshot of ten thousand waiting requests costs 20 ms. Iterators and objects
are valid until `decide` returns, and a type checker refuses every attempt to change them. A policy
that tries things out keeps what differs in an overlay of its own (`policies/`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from csps.configurator.costs.cost_table import EXACT_STRATEGY, BestOption, StepLatency
from csps.protocols.core.topology import GroupShape, Location
from csps.services.scheduling.events.commands import PlacedSlice, RunStep
from csps.services.scheduling.events.events import GangId, InstanceId, RequestId, SequenceId, StepId
from csps.services.scheduling.events.limits import PreemptionDelay
from csps.services.scheduling.state.state import Priority


class StepView(Protocol):
    """An outstanding step."""

    @property
    def id(self) -> StepId: ...
    @property
    def high_priority(self) -> bool: ...
    @property
    def predicted_ns(self) -> int: ...
    @property
    def end_ns(self) -> int:
        """When it will have been computed; of those that are not urgent."""
        ...

    @property
    def unsent(self) -> bool:
        """The ranks have not heard of it, and it may be planned again (`decisions.Replan`)."""
        ...

    @property
    def delayed_ns(self) -> int:
        """What urgent steps on its instances have cost it, or will."""
        ...

    @property
    def preemption_delay(self) -> PreemptionDelay:
        """What they had cost its oldest request before."""
        ...


class InstanceView(Protocol):
    """One copy of the weights."""

    @property
    def id(self) -> InstanceId: ...
    @property
    def place(self) -> Location: ...
    @property
    def order(self) -> int:
        """Rank of its place among those of the gang: neighbours are near each other."""
        ...

    @property
    def capacity(self) -> int: ...
    @property
    def free_slots(self) -> int:
        """KV slots that nobody was promised."""
        ...

    @property
    def mastered(self) -> int:
        """Sequences that draw here, landing ones included."""
        ...

    @property
    def steps(self) -> Mapping[StepId, StepView]:
        """Outstanding ones, in the order of their launch."""
        ...

    @property
    def low_priority_steps(self) -> int:
        """Those of them that are not urgent."""
        ...

    @property
    def high_priority_ns(self) -> int:
        """Predicted time of those of them that are urgent."""
        ...

    @property
    def preempted_ns(self) -> int:
        """Predicted time of urgent steps that were given to it since it has long ones."""
        ...

    @property
    def preemption_delay_ns(self) -> int:
        """What urgent steps have cost long ones here, ever."""
        ...

    @property
    def free_at_ns(self) -> int:
        """When all of them will have been computed, as predicted; may be in the past."""
        ...

    @property
    def stepped_ns(self) -> int:
        """When the last one was done; the time of its coming up before the first."""
        ...


class SequenceView(Protocol):
    """A request that has a place."""

    @property
    def id(self) -> SequenceId: ...
    @property
    def slices(self) -> Sequence[PlacedSlice]:
        """Where its prompt's KV is decoded."""
        ...

    @property
    def answer(self) -> Sequence[PlacedSlice]:
        """Who keeps the answer's; none named: who draws it."""
        ...

    @property
    def master_id(self) -> InstanceId:
        """Who draws it."""
        ...

    @property
    def joined_ns(self) -> int | None:
        """Since when it is decoded; None while it is prefilled."""
        ...

    @property
    def request_id(self) -> RequestId: ...
    @property
    def answer_span(self) -> tuple[int, int]:
        """Positions of the answer that have slots, from one up to another."""
        ...

    @property
    def piggyback_tokens(self) -> int:
        """Tokens of its prompt that iterations have still to compute, at most."""
        ...

    @property
    def is_moving(self) -> bool:
        """Its KV is on its way to other instances."""
        ...


class GangView(Protocol):
    """What lives and dies together."""

    @property
    def id(self) -> GangId: ...
    @property
    def tp(self) -> int: ...
    @property
    def kv_bytes_per_token(self) -> int:
        """That a rank has of a token; 0: nobody knows."""
        ...

    @property
    def instances(self) -> Sequence[InstanceView]: ...
    @property
    def largest(self) -> int:
        """KV slots of the instance that has most."""
        ...

    @property
    def mastered(self) -> int:
        """Sequences that its instances draw, landing ones included: its decode group."""
        ...

    @property
    def iteration_ns(self) -> int:
        """Measured time from one token of a sequence to the next; 0 before the first answer."""
        ...

    @property
    def decode_ns(self) -> int:
        """How long answers have been decoded that ended lately, on average; 0 before the first."""
        ...

    @property
    def decoding(self) -> Mapping[SequenceId, SequenceView]:
        """Sequences that it decodes, those included that are still prefilled; in the order of
        their start."""
        ...


class PairView(Protocol):
    """A gang that prefills and one that decodes, and a connection between them; with permission
    for both, the two are one."""

    @property
    def prefill(self) -> GangView: ...
    @property
    def decode(self) -> GangView: ...
    @property
    def max_positions(self) -> int:
        """Longest prompt and answer together."""
        ...


class RequestView(Protocol):
    """A waiting request."""

    @property
    def id(self) -> RequestId:
        """Order of admission."""
        ...

    @property
    def cls(self) -> str: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int:
        """The most that it may draw: slots are promised for KV that does not exist yet."""
        ...

    @property
    def submitted_ns(self) -> int:
        """When its time to the first token began."""
        ...

    @property
    def waiting_since_ns(self) -> int: ...
    @property
    def delays_before(self) -> Mapping[InstanceId, int]:
        """`preemption_delay_ns` of the instances when it began to wait."""
        ...

    @property
    def blocked_ns(self) -> int | None:
        """Since when it is blocked, if it was found to be."""
        ...

    @property
    def bypassed_rounds(self) -> int:
        """Rounds in which younger ones went first (`decisions.Passed`)."""
        ...


class CostView(Protocol):
    """Predictions (`cost.Costs`)."""

    def best(
        self, cls: str, shape: GroupShape, history: int, length: int, waited_ns: int = 0
    ) -> BestOption:
        """The best option of a group, `waited_ns` after the request was submitted."""
        ...

    def exact(self, sp: int, tp: int, strategy: str = EXACT_STRATEGY) -> StepLatency:
        """Coefficients of exact attention on groups of `sp` instances, to compare many chunks."""
        ...

    def iteration_ns(self, sp: int, tp: int, batch: int, context: int) -> int:
        """A decode iteration."""
        ...

    def rows_alone(self, tp: int) -> int:
        """Rows from which on an instance is no longer as fast alone as two are together."""
        ...

    def transfer_ns(self, kind: str, size: int) -> int | None:
        """A message of `size` bytes over a kind of link; None: nobody has measured it."""
        ...


class CachedView(Protocol):
    """The beginning of a prompt that a gang has kept KV of (`state.Cached`)."""

    @property
    def tokens(self) -> int:
        """Whole blocks, and fewer than the prompt has."""
        ...

    @property
    def slices(self) -> tuple[PlacedSlice, ...]:
        """Where they lie; a step that goes on from them has all of these instances."""
        ...

    @property
    def taken(self) -> Mapping[InstanceId, int]:
        """Slots that are free no longer once they are used."""
        ...


class UnsentStepView(StepView, Protocol):
    """A step that the ranks have not heard of."""

    @property
    def command(self) -> RunStep | None:
        """What they will hear."""
        ...


class PlanView(Protocol):
    """The steps of a sequence that are sent one by one."""

    @property
    def version(self) -> int: ...
    @property
    def made_ns(self) -> int: ...
    @property
    def ends_ns(self) -> int:
        """When the last one was to end, as predicted when the plan was made."""
        ...

    @property
    def unsent(self) -> Sequence[UnsentStepView]:
        """Those that the ranks have not heard of, in order."""
        ...


class PlannedView(Protocol):
    """A sequence with such a plan."""

    @property
    def id(self) -> SequenceId: ...
    @property
    def request(self) -> RequestView: ...
    @property
    def plan(self) -> PlanView | None: ...


class View(Protocol):
    """All that a policy decides on."""

    @property
    def now_ns(self) -> int: ...
    @property
    def cost(self) -> CostView: ...
    @property
    def pairs(self) -> Sequence[PairView]:
        """Those that something can be started on, the oldest first."""
        ...

    def waiting(self, priority: Priority) -> Sequence[RequestView]:
        """The requests of a line in order of admission. It may be very long: no policy looks at
        all of it in every round."""
        ...

    @property
    def planned(self) -> Sequence[PlannedView]:
        """Sequences with steps that the ranks have not heard of, in the order of their start."""
        ...

    @property
    def blocked(self) -> Sequence[RequestView]:
        """Those of them that were found to be blocked (`decisions.Blocked`), in order of admission.
        One that finds slots but no instance may be blocked again before its turn comes."""
        ...

    def blocked_ns(self, request: RequestView) -> int:
        """Since when whoever passes the request is held against it: since it was found to be
        blocked, or from now on."""
        ...

    def cached(self, request: RequestView, gang: GangId) -> CachedView | None:
        """What a gang has kept of this prompt. A plan on the gang that computes it may begin behind
        it (`PlannedPiece.start`), or behind less of it; what lies where it is decoded need not be
        sent (`DecodePlacement.slices`)."""
        ...

    def rate_30s(self) -> int:
        """Requests submitted in the last 30 s."""
        ...
