"""Carry out a Dockerfile without Docker: COPY into folders, RUN with this machine's Python.

Each stage is a folder and an environment of its own. Requirements are those of the environment that
runs the tests, so pip checks versions and installs nothing but the wheel. What changes the system
is checked and not run: packages of the distribution by their names, users by their numbers.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field
from pathlib import Path

STEP_S = 300
INSIDE = "/csps"
"""Folder of the image in which all steps work."""


@dataclass
class Stage:
    """A stage of a build, and what it has become."""

    base: str
    name: str
    root: Path
    workdir: str = "/"
    user: str = "root"
    environment: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)
    """Packages of the distribution."""
    users: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True)
        venv.create(self.root / "venv", with_pip=False)
        (site,) = self.root.glob("venv/lib/python*/site-packages")
        (site / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def here(self, path: str) -> Path:
        """Return the folder or file that stands for a path of the image."""
        full = path if path.startswith("/") else f"{self.workdir.rstrip('/')}/{path}"
        return self.root / os.path.normpath(full).lstrip("/")

    def run(self, line: str) -> str:
        """Run a line of the shell; return its output."""
        python = self.root / "venv" / "bin" / "python"
        pip = f"{sys.executable} -m pip --disable-pip-version-check --python {python}"
        text = re.sub(rf"(?<![\w./-]){INSIDE}(?=/)", f"{self.root}{INSIDE}", line)
        text = re.sub(r"^pip ", f"{pip} ", text)
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            ["bash", "-euc", text],
            cwd=self.here("."),
            env={
                **clean,
                **self.environment,
                "PATH": f"{python.parent}:{os.environ['PATH']}",
                "PIP_NO_INDEX": "1",
                "PIP_NO_BUILD_ISOLATION": "0",  # which means that there is none
                "HOME": str(self.root),
            },
            capture_output=True,
            text=True,
            timeout=STEP_S,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return the instructions with their arguments."""
    lines = [line for line in dockerfile.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    words = [line.strip().split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(name, " ".join(rest.split())) for name, rest in words]


def build(dockerfile: Path, context: Path, ignored: Path, folder: Path) -> Stage:
    """Carry out all steps; return the last stage."""
    stages: list[Stage] = []
    for name, text in instructions(dockerfile):
        if name == "FROM":
            base, _, alias = text.partition(" AS ")
            stages.append(Stage(base, alias, folder / str(len(stages))))
            continue
        stage = stages[-1]
        if name == "COPY":
            _copy(text, stage, {one.name: one for one in stages}, context, ignored)
        elif name == "RUN":
            _run(text, stage)
        elif name == "WORKDIR":
            stage.workdir = text
            stage.here(".").mkdir(parents=True, exist_ok=True)
        elif name == "ENV":
            stage.environment |= dict(word.split("=", 1) for word in shlex.split(text))
        elif name == "USER":
            stage.user = text
        elif name == "ENTRYPOINT":
            stage.entrypoint = json.loads(text)
        elif name == "CMD":
            stage.command = json.loads(text)
        else:
            assert name == "EXPOSE", f"{name} is not understood here"
    return stages[-1]


def _run(text: str, stage: Stage) -> None:
    for line in (part.strip() for part in text.split("&&")):
        words = shlex.split(line)
        if words[:2] == ["apt-get", "install"]:
            stage.packages += [word for word in words[2:] if not word.startswith("-")]
        elif words[0] == "useradd":
            stage.users[words[-1]] = int(words[words.index("--uid") + 1])
        elif words[0] not in ("apt-get", "rm", "install"):
            assert stage.user == "root", "packages are root's"
            stage.run(line)


def _copy(text: str, stage: Stage, named: dict[str, Stage], context: Path, ignored: Path) -> None:
    words = text.split()
    source: Path | None = None
    if words[0].startswith("--from="):
        source = named[words.pop(0).partition("=")[2]].here(words[0])
    target = stage.here(words[1])
    if source is None and words[0] == ".":
        copy_context(context, target, ignored)
    elif source is None:
        target.parent.mkdir(parents=True, exist_ok=True)
        assert not _left_out(words[0], _patterns(ignored)), f"{words[0]} is in .dockerignore"
        shutil.copy(context / words[0], target)
    else:
        shutil.copytree(source, target, dirs_exist_ok=True)


def copy_context(context: Path, target: Path, ignored: Path) -> None:
    """Copy what Docker would send of a folder."""
    patterns = _patterns(ignored)

    def left_out(folder: str, names: list[str]) -> list[str]:
        paths = {name: Path(folder, name).relative_to(context).as_posix() for name in names}
        return [name for name, path in paths.items() if _left_out(path, patterns)]

    shutil.copytree(context, target, symlinks=True, ignore=left_out, dirs_exist_ok=True)


def _patterns(ignored: Path) -> list[str]:
    lines = ignored.read_text().splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _left_out(path: str, patterns: list[str]) -> bool:
    """Return whether Docker would leave a file out: the last pattern that fits it, or a folder
    above it, decides.
    """
    out = False
    above = [path, *(parent.as_posix() for parent in Path(path).parents)][:-1]
    for pattern in patterns:
        wanted, is_exception = pattern.removeprefix("!"), pattern.startswith("!")
        anywhere = wanted.removeprefix("**/")
        if any(
            fnmatch.fnmatch(one.rpartition("/")[2] if anywhere != wanted else one, anywhere)
            for one in above
            if anywhere != wanted or one.count("/") == wanted.count("/")
        ):
            out = not is_exception
    return out
