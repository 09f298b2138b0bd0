"""vLLM's command lines start the server that they mean, or are refused with the reason."""

from __future__ import annotations

import argparse
import os
import shlex
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm_command_lines import LINES, Line

from csps.cli import main
from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError
from csps.services.launch.asked_server import Asked, asked
from csps.services.launch.deploy_config import DeployConfig, read_config
from csps.services.launch.serve_options import add_options, as_parsed
from csps.services.settings import vllm_options
from csps.services.settings.credentials import KEYS_VARIABLE
from csps.services.settings.settings import Settings
from csps.services.settings.vllm_options import ALIASES, HARMLESS, IGNORED, OURS, REFUSED

ROOT = Path(__file__).resolve().parents[2]
TWO_CORES = ROOT / "config.yaml"


def parser() -> CommandParser:
    made = CommandParser(prog="csps serve", allow_abbrev=False)
    add_options(made)
    return made


def parsed(words: str, *, gpus: int = 0) -> Asked:
    return asked(parser().parse_args(as_parsed(shlex.split(words.replace("\\\n", " ")))), gpus=gpus)


def served(wanted: Asked) -> DeployConfig:
    """Return the configuration with the included model in the place of one that is not here."""
    args = {**wanted.args, "model": "needle"}
    return read_config(
        TWO_CORES, host=wanted.host, port=wanted.port, args=args, each_gang=wanted.each_gang
    )


def found(wanted: Asked, path: str) -> Any:
    """Return what a command line gives, by the path of its setting."""
    if path in ("model", "keys"):
        return getattr(wanted, path)
    config = served(wanted)
    if path.startswith("http_options."):
        return config.data["http_options"][path.partition(".")[2]]
    return reduce(
        lambda at, key: at[key] if isinstance(at, dict) else getattr(at, key),
        path.split("."),
        config.settings.model_dump(),
    )


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.source} {line.words[:40]}")
def test_a_command_line_of_vllm_is_understood(
    line: Line, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir("/")
    if line.settings is None:
        with pytest.raises((ConfigError, SystemExit)) as refused:
            served(parsed(line.words))
        said = capsys.readouterr().err.strip() or str(refused.value)
        assert line.refused in said
        assert "\n" not in said
        return
    wanted = parsed(line.words)
    assert {path: found(wanted, path) for path in line.settings} == line.settings
    assert tuple(note.partition(":")[0] for note in wanted.notes) == line.without_effect


def test_a_null_among_overrides_stays_and_an_option_of_its_own_comes_first() -> None:
    """Without its window, Mistral 7B v0.1 attends to everything."""
    wanted = parsed(
        """mistralai/Mistral-7B-v0.1 --hf-overrides '{"sliding_window": null, "rope_theta": 5}' """
        "--rope-theta 1e6"
    )
    assert found(wanted, "model_overrides") == {"sliding_window": None, "rope_theta": 1e6}


def test_there_are_25_lines() -> None:
    assert len(LINES) >= 25
    assert len({line.words for line in LINES}) == len(LINES)


def test_every_option_has_one_meaning() -> None:
    options = {name.lstrip("-") for name in parser()._option_string_actions}
    assert not set(IGNORED) & set(REFUSED)
    assert set(HARMLESS) <= set(REFUSED)
    assert {vllm_options.canonical(name) for name in ALIASES.values()} <= options
    assert {*IGNORED, *REFUSED} <= options
    plain = set(OURS) - set(IGNORED) - set(REFUSED)
    assert plain - options == {
        "model-tag", "kv-cache-memory-bytes", "num-gpu-blocks-override", "scheduling-policy",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("131072", 131072), ("1M", 2**20), ("1m", 10**6), ("25.6k", 25_600), ("128K", 2**17)],
)
def test_a_length_may_have_a_unit(text: str, tokens: int) -> None:
    assert parsed(f"needle --max-model-len {text}").args["max_positions"] == tokens


@pytest.mark.parametrize(
    ("text", "form"), [("auto", "auto"), ("int8", "int8"), ("int8_per_token_head", "int8")]
)
def test_kv_has_a_form_of_its_own(text: str, form: str) -> None:
    assert parsed(f"needle --kv-cache-dtype {text}").args["kv_dtype"] == form


@pytest.mark.parametrize("text", ["fp8", "ptpc_fp8"])
def test_weights_have_a_form_of_their_own(text: str) -> None:
    assert parsed(f"needle --quantization {text}").args["weight_dtype"] == "fp8"


@pytest.mark.parametrize("text", ["awq", "gptq", "mxfp4", "compressed-tensors"])
def test_files_that_are_quantized_need_no_option(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(f"needle --quantization {text}")
    said = capsys.readouterr().err
    assert f"--quantization: csps does not quantize to '{text}'. Checkpoints that are" in said
    assert "are detected: drop the option" in said


def test_a_form_of_kv_that_is_not_here_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed("needle --kv-cache-dtype fp8")
    said = capsys.readouterr().err
    assert "--kv-cache-dtype: the format 'fp8' is not known here; known: auto, int8" in said


@pytest.mark.parametrize("text", ["auto", "-1"])
def test_the_models_own_length_may_be_asked_for(text: str) -> None:
    assert "max_positions" not in parsed(f"needle --max-model-len {text}").args


@pytest.mark.parametrize("text", ["0", "1.5", "many", "1T", ""])
def test_no_length_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(f"needle --max-model-len '{text}'")
    assert "--max-model-len: expected a number of tokens" in capsys.readouterr().err


def test_the_model_is_given_once() -> None:
    assert parsed("--model some/model").model == "some/model"
    with pytest.raises(ConfigError, match="the model is already 'one'"):
        parsed("one --model two")
    with pytest.raises(ConfigError, match="a model has one name, got 2"):
        parsed("needle --served-model-name one two")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--decod 2", "'--decod'; did you mean '--decode'?"),
        ("--zz", "'--zz'; see csps serve --help"),
    ],
)
def test_an_unknown_option_is_one_line_with_the_nearest(
    words: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parsed(f"needle {words}")
    said = capsys.readouterr().err
    assert hint in said
    assert said.count("\n") == 1


def test_an_elastic_gang_replaces_the_pair_and_gets_a_policy_that_takes_it() -> None:
    settings = served(parsed("needle --elastic 3 -tp 2")).settings
    assert settings.gangs.keys() == {"elastic"}
    assert settings.elastic is not None
    assert (settings.elastic.instances, settings.elastic.tp) == (3, 2)
    assert settings.scheduling.policy == "chunked_prefill"
    other = served(parsed("needle --elastic 3 --policy loongserve")).settings
    assert other.scheduling.policy == "loongserve"
    with pytest.raises(ConfigError, match="remove prefill"):
        served(parsed("needle --elastic 3 --prefill 2"))


def test_options_change_only_what_they_name(tmp_path: Path) -> None:
    """Against a file with other gangs, to which an option for all gangs applies as well."""
    data = yaml.safe_load(TWO_CORES.read_text())
    data["applications"][0]["args"] = {
        "elastic": {"instances": 3, "kv_slots": 7000},
        "scheduling": {"policy": "chunked_prefill", "token_budget": 64},
        "telemetry": {"sample": 0.5},
    }
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump(data))
    wanted = parsed(f"--config {path} -tp 2 --otlp-traces-endpoint http://127.0.0.1:4318/v1")
    before, after = read_config(path).settings, wanted.read(download=False).settings
    assert after.elastic is not None
    assert (after.elastic.instances, after.elastic.kv_slots, after.elastic.tp) == (3, 7000, 2)
    assert after.telemetry.sample == 0.5
    assert after.telemetry.otlp_endpoint == "http://127.0.0.1:4318/v1"
    same = {"elastic": before.elastic, "telemetry": before.telemetry}
    assert after.model_copy(update=same) == before


@pytest.mark.parametrize(
    "words", ["--port 80000", "--gpu-memory-utilization 90", "--policy tetirs"]
)
def test_a_wrong_value_may_come_from_an_option(words: str) -> None:
    """The file alone would be the wrong place to look for it."""
    with pytest.raises(ConfigError, match=r"config\.yaml with the options given: "):
        parsed(f"--config {TWO_CORES} {words}").read(download=False)


@pytest.mark.parametrize(
    ("gpus", "words", "gangs"),
    [
        (8, "", {"prefill": (4, 1), "decode": (4, 1)}),
        (8, "-tp 2", {"prefill": (2, 2), "decode": (2, 2)}),
        (3, "", {"prefill": (2, 1), "decode": (1, 1)}),
        (1, "", {"elastic": (1, 1)}),
        (8, "-tp 8", {"elastic": (1, 8)}),
        (8, "--prefill 6 --decode 2", {"prefill": (6, 1), "decode": (2, 1)}),
        (8, "--elastic 4 -tp 2", {"elastic": (4, 2)}),
    ],
)
def test_a_machine_with_gpus_uses_them(
    gpus: int,
    words: str,
    gangs: dict[str, tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # no configuration here: the one that ships
    settings = served(parsed(f"needle {words}", gpus=gpus)).settings
    got = {role: (section.instances, section.tp) for role, section in settings.gangs.items()}
    assert got == gangs
    assert settings.dtype == "bfloat16"
    for section in settings.gangs.values():
        assert (section.num_gpus, section.kv_slots) == (1, "auto")


def test_gpus_are_left_alone_where_a_file_or_an_option_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert served(parsed("needle --device cpu", gpus=8)).settings.prefill.num_gpus == 0
    assert served(parsed(f"--config {TWO_CORES}x", gpus=8)).settings.prefill.num_gpus == 0
    with pytest.raises(ConfigError, match="16 ranks need 16 GPUs, there are 8"):
        parsed("needle -tp 16", gpus=8)


def test_keys_reach_the_router_beside_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "alice aaaaaaaa")
    parsed("needle --api-key token-abc123 --api-key 'bob bbbbbbbb'").give_keys()
    assert os.environ[KEYS_VARIABLE] == "alice aaaaaaaa,token-abc123,bob bbbbbbbb"


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ({"max_model_len": 8192}, "vLLM's max-model-len is max_positions here"),
        ({"tensor-parallel-size": 2}, "is prefill.tp and decode.tp here"),
        ({"prefill": {"tensor_parallel_size": 2}}, "is prefill.tp and decode.tp here"),
        ({"trust_remote_code": True}, "no code from a checkpoint is ever run"),
        ({"enforce_eager": True}, "is not needed: CUDA graphs are not captured"),
        ({"max_positionz": 8192}, "did you mean 'max_positions'?"),
    ],
)
def test_a_name_of_vllm_in_the_settings_is_answered_with_ours(
    args: dict[str, Any], hint: str
) -> None:
    with pytest.raises(ConfigError, match="unknown setting") as refused:
        Settings.model_validate(args)
    assert hint in str(refused.value)


def test_a_configuration_of_vllm_is_answered_with_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`vllm serve --config` takes a flat file."""
    path = tmp_path / "config.yaml"
    path.write_text("model: some/model\ntensor-parallel-size: 4\n")
    assert main(["check-config", "--config", str(path)]) == 1
    assert "unknown setting 'model'; vLLM's model is model here" in capsys.readouterr().err


def test_help_lists_what_has_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    shown = capsys.readouterr().out
    assert "--max-model-len" in shown
    assert "--prefill" in shown
    assert "--trust-remote-code" not in shown
    hidden = [action for action in parser()._actions if action.help == argparse.SUPPRESS]
    assert len(hidden) > 50
