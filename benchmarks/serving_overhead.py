"""What HTTP, router and RPC add to the engine, to the first token and to every further one.

    python benchmarks/serving_overhead.py [--prompt 256] [--tokens 128] [--rounds 15] [--json FILE]

First token: on the deployed server, from sending the request to the first text at the client,
less what the prefill rank itself measured from receiving the job to having the token, less what
Serve's own proxy takes: a request of the same size that the router turns away at once. Further
tokens: the median gap at the HTTP client, less the median gap at a driver that speaks RPC to an
equal pair of gangs without Ray, HTTP or a router. Both are asked in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import report
import wide_checkpoint
from deployed import deployed

from csps.loadgen.streaming_client import stream
from csps.protocols.messages import Sampling, TokenDrawn
from csps.protocols.schema import unpack

# The driver that stands in for the router belongs to the tests, which hold the engine to it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from gang_cell import Cell, Request, even_shares
from gang_processes import process_cell


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = wide_checkpoint.make(Path(folder) / "wide")
        settings = {"model": str(model), "served_model_name": "wide"}
        with deployed(settings) as url, httpx.Client(base_url=url) as client:
            rows = asyncio.run(_measure(model, client, args))
    report.publish({"benchmark": "serving_overhead", "prompt": args.prompt}, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    return report.with_json_option(parser).parse_args()


async def _measure(
    model: Path, client: httpx.Client, args: argparse.Namespace
) -> list[dict[str, Any]]:
    added, proxy, http_gaps, bare_gaps = [], [], [], []
    async with process_cell(model, prefill=2, decode=2) as cell:
        for round_ in range(args.rounds + 2):
            proxy_s = _refused_s(client, args, round_)
            beyond_engine_s, gap_s = _over_http(client, args, round_)
            bare_s = await _bare_gap(cell, args, round_)
            if round_ >= 2:  # connections, caches and allocators have warmed up
                proxy.append(proxy_s)
                added.append(beyond_engine_s)
                http_gaps.append(gap_s)
                bare_gaps.append(bare_s)
    milliseconds = {
        "beyond_engine_ttft_ms": statistics.median(added) * 1e3,
        "proxy_alone_ms": statistics.median(proxy) * 1e3,
        "http_gap_ms": statistics.median(http_gaps) * 1e3,
        "engine_gap_ms": statistics.median(bare_gaps) * 1e3,
    }
    return [
        {
            **milliseconds,
            "ttft_added_ms": milliseconds["beyond_engine_ttft_ms"] - milliseconds["proxy_alone_ms"],
            "per_token_added_ms": milliseconds["http_gap_ms"] - milliseconds["engine_gap_ms"],
        }
    ]


def _refused_s(client: httpx.Client, args: argparse.Namespace, seed: int) -> float:
    """Through the proxy and back: the model does not exist, which is seen before anything else."""
    body = {"model": "none", "prompt": wide_checkpoint.prompt(args.prompt, seed=seed)}
    begin = time.perf_counter()
    assert client.post("/v1/completions", json=body).status_code == 404
    return time.perf_counter() - begin


def _over_http(client: httpx.Client, args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """(seconds to the first token beyond the engine's own, median gap)."""
    body = {
        "model": "wide",
        "prompt": wide_checkpoint.prompt(args.prompt, seed=seed),
        "max_tokens": args.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "csps": {"explain": True},
    }
    answer = stream(client, "/v1/completions", body)
    timings = answer.extra["timings"]
    engine_s = sum(timings[key] for key in ("rank_queue_s", "compute_s", "communication_s"))
    return answer.ttft_s - engine_s, (answer.chunk_s[-1] - answer.chunk_s[1]) / (args.tokens - 2)


async def _bare_gap(cell: Cell, args: argparse.Namespace, rid: int) -> float:
    """Mean gap between the tokens of one request, at a driver of the bare engine."""
    prompt = np.random.default_rng(rid).integers(3, wide_checkpoint.VOCAB, args.prompt)
    stamps: list[float] = []
    notified = cell.notified

    def stamp(method: str, payload: dict[str, Any]) -> None:
        """Wake the driver for the first and the last token only: between them it costs nothing."""
        if method == "token":
            stamps.append(time.perf_counter())
            if 0 < payload["index"] < args.tokens - 1:
                cell.heard[TokenDrawn].append(unpack(TokenDrawn, payload))
                return
        notified(method, payload)

    request = Request(
        rid=rid,
        prompt=prompt.astype("<i4"),
        shares=even_shares(args.prompt, [0]),
        sampling=Sampling(temperature=0, max_tokens=args.tokens),
    )
    cell.notified = stamp  # type: ignore[method-assign]
    try:
        await cell.generate(request, group=[0])
    finally:
        cell.notified = notified  # type: ignore[method-assign]
    return (stamps[-1] - stamps[1]) / (len(stamps) - 2)


if __name__ == "__main__":
    main()
