"""The router's mechanisms put together, for HTTP, metrics and the cluster.

`RequestService.submit` admits a request. The scheduler driver turns events into commands, the
executor sends them to the ranks, and rank notifications return tokens and events.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from csps.configurator.model.attention_shape import AttentionShape, check_csa
from csps.protocols.core.errors import (
    Cancelled,
    CspsError,
    InvalidRequest,
    QueueFull,
    RequestError,
)
from csps.protocols.gang.client import GangClient
from csps.services.cluster.attachment import Cluster
from csps.services.cluster.kv_links import KvLink
from csps.services.requests.request_handle import RequestHandle
from csps.services.requests.request_spec import ApiKey, RequestSpec, SloBounds
from csps.services.router.cluster_state import StateSnapshots
from csps.services.router.cost_table_service import CostTableService
from csps.services.router.decision_log import DecisionLog
from csps.services.router.dispatch import Executor, StepLauncher
from csps.services.router.key_limits import KeyLimiter
from csps.services.router.live_requests import LiveRequests
from csps.services.router.rank_notifications import RankNotifications, RunningSteps, error_of
from csps.services.router.scheduler_driver import AttachedGangs, SchedulerDriver, gang_up
from csps.services.scheduling.core.scheduler import Scheduler, SchedulerCounts
from csps.services.scheduling.deciding.decisions import CapacityCheck
from csps.services.scheduling.events.events import (
    Drain,
    GangDown,
    LinkDown,
    LinkUp,
    Progress,
    Standby,
)
from csps.services.scheduling.policies.registry import own_way
from csps.services.telemetry.load_trace import LoadTrace
from csps.services.telemetry.observer import (
    NullObserver,
    RequestObserver,
    guarded,
    guarded_observer,
)

_log = logging.getLogger(__name__)

BROKEN = "the router is about to be replaced"
"""Reason after an internal error ended scheduling; Serve's next health check replaces the router.
"""


class RequestService:
    """Serves requests from `submit` to the last token, and listens to the cluster.

    Args:
        cluster: the gangs; the service starts and closes it.
        scheduler: decides what starts where.
        costs: cost tables by which the scheduler compares strategies.
        shape: the served model's attention, which limits the sparse attention it allows.
        recorder: writes the scheduler's decision log, if one is kept.
        limiter: limits of API keys; None: there are none.
        load_trace: records the requests; None: nothing does.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        scheduler: Scheduler,
        costs: CostTableService,
        shape: AttentionShape,
        observer: RequestObserver | None = None,
        recorder: DecisionLog | None = None,
        limiter: KeyLimiter | None = None,
        load_trace: LoadTrace | None = None,
    ) -> None:
        self._cluster, self._scheduler, self._shape = cluster, scheduler, shape
        self._costs = costs
        self._observer = guarded_observer(observer or NullObserver())
        self._limiter = limiter or KeyLimiter()
        self._driver = SchedulerDriver(scheduler, recorder=recorder)
        self._gangs = AttachedGangs()
        self._requests = LiveRequests(
            self._observer,
            self._driver.post_event,
            self._limiter,
            (lambda handle: None) if load_trace is None else guarded(load_trace.record),
        )
        self._steps = RunningSteps(
            costs.measured,
            costs.record_overhead,
            self._observer,
            self._requests,
            self._driver.post_event,
        )
        self._notifications = RankNotifications(
            self._gangs,
            self._requests,
            self._steps,
            self._driver.post_event,
            self._observer,
            on_received=self._observer.kv_received,
            on_link_broken=cluster.link_broken,
            on_bug=self._bug,
        )
        self.notified = self._notifications.read
        """Reader of all ranks' notifications: no token makes a detour through this class."""
        launcher = StepLauncher(
            gangs=self._gangs,
            costs=costs,
            requests=self._requests,
            steps=self._steps,
            post_event=self._driver.post_event,
        )
        self._executor = Executor(
            gangs=self._gangs,
            launcher=launcher,
            costs=costs,
            requests=self._requests,
            notifications=self._notifications,
            post_event=self._driver.post_event,
        )
        self._report_fault: Exception | None = None
        """Error with which a rank's report was handled: a bug, after which books may be wrong."""
        self._closing = False
        cluster.listen(self)

    # --- life cycle ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Start following the cluster. Requests may be submitted at once and wait for gangs."""
        self._driver.start(self._executor.execute)
        self._costs.start(self._driver.post_event)
        await self._cluster.start()

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, finish live ones for `drain_s` s, fail the rest, disconnect."""
        self._closing = True
        self._driver.post_event(Drain())
        self._cluster.drain()
        try:
            async with asyncio.timeout(drain_s):
                await self._requests.none_left.wait()
        except TimeoutError:
            _log.warning("%d requests did not finish within %g s", len(self._requests), drain_s)
        self._driver.close()
        self._fail_all(Cancelled("the server is shutting down"))
        await self._costs.close()
        await self._executor.close()
        await self._cluster.close()

    def check_health(self) -> None:
        """Raise the error with which a scheduling round, a report or a background task failed.

        Live requests fail at once: nobody knows which of them will ever go on.
        """
        if self._fault is not None:
            self._fail_all(Cancelled(BROKEN))
            raise self._fault

    def _fail_all(self, error: CspsError) -> None:
        for handle in self._requests:
            self._requests.fail(handle, error)

    def _bug(self, error: Exception) -> None:
        self._report_fault = error
        self._fail_all(Cancelled(BROKEN))

    @property
    def _fault(self) -> BaseException | None:
        return (
            self._driver.fault or self._executor.fault or self._report_fault or self._cluster.fault
        )

    def check_integrity(self) -> None:
        """Assert that no slot and no request was lost track of."""
        self._scheduler.check_invariants()
        for sequence in self._requests.sequences.values():
            assert sequence.pending_free or not sequence.over, (
                f"sequence {sequence.id} is over and freed but still registered"
            )
            assert self._gangs.number_of(sequence.decode), (
                f"the gang of sequence {sequence.id} is detached"
            )

    # --- used by metrics and health ------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Return whether a request would be served now.

        Requests are accepted even while it is false; they wait.
        """
        healthy = self._fault is None
        return healthy and self._scheduler.ready and not self._cluster.phase

    @property
    def trouble(self) -> str:
        """Return why the service is not `ready`, in words that clients may read."""
        return self._cluster.phase if self._fault is None else BROKEN

    @property
    def capacity_check(self) -> CapacityCheck | None:
        """Return what fits the latest gangs; None before the first ones."""
        capacity_check = self._scheduler.capacity
        return capacity_check if capacity_check.known else None

    @property
    def counts(self) -> SchedulerCounts:
        """Return requests and KV slots, for metrics."""
        return self._scheduler.counts

    def snapshots(self, slo: Callable[[], Mapping[str, tuple[int, int]]]) -> StateSnapshots:
        """Return what makes snapshots of the state.

        Args:
            slo: function that returns how often each objective was met and missed.
        """
        return StateSnapshots(self._scheduler, self._requests, self._steps, slo)

    # --- used by the HTTP layer ----------------------------------------------------------------

    def check_room(self, slo: SloBounds, api_key: ApiKey, *, ahead: int) -> None:
        """Refuse a request before its body is read, knowing only its objectives and its key.

        Args:
            ahead: requests that are being read, and will be submitted before it.

        Raises:
            QueueFull: too many requests wait, or the server is shutting down.
            RateLimited: the key has reached one of its limits.
        """
        try:
            self._check_open()
            self._limiter.check_request(api_key)
            if (refusal := self._scheduler.refusal_unread(api_key.tenant, ahead=ahead)) is not None:
                raise error_of(refusal)
        except RequestError as error:
            self._observer.refused(error, slo)
            raise

    def submit(self, spec: RequestSpec) -> RequestHandle:
        """Admit a request; iterate the returned handle for its tokens.

        Raises:
            ContextLengthExceeded: the request could never run here.
            InvalidRequest: the request asks for attention that this server cannot give it.
            QueueFull: too many requests wait, or the server is shutting down.
            RateLimited: the API key has reached one of its limits.
        """
        try:
            self._check(spec)
        except RequestError as error:
            self._observer.refused(error, spec.slo)
            raise
        if spec.open and not self._scheduler.whole_prompts:
            spec = replace(spec, open=False)  # only exact attention is left
        self._costs.register_class(spec.cls)
        handle = self._requests.submit(spec)
        _log.debug(
            "request %s submitted as request_id %d: %d prompt tokens, up to %d output tokens",
            spec.client_request_id, handle.request_id, spec.prompt.size, spec.sampling.max_tokens,
        )  # fmt: skip
        return handle

    def _check(self, spec: RequestSpec) -> None:
        self._check_open()
        prompt_tokens = int(spec.prompt.size)
        self._limiter.check_prompt(spec.api_key, prompt_tokens)
        refusal = self._scheduler.refusal(
            prompt_tokens,
            spec.sampling.max_tokens,
            spec.api_key.tenant,
            self._limiter.kv_permille(spec.api_key),
        )
        if refusal is not None:
            raise error_of(refusal)
        policy = self._scheduler.policy_name
        if spec.strategy is not None and (way := own_way(policy)):
            raise InvalidRequest(
                f"'{spec.strategy}' cannot be chosen here: the policy of this server, "
                f"'{policy}', computes prompts {way}",
                param="csps.strategy",
            )
        if spec.attention == "csa" and not self._scheduler.whole_prompts:
            raise InvalidRequest(
                f"the policy of this server, '{policy}', computes all prompts exactly",
                param="csps.attention",
            )
        if spec.csa is not None:
            check_csa(
                spec.csa,
                prompt_tokens=prompt_tokens,
                locations=self._gangs.prefill_locations,
                shape=self._shape,
            )

    def _check_open(self) -> None:
        if self._closing:
            raise QueueFull("the server is shutting down", retry_after_s=10.0)
        if self._fault is not None:  # nothing will be scheduled any more
            raise QueueFull(BROKEN, retry_after_s=10.0)

    def revoke(self, digests: Set[bytes]) -> None:
        """End the requests of revoked API keys.

        Args:
            digests: of the keys (`ApiKey.digest`).
        """
        for handle in self._requests:
            if handle.spec.api_key.digest in digests:
                self._requests.revoke(handle)

    # --- the cluster (ClusterListener) ---------------------------------------------------------

    @property
    def busy(self) -> bool:
        return len(self._requests) > 0

    def gang_up(self, gang: GangClient) -> None:
        gang_number = self._gangs.add(gang)
        self._driver.post_event(gang_up(gang_number, gang, generation=self._cluster.generation))
        self._costs.gang_up(gang)
        scheduler = self._scheduler
        if scheduler.restores_decode_kv if gang.role == "decode" else scheduler.restores_kv:
            gang.notify_all("list_saved")

    def gang_down(self, gang: GangClient, reason: str) -> None:
        gang_number = self._gangs.remove(gang)
        if gang_number is None:
            return
        self._observer.gang_lost(gang.role, gang.gang_id)
        self._steps.discard(gang)
        self._notifications.discard(gang_number)
        # Before `GangDown`: the scheduler restarts sequences behind the tokens that they have.
        progress = tuple(
            (sequence_id, sequence.next_index)
            for sequence_id, sequence in sorted(self._requests.sequences.items())
            if not sequence.over
        )
        self._driver.post_event(Progress(generated_tokens=progress))
        self._driver.post_event(GangDown(gang=gang_number, reason=reason))
        self._requests.drop(gang)

    def link_up(self, link: KvLink) -> None:
        prefill, decode = self._gangs.number_of(link.prefill), self._gangs.number_of(link.decode)
        assert prefill is not None, "link up before the prefill gang was attached"
        assert decode is not None, "link up before the decode gang was attached"
        self._gangs.linked(link.decode, link.epoch)
        if not link.to_itself:  # an elastic gang needs no link: the scheduler reads its roles
            self._driver.post_event(LinkUp(prefill=prefill, decode=decode))
        self._observer.cluster_ready(link.epoch)

    def link_down(self, link: KvLink, reason: str) -> None:
        if link.prefill.lost.done() or link.decode.lost.done():
            return  # `gang_down` follows and covers the link
        prefill, decode = self._gangs.number_of(link.prefill), self._gangs.number_of(link.decode)
        assert prefill is not None, "link down after the prefill gang was lost"
        assert decode is not None, "link down after the decode gang was lost"
        self._driver.post_event(LinkDown(prefill=prefill, decode=decode, reason=reason))

    def stands_by(self, waits: bool) -> None:
        self._driver.post_event(Standby(waits=waits))
