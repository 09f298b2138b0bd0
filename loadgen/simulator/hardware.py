"""The hardware that a cluster file describes: servers, links, the model, the speed of a rank.

`csps simulate` and `csps plan` read the same keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from csps.configurator.model.attention_shape import AttentionShape, lse_elements
from csps.configurator.model.phase_times import AttentionTimes, LinearTime, PhaseTimes
from csps.configurator.model.scaling_information_base import (
    LinkRow,
    PhaseRow,
    ScalingInformationBase,
)
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.program import LinkSpeed, Wiring
from csps.configurator.plan.profiles import fit_phases, link_speed, with_overheads
from csps.protocols.core.errors import ConfigError, abridged, nearest
from csps.protocols.core.topology import Topology

BITS_PER_BYTE = 8
SCALE_BYTES = 4
"""Bytes of the scale of a head of a token, of KV in 8 bits (`csps.kernels.quantized_kv`, for which
torch would have to be imported)."""
Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Permission = Literal["prefill", "decode"]


def read_named(name_or_path: str, folder: Path) -> tuple[Path, Any]:
    """Return the path and content of a YAML file, given by its stem in a folder or by its path.

    Raises:
        ConfigError: the file does not exist or is no YAML; the message names it.
    """
    named = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    path = named.get(name_or_path, Path(name_or_path))
    if not path.is_file():
        raise ConfigError(f"no cluster '{name_or_path}'{nearest(name_or_path, named)}; or a file")
    try:
        return path, yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {error}") from None


class Section(BaseModel):
    """Base of all sections of a cluster file."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for key in data:
                if key not in cls.model_fields:
                    hint = nearest(str(key), cls.model_fields)
                    raise ValueError(f"unknown key {abridged(key)}{hint}")
        return data


class ClusterServer(Section):
    """One or more identical servers."""

    rack: Annotated[int, Field(ge=0)] = 0
    count: Count = 1
    """Number of servers, numbered within the rack in the order of the file."""
    server: Annotated[int, Field(ge=0)] | None = None
    """Number within the rack of the one server that has these instances beside others."""
    instances: Count
    """Copies of the weights on each server."""
    tp: Count = 1
    """Ranks of each instance."""
    permissions: Annotated[tuple[Permission, ...], Field(min_length=1)]
    kv_slots: Count
    """Tokens that each rank of an instance can hold."""
    cores: Count | None = None
    """Cores of each server, which all its ranks share. Not given: every rank has its own."""


class LinkSection(Section):
    """A kind of link."""

    gbps: Annotated[float, Field(gt=0)]
    """Bandwidth in 10^9 bits a second."""
    latency_us: Annotated[float, Field(ge=0)] = 0.0
    shared: bool = False
    """One link for all (inside: of a server; otherwise of the whole cluster). If not, each pair of
    instances (inside) or of servers has its own.
    """


class Links(Section):
    """Links between instances. What takes a link that is not given arrives at once."""

    inside: LinkSection | None = None
    """Link between instances of one server."""
    between: LinkSection | None = None
    """Link between servers."""
    racks: LinkSection | None = None
    """Link between servers of two racks. Not given: as between servers."""


class ModelSection(Section):
    """Sizes of a model."""

    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    layers: Annotated[int, Field(ge=2)]
    intermediate: Count
    """Width of the MLP."""
    element_bytes: Annotated[int, Field(ge=2, le=8)] = 2
    kv_dtype: Literal["auto", "int8"] = "auto"
    """Form of KV in memory and on links, as the setting of a server says it."""

    @property
    def attention(self) -> AttentionShape:
        """Return the sizes of its attention."""
        return AttentionShape(
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            layers=self.layers,
            lse=lse_elements(self.element_bytes),
        )

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of keys and values of a token in all layers, as they are kept."""
        row = self.head_dim * self.element_bytes
        if self.kv_dtype == "int8":
            row = self.head_dim + SCALE_BYTES
        return 2 * self.kv_heads * row * self.layers


class RankSection(Section):
    """Speed of a rank: measurements of `csps profile`, or the speeds that it reaches."""

    sib: str | None = None
    """Path of a scaling information base, relative to the file."""
    product_tflops: Positive | None = None
    attention_tflops: Positive | None = None
    memory_gb_s: Positive | None = None
    call_us: Annotated[float, Field(ge=0)] = 0.0
    """Fixed time before each computation."""
    ranks_per_core: Annotated[float, Field(ge=0)] = 0.0
    """Ranks of a server divided by its cores. Up to 1, each rank has its own core."""

    @model_validator(mode="after")
    def _one_of_both(self) -> RankSection:
        speeds = (self.product_tflops, self.attention_tflops, self.memory_gb_s)
        given = [speed is not None for speed in speeds]
        if not (all(given) if self.sib is None else not any(given)):
            raise ValueError("either sib, or product_tflops, attention_tflops and memory_gb_s")
        return self


@dataclass(frozen=True, kw_only=True)
class RankSpeed:
    """Speed of a rank and of its links, for the pipeline simulator."""

    model: ModelSection
    tp: int
    times: PhaseTimes
    inside: LinkSpeed
    between: LinkSpeed
    racks: LinkSpeed
    ranks_per_core: float
    measured: Sequence[PhaseRow] = ()
    """Measured phases, by which overheads are found."""

    @classmethod
    def read(
        cls, model: ModelSection, rank: RankSection, links: Links, *, folder: Path, tp: int
    ) -> RankSpeed:
        """Return the speed that a file describes.

        Args:
            folder: where the file is.
            tp: ranks of an instance.

        Raises:
            ConfigError: a link is missing, or the scaling information base.
        """
        if model.heads % tp or model.kv_heads % tp or model.heads % model.kv_heads:
            raise ConfigError(f"model: its heads cannot be split over {tp} ranks")
        measured: Sequence[PhaseRow] = ()
        measured_links: Sequence[LinkRow] = ()
        if rank.sib is None:
            times = _reached(model, rank, tp)
        else:
            base = ScalingInformationBase.read(folder / rank.sib, None)
            if base is None:
                raise ConfigError(f"rank.sib: there is no {folder / rank.sib}")
            with base:
                measured, measured_links = base.rows(PhaseRow), base.rows(LinkRow)
            times = fit_phases(measured, heads=model.heads, kv_heads=model.kv_heads, tp=tp)
        inside = _link(links.inside, measured_links, "inside")
        if inside is None:
            raise ConfigError("links.inside: nothing is known of it; give gbps and latency_us")
        between = _link(links.between, measured_links, "between") or inside
        return cls(
            model=model,
            tp=tp,
            times=times,
            inside=inside,
            between=between,
            racks=_link(links.racks, measured_links, "racks") or between,
            ranks_per_core=rank.ranks_per_core,
            measured=measured,
        )

    def group(self, locations: Sequence[str]) -> SimulatedGroup:
        """Return the group of instances at these Rack-Server-GPU ids."""
        servers = [place.server_id for place in Topology.of(locations).locations]
        sharing = self.ranks_per_core > 1
        numbers = {server: number for number, server in enumerate(dict.fromkeys(servers))}
        group = SimulatedGroup(
            shape=self.model.attention,
            locations=tuple(locations),
            tp=self.tp,
            times=self.times,
            wiring=Wiring.of_servers(
                servers, inside=self.inside, between=self.between, racks=self.racks
            ),
            itemsize=self.model.element_bytes,
            cores_of=tuple(numbers[server] for server in servers) if sharing else None,
            cores=tuple(servers.count(server) / self.ranks_per_core for server in numbers)
            if sharing
            else (),
        )
        return replace(group, times=with_overheads(group, self.measured))


def _link(section: LinkSection | None, measured: Sequence[LinkRow], kind: str) -> LinkSpeed | None:
    """Return the speed of a kind of link, as given or as measured; None: unknown."""
    if section is None:
        known = any(row.kind == kind for row in measured)
        return link_speed(measured, kind) if known else None
    return LinkSpeed(
        bytes_per_s=section.gbps * 1e9 / BITS_PER_BYTE,
        latency_s=section.latency_us * 1e-6,
        shared=section.shared,
    )


def _reached(model: ModelSection, rank: RankSection, tp: int) -> PhaseTimes:
    """Return phase times computed from operations and bytes."""
    assert rank.product_tflops is not None
    assert rank.attention_tflops is not None
    assert rank.memory_gb_s is not None
    flop, pair_flop = 1e-12 / rank.product_tflops, 1e-12 / rank.attention_tflops
    byte, call = 1e-9 / rank.memory_gb_s, rank.call_us * 1e-6
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    row = model.head_dim * model.element_bytes * byte

    def product(inputs: int, outputs: int) -> LinearTime:
        return LinearTime(fixed=call, each=2 * inputs * outputs / tp * flop)

    return PhaseTimes(
        qkv=product(model.hidden, width + 2 * kv_width),
        attention=AttentionTimes(call=call, row=2 * row, pair=4 * model.head_dim * pair_flop),
        linear=product(width, model.hidden),
        rest=product(model.hidden, 3 * model.intermediate),
        select=LinearTime(fixed=call, each=8 * byte),
        importance=LinearTime(fixed=call, each=2 * model.head_dim * pair_flop),
        merge=LinearTime(fixed=call, each=3 * row),
        copy=LinearTime(fixed=call, each=2 * byte),
    )
