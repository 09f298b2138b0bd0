"""The command line: what is wrong is said in one line, before anything is started."""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port

from csps.cli import COMMANDS, main
from csps.protocols.core.errors import ConfigError
from csps.services.launch import preflight
from csps.services.launch.deploy_config import read_config
from csps.services.settings.settings import Settings

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def model_dir(tiny_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama, tmp_path / "some-model"))


def write(tmp_path: Path, model_dir: Path, **changes: Any) -> Path:
    """Return a valid configuration with changes: dotted keys are set inside `applications[0]`."""
    application: dict[str, Any] = {
        "name": "csps",
        "import_path": "csps.services.app:build",
        "args": {"model": str(model_dir)},
    }
    data: dict[str, Any] = {"http_options": {"port": 8123}, "applications": [application]}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        target = {"top": data, "http": data["http_options"], "app": application}.get(section)
        (application["args"] if target is None else target)[name] = value
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_a_good_file_is_called_fine(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, model_dir)
    assert main(["check-config", "--config", str(path)]) == 0
    assert "'some-model' on 2 prefill and 2 decode ranks, at http://127.0.0.1:8123" in (
        capsys.readouterr().out
    )


def test_a_file_with_an_elastic_gang_is_called_fine(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduling = {"policy": "chunked_prefill", "token_budget": 256}
    gang = {"name": "ElasticGang", "num_replicas": 6}
    changes = {"elastic": {"instances": 3, "tp": 2}, "scheduling": scheduling}
    path = write(
        tmp_path,
        model_dir,
        app__deployments=[gang],
        **{f"args__{name}": value for name, value in changes.items()},
    )
    assert main(["check-config", "--config", str(path)]) == 0
    assert "on 6 elastic ranks" in capsys.readouterr().out


def test_check_config_takes_the_replicas_that_there_are(tmp_path: Path, model_dir: Path) -> None:
    counts = {"Router": 1, "Registry": None, "PrefillGang": 2, "DecodeGang": 2}
    deployments = [{"name": name, "num_replicas": count} for name, count in counts.items()]
    path = write(tmp_path, model_dir, app__deployments=deployments)
    assert main(["check-config", "--config", str(path)]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top__http_option": {}}, "unknown setting 'http_option'; did you mean 'http_options'?"),
        ({"http__prt": 1}, "http_options: unknown setting 'prt'; did you mean 'port'?"),
        ({"app__route_prefx": "/"}, "unknown setting 'route_prefx'; did you mean 'route_prefix'?"),
        ({"app__deployments": [{"nam": "Router"}]}, "applications.deployments: unknown setting"),
        (
            {"app__deployments": [{"name": "Router", "num_replicas": 2}]},
            "Router.num_replicas is 2: there is one router: it knows all requests of its gangs",
        ),
        ({"app__deployments": [{"name": "Registry", "num_replicas": "auto"}]}, "is 'auto'"),
        (
            {"app__deployments": [{"name": "Router", "autoscaling_config": {"max_replicas": 3}}]},
            "Router.autoscaling_config: there is one router",
        ),
        (
            {"app__deployments": [{"name": "PrefillGang", "num_replicas": 3}]},
            "PrefillGang.num_replicas is 3: a gang has prefill.instances * prefill.tp replicas",
        ),
        (
            {"args__elastic": {"instances": 2}},
            "scheduling: policy csps cannot use an elastic gang: csps, fixed_sp and tetris need "
            "prefill and decode gangs, loongserve needs an elastic gang, chunked_prefill and "
            "context_parallel take either",
        ),
        ({"args__prefil": {}}, "unknown setting 'prefil'; did you mean 'prefill'?"),
        (
            {"args__tls": {"certificate": "a", "key": "b"}},
            "tls.authority: Field required",
        ),
        (
            {"args__tls": {"certificate": "/a", "key": "/b", "authority": "/c"}},
            "tls.certificate: cannot read /a: No such file or directory",
        ),
        (
            {"args__model": "/nowhere"},
            "there is no directory '/nowhere', nor a shipped model of this name (needle)",
        ),
        ({"args__model": "/"}, "no config.json in '/', so it is no Hugging Face checkpoint"),
        ({"top__http_options": {"port": "eighty"}}, "port: must be an integer from 1 to 65535"),
        ({"top__http_options": {"port": 0}}, "http_options.port: must be an integer from 1 to"),
        ({"app__import_path": "other:app"}, "expected one with import_path csps.services.app"),
        ({"top__http_options": []}, "http_options: expected a mapping"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path,
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    message: str,
) -> None:
    path = write(tmp_path, model_dir, **changes)
    assert main(["check-config", "--config", str(path)]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [[name] for name in COMMANDS if name not in ("bench", "trace")]
    + [["bench", command] for command in ("serve", "sweep", "report")]
    + [["trace", "ui"]],
    ids=" ".join,
)
def test_every_option_says_what_it_is(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    silent: list[str] = []
    print_help = argparse.ArgumentParser.print_help

    def looked_at(self: argparse.ArgumentParser, *args: Any) -> None:
        silent.extend(
            "/".join(action.option_strings) for action in self._actions if not action.help
        )
        print_help(self, *args)

    monkeypatch.setattr(argparse.ArgumentParser, "print_help", looked_at)
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert capsys.readouterr().out
    assert [name for name in silent if name] == []


def test_a_misspelled_command_is_named_and_none_lists_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["simulat"])
    assert "unknown command 'simulat'; did you mean 'simulate'?" in capsys.readouterr().err
    assert main([]) == 2
    assert "  check-config  check a configuration, and say what fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("--verison", "csps: unknown argument '--verison'; did you mean '--version'?"),
        ("serve --prot 8000", "unknown argument '--prot'; did you mean '--port'?"),
        ("serve --max-model-length=1M", "did you mean '--max-model-len'?"),
        ("check-config --hardwar=8xH100 --confg x", "'--confg'; did you mean '--config'?"),
        ("stop --zzz", "csps stop: unknown argument '--zzz'; see csps stop --help"),
        ("ask --flie book.txt what", "did you mean '--file'?"),
        ("bench serve --num-prompt-count 3", "did you mean '--num-prompts'?"),
        ("trace ui --prt 4", "csps trace ui: unknown argument '--prt'; did you mean '--port'?"),
        ("simulate --clutser tetris-16", "did you mean '--cluster'?"),
        ("top extra words", "csps top: unknown argument 'extra'; see csps top --help"),
    ],
)
def test_a_misspelled_option_is_named_with_the_likeliest_one(
    command: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("content", ["a: [", "[]", "\t", "", "applications: [null]"])
def test_an_invalid_configuration_prints_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    assert main(["check-config", "--config", str(path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--config", "/nowhere/config.yaml"]) == 1
    assert "/nowhere/config.yaml" in capsys.readouterr().err


def test_a_port_on_the_command_line_wins(tmp_path: Path, model_dir: Path) -> None:
    config = read_config(write(tmp_path, model_dir), port=9)
    assert config.url == "http://127.0.0.1:9"
    assert config.data["http_options"]["port"] == 9


@pytest.mark.parametrize("host", ["::", "::1"])
def test_an_address_of_version_6_is_a_url(tmp_path: Path, model_dir: Path, host: str) -> None:
    config = read_config(write(tmp_path, model_dir, top__http_options={"host": host}), port=9)
    assert config.url == "http://[::1]:9"


def test_the_file_in_the_repository_is_valid_but_for_the_model(
    tmp_path: Path, model_dir: Path
) -> None:
    data = yaml.safe_load((ROOT / "config.yaml").read_text())
    data["applications"][0]["args"]["model"] = str(model_dir)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(data))
    assert read_config(path).port == 8000


def test_no_path_depends_on_where_a_process_runs(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = {
        "model": model_dir.name,
        "api_keys_file": "keys",
        "scaling_information_base": "sib.sqlite",
        "scheduling": {"policy": "fixed_sp", "sp": 2, "log": "decisions.log"},
        "telemetry": {"spans_dir": "traces", "sample": 0.5},
    }
    changes = {f"args__{name}": value for name, value in given.items()}
    deployed = read_config(write(tmp_path, model_dir, **changes)).application["args"]
    assert deployed["model"] == str(model_dir)
    assert deployed["api_keys_file"] == str(tmp_path / "keys")
    assert deployed["scaling_information_base"] == str(tmp_path / "sib.sqlite")
    assert deployed["scheduling"] == {
        "policy": "fixed_sp",
        "sp": 2,
        "log": str(tmp_path / "decisions.log"),
    }
    assert deployed["telemetry"]["spans_dir"] == str(tmp_path / "traces")
    assert deployed["telemetry"]["sample"] == 0.5
    monkeypatch.chdir("/")
    again = Settings.model_validate(deployed)
    assert again.resolved() == again


def test_a_port_in_use_is_said_in_one_line() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"^port {port} on 127\.0\.0\.1 cannot be used"):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "soon"])
def test_a_ready_timeout_is_a_time(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--ready-timeout", seconds])
    assert "--ready-timeout" in capsys.readouterr().err


def test_stopping_what_was_never_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["stop"]) == 0
    assert "no server was started" in capsys.readouterr().out


_LOADED = """
import contextlib, sys
from csps.cli import main
with contextlib.suppress(SystemExit):
    main(sys.argv[1:])
print(*sorted({"torch", "ray", "numpy", "httpx"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["serve", "--help"], ["sreve"]])
def test_help_loads_no_room(words: list[str]) -> None:
    """The test runs in a process of its own, because this one has loaded everything."""
    command = [sys.executable, "-c", _LOADED, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.splitlines()[-1] == ""


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out.splitlines()
    assert all(any(line.split()[:1] == [name] for line in printed) for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: csps {name}")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("sreve", "csps: argument command: unknown command 'sreve'; did you mean 'serve'?\n"),
        ("stop now", "csps stop: unknown argument 'now'; see csps stop --help\n"),
    ],
)
def test_an_unknown_word_is_one_line(
    words: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert capsys.readouterr().err == error
