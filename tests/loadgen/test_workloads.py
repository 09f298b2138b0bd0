"""Named workloads against the statistics that the papers publish."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import integrate, stats

from csps.loadgen.workloads.generate import Arrivals, Size, generate
from csps.loadgen.workloads.named import WORKLOADS, TruncatedLognormal, random_lengths, workload
from csps.loadgen.workloads.request import (
    HASH_BLOCK_TOKENS,
    ConversationTurns,
    WorkloadRequest,
    converse,
    fit,
)
from csps.protocols.core.errors import ConfigError

REQUESTS = 40_000
K = 1000


def sampled(name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    return workload(name).draw(REQUESTS, np.random.default_rng(3))


@pytest.mark.parametrize(
    ("name", "median", "p99", "answer_median", "answer_p99"),
    [("needlebench", 113 * K, 995 * K, 348, 572), ("bookcorpus", 97 * K, 406 * K, 375, 631)],
)
def test_csps_table_2(
    name: str, median: float, p99: float, answer_median: float, answer_p99: float
) -> None:
    inputs, outputs = sampled(name)
    assert np.quantile(inputs, [0.5, 0.99]) == pytest.approx([median, p99], rel=0.03)
    assert np.quantile(outputs, [0.5, 0.99]) == pytest.approx([answer_median, answer_p99], rel=0.02)


def test_no_lengths_up_to_a_million_have_the_deviation_of_csps_table_2() -> None:
    """Popoviciu: a variable in [a, b] deviates by at most (b - a) / 2."""
    assert WORKLOADS["needlebench"].longest_input / 2 < 506 * K


@pytest.mark.parametrize(
    ("name", "shortest", "longest", "mean"),
    [
        ("tetris-short", 4 * K, 95 * K, 23.6 * K),
        ("tetris-medium", 8 * K, 142 * K, 32.8 * K),
        ("tetris-long", 16 * K, 190 * K, 50.1 * K),
        ("sharegpt", 6, 2238, 896.85),
        ("l-eval", 2.7 * K, 210.5 * K, 16.5 * K),
        # 102,380 words on average, 387,406 at most, which are 497.3K tokens
        ("lv-eval", 15.1 * K, 497.3 * K, 102_380 * 497.3 * K / 387_406),
    ],
)
def test_published_ranges_and_means(
    name: str, shortest: float, longest: float, mean: float
) -> None:
    inputs, _ = sampled(name)
    assert inputs.min() >= shortest
    assert inputs.max() <= longest
    assert inputs.mean() == pytest.approx(mean, rel=0.06 if name == "lv-eval" else 0.02)


def test_answers_of_sharegpt_have_the_published_mean() -> None:
    assert sampled("sharegpt")[1].mean() == pytest.approx(232.63, rel=0.02)


def test_mixed_is_equal_parts_with_lengths_that_belong_together() -> None:
    inputs, outputs = sampled("mixed")
    chat = inputs <= 2300
    assert chat.mean() == pytest.approx(1 / 3, abs=0.01)
    assert inputs[chat].mean() == pytest.approx(896.85, rel=0.04)
    assert outputs[chat].mean() == pytest.approx(232.63, rel=0.04)
    assert outputs[inputs > 210_500].max() <= 64


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.4])
def test_zipf_by_its_definition(alpha: float) -> None:
    inputs, _ = sampled(f"zipf:{alpha}")
    edges = np.array([10, 11, 20, 100, 1000, 10_000, 100_000, 200_000])
    weights = np.array([k**-alpha for k in range(10, 200_000)])
    shares = [weights[a - 10 : b - 10].sum() for a, b in pairwise(edges)]
    expected = np.array(shares) / weights.sum() * REQUESTS
    found = np.histogram(inputs, bins=edges)[0]
    assert stats.chisquare(found, expected).pvalue > 1e-4


@given(
    median=st.floats(1, 1e5),
    sigma=st.floats(0.1, 3),
    shortest=st.integers(1, 1000),
    span=st.floats(1.5, 1e4),
)
def test_the_mean_of_a_truncated_lognormal_is_its_integral(
    median: float, sigma: float, shortest: int, span: float
) -> None:
    lengths = TruncatedLognormal(
        median=median, sigma=sigma, shortest=shortest, longest=math.ceil(shortest * span)
    )
    low, high = math.log(lengths.shortest), math.log(lengths.longest)
    log_density = stats.norm(math.log(median), sigma).logpdf
    top = max(
        log_density(low), log_density(high), log_density(np.clip(math.log(median), low, high))
    )
    mass, moment = (
        integrate.quad(lambda x, n=n: math.exp(log_density(x) - top + n * x), low, high, limit=200)[
            0
        ]
        for n in (0, 1)
    )
    if mass > 0 and abs(math.log(shortest / median)) < 8 * sigma:
        assert lengths.mean == pytest.approx(moment / mass, rel=1e-3)


def test_a_mean_outside_the_range_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot have mean 20"):
        TruncatedLognormal.with_mean(mean=20, sigma=1, shortest=30, longest=40)


def test_a_longer_workload_begins_with_the_shorter_one() -> None:
    arrivals = Arrivals(rate=2)
    few, many = (
        generate(workload("sharegpt"), requests, arrivals=arrivals, seed=5).requests
        for requests in (50, 100)
    )
    assert many[:50] == few
    other = generate(workload("sharegpt"), 50, arrivals=arrivals, seed=6).requests
    assert other != few


def test_another_rate_leaves_the_lengths() -> None:
    slow, fast = (
        generate(workload("mixed"), 50, arrivals=Arrivals(rate=rate)).requests for rate in (1, 3)
    )
    assert [request.input_length for request in slow] == [request.input_length for request in fast]
    ratios = [a.arrival_ns / b.arrival_ns for a, b in zip(slow, fast, strict=True)]
    assert ratios == pytest.approx([3] * 50, rel=1e-6)


def test_scaling_keeps_ratios_and_fills_the_context() -> None:
    size = Size(longest_input=16_384, shortest_input=8, longest_output=64)
    whole = generate(workload("mixed"), 2000, arrivals=Arrivals(), size=Size()).requests
    small = generate(workload("mixed"), 2000, arrivals=Arrivals(), size=size).requests
    assert max(request.input_length for request in small) <= 16_384
    assert max(request.output_length for request in small) == 64
    factor = 16_384 / 497_300
    for before, after in zip(whole, small, strict=True):
        expected = max(8, before.input_length * factor)
        assert after.input_length == pytest.approx(expected, abs=0.5)


def test_prompts_that_do_not_fit_are_cut_and_counted() -> None:
    size = Size(positions=100 * K)
    whole = generate(workload("lv-eval"), 500, arrivals=Arrivals()).requests
    fitted = generate(workload("lv-eval"), 500, arrivals=Arrivals(), size=size)
    too_long = [
        request for request in whole if request.input_length + request.output_length > 100 * K
    ]
    assert fitted.cut == len(too_long) > 100
    assert all(
        request.input_length + request.output_length <= 100 * K for request in fitted.requests
    )
    untouched = {request.arrival_ns for request in whole} - {
        request.arrival_ns for request in too_long
    }
    assert all(request in whole for request in fitted.requests if request.arrival_ns in untouched)


def test_cutting_drops_the_hashes_of_what_is_cut() -> None:
    request = WorkloadRequest(
        arrival_ns=0, input_length=2000, output_length=24, hash_ids=(1, 2, 3, 4)
    )
    (cut,) = fit([request], 1048).requests
    assert (cut.input_length, cut.hash_ids) == (1024, (1, 2))


def test_requests_that_cannot_be_cut_are_rejected() -> None:
    with pytest.raises(ValueError, match="cannot be cut"):
        fit([WorkloadRequest(arrival_ns=0, input_length=5, output_length=100)], 100)
    with pytest.raises(ValueError, match="cannot be cut"):
        fit([WorkloadRequest(arrival_ns=0, input_length=500, output_length=1, prompt="a b c")], 100)


@pytest.mark.parametrize("name", ["mixd", "zipf", "zipf:x"])
def test_an_unknown_workload_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown workload '{name}'"):
        workload(name)


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=4), turns=st.integers(1, 5))
def test_every_turn_starts_with_the_one_before(lengths: list[int], turns: int) -> None:
    first = [
        WorkloadRequest(arrival_ns=0, input_length=length, output_length=7) for length in lengths
    ]
    spoken = converse(first, ConversationTurns(count=turns, added_tokens=100))
    assert len(spoken) == turns * len(first)
    if turns == 1:
        assert spoken == first
        return
    for before, after in pairwise(spoken):
        shared = sum(a == b for a, b in zip(before.hash_ids, after.hash_ids, strict=False))
        if before.conversation == after.conversation:
            assert after.input_length == before.input_length + 7 + 100
            assert shared == before.input_length // HASH_BLOCK_TOKENS
            assert after.delay_ns > 0
        else:
            assert shared == 0
    ids = [number for request in spoken[::turns] for number in request.hash_ids]
    assert len(set(ids)) == len(ids)


def test_every_request_of_one_size() -> None:
    requests = generate(random_lengths(100, 7), 5, arrivals=Arrivals()).requests
    assert {(request.input_length, request.output_length) for request in requests} == {(100, 7)}
