"""Bodies that cost a server more than they cost their client.

What may be large is bounded where a request is read, so that nothing behind it needs to be: neither
the memory of waiting requests nor the messages to the ranks.
"""

from __future__ import annotations

import json
import time
from typing import Any

import msgpack
import pytest

from csps.protocols.openai.requests import MAX_LISTED_TOKENS
from csps.protocols.rpc.schema import pack
from csps.services.http.request_parser import RequestMetadata, RequestParser
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
    metadata = RequestMetadata(client_request_id="x" * 128)
    sampling = parser.completion(longest, metadata).spec.sampling
    before = time.thread_time()
    message = msgpack.packb([pack(sampling)] * MAX_BATCH)
    assert time.thread_time() - before < CALLBACK_S
    assert len(message) < 2 * 2**20
