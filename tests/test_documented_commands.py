"""Commands in the documents are right: ours by our parsers, all others by where they are run."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import pytest
from documented_commands import ROOT, Documented, commands, fenced

from csps.cli import COMMANDS
from csps.protocols.openai import CompletionRequest, parse_request

RUN_ELSEWHERE = {
    "helm": "tests/helm/test_helm_objects.py",
    "kubectl": "tests/helm/test_helm_objects.py",
    "ray": "tests/testbed/test_ray_cluster.py",
    "prometheus": "tests/end_to_end/test_observed.py",
}
"""Other people's programs, and the test that runs what the command is about."""
OURS = ("csps", "make", "python", "curl")
TARGETS = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


class Parsed(Exception):
    """The words were understood."""


@pytest.fixture
def only_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has parsed its arguments goes no further."""
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *args: Any, **more: Any) -> NoReturn:
        parse(self, *args, **more)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)


def program(it: Documented) -> str:
    """Which it is, whoever is to run it."""
    words = [word for word in it.words if word != "sudo"]
    return Path(words[0]).name


def arguments(it: Documented) -> list[str]:
    words = [word for word in it.words if word != "sudo"]
    return words[1:]


def documented(name: str) -> list[Documented]:
    return [it for it in commands() if program(it) == name]


def test_every_command_is_checked_somewhere() -> None:
    """A new program in a document needs a check here."""
    assert {program(it) for it in commands()} <= {*OURS, *RUN_ELSEWHERE}
    assert all((ROOT / path).is_file() for path in RUN_ELSEWHERE.values())


def test_commands_stand_in_blocks_that_are_checked() -> None:
    programs = {*OURS, *RUN_ELSEWHERE, "sudo", "pip"}
    for where, kind, lines in fenced():
        first = [line.split()[0] for line in lines if line.split()]
        if kind != "console":
            assert not programs & set(first[:1]), f"{where}: call this block `console`"


@pytest.mark.parametrize("it", documented("csps"), ids=str)
@pytest.mark.usefixtures("only_parsing")
def test_a_command_of_ours_is_understood(it: Documented) -> None:
    name, *words = arguments(it)
    with pytest.raises(Parsed):
        COMMANDS[name].load()(words)


@pytest.mark.parametrize("it", documented("make"), ids=str)
def test_a_target_exists(it: Documented) -> None:
    assert TARGETS is not None
    targets = [word for word in arguments(it) if "=" not in word]
    assert set(targets) <= set(TARGETS[1].split())


@pytest.mark.parametrize("it", documented("python"), ids=str)
@pytest.mark.usefixtures("only_parsing")
def test_a_benchmark_takes_these_arguments(it: Documented, monkeypatch: pytest.MonkeyPatch) -> None:
    script, *words = arguments(it)
    path = ROOT / script
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(path if path.is_dir() else path.parent))
    with pytest.raises(Parsed):
        runpy.run_path(str(path), run_name="__main__")


def after(words: Sequence[str], option: str) -> list[str]:
    return [value for name, value in pairwise(words) if name == option]


@pytest.mark.parametrize("it", documented("curl"), ids=str)
def test_a_question_to_the_server_is_one(it: Documented) -> None:
    words = arguments(it)
    assert words[0] in ("http://127.0.0.1:8000/v1/completions", "http://127.0.0.1:8000/health")
    assert len(after(words, "-H")) == words.count("-H")
    for body in after(words, "-d"):
        if not body.startswith("@"):
            assert parse_request(CompletionRequest, body.encode()).model == "needle"
