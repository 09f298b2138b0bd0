"""The command `csps plan`: find the best attention configuration for an objective, and say why.

It simulates the configurations only, so the hardware need not exist.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.configurator.regressors.samples import Setting
from csps.configurator.search.search import (
    Found,
    SearchProblem,
    SearchResult,
    compared,
    enumerated,
    exhaustive,
    with_rings,
)
from csps.configurator.search.space import STEP, ImportanceScoring, LayerGroups, Loss, Space
from csps.loadgen.planner.hardware_file import HARDWARE, load_group
from csps.protocols.attention.csa import CsaSettings, ratios_text
from csps.protocols.attention.plan import Objective
from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import Topology

MANY = 16
"""Instances from which SP-TP and finer steps are left out, because simulation takes minutes."""
ROW = "{:<10}{:<11}{:>6}  {:<18}{:<10}{:<14}{:>12}{:>8}{}"
BEYOND = " *"
"""Mark of a loss that was predicted for a longer prompt than any measured one."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 1 if no configuration meets the bounds."""
    arguments = _arguments(argv)
    group = load_group(arguments.cluster, instances=arguments.instances)
    question = SearchProblem(
        group=group, tokens=_tokens(arguments, group), objective=_asked(arguments)
    )
    model = None if arguments.accuracy is None else AccuracyModel.load(arguments.accuracy, None)
    search = exhaustive if arguments.exhaustive else enumerated
    loss = _loss(model, question)
    answer = with_rings(question, search(question, _space(group, model), loss))
    by_hand = compared(question, _by_hand(arguments), _predicted(model, question))
    for line in _lines(question, answer, by_hand, model, arguments):
        print(line)
    return 0 if answer.met else 1


def _by_hand(arguments: argparse.Namespace) -> list[CsaSettings]:
    """Return the configuration that the command line fixes, if any."""
    if arguments.drop_ratio is None:
        return []
    return [
        CsaSettings(
            levels=arguments.levels,
            drop_ratios=tuple((ratio,) for ratio in arguments.drop_ratio),
            strategy="ntp",
            importance_layer=arguments.importance_layer,
            importance_window=arguments.importance_window,
        )
    ]


def _loss(model: AccuracyModel | None, question: SearchProblem) -> Loss:
    """Return a loss with support; without measurements only exact attention counts as lossless."""
    if model is not None:
        return model.of_group(
            question.group.locations, layers=question.group.shape.layers, tokens=question.tokens
        )
    return _unknown


def _predicted(model: AccuracyModel | None, question: SearchProblem) -> Loss:
    """Return the regressor's prediction, also without support from measurements."""
    if model is None:
        return _unknown
    group, tokens = question.group, question.tokens
    return lambda configurations: model.loss(
        [
            Setting(
                tokens=tokens,
                locations=group.locations,
                layers=group.shape.layers,
                csa=configuration,
            )
            for configuration in configurations
        ]
    ).tolist()


def _unknown(configurations: Sequence[CsaSettings]) -> list[float]:
    return [0.0 if configuration.lossless else 1.0 for configuration in configurations]


def _space(group: SimulatedGroup, model: AccuracyModel | None) -> Space:
    layers = group.shape.layers
    groups = LayerGroups.alike(layers) if model is None else model.groups_of(layers)
    scoring = (ImportanceScoring("same", 64), ImportanceScoring("previous", 64))
    if group.members < MANY:
        # Ratios of all layer groups are combined, so more of them need larger steps.
        step = STEP if len(groups.members) == 1 else 5 * STEP
        return Space(groups=groups, scoring=scoring, step=step)
    return Space(
        groups=groups,
        scoring=scoring,
        step=5 * STEP,
        micro_partitions=((4, 8, 16), (1, 4), (1, 2)),
        strategies=("ntp",),
    )


def _asked(arguments: argparse.Namespace) -> Objective:
    return Objective(
        kind=arguments.objective,
        max_accuracy_loss=arguments.max_accuracy_loss,
        max_ttft_ms=arguments.max_ttft_ms,
    )


def _tokens(arguments: argparse.Namespace, group: SimulatedGroup) -> int:
    if arguments.length < group.members:
        raise ConfigError(f"--length {arguments.length}: at least one token for each instance")
    tokens: int = arguments.length
    return tokens


# --- what is printed ---------------------------------------------------------------------------


def _lines(
    question: SearchProblem,
    answer: SearchResult,
    by_hand: Sequence[Found],
    model: AccuracyModel | None,
    arguments: argparse.Namespace,
) -> Iterator[str]:
    group = question.group
    topology = Topology.of(group.locations)
    yield (
        f"{question.tokens} tokens on {group.members} instances of {group.tp}, "
        f"{_counted(len(topology.servers), 'server')}, {_counted(len(topology.racks), 'rack')}; "
        f"{_goal(question)}"
    )
    yield ""
    yield ROW.format(
        "", "strategy", "levels", "drop ratio", "M", "scored_by by", "TTFT", "loss", ""
    )
    beyond = model is not None and question.tokens > model.longest
    yield _row("chosen" if answer.met else "nearest", answer.best, beyond)
    shown = islice(_different(answer), arguments.runners_up)
    for place, found in enumerate(shown, start=2):
        yield _row(str(place), found, beyond)
    for found in by_hand:
        yield _row("by hand", found, beyond)
    yield ""
    yield from _why(question.tokens, answer, model)


def _different(answer: SearchResult) -> Iterator[Found]:
    """Yield runners-up that differ from earlier ones in more than micro-partitions."""
    seen = {_alike(answer.best)}
    for found in answer.runners_up:
        if (kind := _alike(found)) not in seen:
            seen.add(kind)
            yield found


def _alike(found: Found) -> tuple[object, ...]:
    settings = found.settings
    scored_by = (
        (settings.importance_layer, settings.importance_window) if not settings.lossless else ()
    )
    return (
        found.ring,
        settings.strategy,
        settings.levels,
        settings.pipelined,
        settings.drop_ratios,
        scored_by,
    )


def _row(name: str, found: Found, beyond: bool) -> str:
    """Return a table row of a configuration.

    Args:
        beyond: whether the prompt is longer than any whose loss was measured.
    """
    settings = found.settings
    micro = (
        "-"
        if not settings.pipelined
        else " ".join(
            dict.fromkeys(
                ",".join(map(str, of_layer)) for of_layer in settings.micro_partitions or ((4,),)
            )
        )
    )
    scored_by = (
        "-" if settings.lossless else f"{settings.importance_layer}, {settings.importance_window}"
    )
    return ROW.format(
        name,
        _engine_name(found),
        settings.levels or "-",
        "-" if settings.lossless else ratios_text(settings.drop_ratios),
        micro,
        scored_by,
        f"{found.seconds * 1000:.1f} ms",
        f"{found.loss:.1%}",
        BEYOND if beyond and not settings.lossless else "",
    )


def _engine_name(found: Found) -> str:
    settings = found.settings
    if found.ring is not None:
        return found.ring
    if settings.strategy == "tp":
        return "sp_tp"
    if not settings.lossless:
        return "csa"
    return "levels" if settings.pipelined else "ulysses"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _goal(question: SearchProblem) -> str:
    objective = question.objective
    goal = "least TTFT" if objective.kind == "ttft" else "least loss of accuracy"
    bounds = f", loss of accuracy up to {question.most_loss:.1%}"
    if objective.max_ttft_ms is not None:
        bounds += f", TTFT up to {objective.max_ttft_ms:g} ms"
    return goal + bounds


def _why(tokens: int, answer: SearchResult, model: AccuracyModel | None) -> Iterator[str]:
    if answer.met:
        yield f"Nothing else of {answer.compared} configurations is better within the bounds."
    else:
        yield (
            f"None of {answer.compared} configurations keeps the bounds; this one comes nearest."
        )
    exact_options = [
        prediction
        for prediction in (answer.best, *answer.runners_up)
        if _engine_name(prediction) == "ulysses"
    ]
    for exact in exact_options:
        times = exact.seconds / answer.best.seconds
        yield f"Exact attention that is not cut would take {times:.2f} times as long."
    if model is None:
        yield (
            "No accuracy was measured for this model (--accuracy): only what drops nothing is "
            "known to lose nothing."
        )
    else:
        held_out = model.description.held_out
        yield (
            f"Losses by a regressor of {model.description.samples} measurements, held_out-out mean "
            f"error {held_out['mean_absolute_error']:.3f}."
        )
        longest = model.longest
        if tokens > longest:
            yield (
                f"{BEYOND.strip()} No prompt longer than {longest} tokens was measured: these "
                f"losses are what is known of {longest} tokens, and were never seen at "
                f"{tokens}. Only what drops nothing is known to lose nothing."
            )
    yield "Times by the pipeline simulator, without queueing."


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    names = ", ".join(sorted(path.stem for path in HARDWARE.glob("*.yaml")))
    parser = CommandParser(
        prog="csps plan",
        description="Which configuration of attention is best for a prompt, and why. Nothing is "
        "run: the hardware need not be here.",
    )
    parser.add_argument("--length", type=int, required=True, help="tokens of the prompt")
    parser.add_argument(
        "--objective",
        choices=("ttft", "accuracy"),
        default="ttft",
        help="what is best: the least time to the first token (ttft), or loss",
    )
    parser.add_argument("--max-accuracy-loss", type=float, help="share, 0 to 1")
    parser.add_argument("--max-ttft-ms", type=float, help="milliseconds, without queueing")
    parser.add_argument("--cluster", required=True, help=f"a file, or one of: {names}")
    parser.add_argument("--instances", type=int, help="so many of them; all, if not given")
    parser.add_argument(
        "--accuracy", type=Path, metavar="FOLDER", help="regressor of the loss of accuracy"
    )
    parser.add_argument("--runners-up", type=int, default=5, help="so many (%(default)s)")
    parser.add_argument(
        "--drop-ratio",
        type=float,
        nargs="+",
        metavar="P",
        help="also show SP-NTP with these ratios by layer, as a request may fix them",
    )
    parser.add_argument("--levels", type=int, help="with --drop-ratio")
    parser.add_argument(
        "--importance-layer",
        choices=("same", "previous"),
        default="same",
        help="layer that scores importance, with --drop-ratio (same)",
    )
    parser.add_argument(
        "--importance-window",
        type=int,
        default=64,
        help="last queries that score importance; 0: all (64)",
    )
    parser.add_argument(
        "--exhaustive", action="store_true", help="look at everything, which takes longer"
    )
    return parser.parse_args(argv)
