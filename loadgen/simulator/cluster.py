"""What a simulated cluster is: instances, links and latencies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from csps.configurator.costs.latency import HybridCost, LatencyTable
from csps.protocols.gang.members import GangRole
from csps.services.scheduling.events.commands import RunStep


@dataclass(frozen=True, kw_only=True)
class InstanceModel:
    """One copy of the weights."""

    location: str
    """Rack-Server-GPU id of its first rank."""
    kv_slots: int
    cores: int | None = None
    """Of its server, which all ranks there share; None: each rank has its own."""

    @property
    def server(self) -> str:
        """Rack and server of the id."""
        return self.location.rpartition("-")[0]


@dataclass(frozen=True, kw_only=True)
class GangModel:
    """All instances with one permission."""

    instances: tuple[InstanceModel, ...]
    tp: int

    @property
    def kv_slots(self) -> tuple[int, ...]:
        """By instance."""
        return tuple(instance.kv_slots for instance in self.instances)


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """A kind of link."""

    bytes_per_s: int
    latency_ns: int
    shared: bool
    """One for all that use this kind (inside: of a server), or one for each pair of instances
    (inside) or servers (between)."""


@dataclass(frozen=True, kw_only=True)
class ClusterModel:
    """Everything that simulated time depends on, apart from requests and policy."""

    name: str
    prefill: GangModel
    decode: GangModel
    """The same as `prefill` where one elastic gang does both."""
    table: LatencyTable
    inside: LinkModel | None = None
    """Between instances of one server; None: KV arrives at once."""
    between: LinkModel | None = None
    """Between instances of two servers."""
    kv_bytes_per_token: int = 0
    layers: int = 1
    receiving_backends: int | None = None
    """Transfers that a decode instance takes at a time; None: all."""
    max_positions: int = 1 << 20
    quantum_ns: int = 0
    step_gap_ns: int = 0
    iteration_gap_ns: int = 0
    notice_ns: int = 0
    """From an event on a rank to the scheduler, and from a command to the ranks."""
    front_ns: int = 0
    """From a client to the scheduler and back."""

    @property
    def in_place(self) -> bool:
        """One gang decodes what it prefills, where its KV lies."""
        return self.prefill is self.decode

    @property
    def shares_cores(self) -> bool:
        """Ranks slow each other down."""
        return any(instance.cores is not None for instance in self.decode.instances)

    @property
    def roles(self) -> tuple[GangRole, ...]:
        """Of its gangs."""
        return ("elastic",) if self.in_place else ("prefill", "decode")

    def gang(self, role: GangRole) -> GangModel:
        """The gang of a role."""
        return self.prefill if role == "prefill" else self.decode

    @cached_property
    def hybrid(self) -> HybridCost:
        """What an iteration of the gang that decodes takes, with pieces of prompts.

        Raises:
            ConfigError: no steps were measured with its `tp`.
        """
        return self.hybrid_of(len(self.decode.instances))

    def hybrid_of(self, instances: int) -> HybridCost:
        """The same of a group of so many of its instances.

        Raises:
            ConfigError: as above.
        """
        tp = self.decode.tp
        return HybridCost(step=self.table.step(1, tp), decode=self.table.iteration(instances, tp))

    def move_ns(self, tokens: int) -> int:
        """What KV of so many tokens takes from one instance of a server to another."""
        if self.inside is None:
            return 0
        size = tokens * self.kv_bytes_per_token
        return self.inside.latency_ns + size * 1_000_000_000 // self.inside.bytes_per_s

    @cached_property
    def _strategies(self) -> frozenset[str]:
        return frozenset(key.strategy for key, _ in self.table.steps if key.tp == self.prefill.tp)

    def step_ns(self, step: RunStep) -> int:
        """What a step takes: by its strategy where that was measured, else by exact attention."""
        strategy = step.strategy if step.strategy in self._strategies else ""
        cost = self.table.step(len(step.group), self.prefill.tp, strategy)
        rows = ((chunk.length, chunk.start) for chunk in step.chunks)
        return cost.predict_batch_ns(rows) + self.step_gap_ns
