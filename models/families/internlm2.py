"""Where InternLM2 checkpoints keep their tensors.

`wqkv` is grouped by KV head: the query heads that share it, then its key, then its value.
"""

from csps.models.families.llama import head_dims
from csps.models.parameters import LayerParameters, ModelParameters, Place, columns, rows, whole
from csps.models.spec import ModelSpec, Share


def places(spec: ModelSpec, share: Share) -> ModelParameters[Place]:
    """The places of every parameter that a rank with this share needs."""
    return ModelParameters(
        embedding=whole("model.tok_embeddings.weight", spec.vocab, spec.hidden),
        layers=tuple(_layer_places(spec, share, layer) for layer in range(spec.layers)),
        norm=whole("model.norm.weight", spec.hidden),
        head=None if spec.tie_embeddings else whole("output.weight", spec.vocab, spec.hidden),
    )


def _layer_places(spec: ModelSpec, share: Share, layer: int) -> LayerParameters[Place]:
    prefix, hidden, width = f"model.layers.{layer}.", spec.hidden, spec.intermediate
    attention, mlp = prefix + "attention.", prefix + "feed_forward."
    query_dims = head_dims(share.query_heads, spec.head_dim)
    return LayerParameters(
        input_norm=whole(prefix + "attention_norm.weight", hidden),
        qkv=_qkv(spec, share, attention + "wqkv.weight", (hidden,)),
        qkv_bias=_qkv(spec, share, attention + "wqkv.bias", ()) if spec.qkv_bias else None,
        output=columns(attention + "wo.weight", (hidden, spec.heads * spec.head_dim), query_dims),
        output_bias=whole(attention + "wo.bias", hidden) if spec.output_bias else None,
        mlp_norm=whole(prefix + "ffn_norm.weight", hidden),
        gate_up=(
            *rows(mlp + "w1.weight", (width, hidden), share.intermediate),
            *rows(mlp + "w3.weight", (width, hidden), share.intermediate),
        ),
        down=columns(mlp + "w2.weight", (hidden, width), share.intermediate),
    )


def _qkv(spec: ModelSpec, share: Share, tensor: str, inputs: tuple[int, ...]) -> Place:
    group = spec.heads // spec.kv_heads
    query_slots = [head + 2 * (head // group) for head in share.query_heads]
    key_slots = [kv_head * (group + 2) + group for kv_head in share.kv_heads]
    slots = [*query_slots, *key_slots, *(slot + 1 for slot in key_slots)]
    shape = ((spec.heads + 2 * spec.kv_heads) * spec.head_dim, *inputs)
    heads = [head_dims(range(slot, slot + 1), spec.head_dim) for slot in slots]
    return tuple(block for head in heads for block in rows(tensor, shape, head))
