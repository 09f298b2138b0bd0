"""The router: HTTP in front, gangs behind, and the only process that knows all requests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from csps.services import telemetry
from csps.services.admission import QueueLimits
from csps.services.cluster import Cluster
from csps.services.configurator import Configurator, ConfiguratorClient
from csps.services.credentials import ApiKeys, ClusterSecret
from csps.services.dispatch import DispatchDeadlines, Dispatcher
from csps.services.execution import ExecutionDeadlines
from csps.services.gangs import GangRank
from csps.services.http_app import Api
from csps.services.intake import Intake
from csps.services.metrics import Metrics
from csps.services.ray_generations import RayGenerations, application_name
from csps.services.reading_lanes import ReadingLanes
from csps.services.registry import Registry, RegistryDirectory
from csps.services.scheduling.decode_placement import DecodeRules
from csps.services.scheduling.policy import Policy
from csps.services.scheduling.spt_policy import SptPolicy, SptRules
from csps.services.settings import Settings


class Router:
    """Serve ingress. All mechanisms live in plain classes; this puts them together."""

    def __init__(
        self,
        settings: Settings,
        secret: ClusterSecret,
        registry: DeploymentHandle[Registry],
        configurator: DeploymentHandle[Configurator],
        gangs: Sequence[DeploymentHandle[GangRank]],
    ) -> None:
        # `gangs` makes the gangs a part of the application; they are reached without Ray.
        self._settings = settings
        self._flush_spans = telemetry.install("csps-router", settings.telemetry)
        self._configurator = ConfiguratorClient(configurator, secret)
        self._metrics = Metrics(settings.model_name)
        self._lanes = ReadingLanes()
        self._dispatcher = Dispatcher(
            cluster=Cluster(
                RegistryDirectory(registry),
                secret=secret.value,
                router_id=secrets.token_hex(8),
                generations=RayGenerations(f"{application_name()}/routers"),
            ),
            policy=make_policy(settings),
            planner=self._configurator.plan,
            limits=QueueLimits(**settings.queue.model_dump()),
            observer=self._metrics,
            deadlines=make_deadlines(settings),
        )
        self._metrics.watch(self._dispatcher)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Serve once the constructor has returned."""
        api = Api(
            intake=Intake(self._settings),
            engine=self._dispatcher,
            keys=ApiKeys.load(self._settings.api_keys_file),
            metrics=self._metrics,
            max_body_bytes=self._settings.max_body_bytes,
            lanes=self._lanes,
        )
        return api.app(self._lifespan)

    def check_health(self) -> None:
        """Called by Serve; raises when the dispatcher cannot go on, which replaces the router."""
        self._dispatcher.check_health()

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        await self._dispatcher.start()
        ahead = asyncio.create_task(self._configurator.connect())
        try:
            yield
        finally:
            ahead.cancel()
            await self._dispatcher.close(self._settings.drain_s)
            await self._configurator.close()
            self._lanes.close()
            self._flush_spans()


def make_deadlines(settings: Settings) -> DispatchDeadlines:
    """The dispatcher's deadlines, of which the operator may have set some."""
    return DispatchDeadlines(
        execution=ExecutionDeadlines(prefill_progress_s=settings.prefill.progress_deadline_s)
    )


def make_policy(settings: Settings) -> Policy:
    """The scheduling policy with the sizes that the operator set."""
    return SptPolicy(
        SptRules(
            spt_tokens=settings.prefill.spt_tokens, short_tokens=settings.prefill.short_tokens
        ),
        DecodeRules(
            spread_tokens=settings.decode.spread_tokens, max_batch=settings.decode.max_batch
        ),
    )
