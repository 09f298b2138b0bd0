"""How fast links inside a server and between two are: as measured, else as the operator says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from csps.configurator.pipeline.wiring import LinkSpeed
from csps.configurator.profiles import link_speed
from csps.configurator.scaling_information_base import LinkRow, ScalingInformationBase
from csps.protocols.errors import CspsError
from csps.services.launch.settings import Settings
from csps.services.profiling.identity import identity_of

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
