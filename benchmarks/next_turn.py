"""TTFT of a conversation's second turn against its first, on the deployed server over HTTP.

    python benchmarks/next_turn.py [--tokens 16384 32768] [--new 200] [--rounds 5] [--ride 512]
        [--json FILE]

The first turn is a new prompt of so many tokens. The second turn repeats it with the answer and
some new tokens behind it, like a client that continues a conversation. `share` is the median of the
second turn's TTFT over the first turn's. `cached` is the number of tokens that the second turn did
not compute, by its own `usage`. `without` is the second turn's share on the same server with
another `cache_salt`, which cannot reuse anything. With `--ride` the decode gang may compute that
many new tokens (`decode.prefill_tokens_max`).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import httpx
import report
import wide_checkpoint
from deployed import deployed
from streaming_client import Timed, stream

ANSWER = 16
FIRST_WORD = 3
"""Token ids below are the tokenizer's special ones."""


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or wide_checkpoint.make(Path(folder) / "wide")
        with deployed(_settings(model, args)) as url, httpx.Client(base_url=url) as client:
            rows = [_measure(client, token, args.new, args.rounds) for token in args.tokens]
    about = {"benchmark": "next turn", "elastic": args.elastic, "ride": args.ride}
    report.publish(about, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 32_768])
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="default: a random Llama made for this")
    parser.add_argument("--elastic", action="store_true", help="one elastic gang of two instances")
    parser.add_argument("--ride", type=int, default=0, metavar="TOKENS", help="not if elastic")
    return report.with_json_option(parser).parse_args()


def _settings(model: Path, args: argparse.Namespace) -> dict[str, object]:
    gang = {"instances": 2, "threads": 1}
    decode = {**gang, "prefill_tokens_max": args.ride}
    gangs = {"elastic": gang} if args.elastic else {"prefill": gang, "decode": decode}
    policy = {"scheduling": {"policy": "chunked_prefill"}} if args.elastic else {}
    kept = {"kv_reuse": {"enabled": True}}
    return {"model": str(model), "served_model_name": "m", **gangs, **policy, **kept}


def _measure(client: httpx.Client, tokens: int, new: int, rounds: int) -> dict[str, object]:
    first: list[float] = []
    second: list[float] = []
    without: list[float] = []
    cached = 0
    for round_ in range(rounds + 1):
        prompt = _numbers(tokens, seed=round_)
        turns = [
            _ask(client, prompt, salt="conversation"),
            _ask(client, _next(prompt, new, round_), salt="conversation"),
            _ask(client, _next(prompt, new, round_), salt=f"another {round_}"),
        ]
        if round_:  # the first round warms the server up
            for times, turn in zip((first, second, without), turns, strict=True):
                times.append(turn.ttft_s)
            cached = (turns[1].usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "tokens": tokens,
        "new": new,
        "cached": cached,
        "first_s": statistics.median(first),
        "second_s": statistics.median(second),
        "share": statistics.median(b / a for a, b in zip(first, second, strict=True)),
        "without": statistics.median(b / a for a, b in zip(first, without, strict=True)),
        "samples": {"first": first, "second": second, "without": without},
    }


def _next(prompt: list[int], new: int, seed: int) -> list[int]:
    """Return the conversation with an answer and a question of arbitrary tokens."""
    return prompt + _numbers(ANSWER + new, seed=seed + 1_000_000)


def _numbers(count: int, seed: int) -> list[int]:
    """Return token ids that depend on the seed from the first one on."""
    span = wide_checkpoint.VOCAB - FIRST_WORD
    return [FIRST_WORD + (seed * 7919 + index * 104_729) % span for index in range(count)]


def _ask(client: httpx.Client, prompt: list[int], *, salt: str) -> Timed:
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        "stream_options": {"include_usage": True},
    }
    return stream(client, "/v1/completions", body)


if __name__ == "__main__":
    main()
