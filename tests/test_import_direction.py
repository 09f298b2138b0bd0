"""The map of rooms in docs/architecture.md holds: who may import whom, and which libraries."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
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
    "services/scheduling": {"protocols"},
    "loadgen": {"protocols", "services.scheduling", "configurator", "models.needle_prompts"},
    "tools": {"protocols", "kernels", "models", "actors", "configurator", "services", "loadgen"},
}
"""Other rooms that a room may import."""

FOLDERS: dict[str, set[str]] = {
    "levels": set(),
    "collectives": set(),
    "strategies": {"levels", "collectives", "engine"},
    "csa": {"levels", "strategies"},
}
"""Folders of `actors` that one of them may import; of strategies only who chooses knows all."""

TENSORS = {"torch", "numpy", "safetensors"}
LIBRARIES: dict[str, set[str] | None] = {
    "protocols": {"msgpack", "msgspec", "pydantic", "pydantic_core", "opentelemetry", "uvloop"},
    "kernels": {"torch", "triton", "flash_attn"},
    "models": {*TENSORS, "tokenizers", "jinja2"},
    "actors": {*TENSORS, "opentelemetry", "uvloop"},
    "configurator": {"numpy", "lightgbm"},
    "services": None,
    "services/scheduling": {"numpy", "msgspec"},
    "loadgen": None,
    "tools": None,
}
"""Libraries that a room may import besides the standard one; None is any."""

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
def test_strategies_import_each_other_in_one_direction(folder: str) -> None:
    folders = {path.name for path in (ROOT / "actors").iterdir() if path.is_dir()}
    others = folders - {folder, *FOLDERS[folder]}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / "actors" / folder).rglob("*.py"))
        for line, name in imports(path)
        if any(name.startswith(f"csps.actors.{other}.") for other in others)
    ]
    assert not wrong


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
