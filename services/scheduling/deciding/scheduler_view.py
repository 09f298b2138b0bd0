"""View of the scheduler's state in one round: all that a policy decides on.

The view copies nothing, because a copy of ten thousand waiting requests costs 20 ms. All objects
are the scheduler's own and are valid until `decide` returns. A policy reads them and changes none
of them, as `test_policies_change_nothing.py` checks. A policy that tries things out keeps the
differences in overlays (`policies/rounds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many

import msgspec

from csps.configurator.costs.cost_table import Costs
from csps.services.scheduling.events.events import GangId
from csps.services.scheduling.state.state import Cached, GangPair, Priority, Request, Sequence


class SchedulerView(msgspec.Struct, frozen=True, kw_only=True, eq=False, gc=False):
    """The state, costs and time of one round."""

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
    """Waiting requests that were found to be blocked (`decisions.Blocked`), in order. A request
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

    def waiting(self, priority: Priority) -> Many[Request]:
        """Return the requests of a queue in order."""
        return self.queues[priority]
