"""Answers that sparse attention loses over the bytes that it sends between servers: fixed drop
ratios, coverages, and StarAttention's anchor blocks.

One group computes the same prompts of the included model by every configuration, in one process
(`EmulatedGroup`). Bytes are those of the routes by which ranks would send (`Routes`), in the layers
that may drop, between servers: rows of both all-to-alls, scoring queries, LSEs and numbers of kept
tokens. Dropped mass is what `explain` reports.

StarAttention gives every instance the first block of the prompt beside its own, and
lets only the query at the prompt's end see everything. Here the last tokens are its query, and the
first and the last layer are exact, as with the others. Instances compute the anchor again, so only
the query and its outputs are sent.

    python benchmarks/coverage_curves.py --out FILE
    python benchmarks/coverage_curves.py --table FILE
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from csps.actors.attention.base.dropped_mass import mass_without
from csps.actors.attention.base.levels import (
    LevelGeometry,
    LevelPart,
    always_kept_mask,
    kept_counts,
)
from csps.actors.attention.csa.routes import HeadCounts, Routes, SendSlice
from csps.configurator.regressors.samples import loss_interval, places_of
from csps.kernels.attention import attention
from csps.kernels.importance import covering_counts, select
from csps.kernels.merge import merge_into
from csps.protocols.attention.csa import CsaPlan, CsaSettings
from csps.protocols.core.topology import Topology
from csps.services.evaluation.local_model import LocalModel
from csps.services.profiling.accuracy.emulated_attention import EmulatedGroup
from csps.services.profiling.accuracy.questions import (
    NeedleQuestions,
    PlainText,
    QuestionKind,
    Score,
)
from csps.services.settings.settings import shipped_models

KINDS: tuple[QuestionKind, ...] = (
    NeedleQuestions("multi_key", "first"),
    NeedleQuestions("two_hop", "last"),
    PlainText(),
)
LSE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to attend; `number` is its drop ratio or coverage."""

    method: str
    number: float
    importance_layer: str = "same"

    def group(self, model: LocalModel, shape: str, tokens: int) -> CountedGroup:
        """Return the group that computes a prompt in this way."""
        dropping: dict[str, Any] = {}
        if self.method == "coverage":
            dropping = {"coverages": ((self.number,),)}
        elif self.method == "drop_ratio":
            dropping = {"drop_ratios": ((self.number,),)}
        settings = CsaSettings(
            importance_layer="previous" if self.importance_layer == "previous" else "same",
            **dropping,
        )
        spec = model.network.spec
        plan = settings.for_group(places_of(shape), layers=spec.layers, longest_spt=tokens)
        kind = StarGroup if self.method == "anchor" else CountedGroup
        return kind(spec=spec, plan=plan, tokens=tokens)


NUMBERS: Mapping[tuple[str, str], Sequence[float]] = {
    ("drop_ratio", "same"): (0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99),
    ("coverage", "same"): (0.99, 0.95, 0.9, 0.8, 0.6, 0.3, 0.1),
    ("drop_ratio", "previous"): (0.2, 0.5, 0.8),
    ("coverage", "previous"): (0.999, 0.99, 0.9),
}
CONFIGURATIONS = (
    *(
        Configuration(method=method, number=number, importance_layer=layer)
        for (method, layer), numbers in NUMBERS.items()
        for number in numbers
    ),
    Configuration(method="anchor", number=0.0),
)


@dataclass(frozen=True, kw_only=True)
class CountedGroup(EmulatedGroup):
    """A group that counts bytes between servers, and may keep another number for each KV head."""

    sent: list[int] = field(default_factory=list)
    """Bytes between servers of each layer that may drop."""
    dropped: list[Tensor] = field(default_factory=list)
    """Share of attention that each such layer drops, by KV head."""

    def attend_far(
        self,
        layer: int,
        q_nhd: Tensor,
        k_nud: Tensor,
        v_nud: Tensor,
        importance_ut: Tensor,
        out_nhd: Tensor,
        lse_hn: Tensor,
    ) -> Tensor:
        """See `EmulatedGroup`."""
        kept = self._kept(layer, importance_ut)
        self.sent.append(self._bytes(kept, q_nhd.shape[1:], self._schedule.drops(layer)))
        self.dropped.append(self._dropped(kept, importance_ut))
        changed_n = torch.zeros(len(q_nhd), dtype=torch.bool)
        group = q_nhd.shape[1] // k_nud.shape[1]
        for level, seeing, seen in self._rectangles:
            for head in range(k_nud.shape[1]):
                heads = slice(head * group, (head + 1) * group)
                keys_k = self._rows_of(kept, importance_ut, seen, head, level)
                queries_k = self._rows_of(kept, importance_ut, seeing, head, level)
                far = attention(
                    q_nhd[queries_k, heads],
                    k_nud[keys_k, head : head + 1],
                    v_nud[keys_k, head : head + 1],
                    q_positions=None,
                    k_positions=None,
                    scale=self.spec.scale,
                )
                merge_into(out_nhd[:, heads], lse_hn[heads], *far, queries_k[None])
                changed_n[queries_k] = True
        return changed_n

    def _kept(self, layer: int, importance_ut: Tensor) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Return the numbers of kept tokens, [part][KV head][level - 1]."""
        coverages = self._schedule.head_coverages(layer)
        if coverages is None:
            return tuple(
                tuple(
                    kept_counts(self.plan, [self._chunk], part, ratios)
                    for ratios in self._schedule.head_ratios(layer)
                )
                for part in self.parts
            )
        shares = torch.tensor(coverages, dtype=torch.float64)
        return tuple(
            tuple(map(tuple, covering_counts(importance_ut[:, part.rows], shares,
                                             always_t=self._always(part)).tolist()))
            for part in self.parts
        )  # fmt: skip

    def _always(self, part: LevelPart) -> Tensor:
        return always_kept_mask(self.plan, self._chunk, part)

    def _rows_of(
        self,
        kept: Sequence[Sequence[Sequence[int]]],
        importance_ut: Tensor,
        parts: Sequence[LevelPart],
        head: int,
        level: int,
    ) -> Tensor:
        """Return the rows (k,) that some parts keep for a head at a level."""
        return torch.cat(
            [
                part.start
                + select(
                    importance_ut[head : head + 1, part.rows],
                    kept[part.index][head][level - 1],
                    always_t=self._always(part),
                )[0]
                for part in parts
            ]
        )

    def _dropped(self, kept: Sequence[Sequence[Sequence[int]]], importance_ut: Tensor) -> Tensor:
        """Return the share of attention that each KV head drops, as `explain` does."""
        geometry = LevelGeometry(parts=self.parts, levels=self.plan.segments())
        dropped_u = torch.zeros(len(importance_ut))
        for part in self.parts:
            if (level := geometry.level_of_last_queries(part)) == 1:
                continue
            for head, scores_t in enumerate(importance_ut[:, part.rows]):
                count = kept[part.index][head][level - 1]
                chosen = select(scores_t[None], count, always_t=self._always(part))
                dropped_u[head] += mass_without(scores_t[None], chosen)[0]
        return dropped_u / importance_ut.sum(dim=1)

    def _bytes(
        self, kept: tuple[tuple[tuple[int, ...], ...], ...], heads_dim: Sequence[int], drops: bool
    ) -> int:
        """Return the bytes that a layer sends between servers."""
        (heads, dim), kv_heads = heads_dim, len(kept[0])
        counts = HeadCounts(kept=kept, parts=self.parts, drop_queries=True)
        geometry = LevelGeometry(parts=self.parts, levels=self.plan.segments())
        routes = Routes(
            geometry,
            counts,
            heads=heads,
            kv_heads=kv_heads,
            micro_partitions=(1,) * self.plan.levels,
        )
        total = sum(
            _slice_bytes(piece, dim, first=piece.reused_from is None)
            for level in routes.exchanged_levels
            for members in self.plan.segments()[level - 1]
            for segment in [routes.segment(level, members.start)]
            for owner in members
            for step in segment.steps
            for piece in segment.owner(owner).send_slices(step)
            if self._far(owner, self.parts[piece.part].member)
        )
        if not drops:
            return total
        pairs = sum(self._far(a, b) for a in range(self.members) for b in range(self.members))
        window = min(self.plan.importance_window, self.parts[-1].length)
        lses = pairs * window * heads * LSE_BYTES
        numbers = 0
        if self._covers:
            numbers = pairs * kv_heads * (self.plan.levels - 1) * 4
        last = self.parts[-1].member
        asked = sum(self._far(last, member) for member in range(self.members))
        return total + lses + numbers + asked * window * heads * dim * 4

    @property
    def _covers(self) -> bool:
        return any(group.coverages for group in self.plan.layer_groups)

    def _far(self, one: int, other: int) -> bool:
        return self._servers[one] != self._servers[other]

    @cached_property
    def _servers(self) -> list[tuple[int, int]]:
        return [place.server_id for place in Topology.of(self.plan.locations).locations]


def _slice_bytes(piece: SendSlice, dim: int, *, first: bool) -> int:
    """Return the bytes of rows that are sent, and of their outputs that come back."""
    rows = (piece.tokens.stop - piece.tokens.start) * (piece.heads.stop - piece.heads.start)
    there = rows * dim * 4 * (2 if piece.kind == "keys" else 1) * first
    return there + (rows * (dim * 4 + LSE_BYTES) if piece.kind == "queries" else 0)


@dataclass(frozen=True, kw_only=True)
class StarGroup(CountedGroup):
    """StarAttention in the layers that may drop: blocks see themselves and the first block."""

    def attend_far(
        self,
        layer: int,
        q_nhd: Tensor,
        k_nud: Tensor,
        v_nud: Tensor,
        importance_ut: Tensor,
        out_nhd: Tensor,
        lse_hn: Tensor,
    ) -> Tensor:
        """See `EmulatedGroup`."""
        anchor, *blocks = self.parts
        query = range(self.tokens - self.plan.tail, self.tokens)
        changed_n = torch.zeros(len(q_nhd), dtype=torch.bool)
        for block in blocks:
            rows = slice(block.rows.start, min(block.rows.stop, query.start))
            self._merge(q_nhd, k_nud, v_nud, rows, anchor.rows, out_nhd, lse_hn)
            changed_n[rows] = True
        rows = slice(query.start, query.stop)
        before = slice(0, blocks[-1].rows.start)
        self._merge(q_nhd, k_nud, v_nud, rows, before, out_nhd, lse_hn)
        changed_n[rows] = True
        far = sum(self._far(member, self.members - 1) for member in range(self.members))
        heads, dim = q_nhd.shape[1:]
        self.sent.append(far * len(query) * heads * (2 * dim * 4 + LSE_BYTES))
        self.dropped.append(torch.zeros(len(importance_ut)))
        return changed_n

    def _merge(
        self,
        q_nhd: Tensor,
        k_nud: Tensor,
        v_nud: Tensor,
        rows: slice,
        seen: slice,
        out_nhd: Tensor,
        lse_hn: Tensor,
    ) -> None:
        far = attention(
            q_nhd[rows], k_nud[seen], v_nud[seen], q_positions=None, k_positions=None,
            scale=self.spec.scale,
        )  # fmt: skip
        merge_into(out_nhd[rows], lse_hn[:, rows], *far)


@torch.inference_mode()
def measure(
    model: LocalModel, shape: str, tokens: int, rounds: int, limit_s: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind and configuration, when all rounds of the kind are done."""
    end = time.monotonic() + limit_s
    for kind in KINDS:
        scores: dict[Configuration, list[Score]] = {each: [] for each in CONFIGURATIONS}
        sent: dict[Configuration, list[int]] = {each: [] for each in CONFIGURATIONS}
        dropped: dict[Configuration, list[Tensor]] = {each: [] for each in CONFIGURATIONS}
        for round_index in range(min(rounds, kind.rounds)):
            for asked in kind.asked(model, tokens, round_index):
                if time.monotonic() > end:
                    break
                alone = EmulatedGroup(
                    spec=model.network.spec,
                    plan=CsaPlan(locations=("0-0-0",), levels=1),
                    tokens=asked.tokens,
                )
                exact_sv = asked.prompt.logits(alone)
                for each in CONFIGURATIONS:
                    group = each.group(model, shape, asked.tokens)
                    scores[each].append(asked.score(exact_sv, asked.prompt.logits(group)))
                    sent[each].append(sum(group.sent))
                    dropped[each].append(torch.stack(group.dropped))
        for each in CONFIGURATIONS:
            if scores[each]:
                yield {
                    **asdict(each),
                    "kind": kind.name,
                    "tokens": tokens,
                    "group_shape": shape,
                    **_result(scores[each], sent[each], torch.stack(dropped[each])),
                }


def _result(scores: Sequence[Score], sent: Sequence[int], dropped: Tensor) -> dict[str, Any]:
    questions = sum(score.questions for score in scores)
    right = sum(score.right for score in scores)
    right_exact = sum(score.right_exact for score in scores)
    return {
        "questions": questions,
        "right_exact": right_exact,
        "right": right,
        "interval": loss_interval(questions, right_exact, right),
        "divergence": sum(score.questions * score.divergence for score in scores) / questions,
        "bytes_between_servers": round(sum(sent) / len(sent)),
        "dropped_mass_mean": float(dropped.mean()),
        "dropped_mass_worst_head": float(dropped.amax(dim=(1, 2)).mean()),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return a Markdown table: a line for each configuration, a column for each kind."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    yield (
        "| tokens | method | scored by | MB between servers | dropped mass: mean, worst head | "
        + (
            " | ".join(f"right, {kind}" if kind != PlainText.name else kind for kind in kinds)
            + " |"
        )
    )
    yield "|---" * (5 + len(kinds)) + "|"
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = row["tokens"], row["method"], row["number"], row["importance_layer"]
        alike.setdefault(key, []).append(row)
    for (tokens, method, number, layer), of_kinds in sorted(alike.items(), key=_order):
        cells = [
            f"{row['right']} of {row['right_exact']}"
            if row["kind"] != PlainText.name
            else f"{row['right'] / row['right_exact']:.2%} alike, {row['divergence']:.4f} nats"
            for row in of_kinds
        ]
        size = sum(row["bytes_between_servers"] for row in of_kinds) / len(of_kinds) / 1e6
        mean = max(row["dropped_mass_mean"] for row in of_kinds)
        worst = max(row["dropped_mass_worst_head"] for row in of_kinds)
        by = f"{layer} layer" if method != "anchor" else "-"
        name = method if method == "anchor" else f"{method} {number:g}"
        mass = "-" if method == "anchor" else f"{mean:.2%}, {worst:.2%}"
        yield f"| {tokens} | {name} | {by} | {size:.2f} | {mass} | {' | '.join(cells)} |"


def _order(item: tuple[tuple[Any, ...], Sequence[Mapping[str, Any]]]) -> tuple[Any, ...]:
    (tokens, _, _, layer), rows = item
    return tokens, layer, -math.fsum(row["bytes_between_servers"] for row in rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; `argv` replaces the process's own arguments."""
    arguments = parse(argv)
    if arguments.table:
        print("\n".join(table(json.loads(arguments.table.read_text())["rows"])))
        return
    model = LocalModel.load(arguments.model)
    rows: list[dict[str, Any]] = []
    for tokens in arguments.tokens:
        begin = time.monotonic()
        for row in measure(model, arguments.group, tokens, arguments.rounds, arguments.limit_s):
            rows.append(row)
            content = {"command": _command(arguments), "rows": rows}
            arguments.out.write_text(json.dumps(content, indent=1) + "\n")
        print(f"{tokens} tokens: {time.monotonic() - begin:.0f} s", flush=True)


def _command(arguments: argparse.Namespace) -> str:
    lengths = " ".join(map(str, arguments.tokens))
    return (
        f"python benchmarks/coverage_curves.py --tokens {lengths} --group {arguments.group} "
        f"--rounds {arguments.rounds} --out {arguments.out}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=shipped_models() / "needle")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_096, 8_192])
    parser.add_argument("--group", default="2+2", help="instances by server")
    parser.add_argument("--rounds", type=int, default=1, help="of 40 questions, for each kind")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="for each length")
    parser.add_argument("--out", type=Path, help="write the rows here (JSON)")
    parser.add_argument("--table", type=Path, help="print the table of rows written before")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
