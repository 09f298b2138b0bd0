"""Hold the restructured tree to the old one: `python -m csps.tools.restructure.prove OLD NEW`.

Every old file's syntax tree, mapped through the rename table, must stand in the new file that the
table names, statement by statement and in order. Imports, docstrings and comments are left out:
imports are rewritten from the moves, and a missing one fails the type check.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict

from csps.tools.restructure.table import Modules, Rules, Table, module_of, read_table

_BOUND = re.compile(r"(?:ClassDef|FunctionDef)\(name='(\w+)'|Assign\(targets=\[Name\(id='(\w+)'")
BACKTICKED = re.compile(r"`([A-Za-z_][\w.]*)`")
ROOMS = {
    "actors",
    "configurator",
    "kernels",
    "loadgen",
    "models",
    "protocols",
    "services",
    "src",
    "tools",
}


class Mapped(ast.NodeTransformer):
    """Maps an old syntax tree through the table."""

    def __init__(self, path: str, table: Table, modules: Modules) -> None:
        self.rules: Rules = table.rules_for(path)
        self.modules, self.own = modules, module_of(table.new_path(path))
        self.inside: set[str] = set()
        self.owners: list[str] = []
        self.depths: list[int] = []

    def name(self, name: str) -> str:
        return self.rules.names.get(name, name)

    @property
    def owner(self) -> str | None:
        return self.owners[-1] if self.owners else None

    def member(self, name: str) -> str | None:
        if not self.depths or self.depths[-1]:
            return None
        return self.rules.members.get((self.owner or "", name))

    def visit_Module(self, node: ast.Module) -> ast.AST:
        for child in ast.walk(node):
            if isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    if full in self.modules and self.modules.of_module(full) == self.own:
                        self.inside.add(alias.asname or alias.name)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.owners.append(node.name)
        self.depths.append(0)
        node.name = self.name(node.name)
        self.generic_visit(node)
        self.owners.pop()
        self.depths.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self.member(node.name) or self.name(node.name)
        if self.depths:
            self.depths[-1] += 1
        self.generic_visit(node)
        if self.depths:
            self.depths[-1] -= 1
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        new = self.member(node.target.id) if isinstance(node.target, ast.Name) else None
        self.generic_visit(node)
        if new is not None:
            assert isinstance(node.target, ast.Name)
            node.target.id = new
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        new = [self.member(one.id) if isinstance(one, ast.Name) else None for one in node.targets]
        self.generic_visit(node)
        for target, name in zip(node.targets, new, strict=True):
            if name is not None and isinstance(target, ast.Name):
                target.id = name
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.name(node.id)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self.name(node.arg)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id in self.inside:
            return ast.Name(self.rules.attribute(node.value.id, node.attr, None, 0), node.ctx)
        node.attr = self.rules.attribute(
            terminal(node.value), node.attr, self.owner, node.end_lineno or 0
        )
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        called = terminal(node.func) or ""
        if called == "cls" and self.owner:
            called = self.owner
        for keyword in node.keywords:
            if keyword.arg is not None:
                keyword.arg = self.rules.keyword(called, keyword.arg, keyword.lineno)
        return self.generic_visit(node)

    def visit_MatchClass(self, node: ast.MatchClass) -> ast.AST:
        node.kwd_attrs = [self.name(one) for one in node.kwd_attrs]
        return self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> ast.AST:
        node.name = self.name(node.name) if node.name else None
        return self.generic_visit(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> ast.AST:
        node.name = self.name(node.name) if node.name else None
        return self.generic_visit(node)

    def visit_Global(self, node: ast.Global) -> ast.AST:
        node.names = [self.name(one) for one in node.names]
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.AST:
        node.names = [self.name(one) for one in node.names]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, str):
            value = self.rules.strings.get(node.value)
            if value is None:
                value = self.modules.in_text(node.value)
                value = BACKTICKED.sub(
                    lambda m: "`" + ".".join(self.name(one) for one in m[1].split(".")) + "`", value
                )
            node.value = value
        return node


def terminal(node: ast.AST) -> str | None:
    """Return the last identifier of what stands before a dot."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr=name):
            return name
        case ast.Call(func=inner):
            return terminal(inner)
        case ast.Subscript():
            return "[]"
    return None


class Bare(ast.NodeTransformer):
    """Takes away what is not compared."""

    def visit_Import(self, node: ast.Import) -> None:
        return None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        return None

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [
                one
                for one in body
                if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))
            ]
            node.body = kept  # type: ignore[attr-defined]
        return node


def statements(tree: ast.AST) -> list[str]:
    """Return the dumps of a module's statements, without imports and docstrings."""
    bare = Bare().visit(tree)
    return [
        ast.dump(one)
        for one in bare.body
        if not (isinstance(one, ast.If) and "TYPE_CHECKING" in ast.dump(one.test))
    ]


def show(commit: str, path: str) -> str:
    """Return a file at a commit."""
    return subprocess.check_output(["git", "show", f"{commit}:{path}"], text=True)


def main(old: str, new: str) -> None:
    """Compare two commits; exit with 1 if a statement is missing, changed or new."""
    table = read_table()
    listed = subprocess.check_output(["git", "ls-tree", "-r", old], text=True).splitlines()
    paths = [line.split("\t")[1] for line in listed if not line.startswith("120000")]
    python = [
        path for path in paths if path.endswith(".py") and not path.startswith("tools/restructure/")
    ]
    modules = Modules(table, [path for path in python if path.split("/")[0] in ROOMS])
    expected: dict[str, list[str]] = defaultdict(list)
    for path in [*table.moves, *(path for path in python if path not in table.moves)]:
        if path not in python:
            continue
        tree = Mapped(path, table, modules).visit(ast.parse(show(old, path)))
        leaving = {
            table.rules_for(path).names.get(name, name): new
            for (old_path, name), new in table.definitions.items()
            if old_path == path
        }
        for one in statements(tree):
            bound = re.match(
                r"(?:ClassDef|FunctionDef)\(name='(\w+)'|Assign\(targets=\[Name\(id='(\w+)'", one
            )
            name = (bound[1] or bound[2]) if bound else ""
            expected[leaving.get(name, table.new_path(path))].append(one)
    wrong = 0
    for path, lines in expected.items():
        try:
            found = statements(ast.parse(show(new, path)))
        except subprocess.CalledProcessError:
            found = []
        missing = [line for line in lines if line not in found]
        extra = [line for line in found if line not in lines]
        if missing or extra:
            wrong += 1
            print(f"{path}: {len(missing)} statements differ, {len(extra)} are new")
            if "-v" in sys.argv:
                for line in missing[:2]:
                    print("   -", line[:3000])
                for line in extra[:2]:
                    print("   +", line[:3000])
    print(f"{len(expected)} files compared, {wrong} differ")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
