"""Read the rename table of 0.2.0: moved files, folded files, renamed identifiers.

The table lies in `renames/`. `apply.py` of commit d16556e carried it out, and can do so again on a
fork's branch that still has the old names. `prove.py` holds the result to the old syntax trees.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field
from pathlib import Path

TABLE = Path(__file__).parent / "renames"


@dataclass
class Rules:
    """Renames that apply to one old file."""

    names: dict[str, str] = field(default_factory=dict)
    """Identifier to identifier, wherever it stands."""
    members: dict[tuple[str, str], str] = field(default_factory=dict)
    """(class, member) to member: its definition, `self.member`, and keywords of calls."""
    receivers: list[tuple[re.Pattern[str], str, str, set[int]]] = field(default_factory=list)
    """(what stands before the dot, attribute, new attribute, in these lines; none: in all)."""
    keywords: list[tuple[str, str, str, set[int]]] = field(default_factory=list)
    """(what is called, or `*`, keyword, new keyword, lines)."""
    strings: dict[str, str] = field(default_factory=dict)
    """Whole string constants."""

    def attribute(self, receiver: str | None, name: str, owner: str | None, line: int) -> str:
        """Return the new name of an attribute.

        Args:
            receiver: the identifier before the dot, `[]` behind a subscript; None if there is none.
            owner: the class in whose body the attribute is used.
            line: in the old file.
        """
        if receiver in ("self", "cls") and owner is not None and (owner, name) in self.members:
            return self.members[owner, name]
        for pattern, old, new, lines in self.receivers:
            if old == name and (not lines or line in lines) and pattern.fullmatch(receiver or ""):
                return new
        return self.names.get(name, name)

    def keyword(self, called: str, name: str, line: int) -> str:
        """Return the new name of a call's keyword."""
        if (called, name) in self.members:
            return self.members[called, name]
        for callee, old, new, lines in self.keywords:
            if old == name and callee in ("*", called) and (not lines or line in lines):
                return new
        return self.names.get(name, name)

    @property
    def by_line(self) -> bool:
        """Tell whether a rule names lines."""
        return any(rule[3] for rule in (*self.receivers, *self.keywords))


@dataclass
class Table:
    """The whole table."""

    moves: dict[str, str]
    """Old path to new path, of product files; several old ones may share a new one."""
    definitions: dict[tuple[str, str], str]
    """(old path, name) to the new path of definitions that leave their file."""
    rules: list[tuple[list[str], str, str, str]]
    """(scopes, kind, old, new)."""

    def new_path(self, path: str) -> str:
        """Return where a file lies now."""
        return self.moves.get(path, path)

    def rules_for(self, path: str) -> Rules:
        """Return the renames that apply to an old file; the more specific scope wins.

        Raises:
            ValueError: two rules of one rank give a name two new names.
        """
        rules = Rules()
        rank: dict[str, int] = {}
        for scopes, kind, old, new in self.rules:
            found = []
            lines: set[int] = set()
            for scope in scopes:
                pattern, _, numbers = scope.partition("@")
                if fnmatch.fnmatch(path, pattern):
                    found.append(_rank(pattern))
                    lines |= {int(number) for number in numbers.split("+") if number}
            if not found:
                continue
            if kind == "name":
                if rules.names.get(old, new) != new and rank[old] == max(found):
                    raise ValueError(f"{path}: {old} -> {rules.names[old]} and {new}")
                if rank.get(old, -1) <= max(found):
                    rules.names[old], rank[old] = new, max(found)
            elif kind == "str":
                rules.strings[old] = new
            elif kind.startswith("class:"):
                rules.members[kind.removeprefix("class:"), old] = new
            elif kind.startswith("call:"):
                rules.keywords.append((kind.removeprefix("call:"), old, new, lines))
            else:
                shape = {"*": ".*", "[]": r"\[\]"}.get(kind, kind)
                rules.receivers.append((re.compile(shape), old, new, lines))
        rules.receivers.sort(key=lambda rule: (not rule[3], rule[0].pattern == ".*"))
        rules.keywords.sort(key=lambda rule: (not rule[3], rule[0] == "*"))
        return rules


def read_table(folder: Path = TABLE) -> Table:
    """Read all files of the table."""
    moves: dict[str, str] = {}
    definitions: dict[tuple[str, str], str] = {}
    rules: list[tuple[list[str], str, str, str]] = []
    for path in sorted(folder.glob("*.moves")):
        for line in _lines(path):
            left, _, right = (part.strip() for part in line.partition("->"))
            if left.startswith("MOVE "):
                old, _, names = left.removeprefix("MOVE ").strip().partition(":")
                for name in names.split(","):
                    definitions[old, name.strip()] = right
            else:
                if left in moves:
                    raise ValueError(f"{path.name}: {left} is moved twice")
                moves[left] = right
    for path in sorted(folder.glob("*.names")):
        for line in _lines(path):
            parts = [part.strip() for part in line.replace("\\|", "\0").split(" | ")]
            if len(parts) != 3:
                raise ValueError(f"{path.name}: {line}")
            scope, left, new = parts
            scopes = [one.strip() for one in scope.split(",")]
            if left.startswith("str:"):
                rules.append((scopes, "str", left.removeprefix("str:"), new))
            elif left.startswith(("class:", "call:")):
                owner, _, name = left.rpartition(".")
                rules.append((scopes, owner, name, new))
            elif "." in left:
                receiver, _, name = left.rpartition(".")
                rules.append((scopes, receiver.replace("\0", "|"), name, new))
            else:
                rules.append((scopes, "name", left, new))
    return Table(moves, definitions, rules)


def _rank(scope: str) -> int:
    """Return how specific a scope is: a path goes before a pattern, a pattern before all files."""
    if scope == "*":
        return 0
    return 1 if "*" in scope else 2


def _lines(path: Path) -> list[str]:
    lines = [line.split("  #")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def module_of(path: str) -> str:
    """Return the dotted name that a product file imports as."""
    return "csps." + path.removesuffix(".py").replace("/", ".").removeprefix("src.csps.")


class Modules:
    """Where modules and their definitions lie after the moves."""

    def __init__(self, table: Table, files: list[str]) -> None:
        self._table = table
        self._path = {module_of(path): path for path in files}
        self._rules: dict[str, Rules] = {}

    def __contains__(self, module: str) -> bool:
        return module in self._path

    def of_module(self, module: str) -> str:
        """Return the new dotted name of an old module."""
        return module_of(self._table.new_path(self._path[module]))

    def new_name(self, module: str, name: str) -> str:
        """Return what a definition of an old module is called now."""
        path = self._path[module]
        if path not in self._rules:
            self._rules[path] = self._table.rules_for(path)
        return self._rules[path].names.get(name, name)

    def of_name(self, module: str, name: str) -> str:
        """Return the new module of a definition."""
        path = self._path[module]
        moved = self._table.definitions.get((path, name))
        return module_of(moved) if moved else self.of_module(module)

    def in_text(self, text: str) -> str:
        """Rewrite paths and dotted module names in prose, strings and configuration."""

        def dotted(match: re.Match[str]) -> str:
            parts = match[0].split(".")
            for length in range(len(parts), 1, -1):
                module = ".".join(parts[:length])
                if module in self:
                    rest = parts[length:]
                    new = self.of_name(module, rest[0]) if rest else self.of_module(module)
                    return ".".join([new, *rest])
            return match[0]

        def path(match: re.Match[str]) -> str:
            return self._table.new_path(match[0])

        text = re.sub(r"\bcsps(?:\.[A-Za-z_]\w*)+", dotted, text)
        rooms = (
            "actors|configurator|kernels|loadgen|models|protocols|services|tools|tests|benchmarks"
        )
        return re.sub(rf"\b(?:{rooms})/[\w/]+\.py\b", path, text)
