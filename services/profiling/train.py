"""`csps train`: regressors from what was measured, kept beside the scaling information base."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from csps.configurator.enumeration import Judging, Space
from csps.configurator.layer_groups import LayerGroups
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.wiring import LinkSpeed, Wiring
from csps.configurator.profiles import fit_phases, link_speed
from csps.configurator.regressors.accuracy import AccuracyModel, train_accuracy
from csps.configurator.regressors.direct import DirectModel, Objective, fingerprint, train_direct
from csps.configurator.regressors.measured import accuracy_samples
from csps.configurator.regressors.training_set import direct_samples, simulated
from csps.configurator.scaling_information_base import (
    AccuracyRow,
    LinkRow,
    PhaseRow,
    ScalingInformationBase,
)
from csps.configurator.shapes import AttentionShape
from csps.models.spec import ModelSpec, read_spec
from csps.protocols.errors import ConfigError
from csps.protocols.topology import Topology
from csps.services.launch.deploy_config import read_config
from csps.services.launch.model_check import check_model
from csps.services.launch.settings import Settings
from csps.services.profiling.identity import identity_of
from csps.services.profiling.plan import group_sizes

LENGTHS = tuple(1 << exponent for exponent in range(10, 21, 2))
"""Tokens of prompts that are learned from, as far as the model takes them."""
KINDS: tuple[Objective, ...] = ("ttft", "accuracy")


def main(argv: Sequence[str]) -> None:
    """The command."""
    arguments = _arguments(argv)
    settings = read_config(arguments.config).settings
    check_model(settings)
    path = arguments.sib or Path(settings.scaling_information_base)
    identity = identity_of(settings)
    base = ScalingInformationBase.read(path, identity)
    if base is None:
        raise ConfigError(f"there is no {path}: nothing has been measured")
    spec, out = read_spec(settings.model_dir), arguments.out or path.with_suffix(".regressors")
    # Accuracy depends on these alone, times on the machine as well.
    of_model = {"weights": identity.weights, "dtype": identity.dtype}
    of_machine = {**of_model, "device": identity.device, "torch": identity.torch}
    with base:
        samples = accuracy_samples(base.rows(AccuracyRow), layers=spec.layers)
        accuracy = train_accuracy(samples, of_model)
        accuracy.save(out / "accuracy")
        for line in _accuracy_lines(accuracy, out / "accuracy"):
            print(line)
        try:
            groups = _groups(base, settings, spec)
        except ConfigError as error:
            print(f"times were not profiled, so that nothing was learned about them: {error}")
            return
    for model in _direct(groups, accuracy, spec, of_machine):
        folder = out / model.description.kind
        model.save(folder)
        print(f"best for objective '{model.description.kind}', in {folder}")
        print(f"  {model.description.samples} answers of the search")


def _direct(
    groups: Sequence[SimulatedGroup],
    accuracy: AccuracyModel,
    spec: ModelSpec,
    trained_for: dict[str, str],
) -> Iterator[DirectModel]:
    space = Space(
        groups=LayerGroups.alike(spec.layers),
        step=0.1,
        micro_partitions=((4, 8, 16), (1, 4), (1, 2)),
        judging=(Judging("same", 64), Judging("previous", 64)),
    )
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
    for kind in KINDS:
        samples = direct_samples(prompts, kind, space)
        yield train_direct(kind, samples, trained_for, training_set=fingerprint(samples))


def _groups(
    base: ScalingInformationBase, settings: Settings, spec: ModelSpec
) -> list[SimulatedGroup]:
    """Of the gang that prefills, near instances first.

    Raises:
        ConfigError: phases or links were not profiled.
    """
    gang, tp, topology = settings.prefilling, settings.prefilling.tp, settings.topology
    times = fit_phases(base.rows(PhaseRow), heads=spec.heads, kv_heads=spec.kv_heads, tp=tp)
    inside = link_speed(base.rows(LinkRow), "inside")
    between = LinkSpeed(
        bytes_per_s=inside.bytes_per_s / topology.link_ratio, latency_s=inside.latency_s
    )
    named = topology.prefill if settings.elastic is None else topology.elastic
    ids = named or [f"0-0-{rank}" for rank in range(gang.ranks)]
    places = sorted(Topology.of(ids).locations[::tp])
    element = 4 if settings.dtype == "float32" else 2
    return [
        SimulatedGroup(
            shape=AttentionShape(
                hidden=spec.hidden,
                heads=spec.heads,
                kv_heads=spec.kv_heads,
                head_dim=spec.head_dim,
                layers=spec.layers,
                lse=4 // element,
            ),
            locations=tuple(map(str, places[:size])),
            tp=tp,
            times=times,
            wiring=Wiring.of_servers(
                [place.server_id for place in places[:size]], inside=inside, between=between
            ),
            itemsize=element,
        )
        for size in group_sizes(gang.instances)
    ]


def _accuracy_lines(model: AccuracyModel, folder: Path) -> Iterator[str]:
    description = model.description
    yield f"loss of accuracy, {description.samples} configurations, in {folder}"
    yield f"  training set {description.training_set[:12]}"
    held = description.held_out
    error, right = held["mean_absolute_error"], held["right_side_of_bound"]
    yield f"  held out: {held['samples']:.0f}, mean absolute error {error:.4f}"
    yield f"  on the right side of bounds: {right:.1%}; of those farther from the bound than the "
    yield f"  interval of the measurement: {held['right_side_beyond_interval']:.1%}"


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="csps train",
        description="Learn what configurations of sparse attention lose of accuracy, and which is "
        "best for a bound, from what was measured with this model and on this machine.",
    )
    parser.add_argument("--config", type=Path, default=Path("config.yaml"))
    parser.add_argument(
        "--sib", type=Path, metavar="FILE", help="scaling information base, not the settings' one"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="not beside the scaling information base"
    )
    return parser.parse_args(argv)
