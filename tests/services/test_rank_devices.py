"""Test which device a rank computes on, and which combinations are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from csps.protocols.core.errors import ConfigError
from csps.services.launch.deploy_config import read_config
from csps.services.settings.devices import resolve_device


@pytest.fixture(autouse=True)
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_rank_without_a_gpu_of_its_own_leaves_gpus_alone() -> None:
    """All four ranks of the default configuration would use the first GPU."""
    assert resolve_device("auto", 0) == "cpu"
    assert resolve_device("auto", 1) == "cuda"
    assert resolve_device("cpu", 1) == "cpu"


def read(tmp_path: Path, model: Path, device: str, prefill: float, decode: float) -> None:
    args: dict[str, Any] = {
        "model": str(model),
        "device": device,
        "prefill": {"num_gpus": prefill},
        "decode": {"num_gpus": decode},
    }
    application = {"import_path": "csps.services.app:build", "args": args}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    read_config(path)


@pytest.mark.parametrize(
    ("device", "prefill", "decode", "wrong"),
    [
        ("cuda", 0, 0, "prefill.num_gpus is 0"),
        ("cuda", 1, 0, "decode.num_gpus is 0"),
        ("auto", 0, 1, "prefill.num_gpus is 0"),
        ("auto", 1, 0.5, "decode.num_gpus is 0.5"),
    ],
)
def test_ranks_that_would_share_a_gpu_are_refused(
    tmp_path: Path, tiny_llama: Path, device: str, prefill: float, decode: float, wrong: str
) -> None:
    with pytest.raises(ConfigError, match=f"{wrong}: ranks on GPUs need one each, in both gangs"):
        read(tmp_path, tiny_llama, device, prefill, decode)


@pytest.mark.parametrize(
    ("device", "gpus"), [("auto", 0), ("auto", 1), ("cuda", 1), ("cpu", 0), ("cpu", 0.5)]
)
def test_all_or_none_is_fine(tmp_path: Path, tiny_llama: Path, device: str, gpus: float) -> None:
    read(tmp_path, tiny_llama, device, gpus, gpus)
