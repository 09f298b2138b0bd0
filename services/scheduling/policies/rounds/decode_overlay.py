"""What the options of all policies are checked by.

Where a request's KV goes on the decode side, for several requests in a round.

Next turns that are computed where they are decoded, if that gang has kept all but their end.

The end *rides* (`decisions.PiggybackPlan`): the next iteration of the gang's stream computes it, beside the
rows that decode. No prefill instance has anything to do, and no KV is sent. Who decodes waits
longer for that iteration, so an operator says how long an end may be.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from csps.configurator.costs.cost_table import EXACT
from csps.protocols.attention.plan import AUTO
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import GroupShape
from csps.services.scheduling.deciding.decisions import DecodePlacement, PiggybackPlan
from csps.services.scheduling.deciding.view import CachedView, CostView, GangView, RequestView
from csps.services.scheduling.events.commands import PlacedSlice
from csps.services.scheduling.events.events import InstanceId
from csps.services.scheduling.events.slices import level_sizes, own, shifted, tokens_on


def check_least(options: object, least: int, *names: str) -> None:
    """Refuse the first of these options that is less than `least`.

    Raises:
        ConfigError: it names the option and the value.
    """
    for name in names:
        if (value := getattr(options, name)) < least:
            raise ConfigError(f"option {name} must be at least {least}, not {value}")


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How decode instances are shared."""

    spread_tokens: int = 8192
    """A prompt is spread over one instance for every so many tokens: reading a long KV cache is
    what a decode step waits for, so several instances read parts of it."""
    max_batch: int = 64
    """Requests on a decode gang at the same time, landing ones included."""
    prefill_tokens_max: int = 0
    """Longest end of a prompt that a gang which only decodes may compute, if it has kept all that
    comes before (`decode_rides.py`); 0: none."""

    def __post_init__(self) -> None:
        check_least(self, 1, "spread_tokens", "max_batch")
        check_least(self, 0, "prefill_tokens_max")


class Placed(msgspec.Struct, frozen=True, gc=False):
    """The choice for a request."""

    slices: tuple[PlacedSlice, ...]
    master: InstanceId
    answer: tuple[PlacedSlice, ...] = ()
    """Who keeps the answer's KV; none named: the master."""
    taken: Mapping[InstanceId, int] = MappingProxyType({})
    """Slots of kept KV that the shares name: they are free no longer."""


class _Holder(msgspec.Struct, eq=False, gc=False):
    id: InstanceId
    order: int
    free: int
    mastered: int

    @property
    def rank(self) -> tuple[int, InstanceId]:
        """The freest first: free slots per request, the new one included (Tetris §5)."""
        return -(self.free // (self.mastered + 1)), self.id


class DecodeOverlay:
    """A decode gang's instances as they will be once what a round has decided is under way."""

    def __init__(self, gang: GangView, options: DecodeOptions) -> None:
        self._options = options
        self._batch = gang.mastered
        self._holders = {
            instance.id: _Holder(
                instance.id, instance.order, instance.free_slots, instance.mastered
            )
            for instance in gang.instances
        }
        self._freest = sorted(holder.rank for holder in self._holders.values())
        self._free = sum(holder.free for holder in self._holders.values())
        self._largest = -1
        """Slots of the instance that has most; less than none if that is not known."""

    def has_room(self, prompt_tokens: int, output_tokens: int) -> bool:
        """Whether `place` finds a place: slots enough together, and for the answer on one."""
        if self._batch >= self._options.max_batch or prompt_tokens + output_tokens > self._free:
            return False
        if self._holders[self._freest[0][1]].free >= output_tokens:
            return True
        if self._largest < 0:
            self._largest = max(holder.free for holder in self._holders.values())
        return output_tokens <= self._largest

    def place(self, prompt_tokens: int, output_tokens: int) -> Placed | None:
        """Choose the holders of a request's KV and its master; None while there is no room.

        As few instances as `spread_tokens` asks for, the freest first; more if those have no room.
        """
        if not self.has_room(prompt_tokens, output_tokens):
            return None
        wanted = -(-prompt_tokens // self._options.spread_tokens)
        if wanted == 1:
            first = self._holders[self._freest[0][1]]
            if first.free >= prompt_tokens + output_tokens:
                return Placed((PlacedSlice(first.id, 0, prompt_tokens),), first.id)
        return self._spread(prompt_tokens, output_tokens, wanted)

    def place_whole(self, prompt_tokens: int, output_tokens: int) -> Placed | None:
        """All of it on the instance with most freeness (Tetris §5.2), if any has room: free slots,
        without those that KV on its way was promised, for each request that it decodes, landing
        ones included."""
        if self._batch >= self._options.max_batch:
            return None
        total = prompt_tokens + output_tokens
        roomy = [holder for holder in self._holders.values() if holder.free >= total]
        if not roomy:
            return None
        # Compared as fractions of integers, since a float would lose ties.
        best = roomy[0]
        for it in roomy[1:]:
            if it.free * max(1, best.mastered) > best.free * max(1, it.mastered):
                best = it
        return Placed((PlacedSlice(best.id, 0, prompt_tokens),), best.id)

    def place_behind(
        self, cached: CachedView | None, prompt_tokens: int, output_tokens: int
    ) -> Placed | None:
        """The same for a prompt whose beginning may have been kept here: that stays where it is,
        unless the rest finds no place so."""
        if cached is not None and self.has_free(cached.taken):
            self.occupy(cached.taken)
            rest = self.place(prompt_tokens - cached.tokens, output_tokens)
            self.occupy(cached.taken, -1)
            if rest is not None:
                slices = (*cached.slices, *shifted(rest.slices, cached.tokens))
                return Placed(slices, rest.master, taken=cached.taken)
        return self.place(prompt_tokens, output_tokens)

    def take(self, placed: Placed, output_tokens: int) -> None:
        """Somebody was placed so."""
        self._change(placed, output_tokens, 1)

    def put_back(self, placed: Placed, output_tokens: int) -> None:
        """Undo `take`."""
        self._change(placed, output_tokens, -1)

    def _change(self, placed: Placed, output_tokens: int, sign: int) -> None:
        slots = tokens_on(own(placed.slices))
        for instance, count in (*placed.taken.items(), (placed.master, output_tokens)):
            slots[instance] = slots.get(instance, 0) + count
        self.occupy(slots, sign, master=placed.master)
        self._batch += sign

    def has_free(self, slots: Mapping[InstanceId, int]) -> bool:
        """Whether each instance has so many."""
        return all(self._holders[it].free >= count for it, count in slots.items())

    def occupy(
        self, slots: Mapping[InstanceId, int], sign: int = 1, *, master: InstanceId | None = None
    ) -> None:
        """These slots are free no longer, or again; and `master` draws for one more, or less."""
        for instance, count in slots.items():
            holder = self._holders[instance]
            del self._freest[bisect_left(self._freest, holder.rank)]
            if holder.free == self._largest:
                self._largest = -1
            holder.free -= sign * count
            if holder.free > self._largest >= 0:
                self._largest = holder.free
            if instance == master:
                holder.mastered += sign
            insort(self._freest, holder.rank)
            self._free -= sign * count

    def _spread(self, prompt_tokens: int, output_tokens: int, wanted: int) -> Placed:
        """On the fewest of the freest that have room, but no fewer than wanted."""
        room, roomy = -output_tokens, False
        for count, (_, instance) in enumerate(self._freest, 1):
            holder = self._holders[instance]
            room += holder.free
            roomy = roomy or holder.free >= output_tokens
            enough = count >= wanted or count == len(self._freest)
            if enough and roomy and room >= prompt_tokens:
                return self._on(count, prompt_tokens, output_tokens)
        raise AssertionError("there was room")

    def _on(self, count: int, prompt_tokens: int, output_tokens: int) -> Placed:
        """Spread the prompt evenly, with the answer on the least busy one that has room for it."""
        holders = [self._holders[instance] for _, instance in self._freest[:count]]
        roomy = [it for it in holders if it.free >= output_tokens]
        master = min(roomy, key=lambda it: (it.mastered, -it.free, it.id))
        holders.sort(key=lambda it: it.order)
        limits = [it.free - (output_tokens if it is master else 0) for it in holders]
        sizes = level_sizes(prompt_tokens, limits)
        assert sizes is not None, "room was counted wrong"
        slices, start = [], 0
        for holder, size in zip(holders, sizes, strict=True):
            if size:
                slices.append(PlacedSlice(holder.id, start, start + size))
                start += size
        return Placed(tuple(slices), master.id)


class Piggybacking:
    """What may ride on a gang in a round.

    Args:
        gang: that decodes what another one computes.
    """

    def __init__(self, gang: GangView, cost: CostView, options: DecodeOptions) -> None:
        self._gang, self._cost = gang, cost
        self.most = options.prefill_tokens_max
        self._budget = options.max_batch + self.most
        self._ahead: dict[InstanceId, int] = {}
        """Tokens of those that began to ride in this round, by master."""

    def piggyback(
        self, request: RequestView, placed: Placed, within_ns: int | None
    ) -> PiggybackPlan | None:
        """Let what a placement lacks of a prompt ride, if its first token is so drawn in time.

        Args:
            placed: names what the gang has kept.
            within_ns: from now on; None if no time is too long.
        """
        kept = sum(kv_slice.tokens for kv_slice in placed.slices if kv_slice.source)
        new = request.prompt_tokens - kept
        if not kept or new > self.most or request.cls not in (EXACT, AUTO):
            return None
        if within_ns is not None and self._time_ns(placed.master, kept, new) > within_ns:
            return None
        self._ahead[placed.master] = self._ahead.get(placed.master, 0) + new
        placement = DecodePlacement(request.id, placed.slices, placed.master, placed.answer)
        return PiggybackPlan(placement=placement, budget=self._budget)

    def _time_ns(self, master: InstanceId, kept: int, new: int) -> int:
        """Until its first token: the iteration under way, and another one that also computes what
        rides there already, as if that had as much before it."""
        gang = self._gang
        ahead = self._ahead.get(master, 0)
        ahead += sum(it.piggyback_tokens for it in gang.decoding.values() if it.master_id == master)
        sp, batch = len(gang.instances), gang.mastered
        iteration_ns = gang.iteration_ns or self._cost.iteration_ns(sp, gang.tp, batch + 1, kept)
        chunk = self._cost.best(EXACT, GroupShape((1,), gang.tp), kept, ahead + new)
        return iteration_ns * (2 if batch else 1) + chunk.time_ns
