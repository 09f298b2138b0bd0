"""What an operator can set: the `args` of the application in `config.yaml`.

Every model is frozen, an unknown key is an error that names the nearest right one, and every
message fits on one line (`Settings.model_validate`, which Ray Serve calls).
The secret between router and ranks and the API keys are *not* settings of this file's models that
Ray would print: they come from the environment or from a file (`services.launch.credentials`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from csps.protocols.core.errors import ConfigError, abridged, nearest
from csps.protocols.core.topology import Topology
from csps.protocols.gang.members import GangRole
from csps.services.scheduling.policies.registry import check_pairing, make_policy
from csps.services.settings.credentials import TIMELINE_WORDS

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SettingsSection(BaseModel):
    """Base of all settings: frozen, strict about keys, no surprise conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and cls.model_config.get("extra") == "forbid":
            for key in data:
                if key not in cls.model_fields:
                    hint = nearest(str(key), cls.model_fields)
                    raise ValueError(f"unknown setting {abridged(key)}{hint}")
        return data


class GangSettings(SettingsSection):
    """What all gangs have: so many copies of the weights, in so many processes."""

    instances: Count = 2
    """Copies of the weights; one request may use any number of them."""
    tp: Count = 1
    """Ranks (processes) per instance."""
    threads: Count = 1
    """Compute threads per rank."""
    num_cpus: Annotated[float, Field(ge=0)] = 0.1
    """CPUs that Ray accounts per rank. Small, so that a demo fits on two cores."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs per rank."""

    @property
    def ranks(self) -> int:
        """Processes of the gang."""
        return self.instances * self.tp


class PrefillSettings(GangSettings):
    """The gang that computes prompts."""

    kv_slots: Count = 40_960
    """Tokens whose KV an instance can hold while prompts are computed."""
    progress_deadline_s: Seconds = 180.0
    """A gang is replaced when the instances of a step, and those that they wait for, were silent
    for so long. Ranks at work tell about once a second, or once for a part of a layer that takes
    longer, however long the prompt is."""


class DecodeSettings(GangSettings):
    """The gang that holds the KV cache and draws tokens."""

    kv_slots: Count = 65_536
    """Tokens whose KV an instance can hold; a request may be spread over several."""
    silence_deadline_s: Seconds = 120.0
    """A gang is replaced when it owes tokens or slots and was silent for so long."""
    prefill_tokens_max: Annotated[int, Field(ge=0)] = 0
    """Longest end of a prompt that it may compute itself, if it has kept all that comes before and
    so is done sooner than the gang that computes prompts; 0: none. Answers wait for it, as long as
    an instance takes for so many tokens."""


class ElasticSettings(GangSettings):
    """One gang that computes prompts and draws tokens, in place of the other two."""

    kv_slots: Count = 65_536
    """Tokens whose KV an instance can hold; a request may be spread over several."""
    progress_deadline_s: Seconds = 180.0
    """As of a gang that prefills."""
    silence_deadline_s: Seconds = 120.0
    """As of a gang that decodes."""


PIGGYBACK_OPTION = "prefill_tokens_max"
"""An option of policies that is a setting of the gang that decodes."""

AnyGang = PrefillSettings | DecodeSettings | ElasticSettings


class SchedulingSettings(SettingsSection):
    """Which policy decides what starts where, and what it is told (`docs/scheduling.md`)."""

    model_config = ConfigDict(extra="allow")

    policy: str = "csps"
    """Its name. All other keys of this section but `log` are the policy's own options."""
    log: str | None = None
    """File that every decision of the router can be replayed from: what the scheduler was told,
    turn by turn, without tokens or text (`docs/scheduling.md`). None keeps no log."""

    @property
    def options(self) -> dict[str, Any]:
        """What the policy is told."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def _policy_takes_the_options(self) -> Self:
        if PIGGYBACK_OPTION in self.options:
            raise ConfigError(f"{PIGGYBACK_OPTION} stands under decode, not under scheduling")
        make_policy(self.policy, self.options, beside=type(self).model_fields)
        return self


class KvTransferSettings(SettingsSection):
    """How KV goes from prefill to decode ranks."""

    in_flight_mib: Count = 32
    """Host memory of a rank for KV on its way to or from the other gang. Its peers share it: with
    many ranks, or on a fast network that takes long to answer, more of it keeps links busy."""
    receiving_backends: Count = 16
    """Transfers that a decode rank takes at a time, each from one prefill rank: what more wants to
    send waits in the order in which requests have first asked, and a request keeps its backends
    until all of its KV has landed."""
    checksum: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of messages whose bytes are compared where they land: 1 for hardware that is in doubt.
    A difference fails the attempt, which is repeated. None by default: TCP has checksums."""

    @property
    def in_flight_bytes(self) -> int:
        """`in_flight_mib` in bytes."""
        return self.in_flight_mib * 2**20


class KvReuseSettings(SettingsSection):
    """KV that outlives its request, for prompts that begin alike (`docs/operations.md`)."""

    enabled: bool = True
    max_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """Of an instance's slots, for KV that nobody uses. It goes when a request needs its place."""


class ConfiguratorSettings(SettingsSection):
    """What fills in the cost table (`docs/sparse-attention.md`)."""

    profile_when_idle: bool = False
    """Where times of this machine are missing, measure and learn from them while it is idle."""


class DeadlineSettings(SettingsSection):
    """How long a request's ways inside the cell may take. What has to be transferred counts: a
    deadline is a base, and so much more for every thousand tokens of the prompt."""

    reserve_s: Seconds = 10.0
    """For decode instances to set slots aside."""
    reserve_s_per_1k_tokens: Duration = 0.01
    landing_s: Seconds = 60.0
    """From the prefill's last token until all KV is where it decodes."""
    landing_s_per_1k_tokens: Duration = 1.0
    gang_recovery_s: Seconds = 60.0
    """A request waits so long for lost gangs to be replaced."""
    request_s: Seconds | None = None
    """A request that has not finished so long after its submission fails; None waits."""


class QueueSettings(SettingsSection):
    """How long the line may get before clients are asked to come back."""

    max_waiting: Count = 256
    max_waiting_tokens: Count = 4_194_304
    """Sum of prompt and answer tokens of all waiting requests."""
    max_attempts: Count = 3
    """Times a request is tried when the cluster fails under it; one that has streamed goes on with
    its next token."""


class HttpSettings(SettingsSection):
    """Patience with clients that stop in the middle of a request; each gets a 408.

    That for headers belongs to the HTTP front (`services.http.header_deadline`).
    """

    body_deadline_s: Seconds = 60.0
    """For a whole body. Of the largest that is a megabyte in two seconds."""
    body_silence_s: Seconds = 10.0
    """For the next byte of a body."""


class SloSettings(SettingsSection):
    """What requests are held to that bring no objectives of their own (`x-slo-*`): counted in
    `csps:request_slo_total`, enforced nowhere. None counts nothing."""

    ttft_ms: Milliseconds | None = None
    """From submission to the first token."""
    ttft_ms_per_1k_tokens: Duration = 0.0
    """Added for every 1,000 prompt tokens."""
    tpot_ms: Milliseconds | None = None
    """Mean time per token after the first."""
    e2e_ms: Milliseconds | None = None
    """From submission to the last token."""


def _http_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"must be a URL that begins with http:// or https://, got {value!r}")
    return value


class TelemetrySettings(SettingsSection):
    """Where spans go."""

    enabled: bool = True
    otlp_endpoint: Annotated[str, AfterValidator(_http_url)] | None = None
    """OTLP/HTTP traces endpoint, for instance http://127.0.0.1:4318/v1/traces. Unset, it is that of
    OTEL_EXPORTER_OTLP_ENDPOINT, in the environment in which Ray starts."""
    spans_dir: str = "run/traces"
    """Without an endpoint, each process writes OTLP-JSON into a file here (`csps trace`)."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of requests that are traced, unless the client's `traceparent` decides."""
    timeline_sample: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of requests whose trace also has every phase on every rank (`docs/traces.md`),
    unless the client's `tracestate` asks for it; more than `sample` has no effect. None by
    default: a long prompt has thousands of phases, and the next job waits while they are noted."""
    timeline_clients: str = "everyone"
    """Who may ask for the timeline of a request: "everyone", "nobody", or a file with the API keys
    of those who may, one a line."""
    project: str = "csps"
    """`openinference.project.name`: groups traces in Arize Phoenix."""

    def resolved(self) -> Self:
        """The same with absolute paths."""
        clients = self.timeline_clients
        return self.model_copy(
            update={
                "spans_dir": _absolute(self.spans_dir),
                "timeline_clients": clients if clients in TIMELINE_WORDS else _absolute(clients),
            }
        )


class TopologySettings(SettingsSection):
    """Where ranks are, and how far that is (`docs/sparse-attention.md`)."""

    prefill: tuple[str, ...] = ()
    """Rack-Server-GPU id of each rank, such as "0-3-1", in rank order. Empty, each rank asks its
    Ray node for the label `csps.io/server`, the node's Rack-Server id; nodes without the label are
    all taken for one server, 0-0."""
    decode: tuple[str, ...] = ()
    """The same of the decode gang."""
    elastic: tuple[str, ...] = ()
    """The same of the elastic gang."""
    link_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """How much longer a byte takes from server to server than inside one, for the choice between
    strategies, as long as nobody has measured it (`csps profile links`). 1, a byte is a byte, is
    how the paper counts."""

    def of(self, role: GangRole) -> tuple[str, ...]:
        """Ids of a gang's ranks, in rank order; empty where their nodes' labels say."""
        return {"prefill": self.prefill, "decode": self.decode, "elastic": self.elastic}[role]


class Settings(SettingsSection):
    """One cell: a router, a configurator, and prefill and decode gangs or an elastic one."""

    model: str = "needle"
    """Hugging Face checkpoint directory, or the name of a model shipped in `models/`."""
    served_model_name: str | None = None
    """Name in the API; None takes the directory's name."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quantum_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 50.0
    """About how long a rank computes a step of prefill before it does something else that waits:
    an urgent step, or an iteration of the answers that are drawn there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    host: str = "auto"
    """Interface that ranks listen on; `auto` takes the address that Ray knows the node by."""
    max_positions: Count | None = None
    """Longest prompt plus answer; None takes the model's own limit."""
    default_max_tokens: Count = 256
    """Answer length of a chat request that does not set one."""
    max_body_bytes: Count = 32 * 1024 * 1024
    api_keys_file: str | None = None
    """One key a line; `CSPS_API_KEYS` (comma separated) adds to it. None of both: open server."""
    drain_s: Seconds = 30.0
    """How long a stopping server lets running requests finish."""
    scaling_information_base: str = "run/scaling-information-base.sqlite"
    """What `csps profile` has measured on this machine with this model (`docs/profiling.md`).
    Where it is missing, the coefficients that come with csps stand in."""
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    elastic: ElasticSettings | None = None
    """One gang for both, in place of `prefill` and `decode`; not every policy can use it."""
    scheduling: SchedulingSettings = SchedulingSettings()
    queue: QueueSettings = QueueSettings()
    http: HttpSettings = HttpSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    kv_transfer: KvTransferSettings = KvTransferSettings()
    kv_reuse: KvReuseSettings = KvReuseSettings()
    topology: TopologySettings = TopologySettings()
    configurator: ConfiguratorSettings = ConfiguratorSettings()
    slo: SloSettings = SloSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _a_pair_or_an_elastic_gang(self) -> Self:
        given = [name for name in ("prefill", "decode") if name in self.model_fields_set]
        if self.elastic is not None and given:
            raise ValueError(
                f"elastic is a gang in place of prefill and decode: leave {' and '.join(given)} out"
            )
        try:
            check_pairing(self.scheduling.policy, "pair" if self.elastic is None else "elastic")
        except ConfigError as error:
            raise ValueError(f"scheduling: {error}") from None
        return self

    @model_validator(mode="after")
    def _ends_of_prompts_can_be_decoded_on(self) -> Self:
        if self.policy_options.get(PIGGYBACK_OPTION):
            if not self.kv_reuse.enabled:
                raise ValueError(
                    f"decode.{PIGGYBACK_OPTION}: kv_reuse.enabled is false, so nothing is kept"
                )
            try:
                make_policy(self.scheduling.policy, self.policy_options)
            except ConfigError as error:
                raise ValueError(f"decode.{PIGGYBACK_OPTION}: {error}") from None
        return self

    @model_validator(mode="after")
    def _topology_fits_the_gangs(self) -> Self:
        for role in get_args(GangRole):
            locations = self.topology.of(role)
            if role in self.gangs:
                _check_locations(role, locations, self.gangs[role])
            elif locations:
                raise ValueError(f"topology.{role}: there is no {role} gang")
        return self

    @property
    def gangs(self) -> dict[GangRole, AnyGang]:
        """Those of the cell, by what they do."""
        if self.elastic is not None:
            return {"elastic": self.elastic}
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def policy_options(self) -> dict[str, Any]:
        """What the policy is told, by the options' names."""
        options = self.scheduling.options
        if self.elastic is None and self.decode.prefill_tokens_max:
            options[PIGGYBACK_OPTION] = self.decode.prefill_tokens_max
        return options

    @property
    def prefilling_role(self) -> GangRole:
        """Of the gang that computes prompts."""
        return "prefill" if self.elastic is None else "elastic"

    @property
    def prefilling(self) -> PrefillSettings | ElasticSettings:
        """The gang that computes prompts."""
        return self.elastic or self.prefill

    @property
    def decoding(self) -> DecodeSettings | ElasticSettings:
        """The gang that draws tokens."""
        return self.elastic or self.decode

    @classmethod
    def model_validate(cls, obj: Any, **kwargs: Any) -> Self:
        """As pydantic's, but a mistake is one line of text.

        Raises:
            ConfigError: a key is unknown, or a value does not fit.
        """
        try:
            return super().model_validate(obj, **kwargs)
        except ValidationError as exc:
            raise ConfigError(_one_line(exc)) from None

    def resolved(self) -> Self:
        """The same with absolute paths, for processes with other working directories.

        Raises:
            ConfigError: the model does not exist.
        """
        log, keys = self.scheduling.log, self.api_keys_file
        return self.model_copy(
            update={
                "model": str(self.model_dir),
                "served_model_name": self.model_name,
                "api_keys_file": None if keys is None else _absolute(keys),
                "scaling_information_base": _absolute(self.scaling_information_base),
                "scheduling": self.scheduling.model_copy(
                    update={"log": None if log is None else _absolute(log)}
                ),
                "telemetry": self.telemetry.resolved(),
            }
        )

    @property
    def model_dir(self) -> Path:
        """The checkpoint directory.

        Raises:
            ConfigError: there is none.
        """
        for candidate in (Path(self.model).expanduser(), shipped_models() / self.model):
            if (candidate / "config.json").is_file():
                return candidate.resolve()
        raise ConfigError(_no_model(self.model))

    @property
    def element_bytes(self) -> int:
        """Of a number of `dtype`."""
        return 4 if self.dtype == "float32" else 2

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or Path(self.model).name


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _no_model(name: str) -> str:
    """Why there is no such model, and what could be meant."""
    shown = abridged(name, 200)
    if Path(name).expanduser().is_dir():
        return f"model: no config.json in {shown}, so it is no Hugging Face checkpoint"
    shipped = ", ".join(sorted(path.parent.name for path in shipped_models().glob("*/config.json")))
    return (
        f"model: there is no directory {shown}, nor a shipped model of this name ({shipped}); "
        "csps downloads none"
    )


def shipped_models() -> Path:
    """The `models` room, where the default checkpoint lies."""
    return Path(__file__).resolve().parents[2] / "models"


def _check_locations(role: str, locations: Sequence[str], gang: GangSettings) -> None:
    """A topology gives every rank of the gang a place of its own, or says nothing at all."""
    if not locations:
        return
    try:
        Topology.of_gang(locations, ranks=gang.ranks, tp=gang.tp)
    except ConfigError as error:
        raise ValueError(f"topology.{role}: {error}") from None


def _one_line(exc: ValidationError) -> str:
    """The first mistake, as `path: what is wrong`, and how many more there are."""
    errors = exc.errors(include_url=False)
    first = errors[0]
    where = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":  # one of ours, which says it all
        what = first["msg"].removeprefix("Value error, ")
    else:
        rule = first["msg"].partition(", unable")[0].replace("Input should be", "must be")
        what = f"{rule}, got {abridged(first['input'])}"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where}: {what}{more}" if where else f"{what}{more}"
