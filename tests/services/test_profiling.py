"""Test what `csps profile` plans, fits and gives a server; no process is started here."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import make_checkpoint

from csps.configurator.costs.latency import LatencyKey, LinearDecodeCost, LinkCost, StepCost
from csps.configurator.costs.latency_tables import SHIPPED
from csps.configurator.model.scaling_information_base import (
    FitRow,
    LinkRow,
    ScalingInformationBase,
    StepRow,
)
from csps.models.checkpoints.checkpoint import weights_digest
from csps.models.network.spec import read_spec
from csps.protocols.core.errors import ConfigError
from csps.services.measured.fits import fit_table, fitted_points
from csps.services.measured.identity import identity_of
from csps.services.measured.scheduler_inputs import LATENCY, latency_table, ring_rules
from csps.services.profiling.command import coefficient_lines, link_lines, step_lines
from csps.services.profiling.runs import (
    GangLimits,
    RingRun,
    decode_runs,
    group_sizes,
    prefill_runs,
    ring_runs,
)
from csps.services.profiling.steps import even_slices
from csps.services.settings.settings import Settings

# --- the plan -----------------------------------------------------------------------------------

limits = st.builds(
    GangLimits,
    instances=st.integers(1, 20),
    kv_slots=st.integers(16, 60_000),
    max_positions=st.integers(16, 140_000),
)


@given(limits=limits, quick=st.booleans())
def test_every_step_of_the_plan_fits(limits: GangLimits, quick: bool) -> None:
    for run in prefill_runs(limits, quick=quick):
        slices = even_slices(run.tokens * run.batch, run.sp)
        assert run.chunks * max(share.span.length for share in slices) <= limits.kv_slots
        assert run.longest < limits.max_positions
        assert run.sp <= limits.instances


@given(limits=limits, quick=st.booleans(), max_prompt=st.integers(1, 50_000))
def test_every_batch_of_the_plan_fits(limits: GangLimits, quick: bool, max_prompt: int) -> None:
    for run in decode_runs(limits, quick=quick, answer=34, max_batch=8, max_prompt=max_prompt):
        slots = [0] * run.sp
        for number in range(run.batch):
            slots[number % run.sp] += 34
            for share in even_slices(run.context, run.sp):
                slots[share.instance] += share.span.length
        assert max(slots) <= limits.kv_slots
        assert run.batch <= 8
        assert run.context <= max_prompt
        assert run.context + 34 < limits.max_positions


@given(limits=limits, quick=st.booleans())
def test_every_ring_of_the_plan_fits_and_is_measured_both_ways(
    limits: GangLimits, quick: bool
) -> None:
    runs = ring_runs(limits, quick=quick)
    for run in runs:
        slots = sum(-(-chunk // run.sp) for chunk in run.chunks)
        assert slots <= limits.kv_slots
        assert run.longest < limits.max_positions
        assert min(run.chunks) >= run.sp > 1
    pairs = [(run.sp, run.first) for run in runs]
    assert [runs.count(run) for run in runs] == [1] * len(runs)
    assert pairs[::2] == pairs[1::2]


def test_a_rings_chunks_reach_from_nothing_cached_to_nearly_all() -> None:
    chunks = RingRun(sp=2, first=8192, strategy="ring_q").chunks
    missed = [chunk / sum(chunks[: place + 1]) for place, chunk in enumerate(chunks)]
    assert missed[0] == 1.0
    assert missed[-1] < 0.011


def test_the_default_server_is_measured_at_both_group_sizes_from_short_to_long() -> None:
    runs = prefill_runs(
        GangLimits(instances=2, kv_slots=40_960, max_positions=131_072), quick=False
    )
    assert {run.sp for run in runs} == {1, 2}
    assert max(run.longest for run in runs) == 32_768
    sizes = [run.longest * run.batch for run in runs]
    assert sizes == sorted(sizes)
    assert any(run.chunks > 1 for run in runs)
    assert any(run.batch > 1 for run in runs)


def test_group_sizes_are_powers_of_two_and_the_whole_gang() -> None:
    assert group_sizes(1) == [1]
    assert group_sizes(6) == [1, 2, 4, 6]
    assert group_sizes(8) == [1, 2, 4, 8]


# --- fitting ------------------------------------------------------------------------------------

COST = StepCost.of_seconds(4e-3, 2e-5, 2e-9, 1e-9)
LINE = LinearDecodeCost.of_seconds(2e-3, 2e-7, 1e-4)


def step_row(tokens: int, history: int, batch: int, factor: float = 1.0) -> StepRow:
    seconds = COST.predict_batch_ns([(tokens, history)] * batch) / 1e9
    return StepRow(
        strategy="ulysses", group_shape="2", tp=1, tokens=tokens, history=history, batch=batch,
        seconds=factor * seconds, load=0.0, date="d",
    )  # fmt: skip


def decode_row(history: int, batch: int) -> StepRow:
    seconds = LINE.predict_ns(batch, batch * history) / 1e9
    return replace(
        step_row(1, history, batch), strategy="decode", group_shape="1+1", seconds=seconds
    )


ROWS = [
    *(step_row(tokens, 0, 1) for tokens in (128, 1024, 8192)),
    *(step_row(1024, history, 1) for history in (1024, 8192)),
    step_row(256, 0, 8),
    *(decode_row(history, batch) for history in (64, 4096) for batch in (1, 4, 16)),
]


def test_rows_become_the_table_that_they_were_made_from() -> None:
    link = LinkRow(
        kind="inside", sender="0-0-0", receiver="0-0-1", bytes=10**6, seconds=1e-3, load=0, date="d"
    )
    table = fit_table("t", ROWS, [link, replace(link, bytes=2 * 10**6, seconds=2e-3)])
    assert table.step(2).predict_ns(30_000, 9_000) == pytest.approx(
        COST.predict_ns(30_000, 9_000), rel=1e-6
    )
    assert table.iteration(2).predict_ns(7, 9_000) == pytest.approx(
        LINE.predict_ns(7, 9_000), rel=1e-6
    )
    assert table.link("inside").predict_ns(10**6) == pytest.approx(10**6, rel=1e-6)


def test_a_point_counts_once_with_the_least_of_its_measurements() -> None:
    noisy = [*ROWS, step_row(128, 0, 1, factor=1.5), step_row(128, 0, 1, factor=50.0)]
    assert fit_table("t", noisy, []) == fit_table("t", ROWS, [])


def test_held_out_is_what_the_other_points_say() -> None:
    wrong = [step_row(8192, 0, 1, factor=2.0), *(row for row in ROWS if row.tokens != 8192)]
    [point] = [fitted_point for fitted_point in fitted_points(wrong) if fitted_point.tokens == 8192]
    right = COST.predict_ns(8192) / 1e9
    assert point.seconds == pytest.approx(2 * right)
    assert point.held_out == pytest.approx(right, rel=1e-3)
    assert abs(point.fitted - point.seconds) < abs(point.held_out - point.seconds)


def test_what_is_printed_has_measured_fitted_and_coefficients() -> None:
    lines = "\n".join(step_lines(ROWS))
    assert "prefill (ulysses), 2 instances, tp 1" in lines
    assert "decode, 2 instances, tp 1" in lines
    assert f"{COST.predict_ns(8192) / 1e6:.2f} ms" in lines
    table = fit_table("t", ROWS, [])
    assert "a, b, c, d = [0.004, 2e-05, 2e-09, 1e-09] s" in "\n".join(coefficient_lines(table))
    link = LinkRow(
        kind="inside", sender="0-0-0", receiver="0-0-1", bytes=10**6, seconds=1e-3, load=0, date="d"
    )
    links = [link, replace(link, bytes=2 * 10**6, seconds=2e-3)]
    slow = [
        replace(row, kind="between", receiver="0-1-0", seconds=row.seconds * 8) for row in links
    ]
    printed = "\n".join(link_lines([*links, *slow]))
    assert "inside a server" in printed
    assert "0-0-0 to 0-0-1: latency 0 us, 1.000 GB/s" in printed
    assert "between servers" in printed
    assert "0-0-0 to 0-1-0: latency 0 us, 0.125 GB/s" in printed


# --- what a server starts with ------------------------------------------------------------------


@pytest.fixture
def settings(tiny_llama: Path, tmp_path: Path) -> Settings:
    return Settings(model=str(tiny_llama), scaling_information_base=str(tmp_path / "sib.sqlite"))


def test_without_a_base_the_shipped_table_is_taken_with_a_warning(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert latency_table(settings) is SHIPPED
    assert settings.scaling_information_base in caplog.text
    assert "csps profile steps" in caplog.text
    assert not Path(settings.scaling_information_base).exists()


def test_a_base_that_has_no_fit_yet_is_warned_of_alike(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(settings.scaling_information_base)
    ScalingInformationBase.create(path, identity_of(settings)).close()
    assert latency_table(settings) is SHIPPED
    assert "no fitted latencies" in caplog.text


def test_what_was_profiled_is_taken_without_a_word(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    table = fit_table("measured", ROWS, [])
    path = Path(settings.scaling_information_base)
    with ScalingInformationBase.create(path, identity_of(settings)) as base:
        base.add(FitRow(name=LATENCY, digest=table.digest, canonical=table.canonical, date="d"))
    assert latency_table(settings) == table
    assert not caplog.text


def test_a_base_of_another_model_or_of_other_settings_is_refused(
    settings: Settings, tmp_path: Path
) -> None:
    path = Path(settings.scaling_information_base)
    ScalingInformationBase.create(path, identity_of(settings)).close()
    with pytest.raises(ConfigError, match="dtype float32, here it is bfloat16"):
        latency_table(settings.model_copy(update={"dtype": "bfloat16"}))
    other = make_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match="measured with weights"):
        latency_table(settings.model_copy(update={"model": str(other)}))


def test_weights_are_told_apart_by_one_sampled_byte_and_by_their_configuration(
    tmp_path: Path,
) -> None:
    model = make_checkpoint(tmp_path / "model")
    digests = [weights_digest(model)]
    assert weights_digest(model) == digests[0]
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    digests.append(weights_digest(model))
    config = model / "config.json"
    config.write_text(config.read_text() + "\n")
    digests.append(weights_digest(model))
    assert len(set(digests)) == 3


def test_rings_are_compared_by_measured_compute_and_bandwidth(settings: Settings) -> None:
    """Also where nothing was profiled: by what comes with csps, and what the operator says."""
    spec = read_spec(settings.model_dir)
    table = replace(
        SHIPPED,
        steps=((LatencyKey(strategy="ulysses", sp=1), StepCost.of_seconds(0, 0, 2e-9, 1e-9)),),
        links=(("inside", LinkCost.of_seconds(0, 1e-9)),),
    )
    rules = ring_rules(settings, table)
    assert not rules.fitted
    work = 4 * spec.heads * spec.head_dim * (spec.layers - 1)
    assert rules.inside.flops == pytest.approx(work / 2e-9)
    assert rules.inside.bytes_per_s == pytest.approx(1e9)
    assert rules.between.bytes_per_s == rules.inside.bytes_per_s / settings.topology.link_ratio
    assert ring_rules(settings, SHIPPED).inside.bytes_per_s > 0


def test_the_settings_path_is_made_absolute(settings: Settings) -> None:
    relative = settings.model_copy(update={"scaling_information_base": "run/x.sqlite"})
    assert relative.resolved().scaling_information_base == str(Path("run/x.sqlite").resolve())


def test_the_shipped_table_covers_what_the_default_server_asks_for() -> None:
    for sp in (1, 2):
        assert SHIPPED.step(sp).predict_ns(16_384) > SHIPPED.step(sp).predict_ns(1_024) > 0
        assert SHIPPED.iteration(sp).predict_ns(8, 80_000) > 0
    assert SHIPPED.link("inside").predict_ns(10**6) > 0
