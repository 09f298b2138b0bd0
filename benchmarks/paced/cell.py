"""The process of all paced ranks: `python benchmarks/paced/cell.py CLUSTER [--emitted]`.

It prints one line of JSON with the addresses of the ranks, and serves until its standard input is
closed. Then it prints another line with statistics, and with the time of every token on request.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path

import uvloop

# Run as a script, the module path starts inside the folder, where `paced` is not a name.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from csps.loadgen.simulator.cluster_file import load_cluster
from paced.decode import PacedDecode
from paced.prefill import PacedPrefill
from paced.ranks import PacedRanks, Words, timeline

SECRET = b"only for paced ranks on loopback"
FIRST_WORD, WORDS = 300, 800
"""First id and number of the needle model's tokens that are ordinary text."""


async def run(cluster_name: str, *, emitted: bool) -> None:
    """Serve until the standard input is closed."""
    cluster = load_cluster(cluster_name)
    clock = timeline()
    words = Words(range(FIRST_WORD, FIRST_WORD + WORDS))
    decode = PacedDecode(clock, cluster, words, SECRET)
    decode.emitted = [] if emitted else None
    gangs: list[PacedRanks] = [decode.ranks]
    prefill = None
    if len(cluster.roles) > 1:
        prefill = PacedPrefill(clock, cluster, decode, words, SECRET)
        gangs.insert(0, prefill.ranks)
    members = {
        role: asdict(await ranks.start()) for role, ranks in zip(cluster.roles, gangs, strict=True)
    }
    gc.freeze()
    print(json.dumps(members), flush=True)
    try:
        await asyncio.to_thread(sys.stdin.read)
    finally:
        for ranks in gangs:
            await ranks.close()
        print(
            json.dumps(
                {
                    "latest_ms": clock.latest_ns / 1e6,
                    "tokens": decode.tokens,
                    "left": decode.sequences + (prefill.steps if prefill else 0),
                    **({"emitted": decode.emitted} if emitted else {}),
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    uvloop.run(run(sys.argv[1], emitted="--emitted" in sys.argv))
