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
from csps.protocols.core.topology import Location, Topology
from csps.services.measured.identity import identity_of
from csps.services.settings.devices import resolve_device
from csps.services.settings.settings import Settings

INSIDE, BETWEEN, RACKS = "inside", "between", "racks"
"""Kinds of links: both ranks on one server, on two servers of one rack, or in two racks."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLinks:
    """Speeds of links between the ranks that compute prompts."""

    inside: LinkSpeed
    between: LinkSpeed
    racks: LinkSpeed

    @classmethod
    def read(cls, base: ScalingInformationBase, settings: Settings) -> MeasuredLinks:
        """Read the measured links, and derive those that nobody has measured.

        If a gang has none inside, with one rank a server, or none between servers of a rack, with
        one server a rack, the next farther ones count for them. Otherwise links between servers are
        slower than those inside by `topology.link_ratio`, and links between racks are as fast as
        those between servers.

        Raises:
            ConfigError: no links were measured.
        """
        rows = base.rows(LinkRow)
        kinds = {row.kind for row in rows}
        measured = [kind for kind in (INSIDE, BETWEEN, RACKS) if kind in kinds] or [INSIDE]
        inside = link_speed(rows, measured[0])
        farther = [link_speed(rows, kind) for kind in measured if kind != INSIDE]
        if not farther:
            slower = inside.bytes_per_s / settings.topology.link_ratio
            farther = [LinkSpeed(bytes_per_s=slower, latency_s=inside.latency_s)]
        return cls(inside=inside, between=farther[0], racks=farther[-1])

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
    one, other = Location.parse(sender), Location.parse(receiver)
    if one.rack != other.rack:
        return RACKS
    return INSIDE if one.server == other.server else BETWEEN


@dataclass(frozen=True, kw_only=True)
class MeasuredGroups:
    """Profiled times and link speeds of the prefill gang."""

    shape: AttentionShape
    tp: int
    times: PhaseTimes
    links: MeasuredLinks
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
        gang = settings.prefilling
        on_gpu = resolve_device(settings.device, gang.num_gpus) == "cuda"
        alone = cls(
            shape=shape_of(spec, settings),
            tp=tp,
            times=times,
            links=MeasuredLinks.read(base, settings),
            itemsize=settings.element_bytes,
            cores=None if on_gpu else (os.cpu_count() or 1) / (gang.threads * gang.tp),
        )
        return replace(alone, times=with_overheads(alone.of_places(["0-0-0"]), rows))

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
            wiring=Wiring.of_servers(
                servers,
                inside=self.links.inside,
                between=self.links.between,
                racks=self.links.racks,
            ),
            itemsize=self.itemsize,
            cores_of=tuple(indices[server] for server in servers) if sharing else None,
            cores=(self.cores,) * len(indices) if sharing and self.cores is not None else (),
        )


def shape_of(spec: ModelSpec, settings: Settings) -> AttentionShape:
    """Return the sizes of the served model's attention."""
    return AttentionShape(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        layers=spec.layers,
        lse=lse_elements(settings.element_bytes),
        window=spec.window,
        windowed=spec.near_layers,
    )
