"""A checkpoint that cannot be served is refused in one line, before Ray is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from free_ports import free_port
from safetensors.torch import load_file, save_file
from tiny_checkpoints import make_checkpoint

from csps.cli import main
from csps.services.launch import ray_head

WEIGHTS = "model.safetensors"


@pytest.fixture
def model_dir(tiny_llama: Path, tmp_path: Path) -> Path:
    """Return a checkpoint to spoil."""
    return Path(shutil.copytree(tiny_llama, tmp_path / "model"))


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start_head(*_: Any, **__: Any) -> None:
        pytest.fail("Ray was started")

    monkeypatch.setattr(ray_head, "start_head", start_head)
    monkeypatch.chdir(tmp_path)


def config_of(model_dir: Path, **args: Any) -> str:
    application = {"import_path": "csps.services.app:build", "args": {"model": "model", **args}}
    path = model_dir.parent / "config.yaml"
    http = {"port": free_port()}
    path.write_text(yaml.safe_dump({"http_options": http, "applications": [application]}))
    return str(path)


def refusal(command: str, config: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([command, "--config", config]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def set_config(model_dir: Path, **values: Any) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def drop_tensor(model_dir: Path, name: str) -> None:
    weights = load_file(model_dir / WEIGHTS)
    del weights[name]
    save_file(weights, model_dir / WEIGHTS)


commands = pytest.mark.parametrize("command", ["check-config", "serve"])


@commands
def test_an_unsupported_architecture(
    command: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_config(model_dir, architectures=["GPTNeoXForCausalLM"])
    error = refusal(command, config_of(model_dir), capsys)
    assert "GPTNeoXForCausalLM is not supported; supported: LlamaForCausalLM, Mistral" in error


@commands
def test_a_missing_tensor(
    command: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drop_tensor(model_dir, "model.layers.1.mlp.down_proj.weight")
    error = refusal(command, config_of(model_dir), capsys)
    assert "the weight files have no tensor model.layers.1.mlp.down_proj.weight" in error


@commands
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_tp_that_does_not_divide_the_heads(
    command: str, role: str, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(command, config_of(model_dir, **{role: {"tp": 3}}), capsys)
    assert f"{role}.tp: tensor parallelism 3 does not divide 4 query heads and 2 KV heads" in error
    assert "possible: 1, 2, 4" in error


def test_a_tensor_of_another_shape(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_config(model_dir, intermediate_size=100)
    error = refusal("check-config", config_of(model_dir), capsys)
    assert "mlp.gate_proj.weight has shape (96, 64), but config.json asks for (100, 64)" in error


def test_a_checkpoint_without_tokenizer(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model_dir / "tokenizer.json").unlink()
    assert "tokenizer.json" in refusal("check-config", config_of(model_dir), capsys)


def test_weights_that_are_cut_off(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = model_dir / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    assert WEIGHTS in refusal("check-config", config_of(model_dir), capsys)


def test_quantized_weights_are_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from quantized_checkpoints import fp8_checkpoint

    fp8_checkpoint(tmp_path / "model", "llama", (16, 32))
    assert main(["check-config", "--config", config_of(tmp_path / "model", dtype="bfloat16")]) == 0
    said = capsys.readouterr().out
    for role in ("prefill", "decode"):
        line = f"weights are stored as FP8 in 0.0 GiB; each {role} rank keeps 0.0 GiB of bfloat16"
        assert line in said


@pytest.mark.parametrize(("block", "twice"), [((16, 32), True), (None, False)])
def test_blocks_that_are_rounded_twice_are_announced(
    block: tuple[int, int] | None, twice: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from quantized_checkpoints import fp8_checkpoint

    fp8_checkpoint(tmp_path / "model", "llama", block)
    for form in ("auto", "fp8"):
        config = config_of(tmp_path / "model", dtype="bfloat16", weight_dtype=form)
        assert main(["check-config", "--config", config]) == 0
        said = capsys.readouterr().out
        assert ("rounded a second time" in said) == (twice and form == "fp8")


def test_experts_in_fp8_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(tmp_path / "model", "qwen3_moe")
    capsys.readouterr()  # transformers shows its progress
    error = refusal("check-config", config_of(tmp_path / "model", weight_dtype="fp8"), capsys)
    assert "models without experts only; set weight_dtype to auto" in error


def test_shapes_that_gpus_do_not_multiply_in_fp8_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "model", "llama", intermediate_size=88)
    capsys.readouterr()
    gangs = {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": 1}}
    config = config_of(tmp_path / "model", dtype="bfloat16", weight_dtype="fp8", **gangs)
    error = refusal("check-config", config, capsys)
    assert "prefill.tp: weight_dtype: fp8: a rank's feed-forward matrices are 64 by 88" in error
    assert "multiples of 16; set weight_dtype to auto" in error


def test_transfer_memory_below_one_token_is_refused(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    many = {"prefill": {"instances": 9000}, "kv_transfer": {"in_flight_mib": 1}}
    error = refusal("check-config", config_of(model_dir, **many), capsys)
    assert (
        "kv_transfer.in_flight_mib: 9000 ranks share it, and each needs at least 258 bytes" in error
    )
