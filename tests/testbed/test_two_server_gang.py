"""A gang over both servers prefills, and the bytes that it must exchange cross the link."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from testbed import iproute
from testbed.gang import GangOptions, prefill_gang
from testbed.network import Testbed

from csps.models.network.spec import read_spec

pytestmark = [pytest.mark.testbed, pytest.mark.slow]

TOKENS, FLOAT_BYTES = 256, 4


async def test_a_prefill_crosses_the_link_once_for_each_row(bed: Testbed, tiny_llama: Path) -> None:
    """Exact SP-NTP of four ranks: half of all rows' q, k, v, and half of the outputs, cross."""
    spec = read_spec(tiny_llama)
    tokens = np.random.default_rng(0).integers(3, spec.vocab, TOKENS, dtype=np.int32)
    with iproute.entered(bed.servers[0].namespace):
        async with prefill_gang(bed, GangOptions(model_dir=tiny_llama, kv_slots=TOKENS)) as gang:
            first = await gang.prefill(tokens)
            again = await gang.prefill(tokens)
    assert first.token == again.token
    assert [done.rank for done in again.done] == [0, 1, 2, 3]
    assert gang.locations == ("0-0-0", "0-0-1", "0-1-0", "0-1-1")
    crossing = TOKENS * FLOAT_BYTES * spec.head_dim * spec.heads // 2 * (spec.layers - 1)
    assert again.traffic.between_bytes > 2 * crossing  # queries and outputs alone
    assert again.ttft_s > 0
