"""Carry the rename table out on a tree that has the old names: `python tools/restructure/apply.py`.

Nothing but names, places and imports changes. Prints what a person has to look at: names that a
folded file would define twice are told apart by a suffix.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from table import Modules, Rules, Table, read_table

BACKTICKED = re.compile(r"`([A-Za-z_][\w.]*)`")


def terminal(node: cst.CSTNode) -> str | None:
    """Return the last identifier of what stands before a dot."""
    match node:
        case cst.Name(value=name):
            return name
        case cst.Attribute(attr=cst.Name(value=name)):
            return name
        case cst.Call(func=inner):
            return terminal(inner)
        case cst.Subscript():
            return "[]"
    return None


def dotted_name(node: cst.BaseExpression | None) -> str:
    """Return a module path as text."""
    return "" if node is None else cst.Module([]).code_for_node(node)


class Rewriter(cst.CSTTransformer):
    """Renames one file's identifiers and imports."""

    lines: dict[cst.CSTNode, int] = {}  # noqa: RUF012

    def __init__(self, path: str, table: Table, modules: Modules) -> None:
        self.path, self.modules = path, modules
        self.rules: Rules = table.rules_for(path)
        new = table.new_path(path)
        from table import module_of

        self.own = module_of(new)
        self.inside: set[str] = set()
        self._owners: list[str] = []
        self._depths: list[int] = []
        self.notes: list[str] = []

    # --- identifiers ---

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self._owners.append(node.name.value)
        self._depths.append(0)

    def leave_ClassDef(
        self, original_node: cst.ClassDef, updated_node: cst.ClassDef
    ) -> cst.ClassDef:
        self._owners.pop()
        self._depths.pop()
        return updated_node

    @property
    def _owner(self) -> str | None:
        return self._owners[-1] if self._owners else None

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        return updated_node.with_changes(
            value=self.rules.names.get(updated_node.value, updated_node.value)
        )

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        key = (self._owner or "", original_node.name.value)
        if self._depths:
            self._depths[-1] -= 1
        if key in self.rules.members and not self._depths[-1]:
            return updated_node.with_changes(name=cst.Name(self.rules.members[key]))
        return updated_node

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        if self._depths:
            self._depths[-1] += 1

    def _field(self, target: cst.BaseExpression, updated: cst.BaseExpression) -> cst.BaseExpression:
        if isinstance(target, cst.Name) and self._owner is not None and not self._depths[-1]:
            new = self.rules.members.get((self._owner, target.value))
            if new is not None:
                return cst.Name(new)
        return updated

    def leave_AnnAssign(
        self, original_node: cst.AnnAssign, updated_node: cst.AnnAssign
    ) -> cst.AnnAssign:
        return updated_node.with_changes(
            target=self._field(original_node.target, updated_node.target)
        )

    def leave_AssignTarget(
        self, original_node: cst.AssignTarget, updated_node: cst.AssignTarget
    ) -> cst.AssignTarget:
        return updated_node.with_changes(
            target=self._field(original_node.target, updated_node.target)
        )

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        name = original_node.attr.value
        if isinstance(original_node.value, cst.Name) and original_node.value.value in self.inside:
            return cst.Name(self.rules.attribute(original_node.value.value, name, None, 0))
        new = self.rules.attribute(
            terminal(original_node.value), name, self._owner, self.lines.get(original_node, 0)
        )
        return updated_node.with_changes(attr=cst.Name(new))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        name = terminal(original_node.func)
        changed = []
        if name == "cls" and self._owner is not None:
            name = self._owner
        for old, new in zip(original_node.args, updated_node.args, strict=True):
            if old.keyword is not None:
                keyword = self.rules.keyword(
                    name or "", old.keyword.value, self.lines.get(old, 0)
                )
                new = new.with_changes(keyword=cst.Name(keyword))
            changed.append(new)
        return updated_node.with_changes(args=changed)

    # --- text ---

    def _text(self, text: str) -> str:
        text = self.modules.in_text(text)

        def name(match: re.Match[str]) -> str:
            parts = match[1].split(".")
            return "`" + ".".join(self.rules.names.get(part, part) for part in parts) + "`"

        return BACKTICKED.sub(name, text)

    def leave_SimpleString(
        self, original_node: cst.SimpleString, updated_node: cst.SimpleString
    ) -> cst.SimpleString:
        value = original_node.evaluated_value
        if isinstance(value, str) and value in self.rules.strings:
            quote = original_node.quote
            return updated_node.with_changes(
                value=f"{original_node.prefix}{quote}{self.rules.strings[value]}{quote}"
            )
        return updated_node.with_changes(value=self._text(original_node.value))

    def leave_Comment(self, original_node: cst.Comment, updated_node: cst.Comment) -> cst.Comment:
        return updated_node.with_changes(value=self._text(original_node.value))

    # --- imports ---

    def visit_Module(self, node: cst.Module) -> None:
        class Find(cst.CSTVisitor):
            def visit_ImportFrom(find, node: cst.ImportFrom) -> bool:
                module = dotted_name(node.module)
                if not isinstance(node.names, cst.ImportStar):
                    for alias in node.names:
                        full = f"{module}.{alias.evaluated_name}"
                        if full in self.modules and self.modules.of_module(full) == self.own:
                            self.inside.add(alias.evaluated_alias or alias.evaluated_name)
                return False

        node.visit(Find())

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        if len(original_node.body) != 1:
            return updated_node
        statement = original_node.body[0]
        if isinstance(statement, cst.Import):
            code = cst.Module([]).code_for_node(statement)
            new = self.modules.in_text(code)
            return updated_node if new == code else _parse(new, updated_node)
        if not isinstance(statement, cst.ImportFrom) or isinstance(statement.names, cst.ImportStar):
            return updated_node
        module = dotted_name(statement.module)
        lines = []
        touched = False
        for alias in statement.names:
            name, renamed = alias.evaluated_name, alias.evaluated_alias
            full = f"{module}.{name}"
            if full in self.modules:
                touched = True
                new = self.modules.of_module(full)
                package, _, base = new.rpartition(".")
                local = renamed or name
                if new != self.own:
                    lines.append(
                        f"from {package} import {base}" + ("" if local == base else f" as {local}")
                    )
            elif module in self.modules:
                touched = True
                new = self.modules.of_name(module, name)
                names = self.rules.names
                imported = self.modules.new_name(module, name)
                local = names.get(renamed or name, renamed or name)
                if new != self.own:
                    lines.append(
                        f"from {new} import {imported}"
                        + ("" if local == imported else f" as {local}")
                    )
                elif local != imported:
                    self.notes.append(f"{self.path}: {local} = {imported}")
                    lines.append(f"{local} = {imported}")
            else:
                if module.startswith("csps"):
                    self.notes.append(f"{self.path}: unknown import {full}")
                shown = f"{name} as {renamed}" if renamed else name
                lines.append(f"from {module} import {shown}")
        if not touched:
            # names of test modules and libraries
            code = cst.Module([]).code_for_node(statement)
            imported = ", ".join(
                self.rules.names.get(a.evaluated_name, a.evaluated_name)
                + (
                    f" as {self.rules.names.get(a.evaluated_alias, a.evaluated_alias)}"
                    if a.evaluated_alias
                    else ""
                )
                for a in statement.names
            )
            if module in self._local_modules:
                return _parse(f"from {self._local_modules[module]} import {imported}", updated_node)
            return updated_node
        if not lines:
            return cst.RemovalSentinel.REMOVE
        return _parse("\n".join(lines), updated_node)

    _local_modules: dict[str, str] = {}  # noqa: RUF012


def _parse(code: str, like: cst.SimpleStatementLine) -> cst.FlattenSentinel[cst.BaseStatement]:
    body = list(cst.parse_module(code + "\n").body)
    body[0] = body[0].with_changes(leading_lines=like.leading_lines)
    last = body[-1]
    assert isinstance(last, cst.SimpleStatementLine)
    body[-1] = last.with_changes(trailing_whitespace=like.trailing_whitespace)
    return cst.FlattenSentinel(body)


class Suffix(cst.CSTTransformer):
    """Tells private names of folded files apart."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.Attribute:
        return updated_node.with_changes(attr=original_node.attr)

    def leave_Arg(self, original_node: cst.Arg, updated_node: cst.Arg) -> cst.Arg:
        return updated_node.with_changes(keyword=original_node.keyword)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        return updated_node.with_changes(
            value=self.names.get(updated_node.value, updated_node.value)
        )


def rewrite(
    path: str, *, root: Path, table: Table, files: list[str], local: dict[str, str]
) -> tuple[str, list[str]]:
    """Return the new text of one file, and notes."""
    modules = Modules(table, files)
    rewriter = Rewriter(path, table, modules)
    rewriter._local_modules = local
    text = (root / path).read_text()
    if path in table.new_path(path) and not text.strip():
        return text, []
    try:
        module = cst.parse_module(text)
        if rewriter.rules.by_line:
            wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
            places = wrapper.resolve(PositionProvider)
            rewriter.lines = {
                node: (place.end.line if isinstance(node, cst.Attribute) else place.start.line)
                for node, place in places.items()
            }
        module = module.visit(rewriter)
    except Exception as error:
        raise RuntimeError(path) from error
    return module.code, rewriter.notes


def is_import(node: cst.CSTNode) -> bool:
    """Tell whether a top-level statement belongs among the imports."""
    if isinstance(node, cst.SimpleStatementLine):
        return len(node.body) == 1 and isinstance(node.body[0], cst.Import | cst.ImportFrom)
    return isinstance(node, cst.If) and "TYPE_CHECKING" in cst.Module([]).code_for_node(node.test)


def is_own_import(node: cst.CSTNode, path: str) -> bool:
    """Tell whether a statement imports from the file that it stands in."""
    from table import module_of

    if not (isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.ImportFrom)):
        return False
    return dotted_name(node.body[0].module) in (module_of(path), Path(path).stem)


def is_docstring(node: cst.CSTNode) -> bool:
    """Tell whether a statement is a bare string."""
    return (
        isinstance(node, cst.SimpleStatementLine)
        and isinstance(node.body[0], cst.Expr)
        and isinstance(node.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


def defined(node: cst.CSTNode) -> list[str]:
    """Return the names that a top-level statement binds."""
    if isinstance(node, cst.ClassDef | cst.FunctionDef):
        return [node.name.value]
    if isinstance(node, cst.SimpleStatementLine):
        names = []
        for small in node.body:
            targets: Sequence[cst.BaseExpression] = ()
            if isinstance(small, cst.Assign):
                targets = [one.target for one in small.targets]
            elif isinstance(small, cst.AnnAssign):
                targets = [small.target]
            for target in targets:
                if isinstance(target, cst.Name):
                    names.append(target.value)
                elif isinstance(target, cst.Tuple):
                    names += [
                        e.value.value for e in target.elements if isinstance(e.value, cst.Name)
                    ]
        return names
    return []


def imported(node: cst.CSTNode) -> dict[str, str]:
    """Return local name to origin of an import statement."""
    found: dict[str, str] = {}
    if isinstance(node, cst.SimpleStatementLine) and isinstance(node.body[0], cst.ImportFrom):
        statement = node.body[0]
        if not isinstance(statement.names, cst.ImportStar):
            for alias in statement.names:
                local = alias.evaluated_alias or alias.evaluated_name
                found[local] = f"{dotted_name(statement.module)}.{alias.evaluated_name}"
    return found


def fold(new: str, parts: list[tuple[str, str]]) -> tuple[str, list[str]]:
    """Put files one behind another.

    Args:
        parts: (old path, rewritten text) in order.
    """
    notes: list[str] = []
    docs: list[str] = []
    imports: list[str] = []
    bodies: list[str] = []
    known: dict[str, str] = {}
    origins: dict[str, str] = {}
    for old, text in parts:
        module = cst.parse_module(text)
        own = {
            name: module.code_for_node(node).strip()
            for node in module.body
            for name in defined(node)
        }
        clash = {n: c for n, c in own.items() if n in known and known[n] != c}
        for node in module.body:
            if is_own_import(node, new):
                continue
            for local, origin in imported(node).items():
                if origins.setdefault(local, origin) != origin:
                    notes.append(
                        f"{new}: {local} is imported from {origins[local]} and {origin} ({old})"
                    )
        stem = Path(old).stem
        if clash:
            suffixed = {name: f"{name}_{stem}" for name in clash}
            notes += [f"{new}: {name} of {old} -> {suffixed[name]}" for name in clash]
            module = module.visit(Suffix(suffixed))
            own = {suffixed.get(n, n): c for n, c in own.items()}
        body: list[str] = []
        for index, node in enumerate([*module.header, *module.body]):
            if not isinstance(node, cst.BaseStatement):
                continue
        if module.header:
            head = "".join(module.code_for_node(line) for line in module.header).strip()
            if head:
                body.append(head + "\n")
        skip_doc = False
        for index, node in enumerate(module.body):
            code = module.code_for_node(node)
            if index == 0 and is_docstring(node):
                docs.append(code.strip())
            elif is_own_import(node, new):
                pass
            elif is_import(node):
                imports.append(code.strip("\n"))
            elif defined(node) and all(known.get(n) == own.get(n) for n in defined(node)):
                skip_doc = True
                continue  # the same constant again
            elif skip_doc and is_docstring(node):
                pass
            else:
                body.append(code)
            skip_doc = False
        known.update(own)
        bodies.append("".join(body).strip("\n"))
    for name in known:
        if name in origins:
            notes.append(f"{new}: {name} is defined and imported from {origins[name]}")
    doc = docs[0] if docs else '"""Missing."""'
    if len(docs) > 1:
        rest = "\n\n".join(
            cst.ensure_type(cst.parse_expression(d), cst.SimpleString).raw_value.strip()
            for d in docs
        )
        doc = f'"""{rest}\n"""'
    future = "from __future__ import annotations"
    unique = list(dict.fromkeys(line for line in imports if line.strip() != future))
    return "\n\n".join([doc, future, "\n".join(unique), "\n\n\n".join(bodies)]) + "\n", notes


def extract_definitions(table: Table, texts: dict[str, tuple[str, list[str]]]) -> dict[str, str]:
    """Take definitions that leave their file out of it; return them by their new file."""
    from table import module_of

    leaving: dict[str, dict[str, str]] = defaultdict(dict)
    for (old, name), new in table.definitions.items():
        leaving[old][table.rules_for(old).names.get(name, name)] = new
    extracted: dict[str, str] = defaultdict(str)
    for old, names in leaving.items():
        text, said = texts[old]
        module = cst.parse_module(text)
        imports = [node for node in module.body if is_import(node)]
        staying, moved = [], defaultdict(list)
        last = None
        for index, node in enumerate(module.body):
            found = [names[name] for name in defined(node) if name in names]
            if found:
                last = found[0]
                moved[last].append(node)
            elif last is not None and is_docstring(node):
                moved[last].append(node)
            else:
                last = None
                staying.append(node)
        back = [
            cst.parse_statement(f"from {module_of(new)} import {name}") for name, new in names.items()
        ]
        place = next(i for i, node in enumerate(staying) if is_import(node)) + 1
        staying[place:place] = back
        texts[old] = (module.with_changes(body=staying).code, said)
        for new, nodes in moved.items():
            used = cst.Module(nodes).code
            others = [
                cst.parse_statement(f"from {module_of(table.new_path(old))} import {name}")
                for node in staying
                for name in defined(node)
                if re.search(rf"\b{name}\b", used)
            ]
            doc = [] if extracted[new] else [cst.parse_statement('"""Moved definitions."""')]
            part = cst.Module([*doc, *imports, *others, *nodes]).code
            extracted[new] = extracted[new] + part
    return extracted


def main() -> None:
    """Rewrite the tree below the current folder."""
    root = Path.cwd()
    table = read_table()
    tracked = subprocess.check_output(["git", "ls-files"], text=True).split("\n")
    tracked = [p for p in tracked if p and not (root / p).is_symlink() and (root / p).exists()]
    python = [p for p in tracked if p.endswith(".py") and not p.startswith("tools/restructure/")]
    rooms = "actors configurator kernels loadgen models protocols services src tools".split()
    files = [p for p in python if p.split("/")[0] in rooms]
    missing = [p for p in table.moves if not (root / p).exists()]
    if missing:
        sys.exit(f"not in this tree: {missing}")
    # modules of tests and benchmarks are imported by their base names
    local = {
        Path(old).stem: Path(table.new_path(old)).stem
        for old in python
        if old.startswith(("tests/", "benchmarks/"))
    }
    notes: list[str] = []
    with ProcessPoolExecutor(2) as pool:
        job = partial(rewrite, root=root, table=table, files=files, local=local)
        texts = dict(zip(python, pool.map(job, python, chunksize=20), strict=True))
    extracted = extract_definitions(table, texts)
    targets: dict[str, list[str]] = defaultdict(list)
    order = [*table.moves, *(p for p in python if p not in table.moves)]
    for path in order:
        if path in texts:
            targets[table.new_path(path)].append(path)
    for path, (_, said) in texts.items():
        notes += said
    for path in python:
        if table.new_path(path) != path:
            (root / path).unlink()
    for new in [*targets, *(path for path in extracted if path not in targets)]:
        olds = targets.get(new, [])
        if new in extracted:
            parts = [("moved", extracted[new]), *((old, texts[old][0]) for old in olds)]
            text, said = fold(new, parts)
            notes += said
        elif len(olds) == 1:
            text = texts[olds[0]][0]
        else:
            text, said = fold(new, [(old, texts[old][0]) for old in olds])
            notes += said
        (root / new).parent.mkdir(parents=True, exist_ok=True)
        (root / new).write_text(text)
    modules = Modules(table, files)
    star = table.rules_for("README.md")
    for path in tracked:
        if path.endswith(
            (".md", ".yaml", ".tpl", ".toml", ".json", "Makefile")
        ) and not path.startswith(
            ("benchmarks/results", "tests/frozen_surface", "tools/restructure", "CHANGELOG")
        ):
            text = (root / path).read_text()
            new = modules.in_text(text)
            if path.endswith(".md"):
                new = BACKTICKED.sub(
                    lambda m: "`" + ".".join(star.names.get(x, x) for x in m[1].split(".")) + "`",
                    new,
                )
            if new != text:
                (root / path).write_text(new)
    print("\n".join(notes))


if __name__ == "__main__":
    main()
