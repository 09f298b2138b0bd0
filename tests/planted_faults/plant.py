"""Plants each fault of `faults.py` in a copy of the tree, and sees that its tests fail.

Usage: python tests/planted_faults/plant.py [--only NAME] [--log FILE]

Every fault gets a line: its verdict, its name, the seconds that its tests took. The exit status is
0 if all were caught.

==========  ============================================================================
caught      the tests fail with the fault, as they should
survived    they pass: a guarantee that no test holds
misplaced   the file does not have the fault's text exactly once: restate the fault
broken      the tests cannot run with the fault, or do not end: it proves nothing
==========  ============================================================================
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
FAULT_LIMIT_S = 240.0
"""Time limit of all tests of a fault."""
TEST_LIMIT_S = 60
"""Time limit of one of them: a lost event makes some of them wait."""

HASTE = (
    ("tests/services/fake_gangs.py", "PATIENCE_S = 60.0", "PATIENCE_S = 10.0"),
    (
        "tests/conftest.py",
        "derandomize=True",
        "derandomize=True, phases=[Phase.explicit, Phase.generate]",
    ),
    ("tests/conftest.py", "import HealthCheck, settings", "import HealthCheck, Phase, settings"),
)
"""Files of tests, their text, and what the copy has in its place: tests wait for less time for what
never comes, and do not look for the smallest example."""

RUNNER = """
import importlib, sys
try:
    importlib.import_module(sys.argv[1])
except Exception:
    sys.exit(97)
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""
"""Imports a module, then runs tests: a module that cannot be imported would fail any test."""

Verdict = Literal["caught", "survived", "misplaced", "broken"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the faults that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(description="Plant faults, and see that tests catch them.")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="plant faults with this in their name or file; may be repeated (default: all)",
    )
    parser.add_argument(
        "--log", type=Path, help="append verdicts to a file, and skip faults that it calls caught"
    )
    options = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if _is_chosen(fault, options.only)]
    if not chosen:
        print("no fault has such a name or file")
        return 1
    caught_before = _caught_before(options.log)
    faults = [fault for fault in chosen if _digest(fault) not in caught_before]
    verdicts: list[Verdict] = []
    with copied_tree() as tree:
        if faults and not passes_without_faults(tree, faults):
            print("the tests fail without a fault, too")
            return 1
        for fault in faults:
            begin = time.monotonic()
            verdict = verdict_on(tree, fault)
            verdicts.append(verdict)
            print(f"{verdict:9} {fault.name} ({time.monotonic() - begin:.1f} s)", flush=True)
            if options.log is not None:
                with options.log.open("a") as log:
                    log.write(f"{_digest(fault)} {verdict} {fault.name}\n")
    skipped = len(chosen) - len(faults)
    caught = verdicts.count("caught")
    print(f"{caught + skipped} of {len(chosen)} faults were caught ({skipped} of them before)")
    return 0 if caught == len(faults) else 1


def verdict_on(tree: Path, fault: Fault) -> Verdict:
    """Plant a fault in a copied tree, run its tests there, and take it out again."""
    path = tree / fault.file
    sound = path.read_text()
    if sound.count(fault.old) != 1:
        return "misplaced"
    try:
        _write(path, sound.replace(fault.old, fault.new))
        status = run_tests(tree, [fault.test], importing=fault.file)
    finally:
        _write(path, sound)
    verdicts: dict[int, Verdict] = {0: "survived", 1: "caught"}
    return verdicts.get(status, "broken")


def passes_without_faults(tree: Path, faults: Iterable[Fault]) -> bool:
    """Return whether the tests of these faults pass in a tree without faults."""
    tests = list(dict.fromkeys(fault.test for fault in faults))
    return run_tests(tree, tests, limit_s=FAULT_LIMIT_S * 5) == 0


def run_tests(
    tree: Path,
    tests: Sequence[str],
    *,
    importing: str = "protocols/core/errors.py",
    limit_s: float = FAULT_LIMIT_S,
) -> int:
    """Run tests of a copied tree up to the first failure.

    Args:
        importing: product file that is imported before.

    Returns:
        The exit status of pytest, or another one if the tests do not end in time.
    """
    module = ".".join(("csps", *Path(importing).with_suffix("").parts))
    command = [sys.executable, "-c", RUNNER, module, "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"--timeout={TEST_LIMIT_S}", *tests]
    try:
        return subprocess.run(
            command,
            cwd=tree,
            env=_environment(tree),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            check=False,
        ).returncode
    except subprocess.TimeoutExpired:
        return 98


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yield a copy, in a temporary directory, of all files that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as directory:
        tree = Path(directory).resolve()
        for name in filter(None, listed.split("\0")):
            if os.path.lexists(ROOT / name):
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
        for name, patient, hasty in HASTE:
            text = (tree / name).read_text()
            assert text.count(patient) == 1, f"{name} does not have {patient!r} once"
            (tree / name).write_text(text.replace(patient, hasty))
        where = "import csps.services as services; print(*services.__path__)"
        found = subprocess.run(
            [sys.executable, "-c", where],
            cwd=tree,
            env=_environment(tree),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        assert Path(found).resolve() == tree / "services", f"the copy would test {found}"
        yield tree


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}


def _write(path: Path, text: str) -> None:
    """Replace a file, and drop what Python has compiled of it, which could pass for the new one."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _is_chosen(fault: Fault, names: Sequence[str] | None) -> bool:
    known = f"{fault.name}\n{fault.file}".lower()
    return not names or any(name.lower() in known for name in names)


def _digest(fault: Fault) -> str:
    """Return a digest of the whole fault, so that one that was restated is planted again."""
    return hashlib.sha256(repr(fault).encode()).hexdigest()[:12]


def _caught_before(log: Path | None) -> set[str]:
    if log is None or not log.exists():
        return set()
    words = [line.split(maxsplit=2) for line in log.read_text().splitlines()]
    return {parts[0] for parts in words if len(parts) > 1 and parts[1] == "caught"}


if __name__ == "__main__":
    sys.exit(main())
