"""HTTP errors. Every error leaves as `protocols.openai.responses.error_body`."""

from __future__ import annotations

import logging
from typing import ClassVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from csps.models.network.checkpoint_json import InvalidTextError
from csps.protocols.anthropic.messages import messages_error_body, messages_error_event
from csps.protocols.core.errors import InvalidRequest, RequestError, abridged
from csps.protocols.openai.responses import DONE, error_body, error_event
from csps.protocols.openai.responses_api import responses_error_event
from csps.services.http.body_parser import Endpoint

logger = logging.getLogger(__name__)
ROUTES = (
    "/v1/completions, /v1/chat/completions, /v1/messages, /v1/messages/count_tokens, "
    "/v1/responses, /v1/models, /tokenize, /detokenize, /version, /health and /metrics"
)


class PayloadTooLarge(RequestError):
    """The request body is longer than this server reads."""

    status: ClassVar[int] = 413
    code = "payload_too_large"


class HeadersTooLarge(RequestError):
    """A request line and its headers are longer, or more, than this server reads."""

    status: ClassVar[int] = 431
    code = "headers_too_large"


class BodyTooSlow(RequestError):
    """The request body missed its deadline."""

    status: ClassVar[int] = 408
    code = "request_timeout"


class MayNotLook(RequestError):
    """The API key does not allow to look into the server."""

    status: ClassVar[int] = 403
    code = "not_allowed"


class NoSuchRoute(RequestError):
    """The path is not served."""

    status: ClassVar[int] = 404
    code = "not_found"


class MethodNotAllowed(RequestError):
    """The path is served for other HTTP methods."""

    status: ClassVar[int] = 405
    code = "method_not_allowed"


def error_response(error: Exception) -> JSONResponse:
    """Return `error` as an answer; an unexpected one is shown in the log only."""
    status, body, headers = error_body(_public(error))
    _log(status, error)
    return JSONResponse(body, status, headers=headers)


def messages_error_response(error: Exception) -> JSONResponse:
    """Return `error` as an answer of the Messages API."""
    status, body, headers = messages_error_body(_public(error))
    _log(status, error)
    return JSONResponse(body, status, headers=headers)


def last_event(error: Exception, endpoint: Endpoint) -> bytes:
    """Return `error` as an event, for a stream whose status line was sent long ago."""
    status, _, _ = error_body(_public(error))
    _log(status, error)
    match endpoint:
        case "messages":
            return messages_error_event(_public(error))
        case "responses":
            return responses_error_event(_public(error))
        case _:
            return error_event(_public(error)) + DONE


def _log(status: int, error: Exception) -> None:
    if status == 500:
        logger.error("a request failed unexpectedly", exc_info=error)
    elif status > 500:
        logger.warning("a request failed: %s: %s", type(error).__name__, error)


def _public(error: Exception) -> Exception:
    """Return an error that the API knows, for one that knows nothing of the API."""
    return InvalidRequest(str(error)) if isinstance(error, InvalidTextError) else error


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer what Starlette itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    what = f"{request.method} {abridged(request.url.path, 200)}"
    refusal: RequestError
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        refusal = MethodNotAllowed(f"{what} is not allowed: use {allowed}.")
    else:
        refusal = NoSuchRoute(f"{what} is not served here: {ROUTES} are.")
    response = error_response(refusal)
    response.headers.update(error.headers or {})
    return response
