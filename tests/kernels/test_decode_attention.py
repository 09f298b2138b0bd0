"""Decode attention of many rows over a slotted cache against the fp64 oracle, CPU and Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from dense_reference import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from torch import Tensor

from csps.kernels import cpu_attention
from csps.kernels.arguments import SlotRun, SlotRuns
from csps.kernels.attention import decode_attention

pytest.importorskip("triton")

from csps.kernels import triton_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 120


@dataclass(frozen=True)
class Case:
    rows: int
    runs: tuple[SlotRun, ...]
    heads: int
    kv_heads: int
    dim: int

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(len(self.runs))
        shapes = ((self.rows, self.heads), (SLOTS, self.kv_heads), (SLOTS, self.kv_heads))
        q, k, v = (torch.randn(*shape, self.dim, generator=generator) for shape in shapes)
        unseen = torch.ones(SLOTS, dtype=torch.bool)
        for _, begin, end in self.runs:
            unseen[begin:end] = False
        k[unseen] = v[unseen] = torch.nan  # the memory of a pool is not initialized
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def expected(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        q, k, v = self.tensors(dtype)
        out = torch.zeros(q.shape, dtype=torch.float64)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
        for row in range(self.rows):
            own_runs = [run for run in self.runs if run[0] == row]
            slots = [slot for _, begin, end in own_runs for slot in range(begin, end)]
            if slots:
                part = dense_attention(
                    q[row : row + 1], k[slots], v[slots], q_positions=None, k_positions=None
                )
                out[row], lse[row] = part[0][0], part[1][:, 0]
        return out, lse


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 5))
    length = st.integers(0, 40) | st.integers(0, SLOTS)
    runs: list[SlotRun] = []
    for row in range(rows):
        for _ in range(draw(st.integers(0, 3))):
            begin = draw(st.integers(0, SLOTS))
            runs.append((row, begin, min(SLOTS, begin + draw(length))))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (6, 2), (8, 1), (3, 3)]))
    return Case(rows, tuple(runs), heads, kv_heads, draw(st.sampled_from([8, 20, 32])))


def check(got: tuple[Tensor, Tensor], case: Case, dtype: torch.dtype, tolerance: float) -> None:
    expected = case.expected(dtype)
    got = got[0].cpu().double(), got[1].cpu().double()
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=examples(100), deadline=None)
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_cpu_equals_the_definition(case: Case, dtype: torch.dtype) -> None:
    out, lse = decode_attention(*case.tensors(dtype), SlotRuns(case.rows, case.runs))
    assert out.dtype == lse.dtype == dtype
    check((out, lse), case, dtype, 1e-5 if dtype == torch.float32 else 1e-12)


@settings(max_examples=examples(8), deadline=None)
@given(case=cases(), longest=st.sampled_from([7, 32, 128]))
def test_triton_equals_the_definition(case: Case, longest: int) -> None:
    runs = SlotRuns(case.rows, case.runs)
    if not runs.tokens:
        return
    tensors = [tensor.to(DEVICE) for tensor in case.tensors(torch.float32)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_attention, "split_length", lambda work, processors: longest)
        got = triton_attention.decode_attention(*tensors, runs, case.dim**-0.5)  # type: ignore[call-arg]
    check(got, case, torch.float32, 1e-5)


@given(case=cases(), longest=st.integers(1, 50))
def test_split_runs_cover_the_same_slots(case: Case, longest: int) -> None:
    splits, row_n = SlotRuns(case.rows, case.runs).split(torch.device("cpu"), longest)
    assert row_n.tolist() == splits[:, 0].tolist()
    assert all(0 < end - begin <= longest for _, begin, end in splits.tolist())

    def slots(runs: list[SlotRun]) -> list[tuple[int, int]]:
        return [(row, slot) for row, begin, end in runs for slot in range(begin, end)]

    assert slots(splits.tolist()) == slots(list(case.runs))


@pytest.mark.parametrize(
    "backend", [cpu_attention.decode_attention, triton_attention.decode_attention]
)
def test_cache_with_heads_outside_of_slots(backend: Callable[..., tuple[Tensor, Tensor]]) -> None:
    case = Case(2, ((0, 3, 80), (1, 80, 120)), 4, 2, 16)
    q, k, v = (tensor.to(DEVICE) for tensor in case.tensors(torch.float32))
    if backend is cpu_attention.decode_attention:
        q, k, v = q.cpu(), k.cpu(), v.cpu()
    k, v = (cache.transpose(0, 1).contiguous().transpose(0, 1) for cache in (k, v))
    check(backend(q, k, v, SlotRuns(2, case.runs), 0.25), case, torch.float32, 1e-5)


def test_bf16_answers_in_fp32() -> None:
    case = Case(2, ((0, 3, 80), (1, 80, 120), (1, 0, 3)), 4, 2, 16)
    out, lse = decode_attention(*case.tensors(torch.bfloat16), SlotRuns(2, case.runs))
    assert out.dtype == lse.dtype == torch.float32
    check((out, lse), case, torch.bfloat16, 2e-2)


def test_rows_and_slots_of_different_counts_are_refused() -> None:
    q, k = torch.zeros(2, 4, 8), torch.zeros(9, 2, 8)
    with pytest.raises(ValueError, match="2 query rows need as many rows of slots, not 3"):
        decode_attention(q, k, k, SlotRuns(3, ((0, 0, 4),)))
