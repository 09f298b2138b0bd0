"""Read a checkpoint's config.json into a `ModelSpec`, which no architecture owns.

Everything above `models/` works on a `ModelSpec`. Only this file and `checkpoints/families.py` know
the names that a model family uses.
"""

from collections.abc import Callable, Mapping
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


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """A mixture of experts: SwiGLU MLPs of which an expert router chooses some for each token."""

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
    """A decoder-only transformer with RMSNorm, RoPE, grouped-query attention and SwiGLU MLPs."""

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

    def __post_init__(self) -> None:
        sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
        for name in (*sizes, "max_positions"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise CheckpointError(
                f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly"
            )

    @property
    def scale(self) -> float:
        """Factor on the attention logits."""
        return float(self.head_dim**-0.5)

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
    positions = 131_072
    _refuse_window(config, positions, default_window=4096)
    return _spec(config, "mistral", default_kv_heads=8, default_positions=positions)


def _ministral3(config: CheckpointJson) -> ModelSpec:
    positions = 262_144
    _refuse_window(config, positions)
    if not (config.has("rope_parameters") or config.has("rope_scaling")):
        raise CheckpointError(f"{config.path}: rope_parameters is missing")
    return _spec(
        config,
        "ministral3",
        default_head_dim=128,
        default_kv_heads=8,
        default_positions=positions,
        default_eps=1e-5,
        growing_queries=True,
    )


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
    _refuse_sliding_layers(config)
    return _spec(config, "qwen2", qkv_bias=True, default_positions=32_768)


def _qwen3(config: CheckpointJson) -> ModelSpec:
    _refuse_sliding_layers(config)
    bias = config.flag("attention_bias", False)
    return _spec(
        config,
        "qwen3",
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        default_head_dim=128,
        default_positions=32_768,
    )


def _qwen3_moe(config: CheckpointJson) -> ModelSpec:
    _refuse_sliding_layers(config)
    bias = config.flag("attention_bias", False)
    step = config.integer("decoder_sparse_step", 1)
    if step < 1:
        raise CheckpointError(f"{config.path}: decoder_sparse_step must be at least 1, not {step}")
    layers = range(config.integer("num_hidden_layers"))
    dense = config.integers("mlp_only_layers")
    return _spec(
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


def _mixtral(config: CheckpointJson) -> ModelSpec:
    positions = 131_072
    _refuse_window(config, positions)
    return _spec(
        config,
        "mixtral",
        default_kv_heads=8,
        default_positions=positions,
        default_eps=1e-5,
        default_theta=1e6,
        experts=ExpertSpec(
            count=config.integer("num_local_experts", 8),
            per_token=config.integer("num_experts_per_tok", 2),
            intermediate=config.integer("intermediate_size"),
        ),
    )


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
    positions = 4096
    _refuse_window(config, positions)
    return _spec(config, "phi3", default_positions=positions, default_eps=1e-5)


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
    experts: ExpertSpec | None = None,
) -> ModelSpec:
    """Return a spec from the keys that all families share; defaults are those of transformers."""
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{config.path}: activation {activation!r} is not supported")
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
        experts=experts,
    )


def _exact_positions(config: CheckpointJson, positions: int) -> int:
    """Return the context in which plain attention is what the model was trained for.

    Dual chunk attention (Qwen2.5-1M) is plain attention inside its first chunk alone.
    """
    if not config.has("dual_chunk_attention_config"):
        return positions
    chunks = config.object("dual_chunk_attention_config")
    return min(positions, chunks.integer("chunk_size") - chunks.integer("local_size"))


def _refuse_sliding_layers(config: CheckpointJson) -> None:
    """Raise if any layer uses the sliding window; Qwen names one that mostly no layer uses."""
    no_window = config.values.get("sliding_window", 4096) is None
    if no_window or not config.flag("use_sliding_window", False):
        return
    layers = config.integer("num_hidden_layers")
    if config.has("layer_types"):
        slides = "sliding_attention" in config.texts("layer_types")
    else:
        slides = config.integer("max_window_layers", 28) < layers
    if slides:
        raise _sliding_window(config)


def _refuse_window(
    config: CheckpointJson, default_positions: int, default_window: int | None = None
) -> None:
    """Raise if there is a window that is shorter than the context.

    Args:
        default_window: the family's if config.json has none; null is none.
    """
    window = config.values.get("sliding_window", default_window)
    if window is None:
        return
    positions = config.integer("max_position_embeddings", default_positions)
    if config.integer("sliding_window", default_window) < positions:
        raise _sliding_window(config)


def _sliding_window(config: CheckpointJson) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.path}: sliding-window attention is not supported "
        "(model_overrides: {sliding_window: null} attends to the whole context instead)"
    )


@dataclass(frozen=True, kw_only=True)
class ServedArchitecture:
    """A class of transformers whose checkpoints can be served."""

    read: Callable[[CheckpointJson], ModelSpec]
    models: str
    """Well-known checkpoints."""
    limits: str = ""
    """What of it is refused, or differs from transformers."""


_WINDOWS = "a sliding window shorter than the context is refused"
_CHUNKS = "with dual chunk attention, the context ends with the first chunk"

ARCHITECTURES: Mapping[str, ServedArchitecture] = {
    "LlamaForCausalLM": ServedArchitecture(read=_llama, models="Llama 2, 3, 3.1, 3.3"),
    "MistralForCausalLM": ServedArchitecture(
        read=_mistral, models="Mistral 7B v0.2 and later, Nemo, Small 2", limits=_WINDOWS
    ),
    "Ministral3ForCausalLM": ServedArchitecture(
        read=_ministral3, models="Ministral 3 (text)", limits=_WINDOWS
    ),
    "Mistral3ForConditionalGeneration": ServedArchitecture(
        read=_mistral3,
        models="Mistral Small 3.1, 3.2, Ministral 3",
        limits=f"text only; {_WINDOWS}",
    ),
    "MixtralForCausalLM": ServedArchitecture(
        read=_mixtral, models="Mixtral 8x7B, 8x22B", limits=_WINDOWS
    ),
    "Qwen2ForCausalLM": ServedArchitecture(
        read=_qwen2, models="Qwen2, Qwen2.5, Qwen2.5-1M", limits=f"{_WINDOWS}; {_CHUNKS}"
    ),
    "Qwen3ForCausalLM": ServedArchitecture(read=_qwen3, models="Qwen3", limits=_WINDOWS),
    "Qwen3MoeForCausalLM": ServedArchitecture(
        read=_qwen3_moe,
        models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        limits=f"{_WINDOWS}; {_CHUNKS}",
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
        limits=f"{_WINDOWS}; LongRoPE's long factors serve prompts of all lengths, the short ones "
        "if `max_position_embeddings` is overridden with the original context",
    ),
    "InternLM2ForCausalLM": ServedArchitecture(read=_internlm2, models="InternLM2, InternLM2.5-1M"),
}

_GEMMA = "five of six of its layers have a sliding window"
_LLAMA4 = "it attends within chunks, and some of its layers know no positions"
_DELTA = "three of four of its layers have a recurrent state (Gated DeltaNet) in place of KV"
_LATENT = "its KV is latent (MLA)"

REFUSED: Mapping[str, str] = {
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": _GEMMA,
    "GptOssForCausalLM": "half of its layers have a sliding window, and all have attention sinks",
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
