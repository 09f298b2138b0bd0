"""Every Triton kernel compiles for Hopper and fits it, checked without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = 227 * 1024  # bytes a block may have on sm_90
PROGRAM = Path(__file__).with_name("compile_for_hopper.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, PROGRAM], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {k["kernel"] for k in kernels} == {
        "_attention_kernel",
        "_column_sums_kernel",
        "_merge_stacked_kernel",
        "_merge_into_kernel",
        "_top_tokens_kernel",
        "_extremes_kernel",
    }
    assert all(k["shared"] <= SHARED_MEMORY for k in kernels)
    for kernel in kernels:
        if kernel.get("BLOCK_M", 0) >= 64:  # large tiles use Hopper's own tensor core instruction
            assert kernel["wgmma"], kernel
            assert kernel["async_copy"], kernel
