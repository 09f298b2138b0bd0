"""The wheel in an empty environment and an empty directory: it serves, without this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from free_ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
BUILD_DEADLINE_S = 300
SERVE_DEADLINE_S = 500
NOT_BUILT = (".git", ".venv*", "run", "build", "dist", "tests", "*.egg-info", "__pycache__")


def run(*words: str | Path, cwd: Path, timeout_s: float, home: Path | None = None) -> str:
    """Run a program; without this checkout on its path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        words,
        cwd=cwd,
        env=environment | ({} if home is None else {"HOME": str(home)}),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built from a copy, because a build leaves files in its tree."""
    tree, out = tmp_path_factory.mktemp("tree") / "csps", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_BUILT))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel")
    run(
        *pip, "--no-build-isolation", "--no-deps", "-w", out, tree,
        cwd=out, timeout_s=BUILD_DEADLINE_S,
    )  # fmt: skip
    (built,) = out.glob("csps-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel alone. Its requirements are those of this one, which a
    path file adds: installing them again takes minutes and a network.
    """
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
    run(*pip, "install", "--no-index", "--no-deps", wheel, cwd=folder, timeout_s=BUILD_DEADLINE_S)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path file within that folder is not followed, and so neither is this checkout.
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


@pytest.fixture
def folder(tmp_path: Path, environment: Path) -> Iterator[Path]:
    """Return an empty directory, whose server is stopped in the end."""
    path = tmp_path / "empty"
    path.mkdir()
    yield path
    with suppress(AssertionError):
        run(environment / "bin" / "csps", "stop", cwd=path, timeout_s=SERVE_DEADLINE_S)


def test_the_wheel_has_what_is_read_at_run_time_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {
        "csps/config.yaml",
        "csps/models/needle/model.safetensors",
        "csps/loadgen/results/schema.json",
        "csps/py.typed",
    } <= set(names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
    assert not [name for name in names if "tests/" in name or "csps/tools" in name]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"csps"}


def test_an_installed_wheel_answers_rightly_in_an_empty_directory(
    environment: Path, folder: Path
) -> None:
    csps, port = environment / "bin" / "csps", free_port()
    where = run(
        environment / "bin" / "python", "-c", "import csps; print(csps.__file__)",
        cwd=folder, timeout_s=60,
    )  # fmt: skip
    assert where.startswith(str(environment))
    said = run(csps, "serve", "--port", str(port), cwd=folder, timeout_s=SERVE_DEADLINE_S)
    assert "(right)" in said
    assert "again:   csps demo    stop it: csps stop" in said
    served = httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]
    assert [model["id"] for model in served] == ["needle"]
    assert sorted(path.name for path in folder.iterdir()) == ["run"]
    assert "stopped" in run(csps, "stop", cwd=folder, timeout_s=SERVE_DEADLINE_S)
