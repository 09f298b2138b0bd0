"""Read a checkpoint's config.json into a `ModelSpec`, which no architecture owns.

Everything above `models/` works on a `ModelSpec`. Only this file and `checkpoints/families.py` know
the names that a model family uses.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from csps.models.network.checkpoint_json import (
    CheckpointError,
    CheckpointJson,
    UnsupportedModelError,
    read_eos_token_ids,
    read_json,
)
from csps.models.network.rope import RopeSpec, read_rope, scaled_max_positions


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer with RMSNorm, RoPE, grouped-query attention and a SwiGLU MLP."""

    family: str
    """llama, mistral, qwen2, qwen3, glm or internlm2."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
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


@dataclass(frozen=True, kw_only=True)
class TpShard:
    """Heads and MLP columns of each layer that one tensor-parallel rank owns."""

    query_heads: range
    kv_heads: range
    intermediate: range


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
    width = spec.intermediate
    return TpShard(
        query_heads=query_head_range(spec, tp_rank, tp_size),
        kv_heads=kv_head_range(spec, tp_rank, tp_size),
        intermediate=range(tp_rank * width // tp_size, (tp_rank + 1) * width // tp_size),
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
    partial_rotary: float = 1.0,
    interleaved_rotary: bool = False,
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
    "GlmForCausalLM": _glm,
    "InternLM2ForCausalLM": _internlm2,
}
