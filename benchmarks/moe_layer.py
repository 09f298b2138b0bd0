"""Time of a layer's experts beside the products of its experts alone.

    python benchmarks/moe_layer.py [--tokens 1 64 4096] [--dtype float32] [--rounds 9] [--json FILE]

The layer has the shape of Qwen3-30B-A3B: 2,048 dims, 128 experts 768 wide, eight for each token. It
does what a rank does after attention: norm, router, choice, experts, weighted sum, residual. The
products are those of the same tokens with the same experts, with inputs that lie ready. Both take
turns; a ratio is the median over the rounds of one over the other, in processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from csps.models.network.experts import route, row_products, summable
from csps.models.network.network import Layer, rms_norm
from csps.models.network.parameters import ExpertParameters, LayerParameters
from csps.models.network.rope import RopeSpec
from csps.models.network.spec import ExpertSpec, ModelSpec, tp_shard_of

SPEC = ModelSpec(
    family="qwen3_moe",
    layers=1,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    intermediate=6144,
    vocab=1,
    max_positions=262_144,
    rms_eps=1e-6,
    rope=RopeSpec(inverse_frequencies=(1.0,) * 64),
    tie_embeddings=False,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    bos_token_id=None,
    eos_token_ids=(),
    experts=ExpertSpec(count=128, per_token=8, intermediate=768),
)


def random_layer(dtype: torch.dtype) -> Layer:
    """Return a layer with random experts; its attention is empty."""
    assert SPEC.experts is not None
    count, width, hidden = SPEC.experts.count, SPEC.experts.intermediate, SPEC.hidden

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=dtype).normal_(0, columns**-0.5)

    nothing = torch.empty(0)
    experts = ExpertParameters(
        router=summable(matrix(count, hidden)),
        gate_up=matrix(count * 2 * width, hidden),
        down=matrix(count * hidden, width),
    )
    weights = LayerParameters(
        input_norm=nothing,
        qkv=nothing,
        output=nothing,
        mlp_norm=torch.ones(hidden, dtype=dtype),
        experts=experts,
    )
    return Layer(spec=SPEC, shard=tp_shard_of(SPEC, 0, 1), weights=weights, all_reduce=None)


def products_alone(layer: Layer, x_td: Tensor) -> Callable[[], None]:
    """Return a function that computes the products of the layer's experts for these tokens."""
    experts, spec = layer.weights.experts, SPEC.experts
    assert experts is not None
    assert spec is not None
    normed_td = rms_norm(x_td, layer.weights.mlp_norm, SPEC.rms_eps)
    routing = route(row_products(normed_td, experts.router), None, spec)
    order_n = routing.experts_tk.flatten().argsort(stable=True)
    counts = torch.bincount(routing.experts_tk.flatten(), minlength=spec.count).tolist()
    sorted_nd = normed_td[order_n // spec.per_token]
    hidden_ni = torch.randn(len(order_n), spec.intermediate, dtype=x_td.dtype)
    gate_up_eid = experts.gate_up.view(spec.count, -1, SPEC.hidden)
    down_edi = experts.down.view(spec.count, SPEC.hidden, -1)

    def multiply() -> None:
        for expert, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
            if start < stop:
                F.linear(sorted_nd[start:stop], gate_up_eid[expert])
                F.linear(hidden_ni[start:stop], down_edi[expert])

    return multiply


def seconds(work: Callable[[], object]) -> float:
    """Return the processor time that some work takes."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def compare(layer: Layer, tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Return the medians of both times and of their ratio."""
    x_td = torch.randn(tokens, SPEC.hidden).to(dtype)
    products = products_alone(layer, x_td)
    layer.mlp(x_td)
    products()
    pairs = [(seconds(lambda: layer.mlp(x_td)), seconds(products)) for _ in range(rounds)]
    return {
        "tokens": tokens,
        "layer_ms": 1e3 * statistics.median(whole for whole, _ in pairs),
        "products_ms": 1e3 * statistics.median(alone for _, alone in pairs),
        "ratio": statistics.median(whole / alone for whole, alone in pairs),
    }


def main() -> None:
    """Print a row for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 4096])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    result: dict[str, Any] = {"dtype": args.dtype, "load": os.getloadavg()[0], "rows": []}
    print(f"{args.dtype}, load {result['load']:.1f}")
    print(f"{'tokens':>7} {'layer ms':>10} {'products ms':>12} {'ratio':>6}")
    with torch.inference_mode():
        layer = random_layer(dtype)
        for tokens in args.tokens:
            row = compare(layer, tokens, dtype, args.rounds)
            result["rows"].append(row)
            times = f"{row['layer_ms']:10.2f} {row['products_ms']:12.2f} {row['ratio']:6.2f}"
            print(f"{tokens:7d} {times}")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
