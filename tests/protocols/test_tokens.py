"""A frame of tokens: the same rows on both sides, and nothing that does not fit together."""

from __future__ import annotations

from typing import Any

import msgpack  # type: ignore[import-untyped]
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.errors import ProtocolError
from csps.protocols.gang.messages import FinishReason, SampledToken, SampledTokens, TokenLogprob
from csps.protocols.rpc.schema import pack, unpack

_ids = st.integers(0, 2**31 - 1)
_tops = st.builds(TokenLogprob, token=_ids, logprob=st.floats(max_value=0.0, allow_nan=False))
_reasons: st.SearchStrategy[FinishReason | None] = st.sampled_from(
    [None, "stop", "length", "cancelled"]
)


@st.composite
def rows(draw: st.DrawFn) -> SampledToken:
    logprob = draw(st.none() | st.floats(max_value=0.0, allow_nan=False))
    top = () if logprob is None else tuple(draw(st.lists(_tops, max_size=3)))
    return SampledToken(
        sequence_id=draw(st.integers(0, 2**62)),
        index=draw(_ids),
        token=draw(_ids),
        finish_reason=draw(_reasons),
        logprob=logprob,
        top_logprobs=top,
    )


@given(st.lists(rows(), max_size=9))
def test_rows_come_out_as_they_went_in(sampled: list[SampledToken]) -> None:
    frame = msgpack.packb(pack(SampledTokens.of(sampled)))
    received = msgpack.unpackb(frame, strict_map_key=False)
    assert list(unpack(SampledTokens, received).each()) == sampled


def test_a_token_costs_few_bytes() -> None:
    sampled = [SampledToken(sequence_id=10**15 + row, index=300, token=30_000) for row in range(64)]
    assert len(msgpack.packb(pack(SampledTokens.of(sampled)))) < 64 * 16 + 80


@pytest.mark.parametrize(
    "wrong",
    [
        {"indices": [1]},
        {"tokens": []},
        {"finish_reasons": {2: "stop"}},
        {"finish_reasons": {-1: "stop"}},
        {"finish_reasons": {0: "tired"}},
        {"logprobs": {2: {"logprob": -1.0, "top": []}}},
        {"tokens": [1, "2"]},
    ],
)
def test_incompatible_options_are_refused(wrong: dict[str, Any]) -> None:
    sampled = [SampledToken(sequence_id=row, index=0, token=1) for row in range(2)]
    with pytest.raises(ProtocolError, match="Tokens"):
        unpack(SampledTokens, {**pack(SampledTokens.of(sampled)), **wrong})
