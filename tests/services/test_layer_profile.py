"""Layers and KV heads are measured one by one, and get ratios of their own from that (CSPS App. B).

A planted model has some heads that look far (DuoAttention's retrieval heads): they attend to all
tokens alike, and much depends on what they find. Its other heads look at their neighbors only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pipeline_groups import group
from tiny_checkpoints import make_checkpoint

from csps.configurator.model.scaling_information_base import (
    AccuracyRow,
    Identity,
    ScalingInformationBase,
    SpreadRow,
)
from csps.configurator.pipeline.program import LinkSpeed
from csps.configurator.regressors.accuracy import AccuracyModel, train_accuracy
from csps.configurator.regressors.samples import accuracy_samples, measured_groups, row_ratios
from csps.configurator.search.search import SearchProblem, enumerated
from csps.configurator.search.space import ImportanceScoring, Space
from csps.models.checkpoints.loading import load_network
from csps.models.network.network import Network
from csps.protocols.attention.plan import Objective
from csps.services.evaluation.local_model import LocalModel
from csps.services.profiling.accuracy import profile
from csps.services.profiling.accuracy.emulated_attention import EmulatedPrompt, FirstLayer
from csps.services.profiling.accuracy.profile import (
    LAYER_ROUNDS,
    AccuracyProfile,
    Enumeration,
    accuracy_lines,
    spread_lines,
)
from csps.services.profiling.accuracy.questions import AskedText, exact_group

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 5, 4, 2, 16
TOKENS, WINDOW = 512, 64
FAR = {(1, 0), (3, 1)}
"""Layer and KV head of those that look far."""
HERE = Identity(weights="w", dtype="float32", device="cpu", cores=1, torch="2", ranks_per_core=1.0)
POINTS = Enumeration(
    lengths=(TOKENS,),
    group_shapes=("2",),
    scoring=(("ntp", ImportanceScoring("same", WINDOW)),),
    drop_ratios=(0.1, 0.3, 0.5, 0.7, 0.9, 0.98),
    layered_shapes=("2",),
    layered_scoring=(ImportanceScoring("same", WINDOW),),
)


class NextTokens:
    """The likeliest next tokens of random text, of which sparse attention may lose some."""

    name, rounds = "next tokens", 4

    def asked(self, model: LocalModel, tokens: int, round_index: int) -> Iterator[AskedText]:
        generator = torch.Generator().manual_seed(round_index)
        ids = torch.randint(0, 256, (tokens,), generator=generator).tolist()
        scored = range(tokens - 128, tokens)
        prompt = EmulatedPrompt(model.network, FirstLayer.of(model.network, ids), scored)
        yield AskedText(prompt=prompt, tokens=tokens)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder = make_checkpoint(
        tmp_path_factory.mktemp("planted"),
        "qwen2",
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    made = load_network(folder)
    with torch.inference_mode():
        for layer in range(1, LAYERS - 1):
            for head in range(KV_HEADS):
                _plant(made, layer, head)
    return made


def _plant(network: Network, layer: int, head: int) -> None:
    """Make a KV head look far, or at its neighbors only."""
    weights = network.layers[layer].weights
    assert weights.qkv_bias is not None
    sharing = HEADS // KV_HEADS
    queries = slice(head * sharing * HEAD_DIM, (head + 1) * sharing * HEAD_DIM)
    keys = slice((HEADS + head) * HEAD_DIM, (HEADS + head + 1) * HEAD_DIM)
    far = (layer, head) in FAR
    for rows in (queries, keys):
        weights.qkv[rows] = 0.0
        # Rotated by position, equal queries and keys match where they are near.
        weights.qkv_bias[rows] = 0.0 if far else 6.0
    if far:
        weights.output[:, queries] *= 40.0


@pytest.fixture(scope="module")
def base(
    network: Network, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ScalingInformationBase]:
    """A base after the profile of the planted model."""
    path = tmp_path_factory.mktemp("measured") / "sib"
    with (
        pytest.MonkeyPatch.context() as patch,
        ScalingInformationBase.create(path, HERE) as made,
    ):
        patch.setattr(profile, "QUESTION_KINDS", (NextTokens(),))
        model = LocalModel(network, None, frozenset())  # type: ignore[arg-type]
        AccuracyProfile(made, model, POINTS, lambda line: None).run()
        before = {row_ratios(row) for row in made.rows(AccuracyRow)}
        AccuracyProfile(made, model, POINTS, lambda line: None).run()
        assert {row_ratios(row) for row in made.rows(AccuracyRow)} == before
        assert len(made.rows(SpreadRow)) == LAYERS * KV_HEADS
        yield made


@pytest.fixture(scope="module")
def learned(base: ScalingInformationBase) -> AccuracyModel:
    samples = accuracy_samples(base.rows(AccuracyRow), layers=LAYERS)
    groups = measured_groups(base.rows(SpreadRow), samples, layers=LAYERS)
    return train_accuracy(samples, {}, groups)


def test_spreads_are_those_of_dense_attention(network: Network) -> None:
    tokens = 200
    ids = torch.randint(0, 256, (tokens,), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        prompt = EmulatedPrompt(network, FirstLayer.of(network, ids.tolist()), range(1))
        found = prompt.spreads(exact_group(network.spec, tokens))
        dense = _dense_spreads(network, ids)
    assert found.shape == (LAYERS, KV_HEADS)
    torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-7)


def _dense_spreads(network: Network, ids: torch.Tensor) -> torch.Tensor:
    tokens, spec = len(ids), network.spec
    x_td, rotary = network.embed(ids), network.rotary(torch.arange(tokens))
    later_tt = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    spreads = []
    for layer in network.layers:
        q_thd, k_tgd, v_tgd = layer.qkv(x_td, rotary)
        k_thd, v_thd = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k_tgd, v_tgd))
        scores_htt = torch.einsum("qhd,khd->hqk", q_thd, k_thd) * spec.scale
        probabilities_htt = scores_htt.masked_fill(later_tt, -torch.inf).softmax(-1)
        window_hwt = probabilities_htt[:, -WINDOW:]
        seeing_t = (~later_tt[-WINDOW:]).sum(0)
        mean_gt = (window_hwt.sum(1) / seeing_t).unflatten(0, (KV_HEADS, -1)).mean(1)
        spreads.append(((mean_gt - mean_gt.mean(1, keepdim=True)) ** 2).mean(1).sqrt())
        x_td = layer.finish(x_td, torch.einsum("hqk,khd->qhd", probabilities_htt, v_thd))
    return torch.stack(spreads)


def test_each_layer_and_head_has_rows(base: ScalingInformationBase) -> None:
    spreads = {(row.layer, row.kv_head): row.spread for row in base.rows(SpreadRow)}
    assert set(spreads) == {(layer, head) for layer in range(LAYERS) for head in range(KV_HEADS)}
    near = min(
        spreads[layer, head] for layer in (1, 2, 3) for head in (0, 1) if (layer, head) not in FAR
    )
    assert max(spreads[place] for place in FAR) < near / 5
    rows = base.rows(AccuracyRow)
    alone: Counter[int] = Counter()
    for ratios in (row_ratios(row) for row in rows):
        dropping = [layer for layer, of_heads in enumerate(ratios) if any(of_heads)]
        if len(dropping) == 1 and not any(ratios[-1]):
            alone[dropping[0]] += 1
    assert set(alone) == {1, 2, 3}
    assert max(alone.values()) <= LAYER_ROUNDS * len(POINTS.layer_ratios)
    graded = {
        row_ratios(row) for row in rows if len(row_ratios(row)) > 1 and any(row_ratios(row)[0])
    }
    assert len(graded) >= 3, "ratios in proportion to the layers were measured"
    lines = [*accuracy_lines(rows, layers=LAYERS), *spread_lines(base.rows(SpreadRow))]
    assert any("0.98 in layer 2" in line for line in lines)


def test_heads_that_look_far_keep_what_the_others_drop(learned: AccuracyModel) -> None:
    places = ("0-0-0", "0-0-1")
    slow = LinkSpeed(bytes_per_s=1e6)
    of = group(places, layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, inside=slow)
    problem = SearchProblem(group=of, tokens=TOKENS, objective=Objective(max_accuracy_loss=0.05))
    loss = learned.of_group(places, layers=LAYERS, tokens=TOKENS)

    def best(**options: Any) -> Any:
        space = Space(
            scoring=(ImportanceScoring("same", WINDOW),), strategies=("ntp",), step=0.1, **options
        )
        return enumerated(problem, space, loss).best

    found = best(groups=learned.groups_of(LAYERS))
    ratios = found.settings.drop_ratios
    for layer in (1, 2, 3):
        of_heads = ratios[min(layer, len(ratios) - 1)]
        for head in range(KV_HEADS):
            ratio = of_heads[min(head, len(of_heads) - 1)]
            assert ratio < 0.3 if (layer, head) in FAR else ratio >= 0.9, ratios
    alike = best(groups=learned.groups_of(LAYERS + 1).alike(LAYERS))
    assert found.seconds < alike.seconds
