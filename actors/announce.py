"""What a rank tells the router, unasked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from csps.actors.sampling import Draw
from csps.protocols.errors import CspsError, RequestError
from csps.protocols.messages import RequestFailed
from csps.protocols.tokens import TokenDrawn

Notify = Callable[[str, Any], None]
"""(name of the notification, message dataclass); callable from any thread, keeps the order."""


def token_drawn(rid: int, index: int, draw: Draw) -> TokenDrawn:
    """A draw as a row of the message that goes to the router."""
    return TokenDrawn(
        rid=rid,
        index=index,
        token=draw.token,
        finish_reason=draw.finish_reason,
        logprob=draw.logprob,
        top_logprobs=draw.top,
    )


def request_failed(rid: int, rank: int, error: CspsError) -> RequestFailed:
    """An error as the message that goes to the router."""
    return RequestFailed(
        rid=rid,
        rank=rank,
        code=type(error).__name__,
        message=str(error),
        param=error.param if isinstance(error, RequestError) else None,
    )
