"""Who keeps what of the requests that a gang decodes: pass-Q decode (CP §3.6, Alg. 4).

Queries of a batch go to all instances that hold KV, which therefore should be as even as can be.
A prompt's KV is spread over the whole gang, or stays where it was computed on a gang that does
both. The KV of an answer's tokens goes to the instances in turns, while the tokens are drawn in one
place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from csps.protocols.placement import round_robin
from csps.services.scheduling.commands import Share
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.decode_overlay import Placed
from csps.services.scheduling.policies.reuse import NOTHING
from csps.services.scheduling.shares import level_shares, own, tokens_on
from csps.services.scheduling.view import CachedView, GangView, RequestView


class Keepers:
    """A gang's slots as they will be once what a round has decided is under way.

    Args:
        gang: that decodes.
        max_batch: requests that it decodes at a time, landing ones included.
    """

    def __init__(self, gang: GangView, max_batch: int) -> None:
        instances = sorted(gang.instances, key=lambda it: it.order)
        self.free = {it.id: it.free_slots for it in instances}
        """In topology order."""
        self._mastered = {it.id: it.mastered for it in instances}
        self._left = max_batch - gang.mastered

    def has_room(self, tokens: int, taken: Mapping[InstanceId, int] | None = None) -> bool:
        """For one request more, with so many tokens wherever they find slots.

        Args:
            taken: slots of KV that it reads, which are free no longer then.
        """
        return self._left > 0 and tokens + sum((taken or {}).values()) <= sum(self.free.values())

    def spread(self, request: RequestView, kept: CachedView | None) -> Placed:
        """The prompt evenly over all instances, as far as they have slots and what they have kept
        of it allows, which stays where it is."""
        if kept is None or any(self.free[it] < count for it, count in kept.taken.items()):
            kept = NOTHING
        room = {it: free - kept.taken.get(it, 0) for it, free in self.free.items()}
        held = tokens_on(kept.shares)
        sizes = levelled(
            request.prompt_tokens - kept.tokens,
            [held.get(it, 0) for it in room],
            list(room.values()),
        )
        shares, start = list(kept.shares), kept.tokens
        for instance, size in zip(self.free, sizes, strict=True):
            if size:
                shares.append(Share(instance, start, start + size))
                start += size
                room[instance] -= size
        return self._with_answer(request, tuple(shares), room, kept.taken)

    def in_place(self, request: RequestView, cached: CachedView, rows: tuple[Share, ...]) -> Placed:
        """The prompt where it is computed, behind what is reused; the answer there as well, if it
        finds slots."""
        shares, new = (*cached.shares, *rows), tokens_on(rows)
        room = {
            it: free - new.get(it, 0) - cached.taken.get(it, 0) for it, free in self.free.items()
        }
        there = {it: room[it] for it in tokens_on(shares)}
        enough = sum(there.values()) >= request.output_tokens
        return self._with_answer(request, shares, there if enough else room, cached.taken)

    def take(self, placed: Placed) -> None:
        """Somebody was placed so."""
        slots = tokens_on(own((*placed.shares, *placed.answer)))
        for counts in (slots, placed.taken):
            for instance, count in counts.items():
                self.free[instance] -= count
        self._mastered[placed.master] += 1
        self._left -= 1

    def _with_answer(
        self,
        request: RequestView,
        shares: tuple[Share, ...],
        room: Mapping[InstanceId, int],
        taken: Mapping[InstanceId, int],
    ) -> Placed:
        """Keepers of the answer, and the master: whoever of them draws for fewest.

        Args:
            room: slots for it, by keeper.
        """
        held = tokens_on(shares)
        # The first to keep a token is who has fewest, so that all have as many at any time.
        turns = sorted(room, key=lambda it: (held.get(it, 0), -room[it]))
        rooms = [(it, room[it]) for it in turns if room[it]]
        answer = tuple(in_turns(request.prompt_tokens, request.output_tokens, rooms))
        master = min(room, key=lambda it: (self._mastered[it], -room[it]))
        return Placed(shares, master, answer, taken)


def levelled(tokens: int, held: Sequence[int], room: Sequence[int]) -> list[int]:
    """So many more for each keeper that all have as many as one another, as far as slots and what
    they have already allow."""
    below = list(range(len(held)))
    """Those who do not have more than that already."""
    while True:
        total = tokens + sum(held[it] for it in below)
        level = level_shares(total, [held[it] + room[it] for it in below])
        assert level is not None, "room was counted wrong"
        reached = [it for it, count in zip(below, level, strict=True) if count >= held[it]]
        if reached == below:
            more = [0] * len(held)
            for it, count in zip(below, level, strict=True):
                more[it] = count - held[it]
            return more
        below = reached


def in_turns(start: int, tokens: int, rooms: Sequence[tuple[InstanceId, int]]) -> Iterator[Share]:
    """Positions from `start` on, one to each keeper in turn. Whoever has no slot left drops out.

    Args:
        rooms: keepers in the order of their turns, with their slots, at least one; together enough.
    """
    while tokens:
        rounds = min(room for _, room in rooms)
        now = min(tokens, rounds * len(rooms))
        spans = round_robin(start, start + now, [it for it, _ in rooms])
        yield from (Share.of(it, span) for it, span in spans.items() if span.length)
        rooms = [(it, room - rounds) for it, room in rooms if room > rounds]
        start, tokens = start + now, tokens - now
