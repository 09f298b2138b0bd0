"""A benchmark deploys a server of its own, and leaves others alone."""

from __future__ import annotations

import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import Mock

import pytest

from csps.protocols.core.errors import ConfigError
from csps.services.launch.ray_head import RayHead

# By its path: the end-to-end tests have a module of the same name.
_SPEC = spec_from_file_location(
    "deployed_benchmark", Path(__file__).resolve().parents[2] / "benchmarks" / "deployed.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
deployed = module_from_spec(_SPEC)
_SPEC.loader.exec_module(deployed)


def test_a_server_that_runs_here_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Mock(spec=RayHead, pid=7)
    run = Mock(side_effect=subprocess.CalledProcessError(1, "csps"))
    monkeypatch.setattr(deployed.ray_head, "find_head", lambda run_dir: head)
    monkeypatch.setattr(deployed.subprocess, "run", run)
    with pytest.raises(ConfigError, match="process 7"), deployed.deployed({}):
        pass
    assert not run.called


def test_a_deployment_is_stopped_after_success_and_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # nothing runs from there
    run = Mock(side_effect=[subprocess.CalledProcessError(1, "csps"), None])
    monkeypatch.setattr(deployed.subprocess, "run", run)
    with pytest.raises(subprocess.CalledProcessError), deployed.deployed({}):
        pass
    assert [call.args[0][3] for call in run.call_args_list] == ["serve", "stop"]
