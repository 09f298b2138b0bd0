"""The arguments of `csps bench serve` and `sweep`, named as in `vllm bench serve`."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from csps.loadgen.client.client import ENDPOINTS, REQUEST_S
from csps.loadgen.results.record import DEFAULT_BUCKETS, DEFAULT_PERCENTILES, LATENCIES
from csps.loadgen.workloads.named import WORKLOADS
from csps.protocols.core.errors import nearest

API_KEY_VARIABLE = "OPENAI_API_KEY"
SAMPLING: Mapping[str, Callable[[str], float]] = {
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "repetition_penalty": float,
}
"""Sampling parameters beside the temperature, with their types."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the server and the request format."""
    group = parser.add_argument_group("server")
    group.add_argument("--backend", choices=ENDPOINTS, default="csps", help="what it speaks (csps)")
    group.add_argument("--base-url", help="default: http://HOST:PORT")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    group.add_argument("--endpoint", help="default: /v1/completions, or the chats of openai-chat")
    group.add_argument("--model", help="default: the first that the server lists")
    group.add_argument("--served-model-name", help="name in the API, if --model is a checkpoint's")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=_not_negative,
        default=0.0,
        metavar="SECONDS",
        help="wait so long for the server to list its models (0: it has to be there)",
    )
    group.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"of every request; an API key comes from {API_KEY_VARIABLE}",
    )
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="fields of every request"
    )
    group.add_argument("--ignore-eos", action="store_true", help="answers of exactly their length")
    group.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    for name, kind in SAMPLING.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help="of every request")
    group.add_argument(
        "--request-timeout",
        type=positive,
        default=REQUEST_S,
        metavar="SECONDS",
        help="a request that takes longer has failed (%(default)s)",
    )


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of every request: sampling parameters, and `--extra-body`."""
    given = {name: getattr(arguments, name) for name in SAMPLING}
    return {name: value for name, value in given.items() if value is not None} | dict(
        arguments.extra_body
    )


def add_ignored_fields(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the option for fields of a trace that are left out."""
    parser.add_argument(
        "--ignore-fields",
        type=lambda word: tuple(filter(None, word.split(","))),
        default=(),
        metavar="NAME,NAME",
        help="fields of a trace to leave out; others that are unknown or cannot be honored are "
        "errors",
    )


def add_workload_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the workload."""
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset-name",
        "--workload",
        default="random",
        help=f"random, custom, {', '.join(WORKLOADS)}, zipf:ALPHA (default: random)",
    )
    group.add_argument(
        "--dataset-path", "--trace", type=Path, help="JSONL with lengths or prompts (Mooncake's)"
    )
    add_ignored_fields(group)
    group.add_argument(
        "--num-prompts", type=_prompts, help="default: 1000, or the whole file, as -1 is"
    )
    _add_lengths(group)
    group.add_argument("--tokenizer", type=Path, help="folder with the model's tokenizer.json")
    _add_conversations(group)
    group.add_argument(
        "--objective",
        type=json_object,
        action="append",
        default=[],
        metavar="JSON",
        help='of the requests in turn: {"objective": "ttft", "max_accuracy_loss": 0.01}',
    )
    group.add_argument("--seed", type=int, default=0, help="of lengths, texts and times (0)")
    group.add_argument("--save-trace", type=Path, metavar="FILE", help="write the requests here")


def _add_lengths(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input-len",
        "--random-input-len",
        type=int,
        default=1024,
        help="of random (%(default)s)",
    )
    group.add_argument(
        "--output-len",
        "--random-output-len",
        type=int,
        help="of random: 128; of others: at most this",
    )
    group.add_argument(
        "--random-range-ratio",
        type=_ratio,
        default=0.0,
        metavar="RATIO",
        help="of random: lengths are up to this share shorter or longer (0)",
    )
    group.add_argument(
        "--random-prefix-len",
        type=_count,
        default=0,
        metavar="TOKENS",
        help="of random: all prompts begin with the same so many tokens, before their own (0)",
    )
    group.add_argument(
        "--sharegpt-output-len", type=int, help="of sharegpt from a file, instead of its answers'"
    )
    group.add_argument(
        "--skip-chat-template",
        action="store_true",
        help="no effect: completions are sent as they are",
    )
    group.add_argument(
        "--no-oversample", action="store_true", help="no effect: no prompt is sent twice"
    )
    group.add_argument(
        "--max-input-len", type=int, help="scale prompts so that the workload's longest has this"
    )
    group.add_argument(
        "--max-model-len", type=int, help="cut prompts that do not fit; default: the server's own"
    )


def _add_conversations(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--turns", type=int, default=1, help="of each conversation (%(default)s)")
    group.add_argument(
        "--turn-len", type=int, default=128, help="tokens that a later turn adds (128)"
    )
    group.add_argument(
        "--turn-delay",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="from an answer to the next turn (%(default)s)",
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the load over time."""
    group = parser.add_argument_group("load")
    group.add_argument(
        "--request-rate", type=rate, default=math.inf, help="requests/s (default: inf, all at once)"
    )
    group.add_argument(
        "--burstiness", type=rate, default=1.0, help="1: Poisson, less: bursts, inf: evenly spaced"
    )
    group.add_argument(
        "--ramp-up-strategy", choices=["linear", "exponential"], help="a rate that changes in time"
    )
    group.add_argument("--ramp-up-start-rps", type=float, help="requests/s at its beginning")
    group.add_argument("--ramp-up-end-rps", type=float, help="requests/s at its end")
    group.add_argument("--arrival-speedup-ratio", type=positive, default=1.0, help="of a trace")
    group.add_argument(
        "--max-concurrency",
        type=int,
        help="requests at once; with no rate, a closed loop of so many users",
    )
    group.add_argument(
        "--probe-request-rate",
        type=_not_negative,
        default=0.0,
        metavar="RATE",
        help="beside the load, so many requests/s of a few tokens in and one out, measured apart",
    )
    group.add_argument("--num-warmups", type=int, default=0, help="requests before, not counted")
    group.add_argument("--max-duration", type=positive, metavar="SECONDS", help="stop then")


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the result."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="ttft|tpot|e2el:MS", help="the SLO, as bounds"
    )
    group.add_argument(
        "--percentile-metrics",
        type=metrics,
        default=tuple(LATENCIES),
        metavar="METRIC,METRIC",
        help=f"of which percentiles are given ({','.join(LATENCIES)})",
    )
    group.add_argument(
        "--metric-percentiles",
        type=numbers,
        default=DEFAULT_PERCENTILES,
        metavar="P,P",
        help=f"which ({_listed(DEFAULT_PERCENTILES)})",
    )
    group.add_argument(
        "--length-buckets",
        type=numbers,
        default=DEFAULT_BUCKETS,
        metavar="TOKENS,TOKENS",
        help=f"ends of ranges of prompt lengths ({_listed(DEFAULT_BUCKETS)})",
    )
    group.add_argument("--label", help="names the run in reports")
    group.add_argument(
        "--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="kept in the result"
    )
    group.add_argument("--save-result", action="store_true", help="write it as JSON")
    group.add_argument("--save-detailed", action="store_true", help="every gap and text as well")
    group.add_argument("--result-dir", type=Path, default=Path(), help="where (here)")
    group.add_argument("--result-filename", help="default: of label, rate and time")
    group.add_argument("--disable-tqdm", "--quiet", action="store_true", help="no progress line")


def _listed(values: Sequence[float]) -> str:
    return ",".join(f"{value:.10g}" for value in values)


def headers(arguments: argparse.Namespace) -> Mapping[str, str]:
    """Return the headers of every request, with the environment's API key if none is given."""
    given = pairs(arguments.header)
    key = os.environ.get(API_KEY_VARIABLE)
    if key and not any(name.lower() == "authorization" for name in given):
        given["Authorization"] = f"Bearer {key}"
    return given


def pairs(words: list[str]) -> dict[str, str]:
    """Return the pairs of `NAME=VALUE` words."""
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _prompts(text: str) -> int | None:
    """Parse a number of requests; -1 is all."""
    value = int(text)
    if value == -1:
        return None
    if value < 1:
        raise argparse.ArgumentTypeError("expected a number from 1 on, or -1 for all")
    return value


def _ratio(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("expected a share from 0 to less than 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("expected a number from 0 on")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError("expected a finite number, 0 or more")
    return value


def rate(text: str) -> float:
    """Parse a number above 0, or inf."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("expected a number above 0")
    return value


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    value = rate(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError("expected a finite number")
    return value


def numbers(text: str) -> tuple[float, ...]:
    """Parse numbers like `50,90,99`."""
    return tuple(map(float, text.split(",")))


def metrics(text: str) -> tuple[str, ...]:
    """Parse metrics like `ttft,itl`."""
    names = tuple(text.split(","))
    if wrong := [name for name in names if name not in LATENCIES]:
        raise argparse.ArgumentTypeError(
            f"unknown metric '{wrong[0]}'{nearest(wrong[0], LATENCIES)}"
        )
    return names


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object")
    return value
