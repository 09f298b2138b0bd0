"""Sampling a batch: every row as if it were alone, and as the one-row reference samples it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from csps.kernels import sampling as module
from csps.kernels.sampling import NARROW, Filters, candidates, inverse_cdf, sample

FILTERS = st.builds(
    Filters,
    temperature=st.sampled_from([0.05, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 20, NARROW - 1, NARROW, 100, 10_000]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
)


def scores_of(seed: int, rows: int, vocab: int, levels: int | None = None) -> Tensor:
    """Return random scores; with `levels`, many equal ones and some -inf."""
    scores = 2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    if levels is None:
        return scores
    coarse = (scores * levels).round() / levels
    last = coarse == coarse.max(dim=1, keepdim=True).values  # somebody has to be left
    return coarse.masked_fill((coarse < -3) & ~last, -math.inf)


def reference(scores_v: Tensor, filters: Filters, u: float) -> int:
    """Sample one row by sorting all of it: (-score, id) is the order of likelihood."""
    order = sorted(range(len(scores_v)), key=lambda token: (-float(scores_v[token]), token))
    if 0 < filters.top_k < len(order):
        edge = scores_v[order[filters.top_k - 1]]
        order = [token for token in order if scores_v[token] >= edge]
    probs = (scores_v[order].double() / filters.temperature).softmax(0)
    if filters.top_p < 1.0:
        count = 1 + int((probs.cumsum(0)[:-1] < filters.top_p).sum())
        order, probs = order[:count], probs[:count]
    likely = probs >= filters.min_p * probs.max()
    left = sorted(
        (token, float(p)) for token, p, is_left in zip(order, probs, likely, strict=True) if is_left
    )
    aim, mass = u * math.fsum(p for _, p in left), 0.0
    for token, p in left:
        mass += p
        if mass > aim:
            return token
    raise AssertionError("no token left")


@settings(max_examples=examples(80), deadline=None)
@given(
    filters=st.lists(FILTERS, min_size=1, max_size=6),
    vocab=st.sampled_from([2, NARROW, NARROW + 1, 300, 700]),
    levels=st.sampled_from([None, 1, 4]),
    seed=st.integers(0, 1000),
    block=st.sampled_from([1, 1000, 1 << 17]),
    head=st.sampled_from([1, 16, 99, 256, module.HEAD]),
)
def test_every_row_is_sampled_as_if_it_were_alone(
    filters: list[Filters], vocab: int, levels: int | None, seed: int, block: int, head: int
) -> None:
    """Whether the head of the order suffices differs from row to row."""
    scores_bv = scores_of(seed, len(filters), vocab, levels)
    # Coarse, so that no rounding decides.
    uniforms = [(7 * row + seed) % 101 / 101 + 1e-4 for row in range(len(filters))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CPU_BLOCK", block)
        patch.setattr(module, "HEAD", head)
        tokens = sample(scores_bv, filters, uniforms).tolist()
        alone = [
            int(sample(scores_bv[row : row + 1], [asked], [uniforms[row]]))
            for row, asked in enumerate(filters)
        ]
    assert tokens == alone
    assert tokens == [
        reference(scores_bv[row], asked, uniforms[row]) for row, asked in enumerate(filters)
    ]


def test_a_row_with_ties_at_its_top_k_keeps_its_place() -> None:
    """The row is sampled again with the rows of wide filters, in the order of the batch."""
    scores_bv = scores_of(0, 2, NARROW + 1, 1)
    filters = [Filters(top_k=NARROW - 1), Filters()]
    uniforms = [0.3, 0.7]
    assert sample(scores_bv, filters, uniforms).tolist() == [
        reference(scores_bv[row], asked, uniforms[row]) for row, asked in enumerate(filters)
    ]


@settings(max_examples=examples(50), deadline=None)
@given(filters=st.lists(FILTERS, min_size=2, max_size=5), seed=st.integers(0, 1000))
def test_probabilities_do_not_depend_on_the_batch(filters: list[Filters], seed: int) -> None:
    scores_bv = scores_of(seed, len(filters), 1283)

    def probabilities(rows: Sequence[int]) -> dict[int, list[float]]:
        found = candidates(scores_bv[list(rows)], [filters[row] for row in rows])
        return {
            rows[int(row)]: probs_c.tolist()
            for these, _, probs_bc in found
            for row, probs_c in zip(these, probs_bc, strict=True)
        }

    together = probabilities(range(len(filters)))
    for row in range(len(filters)):
        assert probabilities([row])[row] == together[row]


def test_scores_equal_to_the_kth_remain_wherever_they_are() -> None:
    scores_v = torch.zeros(500)
    scores_v[[499, 7]] = 1.0
    ((_, ids_bc, probs_bc),) = candidates(scores_v[None], [Filters(top_k=3)])
    assert ids_bc is None
    assert (probs_bc > 0).all()


@pytest.mark.parametrize(("u", "token"), [(0.0, 1), (0.5, 3), (1 - 2**-52, 3)])
@pytest.mark.parametrize("total", [1.0, 0.3, 1e-300, 1e300])
def test_edges_of_the_random_number_never_hit_an_impossible_token(
    u: float, token: int, total: float
) -> None:
    probs_c = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0], dtype=torch.float64) * total
    assert int(inverse_cdf(probs_c[None], torch.tensor([[u]], dtype=torch.float64))) == token


class _OperationCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations += 1
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


MIXED = [
    Filters(),
    Filters(temperature=0.7, top_p=0.9),
    Filters(top_k=20, top_p=0.5),
    Filters(min_p=0.1),
]


def test_operations_do_not_grow_with_the_batch() -> None:
    counts = []
    for rows in (4, 32):
        scores_bv = scores_of(3, rows, 300)
        filters = [MIXED[row % 4] for row in range(rows)]
        with _OperationCounter() as counted:
            sample(scores_bv, filters, [0.5] * rows)
        counts.append((counted.operations, counted.waits))
    assert counts[1] <= counts[0]
