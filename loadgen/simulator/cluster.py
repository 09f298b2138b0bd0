"""The model of a simulated cluster: instances, links and latencies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from csps.configurator.costs.latency import HybridCost, LatencyTable
from csps.configurator.model.attention_shape import AttentionShape
from csps.loadgen.simulator.planned_options import PlannedOptions
from csps.protocols.core.topology import GroupShape, Location
from csps.protocols.gang.members import GangRole
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.events.events import index_of

LinkKind = Literal["inside", "between", "racks"]


@dataclass(frozen=True, kw_only=True)
class InstanceModel:
    """One copy of the weights."""

    location: str
    """Rack-Server-GPU id of its first rank."""
    kv_slots: int
    cores: int | None = None
    """Cores of the server, which all its ranks share. None: each rank has its own."""

    @property
    def server(self) -> str:
        """Return the server's id: rack and server."""
        return self.location.rpartition("-")[0]

    @property
    def rack(self) -> str:
        """Return the rack's number."""
        return self.location.partition("-")[0]


@dataclass(frozen=True, kw_only=True)
class GangModel:
    """All instances of one gang."""

    instances: tuple[InstanceModel, ...]
    tp: int

    @property
    def kv_slots(self) -> tuple[int, ...]:
        """Return the KV slots of each instance."""
        return tuple(instance.kv_slots for instance in self.instances)


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """A kind of link."""

    bytes_per_s: int
    latency_ns: int
    shared: bool
    """One link for all transfers of its kind (inside: of a server). Otherwise each pair of
    instances (inside) or servers has its own link.
    """


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes of a token in all layers, which instances exchange."""

    shape: AttentionShape
    """Sizes of the model's attention, for the formulas of traffic."""
    element: float
    """Bytes of an element."""

    @property
    def kv(self) -> float:
        """Return the bytes of its keys and values."""
        return 2 * self.shape.kv_width * self.shape.layers * self.element

    @property
    def queries(self) -> float:
        """Return the bytes of its queries, or of attention's output."""
        return self.shape.width * self.shape.layers * self.element


@dataclass(frozen=True, kw_only=True)
class ClusterModel:
    """Everything that simulated time depends on, apart from requests and policy."""

    name: str
    prefill: GangModel
    decode: GangModel
    """The decode gang; the same object as `prefill` if one elastic gang does both."""
    table: LatencyTable
    inside: LinkModel | None = None
    """Link between instances of one server. None: KV arrives at once."""
    between: LinkModel | None = None
    """Link between instances of two servers. None: KV arrives at once."""
    racks: LinkModel | None = None
    """Link between instances of two racks. None: as between servers."""
    measured: LinkModel | None = None
    """Link between the instances on which `table` was measured, all on one server: the times hold
    their exchanges. None: the times hold no exchange.
    """
    kv_bytes_per_token: int = 0
    layers: int = 1
    attention: AttentionShape | None = None
    """Sizes of the model. None: as many query heads as KV heads, and hidden rows as wide."""
    element_bytes: int | None = None
    """Bytes of a number that ranks compute with. None: KV has the same type."""
    options: PlannedOptions | None = None
    """Options of attention, with times. None: all attention is exact."""
    receiving_backends: int | None = None
    """Transfers that a decode instance receives at a time. None: no limit."""
    max_positions: int = 1 << 20
    quantum_ns: int = 0
    step_gap_ns: int = 0
    iteration_gap_ns: int = 0
    notice_ns: int = 0
    """Delay of a message between a rank and the scheduler, either way."""
    front_ns: int = 0
    """Delay between a client and the scheduler, in both directions together."""

    @property
    def in_place(self) -> bool:
        """Return whether one gang decodes where it prefills."""
        return self.prefill is self.decode

    @property
    def shares_cores(self) -> bool:
        """Return whether ranks slow each other down by sharing cores."""
        return any(instance.cores is not None for instance in self.decode.instances)

    def link(self, one: InstanceModel, other: InstanceModel) -> tuple[LinkKind, LinkModel | None]:
        """Return the kind of the link between two instances, and the link; None: KV arrives at
        once."""
        if one.server == other.server:
            return "inside", self.inside
        if self.racks is not None and one.rack != other.rack:
            return "racks", self.racks
        return "between", self.between

    @property
    def roles(self) -> tuple[GangRole, ...]:
        """Return the roles of the cluster's gangs."""
        return ("elastic",) if self.in_place else ("prefill", "decode")

    def gang(self, role: GangRole) -> GangModel:
        """Return the gang of a role."""
        return self.prefill if role == "prefill" else self.decode

    @cached_property
    def hybrid(self) -> HybridCost:
        """Return the cost of a decode iteration that also computes prompt chunks.

        Raises:
            ConfigError: no steps were measured with the decode gang's `tp`.
        """
        return self.hybrid_of(len(self.decode.instances))

    def hybrid_of(self, instances: int) -> HybridCost:
        """Return the cost of such an iteration on a group of some decode instances.

        Raises:
            ConfigError: no steps were measured with the decode gang's `tp`.
        """
        tp = self.decode.tp
        return HybridCost(step=self.table.step(1, tp), decode=self.table.iteration(instances, tp))

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """Return the bytes of a token that is computed; KV that is kept may have fewer."""
        shape = self.attention or AttentionShape(
            hidden=1, heads=1, kv_heads=1, head_dim=1, layers=self.layers
        )
        elements = 2 * shape.kv_width * shape.layers
        in_kv = self.kv_bytes_per_token / elements
        return TokenBytes(shape=shape, element=self.element_bytes or in_kv)

    @cached_property
    def _strategies(self) -> frozenset[str]:
        return frozenset(key.strategy for key, _ in self.table.steps if key.tp == self.prefill.tp)

    def step_ns(self, step: PrefillStep) -> int:
        """Return how long a step takes.

        Unmeasured strategies are predicted as exact attention.
        """
        strategy = step.strategy if step.strategy in self._strategies else ""
        cost = self.table.step(len(step.group), self.prefill.tp, strategy)
        rows = ((chunk.length, chunk.start) for chunk in step.chunks)
        return cost.predict_batch_ns(rows) + self.step_gap_ns

    def permille(self, step: PrefillStep) -> int | None:
        """Return a step's time in thousandths of computing by exact SP-NTP on its group.

        None: the pipeline simulator cannot tell.
        """
        if self.options is None:
            return None
        places = sorted(
            Location.parse(self.prefill.instances[index_of(instance)].location)
            for instance in step.group
        )
        shape, tokens = GroupShape.of(places, self.prefill.tp), step.bounds[-1]
        if not self.options.prices(shape, tokens):
            return None
        history = max(chunk.start for chunk in step.chunks)
        return self.options.permille(step.strategy, shape, history, tokens)
