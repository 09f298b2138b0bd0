"""Placement of requests on a decode gang during a round, and piggybacked ends of prompts.

A round decides about several requests before anything changes. `DecodeOverlay` holds a gang's free
slots and batch as they will be after these decisions, and places further requests there.

`Piggybacking` starts a prompt inside the next decode iterations if the gang has cached all but its
end (`decisions.PiggybackPlan`). No prefill instance takes part, and no KV is transferred. Decoding
requests wait longer for that iteration, so an option bounds the length of the end.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from csps.configurator.costs.cost_table import EXACT, Costs
from csps.protocols.attention.plan import AUTO
from csps.protocols.core.errors import ConfigError, abridged
from csps.protocols.core.placement import KvSlice, level_sizes, own, shifted, tokens_on
from csps.protocols.core.topology import GroupShape
from csps.services.scheduling.deciding.decisions import DecodePlacement, PiggybackPlan
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.state.state import Cached, Gang, Request

SHORT_REST = 8
"""Times that a cached prefix is at least as long as what stays where it ends. A conversation then
changes its instance only when it has grown by an eighth, or has no slots there."""


def check_least(options: object, least: int, *names: str) -> None:
    """Check that options are at least `least`.

    Raises:
        ConfigError: one is less; the message names the option and its value.
    """
    for name in names:
        if (value := getattr(options, name)) < least:
            raise ConfigError(f"option {name} must be at least {least}, not {value}")


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Options for decoding, which all policies have."""

    spread_tokens: int | str = AUTO
    """Prompt tokens per decode instance, which reads their KV in each iteration. `auto`: as few
    instances as are predicted to iterate fastest, since each of them also costs an exchange in each
    layer."""
    max_batch: int = 64
    """Maximum concurrent requests on a decode gang, including those still receiving KV."""
    prefill_tokens_max: int = 0
    """Longest end of a prompt that a decode gang may compute if it has cached the rest
    (`Piggybacking`); 0: none."""

    def __post_init__(self) -> None:
        if isinstance(self.spread_tokens, str):
            if self.spread_tokens != AUTO:
                raise ConfigError(
                    f"option spread_tokens must be {AUTO} or a number, not "
                    f"{abridged(self.spread_tokens)}"
                )
        else:
            check_least(self, 1, "spread_tokens")
        check_least(self, 1, "max_batch")
        check_least(self, 0, "prefill_tokens_max")


SPARED = 8
"""One in so many of a decode gang's slots, and of its batch, is left to modest tenants while
several share it: else their prompts would wait until an answer ends, often a whole batch."""


class Spare(NamedTuple):
    """What only modest tenants may take of a decode gang."""

    batch: int = 0
    slots: int = 0

    @staticmethod
    def of(gang: Gang, max_batch: int, *, shared: bool) -> Spare:
        """Return what is left to modest tenants, if several share the gang."""
        return Spare(max_batch // SPARED, gang.capacity // SPARED) if shared else Spare()

    def leaves(self, tokens: int, *, batch: int, free: int, capacity: int) -> bool:
        """Return True if a request of a tenant that is not modest may start.

        Args:
            tokens: slots that it needs. One that needs more than is ever left to it takes any.
            batch: requests that the gang may still start.
            free: its free slots.
            capacity: all its slots.
        """
        slots = self.slots if tokens <= capacity - self.slots else 0
        return batch > self.batch and tokens <= free - slots


class Placed(msgspec.Struct, frozen=True, gc=False):
    """Placement chosen for a request."""

    slices: tuple[KvSlice, ...]
    master: InstanceId
    answer: tuple[KvSlice, ...] = ()
    """Holders of the answer's KV; empty: the master."""
    taken: Mapping[InstanceId, int] = MappingProxyType({})
    """Slots of the prefix cache that the slices use, and that are no longer free."""


class _Holder(msgspec.Struct, eq=False, gc=False):
    """An instance of the gang with its free slots and the sequences that it samples."""

    id: InstanceId
    order: int
    free: int
    mastered: int
    more: int
    """Sequences that it can still be the master of (`Instance.more_masters`)."""

    @property
    def answers(self) -> int:
        """Free slots for the answer of a sequence that is sampled here; negative for none."""
        return self.free if self.more > 0 else -1

    @property
    def rank(self) -> tuple[int, InstanceId]:
        """Sort key, the instance with most free slots per request first (Tetris §5).

        The new request counts as one.
        """
        return -(self.free // (self.mastered + 1)), self.id


def fits_idle(gang: Gang, prompt_tokens: int, output_tokens: int) -> bool:
    """Return whether `DecodeOverlay.place` finds a place on a gang that has nothing to do."""
    return prompt_tokens + output_tokens <= gang.capacity and output_tokens <= gang.largest


class DecodeOverlay:
    """A decode gang's instances as they will be after the decisions of a round.

    Args:
        shared: whether several tenants share the gang.
    """

    def __init__(
        self, gang: Gang, options: DecodeOptions, cost: Costs, *, shared: bool = False
    ) -> None:
        self._options, self._cost, self._tp = options, cost, gang.tp
        self._batch, self._capacity = gang.mastered, gang.capacity
        self._spare = Spare.of(gang, options.max_batch, shared=shared)
        self._holders = {
            instance.id: _Holder(
                instance.id,
                instance.order,
                instance.free_slots,
                instance.mastered,
                instance.more_masters,
            )
            for instance in gang.instances
        }
        self._freest = sorted(holder.rank for holder in self._holders.values())
        self._free = sum(holder.free for holder in self._holders.values())
        self._largest = -1
        """Free slots of the instance with most for an answer; negative if unknown."""

    def has_room(self, prompt_tokens: int, output_tokens: int, *, modest: bool = False) -> bool:
        """Return True if `place` finds enough slots, with those of the answer on one instance.

        Args:
            modest: whether the request's tenant is modest.
        """
        if not self._may_start(prompt_tokens + output_tokens, modest=modest):
            return False
        if self._holders[self._freest[0][1]].answers >= output_tokens:
            return True
        if self._largest < 0:
            self._largest = max(holder.answers for holder in self._holders.values())
        return output_tokens <= self._largest

    def _may_start(self, tokens: int, *, modest: bool) -> bool:
        """Return True if the batch and the slots of all instances together have room."""
        spare = Spare() if modest else self._spare
        batch = self._options.max_batch - self._batch
        return spare.leaves(tokens, batch=batch, free=self._free, capacity=self._capacity)

    def place(
        self, prompt_tokens: int, output_tokens: int, *, modest: bool = False
    ) -> Placed | None:
        """Choose the holders of a request's KV and its master; None without enough slots.

        Takes as few instances as `spread_tokens` allows, or as are fastest, those with most free
        slots first, and more if these have too few slots.
        """
        if not self.has_room(prompt_tokens, output_tokens, modest=modest):
            return None
        wanted = self._wanted(prompt_tokens)
        if wanted == 1:
            for _, instance in self._freest:
                if self._holders[instance].answers >= prompt_tokens + output_tokens:
                    return Placed((KvSlice(instance, 0, prompt_tokens),), instance)
        return self._spread(prompt_tokens, output_tokens, wanted)

    def _wanted(self, prompt_tokens: int) -> int:
        """Return how many instances should hold a prompt's KV, if they have slots."""
        per_instance = self._options.spread_tokens
        if isinstance(per_instance, int):
            return -(-prompt_tokens // per_instance)
        # Of this sequence alone: how the others are placed does not change.
        sizes = {1 << exponent for exponent in range(len(self._holders).bit_length())}
        return min(
            sorted(sizes | {len(self._holders)}),
            key=lambda sp: self._cost.iteration_ns(sp, self._tp, 1, prompt_tokens),
        )

    def place_whole(
        self, prompt_tokens: int, output_tokens: int, *, modest: bool = False
    ) -> Placed | None:
        """Place all of a request on the instance with most freeness; None without enough slots.

        Freeness is the number of unreserved slots per request, including requests that still
        receive KV (Tetris §5.2).
        """
        total = prompt_tokens + output_tokens
        if not self._may_start(total, modest=modest):
            return None
        roomy = [holder for holder in self._holders.values() if holder.answers >= total]
        if not roomy:
            return None
        # Fractions are compared by cross-multiplication, since floats would lose ties.
        best = roomy[0]
        for holder in roomy[1:]:
            if holder.free * max(1, best.mastered) > best.free * max(1, holder.mastered):
                best = holder
        return Placed((KvSlice(best.id, 0, prompt_tokens),), best.id)

    def place_after(
        self,
        cached: Cached | None,
        prompt_tokens: int,
        output_tokens: int,
        *,
        modest: bool = False,
    ) -> Placed | None:
        """Place a request after its cached prefix, or as a whole if the rest has no slots then.

        A short rest stays where the prefix ends. If each turn of a conversation went to the
        instance with most free slots, all instances would take part in each iteration, and the
        conversation would have a slice for each turn.
        """
        if cached is not None and self.has_free(cached.taken):
            tokens = prompt_tokens - cached.tokens
            self.occupy(cached.taken)
            rest = self._continued(cached, tokens, output_tokens, modest=modest) or self.place(
                tokens, output_tokens, modest=modest
            )
            self.occupy(cached.taken, -1)
            if rest is not None:
                slices = (*cached.slices, *shifted(rest.slices, cached.tokens))
                return Placed(slices, rest.master, taken=cached.taken)
        return self.place(prompt_tokens, output_tokens, modest=modest)

    def _continued(
        self, cached: Cached, tokens: int, output_tokens: int, *, modest: bool
    ) -> Placed | None:
        """Place a short rest where its prefix ends; None if it is long or has no slots there."""
        total = tokens + output_tokens
        if tokens * SHORT_REST > cached.tokens or not self._may_start(total, modest=modest):
            return None
        last = max(cached.slices, key=attrgetter("stop")).instance
        if self._holders[last].answers < total:
            return None
        return Placed((KvSlice(last, 0, tokens),), last)

    def take(self, placed: Placed, output_tokens: int) -> None:
        """Count the slots of a placement as used."""
        self._change(placed, output_tokens, 1)

    def free(self, placed: Placed, output_tokens: int) -> None:
        """Undo `take`."""
        self._change(placed, output_tokens, -1)

    def _change(self, placed: Placed, output_tokens: int, sign: int) -> None:
        slots = tokens_on(own(placed.slices))
        for instance, count in (*placed.taken.items(), (placed.master, output_tokens)):
            slots[instance] = slots.get(instance, 0) + count
        self.occupy(slots, sign, master=placed.master)
        self._batch += sign

    def has_free(self, slots: Mapping[InstanceId, int]) -> bool:
        """Return True if each instance has the given number of free slots."""
        return all(self._holders[instance].free >= count for instance, count in slots.items())

    def occupy(
        self, slots: Mapping[InstanceId, int], sign: int = 1, *, master: InstanceId | None = None
    ) -> None:
        """Count slots as used (`sign` 1) or free (-1), and a sequence of `master` likewise."""
        for instance, count in slots.items():
            holder = self._holders[instance]
            del self._freest[bisect_left(self._freest, holder.rank)]
            if holder.answers == self._largest:
                self._largest = -1
            holder.free -= sign * count
            if instance == master:
                holder.mastered += sign
                holder.more -= sign
            if holder.answers > self._largest >= 0:
                self._largest = holder.answers
            insort(self._freest, holder.rank)
            self._free -= sign * count

    def _spread(self, prompt_tokens: int, output_tokens: int, wanted: int) -> Placed:
        """Place a request on the fewest instances with enough slots, but at least `wanted`."""
        room, roomy = -output_tokens, False
        for count, (_, instance) in enumerate(self._freest, 1):
            holder = self._holders[instance]
            room += holder.free
            roomy = roomy or holder.answers >= output_tokens
            enough = count >= wanted or count == len(self._freest)
            if enough and roomy and room >= prompt_tokens:
                return self._on(count, prompt_tokens, output_tokens)
        raise AssertionError(
            f"has_room accepted {prompt_tokens} + {output_tokens} tokens, which no instances hold"
        )

    def _on(self, count: int, prompt_tokens: int, output_tokens: int) -> Placed:
        """Spread the prompt evenly; the least busy instance with slots for the answer is master."""
        holders = [self._holders[instance] for _, instance in self._freest[:count]]
        roomy = [holder for holder in holders if holder.answers >= output_tokens]
        master = min(roomy, key=lambda holder: (holder.mastered, -holder.free, holder.id))
        holders.sort(key=lambda holder: holder.order)
        limits = [holder.free - (output_tokens if holder is master else 0) for holder in holders]
        sizes = level_sizes(prompt_tokens, limits)
        assert sizes is not None, f"{prompt_tokens} prompt tokens exceed the free slots {limits}"
        slices, start = [], 0
        for holder, size in zip(holders, sizes, strict=True):
            if size:
                slices.append(KvSlice(holder.id, start, start + size))
                start += size
        return Placed(tuple(slices), master.id)


class Piggybacking:
    """The ends of prompts that start on a decode gang in a round.

    Args:
        gang: the decode gang of a pair.
    """

    def __init__(self, gang: Gang, cost: Costs, options: DecodeOptions) -> None:
        self._gang, self._cost = gang, cost
        self.most = options.prefill_tokens_max
        self._budget = options.max_batch + self.most
        self._ahead: dict[InstanceId, int] = {}
        """Tokens piggybacked in this round, by master."""

    def piggyback(
        self, request: Request, placed: Placed, within_ns: int | None
    ) -> PiggybackPlan | None:
        """Piggyback the missing tokens of a prompt, if its first token is sampled in time.

        Args:
            placed: placement whose slices name the cached prefix.
            within_ns: time until the first token, from now on; None: any.
        """
        cached = sum(kv_slice.tokens for kv_slice in placed.slices if kv_slice.source)
        new = request.prompt_tokens - cached
        if not cached or new > self.most or request.cls not in (EXACT, AUTO):
            return None
        if within_ns is not None and self._time_ns(placed.master, cached, new) > within_ns:
            return None
        self._ahead[placed.master] = self._ahead.get(placed.master, 0) + new
        placement = DecodePlacement(request.id, placed.slices, placed.master, placed.answer)
        return PiggybackPlan(placement=placement, budget=self._budget)

    def _time_ns(self, master: InstanceId, cached: int, new: int) -> int:
        """Predict the time until the first token.

        It comes after the running iteration and another one, which also computes the tokens already
        piggybacked on the master. These are predicted as if they had the same history.
        """
        gang = self._gang
        ahead = self._ahead.get(master, 0)
        ahead += sum(
            sequence.piggyback_tokens
            for sequence in gang.decoding.values()
            if sequence.master_id == master
        )
        sp, batch = len(gang.instances), gang.mastered
        iteration_ns = gang.iteration_ns or self._cost.iteration_ns(sp, gang.tp, batch + 1, cached)
        chunk = self._cost.best(EXACT, GroupShape((1,), gang.tp), cached, ahead + new)
        return iteration_ns * (2 if batch else 1) + chunk.time_ns
