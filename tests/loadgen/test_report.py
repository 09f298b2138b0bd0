"""The report: it needs nothing but itself, escapes what users write, and shows the numbers."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from csps.cli import main
from csps.loadgen.report import figures
from csps.loadgen.report.page import draw_all, page
from csps.loadgen.results.record import RequestRecord
from csps.loadgen.results.result import RunDescription, summarize, write_result
from csps.loadgen.workloads.request import RequestObjective, Slo

MS = 1_000_000
VOID = {"meta", "br", "img", "link", "input", "hr"}


def result(
    label: str = "csps", rate: float = 2.0, requests: int = 40, slow: int = 1, **run: Any
) -> dict[str, Any]:
    rng = np.random.default_rng(requests)
    records = []
    for number in range(requests):
        start = int(number / rate * 1000) * MS
        first = start + int(rng.gamma(2, 100 * slow)) * MS
        chunks = tuple(first + gap * 10 * MS for gap in range(5))
        failed = number % 13 == 12
        records.append(
            RequestRecord(
                scheduled_ns=start,
                sent_ns=start,
                chunk_ns=() if failed else chunks,
                finished_ns=chunks[-1],
                input_tokens=int(rng.integers(1, 5000)),
                output_tokens=5,
                status="failed" if failed else "completed",
                error="HTTP 429: busy" if failed else "",
                correct=None if failed else number % 2 == 0,
                objective=RequestObjective(objective="ttft") if number % 3 == 0 else None,
            )
        )
    kind = run.pop("kind", "live")
    settings = {"slo": Slo(ttft=200), "request_rate": rate, **run}
    return summarize(records, RunDescription(kind=kind, label=label, **settings))


class Page(HTMLParser):
    """Parser of a page: every tag with its attributes, and a check that tags are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


SEVERAL = [result(), result(rate=4.0, slow=3), result("other", kind="simulated", requests=25)]


@pytest.fixture(scope="module")
def text() -> str:
    return page(SEVERAL, "Load test")


def test_nothing_is_fetched_from_anywhere(text: str) -> None:
    for tag, attributes in Page(text).tags:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base", "image", "img"}
        for name, value in attributes.items():
            # Namespaces are names, not addresses.
            if not name.startswith("xmlns"):
                assert "//" not in (value or "")
            if name in ("href", "xlink:href", "src"):
                assert (value or "").startswith("#")
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}


def test_every_plot_is_well_formed_and_has_ids_of_its_own(text: str) -> None:
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) == 11
    ids: list[str] = []
    for svg in svgs:
        root = ElementTree.fromstring(svg)
        clips = {element.get("id") for element in root.iter() if element.tag.endswith("clipPath")}
        ids += [clip for clip in clips if clip]
        used = set(re.findall(r"url\(#([^)]+)\)", svg))
        assert used <= clips
    assert len(ids) == len(set(ids))


def test_user_text_is_escaped() -> None:
    label = "<script>alert('1')</script> & $x$"
    text = page([result(label)], label)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    Page(text)


def test_the_numbers_are_those_of_the_results(text: str) -> None:
    for result in SEVERAL:
        for field in ("median_ttft_ms", "p99_ttft_ms", "mean_e2el_ms"):
            assert f"<td>{result[field]:,.1f}</td>" in text
        assert f"<td>{result['slo_attainment']:.1%}</td>" in text
        assert figures.name(result) in text
    assert "HTTP 429" in text
    assert "other (2/s, simulated)" in text


def test_a_cdf_is_the_share_of_requests_up_to_each_latency() -> None:
    one = SEVERAL[0]
    axis = figures.figure(figures.cdf_of("ttfts", "TTFT"), [one]).axes[0]
    x, y = axis.lines[0].get_data()
    ttfts = [1000 * ttft_s for ttft_s in one["ttfts"] if ttft_s is not None]
    for latency, share in dict(zip(x, y, strict=True)).items():
        assert share == pytest.approx(
            sum(ttft <= latency * (1 + 1e-12) for ttft in ttfts) / len(ttfts)
        )
    assert axis.lines[1].get_xdata()[0] == 200


def test_medians_by_length_are_of_the_requests_in_their_range() -> None:
    one = SEVERAL[0]
    axis = figures.figure(figures.ttft_by_length, [one]).axes[0]
    points = dict(zip(*axis.lines[0].get_data(), strict=True))
    ranges: dict[int, list[tuple[int, float]]] = {}
    for length, ttft in zip(one["input_lens"], one["ttfts"], strict=True):
        if ttft is not None:
            ranges.setdefault(length.bit_length(), []).append((length, 1000 * ttft))
    assert len(points) == len(ranges)
    for its in ranges.values():
        lengths, ttfts = np.array(its).T
        assert points[np.median(lengths)] == pytest.approx(np.median(ttfts))


def test_runs_at_several_rates_are_lines_over_the_rate() -> None:
    plot = {name: drawing for name, _, drawing in draw_all(SEVERAL)}
    (line, point) = plot["ttft-by-rate"].axes[0].lines
    assert list(line.get_xdata()) == [2, 4]
    assert list(line.get_ydata()) == [result["median_ttft_ms"] for result in SEVERAL[:2]]
    assert list(point.get_xdata()) == [2]
    assert "ttft-by-rate" not in {name for name, _, _ in draw_all(SEVERAL[:1])}


def test_rows_without_values_are_left_out(text: str) -> None:
    """Load tests and simulations share a page; a value that only one of them has is shown beside a
    dash.
    """
    empty = page([summarize([], RunDescription(kind="live", label="empty"))], "Nothing")
    assert "<td>within SLO</td>" in text
    assert "<td>within SLO</td>" not in empty
    assert "<td>requests</td><td>0</td>" in empty
    assert re.search(r"<tr><td>[^<]+</td>(?:<td>-</td>)+</tr>", text + empty) is None


@pytest.mark.parametrize(("low", "high"), [(9.1, 9.9), (8.0, 21.0), (150.0, 9000.0)])
def test_every_axis_has_numbers_to_read(low: float, high: float) -> None:
    one = {**SEVERAL[0], "ttfts": list(np.linspace(low, high, 20) / 1000)}
    plot = figures.figure(figures.cdf_of("ttfts", "TTFT"), [one])
    plot.canvas.draw()
    axis = plot.axes[0].xaxis
    first, last = axis.get_view_interval()
    assert (
        sum(first <= get_majortickloc <= last for get_majortickloc in axis.get_majorticklocs()) >= 3
    )


def test_results_without_requests_can_be_shown() -> None:
    Page(page([summarize([], RunDescription(kind="live", label="empty"))], "Nothing"))


def test_the_command_writes_page_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, result in enumerate(SEVERAL):
        write_result(result, tmp_path / "in" / f"{number}.json")
    out = tmp_path / "out" / "report.html"
    words = [str(tmp_path / "in"), "-o", str(out), "--png-dir", str(tmp_path / "png")]
    assert main(["bench", "report", *words]) == 0
    assert str(out) in capsys.readouterr().out
    Page(out.read_text())
    assert {path.suffix for path in (tmp_path / "png").iterdir()} == {".png"}


@pytest.mark.parametrize("name", ["in", "x.json"])
def test_no_result_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    assert main(["bench", "report", str(tmp_path / name)]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_it_without_a_network(text: str, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(text)
    offline = ["--headless", "--no-sandbox", "--disable-gpu", "--proxy-server=127.0.0.1:9"]
    command = ["chromium", *offline, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [*command, path.as_uri()], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.count("<svg") == 11
    assert "other (2/s, simulated)" in done.stdout
