"""Plants each fault of `faults.py` in a copy of the tree and sees that the named tests fail.

Usage: python tests/planted_faults/plant.py [--log FILE] [NAME ...]

Names are parts of the faults' names; without any, all faults are planted. Each fault gets one line:
its verdict, its name and the seconds that its tests took. The exit status is 1 unless all faults
were caught.
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
LIMIT_S = 120.0
"""For all tests of one fault."""
TEST_LIMIT_S = 20
"""For one of these tests: a lost event makes some of them wait."""

PATIENCE = {"tests/services/fake_gangs.py": ("PATIENCE_S = 60.0", "PATIENCE_S = 4.0")}
"""Texts of test helpers, and what replaces them: how long tests wait for what never comes."""

RUNNER = """
import importlib, sys
try:
    importlib.import_module(sys.argv[1])
except Exception:
    sys.exit(97)
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""
"""Imports a module, and then runs tests."""

Verdict = Literal["caught", "survived", "misplaced", "broken"]
"""Of a fault: its tests fail; they pass; its text is not in the file exactly once; or its tests
cannot run, or do not end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Plant the faults that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="parts of the names of faults; none means all")
    parser.add_argument(
        "--log", type=Path, help="append verdicts to this file, and skip the faults it calls caught"
    )
    parser.add_argument(
        "--no-baseline", action="store_true", help="do not run the tests without any fault first"
    )
    options = parser.parse_args(arguments)
    chosen = [it for it in FAULTS if _is_named(it, options.names)]
    known = _caught_before(options.log)
    faults = [it for it in chosen if _key(it) not in known]
    if not chosen:
        print("no fault has such a name")
        return 1
    verdicts: list[Verdict] = []
    with copied_tree() as tree:
        if faults and not options.no_baseline and not passes_without_faults(tree, faults):
            print("the tests fail without a fault")
            return 1
        for fault in faults:
            begin = time.monotonic()
            verdict = planted(tree, fault)
            verdicts.append(verdict)
            print(f"{verdict:9} {fault.name} ({time.monotonic() - begin:.1f} s)", flush=True)
            if options.log is not None:
                with options.log.open("a") as log:
                    log.write(f"{_key(fault)} {verdict} {fault.name}\n")
    skipped = len(chosen) - len(faults)
    caught = verdicts.count("caught")
    print(f"{caught + skipped} of {len(chosen)} faults were caught ({skipped} of them before)")
    return 0 if caught == len(faults) else 1


def planted(tree: Path, fault: Fault) -> Verdict:
    """Put a fault into a copied tree, run its tests there, and take it out again."""
    path = tree / fault.file
    sound = path.read_text()
    if sound.count(fault.old) != 1:
        return "misplaced"
    try:
        _write(path, sound.replace(fault.old, fault.new))
        status = run_tests(tree, fault.tests, importing=fault.file)
    finally:
        _write(path, sound)
    verdicts: dict[int, Verdict] = {0: "survived", 1: "caught"}
    return verdicts.get(status, "broken")


def passes_without_faults(tree: Path, faults: Iterable[Fault]) -> bool:
    """Whether all tests of these faults pass in a tree that has none."""
    tests = dict.fromkeys(test for it in faults for test in it.tests)
    return run_tests(tree, tuple(tests), limit_s=LIMIT_S * 5) == 0


def run_tests(
    tree: Path,
    tests: Sequence[str],
    *,
    importing: str = "protocols/span.py",
    limit_s: float = LIMIT_S,
) -> int:
    """Run tests of a copied tree up to the first failure.

    Args:
        importing: a file that is imported before: a fault that cannot be proves nothing.

    Returns:
        The exit status of pytest, or another one if they do not end in time.
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
    """Copy all files that git knows, or would add, to a temporary directory."""
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
        for helper, (patient, hasty) in PATIENCE.items():
            text = (tree / helper).read_text()
            assert text.count(patient) == 1, f"{helper} does not say {patient!r}"
            (tree / helper).write_text(text.replace(patient, hasty))
        found = _python(tree, "import csps.services as it; print(it.__path__[0])").stdout.strip()
        assert Path(found).resolve() == tree / "services", f"the copy would test {found}"
        yield tree


def _python(tree: Path, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=tree,
        env=_environment(tree),
        capture_output=True,
        text=True,
        check=False,
    )


def _environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}


def _write(path: Path, text: str) -> None:
    """Replace a file; what Python has compiled of it could pass for the new text's."""
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _is_named(fault: Fault, names: Sequence[str]) -> bool:
    return not names or any(name.lower() in fault.name.lower() for name in names)


def _key(fault: Fault) -> str:
    """A digest of the whole fault: one that was changed is planted again."""
    return hashlib.sha256(repr(fault).encode()).hexdigest()[:12]


def _caught_before(log: Path | None) -> set[str]:
    if log is None or not log.exists():
        return set()
    words = [line.split(maxsplit=2) for line in log.read_text().splitlines()]
    return {it[0] for it in words if len(it) > 1 and it[1] == "caught"}


if __name__ == "__main__":
    sys.exit(main())
