"""Run `csps eval`: accuracy on facts hidden in long text, over a depth x length grid.

It asks a model in this process, with exact attention, or a deployed OpenAI-compatible server
(greedy ``/v1/completions``). A server can be asked in several ways side by side: exactly and
sparsely. The prompts are those of `csps.models.needle_prompts`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch

from csps.models.needle_prompts.filler import FILLER_KINDS, filler_of
from csps.models.needle_prompts.haystack import KINDS, ORDERS
from csps.models.needle_prompts.words import Count
from csps.models.tokenizers.tokenizer import Tokenizer
from csps.protocols.core.command_line import CommandParser
from csps.services.evaluation.answerers import LocalAnswerer, ServerAnswerer, client_of
from csps.services.evaluation.cases import Evaluation
from csps.services.evaluation.local_model import LocalModel
from csps.services.evaluation.scores import Answered, evaluate, sensitivity, summary
from csps.services.planning.memory import one_line
from csps.services.settings.settings import shipped_models

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage


def plot(summaries: dict[str, Any], path: Path) -> None:
    """Draw a heat map of accuracy, one panel for each kind: depth down, length to the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1,
        len(summaries),
        figsize=(2 + 4 * len(summaries), 4),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, (kind, result) in zip(axes[0], summaries.items(), strict=True):
        image = _draw_panel(axis, result["accuracy_by_length_and_depth"])
        axis.set_title(kind)
    axes[0][0].set_ylabel("depth of the needle")
    figure.colorbar(image, ax=axes, label="accuracy")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_panel(axis: Axes, grid: dict[str, list[float | None]]) -> AxesImage:
    """Draw accuracy by length and depth; an empty cell had no question."""
    rows = list(zip(*grid.values(), strict=True))
    cells = [[float("nan") if value is None else value for value in row] for row in rows]
    image = axis.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    axis.set_xticks(range(len(grid)), [f"{int(length) / 1024:g}K" for length in grid])
    step = 100 / len(rows)
    labels = [f"{step * i:.0f}-{step * (i + 1):.0f} %" for i in range(len(rows))]
    axis.set_yticks(range(len(rows)), labels)
    axis.set_xlabel("prompt tokens")
    for y, row in enumerate(rows):
        for x, value in enumerate(row):
            if value is not None:
                axis.text(x, y, f"{100 * value:.0f}", ha="center", va="center", fontsize=7)
    return image


DEFAULT_MODEL = shipped_models() / "needle"
REAL_FILLERS = ("english", "code", "bytes")
"""Kinds whose words are not tokens, so that these must be counted; files are such kinds too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; `argv` replaces the process's own arguments."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    evaluation = Evaluation(
        kinds=tuple(arguments.kinds),
        lengths=tuple(arguments.lengths),
        questions=arguments.questions,
        needles=arguments.needles,
        share=arguments.share,
        filler=arguments.filler,
        order=arguments.question,
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
    """Return what ``--json`` writes."""
    if arguments.base_url:
        return _measure_server(arguments, evaluation, report)
    with one_line("--model"):
        model = LocalModel.load(
            arguments.model,
            getattr(torch, arguments.dtype),
            rounds_kv=arguments.kv_dtype == "int8",
            fp8=arguments.weight_dtype == "fp8",
        )
    count = model.count if _is_counted(evaluation.filler) else None
    output = {
        "evaluation": asdict(evaluation),
        "model": arguments.model.name,
        **_summaries(evaluate(evaluation, {"": LocalAnswerer(model)}, report, count)),
    }
    if arguments.sensitivity:
        output["sensitivity"] = sensitivity(evaluation, model, report, count)
    return output


def _measure_server(
    arguments: argparse.Namespace, evaluation: Evaluation, report: Callable[[str], None]
) -> dict[str, Any]:
    with client_of(arguments.base_url, arguments.api_key) as client:
        servers = {
            json.dumps(body) if body else "": ServerAnswerer(
                client,
                model=arguments.served_model,
                concurrency=arguments.concurrency,
                extra_body=body,
            )
            for body in arguments.extra_body or [{}]
        }
        count = _counter(arguments.model) if _is_counted(evaluation.filler) else None
        answered = evaluate(evaluation, servers, report, count)
    model = next(iter(servers.values())).model
    return {"evaluation": asdict(evaluation), "model": model, **_summaries(answered)}


def _is_counted(filler: str) -> bool:
    return filler in REAL_FILLERS or filler not in FILLER_KINDS


def _counter(folder: Path) -> Count:
    """Return a function that counts the tokens of a text with a checkpoint's tokenizer."""
    tokenizer = Tokenizer(folder)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _summaries(answered: Mapping[str, Sequence[Answered]]) -> dict[str, Any]:
    """Return ``results`` of the first way to ask, and ``beside`` it those of the others by their
    JSON."""
    summaries = {name: summary(results) for name, results in answered.items()}
    first, *others = summaries
    beside = {name: summaries[name] for name in others}
    named = {"extra_body": json.loads(first)} if first else {}
    return {**named, "results": summaries[first], **({"beside": beside} if beside else {})}


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; exit with a line that names a contradiction."""
    parser = CommandParser(
        prog="csps eval",
        description="Accuracy on facts hidden in long text, over a depth x length grid.",
    )
    _add_prompts(parser)
    _add_models(parser)
    parser.add_argument(
        "--sensitivity", action="store_true", help="also with needle or filler dropped from the KV"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a heat map here (PNG)")
    arguments = parser.parse_args(argv)
    _refuse_contradictions(parser, arguments)
    return arguments


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=["single", "multi_key"],
        help="kinds of questions (single multi_key)",
    )
    prompts.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        default=[1024, 2048, 4096, 8192],
        help="tokens of the prompts (1024 to 8192)",
    )
    prompts.add_argument(
        "--questions", type=int, default=50, help="questions for each kind and length"
    )
    prompts.add_argument("--needles", type=int, default=8, help="facts in a haystack")
    prompts.add_argument("--share", type=int, default=1, help="questions to each haystack")
    prompts.add_argument(
        "--filler",
        metavar="KIND|FILE",
        default="sentences",
        help=f"text that hides the facts: {', '.join(FILLER_KINDS)}, or a text file",
    )
    prompts.add_argument(
        "--question",
        choices=ORDERS,
        default="last",
        help="position of the question: before or behind the text",
    )
    prompts.add_argument("--seed", type=int, default=1, help="seed of facts and texts (1)")


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("model")
    models.add_argument(
        "--model",
        type=Path,
        default=DEFAULT_MODEL,
        help="checkpoint folder; with --base-url only its tokenizer is used, to count",
    )
    models.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s"
    )
    models.add_argument(
        "--kv-dtype", choices=("auto", "int8"), default="auto", help="form of KV (%(default)s)"
    )
    models.add_argument(
        "--weight-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="form of feed-forward weights (%(default)s)",
    )
    models.add_argument("--threads", type=int, help="threads of torch, in this process")
    models.add_argument("--base-url", help="ask this server instead, e.g. http://127.0.0.1:8000")
    models.add_argument("--served-model", help="its name there; default: the first that it lists")
    models.add_argument("--concurrency", type=int, default=1, help="requests at once to a server")
    models.add_argument(
        "--api-key",
        default=os.environ.get("OPENAI_API_KEY"),
        help="for the server; default: OPENAI_API_KEY of the environment",
    )
    models.add_argument(
        "--extra-body",
        type=_json_object,
        action="append",
        metavar="JSON",
        help="""further fields of each request, such as '{"csps": {"attention": "exact"}}'; """
        "several times: each question is asked in each way, and the results stand side by side",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _refuse_contradictions(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.share < 1 or arguments.questions % arguments.share:
        parser.error("--questions must be a multiple of --share")
    if arguments.base_url and arguments.sensitivity:
        parser.error("--sensitivity changes the KV, so it needs the model in this process")
    for option in ("kv_dtype", "weight_dtype"):
        if arguments.base_url and getattr(arguments, option) != "auto":
            parser.error(
                f"--{option.replace('_', '-')} is for the model in this process: a server's "
                f"setting {option} decides there"
            )
    if arguments.base_url and arguments.share > 1 and "single" in arguments.kinds:
        parser.error("a server sees all needles of a shared haystack: single needs --share 1")
    if arguments.extra_body and not arguments.base_url:
        parser.error("--extra-body is sent to a server: it needs --base-url")
    if arguments.sensitivity and arguments.question == "first":
        parser.error("--sensitivity would drop the question with the filler: ask last")
    try:
        filler_of(arguments.filler)
    except (OSError, ValueError) as error:
        parser.error(
            f"--filler {arguments.filler}: not a kind ({', '.join(FILLER_KINDS)}), {error}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
