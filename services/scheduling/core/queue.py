"""The queues of waiting requests, and the order in which all policies consider them.

*The order.* `state.order_key` is the only rule, and every policy goes by it. Requests of one tenant
(the keys of one name) keep their order of admission. Between tenants, the one with the least served
tokens comes first: the Virtual Token Counter of Sheng et al., "Fairness in Serving Large Language
Models" (OSDI 2024). A tenant's counter grows by the prompt of each request that starts and by the
tokens of each that ends. A tenant without waiting requests saves nothing up: when it comes back,
its counter is lifted to the least one of those that wait.

*The bound.* A policy may pass over a request for which it finds no slots or instances. So that a
tenant of large prompts cannot be passed forever by one of small prompts, a tenant is held back that
was served more than another one would have been after its oldest waiting request. The served tokens
of two tenants that both wait therefore never differ by more than the largest prompt and what was in
flight at a time.

*Who is modest.* `RecentTokens` finds tenants that use at most half their share. Their requests come
first, are not held back, and start inside what runs where the policy can preempt. Together they get
at most half of what is served in a window of time, so the others go on. By that much the served
tokens of two tenants may differ more than by the bound above.

With one tenant the order is that of admission, nobody is held back, and nobody is modest.
Priorities and objectives of requests (`promises.py`) go before tokens, but not before the modest,
and start nothing of a tenant that is held back.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Set
from operator import attrgetter

from csps.services.scheduling.core.promises import Promises
from csps.services.scheduling.events.events import TenantId
from csps.services.scheduling.events.limits import SECOND_NS
from csps.services.scheduling.state.state import NO_PLACE, Priority, Request, Round, order_key

GENERATED_WEIGHT = 2
"""Weight of a generated token; one of a prompt weighs 1. Sheng et al. take these weights from
prices."""


def prompt_weight(request: Request) -> int:
    """Return what a waiting request adds to its tenant's counter when it starts: its prompt without
    what a front added, and nothing for another attempt, because the fault was ours."""
    return 0 if request.attempts else request.prompt_tokens - request.front_tokens


class RecentTokens:
    """Weighted tokens that tenants were served in this window of time and the one before it.

    A share is what each would get if all tenants of the two windows got the same. What a tenant was
    served ever says nothing: one that comes back after an hour would have an hour to its good.
    """

    WINDOW_NS = 30 * SECOND_NS
    SHARED_NS = 600 * SECOND_NS
    """Time for which something is left to a tenant that sends nothing."""

    def __init__(self, this_round: Round) -> None:
        self._round, self._window = this_round, 0
        self._present: dict[TenantId, int] = {}
        self._both: dict[TenantId, int] = {}
        self._total = 0
        """Sum of both windows."""
        self._waiting: dict[TenantId, int] = {}
        """Tokens of each tenant's waiting requests."""
        self._last: TenantId | None = None
        """Tenant that was last seen."""
        self._last_ns = 0
        self._other_ns: int | None = None
        """Time at which another one than that was last seen."""

    def serve(self, tenant: TenantId, tokens: int) -> None:
        """Add weighted tokens."""
        self._turn()
        if tenant != self._last:
            self._other_ns = None if self._last is None else self._last_ns
            self._last = tenant
        self._last_ns = self._round.now_ns
        self._present[tenant] = self._present.get(tenant, 0) + tokens
        self._both[tenant] = self._both.get(tenant, 0) + tokens
        self._total += tokens

    def begin(self, tenant: TenantId, tokens: int) -> bool:
        """Note that a request with so many tokens begins to wait; return True if its tenant uses at
        most half its share, waiting requests included."""
        self.serve(tenant, 0)
        waiting = self._waiting.get(tenant, 0) + tokens
        if waiting:
            self._waiting[tenant] = waiting
        tenants = len(self._both)
        return tenants > 1 and 2 * tenants * (self._both[tenant] + waiting) <= self._total + waiting

    def leave(self, tenant: TenantId, tokens: int) -> None:
        """Note that a request with so many tokens waits no longer."""
        left = self._waiting.pop(tenant, 0) - tokens
        assert left >= 0, f"tenant {tenant} has fewer waiting tokens than none"
        if left:
            self._waiting[tenant] = left

    @property
    def shared(self) -> bool:
        """True if several tenants have sent requests lately, modest ones now and then."""
        other_ns = self._other_ns
        return other_ns is not None and self._round.now_ns - other_ns < self.SHARED_NS

    def _turn(self) -> None:
        """Begin the window of the present time."""
        window = self._round.now_ns // self.WINDOW_NS
        if window == self._window:
            return
        self._both = self._present if window == self._window + 1 else {}
        self._present, self._window = {}, window
        self._total = sum(self._both.values())


class TokenCounters:
    """Virtual token counters of all tenants."""

    def __init__(self) -> None:
        self._served: dict[TenantId, int] = {}
        self._last: TenantId = 0
        """Tenant whose request left the queues last."""

    def __getitem__(self, tenant: TenantId) -> int:
        """Return the weighted tokens served to a tenant."""
        return self._served.get(tenant, 0)

    def serve(self, tenant: TenantId, tokens: int) -> None:
        """Add weighted tokens."""
        self._served[tenant] = self[tenant] + tokens

    def lift(self, tenant: TenantId, waiting: Iterable[TenantId]) -> None:
        """Lift a tenant that begins to wait to the least of those that wait already, or, if none
        does, to the one that waited last."""
        least = min((self[other] for other in waiting), default=self[self._last])
        self._served[tenant] = max(self[tenant], least)

    def left(self, tenant: TenantId) -> None:
        """Note that a request of a tenant waits no longer."""
        self._last = tenant


class Queue:
    """Waiting requests by priority, each queue in order.

    A request that comes back after a fault takes its old place among those of its tenant.

    Args:
        promises: gives places to requests with priorities and objectives; None: nobody has any.
    """

    def __init__(self, promises: Promises | None = None) -> None:
        self._promises = promises
        self._promised = 0
        """Number of waiting requests with a client priority or a promise."""
        # Lists, because most requests arrive at the end and leave near the front, and moving the
        # rest of ten thousand pointers takes two microseconds. A list with marks for those that
        # left would make every round skip them.
        self._by_priority: dict[Priority, list[Request]] = {"high": [], "low": []}
        self._counters = TokenCounters()
        self._tenants: dict[TenantId, int] = {}
        """Number of waiting requests of each tenant that has some."""
        self._disordered = False
        """True if counters or requests have changed since `_arrange`, of several tenants, or if
        requests have to get or lose their places."""
        self._held: Set[TenantId] = frozenset()
        self._startable: Mapping[Priority, list[Request]] = self._by_priority

    def __len__(self) -> int:
        return sum(self._tenants.values())

    def __contains__(self, request: Request) -> bool:
        queue = self._by_priority[request.priority]
        at = bisect_left(queue, order_key(request), key=order_key)
        return at < len(queue) and queue[at] is request

    def everyone(self) -> Iterator[Request]:
        """Yield all requests, queue after queue; the queues must not change meanwhile."""
        for queue in self._by_priority.values():
            yield from queue

    def push(self, request: Request) -> None:
        """Add a request to the queue of its priority."""
        request.served_before = 0  # until `_arrange`
        if self._promises is not None:
            self._count_promised(request, +1)
            request.place = self._promises.place(request) if self._promised else NO_PLACE
        queue = self._by_priority[request.priority]
        if not queue or order_key(queue[-1]) < order_key(request):
            queue.append(request)
        else:
            insort(queue, request, key=order_key)
        self._tenants[request.tenant] = self._tenants.get(request.tenant, 0) + 1
        self._note_change()

    def remove(self, request: Request) -> None:
        """Remove a request, if it is in its queue."""
        queue = self._by_priority[request.priority]
        at = bisect_left(queue, order_key(request), key=order_key)
        if at == len(queue) or queue[at] is not request:
            return
        del queue[at]
        self._count_promised(request, -1)
        self._note_change()
        self._tenants[request.tenant] -= 1
        if not self._tenants[request.tenant]:
            del self._tenants[request.tenant]

    def _count_promised(self, request: Request, change: int) -> None:
        """Count a request that comes or goes; all get places with the first one that has a
        priority or a promise, and lose them with the last."""
        if request.client_priority or request.promise is not None:
            before, self._promised = self._promised, self._promised + change
            self._disordered = self._disordered or not (before and self._promised)

    # --- fairness between tenants ---

    @property
    def startable(self) -> Mapping[Priority, list[Request]]:
        """Requests that may start, in order; others read these lists."""
        self._arrange()
        return self._startable

    @property
    def held(self) -> Set[TenantId]:
        """Tenants that are held back: only requests that wait since they were modest may start."""
        self._arrange()
        return self._held

    def begin(self, tenant: TenantId) -> None:
        """Note that a request of the tenant begins to wait."""
        if tenant not in self._tenants:
            self._counters.lift(tenant, self._tenants)

    def leave(self, tenant: TenantId) -> None:
        """Note that a request of the tenant waits no longer."""
        self._counters.left(tenant)

    def serve(self, tenant: TenantId, tokens: int) -> bool:
        """Add weighted tokens to a tenant's counter; return whether that may change the order."""
        self._counters.serve(tenant, tokens)
        self._note_change()
        return self._disordered

    def _note_change(self) -> None:
        self._disordered = self._disordered or len(self._tenants) > 1

    def _arrange(self) -> None:
        """Put the requests of all tenants in order, and find out who is held back."""
        if not self._disordered and not (self._promises and self._promises.stale):
            return
        self._disordered = False
        several = len(self._tenants) > 1
        served = {tenant: self._counters[tenant] for tenant in self._tenants}
        then: dict[TenantId, int] = {}
        """Counters as they will be when each tenant's oldest request has started."""
        for request in sorted(self.everyone(), key=attrgetter("id")):
            tenant = request.tenant
            request.served_before = served[tenant] if several else 0
            served[tenant] += prompt_weight(request)
            then.setdefault(tenant, served[tenant])
        self._place()
        for queue in self._by_priority.values():
            queue.sort(key=order_key)
        least = min(then.values(), default=0)
        self._held = {tenant for tenant in self._tenants if self._counters[tenant] > least}
        self._startable = self._by_priority
        if self._held:
            self._startable = {
                priority: [
                    request
                    for request in queue
                    if request.modest or request.tenant not in self._held
                ]
                for priority, queue in self._by_priority.items()
            }

    def _place(self) -> None:
        """Give all requests their places, or none if nobody has a priority or a promise."""
        if self._promises is None:
            return
        if self._promised:
            fair = sorted(self.everyone(), key=attrgetter("served_before", "id"))
            self._promises.place_all(fair)
        else:
            self._promises.place_none(self.everyone())

    def check(self) -> None:
        """Assert that the queues are in order, and that nobody is held back without need."""
        found: dict[TenantId, int] = {}
        for queue in self._by_priority.values():
            assert queue == sorted(queue, key=order_key), "a queue is not in order"
            for request in queue:
                found[request.tenant] = found.get(request.tenant, 0) + 1
        assert found == self._tenants, "number of waiting requests of a tenant"
        for queue in self.startable.values():
            for request in queue:
                held = request.tenant in self._held and not request.modest
                assert not held, "a request of a held tenant may start"
        assert not self._tenants or self._tenants.keys() - self._held, "all tenants are held back"
