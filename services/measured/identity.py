"""Identify the model and the machine that measured times depend on."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from csps.configurator.model.scaling_information_base import Identity
from csps.models.checkpoints.checkpoint import weights_digest
from csps.services.settings.devices import resolve_device
from csps.services.settings.settings import Settings

CPU_INFO = Path("/proc/cpuinfo")
CPU_FIELDS = ("model name", "cpu family", "model", "stepping")
"""Fields of the CPU. The name alone is ambiguous: clouds give many generations the same."""


def identity_of(settings: Settings) -> Identity:
    """Return the identity of the model that these settings serve, on this machine.

    Raises:
        ConfigError: there is no such model.
    """
    cores = os.cpu_count() or 1
    threads = sum(gang.ranks * gang.threads for gang in settings.gangs.values())
    on_gpu = resolve_device(settings.device, settings.prefilling.num_gpus) == "cuda"
    return Identity(
        weights=weights_digest(settings.model_dir, settings.model_overrides),
        dtype=settings.dtype,
        device=_gpu() if on_gpu else _processor(),
        cores=cores,
        torch=version("torch"),
        ranks_per_core=0.0 if on_gpu else threads / cores,
    )


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def _processor() -> str:
    with suppress(OSError):
        first = CPU_INFO.read_text().split("\n\n", 1)[0]
        lines = (line.partition(":") for line in first.splitlines())
        found = {name.strip(): value.strip() for name, _, value in lines}
        if name := found.get(CPU_FIELDS[0]):
            return " ".join([name, *(found.get(field, "?") for field in CPU_FIELDS[1:])])
    return platform.processor() or platform.machine()
