"""Run guidellm and aiperf against a server, offline, with the included model's tokenizer.

Their reports check `csps bench serve`, and their success checks the API. `make guidellm` and `make
aiperf` install them into an environment of their own, because their requirements contradict
`constraints.txt`, and run this program in it::

    python benchmarks/load_testers.py guidellm --url http://127.0.0.1:8000 --rate 2 --requests 30

Only the standard library is used here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "models" / "needle"
DEADLINE_S = 900.0
_HUB_NAME = "csps/needle"
_TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load, the same for both tools."""

    url: str
    model: str
    rate: float
    """Requests per second, Poisson."""
    requests: int
    input_tokens: int = 512
    output_tokens: int = 16


@dataclass(frozen=True, kw_only=True)
class Found:
    """Figures that both tools report, in milliseconds."""

    completed: int
    failed: int
    mean_ttft_ms: float
    median_ttft_ms: float
    p99_ttft_ms: float
    mean_itl_ms: float
    mean_e2el_ms: float


def guidellm(load: Load, folder: Path, programs: Path) -> Found:
    """Run guidellm; its report stays in the folder.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    words = {
        "--backend": f"kind=openai_http,target={load.url},model={load.model},"
        "request_format=/v1/completions",
        "--profile": f"kind=poisson,rate={load.rate}",
        "--constraint": f"kind=max_requests,count={load.requests}",
        "--tokenizer": f"kind=hf_auto,model={TOKENIZER}",
        "--data": f"kind=synthetic_text,prompt_tokens={load.input_tokens},"
        f"output_tokens={load.output_tokens}",
        "--output": "kind=json,path=guidellm.json",
    }
    command = [str(programs / "guidellm"), "run", "--disable-console-interactive"]
    _run([*command, *(word for pair in words.items() for word in pair)], folder, {})
    report = json.loads((folder / "guidellm.json").read_text())
    (benchmark,) = report["benchmarks"]
    metrics = benchmark["metrics"]
    ttft = metrics["time_to_first_token_ms"]["successful"]
    totals = metrics["request_totals"]
    return Found(
        completed=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        mean_ttft_ms=ttft["mean"],
        median_ttft_ms=ttft["median"],
        p99_ttft_ms=ttft["percentiles"]["p99"],
        mean_itl_ms=metrics["inter_token_latency_ms"]["successful"]["mean"],
        mean_e2el_ms=1000 * metrics["request_latency"]["successful"]["mean"],
    )


def aiperf(load: Load, folder: Path, programs: Path) -> Found:
    """Run aiperf; its report stays in the folder.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    words = {
        "--model": load.model,
        "--url": load.url,
        "--endpoint-type": "completions",
        "--tokenizer": _HUB_NAME,
        "--request-rate": load.rate,
        "--request-count": load.requests,
        "--synthetic-input-tokens-mean": load.input_tokens,
        "--output-tokens-mean": load.output_tokens,
        "--extra-inputs": "ignore_eos:true",
        "--ui": "none",
        "--output-artifact-dir": folder / "aiperf",
    }
    command = [str(programs / "aiperf"), "profile", "--streaming", "--use-server-token-count"]
    command += [str(word) for pair in words.items() for word in pair]
    _run(command, folder, {"HF_HOME": str(_hub_cache(folder))})
    report = json.loads((folder / "aiperf" / "profile_export_aiperf.json").read_text())
    ttft = report["time_to_first_token"]
    failed = report.get("error_request_count") or {"avg": 0}
    return Found(
        completed=round(report["request_count"]["avg"]),
        failed=round(failed["avg"]),
        mean_ttft_ms=ttft["avg"],
        median_ttft_ms=ttft["p50"],
        p99_ttft_ms=ttft["p99"],
        mean_itl_ms=report["inter_token_latency"]["avg"],
        mean_e2el_ms=report["request_latency"]["avg"],
    )


TOOLS: Mapping[str, Callable[[Load, Path, Path], Found]] = {"guidellm": guidellm, "aiperf": aiperf}


def _run(command: Sequence[str], folder: Path, more: Mapping[str, str]) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **more}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    (folder / f"{Path(command[0]).name}.log").write_text(done.stdout)
    if done.returncode:
        sys.stderr.write(done.stdout[-4000:])
        done.check_returncode()


def _hub_cache(folder: Path) -> Path:
    """Make a cache of the Hugging Face hub with the tokenizer, the only place where aiperf looks
    without a network.
    """
    home = folder / "hub-cache"
    entry = home / "hub" / f"models--{_HUB_NAME.replace('/', '--')}"
    snapshot = entry / "snapshots" / "local"
    snapshot.mkdir(parents=True, exist_ok=True)
    (entry / "refs").mkdir(exist_ok=True)
    (entry / "refs" / "main").write_text("local")
    for name in _TOKENIZER_FILES:
        shutil.copy(TOKENIZER / name, snapshot)
    return home


def served_model(url: str) -> str:
    """Return the first model that the server lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        models: Any = json.load(answer)
    return str(models["data"][0]["id"])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tool", choices=TOOLS)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s, Poisson")
    parser.add_argument("--requests", type=int, default=30)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path, help="folder for the tool's own report")
    arguments = parser.parse_args()
    folder = arguments.out or Path(tempfile.mkdtemp(prefix=f"{arguments.tool}-"))
    folder.mkdir(parents=True, exist_ok=True)
    load = Load(
        url=arguments.url,
        model=served_model(arguments.url),
        rate=arguments.rate,
        requests=arguments.requests,
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
    )
    found = TOOLS[arguments.tool](load, folder, Path(sys.executable).parent)
    for name, value in vars(found).items():
        print(f"{name:<16} {value:g}")
    print(f"{arguments.tool}'s own report: {folder}")
    # guidellm may end before its last answers: what it does not count is no failure of the server.
    sys.exit(0 if found.completed and not found.failed else 1)


if __name__ == "__main__":
    main()
