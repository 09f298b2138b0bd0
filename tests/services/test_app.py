"""The application that `config.yaml` names, built but not deployed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray import serve
from ray._raylet import Config  # type: ignore[attr-defined]
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.constants import REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD

from csps.protocols.core.errors import ConfigError
from csps.services.app import ONE_LOOP, build
from csps.services.cluster.registry import Registry
from csps.services.deployments.configurator import Configurator
from csps.services.deployments.router import Router
from csps.services.launch.ray_head import FORCE_STOP
from csps.services.router.scheduler_factory import make_deadlines
from csps.services.scheduling.events.limits import SchedulerDeadlines
from csps.services.settings.replicas import only_one
from csps.services.settings.settings import Settings


def built(**args: object) -> Application:
    """Build the application as Serve does: the file's arguments become the builder's typed
    argument."""
    return call_user_app_builder_with_args_if_necessary(build, dict(args))


def test_the_gangs_have_one_replica_per_rank(tiny_llama: Path) -> None:
    app = built(model=str(tiny_llama), prefill={"instances": 3, "tp": 2})
    router = app._bound_deployment
    prefill, decode = (gang._bound_deployment for gang in router.init_kwargs["gangs"])
    assert (prefill.num_replicas, decode.num_replicas) == (6, 2)


def test_an_elastic_gang_is_deployed_alone(tiny_llama: Path) -> None:
    scheduling = {"policy": "chunked_prefill"}
    app = built(model=str(tiny_llama), elastic={"instances": 3, "tp": 2}, scheduling=scheduling)
    (gang,) = app._bound_deployment.init_kwargs["gangs"]
    deployment = gang._bound_deployment
    assert (deployment.name, deployment.num_replicas) == ("ElasticGang", 6)
    assert deployment.init_args[0] == "elastic"


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_second_router_replica_refuses_to_start(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    """`serve deploy` takes an override without asking the application."""
    wrapped = cast(Any, built(model=str(tiny_llama))._bound_deployment.func_or_class)
    router = wrapped.__mro__[1]  # without what Serve adds for HTTP
    began: list[object] = []
    monkeypatch.setattr(Router, "__init__", lambda self: began.append(self))
    context = SimpleNamespace(deployment="Router", world_size=replicas)
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    if replicas == 1:
        router()
        assert began
    else:
        with pytest.raises(ConfigError, match=r"^Router\.num_replicas is 2: .* one router"):
            router()
        assert not began


def test_constructors_stay_asynchronous_for_serve() -> None:
    """Serve awaits asynchronous constructors."""
    for shell in (Router, Registry, Configurator):
        assert only_one(shell).__init__ is shell.__init__


def test_the_router_keeps_the_applications_environment(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"env_vars": {"A": "b"}, "working_dir": "gcs://x.zip"}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(runtime_env=given))
    options = built(model=str(tiny_llama))._bound_deployment.ray_actor_options
    assert options["runtime_env"] == {**given, "env_vars": {"A": "b", **ONE_LOOP}}


def test_environment_variables_are_known_to_serve() -> None:
    """A misspelled one would be without effect."""
    import ray.serve._private.constants as constants

    known = Path(constants.__file__).read_text()
    core, of_serve = "RAY_kill_worker_timeout_milliseconds", {**ONE_LOOP, **FORCE_STOP}
    del of_serve[core]
    assert all(f'"{name}"' in known for name in of_serve)
    assert hasattr(Config, core.removeprefix("RAY_"))


def test_serve_notices_frozen_replicas_in_time(tiny_llama: Path) -> None:
    """Nobody but Serve notices a frozen router."""
    router = built(model=str(tiny_llama))._bound_deployment
    bound = [*router.init_args[2:4], *router.init_kwargs["gangs"]]
    for deployment in [router, *(application._bound_deployment for application in bound)]:
        config = deployment._deployment_config
        longest_s = 1.1 * config.health_check_period_s + (
            REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD * config.health_check_timeout_s
        )
        assert longest_s < (9.0 if deployment is router else 17.0), deployment.name


def test_no_secret_is_shown(tiny_llama: Path) -> None:
    router = built(model=str(tiny_llama))._bound_deployment
    (secret,) = [arg for arg in router.init_args if type(arg).__name__ == "ClusterSecret"]
    assert secret.value.hex() not in repr(router.init_args)
    assert repr(secret.value) not in repr(router.init_args)


def test_a_typo_is_named(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"^unknown setting 'prefil'; did you mean 'prefill'\?$"):
        built(model=str(tiny_llama), prefil={})


def test_the_settings_set_the_liveness_timeout_of_prefill() -> None:
    settings = Settings.model_validate({"prefill": {"progress_deadline_s": 7.0}})
    assert make_deadlines(settings).prefill_liveness_ns == 7_000_000_000
    assert make_deadlines(Settings()) == SchedulerDeadlines()
