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


def understood(it: Documented) -> argparse.Namespace:
    """As much of Helm's command line as the documents use."""
    parser = argparse.ArgumentParser(prog="helm")
    parser.add_argument("action", choices=("install", "upgrade", "test"))
    parser.add_argument("names", nargs="+")
    parser.add_argument("--namespace", "-n", required=True)
    parser.add_argument("--create-namespace", action="store_true")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--values", "-f", action="append", default=[])
    return parser.parse_intermixed_args(arguments(it))


def values_of(told: argparse.Namespace) -> Values:
    """Of the files, which are blocks that begin with their name, then of single settings."""
    blocks = {lines[0].removeprefix("# "): lines for _, kind, lines in fenced() if kind == "yaml"}
    values: Values = {}
    for name in told.values:
        values |= yaml.safe_load("\n".join(blocks[name]))
    for setting in told.set:
        path, _, value = setting.partition("=")
        *outer, last = path.split(".")
        reduce(lambda it, key: it.setdefault(key, {}), outer, values)[last] = value
    return values


def installed(it: Documented) -> Rendered:
    told = understood(it)
    name, chart = told.names
    return render(values_of(told), chart=ROOT / chart, release=name, namespace=told.namespace)


def installations() -> list[Documented]:
    return [it for it in documented("helm") if understood(it).action != "test"]


@pytest.mark.parametrize("it", installations(), ids=str)
def test_what_is_installed_has_all_that_other_commands_name(it: Documented) -> None:
    """In the namespace and under the name that they say."""
    rendered, told = installed(it), understood(it)
    assert rendered.of_kind("Pod")["metadata"]["annotations"]["helm.sh/hook"] == "test"
    service = rendered.of_kind("RayService")["metadata"]["name"]
    (wait,) = documented("kubectl")
    assert f"rayservice/{service}" in wait.words
    tests = [understood(other) for other in documented("helm")]
    for asked in (other for other in tests if other.action == "test"):
        assert (asked.names, asked.namespace) == (told.names[:1], told.namespace)
    assert wait.words[wait.words.index("-n") + 1] == told.namespace


def test_single_settings_reach_the_chart() -> None:
    first = installations()[0]
    image = installed(first).cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    assert image.startswith("registry.example.org/csps:")


@pytest.mark.parametrize("it", documented("kubectl"), ids=str)
def test_kubectl_understands_its_words(it: Documented, tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    words = [kubectl, *arguments(it), "--help"]  # which it heeds after it has read all others
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
