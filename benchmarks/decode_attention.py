"""Attention of a decode iteration, or of prompts: compiled code against torch's flash kernel.

    python benchmarks/decode_attention.py [--rounds 15] [--threads 1] [--json FILE]
    python benchmarks/decode_attention.py --prompts [--rounds 5]

Rows have one query each, over a token-major KV cache of several layers, more than fits into a
processor's caches. In each round every contender takes its turn, and so does a dot product of two
long vectors, which reads memory as fast as torch can. Times are medians of rounds, of one thread in
its processor time, of several by the clock. On a shared machine only ratios mean anything, and of
several threads nothing does.

- gb_s: KV read, of compiled code in the row's dtype; int8 is KV in 8 bits with its scales. read:
  that over the dot product's.
- flash: time of torch's kernel on the same KV over ours; of int8, on KV that it dequantizes first.
- over_fp32: our time over our time with fp32 KV.

With `--prompts` rows are whole prompts, and chunks of 128 tokens behind 8,192: causal attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import report
import torch

from csps.kernels import cpu_attention, cpu_decode
from csps.kernels.arguments import SlotRuns
from csps.kernels.attention import attention
from csps.kernels.quantized_kv import INT8, quantized, row_width

SHAPES = [(4, 2, 32), (16, 8, 64), (32, 8, 128)]
"""Query heads, KV heads and head dim."""
DTYPES = [torch.float32, torch.bfloat16, INT8]
BATCHES = [(1, 512), (1, 2048), (1, 8192), (1, 16384), (64, 500)]
"""Rows, and keys of each."""
COLD_BYTES = 128 * 2**20
"""Least fp32 KV of all layers."""
READ_NUMBERS = 16 * 2**20
PROMPTS = [(1024, 0), (4096, 0), (128, 8192)]
"""Tokens, and tokens of their history."""


def main() -> None:
    """Print a table and the figures."""
    parser = report.with_json_option(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", action="store_true", help="measure prompts instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.prompts:
        rows = [row for shape in SHAPES for row in of_prompts(shape, args)]
        figures = {
            "benchmark": "prompt_attention",
            "threads": args.threads,
            "least_flash": min(row["flash"] for row in rows),
        }
        report.publish(figures, rows, args.json)
        return
    rows = [row for shape in SHAPES for batch in BATCHES for row in measured(shape, batch, args)]
    long = [row for row in rows if row["keys"] >= 8192]
    figures = {
        "benchmark": "decode_attention",
        "threads": args.threads,
        "least_read_fp32": min(row["read"] for row in long if row["dtype"] == "float32"),
        "least_read_bf16": min(row["read"] for row in long if row["dtype"] == "bfloat16"),
        "least_read_int8": min(row["read"] for row in long if row["dtype"] == "int8"),
        "most_over_fp32": max(row["over_fp32"] for row in long if row["dtype"] == "bfloat16"),
        "most_int8_over_fp32": max(row["over_fp32"] for row in long if row["dtype"] == "int8"),
        "least_flash": min(row["flash"] for row in rows),
    }
    report.publish(figures, rows, args.json)


def of_prompts(shape: tuple[int, int, int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each prompt and dtype."""
    heads, kv_heads, dim = shape
    rows = []
    for tokens, history in PROMPTS:
        for dtype in (torch.float32, torch.bfloat16):
            assert cpu_decode.prepare(heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
            q = torch.randn(tokens, heads, dim).to(dtype)
            k, v = torch.randn(2, history + tokens, kv_heads, dim).to(dtype)
            positions = range(history, history + tokens), range(history + tokens)

            def attend(prepared: Callable[..., object]) -> None:
                cpu_attention.prepared = prepared  # type: ignore[assignment]
                attention(q, k, v, q_positions=positions[0], k_positions=positions[1])  # noqa: B023

            contenders = {
                "compiled": partial(attend, cpu_decode.prepared),
                "flash": partial(attend, lambda *_: None),
            }
            medians = in_turns(contenders, args)
            rows.append(
                {
                    "shape": f"{heads},{kv_heads},{dim}",
                    "tokens": tokens,
                    "history": history,
                    "dtype": str(dtype).removeprefix("torch."),
                    "ms": 1e3 * medians["compiled"],
                    "flash": medians["flash"] / medians["compiled"],
                }
            )
    return rows


def in_turns(
    contenders: Mapping[str, Callable[[], object]], args: argparse.Namespace
) -> dict[str, float]:
    """Return the median time of each."""
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(args.rounds):
        for name, run in contenders.items():
            begin = clock()
            run()
            times[name].append(clock() - begin)
    return {name: statistics.median(samples) for name, samples in times.items()}


def measured(
    shape: tuple[int, int, int], batch: tuple[int, int], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a row for each dtype."""
    heads, kv_heads, dim = shape
    count, keys = batch
    runs = SlotRuns(count, [(row, row * keys, (row + 1) * keys) for row in range(count)])
    slots = count * keys
    layers = max(1, -(-COLD_BYTES // (2 * slots * kv_heads * dim * 4)))
    one, other = torch.randn(2, READ_NUMBERS)
    contenders: dict[str, Callable[[], object]] = {"read": lambda: torch.dot(one, other)}
    for dtype in DTYPES:
        assert cpu_decode.prepare(heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
        q = torch.randn(count, heads, dim)
        q = q if dtype == INT8 else q.to(dtype)
        caches = [cache_of(torch.randn(2, slots, kv_heads, dim), dtype) for _ in range(layers)]
        by_torch = cpu_attention.decode_by_flash
        if dtype == INT8:
            by_torch = cpu_attention.decode_quantized
        for name, attend in (("compiled", cpu_attention.decode_attention), ("flash", by_torch)):
            contenders[f"{name} {dtype}"] = _all_layers(attend, q, caches, runs, dim**-0.5)
    medians = in_turns(contenders, args)
    read_gb_s = 8e-9 * READ_NUMBERS / medians["read"]
    rows = []
    for dtype in DTYPES:
        seconds = medians[f"compiled {dtype}"]
        width = row_width(dim, dtype)
        gb_s = 2e-9 * layers * slots * kv_heads * width * dtype.itemsize / seconds
        rows.append(
            {
                "shape": f"{heads},{kv_heads},{dim}",
                "rows": count,
                "keys": keys,
                "dtype": str(dtype).removeprefix("torch."),
                "layer_ms": 1e3 * seconds / layers,
                "gb_s": gb_s,
                "read_gb_s": read_gb_s,
                "read": gb_s / read_gb_s,
                "flash": medians[f"flash {dtype}"] / seconds,
                "over_fp32": seconds / medians[f"compiled {torch.float32}"],
            }
        )
    return rows


def cache_of(kv_2shd: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return keys and values as a pool of this dtype has them."""
    return quantized(kv_2shd) if dtype == INT8 else kv_2shd.to(dtype)


def _all_layers(
    attend: Callable[..., object],
    q: torch.Tensor,
    caches: list[torch.Tensor],
    runs: SlotRuns,
    scale: float,
) -> Callable[[], object]:
    return lambda: [attend(q, cache[0], cache[1], runs, scale) for cache in caches]


if __name__ == "__main__":
    main()
