"""Cutting byte streams into messages: arbitrary chunks, arbitrary garbage, lying lengths."""

from __future__ import annotations

import contextlib
import itertools
import resource
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from csps.protocols.core.errors import ProtocolError
from csps.protocols.rpc.wire import FrameReader, payload_and_meta

CEILING = 1 << 20

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
plain = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def read(chunks: list[bytes], max_frame_bytes: int = CEILING) -> list[Any]:
    reader = FrameReader(max_frame_bytes, ceiling=CEILING)
    return [message for chunk in chunks for message in reader.feed(chunk)]


@given(st.lists(plain, max_size=6), st.data())
def test_chunking_does_not_matter(messages: list[Any], data: st.DataObject) -> None:
    stream = b"".join(map(msgpack.packb, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    edges = [0, *cuts, len(stream)]
    assert read([stream[a:b] for a, b in itertools.pairwise(edges)]) == messages


def test_one_byte_at_a_time() -> None:
    messages = [[0, 1, "method", [{"payload": b"\x00" * 300}]], [2, "token", [5]]]
    stream = b"".join(map(msgpack.packb, messages))
    assert read([stream[i : i + 1] for i in range(len(stream))]) == messages


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_or_harmless(garbage: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        read([garbage])


@given(size=st.integers(0, 400), limit=st.integers(1, 400), chunk=st.integers(1, 100))
def test_frame_limit_is_exact(size: int, limit: int, chunk: int) -> None:
    frame = msgpack.packb(b"x" * size)
    # A message before and one behind, because the limit holds for each, not for their sum.
    stream = b"\x01" + frame + b"\x02"
    chunks = [stream[i : i + chunk] for i in range(0, len(stream), chunk)]
    if len(frame) <= limit:
        assert read(chunks, limit) == [1, b"x" * size, 2]
    else:
        with pytest.raises(ProtocolError, match=rf"\d+ bytes received, {limit} allowed"):
            read(chunks, limit)


def test_limit_holds_for_messages_of_many_small_elements() -> None:
    with pytest.raises(ProtocolError, match="1003 bytes received, 1000 allowed"):
        read([msgpack.packb([1] * 1000)], 1000)


@pytest.mark.parametrize("header", [b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"])
def test_announced_lengths_allocate_nothing(header: bytes) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = FrameReader(CEILING, ceiling=CEILING)
    with contextlib.suppress(ProtocolError):
        # Arrays and maps nest, so that every header announces four billion elements.
        assert list(reader.feed((header + b"\xff\xff\xff\xff") * 200)) == []
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < 64


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        read([b"\x91" * 100_000 + b"\xc0"])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ([], (None, {})),
        ([5], (5, {})),
        ([5, {"deadline_ms": 1}], (5, {"deadline_ms": 1})),
    ],
)
def test_params_convention(params: list[Any], expected: Any) -> None:
    assert payload_and_meta(params) == expected


@pytest.mark.parametrize("params", [[1, 2], [1, None], [1, {}, 3]])
def test_other_params_are_refused(params: list[Any]) -> None:
    with pytest.raises(ProtocolError, match=r"\[payload, meta\]"):
        payload_and_meta(params)
