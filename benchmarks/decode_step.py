"""Time of a decode iteration, by context and batch, over the ranks of a decode gang.

    python benchmarks/decode_step.py [--ranks 2] [--context 16384] [--batch 1] [--steps 60]
    python benchmarks/decode_step.py --ranks 1 --context 512,8192,16384 --attention flash,compiled
    python benchmarks/decode_step.py --transformers --context 16384

Ranks are processes with a torch thread each, as deployed. There is no router, no HTTP and no
prefill: the prompts' KV is synthetic and written into the pools, each prompt is cut evenly over the
ranks, and masters take turns. The output has milliseconds between two tokens of the same request
(median, least, 90th percentile), each rank's processor time, and the part of it in attention to
resident KV. `--attention` names what computes it, compiled code or torch's flash kernel; several
take turns on each context and batch. `--transformers` measures generate()'s loop on the same
checkpoint in one process with one thread. Several contexts and batches may be given, separated by
commas.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

MODEL = Path(__file__).parent.parent / "models" / "needle"
FIRST_TOKEN = 5


def shares_of_prompt(context: int, ranks: int) -> list[tuple[int, int]]:
    """Return the span of the prompt on each rank."""
    return [(r * context // ranks, (r + 1) * context // ranks) for r in range(ranks)]


def serve_rank(pipe: Connection, rank: int, args: dict[str, Any]) -> None:
    """Run a decode rank that takes (attention, ids, context, steps) and answers with iteration
    times.
    """
    from csps.actors.attention.base.engine import Engine
    from csps.actors.comm.layout import GangLayout
    from csps.actors.comm.mesh import Mesh
    from csps.actors.comm.rendezvous import StoreAddress, join_store
    from csps.actors.engine.decode_batch import DecodeBatch
    from csps.actors.kv_cache.kv_pool import KvPool
    from csps.kernels import cpu_attention, cpu_decode, cpu_product
    from csps.models.checkpoints.loading import load_network
    from csps.protocols.sequencer.log_entries import Change

    torch.set_num_threads(1)
    ranks, slots = args["ranks"], args["slots"]
    dtype = getattr(torch, args["dtype"])
    network = load_network(args["model"], dtype=dtype, device="cpu")
    spec = network.spec
    assert cpu_decode.prepare(
        heads=spec.heads, kv_heads=spec.kv_heads, dim=spec.head_dim, dtype=dtype
    )
    cpu_product.prepare(dtype)
    paths = {
        "compiled": cpu_attention.decode_attention,
        "flash": cpu_attention.decode_by_flash,
    }
    attending_s = 0.0
    pool = KvPool(
        layers=spec.layers,
        slots=slots,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device="cpu",
    )
    mesh = Mesh(
        join_store(StoreAddress("127.0.0.1", args["port"]), args["secret"]),
        name="benchmark",
        rank=rank,
        world_size=ranks,
        device="cpu",
        host="127.0.0.1",
    )
    engine = Engine(
        network=network,
        pool=pool,
        mesh=mesh,
        layout=GangLayout(world_size=ranks, tp=1),
        device=torch.device("cpu"),
    )
    stamps: list[float] = []

    def notify(method: str, message: Any) -> None:
        if method == "tokens":
            stamps.append(time.perf_counter())

    stream, version = DecodeBatch(engine, notify, free_sequence=pool.slots.free_sequence), 0
    pipe.send("ready")
    while (order := pipe.recv()) is not None:
        attention, sequence_ids, context, steps = order

        def attend(*call: Any, path: Any = paths[attention]) -> Any:
            nonlocal attending_s
            begun = time.thread_time()
            found = path(*call)
            attending_s += time.thread_time() - begun
            return found

        cpu_attention.decode_attention = attend
        for sequence_id in sequence_ids:
            _reserve(stream, sequence_id, context, steps, ranks)
            _fill(pool, sequence_id, context, rank, ranks)
        pipe.send("reserved")
        pipe.recv()
        stamps.clear()
        begun, attending_s = time.process_time(), 0.0
        rows = tuple((sequence_id, FIRST_TOKEN) for sequence_id in sequence_ids)
        with torch.inference_mode():
            stream.change(Change(0, version + 1, joined=rows))
            for _ in range(steps - 1):
                stream.iterate()
            stream.change(Change(0, version + 2, left=tuple(sequence_ids)))
        version += 2
        cpu_s = (time.process_time() - begun) / (steps - 1)
        pipe.send((list(stamps), cpu_s, attending_s / (steps - 1)))


def _reserve(stream: Any, sequence_id: int, context: int, steps: int, ranks: int) -> None:
    from csps.protocols.core.placement import KvSlice
    from csps.protocols.gang.messages import ReserveKv, SamplerInputs, Sampling
    from csps.protocols.rpc.schema import encode

    spans = enumerate(shares_of_prompt(context, ranks))
    stream.reservations.reserve(
        ReserveKv(
            sequence_id=sequence_id,
            epoch="e",
            slices=tuple(KvSlice(r, start, stop) for r, (start, stop) in spans),
            master=sequence_id % ranks,
            prompt_tokens=context,
            output_tokens=steps,
            sampler=encode(SamplerInputs(sampling=Sampling(temperature=0.0, max_tokens=steps))),
        ),
        owner=0,
    )


def _fill(pool: Any, sequence_id: int, context: int, rank: int, ranks: int) -> None:
    from csps.protocols.core.placement import Span

    start, stop = shares_of_prompt(context, ranks)[rank]
    k_thd, v_thd = torch.randn(2, stop - start, pool.kv_heads, pool.head_dim)
    for layer in range(len(pool.k)):
        pool.write(layer, sequence_id, Span(start=start, stop=stop), k_thd, v_thd)


Measured = tuple[str, int, int, list[float], list[float], list[float]]
"""What attends, context, batch, gaps in seconds, and processor seconds of an iteration on each
rank: all of them, and those of attention to resident KV."""


def measured(args: argparse.Namespace) -> Iterator[Measured]:
    """Measure a gang."""
    from csps.actors.comm.rendezvous import host_store

    secret = secrets.token_bytes(32)
    store = host_store("127.0.0.1", secret)
    most = max(c * b for c in args.context for b in args.batch)
    slots = most // args.ranks + max(args.batch) * (args.steps + 8) + 64
    spawn = multiprocessing.get_context("spawn")
    options = {
        "ranks": args.ranks,
        "slots": slots,
        "port": store.address.port,
        "secret": secret,
        "model": Path(args.model),
        "dtype": args.dtype,
    }
    pipes = []
    for rank in range(args.ranks):
        ours, theirs = spawn.Pipe()
        spawn.Process(target=serve_rank, args=(theirs, rank, options), daemon=True).start()
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    next_rid = args.ranks
    for context, batch, attention in itertools.product(args.context, args.batch, args.attention):
        sequence_ids = list(range(next_rid, next_rid + batch))
        next_rid += batch + -batch % args.ranks
        for pipe in pipes:
            pipe.send((attention, sequence_ids, context, args.steps))
        for pipe in pipes:
            assert pipe.recv() == "reserved"
        for pipe in pipes:
            pipe.send("go")
        answers = [pipe.recv() for pipe in pipes]
        stamps = answers[0][0]
        gaps = [b - a for a, b in itertools.pairwise(stamps[4:])]
        cpu, attending = ([answer[i] for answer in answers] for i in (1, 2))
        yield attention, context, batch, gaps, cpu, attending
    for pipe in pipes:
        pipe.send(None)


def transformers_gaps(args: argparse.Namespace) -> Iterator[Measured]:
    """Measure the loop of `generate`, one token at a time over a cache of random keys and
    values.
    """
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = model.config
    for context in args.context:
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            shape = (1, config.num_key_value_heads, context, config.head_dim)
            cache.update(torch.randn(shape), torch.randn(shape), layer)
        stamps: list[float] = []

        class Clock:
            def put(self, _: Any, stamps: list[float] = stamps) -> None:
                stamps.append(time.perf_counter())

            def end(self) -> None: ...

        begun = time.process_time()
        with torch.inference_mode():
            model.generate(
                torch.full((1, context + 1), 5),
                past_key_values=cache,
                max_new_tokens=args.steps,
                min_new_tokens=args.steps,
                do_sample=False,
                streamer=Clock(),
            )
        cpu_s = (time.process_time() - begun) / args.steps
        gaps = [b - a for a, b in itertools.pairwise(stamps[4:])]
        yield "generate", context, 1, gaps, [cpu_s], []


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _milliseconds(seconds: list[float]) -> str:
    return ", ".join(f"{1e3 * second:.2f}" for second in seconds)


def main() -> None:
    """Print a line for each context and batch."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--context", type=_numbers, default=[16384])
    parser.add_argument("--batch", type=_numbers, default=[1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--attention", type=lambda text: text.split(","), default=["compiled"])
    parser.add_argument("--transformers", action="store_true")
    args = parser.parse_args()
    measure = transformers_gaps if args.transformers else measured
    for attention, context, batch, gaps, cpu, attending in measure(args):
        gaps_ms = sorted(1e3 * gap for gap in gaps)
        print(
            f"{attention:8} context {context:6d} batch {batch:3d}"
            f"  median {statistics.median(gaps_ms):7.2f}  least {gaps_ms[0]:7.2f}"
            f"  p90 {gaps_ms[len(gaps_ms) * 9 // 10]:7.2f}  cpu {_milliseconds(cpu)}"
            f"  attention {_milliseconds(attending)}  load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
