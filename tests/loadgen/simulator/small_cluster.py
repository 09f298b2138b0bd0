"""A small cluster on which every policy runs, as a pair of gangs or as an elastic gang."""

from __future__ import annotations

from typing import Any

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import parse_cluster

MODEL = {
    "hidden": 1024,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 128,
    "layers": 8,
    "intermediate": 4096,
}
POLICIES: list[tuple[str, bool]] = [
    ("csps", False),
    ("fixed_sp", False),
    ("tetris", False),
    ("context_parallel", False),
    ("chunked_prefill", False),
    ("loongserve", True),
    ("context_parallel", True),
    ("chunked_prefill", True),
]
"""Policies, and whether their gang is elastic."""


def options_of(policy: str) -> dict[str, Any]:
    """Return options by which a policy is not slowed down by its defaults for short prompts."""
    return {"token_budget": 2048} if policy == "chunked_prefill" else {}


def cluster(*, elastic: bool = False, **more: Any) -> ClusterModel:
    """Two servers of four that prefill, and two that decode; or two of four that do both."""
    prefill = {"count": 2, "instances": 4, "permissions": ["prefill"], "kv_slots": 400_000}
    decode = {"count": 2, "instances": 2, "permissions": ["decode"], "kv_slots": 900_000}
    servers = [prefill, decode]
    if elastic:
        servers = [{**prefill, "permissions": ["prefill", "decode"]}]
    steps = {size: [0.01, 3e-5 / size, 2e-10 / size, 1e-10 / size] for size in (1, 2, 4, 8)}
    iterations = {size: [0.005, 1e-9 / size, 1e-4 / size] for size in (1, 2, 4, 8)}
    return parse_cluster(
        {
            "servers": servers,
            "links": {
                "inside": {"gbps": 800, "latency_us": 5},
                "between": {"gbps": 100, "latency_us": 20},
            },
            "latency": {"steps": steps, "decode": iterations, **more.pop("latency", {})},
            "model": MODEL,
            **more,
        },
        name="test",
    )
