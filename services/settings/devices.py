"""Moved definitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from csps.protocols.core.errors import ConfigError
from csps.services.settings.settings import Settings

if TYPE_CHECKING:
    # The shell is imported to build the application as well, where torch is not needed.
    pass


def resolve_device(device: str, num_gpus: float) -> str:
    """`auto` is CUDA for a rank that Ray gives a GPU, and where torch can use it.

    Ray hides GPUs from a process only if it has one of its own: without `num_gpus` all ranks of a
    machine would see, and take, its first GPU.
    """
    if device != "auto":
        return device
    if not num_gpus:
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_gpus(settings: Settings) -> None:
    """Every rank has a GPU of its own, or none has: NCCL refuses two ranks on one GPU, and
    nobody has tried GPUs for one gang and processors for the other.

    Raises:
        ConfigError: `device` and `num_gpus` do not say so.
    """
    counts = {role: section.num_gpus for role, section in settings.gangs.items()}
    if settings.device == "cpu" or (settings.device == "auto" and not any(counts.values())):
        return
    for role, count in counts.items():
        if count < 1:
            every = " and ".join(f"{it}.num_gpus" for it in counts)
            both = ", in both gangs" if len(counts) > 1 else ""
            raise ConfigError(
                f"{role}.num_gpus is {count:g}: ranks on GPUs need one each{both}; "
                f"set {every} to 1, or device to cpu"
            )
