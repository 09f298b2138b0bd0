"""Direct regressors: the best configuration for objectives 1 and 2 without a search (CSPS §3.2.6).

From a bound, a prompt's length, the group's shape, phase times (the paper's G) and links (its B)
they predict N_v, drop ratios and micro-partitions. `predicted_options` makes predictions feasible.
They are monotone: a wider bound on the loss, or a tighter one on TTFT, never drops less.

They learn from results of the search (CSPS App. B). Configurations of a group and a length are
simulated once and then compared under every bound.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

import lightgbm
import numpy as np

from csps.configurator.model.phase_times import Amounts
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE
from csps.configurator.regressors.samples import eligible_pairs
from csps.configurator.regressors.saved import REPRODUCIBLE, Description, load, save
from csps.configurator.search.search import (
    Found,
    SearchProblem,
    admissible,
    chosen,
    compared,
    tuned,
)
from csps.configurator.search.space import LOSSES, LayerGroups, Loss, Space, objectives
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
    """Prediction of regressors, before it is made feasible."""

    tensor_parallel: float
    """SP-TP if above a half."""
    whole: float
    """Exact SP-NTP without micro-partitions if above a half."""
    levels: float
    ratios: tuple[float, ...]
    """Ratios of level 2, by layer group: those of the head that drops most."""
    micro: tuple[float, ...]
    """M of levels 1, 2, …"""

    @classmethod
    def of(cls, outputs: Sequence[float]) -> Predicted:
        """Return the prediction that outputs in the order of `output_names` make."""
        groups = len(outputs) - 3 - MAX_LEVELS
        return cls(
            tensor_parallel=outputs[0],
            whole=outputs[1],
            levels=outputs[2],
            ratios=tuple(outputs[3 : 3 + groups]),
            micro=tuple(2.0**logarithm for logarithm in outputs[3 + groups :]),
        )


@dataclass(frozen=True)
class DirectSample:
    """A search problem and the best configuration."""

    features: tuple[float, ...]
    outputs: tuple[float, ...]


@dataclass(frozen=True)
class DirectModel:
    """Regressors of one objective, one for each output."""

    description: Description
    _boosters: Mapping[str, lightgbm.Booster]

    def predict(self, problem: SearchProblem, exact_seconds: float) -> Predicted:
        """Predict a configuration.

        Args:
            exact_seconds: time of the prompt with exact SP-NTP without micro-partitions.
        """
        features = np.array([problem_features(problem, exact_seconds)])
        outputs = [
            float(np.asarray(booster.predict(features, num_threads=1))[0])
            for booster in self._boosters.values()
        ]
        return Predicted.of(outputs)

    def save(self, folder: Path) -> None:
        """Write the model into a folder."""
        save(folder, self.description, self._boosters)

    @classmethod
    def load(
        cls,
        folder: Path,
        objective: ObjectiveKind,
        groups: int,
        trained_for: Mapping[str, str] | None,
    ) -> DirectModel:
        """Load a model from a folder.

        Args:
            groups: number of layer groups that share a ratio.
            trained_for: model and machine of this process; None accepts any.

        Raises:
            ConfigError: there is none, or it belongs to another model or machine.
        """
        description, boosters = load(folder, objective, output_names(groups), trained_for)
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
    """Learn from results of a search; metrics come from a fifth of the samples.

    Raises:
        ConfigError: there are too few samples to hold some out.
    """
    if len(samples) < FEWEST:
        raise ConfigError(f"{len(samples)} results of the search; at least {FEWEST} are needed")
    names = output_names(len(samples[0].outputs) - 3 - MAX_LEVELS)
    mixed = [samples[index] for index in np.random.default_rng(0).permutation(len(samples))]
    training = [sample for index, sample in enumerate(mixed) if index % HELD_OUT]
    held_out = mixed[::HELD_OUT]
    trial = _trained(objective, names, training)
    features = np.array([sample.features for sample in held_out])
    errors = {
        f"mean_absolute_error_{name}": float(
            np.abs(
                np.asarray(trial[name].predict(features, num_threads=1))
                - np.array([sample.outputs[place] for sample in held_out])
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
    problem: SearchProblem, best: Found, exact_seconds: float, groups: LayerGroups
) -> DirectSample:
    """Return the sample that one result of the search gives."""
    return DirectSample(
        problem_features(problem, exact_seconds), outputs_of(best.settings, groups, problem)
    )


def problem_features(problem: SearchProblem, exact_seconds: float) -> tuple[float, ...]:
    """Return the features of a problem in the order of `FEATURES`.

    A bound on TTFT is relative to exact attention's.
    """
    group = problem.group
    topology = Topology.of(group.locations)
    bound = (
        problem.most_loss
        if problem.objective.kind == "ttft"
        else min(problem.most_seconds / exact_seconds, 10.0)
    )
    return (
        bound,
        log2(problem.tokens),
        float(group.members),
        float(len(topology.servers)),
        float(len(topology.racks)),
        eligible_pairs(group.locations, len(topology.granularities)),
        *map(_log, _speeds(group)),
    )


def output_names(groups: int) -> tuple[str, ...]:
    """Return the names of the outputs."""
    return (
        "tensor_parallel",
        "whole",
        "levels",
        *(f"ratio_{group}" for group in range(groups)),
        *(f"log2_micro_{level}" for level in range(1, MAX_LEVELS + 1)),
    )


def outputs_of(
    settings: CsaSettings, groups: LayerGroups, problem: SearchProblem
) -> tuple[float, ...]:
    """Return the outputs for a configuration, in the order of `output_names`."""
    distinct = len(Topology.of(problem.group.locations).granularities)
    levels = min(settings.levels or distinct, distinct)
    ratios = group_ratios(settings, groups)
    by_level = settings.micro_partitions[0] if settings.micro_partitions else (1,)
    micro = [by_level[min(level, len(by_level) - 1)] for level in range(MAX_LEVELS)]
    return (
        float(settings.strategy == "tp"),
        float(not settings.pipelined),
        float(levels),
        *ratios,
        *(log2(count) for count in micro),
    )


def group_ratios(settings: CsaSettings, groups: LayerGroups) -> list[float]:
    """Return the ratio of level 2 of each layer group: that of the head that drops most."""
    ratios = settings.drop_ratios
    return [
        max(max(ratios[min(layer, len(ratios) - 1)]) for layer in members)
        for members in groups.members
    ]


def fingerprint(samples: Sequence[DirectSample]) -> str:
    """Return the SHA-256 of a training set, independent of its order."""
    lines = sorted(json.dumps([sample.features, sample.outputs]) for sample in samples)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _trained(
    objective: ObjectiveKind, names: Sequence[str], samples: Sequence[DirectSample]
) -> dict[str, lightgbm.Booster]:
    features = np.array([sample.features for sample in samples])
    return {
        name: lightgbm.train(
            {**PARAMETERS, "monotone_constraints": _monotone(objective, name)},
            lightgbm.Dataset(
                features,
                label=np.array([sample.outputs[place] for sample in samples]),
                params={"feature_pre_filter": False, "verbose": -1},
            ),
            num_boost_round=ROUNDS,
        )
        for place, name in enumerate(names)
    }


def _monotone(objective: ObjectiveKind, name: str) -> list[int]:
    """Return the monotone constraints of an output, which concern only the bound.

    A wider bound on the loss allows larger ratios, and more time needs smaller ones.
    """
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
    """Candidates for a prompt on a group, with predicted times and losses."""

    group: SimulatedGroup
    tokens: int
    found: Sequence[Found]

    @property
    def exact_seconds(self) -> float:
        """Time of exact SP-NTP without micro-partitions."""
        return next(option.seconds for option in self.found if option.settings == WHOLE)


def simulated(group: SimulatedGroup, tokens: int, space: Space, loss: Loss) -> Simulated:
    """Simulate all configurations that lose no more than the widest bound."""
    widest = Objective(max_accuracy_loss=LOSSES[-1])
    problem = SearchProblem(group=group, tokens=tokens, objective=widest)
    found = compared(problem, tuned(problem, space, admissible(problem, space, loss)), loss)
    return Simulated(group=group, tokens=tokens, found=found)


def direct_samples(
    prompts: Iterable[Simulated], kind: ObjectiveKind, space: Space
) -> list[DirectSample]:
    """Return the best configuration of every prompt within every bound that can be met."""
    samples = []
    for prompt in prompts:
        for objective in objectives(kind, prompt.exact_seconds):
            problem = SearchProblem(group=prompt.group, tokens=prompt.tokens, objective=objective)
            result = chosen(problem, prompt.found)
            if result.met:
                sample = sample_of(problem, result.best, prompt.exact_seconds, space.groups)
                samples.append(sample)
    return samples
