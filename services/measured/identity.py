"""Identify the model and the machine that measured times depend on."""

from __future__ import annotations

import os
from importlib.metadata import version

from csps.configurator.model.scaling_information_base import Identity
from csps.models.checkpoints.checkpoint import weights_digest
from csps.services.settings.devices import resolve_device
from csps.services.settings.processor import processor
from csps.services.settings.settings import Settings


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
        dtype=settings.number_types,
        device=_gpu() if on_gpu else processor(),
        cores=cores,
        torch=version("torch"),
        ranks_per_core=0.0 if on_gpu else threads / cores,
    )


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()
