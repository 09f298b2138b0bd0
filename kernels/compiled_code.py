"""Load functions that LLVM compiles, and run them on several threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

_log = logging.getLogger(__name__)

THREAD_BYTES = 2 * 2**20
"""Least bytes that a thread reads. Another thread starts after about 50 us, in which a core reads
1 MiB."""


def can_compile(otherwise: str) -> bool:
    """Return whether code can be compiled; if not, log what happens otherwise."""
    if find_spec("llvmlite") is None:
        _log.warning("llvmlite is not installed: %s", otherwise)
        return False
    return True


def load_functions(
    sources: Iterable[tuple[str, str]], arguments: Sequence[Any], otherwise: str
) -> tuple[Callable[..., None], ...] | None:
    """Return the functions of some modules of LLVM IR, by name; None if LLVM fails, and log what
    happens otherwise.

    Args:
        arguments: types of `ctypes`, the same for all functions.
    """
    # Imported on use: a rank on a GPU needs no llvmlite.
    from csps.kernels import native_code

    try:
        return tuple(native_code.load_function(name, ir, arguments) for name, ir in sources)
    except (RuntimeError, OSError) as error:
        _log.warning("%s, LLVM failed: %s", otherwise, error)
        return None


def threads_for(size: int) -> int:
    """Return how many threads read so many bytes fastest."""
    return max(1, min(torch.get_num_threads(), size // THREAD_BYTES))


def run(function: Callable[..., None], calls: Sequence[tuple[Any, ...]]) -> None:
    """Call a function with each list of arguments, on a thread each; the first on this one."""
    own, *others = calls
    if not others:  # the usual case: waiting for nobody takes 10 us
        function(*own)
        return
    helping: list[Future[None]] = []
    try:
        for other in others:
            helping.append(_helpers().submit(function, *other))
        function(*own)
    finally:
        wait(helping)  # they write into the caller's memory
    for helper in helping:
        helper.result()


@cache
def _helpers() -> ThreadPoolExecutor:
    """Return the threads that compute beside the caller."""
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="compiled")
