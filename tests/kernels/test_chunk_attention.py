"""Attention of chunks to what is cached of their prompts, in one call, against the fp64 oracle."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from dense_reference import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from torch import Tensor

from csps.kernels.arguments import ChunkRuns
from csps.kernels.attention import chunk_attention

pytest.importorskip("triton")

from csps.kernels import triton_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 100


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    runs: tuple[tuple[range, ...], ...]
    heads: int
    kv_heads: int
    dim: int

    @property
    def chunk_runs(self) -> ChunkRuns:
        return ChunkRuns(self.lengths, self.runs)

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(sum(self.lengths))
        shapes = ((sum(self.lengths), self.heads), *((SLOTS, self.kv_heads),) * 2)
        q, k, v = (torch.randn(*shape, self.dim, generator=generator) for shape in shapes)
        seen = {slot for runs in self.runs for run in runs for slot in run}
        unseen = torch.tensor([slot not in seen for slot in range(SLOTS)])
        k[unseen] = v[unseen] = torch.nan  # the memory of a pool is not initialized
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def expected(self) -> tuple[Tensor, Tensor]:
        q, k, v = self.tensors(torch.float64)
        out = torch.zeros(q.shape, dtype=torch.float64)
        lse = torch.full((self.heads, len(q)), -torch.inf, dtype=torch.float64)
        start = 0
        for length, runs in zip(self.lengths, self.runs, strict=True):
            rows = slice(start, start := start + length)
            if slots := [slot for run in runs for slot in run]:
                out[rows], lse[:, rows] = dense_attention(
                    q[rows], k[slots], v[slots], q_positions=None, k_positions=None
                )
        return out, lse


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = draw(st.lists(st.integers(1, 9) | st.integers(30, 40), min_size=1, max_size=4))
    runs = []
    for _ in lengths:
        begins = draw(st.lists(st.integers(0, SLOTS), max_size=3))
        run_lengths = st.integers(0, 5) | st.integers(0, SLOTS)
        runs.append(tuple(range(b, min(SLOTS, b + draw(run_lengths))) for b in begins))
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]))
    return Case(tuple(lengths), tuple(runs), heads, kv_heads, draw(st.sampled_from([8, 20, 32])))


TWO_OF_THREE = Case((3, 40, 1), ((range(5, 60), range(70, 71)), (), (range(9),)), 4, 2, 16)
"""One chunk in two runs of slots, one without any, one in one run."""


def check(got: tuple[Tensor, Tensor], case: Case, tolerance: float) -> None:
    got = got[0].cpu().double(), got[1].cpu().double()
    torch.testing.assert_close(got, case.expected(), atol=tolerance, rtol=tolerance)


@settings(max_examples=examples(60), deadline=None)
@given(cases())
def test_every_row_sees_all_runs_of_its_chunk_on_a_cpu(case: Case) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        check(chunk_attention(*case.tensors(dtype), case.chunk_runs), case, tolerance)


def triton_chunks(case: Case) -> tuple[Tensor, Tensor]:
    q, k, v = (tensor.to(DEVICE) for tensor in case.tensors(torch.float32))
    scale = case.dim**-0.5
    return triton_attention.chunk_attention(q, k, v, case.chunk_runs, scale)


@settings(max_examples=examples(8), deadline=None)
@given(cases().filter(lambda case: case.chunk_runs.depth))
def test_every_row_sees_all_runs_of_its_chunk_in_triton(case: Case) -> None:
    check(triton_chunks(case), case, 1e-5)


def test_runs_are_split_when_rows_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_attention, "processors", lambda _: 64)
    monkeypatch.setattr(triton_attention, "MIN_SPLIT_BLOCKS", 1)
    check(triton_chunks(TWO_OF_THREE), TWO_OF_THREE, 1e-5)


def test_rows_that_do_not_match_the_chunks_are_refused() -> None:
    q, k, v = TWO_OF_THREE.tensors(torch.float32)
    with pytest.raises(ValueError, match="44 rows need as many"):
        chunk_attention(q[1:], k, v, TWO_OF_THREE.chunk_runs)


def test_nothing_is_seen_without_runs() -> None:
    out, lse = chunk_attention(*TWO_OF_THREE.tensors(torch.float32), ChunkRuns([44], [[]]))
    assert not out.any()
    assert (lse == -torch.inf).all()
