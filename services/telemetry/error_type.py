"""What metrics and traces call an error."""

from __future__ import annotations

from csps.protocols.errors import RequestError


def error_type(error: BaseException) -> str:
    """The code that the client is told, otherwise the name of the exception's class."""
    code = error.code if isinstance(error, RequestError) else None
    return code or type(error).__name__
