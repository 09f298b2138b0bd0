"""`csps eval`: accuracy on facts hidden in long text, over a depth x length grid.

In this process, with exact attention, or through a deployed OpenAI-compatible server (greedy
``/v1/completions``). The prompts are those of `csps.models.needle_prompts`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import torch

from csps.models.needle_prompts.questions import KINDS
from csps.services.evaluation.cases import Evaluation
from csps.services.evaluation.heat_map import plot
from csps.services.evaluation.local_answerer import LocalAnswerer
from csps.services.evaluation.local_model import LocalModel
from csps.services.evaluation.scores import evaluate, summary
from csps.services.evaluation.sensitivity import sensitivity
from csps.services.evaluation.server_answerer import ServerAnswerer
from csps.services.settings import shipped_models

DEFAULT_MODEL = shipped_models() / "needle"


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit status. `argv` instead of the process's own arguments."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    evaluation = Evaluation(
        kinds=tuple(arguments.kinds),
        lengths=tuple(arguments.lengths),
        questions=arguments.questions,
        needles=arguments.needles,
        share=arguments.share,
        seed=arguments.seed,
    )

    def report(line: str) -> None:
        print(line, flush=True)

    try:
        output = _measure(arguments, evaluation, report)
    except httpx.HTTPError as error:
        print(f"csps eval: {arguments.base_url}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        arguments.json.write_text(json.dumps(output, indent=1) + "\n")
    if arguments.plot:
        plot(output["results"], arguments.plot)
    return 0


def _measure(
    arguments: argparse.Namespace, evaluation: Evaluation, report: Callable[[str], None]
) -> dict[str, Any]:
    """What ``--json`` writes."""
    output: dict[str, Any] = {"evaluation": asdict(evaluation)}
    if arguments.base_url:
        server = ServerAnswerer.at(
            arguments.base_url, model=arguments.served_model, concurrency=arguments.concurrency
        )
        results = evaluate(evaluation, server, report)
        return output | {"model": server.model, "results": summary(results)}
    model = LocalModel.load(arguments.model)
    results = evaluate(evaluation, LocalAnswerer(model), report)
    output |= {"model": arguments.model.name, "results": summary(results)}
    if arguments.sensitivity:
        output["sensitivity"] = sensitivity(evaluation, model, report)
    return output


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Of the command; exits with a line that says what contradicts what."""
    parser = argparse.ArgumentParser(
        prog="csps eval",
        description="Accuracy on facts hidden in long text, over a depth x length grid.",
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="checkpoint folder")
    parser.add_argument("--base-url", help="ask this server instead, e.g. http://127.0.0.1:8000")
    parser.add_argument("--served-model", help="its name there; default: the first that it lists")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at once to a server")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["single", "multi_key"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--questions", type=int, default=50, help="for each kind and length")
    parser.add_argument("--needles", type=int, default=8, help="facts in a haystack")
    parser.add_argument("--share", type=int, default=1, help="questions to each haystack")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, help="of torch, in this process")
    parser.add_argument(
        "--sensitivity", action="store_true", help="also with needle or filler dropped from the KV"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a heat map here (PNG)")
    arguments = parser.parse_args(argv)
    if arguments.share < 1 or arguments.questions % arguments.share:
        parser.error("--questions must be a multiple of --share")
    if arguments.base_url and arguments.sensitivity:
        parser.error("--sensitivity looks into the KV, so it needs the model in this process")
    if arguments.base_url and arguments.share > 1 and "single" in arguments.kinds:
        parser.error("a server sees all needles of a shared haystack: single needs --share 1")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
