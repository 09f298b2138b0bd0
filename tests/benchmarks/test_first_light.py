"""The first run on a GPU, tried on a CPU with tiny shapes."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import first_light
import pytest

PARTS = {"roofline", "kernels", "models"}


def check(whole: dict[str, Any], parts: set[str]) -> None:
    assert whole["failed"] == whole["skipped"] == []
    assert {row["part"] for row in whole["rows"]} == parts
    for row in whole["rows"]:
        for name, figure in row.items():
            if "error" in name:
                assert 0 <= figure < 1e-5, row
            elif name not in ("part", "what"):
                assert figure > 0, row


def test_kernels_and_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_light, "two_ranks", lambda sizes, report: None)
    path = tmp_path / "out.json"
    whole = first_light.main(["--tiny", "--json", str(path)])
    check(whole, PARTS)
    assert json.loads(path.read_text())["rows"] == whole["rows"]
    prompts = [row for row in whole["rows"] if "prompt of" in row["what"]]
    assert [row["what"] for row in prompts] == ["tiny: prompt of 64", "tiny: prompt of 256"]


@pytest.mark.slow
def test_two_ranks_on_one_device() -> None:
    whole = first_light.main(["--tiny"])
    check(whole, PARTS | {"two ranks"})
    ranks = [row for row in whole["rows"] if row["part"] == "two ranks"]
    assert all(f"{way}: error" in row for row in ranks for way in ("ulysses", "ring_kv", "ring_q"))


def test_without_time_everything_is_skipped_by_name() -> None:
    whole = first_light.main(["--tiny", "--minutes", "0"])
    assert whole["failed"] == []
    assert "tiny" in whole["skipped"]
    assert "sampling" in whole["skipped"]


def test_an_error_in_one_part_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(first_light, "two_ranks", broken)
    monkeypatch.setattr(first_light, "_importance", broken)
    whole = first_light.main(["--tiny"])
    assert whole["failed"] == ["importance, 4,2,16", "tiny"]
    assert any("no such kernel" in row.get("error", "") for row in whole["rows"])
    assert any(row["what"] == "tiny: batch 4 behind 40" and "ms" in row for row in whole["rows"])


def test_what_is_missing_comes_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_light, "NEEDED", {"absent_here": "absent-here"})
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(SystemExit, match="absent-here cannot be imported"):
        first_light.install(None)
    wheel = tmp_path / "absent_here-1.0-py3-none-any.whl"
    info = "absent_here-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("absent_here.py", "ANSWER = 42\n")
        file.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: absent-here\nVersion: 1.0\n"
        )
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")
    first_light.install(tmp_path)
    import absent_here  # type: ignore[import-not-found]

    assert absent_here.ANSWER == 42
