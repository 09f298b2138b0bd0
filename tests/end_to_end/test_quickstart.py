"""The commands of docs/quickstart.md, each as it stands there, in an empty directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from documented_commands import Documented, arguments, commands, program
from free_ports import free_port
from local_hub import local_hub
from tiny_checkpoints import make_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "Qwen/Qwen3-0.6B"
POSITIONS = 40_960
DEADLINE_S = 600
PROGRAMS = {
    "csps": (sys.executable, "-m", "csps.cli"),
    "hf": (str(Path(sys.executable).with_name("hf")),),
}
TYPED = "What is it about?\n/exit\n"
"""What the user says in `csps chat`."""
SAYS = {
    "serve": "ready: http",
    "ask": "tokens in",
    "chat": "tokens in",
    "check-config": "longest prompt: 16383 tokens",
    "bench": "Successful requests",
    "stop": "stopped",
    "download": "snapshots",
}
"""A part of what each command shows, by its first word."""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield variables under which the Hub has a small model of the id on the page."""
    made = make_checkpoint(tmp_path / "made", "qwen3", max_position_embeddings=POSITIONS)
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    with local_hub(MODEL, files) as hub:
        yield {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the directory of a user, whose server is stopped in the end."""
    path = tmp_path / "user"
    path.mkdir()
    (path / "notes.txt").write_text("A point. " * 1000)
    yield path
    with suppress(AssertionError):
        run(("csps", "stop"), path, {})


def run(words: tuple[str, ...], folder: Path, environment: dict[str, str]) -> str:
    """Run a command as a user types it; return all that it shows."""
    done = subprocess.run(
        [*PROGRAMS[words[0]], *words[1:]],
        cwd=folder,
        env={**os.environ, **environment},
        input=TYPED,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def quickstart() -> list[Documented]:
    return [each for each in commands() if each.where.startswith("docs/quickstart.md:")]


def test_every_command_of_the_quickstart_works(folder: Path, environment: dict[str, str]) -> None:
    """The port differs from the page's: another server may have that one."""
    port = str(free_port())
    shown: dict[str, list[str]] = {}
    for command in quickstart():
        (first, *rest) = arguments(command)
        takes_port = (first, *rest[:1]) in {("bench", "serve"), ("serve",), ("serve", MODEL)}
        more = ("--port", port) if takes_port else ()
        said = run((program(command), first, *rest, *more), folder, environment)
        assert SAYS[first] in said, said
        shown.setdefault(first, []).append(said)
    assert "(right)" in shown["serve"][0]
    assert "plum" in shown["ask"][0]
    assert MODEL in shown["serve"][1]
    assert "8" in next(
        line for line in shown["bench"][0].splitlines() if line.startswith("Successful requests")
    )
