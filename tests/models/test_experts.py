"""Routing against transformers' own routers, bit for bit the same in any batch; experts by loop."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from csps.models.network import experts as experts_module
from csps.models.network.checkpoint_json import CheckpointError
from csps.models.network.experts import (
    Routing,
    add_by_expert,
    add_by_groups,
    add_experts,
    has_grouped_products,
    route,
    row_products,
    summable,
)
from csps.models.network.parameters import ExpertParameters
from csps.models.network.spec import ExpertSpec

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])

ROUTERS: dict[str, tuple[Any, dict[str, Any], ExpertSpec]] = {
    "qwen3_moe": (
        Qwen3MoeTopKRouter,
        {"num_experts": 12, "num_experts_per_tok": 3, "norm_topk_prob": False},
        ExpertSpec(count=12, per_token=3, intermediate=8, normalized=False),
    ),
    "qwen3_moe, normalized": (
        Qwen3MoeTopKRouter,
        {"num_experts": 12, "num_experts_per_tok": 3, "norm_topk_prob": True},
        ExpertSpec(count=12, per_token=3, intermediate=8),
    ),
    "mixtral": (
        MixtralTopKRouter,
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        ExpertSpec(count=5, per_token=2, intermediate=8),
    ),
    "glm4_moe": (
        Glm4MoeTopkRouter,
        {"n_routed_experts": 9, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5},
        ExpertSpec(count=9, per_token=4, intermediate=8, scores="sigmoid", bias=True, scale=2.5),
    ),
    "glm4_moe, groups": (
        Glm4MoeTopkRouter,
        {
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
        ExpertSpec(
            count=12,
            per_token=3,
            intermediate=8,
            scores="sigmoid",
            bias=True,
            normalized=False,
            groups=4,
            groups_per_token=2,
        ),
    ),
}
KINDS = pytest.mark.parametrize("kind", ROUTERS)
HIDDEN = 40


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def reference_router(kind: str) -> Any:
    """Return transformers' router, with random weights."""
    make, fields, _ = ROUTERS[kind]
    family = kind.partition(",")[0]
    router = make(AutoConfig.for_model(family, hidden_size=HIDDEN, **fields))
    random = generator(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=random) / 4)
        if (bias := getattr(router, "e_score_correction_bias", None)) is not None:
            bias.copy_(torch.randn(bias.shape, generator=random) / 8)
    return router.eval()


def routed(router: Any, x_td: Tensor, spec: ExpertSpec) -> Routing:
    logits_te = row_products(x_td, summable(router.weight))
    return route(logits_te, getattr(router, "e_score_correction_bias", None), spec)


# --- routing --------------------------------------------------------------------------------


@DTYPES
@given(data=st.data())
def test_the_rows_of_a_product_are_those_of_each_row_alone(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    """`F.linear` fails this, and so does `torch.bmm` with a product for each row."""
    rows, dims = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 600))
    experts, seed = data.draw(st.integers(1, 70)), data.draw(st.integers(0, 99))
    random = generator(seed)
    x_td = (torch.randn(rows, dims, generator=random) * 10).to(dtype)
    weight_ed = torch.randn(experts, dims, generator=random)
    start = data.draw(st.integers(0, rows - 1))
    stop = data.draw(st.integers(start + 1, rows))
    summable_ed = summable(weight_ed)
    whole_te = row_products(x_td, summable_ed)
    assert torch.equal(row_products(x_td[start:stop].clone(), summable_ed), whole_te[start:stop])
    expected_te = x_td.double() @ weight_ed.double().T
    bound_te = x_td.double().abs() @ weight_ed.double().abs().T
    assert ((whole_te - expected_te).abs() <= 3e-6 * bound_te).all()


@given(
    dims=st.one_of(st.integers(1, 5000), st.sampled_from((128, 512, 2048))),
    seed=st.integers(0, 99),
    scale=st.integers(-60, 60),
)
def test_products_are_added_without_rounding(dims: int, seed: int, scale: int) -> None:
    """The last rows have sums that take all bits there are."""
    random = generator(seed)
    x_td = torch.randn(3, dims, generator=random) * 2.0**scale
    weight_ed = torch.randn(4, dims, generator=random)
    for rows in (x_td, weight_ed):
        rows[-1] = 2.0 - torch.rand(dims, generator=random) / 8
    summable_td, summable_ed = summable(x_td), summable(weight_ed)
    for row_d, sums_e in zip(summable_td, summable_td @ summable_ed.T, strict=True):
        for other_d, total in zip(summable_ed, sums_e.tolist(), strict=True):
            assert total == math.fsum((row_d * other_d).tolist())
    order = torch.randperm(dims, generator=random)
    shuffled_te = row_products(x_td[:, order], summable(weight_ed[:, order]))
    assert torch.equal(shuffled_te, row_products(x_td, summable_ed))


def test_rows_of_zeros_and_no_rows() -> None:
    summable_ed = summable(torch.randn(5, 16))
    assert torch.equal(row_products(torch.zeros(2, 16), summable_ed), torch.zeros(2, 5))
    assert row_products(torch.zeros(0, 16), summable_ed).shape == (0, 5)


@KINDS
def test_routing_is_that_of_transformers(kind: str) -> None:
    router, spec = reference_router(kind), ROUTERS[kind][2]
    x_td = torch.randn(50, HIDDEN, generator=generator(1))
    with torch.no_grad():
        _, weights_tk, experts_tk = router(x_td)
        routing = routed(router, x_td, spec)
    expected_te = torch.zeros(50, spec.count).scatter_(1, experts_tk, weights_tk)
    actual_te = torch.zeros(50, spec.count).scatter_(1, routing.experts_tk, routing.weights_tk)
    torch.testing.assert_close(actual_te, expected_te, rtol=0, atol=3e-6)


@KINDS
@given(rows=st.integers(1, 40), start=st.integers(0, 39), seed=st.integers(0, 99))
def test_a_token_s_experts_do_not_depend_on_the_tokens_beside_it(
    kind: str, rows: int, start: int, seed: int
) -> None:
    router, spec = reference_router(kind), ROUTERS[kind][2]
    x_td = torch.randn(80, HIDDEN, generator=generator(seed))
    with torch.no_grad():
        whole = routed(router, x_td, spec)
        alone = routed(router, x_td[start : start + rows].clone(), spec)
    assert torch.equal(alone.experts_tk, whole.experts_tk[start : start + rows])
    assert torch.equal(alone.weights_tk, whole.weights_tk[start : start + rows])


def test_the_first_of_equal_experts_is_chosen() -> None:
    spec = ExpertSpec(count=300, per_token=4, intermediate=8)
    logits_te = torch.zeros(3, 300)
    logits_te[1, 7:] = 1.0
    routing = route(logits_te, None, spec)
    assert routing.experts_tk.tolist() == [[0, 1, 2, 3], [7, 8, 9, 10], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"per_token": 9}, "9 for each token, but it may choose among 8"),
        ({"per_token": 5, "groups": 2}, "5 for each token, but it may choose among 4"),
        ({"groups": 3}, "1 of 3 groups cannot be chosen among 8 experts"),
        ({"groups": 2, "groups_per_token": 3}, "3 of 2 groups"),
        ({"groups": 8}, "1 of 8 groups cannot be chosen among 8 experts"),
        ({"intermediate": 0}, "intermediate must be at least 1"),
    ],
)
def test_impossible_choices_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ExpertSpec(**{"count": 8, "per_token": 2, "intermediate": 4, **fields})


# --- experts --------------------------------------------------------------------------------


def random_experts(
    count: int, width: int, dtype: torch.dtype, seed: int
) -> ExpertParameters[Tensor]:
    random = generator(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=random) / columns**0.5).to(dtype)

    return ExpertParameters(
        router=matrix(count, HIDDEN).float(),
        gate_up=matrix(count * 2 * width, HIDDEN),
        down=matrix(count * HIDDEN, width),
    )


def with_biases(
    experts: ExpertParameters[Tensor], width: int, seed: int
) -> ExpertParameters[Tensor]:
    random, count = generator(seed + 2), len(experts.router)
    gate_up_bias = torch.randn(count, 2 * width, generator=random)
    down_bias = torch.randn(count, HIDDEN, generator=random)
    dtype = experts.down.dtype
    return replace(experts, gate_up_bias=gate_up_bias.to(dtype), down_bias=down_bias.to(dtype))


def by_definition(
    out_td: Tensor,
    x_td: Tensor,
    routing: Routing,
    experts: ExpertParameters[Tensor],
    spec: ExpertSpec,
) -> Tensor:
    """Compute token by token in fp64."""
    count = len(experts.router)
    gate_up_eid = experts.gate_up.double().view(count, -1, HIDDEN)
    down_edi = experts.down.double().view(count, HIDDEN, -1)
    rows = []
    for out_d, x_d, chosen_k, weights_k in zip(
        out_td.double(), x_td.double(), routing.experts_tk, routing.weights_tk, strict=True
    ):
        for expert, weight in zip(chosen_k.tolist(), weights_k.tolist(), strict=True):
            if not spec.clamped:
                gate, up = (gate_up_eid[expert] @ x_d).chunk(2)
                out_d = out_d + weight * (down_edi[expert] @ (F.silu(gate) * up))
                continue
            assert experts.gate_up_bias is not None
            assert experts.down_bias is not None
            gate_up = gate_up_eid[expert] @ x_d + experts.gate_up_bias[expert]
            gate = gate_up[0::2].clamp(max=spec.limit)
            up = gate_up[1::2].clamp(-spec.limit, spec.limit)
            middle = (up + 1) * gate * torch.sigmoid(spec.steepness * gate)
            out_d = out_d + weight * (down_edi[expert] @ middle + experts.down_bias[expert])
        rows.append(out_d)
    return torch.stack(rows)


@pytest.mark.parametrize("clamped", [False, True])
@pytest.mark.parametrize("add", [add_by_expert, add_by_groups])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 3e-6), (torch.bfloat16, 0.04)])
@given(
    tokens=st.integers(1, 40),
    count=st.integers(1, 9),
    width=st.sampled_from((8, 24)),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_experts_are_those_of_the_definition(
    add: Any,
    clamped: bool,
    dtype: torch.dtype,
    error: float,
    tokens: int,
    count: int,
    width: int,
    seed: int,
    data: st.DataObject,
) -> None:
    per_token = data.draw(st.integers(1, count))
    experts = random_experts(count, width, dtype, seed)
    if clamped:
        experts = with_biases(experts, width, seed)
    random = generator(seed + 1)
    x_td = torch.randn(tokens, HIDDEN, generator=random).to(dtype)
    out_td = torch.randn(tokens, HIDDEN, generator=random).to(dtype)
    spec = ExpertSpec(
        count=count, per_token=per_token, intermediate=width, clamped=clamped, limit=0.8
    )
    routing = route(row_products(x_td, summable(experts.router)), None, spec)
    expected_td = by_definition(out_td, x_td, routing, experts, spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts_module, "has_grouped_products", lambda *_: add is add_by_groups)
        add_experts(out_td, x_td, routing, experts, spec)
    torch.testing.assert_close(out_td.double(), expected_td, rtol=0, atol=error)


def test_no_tokens() -> None:
    experts = random_experts(4, 8, torch.float32, 0)
    nothing_td = torch.empty(0, HIDDEN)
    spec = ExpertSpec(count=4, per_token=2, intermediate=8)
    routing = route(row_products(nothing_td, summable(experts.router)), None, spec)
    add_experts(nothing_td, nothing_td, routing, experts, spec)


def test_a_cpu_has_no_grouped_products() -> None:
    assert not has_grouped_products(torch.empty(1, 8, dtype=torch.bfloat16), 8)
