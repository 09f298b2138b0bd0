"""The hardware file of `csps plan`: a cluster file with a model and the speed of a rank.

The same file may hold the keys of `csps simulate` (`docs/simulator.md`), which are ignored here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from csps.configurator.model.phase_times import AttentionTimes, LinearTime, PhaseTimes
from csps.configurator.model.scaling_information_base import (
    LinkRow,
    PhaseRow,
    ScalingInformationBase,
)
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.program import LinkSpeed, Wiring
from csps.configurator.plan.profiles import fit_phases, link_speed, with_overheads
from csps.loadgen.simulator.cluster_file import (
    BITS_PER_BYTE,
    ClusterServer,
    Links,
    LinkSection,
    ModelSection,
    Section,
    read_named,
)
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import Topology

HARDWARE = Path(__file__).parent / "hardware"
Positive = Annotated[float, Field(gt=0)]


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


class HardwareFile(Section):
    """The keys that `csps plan` reads."""

    servers: Annotated[tuple[ClusterServer, ...], Field(min_length=1)]
    links: Links = Links()
    model: ModelSection
    rank: RankSection
    # Keys that only `csps simulate` reads.
    latency: Any = None
    kv: Any = None
    max_positions: Any = None
    quantum_ms: Any = None
    gaps_us: Any = None


def load_group(name_or_path: str, *, instances: int | None = None) -> SimulatedGroup:
    """Return the prefill instances of a file, or of one that comes with csps, by name.

    Args:
        instances: number of instances, near ones first; None: all.

    Raises:
        ConfigError: the file does not exist or is invalid; the message names file and key.
    """
    path, data = read_named(name_or_path, HARDWARE)
    try:
        return _group(HardwareFile.model_validate(data), path.parent, instances)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {key + ': ' if key else ''}{message}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _group(file: HardwareFile, folder: Path, instances: int | None) -> SimulatedGroup:
    locations, tp = _places(file)
    if instances is not None:
        if not 1 <= instances <= len(locations):
            raise ConfigError(f"{instances} instances: there are 1 to {len(locations)}")
        locations = locations[:instances]
    model, places = file.model, Topology.of(locations).locations
    if model.heads % tp or model.kv_heads % tp or model.heads % model.kv_heads:
        raise ConfigError(f"model: its heads cannot be split over {tp} ranks")
    times, inside, between, measured = _speeds(file, folder, tp)
    servers = [place.server_id for place in places]
    sharing = file.rank.ranks_per_core > 1
    numbers = {server: number for number, server in enumerate(dict.fromkeys(servers))}
    group = SimulatedGroup(
        shape=model.attention,
        locations=tuple(locations),
        tp=tp,
        times=times,
        wiring=Wiring.of_servers(servers, inside=inside, between=between),
        itemsize=model.element_bytes,
        cores_of=tuple(numbers[server] for server in servers) if sharing else None,
        cores=tuple(servers.count(server) / file.rank.ranks_per_core for server in numbers)
        if sharing
        else (),
    )
    return replace(group, times=with_overheads(group, measured))


def _places(file: HardwareFile) -> tuple[list[str], int]:
    locations: list[str] = []
    in_rack: dict[int, int] = {}
    tps: set[int] = set()
    for servers in sorted(file.servers, key=lambda server: server.rack):
        for _ in range(servers.count):
            number = in_rack[servers.rack] = in_rack.get(servers.rack, -1) + 1
            if "prefill" in servers.permissions:
                tps.add(servers.tp)
                locations += [
                    f"{servers.rack}-{number}-{index * servers.tp}"
                    for index in range(servers.instances)
                ]
    if len(tps) != 1:
        raise ConfigError("servers: instances that may prefill, all of one tp")
    return locations, tps.pop()


def _speeds(
    file: HardwareFile, folder: Path, tp: int
) -> tuple[PhaseTimes, LinkSpeed, LinkSpeed, Sequence[PhaseRow]]:
    """Return phase times, link speeds inside a server and between servers, and measured phases."""
    if file.rank.sib is None:
        inside = _link(file.links.inside)
        between = _link(file.links.between) if file.links.between else inside
        return _reached(file.model, file.rank, tp), inside, between, ()
    base = ScalingInformationBase.read(folder / file.rank.sib, None)
    if base is None:
        raise ConfigError(f"rank.sib: there is no {folder / file.rank.sib}")
    with base:
        rows = base.rows(PhaseRow)
        times = fit_phases(rows, heads=file.model.heads, kv_heads=file.model.kv_heads, tp=tp)
        links = base.rows(LinkRow)
    given = file.links
    inside = _link(given.inside) if given.inside else link_speed(links, "inside")
    return times, inside, _between(given, links) or inside, rows


def _between(given: Links, measured: Sequence[LinkRow]) -> LinkSpeed | None:
    """Return the speed between servers, as given or as measured; None: unknown."""
    if given.between:
        return _link(given.between)
    if any(row.kind == "between" for row in measured):
        return link_speed(measured, "between")
    return None


def _link(section: LinkSection | None) -> LinkSpeed:
    if section is None:
        raise ConfigError("links.inside: nothing is known of it; give gbps and latency_us")
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
