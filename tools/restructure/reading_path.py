"""Counts what a reader has to read to follow one streamed prompt, in any checkout.

    python tools/restructure/reading_path.py CHECKOUT [--list]

The checkout's server is started with its own `config.yaml`, every process under coverage.py. A
*file of the path* is a product file of which a line runs while the prompt is served and not while
the server is idle. A *shape* is a product class that such a line makes; errors are not counted.
"""

from __future__ import annotations

import argparse
import ast
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from coverage import CoverageData

HOOK = """
import os, threading, time
if os.environ.get("READING_PATH"):
    import coverage
    folder, root = os.environ["READING_PATH"], os.environ["READING_PATH_ROOT"]
    measured = coverage.Coverage(
        data_file=f"{folder}/data", data_suffix=True, include=[f"{root}/*"],
        omit=[f"{root}/.venv/*"], config_file=False, messages=False,
    )
    measured.start()
    def follow():
        now = "start"
        while now != "stop":
            time.sleep(0.05)
            with open(f"{folder}/phase") as file:
                then = file.read()
            if then and then != now:
                now = then
                measured.switch_context(now)
                if now == "stop":
                    measured.stop(); measured.save()
                    open(f"{folder}/saved-{os.getpid()}", "w").close()
    threading.Thread(target=follow, daemon=True).start()
"""
"""`sitecustomize.py` of every process: it follows the phase that a file names."""
IDLE_S, PROMPT = 25.0, "The harbor of Oslo is quiet, and Reykjavik is plum. " * 900
FOLDERS = (
    "actors", "configurator", "kernels", "loadgen", "models", "protocols", "services", "src",
)  # fmt: skip


def main() -> None:
    """Serve one prompt from a checkout and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--list", action="store_true", help="name the files and shapes")
    given = parser.parse_args()
    root = given.checkout.resolve()
    with tempfile.TemporaryDirectory() as name:
        lines = ran(root, Path(name))
    path = {
        file: only
        for file, phases in sorted(lines.items())
        if (only := phases["request"] - phases["idle"])
    }
    shapes = sorted(set(made(root, path)))
    print(f"{root}: {len(path)} files, {len(shapes)} shapes")
    if given.list:
        print(*path, "", *shapes, sep="\n")


def ran(root: Path, folder: Path) -> Mapping[str, Mapping[str, set[int]]]:
    """Return the lines that ran in each file and phase."""
    (folder / "sitecustomize.py").write_text(HOOK)
    phase = folder / "phase"
    phase.write_text("start")
    environment = os.environ | {
        "PYTHONPATH": f"{folder}:{root / 'src'}",
        "READING_PATH": str(folder),
        "READING_PATH_ROOT": str(root),
    }
    csps = [sys.executable, "-m", "csps.cli"]
    subprocess.run([*csps, "serve"], cwd=root, env=environment, check=True)
    try:
        for name in ("idle", "request", "idle"):
            phase.write_text(name)
            time.sleep(0.5)
            if name == "request":
                ask()
            else:
                time.sleep(IDLE_S)
        phase.write_text("stop")
        wait_until_saved(folder)
    finally:
        subprocess.run([*csps, "stop"], cwd=root, env=environment, check=False)
    return lines_in(folder, root)


def wait_until_saved(folder: Path) -> None:
    """Wait until no process has saved its lines for ten seconds."""
    counted, since = -1, time.monotonic()
    while time.monotonic() < since + 10:
        now = len(list(folder.glob("saved-*")))
        if now != counted:
            counted, since = now, time.monotonic()
        time.sleep(0.5)


def lines_in(folder: Path, root: Path) -> Mapping[str, Mapping[str, set[int]]]:
    """Return the lines of product files by phase."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for file in folder.glob("data.*"):
        data = CoverageData(str(file))
        data.read()
        for source in data.measured_files():
            relative = str(Path(source).resolve().relative_to(root))
            if relative.split("/")[0] not in FOLDERS:
                continue
            for line, contexts in data.contexts_by_lineno(source).items():
                for context in contexts:
                    found[relative][context].add(line)
    return found


def ask() -> None:
    """Send one long prompt to the server and read its stream."""
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=120)
    body = {"model": "needle", "prompt": PROMPT, "max_tokens": 16, "stream": True}
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
    )
    answer = connection.getresponse().read()
    assert b"[DONE]" in answer, answer[-500:]


def made(root: Path, path: Mapping[str, set[int]]) -> Iterator[str]:
    """Yield the product classes that these lines of the files make."""
    trees = {
        file: ast.parse(file.read_text())
        for folder in FOLDERS
        for file in (root / folder).rglob("*.py")
    }
    classes = {
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.endswith(("Error", "Exceeded", "Lost"))
    }
    for file, lines in path.items():
        tree = ast.parse((root / file).read_text())
        owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or node.lineno not in lines:
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name == "cls":
                inside = [
                    owner.name
                    for owner in owners
                    if owner.lineno <= node.lineno <= (owner.end_lineno or 0)
                ]
                name = inside[-1] if inside else ""
            if name in classes:
                yield name


if __name__ == "__main__":
    main()
