"""The application that `config.yaml` names, built but not deployed."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.serve import Application
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

from csps.protocols.errors import ConfigError
from csps.services.app import build
from csps.services.dispatch import DispatchDeadlines
from csps.services.router import make_deadlines
from csps.services.settings import Settings


def built(**args: object) -> Application:
    """As Serve does it: the arguments of the file become the builder's typed argument."""
    return call_user_app_builder_with_args_if_necessary(build, dict(args))


def test_the_gangs_have_one_replica_per_rank(tiny_llama: Path) -> None:
    app = built(model=str(tiny_llama), prefill={"instances": 3, "tp": 2})
    router = app._bound_deployment
    prefill, decode = (gang._bound_deployment for gang in router.init_kwargs["gangs"])
    assert (prefill.num_replicas, decode.num_replicas) == (6, 2)


def test_no_secret_shows(tiny_llama: Path) -> None:
    router = built(model=str(tiny_llama))._bound_deployment
    (secret,) = [arg for arg in router.init_args if type(arg).__name__ == "ClusterSecret"]
    assert secret.value.hex() not in repr(router.init_args)
    assert repr(secret.value) not in repr(router.init_args)


def test_a_typo_is_named(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"^unknown setting 'prefil'; did you mean 'prefill'\?$"):
        built(model=str(tiny_llama), prefil={})


def test_the_operator_says_how_long_a_prefill_job_may_be_silent() -> None:
    settings = Settings.model_validate({"prefill": {"progress_deadline_s": 7.0}})
    assert make_deadlines(settings).execution.prefill_progress_s == 7.0
    assert make_deadlines(Settings()) == DispatchDeadlines()
