"""Mangled frames on all connections between processes: no crash, no hang, no memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mangled_frames import (
    LONGEST_S,
    Findings,
    mangled_kv_headers,
    mangled_log,
    mangled_messages,
    mangled_rpc,
    memory_bytes,
)
from property_examples import examples

GROWTH_BYTES = 32 << 20


def check(found: Findings) -> None:
    assert not found.wrong
    assert found.slowest_s < LONGEST_S
    assert len(found.outcomes) > 1, "all ended alike: too wrong, or not at all"


@pytest.mark.parametrize("mangled", [mangled_messages, mangled_log, mangled_kv_headers])
def test_what_reads_a_frame_raises_an_error_of_the_tree(
    mangled: Callable[[int, int], Findings],
) -> None:
    check(mangled(1, examples(10_000)))


async def test_rpc_connections_end_and_the_server_serves_on() -> None:
    check(await mangled_rpc(1, examples(2_000)))


async def test_mangled_frames_take_no_memory() -> None:
    await mangled_rpc(2, 100)  # what is made once
    before = memory_bytes()
    await mangled_rpc(3, examples(2_000))
    assert memory_bytes() - before < GROWTH_BYTES
