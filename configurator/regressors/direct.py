"""The best configuration at once: regressors of objectives 1 and 2 (CSPS §3.2.6).

From a bound, a prompt's length, the group's shape, phase times (the paper's G) and links (its B) to
N_v, drop ratios and micro-partitions. What they say is a beginning: `answering` makes it feasible.

Where physics says so they are monotone: a wider bound on the loss, or a tighter one on TTFT, never
drops less.

What the regressors of objectives 1 and 2 learn from: answers of the search (CSPS App. B).

Configurations of a group and a length are simulated once, and then judged by every bound.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from statistics import fmean

import lightgbm
import numpy as np

from csps.configurator.model.phase_times import Amounts
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE
from csps.configurator.regressors.samples import eligible_pairs
from csps.configurator.regressors.saved import REPRODUCIBLE, Description, load, save
from csps.configurator.search.search import Found, SearchProblem, admissible, chosen, compared
from csps.configurator.search.space import LOSSES, LayerGroups, Loss, Ratios, Space, objectives
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import Objective, ObjectiveKind
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import MAX_LEVELS, Topology

FEATURES = (
    "bound",
    "log2 tokens",
    "instances",
    "servers",
    "racks",
    "eligible pairs",
    "log2 pair",
    "log2 row",
    "log2 call",
    "log2 qkv",
    "log2 linear",
    "log2 fastest link",
    "log2 slowest link",
    "log2 latency",
)
LEAST = 1e-15
HELD_OUT = 5
FEWEST = 2 * HELD_OUT
ROUNDS = 200
PARAMETERS = {
    "objective": "l2",
    "learning_rate": 0.08,
    "num_leaves": 15,
    "min_data_in_leaf": 3,
    **REPRODUCIBLE,
}


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What regressors say, before anything is made feasible."""

    tensor_parallel: float
    """SP-TP above a half."""
    whole: float
    """Exact SP-NTP, not cut, above a half."""
    levels: float
    ratios: tuple[float, ...]
    """Of level 2, by run of layers."""
    micro: tuple[float, ...]
    """M of levels 1, 2, …"""


@dataclass(frozen=True)
class DirectSample:
    """A question and what the search has found best."""

    features: tuple[float, ...]
    outputs: tuple[float, ...]


@dataclass(frozen=True)
class DirectModel:
    """Regressors of one objective, one for each number that they say."""

    description: Description
    _boosters: Mapping[str, lightgbm.Booster]

    def predict(self, question: SearchProblem, exact_seconds: float) -> Predicted:
        """
        Args:
            exact_seconds: what the prompt takes with exact SP-NTP, not cut.
        """
        asked = np.array([question_features(question, exact_seconds)])
        said = [
            float(np.asarray(booster.predict(asked, num_threads=1))[0])
            for booster in self._boosters.values()
        ]
        runs = len(said) - 3 - MAX_LEVELS
        return Predicted(
            tensor_parallel=said[0],
            whole=said[1],
            levels=said[2],
            ratios=tuple(said[3 : 3 + runs]),
            micro=tuple(2.0**it for it in said[3 + runs :]),
        )

    def save(self, folder: Path) -> None:
        """Write it into a folder."""
        save(folder, self.description, self._boosters)

    @classmethod
    def load(
        cls,
        folder: Path,
        objective: ObjectiveKind,
        runs: int,
        trained_for: Mapping[str, str] | None,
    ) -> DirectModel:
        """From a folder.

        Args:
            runs: of layers that share ratios.
            trained_for: model and machine of this process; None takes whatever is there.

        Raises:
            ConfigError: there is none, or it is of another model or machine.
        """
        description, boosters = load(folder, objective, output_names(runs), trained_for)
        if description.features != FEATURES:
            raise ConfigError(f"{folder} was trained with other features; run `csps train`")
        return cls(description, boosters)


def train_direct(
    objective: ObjectiveKind,
    samples: Sequence[DirectSample],
    trained_for: Mapping[str, str],
    *,
    training_set: str,
) -> DirectModel:
    """Learn from what a search has found; metrics are of a fifth of the samples.

    Raises:
        ConfigError: too few samples to hold some out.
    """
    if len(samples) < FEWEST:
        raise ConfigError(f"{len(samples)} answers of the search; at least {FEWEST} are needed")
    names = output_names(len(samples[0].outputs) - 3 - MAX_LEVELS)
    mixed = [samples[index] for index in np.random.default_rng(0).permutation(len(samples))]
    kept = [it for number, it in enumerate(mixed) if number % HELD_OUT]
    held = mixed[::HELD_OUT]
    trial = _trained(objective, names, kept)
    asked = np.array([it.features for it in held])
    errors = {
        f"mean_absolute_error_{name}": float(
            np.abs(
                np.asarray(trial[name].predict(asked, num_threads=1))
                - np.array([it.outputs[place] for it in held])
            ).mean()
        )
        for place, name in enumerate(names)
    }
    description = Description(
        kind=objective,
        trained_for=dict(trained_for),
        training_set=training_set,
        samples=len(samples),
        features=FEATURES,
        held_out=errors,
    )
    return DirectModel(description, _trained(objective, names, samples))


def sample_of(
    question: SearchProblem, best: Found, exact_seconds: float, groups: LayerGroups
) -> DirectSample:
    """What is learned from one answer of the search."""
    return DirectSample(
        question_features(question, exact_seconds), outputs_of(best.settings, groups, question)
    )


def question_features(question: SearchProblem, exact_seconds: float) -> tuple[float, ...]:
    """In the order of `FEATURES`. A bound on TTFT is relative to exact attention's."""
    group = question.group
    topology = Topology.of(group.locations)
    bound = (
        question.most_loss
        if question.objective.kind == "ttft"
        else min(question.most_seconds / exact_seconds, 10.0)
    )
    return (
        bound,
        log2(question.tokens),
        float(group.members),
        float(len(topology.servers)),
        float(len(topology.racks)),
        eligible_pairs(group.locations, len(topology.granularities)),
        *map(_log, _speeds(group)),
    )


def output_names(runs: int) -> tuple[str, ...]:
    """Of the numbers that are said."""
    return (
        "tensor_parallel",
        "whole",
        "levels",
        *(f"ratio_{run}" for run in range(runs)),
        *(f"log2_micro_{level}" for level in range(1, MAX_LEVELS + 1)),
    )


def outputs_of(
    settings: CsaSettings, groups: LayerGroups, question: SearchProblem
) -> tuple[float, ...]:
    """The numbers of a configuration, in the order of `output_names`."""
    told_apart = len(Topology.of(question.group.locations).granularities)
    levels = min(settings.levels or told_apart, told_apart)
    ratios = run_ratios(settings, groups)
    by_level = settings.micro_partitions[0] if settings.micro_partitions else (1,)
    micro = [by_level[min(level, len(by_level) - 1)] for level in range(MAX_LEVELS)]
    return (
        float(settings.strategy == "tp"),
        float(not settings.pipelined),
        float(levels),
        *(fmean(of_heads) for of_heads in ratios),
        *(log2(count) for count in micro),
    )


def run_ratios(settings: CsaSettings, groups: LayerGroups) -> Ratios:
    """Of level 2, by run of layers."""
    ratios = settings.drop_ratios
    return tuple(ratios[min(run.start, len(ratios) - 1)] for run in groups.runs)


def fingerprint(samples: Sequence[DirectSample]) -> str:
    """SHA-256 of a training set, whatever its order."""
    lines = sorted(json.dumps([sample.features, sample.outputs]) for sample in samples)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _trained(
    objective: ObjectiveKind, names: Sequence[str], samples: Sequence[DirectSample]
) -> dict[str, lightgbm.Booster]:
    asked = np.array([sample.features for sample in samples])
    return {
        name: lightgbm.train(
            {**PARAMETERS, "monotone_constraints": _monotone(objective, name)},
            lightgbm.Dataset(
                asked,
                label=np.array([sample.outputs[place] for sample in samples]),
                params={"feature_pre_filter": False, "verbose": -1},
            ),
            num_boost_round=ROUNDS,
        )
        for place, name in enumerate(names)
    }


def _monotone(objective: ObjectiveKind, name: str) -> list[int]:
    """More loss may be spent on dropping more; more time needs less of it."""
    of_bound = 0
    if name.startswith("ratio"):
        of_bound = 1 if objective == "ttft" else -1
    return [of_bound, *(0 for _ in FEATURES[1:])]


def _speeds(group: SimulatedGroup) -> tuple[float, ...]:
    times, wiring = group.times, group.wiring
    costs: Amounts = wiring.seconds_per_byte_sr[wiring.wire_sr >= 0]
    links = (costs.min(), costs.max()) if costs.size else (LEAST, LEAST)
    return (
        times.attention.pair,
        times.attention.row,
        times.attention.call,
        times.qkv.each,
        times.linear.each,
        *map(float, links),
        float(wiring.latency_w.max()),
    )


def _log(seconds: float) -> float:
    return log2(max(seconds, LEAST))


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """All that is worth comparing for a prompt on a group."""

    group: SimulatedGroup
    tokens: int
    found: Sequence[Found]

    @property
    def exact_seconds(self) -> float:
        """Of exact SP-NTP that is not cut."""
        return next(it.seconds for it in self.found if it.settings == WHOLE)


def simulated(group: SimulatedGroup, tokens: int, space: Space, loss: Loss) -> Simulated:
    """Whatever loses no more than the widest bound."""
    widest = Objective(max_accuracy_loss=LOSSES[-1])
    question = SearchProblem(group=group, tokens=tokens, objective=widest)
    found = compared(question, admissible(question, space, loss), loss)
    return Simulated(group=group, tokens=tokens, found=found)


def direct_samples(
    prompts: Iterable[Simulated], kind: ObjectiveKind, space: Space
) -> list[DirectSample]:
    """The best of every prompt within every bound; what cannot be kept teaches nothing."""
    samples = []
    for prompt in prompts:
        for objective in objectives(kind, prompt.exact_seconds):
            question = SearchProblem(group=prompt.group, tokens=prompt.tokens, objective=objective)
            answer = chosen(question, prompt.found)
            if answer.met:
                sample = sample_of(question, answer.best, prompt.exact_seconds, space.groups)
                samples.append(sample)
    return samples
