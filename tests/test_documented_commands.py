"""Commands in the documents are right: ours by our parsers, all others by where they are run."""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import pytest
from documented_commands import ROOT, Documented, arguments, commands, documented, fenced, program

from csps.cli import COMMANDS
from csps.protocols.core.topology import Location
from csps.protocols.openai.requests import CompletionRequest, parse_request

CHECKED_ELSEWHERE = {
    "helm": "tests/helm/test_helm_commands.py",
    "kubectl": "tests/helm/test_helm_commands.py",
    "prometheus": "tests/end_to_end/test_observed.py",
}
"""Programs whose commands another test reads from the documents."""
CHECKED_HERE = ("csps", "make", "python", "curl", "ray")
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


def test_every_command_is_checked_somewhere() -> None:
    """A new program in a document needs a check here."""
    assert {program(command) for command in commands()} <= {*CHECKED_HERE, *CHECKED_ELSEWHERE}
    for name, path in CHECKED_ELSEWHERE.items():
        assert f'documented("{name}")' in (ROOT / path).read_text()


def test_commands_stand_in_blocks_that_are_checked() -> None:
    programs = {*CHECKED_HERE, *CHECKED_ELSEWHERE, "sudo", "pip"}
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


@pytest.mark.parametrize("it", documented("ray"), ids=str)
def test_ray_understands_its_words_and_csps_the_label(it: Documented) -> None:
    from ray.scripts.scripts import start

    command, *words = arguments(it)
    assert command == start.name
    labels = start.make_context(command, words).params["labels"]
    name, _, server = labels.partition("=")
    assert name == "csps.io/server"
    assert str(Location.parse(f"{server}-0")) == f"{server}-0"
