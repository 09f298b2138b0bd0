"""Read a checkpoint's config.json into a `ModelSpec`, which no architecture owns.

Everything above `models/` works on a `ModelSpec`. Only this file and `checkpoints/families.py` know
the names that a model family uses.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from csps.models.network.checkpoint_json import (
    CheckpointError,
    CheckpointJson,
    UnsupportedModelError,
    overridden,
    read_eos_token_ids,
    read_json,
)
from csps.models.network.rope import RopeSpec, read_rope, scaled_max_positions

Activation = Literal["silu", "gelu_tanh"]
"""Function of gates: SiLU, or GELU by its tanh form."""


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """A mixture of experts: gated MLPs of which an expert router chooses some for each token."""

    count: int
    per_token: int
    intermediate: int
    """Width of one expert."""
    shared_intermediate: int = 0
    """Width of the experts that every token passes, taken together; 0: there are none."""
    dense_layers: frozenset[int] = frozenset()
    """Layers that have one MLP for all tokens instead."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the expert router's logits into weights."""
    bias: bool = False
    """True if a bias is added to the scores for the choice alone."""
    normalized: bool = True
    """True if the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor on the weights."""
    groups: int = 1
    """Groups of neighboring experts; only those of the best groups are chosen."""
    groups_per_token: int = 1
    clamped: bool = False
    """True if gates and ups are clamped, as in gpt-oss."""
    limit: float = 7.0
    """Largest number that clamped gates and ups may have."""
    steepness: float = 1.702
    """Factor inside the sigmoid of clamped gates."""
    biases: bool = False
    """True if the expert router and the experts have biases."""

    def __post_init__(self) -> None:
        sizes = ("count", "per_token", "intermediate", "groups", "groups_per_token")
        for name in sizes:
            if getattr(self, name) < 1:
                raise CheckpointError(
                    f"experts: {name} must be at least 1, not {getattr(self, name)}"
                )
        in_group = self.count // self.groups
        uneven = self.count % self.groups or (self.groups > 1 and in_group < 2)
        if uneven or self.groups_per_token > self.groups:
            raise CheckpointError(
                f"experts: {self.groups_per_token} of {self.groups} groups cannot be chosen "
                f"among {self.count} experts"
            )
        if self.per_token > (choice := in_group * self.groups_per_token):
            raise CheckpointError(
                f"experts: {self.per_token} for each token, but it may choose among {choice}"
            )


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer with RMSNorm, RoPE, grouped-query attention and gated MLPs."""

    family: str
    """Layout of the checkpoint's tensors, by `checkpoints/families.py`."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP of layers without experts."""
    vocab: int
    max_positions: int
    """Context in tokens, prompt and answer together."""
    rms_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    """True if the output head is the embedding matrix."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """True if queries and keys are normalized head by head before the rotation."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer, generation_config.json's before config.json's."""
    experts: ExpertSpec | None = None
    """None: every layer has one MLP for all tokens."""
    post_norms: bool = False
    """True if attention and MLP are normalized again before the residual is added."""
    wrapped: bool = False
    """True if the checkpoint is of a larger model, of which this is the text part."""
    window: int | None = None
    """Positions that windowed layers see, the query's own included; None: no layer has a window."""
    windowed: frozenset[int] = frozenset()
    """Layers with the window, and with `windowed_rope`."""
    windowed_rope: RopeSpec | None = None
    """Rotation in these layers; None: as in the others."""
    sinks: bool = False
    """True if each query head has an attention sink: a logit that takes probability and adds no
    value."""
    activation: Activation = "silu"
    """Function of an MLP's gates."""
    norms_add_one: bool = False
    """True if the weights of norms are stored without the one that is added to them."""
    embedding_scale: float = 1.0
    """Factor on the embeddings."""
    query_scalar: float | None = None
    """Number whose inverse root scales the attention logits; None: the head dim."""

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.window is not None and self.window < 1:
            raise CheckpointError(f"the sliding window must be at least 1, not {self.window}")
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly"
            )

    @property
    def scale(self) -> float:
        """Factor on the attention logits."""
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def near_layers(self) -> frozenset[int]:
        """Layers that see a window only."""
        return frozenset() if self.window is None else self.windowed

    def window_of(self, layer: int) -> int | None:
        """Return the positions that a layer sees; None for all."""
        return self.window if layer in self.windowed else None

    def experts_of(self, layer: int) -> ExpertSpec | None:
        """Return the experts of a layer; None if it has one MLP for all tokens."""
        experts = self.experts
        return None if experts is None or layer in experts.dense_layers else experts


@dataclass(frozen=True, kw_only=True)
class TpShard:
    """Heads and MLP columns of each layer that one tensor-parallel rank owns."""

    query_heads: range
    kv_heads: range
    intermediate: range
    expert_intermediate: range = range(0)
    """Columns of every expert."""
    # Whole experts for each rank would need no narrower products, but the ranks of an instance
    # wait for each other, and a token's experts never fall evenly on them: with eight of 128
    # experts on two ranks, the slower one has five on average.
    shared_intermediate: range = range(0)
    """Columns of the shared experts."""


def query_head_range(spec: ModelSpec, tp_rank: int, tp_size: int) -> range:
    """Return the query heads of one tensor-parallel rank."""
    _check_tp(spec, tp_rank, tp_size)
    local = spec.heads // tp_size
    return range(tp_rank * local, (tp_rank + 1) * local)


def kv_head_range(spec: ModelSpec, tp_rank: int, tp_size: int) -> range:
    """Return the KV heads that the query heads of one tensor-parallel rank read.

    If there are more ranks than KV heads, neighboring ranks own the same one.
    """
    queries, group = query_head_range(spec, tp_rank, tp_size), spec.heads // spec.kv_heads
    return range(queries[0] // group, queries[-1] // group + 1)


def tp_shard_of(spec: ModelSpec, tp_rank: int, tp_size: int) -> TpShard:
    """Return everything that one tensor-parallel rank owns."""
    experts = spec.experts

    def columns(width: int) -> range:
        return range(tp_rank * width // tp_size, (tp_rank + 1) * width // tp_size)

    return TpShard(
        query_heads=query_head_range(spec, tp_rank, tp_size),
        kv_heads=kv_head_range(spec, tp_rank, tp_size),
        intermediate=columns(spec.intermediate),
        expert_intermediate=columns(experts.intermediate if experts else 0),
        shared_intermediate=columns(experts.shared_intermediate if experts else 0),
    )


def _check_tp(spec: ModelSpec, tp_rank: int, tp_size: int) -> None:
    """Raise ValueError if the shards are uneven or the rank is not in the group."""
    # With uneven shards the ranks of a group would differ in the size of their KV.
    whole_groups = tp_size >= 1 and spec.kv_heads % tp_size == 0
    whole_heads = tp_size >= 1 and tp_size % spec.kv_heads == 0 and spec.heads % tp_size == 0
    if not (whole_groups or whole_heads):
        allowed = [
            size
            for size in range(1, spec.heads + 1)
            if spec.kv_heads % size == 0 or (size % spec.kv_heads == 0 and spec.heads % size == 0)
        ]
        raise ValueError(
            f"tensor parallelism {tp_size} does not divide {spec.heads} query heads and "
            f"{spec.kv_heads} KV heads evenly; possible: {', '.join(map(str, allowed))}"
        )
    if not 0 <= tp_rank < tp_size:
        raise ValueError(f"tensor-parallel rank {tp_rank} is not in a group of {tp_size}")


def read_spec(model_dir: Path, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read config.json, and generation_config.json if there is one.

    Args:
        overrides: values that replace those of config.json (`OVERRIDABLE`).

    Raises:
        UnsupportedModelError: an architecture, or a feature of one, that is not supported.
        CheckpointError: a file that is missing, malformed or contradicts itself.
    """
    config = read_json(model_dir / "config.json")
    if overrides:
        config = overridden(config, overrides)
    return ARCHITECTURES[_architecture(config)].read(config)


def _architecture(config: CheckpointJson) -> str:
    named = config.texts("architectures")
    for architecture in named:
        if architecture in ARCHITECTURES:
            return architecture
    reasons = [f"{REFUSED[name]}; " for name in named if name in REFUSED]
    raise UnsupportedModelError(
        f"{config.path}: architecture {', '.join(named) or '(none named)'} is not supported; "
        f"{''.join(reasons)}supported: {', '.join(ARCHITECTURES)}"
    )


def _llama(config: CheckpointJson) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return _spec(config, "llama", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: CheckpointJson) -> ModelSpec:
    spec = _spec(config, "mistral", default_kv_heads=8, default_positions=131_072)
    return _with_window(config, spec, default_window=4096)


def _ministral3(config: CheckpointJson) -> ModelSpec:
    if not (config.has("rope_parameters") or config.has("rope_scaling")):
        raise CheckpointError(f"{config.path}: rope_parameters is missing")
    spec = _spec(
        config,
        "ministral3",
        default_head_dim=128,
        default_kv_heads=8,
        default_positions=262_144,
        default_eps=1e-5,
        growing_queries=True,
    )
    return _with_window(config, spec)


def _mistral3(config: CheckpointJson) -> ModelSpec:
    text = config.object("text_config")
    readers = {"mistral": _mistral, "ministral3": _ministral3}
    kind = text.text("model_type", "mistral")
    if kind not in readers:
        raise UnsupportedModelError(
            f"{config.path}: text_config of type {kind!r} is not supported; "
            f"supported: {', '.join(readers)}"
        )
    # Files with a head of its own often say nothing: the loader looks whether there is one.
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", True))
    return replace(readers[kind](text), wrapped=True, tie_embeddings=tied)


def _qwen2(config: CheckpointJson) -> ModelSpec:
    spec = _spec(config, "qwen2", qkv_bias=True, default_positions=32_768)
    return _with_windowed_layers(config, spec)


def _qwen3(config: CheckpointJson) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    spec = _spec(
        config,
        "qwen3",
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        default_head_dim=128,
        default_positions=32_768,
    )
    return _with_windowed_layers(config, spec)


def _qwen3_moe(config: CheckpointJson) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    step = config.integer("decoder_sparse_step", 1)
    if step < 1:
        raise CheckpointError(f"{config.path}: decoder_sparse_step must be at least 1, not {step}")
    layers = range(config.integer("num_hidden_layers"))
    dense = config.integers("mlp_only_layers")
    spec = _spec(
        config,
        "qwen3_moe",
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        default_kv_heads=4,
        default_positions=32_768,
        experts=ExpertSpec(
            count=config.integer("num_experts", config.integer("num_local_experts", 128)),
            per_token=config.integer("num_experts_per_tok", 8),
            intermediate=config.integer("moe_intermediate_size", 768),
            dense_layers=frozenset(
                layer for layer in layers if layer in dense or (layer + 1) % step
            ),
            normalized=config.flag("norm_topk_prob", False),
        ),
    )
    if not config.flag("use_sliding_window", False):
        return spec
    return _with_window(config, spec, default_window=4096)


def _mixtral(config: CheckpointJson) -> ModelSpec:
    spec = _spec(
        config,
        "mixtral",
        default_kv_heads=8,
        default_positions=131_072,
        default_eps=1e-5,
        default_theta=1e6,
        experts=ExpertSpec(
            count=config.integer("num_local_experts", 8),
            per_token=config.integer("num_experts_per_tok", 2),
            intermediate=config.integer("intermediate_size"),
        ),
    )
    return _with_window(config, spec)


def _glm4_moe(config: CheckpointJson) -> ModelSpec:
    width = config.integer("moe_intermediate_size", 1408)
    return _spec(
        config,
        "glm4_moe",
        qkv_bias=config.flag("attention_bias", False),
        qk_norm=config.flag("use_qk_norm", False),
        default_kv_heads=8,
        default_positions=131_072,
        default_eps=1e-5,
        partial_rotary=0.5,
        experts=ExpertSpec(
            count=config.integer("n_routed_experts", 128),
            per_token=config.integer("num_experts_per_tok", 8),
            intermediate=width,
            shared_intermediate=width * config.integer("n_shared_experts", 1),
            dense_layers=frozenset(range(config.integer("first_k_dense_replace", 1))),
            scores="sigmoid",
            bias=True,
            normalized=config.flag("norm_topk_prob", True),
            scale=config.number("routed_scaling_factor", 1.0),
            groups=config.integer("n_group", 1),
            groups_per_token=config.integer("topk_group", 1),
        ),
    )


def _glm(config: CheckpointJson) -> ModelSpec:
    return _spec(
        config,
        "glm",
        qkv_bias=config.flag("attention_bias", True),
        default_head_dim=128,
        default_kv_heads=2,
        default_positions=131_072,
        default_eps=1.5625e-7,
        partial_rotary=0.5,
        interleaved_rotary=True,
    )


def _glm4(config: CheckpointJson) -> ModelSpec:
    return replace(_glm(config), post_norms=True)


def _phi3(config: CheckpointJson) -> ModelSpec:
    spec = _spec(config, "phi3", default_positions=4096, default_eps=1e-5)
    return _with_window(config, spec)


_GEMMA3_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
}
"""Values that files of wrapped models leave out."""


def _gemma3(config: CheckpointJson) -> ModelSpec:
    defaults = {key: value for key, value in _GEMMA3_DEFAULTS.items() if not config.has(key)}
    config = replace(config, values={**config.values, **defaults})
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.values.get(key):
            raise UnsupportedModelError(f"{config.path}: {key} is not supported")
    ropes = config.object("rope_parameters")
    full, near = ropes.object("full_attention"), ropes.object("sliding_attention")
    of_full = replace(config, values={**config.values, "rope_parameters": full.values})
    theta = near.number("rope_theta", config.number("rope_local_base_freq", 10_000.0))
    spec = _spec(
        of_full if ropes.has("full_attention") else config,
        "gemma3",
        activation="gelu_tanh",
        qkv_bias=config.flag("attention_bias", False),
        output_bias=config.flag("attention_bias", False),
        qk_norm=True,
        default_positions=131_072,
        default_theta=1e6,
    )
    # The file's scaling is that of layers without a window.
    near = replace(near, values={**near.values, "rope_theta": theta})
    of_near = {"rope_parameters": near.values}
    spec = replace(
        spec,
        post_norms=True,
        norms_add_one=True,
        embedding_scale=math.sqrt(spec.hidden),
        query_scalar=config.number("query_pre_attn_scalar", 256.0),
        windowed_rope=read_rope(
            replace(config, values=of_near),
            head_dim=spec.head_dim,
            max_positions=spec.max_positions,
        ),
    )
    every = config.integer("sliding_window_pattern", 6)
    near_layers = {layer for layer in range(spec.layers) if (layer + 1) % every}
    layers = _sliding_layers(config, near_layers)
    return _with_window(config, spec, default_window=4096, layers=layers)


def _gemma3_wrapped(config: CheckpointJson) -> ModelSpec:
    text = config.object("text_config")
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", True))
    return replace(_gemma3(text), wrapped=True, tie_embeddings=tied)


_GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(config: CheckpointJson) -> ModelSpec:
    if not (config.has("rope_parameters") or config.has("rope_scaling")):
        config = replace(config, values={**config.values, "rope_parameters": _GPT_OSS_ROPE})
    bias = config.flag("attention_bias", True)
    spec = _spec(
        config,
        "gpt_oss",
        qkv_bias=bias,
        output_bias=bias,
        default_head_dim=64,
        default_kv_heads=8,
        default_positions=131_072,
        default_eps=1e-5,
        default_theta=150_000.0,
        experts=ExpertSpec(
            count=config.integer("num_local_experts", config.integer("num_experts", 128)),
            per_token=config.integer("num_experts_per_tok", config.integer("experts_per_token", 4)),
            intermediate=config.integer("intermediate_size"),
            clamped=True,
            limit=config.number("swiglu_limit", 7.0),
            steepness=config.number("swiglu_alpha", 1.702),
            biases=True,
        ),
    )
    spec = replace(spec, sinks=True)
    every_other = set(range(0, spec.layers, 2))
    layers = _sliding_layers(config, every_other)
    return _with_window(config, spec, default_window=128, layers=layers)


def _internlm2(config: CheckpointJson) -> ModelSpec:
    bias = config.flag("bias", True)
    return _spec(config, "internlm2", qkv_bias=bias, output_bias=bias)


def _spec(
    config: CheckpointJson,
    family: str,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
    default_positions: int = 2048,
    default_eps: float = 1e-6,
    default_theta: float = 10_000.0,
    partial_rotary: float = 1.0,
    interleaved_rotary: bool = False,
    growing_queries: bool = False,
    activation: Activation = "silu",
    experts: ExpertSpec | None = None,
) -> ModelSpec:
    """Return a spec from the keys that all families share; defaults are those of transformers."""
    key, expected = _ACTIVATIONS[activation]
    if (named := config.text(key, expected)) != expected:
        raise UnsupportedModelError(f"{config.path}: activation {named!r} is not supported")
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", default_head_dim or hidden // max(heads, 1))
    positions = config.integer("max_position_embeddings", default_positions)
    bos_token_ids = config.token_ids("bos_token_id")
    return ModelSpec(
        family=family,
        layers=config.integer("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads", default_kv_heads or heads),
        head_dim=head_dim,
        intermediate=config.integer("intermediate_size"),
        vocab=config.integer("vocab_size"),
        max_positions=_exact_positions(config, scaled_max_positions(config, positions)),
        rms_eps=config.number("rms_norm_eps", default_eps),
        rope=read_rope(
            config,
            head_dim=head_dim,
            max_positions=positions,
            theta=default_theta,
            partial=partial_rotary,
            interleaved=interleaved_rotary,
            growing_queries=growing_queries,
        ),
        tie_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=read_eos_token_ids(config.path.parent),
        activation=activation,
        experts=experts,
    )


_ACTIVATIONS: Mapping[Activation, tuple[str, str]] = {
    "silu": ("hidden_act", "silu"),
    "gelu_tanh": ("hidden_activation", "gelu_pytorch_tanh"),
}
"""Key and value that name the activation of a family's MLPs."""


def _exact_positions(config: CheckpointJson, positions: int) -> int:
    """Return the context in which plain attention is what the model was trained for.

    Dual chunk attention (Qwen2.5-1M) is plain attention inside its first chunk alone.
    """
    if not config.has("dual_chunk_attention_config"):
        return positions
    chunks = config.object("dual_chunk_attention_config")
    return min(positions, chunks.integer("chunk_size") - chunks.integer("local_size"))


def _with_windowed_layers(config: CheckpointJson, spec: ModelSpec) -> ModelSpec:
    """Return a spec with Qwen's window, which most files name and no layer uses."""
    if not config.flag("use_sliding_window", False):
        return spec
    last = range(config.integer("max_window_layers", 28), spec.layers)
    return _with_window(config, spec, default_window=4096, layers=_sliding_layers(config, last))


def _sliding_layers(config: CheckpointJson, default: Collection[int]) -> Collection[int]:
    """Return the layers that config.json lists as windowed, or else the family's."""
    if not config.has("layer_types"):
        return default
    kinds = config.texts("layer_types")
    if unknown := sorted(set(kinds) - {"sliding_attention", "full_attention"}):
        raise UnsupportedModelError(f"{config.path}: {unknown[0]} layers are not supported")
    return [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention"]


def _with_window(
    config: CheckpointJson,
    spec: ModelSpec,
    *,
    default_window: int | None = None,
    layers: Collection[int] | None = None,
) -> ModelSpec:
    """Return a spec with the sliding window of config.json, unless it is as long as the context.

    Args:
        default_window: the family's if config.json has none; null is none.
        layers: layers with the window; None for all.
    """
    if config.values.get("sliding_window", default_window) is not None:
        window = config.integer("sliding_window", default_window)
        if window < spec.max_positions:
            spec = replace(spec, window=window)
    # Without a window, such layers may still have a rotation of their own.
    if spec.window is None and spec.windowed_rope is None:
        return spec
    return replace(spec, windowed=frozenset(range(spec.layers) if layers is None else layers))


@dataclass(frozen=True, kw_only=True)
class ServedArchitecture:
    """A class of transformers whose checkpoints can be served."""

    read: Callable[[CheckpointJson], ModelSpec]
    models: str
    """Well-known checkpoints."""
    limits: str = ""
    """What of it is refused, or differs from transformers."""


_CHUNKS = "with dual chunk attention, the context ends with the first chunk"

ARCHITECTURES: Mapping[str, ServedArchitecture] = {
    "LlamaForCausalLM": ServedArchitecture(read=_llama, models="Llama 2, 3, 3.1, 3.3"),
    "MistralForCausalLM": ServedArchitecture(
        read=_mistral, models="Mistral 7B (v0.1 has a window), Nemo, Small 2"
    ),
    "Ministral3ForCausalLM": ServedArchitecture(read=_ministral3, models="Ministral 3 (text)"),
    "Mistral3ForConditionalGeneration": ServedArchitecture(
        read=_mistral3,
        models="Mistral Small 3.1, 3.2, Ministral 3",
        limits="text only",
    ),
    "MixtralForCausalLM": ServedArchitecture(read=_mixtral, models="Mixtral 8x7B, 8x22B"),
    "Qwen2ForCausalLM": ServedArchitecture(
        read=_qwen2, models="Qwen2, Qwen2.5, Qwen2.5-1M", limits=_CHUNKS
    ),
    "Qwen3ForCausalLM": ServedArchitecture(read=_qwen3, models="Qwen3"),
    "Qwen3MoeForCausalLM": ServedArchitecture(
        read=_qwen3_moe,
        models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        limits=_CHUNKS,
    ),
    "GlmForCausalLM": ServedArchitecture(read=_glm, models="GLM-4-9B-Chat, GLM-4-9B-Chat-1M (hf)"),
    "Glm4ForCausalLM": ServedArchitecture(read=_glm4, models="GLM-4-0414, GLM-Z1"),
    "Glm4MoeForCausalLM": ServedArchitecture(
        read=_glm4_moe,
        models="GLM-4.5, 4.5-Air, 4.6",
        limits="layers that predict more tokens at once are not used",
    ),
    "Phi3ForCausalLM": ServedArchitecture(
        read=_phi3,
        models="Phi-3, Phi-3.5-mini, Phi-4-mini, Phi-4",
        limits="LongRoPE's long factors serve prompts of all lengths, the short ones "
        "if `max_position_embeddings` is overridden with the original context",
    ),
    "InternLM2ForCausalLM": ServedArchitecture(read=_internlm2, models="InternLM2, InternLM2.5-1M"),
    "Gemma3ForCausalLM": ServedArchitecture(read=_gemma3, models="Gemma 3 1B"),
    "Gemma3ForConditionalGeneration": ServedArchitecture(
        read=_gemma3_wrapped, models="Gemma 3 4B, 12B, 27B", limits="text only"
    ),
    "GptOssForCausalLM": ServedArchitecture(
        read=_gpt_oss,
        models="gpt-oss-20b, gpt-oss-120b",
        limits="chats need a template that writes its harmony format, as the published one does",
    ),
}

_LLAMA4 = "it attends within chunks, and some of its layers know no positions"
_DELTA = (
    "three of four of its layers have a recurrent state (Gated DeltaNet) in place of KV "
    "(docs/recurrent-layers.md)"
)
_LATENT = "its KV is latent (MLA)"

REFUSED: Mapping[str, str] = {
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
    "Qwen3NextForCausalLM": _DELTA,
    "Qwen3_5ForCausalLM": _DELTA,
    "Qwen3_5ForConditionalGeneration": _DELTA,
    "Qwen3_5MoeForConditionalGeneration": _DELTA,
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
}
"""Architectures that are often asked for, and why they cannot be served."""
