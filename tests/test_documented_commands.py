"""Commands in the documents are right: ours by our parsers, all others by where they are run."""

from __future__ import annotations

import argparse
import ast
import json
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
from csps.protocols.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    parse_request,
)
from csps.services.settings.hub import is_hub_id

CHECKED_ELSEWHERE = {
    "docker": "tests/deploy/test_images.py",
    "haproxy": "tests/examples/test_two_cells.py",
    "helm": "tests/helm/test_helm_commands.py",
    "kubectl": "tests/helm/test_helm_commands.py",
    "prometheus": "tests/end_to_end/test_observed.py",
}
"""Programs whose commands another test reads from the documents."""
CHECKED_HERE = ("csps", "make", "python", "curl", "ray", "hf")
TARGETS = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


class Parsed(Exception):
    """The words were understood."""


@pytest.fixture
def only_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop a program after it has parsed its arguments."""
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


def test_commands_are_in_checked_blocks() -> None:
    programs = {*CHECKED_HERE, *CHECKED_ELSEWHERE, "sudo", "pip"}
    for where, kind, lines in fenced():
        first = [line.split()[0] for line in lines if line.split()]
        if kind != "console":
            assert not programs & set(first[:1]), f"{where}: call this block `console`"


@pytest.mark.parametrize("command", documented("csps"), ids=str)
@pytest.mark.usefixtures("only_parsing")
def test_a_csps_command_parses(command: Documented) -> None:
    name, *words = arguments(command)
    with pytest.raises(Parsed):
        COMMANDS[name].load()(words)


@pytest.mark.parametrize("command", documented("make"), ids=str)
def test_a_target_exists(command: Documented) -> None:
    assert TARGETS is not None
    targets = [word for word in arguments(command) if "=" not in word]
    assert set(targets) <= set(TARGETS[1].split())


@pytest.mark.parametrize("command", documented("python"), ids=str)
@pytest.mark.usefixtures("only_parsing")
def test_a_benchmark_takes_these_arguments(
    command: Documented, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, *words = arguments(command)
    path = ROOT / script
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.syspath_prepend(str(path if path.is_dir() else path.parent))
    with pytest.raises(Parsed):
        runpy.run_path(str(path), run_name="__main__")


def after(words: Sequence[str], option: str) -> list[str]:
    return [value for name, value in pairwise(words) if name == option]


@pytest.mark.parametrize("command", documented("curl"), ids=str)
def test_a_curl_command_sends_a_valid_request(command: Documented) -> None:
    words = arguments(command)
    assert words[0] in ("http://127.0.0.1:8000/v1/completions", "http://127.0.0.1:8000/health")
    assert len(after(words, "-H")) == words.count("-H")
    for body in after(words, "-d"):
        if not body.startswith("@"):
            assert parse_request(CompletionRequest, body.encode()).model == "needle"


CALLS: dict[str, type[GenerationRequest]] = {
    "client.completions.create": CompletionRequest,
    "client.chat.completions.create": ChatCompletionRequest,
}
"""Calls of the openai client in Python examples, and what the server parses them as."""


def test_python_examples_send_requests_that_the_server_accepts() -> None:
    """Check calls whose arguments are all literals; a variable says nothing about its value."""
    parsed = []
    for _, kind, lines in fenced():
        tree = ast.parse("\n".join(lines)) if kind == "python" else ast.Module([], [])
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) not in CALLS:
                continue
            values = {str(keyword.arg): keyword.value for keyword in call.keywords}
            nodes = [node for value in values.values() for node in ast.walk(value)]
            if not any(isinstance(node, ast.Name) for node in nodes):
                body = {name: ast.literal_eval(value) for name, value in values.items()}
                body |= body.pop("extra_body", {})
                cls = CALLS[ast.unparse(call.func)]
                parsed.append(parse_request(cls, json.dumps(body).encode()))
    assert {type(request) for request in parsed} == set(CALLS.values())
    assert {request.model for request in parsed} == {"needle"}
    assert any(request.csps.explain for request in parsed)


@pytest.mark.parametrize("command", documented("ray"), ids=str)
def test_a_ray_start_command_has_a_valid_server_label(command: Documented) -> None:
    from ray.scripts.scripts import start

    name, *words = arguments(command)
    assert name == start.name
    labels = start.make_context(name, words).params["labels"]
    label, _, server = labels.partition("=")
    assert label == "csps.io/server"
    assert str(Location.parse(f"{server}-0")) == f"{server}-0"


@pytest.mark.parametrize("command", documented("hf"), ids=str)
def test_an_hf_command_downloads_a_model_by_its_id(command: Documented) -> None:
    """Other commands of the Hub's program would need a check of their own."""
    name, model = arguments(command)
    assert name == "download"
    assert is_hub_id(model)
