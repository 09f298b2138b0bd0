"""Decode and short prefills of the deployed server over HTTP, beside transformers' own loop.

    python benchmarks/decode_rates.py [--context 16384] [--rounds 7] [--json FILE]

- time between tokens: one stream behind a long prompt over the decode ranks. In turns with it,
  `generate`'s loop on the same checkpoint and prompt length, in one process with one torch thread.
  The one that is not measured is stopped.
- many streams: 64 at once, 500 tokens in and 128 out each; tokens a second until all have ended
- short prefills: prompts of 200 tokens with 1 out, 16 at once; requests a second

The client shares the machine's cores with the server, as in all these benchmarks.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import report
import torch
from deployed import deployed

MODEL = Path(__file__).parent.parent / "models" / "needle"
STREAMS, IN, OUT = 64, 500, 128
SHORT, AT_ONCE, REQUESTS = 200, 16, 320
WARM_UP = 4
"""Number of first gaps of a stream that are not counted."""
PATIENCE_S = 300.0


def main() -> None:
    """Print a table and the figures."""
    parser = report.with_json_option(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(
        target=generate_on_demand, args=(theirs, args.context, args.tokens), daemon=True
    )
    peer.start()
    assert ours.recv() == "ready"
    try:
        with deployed({}) as url:
            rows, figures = measure(url, ours, args)
    finally:
        ours.send(None)
        peer.join(PATIENCE_S)
    report.publish(figures, rows, args.json)


def measure(
    url: str, peer: Connection, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Measure everything on one server."""
    streams, rates, requests, pairs = [], [], [], []
    for _ in range(args.rounds):
        gap_ms = 1e3 * statistics.median(stream_gaps(url, args.context, args.tokens))
        peer.send("go")
        pairs.append((gap_ms, 1e3 * statistics.median(peer.recv())))
    for _ in range(3):
        rates.append(asyncio.run(many(url, STREAMS, STREAMS, IN, OUT)) * OUT)
        requests.append(asyncio.run(many(url, REQUESTS, AT_ONCE, SHORT, 1)))
    streams = [ours / theirs for ours, theirs in pairs]
    rows = [
        {"round": number, "ours_ms": ours, "transformers_ms": theirs, "ratio": ours / theirs}
        for number, (ours, theirs) in enumerate(pairs)
    ]
    figures = {
        "context": args.context,
        "gap_ms": statistics.median(ours for ours, _ in pairs),
        "transformers_gap_ms": statistics.median(theirs for _, theirs in pairs),
        "gap_ratio": statistics.median(streams),
        "tokens_per_s": statistics.median(rates),
        "requests_per_s": statistics.median(requests),
        "all_tokens_per_s": rates,
        "all_requests_per_s": requests,
    }
    return rows, figures


def body(prompt_tokens: int, tokens: int, seed: int, **fields: Any) -> dict[str, Any]:
    """Return a request whose answer does not end early."""
    token_ids = np.random.default_rng(seed).integers(200, 1000, prompt_tokens)
    return {
        "model": "needle",
        "prompt": token_ids.tolist(),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }


def stream_gaps(url: str, context: int, tokens: int) -> list[float]:
    """Return the seconds between the tokens of one stream, as its client reads them."""
    stamps: list[float] = []
    message = body(context, tokens, 0, stream=True)
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=message, timeout=PATIENCE_S
    ) as response:
        assert response.status_code == 200, response.read()
        stamps.extend(
            time.perf_counter()
            for line in response.iter_lines()
            if line.startswith("data: {") and json.loads(line[6:])["choices"]
        )
    return [b - a for a, b in itertools.pairwise(stamps[WARM_UP:])]


async def many(url: str, requests: int, at_once: int, prompt: int, tokens: int) -> float:
    """Return requests a second, with so many at a time."""
    slots = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:

        async def one(seed: int) -> None:
            async with slots:
                message = body(prompt, tokens, seed, stream=tokens > 1)
                response = await client.post(f"{url}/v1/completions", json=message)
                assert response.status_code == 200, response.text

        await asyncio.gather(*map(one, range(at_once)))
        begin = time.perf_counter()
        await asyncio.gather(*map(one, range(at_once, at_once + requests)))
        return requests / (time.perf_counter() - begin)


def generate_on_demand(pipe: Connection, context: int, tokens: int) -> None:
    """Yield a function that returns the gaps of `generate`."""
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    config, stamps = model.config, []

    class Clock:
        def put(self, _: Any) -> None:
            stamps.append(time.perf_counter())

        def end(self) -> None: ...

    pipe.send("ready")
    while pipe.recv() is not None:
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            shape = (1, config.num_key_value_heads, context, config.head_dim)
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        stamps.clear()
        with torch.inference_mode():
            model.generate(
                torch.full((1, context + 1), 5),
                past_key_values=cache,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                streamer=Clock(),
            )
        pipe.send([b - a for a, b in itertools.pairwise(stamps[WARM_UP:])])


if __name__ == "__main__":
    main()
