"""Regressors on disk: a folder with LightGBM's text for each, and a description of all.

The description says for which model, and on which machine where times are predicted, they were
trained, with which data, and how they did on held-out data. A process that loads them names its own
model and machine; regressors trained for others are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import lightgbm

from csps.protocols.core.errors import ConfigError

# With these parameters equal rows give equal regressors on any machine.
REPRODUCIBLE = {
    "feature_pre_filter": False,
    "num_threads": 1,
    "deterministic": True,
    "force_col_wise": True,
    "seed": 0,
    "verbose": -1,
}


VERSION = 1
DESCRIPTION = "description.json"


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of some regressors."""

    kind: str
    """Kind, such as "accuracy"."""
    trained_for: Mapping[str, str]
    """Conditions under which predictions hold, such as the digest of the weights."""
    training_set: str
    """Fingerprint of the samples."""
    samples: int
    features: tuple[str, ...]
    held_out: Mapping[str, float]
    """Metrics on samples that were held out."""
    about: Mapping[str, object] = field(default_factory=dict)
    """Additional data of the kind."""


def save(folder: Path, description: Description, boosters: Mapping[str, lightgbm.Booster]) -> None:
    """Write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    for name, booster in boosters.items():
        (folder / f"{name}.txt").write_text(booster.model_to_string())
    # The description is written last, so an interrupted write leaves no valid folder.
    text = json.dumps({"version": VERSION, **asdict(description)}, indent=1)
    (folder / DESCRIPTION).write_text(text + "\n")


def load(
    folder: Path, kind: str, names: tuple[str, ...], trained_for: Mapping[str, str] | None
) -> tuple[Description, dict[str, lightgbm.Booster]]:
    """Return regressors and their description.

    Args:
        names: names of the regressors.
        trained_for: conditions of this process; None accepts any.

    Raises:
        ConfigError: there are no regressors of this kind, or not for these conditions.
    """
    try:
        found = json.loads((folder / DESCRIPTION).read_text())
        version = found.pop("version")
        description = Description(**{**found, "features": tuple(found["features"])})
        boosters = {
            name: lightgbm.Booster(model_str=(folder / f"{name}.txt").read_text()) for name in names
        }
    except (OSError, ValueError, TypeError, KeyError, lightgbm.basic.LightGBMError) as error:
        raise ConfigError(f"no regressors in {folder}: {error}; run `csps train`") from None
    if (version, description.kind) != (VERSION, kind):
        raise ConfigError(
            f"{folder} holds regressors '{description.kind}' of version {version}, not '{kind}' of "
            f"version {VERSION}; run `csps train`"
        )
    for name, value in (trained_for or {}).items():
        if description.trained_for.get(name) != value:
            raise ConfigError(
                f"{folder} was trained for {name} {description.trained_for.get(name)}, here it is "
                f"{value}; run `csps train`"
            )
    return description, boosters
