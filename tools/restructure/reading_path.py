"""Counts what a reader has to read to follow one streamed prompt, in any checkout.

    python tools/restructure/reading_path.py CHECKOUT [--list]

The checkout's server is started with its own `config.yaml`, every process under coverage.py. A
*file of the path* is a product file of which a line runs while the prompt is served and not while
the server is idle. A *shape* is a record that is made for the prompt: a class that declares fields,
of which such a line makes an object (errors are not counted), and each bare tuple of several fields
or dict of named ones that a function of such a line takes or returns. Machinery is no shape: what
has methods and no declared fields is one of the files' ideas, not a form in which the request is
written down.
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
from collections.abc import Iterable, Iterator, Mapping, Set
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
    records, bare = shapes_of(root, path)
    print(f"{root}: {len(path)} files, {len(records)} records, {len(bare)} bare tuples and dicts")
    if given.list:
        named = [f"{file}: {_few(lines)}" for file, lines in path.items()]
        print(*named, "", *records, "", *bare, sep="\n")


def _few(lines: Set[int]) -> str:
    few = ", ".join(map(str, sorted(lines)))
    return f"{len(lines)} lines" if len(lines) > 9 else f"lines {few}"


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


def shapes_of(root: Path, path: Mapping[str, set[int]]) -> tuple[list[str], list[str]]:
    """Return the records that these lines make, and the bare tuples and dicts that cross the
    functions to which the lines belong."""
    trees = {
        str(file.relative_to(root)): ast.parse(file.read_text())
        for folder in FOLDERS
        for file in (root / folder).rglob("*.py")
        if not file.is_symlink()
    }
    records, bare = record_names(trees.values()), bare_names(trees.values())
    made: set[str] = set()
    crossing: set[str] = set()
    for file, lines in path.items():
        made.update(name for name in called_names(trees[file], lines) if name in records)
        crossing.update(crossing_functions(trees[file], lines, bare))
    return sorted(made), sorted(crossing)


def record_names(trees: Iterable[ast.Module]) -> set[str]:
    """Return the classes that declare fields, or inherit them, and are no errors."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    records: set[str] = set()
    bases = {"NamedTuple", "TypedDict", "BaseModel", "Struct"}
    grown = -1
    while grown != len(records):
        grown = len(records)
        for node in classes:
            decorators = {name_of(decorator) for decorator in node.decorator_list}
            inherited = {name_of(base) for base in node.bases}
            if "dataclass" in decorators or inherited & (bases | records):
                records.add(node.name)
    return {name for name in records if not name.endswith(("Error", "Exceeded", "Lost"))}


def bare_names(trees: Iterable[ast.Module]) -> set[str]:
    """Return the module-level aliases of bare records."""
    return {
        node.targets[0].id
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if is_bare(node.value, set())
    }


def is_bare(annotation: ast.expr | None, aliases: Set[str]) -> bool:
    """Return whether an annotation is a tuple of several fields, or a dict with named ones."""
    if isinstance(annotation, ast.Name):
        return annotation.id in aliases
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.slice, ast.Tuple):
        return False
    kind, parts = name_of(annotation.value), list(map(ast.unparse, annotation.slice.elts))
    if kind == "tuple":
        return "..." not in parts
    return kind in ("dict", "Mapping") and parts[0] == "str" and parts[1] in ("Any", "object")


def crossing_functions(tree: ast.Module, lines: Set[int], aliases: Set[str]) -> Iterator[str]:
    """Yield the bare records that functions with one of the lines take or return."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
            given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            for annotation in [node.returns, *(argument.annotation for argument in given)]:
                if is_bare(annotation, aliases) and not lines.isdisjoint(body):
                    yield ast.unparse(annotation)  # type: ignore[arg-type]


def called_names(tree: ast.Module, lines: Set[int]) -> Iterator[str]:
    """Yield the names that are called on these lines; `cls` by the name of its class."""
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or node.lineno not in lines:
            continue
        name = name_of(node)
        if name == "cls":
            around = [
                owner.name
                for owner in owners
                if owner.lineno <= node.lineno <= (owner.end_lineno or 0)
            ]
            name = around[-1] if around else ""
        yield name


def name_of(node: ast.expr) -> str:
    """Return the last name of an expression, of what it calls or of what it indexes."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return getattr(node, "id", getattr(node, "attr", ""))


if __name__ == "__main__":
    main()
