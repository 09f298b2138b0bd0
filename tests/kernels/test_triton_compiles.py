"""Every Triton kernel compiles for several cards, fits them, and is not recompiled for a length; no
GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}
"""Bytes that a program may have on A100, L40 and H100."""
COMPILE, COUNT = (
    Path(__file__).with_name(f"{name}.py") for name in ("compile_kernels", "count_variants")
)


def printed(program: Path, cache: Path, *arguments: int) -> str:
    """Return what a program prints outside of the interpreter."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, program, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_no_kernel_is_compiled_anew_for_a_length(tmp_path: Path) -> None:
    """Of any length from 1 on, and wherever a slice begins."""
    assert json.loads(printed(COUNT, tmp_path)) == {
        # few rows or many, with positions or without, one sequence or several
        "_attention_kernel": 8,
        "_column_sums_kernel": 2,  # with positions or without
        "_decode_kernel": 1,
        "_extremes_kernel": 3,  # of keys, of one sequence or several, and of queries
        "_merge_into_kernel": 1,
        "_merge_rows_kernel": 1,
        "_merge_stacked_kernel": 1,
        "_top_tokens_kernel": 1,
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sm", SHARED_MEMORY)
def test_kernels_compile_for_a_card_and_fit_it(sm: int, tmp_path: Path) -> None:
    shared = SHARED_MEMORY[sm]
    kernels = [json.loads(line) for line in printed(COMPILE, tmp_path, sm, shared).splitlines()]
    assert {k["kernel"] for k in kernels} == {
        "_attention_kernel",
        "_column_sums_kernel",
        "_decode_kernel",
        "_merge_stacked_kernel",
        "_merge_into_kernel",
        "_merge_rows_kernel",
        "_top_tokens_kernel",
        "_extremes_kernel",
    }
    assert all(k["shared"] <= shared for k in kernels)
    if sm != 90:
        return
    for kernel in kernels:
        if (
            kernel["half"] and kernel.get("BLOCK_M", 0) >= 64
        ):  # large tiles use Hopper's own tensor core instruction
            assert kernel["wgmma"], kernel
            assert kernel["async_copy"], kernel
