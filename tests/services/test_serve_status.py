"""Waiting for a deployment: what counts is the one just sent, and what it says when it fails.

A small HTTP server stands for Ray's REST API and for the router.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from csps.protocols.core.errors import ConfigError, DeadlineExceeded, FaultError
from csps.services.launch import preflight, ray_head, serve_command
from csps.services.launch import serve_command as serve_status
from csps.services.launch.demo_command import ask
from csps.services.launch.deploy_config import DeployConfig, read_config
from csps.services.launch.ray_head import RayHead
from csps.services.launch.serve_command import (
    APPLICATIONS_PATH,
    ServeStatus,
    _clear,
    read_status,
    undeploy,
    wait_keys,
    wait_ready,
)
from csps.services.planning.machine import GIB, MainMemory
from csps.services.planning.memory import memory_need

PORT = 8123
FAILED = """The deployment failed to start 3 times in a row. See controller logs. Error:
ray::ServeReplica:csps:PrefillGang.initialize_and_get_metadata() (pid=1, ip=127.0.0.1)
  File "csps/services/deployments/gang_rank.py", line 54, in __init__
csps.models.network.checkpoint_json.MissingTensorError: no tensor model.norm.weight
"""


class Cluster:
    """State that the fake answers with."""

    def __init__(self) -> None:
        self.statuses: list[dict[str, Any]] = [{}]
        """Answers of the applications API, the last one for good."""
        self.healthy = True
        self.unauthorized = 0
        """Requests for models that are refused before one is answered."""
        self.asked: list[str] = []

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        self.asked.append(path)
        if path == "/v1/models":
            self.unauthorized -= 1
            return (401 if self.unauthorized >= 0 else 200), {}
        if path == "/health":
            return (200, {}) if self.healthy else (503, {"reason": "waiting for a decode gang"})
        return 200, self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def server(cluster: Cluster) -> Iterator[ThreadingHTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = cluster.get(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_PUT(self) -> None:
            cluster.asked.append(f"PUT {self.path}")
            self.send_response(200)
            self.end_headers()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"choices": [], "usage": {"prompt_tokens": 1}}\n\n')

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Head(RayHead):
    """Head whose process is this one."""

    @property
    def alive(self) -> bool:
        return True


@pytest.fixture
def head(server: ThreadingHTTPServer, tmp_path: Path) -> Head:
    (tmp_path / "token").write_text("token")
    return Head(
        pid=os.getpid(),
        address="",
        dashboard=f"http://127.0.0.1:{server.server_address[1]}",
        token_file=str(tmp_path / "token"),
        log_file="",
        socket_dir=str(tmp_path / "front"),
    )


@pytest.fixture
def config(server: ThreadingHTTPServer, tiny_llama: Path, tmp_path: Path) -> DeployConfig:
    args = {"model": str(tiny_llama), "prefill": {"instances": 1}}
    application = {"name": "csps", "import_path": "csps.services.app:build", "args": args}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return read_config(path, port=server.server_address[1])


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_status, "POLL_S", 0)
    monkeypatch.setattr("csps.services.launch.serve_command.POLL_S", 0)


def applications(
    config: DeployConfig, status: str, *, old: bool = False, **gang: Any
) -> dict[str, Any]:
    settings = config.application["args"]
    args = {**settings, "model": "/another"} if old else settings
    replicas = [{"state": "RUNNING"}, {"state": "STARTING"}]
    deployment = {"replicas": replicas, "target_num_replicas": 2, "status": "UPDATING", **gang}
    application = {
        "status": status,
        "message": "Failed to update the deployments ['PrefillGang'].",
        "deployed_app_config": {**config.application, "args": args},
        "deployments": {"PrefillGang": deployment},
    }
    return {"applications": {"csps": application}}


def replaced_by(
    config: DeployConfig, old: dict[str, Any] | None = None, name: str = "former", **changes: Any
) -> dict[str, Any]:
    """Return an application with another name and other settings than those of `config`; `old`
    replaces all of them."""
    answer = {**applications(config, "RUNNING"), "http_options": config.data["http_options"]}
    deployed = answer["applications"]["csps"]["deployed_app_config"]
    deployed["args"] = {**config.application["args"], **changes} if old is None else old
    answer["applications"] = {name: answer["applications"].pop("csps")}
    return answer


def said_while_waiting(config: DeployConfig, head: RayHead, **wait: Any) -> list[str]:
    said: list[str] = []
    wait_ready(config, head, say=said.append, **wait)
    return said


def test_an_old_application_that_answers_is_not_taken_for_the_new_one(
    config: DeployConfig, head: RayHead, cluster: Cluster
) -> None:
    cluster.statuses = [
        applications(config, "RUNNING", old=True),
        applications(config, "DEPLOYING"),
        applications(config, "RUNNING"),
    ]
    assert said_while_waiting(config, head) == ["  PrefillGang 1/2 and 1 starting (starting)"]
    assert cluster.asked.count("/health") == 1  # only once the new one runs


def test_applications_are_known_with_the_logging_of_the_file(config: DeployConfig) -> None:
    logging = {"log_level": "INFO"}
    logged = replace(config, data={**config.data, "logging_config": logging})
    assert logged.application == {"logging_config": logging, **config.application}


@pytest.mark.parametrize("name", ["runtime_env", "deployments", "import_path"])
def test_an_application_that_differs_outside_of_its_settings_is_another_one(
    config: DeployConfig, name: str
) -> None:
    answer = applications(config, "RUNNING")
    assert ServeStatus(applications=answer["applications"]).runs(config)
    answer["applications"]["csps"]["deployed_app_config"][name] = "another"
    assert not ServeStatus(applications=answer["applications"]).runs(config)


def test_an_old_application_for_ever_is_a_deadline(
    config: DeployConfig, head: RayHead, cluster: Cluster
) -> None:
    cluster.statuses = [applications(config, "RUNNING", old=True)]
    with pytest.raises(DeadlineExceeded):
        said_while_waiting(config, head, deadline_s=1.0)


def test_running_is_not_ready(config: DeployConfig, head: RayHead, cluster: Cluster) -> None:
    cluster.statuses, cluster.healthy = [applications(config, "RUNNING")], False
    with pytest.raises(DeadlineExceeded, match="waiting for a decode gang"):
        said_while_waiting(config, head, deadline_s=1.0)


def test_a_failed_deployment_says_what_its_replicas_raised(
    config: DeployConfig, head: RayHead, cluster: Cluster
) -> None:
    """Serve's message for the application names the deployment only."""
    cluster.statuses = [applications(config, "DEPLOY_FAILED", message=FAILED)]
    error = r"csps\.models\.network\.checkpoint_json\.MissingTensorError: "
    expected = rf"^deployment failed: PrefillGang: {error}"
    with pytest.raises(ConfigError, match=expected):
        said_while_waiting(config, head)


def test_a_failed_build_says_why(config: DeployConfig) -> None:
    status = ServeStatus(**applications(config, "DEPLOY_FAILED"))
    with pytest.raises(ConfigError, match=r"^deployment failed: Failed to update"):
        status.progress(config, "starting")


def test_an_error_of_replicas_is_shown_while_serve_tries_again(config: DeployConfig) -> None:
    status = ServeStatus(**applications(config, "DEPLOYING", message=FAILED))
    assert status.progress(config, "starting") == (
        "PrefillGang 1/2 and 1 starting (PrefillGang: "
        "csps.models.network.checkpoint_json.MissingTensorError: no tensor model.norm.weight)"
    )


def test_http_options_in_force_cannot_change(config: DeployConfig) -> None:
    same = {**config.data["http_options"], "keep_alive_timeout_s": 90}
    ServeStatus(http_options=same).check_http_options(config)
    ServeStatus().check_http_options(config)
    with pytest.raises(ConfigError, match=rf"http_options\.port {PORT}, .* run `make stop` first"):
        ServeStatus(http_options={**same, "port": PORT}).check_http_options(config)


def test_a_head_that_has_ended_is_reported_at_once(config: DeployConfig, head: RayHead) -> None:
    ended = RayHead(**{**vars(head), "pid": 2**22 + 1})  # beyond the largest number there is
    with pytest.raises(FaultError, match=r"^Ray has ended"):
        said_while_waiting(config, ended)


def test_removing_waits_until_nothing_is_left(
    config: DeployConfig, head: RayHead, cluster: Cluster
) -> None:
    cluster.statuses = [
        applications(config, "RUNNING"),
        applications(config, "DELETING"),
        {"applications": {}},
    ]
    undeploy(head)
    api = "/api/serve/applications/"
    assert cluster.asked == [api, f"PUT {api}", api, api]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """GiB that are available, from one look to the next, the last for good."""
    available = [1.0]

    def look(root: Path) -> MainMemory:
        left = available.pop(0) if len(available) > 1 else available[0]
        return MainMemory(total=10**6 * GIB, available=int(left * GIB))

    monkeypatch.setattr(preflight, "main_memory", look)
    monkeypatch.setattr(preflight, "POLL_S", 0)
    return available


@pytest.mark.parametrize("kv_slots", [10**6, 2 * 10**6 - 1])
def test_an_application_stays_if_the_new_one_cannot_fit_without_it(
    head: RayHead,
    config: DeployConfig,
    cluster: Cluster,
    memory: list[float],
    kv_slots: int,
) -> None:
    large = with_slots(config, 2 * 10**6)
    cluster.statuses = [replaced_by(config, prefill={"instances": 1, "kv_slots": kv_slots})]
    memory[:] = [0.0]
    with pytest.raises(
        ConfigError, match=r"^0\.0 GiB .*, and at most .* more once the running server ends, but"
    ):
        _clear(head, large)
    assert cluster.asked == ["/api/serve/applications/"]


def with_slots(config: DeployConfig, kv_slots: int) -> DeployConfig:
    """Return the configuration with another prefill gang."""
    prefill = config.settings.prefill.model_copy(update={"kv_slots": kv_slots})
    settings = config.settings.model_copy(update={"prefill": prefill})
    return replace(config, settings=settings)


def test_memory_that_an_application_frees_slowly_is_waited_for(
    head: RayHead, config: DeployConfig, cluster: Cluster, memory: list[float]
) -> None:
    need = memory_need(config.settings, ray_runs=True).total / GIB
    cluster.statuses = [replaced_by(config, drain_s=1.0), *[{"applications": {}}] * 3]
    cluster.statuses.insert(1, cluster.statuses[0])
    memory[:] = [0.1, 0.1, need / 2, need + 0.1]
    _clear(head, config)
    assert f"PUT {APPLICATIONS_PATH}" in cluster.asked
    assert memory == [need + 0.1]


@pytest.mark.parametrize("old", [{"model": "/not there any more"}, {"unknown": "setting"}])
def test_an_application_of_unknown_memory_is_removed_before_memory_is_checked(
    head: RayHead,
    config: DeployConfig,
    cluster: Cluster,
    memory: list[float],
    monkeypatch: pytest.MonkeyPatch,
    old: dict[str, Any],
) -> None:
    """Assume that it frees enough; the check afterwards decides."""
    monkeypatch.setattr(serve_command, "FREED_DEADLINE_S", 0.0)
    running = replaced_by(config, old)
    cluster.statuses = [running, running, {"applications": {}}]
    memory[:] = [0.0]
    with pytest.raises(ConfigError, match=r"^0\.0 GiB of memory are available, but"):
        _clear(head, config)
    assert f"PUT {APPLICATIONS_PATH}" in cluster.asked


@pytest.mark.parametrize("status", ["RUNNING", "DEPLOYING", "DEPLOY_FAILED", "UNHEALTHY"])
def test_an_application_of_the_same_name_is_updated_in_place(
    head: RayHead, config: DeployConfig, cluster: Cluster, memory: list[float], status: str
) -> None:
    """Its ranks wait for memory themselves: removing it first would refuse its clients. What served
    before a deployment that failed still does."""
    running = replaced_by(config, name="csps", prefill={"instances": 2})
    running["applications"]["csps"]["status"] = status
    cluster.statuses = [running]
    memory[:] = [0.1]
    _clear(head, config)
    assert cluster.asked == [APPLICATIONS_PATH]


def test_edited_keys_are_waited_for(
    config: DeployConfig, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSPS_API_KEYS", "alice old, bob new")
    cluster.unauthorized = 2
    wait_keys(config)
    assert cluster.asked == ["/v1/models"] * 4
    monkeypatch.setattr(serve_command, "KEYS_DEADLINE_S", 0.0)
    cluster.unauthorized = 1 << 20
    with pytest.raises(FaultError, match="does not take over the API keys"):
        wait_keys(config)


def test_nothing_is_removed_where_nothing_runs(head: RayHead, cluster: Cluster) -> None:
    """Send no request, which would start Serve."""
    cluster.statuses = [{"applications": {}}]
    undeploy(head)
    assert cluster.asked == ["/api/serve/applications/"]


def test_a_proxy_of_the_environment_is_not_asked_for_loopback(
    config: DeployConfig, head: RayHead, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    cluster.statuses = [applications(config, "RUNNING")]
    assert read_status(head) is not None
    said_while_waiting(config, head)
    assert ask(config, "hello").usage == {"prompt_tokens": 1}


@pytest.mark.parametrize(
    ("set_as", "expected"),
    [
        ({}, "127.0.0.1,localhost"),
        ({"NO_PROXY": "intra.net"}, "intra.net,127.0.0.1,localhost"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,127.0.0.1,localhost"),
    ],
)
def test_nor_by_what_is_started(
    head: RayHead, monkeypatch: pytest.MonkeyPatch, set_as: dict[str, str], expected: str
) -> None:
    """`serve deploy` and Ray's own processes read the environment."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name, value in set_as.items():
        monkeypatch.setenv(name, value)
    environment = ray_head.RayHead(**vars(head)).environment()
    assert environment["no_proxy"] == environment["NO_PROXY"] == expected
