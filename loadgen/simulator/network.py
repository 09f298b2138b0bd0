"""The links between a prefill and a decode gang."""

from __future__ import annotations

from csps.loadgen.simulator.cluster import ClusterModel
from csps.loadgen.simulator.links import Link
from csps.loadgen.simulator.timeline import Timeline
from csps.services.scheduling.ids import InstanceId, index_of


class Network:
    """Finds the link from one instance to another; links are made when first used."""

    def __init__(self, timeline: Timeline, cluster: ClusterModel) -> None:
        self._timeline, self._cluster = timeline, cluster
        self._links: dict[tuple[str, str, str], Link] = {}
        self._routes: dict[tuple[InstanceId, InstanceId], Link | None] = {}

    def route(self, source: InstanceId, destination: InstanceId) -> Link | None:
        """The link from where KV is computed to where it is decoded; None takes no time."""
        key = (source, destination)
        if key not in self._routes:
            self._routes[key] = self._find(source, destination)
        return self._routes[key]

    def _find(self, source: InstanceId, destination: InstanceId) -> Link | None:
        cluster = self._cluster
        if source == destination:  # of an elastic gang
            return None
        sender = cluster.prefill.instances[index_of(source)]
        receiver = cluster.decode.instances[index_of(destination)]
        if sender.server == receiver.server:
            kind, model = "inside", cluster.inside
            ends = (
                (sender.server, "")
                if model and model.shared
                else (sender.location, receiver.location)
            )
        else:
            kind, model = "between", cluster.between
            ends = ("", "") if model and model.shared else (sender.server, receiver.server)
        if model is None:
            return None
        key = (kind, *ends)
        if key not in self._links:
            self._links[key] = Link(
                self._timeline, bytes_per_s=model.bytes_per_s, latency_ns=model.latency_ns
            )
        return self._links[key]

    @property
    def transfers(self) -> int:
        """Under way on all links."""
        return sum(link.transfers for link in self._links.values())
