"""Cost and gain of elasticity on one elastic gang of real ranks, without a router.

    python benchmarks/elastic.py [--instances 4] [--lengths 2048 8192] [--json FILE]

- *scale-down*: a prompt that all instances compute in a ring. Its KV stays where it was computed,
  or one instance holds all of it, in turns. The extra time of the second is the cost (proactive,
  LoongServe §4.1), in layers that circulate and in the last one, which does not. Beside it are the
  ranks' figures: storing circulating KV, moving and awaiting KV in the last layer, extra time
  waiting for one another, delay of the first token, and extra processor time over all pairs. Also
  the same prompt moved to one instance afterwards, while it decodes (reactive)
- *preemption*: time between the tokens of a sequence that decodes on one instance, alone and beside
  a prompt that all instances compute
- *decoding*: an iteration of batches on one instance; the same after scaling up, so that two
  instances sample and hold the answers and no prompt has moved; and batches whose prompts lie on
  two instances by halves, with one master and with two. The share of the time of query exchanges
  in which the asking rank computed (hidden), as in spans `decode.rank`
- *Eq. 7*: LoongServe's time of a prefill iteration, fitted to some steps of one, two and all
  instances and compared with others

Figures are medians of `--rounds`, for scale-down of `--pairs`. Ranks have one thread each, whatever
the number of cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import report

from csps.actors.worker.rank_config import RankConfig
from csps.configurator.costs.fitting import StepMeasurement, fit_step
from csps.protocols.core.placement import KvSlice, place, striped
from csps.protocols.gang.client import GangClient
from csps.protocols.gang.messages import (
    CancelSequence,
    JoinBatch,
    PrefillDone,
    RankKvReceived,
    RequestFailed,
    ReserveKv,
    SampledTokens,
    SamplerInputs,
    Sampling,
    SlotsFreed,
)
from csps.protocols.gang.step_messages import (
    MoveSequence,
    PrefillChunk,
    PrefillStep,
    SequenceMoved,
    SequencePlacement,
)
from csps.protocols.rpc.schema import encode, pack, unpack
from csps.services.profiling.local_gangs import RankProcesses

MODEL = Path(__file__).parent.parent / "models" / "needle"
CALL_S, WAIT_S = 60.0, 300.0
Row = dict[str, Any]
ANSWER = 3000
"""Token limit that sequences do not reach."""


def main() -> None:
    """Print a table and the figures."""
    parser = report.with_json_option(argparse.ArgumentParser(description=__doc__.split("\n")[0]))
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument(
        "--batches",
        type=_batch,
        nargs="+",
        default=[(1, 1024), (8, 1024), (32, 1024), (4, 16384)],
        metavar="ROWSxCONTEXT",
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=100, help="of each batch")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    downs, others = asyncio.run(_measure(args))
    for rows in others.values():
        report.print_table(rows)
    figures = {"instances": args.instances, "rounds": args.rounds, "pairs": args.pairs}
    report.publish({"benchmark": "elastic", **figures, **others}, downs, args.json)


def _batch(text: str) -> tuple[int, int]:
    rows, _, context = text.partition("x")
    return int(rows), int(context)


async def _measure(args: argparse.Namespace) -> tuple[list[Row], dict[str, list[Row]]]:
    """Return the cost of scaling down, and all other measurements by name."""
    async with _gang(args.instances) as gang:
        await gang.prefill(512, gang.everyone, [0])  # warms up
        downs = [await _scale_down(gang, length, args) for length in args.lengths]
        return downs, {
            "preemption": [await _preemption(gang, max(args.lengths), args.iterations)],
            "decoding": [await _decoding(gang, batch, args) for batch in args.batches],
            "equation_7": [
                row
                for count in sorted({1, 2, args.instances})
                for row in await _equation_7(gang, gang.everyone[:count], args)
            ],
        }


async def _scale_down(gang: _Gang, length: int, args: argparse.Namespace) -> Row:
    found = defaultdict(list)
    processor_s = {"kept": 0.0, "down": 0.0}
    await gang.prefill(length, gang.everyone, [0])  # the pool's memory is used for the first time
    for _ in range(args.pairs):
        began = _processor_s()
        kept = await gang.prefill(length, gang.everyone, gang.everyone)
        between, first_token_s = _processor_s(), gang.first_token_s
        down = await gang.prefill(length, gang.everyone, [0])
        found["first_token_share"].append(gang.first_token_s / first_token_s - 1)
        processor_s["kept"] += between - began
        processor_s["down"] += _processor_s() - between
        for name, figure in _compared(kept, down).items():
            found[name].append(figure)
    for _ in range(args.rounds):
        sequence_id, done = await gang.decode(length, gang.everyone, gang.everyone)
        moved = await gang.move(sequence_id, length, gang.everyone, [0])
        await gang.cancel([sequence_id])
        found["migrate_share"].append(max(move.seconds for move in moved) / _seconds(done))
        found["migrate_bytes"].append(sum(move.sent_bytes for move in moved))
    longer = processor_s["down"] / processor_s["kept"] - 1
    return {"tokens": length, **_medians(found), "processor_share": longer}


def _processor_s() -> float:
    """Return the processor time of all ranks."""
    ranks = psutil.Process().children()
    return float(sum(sum(rank.cpu_times()[:2]) for rank in ranks))


async def _preemption(gang: _Gang, length: int, tokens: int) -> Row:
    sequence_id, _ = await gang.decode(1024, [0], [0])
    await gang.until(lambda: len(gang.stamps[sequence_id]) > tokens)
    alone = _gaps(gang.stamps[sequence_id])
    begun = len(gang.stamps[sequence_id])
    done = await gang.prefill(length, gang.everyone, [1 % len(gang.everyone)])
    beside = _gaps(gang.stamps[sequence_id][begun - 1 :])
    await gang.cancel([sequence_id])
    return {
        "tokens": length,
        "prefill_s": _seconds(done),
        "alone_p50_ms": 1e3 * statistics.median(alone),
        "beside_p50_ms": 1e3 * statistics.median(beside),
        "beside_max_ms": 1e3 * max(beside),
        "beside_tokens": len(beside),
    }


async def _decoding(gang: _Gang, batch: tuple[int, int], args: argparse.Namespace) -> Row:
    count, context = batch
    ways: dict[str, list[tuple[list[int], int, int]]] = {
        "one_ms": [([0], 0, 0)] * count,
        "scaled_up_ms": [([0], n % 2, n % 2) for n in range(count)],
        "halves_one_master_ms": [([0, 1], 0, n % 2) for n in range(count)],
        "halves_two_masters_ms": [([0, 1], n % 2, n % 2) for n in range(count)],
    }
    found: dict[str, list[float]] = defaultdict(list)
    hidden: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for way, rows in ways.items():
            milliseconds, share = await _iteration(gang, context, args.iterations, rows)
            found[way].append(milliseconds)
            hidden[way] += [share] if share is not None else []
    medians = _medians(found)
    others = {way.removesuffix("_ms"): way for way in ways if way != "one_ms"}
    gains = {f"{name}_gain": medians["one_ms"] / medians[way] for name, way in others.items()}
    slices = {
        f"{name}_hidden": statistics.median(hidden[way]) if hidden[way] else None
        for name, way in others.items()
    }
    return {"rows": count, "context": context, **medians, **gains, **slices}


async def _iteration(
    gang: _Gang, context: int, iterations: int, rows: Sequence[tuple[list[int], int, int]]
) -> tuple[float, float | None]:
    """Return milliseconds of an iteration, and the share of query exchanges hidden by computing.

    The share is None without exchanges. Each sequence has holders of its prompt, a master and a KV
    holder of its answer.
    """
    numbers = [
        (await gang.decode(context, holders, holders, master=master, answer_holder=answer_holder))[
            0
        ]
        for holders, master, answer_holder in rows
    ]
    before = await gang.client.stats()
    await gang.until(lambda: len(gang.stamps[numbers[-1]]) > iterations)
    after = await gang.client.stats()
    await gang.cancel(numbers)
    counted = after[0].iterations - before[0].iterations
    milliseconds = 1e3 * (after[0].iterating_s - before[0].iterating_s) / counted
    exchanged, awaited = (
        sum(getattr(counters, name) for counters in after)
        - sum(getattr(counters, name) for counters in before)
        for name in ("exchange_s", "communication_s")
    )
    return milliseconds, 1 - awaited / exchanged if exchanged else None


async def _equation_7(gang: _Gang, group: list[int], args: argparse.Namespace) -> list[Row]:
    """Fit Eq. 7 to lengths of one group; every other length is held out."""
    longest = max(args.lengths)
    lengths = [longest * part // 16 for part in (1, 2, 3, 4, 6, 8, 10, 12, 16)]
    seconds = {
        length: statistics.median(
            [_seconds(await gang.prefill(length, group, [0])) for _ in range(args.rounds)]
        )
        for length in lengths
    }
    fitted = fit_step(
        [StepMeasurement(chunks=((tokens, 0),), seconds=seconds[tokens]) for tokens in lengths[::2]]
    )
    return [
        {
            "instances": len(group),
            "held_out_tokens": tokens,
            "measured_s": seconds[tokens],
            "predicted_s": fitted.predict_ns(tokens) / 1e9,
            "error": fitted.predict_ns(tokens) / 1e9 / seconds[tokens] - 1,
        }
        for tokens in lengths[1::2]
    ]


def _compared(kept: Sequence[PrefillDone], down: Sequence[PrefillDone]) -> dict[str, float]:
    """Return the extra time of scaling down; shares are of the prefill without it."""
    whole = _seconds(kept)

    def longer(seconds: Callable[[Sequence[PrefillDone]], float]) -> float:
        return (seconds(down) - seconds(kept)) / whole

    return {
        "prefill_s": whole,
        "scale_down_share": longer(_seconds),
        "circulating_share": longer(_circulating),
        "last_layer_share": longer(lambda done: _seconds(done) - _circulating(done)),
        "stored_share": max(measure.placing_stored_s for measure in down) / whole,
        "last_moved_share": max(measure.placing_s - measure.placing_stored_s for measure in down)
        / whole,
        "last_awaited_share": max(measure.placing_waited_s for measure in down) / whole,
        "awaited_share": longer(
            lambda done: statistics.mean(measure.communication_s for measure in done)
        ),
        "scale_down_bytes": sum(measure.placed_bytes for measure in down),
    }


def _circulating(done: Iterable[PrefillDone]) -> float:
    """Return the time until the last member comes to the last layer."""
    return max(
        measure.compute_s + measure.communication_s - measure.last_layer_s for measure in done
    )


def _seconds(done: Iterable[PrefillDone]) -> float:
    return max(measure.compute_s + measure.communication_s for measure in done)


def _gaps(stamps: Sequence[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(stamps)]


def _medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


class _Gang:
    """Commands the ranks like a router."""

    def __init__(self, instances: int) -> None:
        self.client: GangClient
        self.everyone = list(range(instances))
        self.stamps: dict[int, list[float]] = defaultdict(list)
        """Times of each sequence's tokens."""
        self.first_token_s = 0.0
        """Time to the first token of the last `prefill`, from its reservation on."""
        self._tokens: dict[int, int] = {}
        self._messages: dict[tuple[str, int], list[Any]] = defaultdict(list)
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()

    def receive(self, _gang: GangClient, _rank: int, method: str, payload: Any) -> None:
        """Take a message of a rank."""
        now = time.perf_counter()
        match method:
            case "tokens":
                frame = unpack(SampledTokens, payload)
                for sequence_id, token in zip(frame.sequence_ids, frame.tokens, strict=True):
                    self.stamps[sequence_id].append(now)
                    self._tokens[sequence_id] = token
            case "prefill_done":
                self._note(method, (done := unpack(PrefillDone, payload)).step_id, done)
            case "received":
                self._note(
                    method, (received := unpack(RankKvReceived, payload)).sequence_id, received
                )
            case "moved":
                self._note(method, (moved := unpack(SequenceMoved, payload)).sequence_id, moved)
            case "freed":
                self._note(method, (freed := unpack(SlotsFreed, payload)).sequence_id, freed)
            case "failed":
                raise RuntimeError(unpack(RequestFailed, payload).message)
        self._news.set()

    def _note(self, method: str, number: int, message: Any) -> None:
        self._messages[method, number].append(message)

    async def until(self, condition: Any) -> None:
        """Wait until the ranks have reported something."""
        async with asyncio.timeout(WAIT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def _all(self, method: str, number: int, count: int) -> list[Any]:
        await self.until(lambda: len(self._messages[method, number]) >= count)
        return self._messages.pop((method, number))

    async def prefill(self, length: int, group: list[int], holders: list[int]) -> list[PrefillDone]:
        """Prefill a prompt, sample only its first token, and free it."""
        began = time.perf_counter()
        sequence_id, done = await self._prefill(length, group, _evenly(length, holders), 0, ())
        self.first_token_s = self.stamps[sequence_id][0] - began
        await self.cancel([sequence_id])
        return done

    async def decode(
        self,
        length: int,
        group: list[int],
        holders: list[int],
        *,
        master: int = 0,
        answer_holder: int = 0,
    ) -> tuple[int, list[PrefillDone]]:
        """Prefill a prompt and decode its answer from then on."""
        answer = (KvSlice(answer_holder, length, length + ANSWER),)
        slices = _evenly(length, holders)
        sequence_id, done = await self._prefill(length, group, slices, master, answer)
        await self._all("received", sequence_id, len({kv_slice.instance for kv_slice in slices}))
        join = JoinBatch(
            sequence_id=sequence_id,
            first_token=self._tokens[sequence_id],
            instances=tuple(sorted({*holders, master, answer_holder})),
        )
        self.client.notify(0, "join", pack(join))
        return sequence_id, done

    async def _prefill(
        self,
        length: int,
        group: list[int],
        slices: tuple[KvSlice, ...],
        master: int,
        answer: tuple[KvSlice, ...],
    ) -> tuple[int, list[PrefillDone]]:
        sequence_id, step = next(self._numbers), next(self._numbers)
        sampler = encode(SamplerInputs(sampling=Sampling(temperature=0, max_tokens=ANSWER)))
        reserve = ReserveKv(
            sequence_id=sequence_id,
            epoch="",
            slices=slices,
            master=master,
            prompt_tokens=length,
            output_tokens=ANSWER,
            sampler=sampler,
            answer=answer,
        )
        await self.client.call_all("reserve", pack(reserve))
        rows = place(group, striped(length, len(group)))
        chunk = PrefillChunk(
            sequence_id=sequence_id,
            start=0,
            length=length,
            rows=rows if len(group) > 1 else (),
            destinations=slices,
        )
        counts = [
            sum(kv_slice.span.length for kv_slice in rows if kv_slice.instance == member)
            for member in group
        ]
        prompt = np.random.default_rng(sequence_id).integers(200, 1000, length).astype("<i4")
        for rank in self.everyone:
            own = [
                prompt[list(kv_slice.span.positions)]
                for kv_slice in rows
                if kv_slice.instance == rank
            ]
            job = PrefillStep(
                step_id=step,
                group=tuple(group),
                bounds=tuple(itertools.accumulate(counts, initial=0)),
                chunks=(chunk,),
                tokens=b"".join(array.tobytes() for array in own),
                strategy="ring_kv" if len(group) > 1 else "ulysses",
                samplers={sequence_id: sampler},
            )
            self.client.notify(rank, "prefill", pack(job))
        return sequence_id, await self._all("prefill_done", step, len(group))

    async def move(
        self, sequence_id: int, length: int, before: list[int], after: list[int]
    ) -> list[SequenceMoved]:
        """Move a sequence's prompt KV elsewhere; its answer stays."""
        answer = (KvSlice(0, length, length + ANSWER),)
        places = [
            SequencePlacement(slices=_evenly(length, instances), master=0, answer=answer)
            for instances in (before, after)
        ]
        message = MoveSequence(
            step_id=next(self._numbers),
            sequence_id=sequence_id,
            prompt_tokens=length,
            stop=length + ANSWER - 1,
            before=places[0],
            after=places[1],
        )
        self.client.notify_all("move", pack(message))
        return await self._all("moved", sequence_id, len(message.instances))

    async def cancel(self, sequence_ids: Sequence[int]) -> None:
        """Cancel sequences and wait for their slots."""
        for sequence_id in sequence_ids:
            self.client.notify_all("cancel", pack(CancelSequence(sequence_id=sequence_id)))
        for sequence_id in sequence_ids:
            await self._all("freed", sequence_id, len(self.everyone))
            self.stamps.pop(sequence_id, None)


def _evenly(length: int, instances: Sequence[int]) -> tuple[KvSlice, ...]:
    return place(instances, striped(length, len(instances)))


@asynccontextmanager
async def _gang(instances: int) -> AsyncIterator[_Gang]:
    secret, processes, gang = secrets.token_hex(16).encode(), RankProcesses(), _Gang(instances)
    gang_id = f"elastic-{secrets.token_hex(4)}"
    configs = [
        RankConfig(
            model_dir=str(MODEL),
            role="elastic",
            rank=rank,
            world_size=instances,
            tp=1,
            gang_id=gang_id,
            kv_slots=160_000,
            location=f"0-0-{rank}",
        )
        for rank in range(instances)
    ]
    try:
        members = await processes.start(configs, secret)
        gang.client = GangClient("elastic", members, gang.receive, deadline_s=CALL_S)
        await gang.client.connect(secret=secret, router_id="elastic")
        await gang.client.attach(generation=1)
        yield gang
        await gang.client.close()
    finally:
        await processes.close()


if __name__ == "__main__":
    main()
