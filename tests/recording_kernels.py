"""Triton kernels that record what a launch would be compiled for, as Triton tells variants apart.

Nothing is compiled or run. Tensors of the device "meta" stand for a GPU's, as in `device_budget`:
they take the code's paths for CUDA, and their addresses are those of slices of aligned memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from device_budget import DEVICE, PROCESSORS
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

BACKEND = make_backend(GPUTarget("cuda", 90, 32))

Variants = dict[str, set[str]]
"""What each kernel would be compiled for."""


class RecordingKernel:
    """Stand-in for a kernel."""

    def __init__(self, kernel: Any, variants: Variants) -> None:
        self._name, self._variants = kernel.__name__, variants
        self._bind = create_function_from_signature(kernel.signature, kernel.params, BACKEND)

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._record

    def _record(self, *args: Any, **kwargs: Any) -> None:
        _, specialization, options = self._bind(*args, **kwargs)
        self._variants[self._name].add(repr((specialization, sorted(options.items()))))


def recorded_kernels() -> Variants:
    """Replace all Triton kernels of this process; return what will have been launched."""
    variants: Variants = defaultdict(set)
    for part in ("attention", "blocks", "importance", "merge"):
        module = import_module(f"csps.kernels.triton_{part}")
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, RecordingKernel(getattr(module, name), variants))
        if hasattr(module, "processors"):
            module.processors = lambda device: PROCESSORS  # type: ignore[attr-defined]
    Tensor.is_cuda = property(lambda tensor: tensor.device.type == DEVICE.type)  # type: ignore[assignment, method-assign]
    return variants


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a tensor of the recorded device."""
    return torch.zeros(shape, dtype=dtype, device=DEVICE)
