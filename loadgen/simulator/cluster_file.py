"""Cluster files: the YAML description of a simulated cluster (`docs/simulator.md`).

A file is one that comes with csps, given by name, or a user's own. Every model is frozen, and an
unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from csps.configurator.costs.cost_table import read_latencies
from csps.configurator.costs.latency import (
    FRACTION_BITS,
    DecodeCost,
    LatencyKey,
    LatencyTable,
    LinearDecodeCost,
    LinkCost,
    StepCost,
    parse_table,
)
from csps.configurator.costs.latency_tables import PUBLISHED
from csps.configurator.model.scaling_information_base import ScalingInformationBase
from csps.loadgen.simulator.cluster import ClusterModel, GangModel, InstanceModel, LinkModel
from csps.loadgen.simulator.hardware import (
    BITS_PER_BYTE,
    ClusterServer,
    Count,
    Links,
    LinkSection,
    ModelSection,
    Permission,
    RankSection,
    RankSpeed,
    Section,
    read_named,
)
from csps.loadgen.simulator.planned_options import PlannedOptions
from csps.protocols.attention.plan import EXACT
from csps.protocols.core.errors import ConfigError, abridged, nearest
from csps.protocols.gang.members import GangRole

CLUSTERS = Path(__file__).parent / "clusters"
NS_PER_S = 1_000_000_000
LATENCY_FIT = "latency"
"""Name of the fits that `csps profile` writes."""
Seconds = Annotated[float, Field(ge=0)]


class Gpus(Section):
    """GPUs from which any gangs are made (`--gangs`), so that policies for a pair of gangs and for
    an elastic one can be compared on the same hardware."""

    servers: Count = 1
    each: Count
    """GPUs of each server."""
    tp: Count = 1
    """Ranks of a small instance, of which elastic gangs and pairs consist unless told otherwise."""
    memory_gb: Annotated[float, Field(gt=0)]
    """Memory of a GPU for weights and KV, in 10^9 bytes."""
    weights_gb: Annotated[float, Field(ge=0)]
    """Size of one copy of the weights, which the ranks of an instance share."""


class DecodeSection(Section):
    """Seconds of a decode iteration, A + B * context + C * batch, in two regimes."""

    small: tuple[Seconds, Seconds, Seconds]
    large: tuple[Seconds, Seconds, Seconds]
    tipping_batch: Count
    """Largest batch of the first regime."""


class Latency(Section):
    """Source of times: one of `steps`, `published`, `sib` and `table`."""

    steps: dict[Count, tuple[Seconds, Seconds, Seconds, Seconds]] | None = None
    """Seconds of a step on `sp` instances: a + b L + c C L + d L^2 for L tokens after C others."""
    strategy: Literal["ulysses", "ring_kv", "ring_q"] | None = None
    """Exact strategy of `steps`, by which its exchanges are priced. Not given: `ulysses`."""
    measured: LinkSection | None = None
    """Link between the instances of one server on which the times were measured, with exchanges.
    Not given: as in `sib` or `table`; other times hold no exchange that computing does not hide.
    """
    published: str | None = None
    """Name of a paper's table of steps."""
    decode: dict[Count, tuple[Seconds, Seconds, Seconds] | DecodeSection] | None = None
    """Decode costs by number of decode instances; they replace those of `sib` or `table`."""
    decode_by_tp: dict[Count, dict[Count, tuple[Seconds, Seconds, Seconds] | DecodeSection]] = (
        Field(default_factory=dict)
    )
    """The same by ranks of an instance, with `gpus`."""
    pipeline_chunk: Count | None = None
    """Groups of several instances are pipelines: each computes its share of the layers, one chunk
    of so many tokens after the other. Times are derived from those of one instance."""
    sib: str | None = None
    """Path of a scaling information base that `csps profile` has filled."""
    table: str | None = None
    """Path of a table beside a live router's log, with what the router learned from its steps."""


class Kv(Section):
    """KV sizes of the model."""

    bytes_per_token: Annotated[int, Field(ge=0)] = 0
    """Bytes of keys and values of a token in all layers."""
    layers: Count = 1
    """Number of layers. KV of all but the last one is sent while a step computes."""


class Gaps(Section):
    """Microseconds without computation. Papers leave them out, real machines have them."""

    step: Annotated[float, Field(ge=0)] = 0.0
    """Gap before each step."""
    iteration: Annotated[float, Field(ge=0)] = 0.0
    """Gap before each decode iteration."""
    notice: Annotated[float, Field(ge=0)] = 0.0
    """Delay of a message between router and ranks."""
    front: Annotated[float, Field(ge=0)] = 0.0
    """Delay between client and scheduler of each request (HTTP, parsing, way back of the first
    token). It passes before the request is submitted.
    """


class ClusterFile(Section):
    """A cluster file."""

    servers: tuple[ClusterServer, ...] = ()
    gpus: Gpus | None = None
    """Replaces `servers`."""
    links: Links = Links()
    latency: Latency
    kv: Kv | None = None
    """Not given: the sizes of `model`."""
    receiving_backends: Count | None = None
    """KV transfers that a decode instance receives at a time. Not given: no limit."""
    max_positions: Count = 1 << 20
    """Longest prompt and answer together, in tokens."""
    quantum_ms: Annotated[float, Field(ge=0)] = 0.0
    """Time between two yield points of a low-priority step; 0 means anywhere."""
    gaps_us: Gaps = Gaps()
    model: ModelSection | None = None
    """Sizes of the model. Not given: it has as many query heads as KV heads, for exchanges."""
    rank: RankSection | None = None
    """Speed of a rank, by which the pipeline simulator prices options of attention, as in
    `csps plan`. Not given: all attention is exact.
    """

    @model_validator(mode="after")
    def _one_model(self) -> ClusterFile:
        if self.kv and self.model and self.kv.bytes_per_token != self.model.kv_bytes:
            raise ValueError(
                f"kv.bytes_per_token: {self.kv.bytes_per_token}, but a token of the model has "
                f"{self.model.kv_bytes}; leave it out"
            )
        if self.kv and self.model and self.kv.layers != self.model.layers:
            raise ValueError(f"kv.layers: the model has {self.model.layers}; leave it out")
        if self.rank and not self.model:
            raise ValueError("rank: needs the sizes of `model`")
        return self

    @property
    def kv_sizes(self) -> Kv:
        """Return the KV sizes, as given or the model's."""
        if self.kv is None and self.model is not None:
            return Kv(bytes_per_token=self.model.kv_bytes, layers=self.model.layers)
        return self.kv or Kv()


@dataclass(frozen=True, kw_only=True)
class GangSizes:
    """Instances of a gang, and the ranks of each."""

    instances: int
    tp: int


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The gangs into which GPUs are divided."""

    prefill: GangSizes
    """The prefill gang, or the elastic one."""
    decode: GangSizes | None = None
    """None: the elastic gang decodes too."""
    pipeline_chunk: int | None = None
    """Tokens of a chunk, if groups are pipelines."""

    @classmethod
    def parse(cls, word: str) -> Arrangement:
        """Return the arrangement of a word: `4x2` is an elastic gang of four instances with two
        ranks each, `8x1+1x8` a prefill and a decode gang.

        Raises:
            ConfigError: it is none.
        """
        match = re.fullmatch(r"(\d+)x(\d+)(?:\+(\d+)x(\d+))?", word)
        sizes = [int(digits) for digits in match.groups() if digits] if match else [0]
        if min(sizes) < 1:
            raise ConfigError(
                f"--gangs: expected INSTANCESxRANKS for an elastic gang or two of them with a + "
                f"for prefill and decode, such as 4x2 or 8x1+1x8, got {abridged(word)}"
            )
        decode = GangSizes(instances=sizes[2], tp=sizes[3]) if len(sizes) > 2 else None
        return cls(prefill=GangSizes(instances=sizes[0], tp=sizes[1]), decode=decode)


def load_cluster(name_or_path: str, arrangement: Arrangement | None = None) -> ClusterModel:
    """Return the model of a cluster that comes with csps, by name, or of a file.

    Args:
        arrangement: gangs to make of a file with `gpus`.

    Raises:
        ConfigError: the file does not exist or is invalid, or the gangs do not fit; the message
            names file and key.
    """
    path, data = read_named(name_or_path, CLUSTERS)
    return parse_cluster(
        data, name=path.stem, place=str(path), folder=path.parent, arrangement=arrangement
    )


def read_gpus(name_or_path: str) -> Gpus | None:
    """Return the GPUs of a cluster file; None if it has gangs instead.

    Raises:
        ConfigError: the file does not exist or is invalid.
    """
    path, data = read_named(name_or_path, CLUSTERS)
    with _errors_of(str(path)):
        return ClusterFile.model_validate(data).gpus


def parse_cluster(
    data: Any,
    *,
    name: str,
    place: str = "cluster",
    folder: Path | None = None,
    arrangement: Arrangement | None = None,
) -> ClusterModel:
    """Return the model of a cluster file's content.

    Args:
        folder: where the file is, for paths in it. None: the working directory.

    Raises:
        ConfigError: the content is invalid.
    """
    with _errors_of(place):
        file = ClusterFile.model_validate(data)
        if bool(file.servers) == (file.gpus is not None):
            raise ConfigError("one of servers and gpus")
        if file.gpus is not None:
            if arrangement is None:
                raise ConfigError("gpus: name the gangs to make of them, such as `--gangs 4x2`")
            file = _arranged(file, file.gpus, arrangement)
        elif arrangement is not None:
            raise ConfigError("servers: gangs are given, so there is nothing to arrange")
        return _model(file, name, folder or Path())


@contextmanager
def _errors_of(place: str) -> Iterator[None]:
    """Name the file in errors."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{place}: {key + ': ' if key else ''}{message}") from None
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


def _arranged(file: ClusterFile, gpus: Gpus, arrangement: Arrangement) -> ClusterFile:
    """Return the file with gangs in place of GPUs.

    Instances are placed in order, the prefill gang's first; none lies on two servers.
    """
    servers: list[ClusterServer] = []
    free = [gpus.each] * gpus.servers
    parts: list[tuple[GangSizes, tuple[Permission, ...]]]
    if arrangement.decode is None:
        parts = [(arrangement.prefill, ("prefill", "decode"))]
    else:
        parts = [(arrangement.prefill, ("prefill",)), (arrangement.decode, ("decode",))]
    for sizes, permissions in parts:
        left = sizes.instances
        for server in range(gpus.servers):
            count = min(left, free[server] // sizes.tp)
            if count:
                left -= count
                free[server] -= count * sizes.tp
                servers.append(
                    ClusterServer(
                        server=server,
                        instances=count,
                        tp=sizes.tp,
                        permissions=permissions,
                        kv_slots=_slots(gpus, sizes.tp, file.kv_sizes),
                    )
                )
        if left:
            found = f"{gpus.servers} servers with {gpus.each} GPUs"
            raise ConfigError(f"gpus: {found} have no room for {left} instances of {sizes.tp}")
    tp = (arrangement.decode or arrangement.prefill).tp
    if tp not in file.latency.decode_by_tp:
        raise ConfigError(f"latency: decode_by_tp: no times of instances with {tp} ranks")
    latency: dict[str, Any] = {"decode": file.latency.decode_by_tp[tp]}
    if arrangement.pipeline_chunk is not None:
        latency["pipeline_chunk"] = arrangement.pipeline_chunk
    return file.model_copy(
        update={
            "servers": tuple(servers),
            "latency": file.latency.model_copy(update=latency),
        }
    )


def _slots(gpus: Gpus, tp: int, kv: Kv) -> int:
    """Return the tokens that an instance can hold beside its weights."""
    room = tp * gpus.memory_gb - gpus.weights_gb
    if not kv.bytes_per_token or room <= 0:
        raise ConfigError(f"gpus: the weights leave an instance of {tp} ranks no room for KV")
    return int(room * 1e9 / kv.bytes_per_token)


def _options(file: ClusterFile, folder: Path, tp: int) -> PlannedOptions | None:
    if file.rank is None or file.model is None:
        return None
    speed = RankSpeed.read(file.model, file.rank, file.links, folder=folder, tp=tp)
    return PlannedOptions(speed)


def _model(file: ClusterFile, name: str, folder: Path) -> ClusterModel:
    prefill, decode = _gangs(file)
    table, kv = _table(file.latency, name, prefill, decode), file.kv_sizes
    return ClusterModel(
        name=name,
        prefill=prefill,
        decode=decode,
        table=_with_links(table, file.links),
        measured=_link(file.latency.measured) or _measured_link(table),
        inside=_link(file.links.inside),
        between=_link(file.links.between),
        racks=_link(file.links.racks),
        kv_bytes_per_token=kv.bytes_per_token,
        layers=kv.layers,
        attention=None if file.model is None else file.model.attention,
        element_bytes=None if file.model is None else file.model.element_bytes,
        options=_options(file, folder, prefill.tp),
        receiving_backends=file.receiving_backends,
        max_positions=file.max_positions,
        quantum_ns=round(file.quantum_ms * 1_000_000),
        step_gap_ns=round(file.gaps_us.step * 1000),
        iteration_gap_ns=round(file.gaps_us.iteration * 1000),
        notice_ns=round(file.gaps_us.notice * 1000),
        front_ns=round(file.gaps_us.front * 1000),
    )


def _gangs(file: ClusterFile) -> tuple[GangModel, GangModel]:
    """Return the prefill and decode gang; an elastic gang is returned as both."""
    both = [len(set(servers.permissions)) > 1 for servers in file.servers]
    if all(both):
        gang = _gang(file, "prefill", "elastic")
        return gang, gang
    if any(both):
        raise ConfigError("servers: all instances have both permissions, an elastic gang, or none")
    if any(servers.cores for servers in file.servers):
        raise ConfigError("servers: cores: only ranks of an elastic gang share them")
    return _gang(file, "prefill", "prefill"), _gang(file, "decode", "decode")


def _gang(file: ClusterFile, permission: Permission, role: GangRole) -> GangModel:
    instances: list[InstanceModel] = []
    in_rack: dict[int, int] = {}
    used: Counter[tuple[int, int]] = Counter()
    """GPUs taken so far, by rack and server."""
    tps: set[int] = set()
    for servers in file.servers:
        for _ in range(servers.count):
            number = in_rack[servers.rack] = in_rack.get(servers.rack, -1) + 1
            if servers.server is not None:
                number = servers.server
            begin = used[servers.rack, number]
            used[servers.rack, number] += servers.instances * servers.tp
            if permission not in servers.permissions:
                continue
            tps.add(servers.tp)
            instances += (
                InstanceModel(
                    location=f"{servers.rack}-{number}-{begin + index * servers.tp}",
                    kv_slots=servers.kv_slots,
                    cores=servers.cores,
                )
                for index in range(servers.instances)
            )
    if len(tps) != 1:
        found = f"has tp {' and '.join(map(str, sorted(tps)))}" if tps else "has no instances"
        raise ConfigError(f"servers: the {role} gang {found}; it has one tp")
    return GangModel(instances=tuple(instances), tp=tps.pop())


def _link(section: LinkSection | None) -> LinkModel | None:
    if section is None:
        return None
    return LinkModel(
        bytes_per_s=round(section.gbps * 1e9 / BITS_PER_BYTE),
        latency_ns=round(section.latency_us * 1000),
        shared=section.shared,
    )


def _measured_link(table: LatencyTable) -> LinkModel | None:
    """Return the link on which a table's times were measured; None: it has no measured link."""
    cost = dict(table.links).get("inside")
    if cost is None or not cost.b:
        return None
    return LinkModel(
        bytes_per_s=(NS_PER_S << FRACTION_BITS) // cost.b,
        latency_ns=cost.a >> FRACTION_BITS,
        shared=False,
    )


def _with_links(table: LatencyTable, links: Links) -> LatencyTable:
    """Replace measured link costs by those that the file gives."""
    given = {"inside": links.inside, "between": links.between, "racks": links.racks}
    costs = dict(table.links)
    for kind, link in given.items():
        if link is not None:
            s_per_byte = BITS_PER_BYTE / (link.gbps * 1e9)
            costs[kind] = LinkCost.of_seconds(link.latency_us * 1e-6, s_per_byte)
    return replace(table, links=tuple(costs.items()))


def _table(latency: Latency, name: str, prefill: GangModel, decode: GangModel) -> LatencyTable:
    sources = ("steps", "published", "sib", "table")
    given = [key for key in sources if getattr(latency, key) is not None]
    if latency.strategy is not None and latency.steps is None:
        raise ConfigError("latency: strategy: only that of `steps` can be given")
    if len(given) != 1:
        raise ConfigError(f"latency: one of {', '.join(sources)}, not {given or 'none'}")
    if latency.sib is not None:
        table = _measured(Path(latency.sib))
    elif latency.table is not None:
        table = read_latencies(Path(latency.table))
    else:
        exact, steps = _steps(latency, prefill.tp)
        table = LatencyTable(name=name, exact=exact, steps=steps)
    if latency.pipeline_chunk is not None:
        table = pipelined(table, prefill, latency.pipeline_chunk)
    if latency.decode is not None:
        decode_costs = tuple(
            (LatencyKey(strategy="decode", sp=sp, tp=decode.tp), _decode(triple))
            for sp, triple in latency.decode.items()
        )
        table = replace(table, decode=decode_costs)
    table.step(len(prefill.instances), prefill.tp)
    table.iteration(len(decode.instances), decode.tp)
    return table


def pipelined(table: LatencyTable, gang: GangModel, chunk: int) -> LatencyTable:
    """Return the table with the times of pipelines for groups of several instances.

    A prompt on S stages takes (sum of all chunks + (S - 1) x last chunk) / S: a stage computes a
    chunk while the next one computes the chunk before. With a chunk's time a + b L + c C L + d L^2
    this is quadratic in the prompt's length, too. Activations that travel between stages are not
    counted, nor that another prompt could fill the bubbles.
    """
    one = table.step(1, gang.tp)
    a, b, c, d = (coefficient * 1e-9 for coefficient in one.in_ns)
    steps = [(key, cost) for key, cost in table.steps if key.sp == 1]
    for stages in range(2, len(gang.instances) + 1):
        others = stages - 1
        fit = (
            max(0.0, others * (a + b * chunk + (d - c) * chunk**2) / stages),
            (a / chunk + b + max(0.0, d - c / 2) * chunk + others * c * chunk) / stages,
            c / stages,
            c / 2 / stages,
        )
        key = LatencyKey(strategy=table.exact, sp=stages, tp=gang.tp)
        steps.append((key, StepCost.of_seconds(*fit)))
    return replace(table, steps=tuple(steps))


def _measured(path: Path) -> LatencyTable:
    """Return the latencies that `csps profile` has fitted, on any machine.

    Raises:
        ConfigError: the file does not exist or has no fit.
    """
    base = ScalingInformationBase.read(path, None)
    if base is None:
        raise ConfigError(f"latency: there is no {path}")
    with base:
        fit = base.latest_fit(LATENCY_FIT)
    if fit is None:
        raise ConfigError(f"latency: {path} has no fitted latencies; run `csps profile steps`")
    return parse_table(fit.canonical)


def _steps(latency: Latency, tp: int) -> tuple[str, tuple[tuple[LatencyKey, StepCost], ...]]:
    """Return the exact strategy that was measured, and its times."""
    if latency.steps is not None:
        exact = latency.strategy or EXACT
        return exact, tuple(
            (LatencyKey(strategy=exact, sp=sp, tp=tp), StepCost.of_seconds(*coefficients))
            for sp, coefficients in latency.steps.items()
        )
    assert latency.published is not None
    if (table := PUBLISHED.get(latency.published)) is None:
        raise ConfigError(
            f"latency: no published table '{latency.published}'"
            f"{nearest(latency.published, PUBLISHED)}"
        )
    return table.exact, table.steps


def _decode(section: tuple[float, float, float] | DecodeSection) -> DecodeCost:
    if isinstance(section, DecodeSection):
        small, large = section.small, section.large
        tipping = section.tipping_batch
    else:
        small = large = section
        tipping = 1 << 30
    return DecodeCost(
        small=LinearDecodeCost.of_seconds(*small),
        large=LinearDecodeCost.of_seconds(*large),
        tipping_batch=tipping,
    )
