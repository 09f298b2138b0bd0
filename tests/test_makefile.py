"""`make clean` and a server that runs, with a `csps` that only notes what it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder of the Makefile with an environment that is up to date."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in (".venv/bin/python", ".venv/.installed"):
        (tmp_path / name).touch()
    (tmp_path / "run").mkdir()
    return tmp_path


def give_csps(checkout: Path, script: str) -> None:
    csps = checkout / ".venv" / "bin" / "csps"
    csps.write_text(f"#!/bin/sh\n{script}\n")
    csps.chmod(0o755)


def clean(checkout: Path) -> int:
    done = subprocess.run(["make", "clean"], cwd=checkout, capture_output=True, check=False)
    return done.returncode


def test_cleaning_stops_a_server_first(checkout: Path) -> None:
    """Without its state file no command could stop the server."""
    (checkout / "run" / "ray.json").touch()
    give_csps(checkout, 'test -e run/ray.json && echo "$@" > asked')
    assert clean(checkout) == 0
    assert (checkout / "asked").read_text() == "stop\n"
    assert not (checkout / "run").exists()


def test_a_failed_stop_preserves_the_state_file(checkout: Path) -> None:
    (checkout / "run" / "ray.json").touch()
    give_csps(checkout, "exit 1")
    assert clean(checkout) != 0
    assert (checkout / "run" / "ray.json").exists()


def test_without_a_server_nothing_is_asked(checkout: Path) -> None:
    give_csps(checkout, "touch asked")
    assert clean(checkout) == 0
    assert not (checkout / "asked").exists()
    assert not (checkout / ".venv").exists()
