"""Compiled attention on CPUs against the fp64 oracle and torch's flash kernel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from dense_reference import dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples
from rounded_reference import rounded
from torch import Tensor

from csps.kernels import compiled_code, cpu_attention, cpu_decode
from csps.kernels.arguments import EVERY_SLOT, PART_FIELDS, RowParts, SlotRun, SlotRuns
from csps.kernels.attention import attention, decode_attention
from csps.kernels.cpu_decode import DecodeKernel
from csps.kernels.quantized_kv import INT8, quantized

pytest.importorskip("llvmlite")

from csps.kernels import native_code

SLOTS = 400
SHAPES = [(1, 1, 8), (4, 2, 32), (3, 3, 16), (8, 1, 32), (14, 2, 64), (6, 2, 20), (20, 1, 48)]
"""Query heads, KV heads and head dims: groups of 1 to 20, and dims of 4 to 16 lanes."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16, INT8]
"""Types of KV; that with 8 bits has scales."""
Heads = tuple[int, int, int]


def kernel(heads: Heads, dtype: torch.dtype) -> DecodeKernel:
    """Return the compiled kernel of a shape."""
    query_heads, kv_heads, dim = heads
    assert cpu_decode.prepare(heads=query_heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    found = cpu_decode.prepared(
        torch.zeros(1, query_heads, dim), *[stored(torch.zeros(1, kv_heads, dim), dtype)] * 2
    )
    assert found is not None
    return found


def stored(x_thd: Tensor, dtype: torch.dtype) -> Tensor:
    """Return keys or values as a pool of this type has them."""
    return quantized(x_thd) if dtype == INT8 else x_thd.to(dtype)


def numbers(x_thd: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the same as numbers."""
    return rounded(x_thd.nan_to_num()) if dtype == INT8 else x_thd.to(dtype)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let even the shortest work be cut for two threads."""
    monkeypatch.setattr(compiled_code, "THREAD_BYTES", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    heads: Heads
    dtype: torch.dtype
    rows: int
    runs: tuple[SlotRun, ...]
    seed: int

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v in memory; slots that no run has are NaN, as a pool's memory may be."""
        q, k, v = self._drawn()
        q = q if self.dtype == INT8 else q.to(self.dtype)
        return q, stored(k, self.dtype), stored(v, self.dtype)

    def numbers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v as numbers."""
        q, k, v = self._drawn()
        q = q if self.dtype == INT8 else q.to(self.dtype)
        return q, numbers(k, self.dtype), numbers(v, self.dtype)

    def _drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, dim = self.heads
        generator = torch.Generator().manual_seed(self.seed)
        shapes = (self.rows, heads), (SLOTS, kv_heads), (SLOTS, kv_heads)
        q, k, v = (torch.randn(*shape, dim, generator=generator) for shape in shapes)
        unseen = torch.ones(SLOTS, dtype=torch.bool)
        for _, begin, end in self.runs:
            unseen[begin:end] = False
        k[unseen] = v[unseen] = torch.nan
        return q, k, v


def prompt(heads: Heads, dtype: torch.dtype, *, rows: int, keys: int) -> list[Tensor]:
    """Return q, k and v."""
    query_heads, kv_heads, dim = heads
    shapes = (rows, query_heads), (keys, kv_heads), (keys, kv_heads)
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(*shape, dim, generator=generator).to(dtype) for shape in shapes]


def lengths() -> st.SearchStrategy[int]:
    """Draw lengths about a block's, a vector's and a tile's, and any other."""
    return st.sampled_from([0, 1, 3, 4, 5, 15, 16, 17, 63, 64, 65, 128, 129]) | st.integers(0, 300)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 5))
    runs: list[SlotRun] = []
    for row in range(rows):
        for _ in range(draw(st.integers(0, 3))):
            begin = draw(st.integers(0, SLOTS))
            runs.append((row, begin, min(SLOTS, begin + draw(lengths()))))
    heads, dtype = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(DTYPES))
    return Case(heads, dtype, rows, tuple(runs), draw(st.integers(0, 99)))


def by_definition(case: Case, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    q, k, v = tensors
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float64)
    for row in range(case.rows):
        slots = [slot for r, begin, end in case.runs if r == row for slot in range(begin, end)]
        if slots:
            keys, values = k[slots], v[slots]
            part = dense_attention(q[[row]], keys, values, q_positions=None, k_positions=None)
            out[row], lse[row] = part[0][0], part[1][:, 0]
    return out, lse


def check(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], atol: float = 2e-6) -> None:
    assert got[0].dtype == got[1].dtype == torch.float32
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.double(), other.double(), atol=atol, rtol=1e-5)


def scale_of(case: Case) -> float:
    return float(case.heads[2] ** -0.5)


# Numbers of 16 bits are converted without a loss and computed in fp32, so one tolerance does.
@settings(max_examples=examples(300), deadline=None)
@given(case=cases())
def test_equals_the_definition(case: Case) -> None:
    tensors, runs = case.tensors(), SlotRuns(case.rows, case.runs)
    got = kernel(case.heads, case.dtype).attend_runs(*tensors, runs, scale_of(case))
    check(got, by_definition(case, case.numbers()))


@settings(max_examples=examples(100), deadline=None)
@given(case=cases(), threads=st.integers(2, 4))
def test_threads_change_no_row(case: Case, threads: int) -> None:
    tensors = case.tensors()
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_code, "THREAD_BYTES", 1)
        torch.set_num_threads(threads)
        try:
            runs = SlotRuns(case.rows, case.runs)
            got = kernel(case.heads, case.dtype).attend_runs(*tensors, runs, scale_of(case))
        finally:
            torch.set_num_threads(before)
    check(got, by_definition(case, case.numbers()))


@settings(max_examples=examples(100), deadline=None)
@given(case=cases(), threads=st.integers(1, 4))
def test_parts_cover_each_rows_slots_once(case: Case, threads: int) -> None:
    runs = SlotRuns(case.rows, case.runs)
    parts = runs.parts(threads)
    assert [number for own in parts.of_thread for number in own] == list(
        range(len(parts.parts) // PART_FIELDS)
    )
    seen: dict[int, list[int]] = {row: [] for row in range(case.rows)}
    rows_of = [*range(case.rows), *parts.further]
    outputs = []
    for at in range(0, len(parts.parts), PART_FIELDS):
        row, out_row, rows, first, end, unseen = parts.parts[at : at + PART_FIELDS]
        assert rows == 1
        assert unseen == EVERY_SLOT
        assert rows_of[out_row] == row
        outputs.append(out_row)
        for run in range(first, end):
            seen[row] += range(parts.runs[2 * run], parts.runs[2 * run + 1])
    assert sorted(outputs) == list(range(parts.rows))
    for row, slots in seen.items():
        assert slots == [s for r, begin, end in runs.runs if r == row for s in range(begin, end)]


@settings(max_examples=examples(200), deadline=None)
@given(
    heads=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 150),
    first=st.integers(1, 200),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_each_query_sees_one_key_more(
    heads: Heads, dtype: torch.dtype, rows: int, first: int, threads: int, seed: int
) -> None:
    query_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(seed)
    keys = first + rows - 1
    q = torch.randn(rows, query_heads, dim, generator=generator)
    k, v = (torch.randn(keys + 5, kv_heads, dim, generator=generator) for _ in range(2))
    expected = dense_attention(
        q,
        numbers(k[:keys], dtype),
        numbers(v[:keys], dtype),
        q_positions=torch.arange(first - 1, first - 1 + rows),
        k_positions=torch.arange(keys),
    )
    k[keys:] = v[keys:] = torch.nan  # which no query sees
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled_code, "THREAD_BYTES", 1)
        torch.set_num_threads(threads)
        try:
            kv = stored(k, dtype), stored(v, dtype)
            got = kernel(heads, dtype).attend_staircase(q, *kv, first, dim**-0.5)
        finally:
            torch.set_num_threads(before)
    check(got, expected)


@settings(max_examples=examples(100), deadline=None)
@given(
    rows=st.integers(1, 300),
    first=st.integers(1, 1000),
    threads=st.integers(1, 4),
    most=st.integers(1, 40),
)
def test_parts_of_a_staircase_share_keys_evenly(
    rows: int, first: int, threads: int, most: int
) -> None:
    parts = RowParts.of_staircase(rows, first, threads=threads, most_rows=most)
    fields = [parts.parts[at : at + PART_FIELDS] for at in range(0, len(parts.parts), PART_FIELDS)]
    assert [row for start, _, count, *_ in fields for row in range(start, start + count)] == list(
        range(rows)
    )
    assert max(part[2] for part in fields) == parts.most_rows <= most
    keys = []
    for own in parts.of_thread:
        keys.append(0)
        for part in own:
            start, out, count, run, end_run, unseen = fields[part]
            assert (out, end_run, unseen) == (start, run + 1, first + start)
            assert list(parts.runs[2 * run : 2 * run + 2]) == [0, first + start + count - 1]
            keys[-1] += sum(first + row for row in range(start, start + count))
    assert max(keys) <= sum(keys) / threads + first + rows


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_causal_attention_of_prepared_heads_is_compiled(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts, and pieces behind their history, in the same cache."""
    heads, kv_heads, dim = 4, 2, 32
    compiled = kernel((heads, kv_heads, dim), dtype)
    monkeypatch.setattr(compiled, "most_queries", 1000)
    monkeypatch.setattr(cpu_attention, "_flash", None)
    for history in (0, 70):
        q = torch.randn(90, heads, dim).to(dtype)
        k, v = (torch.randn(history + 90, kv_heads, dim).to(dtype) for _ in range(2))
        positions = range(history, history + 90), range(history + 90)
        got = attention(q, k, v, q_positions=positions[0], k_positions=positions[1])
        tensors = [torch.arange(r.start, r.stop) for r in positions]
        check(got, dense_attention(q, k, v, q_positions=tensors[0], k_positions=tensors[1]))


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_have_about_the_same_number_of_tokens(threads: int) -> None:
    for lengths_of_rows in ([1000], [10, 1000, 10], [500] * 64, [1, 2, 300, 4, 700]):
        runs = SlotRuns(len(lengths_of_rows), [(r, 0, n) for r, n in enumerate(lengths_of_rows)])
        parts = runs.parts(threads)
        tokens = [
            sum(
                parts.runs[2 * run + 1] - parts.runs[2 * run]
                for part in own
                for run in range(*parts.parts[PART_FIELDS * part + 3 : PART_FIELDS * part + 5])
            )
            for own in parts.of_thread
        ]
        share = sum(lengths_of_rows) / threads
        assert max(tokens) <= share * 1.25 + 1
    assert SlotRuns(64, [(row, 0, 500) for row in range(64)]).parts(2).further == []


@settings(max_examples=examples(60), deadline=None)
@given(
    heads=st.sampled_from(SHAPES),
    dtype=st.sampled_from(DTYPES),
    queries=st.integers(1, 70),
    keys=st.integers(1, 300),
)
def test_all_queries_see_all_keys(
    heads: Heads, dtype: torch.dtype, queries: int, keys: int
) -> None:
    query_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(queries)
    shapes = (queries, query_heads), (keys + 2, kv_heads), (keys + 2, kv_heads)
    q, k, v = (torch.randn(*shape, dim, generator=generator) for shape in shapes)
    kv = stored(k, dtype)[1:-1], stored(v, dtype)[1:-1]  # a slice of a pool
    out, lse = kernel(heads, dtype).attend_all(q, *kv, dim**-0.5)
    k, v = numbers(k, dtype)[1:-1], numbers(v, dtype)[1:-1]
    check((out, lse), dense_attention(q, k, v, q_positions=None, k_positions=None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8])
@pytest.mark.parametrize("cut", [False, True])
def test_twenty_thousand_keys(
    dtype: torch.dtype, cut: bool, request: pytest.FixtureRequest
) -> None:
    if cut:
        request.getfixturevalue("two_threads")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 32, generator=generator)
    k, v = (torch.randn(20_100, 2, 32, generator=generator) for _ in range(2))
    kv = stored(k, dtype), stored(v, dtype)
    runs = SlotRuns(2, [(0, 0, 15_000), (0, 15_100, 20_100), (1, 20_099, 20_100)])
    got = kernel((4, 2, 32), dtype).attend_runs(q, *kv, runs, 32**-0.5)
    k, v = numbers(k, dtype).float(), numbers(v, dtype).float()
    check(got, cpu_attention.decode_by_flash(q, k, v, runs, 32**-0.5))


@pytest.mark.parametrize("lanes", [4, 8])
def test_narrower_vectors_of_other_processors(lanes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_code, "vector_lanes", lambda: lanes)
    monkeypatch.setattr(cpu_decode, "_prepared", {})
    runs = tuple((row, 7 * row, 7 * row + length) for row, length in enumerate([130, 1, 0, 64, 77]))
    for heads in SHAPES[1::2]:
        for dtype in (torch.float32, torch.bfloat16, INT8):
            case = Case(heads, dtype, 5, runs, lanes)
            tensors = case.tensors()
            got = kernel(heads, dtype).attend_runs(*tensors, SlotRuns(5, runs), scale_of(case))
            check(got, by_definition(case, case.numbers()))
            if dtype == INT8:  # of which prompts are not computed
                continue
            q, k, v = prompt(heads, dtype, rows=40, keys=110)
            got = kernel(heads, dtype).attend_staircase(q, k, v, 71, scale_of(case))
            positions = torch.arange(70, 110), torch.arange(110)
            check(got, dense_attention(q, k, v, q_positions=positions[0], k_positions=positions[1]))


READ_TO_THE_END = """
import ctypes, mmap, torch
from csps.kernels import cpu_decode
from csps.kernels.arguments import SlotRuns
from csps.kernels.quantized_kv import quantized, row_width

def before_forbidden_page(slots, dtype):
    \"\"\"Return a cache whose last byte is the last before a page that nobody may read.\"\"\"
    pages = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    behind = memory.data_ptr() + 2 * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0
    width = row_width(32, dtype)
    size = slots * 2 * width * dtype.itemsize
    cache = memory[2 * mmap.PAGESIZE - size : 2 * mmap.PAGESIZE].view(dtype).view(slots, 2, width)
    return cache.copy_(quantized(torch.zeros(slots, 2, 32))) if dtype == torch.int8 else cache

for dtype in (torch.float32, torch.bfloat16, torch.int8):
    assert cpu_decode.prepare(heads=4, kv_heads=2, dim=32, dtype=dtype)
    for slots in range(1, 10):
        k, v = before_forbidden_page(slots, dtype), before_forbidden_page(slots, dtype)
        kernel = cpu_decode.prepared(torch.ones(1, 4, 32), k, v)
        out, _ = kernel.attend_runs(torch.ones(1, 4, 32), k, v, SlotRuns(1, [(0, 0, slots)]), 0.2)
        assert out.isfinite().all()
        out, _ = kernel.attend_all(torch.ones(20, 4, 32), k, v, 0.2)
        assert out.isfinite().all()
"""


def test_nothing_behind_the_last_slot_is_read() -> None:
    """A read behind a pool would end the process, so another one tries."""
    subprocess.run([sys.executable, "-c", READ_TO_THE_END], check=True, timeout=60)


# --- infinity, NaN and large numbers ---------------------------------------------------------


def test_nan_stays_in_its_row_and_head() -> None:
    case = Case((4, 2, 32), torch.float32, 3, ((0, 0, 100), (1, 100, 200), (2, 200, 300)), 1)
    q, k, v = case.tensors()
    k[150, 0, 3] = torch.nan
    v[250, 1, 5] = torch.nan
    out, lse = kernel(case.heads, case.dtype).attend_runs(q, k, v, SlotRuns(3, case.runs), 0.2)
    nan_out, nan_lse = out.isnan(), lse.isnan()
    assert nan_out[1, :2].all()
    assert nan_lse[1, :2].all()
    assert nan_out[2, 2:, 5].all()
    assert nan_out.sum() == 2 * 32 + 2
    assert nan_lse.sum() == 2


def test_scores_of_minus_infinity_weigh_nothing() -> None:
    q, v = torch.ones(2, 4, 32), torch.randn(200, 2, 32)
    k = torch.randn(200, 2, 32)
    k[:70] = -torch.inf  # of row 0 all; of row 1 the first block and a part of the second
    runs = SlotRuns(2, [(0, 0, 70), (1, 0, 200)])
    out, lse = kernel((4, 2, 32), torch.float32).attend_runs(q, k, v, runs, 0.2)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    rest = SlotRuns(1, [(0, 70, 200)])
    seen = cpu_attention.decode_by_flash(q[1:], k, v, rest, 0.2)
    check((out[1:], lse[1:]), seen)
    many = torch.ones(20, 4, 32)
    out, lse = kernel((4, 2, 32), torch.float32).attend_staircase(many, k, v, 70, 0.2)
    assert (out[0] == 0).all()
    assert (lse[:, 0] == -torch.inf).all()
    assert out[1:].isfinite().all()
    out, lse = kernel((4, 2, 32), torch.float32).attend_all(many, k, v, 0.2)
    check((out[:1], lse.T[:1]), seen)


def test_infinite_scores_give_nan_as_the_definition_does() -> None:
    q, k, v = torch.ones(1, 4, 32), torch.zeros(9, 2, 32), torch.randn(9, 2, 32)
    k[4] = torch.inf
    out, lse = kernel((4, 2, 32), torch.float32).attend_runs(q, k, v, SlotRuns(1, [(0, 0, 9)]), 1.0)
    assert out.isnan().all()
    assert not lse.isfinite().any()


@settings(max_examples=examples(30), deadline=None)
@given(size=st.sampled_from([1e-20, 1e-3, 30.0, 1e3, 1e4]), seed=st.integers(0, 99))
def test_scores_of_any_size(size: float, seed: int) -> None:
    case = Case((4, 2, 32), torch.float32, 1, ((0, 0, 300),), seed)
    q, k, v = case.tensors()
    q *= size
    got = kernel(case.heads, case.dtype).attend_runs(q, k, v, SlotRuns(1, case.runs), 32**-0.5)
    # An fp32 score is off by 1e-7 of itself, and its weight by as much as the score is.
    check(got, by_definition(case, (q, k, v)), atol=max(2e-6, 2e-6 * size))


# --- the choice of a kernel ------------------------------------------------------------------


def test_decode_runs_compiled_code_once_it_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_decode, "_prepared", {})
    case = Case((4, 2, 32), torch.float32, 2, ((0, 0, 100), (1, 100, 200)), 3)
    tensors, runs = case.tensors(), SlotRuns(2, case.runs)
    by_flash = decode_attention(*tensors, runs)
    kernel(case.heads, case.dtype)
    monkeypatch.delattr(cpu_attention, "decode_by_flash")
    check(decode_attention(*tensors, runs), by_flash)


def test_history_and_riding_chunks_run_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel((4, 2, 32), torch.float32)
    q, k, v = (torch.randn(tokens, heads, 32) for tokens, heads in ((7, 4), (90, 2), (90, 2)))
    expected = dense_attention(q, k, v, q_positions=None, k_positions=None)
    monkeypatch.delattr(cpu_attention, "_flash")
    check(attention(q, k, v, q_positions=None, k_positions=None), expected)


def test_many_queries_of_single_headed_groups_run_flash() -> None:
    few = kernel((3, 3, 16), torch.float32).most_queries
    assert 0 < few < 16 < kernel((4, 2, 32), torch.float32).most_queries


def test_heads_that_are_cut_out_of_a_cache_run_flash() -> None:
    kernel((4, 2, 32), torch.float32)
    q, cache = torch.randn(1, 4, 32), torch.randn(50, 4, 32)
    k = v = cache[:, 1:3]
    assert cpu_decode.prepared(q, k, v) is None
    got = decode_attention(q, k, v, SlotRuns(1, [(0, 3, 50)]))
    expected = dense_attention(q, k[3:], v[3:], q_positions=None, k_positions=None)
    check(got, (expected[0], expected[1].T))


@pytest.mark.parametrize(("dim", "dtype"), [(32, torch.float64), (6, torch.float32)])
def test_what_cannot_be_compiled_runs_flash(
    dim: int, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    assert not cpu_decode.prepare(heads=4, kv_heads=2, dim=dim, dtype=dtype)
    assert "decoding runs torch's attention" in caplog.text
    q, k, v = (torch.randn(n, heads, dim, dtype=dtype) for n, heads in ((1, 4), (9, 2), (9, 2)))
    out, lse = decode_attention(q, k, v, SlotRuns(1, [(0, 0, 9)]))
    expected = dense_attention(q, k, v, q_positions=None, k_positions=None)
    torch.testing.assert_close(out.double(), expected[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1].T, atol=1e-6, rtol=1e-5)


def test_without_llvmlite_torch_decodes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu_decode, "_prepared", {})
    monkeypatch.setattr(compiled_code, "find_spec", lambda name: None)
    assert not cpu_decode.prepare(heads=4, kv_heads=2, dim=32, dtype=torch.float32)
    assert "llvmlite is not installed" in caplog.text
    q, k = torch.randn(1, 4, 32), torch.randn(9, 2, 32)
    assert decode_attention(q, k, k, SlotRuns(1, [(0, 0, 9)]))[0].isfinite().all()


def test_an_error_of_the_compiler_is_not_the_ranks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("cannot select")

    monkeypatch.setattr(cpu_decode, "_prepared", {})
    monkeypatch.setattr(native_code, "load_function", fail)
    assert not cpu_decode.prepare(heads=4, kv_heads=2, dim=32, dtype=torch.float32)
    assert "cannot select" in caplog.text
