"""TTFT of a conversation's second turn against its first, on the deployed server over HTTP.

    python benchmarks/next_turn.py [--tokens 16384 32768] [--new 200] [--rounds 5] [--ride 512]
        [--restart] [--json FILE]

The first turn is a new prompt of so many tokens. The second turn repeats it with the answer and
some new tokens behind it, like a client that continues a conversation. `share` is the median of the
second turn's TTFT over the first turn's. `cached` is the number of tokens that the second turn did
not compute, by its own `usage`. `without` is the second turn's share on the same server with
another `cache_salt`, which cannot reuse anything. With `--ride` the decode gang may compute that
many new tokens (`decode.prefill_tokens_max`).

With `--restart`, KV survives in files (`kv_reuse.files`), and between both turns the ranks that
computed the first one are killed. The second turn is asked when the server is ready again.
`restarted_s` is the time from the kill until then.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import report
import wide_checkpoint
from deployed import READY_S, deployed, running
from streaming_client import Timed, stream

from csps.services.scheduling.events.limits import BLOCK_TOKENS

ANSWER = 16
QUIET_S = 1.0
"""Nothing is being written if nothing was for so long."""
FIRST_WORD = 3
"""Token ids below are the tokenizer's special ones."""


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or wide_checkpoint.make(Path(folder) / "wide")
        settings = _settings(model, args, Path(folder) / "kv")
        with deployed(settings) as url, httpx.Client(base_url=url) as client:
            gang = "ElasticGang" if args.elastic else "PrefillGang"
            restart = (lambda: _restart(client, gang)) if args.restart else None
            rows = [_measure(client, token, args, restart) for token in args.tokens]
    about = {"benchmark": "next turn", "elastic": args.elastic, "ride": args.ride}
    report.publish({**about, "restart": args.restart}, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384, 32_768])
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", type=Path, help="default: a random Llama made for this")
    parser.add_argument("--elastic", action="store_true", help="one elastic gang of two instances")
    parser.add_argument("--ride", type=int, default=0, metavar="TOKENS", help="not if elastic")
    parser.add_argument("--restart", action="store_true", help="kill the ranks between the turns")
    return report.with_json_option(parser).parse_args()


def _settings(model: Path, args: argparse.Namespace, files: Path) -> dict[str, object]:
    gang = {"instances": 2, "threads": 1}
    decode = {**gang, "prefill_tokens_max": args.ride}
    gangs = {"elastic": gang} if args.elastic else {"prefill": gang, "decode": decode}
    policy = {"scheduling": {"policy": "chunked_prefill"}} if args.elastic else {}
    kept: dict[str, object] = {"enabled": True}
    if args.restart:
        kept["files"] = {"path": str(files)}
    return {"model": str(model), "served_model_name": "m", **gangs, **policy, "kv_reuse": kept}


def _measure(
    client: httpx.Client,
    tokens: int,
    args: argparse.Namespace,
    restart: Callable[[], float] | None,
) -> dict[str, object]:
    first: list[float] = []
    second: list[float] = []
    without: list[float] = []
    restarted: list[float] = []
    cached = 0
    for round_ in range(args.rounds + 1):
        prompt = _numbers(tokens, seed=round_)
        after = _next(prompt, args.new, round_)
        before = _saved(client) if restart else 0
        turns = [_ask(client, prompt, salt="conversation")]
        if restart:
            _wait_saved(client, before + tokens // BLOCK_TOKENS * BLOCK_TOKENS)
            restarted.append(restart())
        turns += [
            _ask(client, after, salt="conversation"),
            _ask(client, after, salt=f"another {round_}"),
        ]
        if round_:  # the first round warms the server up
            for times, turn in zip((first, second, without), turns, strict=True):
                times.append(turn.ttft_s)
            cached = (turns[1].usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "tokens": tokens,
        "new": args.new,
        "cached": cached,
        "first_s": statistics.median(first),
        "second_s": statistics.median(second),
        "share": statistics.median(b / a for a, b in zip(first, second, strict=True)),
        "without": statistics.median(b / a for a, b in zip(first, without, strict=True)),
        **({"restarted_s": statistics.median(restarted)} if restarted else {}),
        "samples": {"first": first, "second": second, "without": without},
    }


def _restart(client: httpx.Client, gang: str) -> float:
    """Kill all ranks of a gang; return the time until others serve."""
    killed, began = running(gang), time.monotonic()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)

    def serves() -> bool:
        alive = running(gang)
        others = len(alive) == len(killed) and alive.isdisjoint(killed)
        return others and client.get("/health").status_code == 200

    _wait(serves, f"{gang} does not come back")
    return time.monotonic() - began


def _saved(client: httpx.Client) -> float:
    """Return how many tokens were written to files, once no more are being written."""
    before, now = -1.0, _saved_so_far(client)
    while now > before:
        time.sleep(QUIET_S)
        before, now = now, _saved_so_far(client)
    return now


def _wait_saved(client: httpx.Client, tokens: float) -> None:
    """Wait until so many tokens were written."""
    _wait(lambda: _saved_so_far(client) >= tokens, "KV is not written")


def _saved_so_far(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    name = "csps:kv_saved_tokens_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def _wait(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + READY_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.05)


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
