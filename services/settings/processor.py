"""What this machine's processor is, and whether it multiplies bf16 numbers itself."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
CPU_FIELDS = ("model name", "cpu family", "model", "stepping")
"""Fields of the CPU. The name alone is ambiguous: clouds give many generations the same."""
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Instructions for products of bf16 numbers: of x86 with AVX-512, with AMX, and of ARM. Without
them torch converts to fp32 and back, and is slower than with fp32."""


def processor() -> str:
    """Return a text that differs between kinds of processors."""
    found = _fields()
    if name := found.get(CPU_FIELDS[0]):
        return " ".join([name, *(found.get(field, "?") for field in CPU_FIELDS[1:])])
    return platform.processor() or platform.machine()


def multiplies_bf16() -> bool:
    """Return whether products of bf16 numbers are faster here than those of fp32 numbers."""
    found = _fields()
    return bool(BF16_FLAGS & {*found.get("flags", "").split(), *found.get("Features", "").split()})


def _fields() -> dict[str, str]:
    """Return what Linux says about the first core."""
    with suppress(OSError):
        first = CPU_INFO.read_text().split("\n\n", 1)[0]
        lines = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in lines}
    return {}
