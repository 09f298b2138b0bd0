"""The hardware file of `csps plan`: a cluster file with a model and the speed of a rank.

The same file may hold the keys of `csps simulate` (`docs/simulator.md`), which are ignored here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from csps.configurator.pipeline.cases import SimulatedGroup
from csps.loadgen.simulator.hardware import (
    ClusterServer,
    Links,
    ModelSection,
    RankSection,
    RankSpeed,
    Section,
    read_named,
)
from csps.protocols.core.errors import ConfigError

HARDWARE = Path(__file__).parent / "hardware"


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
    return RankSpeed.read(file.model, file.rank, file.links, folder=folder, tp=tp).group(locations)


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
