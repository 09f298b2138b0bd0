"""The rates of improvement that Tetris starts with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from csps.configurator.scaling_information_base import ScalingInformationBase
from csps.services.launch.settings import Settings
from csps.services.profiling.identity import identity_of
from csps.services.scheduling.policies.tetris.improvement import FIT
from csps.services.scheduling.policies.tetris.options import AUTO


def scheduling_options(settings: Settings) -> dict[str, Any]:
    """The policy's options as the settings have them, with what `csps rates` has found where the
    policy looks up rates of improvement and the settings name none. So they are in the header of
    the decision log, which can be replayed without the scaling information base.

    Raises:
        ConfigError: the scaling information base is of another model or machine, or damaged.
    """
    options = settings.policy_options
    wanted = options.get("improvement_rate", AUTO) == AUTO and "improvement_rates" not in options
    path = Path(settings.scaling_information_base)
    if settings.scheduling.policy != "tetris" or not wanted or not path.is_file():
        return options
    base = ScalingInformationBase.read(path, identity_of(settings))
    assert base is not None, "the file was there"
    with base:
        fit = base.latest_fit(FIT)
    if fit is None:
        return options
    return {**options, "improvement_rates": json.loads(fit.canonical)}
