"""`csps bench serve` as a user types it, against a server that stamps its own writes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from csps.cli import main
from csps.loadgen.results.result import read_result

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "loadgen" / "results" / "schema.json").read_text())
TTFT_MS, ITL_MS = 100, 10


@pytest.fixture(scope="module")
def planted() -> Iterator[str]:
    """Yield the base URL of a server in a process of its own."""
    program = [sys.executable, str(ROOT / "benchmarks" / "planted_server.py")]
    delays = ["--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)]
    with subprocess.Popen([*program, *delays], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def bench(planted: str, tmp_path: Path, *words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the result, and the stamps of the server by request id."""
    httpx.get(f"{planted}/stamps")
    saved = ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    fixed = ["--base-url", planted, "--disable-tqdm", *saved]
    assert main(["bench", "serve", *fixed, *words]) == 0
    stamps = httpx.get(f"{planted}/stamps").json()
    return read_result(tmp_path / "r.json"), stamps


def test_times_are_those_of_the_servers_own_stamps(planted: str, tmp_path: Path) -> None:
    """No time may be early or belong to another event, however busy the machine is.
    benchmarks/load_generator.py measures the deviation.
    """
    words = ["--num-prompts", "150", "--request-rate", "100", "--input-len", "40"]
    result, stamps = bench(planted, tmp_path, *words, "--output-len", "8", "--save-detailed")
    jsonschema.validate(result, SCHEMA)
    assert result["completed"] == 150
    by_id = {stamp["id"]: stamp for stamp in stamps}
    mine: list[float] = []
    theirs: list[float] = []
    for number, ttft in enumerate(result["ttfts"]):
        stamp = by_id[f"bench-{number}"]
        mine.append(ttft)
        theirs.append((stamp["written"][0] - stamp["received"]) / 1e9)
        gaps = [b - a for a, b in zip(stamp["written"], stamp["written"][1:], strict=False)]
        assert len(result["itls"][number]) == len(gaps) == 7
    assert all(client > server for client, server in zip(mine, theirs, strict=True))
    # A pause of a second affects many requests, but neither all nor most.
    assert min(mine) < 5 * min(theirs)
    spans = [(stamp["written"][-1] - stamp["written"][0]) / 7e6 for stamp in stamps]
    assert 0.2 < median(map(fmean, result["itls"])) * 1e3 / median(spans) < 5
    assert result["output_lens"] == [8] * 150


def test_goodput_is_that_of_the_servers_own_stamps(planted: str, tmp_path: Path) -> None:
    words = ["--num-prompts", "100", "--request-rate", "100", "--output-len", "4"]
    words += ["--goodput", f"ttft:{TTFT_MS}", "--save-detailed"]
    result, stamps = bench(planted, tmp_path, *words)
    good = [stamp["written"][0] - stamp["received"] <= TTFT_MS * 1e6 for stamp in stamps]
    seen = [1000 * ttft_s <= TTFT_MS for ttft_s in result["ttfts"]]
    assert result["slo_attainment"] == pytest.approx(fmean(seen))
    assert fmean(seen) <= fmean(good) < 0.8  # for its clients nothing is earlier than for itself
    seconds = result["duration"]
    assert result["request_goodput"] == pytest.approx(100 * result["slo_attainment"] / seconds)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_the_official_client_reads_the_same(planted: str, tmp_path: Path, backend: str) -> None:
    words = ["--backend", backend, "--num-prompts", "2", "--output-len", "5", "--save-detailed"]
    result, _ = bench(planted, tmp_path, *words)
    client = openai.OpenAI(base_url=f"{planted}/v1", api_key="none")
    if backend == "openai":
        stream = client.completions.create(model="planted", prompt="x", max_tokens=5, stream=True)
        texts = [chunk.choices[0].text for chunk in stream if chunk.choices]
    else:
        said = client.chat.completions.create(
            model="planted",
            messages=[{"role": "user", "content": "x"}],
            max_completion_tokens=5,
            stream=True,
        )
        texts = [chunk.choices[0].delta.content or "" for chunk in said if chunk.choices]
    assert len(texts) == 5
    text = "".join(texts)
    assert result["generated_texts"] == [text, text]
    assert result["output_lens"] == [5, 5]


def test_probes_are_sent_beside_the_load_and_counted_apart(
    planted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One user occupies the only slot; probes do not wait for it."""
    words = ["--num-prompts", "4", "--output-len", "40", "--max-concurrency", "1"]
    result, stamps = bench(planted, tmp_path, *words, "--probe-request-rate", "20")
    jsonschema.validate(result, SCHEMA)
    probes = [stamp for stamp in stamps if stamp["id"].startswith("probe-")]
    assert result["completed"] == result["num_prompts"] == 4
    assert len(stamps) == 4 + len(probes)
    assert 1 <= result["probe_completed"] <= len(probes)
    assert len(probes) - result["probe_completed"] <= 20, "those under way at the end"
    assert result["probe_failed"] == 0
    assert all(len(stamp["written"]) == 1 for stamp in probes if stamp["written"])
    # In an open loop at 20/s, so about as many as the run has twentieths of a second.
    assert len(probes) <= 20 * result["duration"] + 2
    assert TTFT_MS / 2 < result["probe_median_e2el_ms"] <= result["probe_p99_e2el_ms"]
    assert result["probe_p99_e2el_ms"] <= result["probe_max_e2el_ms"]
    assert "Probes beside the load" in capsys.readouterr().out


def test_without_probes_there_are_no_figures_of_them(planted: str, tmp_path: Path) -> None:
    result, stamps = bench(planted, tmp_path, "--num-prompts", "2", "--output-len", "2")
    assert len(stamps) == 2
    assert not [name for name in result if name.startswith("probe_")]


def test_a_closed_loop_and_a_trace(planted: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    words = ["--dataset-name", "mixed", "--max-input-len", "512", "--output-len", "4"]
    closed, _ = bench(
        planted, tmp_path, *words, "--num-prompts", "12", "--max-concurrency", "4",
        "--save-trace", str(trace),
    )  # fmt: skip
    assert closed["loop"] == "closed"
    assert closed["max_concurrent_requests"] == 4
    again, _ = bench(planted, tmp_path, "--dataset-path", str(trace), "--request-rate", "50")
    assert again["loop"] == "open"
    assert sorted(again["input_lens"]) == sorted(closed["input_lens"])
    assert again["workload"] == "trace.jsonl"


def test_warm_ups_are_not_counted(planted: str, tmp_path: Path) -> None:
    words = ["--num-prompts", "3", "--output-len", "2", "--num-warmups", "2"]
    result, stamps = bench(planted, tmp_path, *words)
    assert result["num_prompts"] == 3
    assert len(stamps) == 5


def test_a_time_limit_ends_the_run_not_the_report(planted: str, tmp_path: Path) -> None:
    words = ["--num-prompts", "1000", "--request-rate", "20", "--output-len", "2"]
    result, _ = bench(planted, tmp_path, *words, "--max-duration", "1")
    assert result["completed"] < 60
    assert result["cancelled"] > 0
    assert result["completed"] + result["cancelled"] == result["num_prompts"]
    assert result["num_prompts"] + result["not_sent"] == 1000


def test_ctrl_c_ends_the_run_not_the_report(planted: str, tmp_path: Path) -> None:
    httpx.get(f"{planted}/stamps")
    words = ["--base-url", planted, "--request-rate", "5", "--save-result", "--quiet"]
    command = [sys.executable, "-m", "csps.cli", "bench", "serve", *words]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not httpx.get(f"{planted}/stamps").json():
            assert time.monotonic() < deadline, "nothing was sent"
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert "Cancelled requests:" in printed
    (saved,) = tmp_path.glob("csps-5.0qps-planted-*.json")
    result = read_result(saved)
    assert result["not_sent"] > 900
    assert result["completed"] + result["cancelled"] == result["num_prompts"] > 0


def test_objectives_are_reported_apart(planted: str, tmp_path: Path) -> None:
    objectives = ['{"objective": "ttft", "max_accuracy_loss": 0.01}', '{"max_ttft_ms": 5000}']
    words = [word for objective in objectives for word in ("--objective", objective)]
    result, _ = bench(planted, tmp_path, "--num-prompts", "4", "--output-len", "2", *words)
    parts = {part["objective"]: part for part in result["by_objective"]}
    assert {name: part["num_prompts"] for name, part in parts.items()} == {
        "ttft max_accuracy_loss=0.01": 2,
        "default max_ttft_ms=5000": 2,
    }
    assert parts["default max_ttft_ms=5000"]["ttft_bound_met"] == 1


def test_metadata_and_label_are_in_the_result(planted: str, tmp_path: Path) -> None:
    words = ["--num-prompts", "1", "--output-len", "1", "--label", "mine", "--metadata", "gpu=none"]
    result, _ = bench(planted, tmp_path, *words)
    assert (result["label"], result["gpu"], result["model_id"]) == ("mine", "none", "planted")
    assert "mean_tpot_ms" not in result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "other"], "no model 'other'; it serves planted"),
        (["--goodput", "ttft"], "ttft:MILLISECONDS"),
        (["--dataset-name", "mixd"], "did you mean 'mixed'"),
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--dataset-path", "/nowhere"], "/nowhere"),
        (["--ramp-up-strategy", "linear"], "--ramp-up-start-rps"),
        (["--objective", '{"goal": 1}'], "--objective"),
        (["--tokenizer", "/nowhere"], "no tokenizer.json"),
        (["--max-model-len", "100", "--output-len", "200"], "do not fit"),
    ],
)
def test_a_mistake_is_one_line(
    planted: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--base-url", planted, "--num-prompts", "2", *words]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert "http://127.0.0.1:9: no connection" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--request-rate", "0"],
        ["--extra-body", "["],
        ["--extra-body", "1"],
        ["--percentile-metrics", "ttft,tpit"],
        ["--max-duration", "inf"],
    ],
)
def test_a_wrong_option_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", *words])
