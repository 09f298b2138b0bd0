"""Describe the prefill gang for the pipeline simulator, with profiled times and link speeds.

Links that nobody has measured follow the operator's `topology.link_ratio`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from csps.configurator.model.attention_shape import AttentionShape, lse_elements
from csps.configurator.model.phase_times import PhaseTimes
from csps.configurator.model.scaling_information_base import (
    LinkRow,
    PhaseRow,
    ScalingInformationBase,
)
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.program import LinkSpeed, Wiring
from csps.configurator.plan.profiles import fit_phases, link_speed, with_overheads
from csps.models.network.spec import ModelSpec, read_spec
from csps.protocols.core.errors import CspsError
from csps.protocols.core.topology import Topology
from csps.services.measured.identity import identity_of
from csps.services.settings.devices import resolve_device
from csps.services.settings.settings import Settings

INSIDE, BETWEEN = "inside", "between"
"""Kinds of links: both ranks on one server, or on two servers."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLinks:
    """Speeds of links between the ranks that compute prompts."""

    inside: LinkSpeed
    between: LinkSpeed

    @classmethod
    def read(cls, base: ScalingInformationBase, settings: Settings) -> MeasuredLinks:
        """Read the measured links, and derive those that nobody has measured.

        Links between servers then are slower than those inside by `topology.link_ratio`. If a gang
        has none inside, with one rank a server, those between servers count for both.

        Raises:
            ConfigError: no links were measured.
        """
        rows = base.rows(LinkRow)
        kinds = {row.kind for row in rows}
        inside = link_speed(rows, BETWEEN if kinds == {BETWEEN} else INSIDE)
        if BETWEEN in kinds:
            return cls(inside=inside, between=link_speed(rows, BETWEEN))
        slower = inside.bytes_per_s / settings.topology.link_ratio
        return cls(inside=inside, between=LinkSpeed(bytes_per_s=slower, latency_s=inside.latency_s))

    @property
    def ratio(self) -> float:
        """Time of a byte between servers over that inside one, at least 1."""
        return max(1.0, self.inside.bytes_per_s / self.between.bytes_per_s)


def link_ratio(settings: Settings) -> float:
    """Return the measured ratio; the settings' one if none was measured on this machine."""
    path = Path(settings.scaling_information_base)
    try:
        base = ScalingInformationBase.read(path, identity_of(settings)) if path.is_file() else None
        if base is None:
            return settings.topology.link_ratio
        with base:
            return MeasuredLinks.read(base, settings).ratio
    except CspsError:  # `attention_options` logs the reason
        return settings.topology.link_ratio


def gang_places(base: ScalingInformationBase, settings: Settings) -> list[str]:
    """Return Rack-Server-GPU ids of the ranks that compute prompts, in rank order.

    They are those of the settings, else those of the last measurement of links, else all on one
    server.
    """
    if named := settings.topology.of(settings.prefilling_role):
        return list(named)
    ranks = range(settings.prefilling.ranks)
    by_rank: dict[int, str] = {}
    for row in reversed(base.rows(LinkRow)):
        for place in filter(None, (row.sender, row.receiver)):
            # Ids made from node labels end with the rank.
            by_rank.setdefault(int(place.rpartition("-")[2]), place)
    return [by_rank.get(rank, f"0-0-{rank}") for rank in ranks]


def kind_of(sender: str, receiver: str) -> str:
    """Return the kind of the link between two Rack-Server-GPU ids."""
    servers = {place.rpartition("-")[0] for place in (sender, receiver)}
    return INSIDE if len(servers) == 1 else BETWEEN


@dataclass(frozen=True, kw_only=True)
class MeasuredGroups:
    """Profiled times and link speeds of the prefill gang."""

    shape: AttentionShape
    tp: int
    times: PhaseTimes
    inside: LinkSpeed
    between: LinkSpeed
    itemsize: int
    cores: float | None = None
    """Cores of a server over the threads of an instance, which is simulated as one rank; None if
    each rank has a device of its own."""

    @classmethod
    def read(cls, base: ScalingInformationBase, settings: Settings) -> MeasuredGroups:
        """Read the times of the settings' gang.

        Raises:
            ConfigError: phases or links were not profiled.
        """
        tp, spec = settings.prefilling.tp, read_spec(settings.model_dir, settings.model_overrides)
        rows = base.rows(PhaseRow)
        times = fit_phases(rows, heads=spec.heads, kv_heads=spec.kv_heads, tp=tp)
        links = MeasuredLinks.read(base, settings)
        gang = settings.prefilling
        on_gpu = resolve_device(settings.device, gang.num_gpus) == "cuda"
        alone = cls(
            shape=shape_of(spec, settings),
            tp=tp,
            times=times,
            inside=links.inside,
            between=links.between,
            itemsize=settings.element_bytes,
            cores=None if on_gpu else (os.cpu_count() or 1) / (gang.threads * gang.tp),
        )
        return replace(alone, times=with_overheads(alone.of_servers([1], tp), rows))

    def of_places(self, places: Sequence[str]) -> SimulatedGroup:
        """Return a group of instances at Rack-Server-GPU ids, ascending."""
        servers = [location.server_id for location in Topology.of(places).locations]
        indices = {server: index for index, server in enumerate(dict.fromkeys(servers))}
        most = max(map(servers.count, indices))
        sharing = self.cores is not None and self.cores < most
        return SimulatedGroup(
            shape=self.shape,
            locations=tuple(places),
            tp=self.tp,
            times=self.times,
            wiring=Wiring.of_servers(servers, inside=self.inside, between=self.between),
            itemsize=self.itemsize,
            cores_of=tuple(indices[server] for server in servers) if sharing else None,
            cores=(self.cores,) * len(indices) if sharing and self.cores is not None else (),
        )

    def of_servers(self, servers: Sequence[int], tp: int) -> SimulatedGroup:
        """Return a group with `servers[i]` instances on server i of one rack."""
        assert tp == self.tp, f"group with tp {tp} from a gang with tp {self.tp}"
        places = [
            f"0-{server}-{place}"
            for server, instances in enumerate(servers)
            for place in range(instances)
        ]
        return self.of_places(places)


def shape_of(spec: ModelSpec, settings: Settings) -> AttentionShape:
    """Return the sizes of the served model's attention."""
    return AttentionShape(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        layers=spec.layers,
        lse=lse_elements(settings.element_bytes),
    )
