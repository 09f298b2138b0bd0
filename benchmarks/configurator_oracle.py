"""The configurator against an exhaustive search: `configurator.py oracle` and `starts`.

Regressors learn from the lengths of `csps train`. They are asked for the lengths of the cost
table's buckets, which lie between, and for unseen bounds. Times come from the pipeline simulator.
For least TTFT, `worse` is the answer's time over the best of an exhaustive search of the same
space, less one. For least loss it is the difference of the losses. Losses are those shipped for the
included model, or planted: they grow with the drop ratios, so that bounds bind.

`starts` asks what the regressors add. The same local search starts at their prediction, at zeros,
and at the best configuration of the nearest learned problem. The exhaustive search then tries
ratios in steps of 0.02 and all M of App. B. A cell is an output of an objective's regressors: its
errors are those of the starts themselves, before the local search.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from report import Section

from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.plan.predicted_options import DirectAnswerer, answered_space, exact_seconds
from csps.configurator.regressors.accuracy import AccuracyModel, shipped_accuracy
from csps.configurator.regressors.direct import (
    DirectModel,
    DirectSample,
    Predicted,
    direct_samples,
    fingerprint,
    output_names,
    outputs_of,
    problem_features,
    simulated,
    train_direct,
)
from csps.configurator.regressors.samples import eligible_pairs
from csps.configurator.search.search import Found, SearchProblem, SearchResult, chosen, exhaustive
from csps.configurator.search.space import LOSSES, LayerGroups, Loss, Space
from csps.loadgen.planner.hardware_file import load_group
from csps.models.checkpoints.checkpoint import weights_digest
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import Objective, ObjectiveKind
from csps.protocols.core.topology import Topology
from csps.services.measured.attention_options import OBJECTIVE_KINDS
from csps.services.settings.settings import shipped_models

LEARNED = tuple(1 << exponent for exponent in range(10, 18))
ASKED = tuple(3 << exponent >> 1 for exponent in range(10, 17))
"""Lengths of the cost table's buckets."""
HELD_OUT_LOSSES = (0.003, 0.015, 0.03, 0.07)
HELD_OUT_TIMES = (0.45, 0.65, 0.85, 1.2)


def oracle(arguments: argparse.Namespace) -> Section:
    """Answer held-out questions and compare with the exhaustive search."""
    accuracy = Planted() if arguments.planted else shipped()
    groups = [load_group(arguments.cluster, instances=instance) for instance in arguments.instances]
    answerer = trained(groups, accuracy)
    rows = []
    for group in groups:
        for tokens in arguments.lengths or ASKED:
            loss = _loss(accuracy, group, tokens)
            whatever = SearchProblem(
                group=group, tokens=tokens, objective=Objective(max_accuracy_loss=1.0)
            )
            everything = exhaustive(whatever, answerer.space, loss)
            found = [everything.best, *everything.runners_up]
            rows += [
                _compared(answerer, request, loss, found) for request in _held_out(group, tokens)
            ]
    losses = "planted" if arguments.planted else "shipped"
    return rows, {"losses": losses, "summary": [_summary(rows, kind) for kind in OBJECTIVE_KINDS]}


class Planted:
    """Planted losses in place of F_Ad."""

    def of_group(self, locations: Sequence[str], *, layers: int, tokens: int) -> Loss:
        """Return losses that are greater if the previous layer scores importance."""
        share = eligible_pairs(locations, len(Topology.of(locations).granularities))

        def loss(settings: CsaSettings) -> float:
            if settings.lossless:
                return 0.0
            worse = 1.0 if settings.importance_layer == "same" else 4.0
            return min(1.0, 0.3 * worse * share * max(map(max, settings.drop_ratios)) ** 3)

        return lambda configurations: list(map(loss, configurations))


def shipped() -> AccuracyModel:
    """Return F_Ad of the included model."""
    found = shipped_accuracy(weights_digest(shipped_models() / "needle"))
    assert found is not None, "nothing ships of the included model"
    return found


def trained(groups: Sequence[SimulatedGroup], accuracy: AccuracyModel | Planted) -> DirectAnswerer:
    """Return the answerer trained for groups of these kinds."""
    space = answered_space(LayerGroups.alike(groups[0].shape.layers))
    learned = _learned(groups, accuracy, space)
    models = {kind: _trained(kind, samples) for kind, samples in learned.items()}
    return DirectAnswerer(space=space, models=models)


def _learned(
    groups: Sequence[SimulatedGroup], accuracy: AccuracyModel | Planted, space: Space
) -> dict[ObjectiveKind, list[DirectSample]]:
    prompts = [
        simulated(group, tokens, space, _loss(accuracy, group, tokens))
        for group in groups
        for tokens in LEARNED
    ]
    return {kind: direct_samples(prompts, kind, space) for kind in OBJECTIVE_KINDS}


def _trained(kind: ObjectiveKind, samples: Sequence[DirectSample]) -> DirectModel:
    return train_direct(kind, samples, {}, training_set=fingerprint(samples))


# --- what the regressors add --------------------------------------------------------------------


@dataclass(frozen=True)
class Nearest(DirectModel):
    """In place of regressors: the best configuration of the nearest learned problem."""

    samples: Sequence[DirectSample]

    def predict(self, problem: SearchProblem, exact_seconds: float) -> Predicted:
        """Return the outputs of the sample with the nearest features, each in its deviations."""
        learned = np.array([sample.features for sample in self.samples])
        deviations = learned.std(axis=0)
        asked = np.array(problem_features(problem, exact_seconds))
        apart = (learned - asked) / np.where(deviations > 0, deviations, 1.0)
        return Predicted.of(self.samples[int((apart**2).sum(axis=1).argmin())].outputs)


@dataclass(frozen=True)
class Zeros(DirectModel):
    """In place of regressors: SP-NTP that drops nothing, M of 1."""

    outputs: int

    def predict(self, problem: SearchProblem, exact_seconds: float) -> Predicted:
        """Return zeros."""
        return Predicted.of([0.0] * self.outputs)


def starts(arguments: argparse.Namespace) -> Section:
    """Answer held-out questions from each start and compare with a search of a fine grid."""
    accuracy = Planted() if arguments.planted else shipped()
    groups = [load_group(arguments.cluster, instances=instance) for instance in arguments.instances]
    layers = LayerGroups.alike(groups[0].shape.layers)
    space = answered_space(layers)
    fine = Space(groups=layers, scoring=space.scoring)
    models = _starts(_learned(groups, accuracy, space))
    rows = []
    for group in groups:
        for tokens in arguments.lengths or ASKED:
            loss = _loss(accuracy, group, tokens)
            whatever = SearchProblem(
                group=group, tokens=tokens, objective=Objective(max_accuracy_loss=1.0)
            )
            everything = exhaustive(whatever, fine, loss)
            found = [everything.best, *everything.runners_up]
            for question in _held_out(group, tokens):
                best = chosen(question, found)
                rows += [
                    {
                        "start": start,
                        **_compared(DirectAnswerer(space=space, models=of), question, loss, found),
                        "errors": _errors(of[question.objective.kind], question, best, layers),
                    }
                    for start, of in models.items()
                ]
    losses = "planted" if arguments.planted else "shipped"
    return rows, {"losses": losses, "cells": _cells(rows), "summary": _by_start(rows)}


def _starts(
    learned: Mapping[ObjectiveKind, Sequence[DirectSample]],
) -> dict[str, dict[ObjectiveKind, DirectModel]]:
    trained = {kind: _trained(kind, samples) for kind, samples in learned.items()}
    return {
        "regressors": trained,
        "nearest": {
            kind: Nearest(model.description, {}, learned[kind]) for kind, model in trained.items()
        },
        "zeros": {
            kind: Zeros(model.description, {}, len(learned[kind][0].outputs))
            for kind, model in trained.items()
        },
    }


def _errors(
    model: DirectModel, question: SearchProblem, best: SearchResult, groups: LayerGroups
) -> dict[str, float] | None:
    """Return the error of each output against the best configuration, if that meets the bound."""
    if not best.met:
        return None
    said = model.predict(question, exact_seconds(question.group, question.tokens))
    outputs = (said.tensor_parallel, said.whole, said.levels, *said.ratios, *np.log2(said.micro))
    right = outputs_of(best.best.settings, groups, question)
    names = output_names(len(groups.members))
    return {
        name: abs(float(output) - truth)
        for name, output, truth in zip(names, outputs, right, strict=True)
    }


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean error of every output of both objectives, by start."""
    cells: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        for name, error in (row["errors"] or {}).items():
            of_start = cells.setdefault((row["objective"], name), {})
            of_start.setdefault(row["start"], []).append(error)
    return [
        {
            "objective": kind,
            "output": name,
            "questions": len(next(iter(of_start.values()))),
            **{start: statistics.fmean(errors) for start, errors in of_start.items()},
        }
        for (kind, name), of_start in cells.items()
    ]


def _by_start(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"start": start, **_summary([row for row in rows if row["start"] == start], kind)}
        for start in dict.fromkeys(row["start"] for row in rows)
        for kind in OBJECTIVE_KINDS
    ]


# --- questions ----------------------------------------------------------------------------------


def _held_out(group: SimulatedGroup, tokens: int) -> Iterator[SearchProblem]:
    exact_ms = 1000 * exact_seconds(group, tokens)
    for bound in HELD_OUT_LOSSES:
        objective = Objective(max_accuracy_loss=bound)
        yield SearchProblem(group=group, tokens=tokens, objective=objective)
    for share in HELD_OUT_TIMES:
        objective = Objective(
            kind="accuracy", max_ttft_ms=share * exact_ms, max_accuracy_loss=LOSSES[-1]
        )
        yield SearchProblem(group=group, tokens=tokens, objective=objective)


def _compared(
    answerer: DirectAnswerer, question: SearchProblem, loss: Loss, everything: Sequence[Found]
) -> dict[str, Any]:
    begin = time.process_time()
    answer = answerer.answer(question, loss)
    took_s = time.process_time() - begin
    best = chosen(question, everything)
    return {
        "instances": question.group.members,
        "tokens": question.tokens,
        "objective": question.objective.kind,
        "bound": question.objective.max_ttft_ms or question.most_loss,
        "met": answer.met,
        "oracle_met": best.met,
        "worse": _worse(question.objective.kind, answer, best),
        "compared": answer.compared,
        "of": best.compared,
        "cpu_s": took_s,
    }


def _worse(kind: ObjectiveKind, answer: SearchResult, best: SearchResult) -> float | None:
    if not (answer.met and best.met):
        return None
    if kind == "ttft":
        return answer.best.seconds / best.best.seconds - 1
    return answer.best.loss - best.best.loss


def _summary(rows: Sequence[Mapping[str, Any]], kind: ObjectiveKind) -> dict[str, Any]:
    of_kind = [row for row in rows if row["objective"] == kind]
    worse = [row["worse"] for row in of_kind if row["worse"] is not None]
    return {
        "objective": kind,
        "questions": len(of_kind),
        "met_as_the_oracle": sum(row["met"] == row["oracle_met"] for row in of_kind) / len(of_kind),
        "worse_median": statistics.median(worse),
        "worse_p95": float(np.quantile(worse, 0.95)),
        "compared_median": statistics.median(row["compared"] for row in of_kind),
        "cpu_s_median": statistics.median(row["cpu_s"] for row in of_kind),
    }


def _loss(accuracy: AccuracyModel | Planted, group: SimulatedGroup, tokens: int) -> Loss:
    return accuracy.of_group(group.locations, layers=group.shape.layers, tokens=tokens)
