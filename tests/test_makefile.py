"""The Makefile, with a `csps` and a `pip` that only note what they are asked for, and the hosted
workflow, which calls it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

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


INDEX = "http://wheels.example.org/cpu"


def install(checkout: Path, *, driver: bool = False, status: int = 0, **variables: str) -> str:
    """Make the environment anew; return what make said.

    Args:
        driver: whether the machine has NVIDIA's.
        status: with which pip ends if it is asked for another index.
    """
    (checkout / ".venv" / ".installed").unlink()
    (checkout / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0\ntorchx==1\n")
    pip = checkout / ".venv" / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\necho "$@" >> asked\ncase "$*" in *index*) exit {status};; esac\n')
    pip.chmod(0o755)
    programs = checkout / "programs"
    programs.mkdir()
    for name in ("sh", "bash", "grep", "touch", "python3", "env"):
        (programs / name).symlink_to(shutil.which(name) or name)
    if driver:
        (programs / "nvidia-smi").symlink_to("/bin/true")
    done = subprocess.run(
        [shutil.which("make") or "make", ".venv/.installed", "SHELL=/bin/sh"],
        cwd=checkout,
        env={"PATH": str(programs), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def asked(checkout: Path) -> list[str]:
    return (checkout / "asked").read_text().splitlines()


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has a driver")
def test_without_a_driver_torch_comes_from_the_index_of_cpu_wheels(checkout: Path) -> None:
    assert install(checkout, CPU_WHEELS=INDEX) == ""
    first, second = asked(checkout)
    assert first.endswith(f"--no-deps --index-url {INDEX} torch==2.13.0")
    assert second.endswith("-c constraints.txt -e .")


def test_with_a_driver_torch_comes_from_the_usual_index(checkout: Path) -> None:
    install(checkout, driver=True)
    (only,) = asked(checkout)
    assert "index" not in only


def test_no_index_of_cpu_wheels_can_be_asked_for(checkout: Path) -> None:
    install(checkout, CPU_WHEELS="")
    assert len(asked(checkout)) == 1


@pytest.mark.skipif(Path("/proc/driver/nvidia").exists(), reason="this machine has a driver")
def test_an_index_that_cannot_be_reached_is_said_and_does_not_stop_the_rest(
    checkout: Path,
) -> None:
    said = install(checkout, status=1, CPU_WHEELS=INDEX)
    assert INDEX in said
    assert "gigabytes" in said
    assert "CPU_WHEELS=" in said
    assert asked(checkout)[-1].endswith("-e .")


def test_the_hosted_workflow_runs_what_is_here() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yaml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    lines = [
        [word for word in step["run"].split() if "=" not in word or word[0] == "-"]
        for step in steps
        if "run" in step
    ]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for program, *words in lines:
        if program == "make":
            assert set(words) <= targets
        elif program == "python":
            assert (ROOT / words[0]).is_file()
        else:
            assert program == "pip" or os.access(ROOT / program, os.X_OK)
    assert ["make", "audit"] in lines
    assert all("@" in step["uses"] for step in steps if "uses" in step), "an action is pinned"


def test_the_list_of_parts_is_made_of_what_is_installed() -> None:
    """`make audit` reads the file that pins what `make serve` installs."""
    recipe = (ROOT / "Makefile").read_text().partition("\naudit:")[2].partition("\n\n")[0]
    assert recipe.count("constraints.txt") == 2
    assert "--output-file dist/sbom.json" in recipe
    assert "--strict" in recipe, "a package that cannot be looked up is an error"
