"""Counts what code would ask of a GPU: kernels, copies from the host, and waits.

Tensors of the device "meta" replace the device's. They take the code's paths for CUDA, but no
kernel runs. Reading a value on the host fails, because no value exists; a GPU would answer after
everything that was launched before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
PROCESSORS = 132

_NO_KERNEL = {"chunk", "detach", "detach_", "empty", "empty_like", "expand_as", "lift_fresh"}
_NO_KERNEL |= {"new_empty", "numpy_T", "resolve_conj", "resolve_neg", "split", "split_with_sizes"}
_NO_KERNEL |= {"unbind", "view"}
_COPIES_IF_IT_MUST = {"contiguous", "flatten", "reshape", "to"}


class DeviceBudget(TorchDispatchMode):
    """Counts; by name, so that a failure says what there is too much of."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        """Copies from the host to the device. A copy that is not pinned waits for the device's
        stream.
        """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        inputs = [
            tree_leave
            for tree_leave in tree_leaves((args, kwargs))
            if isinstance(tree_leave, Tensor)
        ]
        outputs = [tree_leave for tree_leave in tree_leaves(out) if isinstance(tree_leave, Tensor)]
        on_device = [output for output in outputs if output.device.type == DEVICE.type]
        # A number may come from the host: it is an argument of the kernel.
        if on_device and any(tensor.device.type == "cpu" and tensor.dim() for tensor in inputs):
            self.copies[name] += 1
        elif on_device and _computes(func, inputs, outputs):
            self.kernels[name] += 1
        return out


def _computes(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    name = func.overloadpacket.__name__
    if name in _COPIES_IF_IT_MUST:
        same = inputs[0].dtype == outputs[0].dtype and inputs[0].device == outputs[0].device
        return not (same and (name == "to" or inputs[0].is_contiguous()))
    return not (func.is_view or name in _NO_KERNEL)


class _Launches:
    """Replacement of a Triton kernel that counts its launches."""

    def __init__(self, name: str, budgets: list[DeviceBudget]) -> None:
        self._name, self._budgets = name, budgets

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self._launch

    def _launch(self, *args: object, **kwargs: object) -> None:
        for argument in args:
            assert not isinstance(argument, Tensor) or argument.device == DEVICE, (
                "an argument on the host"
            )
        for budget in self._budgets[-1:]:
            budget.kernels[self._name] += 1


class Device:
    """Counts what is done with tensors on `DEVICE`."""

    def __init__(self) -> None:
        self._budgets: list[DeviceBudget] = []

    @contextmanager
    def counting(self) -> Iterator[DeviceBudget]:
        """Count everything done inside."""
        budget = DeviceBudget()
        self._budgets.append(budget)
        try:
            with budget:
                yield budget
        finally:
            self._budgets.pop()

    def notice_lists(self, patch: pytest.MonkeyPatch) -> None:
        """Count copies of numbers to the device, which happen before any operation is seen, also
        for indices.
        """
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, self._copying(getattr(torch, name), name))
        for name in ("__getitem__", "__setitem__"):
            patch.setattr(torch.Tensor, name, self._noticing(getattr(torch.Tensor, name), name))

    def _copying(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def made(data: Any, *args: Any, **kwargs: Any) -> Any:
            tensor = real(data, *args, **kwargs)
            if tensor.device == DEVICE and not isinstance(data, Tensor) and tensor.numel():
                for budget in self._budgets[-1:]:
                    budget.copies[name] += 1
            return tensor

        return made

    def _noticing(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def index(tensor: Tensor, at: Any, *value: Any) -> Any:
            places = at if isinstance(at, tuple) else (at,)
            if tensor.device == DEVICE and any(isinstance(place, list) for place in places):
                for budget in self._budgets[-1:]:
                    budget.copies[name] += 1
            return real(tensor, at, *value)

        return index

    def replace_kernels(self, patch: pytest.MonkeyPatch) -> None:
        """Replace all Triton kernels by counters."""
        for name in ("attention", "blocks", "importance", "merge"):
            module = import_module(f"csps.kernels.triton_{name}")
            for kernel in [name for name in vars(module) if name.endswith("_kernel")]:
                patch.setattr(module, kernel, _Launches(kernel, self._budgets))
            if hasattr(module, "processors"):
                patch.setattr(module, "processors", lambda device: PROCESSORS)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Return the counting device, for the duration of a test."""
    pytest.importorskip("triton")
    recorder = Device()
    recorder.replace_kernels(monkeypatch)
    recorder.notice_lists(monkeypatch)
    on_device = property(lambda tensor: tensor.device.type == DEVICE.type)
    monkeypatch.setattr(torch.Tensor, "is_cuda", on_device, raising=False)
    return recorder
