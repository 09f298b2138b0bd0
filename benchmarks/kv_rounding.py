"""What 8-bit KV changes in the model's next tokens, over the English text of docs/.

    python benchmarks/kv_rounding.py [--model FOLDER] [--tokens 2048] [--parts 8] [--json FILE]

Each part of the text is computed in each dtype with KV in it and in 8 bits, and compared with fp32.
Nothing is timed, so other load changes no figure.

- same: share of positions with the same likeliest next token, of `positions`.
- nats: divergence of the distribution of the next token, the mean over positions.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import report
import torch
from torch import Tensor

from csps.kernels.attention import attention
from csps.kernels.merge import merge_sink
from csps.models.network.network import Network
from csps.services.evaluation.local_model import LocalModel

ROOT = Path(__file__).resolve().parent.parent
FORMS = [
    (torch.float32, True),
    (torch.bfloat16, False),
    (torch.bfloat16, True),
]
"""Dtypes, each with KV in it or in 8 bits."""


def main() -> None:
    """Print a row for each form."""
    parser = report.with_json_option(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "needle")
    parser.add_argument("--tokens", type=int, default=2048, help="of each part (%(default)s)")
    parser.add_argument("--parts", type=int, default=8, help="parts of the text (%(default)s)")
    args = parser.parse_args()
    exact = LocalModel.load(args.model)
    pages = sorted((ROOT / "docs").glob("*.md"))
    ids = exact.tokenizer.encode("\n".join(page.read_text() for page in pages)).ids
    if len(ids) < args.tokens * args.parts:
        parser.error(f"the pages have {len(ids)} tokens: lower --tokens or --parts")
    parts = [ids[at * args.tokens : (at + 1) * args.tokens] for at in range(args.parts)]
    expected = [logprobs(exact.network, part) for part in parts]
    rows = [row(args.model, dtype, rounds_kv, parts, expected) for dtype, rounds_kv in FORMS]
    figures = {"benchmark": "kv_rounding", "model": args.model.name, "tokens": args.tokens}
    report.publish(figures, rows, args.json)


def row(
    model: Path,
    dtype: torch.dtype,
    rounds_kv: bool,
    parts: list[list[int]],
    expected: list[Tensor],
) -> dict[str, Any]:
    """Compare one form with fp32."""
    network = LocalModel.load(model, dtype, rounds_kv=rounds_kv).network
    same, nats, count = 0, 0.0, 0
    for part, expected_tv in zip(parts, expected, strict=True):
        found_tv = logprobs(network, part)
        same += int((found_tv.argmax(-1) == expected_tv.argmax(-1)).sum())
        nats += float((expected_tv.exp() * (expected_tv - found_tv)).sum())
        count += len(part)
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "kv": "int8" if rounds_kv else "auto",
        "positions": count,
        "same": same / count,
        "nats": nats / count,
    }


@torch.inference_mode()
def logprobs(network: Network, ids: list[int]) -> Tensor:
    """Return the log-probabilities of the next token at each position, (t, vocab)."""
    rows, spec = range(len(ids)), network.spec
    x_td, rotary = network.embed(torch.tensor(ids)), network.rotary(torch.arange(len(ids)))
    for index, layer in enumerate(network.layers):
        q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
        window = spec.window_of(index)
        at = {"q_positions": rows, "k_positions": rows, "scale": spec.scale, "window": window}
        out_thd, lse_ht = attention(q_thd, k_thd, v_thd, **at)  # type: ignore[arg-type]
        if layer.weights.sinks is not None:
            merge_sink(out_thd, lse_ht, layer.weights.sinks)
        x_td = layer.finish(x_td, out_thd)
    return network.logits(x_td).log_softmax(-1)


if __name__ == "__main__":
    main()
