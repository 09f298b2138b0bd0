"""Cost of sending a prompt's KV from one rank to another, with and without checksums.

    python benchmarks/kv_transfer.py [--tokens 16384] [--layers 8] [--kv-heads 8] [--head-dim 64]
        [--in-flight-mib 32] [--rounds 10]

Both ends are threads of this process with a loopback connection between them. For each share of
messages with a checksum the output has: seconds from posting the first layer to receiving the last
one, processor seconds of the whole process, and bytes a second. These are medians over rounds in
which the shares take turns. Torch uses one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore

from csps.actors.comm.layout import LocalChunk
from csps.actors.kv_cache.kv_pool import KvPool
from csps.actors.kv_transfer.connection import KvConnection
from csps.actors.kv_transfer.receiver import KvReceiver
from csps.actors.kv_transfer.reservation import Reservation
from csps.actors.kv_transfer.sender import KvSender
from csps.actors.kv_transfer.transfer_tracker import TransferTracker
from csps.models.network.spec import ModelSpec, read_spec
from csps.protocols.core.placement import KvSlice, Span
from csps.protocols.gang.messages import ConnectKv, ReserveKv
from csps.protocols.gang.step_messages import PrefillChunk
from csps.services.settings.settings import shipped_models

SHARES = (0.0, 0.1, 1.0)
"""Shares of messages with a checksum."""
SEQUENCE_ID, EPOCH = 1, "benchmark"
WAIT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Round:
    """Figures of one prompt's transfer."""

    wall_s: float
    processor_s: float


class Pair:
    """A prefill and a decode rank that consist of their pools."""

    def __init__(self, spec: ModelSpec, tokens: int, *, checked: float, in_flight: int) -> None:
        self.spec, self.span = spec, Span(start=0, stop=tokens)
        self.pools = [pool_of(spec, tokens) for _ in range(2)]
        self.ends = connect()
        self.reports: SimpleQueue[Any] = SimpleQueue()
        self.reservations: dict[int, Reservation] = {}
        self.sender = KvSender(
            self.ends[0],
            self.pools[0],
            spec,
            rank=0,
            in_flight_bytes=in_flight,
            checked=checked,
            on_lost=self.reports.put,
            on_broken=self.reports.put,
        )
        self.receiver = KvReceiver(
            self.ends[1],
            self.pools[1],
            rank=0,
            in_flight_bytes=in_flight,
            backends=1,
            find=self.reservations.get,
            on_received=lambda _: self.reports.put(None),
            on_failed=self.reports.put,
            on_lost=self.reports.put,
            on_broken=self.reports.put,
        )

    def prepare(self) -> None:
        """Prepare a prompt: computed on one side, expected on the other."""
        for pool in self.pools:
            pool.slots.free_sequence(SEQUENCE_ID)
            pool.slots.allocate(SEQUENCE_ID, [self.span])
        for layer in range(self.spec.layers):
            shape = (self.span.length, self.spec.kv_heads, self.spec.head_dim)
            self.pools[0].write(
                layer, SEQUENCE_ID, self.span, torch.randn(shape), torch.randn(shape)
            )
        self.reservations[SEQUENCE_ID] = Reservation(
            request=ReserveKv(
                sequence_id=SEQUENCE_ID,
                epoch=EPOCH,
                slices=self.slices,
                master=0,
                prompt_tokens=self.span.length,
                output_tokens=16,
            ),
            spans=(self.span,),
            heads=range(self.spec.kv_heads),
            layers=self.spec.layers,
            owner="",
        )

    @property
    def slices(self) -> tuple[KvSlice, ...]:
        return (KvSlice.of(0, self.span),)

    def send(self) -> Round:
        """Send all layers and wait until they are received."""
        chunk = PrefillChunk(
            sequence_id=SEQUENCE_ID, start=0, length=self.span.length, destinations=self.slices
        )
        part = LocalChunk(chunk, self.span, slice(0, self.span.length))
        tracker = TransferTracker(self.pools[0].slots, self.reports.put)
        wall, processor = time.perf_counter(), time.process_time()
        for layer in range(self.spec.layers):
            self.sender.post(tracker, layer, part)
        self.sender.finish(tracker)
        tracker.finish()
        for _ in range(2):  # received there, and acknowledged here
            if (failure := self.reports.get(timeout=WAIT_S)) is not None:
                raise RuntimeError(failure)
        return Round(wall_s=time.perf_counter() - wall, processor_s=time.process_time() - processor)

    def close(self) -> None:
        """Close the connections."""
        self.sender.close()
        self.receiver.close()


def pool_of(spec: ModelSpec, tokens: int) -> KvPool:
    """Return a pool for one prompt."""
    return KvPool(
        layers=spec.layers,
        slots=tokens,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        device="cpu",
    )


def connect() -> list[KvConnection]:
    """Connect both ends."""
    store = HashStore()
    message = ConnectKv(
        epoch=EPOCH,
        store_host="",
        store_port=0,
        prefill_ranks=1,
        decode_ranks=1,
        prefill_tp=1,
        decode_tp=1,
    )
    with ThreadPoolExecutor(2) as threads:
        make = [
            threads.submit(
                KvConnection, store, message, rank=0, is_decode=is_decode, host="127.0.0.1"
            )
            for is_decode in (False, True)
        ]
        return [future.result() for future in make]


@contextmanager
def pairs(args: argparse.Namespace) -> Iterator[dict[float, Pair]]:
    """Yield a pair for each share."""
    spec = replace(
        read_spec(shipped_models() / "needle"),
        layers=args.layers,
        heads=args.kv_heads,
        kv_heads=args.kv_heads,
        head_dim=args.head_dim,
    )
    in_flight = args.in_flight_mib * 2**20
    made = {share: Pair(spec, args.tokens, checked=share, in_flight=in_flight) for share in SHARES}
    try:
        yield made
    finally:
        for pair in made.values():
            pair.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--in-flight-mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds: dict[float, list[Round]] = defaultdict(list)
    with pairs(args) as made:
        for _ in range(args.rounds + 1):
            for share, pair in made.items():
                pair.prepare()
                rounds[share].append(pair.send())
        sent = 2 * 4 * args.tokens * args.layers * args.kv_heads * args.head_dim
    print(f"{sent / 1e6:.0f} MB of KV")
    print(f"{'checked':>8} {'seconds':>9} {'processor':>10} {'GB/s':>6}")
    for share, taken in rounds.items():
        wall_s = statistics.median(sample.wall_s for sample in taken[1:])
        processor_s = statistics.median(sample.processor_s for sample in taken[1:])
        print(f"{share:8.1f} {wall_s:9.3f} {processor_s:10.3f} {sent / wall_s / 1e9:6.2f}")


if __name__ == "__main__":
    main()
