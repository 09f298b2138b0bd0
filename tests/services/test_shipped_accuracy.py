"""Test that the shipped accuracy loss is of the included model's weights, and matches the
measurements."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

from csps.configurator.regressors.accuracy import SHIPPED, AccuracyModel, shipped_accuracy
from csps.configurator.regressors.samples import Setting, places_of
from csps.models.checkpoints.checkpoint import weights_digest
from csps.models.network.spec import read_spec
from csps.protocols.attention.csa import CsaSettings
from csps.services.measured.attention_options import accuracy_model
from csps.services.settings.settings import Settings, shipped_models

ROOT = Path(__file__).parents[2]
NEEDLE = shipped_models() / "needle"


@pytest.mark.parametrize("tokens", [1_024, 4_096])
def test_scored_by_the_same_layer_the_included_model_loses_nothing(tokens: int) -> None:
    model = shipped_accuracy(weights_digest(NEEDLE))
    assert model is not None
    settings = [
        Setting(
            tokens=tokens,
            locations=places_of("2+2"),
            layers=read_spec(NEEDLE).layers,
            csa=CsaSettings(drop_ratios=((0.5,),), importance_layer=layer),
        )
        for layer in ("same", "previous")
    ]
    same, previous = model.loss(settings)
    assert same <= 0.01
    assert previous > 0.3


def test_other_weights_have_no_shipped_regressor() -> None:
    assert shipped_accuracy("0" * 64) is None


@pytest.mark.parametrize(
    ("forms", "known"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"dtype": "float16"}, False),
        ({"weight_dtype": "fp8"}, False),
        ({"kv_dtype": "int8"}, False),
    ],
)
def test_number_types_that_were_not_measured_have_no_shipped_regressor(
    forms: dict[str, str], known: bool, tmp_path: Path
) -> None:
    base = str(tmp_path / "nothing.sib")
    settings = Settings.model_validate(
        {"model": "needle", "scaling_information_base": base, **forms}
    )
    assert isinstance(accuracy_model(settings), AccuracyModel) == known


def test_regressors_are_in_the_wheel() -> None:
    packaging = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = packaging["package-data"]["*"]
    shipped = [path.relative_to(SHIPPED) for path in SHIPPED.rglob("*") if path.is_file()]
    assert {path.name for path in shipped} == {"description.json", "accuracy.txt"}
    packages = find_namespace_packages(str(ROOT / "src"), packaging["packages"]["find"]["exclude"])
    for path in shipped:
        folder = ".".join(path.parent.parts)
        assert f"csps.configurator.regressors.shipped.{folder}" in packages
        assert any(fnmatch(path.name, pattern) for pattern in patterns)
