"""Trials of input that is wrong: requests, frames, headers of KV, and tokens that are no text."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from campaign_bench import Bench
from campaign_trial import Outcome, Trial
from deployed_server import MODEL, Deployed
from malformed_requests import send_malformed
from mangled_frames import (
    LONGEST_S,
    Findings,
    mangled_kv_headers,
    mangled_log,
    mangled_messages,
    mangled_rpc,
    memory_bytes,
)
from streamed_texts import stream_texts

REQUESTS, FRAMES, ANSWERS = 2_000, 25_000, 2_000
GROWTH_BYTES = 64 << 20
WARM_UP = 500
"""Inputs before memory is measured."""


def resident_bytes(pid: int) -> int:
    """Return a process's memory that is resident and no file's."""
    with open(f"/proc/{pid}/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    return int(fields["RssAnon"].split()[0]) * 1024


def requests_run(bench: Bench, trial: Trial) -> Outcome:
    """Send malformed requests to a deployed server."""
    server = bench.server(trial.server)
    before = _processes(server)
    (router,) = server.pids("Router")
    send_malformed(server.url, MODEL, refused=WARM_UP, number=1_000_000)
    began_bytes = resident_bytes(router)
    tally = send_malformed(server.url, MODEL, refused=REQUESTS, number=1_000 * trial.seed)
    outcome = Outcome(tries=tally.by_class.total(), undocumented=tally.failures)
    outcome.measured = {f"answers_{name}": count for name, count in tally.by_class.items()}
    if _processes(server) != before:
        outcome.missed.append("a process of the server was replaced")
        return outcome
    grown = resident_bytes(router) - began_bytes
    outcome.measured["router_grew_mib"] = round(grown / 2**20, 1)
    if grown > GROWTH_BYTES:
        outcome.missed.append(f"the router grew by {grown >> 20} MiB")
    return outcome


def _processes(server: Deployed) -> set[int]:
    return set().union(
        *(server.pids(name) for name in ("Router", "Registry", "PrefillGang", "DecodeGang"))
    )


Mangled = Callable[[int, int], Findings]


def rpc(seed: int, count: int) -> Findings:
    """Send mangled RPC frames on an event loop of their own."""
    return asyncio.run(mangled_rpc(seed, count))


FRAME_KINDS: dict[str, Mangled] = {
    "RPC frames": rpc,
    "RPC messages": mangled_messages,
    "log frames": mangled_log,
    "KV headers": mangled_kv_headers,
}


def frames_run(bench: Bench, trial: Trial) -> Outcome:
    """Mangle frames of one kind; both ends are in this process."""
    mangled = FRAME_KINDS[trial.target]
    with _quiet():
        mangled(1_000_000 + trial.seed, WARM_UP)
        before = memory_bytes()
        found = mangled(trial.seed, FRAMES)
        grown = memory_bytes() - before
    outcome = Outcome(tries=found.frames, undocumented=found.wrong)
    outcome.measured = {name.replace(" ", "_"): count for name, count in found.outcomes.items()}
    outcome.measured |= {
        "slowest_ms": round(1e3 * found.slowest_s, 2),
        "grew_mib": round(grown / 2**20, 1),
    }
    if found.slowest_s > LONGEST_S:
        outcome.missed.append(f"a frame took {found.slowest_s:.1f} s of a processor")
    if grown > GROWTH_BYTES:
        outcome.missed.append(f"this process grew by {grown >> 20} MiB")
    return outcome


@contextmanager
def _quiet() -> Iterator[None]:
    """Write no log: every refused frame leaves a line."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def texts_run(bench: Bench, trial: Trial) -> Outcome:
    """Stream answers of random tokens by several kinds of tokenizers."""
    with tempfile.TemporaryDirectory() as folder:
        found = stream_texts(Path(folder), count=ANSWERS, seed=trial.seed)
    outcome = Outcome(tries=found.answers, wrong=len(found.wrong), missed=found.wrong)
    outcome.measured["longest_window"] = found.longest_window
    return outcome


TRIALS = [
    *(
        Trial(fault="malformed input", target="HTTP requests", seed=seed, server="pair",
              run=requests_run, about_s=90, limit_s=900)
        for seed in range(1, 6)
    ),
    *(
        Trial(fault="malformed input", target=kind, seed=seed, run=frames_run, about_s=60,
              limit_s=900)
        for kind in FRAME_KINDS
        for seed in range(1, 5)
    ),
    Trial(fault="malformed input", target="streamed tokens", seed=1, run=texts_run, about_s=60,
          limit_s=600),
]  # fmt: skip
