"""What LightGBM is told so that the same rows give the same model, whatever the machine does.

Regressors on disk: a folder with LightGBM's text for each and a description of all.

A description says what they were trained for, model, and machine where times are predicted, with
which data, and how well they did on data that they have not seen. Who loads them says what it runs
on; what was trained for something else is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import lightgbm

from csps.protocols.core.errors import ConfigError

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
    """Of some regressors."""

    kind: str
    """Such as "accuracy"."""
    trained_for: Mapping[str, str]
    """What predictions hold for, such as the digest of the weights."""
    training_set: str
    """Fingerprint."""
    samples: int
    features: tuple[str, ...]
    held_out: Mapping[str, float]
    """Metrics on samples that were not trained with."""
    about: Mapping[str, object] = field(default_factory=dict)
    """What the kind needs besides."""


def save(folder: Path, description: Description, boosters: Mapping[str, lightgbm.Booster]) -> None:
    """Write the folder; the description last, so that one that is cut short is none."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    for name, booster in boosters.items():
        (folder / f"{name}.txt").write_text(booster.model_to_string())
    text = json.dumps({"version": VERSION, **asdict(description)}, indent=1)
    (folder / DESCRIPTION).write_text(text + "\n")


def load(
    folder: Path, kind: str, names: tuple[str, ...], trained_for: Mapping[str, str] | None
) -> tuple[Description, dict[str, lightgbm.Booster]]:
    """Regressors and their description.

    Args:
        names: of the regressors.
        trained_for: of this process; None takes whatever is there.

    Raises:
        ConfigError: there are none, of this kind or at all, or they are of something else.
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
