"""Overhead of HTTP, router and RPC over the engine, for the first and every further token.

    python benchmarks/serving_overhead.py [--prompt 256] [--tokens 128] [--rounds 15] [--json FILE]

First token: on the deployed server, from sending the request to the first text at the client. Two
times are subtracted: that which the prefill rank itself measured from receiving the job to having
the token, and that of Serve's own proxy for a request of the same size that the router rejects at
once. Further tokens: the median gap at the HTTP client, less the median gap at a driver that speaks
RPC to an equal pair of gangs without Ray, HTTP or a router. All are measured in turns.

On few cores, handling a token slows the engine down. Serve's part of that is measured in the same
way: `floor_gap_ms` is the driver's gap while Serve streams chunks of the same size, at the same
pace, from an application that does nothing else. `per_token_floor_ms` is what this adds to the
engine's gap, `per_token_ours_ms` the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import report
import stream_floor
import wide_checkpoint
from deployed import deployed, deployed_beside
from streaming_client import stream

from csps.protocols.gang.messages import SampledToken, SampledTokens, Sampling
from csps.protocols.rpc.schema import unpack

# The driver that stands in for the router belongs to the tests, which hold the engine to it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from gang_driver import Cell, Request, even_slices
from gang_processes import process_cell

WARM_UP_ROUNDS = 2
"""Rounds that warm up connections, caches and allocators."""
FLOOR_CHUNKS = 100_000
"""Number of chunks that no client reads to the end."""


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = wide_checkpoint.make(Path(folder) / "wide")
        settings = {"model": str(model), "served_model_name": "wide"}
        with deployed(settings) as url, httpx.Client(base_url=url) as client:
            deployed_beside(stream_floor.APPLICATION, url)
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
    rounds: list[_Round] = []
    async with process_cell(model, prefill=2, decode=2) as cell:
        for seed in range(args.rounds + WARM_UP_ROUNDS):
            rounds.append(await _one_round(cell, client, args, seed))
    return [_figures(rounds[WARM_UP_ROUNDS:])]


@dataclass(frozen=True, kw_only=True)
class _Round:
    """Times of one round in seconds."""

    proxy_s: float
    beyond_engine_ttft_s: float
    http_gap_s: float
    engine_gap_s: float
    floor_gap_s: float


async def _one_round(
    cell: Cell, client: httpx.Client, args: argparse.Namespace, seed: int
) -> _Round:
    proxy_s = _refused_s(client, args, seed)
    beyond_engine_ttft_s, http_gap_s = _over_http(client, args, seed)
    engine_gap_s = await _bare_gap(cell, args, 2 * seed)
    with _serve_streams(str(client.base_url), period_s=engine_gap_s):
        floor_gap_s = await _bare_gap(cell, args, 2 * seed + 1)
    return _Round(
        proxy_s=proxy_s,
        beyond_engine_ttft_s=beyond_engine_ttft_s,
        http_gap_s=http_gap_s,
        engine_gap_s=engine_gap_s,
        floor_gap_s=floor_gap_s,
    )


def _figures(rounds: list[_Round]) -> dict[str, float]:
    """Return medians in milliseconds, and their differences."""

    def median_ms(name: str) -> float:
        median_s: float = statistics.median(getattr(round_, name) for round_ in rounds)
        return median_s * 1e3

    beyond_engine_ttft_ms, proxy_ms = median_ms("beyond_engine_ttft_s"), median_ms("proxy_s")
    http_ms, engine_ms = median_ms("http_gap_s"), median_ms("engine_gap_s")
    floor_ms = median_ms("floor_gap_s")
    return {
        "beyond_engine_ttft_ms": beyond_engine_ttft_ms,
        "proxy_alone_ms": proxy_ms,
        "http_gap_ms": http_ms,
        "engine_gap_ms": engine_ms,
        "floor_gap_ms": floor_ms,
        "ttft_added_ms": beyond_engine_ttft_ms - proxy_ms,
        "per_token_added_ms": http_ms - engine_ms,
        "per_token_floor_ms": floor_ms - engine_ms,
        "per_token_ours_ms": http_ms - floor_ms,
    }


@contextmanager
def _serve_streams(url: str, *, period_s: float) -> Iterator[None]:
    """Let Serve stream chunks at this pace meanwhile, to a client that reads them like `stream`."""
    stop = threading.Event()
    reader = threading.Thread(target=_read_floor, args=(url, period_s, stop))
    reader.start()
    try:
        yield
    finally:
        stop.set()
        reader.join()


def _read_floor(url: str, period_s: float, stop: threading.Event) -> None:
    query = {"period_s": period_s, "count": FLOOR_CHUNKS}
    with (
        httpx.Client(base_url=url) as client,
        client.stream("GET", stream_floor.PATH, params=query) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data:"):
                json.loads(line[5:])
            if stop.is_set():
                return


def _refused_s(client: httpx.Client, args: argparse.Namespace, seed: int) -> float:
    """Return the time of a request for an unknown model, which is rejected first of all."""
    body = {"model": "none", "prompt": wide_checkpoint.prompt(args.prompt, seed=seed)}
    begin = time.perf_counter()
    assert client.post("/v1/completions", json=body).status_code == 404
    return time.perf_counter() - begin


def _over_http(client: httpx.Client, args: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Return (seconds to the first token beyond the engine's own, median gap)."""
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


async def _bare_gap(cell: Cell, args: argparse.Namespace, sequence_id: int) -> float:
    """Return the mean gap between the tokens of one request, at a driver of the bare engine."""
    prompt = np.random.default_rng(sequence_id).integers(3, wide_checkpoint.VOCAB, args.prompt)
    stamps: list[float] = []
    notified = cell.notified

    def stamp(method: str, payload: dict[str, Any]) -> None:
        """Wake the driver for the first and the last token only, so that it costs nothing between
        them.
        """
        if method == "tokens":
            stamps.append(time.perf_counter())
            if 0 < payload["indices"][0] < args.tokens - 1:
                cell.received[SampledToken].extend(unpack(SampledTokens, payload).each())
                return
        notified(method, payload)

    request = Request(
        sequence_id=sequence_id,
        prompt=prompt.astype("<i4"),
        slices=even_slices(args.prompt, [0]),
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
