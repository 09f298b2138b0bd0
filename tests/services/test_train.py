"""`csps train` learns from rows of accuracy, and its regressor is `csps plan`'s."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from measured_rows import accuracy_row as row
from measured_rows import add_times

from csps.configurator.model.scaling_information_base import ScalingInformationBase
from csps.configurator.plan.predicted_options import PredictedOptions
from csps.configurator.regressors.accuracy import AccuracyModel
from csps.configurator.regressors.direct import DirectModel
from csps.configurator.regressors.samples import PLAIN_TEXT, accuracy_samples, places_of
from csps.configurator.regressors.saved import DESCRIPTION
from csps.protocols.attention.plan import EXACT, StrategyChoice, StrategyQuestion
from csps.protocols.core.errors import ConfigError
from csps.services.launch.deploy_config import read_config
from csps.services.measured.attention_options import OBJECTIVE_KINDS as KINDS
from csps.services.measured.attention_options import (
    UNKNOWN,
    UNTIMED,
    accuracy_folder,
    accuracy_model,
    direct_folder,
    predicted_options,
    regressors_folder,
)
from csps.services.measured.identity import identity_of
from csps.services.measured.measured_groups import MeasuredGroups
from csps.services.profiling import train
from csps.services.settings.settings import Settings


@pytest.fixture
def config(tiny_llama: Path, tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    arguments = {
        "model": str(tiny_llama),
        "scaling_information_base": str(tmp_path / "sib.sqlite"),
    }
    application = {"name": "csps", "import_path": "csps.services.app:build", "args": arguments}
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


def test_of_kinds_of_questions_the_worst_counts_and_rows_of_a_kind_add_up() -> None:
    rows = [row(0.5, 99), row(0.5, 97), row(0.5, 90, kind="two_hop"), row(0.6, 100)]
    half, more = accuracy_samples(rows, layers=4)
    assert (half.loss, half.questions) == (0.1, 100)
    assert more.loss == 0
    (summed,) = accuracy_samples(rows[:2], layers=4)
    assert (summed.loss, summed.questions) == (0.02, 200)


def test_plain_text_counts_where_the_model_answers_nothing() -> None:
    text = row(0.5, 60, kind=PLAIN_TEXT)
    retrieving = [text, row(0.5, 97)]
    assert [sample.loss for sample in accuracy_samples(retrieving, layers=4)] == [0.03]
    guessing = [text, replace(row(0.5, 1), right_exact=2)]
    assert [sample.loss for sample in accuracy_samples(guessing, layers=4)] == [0.4]


def test_places_of_a_shape() -> None:
    assert places_of("2+1") == ("0-0-0", "0-0-1", "0-1-0")


def test_what_was_measured_is_learned_and_kept(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = read_config(config).settings
    sib = Path(settings.scaling_information_base)
    identity = identity_of(settings)
    with ScalingInformationBase.create(sib, identity) as base:
        for percent in range(2, 98, 4):
            base.add(row(percent / 100, 100 if percent < 60 else 80))
    train.main(["--config", str(config)])
    said = capsys.readouterr().out
    assert "24 configurations" in said
    assert "run `csps profile phases`" in said
    folder = accuracy_folder(regressors_folder(sib))
    model = AccuracyModel.load(folder, {"weights": identity.weights, "dtype": identity.dtype})
    (low, high) = model.loss(
        [sample.setting for sample in accuracy_samples([row(0.2, 0), row(0.9, 0)], layers=4)]
    )
    assert low < 0.05 < high


def test_with_profiled_times_a_server_answers_by_what_was_learned_here_and_by_nothing_else(
    config: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(train, "LENGTHS", (128, 256, 512))
    settings = read_config(config).settings
    assert predicted_options(settings, accuracy_model(settings)) == UNKNOWN
    sib = Path(settings.scaling_information_base)
    identity = identity_of(settings)
    with ScalingInformationBase.create(sib, identity) as base:
        for percent in range(2, 98, 4):
            base.add(row(percent / 100, 100))
        add_times(base)
    assert predicted_options(settings, accuracy_model(settings)) == UNKNOWN
    train.main(["--config", str(config)])
    assert "results of the search" in capsys.readouterr().out
    of_machine = {"weights": identity.weights, "device": identity.device}
    made = regressors_folder(sib)
    for kind in KINDS:
        assert DirectModel.load(direct_folder(made, kind), kind, 1, of_machine)
    assert AccuracyModel.load(accuracy_folder(made), {"weights": identity.weights})
    learned = predicted_options(settings, accuracy_model(settings))
    assert isinstance(learned, PredictedOptions)
    asked = StrategyQuestion(csa=None, bounded=True, servers=(2,), tp=1, tokens=96)
    usual = StrategyChoice(strategy=EXACT, reason="")
    assert {option.loss for option in learned.options(asked, usual)} == {0.0}
    description = direct_folder(made, "ttft") / DESCRIPTION
    description.write_text(description.read_text().replace("torch", "another"))
    caplog.clear()
    assert predicted_options(settings, accuracy_model(settings)) == UNTIMED
    assert "was trained for torch None, here it is" in caplog.text


def test_without_measurements_it_says_so(config: Path) -> None:
    with pytest.raises(ConfigError, match="run `csps profile` first"):
        train.main(["--config", str(config)])
    settings = read_config(config).settings
    ScalingInformationBase.create(
        Path(settings.scaling_information_base), identity_of(settings)
    ).close()
    with pytest.raises(ConfigError, match="0 measurements of accuracy"):
        train.main(["--config", str(config)])


@pytest.mark.parametrize(
    "gangs",
    [
        {"topology": {"prefill": ["0-0-0", "0-1-0"]}},
        {
            "elastic": {},
            "scheduling": {"policy": "loongserve"},
            "topology": {"elastic": ["0-0-0", "0-1-0"]},
        },
    ],
)
def test_groups_lie_where_the_gang_that_prefills_does(
    tiny_llama: Path, tmp_path: Path, gangs: dict[str, Any]
) -> None:
    settings = Settings.model_validate({"model": str(tiny_llama), **gangs})
    sib = tmp_path / "sib.sqlite"
    with ScalingInformationBase.create(sib, identity_of(settings)) as base:
        add_times(base)
        groups = train._groups(base, settings)
    assert [group.locations for group in groups] == [("0-0-0",), ("0-0-0", "0-1-0")]


@pytest.mark.parametrize(("cores", "shared"), [(2, None), (1, (0, 0, 1))])
def test_ranks_of_a_server_share_its_cores_where_these_are_fewer(
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: int,
    shared: tuple[int, ...] | None,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    settings = Settings.model_validate({"model": str(tiny_llama), "prefill": {"instances": 3}})
    with ScalingInformationBase.create(tmp_path / "sib.sqlite", identity_of(settings)) as base:
        add_times(base)
        group = MeasuredGroups.read(base, settings).of_places(["0-0-0", "0-0-1", "0-1-0"])
    assert group.cores_of == shared
    assert group.cores == (() if shared is None else (1.0, 1.0))
