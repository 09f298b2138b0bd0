"""F_Ad of models that csps includes: what sparse attention loses of their accuracy.

It depends on the model alone, so it ships, while times are profiled where they are needed. Each is
as `csps train --out shipped/DIGEST` has written it, by the first digits of the weights' digest.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from csps.configurator.regressors.accuracy import KIND, AccuracyModel

SHIPPED = Path(__file__).parent / "shipped"
DIGITS = 16


@cache
def shipped_accuracy(model_digest: str) -> AccuracyModel | None:
    """The regressor of the model with this digest of its weights; None where none ships.

    Raises:
        ConfigError: what ships is broken, or of weights whose digest begins alike.
    """
    folder = SHIPPED / model_digest[:DIGITS] / KIND
    return AccuracyModel.load(folder, {"weights": model_digest}) if folder.is_dir() else None
