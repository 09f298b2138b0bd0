"""Processor time of prefill and of a decoded token, for several checkpoints in one process.

    python benchmarks/needle_speed.py models/needle OTHER/needle --json speed.json

Exact attention runs on one thread. Checkpoints take turns, so that other work on the machine, which
takes caches and clock though no processor time, slows all of them. Figures are medians of the
rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file

from csps.models.needle_prompts.filler import filler_sentences
from csps.services.evaluation.local_model import LocalModel

DECODED = 32
"""Tokens of each measurement of decode."""


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="checkpoint folders")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {str(folder): LocalModel.load(folder) for folder in arguments.models}
    result: dict[str, Any] = {name: {"parameters": parameters(Path(name))} for name in models}
    for tokens in arguments.tokens:
        sentences = filler_sentences(random.Random(tokens), tokens, None)
        text = "".join(word for sentence in sentences for word in sentence).strip()
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
        for _ in range(arguments.rounds):
            for name, model in models.items():
                times[name].append(timed(model, text))
        for name, measured in times.items():
            prefill, decode = (median(each) for each in zip(*measured, strict=True))
            figures = {"prefill_s": round(prefill, 4), "decode_ms": round(1000 * decode, 3)}
            result[name][str(tokens)] = figures
            print(name, tokens, figures, flush=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def parameters(folder: Path) -> int:
    """Return the number of weights."""
    tensors = load_file(folder / "model.safetensors").values()
    return sum(tensor.numel() for tensor in tensors)


@torch.inference_mode()
def timed(model: LocalModel, text: str) -> tuple[float, float]:
    """Return processor seconds to read the text, and per token decoded behind it."""
    start = time.process_time()
    context = model.read(text)
    read = time.process_time()
    own = None
    for _ in range(DECODED):
        _, own = model._forward([100], context, own)
    return read - start, (time.process_time() - read) / DECODED


if __name__ == "__main__":
    main()
