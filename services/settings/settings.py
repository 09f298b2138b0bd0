"""Define what an operator can set: the `args` of the application in `config.yaml`.

Every model is frozen. An unknown key is an error that names the nearest known one, and every
message fits on one line (`Settings.model_validate`, which Ray Serve calls).

The secret between router and ranks and the API keys are *not* settings, which Ray would print: they
come from the environment or from a file (`services.settings.credentials`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from csps.models.network.checkpoint_json import OVERRIDABLE
from csps.protocols.core.errors import ConfigError, abridged, nearest
from csps.protocols.core.topology import Topology
from csps.protocols.gang.members import GangRole
from csps.protocols.rpc.tls import Tls, TlsFiles
from csps.services.requests.request_spec import ApiKey
from csps.services.scheduling.policies.registry import check_pairing, in_iterations, make_policy
from csps.services.settings.hub import cached_model, download_hint, is_hub_id
from csps.services.settings.processor import multiplies_bf16
from csps.services.settings.vllm_options import hint_of

Count = Annotated[int, Field(ge=1)]


def _slots(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Say what slots may be in one sentence, and not in one for each alternative."""
    try:
        return validate(value)
    except ValidationError:
        problem = f"must be a number of tokens from 1 on, or auto, got {abridged(value)}"
        raise ValueError(problem) from None


Slots = Annotated[Literal["auto"] | Count, WrapValidator(_slots)]
"""Number of KV slots; `auto` is as many as fit (`services.planning.memory`)."""
MetricsPrefix = Literal["csps", "vllm"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Duration = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class SettingsSection(BaseModel):
    """Base of all settings: frozen, strict about keys, without surprising conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_keys_only(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and cls.model_config.get("extra") == "forbid":
            for key in data:
                if key not in cls.model_fields:
                    hint = hint_of(str(key)) or _deeper(cls, key)
                    hint = hint or nearest(str(key), cls.model_fields)
                    raise ValueError(f"unknown setting {abridged(key)}{hint}")
        return data


def _deeper(cls: type[BaseModel], key: Any) -> str:
    """Return text to append to "unknown setting" if sections of `cls` have it."""
    places = [
        f"{name}.{key}"
        for name, field in cls.model_fields.items()
        for kind in (field.annotation, *get_args(field.annotation))
        if isinstance(kind, type) and issubclass(kind, BaseModel) and key in kind.model_fields
    ]
    return f"; did you mean {' or '.join(places)}?" if places else ""


def _known_overrides(overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in overrides:
        if key not in OVERRIDABLE:
            hint = nearest(str(key), OVERRIDABLE)
            raise ValueError(f"{abridged(key)} cannot be overridden{hint}")
    return overrides


class GangSettings(SettingsSection):
    """Settings of every gang: copies of the weights, and processes."""

    instances: Count = 2
    """Copies of the weights; one request may use any number of them."""
    tp: Count = 1
    """Ranks (processes) per instance."""
    threads: Count = 1
    """Compute threads per rank."""
    num_cpus: Annotated[float, Field(ge=0)] = 0.1
    """CPUs that Ray accounts for each rank. Small, so that a demo fits on two cores."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs per rank."""

    @property
    def ranks(self) -> int:
        """Processes of the gang."""
        return self.instances * self.tp


class PrefillSettings(GangSettings):
    """The gang that computes prompts."""

    kv_slots: Slots = 40_960
    """Tokens whose KV an instance can store while prompts are computed."""
    progress_deadline_s: Seconds = 180.0
    """Seconds after which a gang is replaced if a step of it does not advance, nor any that this
    one waits for. Ranks at work report each step about once a second, or once for a yield point
    that takes longer, however long the prompt is."""


class DecodeSettings(GangSettings):
    """The gang that stores the KV cache and samples tokens."""

    kv_slots: Slots = 65_536
    """Tokens whose KV an instance can store; a request may be spread over several."""
    window_slots: Slots | None = None
    """Tokens whose KV an instance can store in layers with a sliding window. A request takes as
    many as the window has, on one instance; `auto` is enough for `scheduling.max_batch` requests.
    None: as many as in other layers (`docs/models.md`)."""
    silence_deadline_s: Seconds = 120.0
    """Seconds of silence of an instance that owes tokens or slots, after which its gang is
    replaced."""
    prefill_tokens_max: Annotated[int, Field(ge=0)] = 0
    """Longest end of a prompt that this gang may compute itself (piggybacked prefill); 0: none. It
    does so if it has all KV before that end and is faster than the gang that computes prompts.
    Running answers wait for it, as long as an instance takes for these tokens."""


class ElasticSettings(GangSettings):
    """One gang that computes prompts and samples tokens, in place of the other two."""

    kv_slots: Slots = 65_536
    """Tokens whose KV an instance can store; a request may be spread over several."""
    progress_deadline_s: Seconds = 180.0
    """Limit as of a prefill gang."""
    silence_deadline_s: Seconds = 120.0
    """Limit as of a decode gang."""


PIGGYBACK_OPTION = "prefill_tokens_max"
"""Option of policies that is a setting of the decode gang."""

AnyGang = PrefillSettings | DecodeSettings | ElasticSettings


class SchedulingSettings(SettingsSection):
    """Policy that decides what starts where, and its options (`docs/scheduling.md`)."""

    model_config = ConfigDict(extra="allow")

    policy: str = "csps"
    """Name of the policy. All other keys of this section but `log` are the policy's own options."""
    log: str | None = None
    """File from which every decision of the router can be replayed: the scheduler's input, round by
    round, without tokens or text (`docs/scheduling.md`). None writes no log."""

    @property
    def options(self) -> dict[str, Any]:
        """Options for the policy."""
        return dict(self.__pydantic_extra__ or {})

    @model_validator(mode="after")
    def _policy_takes_the_options(self) -> Self:
        if PIGGYBACK_OPTION in self.options:
            raise ConfigError(f"{PIGGYBACK_OPTION} belongs under decode:, not scheduling:")
        make_policy(self.policy, self.options, beside=type(self).model_fields)
        return self


class KvTransferSettings(SettingsSection):
    """KV transfer from prefill to decode ranks."""

    in_flight_mib: Count = 32
    """Host memory of a rank for KV in transfer to or from the other gang. Its peers share it: with
    many ranks, or on a fast network with a long latency, more of it keeps links busy."""
    receiving_backends: Count = 16
    """Transfers that a decode rank receives at a time, each from one prefill rank. Further ones
    wait in the order of their requests' first transfer, and a request keeps its slots until all of
    its KV is received."""
    checksum: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Fraction of messages whose bytes are compared at the receiver: 1 for hardware in doubt, which
    TCP's checksums do not find. A difference fails the attempt, which is repeated."""

    @property
    def in_flight_bytes(self) -> int:
        """`in_flight_mib` in bytes."""
        return self.in_flight_mib * 2**20


class KvFilesSettings(SettingsSection):
    """Files in which KV survives its gang (`docs/operations.md`)."""

    path: str
    """Folder on each machine with ranks that prefill, or one that all share."""
    mib: Count = 4096
    """Limit of all files in a folder, whoever writes them. The least recently used go first."""

    @property
    def bytes(self) -> int:
        """`mib` in bytes."""
        return self.mib * 2**20


class KvReuseSettings(SettingsSection):
    """Prefix cache: KV that outlives its request, for prompts with a common prefix
    (`docs/operations.md`)."""

    enabled: bool = True
    max_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """Fraction of an instance's slots for cached KV that no request uses. It is evicted when a
    request needs the slots."""
    files: KvFilesSettings | None = None
    """Where KV survives a restart of its gang; None: it is lost."""

    @model_validator(mode="after")
    def _files_need_reuse(self) -> Self:
        if self.files is not None and not self.enabled:
            raise ValueError("files: enabled is false, so there is no KV to save")
        return self


class ConfiguratorSettings(SettingsSection):
    """Source of the cost table (`docs/sparse-attention.md`)."""

    profile_when_idle: bool = False
    """Measure missing times of this machine, and learn from them, while it is idle."""
    beyond_measured: bool = True
    """Let bounds drop tokens of prompts longer than any whose loss was measured."""


class DeadlineSettings(SettingsSection):
    """Limits for the phases of a request inside the cell. A phase that transfers data has a base,
    and an addition for every thousand tokens of the prompt."""

    reserve_s: Seconds = 10.0
    """Limit for decode instances to reserve slots."""
    reserve_s_per_1k_tokens: Duration = 0.01
    landing_s: Seconds = 60.0
    """Limit from the prefill's last token until all KV is where it decodes."""
    landing_s_per_1k_tokens: Duration = 1.0
    gang_recovery_s: Seconds = 60.0
    """Longest that a request waits for lost gangs to be replaced."""
    request_s: Seconds | None = None
    """Limit from submission to the end of the answer, after which a request fails; None waits."""


class QueueSettings(SettingsSection):
    """Limits of the waiting queue, beyond which clients must come back later."""

    max_waiting: Count = 256
    max_waiting_tokens: Count = 4_194_304
    """Sum of prompt and answer tokens of all waiting requests."""
    max_attempts: Count = 3
    """Attempts at a request whose gang fails; one that has streamed continues with its next
    token."""
    patience_s: Count = 60
    """Seconds after which no request that comes later goes before a waiting one, whatever
    objectives and priorities they have."""


class HttpSettings(SettingsSection):
    """What clients may do. One that stops in the middle of a request gets a 408.

    The limit for headers belongs to the reverse proxy (`services.http.header_deadline`).
    """

    body_deadline_s: Seconds = 60.0
    """Limit for a whole body. For the largest body it means a megabyte in two seconds."""
    body_silence_s: Seconds = 10.0
    """Limit for the next byte of a body."""
    ui: bool = False
    """True serves `/v1/csps/state` and the page `/ui` that shows it, to those who may look into the
    server (`auth.diagnostics`)."""
    request_templates: bool = False
    """True allows `chat_template` in a request: a program that a client wrote, in a sandbox."""
    docs: bool = False
    """True shows the API at `/docs`, and as an OpenAPI document at `/openapi.json`, to everyone."""


class TlsSettings(SettingsSection):
    """PEM files for mutual TLS between router, configurator and ranks (`docs/security.md`), at the
    same paths on every node."""

    certificate: str
    """Certificate that each process shows."""
    key: str
    """The certificate's private key, without a password."""
    authority: str
    """Authority that has signed the certificates of all processes of this cell, and no others."""

    @property
    def files(self) -> TlsFiles:
        """The files."""
        return TlsFiles(certificate=self.certificate, key=self.key, authority=self.authority)

    def resolved(self) -> Self:
        """Return a copy with absolute paths."""
        return self.model_copy(
            update={name: _absolute(getattr(self, name)) for name in type(self).model_fields}
        )


class KeyLimits(SettingsSection):
    """Limits of the API keys of one name, beyond which a request gets a 429. None is no limit."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Prompt tokens, and generated ones when their request ends. A prompt above the limit runs if
    nothing was used for a minute."""
    concurrent_requests: Count | None = None
    """Requests in the server at a time, those that wait included."""
    kv_share: Annotated[float, Field(ge=0.001, le=1)] | None = None
    """Share of the KV slots for decoding that these requests may need together, with their longest
    answers; and, as much again, share of each gang's slots for cached KV that no request uses."""


class AuthSettings(SettingsSection):
    """Rights of clients by the names of their API keys (`docs/operations.md`). Without keys, all
    clients together have one name."""

    limits: KeyLimits = KeyLimits()
    """Limits of each name."""
    overrides: dict[str, KeyLimits] = {}
    """Other limits of some names; what is not given there is as in `limits`."""
    diagnostics: Literal["everyone", "nobody"] | tuple[str, ...] | None = None
    """Names whose clients may look into the server: with `explain`, with a `traceparent` of their
    own, or with a timeline, which is thousands of spans that ranks have to write. Of others these
    are ignored. None: everyone where there are no keys, and nobody where there are."""

    def may_diagnose(self, key: ApiKey) -> bool:
        """Return whether the client with this key may look into the server."""
        if self.diagnostics is None:
            return not key.name
        if isinstance(self.diagnostics, str):
            return self.diagnostics == "everyone"
        return key.name in self.diagnostics

    @property
    def names(self) -> tuple[str, ...]:
        """All names of keys in these settings."""
        allowed = self.diagnostics if isinstance(self.diagnostics, tuple) else ()
        return (*self.overrides, *allowed)

    def limits_of(self, name: str) -> KeyLimits:
        """Return the limits of a name."""
        override = self.overrides.get(name)
        if override is None:
            return self.limits
        given = override.model_dump(include=override.model_fields_set)
        return self.limits.model_copy(update=given)


class SloSettings(SettingsSection):
    """Objectives of requests that bring none of their own (`x-slo-*`). They order waiting requests
    (`services.scheduling.core.promises`) and are counted in `csps:request_slo_total`."""

    ttft_ms: Milliseconds | None = None
    """Time from submission to the first token."""
    ttft_ms_per_1k_tokens: Duration = 0.0
    """Addition for every 1,000 prompt tokens."""
    tpot_ms: Milliseconds | None = None
    """Mean time per token after the first."""
    e2e_ms: Milliseconds | None = None
    """Time from submission to the last token."""


def _http_url(value: str) -> str:
    if not value.startswith(("http://", "https://")):
        raise ValueError(f"must be a URL that begins with http:// or https://, got {value!r}")
    return value


class TelemetrySettings(SettingsSection):
    """Recording of spans, and their destination."""

    enabled: bool = True
    otlp_endpoint: Annotated[str, AfterValidator(_http_url)] | None = None
    """OTLP/HTTP traces endpoint, for instance http://127.0.0.1:4318/v1/traces. The default is
    OTEL_EXPORTER_OTLP_ENDPOINT of the environment in which Ray starts."""
    spans_dir: str = "run/traces"
    """Directory for a file of OTLP-JSON per process, if there is no endpoint (`csps trace`)."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Fraction of requests that are traced, unless the `traceparent` of a client that may
    (`auth.diagnostics`) decides."""
    timeline_sample: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of requests whose trace also has every phase on every rank (`docs/traces.md`),
    unless the `tracestate` of a client that may (`auth.diagnostics`) asks for it; more than
    `sample` has no effect. 0 by default: a long prompt has thousands of phases, and the next step
    waits while they are recorded."""
    request_trace: str | None = None
    """File that records lengths, times, conversations and objectives of all requests, without
    text, for `csps simulate`, `csps rates` and `csps bench`. A file of 64 MiB, and that of the
    router before, becomes `NAME.1`."""
    project: str = "csps"
    """Value of `openinference.project.name`, which groups traces in Arize Phoenix."""
    metrics_prefix: MetricsPrefix = "csps"
    """Prefix of those metrics that vLLM has too. With `vllm` their names and labels are vLLM's, so
    that dashboards and routers made for it work unchanged (`docs/vllm.md`)."""

    def resolved(self) -> Self:
        """Return a copy with absolute paths."""
        trace = self.request_trace
        return self.model_copy(
            update={
                "spans_dir": _absolute(self.spans_dir),
                "request_trace": None if trace is None else _absolute(trace),
            }
        )


class TopologySettings(SettingsSection):
    """Location of ranks, and the distance between them (`docs/sparse-attention.md`)."""

    prefill: tuple[str, ...] = ()
    """Rack-Server-GPU id of each rank, such as "0-3-1", in rank order. If empty, each rank reads
    the label `csps.io/server` of its Ray node, the node's Rack-Server id. Nodes without the label
    count as one server, 0-0."""
    decode: tuple[str, ...] = ()
    """Ids of the decode gang's ranks."""
    elastic: tuple[str, ...] = ()
    """Ids of the elastic gang's ranks."""
    link_ratio: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    """Time of a byte between servers over that inside one. It is used to choose strategies until
    `csps profile links` has measured it. The paper's count is 1."""

    def of(self, role: GangRole) -> tuple[str, ...]:
        """Return the ids of a gang's ranks, in rank order; empty if their nodes' labels give
        them."""
        return {"prefill": self.prefill, "decode": self.decode, "elastic": self.elastic}[role]


class Settings(SettingsSection):
    """Settings of one cell: a router, a configurator, and prefill and decode gangs or an elastic
    one."""

    model: str = "needle"
    """Hugging Face checkpoint directory, the name of a model shipped in `models/`, or the id of a
    model of the Hugging Face Hub that has been downloaded."""
    served_model_name: str | None = None
    """Name in the API; None means the directory's name, or the id."""
    chat_template: str | None = None
    """File with a Jinja template for chat requests; None takes the checkpoint's."""
    model_overrides: Annotated[Mapping[str, Any], AfterValidator(_known_overrides)] = {}
    """Values that replace those of the checkpoint's config.json: its RoPE parameters, its longest
    context and its sliding window."""
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "float32"
    """Type of weights, activations and KV. `auto` is bfloat16 on GPUs and on processors that
    multiply such numbers, as the machine that reads the settings, and otherwise float32."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """Form of KV in memory. `auto` is `dtype`; `int8` is 8 bits with a scale for each token and KV
    head, on CPUs only."""
    weight_dtype: Literal["auto", "fp8"] = "auto"
    """Form of the matrices of feed-forward layers in memory. `auto` is `dtype`; `fp8`: 8-bit floats
    with one scale per row; activations are also quantized to FP8, one scale per token."""
    quantum_ms: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 50.0
    """About how long a rank computes a prefill step before it turns to other waiting work: a
    high-priority step, or a decode iteration of its own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 0.9
    """Share of a GPU's memory, or of main memory on CPUs, that `kv_slots: auto` fills."""
    host: str = "auto"
    """Interface that ranks listen on; `auto` is the address that Ray knows the node by."""
    max_positions: Count | None = None
    """Longest prompt plus answer; None means the model's own limit."""
    default_max_tokens: Count | None = None
    """Answer length of a chat request that does not set one. By default, prompt and answer together
    may use a quarter of the decode gang's KV slots, less where four such parts do not fit the
    instances. A long prompt still leaves half of that for the answer. The limit is 4,096 tokens and
    the remaining context."""
    tool_format: Literal["auto", "hermes", "llama3", "harmony", "none"] = "auto"
    """How the model writes calls of tools; `auto`: as its chat template shows."""
    reasoning: Literal["auto", "think", "harmony", "none"] = "auto"
    """How the model writes its reasoning, which answers have apart from their text: `think` for
    `<think>`, `harmony` for the channels of gpt-oss; `auto`: as its chat template shows."""
    max_body_bytes: Count = 32 * 1024 * 1024
    api_keys_file: str | None = None
    """File of client keys, each as `KEY` or `NAME KEY`, which is read again when it changes;
    `CSPS_API_KEYS` adds to it. Without both, the server is open."""
    drain_s: Seconds = 30.0
    """Time that a stopping server gives running requests."""
    revision: str | None = None
    """Text without a meaning of its own. Another one makes a deployment replace all processes,
    which code that was installed anew does not by itself. `csps serve` sets it to a digest of the
    installed code, unless the file has one."""
    scaling_information_base: str = "run/scaling-information-base.sqlite"
    """File with the measurements of `csps profile` on this machine with this model
    (`docs/profiling.md`). If there is none, shipped coefficients are used."""
    prefill: PrefillSettings = PrefillSettings()
    decode: DecodeSettings = DecodeSettings()
    elastic: ElasticSettings | None = None
    """One gang in place of `prefill` and `decode`; not every policy supports it."""
    scheduling: SchedulingSettings = SchedulingSettings()
    queue: QueueSettings = QueueSettings()
    http: HttpSettings = HttpSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    kv_transfer: KvTransferSettings = KvTransferSettings()
    kv_reuse: KvReuseSettings = KvReuseSettings()
    topology: TopologySettings = TopologySettings()
    configurator: ConfiguratorSettings = ConfiguratorSettings()
    auth: AuthSettings = AuthSettings()
    tls: TlsSettings | None = None
    """Files for mutual TLS between processes of the server; None leaves them unencrypted."""
    slo: SloSettings = SloSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @model_validator(mode="after")
    def _dtype_of_this_machine(self) -> Self:
        # Replaced at once: all ranks must compute in one dtype, whatever machine each is on, and
        # measurements and KV of another one do not fit.
        if self.dtype == "auto":
            best = "bfloat16" if self.asks_for_gpus or multiplies_bf16() else "float32"
            object.__setattr__(self, "dtype", best)  # a frozen model
        return self

    @model_validator(mode="after")
    def _eight_bits_are_for_cpus(self) -> Self:
        if self.kv_dtype == "int8" and self.asks_for_gpus:
            raise ValueError(
                "kv_dtype: int8 is for CPUs, and these ranks compute on GPUs: set kv_dtype to auto "
                "(KV in dtype), or device to cpu and num_gpus to 0"
            )
        return self

    @model_validator(mode="after")
    def _fp8_has_results_in_bf16(self) -> Self:
        if self.weight_dtype == "fp8" and self.asks_for_gpus and self.dtype != "bfloat16":
            raise ValueError(
                f"weight_dtype: fp8 needs dtype: bfloat16 on GPUs, not {self.dtype}: set dtype to "
                "bfloat16, or weight_dtype to auto"
            )
        return self

    @property
    def asks_for_gpus(self) -> bool:
        """Return whether ranks are to compute on GPUs."""
        return any(gang.num_gpus for gang in self.gangs.values()) and self.device != "cpu"

    @model_validator(mode="after")
    def _a_pair_or_an_elastic_gang(self) -> Self:
        given = [name for name in ("prefill", "decode") if name in self.model_fields_set]
        if self.elastic is not None and given:
            raise ValueError(
                f"elastic replaces the prefill and decode gangs: remove {' and '.join(given)}"
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
                    f"decode.{PIGGYBACK_OPTION}: kv_reuse.enabled is false, so no prefix is cached"
                )
            try:
                make_policy(self.scheduling.policy, self.policy_options)
            except ConfigError as error:
                raise ValueError(f"decode.{PIGGYBACK_OPTION}: {error}") from None
        return self

    @model_validator(mode="after")
    def _without_near_kv_no_prompts_are_decoded_on(self) -> Self:
        if self.elastic is not None or self.decode.window_slots is None:
            return self
        if self.decode.prefill_tokens_max:
            raise ValueError(
                f"decode.{PIGGYBACK_OPTION}: with decode.window_slots, the gang lacks KV before "
                "ends of prompts; remove one of them"
            )
        if in_iterations(self.scheduling.policy):
            raise ValueError(
                f"decode.window_slots: policy {self.scheduling.policy} computes prompts beside "
                "decoding, behind KV that the gang would lack; remove it, or choose another policy"
            )
        return self

    @model_validator(mode="after")
    def _topology_fits_the_gangs(self) -> Self:
        for role in get_args(GangRole):
            locations = self.topology.of(role)
            if role in self.gangs:
                _check_locations(role, locations, self.gangs[role])
            elif locations:
                raise ValueError(f"topology.{role}: this cell has no {role} gang")
        return self

    @property
    def gangs(self) -> dict[GangRole, AnyGang]:
        """Gangs of the cell by role."""
        if self.elastic is not None:
            return {"elastic": self.elastic}
        return {"prefill": self.prefill, "decode": self.decode}

    @property
    def policy_options(self) -> dict[str, Any]:
        """Options for the policy, including the decode gang's."""
        options = self.scheduling.options
        if self.elastic is None and self.decode.prefill_tokens_max:
            options[PIGGYBACK_OPTION] = self.decode.prefill_tokens_max
        return options

    def kv_files_of(self, role: GangRole) -> KvFilesSettings | None:
        """Return the files of a gang's KV; None if it has none. A decode gang's KV is worth files
        only if it computes ends of prompts behind it."""
        decodes_only = role == "decode" and not self.decode.prefill_tokens_max
        return None if decodes_only else self.kv_reuse.files

    @property
    def prefilling_role(self) -> GangRole:
        """Role of the gang that computes prompts."""
        return "prefill" if self.elastic is None else "elastic"

    @property
    def prefilling(self) -> PrefillSettings | ElasticSettings:
        """The gang that computes prompts."""
        return self.elastic or self.prefill

    @property
    def decoding_role(self) -> GangRole:
        """Role of the gang that samples tokens."""
        return "decode" if self.elastic is None else "elastic"

    @property
    def decoding(self) -> DecodeSettings | ElasticSettings:
        """The gang that samples tokens."""
        return self.elastic or self.decode

    @classmethod
    def model_validate(cls, obj: Any, **kwargs: Any) -> Self:
        """Validate as pydantic does, but report an error as one line of text.

        Raises:
            ConfigError: a key is unknown, or a value does not fit.
        """
        _refuse_booleans(cls, obj, "")
        try:
            return super().model_validate(obj, **kwargs)
        except ValidationError as exc:
            raise ConfigError(first_error(exc)) from None

    def resolved(self) -> Self:
        """Return a copy with absolute paths, for processes with other working directories.

        Raises:
            ConfigError: the model does not exist.
        """
        log, keys, template = self.scheduling.log, self.api_keys_file, self.chat_template
        files = self.kv_reuse.files
        return self.model_copy(
            update={
                "model": str(self.model_dir),
                "served_model_name": self.model_name,
                "chat_template": None if template is None else _absolute(template),
                "api_keys_file": None if keys is None else _absolute(keys),
                "scaling_information_base": _absolute(self.scaling_information_base),
                "scheduling": self.scheduling.model_copy(
                    update={"log": None if log is None else _absolute(log)}
                ),
                "kv_reuse": self.kv_reuse.model_copy(
                    update={"files": None if files is None else _resolved_files(files)}
                ),
                "telemetry": self.telemetry.resolved(),
                "tls": None if self.tls is None else self.tls.resolved(),
            }
        )

    def load_tls(self) -> Tls | None:
        """Return what encrypts connections between processes of the server, if it is set.

        Raises:
            ConfigError: a file is missing, or two processes would not accept each other with them.
        """
        return None if self.tls is None else Tls.load(self.tls.files)

    @property
    def model_dir(self) -> Path:
        """The checkpoint directory.

        Raises:
            ConfigError: there is no such directory.
        """
        for candidate in (Path(self.model).expanduser(), shipped_models() / self.model):
            if (candidate / "config.json").is_file():
                return candidate.resolve()
        if (downloaded := cached_model(self.model)) is not None:
            return downloaded.resolve()
        raise ConfigError(_no_model(self.model))

    @property
    def element_bytes(self) -> int:
        """Bytes of a number of `dtype`."""
        return 4 if self.dtype == "float32" else 2

    @property
    def number_types(self) -> str:
        """`dtype`, with the forms of KV and weights if they are others: what measurements depend
        on."""
        kv = "" if self.kv_dtype == "auto" else f", KV {self.kv_dtype}"
        weights = "" if self.weight_dtype == "auto" else f", weights {self.weight_dtype}"
        return f"{self.dtype}{kv}{weights}"

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        if self.served_model_name:
            return self.served_model_name
        return self.model if is_hub_id(self.model) else Path(self.model).name


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _resolved_files(files: KvFilesSettings) -> KvFilesSettings:
    return files.model_copy(update={"path": _absolute(files.path)})


def _no_model(name: str) -> str:
    """Say that there is no such model, and which could be meant."""
    shown = abridged(name, 200)
    if Path(name).expanduser().is_dir():
        return f"model: no config.json in {shown}, so it is no Hugging Face checkpoint"
    if is_hub_id(name):
        return (
            f"model: {name} is neither a directory nor in the Hugging Face cache; `csps serve "
            f"{name}` downloads it. Without a connection, {download_hint(name)}"
        )
    shipped = ", ".join(sorted(path.parent.name for path in shipped_models().glob("*/config.json")))
    return f"model: there is no directory {shown}, nor a shipped model of this name ({shipped})"


def shipped_models() -> Path:
    """Return the directory `models`, which holds the default checkpoint."""
    return Path(__file__).resolve().parents[2] / "models"


def _check_locations(role: str, locations: Sequence[str], gang: GangSettings) -> None:
    """Raise if a topology names ranks but not a place for every rank of the gang."""
    if not locations:
        return
    try:
        Topology.of_gang(locations, ranks=gang.ranks, tp=gang.tp)
    except ConfigError as error:
        raise ValueError(f"topology.{role}: {error}") from None


def _refuse_booleans(cls: type[BaseModel], given: Any, prefix: str) -> None:
    """Raise ConfigError for true or false where a number belongs: pydantic takes them for 1 and 0,
    and YAML reads `yes` and `no` as them."""
    for name, value in given.items() if isinstance(given, Mapping) else ():
        field = cls.model_fields.get(name)
        if field is None:
            continue
        kinds = {field.annotation, *get_args(field.annotation)}
        numbers = {int, float} & {*kinds, *(arg for kind in kinds for arg in get_args(kind))}
        if isinstance(value, bool) and numbers and bool not in kinds:
            raise ConfigError(f"{prefix}{name} must be a number, got {value}")
        for kind in kinds:
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                _refuse_booleans(kind, value, f"{prefix}{name}.")


def first_error(exc: ValidationError) -> str:
    """Return the first error, as `path: what is wrong`, and the number of further ones."""
    errors = exc.errors(include_url=False)
    first = errors[0]
    where = ".".join(str(key) for key in first["loc"])
    if first["type"] == "value_error":  # raised here, and complete
        problem = first["msg"].removeprefix("Value error, ")
    else:
        rule = first["msg"].partition(", unable")[0].replace("Input should be", "must be")
        problem = f"{rule}, got {abridged(first['input'])}"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{where}: {problem}{more}" if where else f"{problem}{more}"
