"""Serving systems by name: a policy, its options, and the gangs that it has of given GPUs.

Baselines of the papers are options of policies that serve live, too. On a cluster file with `gpus`
every system gets the same hardware; on one with `servers` it has to do with the gangs that are
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.cluster_file import (
    Arrangement,
    GangSizes,
    Gpus,
    load_cluster,
    read_gpus,
)
from csps.services.scheduling.policies.registry import policy_pairings

Layout = Literal["instances", "whole", "pair", "halves"]
"""Gangs of a system: an elastic gang of small instances, one with a whole server for each instance,
a pair of equal gangs of small instances, or a pair with half a server for each instance."""
VLLM_TOKENS = 600_000
"""Prompt tokens of an iteration of vLLM in LoongServe's experiments."""
PIPELINE_CHUNK = 4096
UNBOUNDED_BATCH = 4096
"""Batch limit that slots reach first, as in the papers' systems."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A serving system."""

    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sized: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    """Options that depend on the number of instances of the gang that prefills."""
    layout: Layout | None = None
    """None: as the policy needs."""
    pipeline_chunk: int | None = None

    def options_on(self, cluster: ClusterModel, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options, those that the user gives instead of its own."""
        instances = len(cluster.prefill.instances)
        sized = {name: size(instances) for name, size in self.sized.items()}
        return {**self.options, **sized, **given}

    def arrangement(self, gpus: Gpus) -> Arrangement:
        """Return the system's gangs."""
        tp, layout = gpus.tp, self.layout
        if layout is None:
            layout = "pair" if "pair" in policy_pairings(self.policy) else "instances"
        small = gpus.servers * (gpus.each // tp)
        sizes = {
            "instances": (GangSizes(instances=small, tp=tp), None),
            "whole": (GangSizes(instances=gpus.servers, tp=gpus.each), None),
            "pair": (GangSizes(instances=small // 2, tp=tp),) * 2,
            "halves": (GangSizes(instances=gpus.servers, tp=gpus.each // 2),) * 2,
        }
        prefill, decode = sizes[layout]
        return Arrangement(prefill=prefill, decode=decode, pipeline_chunk=self.pipeline_chunk)


def _everyone(instances: int) -> int:
    return instances


SYSTEMS = {
    "vllm_like": System(
        policy="loongserve",
        options={
            "static_dop": 1,
            "tipping_tokens": VLLM_TOKENS,
            "decode_iterations": 0,
            "max_batch": 256,
        },
        layout="whole",
    ),
    "sarathi": System(
        policy="chunked_prefill",
        options={"token_budget": 2048, "max_batch": 512},
        layout="whole",
    ),
    "distserve": System(policy="fixed_sp", options={"sp": 1}, layout="halves"),
    "static_tp": System(
        policy="loongserve",
        options={"static_dop": 1, "max_batch": UNBOUNDED_BATCH},
        layout="whole",
    ),
    "static_sp_tp": System(
        policy="loongserve",
        options={"max_batch": UNBOUNDED_BATCH},
        sized={"static_dop": _everyone},
        layout="instances",
    ),
    "replicas": System(
        policy="loongserve",
        options={"static_dop": 1, "max_batch": UNBOUNDED_BATCH},
        layout="instances",
    ),
    "loongserve_single": System(policy="loongserve", options={"max_prompts": 1}),
    "loongserve_disagg": System(
        policy="tetris", options={"improvement_rate": 0.0, "chunked": False}
    ),
    "single_chunk": System(policy="tetris", options={"chunked": False}),
    "fixed_sp_all": System(policy="fixed_sp", sized={"sp": _everyone}),
    "pipeline": System(
        policy="fixed_sp",
        sized={"sp": _everyone},
        layout="pair",
        pipeline_chunk=PIPELINE_CHUNK,
    ),
}
"""The papers' baselines:

vllm_like          whole prompts before all decoding, tensor parallelism over a server
sarathi            chunked prefill beside decoding (Sarathi-Serve, SplitFuse), likewise
distserve          half of a server prefills, half of it decodes
static_tp          LoongServe's scheduler without elasticity, tensor parallelism over a server
static_sp_tp       likewise, sequence parallelism over all small instances
replicas           likewise, every small instance by itself
loongserve_single  LoongServe that starts one prompt at a time
loongserve_disagg  LoongServe's groups on a prefill gang (Tetris' baseline)
single_chunk       Tetris without chunks
fixed_sp_all       one group of all prefill instances (Fixed-SP)
pipeline           chunked pipeline parallelism over all prefill instances (Medha, SGLang)
"""


def system_named(name: str) -> System:
    """Return a system of the list, or a policy with its own options."""
    return SYSTEMS.get(name) or System(policy=name)


def cluster_for(system: System, name_or_path: str, gangs: str | None = None) -> ClusterModel:
    """Return the cluster on which a system runs.

    Args:
        name_or_path: cluster file.
        gangs: gangs to make of its GPUs; None: the system's.

    Raises:
        ConfigError: the file is invalid, or the gangs do not fit.
    """
    if gangs is not None:
        return load_cluster(name_or_path, Arrangement.parse(gangs))
    gpus = read_gpus(name_or_path)
    if gpus is None:
        return load_cluster(name_or_path)
    return load_cluster(name_or_path, system.arrangement(gpus))
