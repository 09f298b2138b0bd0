"""What steps take beside their phases, recovered from steps whose overheads are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pipeline_groups import TIMES, group

from csps.configurator.phase_times import ExchangeTimes
from csps.configurator.pipeline.cases import SimulatedGroup
from csps.configurator.pipeline.prefill import prefill_seconds, work_seconds
from csps.configurator.profiles import STRATEGY
from csps.configurator.scaling_information_base import PhaseRow
from csps.configurator.step_overheads import STEP, measured_settings, with_overheads
from csps.protocols.csa_settings import CsaSettings
from csps.protocols.options import option_name

SENT = ExchangeTimes(call=4e-4, message=1e-4, byte=5e-10)
TOKEN = 3e-6
OPTIONS = (
    "ulysses",
    *(
        option_name(name, CsaSettings(levels=1, strategy=strategy, micro_partitions=((micro,),)))
        for name, strategy in (("csa", "ntp"), ("sp_tp", "tp"))
        for micro in (1, 8)
    ),
)
TWO = group(("0-0-0", "0-0-1"))
TRUE = replace(TIMES, rest=replace(TIMES.rest, each=TIMES.rest.each + TOKEN), exchange=SENT)


def row(option: str, tokens: int, *, of: SimulatedGroup, phase: str = STEP) -> PhaseRow:
    seconds = work_seconds(of, [measured_settings(option)], tokens)[0] * of.tp
    return PhaseRow(
        strategy=option if phase == STEP else STRATEGY,
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
def test_what_was_planted_is_found_on_whichever_group(tp: int) -> None:
    """Steps of two instances on one server tell of four on two servers."""
    of = replace(TWO, tp=tp, times=TRUE)
    rows = [row(option, tokens, of=of) for tokens in (256, 1_000, 4_000) for option in OPTIONS]
    rows.append(row("ulysses", 256, of=of, phase="qkv"))
    found = with_overheads(replace(group(), tp=tp), rows)
    assert found.rest.each == pytest.approx(TRUE.rest.each, rel=1e-6)
    for name in ("call", "message", "byte"):
        assert getattr(found.exchange, name) == pytest.approx(getattr(SENT, name), rel=1e-6)
    assert replace(found, rest=TIMES.rest, exchange=TIMES.exchange) == TIMES


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
