"""The first run on a GPU: kernels, engine and two ranks, within nine minutes.

    python benchmarks/first_light.py --json first-light.json [--wheels DIR] [--minutes 9]
    python benchmarks/first_light.py --tiny      # the same on a CPU, with tiny shapes

Needs torch, Triton and numpy. What else csps imports is installed from `--wheels DIR`, without a
network, for this process alone. Every part is tried even if others fail: an error becomes a row.
Parts for which too little time is left are skipped, and named.

- roofline: read bandwidth and bf16 products of this device, as torch reaches them.
- kernels: each against dense attention in fp64 (largest error), with its time. The product in FP8
  is against the same numbers in fp64.
- models: random Llamas of 1B and 8B parameters through engine and pool: prompts of 8K to 128K
  tokens, and decoding at batch 1 and 64. `share` is the part of the roofline: of the products for
  prompts, of the bandwidth for decoding.
- two ranks: on this one device, with messages through the host's memory and gloo, because NCCL
  takes one rank a device. Against one rank.
"""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import multiprocessing
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {
    "msgpack": "msgpack",
    "msgspec": "msgspec",
    "opentelemetry.trace": "opentelemetry-api",
    "pydantic": "pydantic",
    "safetensors": "safetensors",
    "uvloop": "uvloop",
}
"""Distributions by the modules that ranks import, besides torch and numpy."""
LLAMAS: dict[str, dict[str, int]] = {
    "tiny": {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 96, "vocab": 500},
    "1B": {"hidden": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "mlp": 8192, "vocab": 128_256},
    "8B": {
        "hidden": 4096,
        "layers": 32,
        "heads": 32,
        "kv_heads": 8,
        "mlp": 14_336,
        "vocab": 128_256,
    },
}
RANKS = 2
JOIN_S = 240.0
WARM_UP = 3


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of what is measured."""

    device: str
    dtype: str
    models: tuple[str, ...]
    prompts: tuple[int, ...]
    decoding: tuple[tuple[int, int], ...]
    """Batches, and the context of each sequence."""
    iterations: int
    heads: tuple[tuple[int, int, int], ...]
    """Query heads, KV heads and head dim of the kernels."""
    kernel_tokens: int
    read_bytes: int
    product: int
    together: int
    """Prompt of two ranks."""


FULL = Sizes(
    device="cuda",
    dtype="bfloat16",
    models=("1B", "8B"),
    prompts=(8192, 32_768, 131_072),
    decoding=((1, 8192), (1, 131_000), (64, 2000)),
    iterations=40,
    heads=((32, 8, 128), (32, 8, 64), (16, 16, 128)),
    kernel_tokens=2048,
    read_bytes=2 * 2**30,
    product=8192,
    together=8192,
)
TINY = Sizes(
    device="cpu",
    dtype="float32",
    models=("tiny",),
    prompts=(64, 256),
    decoding=((1, 200), (4, 40)),
    iterations=4,
    heads=((4, 2, 16),),
    kernel_tokens=64,
    read_bytes=2**20,
    product=64,
    together=96,
)


class Clock:
    """Times of work on a device."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def settle(self) -> None:
        """Wait for the device."""
        import torch

        if self._cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], rounds: int = 5) -> float:
        """Return the median of some runs, after one that compiles."""
        work()
        times = []
        for _ in range(rounds):
            self.settle()
            begin = time.perf_counter()
            work()
            self.settle()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


class Report:
    """Rows so far, and the time that is left."""

    def __init__(self, minutes: float) -> None:
        self.rows: list[dict[str, Any]] = []
        self._end = time.monotonic() + 60 * minutes

    def add(self, part: str, what: str, **figures: float | str) -> None:
        """Add a row, and print it: whatever happens later, it was seen."""
        row: dict[str, Any] = {"part": part, "what": what, **figures}
        self.rows.append(row)
        print(json.dumps(row), flush=True)

    @contextmanager
    def trying(self, part: str, what: str, needed_s: float) -> Iterator[bool]:
        """Yield whether there is time for a part that takes so long; an error becomes a row."""
        left = self._end - time.monotonic()
        if left < needed_s:
            self.add(part, what, skipped=f"{left:.0f} s left, {needed_s:.0f} s needed")
        try:
            yield left >= needed_s
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            self.add(part, what, error=f"{error!r} at {where.filename}:{where.lineno}")
            traceback.print_exc()

    @property
    def left_s(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self._end - time.monotonic())


# --- roofline and kernels ---------------------------------------------------------------------


def roofline(sizes: Sizes, clock: Clock) -> dict[str, float]:
    """Return the device's bandwidth of reading, and its speed of products."""
    import torch

    dtype = getattr(torch, sizes.dtype)
    read = torch.ones(sizes.read_bytes // 4, device=sizes.device)
    one, other = torch.randn(2, sizes.product, sizes.product, device=sizes.device).to(dtype)
    return {
        "read_gb_s": sizes.read_bytes / clock.seconds(lambda: read.sum()) / 1e9,
        "tflops": 2 * sizes.product**3 / clock.seconds(lambda: one @ other) / 1e12,
    }


def dense(q_thd: Any, k_thd: Any, v_thd: Any, visible_tk: Any) -> tuple[Any, Any]:
    """Return attention in fp64 and its LSE (h, t)."""
    import torch

    group = q_thd.shape[1] // k_thd.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k_thd, v_thd))
    scores = torch.einsum("thd,khd->htk", q_thd.double(), k) * q_thd.shape[2] ** -0.5
    if visible_tk is not None:
        scores = scores.masked_fill(~visible_tk, -torch.inf)
    return torch.einsum("htk,khd->thd", scores.softmax(-1), v), scores.logsumexp(-1)


def kernels(sizes: Sizes, clock: Clock, report: Report) -> None:
    """Hold every kernel to a dense reference."""
    for shape in sizes.heads:
        for name, check in (
            ("causal attention", _causal),
            ("attention of two sequences", _packed),
            ("decode attention", _decoding),
            ("merge", _merging),
            ("importance", _importance),
        ):
            what = f"{name}, {','.join(map(str, shape))}"
            with report.trying("kernels", what, 20.0) as in_time:
                if in_time:
                    error, work = check(sizes, *shape)
                    report.add("kernels", what, largest_error=error, ms=1e3 * clock.seconds(work))
    with report.trying("kernels", "sampling", 20.0) as in_time:
        if in_time:
            error, work = _sampling(sizes)
            report.add("kernels", "sampling", largest_error=error, ms=1e3 * clock.seconds(work))
    for matrix in ("gate_up", "down"):
        for rows in (1, 3, sizes.kernel_tokens):
            what = f"product in FP8, {matrix}, {rows} rows"
            with report.trying("kernels", what, 20.0) as in_time:
                if in_time:
                    error, work, plain = _fp8(sizes, matrix, rows)
                    report.add(
                        "kernels", what, largest_error=error, ms=1e3 * clock.seconds(work),
                        unquantized_ms=1e3 * clock.seconds(plain),
                    )  # fmt: skip


Checked = tuple[float, Callable[[], object]]
"""Largest error, and what to time."""


def _tensors(sizes: Sizes, tokens: int, heads: int, kv_heads: int, dim: int) -> tuple[Any, ...]:
    import torch

    like = {"device": sizes.device, "dtype": getattr(torch, sizes.dtype)}
    return tuple(torch.randn(tokens, count, dim, **like) for count in (heads, kv_heads, kv_heads))


def _largest(found: Any, expected: Any) -> float:
    return float((found.double() - expected.double()).abs().max())


def _causal(sizes: Sizes, heads: int, kv_heads: int, dim: int) -> Checked:
    import torch

    from csps.kernels.attention import attention

    tokens = sizes.kernel_tokens
    q, k, v = _tensors(sizes, tokens, heads, kv_heads, dim)
    positions = range(tokens)
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=sizes.device).tril()
    work = partial(attention, q, k, v, q_positions=positions, k_positions=positions)
    (out, lse), (exact, exact_lse) = work(), dense(q, k, v, visible)
    return max(_largest(out, exact), _largest(lse, exact_lse)), work


def _packed(sizes: Sizes, heads: int, kv_heads: int, dim: int) -> Checked:
    import torch

    from csps.kernels.attention import attention

    tokens = sizes.kernel_tokens
    cut = tokens // 3
    q, k, v = _tensors(sizes, tokens, heads, kv_heads, dim)
    offsets = torch.tensor([0, cut, tokens], device=sizes.device)
    positions = torch.cat([torch.arange(cut), torch.arange(tokens - cut)]).to(sizes.device)
    owner = (torch.arange(tokens, device=sizes.device) >= cut).int()
    visible = torch.ones(tokens, tokens, dtype=torch.bool, device=sizes.device).tril()
    visible &= owner[:, None] == owner
    work = partial(
        attention, q, k, v, q_positions=positions, k_positions=positions,
        cu_seqlens_q=offsets, cu_seqlens_k=offsets,
    )  # fmt: skip
    (out, lse), (exact, exact_lse) = work(), dense(q, k, v, visible)
    return max(_largest(out, exact), _largest(lse, exact_lse)), work


def _decoding(sizes: Sizes, heads: int, kv_heads: int, dim: int) -> Checked:
    import torch

    from csps.kernels.arguments import SlotRuns
    from csps.kernels.attention import decode_attention

    slots, rows = sizes.kernel_tokens, 8
    _, k, v = _tensors(sizes, slots, heads, kv_heads, dim)
    q, _, _ = _tensors(sizes, rows, heads, kv_heads, dim)
    spans = [(row, 3 * row, slots - 5 * row) for row in range(rows)]
    spans.insert(1, (0, 0, 1))  # a row of two runs
    spans[0] = (0, 7, slots)
    visible = torch.zeros(rows, slots, dtype=torch.bool, device=sizes.device)
    for row, begin, end in spans:
        visible[row, begin:end] = True
    work = partial(decode_attention, q, k, v, SlotRuns(rows, spans))
    (out, lse), (exact, exact_lse) = work(), dense(q, k, v, visible)
    return max(_largest(out, exact), _largest(lse.T, exact_lse)), work


def _merging(sizes: Sizes, heads: int, kv_heads: int, dim: int) -> Checked:
    from csps.kernels.attention import attention
    from csps.kernels.merge import merge

    tokens = sizes.kernel_tokens
    q, k, v = _tensors(sizes, tokens, heads, kv_heads, dim)
    cuts = [slice(0, tokens // 4), slice(tokens // 4, tokens)]
    parts = [attention(q, k[cut], v[cut], q_positions=None, k_positions=None) for cut in cuts]
    outs, lses = zip(*parts, strict=True)
    work = partial(merge, outs, lses)
    return _largest(work()[0], dense(q, k, v, None)[0]), work


def _importance(sizes: Sizes, heads: int, kv_heads: int, dim: int) -> Checked:
    from csps.kernels.attention import attention
    from csps.kernels.importance import column_sums

    tokens = sizes.kernel_tokens
    q, k, v = _tensors(sizes, tokens, heads, kv_heads, dim)
    lse = attention(q, k, v, q_positions=None, k_positions=None)[1]
    work = partial(column_sums, q, k, lse, q_positions=None, k_positions=None)
    group = heads // kv_heads
    exact = []
    for head in range(heads):
        scores = q[:, head].double() @ k[:, head // group].double().T * dim**-0.5
        exact.append(scores.softmax(-1).sum(0))
    sums = [sum(exact[group * head : group * (head + 1)]) for head in range(kv_heads)]
    return max(_largest(found, own) for found, own in zip(work(), sums, strict=True)), work


def _sampling(sizes: Sizes) -> Checked:
    """Compare with the same on a CPU."""
    import torch

    from csps.kernels.sampling import Filters, sample

    vocab, rows = (LLAMAS[sizes.models[0]]["vocab"], 16)
    scores = 4 * torch.randn(rows, vocab)
    asked = (Filters(top_p=0.9), Filters(top_k=20), Filters(top_k=300, top_p=0.5), Filters())
    filters = [asked[row % len(asked)] for row in range(rows)]
    uniforms = [(0.37 * row + 0.1) % 1.0 for row in range(rows)]
    work = partial(sample, scores.to(sizes.device), filters, uniforms)
    return float((work().cpu() != sample(scores, filters, uniforms)).sum()), work


def _fp8(
    sizes: Sizes, matrix: str, rows: int
) -> tuple[float, Callable[[], object], Callable[[], object]]:
    """Compare a product of the largest model's feed-forward layers with one in fp64 of the same
    FP8 numbers; return also what to time without FP8."""
    import torch
    from torch.nn.functional import linear

    from csps.kernels.rowwise_fp8 import quantize_rows, rowwise_product

    shape = LLAMAS[sizes.models[-1]]
    like = {"device": sizes.device, "dtype": getattr(torch, sizes.dtype)}
    hidden, mlp = shape["hidden"], shape["mlp"]
    outputs, inputs = (2 * mlp, hidden) if matrix == "gate_up" else (hidden, mlp)
    x = torch.randn(rows, inputs, **like)
    floats = 0.02 * torch.randn(outputs, inputs, **like)
    weight, scales = quantize_rows(floats)
    work = partial(rowwise_product, x, weight, scales)
    own, own_scales = quantize_rows(x)
    exact = own.double() @ weight.double().T * own_scales * scales.T
    return _largest(work(), exact), work, partial(linear, x, floats)


# --- models -------------------------------------------------------------------------------------


def random_network(name: str, sizes: Sizes) -> Any:
    """Return a Llama with random weights on the device, without a checkpoint on disk."""
    import torch

    from csps.models.checkpoints.checkpoint import empty
    from csps.models.checkpoints.families import llama_places
    from csps.models.network.network import Network
    from csps.models.network.spec import read_spec, tp_shard_of

    shape = LLAMAS[name]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["mlp"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["hidden"] // shape["heads"],
        "vocab_size": shape["vocab"],
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        spec = read_spec(Path(folder))
    shard = tp_shard_of(spec, 0, 1)
    dtype = getattr(torch, sizes.dtype)
    torch.manual_seed(0)

    def filled(place: Any) -> Any:
        tensor = empty(place, dtype, sizes.device)
        return tensor.fill_(1.0) if tensor.ndim == 1 else tensor.normal_(0.0, 0.02)

    return Network.of(spec, shard, llama_places(spec, shard).map(filled))


def engine_of(network: Any, sizes: Sizes, slots: int, mesh: Any, ranks: int = 1) -> Any:
    """Return an engine with a pool of random keys and values."""
    import torch

    from csps.actors.attention.base.engine import Engine
    from csps.actors.comm.layout import GangLayout
    from csps.actors.kv_cache.kv_pool import KvPool
    from csps.kernels.attention import prepare_attention

    spec, dtype = network.spec, getattr(torch, sizes.dtype)
    pool = KvPool(
        layers=spec.layers,
        slots=slots,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=mesh.device,
    )
    for tensor in (pool.k, pool.v):
        for layer in tensor:  # by layer, which takes no memory besides
            layer.normal_()
    prepare_attention(
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        dim=spec.head_dim,
        dtypes=[dtype],
        device=mesh.device,
    )
    layout = GangLayout(world_size=ranks, tp=1)
    return Engine(network=network, pool=pool, mesh=mesh, layout=layout, device=mesh.device)


def mesh_of(store: Any, sizes: Sizes, rank: int = 0, ranks: int = 1, maker: Any = None) -> Any:
    """Join a mesh."""
    from csps.actors.comm.mesh import Mesh

    return Mesh(
        store,
        name="first light",
        rank=rank,
        world_size=ranks,
        device=sizes.device,
        host="127.0.0.1",
        data_group=maker,
    )


def prefill(engine: Any, tokens: int, ranks: int = 1, strategy: str = "ulysses") -> Any:
    """Compute a prompt by all ranks, and store its KV; return the rows of this rank."""
    import torch

    from csps.actors.attention.base.group import SpGroup
    from csps.actors.attention.choice import strategy_of
    from csps.actors.timing.timeline import StepClock
    from csps.protocols.core.placement import Span
    from csps.protocols.gang.step_messages import PrefillChunk, PrefillStep

    bounds = tuple(tokens * rank // ranks for rank in range(ranks + 1))
    chunk = PrefillChunk(sequence_id=0, start=0, length=tokens)
    step = PrefillStep(
        step_id=0, group=tuple(range(ranks)), bounds=bounds, chunks=(chunk,), strategy=strategy
    )
    group = SpGroup(engine.mesh, engine.layout, step, engine.rank, StepClock())
    span = Span(bounds[engine.rank], bounds[engine.rank + 1])
    network, pool = engine.network, engine.pool
    pool.slots.allocate(0, [span])

    def keep(layer: int, k_thd: Any, v_thd: Any, *_: Any, member: int | None = None) -> None:
        if member is None:
            pool.write(layer, 0, span, k_thd, v_thd)

    try:
        x_td = network.embed(
            prompt_of(tokens, network.spec.vocab, engine.device)[span.start : span.stop]
        )
        rotary = network.rotary(group.positions.to(engine.device))
        with strategy_of(group, engine) as attending:
            for index, layer in enumerate(network.layers):
                group.points.begin_layer(index)
                x_td = layer.mlp(attending.attend_layer(index, layer, x_td, rotary, keep))
        return torch.clone(x_td)
    finally:
        pool.slots.free_sequence(0)


def prompt_of(tokens: int, vocab: int, device: Any) -> Any:
    """Return token ids, always the same."""
    import torch

    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(0, vocab, (tokens,), generator=generator).to(device)


def prefill_flops(network: Any, tokens: int) -> float:
    """Return the operations of all layers on a prompt."""
    spec = network.spec
    products = sum(
        weight.numel() for layer in network.layers for weight in layer.weights if weight.ndim == 2
    )
    pairs = tokens * (tokens + 1) / 2
    return 2.0 * products * tokens + 4.0 * spec.layers * spec.heads * spec.head_dim * pairs


class Decoding:
    """A decode batch whose KV is whatever lies in the pool."""

    def __init__(self, engine: Any, ranks: int = 1) -> None:
        from csps.actors.engine.decode_batch import DecodeBatch

        self._engine, self._ranks, self._version, self._next = engine, ranks, 0, ranks
        self._batch = DecodeBatch(
            engine, lambda method, message: None, engine.pool.slots.free_sequence
        )

    def seconds(self, batch: int, context: int, iterations: int, clock: Clock) -> float:
        """Return the median time of an iteration."""
        from csps.protocols.core.placement import KvSlice
        from csps.protocols.gang.messages import ReserveKv, SamplerInputs, Sampling
        from csps.protocols.rpc.schema import encode
        from csps.protocols.sequencer.log_entries import Change

        steps, ranks = iterations + WARM_UP + 1, self._ranks
        ids = range(self._next, self._next + batch)
        self._next = ids.stop + -batch % ranks
        cuts = [context * rank // ranks for rank in range(ranks + 1)]
        for sequence_id in ids:
            self._batch.reservations.reserve(
                ReserveKv(
                    sequence_id=sequence_id,
                    epoch="first light",
                    slices=tuple(KvSlice(r, cuts[r], cuts[r + 1]) for r in range(ranks)),
                    master=sequence_id % ranks,
                    prompt_tokens=context,
                    output_tokens=steps,
                    sampler=encode(
                        SamplerInputs(sampling=Sampling(temperature=0.0, max_tokens=steps))
                    ),
                ),
                owner=0,
            )
        times = []
        joined = tuple((sequence_id, 5) for sequence_id in ids)
        self._batch.change(Change(0, self._version + 1, joined=joined))
        for _ in range(steps - 1):
            begin = time.perf_counter()
            self._batch.iterate()
            clock.settle()
            times.append(time.perf_counter() - begin)
        self._batch.change(Change(0, self._version + 2, left=tuple(ids)))
        self._version += 2
        return statistics.median(times[WARM_UP:])


def models(sizes: Sizes, clock: Clock, report: Report, roof: dict[str, float]) -> None:
    """Run random models of real shapes through engine and pool."""
    for name in sizes.models:
        with report.trying("models", name, 60.0) as in_time:
            if in_time:
                _one_model(name, sizes, clock, report, roof)
        _give_back(sizes)


def _one_model(
    name: str, sizes: Sizes, clock: Clock, report: Report, roof: dict[str, float]
) -> None:
    import torch
    from torch._C._distributed_c10d import HashStore

    network = random_network(name, sizes)
    most = max(*sizes.prompts, *(b * (c + sizes.iterations + 8) for b, c in sizes.decoding))
    mesh = mesh_of(HashStore(), sizes)
    try:
        engine = engine_of(network, sizes, most + 64, mesh)
        needed_s = 10.0
        for tokens in sizes.prompts:
            what = f"{name}: prompt of {tokens}"
            with report.trying("models", what, needed_s) as in_time:
                if in_time:
                    spent_s = clock.seconds(partial(prefill, engine, tokens), rounds=2)
                    needed_s = 10.0 + 3 * 16 * spent_s  # three runs of one four times as long
                    tflops = prefill_flops(network, tokens) / spent_s / 1e12
                    share = tflops / roof["tflops"]
                    report.add("models", what, ms=1e3 * spent_s, tflops=tflops, share=share)
        decoding = Decoding(engine)
        weights = sum(weight.nbytes for layer in network.layers for weight in layer.weights)
        weights += network.head_vd.nbytes
        for batch, context in sizes.decoding:
            what = f"{name}: batch {batch} behind {context}"
            with report.trying("models", what, 15.0) as in_time:
                if in_time:
                    spent_s = decoding.seconds(batch, context, sizes.iterations, clock)
                    spec, item = network.spec, engine.pool.k.element_size()
                    kv = 2 * spec.layers * spec.kv_heads * spec.head_dim * item * batch * context
                    gb_s = (weights + kv) / spent_s / 1e9
                    share = gb_s / roof["read_gb_s"]
                    report.add("models", what, ms=1e3 * spent_s, gb_s=gb_s, share=share)
        if sizes.device == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            report.add("models", f"{name}: peak memory", gib=peak)
    finally:
        mesh.close()


def _give_back(sizes: Sizes) -> None:
    import gc

    import torch

    gc.collect()
    if sizes.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --- two ranks on one device ----------------------------------------------------------------------


class HostStaged:
    """A process group over gloo for tensors of a device, which pass through the host's memory.

    Each call ends before it returns, which is the strictest reading of NCCL's order.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._open: list[tuple[Any, Any, Any]] | None = None

    def send(self, tensors: list[Any], peer: int, tag: int) -> Any:
        """Send, or add a send to the open group."""
        on_host = tensors[0].cpu()
        return self._add(lambda: (self._inner.send([on_host], peer, 0), None, on_host))

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Any:
        """Receive, or add a receive to the open group."""
        import torch

        on_host = torch.empty_like(tensors[0], device="cpu")
        return self._add(lambda: (self._inner.recv([on_host], peer, 0), tensors[0], on_host))

    def allreduce(self, tensors: list[Any]) -> Any:
        """Sum over all ranks."""
        on_host = tensors[0].cpu()
        return self._add(lambda: (self._inner.allreduce([on_host]), tensors[0], on_host))

    def eager_connect_single_device(self, device: Any) -> None:
        """Do nothing: gloo has connected all ranks."""

    def abort(self) -> None:
        """Do nothing: no call is under way."""

    def _start_coalescing(self) -> None:
        self._open = []

    def _end_coalescing(self) -> Any:
        begun, self._open = self._open or [], None
        return self._finish(begun)

    def _add(self, begin: Callable[[], tuple[Any, Any, Any]]) -> Any:
        if self._open is None:
            return self._finish([begin()])
        self._open.append(begin())
        return self

    def _finish(self, begun: list[tuple[Any, Any, Any]]) -> Any:
        for work, _, _ in begun:
            work.wait(timedelta(seconds=JOIN_S))
        for _, tensor, on_host in begun:
            if tensor is not None:
                tensor.copy_(on_host)
        return self

    def wait(self, *_: Any) -> bool:
        """Return at once: the call has ended."""
        return True


def host_staged(store: Any, rank: int, size: int, host: str) -> Any:
    """Make a `HostStaged` group."""
    from csps.actors.comm.process_group import gloo_group

    return HostStaged(gloo_group(store, rank, size, host))


def serve_rank(pipe: Connection, rank: int, port: int, secret: bytes, sizes: Sizes) -> None:
    """Compute a prompt and decode as one of two ranks; send figures."""
    try:
        pipe.send(_ranks_figures(rank, port, secret, sizes))
    except Exception as error:
        traceback.print_exc()
        pipe.send(repr(error))


def _ranks_figures(rank: int, port: int, secret: bytes, sizes: Sizes) -> dict[str, float]:
    import torch

    from csps.actors.comm.rendezvous import StoreAddress, join_store
    from csps.kernels.attention import attention

    clock, figures = Clock(sizes.device), {}
    store = join_store(StoreAddress("127.0.0.1", port), secret)
    mesh = mesh_of(store, sizes, rank, RANKS, host_staged)
    try:
        with torch.inference_mode():
            network, tokens = random_network(sizes.models[0], sizes), sizes.together
            batch, context = sizes.decoding[-1]
            slots = max(tokens, batch * (context + sizes.iterations + 8)) + 64
            engine = engine_of(network, sizes, slots, mesh, RANKS)
            # Alone, with one call of the kernel for each layer.
            x_td = network.embed(prompt_of(tokens, network.spec.vocab, engine.device))
            rotary = network.rotary(torch.arange(tokens, device=engine.device))
            positions = range(tokens)
            for layer in network.layers:
                q, k, v = layer.qkv(x_td, rotary)
                out, _ = attention(q, k, v, q_positions=positions, k_positions=positions)
                x_td = layer.finish(x_td, out.to(x_td.dtype))
            own = slice(tokens * rank // RANKS, tokens * (rank + 1) // RANKS)
            for strategy in ("ulysses", "ring_kv", "ring_q"):
                found_td = prefill(engine, tokens, RANKS, strategy)
                size = float(x_td[own].double().abs().max())
                figures[f"{strategy}: error"] = _largest(found_td, x_td[own]) / size
                work = partial(prefill, engine, tokens, RANKS, strategy)
                figures[f"{strategy}: ms"] = 1e3 * clock.seconds(work, rounds=2)
            spent_s = Decoding(engine, RANKS).seconds(batch, context, sizes.iterations, clock)
            figures[f"batch {batch} behind {context}: ms"] = 1e3 * spent_s
    finally:
        mesh.close()
        store.close()
    return figures


def two_ranks(sizes: Sizes, report: Report) -> None:
    """Run a gang of two processes on the one device."""
    from csps.actors.comm.rendezvous import host_store

    secret = secrets.token_bytes(32)
    hosted = host_store("127.0.0.1", secret)
    spawn = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    try:
        for rank in range(RANKS):
            ours, theirs = spawn.Pipe()
            arguments = (theirs, rank, hosted.address.port, secret, sizes)
            process = spawn.Process(target=serve_rank, args=arguments, daemon=True)
            process.start()
            processes.append(process)
            pipes.append(ours)
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(min(JOIN_S, report.left_s)):
                raise TimeoutError(f"rank {rank} has no figures yet")
            figures = pipe.recv()
            if isinstance(figures, str):
                raise RuntimeError(figures)
            report.add("two ranks", f"rank {rank}", **figures)
    finally:
        for process in processes:
            process.kill()
            process.join(10.0)
        hosted.close()


def install(wheels: Path | None) -> None:
    """Make csps importable, and what it needs from a folder of wheels.

    Raises:
        SystemExit: something is missing.
    """
    sys.path[:0] = [str(ROOT / "src")]
    missing = [wheel for module, wheel in NEEDED.items() if not _importable(module)]
    if not missing:
        return
    if wheels is None:
        sys.exit(f"{', '.join(missing)} cannot be imported: install them, or give --wheels DIR")
    folder = tempfile.mkdtemp(prefix="first-light-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    found = [str(path) for path in sorted(wheels.glob("*.whl"))]
    subprocess.run([*pip, "--target", folder, *found], check=True)
    # Behind what is installed: torch and numpy stay those of the machine.
    sys.path.append(folder)
    importlib.invalidate_caches()


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure everything, print it and return it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--minutes", type=float, default=8.5, help="time limit (8.5)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels for what is not installed")
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    args = parser.parse_args(arguments)
    install(args.wheels)
    import report as output
    import torch

    sizes, report = TINY if args.tiny else FULL, Report(args.minutes)
    clock = Clock(sizes.device)
    whole: dict[str, Any] = {"benchmark": "first_light", "sizes": "tiny" if args.tiny else "full"}
    if sizes.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        whole["device"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    roof = {"read_gb_s": float("nan"), "tflops": float("nan")}
    with torch.inference_mode():
        with report.trying("roofline", "bandwidth and products", 10.0):
            roof = roofline(sizes, clock)
            report.add("roofline", "bandwidth and products", **roof)
        kernels(sizes, clock, report)
        _give_back(sizes)
        with report.trying("two ranks", sizes.models[0], 60.0) as in_time:
            if in_time:
                two_ranks(sizes, report)
        models(sizes, clock, report, roof)
    failed = [row["what"] for row in report.rows if "error" in row]
    skipped = [row["what"] for row in report.rows if "skipped" in row]
    whole |= {"roofline": roof, "failed": failed, "skipped": skipped, "rows": report.rows}
    whole["machine"] = output.machine()
    if args.json is not None:
        args.json.write_text(json.dumps(whole, indent=2) + "\n")
    print(json.dumps({**whole, "rows": len(report.rows)}))
    return whole


if __name__ == "__main__":
    main()
