"""Tokens are shared fairly between tenants: the order against a brute-force virtual token counter,
and what all policies make of it on simulated ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from random_executor import RandomCell
from recorded_workloads import SECOND, elastic, pair
from scheduler_harness import SchedulerHarness, only, steps_of

from csps.configurator.costs.cost_table import Costs, CostTable, Unmeasured
from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.kernel import Simulator
from csps.loadgen.simulator.requests import Arrival
from csps.services.scheduling.core.queue import GENERATED_WEIGHT, Queue, RecentTokens
from csps.services.scheduling.core.scheduler import Scheduler
from csps.services.scheduling.events import commands as cmd
from csps.services.scheduling.events import events as ev
from csps.services.scheduling.events.limits import QueueLimits
from csps.services.scheduling.policies.fixed_sp import FixedSp
from csps.services.scheduling.policies.registry import make_policy
from csps.services.scheduling.state.state import Request, order_key

# --- the order -------------------------------------------------------------------------------


class BruteForceCounters:
    """Algorithm 2 of Sheng et al., one request at a time, without any cleverness."""

    def __init__(self) -> None:
        self.counters: dict[int, int] = {}
        self.last = 0
        self.waiting: list[Request] = []

    def arrives(self, request: Request) -> None:
        others = {other.tenant for other in self.waiting}
        own = self.counters.get(request.tenant, 0)
        if request.tenant not in others:
            lifted = [self.counters.get(other, 0) for other in others]
            own = max(own, min(lifted) if lifted else self.counters.get(self.last, 0))
        self.counters[request.tenant] = own
        self.waiting.append(request)

    def leaves(self, request: Request) -> None:
        self.waiting.remove(request)
        self.last = request.tenant

    def order(self) -> list[int]:
        """Pick from the tenant with the least counter until nobody waits, as if all started."""
        counters, left, picked = dict(self.counters), list(self.waiting), []
        while left:
            oldest: dict[int, Request] = {}
            for request in sorted(left, key=lambda request: request.id):
                oldest.setdefault(request.tenant, request)
            best = min(oldest.values(), key=lambda first: (counters[first.tenant], first.id))
            picked.append(best.id)
            left.remove(best)
            counters[best.tenant] += 0 if best.attempts else best.prompt_tokens
        return picked

    def held(self) -> set[int]:
        """Tenants that were served more than another one would be after its oldest request."""
        found = set()
        for tenant in {request.tenant for request in self.waiting}:
            for other in {request.tenant for request in self.waiting}:
                first = min(
                    (request for request in self.waiting if request.tenant == other),
                    key=lambda request: request.id,
                )
                then = self.counters[other] + (0 if first.attempts else first.prompt_tokens)
                if self.counters[tenant] > then:
                    found.add(tenant)
        return found


def waiting_request(number: int, tenant: int, prompt: int) -> Request:
    return Request(
        id=number,
        tenant=tenant,
        cls="exact",
        prompt_tokens=prompt,
        output_tokens=10,
        deadline_ns=None,
        submitted_ns=0,
        waiting_since_ns=0,
        priority="high" if prompt < 50 else "low",
    )


def in_order(queue: Queue) -> list[int]:
    """Return all waiting requests that may start, in the order of a policy with both queues."""
    both = [request for waiting in queue.startable.values() for request in waiting]
    for waiting in queue.startable.values():
        assert waiting == [request for request in sorted(both, key=order_key) if request in waiting]
    return [request.id for request in sorted(both, key=order_key)]


@settings(max_examples=examples(200))
@given(seed=st.integers(0, 1 << 30), tenants=st.integers(1, 5))
def test_order_is_that_of_virtual_token_counters(seed: int, tenants: int) -> None:
    rng, queue, oracle = random.Random(seed), Queue(), BruteForceCounters()
    running: list[Request] = []
    for number in range(1, 120):
        drawn = rng.random()
        if drawn < 0.45 or not (oracle.waiting or running):
            request = waiting_request(number, rng.randrange(tenants), rng.choice((1, 40, 90, 700)))
            queue.begin(request.tenant)
            queue.push(request)
            oracle.arrives(request)
        elif drawn < 0.75 and oracle.waiting:
            request = oracle.waiting[0] if rng.random() < 0.5 else rng.choice(oracle.waiting)
            served = 0 if request.attempts else request.prompt_tokens
            queue.remove(request)
            queue.leave(request.tenant)
            oracle.leaves(request)
            if rng.random() < 0.8:  # else its client has left
                queue.serve(request.tenant, served)
                oracle.counters[request.tenant] += served
                request.attempts += 1
                running.append(request)
        elif running:
            request = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.3:  # a fault
                queue.begin(request.tenant)
                queue.push(request)
                oracle.arrives(request)
            else:
                tokens = GENERATED_WEIGHT * rng.randrange(300)
                queue.serve(request.tenant, tokens)
                oracle.counters[request.tenant] += tokens
        if rng.random() < 0.7:
            queue.check()
            held = oracle.held()
            assert queue.held == held
            by_id = {request.id: request for request in oracle.waiting}
            wanted = [which for which in oracle.order() if by_id[which].tenant not in held]
            assert in_order(queue) == wanted
            assert len(queue) == len(oracle.waiting)


@settings(max_examples=examples(50))
@given(prompts=st.lists(st.integers(1, 1000), max_size=60), tenant=st.integers(0, 3))
def test_order_of_one_tenant_is_that_of_admission(prompts: list[int], tenant: int) -> None:
    queue = Queue()
    for number, prompt in enumerate(prompts, 1):
        queue.begin(tenant)
        queue.push(waiting_request(number, tenant, prompt))
        queue.serve(tenant, prompt)
    assert in_order(queue) == list(range(1, len(prompts) + 1))
    assert not queue.held


# --- the scheduler ---------------------------------------------------------------------------


def one_at_a_time() -> SchedulerHarness:
    """Make a scheduler whose decode gang has room for one request of 500 + 10 tokens."""
    harness = SchedulerHarness(FixedSp())
    harness.turn(harness.prefill(1, 4000), harness.decode(2, 600), ev.LinkUp(prefill=1, decode=2))
    return harness


def test_a_tenant_with_a_long_queue_does_not_delay_another() -> None:
    harness = one_at_a_time()
    submitted = [harness.submit(tenant=1) for _ in range(6)]
    late = [harness.submit(tenant=2) for _ in range(3)]
    order = serve_all(harness, harness.turn(*submitted, *late))
    assert order == [1, 7, 2, 8, 3, 9, 4, 5, 6]


def test_requests_of_one_tenant_start_in_order_of_admission() -> None:
    harness = one_at_a_time()
    submitted = [harness.submit(tenant=3) for _ in range(5)]
    assert serve_all(harness, harness.turn(*submitted)) == [1, 2, 3, 4, 5]


def serve_all(
    harness: SchedulerHarness, commands: list[cmd.AnyCommand], generated: int = 10
) -> list[int]:
    """Serve what starts, one after the other; return the requests in the order of their starts."""
    order: list[int] = []
    while reserves := only(commands, cmd.Reserve):
        (reserve,), (step,) = reserves, steps_of(commands)
        order.append(reserve.request_id)
        holders = {kv_slice.instance: kv_slice.tokens for kv_slice in reserve.message.slices}
        commands = harness.turn(
            ev.FirstToken(sequence_id=reserve.message.sequence_id),
            *(ev.StepDone(step_id=step.step_id, instance=i, took_ns=1) for i in step.group),
            *(
                ev.KvReceived(sequence_id=reserve.message.sequence_id, instance=i, tokens=n)
                for i, n in holders.items()
            ),
        )
        commands += harness.turn(
            ev.Finished(sequence_id=reserve.message.sequence_id, generated_tokens=generated),
            *(ev.Freed(sequence_id=reserve.message.sequence_id, instance=i) for i in holders),
        )
    return order


def test_generated_tokens_count_twice() -> None:
    """After one request of each, the tenant of short answers has 2 x 90 tokens to its good."""
    harness = one_at_a_time()
    events = [harness.submit(400, 100, tenant=tenant) for tenant in (1, 2, 1, 2, 1, 2)]
    commands = harness.turn(*events)
    order: list[int] = []
    generated = {1: 100, 2: 10}
    while reserves := only(commands, cmd.Reserve):
        (reserve,), (step,) = reserves, steps_of(commands)
        order.append(reserve.request_id)
        tenant = 2 - reserve.request_id % 2
        (instance,) = {kv_slice.instance for kv_slice in reserve.message.slices}
        commands = harness.turn(
            ev.FirstToken(sequence_id=reserve.message.sequence_id),
            ev.StepDone(step_id=step.step_id, instance=step.group[0], took_ns=1),
            ev.KvReceived(sequence_id=reserve.message.sequence_id, instance=instance, tokens=400),
            ev.Finished(
                sequence_id=reserve.message.sequence_id, generated_tokens=generated[tenant]
            ),
            ev.Freed(sequence_id=reserve.message.sequence_id, instance=instance),
        )
    # Counters: 0, 0 | 600, 0 | 600, 420 | 600, 840 | 1200, 840 | 1200, 1260.
    assert order == [1, 2, 4, 3, 6, 5]


def test_tokens_of_a_cancelled_answer_count() -> None:
    harness = one_at_a_time()
    events = [harness.submit(100, 400, tenant=tenant) for tenant in (1, 2, 1, 2)]
    (reserve,) = only(harness.turn(*events), cmd.Reserve)
    assert reserve.request_id == 1
    (instance,) = {kv_slice.instance for kv_slice in reserve.message.slices}
    commands = harness.turn(ev.RequestCancelled(request_id=1, generated_tokens=300))
    commands += harness.turn(ev.Freed(sequence_id=reserve.message.sequence_id, instance=instance))
    assert serve_all(harness, commands) == [2, 4, 3]


def test_an_idle_tenant_saves_nothing_up() -> None:
    harness = one_at_a_time()
    serve_all(harness, harness.turn(harness.submit(tenant=2)))
    serve_all(harness, harness.turn(*(harness.submit(tenant=1) for _ in range(20))))
    harness.turn(after_ns=2 * RecentTokens.WINDOW_NS)
    both = [harness.submit(tenant=tenant) for tenant in (1, 1, 1, 2, 2, 2)]
    assert serve_all(harness, harness.turn(*both)) == [22, 25, 23, 26, 24, 27]


def test_a_fault_costs_its_tenant_nothing() -> None:
    harness = one_at_a_time()
    events = [harness.submit(tenant=tenant) for tenant in (1, 2, 1, 2)]
    (reserve,) = only(harness.turn(*events), cmd.Reserve)
    error = ev.WireError("TransferError", "bad KV")
    (instance,) = {kv_slice.instance for kv_slice in reserve.message.slices}
    commands = harness.turn(
        ev.Failed(
            sequence_id=reserve.message.sequence_id, generated_tokens=0, error=error, retryable=True
        ),
        ev.Freed(sequence_id=reserve.message.sequence_id, instance=instance),
    )
    harness.wait(until_ns=harness.now_ns + SECOND)  # the pause before another attempt
    # Counters: 500, 0 | 500, 520 | the second attempt costs nothing: 520, 520 | 1020, 520.
    assert serve_all(harness, commands) == [2, 1, 3, 4]


# --- policies on simulated ranks -------------------------------------------------------------

SMALL_PAIR, SMALL_ELASTIC = pair(3000), elastic(3000)
URGENT = {"short_tokens": 200, "urgent_batch_tokens": 400}
POLICIES: list[tuple[str, dict[str, Any], ClusterModel]] = [
    ("csps", {"spt_tokens": 600, "spread_tokens": 1500, **URGENT}, SMALL_PAIR),
    ("context_parallel", URGENT, SMALL_PAIR),
    ("context_parallel", URGENT, SMALL_ELASTIC),
    ("fixed_sp", {"sp": 2}, SMALL_PAIR),
    ("tetris", {"improvement_rate": 0.05, "min_chunk": 64}, SMALL_PAIR),
    ("chunked_prefill", {"token_budget": 256}, SMALL_ELASTIC),
    ("loongserve", {"decode_iterations": 2, "max_num_ooe": 1000}, SMALL_ELASTIC),
]
"""Policies that pass over what does not fit do so as often as they can."""
NAMES = [f"{name}-{cluster.name}" for name, _, cluster in POLICIES]
LENGTHS = {"short": (50, 200), "long": (4000, 5500), "mixed": (20, 5500)}
LONGEST = 5500
TOKENS = 60_000


def drawn(
    rng: random.Random, lengths: str, tenant: int, tokens: int, at_ns: int = 0
) -> list[Arrival]:
    """Draw requests of one tenant that arrive together, with so many prompt tokens."""
    arrivals: list[Arrival] = []
    while sum(arrival.prompt_tokens for arrival in arrivals) < tokens:
        arrivals.append(
            Arrival(
                at_ns=at_ns,
                prompt_tokens=rng.randint(*LENGTHS[lengths]),
                output_tokens=rng.choice((1, 5, 40)),
                tenant=tenant,
            )
        )
    return arrivals


class Watch:
    """Runs a policy, and follows what two tenants are served in weighted tokens."""

    def __init__(
        self, policy: str, options: dict[str, Any], cluster: ClusterModel, arrivals: list[Arrival]
    ) -> None:
        self._arrivals = arrivals
        self._waiting: set[int] = set()
        self._running: dict[int, ev.RequestId] = {}
        """Requests in flight, by sequence."""
        self._served = {1: 0, 2: 0}
        self._served_at_arrival: dict[int, int] = {}
        self.in_flight = 0
        """Most that was in flight at a time, with answers as far as they may go."""
        self.apart = 0
        """Most by which the tenants' tokens differed while both waited."""
        self.passed_second = 0
        """Most that the first tenant was served while a request of the second waited."""
        limits = QueueLimits(max_waiting=1 << 20, max_waiting_tokens=1 << 40)
        scheduler = Scheduler(
            make_policy(policy, options), Costs(CostTable(latencies=cluster.table)), limits=limits
        )
        simulator = Simulator(scheduler, cluster, arrivals, observer=self._round)
        outcomes = simulator.run().outcomes
        assert not any(outcome.error for outcome in outcomes)
        scheduler.check_invariants()

    def _round(
        self, now_ns: int, events: Sequence[ev.AnyEvent], commands: Sequence[cmd.AnyCommand]
    ) -> None:
        for event in events:
            if isinstance(event, ev.Submitted):
                self._waiting.add(event.request_id)
                self._served_at_arrival[event.request_id] = self._served[1]
            elif isinstance(event, ev.Finished):
                self._serve(
                    self._running.pop(event.sequence_id), GENERATED_WEIGHT * event.generated_tokens
                )
        tenants = {self._arrivals[request - 1].tenant for request in self._waiting}
        for command in commands:
            if isinstance(command, cmd.Reserve):
                self._starts(command)
        self.in_flight = max(self.in_flight, sum(map(self._weight, self._running.values())))
        if tenants == {1, 2}:
            self.apart = max(self.apart, abs(self._served[1] - self._served[2]))

    def _starts(self, command: cmd.Reserve) -> None:
        request = command.request_id
        self._waiting.discard(request)
        if self._arrivals[request - 1].tenant == 2:
            passed = self._served[1] - self._served_at_arrival[request]
            self.passed_second = max(self.passed_second, passed)
        self._running[command.message.sequence_id] = request
        self._serve(request, command.message.prompt_tokens)

    def _serve(self, request: int, tokens: int) -> None:
        self._served[self._arrivals[request - 1].tenant] += tokens

    def _weight(self, request: int) -> int:
        arrival = self._arrivals[request - 1]
        return arrival.prompt_tokens + GENERATED_WEIGHT * arrival.output_tokens

    @property
    def bound(self) -> int:
        """Bound that `core/queue.py` states."""
        return LONGEST + self.in_flight


@pytest.mark.parametrize(("policy", "options", "cluster"), POLICIES, ids=NAMES)
@pytest.mark.parametrize("lengths", ["short long", "long short", "mixed mixed"])
def test_two_backlogged_tenants_are_served_alike(
    policy: str, options: dict[str, Any], cluster: ClusterModel, lengths: str
) -> None:
    """The first tenant has sent all of its requests before the second one sends any."""
    rng = random.Random(lengths)
    first, second = lengths.split()
    arrivals = [*drawn(rng, first, 1, TOKENS), *drawn(rng, second, 2, TOKENS)]
    watch = Watch(policy, options, cluster, arrivals)
    assert watch.apart <= watch.bound
    assert 2 * watch.bound < TOKENS, "the bound says nothing"


@pytest.mark.parametrize(("policy", "options", "cluster"), POLICIES, ids=NAMES)
@pytest.mark.parametrize("lengths", ["short", "long"])
def test_a_newcomer_waits_for_no_backlog(
    policy: str, options: dict[str, Any], cluster: ClusterModel, lengths: str
) -> None:
    rng = random.Random(lengths)
    newcomer = drawn(rng, lengths, 2, 1, at_ns=SECOND)
    watch = Watch(policy, options, cluster, [*drawn(rng, "mixed", 1, TOKENS), *newcomer])
    assert watch.passed_second <= watch.bound
    assert 2 * watch.bound < TOKENS, "the bound says nothing"


@pytest.mark.parametrize("seed", range(60))
def test_storm_of_tenants_loses_nothing(seed: int) -> None:
    name, options, cluster = POLICIES[seed % len(POLICIES)]
    options = {**options, "max_batch": 6}
    scheduler = Scheduler(
        make_policy(name, options),
        Costs(CostTable(latencies=Unmeasured())),
        limits=QueueLimits(max_waiting=12, max_waiting_tokens=30_000),
    )
    cell = RandomCell(
        scheduler, seed, faults=(0.0, 0.1)[seed % 2], elastic=cluster.in_place, tenants=4
    )
    cell.play(requests=25, turns=120)
    counts = scheduler.counts
    assert (counts.running, counts.waiting) == (0, 0)
    assert (counts.prefill_kv, counts.decode_kv) == (0.0, 0.0)
