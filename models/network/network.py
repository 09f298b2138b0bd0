"""Compute the forward pass, except attention: the caller knows where keys lie.

    rotary = network.rotary(positions_t)
    x_td = network.embed(token_ids_t)
    for layer in network.layers:
        q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
        x_td = layer.finish(x_td, attention(q_thd, k_thd, v_thd, ...))
    logits_tv = network.logits(x_td[-1:])

Call it under `torch.inference_mode()`. Tokens of any number of sequences lie end to end. Blocks of
tokens keep the temporaries of long inputs small.

Shape suffixes: t tokens, d model or head dim, h heads of this rank, v vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from csps.kernels.cpu_product import SHORT_INNER, few_row_product, has_code
from csps.kernels.quantized_kv import round_kv
from csps.kernels.rowwise_fp8 import rowwise_product
from csps.models.network.experts import add_experts, gated, route, row_products, summable
from csps.models.network.parameters import ExpertParameters, LayerParameters, ModelParameters
from csps.models.network.rope import Rotary, rotary_at, rotate
from csps.models.network.spec import ModelSpec, TpShard

AllReduce = Callable[[Tensor], Tensor]
"""Function that sums a tensor over the tensor-parallel group and returns the sum."""

CPU_BLOCK_TOKENS = 1024
"""Fastest of 256 to 8192 for the MLP on one core, by 20 % over no blocks."""
PACKED_NUMBERS = 400_000
"""Fewest numbers of a matrix that is packed. For 1 to 128 rows, packed matrices of 3,299 x 128
numbers and more take 0.25 to 1.0 of `F.linear`'s time. Those of 256 x 128 take three times as long,
because a call takes 20 us (processor time of one core, AVX-512)."""
_PACKED_ROWS = 8
"""Rows of a product for which matrices are packed; others are computed as well."""
GPU_BLOCK_TOKENS = 16_384
"""Large, because a GPU wants large products; the block only bounds memory."""
EXPERT_BLOCK_TOKENS = 8192
"""Larger than on a CPU otherwise: every block reads the weights of all experts."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One decoder layer of one tensor-parallel rank."""

    spec: ModelSpec
    shard: TpShard
    weights: LayerParameters[Tensor]
    all_reduce: AllReduce | None
    windowed: bool = False
    """True if it is one of the layers with a window."""
    rounds_kv: bool = False
    """True if keys and values are rounded to what 8 bits hold."""

    def qkv(self, x_td: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values of this rank's heads, rotated to their positions.

        Args:
            x_td: the residual stream.
            rotary: `Network.rotary` of the same tokens.

        Returns:
            q_thd, k_thd, v_thd: contiguous, in the dtype of `x_td`.
        """
        if self.windowed and rotary.windowed is not None:
            rotary = rotary.windowed
        tokens, head_dim = x_td.shape[0], self.spec.head_dim
        heads, kv_heads = len(self.shard.query_heads), len(self.shard.kv_heads)
        q_thd = x_td.new_empty(tokens, heads, head_dim)
        k_thd, v_thd = kv_2thd = x_td.new_empty(2, tokens, kv_heads, head_dim)
        for block in _blocks(x_td):
            fused_thd = self._project(x_td[block]).view(-1, heads + 2 * kv_heads, head_dim)
            query_thd, key_thd, value_thd = torch.split(fused_thd, [heads, kv_heads, kv_heads], 1)
            rotate(self._head_norm(query_thd, self.weights.query_norm), rotary[block], q_thd[block])
            if rotary.query_scale_t11 is not None:
                q_thd[block].mul_(rotary.query_scale_t11[block])
            rotate(self._head_norm(key_thd, self.weights.key_norm), rotary[block], k_thd[block])
            v_thd[block] = value_thd
            if self.rounds_kv:
                round_kv(kv_2thd[:, block])
        return q_thd, k_thd, v_thd

    def finish(self, x_td: Tensor, attention_thd: Tensor) -> Tensor:
        """Compute the rest of the layer, from attention's result to the next layer's input."""
        return self.mlp(self.attention_output(x_td, attention_thd))

    def attention_output(self, x_td: Tensor, attention_thd: Tensor) -> Tensor:
        """Project attention's result back, add the residual, and sum over the TP group.

        Args:
            attention_thd: attention of this rank's query heads, in any floating dtype.
        """
        attended = attention_thd.flatten(1).to(x_td.dtype)
        weights, out_td = self.weights, torch.empty_like(x_td)
        with_residual = self._with_residual(weights.attention_post_norm)
        self._add_product(x_td if with_residual else None, attended, weights.output, out_td)
        return self._reduced(x_td, out_td, weights.output_bias, weights.attention_post_norm)

    def keys_and_values(self, x_td: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Compute `qkv` without queries, for rows whose attention is computed elsewhere."""
        layer = self.of_heads(slice(0, 0), slice(0, len(self.shard.kv_heads)))
        _, k_thd, v_thd = layer.qkv(x_td, rotary)
        return k_thd, v_thd

    def of_heads(self, queries: slice, keys: slice) -> "Layer":
        """Return this layer's attention with some of its heads, for work divided by heads.

        `qkv` then computes these heads and `output_part` takes them. The result copies their
        projection: use it for one layer's work and do not store it.

        Args:
            queries, keys: heads of this rank, counted from its first one.
        """
        weights, dim = self.weights, self.spec.head_dim
        bias = weights.qkv_bias
        return replace(
            self,
            shard=replace(
                self.shard,
                query_heads=self.shard.query_heads[queries],
                kv_heads=self.shard.kv_heads[keys],
            ),
            weights=replace(
                weights,
                qkv=self._rows_of_heads(weights.qkv, queries, keys),
                qkv_bias=None if bias is None else self._rows_of_heads(bias, queries, keys),
                output=weights.output[:, queries.start * dim : queries.stop * dim],
            ),
        )

    def output_part(self, attention_thd: Tensor) -> Tensor:
        """Return these heads' contribution to the output projection, (t, hidden); see
        `add_output`."""
        return F.linear(attention_thd.flatten(1).to(self.weights.output.dtype), self.weights.output)

    def add_output(self, x_td: Tensor, sum_td: Tensor) -> Tensor:
        """Add bias and residual to the sum of all heads' `output_part`."""
        bias_d, post_norm_d = self.weights.output_bias, self.weights.attention_post_norm
        if bias_d is not None:
            # Not in place: the sum may still be on its way to the other ranks of the instance.
            sum_td = sum_td + bias_d
        return x_td + self._biased_and_normed(sum_td, None, post_norm_d)

    def mlp(self, x_td: Tensor) -> Tensor:
        """Compute norm, gated MLP or experts, and residual; sum over the TP group."""
        weights, out_td = self.weights, torch.empty_like(x_td)
        with_residual = self._with_residual(weights.mlp_post_norm)
        for block in _blocks(x_td, EXPERT_BLOCK_TOKENS if weights.experts else None):
            normed_td = rms_norm(x_td[block], weights.mlp_norm, self.spec.rms_eps)
            self._add_mlp(x_td[block] if with_residual else None, normed_td, out_td[block])
            if weights.experts is not None:
                self._add_experts(normed_td, weights.experts, out_td[block])
        return self._reduced(x_td, out_td, weights.down_bias, weights.mlp_post_norm)

    def _add_mlp(self, residual_td: Tensor | None, normed_td: Tensor, out_td: Tensor) -> None:
        """Write this rank's part of the MLP that all tokens pass, as `_add_product`."""
        weights = self.weights
        if weights.gate_up is None or weights.down is None:
            out_td.zero_() if residual_td is None else out_td.copy_(residual_td)
            return
        gate_up = _linear(normed_td, weights.gate_up, weights.gate_up_bias, weights.gate_up_scales)
        activated = gated(gate_up, self.spec.activation)
        self._add_product(residual_td, activated, weights.down, out_td, weights.down_scales)

    def _add_experts(
        self, normed_td: Tensor, experts: ExpertParameters[Tensor], out_td: Tensor
    ) -> None:
        """Add this rank's part of the experts."""
        assert self.spec.experts is not None, "experts without a spec"
        logits_te = row_products(normed_td, experts.router)
        if experts.logit_bias is not None:
            logits_te += experts.logit_bias
        routing = route(logits_te, experts.router_bias, self.spec.experts)
        add_experts(out_td, normed_td, routing, experts, self.spec.experts)

    def _rows_of_heads(self, qkv: Tensor, queries: slice, keys: slice) -> Tensor:
        """Return these heads' rows of the fused weight, or entries of its bias."""
        dim, heads = self.spec.head_dim, len(self.shard.query_heads)
        kv_heads = len(self.shard.kv_heads)
        parts = [(0, queries), (heads, keys), (heads + kv_heads, keys)]
        return torch.cat(
            [qkv[(at + part.start) * dim : (at + part.stop) * dim] for at, part in parts]
        )

    def _project(self, x_td: Tensor) -> Tensor:
        normed_td = rms_norm(x_td, self.weights.input_norm, self.spec.rms_eps)
        return _linear(normed_td, self.weights.qkv, self.weights.qkv_bias)

    def _head_norm(self, x_thd: Tensor, weight_d: Tensor | None) -> Tensor:
        return x_thd if weight_d is None else rms_norm(x_thd, weight_d, self.spec.rms_eps)

    def _with_residual(self, post_norm_d: Tensor | None) -> bool:
        """Return whether the residual can be added before `_reduced`."""
        return self.all_reduce is None and post_norm_d is None

    def _add_product(
        self,
        residual_td: Tensor | None,
        inputs: Tensor,
        weight: Tensor,
        out_td: Tensor,
        scales_o1: Tensor | None = None,
    ) -> None:
        """Write this rank's part of a row-parallel product, with the residual if there is one."""
        product_td = _special_product(inputs, weight, None, scales_o1)
        if product_td is not None:
            if residual_td is None:
                out_td.copy_(product_td)
            else:
                torch.add(residual_td, product_td, out=out_td)
        elif residual_td is None:
            torch.mm(inputs, weight.T, out=out_td)
        else:
            # One call for product and residual saves a pass over memory.
            torch.addmm(residual_td, inputs, weight.T, out=out_td)

    def _reduced(
        self, x_td: Tensor, out_td: Tensor, bias_d: Tensor | None, post_norm_d: Tensor | None
    ) -> Tensor:
        """Sum the parts of the group, then add bias and residual once, with the norm between."""
        if self.all_reduce is not None:
            out_td = self.all_reduce(out_td)
        out_td = self._biased_and_normed(out_td, bias_d, post_norm_d)
        return out_td if self._with_residual(post_norm_d) else out_td.add_(x_td)

    def _biased_and_normed(
        self, sum_td: Tensor, bias_d: Tensor | None, post_norm_d: Tensor | None
    ) -> Tensor:
        """Add the bias to the sum of all ranks and normalize it, in place or not."""
        if bias_d is not None:
            sum_td.add_(bias_d)
        if post_norm_d is None:
            return sum_td
        return rms_norm(sum_td, post_norm_d, self.spec.rms_eps)


@dataclass(frozen=True, kw_only=True)
class Network:
    """One tensor-parallel rank's shard of a model."""

    spec: ModelSpec
    layers: tuple[Layer, ...]
    embedding_vd: Tensor
    norm_d: Tensor
    head_vd: Tensor

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        shard: TpShard,
        parameters: ModelParameters[Tensor],
        all_reduce: AllReduce | None = None,
        *,
        packed: bool = False,
        rounds_kv: bool = False,
    ) -> "Network":
        """Return a network that computes with these parameters.

        Args:
            rounds_kv: whether keys and values are rounded to what 8 bits hold
                (`csps.kernels.quantized_kv`).
            packed: whether products of few rows matter more than parts of matrices. Large matrices
                are then packed (`_packed`), which `Layer.of_heads` cannot cut. A head that is the
                embedding as well stays as it is.
        """
        head = parameters.head
        if head is None:
            head = parameters.embedding
        elif packed:
            head = _packed(head)
        return cls(
            spec=spec,
            layers=tuple(
                Layer(
                    spec=spec,
                    shard=shard,
                    weights=_ready(weights, spec, packed),
                    all_reduce=all_reduce,
                    windowed=index in spec.windowed,
                    rounds_kv=rounds_kv,
                )
                for index, weights in enumerate(parameters.layers)
            ),
            embedding_vd=parameters.embedding,
            norm_d=parameters.norm.add_(1) if spec.norms_add_one else parameters.norm,
            head_vd=head,
        )

    def rotary(self, positions_t: Tensor) -> Rotary:
        """Return the rotation of tokens at these positions, for all layers of one forward pass."""
        dtype, near = self.embedding_vd.dtype, self.spec.windowed_rope
        rotary = rotary_at(self.spec.rope, positions_t, dtype)
        if near is None:
            return rotary
        return replace(rotary, windowed=rotary_at(near, positions_t, dtype))

    def embed(self, token_ids_t: Tensor) -> Tensor:
        """Return the residual stream before the first layer, (t, hidden)."""
        x_td = F.embedding(token_ids_t, self.embedding_vd)
        scale = self.spec.embedding_scale
        # The factor is rounded to the dtype first, as in training.
        return x_td if scale == 1.0 else x_td * torch.tensor(scale, dtype=x_td.dtype)

    def logits(self, x_td: Tensor) -> Tensor:
        """Apply final norm and head: fp32 logits over the whole vocabulary, on every rank."""
        normed_td = rms_norm(x_td, self.norm_d, self.spec.rms_eps)
        return _linear(normed_td, self.head_vd).float()


def _ready(
    weights: LayerParameters[Tensor], spec: ModelSpec, packed: bool
) -> LayerParameters[Tensor]:
    """Return a layer's weights as they are computed with."""
    if packed:
        weights = replace(
            weights,
            qkv=_packed(weights.qkv),
            output=_packed(weights.output),
            gate_up=None if weights.gate_up is None else _packed(weights.gate_up),
            down=None if weights.down is None else _packed(weights.down),
        )
    if spec.norms_add_one:
        for norm_d in weights.norms:
            norm_d.add_(1)
    if (experts := weights.experts) is None:
        return weights
    return replace(weights, experts=replace(experts, router=summable(experts.router)))


def _packed(weight: Tensor) -> Tensor:
    """Return a matrix in oneDNN's blocks, and free the original; a small one as it is.

    `F.linear` brings a matrix into this order in each call, which takes longer than the product
    itself if there are few rows.
    """
    if weight.numel() < PACKED_NUMBERS or not _packable(weight):
        return weight
    if weight.dtype == torch.float32 and weight.shape[1] <= SHORT_INNER and has_code(weight):
        # `few_row_product` takes 0.6 of the time for one row, as long for 16, and 1.2 for 32.
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
    weight.untyped_storage().resize_(0)  # both at once would double a rank's memory while it loads
    return packed


def _packable(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _linear(
    x_ti: Tensor, weight: Tensor, bias_o: Tensor | None = None, scales_o1: Tensor | None = None
) -> Tensor:
    """Compute `F.linear` with a matrix that may be packed, or in FP8 and has scales."""
    product_to = _special_product(x_ti, weight, bias_o, scales_o1)
    return F.linear(x_ti, weight, bias_o) if product_to is None else product_to


def _special_product(
    x_ti: Tensor, weight: Tensor, bias_o: Tensor | None, scales_o1: Tensor | None
) -> Tensor | None:
    """Compute what `_linear` computes; return None if `F.linear` computes it best."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_ti, weight, bias_o, "none", [], "")
        return product
    if scales_o1 is None:
        return few_row_product(x_ti, weight, bias_o)
    product_to = rowwise_product(x_ti, weight, scales_o1)
    return product_to if bias_o is None else product_to.add_(bias_o)


def rms_norm(x: Tensor, weight_d: Tensor, eps: float) -> Tensor:
    """Apply a root-mean-square norm over the last dim, computed in fp32."""
    if weight_d.dtype != x.dtype:  # kept in fp32, to be applied before the result is rounded
        return F.rms_norm(x.to(weight_d.dtype), weight_d.shape, weight_d, eps).to(x.dtype)
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return F.rms_norm(x, weight_d.shape, weight_d, eps)
    # The vector norm needs no square of `x` in memory: half the time of `F.rms_norm` on a CPU.
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale: Tensor = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight_d)


def _blocks(x_td: Tensor, size: int | None = None) -> Iterator[slice]:
    """Yield slices that divide the tokens into blocks for one product."""
    if size is None:
        size = CPU_BLOCK_TOKENS if x_td.device.type == "cpu" else GPU_BLOCK_TOKENS
    return (slice(start, start + size) for start in range(0, x_td.shape[0], size))
