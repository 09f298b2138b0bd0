"""Choose experts for tokens, and add what the chosen experts compute.

Tokens are sorted by expert, so that every expert that has any multiplies all of its tokens at once.
What is chosen for a token, and with which weight, depends on this token alone: not on the tokens
beside it, nor on their number. Otherwise a prompt would be answered differently in chunks than
whole, and differently when the server is busy.

Shape suffixes: t tokens, d model dim, e experts, k experts of a token, n pairs of a token and one
of its experts, i width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from csps.models.network.parameters import ExpertParameters
from csps.models.network.spec import Activation, ExpertSpec

_FP64_BITS = 53
"""Bits of the largest integers that fp64 adds without rounding."""
PRODUCT_ROWS = 1024
"""Rows that are turned to fp64 at a time; they stay in a processor's cache."""


def summable(rows_nd: Tensor) -> Tensor:
    """Return rows in fp64, rounded so that no sum of products of two such rows is rounded again.

    Each row keeps the bits from its largest element's on that allow it: 21 for 2,048 dims.
    """
    bits = (_FP64_BITS - (rows_nd.shape[1] - 1).bit_length()) // 2
    largest_n1 = torch.linalg.vector_norm(rows_nd, ord=float("inf"), dim=1, keepdim=True)
    exponent_n1 = torch.frexp(largest_n1.double()).exponent
    # A sum with so large a number has no smaller bits than those to keep.
    shift_n1 = torch.exp2((exponent_n1 + (_FP64_BITS - 1 - bits)).double()).mul_(1.5)
    return rows_nd.double().add_(shift_n1).sub_(shift_n1)


def row_products(x_td: Tensor, summable_ed: Tensor) -> Tensor:
    """Return the products of all pairs of rows in fp32; each is the same in any batch, bit for bit.

    Args:
        summable_ed: rows that `summable` has returned.
    """
    # A library adds in another order where there are other numbers of rows: MKL has kernels of
    # their own for one row and for two and three, also if it is asked for a product a row, and
    # cuBLAS cuts long sums where rows are few. The last bit would then decide between two experts
    # that are almost alike. What is added without rounding has the same sum in any order, on any
    # device. On a core, with 1,024 rows, 2,048 dims and 128 experts, this takes 27 ms, and fp32
    # products 7 ms; the experts take 1,200 ms.
    blocks = torch.split(x_td, PRODUCT_ROWS)
    return torch.cat([(summable(block_td) @ summable_ed.T).float() for block_td in blocks])


@dataclass(frozen=True)
class Routing:
    """Experts of each token, and the weights of their outputs."""

    experts_tk: Tensor
    weights_tk: Tensor
    """Weights of their outputs, in fp32."""


def route(logits_te: Tensor, bias_e: Tensor | None, spec: ExpertSpec) -> Routing:
    """Choose the experts of each token by the expert router's logits; of equal ones, the first.

    Args:
        bias_e: correction of the scores that counts for the choice and not for the weights.
    """
    scores_te = _scores(logits_te, spec)
    choice_te = scores_te if bias_e is None else scores_te + bias_e
    if spec.groups > 1:
        choice_te = _in_best_groups(choice_te, spec)
    experts_tk = _largest(choice_te, spec.per_token)
    weights_tk = scores_te.gather(1, experts_tk)
    if spec.normalized:
        # cumsum adds one after the other; sum may choose an order by the shape.
        total_t1 = weights_tk.cumsum(dim=1)[:, -1:]
        weights_tk = weights_tk / (total_t1 + 1e-20 if spec.scores == "sigmoid" else total_t1)
    return Routing(experts_tk, weights_tk * spec.scale)


def _scores(logits_te: Tensor, spec: ExpertSpec) -> Tensor:
    if spec.scores == "softmax":
        return torch.softmax(logits_te, dim=-1)
    # Sigmoid, in which the last elements of a tensor are rounded differently from the others on a
    # CPU; a softmax of two rounds all alike.
    pairs_te2 = torch.stack((logits_te, torch.zeros_like(logits_te)), dim=-1)
    return torch.softmax(pairs_te2, dim=-1)[..., 0]


def _in_best_groups(choice_te: Tensor, spec: ExpertSpec) -> Tensor:
    """Return the scores, -inf outside of the groups whose two best experts have the most."""
    by_group_tge = choice_te.view(len(choice_te), spec.groups, -1)
    best_tg2 = by_group_tge.topk(2, dim=-1).values
    chosen = _largest(best_tg2[..., 0] + best_tg2[..., 1], spec.groups_per_token)
    outside_tg = torch.ones_like(by_group_tge[..., 0], dtype=torch.bool).scatter_(1, chosen, False)
    return by_group_tge.masked_fill(outside_tg[..., None], float("-inf")).flatten(1)


def _largest(values_tn: Tensor, count: int) -> Tensor:
    """Return the places of the largest values of each row, the first of equal ones first."""
    # topk takes any of equal ones, which differs between kernels.
    return values_tn.sort(dim=1, descending=True, stable=True).indices[:, :count]


def gated(gate_up_ni: Tensor, activation: Activation) -> Tensor:
    """Return ups times the activation of their gates, which come first; may overwrite both."""
    gate, up = gate_up_ni.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate, inplace=True).mul_(up)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped(gate_up_ni: Tensor, spec: ExpertSpec) -> Tensor:
    """Return the same for clamped gates and ups, which take turns."""
    gate, up = gate_up_ni.view(len(gate_up_ni), -1, 2).unbind(dim=-1)
    gate = gate.clamp(max=spec.limit)
    activated: Tensor = gate * torch.sigmoid(gate * spec.steepness)
    return activated.mul_(up.clamp(-spec.limit, spec.limit) + 1)


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of a layer's experts, expert by expert."""

    gate_up_eid: Tensor
    down_edi: Tensor
    gate_up_bias_ei: Tensor | None
    down_bias_ed: Tensor | None
    spec: ExpertSpec

    @classmethod
    def of(cls, experts: ExpertParameters[Tensor], spec: ExpertSpec, dim: int) -> ExpertWeights:
        """Return the parameters of one rank as stacks."""
        count, width = len(experts.router), experts.down.shape[1]
        return cls(
            gate_up_eid=experts.gate_up.view(count, 2 * width, dim),
            down_edi=experts.down.view(count, dim, width),
            gate_up_bias_ei=experts.gate_up_bias,
            down_bias_ed=experts.down_bias,
            spec=spec,
        )

    def gated(self, gate_up_ni: Tensor) -> Tensor:
        """Return the activated numbers between the two products."""
        if self.spec.clamped:
            return clamped(gate_up_ni, self.spec)
        return gated(gate_up_ni, "silu")


def add_experts(
    out_td: Tensor,
    x_td: Tensor,
    routing: Routing,
    experts: ExpertParameters[Tensor],
    spec: ExpertSpec,
) -> None:
    """Add to each token what its experts compute, times their weights.

    Args:
        x_td: the tokens after the norm.
    """
    order_n = routing.experts_tk.flatten().argsort(stable=True)
    counts_e = torch.bincount(routing.experts_tk.flatten(), minlength=len(experts.router))
    width = experts.down.shape[1]
    add = add_by_groups if has_grouped_products(x_td, width) else add_by_expert
    add(out_td, x_td, routing, order_n, counts_e, ExpertWeights.of(experts, spec, x_td.shape[1]))


def has_grouped_products(x_td: Tensor, width: int) -> bool:
    """Return whether one kernel can multiply the tokens of all experts."""
    aligned = x_td.shape[1] % 8 == width % 8 == 0
    return x_td.is_cuda and x_td.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


def add_by_expert(
    out_td: Tensor,
    x_td: Tensor,
    routing: Routing,
    order_n: Tensor,
    counts_e: Tensor,
    weights: ExpertWeights,
) -> None:
    """Add what experts compute, one after the other; see `add_experts`.

    Args:
        order_n: pairs of a token and one of its experts, sorted by expert.
        counts_e: pairs of each expert.
    """
    tokens_n = order_n // routing.experts_tk.shape[1]
    weights_n1 = routing.weights_tk.flatten()[order_n, None]
    # 16 bit would round away what a token's last experts add.
    sum_td = out_td if out_td.dtype == torch.float32 else out_td.float()
    for expert, (start, stop) in enumerate(pairwise(accumulate(counts_e.tolist(), initial=0))):
        if start == stop:
            continue
        tokens = tokens_n[start:stop]
        gate_up_bias, down_bias = (
            None if bias is None else bias[expert]
            for bias in (weights.gate_up_bias_ei, weights.down_bias_ed)
        )
        gate_up_ni = F.linear(x_td[tokens], weights.gate_up_eid[expert], gate_up_bias)
        result = F.linear(weights.gated(gate_up_ni), weights.down_edi[expert], down_bias)
        sum_td.index_add_(0, tokens, result.to(sum_td.dtype).mul_(weights_n1[start:stop]))
    if sum_td is not out_td:
        out_td.copy_(sum_td)


def add_by_groups(
    out_td: Tensor,
    x_td: Tensor,
    routing: Routing,
    order_n: Tensor,
    counts_e: Tensor,
    weights: ExpertWeights,
) -> None:
    """Add what experts compute, all in one product; arguments as `add_by_expert`.

    The host does not wait for the device, and each token's sum has one order.
    """
    ends_e = counts_e.cumsum(0).to(torch.int32)
    per_token = routing.experts_tk.shape[1]
    experts_n = routing.experts_tk.flatten()[order_n]
    gate_up_ni = F.grouped_mm(x_td[order_n // per_token], weights.gate_up_eid.mT, offs=ends_e)
    if weights.gate_up_bias_ei is not None:
        gate_up_ni = gate_up_ni + weights.gate_up_bias_ei[experts_n]
    sorted_nd = F.grouped_mm(weights.gated(gate_up_ni), weights.down_edi.mT, offs=ends_e)
    if weights.down_bias_ed is not None:
        sorted_nd = sorted_nd + weights.down_bias_ed[experts_n]
    results_nd = torch.empty_like(sorted_nd)
    results_nd[order_n] = sorted_nd
    weights_tk1 = routing.weights_tk[..., None]
    out_td += (results_nd.view(*routing.experts_tk.shape, -1) * weights_tk1).sum(dim=1)
