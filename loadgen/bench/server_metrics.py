"""Figures of the server's own `/metrics` for the time of a run, beside the client's.

Where both differ, the time is lost between them: in the client, in a proxy, or on the network. The
names are those that vLLM and csps share, under either prefix.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from csps.loadgen.client.connection import Server
from csps.protocols.core.errors import FaultError

_log = logging.getLogger(__name__)

ASK_S = 10.0
PREFIXES = ("csps:", "vllm:")
COUNTERS = {
    "prompt_tokens": "prompt_tokens_total",
    "generation_tokens": "generation_tokens_total",
    "preemptions": "num_preemptions_total",
    "retries": "request_retries_total",
    "failed": "request_failures_total",
    "refused": "requests_refused_total",
}
LATENCIES = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "tpot": "request_time_per_output_token_seconds",
    "e2el": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
    "decode": "request_decode_time_seconds",
}

Totals = dict[str, float]
"""Sums over all labels, by name without prefix."""


async def totals(server: Server) -> Totals | None:
    """Return the server's counters and sums; None if it shows none, as to other machines."""
    body = bytearray()
    try:
        async with asyncio.timeout(ASK_S):
            status = await server.send(server.encode("/metrics"), lambda data, _: body.extend(data))
    except (FaultError, TimeoutError) as error:
        _log.info("no metrics of the server: %s", error)
        return None
    return parsed(body.decode(errors="replace")) if status == 200 else None


def parsed(text: str) -> Totals | None:
    """Return the totals of a text in Prometheus' format; None if it is none of ours or vLLM's."""
    found: defaultdict[str, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(text):
            if family.name.startswith(PREFIXES):
                for sample in family.samples:
                    if not sample.name.endswith("_bucket"):
                        found[sample.name.partition(":")[2]] += sample.value
    except ValueError as error:
        _log.info("the server's metrics cannot be read: %s", error)
        return None
    return dict(found) or None


def between(before: Totals | None, after: Totals | None) -> dict[str, Any]:
    """Return the figures of a run from the totals before and after it; nothing without both.

    Other clients of the server are in them.
    """
    if before is None or after is None:
        return {}
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    figures: dict[str, Any] = {
        name: round(gained[series]) for name, series in COUNTERS.items() if series in gained
    }
    for name, series in LATENCIES.items():
        if count := gained.get(f"{series}_count"):
            figures[f"mean_{name}_ms"] = round(1e3 * gained[f"{series}_sum"] / count, 3)
    if asked := gained.get("prefix_cache_queries_total"):
        figures["prefix_cache_hit_rate"] = round(gained["prefix_cache_hits_total"] / asked, 4)
    return {"server_metrics": figures}
