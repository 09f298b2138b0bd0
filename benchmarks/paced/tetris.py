"""Policies on Tetris' three traces, one load each, on paced ranks behind the real router.

    python benchmarks/paced/tetris.py [--traces short medium long] [--policies ...] [--seconds 12]
                                      [--seed 0] [--results FOLDER]

Sixteen prefill instances have the times of the paper's Table 1 (`clusters/16.yaml`, whose tokens
cost sixteen times as much: prompts are a sixteenth as long). The load is slightly too high for
Fixed-SP 8, so that policies differ by the time that they need to get through. Answers have one
token, so that only prefill is compared. Beside each median stands the simulator's for the same
requests. With the defaults it takes less than six minutes.

FOLDER gets a file for each run, as load tests write them (`csps bench report` reads them), and a
summary, `paced-tetris.json`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

# Run as a script, the module path starts inside the folder, where `paced` is not a name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

import report

from csps.loadgen.results.record import RequestRecord
from csps.loadgen.results.result import (
    RunDescription,
    summarize,
    write_result,
)
from csps.loadgen.simulator.cluster_file import load_cluster
from csps.loadgen.simulator.simulate import (
    options_of,
    simulate,
)
from csps.loadgen.workloads.generate import (
    Arrivals,
    Size,
    generate,
)
from csps.loadgen.workloads.named import workload
from csps.loadgen.workloads.request import (
    FittedRequests,
    WorkloadRequest,
)
from paced.compare import CLUSTERS, SMALLER, ask_all
from paced.http_client import Answer
from paced.processes import served

LOADS = {"short": 4.6, "medium": 3.3, "long": 2.0}
"""Loads in requests a second."""
COMMON = ("max_batch=100000",)
CUT = (f"min_chunk={512 // SMALLER}",)
POLICIES: Mapping[str, tuple[str, ...]] = {
    "tetris": ("tetris", "improvement_rate=0.5", *CUT),
    "single-chunk": ("tetris", "improvement_rate=0.5", "chunked=false"),
    "loongserve-disagg": ("tetris", "improvement_rate=0", "chunked=false"),
    "fixed_sp 8": ("fixed_sp", "sp=8"),
    "fixed_sp 16": ("fixed_sp", "sp=16"),
}
CLUSTER = str(CLUSTERS / "16.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--traces", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--seconds", type=float, default=12.0, help="in which requests come")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    rows = [
        _row(trace, name, arguments) for trace in arguments.traces for name in arguments.policies
    ]
    about = {"benchmark": "paced_tetris", "seconds": arguments.seconds, "seed": arguments.seed}
    folder: Path | None = arguments.results
    report.publish(about, rows, None if folder is None else folder / "paced-tetris.json")


def _row(trace: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    policy, *options = POLICIES[name]
    options += COMMON
    requests = requests_of(trace, arguments.seconds, arguments.seed)
    expected = simulate(load_cluster(CLUSTER), policy, options_of(options), requests)
    with served(CLUSTER, policy, *options) as server:
        answers = uvloop.run(ask_all(server.port, requests.requests))
    facts = {"policy": policy, "policy_options": options_of(options), "workload": trace}
    facts |= {"cluster": "16", "seed": arguments.seed, "ranks_latest_ms": server.after["latest_ms"]}
    run = RunDescription(
        kind="live",
        label=f"{name} tetris-{trace}",
        model_id="paced",
        request_rate=LOADS[trace],
        facts=facts,
    )
    if arguments.results is not None:
        file = f"paced-{trace}-{name.replace(' ', '')}.json"
        write_result(
            summarize(records_of(requests.requests, answers), run), arguments.results / file
        )
    return {
        "trace": trace,
        "policy": name,
        "rate": LOADS[trace],
        "requests": len(answers),
        "p50_s": _median([answer.ttft_s for answer in answers]),
        "simulated_p50_s": _median([outcome.ttft_ns / 1e9 for outcome in expected.outcomes]),
        "latest_ms": round(server.after["latest_ms"], 1),
    }


def requests_of(trace: str, seconds: float, seed: int) -> FittedRequests:
    """Return a trace's requests at the cluster's scale, with answers of one token."""
    prompts, rate = workload(f"tetris-{trace}"), LOADS[trace]
    size = Size(longest_input=prompts.longest_input // SMALLER, longest_output=1)
    return generate(
        prompts, max(1, round(rate * seconds)), arrivals=Arrivals(rate=rate), seed=seed, size=size
    )


def records_of(
    requests: Sequence[WorkloadRequest], answers: Sequence[Answer]
) -> list[RequestRecord]:
    """Return records with times from the start of the run."""
    start = min(
        answer.sent - request.arrival_ns / 1e9
        for answer, request in zip(answers, requests, strict=True)
    )

    def since(at: float) -> int:
        return round((at - start) * 1e9)

    return [
        RequestRecord(
            scheduled_ns=request.arrival_ns,
            sent_ns=since(answer.sent),
            chunk_ns=(since(answer.first),),
            finished_ns=since(answer.last),
            input_tokens=request.input_length,
            output_tokens=answer.events,
            status="completed",
        )
        for request, answer in zip(requests, answers, strict=True)
    ]


def _median(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds), 3)


if __name__ == "__main__":
    main()
