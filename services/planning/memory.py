"""Predict the bytes that ranks take, and choose how many KV slots fit.

Weights are measured in the headers of the checkpoint, KV is counted from the model's shape, and
`StepMemory` counts the temporaries of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from csps.kernels.quantized_kv import INT8, row_width
from csps.models.checkpoints.loading import WeightSizes, measure_weights
from csps.models.network.spec import ModelSpec, read_spec, tp_shard_of
from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.members import GangRole
from csps.services.planning.machine import GIB, main_memory
from csps.services.planning.step_memory import StepMemory
from csps.services.scheduling.policies.registry import decode_options
from csps.services.settings.devices import resolve_device
from csps.services.settings.settings import DecodeSettings, Settings

RAY_BYTES = 7 * GIB // 8
"""Ray and its dashboard. This and the next two are measured, with common pages divided, rounded
up."""
SHELL_BYTES = 3 * GIB // 4
"""Reverse proxy, router, configurator and registry."""
RANK_BYTES = GIB // 4
"""Python and torch of one rank, without the parts counted below."""
HEAP_BYTES = GIB // 16
"""Allowance for freed temporaries that malloc keeps (glibc's largest trim threshold). Ranks of the
shapes of `benchmarks/planned_memory.py` kept 32 to 125 MiB."""
GPU_BYTES = 3 * GIB // 2
"""CUDA, NCCL's buffers and compiled kernels on a GPU. Not measured: no GPU has been at hand."""


@dataclass(frozen=True, kw_only=True)
class RankNeed:
    """Bytes of one rank on its device, by purpose."""

    weights: int
    layer: int
    """Bytes of keys and values of a token in one layer."""
    slot: int
    """Bytes of one KV slot: keys and values of a token in all layers, without those that have slots
    of their own."""
    slots: int
    window_slot: int
    """Bytes of a slot of these: keys and values of a token in all layers with a window."""
    window_slots: int
    step: StepMemory | None
    """Temporaries of a step; None if the rank computes no prompts."""
    fixed: int
    """Bytes of the process, or of the device's libraries."""
    kv_transfer: int
    """Bytes of main memory for KV in transfer between gangs, on a GPU as well."""

    @property
    def kv_cache(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot + self.near

    @property
    def near(self) -> int:
        """Bytes of the slots of layers with a window."""
        return self.window_slots * self.window_slot

    @property
    def activations(self) -> int:
        """Bytes of a step whose tokens fill the slots, with what malloc keeps of them."""
        if self.step is None:
            return 0
        size = self.step.bytes(self.slots)
        return size if self.step.on_gpu else size + min(HEAP_BYTES, size)

    @property
    def filled(self) -> int:
        """Bytes of the KV slots, without those of layers with a window, and of a step whose tokens
        fill them."""
        return self.slots * self.slot + self.activations

    @property
    def total(self) -> int:
        """All bytes on the device; those for transfers only if it is a CPU."""
        return self.without_slots + self.filled

    @property
    def without_slots(self) -> int:
        """Bytes before the first slot."""
        return self.weights + self.near + self.fixed

    def fitting(self, budget: float) -> int:
        """Return how many slots take at most so many bytes when they are filled."""
        fit, too_many = 0, int(max(0, budget) // max(1, self.slot)) + 1
        while too_many - fit > 1:
            middle = (fit + too_many) // 2
            if replace(self, slots=middle).filled <= budget:
                fit = middle
            else:
                too_many = middle
        return fit


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """A number in the settings, and the bytes that it stands for."""

    name: str
    value: int
    bytes: int
    fitting: Callable[[int], int]
    """Function (bytes) that returns the largest value for which so many are enough."""

    def remedy(self, excess: int) -> str:
        """Return what to do to need so many bytes less."""
        fitting = self.fitting(self.bytes - excess)
        most = f"at most {fitting} fit" if fitting > 0 else "lower it"
        return f"{self.name} is {self.value}, {most}"


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes of main memory by purpose, all ranks together."""

    ranks: int
    """Number of ranks, not bytes."""
    ray: int = 0
    """Bytes of Ray itself; 0 if it runs already."""
    weights: int = 0
    kv_cache: int = 0
    """Bytes of all slots. The system backs a slot when it is first written: a server starts with
    less, and would be killed on the way to its full load."""
    activations: int = 0
    """Bytes for a prompt that fills the prefill slots."""
    kv_transfer: int = 0
    """Bytes for KV in transfer between gangs."""
    largest: MemoryUse | None = None
    """The setting that most of it is for."""

    @property
    def total(self) -> int:
        """All bytes."""
        lasting = self.processes + self.weights + self.kv_cache
        return lasting + self.activations + self.kv_transfer

    @property
    def processes(self) -> int:
        """Bytes in use before any weight is loaded."""
        return self.ray + SHELL_BYTES + self.ranks * RANK_BYTES

    @property
    def breakdown(self) -> str:
        """The need in words, GiB each."""
        return (
            f"Ray and {self.ranks} ranks {self.processes / GIB:.1f}, "
            f"weights {self.weights / GIB:.1f}, KV cache {self.kv_cache / GIB:.1f}, "
            f"activations {self.activations / GIB:.1f}, "
            f"KV in transfer {self.kv_transfer / GIB:.1f}"
        )

    def __add__(self, other: MemoryNeed) -> MemoryNeed:
        return MemoryNeed(
            ranks=self.ranks + other.ranks,
            weights=self.weights + other.weights,
            kv_cache=self.kv_cache + other.kv_cache,
            activations=self.activations + other.activations,
            kv_transfer=self.kv_transfer + other.kv_transfer,
            largest=max(
                filter(None, (self.largest, other.largest)), key=lambda one: one.bytes, default=None
            ),
        )


def memory_need(settings: Settings, *, ray_runs: bool = False) -> MemoryNeed:
    """Return the need of all gangs and of everything around them.

    Args:
        ray_runs: Ray runs already, and its memory is in use.

    Raises:
        ConfigError: the model cannot be served.
    """
    need = MemoryNeed(ranks=0)
    for role in settings.gangs:
        need += _gang_need(role, settings)
    return need if ray_runs else replace(need, ray=RAY_BYTES)


def _gang_need(role: GangRole, settings: Settings) -> MemoryNeed:
    section = settings.gangs[role]
    ranks = section.ranks
    transfers = ranks * _transfer_bytes(role, settings)
    in_flight = _use_of_each(
        "kv_transfer.in_flight_mib", settings.kv_transfer.in_flight_mib, transfers
    )
    if on_gpus(role, settings):
        # The rest lies in the GPUs' own memory.
        return MemoryNeed(ranks=ranks, kv_transfer=transfers, largest=in_flight)
    rank = rank_need(role, settings)
    copies = ranks * (rank.without_slots - rank.near)
    largest = max(
        in_flight,
        MemoryUse(
            name=f"{role}.kv_slots",
            value=rank.slots,
            bytes=ranks * rank.filled,
            fitting=lambda budget: rank.fitting(budget / ranks),
        ),
        _use_of_each(f"{role}.window_slots", rank.window_slots, ranks * rank.near),
        _use_of_each(f"{role}.instances", section.instances, copies),
        key=lambda setting: setting.bytes,
    )
    return MemoryNeed(
        ranks=ranks,
        weights=ranks * rank.weights,
        kv_cache=ranks * rank.kv_cache,
        activations=ranks * rank.activations,
        kv_transfer=transfers,
        largest=largest,
    )


def _use_of_each(name: str, value: int, total: int) -> MemoryUse:
    """Return the use of a number that takes equally many bytes for each one."""
    return MemoryUse(
        name=name, value=value, bytes=total, fitting=lambda budget: value * budget // total
    )


def on_gpus(role: GangRole, settings: Settings) -> bool:
    """Return True if the ranks of a gang compute on GPUs."""
    return resolve_device(settings.device, settings.gangs[role].num_gpus) != "cpu"


def rank_need(role: GangRole, settings: Settings, *, gpu_bytes: int | None = None) -> RankNeed:
    """Return the need of one rank.

    Args:
        gpu_bytes: memory of each GPU, if ranks compute on GPUs.

    Raises:
        ConfigError: the model cannot be served, or leaves no room for KV.
    """
    need = _without_slots(role, settings, on_gpu=gpu_bytes is not None)
    slots = settings.gangs[role].kv_slots
    return replace(need, slots=slots if slots != "auto" else auto_slots(role, settings, gpu_bytes))


def kv_slots(role: GangRole, settings: Settings) -> int:
    """Return the slots of each instance of a gang, on the device that its ranks have here."""
    slots = settings.gangs[role].kv_slots
    if slots != "auto":
        return slots
    gpu_bytes = torch.cuda.mem_get_info()[1] if on_gpus(role, settings) else None
    return auto_slots(role, settings, gpu_bytes)


def window_slots(role: GangRole, settings: Settings) -> int:
    """Return the slots of each instance of a gang in layers with a window; 0: they have none of
    their own."""
    section = settings.gangs[role]
    given = section.window_slots if isinstance(section, DecodeSettings) else None
    if given != "auto":
        return given or 0
    spec = read_spec(settings.model_dir, settings.model_overrides)
    window = spec.window if spec.near_layers else None
    return decode_options(settings.policy_options).max_batch * (window or 0)


def auto_slots(role: GangRole, settings: Settings, gpu_bytes: int | None) -> int:
    """Return the slots of a gang's instances that `kv_slots: auto` stands for.

    Of a GPU, `gpu_memory_utilization` is used. Of main memory, all ranks of all gangs use as much
    together, as if they were all on this machine, and gangs whose slots are given have theirs
    first.

    Raises:
        ConfigError: weights and temporaries leave no room.
    """
    if gpu_bytes is not None:
        need = _without_slots(role, settings, on_gpu=True)
        budget = settings.gpu_memory_utilization * gpu_bytes - need.without_slots
    else:
        budget = _share_of_main_memory(settings)
        need = _without_slots(role, settings, on_gpu=False)
    if not need.slot:
        raise ConfigError(
            f"{role}.kv_slots: auto finds no number: all layers have a window and "
            f"{role}.window_slots, so these slots take no memory; set a number"
        )
    slots = need.fitting(budget)
    if slots < 1:
        raise ConfigError(
            f"{role}.kv_slots: auto finds no room: a rank's weights take "
            f"{need.weights / GIB:.1f} GiB, of {settings.gpu_memory_utilization:g} "
            "(gpu_memory_utilization) of the memory; raise it or tp, lower instances, or set dtype "
            "to bfloat16"
        )
    return slots


def _share_of_main_memory(settings: Settings) -> float:
    """Return the bytes for slots of each rank whose gang has `kv_slots: auto`."""
    memory = main_memory()
    if memory is None:
        raise ConfigError("kv_slots: auto does not know the memory of this machine; set a number")
    left = settings.gpu_memory_utilization * memory.total - RAY_BYTES - SHELL_BYTES
    ranks = 0
    for role, section in settings.gangs.items():
        need = _without_slots(role, settings, on_gpu=False)
        given = 0 if section.kv_slots == "auto" else section.kv_slots
        filled = replace(need, slots=given).filled
        left -= section.ranks * (need.without_slots + need.kv_transfer + filled)
        ranks += section.ranks if section.kv_slots == "auto" else 0
    return left / ranks


def _without_slots(role: GangRole, settings: Settings, *, on_gpu: bool) -> RankNeed:
    """Return the need of a rank of a gang that has no slots."""
    section = settings.gangs[role]
    spec = read_spec(settings.model_dir, settings.model_overrides)
    layer = _layer_bytes(settings, spec, section.tp)
    apart = window_slots(role, settings)
    near = len(spec.near_layers) if apart else 0
    return RankNeed(
        weights=rank_weights(role, settings).loaded_bytes,
        layer=layer,
        slot=layer * (spec.layers - near),
        slots=0,
        window_slot=layer * near,
        window_slots=apart,
        step=None
        if role == "decode"
        else StepMemory(
            spec=spec,
            instances=section.instances,
            tp=section.tp,
            element=settings.element_bytes,
            on_gpu=on_gpu,
            eight_bit_kv=settings.kv_dtype == "int8",
            fp8=settings.weight_dtype == "fp8",
        ),
        fixed=GPU_BYTES if on_gpu else RANK_BYTES,
        kv_transfer=_transfer_bytes(role, settings),
    )


def _transfer_bytes(role: GangRole, settings: Settings) -> int:
    return 0 if role == "elastic" else settings.kv_transfer.in_flight_bytes


def _layer_bytes(settings: Settings, spec: ModelSpec, tp: int) -> int:
    """Count the bytes that one rank stores for a token in a layer: keys and values."""
    stored = kv_torch_dtype(settings)
    heads = len(tp_shard_of(spec, 0, tp).kv_heads)
    return 2 * heads * row_width(spec.head_dim, stored) * stored.itemsize


def kv_torch_dtype(settings: Settings) -> torch.dtype:
    """Return the type of numbers of which KV in memory consists."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    return dtype if settings.kv_dtype == "auto" else INT8


def rank_weights(role: GangRole, settings: Settings) -> WeightSizes:
    """Measure the weights that one rank of a gang loads.

    Raises:
        ConfigError: the rank cannot load the model.
    """
    with one_line(f"{role}.tp"):
        return measure_weights(
            settings.model_dir,
            settings.model_overrides,
            dtype=getattr(torch, settings.dtype),
            tp_size=settings.gangs[role].tp,
            fp8=settings.weight_dtype == "fp8",
            on_gpu=settings.asks_for_gpus,
        )


@contextmanager
def one_line(setting: str) -> Iterator[None]:
    """Turn a ValueError of `models` into a ConfigError about a setting, on one line."""
    try:
        yield
    except ValueError as exc:  # CheckpointError, and a `tp` that does not fit
        raise ConfigError(f"{setting}: {' '.join(str(exc).split())}") from None
