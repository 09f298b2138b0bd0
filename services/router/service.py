"""The router's mechanisms put together: what HTTP, metrics and the cluster see of them."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

from csps.configurator.csa_limits import check_csa
from csps.configurator.shapes import AttentionShape
from csps.protocols.errors import Cancelled, InvalidRequest, QueueFull, RequestError
from csps.protocols.gang_client import GangClient
from csps.services.cluster.attachment import Cluster
from csps.services.cluster.kv_links import KvLink
from csps.services.router.attached import AttachedGangs, gang_up
from csps.services.router.cost_book import CostBook
from csps.services.router.elastic_events import ElasticEvents
from csps.services.router.executor import Executor
from csps.services.router.generation import Generation
from csps.services.router.reports import Reports, error_of
from csps.services.router.requests import Requests
from csps.services.router.running import Running
from csps.services.router.sequences import Sequences
from csps.services.router.slo import Slo
from csps.services.router.step_launch import StepLauncher
from csps.services.router.steps import Steps
from csps.services.router.turns import Recorder, Turns
from csps.services.scheduling.events import Drain, GangDown, LinkDown, LinkUp, Progress
from csps.services.scheduling.fit import Fit
from csps.services.scheduling.policies.choice import own_way
from csps.services.scheduling.scheduler import Counts, Scheduler
from csps.services.telemetry.observer import NoObserver, Observer

_log = logging.getLogger(__name__)

BROKEN = "the router is about to be replaced"
"""After a mistake of ours that ended its scheduling; Serve's next health check sees it."""


class RequestService:
    """Takes requests from `submit` to their last token; listens to the cluster.

    Args:
        cluster: the gangs. The service starts and closes it.
        scheduler: decides what starts where.
        costs: what it compares strategies by.
        shape: the served model's attention, for what sparse attention it allows.
        recorder: of the scheduler's log, if one is kept.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        scheduler: Scheduler,
        costs: CostBook,
        shape: AttentionShape,
        observer: Observer | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._cluster, self._scheduler, self._shape = cluster, scheduler, shape
        self._costs = costs
        self._observer = observer or NoObserver()
        self._turns = Turns(scheduler, recorder=recorder)
        self._gangs, self._sequences = AttachedGangs(), Sequences()
        self._requests = Requests(self._observer, self._turns.tell, costs.answered)
        elastic = ElasticEvents(self._sequences.groups, self._requests.changed)
        self._steps = Steps(costs.measured, self._observer, elastic)
        self._reports = Reports(
            self._requests,
            self._sequences,
            self._steps,
            self._turns.tell,
            on_landed=self._observer.kv_landed,
            on_moved=elastic.moved,
        )
        launcher = StepLauncher(
            gangs=self._gangs,
            costs=costs,
            requests=self._requests,
            steps=self._steps,
            reports=self._reports,
            tell=self._turns.tell,
        )
        self._executor = Executor(
            gangs=self._gangs,
            launcher=launcher,
            costs=costs,
            requests=self._requests,
            sequences=self._sequences,
            reports=self._reports,
            elastic=elastic,
            tell=self._turns.tell,
        )
        self._closing = False
        cluster.listen(self)

    # --- the owner's side ----------------------------------------------------------------------

    async def start(self) -> None:
        """Start following the cluster. Requests may be submitted at once; they wait for it."""
        self._turns.start(self._executor.carry_out)
        self._costs.start(self._turns.tell)
        await self._cluster.start()

    async def close(self, drain_s: float) -> None:
        """Refuse new requests, let running ones finish for `drain_s`, end the rest, hang up."""
        self._closing = True
        self._turns.tell(Drain())
        self._cluster.drain()
        try:
            async with asyncio.timeout(drain_s):
                await self._requests.none_left.wait()
        except TimeoutError:
            _log.warning("%d requests did not finish within %g s", len(self._requests), drain_s)
        self._turns.close()
        for running in self._requests:
            self._requests.fail(running, Cancelled("the server is shutting down"))
        await self._costs.close()
        await self._executor.close()
        await self._cluster.close()

    def check_health(self) -> None:
        """Raise what a scheduling turn, or a command in the background, has failed with."""
        if self._fault is not None:
            raise self._fault

    @property
    def _fault(self) -> BaseException | None:
        return self._turns.fault or self._executor.fault

    def check_integrity(self) -> None:
        """Assert that no slot and no request was lost track of."""
        self._scheduler.check_integrity()
        for sequence in self._sequences.by_id.values():
            assert sequence.unfreed or not sequence.over, "over and freed, but remembered"
            assert self._gangs.number_of(sequence.decode), "of a gang that is gone"

    # --- what metrics and health look at -------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Requests would be served now. They are accepted all the same while they would not."""
        healthy = self._fault is None
        return healthy and self._scheduler.ready and self._cluster.link is not None

    @property
    def trouble(self) -> str:
        """Why not `ready`, in words that clients may read."""
        return self._cluster.phase if self._fault is None else BROKEN

    @property
    def fit(self) -> Fit | None:
        """What fits the gangs that were there last; None before the first time."""
        fit = self._scheduler.fit
        return fit if fit.known else None

    @property
    def counts(self) -> Counts:
        """Requests and KV slots, for metrics."""
        return self._scheduler.counts

    # --- the HTTP layer's side -----------------------------------------------------------------

    def check_room(self, slo: Slo) -> None:
        """Refuse a request of which nothing but its objectives is known yet: its body need not be
        read.

        Raises:
            QueueFull: too many are waiting, or the server is shutting down.
        """
        try:
            self._check_open()
            if (refusal := self._scheduler.refusal_unread()) is not None:
                raise error_of(refusal)
        except RequestError as error:
            self._observer.refused(error, slo)
            raise

    def submit(self, generation: Generation) -> Running:
        """Admit a request; its tokens come by iterating over what is returned.

        Raises:
            ContextLengthExceeded: it could never run here.
            InvalidRequest: it asks for sparse attention that it could never have here.
            QueueFull: too many are waiting, or the server is shutting down.
        """
        try:
            self._check(generation)
        except RequestError as error:
            self._observer.refused(error, generation.slo)
            raise
        if generation.open and not self._scheduler.whole_prompts:
            generation = replace(generation, open=False)  # nothing but exact attention is left
        self._costs.know(generation.cls)
        return self._requests.submit(generation)

    def _check(self, generation: Generation) -> None:
        self._check_open()
        prompt_tokens = int(generation.prompt.size)
        refusal = self._scheduler.refusal(prompt_tokens, generation.sampling.max_tokens)
        if refusal is not None:
            raise error_of(refusal)
        policy = self._scheduler.policy_name
        if generation.strategy is not None and (way := own_way(policy)):
            raise InvalidRequest(
                f"'{generation.strategy}' cannot be chosen here: the policy of this server, "
                f"'{policy}', computes prompts {way}",
                param="csps.strategy",
            )
        if generation.attention == "csa" and not self._scheduler.whole_prompts:
            raise InvalidRequest(
                f"the policy of this server, '{policy}', computes all prompts exactly",
                param="csps.attention",
            )
        if generation.csa is not None:
            check_csa(
                generation.csa,
                prompt_tokens=prompt_tokens,
                locations=self._gangs.prefill_locations,
                shape=self._shape,
            )

    def _check_open(self) -> None:
        if self._closing:
            raise QueueFull("the server is shutting down", retry_after_s=10.0)
        if self._fault is not None:  # nothing would ever be decided about it
            raise QueueFull(BROKEN, retry_after_s=10.0)

    # --- the cluster (ClusterListener) ---------------------------------------------------------

    @property
    def busy(self) -> bool:
        return len(self._requests) > 0

    def gang_up(self, gang: GangClient) -> None:
        number = self._gangs.add(gang)
        self._turns.tell(gang_up(number, gang, generation=self._cluster.generation))
        self._costs.gang_up(gang)

    def gang_down(self, gang: GangClient, reason: str) -> None:
        number = self._gangs.remove(gang)
        if number is None:
            return
        self._observer.gang_lost(gang.role, gang.gang_id)
        self._steps.forget(gang)
        self._reports.forget(number)
        serving = [it for _, it in sorted(self._sequences.by_id.items()) if not it.over]
        self._turns.tell(Progress(drawn=tuple((it.id, it.next_index) for it in serving)))
        self._turns.tell(GangDown(gang=number, reason=reason))
        self._sequences.drop(gang)

    def link_up(self, link: KvLink) -> None:
        prefill, decode = self._gangs.number_of(link.prefill), self._gangs.number_of(link.decode)
        assert prefill is not None, "linked before the prefill gang was attached"
        assert decode is not None, "linked before the decode gang was attached"
        self._gangs.linked(link.decode, link.epoch)
        if not link.own:  # which the scheduler knows by the gang's permissions
            self._turns.tell(LinkUp(prefill=prefill, decode=decode))
        self._observer.cluster_ready(link.epoch)

    def link_down(self, link: KvLink, reason: str) -> None:
        if link.prefill.lost.done() or link.decode.lost.done():
            return  # the gang's end says it all, and more: who was alone in it
        prefill, decode = self._gangs.number_of(link.prefill), self._gangs.number_of(link.decode)
        assert prefill is not None, "unlinked after the prefill gang was gone"
        assert decode is not None, "unlinked after the decode gang was gone"
        self._turns.tell(LinkDown(prefill=prefill, decode=decode, reason=reason))

    def notified(self, gang: GangClient, rank: int, method: str, payload: Any) -> None:
        number = self._gangs.number_of(gang)
        if number is not None:
            self._reports.read(number, gang, rank, method, payload)
