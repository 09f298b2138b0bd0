"""Decode that sees kept tokens only, on real gangs, against brute force over pairs of tokens.

The brute force computes whole matrices in fp64 by the definition of `CsaPlan.decode_kept_only`. It
uses nothing of the product but the network's layers, and the oracle of kept sets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dense_csa_reference import DenseCsa
from gang_driver import Request, even_bounds, even_slices, prefill_step, prompt_of
from gang_threads import ThreadCell, thread_cell
from tiny_checkpoints import make_checkpoint
from torch import Tensor

from csps.actors.kv_transfer.message import KvHeader
from csps.models.checkpoints.loading import load_network
from csps.models.network.network import Network
from csps.protocols.attention.csa import CsaPlan, LayerGroup, Ratios, halving
from csps.protocols.gang.messages import RequestFailed, SampledToken, Sampling


@dataclass
class DenseDecode:
    """Brute force for one prompt; `owners` is the prefill member of each prompt token."""

    network: Network
    plan: CsaPlan
    owners: Sequence[int]
    k_thd: list[Tensor] = field(default_factory=list)
    v_thd: list[Tensor] = field(default_factory=list)
    seen: list[list[set[int]]] = field(default_factory=list)
    """Prompt tokens that decode sees, [layer][KV head]."""

    def prefill(self, prompt: Tensor) -> Tensor:
        """Return log-probabilities (vocab,) of the first generated token."""
        rotary, x_td = self.network.rotary(torch.arange(len(prompt))), self.network.embed(prompt)
        importance: Tensor | None = None
        for index, layer in enumerate(self.network.layers):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
            oracle, scale = self._oracle(index), q_thd.shape[2] ** -0.5
            scored = oracle.judged_by_window(q_thd, k_thd, self.plan.importance_window, scale)
            if self.plan.importance_layer == "same":
                importance = scored
            weights = oracle.counts(importance)
            out_thd, _ = oracle.attend(q_thd, k_thd, v_thd, weights, scale)
            self.seen.append([self._seen(oracle, h, importance) for h in range(k_thd.shape[1])])
            importance = scored
            x_td = layer.finish(x_td, out_thd.float())
            self.k_thd.append(k_thd)
            self.v_thd.append(v_thd)
        return self.network.logits(x_td[-1:])[0].log_softmax(-1)

    def step(self, token: int) -> Tensor:
        """Return log-probabilities (vocab,) of the token after this one."""
        position = len(self.k_thd[0])
        rotary = self.network.rotary(torch.tensor([position]))
        x_td = self.network.embed(torch.tensor([token]))
        for index, layer in enumerate(self.network.layers):
            q_thd, k_thd, v_thd = layer.qkv(x_td, rotary)
            self.k_thd[index] = torch.cat((self.k_thd[index], k_thd))
            self.v_thd[index] = torch.cat((self.v_thd[index], v_thd))
            x_td = layer.finish(x_td, self._attend(index, q_thd).float())
        return self.network.logits(x_td)[0].log_softmax(-1)

    def _attend(self, index: int, q_thd: Tensor) -> Tensor:
        heads, dim = q_thd.shape[1:]
        k_thd, v_thd = self.k_thd[index].double(), self.v_thd[index].double()
        group = heads // k_thd.shape[1]
        outs = []
        for head in range(heads):
            generated = set(range(len(self.owners), len(k_thd)))
            keys = sorted(self.seen[index][head // group] | generated)
            score_k = k_thd[keys, head // group] @ q_thd[0, head].double() / math.sqrt(dim)
            outs.append(torch.softmax(score_k, dim=0) @ v_thd[keys, head // group])
        return torch.stack(outs)[None]

    def _seen(self, oracle: DenseCsa, head: int, importance_gt: Tensor | None) -> set[int]:
        if not self.plan.decode_kept_only or len(oracle.segments) == 1:
            return set(range(oracle.tokens))
        importance_t = None if importance_gt is None else importance_gt[head]
        last_spt = {t for t, owner in enumerate(self.owners) if owner == self.owners[-1]}
        return last_spt | oracle.kept(head, 2, importance_t)

    def _oracle(self, index: int) -> DenseCsa:
        last, kv_heads = len(self.network.layers) - 1, self.network.spec.kv_heads
        everyone = [range(len(self.plan.locations))]
        # A prompt inside one member is exact, and so is the last layer, of which one row is needed.
        alone = index == last or len(set(self.owners)) == 1
        segments = [everyone] if alone else self.plan.segments()
        group, levels = self.plan.layer_group(index), range(1, len(segments) + 1)
        return DenseCsa(
            owners=self.owners,
            segments=segments,
            ratios=[
                [group.drop_ratio(level, head) if index else 0.0 for level in levels]
                for head in range(kv_heads)
            ],
            sinks=self.plan.sinks,
            tail=self.plan.tail,
            nested=self.plan.nested,
            drop_queries=self.plan.drop_queries,
        )


LAYERS, KV_HEADS, HEAD_DIM = 4, 4, 8
LOCATIONS = ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
LONG, SHORT = 90, 6
"""Lengths of a prompt that spans all members, and of one inside the last member."""
SAMPLING = Sampling(temperature=0, max_tokens=5, logprobs=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("deep"),
        num_hidden_layers=LAYERS,
        num_attention_heads=2 * KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
    )


def plan_of(
    members: int, levels: int, ratios: Ratios | None = None, *, kept_only: bool = True
) -> CsaPlan:
    ratios = halving(0.6, levels) if ratios is None else ratios
    return CsaPlan(
        locations=LOCATIONS[:members],
        levels=levels,
        layer_groups=(LayerGroup(first=0, stop=LAYERS, drop_ratios=ratios),),
        importance_window=16,
        sinks=2,
        tail=5,
        decode_kept_only=kept_only,
    )


def requests_of(*lengths: int, instances: Sequence[int], kept_only: bool = True) -> list[Request]:
    return [
        Request(
            sequence_id=sequence_id,
            prompt=prompt_of(length, sequence_id),
            slices=even_slices(length, instances),
            master=instances[-1],
            sampling=SAMPLING,
            kept_only=kept_only,
        )
        for sequence_id, length in enumerate(lengths)
    ]


async def answers(cell: ThreadCell, requests: Sequence[Request], plan: CsaPlan) -> None:
    for request in requests:
        await cell.reserve(request)
    chunks = [request.chunk() for request in requests]
    step = prefill_step(chunks, range(len(plan.locations)), strategy="csa", csa=plan)
    cell.submit(step, np.concatenate([request.prompt for request in requests]))
    await cell.answer(*requests)
    await cell.freed(*(request.sequence_id for request in requests))
    await cell.prefilled(*cell.steps)
    cell.check_idle()


def logprobs_by_brute_force(
    model: Path,
    plan: CsaPlan,
    requests: Sequence[Request],
    sampled: Sequence[Sequence[SampledToken]],
) -> list[list[float]]:
    """Return the log-probability of each sampled token after the tokens before it."""
    network, begin, found = load_network(model), 0, []
    lengths = [len(request.prompt) for request in requests]
    bounds = even_bounds(sum(lengths), len(plan.locations))
    owner = np.repeat(range(len(plan.locations)), np.diff(bounds)).tolist()
    for request, tokens in zip(requests, sampled, strict=True):
        end = begin + len(request.prompt)
        dense = DenseDecode(network, plan, owner[begin:end])
        begin = end
        with torch.inference_mode():
            rows = [dense.prefill(torch.from_numpy(request.prompt.astype(np.int64)))]
            rows += [dense.step(token.token) for token in tokens[:-1]]
        assert [int(row.argmax()) for row in rows] == [token.token for token in tokens]
        found.append([float(row[token.token]) for row, token in zip(rows, tokens, strict=True)])
    return found


@dataclass(frozen=True)
class Shape:
    """Shape of both gangs."""

    prefill: int
    levels: int
    decode: int = 1
    prefill_tp: int = 1
    decode_tp: int = 1


SHAPES = [
    Shape(1, 1),
    Shape(2, 2),
    Shape(3, 2, decode=2),
    Shape(4, 3, decode=2),
    Shape(2, 2, prefill_tp=2),
    Shape(2, 2, decode_tp=2),
    Shape(2, 2, decode=2, prefill_tp=2, decode_tp=4),
]


async def check(model: Path, shape: Shape, plan: CsaPlan, *, lengths: Sequence[int]) -> None:
    requests = requests_of(*lengths, instances=range(shape.decode))
    async with thread_cell(
        model,
        prefill=shape.prefill,
        prefill_tp=shape.prefill_tp,
        decode=shape.decode,
        decode_tp=shape.decode_tp,
    ) as cell:
        await answers(cell, requests, plan)
        sampled = [cell.samples(request.sequence_id) for request in requests]
    expected = logprobs_by_brute_force(model, plan, requests, sampled)
    for tokens, logprobs in zip(sampled, expected, strict=True):
        assert [token.logprob for token in tokens] == pytest.approx(logprobs, abs=2e-4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
async def test_decode_sees_kept_tokens_and_no_others(model: Path, shape: Shape) -> None:
    await check(model, shape, plan_of(shape.prefill, shape.levels), lengths=(LONG, SHORT))


@pytest.mark.parametrize("tp", [1, 2])
async def test_heads_that_keep_unequally_many(model: Path, tp: int) -> None:
    """With two tensor-parallel ranks, only the heads of the second drop tokens."""
    plan = plan_of(2, 2, ((0.0, 0.0, 0.5, 0.8),))
    await check(model, Shape(2, 2, prefill_tp=tp), plan, lengths=(LONG, SHORT))


@pytest.mark.parametrize(
    "change",
    [{"importance_layer": "same"}, {"nested": True}, {"drop_queries": False}, {"pipelined": False}],
    ids=str,
)
async def test_every_variant_equals_brute_force(model: Path, change: dict[str, Any]) -> None:
    await check(model, Shape(4, 3), replace(plan_of(4, 3), **change), lengths=(LONG,))


async def test_the_tests_would_notice_a_decode_that_sees_all(model: Path) -> None:
    plan, (request,) = plan_of(2, 2, kept_only=False), requests_of(LONG, instances=[0])
    async with thread_cell(model, prefill=2, decode=1) as cell:
        await answers(cell, [request], plan)
        sampled = cell.samples(request.sequence_id)
    (exact,) = logprobs_by_brute_force(model, plan, [request], [sampled])
    assert [token.logprob for token in sampled] == pytest.approx(exact, abs=2e-4)
    dense = DenseDecode(load_network(model), replace(plan, decode_kept_only=True), _halves())
    with torch.inference_mode():
        dense.prefill(torch.from_numpy(request.prompt.astype(np.int64)))
        narrowed = [
            float(dense.step(token.token)[after.token]) for token, after in pairwise(sampled)
        ]
    assert max(abs(a - b) for a, b in zip(narrowed, exact[1:], strict=True)) > 1e-2


def _halves() -> list[int]:
    return np.repeat([0, 1], LONG // 2).tolist()


# --- what it saves ---------------------------------------------------------------------------


async def sent_to_decode(model: Path, plan: CsaPlan, *, kept_only: bool) -> int:
    """Return the bytes sent over the KV connection."""
    requests = requests_of(LONG, instances=[0], kept_only=kept_only)
    async with thread_cell(model, prefill=len(plan.locations), decode=1) as cell:
        await answers(cell, requests, plan)
        senders = [rank._kv_link._sender for rank in cell.prefill_gang.ranks]
        return sum(sender.connection.bytes_sent for sender in senders if sender is not None)


async def test_only_kept_tokens_are_sent_to_decode(model: Path) -> None:
    """Two of four layers drop; of two SPTs the first keeps two fifths, the last everything."""
    vector, spt = 2 * HEAD_DIM * 4, LONG // 2
    header = (KvHeader.WORDS + 1) * 8  # and its checksum
    whole = await sent_to_decode(model, plan_of(2, 2, kept_only=False), kept_only=False)
    assert whole == LAYERS * (LONG * KV_HEADS * vector + 2 * header)
    nothing_dropped = plan_of(2, 2, ((0.0,),))
    assert await sent_to_decode(model, nothing_dropped, kept_only=True) == whole
    kept = await sent_to_decode(model, plan_of(2, 2), kept_only=True)
    dropped = 2 * KV_HEADS * (spt - 18)
    masks = 2 * KV_HEADS * LONG
    assert kept == whole - dropped * vector + masks


async def test_a_request_reserved_for_all_tokens_fails_with_kept_ones_only(model: Path) -> None:
    (request,) = requests_of(LONG, instances=[0], kept_only=False)
    async with thread_cell(model, prefill=2, decode=1) as cell:
        cell.failures_expected = True
        await cell.reserve(request)
        step = prefill_step([request.chunk()], range(2), strategy="csa", csa=plan_of(2, 2))
        cell.submit(step, request.prompt)
        await cell.until(lambda: cell.about(RequestFailed, sequence_id=request.sequence_id))
        assert {failed.code for failed in cell.about(RequestFailed)} == {"TransferError"}
        cell.cancel(request.sequence_id)
        await cell.prefilled(*cell.steps)
        await cell.idle()
