"""Machine code for this processor: compiled from LLVM IR once, and kept on disk.

llvmlite compiles, without numba above it: a rank needs 40 MB and 0.2 s for llvmlite, and 130 MB and
a second for numba before it has compiled anything. numba's cache is not safe either for processes
that compile different signatures at once: two may take the same file name, and then a third loads
the wrong function.

A file is named after all that its content depends on, so processes that compile at once write the
same bytes, and the last one to rename its file wins. Content that does not fit its checksum is
compiled again. A folder that others may write is not used, as its code would run here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import binding as llvm

_log = logging.getLogger(__name__)

_OPTIMIZATION = 3
_WIDE = ",-prefer-256-bit"
"""Without it LLVM cuts vectors of 16 numbers in two on some processors that have them."""
_DIGEST_BYTES = sha256().digest_size


@cache
def vector_lanes() -> int:
    """Return the fp32 numbers of this processor's vectors."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return 16
    return 8 if features.get("avx2") else 4


@cache
def supports_fp16() -> bool:
    """Return whether this processor converts fp16 by itself."""
    features = llvm.get_host_cpu_features()
    return bool(features.get("f16c") or features.get("fullfp16"))


@cache
def multiplies_bf16_tiles() -> bool:
    """Return whether this processor has instructions for products of bf16 matrices (AMX)."""
    return bool(llvm.get_host_cpu_features().get("amx-bf16"))


def load_function(name: str, ir: str, arguments: Sequence[Any]) -> Callable[..., None]:
    """Return a function without a result, from disk or compiled now.

    It runs without the interpreter's lock.

    Args:
        ir: a module that defines the function and calls nothing outside of it.
        arguments: the arguments' types of `ctypes`.

    Raises:
        RuntimeError: LLVM cannot compile it for this processor.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = _machine()
    code = _stored(name, ir, machine)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    function = ctypes.CFUNCTYPE(None, *arguments)(engine.get_function_address(name))
    _engines.append(engine)
    return function


_engines: list[Any] = []
"""Owners of the memory of loaded functions, which lives as long as the process."""


def cache_folder() -> Path | None:
    """Return the folder of compiled functions; None if there is none that only this user can
    write."""
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(root) / "csps"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        return None
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return None if status.st_uid != os.geteuid() or writable_by_others else folder


def _stored(name: str, ir: str, machine: Any) -> bytes:
    """Return the object file of a module."""
    folder = cache_folder()
    features = llvm.get_host_cpu_features().flatten()
    version = llvmlite.__version__, llvm.llvm_version_info, machine.triple, _OPTIMIZATION, _WIDE
    said = f"{version} {llvm.get_host_cpu_name()} {features}\n{ir}"
    place = folder / f"{name}-{sha256(said.encode()).hexdigest()[:32]}.o" if folder else None
    if place is not None and (code := _read(place)) is not None:
        return code
    begin = time.monotonic()
    code = _compile(ir, machine)
    _log.info("compiled %s in %.2f s", name, time.monotonic() - begin)
    if place is not None:
        _write(place, code)
    return code


def _machine() -> Any:
    """Return LLVM's description of this processor."""
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten() + (_WIDE if vector_lanes() == 16 else ""),
        opt=_OPTIMIZATION,
        jit=True,
    )


def _compile(ir: str, machine: Any) -> bytes:
    module = llvm.parse_assembly(ir)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=_OPTIMIZATION)
    # The code says which vectors it wants. What LLVM adds to short loops around them only grows.
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    return code


def _read(place: Path) -> bytes | None:
    try:
        content = place.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return code if sha256(code).digest() == digest else None


def _write(place: Path, code: bytes) -> None:
    """Write a file whole or not at all; a failure costs another compilation at the next start."""
    try:
        descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=".", suffix=".o")
    except OSError as error:
        _log.debug("compiled code is not kept: %s", error)
        return
    try:
        with open(descriptor, "wb") as file:
            file.write(sha256(code).digest() + code)
        Path(name).replace(place)
    except OSError as error:
        _log.debug("compiled code is not kept: %s", error)
        Path(name).unlink(missing_ok=True)
