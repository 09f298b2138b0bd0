"""Load what the configurator may trade accuracy for, of this model on this machine."""

from __future__ import annotations

import logging
from pathlib import Path

from csps.configurator.model.scaling_information_base import Identity, ScalingInformationBase
from csps.configurator.plan.predicted_options import (
    DirectAnswerer,
    PredictedOptions,
    answered_space,
)
from csps.configurator.regressors.accuracy import KIND, AccuracyModel, shipped_accuracy
from csps.configurator.regressors.direct import DirectModel
from csps.models.network.spec import read_spec
from csps.protocols.attention.plan import ObjectiveKind
from csps.protocols.core.errors import ConfigError, CspsError
from csps.services.measured.identity import identity_of
from csps.services.measured.measured_groups import MeasuredGroups
from csps.services.settings.settings import Settings

OBJECTIVE_KINDS: tuple[ObjectiveKind, ...] = ("ttft", "accuracy")
UNKNOWN = "nothing was measured"
UNTIMED = "times of sparse attention were not measured here"
_log = logging.getLogger(__name__)


def accuracy_model(settings: Settings) -> AccuracyModel | str:
    """Load the accuracy loss of sparse attention with this model, learned here or shipped; else
    return the reason why it is unknown."""
    folder = regressors_folder(Path(settings.scaling_information_base))
    identity = identity_of(settings)
    try:
        return AccuracyModel.load(accuracy_folder(folder), of_model(identity))
    except CspsError as error:
        return shipped_accuracy(identity.weights, identity.dtype) or str(error)


def predicted_options(settings: Settings, accuracy: AccuracyModel | str) -> PredictedOptions | str:
    """Return the options for requests with bounds, or the reason why all attention is exact.

    Clients may read the reason; the log has the details. Missing or foreign measurements do not end
    the server.

    Args:
        accuracy: result of `accuracy_model`.
    """
    try:
        if isinstance(accuracy, str):
            raise ConfigError(accuracy)
        return _read(settings, accuracy)
    except CspsError as error:
        _log.warning("attention stays exact for requests with bounds: %s", error)
        return UNKNOWN if isinstance(accuracy, str) else UNTIMED


def regressors_folder(sib: Path) -> Path:
    """Return the folder for what `csps train` has learned from a scaling information base."""
    return sib.with_suffix(".regressors")


def accuracy_folder(folder: Path) -> Path:
    """Return the folder of the regressor of the accuracy loss."""
    return folder / KIND


def direct_folder(folder: Path, kind: ObjectiveKind) -> Path:
    """Return the folder of the regressors of an objective."""
    return folder / f"objective-{kind}"


def of_model(identity: Identity) -> dict[str, str]:
    """Return what the accuracy loss depends on."""
    return {"weights": identity.weights, "dtype": identity.dtype}


def of_machine(identity: Identity) -> dict[str, str]:
    """Return what times depend on: the model, the device and torch."""
    return {**of_model(identity), "device": identity.device, "torch": identity.torch}


def _read(settings: Settings, accuracy: AccuracyModel) -> PredictedOptions:
    path, identity = Path(settings.scaling_information_base), identity_of(settings)
    base = ScalingInformationBase.read(path, identity) if path.is_file() else None
    if base is None:
        raise ConfigError(f"{path} does not exist: run `csps profile` on this machine first")
    with base:
        groups = MeasuredGroups.read(base, settings)
    folder = regressors_folder(path)
    layers = read_spec(settings.model_dir, settings.model_overrides).layers
    space = answered_space(accuracy.groups_of(layers))
    machine = of_machine(identity)
    models = {
        kind: DirectModel.load(
            direct_folder(folder, kind), kind, len(space.groups.members), machine
        )
        for kind in OBJECTIVE_KINDS
    }
    return PredictedOptions(
        answerer=DirectAnswerer(space=space, models=models),
        accuracy=accuracy,
        group_of=groups.of_places,
        beyond_measured=settings.configurator.beyond_measured,
    )
