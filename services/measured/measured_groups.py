"""How fast links inside a server and between two are: as measured, else as the operator says.

Groups of instances as the pipeline simulator wants them, with the times that were profiled.
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
"""Kinds of links: both ranks on one server, or on two."""


@dataclass(frozen=True, kw_only=True)
class MeasuredLinks:
    """Of the ranks that compute prompts."""

    inside: LinkSpeed
    between: LinkSpeed

    @classmethod
    def read(cls, base: ScalingInformationBase, settings: Settings) -> MeasuredLinks:
        """Links between servers that nobody has measured are slower than those inside by the
        settings' `topology.link_ratio`. Where there are none inside, as of one rank a server, those
        between count for both.

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
        """How much longer a byte takes between servers than inside one, at least 1."""
        return max(1.0, self.inside.bytes_per_s / self.between.bytes_per_s)


def link_ratio(settings: Settings) -> float:
    """As measured here; what the settings say where nothing was, or on another machine."""
    path = Path(settings.scaling_information_base)
    try:
        base = ScalingInformationBase.read(path, identity_of(settings)) if path.is_file() else None
        if base is None:
            return settings.topology.link_ratio
        with base:
            return MeasuredLinks.read(base, settings).ratio
    except CspsError:  # whoever predicts times from the base logs why
        return settings.topology.link_ratio


def gang_places(base: ScalingInformationBase, settings: Settings) -> list[str]:
    """Rack-Server-GPU ids of the ranks that compute prompts, in rank order: as the settings name
    them, else as they were when links were last measured, else all on one server."""
    if named := settings.topology.of(settings.prefilling_role):
        return list(named)
    ranks = range(settings.prefilling.ranks)
    by_rank: dict[int, str] = {}
    for row in reversed(base.rows(LinkRow)):
        for place in filter(None, (row.sender, row.receiver)):
            # By their nodes' labels ids end with the rank's number.
            by_rank.setdefault(int(place.rpartition("-")[2]), place)
    return [by_rank.get(rank, f"0-0-{rank}") for rank in ranks]


def kind_of(sender: str, receiver: str) -> str:
    """The link between two Rack-Server-GPU ids."""
    servers = {it.rpartition("-")[0] for it in (sender, receiver)}
    return INSIDE if len(servers) == 1 else BETWEEN


@dataclass(frozen=True, kw_only=True)
class MeasuredGroups:
    """Of the gang that prefills."""

    shape: AttentionShape
    tp: int
    times: PhaseTimes
    inside: LinkSpeed
    between: LinkSpeed
    itemsize: int
    cores: float | None = None
    """Of a server, over the threads of those of its ranks that are simulated as one; None where
    each rank has a device of its own."""

    @classmethod
    def read(cls, base: ScalingInformationBase, settings: Settings) -> MeasuredGroups:
        """Raises ConfigError if phases or links were not profiled."""
        tp, spec = settings.prefilling.tp, read_spec(settings.model_dir)
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
        """Instances at Rack-Server-GPU ids, ascending."""
        servers = [location.server_id for location in Topology.of(places).locations]
        numbers = {server: number for number, server in enumerate(dict.fromkeys(servers))}
        most = max(map(servers.count, numbers))
        sharing = self.cores is not None and self.cores < most
        return SimulatedGroup(
            shape=self.shape,
            locations=tuple(places),
            tp=self.tp,
            times=self.times,
            wiring=Wiring.of_servers(servers, inside=self.inside, between=self.between),
            itemsize=self.itemsize,
            cores_of=tuple(numbers[it] for it in servers) if sharing else None,
            cores=(self.cores,) * len(numbers) if sharing and self.cores is not None else (),
        )

    def of_servers(self, servers: Sequence[int], tp: int) -> SimulatedGroup:
        """So many instances on each of some servers of one rack."""
        assert tp == self.tp, "another gang's instances"
        places = [
            f"0-{server}-{place}"
            for server, instances in enumerate(servers)
            for place in range(instances)
        ]
        return self.of_places(places)


def shape_of(spec: ModelSpec, settings: Settings) -> AttentionShape:
    """The sizes of the served model's attention."""
    return AttentionShape(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        layers=spec.layers,
        lse=lse_elements(settings.element_bytes),
    )
