"""The application builder that `config.yaml` names.

This module has no `from __future__ import annotations`: Ray Serve reads the type of `build`'s
argument to parse `args`, and would find a string.
"""

import time
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import GangSchedulingConfig

from csps.services.cluster.registry import Registry
from csps.services.deployments.configurator import Configurator
from csps.services.deployments.gang_rank import UPDATE_S, GangRank
from csps.services.deployments.router import Router
from csps.services.planning.checks import check_settings
from csps.services.settings.credentials import cluster_secret
from csps.services.settings.replicas import GANGS, only_one
from csps.services.settings.settings import AnyGang, Settings

MANY = 100_000
"""Admission is the router's decision: Serve must not queue in front of it."""
SHELL_CPUS = 0.05
"""CPUs of router, configurator and registry, which wait most of the time."""
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
"""Run the router's HTTP server and the code behind it on one event loop.

Serve's default is a thread for each. Every write of every stream would then cross threads: a task,
a wake-up through a pipe and a fight for the interpreter, which doubled the cost of a token.
"""
GRACE_S = 10.0
"""Time for a replica to close after the server has drained."""
BESIDE_PERCENT = 100
"""Serve's `max_surge_percent` of router and gangs: the next ones start while the former ones serve
(`services.cluster.handover`)."""
HEALTH_CHECK_PERIOD_S = 1.0
"""Period of Serve's health checks: a killed replica is noticed at the next one."""
ROUTER_ANSWER_S, ANSWER_S = 2.5, 5.0
"""Time for a replica to answer a check. Serve ends a replica that leaves three in a row unanswered:
a frozen router after 9 s of the 15 s in which requests are to be served again, and others after
16 s. A frozen rank is noticed earlier by the router's pings, and nobody waits for the rest. On an
overloaded machine healthy routers took 2 s and more to answer; Serve's default is 30 s."""


def build(settings: Settings) -> Application:
    """Return one cell: router (ingress), configurator, registry and gangs.

    The gangs are a prefill and a decode gang, or an elastic one.

    Raises:
        ConfigError: a setting names something that does not exist.
    """
    settings = settings.resolved()
    check_settings(settings)
    secret = cluster_secret()
    rollout = time.time_ns()  # larger than that of every former build
    registry = _shell(Registry, "Registry", settings).bind()
    gangs = tuple(
        _gang(name, settings, settings.gangs[role]).bind(role, settings, secret, registry, rollout)
        for name, role in GANGS.items()
        if role in settings.gangs
    )
    configurator = _shell(Configurator, "Configurator", settings).bind(settings, secret)
    router = _shell(Router, "Router", settings, ingress=True)
    return router.bind(settings, secret, registry, configurator, rollout, gangs=gangs)


def _shell(cls: type, name: str, settings: Settings, *, ingress: bool = False) -> serve.Deployment:
    make = serve.deployment(
        name=name,
        num_replicas=1,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": SHELL_CPUS, **(one_loop() if ingress else {})},
        max_surge_percent=BESIDE_PERCENT if ingress else 0,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=ROUTER_ANSWER_S if ingress else ANSWER_S,
        graceful_shutdown_timeout_s=settings.drain_s + GRACE_S,
        graceful_shutdown_wait_loop_s=0.2,
    )
    alone = only_one(cls)
    return make(serve.ingress()(alone) if ingress else alone)


def one_loop() -> dict[str, Any]:
    """Return actor options with `ONE_LOOP`.

    Serve applies an application's `runtime_env` only to deployments without one, so it is merged
    here.
    """
    given = dict(ray.get_runtime_context().runtime_env) if ray.is_initialized() else {}
    return {"runtime_env": {**given, "env_vars": {**given.get("env_vars", {}), **ONE_LOOP}}}


def _gang(name: str, settings: Settings, section: AnyGang) -> serve.Deployment:
    resources: dict[str, Any] = {"num_cpus": section.num_cpus, "num_gpus": section.num_gpus}
    make = serve.deployment(
        name=name,
        num_replicas=section.ranks,
        gang_scheduling_config=GangSchedulingConfig(gang_size=section.ranks),
        ray_actor_options=resources,
        max_surge_percent=BESIDE_PERCENT,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=ANSWER_S,
        graceful_shutdown_timeout_s=UPDATE_S + settings.drain_s + GRACE_S,
        graceful_shutdown_wait_loop_s=0.2,
    )
    return make(GangRank)
