"""Where Llama, Mistral, Qwen2 and Qwen3 checkpoints keep their tensors."""

from csps.models.parameters import LayerParameters, ModelParameters, Place, columns, rows, whole
from csps.models.spec import ModelSpec, Share


def places(spec: ModelSpec, share: Share) -> ModelParameters[Place]:
    """The places of every parameter that a rank with this share needs."""
    return ModelParameters(
        embedding=whole("model.embed_tokens.weight", spec.vocab, spec.hidden),
        layers=tuple(layer_places(spec, share, layer) for layer in range(spec.layers)),
        norm=whole("model.norm.weight", spec.hidden),
        head=None if spec.tie_embeddings else whole("lm_head.weight", spec.vocab, spec.hidden),
    )


def layer_places(spec: ModelSpec, share: Share, layer: int) -> LayerParameters[Place]:
    """The places of one layer's parameters."""
    prefix = f"model.layers.{layer}."
    attention, mlp, hidden = prefix + "self_attn.", prefix + "mlp.", spec.hidden
    query_dims = head_dims(share.query_heads, spec.head_dim)
    return LayerParameters(
        input_norm=whole(prefix + "input_layernorm.weight", hidden),
        qkv=_qkv(spec, share, attention, "weight", (hidden,)),
        qkv_bias=_qkv(spec, share, attention, "bias", ()) if spec.qkv_bias else None,
        query_norm=_head_norm(spec, attention + "q_norm.weight"),
        key_norm=_head_norm(spec, attention + "k_norm.weight"),
        output=columns(
            attention + "o_proj.weight", (hidden, spec.heads * spec.head_dim), query_dims
        ),
        output_bias=whole(attention + "o_proj.bias", hidden) if spec.output_bias else None,
        mlp_norm=whole(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=_gate_up(spec, share, mlp, "weight", (hidden,)),
        gate_up_bias=_gate_up(spec, share, mlp, "bias", ()) if spec.mlp_bias else None,
        down=columns(mlp + "down_proj.weight", (hidden, spec.intermediate), share.intermediate),
        down_bias=whole(mlp + "down_proj.bias", hidden) if spec.mlp_bias else None,
    )


def head_dims(heads: range, head_dim: int) -> range:
    """The rows (or columns) that belong to neighbouring heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def _qkv(spec: ModelSpec, share: Share, prefix: str, kind: str, inputs: tuple[int, ...]) -> Place:
    queries = head_dims(share.query_heads, spec.head_dim)
    keys = head_dims(share.kv_heads, spec.head_dim)
    query_shape = (spec.heads * spec.head_dim, *inputs)
    key_shape = (spec.kv_heads * spec.head_dim, *inputs)
    return (
        *rows(f"{prefix}q_proj.{kind}", query_shape, queries),
        *rows(f"{prefix}k_proj.{kind}", key_shape, keys),
        *rows(f"{prefix}v_proj.{kind}", key_shape, keys),
    )


def _head_norm(spec: ModelSpec, tensor: str) -> Place | None:
    return whole(tensor, spec.head_dim) if spec.qk_norm else None


def _gate_up(
    spec: ModelSpec, share: Share, prefix: str, kind: str, inputs: tuple[int, ...]
) -> Place:
    shape = (spec.intermediate, *inputs)
    return (
        *rows(f"{prefix}gate_proj.{kind}", shape, share.intermediate),
        *rows(f"{prefix}up_proj.{kind}", shape, share.intermediate),
    )
