"""The map of rooms in docs/architecture.md holds: who may import whom, and which libraries."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

ROOT = Path(__file__).resolve().parent.parent

ROOMS: dict[str, set[str]] = {
    "protocols": set(),
    "kernels": set(),
    "models": {"kernels"},
    "actors": {"protocols", "kernels", "models"},
    "configurator": {"protocols"},
    "services": {"protocols", "kernels", "models", "actors", "configurator"},
    "services/scheduling": {"protocols", "configurator.costs"},
    "loadgen": {"protocols", "services.scheduling", "configurator", "models.needle_prompts"},
    "tools": {"protocols", "kernels", "models", "actors", "configurator", "services", "loadgen"},
}
"""Other rooms that a room may import."""

TENSORS = {"torch", "numpy", "safetensors"}
LIBRARIES: dict[str, set[str] | None] = {
    "protocols": {"msgpack", "msgspec", "pydantic", "pydantic_core", "opentelemetry", "uvloop"},
    "kernels": {"torch", "triton", "flash_attn", "llvmlite"},
    "models": {*TENSORS, "tokenizers", "jinja2", "llguidance"},
    "actors": {*TENSORS, "opentelemetry", "uvloop"},
    "configurator": {"numpy", "lightgbm", "msgspec"},
    "services": None,
    "services/scheduling": {"numpy", "msgspec"},
    "loadgen": None,
    "tools": None,
}
"""Libraries that a room may import besides the standard one; None is any."""

PATHS = {
    path.relative_to(ROOT).as_posix(): path
    for room in ROOMS
    if "/" not in room
    for path in sorted((ROOT / room).rglob("*.py"))
}
MODULES = {f"csps.{name.removesuffix('.py').replace('/', '.')}": name for name in PATHS}


def _edges(path: Path) -> set[str]:
    """Return the product files that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {MODULES.get(name) or MODULES.get(node.module or "") for name in names}
        elif isinstance(node, ast.Import):
            found |= {MODULES.get(alias.name) for alias in node.names}
    return {name for name in found if name is not None and PATHS[name] != path}


EDGES = {name: _edges(path) for name, path in PATHS.items()}
FOLDERS = sorted({parent.as_posix() for name in EDGES for parent in Path(name).parents} - {"."})

NEVER: dict[str, set[str]] = {"loadgen": {"ray", "torch"}}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_map_allows(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for line, name in imports(path)
        if not allowed(room, name)
    ]
    assert not wrong


@pytest.mark.parametrize("folder", FOLDERS)
def test_parts_of_a_folder_import_each_other_one_way(folder: str) -> None:
    """Hold the subfolders of a folder, and its loose files as one part, to a graph without circles.

    Imports inside functions and under TYPE_CHECKING count as well.
    """
    imported: dict[str, set[str]] = {}
    for importer, found in EDGES.items():
        if importer.startswith(f"{folder}/"):
            part = _part(folder, importer)
            others = {_part(folder, path) for path in found if path.startswith(f"{folder}/")}
            imported.setdefault(part, set()).update(others - {part})
    assert not _circle(imported), f"{folder}: {' -> '.join(_circle(imported))}"


def test_files_import_each_other_one_way() -> None:
    """Hold all files of the product to a graph without circles."""
    assert not _circle(EDGES), " -> ".join(_circle(EDGES))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_is_a_plain_folder(room: str) -> None:
    """An `__init__.py` would make the folder a package of its own on a user's path."""
    assert (ROOT / room).is_dir()
    assert not list((ROOT / room).rglob("__init__.py"))
    assert (ROOT / "src" / "csps" / room).resolve() == ROOT / room


def test_tools_do_not_ship() -> None:
    """They make what ships, with libraries that a server does not need."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    find = settings["packages"]["find"]
    shipped = find_namespace_packages(str(ROOT / "src"), find["exclude"])
    assert "csps.models.needle_prompts" in shipped
    assert not [name for name in shipped if name.startswith("csps.tools")]


def test_tests_have_names_of_their_own() -> None:
    """Without packages, pytest tells test files apart by their base names only."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def _part(folder: str, path: str) -> str:
    """Return the subfolder that a file belongs to, or "." for a loose file."""
    first, slash, _ = path.removeprefix(f"{folder}/").partition("/")
    return first if slash else "."


def _circle(imported: Mapping[str, Set[str]]) -> list[str]:
    """Return the parts of a circle in order, or none."""
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            if module == "csps" or module.endswith("services"):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def allowed(room: str, module: str) -> bool:
    """Whether `room` may import `module`."""
    top, _, rest = module.partition(".")
    if top == "csps":
        rooms = {room.replace("/", "."), *ROOMS[room]}
        return not rest or any(rest == name or rest.startswith(f"{name}.") for name in rooms)
    if top in sys.stdlib_module_names:
        return True
    libraries = LIBRARIES[room]
    return top not in NEVER.get(room, set()) and (libraries is None or top in libraries)
