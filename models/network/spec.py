"""Read a checkpoint's config.json into a `ModelSpec`, which no architecture owns.

Everything above `models/` works on a `ModelSpec`. Only this file and `checkpoints/families.py` know
the names that a model family uses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from csps.models.network.checkpoint_json import (
    CheckpointError,
    CheckpointJson,
    UnsupportedModelError,
    read_json,
    read_json_if_present,
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
    """llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, glm, glm4_moe or internlm2."""
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


def read_spec(model_dir: Path) -> ModelSpec:
    """Read config.json, and generation_config.json if there is one.

    Raises:
        UnsupportedModelError: an architecture, or a feature of one, that is not supported.
        CheckpointError: a file that is missing, malformed or contradicts itself.
    """
    config = read_json(model_dir / "config.json")
    architecture = _architecture(config)
    if config.has("quantization_config"):
        raise UnsupportedModelError(f"{config.path}: quantized weights are not supported")
    if (activation := config.text("hidden_act", "silu")) != "silu":
        raise UnsupportedModelError(f"{config.path}: activation {activation!r} is not supported")
    return _READERS[architecture](config)


def read_eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Return the tokens that end an answer: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        if token_ids := read_json_if_present(model_dir / name).token_ids("eos_token_id"):
            return token_ids
    return ()


def _architecture(config: CheckpointJson) -> str:
    named = config.texts("architectures")
    for architecture in named:
        if architecture in _READERS:
            return architecture
    raise UnsupportedModelError(
        f"{config.path}: architecture {', '.join(named) or '(none named)'} is not supported; "
        f"supported: {', '.join(_READERS)}"
    )


def _llama(config: CheckpointJson) -> ModelSpec:
    bias = config.flag("attention_bias", False)
    mlp_bias = config.flag("mlp_bias", False)
    return _spec(config, "llama", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: CheckpointJson) -> ModelSpec:
    # Absent means 4096 to transformers, null means none.
    if config.values.get("sliding_window", 4096) is not None:
        raise _sliding_window(config)
    return _spec(config, "mistral", default_kv_heads=8, default_positions=131_072)


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
    if config.has("sliding_window"):
        raise _sliding_window(config)
    return _spec(
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
    experts: ExpertSpec | None = None,
) -> ModelSpec:
    """Return a spec from the keys that all families share; defaults are those of transformers."""
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
        max_positions=scaled_max_positions(config, positions),
        rms_eps=config.number("rms_norm_eps", default_eps),
        rope=read_rope(
            config,
            head_dim=head_dim,
            max_positions=positions,
            theta=default_theta,
            partial=partial_rotary,
            interleaved=interleaved_rotary,
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


def _sliding_window(config: CheckpointJson) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.path}: sliding-window attention is not supported "
        "(set sliding_window to null to attend to the whole context instead)"
    )


_READERS: Mapping[str, Callable[[CheckpointJson], ModelSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "GlmForCausalLM": _glm,
    "Glm4MoeForCausalLM": _glm4_moe,
    "InternLM2ForCausalLM": _internlm2,
}
