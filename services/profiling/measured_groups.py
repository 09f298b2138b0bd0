"""Groups of instances as the pipeline simulator wants them, with the times that were profiled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from csps.configurator.phase_times import PhaseTimes
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.wiring import LinkSpeed, Wiring
from csps.configurator.profiles import fit_phases
from csps.configurator.scaling_information_base import PhaseRow, ScalingInformationBase
from csps.configurator.shapes import AttentionShape, lse_elements
from csps.configurator.step_overheads import with_overheads
from csps.models.spec import ModelSpec, read_spec
from csps.protocols.topology import Topology
from csps.services.cluster.gangs import resolve_device
from csps.services.launch.settings import Settings
from csps.services.profiling.measured_links import MeasuredLinks


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
        servers = [it.server_id for it in Topology.of(places).locations]
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
