"""A release is the same bytes wherever it is built, and its archive builds the same wheel."""

from __future__ import annotations

import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from csps.tools.release import release

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
NOT_BUILT = (".git", ".venv*", "run", "build", "dist", "tests", "*.egg-info", "__pycache__")
EPOCH = 1_700_000_000


def tree(folder: Path, *, age_s: int) -> Path:
    """Return a copy of this checkout whose files are `age_s` old."""
    path = folder / "csps"
    shutil.copytree(ROOT, path, symlinks=True, ignore=shutil.ignore_patterns(*NOT_BUILT))
    for file in path.rglob("*"):
        if not file.is_symlink():
            os.utime(file, (EPOCH - age_s, EPOCH - age_s))
    return path


def test_two_builds_of_one_tree_are_equal(tmp_path: Path) -> None:
    built = [
        release(tree(tmp_path / str(age_s), age_s=age_s), tmp_path / f"out{age_s}", EPOCH)
        for age_s in (10, 1000)
    ]
    for one, other in zip(*built, strict=True):
        assert one.name == other.name
        assert one.read_bytes() == other.read_bytes()
    archive, wheel = built[0]
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    _, again = release(unpacked, tmp_path / "again", EPOCH)
    assert names(again) == names(wheel)


def names(wheel: Path) -> list[str]:
    return sorted(zipfile.ZipFile(wheel).namelist())
