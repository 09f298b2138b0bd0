"""Bodies that cost a server more than they cost their client.

What may be large is bounded where a request is read, so that nothing behind it needs to be: neither
the memory of waiting requests nor the messages to the ranks.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest

from csps.protocols.core.errors import ContextLengthExceeded
from csps.protocols.openai.requests import MAX_LISTED_TOKENS
from csps.protocols.rpc.schema import pack
from csps.services.http.body_parser import Endpoint
from csps.services.http.parser_pool import ParserPool
from csps.services.http.request_parser import ParsedRequest, RequestMetadata, RequestParser
from csps.services.settings.settings import Settings

CALLBACK_S = 0.05
"""Processor time that one callback of the event loop may take."""
MAX_BATCH = 64
"""Requests in one step (`decode.max_batch`)."""


@pytest.fixture(scope="module")
def parser() -> RequestParser:
    return RequestParser(Settings())


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "needle", "prompt": "hi", **fields}).encode()


def parsed_by(parser: RequestParser, endpoint: Endpoint, body: bytes) -> ParsedRequest:
    metadata = RequestMetadata(client_request_id="x" * 128)
    return parser.finish(parser.body_parser.parse(endpoint, body, b""), metadata)


# --- long lists ------------------------------------------------------------------------------


def test_sampling_parameters_of_a_batch_fit_a_message_many_times(parser: RequestParser) -> None:
    """26 requests with lists as long as a vocabulary of 151,936 exceeded 64 MiB, which ended the
    router."""
    longest = body_of(
        logit_bias={str(token): 0.123456789 for token in range(MAX_LISTED_TOKENS)},
        stop_token_ids=list(range(MAX_LISTED_TOKENS)),
        stop=["\N{GRINNING FACE}" * 1024] * 16,
        seed=-(2**63),
    )
    sampling = parsed_by(parser, "completion", longest).specs[0].sampling
    before = time.thread_time()
    message = msgpack.packb([pack(sampling)] * MAX_BATCH)
    assert time.thread_time() - before < CALLBACK_S
    assert len(message) < 2 * 2**20


# --- fields that are ignored -----------------------------------------------------------------

LARGE_BYTES = 8 * 2**20
IGNORED = {
    "a list of lists": b'"prediction": {"a": [%s[]]}' % (b"[]," * (LARGE_BYTES // 3)),
    "a list of objects": b'"web_search_options": {"a": [%s{}]}' % (b"{}," * (LARGE_BYTES // 3)),
    "an object": b'"metadata": {%s"a": "b"}' % (b'"a":"b",' * (LARGE_BYTES // 8)),
    "a string": b'"user": "%s"' % (b"u" * LARGE_BYTES),
}
CHAT = b'{"model": "needle", "messages": [{"role": "user", "content": "hi"}], %s}'


@pytest.mark.parametrize("kind", IGNORED)
async def test_an_ignored_field_takes_no_memory(parser: RequestParser, kind: str) -> None:
    """8 MiB of `[],` became 193 MiB for as long as the request lived."""
    body = CHAT % IGNORED[kind]
    parsed_by(parser, "chat", CHAT % b'"user": ""')  # what is made once
    tracemalloc.start()
    try:
        parsed = parsed_by(parser, "chat", body)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 64 * 1024
    assert peak < 64 * 1024
    assert parsed.specs[0].prompt.size < 20


def retained_bytes(thing: object, seen: set[int]) -> int:
    """Return the memory of an object and of everything that only it leads to."""
    if id(thing) in seen or isinstance(thing, type):
        return 0
    seen.add(id(thing))
    if isinstance(thing, np.ndarray):
        return sys.getsizeof(thing) + (
            retained_bytes(thing.base, seen) if thing.base is not None else 0
        )
    inner: list[object] = []
    if isinstance(thing, dict):
        inner = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple):
        inner = list(thing)
    elif hasattr(thing, "__dict__"):
        inner = [vars(thing)]
    return sys.getsizeof(thing) + sum(retained_bytes(other, seen) for other in inner)


def test_a_request_keeps_its_prompt_and_what_is_bounded(parser: RequestParser) -> None:
    """Everything that may be as long as a client likes is in the prompt, which the queue counts."""
    tokens = 100_000
    worst = {
        "prompt": [7] * tokens,
        "logit_bias": {str(token): token / 99 for token in range(1000, 1000 + MAX_LISTED_TOKENS)},
        "stop_token_ids": list(range(1000, 1000 + MAX_LISTED_TOKENS)),
        "stop": [chr(0x1F600 + index) * 1024 for index in range(16)],
        "cache_salt": "s" * 100_000,
        "user": "u" * 100_000,
        "max_tokens": 1,
        "csps": {"attention": "csa", "drop_ratio": [[0.25 + n / 1e6 for n in range(1024)]] * 16},
    }
    body = json.dumps({"model": "needle", **worst}).encode()
    parsed = parsed_by(parser, "completion", body)
    rest = retained_bytes(parsed, set()) - 4 * tokens
    assert rest < 1.5 * 2**20


# --- prompts that are too long ---------------------------------------------------------------


def peak_bytes(pids: list[int]) -> int:
    """Return the most memory that one of these processes has had."""
    peaks = []
    for pid in pids:
        with open(f"/proc/{pid}/status") as status:
            peaks += [int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:")]
    return max(peaks)


@pytest.mark.parametrize("fits", [True, False])
async def test_a_prompt_that_is_too_long_takes_little_memory(
    parser: RequestParser, fits: bool
) -> None:
    """8 MiB of words took a gigabyte and six seconds before their number was looked at."""
    longest = parser.tokenizer.long_texts.longest_token_bytes
    assert longest is not None
    size = longest * parser.max_positions if fits else 8 * 2**20
    text = "the quick brown fox jumps over a lazy dog while rain falls on the plain " * (size // 72)
    pool = ParserPool(parser.body_parser)
    try:
        await pool.start()
        before = peak_bytes(pool.pids)
        parsed = await pool.parse("completion", body_of(prompt=text), b"")
        assert peak_bytes(pool.pids) - before < 2**27
    finally:
        await pool.close()
    assert parsed.prompts[0].more_tokens
    assert not parsed.prompts[0].ids
    with pytest.raises(ContextLengthExceeded, match=r"at least \d+ in the prompt") as refused:
        parser.finish(parsed, RequestMetadata(client_request_id="x"))
    assert refused.value.prompt_tokens == parsed.prompts[0].tokens > parser.max_positions
