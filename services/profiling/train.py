"""Run `csps train`: train regressors on measurements, and store them beside the scaling information
base."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from csps.configurator.model.scaling_information_base import (
    AccuracyRow,
    Identity,
    ScalingInformationBase,
    SpreadRow,
)
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.plan.predicted_options import answered_space
from csps.configurator.regressors.accuracy import AccuracyModel, shipped_accuracy, train_accuracy
from csps.configurator.regressors.direct import (
    DirectModel,
    direct_samples,
    fingerprint,
    simulated,
    train_direct,
)
from csps.configurator.regressors.samples import accuracy_samples, measured_groups
from csps.configurator.search.space import LayerGroups
from csps.models.network.spec import ModelSpec, read_spec
from csps.protocols.attention.plan import ObjectiveKind
from csps.protocols.core.command_line import CommandParser
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import Topology
from csps.services.launch.deploy_config import read_config
from csps.services.launch.preflight import check_model
from csps.services.measured.attention_options import (
    OBJECTIVE_KINDS,
    accuracy_folder,
    direct_folder,
    of_machine,
    of_model,
    regressors_folder,
)
from csps.services.measured.identity import identity_of
from csps.services.measured.measured_groups import MeasuredGroups, gang_places
from csps.services.profiling.runs import group_sizes
from csps.services.settings.settings import Settings

LENGTHS = tuple(1 << exponent for exponent in range(10, 21))
"""Tokens of the prompts to learn from, as far as the model supports them."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    arguments = _arguments(argv)
    settings = read_config(arguments.config).settings
    check_model(settings)
    path = arguments.sib or Path(settings.scaling_information_base)
    identity = identity_of(settings)
    base = ScalingInformationBase.read(path, identity)
    if base is None:
        raise ConfigError(f"{path} does not exist: run `csps profile` first")
    spec = read_spec(settings.model_dir, settings.model_overrides)
    out = arguments.out or regressors_folder(path)
    with base:
        accuracy = _accuracy(base, identity, spec, accuracy_folder(out))
        try:
            groups = _groups(base, settings)
        except ConfigError as error:
            print(f"nothing was learned about times, which were not profiled: {error}")
            return
    for kind, model in _direct(groups, accuracy, spec, of_machine(identity)):
        folder = direct_folder(out, kind)
        model.save(folder)
        print(f"best for objective '{kind}', in {folder}")
        print(f"  {model.description.samples} results of the search")


def _accuracy(
    base: ScalingInformationBase, identity: Identity, spec: ModelSpec, folder: Path
) -> AccuracyModel:
    """Train on the measurements of this model; without any, return the shipped regressor.

    Raises:
        ConfigError: too little was measured, or nothing of a model without a shipped regressor.
    """
    rows = base.rows(AccuracyRow)
    shipped = None if rows else shipped_accuracy(identity.weights, identity.dtype)
    if shipped is not None:
        print(f"loss of accuracy, as shipped: {shipped.description.samples} configurations")
        return shipped
    samples = accuracy_samples(rows, layers=spec.layers)
    groups = measured_groups(base.rows(SpreadRow), samples, layers=spec.layers)
    accuracy = train_accuracy(samples, of_model(identity), groups)
    accuracy.save(folder)
    for line in _accuracy_lines(accuracy, folder):
        print(line)
    return accuracy


def _direct(
    groups: Sequence[SimulatedGroup],
    accuracy: AccuracyModel,
    spec: ModelSpec,
    trained_for: dict[str, str],
) -> Iterator[tuple[ObjectiveKind, DirectModel]]:
    space = answered_space(accuracy.groups_of(spec.layers))
    prompts = [
        simulated(
            group,
            tokens,
            space,
            accuracy.of_group(group.locations, layers=spec.layers, tokens=tokens),
        )
        for group in groups
        for tokens in LENGTHS
        if group.members <= tokens <= spec.max_positions
    ]
    for kind in OBJECTIVE_KINDS:
        samples = direct_samples(prompts, kind, space)
        yield kind, train_direct(kind, samples, trained_for, training_set=fingerprint(samples))


def _groups(base: ScalingInformationBase, settings: Settings) -> list[SimulatedGroup]:
    """Return groups of the prefill gang, near instances first.

    Raises:
        ConfigError: phases or links were not profiled.
    """
    gang = settings.prefilling
    measured = MeasuredGroups.read(base, settings)
    places = sorted(Topology.of(gang_places(base, settings)).locations[:: gang.tp])
    return [
        measured.of_places([str(place) for place in places[:size]])
        for size in group_sizes(gang.instances)
    ]


def _accuracy_lines(model: AccuracyModel, folder: Path) -> Iterator[str]:
    description = model.description
    yield f"loss of accuracy, {description.samples} configurations, in {folder}"
    yield f"  training set {description.training_set[:12]}"
    held_out = description.held_out
    error, right = held_out["mean_absolute_error"], held_out["right_side_of_bound"]
    yield f"  held out: {held_out['samples']:.0f}, mean absolute error {error:.4f}"
    yield f"  on the right side of bounds: {right:.1%}; of those farther from the bound than the "
    yield f"  interval of the measurement: {held_out['right_side_beyond_interval']:.1%}"
    if model.groups is not None:
        yield from group_lines(model.groups)


def group_lines(groups: LayerGroups) -> Iterator[str]:
    """Yield which layers share a ratio, and how ratios relate; nothing if all are alike."""
    if groups.all_alike:
        return
    ratios = groups.graded(1.0)
    for members in groups.members:
        layers = ", ".join(map(str, members))
        of_layers = "; ".join(
            "/".join(f"{ratio:.2f}" for ratio in ratios[min(layer, len(ratios) - 1)])
            for layer in members
        )
        yield f"  layers {layers} drop {of_layers} of the largest ratio"


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="csps train",
        description="Learn how much accuracy configurations of sparse attention lose, and which is "
        "best for a bound, from measurements with this model on this machine.",
    )
    parser.add_argument(
        "--config", type=Path, default=Path("config.yaml"), help="default: %(default)s"
    )
    parser.add_argument(
        "--sib",
        type=Path,
        metavar="FILE",
        help="scaling information base; default: the settings' one",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="default: beside the scaling information base"
    )
    return parser.parse_args(argv)
