"""Check choices within bounds on the loss with questions that no regressor learned from.

    python benchmarks/kept_bounds.py [--lengths 1024 2048 4096] [--questions 400] [--json FILE]

The included model and its shipped losses are used. For the cost table bucket that each length
begins, whose shortest prompts keep the fewest tokens, and for groups of two to eight instances, the
quickest option within each bound is measured. Questions precede their text, where sparse attention
loses most, in one step and in two; losses are of the kind that loses more. A bound is broken if the
whole 95 % interval is beyond it. One process answers like a group's ranks, so measured times play
no part; choices are based on the pipeline simulator's times.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import report
import torch
import yaml
from configurator_oracle import shipped, trained

from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.plan.predicted_options import PredictedOptions
from csps.configurator.search.space import ImportanceScoring
from csps.loadgen.planner.hardware_file import load_group
from csps.protocols.attention.plan import EXACT, StrategyChoice, StrategyQuestion, parse_option
from csps.protocols.core.topology import GroupShape, Topology
from csps.services.evaluation.local_model import LocalModel
from csps.services.profiling.accuracy.profile import AnswerTally, Branch, Point, answered
from csps.services.profiling.accuracy.questions import NeedleQuestions
from csps.services.settings.settings import shipped_models

BOUNDS = (0.0, 0.01, 0.05)
SHAPES = ("2", "2+2", "4+4")
SEED = 2
"""Seed of the questions, which differs from that of the training questions."""
KINDS = tuple(NeedleQuestions(kind, "first", SEED) for kind in ("multi_key", "two_hop"))


def main() -> int:
    """Measure and publish; return the exit status."""
    arguments = _arguments()
    rows = bounds(arguments)
    dropping = [row for row in rows if row["questions"]]
    summary = {
        "chosen": len(rows),
        "dropping": len(dropping),
        "broken": sum(not row["kept"] for row in dropping),
    }
    result = {"benchmark": "kept bounds", "seed": SEED, "summary": summary}
    report.publish(result, rows, arguments.json)
    return 0


def bounds(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each length, group and bound."""
    accuracy, cluster = shipped(), Path(arguments.cluster)
    options = PredictedOptions(
        answerer=trained(
            [load_group(str(cluster), instances=instances) for instances in (2, 4)], accuracy
        ),
        accuracy=accuracy,
        group_of=partial(_spread, cluster),
    )
    model = LocalModel.load(shipped_models() / "needle")
    rows = []
    for tokens in arguments.lengths:
        chosen = {
            (shape, bound): _chosen(options, shape, tokens, bound)
            for shape in arguments.shapes
            for bound in BOUNDS
        }
        points = list(dict.fromkeys(choice for choice in chosen.values() if choice))
        answers = _answers(model, points, tokens, arguments.questions)
        rows += [
            {"tokens": tokens, "group": shape, "bound": bound, **_row(point, answers, bound)}
            for (shape, bound), point in chosen.items()
        ]
    return rows


def _spread(cluster: Path, places: Sequence[str]) -> SimulatedGroup:
    """Return the cluster's speeds with other servers, each of as many instances."""
    written = yaml.safe_load(cluster.read_text())
    (kind,) = written["servers"]
    shape = GroupShape.of(Topology.of(places).locations, 1)
    written["servers"] = [
        {**kind, "count": len(shape.servers), "instances": shape.servers[0], "tp": shape.tp}
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / cluster.name
        path.write_text(yaml.safe_dump(written))
        return load_group(str(path))


def _chosen(options: PredictedOptions, shape: str, tokens: int, bound: float) -> Point | None:
    """Return the quickest option of a bucket within a bound, or None if it is exact."""
    asked = StrategyQuestion(
        csa=None,
        bounded=True,
        servers=tuple(map(int, shape.split("+"))),
        tp=1,
        tokens=3 << (tokens.bit_length() - 1) >> 1,
    )
    exact = StrategyChoice(strategy=EXACT, reason="")
    offered = options.options(asked, exact)
    within = [option for option in offered if option.loss is not None and option.loss <= bound]
    settings = parse_option(min(within, key=lambda option: option.permille).strategy).csa
    if settings is None or settings.lossless:
        return None
    assert settings.levels is not None
    branch = Branch(
        tokens=tokens,
        group_shape=shape,
        strategy="tp" if settings.strategy == "tp" else "ntp",
        levels=settings.levels,
        scoring=ImportanceScoring(settings.importance_layer, settings.importance_window),
    )
    return Point(branch=branch, drop_ratios=settings.drop_ratios)


@torch.inference_mode()
def _answers(
    model: LocalModel, points: Sequence[Point], tokens: int, questions: int
) -> dict[Point, list[AnswerTally]]:
    """Return the answers of each option to each kind of question."""
    found: dict[Point, list[AnswerTally]] = {point: [] for point in points}
    for kind in KINDS if points else ():
        tallies = {point: AnswerTally() for point in points}
        rounds = (kind.asked(model, tokens, number) for number in range(kind.rounds))
        for asked in islice(chain.from_iterable(rounds), questions):
            for point, score in answered(model, asked, points).items():
                tallies[point].add(score)
        for point, tally in tallies.items():
            found[point].append(tally)
    return found


def _row(
    point: Point | None, answers: dict[Point, list[AnswerTally]], bound: float
) -> dict[str, Any]:
    if point is None:
        nothing = {"questions": 0, "lost": 0, "low": 0.0, "high": 0.0, "kept": True}
        return {"strategy": "exact", "levels": None, "ratio": 0.0, **nothing}
    worst = max(answers[point], key=lambda option: option.interval)
    low, high = worst.interval
    return {
        "strategy": point.branch.strategy,
        "levels": point.branch.levels,
        "ratio": point.largest,
        "questions": worst.questions,
        "lost": worst.right_exact - worst.right,
        "low": low,
        "high": high,
        "kept": low <= bound,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    here = Path(__file__).with_name("needle-two-servers.yaml")
    parser.add_argument("--cluster", default=str(here), help="a file as `csps plan` takes it")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1_024, 2_048, 4_096])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="instances by server")
    parser.add_argument("--questions", type=int, default=400, help="of each kind")
    return report.with_json_option(parser).parse_args()


if __name__ == "__main__":
    sys.exit(main())
