"""Curves and table of what was measured, beside what was learned of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from accuracy_curves import main

from csps.configurator.model.scaling_information_base import (
    AccuracyRow,
    Identity,
    ScalingInformationBase,
)
from csps.configurator.regressors.accuracy import train_accuracy
from csps.configurator.regressors.samples import accuracy_samples


@pytest.mark.slow
def test_every_point_is_in_the_table_and_the_picture_is_drawn(tmp_path: Path) -> None:
    identity = Identity(
        weights="w", dtype="float32", device="cpu", cores=1, torch="2", ranks_per_core=1.0
    )
    rows = [
        AccuracyRow(
            kind="multi_key, question last",
            tokens=1_024,
            strategy="ntp",
            levels=2,
            drop_ratio=percent / 100,
            importance_layer=layer,
            importance_window=64,
            group_shape="2+2",
            questions=400,
            right_exact=400,
            right=400 if layer == "same" else 400 - 4 * percent,
            divergence=0.0,
            date="d",
        )
        for percent in range(5, 95, 10)
        for layer in ("same", "previous")
    ]
    with ScalingInformationBase.create(tmp_path / "sib", identity) as base:
        for row in rows:
            base.add(row)
    train_accuracy(accuracy_samples(rows, layers=4), {}).save(tmp_path / "made")
    picture, table = tmp_path / "curves.png", tmp_path / "table.md"
    paths = ["--sib", tmp_path / "sib", "--regressor", tmp_path / "made"]
    main([*map(str, paths), "--plot", str(picture), "--table", str(table)])
    head, _, *lines = table.read_text().splitlines()
    assert len(lines) == len(rows)
    assert all(line.count("|") == head.count("|") for line in lines)
    assert picture.stat().st_size > 1_000
