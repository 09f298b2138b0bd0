"""Tetris' chunks on growing groups: the share of balancing and KV transfer in the TTFT.

    python benchmarks/growing_groups.py [--tokens 16384] [--rounds 5] [--model needle|wide]
        [--strategy ring_kv] [--json FILE] [--image FILE]
    python benchmarks/growing_groups.py --smoke

Four prefill ranks and two decode ranks, processes with one torch thread each, compute a prompt in
three chunks: on one rank, on two, and on all four, its rows in zigzag. All chunks are sent at once.
In turns, history is balanced over each group before its chunk, layer by layer, or stays where it
was computed. Figures of each round:

`ttft_s`           from sending the first chunk to the first token
`balancing_waited` share of the TTFT for which a rank waited for history, the most of any rank
`balancing_hidden` share of the time in which history was under way that no rank waited for it
`transfer_after`   share of the TTFT that the KV transfer took after the first token

Figures are medians over the rounds. Each prefill rank needs a core: compare the load average in the
result. `--image` draws the last balanced round's timeline (needs matplotlib).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import growing_groups_picture
import numpy as np
import report
from checkpoints import checkpoint

from csps.actors.timing.timeline import BYTES, LAYER, PHASE, RANK, TRANSFERS
from csps.protocols.core.placement import KvSlice, outside, place, zigzag
from csps.protocols.gang.messages import RankKvReceived, SampledToken, Sampling
from csps.protocols.gang.step_messages import PrefillStep
from csps.services.scheduling.policies.tetris.policy import balancing_moves
from csps.services.telemetry.traces.spans import RecordedSpan, Trace, read_spans, span_files, traces

# The driver that stands in for the router belongs to the tests, which hold the engine to it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import gang_driver
from gang_driver import Cell, GangPlan, Request, prefill_step
from gang_processes import ProcessGang

gang_driver.ANSWER_S = 600.0
TRACED_RANK = Path(__file__).with_name("testbed") / "traced_rank.py"
GROUPS = ((0,), (0, 1), (0, 1, 2, 3))
DECODE = 2
TWO_TOKENS = Sampling(temperature=0, max_tokens=2)
"""Sampling of two tokens. The second one is decoded, so that KV is sent."""
BALANCING = "balancing"
SMOKE = ["--tokens", "1024", "--rounds", "1"]


@dataclass(frozen=True, kw_only=True)
class Round:
    """Result of one prompt."""

    trace_id: str
    balanced: bool
    ttft_s: float
    landed_s: float
    """Time from sending the first chunk until all KV was received."""
    token: int


def main() -> None:
    args = _arguments()
    os.environ.setdefault("CSPS_LOG", "CRITICAL")  # ranks that end call one another lost
    with checkpoint(args.model) as model, tempfile.TemporaryDirectory() as spans:
        rounds = asyncio.run(_measure(model, Path(spans), args))
        found = {trace.trace_id: trace for trace in traces(read_spans(span_files(Path(spans))))}
    rows = [
        _row(
            [(round_, found[round_.trace_id]) for round_ in rounds if round_.balanced == balanced],
            balanced,
        )
        for balanced in (True, False)
    ]
    assert len({round_.token for round_ in rounds}) == 1, "not the same token"
    result = {
        "benchmark": "growing_groups",
        "model": args.model,
        "tokens": args.tokens,
        "groups": [len(group) for group in GROUPS],
        "strategy": args.strategy,
        "rounds": args.rounds,
    }
    if args.image is not None:
        last = [round_ for round_ in rounds if round_.balanced][-1]
        growing_groups_picture.draw(found[last.trace_id], last.ttft_s, args.image)
    report.publish(result, rows, args.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=["needle", "wide"], default="needle")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategy", choices=["ring_kv", "ring_q", "ulysses"], default="ring_kv")
    parser.add_argument("--image", type=Path, help="draw a timeline here")
    parser.add_argument("--smoke", action="store_true", help="see that it works")
    args = report.with_json_option(parser).parse_args()
    return parser.parse_args([*sys.argv[1:], *SMOKE]) if args.smoke else args


# --- on the ranks --------------------------------------------------------------------------------


async def _measure(model: Path, spans: Path, args: argparse.Namespace) -> list[Round]:
    prompt = np.random.default_rng(0).integers(3, 256, args.tokens).astype("<i4")
    rounds = []
    async with _ranks(model, spans, args.tokens) as cell:
        await _prefill(cell, 1, prompt[:512], args.strategy, balanced=True)  # warms up
        for number in range(2 * args.rounds):
            balanced = number % 2 == 0
            rounds.append(
                await _prefill(cell, 2 + number, prompt, args.strategy, balanced=balanced)
            )
    return rounds


@asynccontextmanager
async def _ranks(model: Path, spans: Path, tokens: int) -> AsyncIterator[Cell]:
    """Attach and connect both gangs; at the end all spans are written."""
    slots = 2 * tokens
    plans = [
        GangPlan(model_dir=str(model), role="prefill", instances=len(GROUPS[-1]), kv_slots=slots),
        GangPlan(model_dir=str(model), role="decode", instances=DECODE, kv_slots=slots),
    ]
    traced = ProcessGang(plans[0], (str(TRACED_RANK), str(spans)))
    gangs = [traced, ProcessGang(plans[1])]
    try:
        members = await asyncio.gather(*(gang.start() for gang in gangs))
        cell = Cell()
        cell.prefill = await cell.attach(members[0], "prefill")
        cell.decode = await cell.attach(members[1], "decode")
        await cell.connect()
        yield cell
        await cell.disconnect()
        await traced.end()
    finally:
        for gang in gangs:
            gang.close()


async def _prefill(
    cell: Cell, sequence_id: int, prompt: np.ndarray, strategy: str, *, balanced: bool
) -> Round:
    slices = place(range(DECODE), zigzag(len(prompt), DECODE))
    request = Request(sequence_id=sequence_id, prompt=prompt, slices=slices, sampling=TWO_TOKENS)
    await cell.reserve(request)
    trace_id = os.urandom(16).hex()
    trace = {
        "traceparent": f"00-{trace_id}-{os.urandom(8).hex()}-01",
        "tracestate": "csps=timeline",
    }
    steps = list(_chunks(request, strategy, trace, balanced=balanced))
    begin = time.perf_counter()
    jobs = [cell.submit(step, tokens) for step, tokens in steps]
    await cell.until(lambda: cell.about(SampledToken, sequence_id=sequence_id))
    ttft_s = time.perf_counter() - begin
    await cell.until(lambda: len(cell.about(RankKvReceived, sequence_id=sequence_id)) == DECODE)
    landed_s = time.perf_counter() - begin
    await cell.answer(request)
    await cell.freed(sequence_id)
    await cell.prefilled(*jobs)
    return Round(
        trace_id=trace_id,
        balanced=balanced,
        ttft_s=ttft_s,
        landed_s=landed_s,
        token=cell.tokens(sequence_id)[0],
    )


def _chunks(
    request: Request, strategy: str, trace: dict[str, str], *, balanced: bool
) -> Iterator[tuple[PrefillStep, np.ndarray]]:
    """Return chunks in proportion to their groups, with their tokens."""
    length, sizes = len(request.prompt), [len(group) for group in GROUPS]
    stops = [length * sum(sizes[: i + 1]) // sum(sizes) for i in range(len(sizes))]
    start, lying = 0, tuple[KvSlice, ...]()
    for group, stop in zip(GROUPS, stops, strict=True):
        rows = place(group, zigzag(stop - start, len(group)), start=start)
        moves = balancing_moves(lying, group) if balanced else ()
        chunk = request.chunk(
            start,
            stop,
            rows=rows,
            history=lying,
            placement=(*rows, *moves) if moves else (),
        )
        yield (
            prefill_step([chunk], group, strategy=strategy, trace=trace),
            request.prompt[start:stop],
        )
        start, lying = stop, (*outside(lying, moves), *moves, *rows)


# --- out of the timelines ------------------------------------------------------------------------


def _row(rounds: Sequence[tuple[Round, Trace]], balanced: bool) -> dict[str, Any]:
    costs = [_balancing(trace.spans, round_.ttft_s) for round_, trace in rounds]
    return {
        "history": "balanced" if balanced else "where it was computed",
        "ttft_s": statistics.median(round_.ttft_s for round_, _ in rounds),
        "balancing_waited": statistics.median(waited for waited, _, _ in costs),
        "balancing_hidden": statistics.median(hidden for _, hidden, _ in costs),
        "balancing_mib": statistics.median(sent for _, _, sent in costs) / 2**20,
        "transfer_after": statistics.median(
            max(0.0, round_.landed_s - round_.ttft_s) / round_.ttft_s for round_, _ in rounds
        ),
    }


def _balancing(spans: Sequence[RecordedSpan], ttft_s: float) -> tuple[float, float, float]:
    """Return the share of the TTFT that the slowest rank waited, the share hidden, and bytes."""
    jobs: dict[tuple[int, str | None], list[RecordedSpan]] = defaultdict(list)
    for span in spans:
        if span.is_phase:
            jobs[span.attributes[RANK], span.parent_id].append(span)
    waited_ns = Counter[int]()
    for (rank, _), phases in jobs.items():
        waited_ns[rank] += sum(wait.duration_ns for wait in _waits(phases))
    moves = [span for span in spans if _phase(span) == BALANCING]
    under_way_ns = sum(move.duration_ns for move in moves)
    return (
        max(waited_ns.values()) / 1e9 / ttft_s,
        max(0.0, 1 - waited_ns.total() / under_way_ns) if under_way_ns else 0.0,
        sum(move.attributes[BYTES] for move in moves),
    )


def _waits(phases: Sequence[RecordedSpan]) -> Iterator[RecordedSpan]:
    """Return the waits for history of one step on one rank.

    Such waits come in layers with history, before the layer's other exchanges begin.
    """
    for layer in {phase.attributes[LAYER] for phase in phases if _phase(phase) == BALANCING}:
        here = [phase for phase in phases if phase.attributes.get(LAYER) == layer]
        others = [
            span.start_ns for span in here if _phase(span) in TRANSFERS - {BALANCING, "kv transfer"}
        ]
        until_ns = min(others, default=max(span.end_ns for span in here))
        yield from (span for span in here if _phase(span) == "wait" and span.start_ns < until_ns)


def _phase(span: RecordedSpan) -> str:
    return str(span.attributes.get(PHASE, ""))


if __name__ == "__main__":
    main()
