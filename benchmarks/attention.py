"""Our attention against the fastest of torch's own, causal over a whole prompt, side by side.

    python benchmarks/attention.py                                  # CPU, 4K-32K tokens
    python benchmarks/attention.py --device cuda --dtype bfloat16 \
        --heads 32 --kv-heads 8 --head-dim 128 --lengths 32768 65536 131072

Contenders take turns within each round, so that a slow moment of the machine meets them all.
Prints a table and, last, one JSON line. `ratio` is torch's median time over ours.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import report
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from csps.kernels.attention import attention

TORCH_BACKENDS = {
    "cpu": [SDPBackend.FLASH_ATTENTION],
    "cuda": [
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
    ],
}


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    rows = [_measure(length, args) for length in args.lengths]
    result = {
        "benchmark": "attention",
        "device": args.device,
        "dtype": args.dtype,
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "threads": args.threads,
        "least_ratio": min(row["ratio"] for row in rows),
    }
    report.publish(result, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--device", choices=sorted(TORCH_BACKENDS), default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return report.with_json_option(parser).parse_args()


def _measure(length: int, args: argparse.Namespace) -> dict[str, float]:
    """Return the median milliseconds of each contender at one length."""
    contenders = _contenders(length, args)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        _milliseconds(run, args.device)  # warm up: compilation, page faults
    for _ in range(args.rounds):
        for name, run in contenders.items():
            times[name].append(_milliseconds(run, args.device))
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    ours = medians.pop("ours")
    return {"tokens": length, "ours_ms": ours, **medians, "ratio": min(medians.values()) / ours}


def _contenders(length: int, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    generator = torch.Generator(args.device).manual_seed(0)
    q_thd, k_thd, v_thd = (
        torch.randn(
            (length, heads, args.head_dim),
            generator=generator,
            device=args.device,
            dtype=getattr(torch, args.dtype),
        )
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )
    positions = torch.arange(length, device=args.device)
    # Given to torch as (1, heads, tokens, dim) in dense memory, which is its best layout.
    q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (q_thd, k_thd, v_thd))

    def ours() -> object:
        return attention(q_thd, k_thd, v_thd, q_positions=positions, k_positions=positions)

    def torchs(backend: SDPBackend) -> Callable[[], object]:
        def run() -> object:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        return run

    others = {f"{backend.name.lower()}_ms": torchs(backend) for backend in _usable(args, q, k, v)}
    return {"ours": ours, **others}


def _usable(args: argparse.Namespace, *qkv: torch.Tensor) -> list[SDPBackend]:
    """Return those of torch's back ends that take these inputs, tried on one key."""
    q, k, v = (x[:, :, :1] for x in qkv)
    usable = []
    for backend in TORCH_BACKENDS[args.device]:
        try:
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        except RuntimeError:
            continue
        usable.append(backend)
    return usable


def _milliseconds(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


if __name__ == "__main__":
    main()
