"""Time between the tokens of an answer while the same ranks prefill a long prompt.

    python benchmarks/stream_gaps.py [--long 32768] [--budgets 64 128 256] [--spread-tokens 4096]
        [--json FILE]

On a deployed server with one elastic gang of two ranks and the included model, one client streams
an answer, first alone, then beside a prompt of `--long` tokens of another client. Each token budget
is a deployment of its own; without `--budgets` it is the server's default. Gaps are those between
reads with tokens, usually one. A slow reader gets several tokens at once, which do not count as
gaps of zero. All rounds of a budget are taken together.

Beside counts from the time at which the ranks received the prompt until its first token.
`beside_p99_ms` should stay below `bound_ms`: an iteration without a prefill, `alone_p50_ms`, and
three quanta. `at_end_p50_ms` is the gap beside the last tenth of the prompt, where a chunk attends
to most keys. `long_s`, the time of the long prompt's prefill, is the cost of a smaller budget, and
of a prompt on one instance: with `--spread-tokens` the prompt takes one for so many tokens.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import random
import statistics
import threading
import time
from typing import Any

import httpx
import report
from deployed import deployed
from streaming_client import REQUEST_S, stream

from csps.services.scheduling.policies.chunked_prefill import ChunkedPrefillOptions
from csps.services.settings.settings import Settings

PATH = "/v1/completions"
MODEL = "needle"
WORDS = 1270
"""Token ids of the model below its special ones."""
STREAM_TOKENS = 30_000
"""Token limit that the stream does not reach."""
STREAM_PROMPT = 200
QUANTA = 3


def main() -> None:
    args = _arguments()
    rows = [_measure(budget, args) for budget in args.budgets]
    result = {
        "benchmark": "stream_gaps",
        "long_tokens": args.long,
        "spread_tokens": args.spread_tokens,
        "quantum_ms": args.quantum_ms,
        "rounds": args.rounds,
    }
    report.publish(result, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--long", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--alone", type=int, default=500, help="gaps without a prefill")
    budget = ChunkedPrefillOptions().token_budget
    parser.add_argument("--budgets", type=int, nargs="+", default=[budget])
    parser.add_argument("--spread-tokens", type=int)
    parser.add_argument("--quantum-ms", type=float, default=Settings().quantum_ms)
    return report.with_json_option(parser).parse_args()


def _measure(budget: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return a row of the table."""
    spread = {} if args.spread_tokens is None else {"spread_tokens": args.spread_tokens}
    settings = {
        "model": MODEL,
        "served_model_name": MODEL,
        "quantum_ms": args.quantum_ms,
        "elastic": {"instances": 2},
        "scheduling": {
            "policy": "chunked_prefill",
            "token_budget": budget,
            "max_batch": 32,
            **spread,
        },
    }
    alone, beside, at_end, long_s = [], [], [], []
    with deployed(settings) as url, httpx.Client(base_url=url, timeout=REQUEST_S) as client:
        for seed in range(args.rounds + 1):
            with Talker(client, seed) as talker:
                first_s = talker.wait(args.alone)
                sent_s = time.perf_counter()
                long = stream(client, PATH, _body(args.long, 1, seed + 1000))
                answered_s = time.perf_counter()
                prefill_s = long.extra["timings"]["prefill_s"]
            if not seed:
                continue  # the first round warms up
            begun_s = answered_s - prefill_s
            alone += talker.gaps(first_s, sent_s)
            beside += talker.gaps(begun_s, answered_s)
            at_end += talker.gaps(answered_s - prefill_s / 10, answered_s)
            long_s.append(prefill_s)
    return {"token_budget": budget, **_row(alone, beside, at_end, long_s, args.quantum_ms)}


def _row(
    alone: list[float],
    beside: list[float],
    at_end: list[float],
    long_s: list[float],
    quantum_ms: float,
) -> dict[str, Any]:
    figures = {
        f"{when}_{name}_ms": 1e3 * value
        for when, gaps in (("alone", alone), ("beside", beside))
        for name, value in _percentiles(gaps).items()
    }
    bound_ms = figures["alone_p50_ms"] + QUANTA * quantum_ms
    return {
        **figures,
        "at_end_p50_ms": 1e3 * statistics.median(at_end),
        "bound_ms": bound_ms,
        "within": figures["beside_p99_ms"] <= bound_ms,
        "beside_reads": len(beside),
        "long_s": statistics.median(long_s),
    }


def _percentiles(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    last = len(ordered) - 1
    p99 = ordered[round(0.99 * last)]
    return {"p50": statistics.median(ordered), "p99": p99, "max": ordered[-1]}


class Talker:
    """An answer that streams while the block lasts."""

    def __init__(self, client: httpx.Client, seed: int) -> None:
        self._client, self._body = client, _body(STREAM_PROMPT, STREAM_TOKENS, seed)
        self._stamps: list[float] = []
        self._news = threading.Condition()
        self._left, self._failure = False, ""
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> Talker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        self._thread.join()
        if self._failure:
            raise RuntimeError(self._failure)

    def wait(self, reads: int) -> float:
        """Wait for so many reads since the first; return the time of the last one."""
        with self._news:
            self._news.wait_for(lambda: len(self._stamps) > reads or self._failure, REQUEST_S)
            if len(self._stamps) <= reads:
                raise RuntimeError(self._failure or f"no {reads} reads in {REQUEST_S:g} s")
            return self._stamps[0]

    def gaps(self, begin_s: float, end_s: float) -> list[float]:
        """Return the gaps that ended between two times."""
        first = max(1, bisect.bisect_left(self._stamps, begin_s))
        last = bisect.bisect_right(self._stamps, end_s)
        return [b - a for a, b in itertools.pairwise(self._stamps[first - 1 : last])]

    def _read(self) -> None:
        body = {**self._body, "stream": True}
        try:
            with self._client.stream("POST", PATH, json=body) as answer:
                for read in answer.iter_raw():
                    if self._left:
                        return
                    self._receive(read)
            self._fail("the answer ended before the long prompt was computed")
        except httpx.HTTPError as exc:
            self._fail(repr(exc))

    def _receive(self, read: bytes) -> None:
        if b'"error"' in read:
            self._fail(read.decode())
        if b"data:" in read:
            with self._news:
                self._stamps.append(time.perf_counter())
                self._news.notify()

    def _fail(self, why: str) -> None:
        with self._news:
            self._failure = self._failure or why
            self._news.notify()


def _body(tokens: int, answer: int, seed: int) -> dict[str, Any]:
    prompt = random.Random(seed).choices(range(WORDS), k=tokens)
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": answer,
        "temperature": 0,
        "ignore_eos": True,
        "csps": {"explain": True},
    }


if __name__ == "__main__":
    main()
