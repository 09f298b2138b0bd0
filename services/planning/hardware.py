"""Describe the devices that ranks compute on: those of this machine, or GPUs that are not here."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

from csps.protocols.core.errors import ConfigError, abridged, nearest

GPUS = Path(__file__).with_name("gpus.yaml")
_COUNTED = re.compile(r"(\d+)\s*[xX*]\s*(.+)")
_SIDE = 768
"""Rows of the products with which a core is measured: large enough for its best speed, and a tenth
of a second."""
_REPEATS = 5
_COPY_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Device:
    """A core or GPU on which one rank computes, with speeds that it reaches, not peaks."""

    name: str
    gpu_bytes: int | None
    """Memory of a GPU; None for a core."""
    capability: tuple[int, int] | None
    """Compute capability of a GPU; None for a core."""
    product_flops: float
    attention_flops: float
    memory_bytes_s: float
    link_bytes_s: float
    """Bytes a second to another rank, one way."""
    origin: str
    """How the speeds are known."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Devices of one machine."""

    count: int
    device: Device


def named_hardware(text: str) -> Hardware:
    """Return the hardware of a name such as `8xH100`.

    Raises:
        ConfigError: there is no such GPU in the list.
    """
    match = _COUNTED.fullmatch(text.strip())
    count, name = (int(match[1]), match[2]) if match else (1, text.strip())
    listed = yaml.safe_load(GPUS.read_text())
    known = {gpu.lower(): gpu for gpu in listed["gpus"]}
    if count < 1 or name.lower() not in known:
        raise ConfigError(
            f"--hardware: {abridged(text)} is not COUNTxGPU{nearest(name, listed['gpus'])}"
        )
    gpu, reached = listed["gpus"][known[name.lower()]], listed["efficiency"]
    flops = gpu["bf16_tflops"] * 1e12
    return Hardware(
        count=count,
        device=Device(
            name=known[name.lower()],
            gpu_bytes=int(gpu["memory_gib"] * 2**30),
            capability=tuple(gpu["capability"]),
            product_flops=flops * reached["products"],
            attention_flops=flops * reached["attention"],
            memory_bytes_s=gpu["memory_gb_s"] * 1e9 * reached["memory"],
            link_bytes_s=gpu["link_gb_s"] * 1e9 * reached["link"],
            origin=(
                f"{gpu['source']}; {reached['products']:.0%} of the peak in products and "
                f"{reached['attention']:.0%} in attention are assumed, not measured"
            ),
        ),
    )


def gpus_here() -> Hardware | None:
    """Return the GPUs of this machine, with the speeds of the list if it has them; None if there
    are none, or the list does not have them."""
    count = torch.cuda.device_count()
    if not count:
        return None
    found = torch.cuda.get_device_properties(0)
    listed = sorted(yaml.safe_load(GPUS.read_text())["gpus"], key=len, reverse=True)
    name = next((gpu for gpu in listed if gpu.lower() in found.name.lower()), None)
    if name is None:
        return None
    known = named_hardware(f"{count}x{name}")
    return replace(known, device=replace(known.device, gpu_bytes=found.total_memory))


def measured_core(dtype: torch.dtype) -> Device:
    """Return a core of this machine, by a short measurement in this process.

    Links between ranks on one machine copy memory twice.
    """
    left, right = (torch.ones(_SIDE, _SIDE, dtype=dtype) for _ in range(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        product_s = _fastest(lambda: torch.mm(left, right))
        source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
        target = torch.empty_like(source)
        copy_s = _fastest(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    flops = 2 * _SIDE**3 / product_s
    copied = 2 * _COPY_BYTES / copy_s
    return Device(
        name="core",
        gpu_bytes=None,
        capability=None,
        product_flops=flops,
        attention_flops=0.5 * flops,
        memory_bytes_s=copied,
        link_bytes_s=copied / 4,
        origin="products and copies of this machine's core, measured just now",
    )


def _fastest(compute: Callable[[], object]) -> float:
    """Return the least of several times: what else runs here only adds to one."""
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        compute()
        times.append(time.perf_counter() - began)
    return min(times)
