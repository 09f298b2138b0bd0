"""The Serve ingress: HTTP in front, gangs behind, and the only process that knows all requests."""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from csps.protocols.core.errors import FaultError
from csps.services.cluster.attachment import Cluster
from csps.services.cluster.handover import Handover
from csps.services.cluster.ray_context import (
    GangStarts,
    RayGenerations,
    application_name,
    serving_rollouts,
)
from csps.services.cluster.registry import Registry, RegistryDirectory
from csps.services.deployments.configurator import Configurator, ConfiguratorClient, attention_shape
from csps.services.deployments.gang_rank import GangRank
from csps.services.http.api import HttpApi
from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import RequestParser
from csps.services.router.cost_table_service import CostTableService
from csps.services.router.key_limits import KeyLimiter
from csps.services.router.scheduler_factory import initial_costs, make_scheduler, open_log
from csps.services.router.service import RequestService
from csps.services.settings.credentials import ApiKeys, ClusterSecret
from csps.services.settings.settings import Settings
from csps.services.telemetry import tracing
from csps.services.telemetry.load_trace import LoadTrace
from csps.services.telemetry.metrics import Metrics


class Router:
    """Serve ingress. Plain classes contain all mechanisms; this class connects them."""

    def __init__(
        self,
        settings: Settings,
        secret: ClusterSecret,
        registry: DeploymentHandle[Registry],
        configurator: DeploymentHandle[Configurator],
        rollout: int,
        gangs: Sequence[DeploymentHandle[GangRank]],
    ) -> None:
        # `gangs` only makes the gangs part of the application: the router reaches them without Ray.
        self._settings = settings
        self._flush_spans = tracing.install("csps-router", settings.telemetry)
        tls = settings.load_tls()
        self._configurator = ConfiguratorClient(configurator, secret, tls)
        self._metrics = Metrics(settings.model_name, settings.telemetry.metrics_prefix)
        self._parser = RequestParser(settings)
        self._parser_pool = ParserPool(self._parser.body_parser)
        self._keys = ApiKeys.load(settings.api_keys_file)
        self._keys.warn_of_unknown(settings.auth.names)
        self._watching: asyncio.Task[None] | None = None
        table = initial_costs(settings)
        self._log = open_log(settings, table)
        store_table = None if self._log is None else self._log.store_table
        costs = CostTableService(table, self._configurator.strategies, store_table)
        directory, roles = RegistryDirectory(registry, rollout), tuple(settings.gangs)
        cluster = Cluster(
            directory,
            secret=secret.value,
            router_id=secrets.token_hex(8),
            generations=RayGenerations(f"{application_name()}/routers"),
            roles=roles,
            tls=tls,
        )
        self._handover = Handover(
            cluster,
            directory,
            serving_rollouts(rollout),
            roles,
            feasible=GangStarts(settings).only_lack_room,
        )
        recorded = settings.telemetry.request_trace
        self._load_trace = None if recorded is None else LoadTrace(Path(recorded))
        self._service = RequestService(
            cluster=cluster,
            scheduler=make_scheduler(settings, costs.costs),
            costs=costs,
            shape=attention_shape(settings),
            observer=self._metrics,
            recorder=self._log,
            limiter=KeyLimiter(settings.auth),
            load_trace=self._load_trace,
        )
        self._metrics.watch(self._service)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the ASGI application; Serve calls this after the constructor."""
        api = HttpApi(
            parser=self._parser,
            service=self._service,
            keys=self._keys,
            metrics=self._metrics,
            max_body_bytes=self._settings.max_body_bytes,
            auth=self._settings.auth,
            docs=self._settings.http.docs,
            parser_pool=self._parser_pool,
            state=self._state(),
        )
        return api.app(self._lifespan)

    def _state(self) -> Callable[[], bytes] | None:
        """Return the function that makes `/v1/csps/state`, if the settings switch it on."""
        if not self._settings.http.ui:
            return None
        return self._service.snapshots(lambda: self._metrics.slo_counts).encoded

    def check_health(self) -> None:
        """Raise, for Serve, if the scheduler cannot go on; Serve then replaces the router."""
        self._service.check_health()
        if self._watching is not None and self._watching.done():
            raise FaultError("the API keys are no longer watched")

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        await self._service.start()
        ahead = [self._configurator.connect(), self._parser_pool.start()]
        if self._settings.api_keys_file is not None:
            ahead.append(self._keys.watch(self._service.revoke))
        tasks = [asyncio.create_task(work) for work in ahead]
        self._watching = tasks[-1] if self._settings.api_keys_file is not None else None
        # What was imported is never garbage, and searching it would take 0.2 s of the event loop.
        gc.collect()
        gc.freeze()
        try:
            await self._handover.wait_turn()
            yield
        finally:
            for task in tasks:
                task.cancel()
            self._watching = None
            await self._service.close(self._settings.drain_s)
            await self._handover.close()
            await self._configurator.close()
            await self._parser_pool.close()
            if self._log is not None:
                self._log.close()
            if self._load_trace is not None:
                self._load_trace.close()
            self._flush_spans()
