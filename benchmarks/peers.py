"""TTFT of the deployed server against `transformers serve`: same checkpoint, same cores, one run.

    python benchmarks/peers.py [--tokens 16384] [--rounds 5] [--json FILE]

Both servers stay up and take turns, so that each has the two cores to itself while it is measured,
and a slow moment of the machine affects both. Ours has two prefill ranks of one thread, theirs one
process of two threads. Every prompt is new, so that no prefix cache helps. `ratio` is their median
TTFT over ours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import httpx
import report
import wide_checkpoint
from deployed import deployed, process
from streaming_client import stream

PEER_PORT = 8124


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = wide_checkpoint.make(Path(folder) / "wide")
        with deployed(_settings(model)) as ours, _transformers(model) as theirs:
            rows = [
                _measure(tokens, ours, theirs, str(model), args.rounds) for tokens in args.tokens
            ]
    report.publish({"benchmark": "peers", "peer": "transformers serve"}, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16_384])
    parser.add_argument("--rounds", type=int, default=5)
    return report.with_json_option(parser).parse_args()


def _settings(model: Path) -> dict[str, object]:
    return {
        "model": str(model),
        "served_model_name": "wide",
        "prefill": {"instances": 2, "threads": 1},
        "decode": {"instances": 2, "threads": 1},
    }


def _transformers(model: Path):  # type: ignore[no-untyped-def]
    command = [str(Path(sys.executable).parent / "transformers"), "serve", "--host", "127.0.0.1"]
    command += ["--port", str(PEER_PORT), "--device", "cpu", "--dtype", "float32", str(model)]
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    return process(command, ready_url=f"http://127.0.0.1:{PEER_PORT}/health", **environment)


def _measure(tokens: int, ours: str, theirs: str, model: str, rounds: int) -> dict[str, object]:
    peer = f"http://127.0.0.1:{PEER_PORT}"
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    with httpx.Client(base_url=ours) as our_client, httpx.Client(base_url=peer) as peer_client:
        for round_ in range(rounds + 1):
            text = wide_checkpoint.prompt(tokens, seed=round_)
            for name, client, served in (
                ("ours", our_client, "wide"),
                ("theirs", peer_client, model),
            ):
                body = {
                    "model": served,
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": 4,
                    "temperature": 0,
                }
                answer = stream(client, "/v1/chat/completions", body)
                if round_:  # the first round warms both up
                    times[name].append(answer.ttft_s)
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    return {
        "tokens": tokens,
        "ours_ttft_s": medians["ours"],
        "transformers_ttft_s": medians["theirs"],
        "ratio": medians["theirs"] / medians["ours"],
        "samples": times,
    }


if __name__ == "__main__":
    main()
