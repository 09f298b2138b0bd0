"""Next turns that are computed where they are decoded, if that gang has kept all but their end.

The end *rides* (`decisions.Ride`): the next iteration of the gang's stream computes it, beside the
rows that decode. No prefill instance has anything to do, and no KV is sent. Who decodes waits
longer for that iteration, so an operator says how long an end may be.
"""

from __future__ import annotations

from csps.protocols.group_shape import GroupShape
from csps.protocols.plans import AUTO
from csps.services.scheduling.cost import EXACT
from csps.services.scheduling.decisions import DecodePlacement, Ride
from csps.services.scheduling.ids import InstanceId
from csps.services.scheduling.policies.decode_overlay import DecodeOptions, Placed
from csps.services.scheduling.view import CostView, GangView, RequestView


class DecodeRides:
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

    def ride(self, request: RequestView, placed: Placed, within_ns: int | None) -> Ride | None:
        """Let what a placement lacks of a prompt ride, if its first token is so drawn in time.

        Args:
            placed: names what the gang has kept.
            within_ns: from now on; None if no time is too long.
        """
        kept = sum(it.tokens for it in placed.shares if it.origin)
        new = request.prompt_tokens - kept
        if not kept or new > self.most or request.cls not in (EXACT, AUTO):
            return None
        if within_ns is not None and self._time_ns(placed.master, kept, new) > within_ns:
            return None
        self._ahead[placed.master] = self._ahead.get(placed.master, 0) + new
        placement = DecodePlacement(request.id, placed.shares, placed.master, placed.answer)
        return Ride(placement=placement, budget=self._budget)

    def _time_ns(self, master: InstanceId, kept: int, new: int) -> int:
        """Until its first token: the iteration under way, and another one that also computes what
        rides there already, as if that had as much before it."""
        gang = self._gang
        ahead = self._ahead.get(master, 0)
        ahead += sum(it.riding for it in gang.decoding.values() if it.master_id == master)
        sp, batch = len(gang.instances), gang.mastered
        iteration_ns = gang.iteration_ns or self._cost.iteration_ns(sp, gang.tp, batch + 1, kept)
        piece = self._cost.best(EXACT, GroupShape((1,), gang.tp), kept, ahead + new)
        return iteration_ns * (2 if batch else 1) + piece.time_ns
