"""Check a checkpoint and a machine before a server is started on them.

Only JSON files and the headers of the weight files are read. Ranks would find the same errors, but
only after Ray has started them, several times over and in a log file. Each finding is one line.

`MemoryNeed` says how much main memory a fully loaded server takes on this machine.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from csps.actors.kv_transfer.message import entry_bytes
from csps.models.checkpoints.loading import WeightSizes, measure_weights
from csps.models.network.spec import ModelSpec, read_spec, tp_shard_of
from csps.models.tokenizers.chat_template import read_chat_template
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.core.errors import ConfigError
from csps.protocols.gang.members import GangRole
from csps.services.settings.devices import resolve_device
from csps.services.settings.settings import Settings


def check_model(settings: Settings) -> None:
    """Raise if the router cannot read requests for the model, or if a rank cannot load it.

    Raises:
        ConfigError: the architecture or a feature of it is not supported, a tensor is missing or
            of another shape, the model cannot be split over `tp` ranks, or a file is damaged.
    """
    with _one_line("model"):
        read_spec(settings.model_dir, settings.model_overrides)
        Tokenizer(settings.model_dir)
        read_chat_template(settings.model_dir)
        measure_weights(settings.model_dir, settings.model_overrides)
    for role in settings.gangs:
        rank_weights(role, settings)
    if len(settings.gangs) > 1:
        _check_in_flight(settings)


def _check_in_flight(settings: Settings) -> None:
    """Raise ConfigError if a rank has no room in flight for one token to each rank of the other
    gang."""
    spec = read_spec(settings.model_dir, settings.model_overrides)
    dtype = getattr(torch, settings.dtype)
    heads = min(len(tp_shard_of(spec, 0, gang.tp).kv_heads) for gang in settings.gangs.values())
    token_bytes = heads * entry_bytes(dtype, spec.head_dim)
    peers = max(gang.ranks for gang in settings.gangs.values())
    if settings.kv_transfer.in_flight_bytes // peers < token_bytes:
        raise ConfigError(
            f"kv_transfer.in_flight_mib: {peers} ranks share it, and each needs at least "
            f"{token_bytes} bytes, the KV of one token in one layer"
        )


def rank_weights(role: GangRole, settings: Settings) -> WeightSizes:
    """Measure the weights that one rank of a gang loads.

    Raises:
        ConfigError: the rank cannot load the model; see `check_model`.
    """
    with _one_line(f"{role}.tp"):
        return measure_weights(
            settings.model_dir,
            settings.model_overrides,
            dtype=getattr(torch, settings.dtype),
            tp_size=settings.gangs[role].tp,
        )


def dequantization(settings: Settings) -> list[str]:
    """Return a line for each gang about weights that take more memory than in their files."""
    lines = []
    for role in settings.gangs:
        sizes = rank_weights(role, settings)
        if sizes.quantized:
            lines.append(
                f"weights are stored as {', '.join(sizes.quantized)} in "
                f"{sizes.stored_bytes / GIB:.1f} GiB; each {role} rank keeps "
                f"{sizes.loaded_bytes / GIB:.1f} GiB of {settings.dtype}"
            )
    return lines


@contextmanager
def _one_line(setting: str) -> Iterator[None]:
    """Turn a ValueError of `models` into a ConfigError about a setting, on one line."""
    try:
        yield
    except ValueError as exc:  # CheckpointError, and a `tp` that does not fit
        raise ConfigError(f"{setting}: {' '.join(str(exc).split())}") from None


GIB = 2**30
RAY_BYTES = 7 * GIB // 8
"""Ray and its dashboard. This and the next two are measured, with common pages divided, rounded
up."""
SHELL_BYTES = 3 * GIB // 4
"""Reverse proxy, router, configurator and registry."""
RANK_BYTES = GIB // 4
"""Python and torch of one rank, without the parts counted below."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    kv_transfer = 0 if role == "elastic" else section.ranks * settings.kv_transfer.in_flight_bytes
    if resolve_device(settings.device, section.num_gpus) != "cpu":
        # The rest lies in the GPUs' own memory.
        return MemoryNeed(ranks=section.ranks, kv_transfer=kv_transfer)
    element_bytes = DTYPE_BYTES[settings.dtype]
    slots_bytes = section.ranks * section.kv_slots * element_bytes
    spec = read_spec(settings.model_dir, settings.model_overrides)
    return MemoryNeed(
        ranks=section.ranks,
        weights=section.ranks * rank_weights(role, settings).loaded_bytes,
        kv_cache=slots_bytes * _kv_elements(spec, section.tp),
        activations=slots_bytes * _activation_elements(spec, section.tp) if role != "decode" else 0,
        kv_transfer=kv_transfer,
    )


def _kv_elements(spec: ModelSpec, tp: int) -> int:
    """Count the numbers that one rank stores for a token: keys and values, all layers."""
    return 2 * spec.layers * len(tp_shard_of(spec, 0, tp).kv_heads) * spec.head_dim


def _activation_elements(spec: ModelSpec, tp: int) -> int:
    """Estimate the numbers that a prefill rank has at once for a token: three times the residual
    stream, and queries, keys, values and outputs on both sides of an exchange."""
    shard = tp_shard_of(spec, 0, tp)
    heads = len(shard.query_heads) + len(shard.kv_heads)
    return 3 * spec.hidden + 4 * heads * spec.head_dim


MIN_PYTHON = (3, 11)


def check_python() -> None:
    """Raise `ConfigError` if this interpreter is too old."""
    if sys.version_info < MIN_PYTHON:
        have = ".".join(map(str, sys.version_info[:3]))
        want = ".".join(map(str, MIN_PYTHON))
        raise ConfigError(f"Python {want} or newer is needed, this is {have}")


SERVER_PORT = "http_options.port, or `csps serve --port`"
"""Ways to choose the server's port."""


def check_port(host: str, port: int, *, setting: str = SERVER_PORT) -> None:
    """Raise `ConfigError` if another process listens there; `setting` names another port's
    setting."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            raise ConfigError(
                f"port {port} on {host} cannot be used ({exc.strerror}): stop its user, or "
                f"choose another one ({setting})"
            ) from None


MEMINFO = Path("/proc/meminfo")
POLL_S = 0.5


def check_memory_at_all(need: MemoryNeed, *, meminfo: Path = MEMINFO) -> None:
    """Raise `ConfigError` if a server would not fit even if all memory were free."""
    whole = memory_gib("MemTotal", meminfo)
    if whole is not None and whole < need.total / GIB:
        raise ConfigError(
            f"this machine has {whole:.1f} GiB of memory, but {need.total / GIB:.1f} GiB are "
            f"needed ({need.breakdown})"
        )


def wait_memory(need: MemoryNeed, deadline_s: float) -> None:
    """Repeat `check_memory` until the deadline: processes that have ended may still hold memory."""
    deadline = time.monotonic() + deadline_s
    while True:
        try:
            return check_memory(need)
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(POLL_S)


def check_memory(need: MemoryNeed, *, freed: int = 0, meminfo: Path = MEMINFO) -> None:
    """Raise `ConfigError` if a server does not fit into free memory; do nothing if that is unknown.

    Args:
        freed: further bytes that become free when the running server ends.
    """
    available = memory_gib("MemAvailable", meminfo)
    if available is not None and available + freed / GIB < need.total / GIB:
        more = f", and at most {freed / GIB:.1f} more once the running server ends" if freed else ""
        raise ConfigError(
            f"{available:.1f} GiB of memory are available{more}, but {need.total / GIB:.1f} GiB "
            f"are needed ({need.breakdown}): free some, lower instances or kv_slots, or set dtype "
            "to bfloat16"
        )


def memory_gib(name: str, meminfo: Path = MEMINFO) -> float | None:
    """Return a figure of /proc/meminfo in GiB: MemTotal, or MemAvailable, which excludes swap."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # not Linux
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields[name].split()[0]) / 2**20 if name in fields else None
