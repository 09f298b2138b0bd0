"""Headers of KV messages survive the wire, and other words are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kv_ends import header

from csps.actors.comm.layout import name_digest
from csps.actors.kv_transfer.message import KvHeader
from csps.protocols.core.errors import TransferError
from csps.protocols.core.placement import Span


@given(
    st.builds(
        header,
        kept=st.none() | st.just(0),
        checksum=st.none() | st.integers(0, 2**32 - 1),
        epoch=st.integers(0, 2**63 - 1),
        sequence_id=st.integers(0, 2**63 - 1),
        layer=st.integers(0, 200),
        span=st.builds(
            lambda start, extent, step: Span(start, start + extent, step),
            st.integers(0, 2**40),
            st.integers(0, 2**40),
            st.integers(1, 9),
        ),
        heads=st.builds(range, st.integers(0, 64), st.integers(64, 128)),
        dtype=st.sampled_from((torch.float32, torch.bfloat16, torch.float16, torch.float64)),
    )
)
def test_a_header_survives_the_wire(announced: KvHeader) -> None:
    words = announced.pack()
    assert words.dtype == torch.int64
    assert words.shape == (KvHeader.WORDS,)
    assert KvHeader.unpack(words) == announced


@pytest.mark.parametrize("kept", [None, 0, 1, 20])
def test_a_header_says_how_much_is_kept(kept: int | None) -> None:
    assert KvHeader.unpack(header(kept=kept).pack()).kept == kept


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (0, 1),
        (4, 11),
        (4, -1),
        (6, 0),
        (7, 5),
        (9, 9),
        (9, -1),
        (10, -2),
        (10, 21),
        (11, -2),
        (11, 2**32),
    ],
)
def test_words_that_are_no_header_are_refused(word: int, value: int) -> None:
    words = header().pack()
    words[word] = value
    with pytest.raises(TransferError, match="expected a KV header"):
        KvHeader.unpack(words)


def test_epochs_have_different_digests() -> None:
    names = [f"{prefill}.{decode}.{n}" for prefill in "ab" for decode in "cd" for n in range(50)]
    numbers = {name_digest(name) for name in names}
    assert len(numbers) == len(names)
    assert all(0 <= number < 2**63 for number in numbers)
