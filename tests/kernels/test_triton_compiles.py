"""Every Triton kernel compiles for Hopper, fits it, and is not recompiled for a length; no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = 227 * 1024  # bytes a block may have on sm_90
COMPILE, COUNT = (
    Path(__file__).with_name(f"{name}.py") for name in ("compile_for_hopper", "count_variants")
)


def printed(program: Path, cache: Path) -> str:
    """Return what a program prints outside of the interpreter."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_kernel_is_compiled_anew_for_a_length(tmp_path: Path) -> None:
    variants = json.loads(printed(COUNT, tmp_path))
    assert variants == dict.fromkeys(
        (
            "_attention_kernel",
            "_column_sums_kernel",
            "_decode_kernel",
            "_extremes_kernel",
            "_merge_into_kernel",
            "_merge_rows_kernel",
            "_merge_stacked_kernel",
            "_top_tokens_kernel",
        ),
        1,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    kernels = [json.loads(line) for line in printed(COMPILE, tmp_path).splitlines()]
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
    assert all(k["shared"] <= SHARED_MEMORY for k in kernels)
    for kernel in kernels:
        if kernel.get("BLOCK_M", 0) >= 64:  # large tiles use Hopper's own tensor core instruction
            assert kernel["wgmma"], kernel
            assert kernel["async_copy"], kernel
