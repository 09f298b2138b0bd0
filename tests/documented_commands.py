"""The commands of the documents: every line of their `console` blocks, as words, and what the
tables of docs/benchmarks.md have in their column *command*."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "helm" / "csps" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
)
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
_CODE = re.compile(r"(?<!\[)`([^`]+)`")
_FENCE = re.compile(r"^ *```(.*)$")


@dataclass(frozen=True)
class Documented:
    """A command, and where it stands."""

    where: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.words)[:80]}"


def fenced() -> Iterator[tuple[str, str, list[str]]]:
    """Yield the place, the language and the lines of each block."""
    for document in DOCUMENTS:
        kind: str | None = None
        lines: list[str] = []
        where = ""
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
            if (fence := _FENCE.match(line)) is None:
                lines.append(line)
            elif kind is None:
                kind, lines = fence[1].strip(), []
                where = f"{document.relative_to(ROOT)}:{number}"
            else:
                yield where, kind, lines
                kind = None


def commands() -> list[Documented]:
    """Return all commands in the order of the documents."""
    found = []
    for where, kind, lines in fenced():
        if kind == "console":
            found += [Documented(where, words) for words in _commands("\n".join(lines))]
    return found + [
        Documented(BENCHMARKS.name, words)
        for _, command, _, _ in benchmark_rows()
        for code in _CODE.findall(command)
        for words in _commands(code)
    ]


def benchmark_rows() -> Iterator[list[str]]:
    """Yield figure, command, result and duration of each benchmark."""
    for line in BENCHMARKS.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| figure |"):
            yield line.strip("| ").split(" | ")


def documented(name: str) -> list[Documented]:
    """Return the commands of one program."""
    return [command for command in commands() if program(command) == name]


def program(command: Documented) -> str:
    """Return the program of a command, without `sudo`."""
    return Path(_unprivileged(command)[0]).name


def arguments(command: Documented) -> list[str]:
    """Return the program's arguments."""
    return _unprivileged(command)[1:]


def _unprivileged(command: Documented) -> list[str]:
    return [word for word in command.words if word != "sudo"]


def _commands(block: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands of a block. A command ends with its line, except for open quotes and a
    backslash at its end.
    """
    pending = ""
    for line in block.replace("\\\n", " ").splitlines():
        pending += line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # no closing quotation
            pending += "\n"
            continue
        pending = ""
        for joined, one in groupby(words, lambda word: word == "&&"):
            if not joined:
                yield tuple(one)
    assert not pending, f"a quotation stays open: {pending}"
