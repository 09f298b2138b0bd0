"""Peak of anonymous memory while a checkpoint is loaded, over what stays resident.

    python benchmarks/load_memory.py [--gib 2.2] [--kinds bfloat16 fp8 experts] [--json FILE]

Writes random checkpoints of so many GiB in several files to a temporary folder, which is deleted in
the end, and loads each in a process of its own. Anonymous memory (RssAnon) is what the process has
allocated; pages of files do not count, because the system may drop them. Both figures are over the
process before it opens the checkpoint. A row for each kind of weights:

    bfloat16   Llama in bfloat16, kept as bfloat16 and as float32
    fp8        Llama in FP8 with blocks of 128 x 128, kept as bfloat16
    experts    Qwen3-MoE in bfloat16, kept as bfloat16
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from csps.models.checkpoints.loading import load_network

HIDDEN, HEADS, HEAD_DIM, VOCAB = 2048, 16, 128, 65_536
WIDTH, EXPERT_WIDTH, EXPERTS = 8192, 768, 64
BLOCK = 128
SHARD_BYTES = 2**29
KINDS = {
    "bfloat16": ("bfloat16", "float32"),
    "fp8": ("bfloat16",),
    "experts": ("bfloat16",),
}
SAMPLE_S = 0.002


def tensors_of(kind: str, layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yield random tensors of a checkpoint."""
    yield from _matrix("model.embed_tokens.weight", VOCAB, HIDDEN, "bfloat16")
    yield from _matrix("lm_head.weight", VOCAB, HIDDEN, "bfloat16")
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", torch.ones(HIDDEN, dtype=torch.bfloat16)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield from _matrix(f"{prefix}self_attn.{name}.weight", HIDDEN, HIDDEN, kind)
        if kind != "experts":
            yield from _mlp(f"{prefix}mlp.", WIDTH, kind)
            continue
        for name in ("q_norm", "k_norm"):
            yield f"{prefix}self_attn.{name}.weight", torch.ones(HEAD_DIM, dtype=torch.bfloat16)
        yield from _matrix(f"{prefix}mlp.gate.weight", EXPERTS, HIDDEN, kind)
        for expert in range(EXPERTS):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", EXPERT_WIDTH, kind)


def _mlp(prefix: str, width: int, kind: str) -> Iterator[tuple[str, Tensor]]:
    yield from _matrix(f"{prefix}gate_proj.weight", width, HIDDEN, kind)
    yield from _matrix(f"{prefix}up_proj.weight", width, HIDDEN, kind)
    yield from _matrix(f"{prefix}down_proj.weight", HIDDEN, width, kind)


def _matrix(name: str, rows: int, columns: int, kind: str) -> Iterator[tuple[str, Tensor]]:
    # The upper bits of random words: numbers between 0.5 and 2, and faster than a normal
    # distribution.
    words = torch.randint(0x3F00, 0x4000, (rows, columns), dtype=torch.int16)
    numbers = words.view(torch.bfloat16)
    if kind != "fp8":
        yield name, numbers
        return
    yield name, numbers.to(torch.float8_e4m3fn)
    yield f"{name}_scale_inv", torch.rand(-(-rows // BLOCK), -(-columns // BLOCK))


def write(folder: Path, kind: str, size: int) -> int:
    """Write a checkpoint of at least so many bytes in several files; return its bytes."""
    outside = sum(tensor.nbytes for _, tensor in tensors_of(kind, 0))
    layer = sum(tensor.nbytes for _, tensor in tensors_of(kind, 1)) - outside
    layers = max(1, -(-(size - outside) // layer))
    shard: dict[str, Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in tensors_of(kind, layers):
        shard[name] = tensor
        if sum(part.nbytes for part in shard.values()) >= SHARD_BYTES:
            _write_shard(folder, shard, names)
    _write_shard(folder, shard, names)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text(json.dumps(_config(kind, layers)))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _write_shard(folder: Path, shard: dict[str, Tensor], names: dict[str, str]) -> None:
    file = f"model-{len(set(names.values())) + 1:05d}.safetensors"
    save_file(shard, folder / file)
    names |= dict.fromkeys(shard, file)
    shard.clear()


def _config(kind: str, layers: int) -> dict[str, Any]:
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if kind == "experts" else "LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 131_072,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": EXPERT_WIDTH,
    }
    if kind == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        }
    return config


def anonymous(process: int | str = "self") -> int:
    """Return the anonymous memory of a process in bytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


def measure(folder: Path, dtype: str) -> dict[str, float]:
    """Load a checkpoint in this process, and return what it has taken."""
    torch.set_num_threads(1)
    torch.ones(64, 64) @ torch.ones(64, 64)  # loads the libraries for it
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_S):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        network = load_network(folder, dtype=getattr(torch, dtype))
    finally:
        done.set()
        watcher.join()
    tensors = [network.embedding_vd, network.head_vd, network.norm_d]
    for layer in network.layers:
        tensors += layer.weights
    resident = sum(tensor.nbytes for tensor in tensors)
    peak = max(peak, anonymous())
    return {
        "resident_gib": resident / 2**30,
        "peak_gib": (peak - before) / 2**30,
        "ratio": (peak - before) / resident,
    }


def measured_apart(folder: Path, dtype: str) -> dict[str, float]:
    """Return `measure` of a process that has not written the files."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (folder, dtype))


def main() -> None:
    """Print a row for each kind of weights."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gib", type=float, default=2.2)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {"load": os.getloadavg()[0], "rows": []}
    print(
        f"{'kind':>9} {'files GiB':>10} {'as':>9} {'resident GiB':>13} {'peak GiB':>9} {'ratio':>6}"
    )
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as folder:
            size = write(Path(folder), kind, int(args.gib * 2**30))
            for dtype in KINDS[kind]:
                row = measured_apart(Path(folder), dtype)
                row = {"kind": kind, "dtype": dtype, "files_gib": size / 2**30, **row}
                result["rows"].append(row)
                print(
                    f"{kind:>9} {row['files_gib']:10.2f} {dtype:>9} {row['resident_gib']:13.2f}"
                    f" {row['peak_gib']:9.2f} {row['ratio']:6.3f}"
                )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
