"""The documents' commands of Helm and kubectl, without a cluster: Helm renders what they install,
and kubectl's own parser reads its words, where it is there."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from functools import reduce
from pathlib import Path

import pytest
import yaml
from documented_commands import ROOT, Documented, arguments, documented, fenced
from rendered_chart import Rendered, Values, render


def understood(command: Documented) -> argparse.Namespace:
    """Parse as much of Helm's command line as the documents use."""
    parser = argparse.ArgumentParser(prog="helm")
    parser.add_argument("action", choices=("install", "upgrade", "test"))
    parser.add_argument("names", nargs="+")
    parser.add_argument("--namespace", "-n", required=True)
    parser.add_argument("--create-namespace", action="store_true")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--values", "-f", action="append", default=[])
    return parser.parse_intermixed_args(arguments(command))


def values_of(options: argparse.Namespace) -> Values:
    """Return the values of the files, which lie in the chart or are blocks that start with their
    name, and of single settings."""
    blocks = {lines[0].removeprefix("# "): lines for _, kind, lines in fenced() if kind == "yaml"}
    values: Values = {}
    for name in options.values:
        shipped = ROOT / name
        text = shipped.read_text() if shipped.is_file() else "\n".join(blocks[name])
        values |= yaml.safe_load(text)
    for setting in options.set:
        path, _, value = setting.partition("=")
        *outer, last = path.split(".")
        reduce(lambda section, key: section.setdefault(key, {}), outer, values)[last] = value
    return values


def installed(command: Documented) -> Rendered:
    options = understood(command)
    name, chart = options.names
    return render(values_of(options), chart=ROOT / chart, release=name, namespace=options.namespace)


def installations() -> list[Documented]:
    return [command for command in documented("helm") if understood(command).action != "test"]


@pytest.mark.parametrize("command", installations(), ids=str)
def test_what_is_installed_has_all_that_other_commands_name(command: Documented) -> None:
    """Look in the namespace and under the name that they give."""
    rendered, options = installed(command), understood(command)
    assert rendered.of_kind("Pod")["metadata"]["annotations"]["helm.sh/hook"] == "test"
    service = rendered.of_kind("RayService")["metadata"]["name"]
    (wait,) = [command for command in documented("kubectl") if "wait" in command.words]
    assert f"rayservice/{service}" in wait.words
    tests = [understood(other) for other in documented("helm")]
    for asked in (other for other in tests if other.action == "test"):
        assert (asked.names, asked.namespace) == (options.names[:1], options.namespace)
    assert wait.words[wait.words.index("-n") + 1] == options.namespace


def test_single_settings_reach_the_chart() -> None:
    first = installations()[0]
    image = installed(first).cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    assert image.startswith("registry.example.org/csps:")


@pytest.mark.parametrize("command", documented("kubectl"), ids=str)
def test_kubectl_commands_parse(command: Documented, tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    words = [kubectl, *arguments(command), "--help"]  # which it heeds after it has read all others
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
