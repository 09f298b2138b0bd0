"""Choose the device of ranks, and check that each rank has a GPU of its own."""

from __future__ import annotations

from csps.protocols.core.errors import ConfigError
from csps.services.settings.settings import Settings


def resolve_device(device: str, num_gpus: float) -> str:
    """Return the device; `auto` is CUDA if Ray gives the rank a GPU and torch can use it."""
    if device != "auto":
        return device
    # Ray hides GPUs only from a process that has one of its own: without `num_gpus`, all ranks of a
    # machine would see, and use, its first GPU.
    if not num_gpus:
        return "cpu"
    # Imported here: the application is built by processes that do not need torch.
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def check_gpus(settings: Settings) -> None:
    """Check that either every rank has a GPU of its own, or none has one.

    Raises:
        ConfigError: `device` and `num_gpus` ask for something else.
    """
    # NCCL rejects two ranks on one GPU. Nobody has tried GPUs for one gang and CPUs for the other.
    counts = {role: section.num_gpus for role, section in settings.gangs.items()}
    if settings.device == "cpu" or (settings.device == "auto" and not any(counts.values())):
        return
    for role, count in counts.items():
        if count < 1:
            every = " and ".join(f"{name}.num_gpus" for name in counts)
            both = ", in both gangs" if len(counts) > 1 else ""
            raise ConfigError(
                f"{role}.num_gpus is {count:g}: ranks on GPUs need one each{both}; "
                f"set {every} to 1, or device to cpu"
            )
