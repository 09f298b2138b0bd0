"""Published measurements come back into a base as they were, and once."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accuracy_rows import PUBLISHED, main, published

from csps.configurator.model.scaling_information_base import AccuracyRow, ScalingInformationBase
from csps.configurator.regressors.accuracy import shipped_accuracy
from csps.configurator.regressors.samples import accuracy_samples
from csps.configurator.regressors.support import Support
from csps.services.launch.deploy_config import read_config
from csps.services.measured.identity import identity_of


def test_what_ships_is_supported_by_the_published_rows(tmp_path: Path) -> None:
    config, sib = tmp_path / "config.yaml", tmp_path / "sib"
    application = {
        "name": "csps",
        "import_path": "csps.services.app:build",
        "args": {"model": "needle"},
    }
    config.write_text(yaml.safe_dump({"applications": [application]}))
    command = ["--config", str(config), "--sib", str(sib)]
    main(command)
    base = ScalingInformationBase.read(sib, None)
    assert base is not None
    with base:
        rows = base.rows(AccuracyRow)
    assert sorted(map(repr, rows)) == sorted(map(repr, published(PUBLISHED, "2026-11-22")))
    shipped = shipped_accuracy(identity_of(read_config(config).settings).weights)
    assert shipped is not None
    support = Support.of(accuracy_samples(rows, layers=4))
    assert sorted(_losses(support)) == sorted(_losses(shipped.support))
    with pytest.raises(SystemExit, match="has measurements of accuracy already"):
        main(command)


def _losses(support: Support) -> list[tuple[float, ...]]:
    """Return features and loss of each configuration, as far as a file holds them."""
    return [
        tuple(float(f"{number:.9g}") for number in (*features, loss))
        for features, loss in zip(support.features_mf, support.losses_m, strict=True)
    ]
