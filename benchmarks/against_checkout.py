"""Compare the servers of two checkouts: the same requests in turns, and the ratio of times.

    git worktree add ../before e66d412
    python benchmarks/against_checkout.py ../before . [--rounds 20] [--json FILE]
    python benchmarks/against_checkout.py ../before . --streams --rounds 5

Both servers are up on the same cores, so the idle one takes a little of them, too. The order
changes with each round. The output has medians, and the median of the rounds' ratios with its 95 %
interval (bootstrap). Processor time is that of all processes of a server.

With `--streams` the requests are 64 streams at once (500 tokens in, 128 out), prompts of 200 tokens
with one out (16 at once), and one stream behind 16,000 tokens. `us_a_token` is the processor time
of each kind of process for a token of the 64 streams, prompts included.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import report

FIRST_PORT = 8211
START_S, STOP_S, PATIENCE_S = 240.0, 120.0, 180.0
LONG, BEHIND, SHORT, ANSWER = 16_000, 32_000, 200, 16
STREAMS, STREAM_IN, STREAM_OUT = 64, 500, 128
SHORTS, AT_ONCE = 160, 16
GAPS, FIRST_GAPS = 60, 4
"""Tokens behind a long prompt, and how many of the first gaps are not counted."""
HEAD_START_S = 0.5
"""Time by which the long prompt is sent before the short one."""


@dataclass(frozen=True)
class Server:
    """Server of one checkout, deployed with its own settings."""

    folder: Path
    port: int

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of its commands, which also identifies its processes."""
        return {**os.environ, "PYTHONPATH": str(self.folder / "src")}

    def command(self, *arguments: str) -> list[str]:
        """Return the command `csps ...` of this checkout."""
        module = "csps.cli" if (self.folder / "src/csps/cli.py").exists() else "csps.services.cli"
        return [sys.executable, "-m", module, *arguments]

    @contextmanager
    def up(self) -> Iterator[None]:
        """Start the server and wait until it serves."""
        run = {"cwd": self.folder, "env": self.environment, "check": True}
        serve = self.command("serve", "--port", str(self.port), "--no-demo")
        try:
            subprocess.run(serve, timeout=START_S, stdout=subprocess.DEVNULL, **run)
            yield
        finally:
            subprocess.run(self.command("stop"), timeout=STOP_S, stdout=subprocess.DEVNULL, **run)

    def processes(self) -> list[psutil.Process]:
        """Return all processes of the server."""
        own = self.environment["PYTHONPATH"]
        return [process for process in psutil.process_iter() if _python_path(process) == own]


def _python_path(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("PYTHONPATH", ""))
    except psutil.Error:
        return ""


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(_cpu_of_kinds(processes).values())


def _cpu_of_kinds(processes: list[psutil.Process]) -> Counter[str]:
    """Return the processor time by title: Ray names a replica after its deployment."""
    found: Counter[str] = Counter()
    for process in processes:
        try:
            title = process.cmdline()[:1] or [""]
            times = process.cpu_times()
        except psutil.Error:
            continue
        kind = title[0] if title[0].startswith("ray::") else process.name()
        found[kind] += times.user + times.system
    return found


class Client:
    """Client of one server. Prompts are random tokens, no two alike."""

    def __init__(self, server: Server) -> None:
        self._url = f"http://127.0.0.1:{server.port}/v1/completions"
        self._processes = server.processes()
        self._rng = np.random.default_rng(server.port)

    def _body(self, tokens: int, answer: int, **fields: Any) -> dict[str, Any]:
        prompt = self._rng.integers(200, 900, tokens).tolist()
        common = {"model": "needle", "temperature": 0, "ignore_eos": True}
        return {**common, "prompt": prompt, "max_tokens": answer, **fields}

    def first_token_s(self, tokens: int) -> float:
        """Return the time to the first text."""
        begin, found = time.perf_counter(), 0.0
        body = self._body(tokens, 2, stream=True)
        with httpx.stream("POST", self._url, json=body, timeout=PATIENCE_S) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {") and not found:
                    found = time.perf_counter() - begin
        return found

    def behind_a_long_one_s(self) -> float:
        """Return the time to the first text of a short prompt behind a long one."""
        long = threading.Thread(target=self.first_token_s, args=(BEHIND,))
        long.start()
        time.sleep(HEAD_START_S)
        short_s = self.first_token_s(SHORT)
        long.join()
        return short_s

    def whole_s(self) -> float:
        """Return the time of a short request without streaming."""
        begin = time.perf_counter()
        response = httpx.post(self._url, json=self._body(SHORT, ANSWER), timeout=PATIENCE_S)
        assert response.status_code == 200, response.text
        return time.perf_counter() - begin

    def with_cpu(self, measure: Callable[[], float]) -> tuple[float, float]:
        """Return the result of `measure` and the server's processor time meanwhile."""
        before = _cpu_s(self._processes)
        return measure(), _cpu_s(self._processes) - before

    def streams_s(self) -> float:
        """Return the time until all of many streams have ended."""
        return self._all_s(STREAMS, STREAMS, STREAM_IN, STREAM_OUT)

    def shorts_s(self) -> float:
        """Return the time of many prompts with one token out, some at once."""
        return self._all_s(SHORTS, AT_ONCE, SHORT, 1)

    def gap_s(self) -> float:
        """Return the median gap between tokens behind a long prompt."""
        stamps: list[float] = []
        body = self._body(LONG, GAPS, stream=True)
        with httpx.stream("POST", self._url, json=body, timeout=PATIENCE_S) as response:
            assert response.status_code == 200, response.read()
            stamps.extend(
                time.perf_counter()
                for line in response.iter_lines()
                if line.startswith("data: {") and json.loads(line[6:])["choices"]
            )
        gaps = [later - one for one, later in itertools.pairwise(stamps)]
        return statistics.median(gaps[FIRST_GAPS:])

    def _all_s(self, requests: int, at_once: int, tokens: int, answer: int) -> float:
        bodies = [self._body(tokens, answer, stream=answer > 1) for _ in range(requests)]

        async def all_of_them() -> None:
            places = asyncio.Semaphore(at_once)
            limits = httpx.Limits(max_connections=at_once)
            async with httpx.AsyncClient(timeout=PATIENCE_S, limits=limits) as client:

                async def one(body: dict[str, Any]) -> None:
                    async with places:
                        response = await client.post(self._url, json=body)
                        assert response.status_code == 200, response.text

                await asyncio.gather(*map(one, bodies))

        begin = time.perf_counter()
        asyncio.run(all_of_them())
        return time.perf_counter() - begin

    def with_split(self, measure: Callable[[], float], parts: int) -> tuple[float, Counter[str]]:
        """Return the result of `measure`, and each kind of process's processor time for a part."""
        before = _cpu_of_kinds(self._processes)
        seconds = measure()
        spent = _cpu_of_kinds(self._processes) - before
        return seconds, Counter({kind: 1e6 * cpu_s / parts for kind, cpu_s in spent.items()})


Splits = dict[str, list[Counter[str]]]
"""Processor time in microseconds of each kind of process, of a token and of a short prompt."""


def round_of_streams(client: Client, splits: Splits) -> dict[str, float]:
    """Measure what `--streams` names, in seconds; add to the splits."""
    streams, of_token = client.with_split(client.streams_s, STREAMS * STREAM_OUT)
    shorts, of_short = client.with_split(client.shorts_s, SHORTS)
    splits["us_a_token"].append(of_token)
    splits["us_a_short"].append(of_short)
    return {"streams": streams, "shorts": shorts, "gap": client.gap_s()}


def one_round(client: Client, *, with_long: bool) -> dict[str, float]:
    """Measure everything once, in seconds."""
    ttft, ttft_cpu = client.with_cpu(lambda: client.first_token_s(LONG))
    whole, whole_cpu = client.with_cpu(
        lambda: statistics.median(client.whole_s() for _ in range(5))
    )
    figures = {"ttft": ttft, "ttft_cpu": ttft_cpu, "whole": whole, "whole_cpu": whole_cpu / 5}
    return {**figures, "behind": client.behind_a_long_one_s()} if with_long else figures


def compared(rounds: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a row for each figure."""
    rows = []
    for name in rounds[0]["new"]:
        ratios = [round_["new"][name] / round_["old"][name] for round_ in rounds]
        resamples = (random.choices(ratios, k=len(ratios)) for _ in range(2000))
        medians = sorted(map(statistics.median, resamples))
        rows.append(
            {
                "figure": name,
                "old_s": statistics.median(round_["old"][name] for round_ in rounds),
                "new_s": statistics.median(round_["new"][name] for round_ in rounds),
                "ratio": statistics.median(ratios),
                "low": medians[50],
                "high": medians[1950],
            }
        )
    return rows


def main() -> None:
    """Print a row for each figure."""
    parser = report.with_json_option(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--behind", action="store_true", help="also a short prompt behind a long")
    parser.add_argument("--streams", action="store_true", help="many streams and short prompts")
    args = parser.parse_args()
    old, new = (
        Server(folder.resolve(), FIRST_PORT + index)
        for index, folder in enumerate((args.old, args.new))
    )
    rounds: list[dict[str, dict[str, float]]] = []
    with old.up(), new.up():
        clients = {"old": Client(old), "new": Client(new)}
        splits: dict[str, Splits] = {side: defaultdict(list) for side in clients}

        def measured(side: str) -> dict[str, float]:
            if args.streams:
                return round_of_streams(clients[side], splits[side])
            return one_round(clients[side], with_long=args.behind)

        for client in clients.values():
            client.first_token_s(LONG)
        for number in range(args.rounds):
            order = list(clients) if number % 2 else list(reversed(clients))
            rounds.append({side: measured(side) for side in order})
    result: dict[str, Any] = {"benchmark": "against_checkout", "rounds": rounds}
    for side, found in splits.items():
        for name, split in found.items():
            result.setdefault(name, {})[side] = _medians(split)
    report.publish(result, compared(rounds), args.json)


def _medians(found: list[Counter[str]]) -> dict[str, float]:
    kinds = sorted(set().union(*found))
    return {kind: statistics.median(split[kind] for split in found) for kind in kinds}


if __name__ == "__main__":
    main()
