"""How much main memory a server on this machine takes when it is full."""

from __future__ import annotations

from dataclasses import dataclass, replace

from csps.models.spec import ModelSpec, read_spec, share_of
from csps.protocols.gang_members import GangRole
from csps.services.cluster.gangs import resolve_device
from csps.services.launch.model_check import rank_parameters
from csps.services.launch.settings import Settings

GIB = 2**30
RAY_BYTES = 7 * GIB // 8
"""Ray and its dashboard; this and the next two as measured, common pages shared out, rounded up."""
SHELL_BYTES = 3 * GIB // 4
"""HTTP front, router, configurator and registry."""
RANK_BYTES = GIB // 4
"""Python and torch of one rank, without what is counted below."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """Bytes of main memory, by what they are for. All ranks together."""

    ranks: int
    """How many; not bytes."""
    ray: int = 0
    """What is there before any rank, where it is not there yet."""
    weights: int = 0
    kv_cache: int = 0
    """With every slot in use. The system backs a slot when it is first written, so a server
    starts with less, and would be killed on the way to its full load."""
    activations: int = 0
    """Of a prompt that fills the prefill slots."""
    kv_transfer: int = 0
    """For KV on its way between gangs."""

    @property
    def total(self) -> int:
        """All of it."""
        lasting = self.processes + self.weights + self.kv_cache
        return lasting + self.activations + self.kv_transfer

    @property
    def processes(self) -> int:
        """What is there before any weight is loaded."""
        return self.ray + SHELL_BYTES + self.ranks * RANK_BYTES

    @property
    def parts(self) -> str:
        """In words, GiB each."""
        return (
            f"Ray and {self.ranks} ranks {self.processes / GIB:.1f}, "
            f"weights {self.weights / GIB:.1f}, KV cache {self.kv_cache / GIB:.1f}, "
            f"activations {self.activations / GIB:.1f}, "
            f"KV on its way {self.kv_transfer / GIB:.1f}"
        )

    def __add__(self, other: MemoryNeed) -> MemoryNeed:
        return MemoryNeed(
            ranks=self.ranks + other.ranks,
            weights=self.weights + other.weights,
            kv_cache=self.kv_cache + other.kv_cache,
            activations=self.activations + other.activations,
            kv_transfer=self.kv_transfer + other.kv_transfer,
        )


def memory_need(settings: Settings, *, ray_runs: bool = False) -> MemoryNeed:
    """What all gangs and everything around them need.

    Args:
        ray_runs: its memory is taken already.

    Raises:
        ConfigError: the model cannot be served.
    """
    need = MemoryNeed(ranks=0)
    for role in settings.gangs:
        need += _gang_need(role, settings)
    return need if ray_runs else replace(need, ray=RAY_BYTES)


def _gang_need(role: GangRole, settings: Settings) -> MemoryNeed:
    section = settings.gangs[role]
    kv_transfer = 0 if role == "elastic" else section.ranks * settings.kv_transfer.in_flight_bytes
    if resolve_device(settings.device, section.num_gpus) != "cpu":
        # The rest lies in the GPUs' own memory.
        return MemoryNeed(ranks=section.ranks, kv_transfer=kv_transfer)
    number_bytes = DTYPE_BYTES[settings.dtype]
    slots_bytes = section.ranks * section.kv_slots * number_bytes
    spec = read_spec(settings.model_dir)
    return MemoryNeed(
        ranks=section.ranks,
        weights=section.ranks * rank_parameters(role, settings) * number_bytes,
        kv_cache=slots_bytes * _kv_numbers(spec, section.tp),
        activations=slots_bytes * _row_numbers(spec, section.tp) if role != "decode" else 0,
        kv_transfer=kv_transfer,
    )


def _kv_numbers(spec: ModelSpec, tp: int) -> int:
    """Numbers that one rank keeps of a token: keys and values, all layers."""
    return 2 * spec.layers * len(share_of(spec, 0, tp).kv_heads) * spec.head_dim


def _row_numbers(spec: ModelSpec, tp: int) -> int:
    """Numbers that a prefill rank has of a token at once, roughly: three times the residual
    stream, and queries, keys, values and outputs on both sides of an exchange."""
    share = share_of(spec, 0, tp)
    heads = len(share.query_heads) + len(share.kv_heads)
    return 3 * spec.hidden + 4 * heads * spec.head_dim
