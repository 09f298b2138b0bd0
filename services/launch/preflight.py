"""Check a checkpoint and a machine before a server is started on them.

Only JSON files and the headers of the weight files are read. Ranks would find the same errors, but
only after Ray has started them, several times over and in a log file. Each finding is one line.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

from csps.actors.kv_transfer.message import entry_bytes
from csps.kernels.quantized_kv import row_width
from csps.models.checkpoints.loading import measure_weights
from csps.models.network.spec import read_spec, tp_shard_of
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.core.errors import ConfigError
from csps.services.planning.checks import check_settings
from csps.services.planning.machine import GIB, ROOT, main_memory
from csps.services.planning.memory import MemoryNeed, kv_torch_dtype, one_line, rank_weights
from csps.services.settings.settings import Settings


def check_model(settings: Settings) -> None:
    """Raise if the router cannot read requests for the model, or if a rank cannot load it.

    Raises:
        ConfigError: the architecture or a feature of it is not supported, a tensor is missing or
            of another shape, the model cannot be split over `tp` ranks, or a file is damaged.
    """
    with one_line("model"):
        read_spec(settings.model_dir, settings.model_overrides)
        Tokenizer(settings.model_dir)
        measure_weights(
            settings.model_dir, settings.model_overrides, fp8=settings.weight_dtype == "fp8"
        )
    check_settings(settings)
    for role in settings.gangs:
        rank_weights(role, settings)
    if len(settings.gangs) > 1:
        _check_in_flight(settings)


def _check_in_flight(settings: Settings) -> None:
    """Raise ConfigError if a rank has no room in flight for one token to each rank of the other
    gang."""
    spec = read_spec(settings.model_dir, settings.model_overrides)
    stored = kv_torch_dtype(settings)
    heads = min(len(tp_shard_of(spec, 0, gang.tp).kv_heads) for gang in settings.gangs.values())
    token_bytes = heads * entry_bytes(stored, row_width(spec.head_dim, stored))
    peers = max(gang.ranks for gang in settings.gangs.values())
    if settings.kv_transfer.in_flight_bytes // peers < token_bytes:
        raise ConfigError(
            f"kv_transfer.in_flight_mib: {peers} ranks share it, and each needs at least "
            f"{token_bytes} bytes, the KV of one token in one layer"
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
                f"{' and FP8' if settings.weight_dtype == 'fp8' else ''}"
            )
            if sizes.rounded_twice:
                lines[-1] += (
                    ". FP8 in blocks is rounded a second time, to FP8 by row; weight_dtype: auto "
                    "keeps its numbers"
                )
    return lines


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


POLL_S = 0.5


def check_memory_at_all(need: MemoryNeed, *, root: Path = ROOT) -> None:
    """Raise `ConfigError` if a server would not fit even if all memory were free."""
    memory = main_memory(root)
    if memory is not None and memory.total < need.total:
        where = "this container may use" if memory.limited else "this machine has"
        raise ConfigError(
            f"{where} {memory.total / GIB:.1f} GiB of memory, but {need.total / GIB:.1f} GiB are "
            f"needed ({need.breakdown}){_remedy(need, need.total - memory.total)}"
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


def check_memory(need: MemoryNeed, *, freed: int = 0, root: Path = ROOT) -> None:
    """Raise `ConfigError` if a server does not fit into free memory; do nothing if that is unknown.

    Args:
        freed: further bytes that become free when the running server ends.
    """
    memory = main_memory(root)
    if memory is not None and memory.available + freed < need.total:
        more = f", and at most {freed / GIB:.1f} more once the running server ends" if freed else ""
        raise ConfigError(
            f"{memory.available / GIB:.1f} GiB of memory are available{more}, but "
            f"{need.total / GIB:.1f} GiB are needed ({need.breakdown}): free some, lower "
            "instances, kv_slots or gpu_memory_utilization, or set dtype to bfloat16"
            f"{_remedy(need, need.total - memory.available - freed)}"
        )


def _remedy(need: MemoryNeed, excess: int) -> str:
    return "" if need.largest is None else f"; {need.largest.remedy(excess)}"
