"""Compare `csps bench serve` with guidellm and aiperf on a server that stamps its own writes.

    python benchmarks/load_generator.py --testers .venv-load-testers --out FILE.json

Every tool sends the same load to `planted_server.py`. Its report is compared with the stamps. Its
processor time, of all its processes, is taken from two runs of different length, so that start-up
does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from load_testers import TOOLS, Found, Load

ROOT = Path(__file__).resolve().parents[1]
SLO_TTFT_MS, SLO_TPOT_MS = 100.0, 10.5
Tool = Callable[[Load, Path], Found]


@contextmanager
def planted_server(seed: int) -> Iterator[str]:
    """Start a server for one run, with the same delays as all others, and yield its address."""
    program = [sys.executable, str(ROOT / "benchmarks" / "planted_server.py"), "--seed", str(seed)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def csps(load: Load, folder: Path) -> Found:
    """Run our own tool as a user runs it."""
    path = folder / "csps.json"
    words = {
        "--base-url": load.url,
        "--num-prompts": load.requests,
        "--request-rate": load.rate,
        "--input-len": load.input_tokens,
        "--output-len": load.output_tokens,
        "--result-dir": folder,
        "--result-filename": path.name,
    }
    command = [sys.executable, "-m", "csps.cli", "bench", "serve", "--save-result", "--quiet"]
    command += [str(word) for pair in words.items() for word in pair]
    command += ["--goodput", f"ttft:{SLO_TTFT_MS}", f"tpot:{SLO_TPOT_MS}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result = json.loads(path.read_text())
    return Found(
        completed=result["completed"],
        failed=result["failed"] + result["cancelled"],
        **{name: result[name] for name in Found.__dataclass_fields__ if name.endswith("_ms")},
    )


def stamped(stamps: list[dict[str, Any]]) -> dict[str, float]:
    """Return the server's stamps of the same requests, under the names of a result."""
    written = [np.array([stamp["received"], *stamp["written"]]) / 1e6 for stamp in stamps]
    ttfts = np.array([times[1] - times[0] for times in written])
    tpots = np.array([(times[-1] - times[1]) / (len(times) - 2) for times in written])
    good = (ttfts <= SLO_TTFT_MS) & (tpots <= SLO_TPOT_MS)
    return {
        "mean_ttft_ms": float(ttfts.mean()),
        "median_ttft_ms": float(np.median(ttfts)),
        "p99_ttft_ms": float(np.percentile(ttfts, 99)),
        "mean_itl_ms": float(np.concatenate([np.diff(times[1:]) for times in written]).mean()),
        "mean_e2el_ms": fmean(float(times[-1] - times[0]) for times in written),
        "slo_attainment": float(good.mean()),
        "rate": float((len(stamps) - 1) / (np.ptp([stamp["received"] for stamp in stamps]) / 1e9)),
    }


def run_once(tool: Tool, load: Load, folder: Path, seed: int) -> dict[str, Any]:
    """Run one tool once; return its report, the server's stamps and its processor time."""
    with planted_server(seed) as url:
        spent = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = tool(Load(**(vars(load) | {"url": url})), folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        with urllib.request.urlopen(f"{url}/stamps", timeout=60) as answer:
            stamps = json.load(answer)
    cpu_s = after.ru_utime + after.ru_stime - spent.ru_utime - spent.ru_stime
    measured = stamps[-load.requests :]  # a tool may send a request or two to try the server
    row: dict[str, Any] = {"reported": vars(found), "stamped": stamped(measured), "cpu_s": cpu_s}
    if (folder / "csps.json").exists():
        own = json.loads((folder / "csps.json").read_text())
        row["reported"] |= {name: own[name] for name in ("slo_attainment", "request_goodput")}
        row["client_cpu_ms_per_request"] = own["client_cpu_ms_per_request"]
    return row


def compare(tool: Tool, load: Load, few: int, seed: int) -> dict[str, Any]:
    """Return the long run, with the cost of each of its further requests."""
    rows = []
    for requests in (few, load.requests):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(
                run_once(tool, Load(**(vars(load) | {"requests": requests})), Path(folder), seed)
            )
    short, long = rows
    more = load.requests - few
    off = {
        name: round(100 * (long["reported"][name] / value - 1), 2)
        for name, value in long["stamped"].items()
        if name in long["reported"] and value
    }
    cpu_ms = 1000 * (long["cpu_s"] - short["cpu_s"]) / more
    return {**long, "off_percent": off, "cpu_ms_per_request": round(cpu_ms, 3)}


def plain_client(name: str, load: Load) -> float:
    """Return the processor milliseconds of a request through a plain HTTP library."""
    program = [sys.executable, str(ROOT / "benchmarks" / "plain_clients.py"), name]
    with planted_server(seed=1) as url:
        words = ["--url", url, "--rate", str(load.rate), "--requests", str(load.requests)]
        done = subprocess.run([*program, *words], check=True, capture_output=True, text=True)
    return round(float(done.stdout), 3)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--testers", type=Path, help="environment with guidellm and aiperf")
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--few", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    tools: dict[str, Tool] = {"csps": csps}
    if arguments.testers:
        programs = arguments.testers / "bin"
        for name, run in TOOLS.items():
            tools[name] = lambda load, folder, run=run: run(load, folder, programs)
    load = Load(
        url="",
        model="planted",
        rate=arguments.rate,
        requests=arguments.requests,
        input_tokens=64,
        output_tokens=16,
    )
    results: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "nice": os.nice(0),
        "real_time": os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR),
        "load": vars(load),
        "slo": {"ttft": SLO_TTFT_MS, "tpot": SLO_TPOT_MS},
        "tools": {},
    }
    for name, tool in tools.items():
        row = results["tools"][name] = compare(tool, load, arguments.few, seed=1)
        print(f"{name}: {row['cpu_ms_per_request']} ms of processor time a request", flush=True)
        for part in ("reported", "stamped", "off_percent"):
            print(f"  {part}: {row[part]}")
    results["http_clients_cpu_ms_per_request"] = {
        name: plain_client(name, load) for name in ("httpx", "aiohttp")
    }
    print(f"HTTP libraries alone: {results['http_clients_cpu_ms_per_request']} ms a request")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
