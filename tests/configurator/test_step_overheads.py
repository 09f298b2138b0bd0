"""Overheads of steps, recovered from steps whose overheads are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipeline_groups import TIMES, group

from csps.configurator.model.phase_times import ExchangeTimes, StepTimes
from csps.configurator.model.scaling_information_base import PhaseRow
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import prefill_seconds, work_seconds
from csps.configurator.plan.profiles import (
    BESIDE,
    CROWDING,
    STEP,
    STRATEGY,
    measured_settings,
    with_overheads,
)
from csps.protocols.attention.csa import CsaSettings
from csps.protocols.attention.plan import option_name

SENT = ExchangeTimes(call=4e-4, message=1e-4, byte=5e-10, overlapped=7e-10)
AROUND = StepTimes(fixed=5e-3, dropping=2e-3)
TOKEN = 3e-6
OPTIONS = (
    "ulysses",
    *(
        option_name(name, CsaSettings(levels=1, strategy=strategy, micro_partitions=((micro,),)))
        for name, strategy in (("csa", "ntp"), ("sp_tp", "tp"))
        for micro in (1, 8)
    ),
    *(
        option_name(name, CsaSettings(levels=2, strategy=strategy, drop_ratios=((0.5,),)))
        for name, strategy in (("csa", "ntp"), ("sp_tp", "tp"))
    ),
)
TWO = group(("0-0-0", "0-0-1"))
TRUE = replace(
    TIMES,
    rest=replace(TIMES.rest, each=TIMES.rest.each + TOKEN),
    exchange=SENT,
    step=AROUND,
)
BESIDE_IT = replace(
    TIMES,
    exchange=ExchangeTimes(call=3e-5, message=2e-5, byte=3e-10),
    step=StepTimes(fixed=1e-3),
)


def work(option: str, tokens: int, of: SimulatedGroup) -> float:
    return float(work_seconds(of, [measured_settings(option)], tokens)[0] * of.tp)


def row(
    option: str,
    tokens: int,
    *,
    of: SimulatedGroup,
    phase: str = STEP,
    seconds: float | None = None,
) -> PhaseRow:
    seconds = work(option, tokens, of) if seconds is None else seconds
    return PhaseRow(
        strategy=option if phase.startswith(STEP) else STRATEGY,
        group_shape=str(of.members),
        tp=of.tp,
        phase=phase,
        tokens=tokens,
        keys=0,
        bytes=0,
        seconds=float(seconds),
        load=0.0,
        date="",
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_planted_overheads_are_found_on_any_group(tp: int) -> None:
    """Steps of two instances on one server tell of four on two servers."""
    of = replace(TWO, tp=tp, times=TRUE)
    rows = [row(option, tokens, of=of) for tokens in (256, 1_000, 4_000) for option in OPTIONS]
    rows.append(row("ulysses", 256, of=of, phase="qkv"))
    found = with_overheads(replace(group(), tp=tp), rows)
    assert found.rest.each == pytest.approx(TRUE.rest.each, rel=1e-6)
    for name in ("call", "message", "byte", "beside", "overlapped"):
        assert getattr(found.exchange, name) == pytest.approx(getattr(SENT, name), rel=1e-6)
    for name in ("fixed", "dropping", "crowding"):
        assert getattr(found.step, name) == pytest.approx(getattr(AROUND, name), rel=1e-6)
    assert replace(found, rest=TIMES.rest, exchange=TIMES.exchange, step=TIMES.step) == TIMES


@pytest.mark.slow
def test_steps_that_were_measured_on_two_servers_are_simulated_there() -> None:
    """SP-TP sends other messages than on one."""
    of = replace(group(), times=TRUE)
    rows = [
        replace(row(option, tokens, of=of), group_shape="2+2")
        for tokens in (256, 1_000, 4_000)
        for option in OPTIONS
    ]
    found = with_overheads(TWO, rows)
    assert found.exchange.message == pytest.approx(SENT.message, rel=1e-6)
    assert found.exchange.overlapped == pytest.approx(SENT.overlapped, rel=1e-6)


def test_threads_beside_are_fitted_apart_and_crowding_is_included() -> None:
    """Bytes that they move take no time of the thread that computes; all else is on one core."""
    computing, beside = replace(TWO, times=TRUE), replace(TWO, times=BESIDE_IT)
    rows = []
    for tokens in (256, 1_000, 4_000):
        for number, option in enumerate(OPTIONS):
            side = work(option, tokens, beside) - work(option, tokens, TWO)
            both = work(option, tokens, computing) + side
            rows += [
                row(option, tokens, of=TWO, seconds=both),
                row(option, tokens, of=TWO, phase=BESIDE, seconds=side),
                row(option, tokens, of=TWO, phase=CROWDING, seconds=1.05 + 0.01 * number),
            ]
    found = with_overheads(group(), rows)
    sent, side_sent = found.exchange, BESIDE_IT.exchange
    assert sent.byte == pytest.approx(SENT.byte, rel=1e-6)
    assert sent.beside == pytest.approx(side_sent.byte, rel=1e-6)
    assert sent.call == pytest.approx(SENT.call + side_sent.call, rel=1e-6)
    assert sent.message == pytest.approx(SENT.message + side_sent.message, rel=1e-6)
    assert found.step.fixed == pytest.approx(AROUND.fixed + BESIDE_IT.step.fixed, rel=1e-6)
    assert found.step.crowding == pytest.approx(1.08)


def test_without_steps_phases_are_all_that_is_known() -> None:
    assert with_overheads(group(), []) is TIMES
    assert with_overheads(group(), [row("ulysses", 256, of=replace(TWO, tp=2))]) is TIMES


def test_work_is_the_same_over_any_link_and_at_least_what_fills_the_cores() -> None:
    of = group(cores=2.0)
    settings = [measured_settings(option) for option in OPTIONS]
    fast = replace(of, wiring=replace(of.wiring, latency_w=0 * of.wiring.latency_w))
    work = work_seconds(of, settings, 2_000)
    assert work.tolist() == work_seconds(fast, settings, 2_000).tolist()
    assert (prefill_seconds(of, settings, 2_000) >= work / 2 * (1 - 1e-9)).all()


def test_exact_attention_is_cut_where_exchanges_are_free_and_not_where_each_costs() -> None:
    """The same links and phases."""
    whole, cut = measured_settings("ulysses"), CsaSettings(strategy="ntp")
    dear = replace(TIMES, exchange=ExchangeTimes(call=5e-3))
    seconds = {
        name: prefill_seconds(group(times=times), [whole, cut], 8_192).tolist()
        for name, times in (("free", TIMES), ("dear", dear))
    }
    assert seconds["free"][1] < seconds["free"][0]
    assert seconds["dear"][1] > seconds["dear"][0]


def test_time_of_threads_beside_is_hidden_while_ranks_only_wait() -> None:
    """Two ranks of a core each: who overlaps computes while messages are moved."""
    whole, cut = measured_settings("ulysses"), CsaSettings(strategy="ntp")
    busy = replace(TIMES, exchange=ExchangeTimes(beside=5e-9))  # half of what the wire takes
    seconds = {
        name: prefill_seconds(group(times=times, cores=4.0), [whole, cut], 8_192)
        for name, times in (("free", TIMES), ("busy", busy))
    }
    grown = seconds["busy"] / seconds["free"]
    assert grown[0] == pytest.approx(1.0)
    assert grown[1] > 1.02


def test_crowded_cores_take_longer_and_others_do_not() -> None:
    crowded = replace(TIMES, step=StepTimes(crowding=1.25))
    asked = [measured_settings("ulysses"), CsaSettings(strategy="ntp")]
    for cores, least in ((None, 1.0), (4.0, 1.0), (1.0, 1.05)):
        alone = prefill_seconds(group(cores=cores), asked, 8_192)
        among = prefill_seconds(group(cores=cores, times=crowded), asked, 8_192)
        assert (among >= least * alone).all()
        assert (among <= (1.25 if least > 1 else 1.0) * alone * (1 + 1e-9)).all()
