"""Buckets of the cost table by regressors and the pipeline simulator: what is offered is feasible,
no slower with a wider bound, and exact where nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from pipeline_groups import group

from csps.configurator.model.phase_times import Amounts
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import WHOLE, prefill_seconds, ring_seconds
from csps.configurator.pipeline.program import LinkSpeed
from csps.configurator.plan.predicted_options import (
    PAYS,
    RESOLUTION,
    DirectAnswerer,
    PredictedOptions,
    answered_space,
    bucket_ends,
    exact_candidates,
    exact_seconds,
)
from csps.configurator.plan.strategy_rules import StrategyRules
from csps.configurator.regressors.direct import Predicted
from csps.configurator.regressors.samples import Setting
from csps.configurator.search.search import SearchProblem
from csps.configurator.search.space import LOSSES, LayerGroups
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import (
    RINGS,
    StrategyChoice,
    StrategyQuestion,
    StrategyQuestions,
    parse_option,
)
from csps.protocols.core.topology import GroupShape, Topology

LAYERS, TOKENS = 4, 3 << 13


class Says:
    """Regressors of an objective that always make the same prediction."""

    def predict(self, problem: SearchProblem, exact_seconds: float) -> Predicted:
        return Predicted(
            tensor_parallel=0.0, whole=0.0, levels=3.0, ratios=(0.6,), micro=(8.0, 4.0, 2.0, 1.0)
        )


class Loses:
    """F_Ad that loses everything if the previous layer scores."""

    longest = 1 << 20

    def of_group(
        self, locations: Sequence[str], *, layers: int, tokens: int
    ) -> Callable[[Sequence[CsaSettings]], list[float]]:
        return lambda configurations: [
            self._lost(configuration) for configuration in configurations
        ]

    def loss(self, settings: Sequence[Setting]) -> Amounts:
        return np.array([self._lost(setting.csa) for setting in settings])

    def _lost(self, configuration: CsaSettings) -> float:
        if configuration.lossless:
            return 0.0
        if configuration.importance_layer == "previous":
            return 1.0
        ratio = max(map(max, configuration.drop_ratios))
        return 1e-4 + max(0.0, ratio - 0.5) * 0.2


def group_of(places: Sequence[str]) -> SimulatedGroup:
    return group(tuple(places), layers=LAYERS)


TWO_BY_TWO = GroupShape((2, 2)).places


PREDICTED = PredictedOptions(
    answerer=DirectAnswerer(
        space=answered_space(LayerGroups.alike(LAYERS)),
        models={"ttft": Says(), "accuracy": Says()},  # type: ignore[dict-item]
    ),
    accuracy=Loses(),  # type: ignore[arg-type]
    group_of=group_of,
)
SHAPE = group_of(TWO_BY_TWO).shape
RULES = StrategyRules(SHAPE, predicted=PREDICTED, accuracy=Loses())  # type: ignore[arg-type]


def answer(rules: StrategyRules = RULES, **asked: Any) -> tuple[StrategyChoice, ...]:
    problem = StrategyQuestion(
        **{"csa": None, "servers": (2, 2), "tp": 1, "tokens": TOKENS, "bounded": True, **asked}
    )
    (chosen,) = rules.answer(StrategyQuestions(asked=(problem,))).chosen
    return chosen


@pytest.fixture(scope="module")
def offered() -> tuple[StrategyChoice, ...]:
    return answer()


def test_wider_bounds_take_less_time_and_times_are_the_simulators(
    offered: tuple[StrategyChoice, ...],
) -> None:
    losses = [choice.loss for choice in offered]
    assert losses[0] == 0.0
    assert losses == sorted(losses)  # type: ignore[type-var]
    assert max(loss or 0.0 for loss in losses) <= LOSSES[-1]
    of = group_of(TWO_BY_TWO)
    exact_s = exact_seconds(of, TOKENS)
    for choice in offered:
        strategy, settings = parse_option(choice.strategy)
        if settings is not None:
            (seconds,) = prefill_seconds(of, [settings], TOKENS)
            assert choice.permille == round(1000 * seconds / exact_s)
            assert strategy == ("levels" if settings.lossless else "csa")
    least = [
        min(choice.permille for choice in offered if (choice.loss or 0.0) <= bound)
        for bound in LOSSES
    ]
    assert least == sorted(least, reverse=True)
    assert least[-1] < least[0] < 1000


@pytest.mark.parametrize(
    ("servers", "tokens"), [((1, 1), 3 << 9), ((2, 2), 3 << 12), ((1, 1), 3 << 16)]
)
def test_steps_in_time_lie_between_exact_attention_and_the_fastest_option(
    servers: tuple[int, ...], tokens: int
) -> None:
    """At every length, also where nothing is lost, a tighter bound on TTFT drops a little more."""

    class Nothing(Loses):
        def _lost(self, configuration: CsaSettings) -> float:
            return 0.0

    nothing: Any = Nothing()
    for accuracy in (PREDICTED.accuracy, nothing):
        rules = StrategyRules(SHAPE, predicted=replace(PREDICTED, accuracy=accuracy))
        offered = answer(rules, servers=servers, tokens=tokens)
        exact = min(
            option.permille
            for option in offered
            if (csa := parse_option(option.strategy).csa) is None or csa.lossless
        )
        fastest = min(option.permille for option in offered)
        assert fastest < 0.95 * exact
        dropping = {
            option.permille: max(map(max, csa.drop_ratios))
            for option in offered
            if (csa := parse_option(option.strategy).csa) is not None and not csa.lossless
        }
        by_time = [dropping[taken] for taken in sorted(dropping, reverse=True)]
        assert len(by_time) >= 4
        if accuracy is nothing:
            assert max(by_time) == 0.98
            assert by_time == sorted(by_time)


def test_a_loss_below_the_resolution_is_none(
    offered: tuple[StrategyChoice, ...],
) -> None:
    assert RESOLUTION > 1e-4
    dropping = [parse_option(choice.strategy).csa for choice in offered if choice.loss == 0]
    assert any(csa is not None and not csa.lossless for csa in dropping)


def test_every_prompt_of_a_bucket_meets_the_bound() -> None:
    """Options that lose nothing in the bucket's middle, but all at one of its ends, are not
    offered."""

    class Short(Loses):
        def of_group(
            self, locations: Sequence[str], *, layers: int, tokens: int
        ) -> Callable[[Sequence[CsaSettings]], list[float]]:
            if tokens != bucket_ends(TOKENS)[0]:
                return super().of_group(locations, layers=layers, tokens=tokens)
            return lambda configurations: [
                1.0 if max(map(max, configuration.drop_ratios)) > 0.4 else self._lost(configuration)
                for configuration in configurations
            ]

    assert bucket_ends(TOKENS) == (1 << 14, (1 << 15) - 1)
    short: Any = Short()
    found = answer(StrategyRules(SHAPE, predicted=replace(PREDICTED, accuracy=short)))
    dropping = [csa.drop_ratios for choice in found if (csa := parse_option(choice.strategy).csa)]
    assert 0.2 < max(max(map(max, ratios)) for ratios in dropping) <= 0.4


def test_only_scoring_that_loses_little_is_offered(offered: tuple[StrategyChoice, ...]) -> None:
    found = [csa for choice in offered if (csa := parse_option(choice.strategy).csa)]
    assert {csa.importance_layer for csa in found if not csa.lossless} == {"same"}


def test_given_fields_stay_and_run_by_parts() -> None:
    fixed = CsaSettings(levels=2, tail=100, pipelined=False, importance_layer="same")
    given = ("levels", "tail", "pipelined")
    found = answer(csa=fixed, given=given, servers=(1, 1))
    assert found
    for choice in found:
        strategy, settings = parse_option(choice.strategy)
        assert settings is not None
        assert strategy in ("csa", "sp_tp")
        assert (settings.levels, settings.tail, settings.pipelined) == (2, 100, False)


def test_a_single_instance_is_exact_at_once() -> None:
    assert {(choice.strategy, choice.loss) for choice in answer(servers=(1,))} == {("ulysses", 0.0)}


@pytest.mark.parametrize("servers", [(2, 2), (2,)])
@pytest.mark.parametrize("tokens", [512, TOKENS])
@pytest.mark.parametrize("history", [0, 3 << 14])
def test_exact_attention_is_the_quickest_of_all_ways(
    servers: tuple[int, ...], tokens: int, history: int
) -> None:
    """SP-NTP whole and over levels, SP-TP, and both rings; behind history all of it but SP-TP."""
    (choice,) = answer(bounded=False, servers=servers, tokens=tokens, history=history)
    of, space = group_of(GroupShape(servers).places), PREDICTED.answerer.space
    ways = exact_candidates(space, of, history)
    assert {way.strategy for way in ways} == {"ntp"} | ({"tp"} if not history else set())
    seconds = dict(zip(ways, prefill_seconds(of, ways, tokens, history).tolist(), strict=True))
    rings = {ring: ring_seconds(of, ring, tokens, history) for ring in RINGS}
    least = min([*seconds.values(), *rings.values()])
    strategy, settings = parse_option(choice.strategy)
    if least >= PAYS * seconds[WHOLE]:
        assert settings is None
        assert strategy not in RINGS
        return
    assert choice.loss == 0.0
    assert choice.permille == max(1, round(1000 * least / seconds[WHOLE]))
    assert (rings[strategy] if settings is None else seconds[settings]) == least  # type: ignore[index]


def test_a_ring_is_taken_where_few_keys_serve_many_queries_over_one_slow_wire() -> None:
    slow = LinkSpeed(bytes_per_s=2e7, latency_s=1e-4, shared=True)

    def over_slow_links(places: Sequence[str]) -> SimulatedGroup:
        return group(tuple(places), layers=LAYERS, kv_heads=1, inside=slow)

    rules = StrategyRules(SHAPE, predicted=replace(PREDICTED, group_of=over_slow_links))
    (exact,) = answer(rules, bounded=False, servers=(4,))
    assert (exact.strategy, exact.loss) == ("ring_kv", 0.0)
    of = over_slow_links(GroupShape((4,)).places)
    share = ring_seconds(of, "ring_kv", TOKENS) / exact_seconds(of, TOKENS)
    assert exact.permille == round(1000 * share)
    (offered, *_) = answer(rules, servers=(4,))
    assert offered == exact


def quickly(places: Sequence[str]) -> SimulatedGroup:
    """Over links that cost nothing."""
    fast = LinkSpeed(bytes_per_s=1e13)
    return group(tuple(places), layers=LAYERS, inside=fast, between=fast)


def test_nothing_is_pipelined_where_links_cost_nothing() -> None:
    """Also where what moves least is."""
    rules = StrategyRules(SHAPE, link_ratio=25.0, predicted=replace(PREDICTED, group_of=quickly))
    places = Topology.of(TWO_BY_TWO)
    assert rules.choose(None, group=places, tp=1, tokens=TOKENS).strategy == "levels"
    (choice,) = answer(rules, bounded=False)
    assert parse_option(choice.strategy) == ("ulysses", None)
    sparse = [parse_option(choice.strategy).csa for choice in answer(rules) if choice.loss]
    assert sparse
    assert not any(settings.pipelined for settings in sparse if settings is not None)


def test_sparse_attention_is_pipelined_where_it_is_predicted_to_gain() -> None:
    of, found = group_of(TWO_BY_TWO), set()
    for strategy, csa in (parse_option(choice.strategy) for choice in answer() if choice.loss):
        assert csa is not None, strategy
        waiting = replace(csa, micro_partitions=None, pipelined=False)
        taken, waiting_s = prefill_seconds(of, [csa, waiting], TOKENS).tolist()
        assert taken < waiting_s if csa.pipelined else taken == waiting_s
        found.add(csa.pipelined)
    assert True in found
    asked = {"csa": CsaSettings(micro_partitions=((4, 1, 1),)), "given": ("micro_partitions",)}
    rules = StrategyRules(SHAPE, predicted=replace(PREDICTED, group_of=quickly), accuracy=Loses())  # type: ignore[arg-type]
    for choice in answer(rules, **asked):
        (settings,) = [parse_option(choice.strategy).csa]
        assert settings is None or settings.lossless or settings.pipelined


def test_between_racks_levels_are_more_and_a_slow_link_makes_dropping_pay_more() -> None:
    def offered(bytes_per_s: float, **shape: tuple[int, ...]) -> tuple[StrategyChoice, ...]:
        def over_racks(places: Sequence[str]) -> SimulatedGroup:
            return group(tuple(places), layers=LAYERS, racks=LinkSpeed(bytes_per_s=bytes_per_s))

        predicted = replace(PREDICTED, group_of=over_racks)
        rules = StrategyRules(SHAPE, predicted=predicted, accuracy=Loses())  # type: ignore[arg-type]
        return answer(rules, **shape)

    def levels(choices: Sequence[StrategyChoice]) -> set[int | None]:
        plans = [parse_option(choice.strategy).csa for choice in choices if choice.loss]
        assert plans
        return {plan.levels for plan in plans if plan is not None}

    inside_one = offered(1e6, servers=(1, 1, 1, 1))
    slow = offered(1e6, servers=(1, 1, 1, 1), racks=(2, 2))
    fast = offered(1e8, servers=(1, 1, 1, 1), racks=(2, 2))
    assert levels(inside_one) == {2}
    assert levels(slow) == levels(fast) == {3}
    assert min(choice.permille for choice in slow) < min(choice.permille for choice in fast)


def test_a_strategy_not_simulated_is_taken_if_it_moves_least_and_none_is_faster() -> None:
    usual = StrategyChoice(strategy="gathered_weights", reason="")
    asked = StrategyQuestion(csa=None, servers=(2, 2), tp=1, tokens=TOKENS)
    predicted = replace(PREDICTED, group_of=quickly)
    assert predicted.exact(asked, usual) is usual
    by_what_moves_least = predicted.options(replace(asked, bounded=True), usual)
    simulated = predicted.options(replace(asked, bounded=True), replace(usual, strategy="ulysses"))
    assert [choice.strategy.replace("ulysses", "gathered_weights") for choice in simulated] == [
        choice.strategy for choice in by_what_moves_least
    ]
    (exact,) = (choice for choice in by_what_moves_least if choice.strategy == "gathered_weights")
    assert (exact.permille, exact.loss) == (1000, 0.0)


def test_options_for_longer_prompts_than_measured_say_so() -> None:
    known = Loses()
    known.longest = 16_384
    rules = StrategyRules(
        SHAPE,
        predicted=replace(PREDICTED, accuracy=known),  # type: ignore[arg-type]
        accuracy=known,  # type: ignore[arg-type]
    )
    for tokens, said in ((12_288, False), (TOKENS, True)):
        for choice in answer(rules, tokens=tokens):
            settings = parse_option(choice.strategy).csa
            drops = settings is not None and not settings.lossless
            assert ("prompts of 16384 tokens" in choice.reason) == (said and drops)


def test_a_setting_keeps_longer_prompts_than_measured_exact() -> None:
    known = Loses()
    known.longest = 16_384
    predicted = replace(PREDICTED, accuracy=known, beyond_measured=False)  # type: ignore[arg-type]
    rules = StrategyRules(SHAPE, predicted=predicted)
    for tokens, refused in ((12_288, False), (TOKENS, True)):
        offered = answer(rules, tokens=tokens)
        assert (max(choice.loss or 0.0 for choice in offered) == 0) == refused
        for choice in offered:
            settings = parse_option(choice.strategy).csa
            assert settings is None or settings.lossless or not refused
            assert ("measured up to 16384 tokens" in choice.reason) == refused


def test_the_reason_says_why_nothing_is_dropped() -> None:
    def reasons(least: float) -> list[str]:
        class More(Loses):
            def _lost(self, configuration: CsaSettings) -> float:
                return 0.0 if configuration.lossless else least + super()._lost(configuration)

        more: Any = More()
        rules = StrategyRules(SHAPE, predicted=replace(PREDICTED, accuracy=more))
        return [choice.reason for choice in answer(rules, servers=(2,)) if choice.loss == 0]

    for least, why in (
        (0.0074, "the least loss that is offered is 0.75%"),
        (1.0, "nothing that drops tokens is quicker and known to lose 10% or less"),
    ):
        found = reasons(least)
        assert found
        assert all(why in reason for reason in found)


@pytest.mark.parametrize(("ratio", "loss"), [(0.0, 0.0), (0.4, 0.0), (0.9, pytest.approx(0.0801))])
def test_fields_fixed_by_the_client_are_used_and_their_loss_is_reported(
    ratio: float, loss: object
) -> None:
    fixed = CsaSettings(drop_ratios=((ratio,),), importance_layer="same")
    (choice,) = answer(bounded=False, csa=fixed)
    assert (choice.strategy, choice.loss) == ("csa", loss)


def test_without_measurements_all_is_exact_and_says_why() -> None:
    rules = StrategyRules(SHAPE, predicted="nobody has measured")
    (choice,) = answer(rules)
    assert choice.loss == 0.0
    assert parse_option(choice.strategy).csa is None
    assert "exact, because nobody has measured" in choice.reason
    fixed = CsaSettings(drop_ratios=((0.9,),), importance_layer="same")
    (choice,) = answer(rules, bounded=False, csa=fixed)
    assert choice.loss is None
    (many,) = answer(servers=(9, 9))
    assert "no group of so many instances" in many.reason
