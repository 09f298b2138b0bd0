"""`csps profile phases` with a tiny model; the process that measures is this one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from csps.actors import phase_probe
from csps.actors.phase_probe import PhaseTime as Row
from csps.configurator.model.scaling_information_base import PhaseRow, ScalingInformationBase
from csps.configurator.plan.profiles import NEEDED, fit_phases
from csps.models.network.spec import read_spec
from csps.services.profiling import command, phases


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    async def probed(arguments: Iterable[str], threads: int) -> list[Row]:
        return phase_probe.measured(list(arguments))

    monkeypatch.setattr(phases, "_probed", probed)

    async def no_ranks(*_: object, **__: object) -> None:
        """`test_profile_ranks` has them."""

    monkeypatch.setattr(command, "measure_overheads", no_ranks)
    monkeypatch.setattr(phases, "QUICK_TOKENS", (16, 48))


@pytest.mark.usefixtures("here")
def test_what_was_measured_can_be_fitted_and_is_printed(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, sib = tmp_path / "config.yaml", tmp_path / "sib.sqlite"
    application = {
        "name": "csps",
        "import_path": "csps.services.app:build",
        "args": {"model": str(tiny_llama)},
    }
    config.write_text(yaml.safe_dump({"applications": [application]}))
    command.main(["phases", "--config", str(config), "--sib", str(sib), "--quick"])
    base = ScalingInformationBase.read(sib, None)
    assert base is not None
    with base:
        rows, spec = base.rows(PhaseRow), read_spec(tiny_llama)
    assert {row.phase for row in rows} >= set(NEEDED)
    assert all(row.seconds > 0 for row in rows)
    times = fit_phases(rows, heads=spec.heads, kv_heads=spec.kv_heads, tp=1)
    assert times.qkv.fixed + times.qkv.each > 0
    assert "us a call" in capsys.readouterr().out
