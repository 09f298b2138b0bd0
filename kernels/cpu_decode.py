"""Attention on CPUs in compiled code: decode, prompts, and chunks of prompts behind their history.

For one query torch's flash kernel reads memory at a quarter of a core's speed, and each call takes
13 us besides. Here one call computes all rows of a layer, over runs of slots, and reads keys and
values once (`cpu_decode_ir`). With as many queries as a prompt has (`cpu_prompt_ir`) it is still
faster, 1.2 to 2 times on a processor without AMX.

A shape of heads has to be prepared, since compiling takes about a second, for which no request
should wait. Whatever is not prepared, or cannot be compiled, runs torch's kernel.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from csps.kernels import compiled_code
from csps.kernels.arguments import RowParts, SlotRuns
from csps.kernels.merge import merge_into
from csps.kernels.quantized_kv import INT8, row_width

_log = logging.getLogger(__name__)

PART_ROWS = 32
"""Rows of a part, at most: their outputs stay in a core's second cache beside a block of KV."""
_LOG2_E = 1 / math.log(2)
_DTYPES = torch.float32, torch.bfloat16, torch.float16, INT8


class DecodeKernel:
    """Compiled attention for one shape of heads and dtype of KV."""

    def __init__(
        self,
        function: Callable[..., None],
        of_prompts: Callable[..., None],
        *,
        many_rows: int,
        scratch_numbers: int,
        row_numbers: int,
        token_bytes: int,
        most_queries: int,
    ) -> None:
        """Args:
        function: computes parts of few rows, `of_prompts` those of at least `many_rows`.
        scratch_numbers: fp32 numbers of scratch memory of a thread.
        row_numbers: numbers for each row of a part besides.
        token_bytes: size of a token's keys and values in a layer.
        """
        self._function, self._of_prompts = function, of_prompts
        self._many_rows = many_rows
        self._scratch_numbers, self._row_numbers = scratch_numbers, row_numbers
        self._token_bytes = token_bytes
        self.most_queries = most_queries
        """Queries of one sequence up to which this is faster than torch's kernel."""

    def attend_runs(
        self, q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, runs: SlotRuns, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend each row to its runs of slots, as `csps.kernels.attention.decode_attention`."""
        parts = runs.parts(self._threads(runs.tokens))
        out_nhd, lse_nh = self._run(q_rhd, k_shd, v_shd, parts, scale)
        if not parts.further:
            return out_nhd, lse_nh
        rows = runs.rows
        for place, row in enumerate(parts.further, start=rows):
            one, other = slice(row, row + 1), slice(place, place + 1)
            merge_into(out_nhd[one], lse_nh[one].T, out_nhd[other], lse_nh[other].T)
        return out_nhd[:rows], lse_nh[:rows]

    def attend_all(
        self, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend every query to every key; return out (t, h, d) and lse (h, t)."""
        tokens, rows = len(k_thd), len(q_thd)
        threads = min(self._threads(tokens * rows), rows)
        parts = RowParts.of_one_run(rows, tokens, threads=threads, most_rows=PART_ROWS)
        out_thd, lse_th = self._run(q_thd, k_thd, v_thd, parts, scale)
        return out_thd, lse_th.T

    def attend_staircase(
        self, q_thd: Tensor, k_thd: Tensor, v_thd: Tensor, first: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Attend query i to the first `first` + i keys, of which there are at least one and at most
        all; return out (t, h, d) and lse (h, t)."""
        rows = len(q_thd)
        threads = min(self._threads(rows * (first + rows // 2)), rows)
        parts = RowParts.of_staircase(rows, first, threads=threads, most_rows=PART_ROWS)
        out_thd, lse_th = self._run(q_thd, k_thd, v_thd, parts, scale)
        return out_thd, lse_th.T

    def _threads(self, tokens: int) -> int:
        return compiled_code.threads_for(tokens * self._token_bytes)

    def _run(
        self, q_rhd: Tensor, k_shd: Tensor, v_shd: Tensor, parts: RowParts, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads, dim = q_rhd.shape[1:]
        q_rhd = q_rhd.float().contiguous()
        out_nhd = torch.empty(parts.rows, heads, dim)
        lse_nh = torch.empty(parts.rows, heads)
        numbers = self._scratch_numbers + parts.most_rows * self._row_numbers
        scratch = torch.empty(numbers * len(parts.of_thread))
        memory = scratch.data_ptr()
        tensors = (
            q_rhd.data_ptr(),
            k_shd.data_ptr(),
            v_shd.data_ptr(),
            parts.parts,
            parts.runs,
            out_nhd.data_ptr(),
            lse_nh.data_ptr(),
        )
        factor = scale * _LOG2_E
        compute = self._function if parts.most_rows < self._many_rows else self._of_prompts
        calls = [
            (*tensors, memory + 4 * numbers * thread, own.start, own.stop, factor)
            for thread, own in enumerate(parts.of_thread)
        ]
        compiled_code.run(compute, calls)
        return out_nhd, lse_nh


_prepared: dict[tuple[int, int, int, torch.dtype], DecodeKernel] = {}


def prepare(*, heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> bool:
    """Compile attention for a shape of heads and dtype of KV, or load it from disk.

    Returns:
        False if torch's kernel will run instead, for a reason that is logged.
    """
    key = heads, kv_heads, dim, dtype
    if key not in _prepared and (kernel := _compiled(*key)) is not None:
        _prepared[key] = kernel
    return key in _prepared


def prepared(q_thd: Tensor, k_thd: Tensor, v_thd: Tensor) -> DecodeKernel | None:
    """Return the kernel for tensors of this shape and layout, if it has been prepared."""
    _, heads, dim = q_thd.shape
    _, kv_heads, width = k_thd.shape
    # Tokens have to lie one after the other; heads that are cut out of a cache do not.
    dense = kv_heads * width, width, 1
    if k_thd.stride() != dense or v_thd.stride() != dense:
        return None
    return _prepared.get((heads, kv_heads, dim, k_thd.dtype))


def _compiled(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> DecodeKernel | None:
    what = f"{heads} heads of {dim} over {kv_heads} KV heads in {dtype}"
    if not compiled_code.can_compile("decoding runs torch's attention"):
        return None
    # Imported on use: a rank on a GPU needs no llvmlite.
    from csps.kernels import cpu_decode_ir, cpu_parts_ir, cpu_prompt_ir, native_code
    from csps.kernels.vector_ir import Element

    known = Element.FP32, Element.BF16, Element.FP16, Element.INT8
    elements = dict(zip(_DTYPES, known, strict=True))
    lanes = cpu_parts_ir.lanes_for(dim, native_code.vector_lanes())
    element = elements.get(dtype)
    if (
        element is None
        or lanes < 4
        or (element is Element.FP16 and not native_code.supports_fp16())
    ):
        _log.warning("%s: decoding runs torch's attention", what)
        return None
    shape = cpu_parts_ir.HeadShape(heads=heads, kv_heads=kv_heads, dim=dim, element=element)
    arguments = [*[c_void_p] * 8, *[c_int64] * 2, c_float]
    functions = compiled_code.load_functions(
        (
            (cpu_decode_ir.NAME, cpu_decode_ir.decode_attention_ir(shape, lanes)),
            (cpu_prompt_ir.NAME, cpu_prompt_ir.prompt_attention_ir(shape, lanes)),
        ),
        arguments,
        f"{what}: decoding runs torch's attention",
    )
    if functions is None:
        return None
    function, of_prompts = functions
    return DecodeKernel(
        function,
        # Prompts attend to 8 bits in pieces only, which are short.
        function if element is Element.INT8 else of_prompts,
        many_rows=cpu_prompt_ir.FEWEST_ROWS,
        scratch_numbers=max(
            ir.scratch_numbers(shape, lanes) for ir in (cpu_decode_ir, cpu_prompt_ir)
        ),
        row_numbers=cpu_parts_ir.row_numbers(shape, lanes),
        token_bytes=2 * kv_heads * row_width(dim, dtype) * element.bytes,
        most_queries=_most_queries(shape.group, dtype, native_code.multiplies_bf16_tiles()),
    )


def _most_queries(group: int, dtype: torch.dtype, bf16_tiles: bool) -> int:
    """Return how many queries of a sequence compiled code computes faster than torch."""
    if group == 1:  # each key is then loaded for one query head, and a matrix product is better
        return 4
    return 16 if bf16_tiles and dtype != torch.float32 else sys.maxsize
