"""Another library's loop in a process of its own, which may have another environment.

    .venv/bin/python benchmarks/peer_process.py loop MODEL --dtype float32 --threads 1

Reads lines of JSON, `{"prompt": [ids], "tokens": n}`, and answers each with a line: the seconds
from reading it to each token. It imports only the library that it measures, so any interpreter that
has the library runs it.

- loop: transformers, one call of the model for each token, with its cache
- generate: transformers' `generate`
- openvino: openvino-genai's `LLMPipeline`; the model is exported first, by optimum-intel
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Answer = Callable[[Sequence[int], int], list[float]]
"""Generates so many tokens after a prompt, and returns the time of each."""


def main() -> None:
    """Answer until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("library", choices=["loop", "generate", "openvino"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    # Libraries print; the protocol's lines have a descriptor of their own.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        answer = of_openvino(args, Path(folder)) if args.library == "openvino" else of_torch(args)
        print(json.dumps("ready"), file=replies, flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            begin = time.perf_counter()
            stamps = [stamp - begin for stamp in answer(order["prompt"], order["tokens"])]
            print(json.dumps(stamps), file=replies, flush=True)


def of_torch(args: argparse.Namespace) -> Answer:
    """Return transformers' plain loop or `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model.eval()

    @torch.inference_mode()
    def loop(prompt: Sequence[int], tokens: int) -> list[float]:
        cache, ids, stamps = DynamicCache(config=model.config), torch.tensor([prompt]), []
        for _ in range(tokens):
            logits = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            ids = logits[:, -1:].argmax(-1)
            stamps.append(time.perf_counter())
        return stamps

    def generate(prompt: Sequence[int], tokens: int) -> list[float]:
        stamps: list[float] = []

        class Clock:
            def put(self, _: Any) -> None:
                stamps.append(time.perf_counter())

            def end(self) -> None: ...

        model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=Clock(),
        )
        return stamps[1:]  # the first is the prompt

    return loop if args.library == "loop" else generate


def of_openvino(args: argparse.Namespace, folder: Path) -> Answer:
    """Return openvino-genai's pipeline."""
    import numpy as np
    import openvino
    import openvino_genai
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(args.model, export=True, compile=False)
    model.save_pretrained(folder)
    precision = {"float32": "f32", "bfloat16": "bf16"}[args.dtype]
    pipeline = openvino_genai.LLMPipeline(
        str(folder),
        openvino_genai.Tokenizer(str(folder)),
        "CPU",
        INFERENCE_NUM_THREADS=args.threads,
        INFERENCE_PRECISION_HINT=precision,
        KV_CACHE_PRECISION=precision,
    )

    def answer(prompt: Sequence[int], tokens: int) -> list[float]:
        stamps: list[float] = []

        class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
            def write(self, _: Any) -> Any:
                stamps.append(time.perf_counter())
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None: ...

        ids = np.array([prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        pipeline.generate(inputs, config, Clock())
        return stamps

    return answer


if __name__ == "__main__":
    main()
