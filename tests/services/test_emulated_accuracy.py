"""Test that one process computes what a group's ranks compute, and which points are continued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from strategy_ranks import FAR, NEAR, StrategyRanks, assert_near, step_of, strategy_ranks
from tiny_checkpoints import make_checkpoint

from csps.actors.attention.choice import strategy_of
from csps.configurator.model.scaling_information_base import (
    AccuracyRow,
    Identity,
    ScalingInformationBase,
)
from csps.configurator.regressors.samples import (
    ENOUGH_POSITIONS,
    accuracy_samples,
    category_of,
)
from csps.configurator.regressors.support import Support
from csps.configurator.search.space import ImportanceScoring, LayerGroups
from csps.models.needle_prompts.tasks import CATEGORIES, write_prompt
from csps.protocols.attention.csa import CsaPlan, Ratios
from csps.services.evaluation.local_model import LocalModel
from csps.services.profiling import command
from csps.services.profiling.accuracy import profile, questions
from csps.services.profiling.accuracy.chosen_points import ChosenPoints
from csps.services.profiling.accuracy.emulated_attention import (
    EmulatedGroup,
    EmulatedPrompt,
    FirstLayer,
    SharedText,
)
from csps.services.profiling.accuracy.profile import (
    HOPELESS,
    AccuracyProfile,
    Branch,
    Enumeration,
    Point,
)
from csps.services.profiling.accuracy.questions import (
    QUESTION_KINDS,
    NeedleQuestions,
    NextTokens,
    PlainText,
    QuestionKind,
    Score,
    TaskQuestions,
    answered_kinds,
)
from csps.services.settings.settings import shipped_models

LAYERS, HEADS, KV_HEADS = 5, 4, 2
TOKENS = 70
EVEN = (0, 17, 35, 52, 70)
HERE = Identity(weights="w", dtype="float32", device="cpu", cores=1, torch="2", ranks_per_core=1.0)


WINDOWED = {
    "gpt_oss": [NEAR, FAR, FAR, NEAR, FAR],
    "gemma3_text": [FAR, NEAR, FAR, FAR, NEAR],
}
"""Layers of models with windows: two and three see all tokens before the last layer."""


@contextmanager
def ranks_of(folder: Path, family: str, **config: Any) -> Iterator[StrategyRanks]:
    model = make_checkpoint(
        folder,
        family,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=8,
        **config,
    )
    with strategy_ranks(model, instances=4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StrategyRanks]:
    with ranks_of(tmp_path_factory.mktemp("emulated"), "llama") as ranks:
        yield ranks


@pytest.fixture(scope="module", params=WINDOWED)
def windowed_gang(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StrategyRanks]:
    folder, layer_types = tmp_path_factory.mktemp("windowed"), WINDOWED[request.param]
    with ranks_of(folder, request.param, sliding_window=9, layer_types=layer_types) as ranks:
        yield ranks


def point(strategy: str, layer: str, ratio: float | Ratios, levels: int = 3) -> Point:
    branch = Branch(
        tokens=TOKENS,
        group_shape="2+2",
        strategy="tp" if strategy == "tp" else "ntp",
        levels=levels,
        scoring=ImportanceScoring(layer, 8),
    )
    drop_ratios = ((ratio,),) if isinstance(ratio, float) else ratio
    return Point(branch=branch, drop_ratios=drop_ratios)


@pytest.mark.parametrize(
    ("strategy", "layer", "ratio", "levels"),
    [
        ("ntp", "previous", 0.5, 3),
        ("ntp", "same", 0.7, 3),
        ("ntp", "same", 0.4, 2),
        ("tp", "previous", 0.6, 3),
        ("tp", "same", 0.5, 3),
        ("ntp", "same", ((0.0,), (0.7, 0.2), (0.0,), (0.5,)), 3),
        ("ntp", "previous", ((0.9,), (0.1, 0.6), (0.0, 0.8), (0.0,)), 3),
        ("tp", "same", ((0.0,), (0.0,), (0.3, 0.7), (0.0,)), 3),
    ],
    ids=str,
)
def test_one_process_computes_what_ranks_compute(
    gang: StrategyRanks, strategy: str, layer: str, ratio: float | Ratios, levels: int
) -> None:
    check_against_ranks(gang, point(strategy, layer, ratio, levels))


@pytest.mark.parametrize("layer", ["previous", "same"])
@pytest.mark.parametrize("strategy", ["ntp", "tp"])
def test_layers_with_a_window_drop_nothing_and_sinks_count_once(
    windowed_gang: StrategyRanks, strategy: str, layer: str
) -> None:
    check_against_ranks(windowed_gang, point(strategy, layer, 0.6))


def check_against_ranks(gang: StrategyRanks, point: Point) -> None:
    spec = gang.network.spec
    group = point.group(spec, TOKENS)
    group = replace(group, plan=replace(group.plan, sinks=2, tail=5))
    prompt = gang.prompt(0, TOKENS)
    with torch.inference_mode():
        first = FirstLayer.of(gang.network, prompt.tolist())
        last_part = range(EVEN[-2], TOKENS)
        emulated = EmulatedPrompt(gang.network, first, last_part).logits(group)
        exact = EmulatedPrompt(gang.network, first, last_part).logits(
            EmulatedGroup(spec=spec, plan=CsaPlan(locations=("0-0-0",), levels=1), tokens=TOKENS)
        )
    name = "sp_tp" if group.tensor_parallel else "csa"
    step = step_of(EVEN, [TOKENS], strategy=name, csa=group.plan)
    with torch.inference_mode():
        computed = gang.network.logits(gang.run(step, strategy_of)[-1].x_td)
        dense = gang.network.logits(gang.forwards(step)[0].x_td[EVEN[-2] :])
    assert_near(emulated, computed)
    assert_near(exact, dense)
    assert (emulated - exact).abs().max() > 1e-3, "nothing was dropped"


def test_what_configurations_have_in_common_changes_none_of_them(gang: StrategyRanks) -> None:
    points = [
        point(strategy, layer, ratio)
        for strategy, layer in (("ntp", "previous"), ("ntp", "same"), ("tp", "previous"))
        for ratio in (0.3, 0.8)
    ]
    groups = [point.group(gang.network.spec, TOKENS - 3) for point in points]
    ids = gang.prompt(1, TOKENS).tolist()
    scored = range(TOKENS - 4, TOKENS)
    with torch.inference_mode():
        behind = FirstLayer.of(gang.network, ids[:50]).followed_by(gang.network, ids[50:])
        shared = EmulatedPrompt(gang.network, behind, scored)
        whole = FirstLayer.of(gang.network, ids)
        for group in [*groups, *groups]:
            alone = EmulatedPrompt(gang.network, whole, scored).logits(group)
            assert_near(shared.logits(group), alone)


def test_a_text_is_the_same_behind_whatever_stands_before_it(
    gang: StrategyRanks, windowed_gang: StrategyRanks
) -> None:
    for each in (gang, windowed_gang):
        check_shared_text(each)


def check_shared_text(gang: StrategyRanks) -> None:
    ids, other = gang.prompt(1, TOKENS).tolist(), gang.prompt(2, 9).tolist()
    with torch.inference_mode():
        text = SharedText.of(gang.network, ids[9:], 9)
        for before in (ids[:9], other):
            shared = text.behind(gang.network, before)
            whole = FirstLayer.of(gang.network, [*before, *ids[9:]])
            for name in ("q_nhd", "k_ngd", "v_ngd", "x_nd"):
                assert_near(getattr(shared, name), getattr(whole, name))
        begin = SharedText.of(gang.network, ids, 0).behind(gang.network, [])
        assert_near(begin.x_nd, FirstLayer.of(gang.network, ids).x_nd)


# --- questions ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def needle() -> LocalModel:
    return LocalModel.load(shipped_models() / "needle")


@pytest.mark.parametrize(
    "kind",
    [
        NeedleQuestions("two_hop", "last"),
        TaskQuestions("variables"),
        NextTokens("question answering"),
        PlainText(),
    ],
    ids=lambda kind: kind.name,
)
def test_with_nothing_dropped_nothing_is_lost(needle: LocalModel, kind: QuestionKind) -> None:
    spec = needle.network.spec
    with torch.inference_mode():
        asked = next(iter(kind.asked(needle, 512, 0)))
        exact_group = EmulatedGroup(
            spec=spec, plan=CsaPlan(locations=("0-0-0",), levels=1), tokens=asked.tokens
        )
        exact = asked.prompt.logits(exact_group)
        by_levels = asked.prompt.logits(point("ntp", "same", 0.0).group(spec, asked.tokens))
        blind = exact.flip(1)
    score = asked.score(exact, by_levels)
    assert score.questions >= score.right_exact == score.right
    assert abs(score.divergence) < 1e-4
    assert asked.score(exact, blind).right < score.questions
    assert asked.score(exact, blind).divergence > 1.0


def test_other_seeds_ask_for_other_facts(needle: LocalModel) -> None:
    with torch.inference_mode():
        first, same, other = (
            [
                question.answer
                for question in NeedleQuestions("multi_key", "last", seed).asked(needle, 256, 0)
            ]
            for seed in (1, 1, 2)
        )
    assert first == same
    assert first != other


def test_kinds_have_different_names_and_each_category_has_a_stand_in() -> None:
    names = [kind.name for kind in QUESTION_KINDS]
    assert len(set(names)) == len(names)
    by_category: dict[str | None, list[str]] = {}
    for name in names:
        by_category.setdefault(category_of(name), []).append(name)
    assert set(by_category) == {*CATEGORIES, None}
    for category in CATEGORIES:
        *questions, stand_in = by_category[category]
        assert stand_in == f"{category}: next token"
        assert questions


def test_a_task_s_answer_ends_with_any_mark_but_not_within_a_word(needle: LocalModel) -> None:
    with torch.inference_mode():
        (asked, *_) = TaskQuestions("one_passage").asked(needle, 512, 0)
    written = write_prompt("one_passage", 511, "1/0", needle.count)
    assert needle.tokenizer.decode(asked.answer) == f" {written.answer}"
    assert asked.tokens == len(needle.tokenizer.encode(written.text)) <= 512
    entries = needle.tokenizer.get_vocab()
    right = {".": True, "\u010a": True, "\u0120and": True, "s": False, "7": False}

    def greedy(ids: list[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(ids), len(entries)).float()

    for entry, expected in right.items():
        logits_sv = greedy([*asked.answer, entries[entry]])
        assert asked.score(logits_sv, logits_sv).right == expected, entry
    (stop,) = needle.stop_ids
    assert asked.score(*2 * (greedy([*asked.answer, stop]),)).right == 1
    assert asked.score(*2 * (greedy([stop, *asked.answer[1:], stop]),)).right == 0


@pytest.mark.parametrize("tokens", [512, 3_000, 10_000])
def test_next_tokens_are_compared_at_ten_thousand_positions(
    needle: LocalModel, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    monkeypatch.setattr(FirstLayer, "of", lambda network, ids: None)
    scored: list[range] = []

    def remember(network: Any, first: Any, rows: range) -> None:
        scored.append(rows)

    monkeypatch.setattr(questions, "EmulatedPrompt", remember)
    kind = NextTokens("aggregation")
    lengths = [asked.tokens for index in range(4) for asked in kind.asked(needle, tokens, index)]
    assert ENOUGH_POSITIONS <= sum(map(len, scored)) < ENOUGH_POSITIONS + 4 * max(map(len, scored))
    for rows, length in zip(scored, lengths, strict=True):
        assert rows.stop == length <= tokens
        assert len(rows) <= min(length / 4, 2_048)


@dataclass
class ExactKind:
    """Kind of which exact attention answers a share; it counts how often it is asked."""

    name: str
    share: float
    rounds: int = 10
    times: int = 0

    def asked(self, model: Any, tokens: int, number: int) -> Iterator[Any]:
        for index in range(40):
            self.times += 1
            right = int((index + 1) * self.share) > int(index * self.share)
            yield ExactPrompt(right)


@dataclass
class ExactPrompt:
    """Prompt that exact attention answers, or not."""

    right: bool
    tokens: int = 64

    @property
    def prompt(self) -> ExactPrompt:
        return self

    def logits(self, group: EmulatedGroup) -> float:
        assert group.plan.levels == 1
        return 0.0

    def score(self, exact: float, sparse: float) -> Score:
        return Score(questions=1, right_exact=self.right, right=self.right, divergence=0.0)


def test_next_tokens_are_asked_where_the_model_fails_a_category(gang: StrategyRanks) -> None:
    model = LocalModel(gang.network, None, frozenset())  # type: ignore[arg-type]
    shares = {
        "multi_key, question last": 0.9,
        "two_hop, question first": 0.1,
        "retrieval: next token": 1.0,
        "tracing: variables": 0.4,
        "tracing: next token": 1.0,
        "plain text": 1.0,
    }
    kinds = [ExactKind(name, share) for name, share in shares.items()]
    asked = answered_kinds(kinds, model, 64, {})
    assert [kind.name for kind in asked] == [
        "multi_key, question last",
        "tracing: next token",
        "plain text",
    ]
    times = [kind.times for kind in kinds]
    assert [number > 0 for number in times] == [True, True, False, True, False, False]
    assert max(times) < 40, "a part of the round decides"
    # What was stored decides without another question.
    stored = {"multi_key, question last": (400, 350), "tracing: next token": (2_500, 2_500)}
    kinds = [replace(kind, times=0) for kind in kinds]
    again = answered_kinds(kinds, model, 64, stored)
    assert [kind.name for kind in again] == [kind.name for kind in asked]
    assert [kind.times > 0 for kind in kinds] == [False, True, False, False, False, False]


# --- what is asked -----------------------------------------------------------------------------


@dataclass
class ScriptedKind:
    """Ten questions a round, of which so many are lost as the ratio says."""

    name: str
    share: float
    rounds: int = 4

    def asked(self, model: Any, tokens: int, number: int) -> Iterator[Any]:
        yield ScriptedPrompt(self.share)


@dataclass
class ScriptedPrompt:
    """Prompt whose logits are the group's drop ratio, which is also the fraction of lost
    answers."""

    share: float
    tokens: int = 64

    @property
    def prompt(self) -> ScriptedPrompt:
        return self

    def logits(self, group: EmulatedGroup) -> float:
        groups = group.plan.layer_groups
        return max((max(of_layers.drop_ratios[0]) for of_layers in groups), default=0.0)

    def spreads(self, group: EmulatedGroup) -> torch.Tensor:
        return torch.ones(LAYERS, KV_HEADS)

    def score(self, exact: float, sparse: float) -> Score:
        lost = round(100 * min(1.0, self.share * sparse))
        return Score(questions=100, right_exact=100, right=100 - lost, divergence=lost / 100)


BRANCHES = Enumeration(
    lengths=(64,),
    group_shapes=("2",),
    scoring=(("ntp", ImportanceScoring("same", 8)),),
    drop_ratios=(0.1, 0.5, 0.9, 0.95),
    layered_shapes=(),
)


def run(
    monkeypatch: pytest.MonkeyPatch,
    path: Path,
    kinds: list[ScriptedKind],
    network: Any,
    limit_s: float = float("inf"),
    rounds: int = 10,
) -> dict[tuple[float, str], int]:
    """Run the profile; return rounds by drop ratio and kind, of all runs so far."""
    monkeypatch.setattr(profile, "QUESTION_KINDS", tuple(kinds))
    model = LocalModel(network, None, frozenset())  # type: ignore[arg-type]
    with ScalingInformationBase.create(path, HERE) as base:
        AccuracyProfile(
            base, model, BRANCHES, lambda line: None, limit_s=limit_s, rounds=rounds
        ).run()
        asked: dict[tuple[float, str], int] = {}
        for row in base.rows(AccuracyRow):
            at = row.drop_ratio, row.kind
            asked[at] = asked.get(at, 0) + 1
    return asked


def test_a_branch_ends_where_most_is_lost(
    gang: StrategyRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = run(monkeypatch, tmp_path / "sib", [ScriptedKind("a", 0.8)], gang.network)
    assert rounds == {(ratio, "a"): 4 for ratio in (0.1, 0.5, 0.9)} | {(0.95, "a"): 1}
    assert HOPELESS == 0.5


def test_a_kind_that_surely_loses_less_is_not_asked_on(
    gang: StrategyRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds = [ScriptedKind("worse", 0.5), ScriptedKind("better", 0.1)]
    rounds = run(monkeypatch, tmp_path / "sib", kinds, gang.network)
    assert (rounds[0.5, "worse"], rounds[0.5, "better"]) == (4, 1)


def test_what_drops_less_than_what_loses_nothing_is_not_asked_on(
    gang: StrategyRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rounds = run(monkeypatch, tmp_path / "sib", [ScriptedKind("a", 0.0)], gang.network)
    assert rounds == {(0.1, "a"): 1, (0.5, "a"): 1, (0.9, "a"): 1, (0.95, "a"): 4}


def test_so_many_rounds_are_asked_at_most(
    gang: StrategyRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds = [ScriptedKind("a", 0.1)]
    assert set(run(monkeypatch, tmp_path / "sib", kinds, gang.network, rounds=3).values()) == {3}


def measured(ratio: float, lost: int, tokens: int = 64) -> AccuracyRow:
    return AccuracyRow(
        kind="multi_key, question last",
        tokens=tokens,
        strategy="ntp",
        levels=2,
        drop_ratio=ratio,
        importance_layer="same",
        importance_window=8,
        group_shape="2",
        questions=400,
        right_exact=400,
        right=400 - lost,
        divergence=0.0,
        date="2026-11-24",
    )


def chosen(
    *rows: AccuracyRow, bounds: tuple[float, ...], shipped: Support | None = None
) -> list[float]:
    """Return the ratios to measure at twice the length."""
    points = ChosenPoints(
        **vars(BRANCHES), measured=rows, shipped=shipped, layers=LAYERS, bounds=bounds
    )
    return [point.largest for point in points.points(128)]


def test_of_long_prompts_only_what_bounds_choose_is_measured() -> None:
    rows = [measured(0.1, 0), measured(0.5, 0), measured(0.9, 4), measured(0.95, 40)]
    assert chosen(*rows, bounds=(0.0, 0.01)) == [0.5, 0.9]
    assert chosen(*rows, bounds=(0.0,)) == [0.5]
    assert chosen(*rows, bounds=(1.0,)) == [0.95]
    # What the same length has shown so far does not change what is measured.
    assert chosen(*rows, measured(0.5, 200, tokens=128), bounds=(0.0,)) == [0.5]
    support = Support.of(accuracy_samples(rows[:1], layers=LAYERS))
    assert chosen(*rows, bounds=(0.0,), shipped=support) == [0.5]
    assert chosen(bounds=(0.0,), shipped=support) == [0.1]
    assert chosen(bounds=(0.0,)) == []


def test_bounds_choose_no_points_by_layer() -> None:
    groups = LayerGroups.similar([0.9, 0.9, 0.3, 0.3], [[1.0, 0.5]] * 4)
    layered = replace(BRANCHES, layered_shapes=("2",))
    points = ChosenPoints(**vars(layered), measured=(), shipped=None, layers=4, bounds=(1.0,))
    for each, some in ((points, False), (layered, True)):
        found = [*each.layer_points(64, groups), *each.graded_points(64, groups)]
        assert bool(found) == some


@pytest.mark.parametrize(("groups", "layered"), [(["2"], ("2",)), (["2+2", "4"], ())])
def test_only_the_groups_asked_for_are_measured_by_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: list[str], layered: tuple[str, ...]
) -> None:
    made: list[Enumeration] = []
    monkeypatch.setattr(AccuracyProfile, "run", lambda self: made.append(self.enumeration))
    arguments = {"model": "needle"}
    application = {"name": "csps", "import_path": "csps.services.app:build", "args": arguments}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [application]}))
    paths = ["--config", str(config), "--sib", str(tmp_path / "sib")]
    command.main(["accuracy", "--groups", *groups, *paths])
    assert [(each.group_shapes, each.layered_shapes) for each in made] == [(tuple(groups), layered)]


def test_an_interrupted_run_goes_on_where_it_was(
    gang: StrategyRanks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds, path = [ScriptedKind("a", 0.1)], tmp_path / "sib"
    assert run(monkeypatch, path, kinds, gang.network, limit_s=-1.0) == {}
    once = run(monkeypatch, path, [replace(kinds[0], rounds=1)], gang.network)
    assert set(once.values()) == {1}
    assert set(run(monkeypatch, path, kinds, gang.network).values()) == {4}
    assert set(run(monkeypatch, path, kinds, gang.network).values()) == {4}


def test_the_command_stores_rows_and_prints_the_loss(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "QUESTION_KINDS", (ScriptedKind("a", 0.5, rounds=1),))
    arguments = {"model": "needle"}
    application = {"name": "csps", "import_path": "csps.services.app:build", "args": arguments}
    config, sib = tmp_path / "config.yaml", tmp_path / "sib"
    config.write_text(yaml.safe_dump({"applications": [application]}))
    paths = ["--config", str(config), "--sib", str(sib)]
    command.main(["accuracy", "--quick", "--lengths", "64", *paths])
    base = ScalingInformationBase.read(sib, None)
    assert base is not None
    with base:
        rows = base.rows(AccuracyRow)
    assert {row.tokens for row in rows} == {64}
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if " of 100;" in line]) == len(rows)
    assert any("45.0% [" in line for line in said), "half of what 0.9 drops"


def test_losses_are_printed_by_category_and_few_questions_are_marked() -> None:
    tracing = replace(measured(0.9, 2), kind="tracing: variables", questions=100, right_exact=100)
    tokens = replace(measured(0.9, 9), kind="aggregation: next token")
    rows = [measured(0.9, 0), replace(tracing, right=98), tokens]
    (_, line) = profile.accuracy_lines(rows, layers=LAYERS)
    assert line.split(" of ", 1)[1] == (
        "100; retrieval 0.0%; tracing 2.0%; aggregation 2.2% of next tokens; "
        "few questions: counts as 7.0%"
    )
    (_, line) = profile.accuracy_lines([measured(0.9, 0)], layers=LAYERS)
    assert line.endswith("0.0% [0.0%, 1.0%] of 400")
