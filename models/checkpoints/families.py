"""List where each model family keeps its tensors in a checkpoint.

Llama, Mistral, Qwen2 and Qwen3 share one layout. GLM-4 differs from it only in the MLP, whose gates
and ups lie in one tensor, Phi-3 also in queries, keys and values, which lie in another; mixtures of
experts only in that a layer has many MLPs and an expert router. InternLM2 has names of its own and
one tensor `wqkv`, grouped by KV head: the query heads that share it, then its key, then its value.
"""

from __future__ import annotations

from dataclasses import replace

from csps.models.network.parameters import (
    ExpertParameters,
    LayerParameters,
    ModelParameters,
    Place,
    TensorBlock,
    columns,
    precise,
    rows,
    whole,
)
from csps.models.network.spec import ModelSpec, TpShard


def llama_places(spec: ModelSpec, shard: TpShard) -> ModelParameters[Place]:
    """Return the places of every parameter that a rank with this shard needs."""
    return ModelParameters(
        embedding=whole("model.embed_tokens.weight", spec.vocab, spec.hidden),
        layers=tuple(llama_layer_places(spec, shard, layer) for layer in range(spec.layers)),
        norm=whole("model.norm.weight", spec.hidden),
        head=None if spec.tie_embeddings else whole("lm_head.weight", spec.vocab, spec.hidden),
    )


def llama_layer_places(spec: ModelSpec, shard: TpShard, layer: int) -> LayerParameters[Place]:
    """Return the places of one layer's parameters."""
    prefix = f"model.layers.{layer}."
    attention, mlp, hidden = prefix + "self_attn.", prefix + "mlp.", spec.hidden
    gate_up, down = _mlp(mlp, hidden, spec.intermediate, shard.intermediate)
    query_dims = head_dims(shard.query_heads, spec.head_dim)
    return LayerParameters(
        input_norm=whole(prefix + "input_layernorm.weight", hidden),
        qkv=_llama_qkv(spec, shard, attention, "weight", (hidden,)),
        qkv_bias=_llama_qkv(spec, shard, attention, "bias", ()) if spec.qkv_bias else None,
        query_norm=_head_norm(spec, attention + "q_norm.weight"),
        key_norm=_head_norm(spec, attention + "k_norm.weight"),
        output=columns(
            attention + "o_proj.weight", (hidden, spec.heads * spec.head_dim), query_dims
        ),
        output_bias=whole(attention + "o_proj.bias", hidden) if spec.output_bias else None,
        mlp_norm=whole(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=gate_up,
        gate_up_bias=_gate_up_bias(spec, shard, mlp) if spec.mlp_bias else None,
        down=down,
        down_bias=whole(mlp + "down_proj.bias", hidden) if spec.mlp_bias else None,
    )


def head_dims(heads: range, head_dim: int) -> range:
    """Return the rows (or columns) that belong to neighbouring heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def _llama_qkv(
    spec: ModelSpec, shard: TpShard, prefix: str, kind: str, inputs: tuple[int, ...]
) -> Place:
    queries = head_dims(shard.query_heads, spec.head_dim)
    keys = head_dims(shard.kv_heads, spec.head_dim)
    query_shape = (spec.heads * spec.head_dim, *inputs)
    key_shape = (spec.kv_heads * spec.head_dim, *inputs)
    return (
        *rows(f"{prefix}q_proj.{kind}", query_shape, queries),
        *rows(f"{prefix}k_proj.{kind}", key_shape, keys),
        *rows(f"{prefix}v_proj.{kind}", key_shape, keys),
    )


def _head_norm(spec: ModelSpec, tensor: str) -> Place | None:
    return whole(tensor, spec.head_dim) if spec.qk_norm else None


def _gate_up_bias(spec: ModelSpec, shard: TpShard, mlp: str) -> Place:
    shape, wanted = (spec.intermediate,), shard.intermediate
    return (
        *rows(mlp + "gate_proj.bias", shape, wanted),
        *rows(mlp + "up_proj.bias", shape, wanted),
    )


_MLP_NAMES = "gate_proj", "up_proj", "down_proj"
_NUMBERED_NAMES = "w1", "w3", "w2"


def _mlp(
    prefix: str,
    hidden: int,
    width: int,
    wanted: range,
    names: tuple[str, str, str] = _MLP_NAMES,
) -> tuple[Place, Place]:
    """Return the places of an MLP's gates and ups, and of its output.

    Args:
        wanted: the columns of its width that a rank owns.
        names: of gate, up and output.
    """
    gate, up, down = (f"{prefix}{name}.weight" for name in names)
    shape = (width, hidden)
    gate_up = (*rows(gate, shape, wanted), *rows(up, shape, wanted))
    return gate_up, columns(down, (hidden, width), wanted)


_EXPERT_NAMES = {
    "qwen3_moe": ("mlp.", _MLP_NAMES),
    "mixtral": ("block_sparse_moe.", _NUMBERED_NAMES),
    "glm4_moe": ("mlp.", _MLP_NAMES),
}
"""Folder of a layer's experts and router, and names of an expert's matrices, by family."""


def expert_places(spec: ModelSpec, shard: TpShard) -> ModelParameters[Place]:
    """Return the places of every parameter of a mixture of experts that a rank needs."""
    layers = tuple(
        _expert_layer_places(spec, shard, layer)
        if spec.experts_of(layer)
        else llama_layer_places(spec, shard, layer)
        for layer in range(spec.layers)
    )
    return replace(llama_places(spec, shard), layers=layers)


def _expert_layer_places(spec: ModelSpec, shard: TpShard, layer: int) -> LayerParameters[Place]:
    experts, hidden = spec.experts, spec.hidden
    assert experts is not None, f"{spec.family} has no experts"
    folder, names = _EXPERT_NAMES[spec.family]
    prefix = f"model.layers.{layer}.{folder}"
    mlps = [
        _mlp(
            f"{prefix}experts.{expert}.",
            hidden,
            experts.intermediate,
            shard.expert_intermediate,
            names,
        )
        for expert in range(experts.count)
    ]
    gate_up, down = None, None
    if width := experts.shared_intermediate:
        gate_up, down = _mlp(f"{prefix}shared_experts.", hidden, width, shard.shared_intermediate)
    bias = whole(prefix + "gate.e_score_correction_bias", experts.count) if experts.bias else None
    return replace(
        llama_layer_places(spec, shard, layer),
        gate_up=gate_up,
        down=down,
        experts=ExpertParameters(
            router=precise(whole(prefix + "gate.weight", experts.count, hidden), 8),
            router_bias=None if bias is None else precise(bias, 4),
            gate_up=tuple(block for gate_up, _ in mlps for block in gate_up),
            down=tuple(block for _, down in mlps for block in down),
        ),
    )


def glm_places(spec: ModelSpec, shard: TpShard) -> ModelParameters[Place]:
    """Return the places of every parameter that a rank with this shard needs."""
    layers = tuple(_glm_layer_places(spec, shard, layer) for layer in range(spec.layers))
    return replace(llama_places(spec, shard), layers=layers)


def _glm_layer_places(spec: ModelSpec, shard: TpShard, layer: int) -> LayerParameters[Place]:
    prefix, hidden = f"model.layers.{layer}.", spec.hidden
    places = replace(
        llama_layer_places(spec, shard, layer), gate_up=_fused_gate_up(spec, shard, prefix)
    )
    if not spec.post_norms:
        return places
    return replace(
        places,
        attention_post_norm=whole(prefix + "post_self_attn_layernorm.weight", hidden),
        mlp_post_norm=whole(prefix + "post_mlp_layernorm.weight", hidden),
    )


def _fused_gate_up(spec: ModelSpec, shard: TpShard, prefix: str) -> Place:
    """Return the places of gates and ups that lie in one tensor."""
    tensor, width = prefix + "mlp.gate_up_proj.weight", spec.intermediate
    shape, gates = (2 * width, spec.hidden), shard.intermediate
    ups = range(width + gates.start, width + gates.stop)
    return (*rows(tensor, shape, gates), *rows(tensor, shape, ups))


def phi3_places(spec: ModelSpec, shard: TpShard) -> ModelParameters[Place]:
    """Return the places of every parameter that a rank with this shard needs."""
    layers = tuple(_phi3_layer_places(spec, shard, layer) for layer in range(spec.layers))
    return replace(llama_places(spec, shard), layers=layers)


def _phi3_layer_places(spec: ModelSpec, shard: TpShard, layer: int) -> LayerParameters[Place]:
    prefix, dim = f"model.layers.{layer}.", spec.head_dim
    shape = ((spec.heads + 2 * spec.kv_heads) * dim, spec.hidden)
    heads = (
        shard.query_heads,
        range(spec.heads + shard.kv_heads.start, spec.heads + shard.kv_heads.stop),
        range(
            spec.heads + spec.kv_heads + shard.kv_heads.start,
            spec.heads + spec.kv_heads + shard.kv_heads.stop,
        ),
    )
    qkv = prefix + "self_attn.qkv_proj.weight"
    return replace(
        llama_layer_places(spec, shard, layer),
        qkv=tuple(block for part in heads for block in rows(qkv, shape, head_dims(part, dim))),
        gate_up=_fused_gate_up(spec, shard, prefix),
    )


def internlm2_places(spec: ModelSpec, shard: TpShard) -> ModelParameters[Place]:
    """Return the places of every parameter that a rank with this shard needs."""
    return ModelParameters(
        embedding=whole("model.tok_embeddings.weight", spec.vocab, spec.hidden),
        layers=tuple(_internlm2_layer_places(spec, shard, layer) for layer in range(spec.layers)),
        norm=whole("model.norm.weight", spec.hidden),
        head=None if spec.tie_embeddings else whole("output.weight", spec.vocab, spec.hidden),
    )


def _internlm2_layer_places(spec: ModelSpec, shard: TpShard, layer: int) -> LayerParameters[Place]:
    prefix, hidden, width = f"model.layers.{layer}.", spec.hidden, spec.intermediate
    attention, mlp = prefix + "attention.", prefix + "feed_forward."
    gate_up, down = _mlp(mlp, hidden, width, shard.intermediate, _NUMBERED_NAMES)
    query_dims = head_dims(shard.query_heads, spec.head_dim)
    return LayerParameters(
        input_norm=whole(prefix + "attention_norm.weight", hidden),
        qkv=_internlm2_qkv(spec, shard, attention + "wqkv.weight", (hidden,)),
        qkv_bias=_internlm2_qkv(spec, shard, attention + "wqkv.bias", ())
        if spec.qkv_bias
        else None,
        output=columns(attention + "wo.weight", (hidden, spec.heads * spec.head_dim), query_dims),
        output_bias=whole(attention + "wo.bias", hidden) if spec.output_bias else None,
        mlp_norm=whole(prefix + "ffn_norm.weight", hidden),
        gate_up=gate_up,
        down=down,
    )


def _internlm2_qkv(spec: ModelSpec, shard: TpShard, tensor: str, inputs: tuple[int, ...]) -> Place:
    group = spec.heads // spec.kv_heads
    query_slots = [head + 2 * (head // group) for head in shard.query_heads]
    key_slots = [kv_head * (group + 2) + group for kv_head in shard.kv_heads]
    slots = [*query_slots, *key_slots, *(slot + 1 for slot in key_slots)]
    shape = ((spec.heads + 2 * spec.kv_heads) * spec.head_dim, *inputs)
    heads = [head_dims(range(slot, slot + 1), spec.head_dim) for slot in slots]
    return tuple(block for head in heads for block in rows(tensor, shape, head))


def gemma3_places(spec: ModelSpec, shard: TpShard) -> ModelParameters[Place]:
    """Return the places of every parameter that a rank with this shard needs."""
    places = llama_places(spec, shard)
    layers = tuple(_gemma3_layer_places(spec, shard, layer) for layer in range(spec.layers))
    return replace(places, layers=layers, norm=precise(places.norm, 4))


def _gemma3_layer_places(spec: ModelSpec, shard: TpShard, layer: int) -> LayerParameters[Place]:
    prefix = f"model.layers.{layer}."
    places = llama_layer_places(spec, shard, layer)

    # One is added to the weights of norms before they are rounded.
    def norm(name: str, dims: int = spec.hidden) -> Place:
        return precise(whole(f"{prefix}{name}.weight", dims), 4)

    return replace(
        places,
        input_norm=norm("input_layernorm"),
        query_norm=norm("self_attn.q_norm", spec.head_dim),
        key_norm=norm("self_attn.k_norm", spec.head_dim),
        attention_post_norm=norm("post_attention_layernorm"),
        mlp_norm=norm("pre_feedforward_layernorm"),
        mlp_post_norm=norm("post_feedforward_layernorm"),
    )


def gpt_oss_places(spec: ModelSpec, shard: TpShard) -> ModelParameters[Place]:
    """Return the places of every parameter that a rank with this shard needs."""
    layers = tuple(_gpt_oss_layer_places(spec, shard, layer) for layer in range(spec.layers))
    return replace(llama_places(spec, shard), layers=layers)


def _gpt_oss_layer_places(spec: ModelSpec, shard: TpShard, layer: int) -> LayerParameters[Place]:
    experts, hidden = spec.experts, spec.hidden
    assert experts is not None, f"{spec.family} has no experts"
    prefix = f"model.layers.{layer}."
    mlp, count, width = prefix + "mlp.", experts.count, experts.intermediate
    own = shard.expert_intermediate
    # A row of gates and one of ups take turns.
    pairs = range(2 * own.start, 2 * own.stop)
    gate_up = TensorBlock(
        tensor=mlp + "experts.gate_up_proj",
        shape=(count, 2 * width, hidden),
        rows=pairs,
        columns=range(hidden),
        transposed=True,
    )
    down = TensorBlock(
        tensor=mlp + "experts.down_proj",
        shape=(count, hidden, width),
        rows=range(hidden),
        columns=own,
        transposed=True,
    )
    gate_up_bias, down_bias = (mlp + f"experts.{name}_proj_bias" for name in ("gate_up", "down"))
    leads = shard.query_heads.start == 0
    return replace(
        llama_layer_places(spec, shard, layer),
        gate_up=None,
        down=None,
        sinks=precise(whole(prefix + "self_attn.sinks", spec.heads), 4),
        experts=ExpertParameters(
            router=precise(whole(mlp + "router.weight", count, hidden), 8),
            logit_bias=precise(whole(mlp + "router.bias", count), 4),
            gate_up=tuple(replace(gate_up, index=expert) for expert in range(count)),
            down=tuple(replace(down, index=expert) for expert in range(count)),
            gate_up_bias=columns(gate_up_bias, (count, 2 * width), pairs),
            down_bias=whole(down_bias, count, hidden) if leads else None,
        ),
    )
