"""Compile every Triton kernel for a card, which needs the compiler but no GPU.

Run as a program by test_triton_compiles.py, outside of the interpreter: SM (80, 89, 90) SHARED (its
bytes of shared memory). The interpreter checks
what kernels compute; this checks that they are programs the compiler accepts, which tensor cores
they use and whether they fit the machine. Prints one JSON line a kernel.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from csps.kernels import triton_attention, triton_blocks, triton_importance, triton_merge
from csps.kernels.triton_blocks import padded_dim

POINTERS = {
    **dict.fromkeys(["q_positions", "k_positions", "positions", "kept", "row_of"], "*i64"),
    **dict.fromkeys(["least", "most", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"], "*i32"),
    **dict.fromkeys(["k_begins", "k_ends"], "*i32"),
    **dict.fromkeys(["out", "lse", "outs", "lses", "other", "other_lse", "sums"], "*fp32"),
    "values": "*fp32",
    "runs": "*i32",
}
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
SM, SHARED = map(int, sys.argv[1:])
OPTIONAL = ("q_positions", "k_positions", "least", "most", "cu_seqlens_q")
ALIGNED = ("q", "k", "v", "out", "stride_qt", "stride_qh", "stride_kt", "stride_kh", "stride_vt",
           "stride_vh")  # fmt: skip


def report(kernel: Any, dtype: torch.dtype, warps: int = 4, stages: int = 2, **const: Any) -> None:
    def type_of(name: str) -> str:
        if name in const:
            return "constexpr"
        if name in ("q", "k", "v"):
            return TYPES[dtype]
        return "fp32" if name == "scale_log2" else POINTERS.get(name, "i32")

    names = kernel.arg_names
    aligned = {
        (names.index(n),): [["tt.divisibility", 16]]
        for n in ALIGNED
        if n in names and n not in const
    }
    source = ASTSource(kernel, {n: type_of(n) for n in names}, const, aligned)
    built = compile(
        source,
        target=GPUTarget("cuda", SM, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    ptx = built.asm["ptx"]
    result = {"kernel": kernel.__name__, "shared": built.metadata.shared, **const}
    result |= {
        "half": dtype == torch.bfloat16,
        "wgmma": "wgmma.mma_async" in ptx,
        "async_copy": "cp.async" in ptx,
    }
    print(json.dumps(result), flush=True)


def absent(*names: str, unless: bool) -> dict[str, Any]:
    return {} if unless else dict.fromkeys(names)


def attention(
    dtype: torch.dtype, dim: int, group: int, rows: int, *, simple: bool, windowed: bool = False,
    varlen: bool | None = None,
) -> None:  # fmt: skip
    """Compile a variant; a simple one compares no positions."""
    varlen = not simple if varlen is None else varlen
    tiling = triton_attention.choose_tiling(dtype, dim, group, rows, SHARED)
    kernel = triton_attention._attention_kernel
    report(
        kernel, dtype, tiling.warps, tiling.stages, GROUP=group, HEAD_DIM=dim, CAUSAL=not simple,
        WINDOWED=windowed, VARLEN=varlen, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        BLOCK_D=padded_dim(dim), splits=1,
        **absent("q_positions", "k_positions", "least", "most", unless=not simple),
        **absent("cu_seqlens_q", "k_begins", "k_ends", unless=varlen),
    )  # fmt: skip


def column_sums(dtype: torch.dtype, dim: int, group: int, *, simple: bool) -> None:
    kernel = triton_importance._column_sums_kernel
    block_m, block_n = triton_importance.choose_blocks(dtype, dim, group, SHARED)
    report(
        kernel, dtype, 8, 2, GROUP=group, HEAD_DIM=dim, CAUSAL=not simple, VARLEN=not simple,
        BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_D=padded_dim(dim), **absent(*OPTIONAL, "cu_seqlens_k", unless=not simple),
    )  # fmt: skip


def main() -> None:
    half, full = torch.bfloat16, torch.float32
    short, long = triton_attention.SHORT_ROWS, triton_attention.LONG_ROWS
    attention(half, 128, 4, long, simple=False)
    attention(half, 128, 4, short, simple=True)
    attention(half, 128, 4, long, simple=False, windowed=True)
    attention(half, 80, 7, long, simple=False)
    attention(half, 128, 4, long, simple=True, varlen=True)
    attention(half, 64, 4, long, simple=False)
    attention(half, 256, 1, long, simple=False)
    attention(half, 256, 4, short, simple=True)
    attention(full, 256, 2, long, simple=True)
    column_sums(half, 128, 4, simple=False)
    column_sums(half, 256, 7, simple=True)
    column_sums(full, 256, 2, simple=True)
    report(triton_merge._merge_stacked_kernel, full, HEAD_DIM=128, ROWS=4, BLOCK_D=128)
    for kept in (True, False):
        report(
            triton_merge._merge_into_kernel, full, KEPT=kept, HEAD_DIM=96, ROWS=4, BLOCK_D=128,
            **absent("kept", unless=kept),
        )  # fmt: skip
    report(triton_merge._merge_rows_kernel, full, HEAD_DIM=96, PARTS=16, BLOCK_D=128)
    for dtype, dim, group in ((half, 128, 4), (full, 64, 7)):
        tiling = triton_attention.choose_tiling(
            dtype, dim, group, triton_attention.TOKEN_ROWS, SHARED
        )
        report(
            triton_attention._decode_kernel, dtype, tiling.warps, tiling.stages, GROUP=group,
            HEAD_DIM=dim, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, BLOCK_D=padded_dim(dim),
        )  # fmt: skip
    report(triton_importance._top_tokens_kernel, full, 8, BLOCK=triton_importance.BLOCK)
    for varlen in (True, False):
        report(
            triton_blocks._extremes_kernel, full, VARLEN=varlen, BLOCK=18, SPAN=32,
            **absent("cu_seqlens", unless=varlen),
        )  # fmt: skip


if __name__ == "__main__":
    main()
