"""Links in the documents resolve, and each mechanism of the papers has code and a test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from documented_commands import BENCHMARKS, DOCUMENTS, ROOT, arguments, benchmark_rows, documented

PAPERS = ROOT / "docs" / "papers.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SOURCE = re.compile(r"`([\w/]+\.py)`")
TO_WRITE = {"services/scheduling/policies/longest_first.py"}
"""Files that a how-to tells its reader to write."""
FENCED = re.compile(r"^ *```.*?^ *```", re.M | re.S)
SPARSE = re.compile(
    r"sparse attention|\bCSA\b|`csa`|drop[ _]ratio|% (?:is |of tokens )?dropped|coverage", re.I
)
FIGURE = re.compile(r"\d ?(?:[%\u00d7]|nats\b|m?s\b|µs\b|[KMG]i?B\b)|\d times as\b|\b\d+ of \d+\b")
MEASURED = re.compile(r"measured|\blos[et]\b|\bloss\b|questions?\b|faster|\bnats\b|takes \d", re.I)
INTERVAL = re.compile(r"\b95% (?:confidence )?intervals?\b")
"""No figure, but how one is judged."""
COMMAND = re.compile(r"\b(?:python benchmarks/\w+\.py|csps (?:profile|eval|bench|train|plan)\b)")
ROOMS = ("actors", "configurator", "kernels", "loadgen", "models", "protocols", "services")


def targets(text: str, document: Path) -> list[Path]:
    """Return files of this repository that a text links to."""
    links = [link.split("#")[0] for link in _LINK.findall(text) if "://" not in link]
    return [(document.parent / link).resolve() for link in links if link]


def sections(document: Path) -> Iterator[str]:
    """Yield the text below each heading, up to the next one."""
    text = document.read_text(encoding="utf-8")
    # A comment in a block of code is no heading.
    code = [block.span() for block in FENCED.finditer(text)]
    starts = [
        found.start()
        for found in re.finditer(r"^#+ ", text, re.M)
        if not any(begin < found.start() < end for begin, end in code)
    ]
    for begin, end in pairwise([0, *starts, len(text)]):
        yield text[begin:end]


def measured_figures(section: str) -> list[str]:
    """Return the paragraphs, lists and table rows that state measured figures of sparse attention.

    A table's row is read below its header.
    """
    prose = INTERVAL.sub("", FENCED.sub("", section))
    return [
        statement
        for paragraph in prose.split("\n\n")
        for statement in statements(paragraph.strip())
        if all(rule.search(statement) for rule in (SPARSE, FIGURE, MEASURED))
    ]


def statements(paragraph: str) -> list[str]:
    """Return a paragraph, or the rows of a table, each below its header."""
    if not paragraph.startswith("|"):
        return [paragraph]
    header, _, *rows = paragraph.splitlines()
    return [f"{header}\n{row}" for row in rows]


def row_files(text: str, document: Path) -> list[Path]:
    """Return the files of rows, not pages, that a text links to."""
    folder = ROOT / "benchmarks" / "results"
    found = [path for path in targets(text, document) if path.parent == folder]
    return [path for path in found if path.suffix in {".json", ".jsonl", ".csv"}]


def headings(document: Path) -> set[str]:
    """Return the names under which a page's headings are linked to."""
    lines = document.read_text(encoding="utf-8").splitlines()
    titles = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    found = targets(text, document)
    assert [path for path in found if not path.exists()] == []
    for link in _LINK.findall(text):
        page, _, heading = link.partition("#")
        if heading and "://" not in link:
            target = (document.parent / page).resolve() if page else document
            assert heading in headings(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_source_files_exist(document: Path) -> None:
    folders = [*ROOMS, "benchmarks", "examples", "src", "tests", "tools"]
    files = {
        str(path.relative_to(ROOT)) for name in folders for path in (ROOT / name).rglob("*.py")
    }
    ends = {"/".join(parts[-count:]) for path in files for parts in [path.split("/")]
            for count in range(1, len(parts) + 1)}  # fmt: skip
    named = set(_SOURCE.findall(document.read_text(encoding="utf-8")))
    assert named - ends - TO_WRITE == set()


def test_every_mechanism_has_code_and_a_test_and_numbers_if_measured() -> None:
    rows = [line for line in PAPERS.read_text().splitlines() if line.startswith("| ")]
    mechanisms = [row.split(" | ") for row in rows if not row.startswith("| section")]
    assert len(mechanisms) > 50
    for _, mechanism, code, test, numbers in mechanisms:
        assert {target.relative_to(ROOT).parts[0] for target in targets(code, PAPERS)} <= set(ROOMS)
        assert targets(code, PAPERS), mechanism
        assert all(target.name.startswith("test_") for target in targets(test, PAPERS)), mechanism
        assert targets(test, PAPERS), mechanism
        folders = {target.parent.relative_to(ROOT) for target in targets(numbers, PAPERS)}
        assert folders <= {Path("benchmarks/results")}, mechanism


def test_every_benchmark_and_every_result_is_on_the_page() -> None:
    """Named by a command or a link: who adds one adds its row."""
    folder = ROOT / "benchmarks"
    linked = set(targets(BENCHMARKS.read_text(encoding="utf-8"), BENCHMARKS))
    run = {(ROOT / arguments(command)[0]).resolve() for command in documented("python")}
    whole = {folder / "paced", folder / "testbed"}  # named as a whole
    files = {*folder.glob("*.*"), *(folder / "results").iterdir()}
    commands = {
        path for path in (folder / "paced").glob("*.py") if "add_argument" in path.read_text()
    }
    assert sorted(map(str, (files | commands) - linked - run)) == []
    assert whole <= linked


def test_every_figure_has_a_command_a_result_and_a_duration() -> None:
    rows = list(benchmark_rows())
    assert len(rows) > 50
    for figure, command, result, takes in rows:
        assert command.startswith("`"), figure
        assert result == "none published" or targets(result, BENCHMARKS), figure
        assert takes, figure


@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_of_sparse_attention_have_a_command_and_rows(document: Path) -> None:
    """One paragraph of the section names both: who adds a figure says how it was measured."""
    for section in sections(document):
        if figures := measured_figures(section):
            sources = [text for text in section.split("\n\n") if COMMAND.search(text)]
            assert any(row_files(text, document) for text in sources), figures
