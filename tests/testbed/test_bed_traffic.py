"""Bytes are counted where they went, the link has its rate, and delay is what was asked for."""

from __future__ import annotations

import os

import pytest
from testbed import iproute
from testbed.check import Throughput, measure, round_trip_s
from testbed.link import Link
from testbed.network import Testbed, two_servers

pytestmark = pytest.mark.testbed

MEGABYTES, ROUNDS = 2.0, 2
PAYLOAD = MEGABYTES * 1e6 * (ROUNDS + 1)
"""Bytes of payload, with the round that connects."""
HEADERS = 0.1
"""More than TCP/IP headers, acknowledgements, the rendezvous and control take."""


@pytest.fixture(scope="module")
def across(bed: Testbed) -> Throughput:
    """Measure over a link without a rate."""
    bed.set_rate(None)
    try:
        return measure(bed, *bed.servers, MEGABYTES, ROUNDS)  # type: ignore[call-arg]  # servers are two
    finally:
        bed.set_rate(800e6)


def test_an_exchange_across_is_counted_between_the_servers(across: Throughput) -> None:
    assert PAYLOAD < across.between_bytes < PAYLOAD * (1 + HEADERS)
    assert across.inside_bytes < PAYLOAD * HEADERS


@pytest.mark.slow
def test_an_exchange_inside_is_counted_inside(bed: Testbed) -> None:
    server = bed.servers[1]
    result = measure(bed, server, server, MEGABYTES, ROUNDS)
    assert PAYLOAD < result.inside_bytes < PAYLOAD * (1 + HEADERS)
    assert result.between_bytes < PAYLOAD * HEADERS


@pytest.mark.slow
def test_the_link_is_as_slow_as_asked_for(bed: Testbed, across: Throughput) -> None:
    """Never faster, whatever else the machine does; how slow it may get depends on that."""
    bed.set_rate(40e6)
    try:
        slow = measure(bed, *bed.servers, MEGABYTES, ROUNDS)  # type: ignore[call-arg]  # servers are two
        assert slow.gb_per_s < 1.15 * 40e6 / 8 / 1e9
        assert slow.gb_per_s < across.gb_per_s
    finally:
        bed.set_rate(800e6)


@pytest.mark.slow  # rates, which benchmarks use, are held by the tests around it
def test_a_delay_is_paid_both_ways() -> None:
    delay_s = 0.02
    with two_servers(Link(delay_s=delay_s)) as bed:
        assert round_trip_s(*bed.servers) > 2 * delay_s


def test_a_thread_enters_a_server_and_comes_back(bed: Testbed) -> None:
    outside = _namespace()
    with iproute.entered(bed.servers[0].namespace):
        assert _namespace() != outside
        assert os.getpid() in iproute.pids(bed.servers[0].namespace)
    assert _namespace() == outside


def _namespace() -> str:
    return os.readlink("/proc/thread-self/ns/net")
