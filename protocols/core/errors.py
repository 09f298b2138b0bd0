"""All exceptions of the project, as one tree.

::

    CspsError
    ├── RequestError (ValueError)        the client's mistake; carries its HTTP status
    │   ├── InvalidRequest               400  a field is missing, unknown or out of range
    │   ├── ContextLengthExceeded        400  prompt and answer do not fit
    │   ├── Unauthorized                 401  no API key, or a wrong one
    │   ├── ModelNotFound                404  the model is not served here
    │   ├── BoundNotMet                  422  no configuration meets the client's bounds
    │   ├── SloNotMet                    429  an objective is predicted to be missed
    │   ├── QueueFull                    429  come back after `retry_after_s`
    │   └── RateLimited                  429  the API key has reached one of its limits
    ├── ConfigError (ValueError)         the operator's mistake
    └── FaultError (RuntimeError)        a failure; the request may be tried again
        ├── GangLost                     a rank died, and its gang with it
        ├── RanksHeld                    another router still commands the ranks
        ├── Superseded                   a newer router has taken the ranks over
        ├── DeadlineExceeded             a named wait took too long
        ├── TransferError                KV cache arrived wrong, late or not at all
        ├── ConnectionLost               the other side of a connection is gone
        ├── ProtocolError                a peer sent what the protocol does not allow
        │   └── ProtocolMismatch         the peer speaks another protocol version
        ├── AuthenticationFailed         the peer does not know the cluster secret
        ├── Cancelled                    the caller no longer wants the answer
        └── RemoteError                  a peer failed in a way that this tree does not name

An exception of the tree crosses a process boundary as the map `{code, message, data?}`, where
`code` is the name of its class, and becomes that class again (`to_wire`, `from_wire`). Nothing is
unpickled: a map can only name a class that this process has already imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

_BY_NAME: dict[str, type[CspsError]] = {}


class CspsError(Exception):
    """Base of the tree. Subclasses defined in other packages cross process boundaries as well."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        assert cls.__name__ not in _BY_NAME, f"two exceptions are named {cls.__name__}"
        _BY_NAME[cls.__name__] = cls

    def wire_data(self) -> dict[str, Any]:
        """Return the keyword arguments that rebuild this exception; empty if its message
        suffices."""
        return {}


class RequestError(CspsError, ValueError):
    """The client's mistake, with the fields of an OpenAI error body."""

    status: ClassVar[int] = 400
    """HTTP status."""
    type: ClassVar[str] = "invalid_request_error"
    """OpenAI's error family."""
    code: str | None = None
    """OpenAI's machine-readable reason."""
    param: str | None = None
    """Field at fault, as a dotted path."""
    refusal: ClassVar[bool] = False
    """True if the request is valid, but the server cannot serve it now."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def wire_data(self) -> dict[str, Any]:
        return {"message": str(self), "param": self.param}


class InvalidRequest(RequestError):
    """A field is missing, unknown, of the wrong type or out of range."""


class ContextLengthExceeded(RequestError):
    """Prompt and answer need more tokens than the model, or the KV cache, can hold."""

    code = "context_length_exceeded"

    def __init__(
        self,
        *,
        prompt_tokens: int,
        output_tokens: int,
        limit: int,
        at_least: bool = False,
        param: str | None = None,
    ) -> None:
        self.prompt_tokens, self.output_tokens, self.limit = prompt_tokens, output_tokens, limit
        self.at_least = at_least
        """The prompt has more tokens than were counted."""
        prompt = f"{'at least ' if at_least else ''}{prompt_tokens}"
        super().__init__(
            f"This server's maximum context length is {limit} tokens. However, you requested "
            f"{prompt_tokens + output_tokens} tokens ({prompt} in the prompt, "
            f"{output_tokens} for the answer). Please shorten the prompt or the answer.",
            param=param,
        )

    def wire_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "limit": self.limit,
            "param": self.param,
        }
        return data | {"at_least": True} if self.at_least else data


class Unauthorized(RequestError):
    """No API key, or one that this server does not know."""

    status = 401
    code = "invalid_api_key"

    def __init__(self, message: str = "Incorrect API key provided.") -> None:
        super().__init__(message)

    def wire_data(self) -> dict[str, Any]:
        return {}


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"

    def __init__(self, *, model: str, served: str) -> None:
        self.model, self.served = model, served
        super().__init__(
            f"The model {abridged(model)} does not exist; this server serves '{served}'.",
            param="model",
        )

    def wire_data(self) -> dict[str, Any]:
        return {"model": self.model, "served": self.served}


class BoundNotMet(RequestError):
    """No configuration meets the bounds of a request that accepts no other."""

    status = 422
    code = "bound_not_met"
    refusal = True

    def __init__(self, *, ttft_ms: float, loss: float | None) -> None:
        self.ttft_ms, self.loss = ttft_ms, loss
        lost = f" and a loss of accuracy of {loss:.3g}" if loss else ""
        super().__init__(
            f"No way to compute this prompt now is predicted to keep the bounds of the request: "
            f"the nearest would take {ttft_ms:.0f} ms to the first token{lost}.",
            param="csps.unmet",
        )

    def wire_data(self) -> dict[str, Any]:
        return {"ttft_ms": self.ttft_ms, "loss": self.loss}


class SloNotMet(RequestError):
    """An objective is predicted to be missed, and the client wants no later answer."""

    status = 429
    type = "rate_limit_error"
    code = "slo_not_met"
    refusal = True

    def __init__(self, name: str, predicted_ms: float, *, retry_after_s: float) -> None:
        self.name, self.predicted_ms, self.retry_after_s = name, predicted_ms, retry_after_s
        what = {"ttft": "The first token is", "tpot": "A token after the first is"}
        super().__init__(
            f"{what.get(name, 'The answer is')} predicted to take {predicted_ms:.0f} ms, which is "
            "more than the request allows (x-slo-*), and it asked to be refused then.",
            param="x-slo-unmet",
        )

    def wire_data(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "predicted_ms": self.predicted_ms,
            "retry_after_s": self.retry_after_s,
        }


class QueueFull(RequestError):
    """Admission is closed for now."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    refusal = True

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def wire_data(self) -> dict[str, Any]:
        return {"message": str(self), "retry_after_s": self.retry_after_s}


class RateLimited(RequestError):
    """The client's API key has reached one of its limits."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def wire_data(self) -> dict[str, Any]:
        return {"message": str(self), "retry_after_s": self.retry_after_s}


class ConfigError(CspsError, ValueError):
    """The operator's mistake: a setting, a checkpoint or a topology that cannot be served."""


class FaultError(CspsError, RuntimeError):
    """A failure that neither client nor operator caused."""


class GangLost(FaultError):
    """A rank died; its gang is replaced, and its KV and requests are lost."""


class RanksHeld(FaultError):
    """An older router still commands the ranks; a newer one waits until it is gone."""


class Superseded(FaultError):
    """A newer router has taken the ranks over; they never obey an older one again."""


class DeadlineExceeded(FaultError):
    """A wait took too long; `name` says which."""

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__(f"{name} did not finish within {seconds:g} s")
        self.name, self.seconds = name, seconds

    def wire_data(self) -> dict[str, Any]:
        return {"name": self.name, "seconds": self.seconds}


class TransferError(FaultError):
    """KV cache arrived incomplete, out of place, from a former gang, or not at all."""


class ConnectionLost(FaultError):
    """The connection is gone; calls sent over it get no answer."""


class ProtocolError(FaultError):
    """A peer sent what the protocol does not allow."""


class ProtocolMismatch(ProtocolError):
    """Two processes of different releases connected."""

    def __init__(self, *, ours: int, theirs: int) -> None:
        super().__init__(
            f"protocol version mismatch: this side speaks version {ours}, the peer {theirs}; "
            "run the same release on every node"
        )
        self.ours, self.theirs = ours, theirs

    def wire_data(self) -> dict[str, Any]:
        # The peer's "ours" is this side's "theirs".
        return {"ours": self.theirs, "theirs": self.ours}


class AuthenticationFailed(FaultError):
    """A peer could not prove that it knows the cluster secret."""


class Cancelled(FaultError):
    """The caller cancelled the request or disconnected."""


class RemoteError(FaultError):
    """A peer failed with something outside this tree; `code` is the name it gave."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code, self.message = code, message

    def wire_data(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message}


def to_wire(exc: BaseException) -> dict[str, Any]:
    """Return the map that represents `exc` in an RPC response."""
    wire: dict[str, Any] = {"code": type(exc).__name__, "message": str(exc)}
    if isinstance(exc, CspsError) and (data := exc.wire_data()):
        wire["data"] = data
    return wire


def from_wire(wire: object) -> CspsError:
    """Return the exception that a peer's map represents; `RemoteError` if it names no known
    class."""
    if not isinstance(wire, Mapping):
        return RemoteError("error", str(wire))
    code, message, data = str(wire.get("code")), str(wire.get("message")), wire.get("data")
    cls = _BY_NAME.get(code)
    if cls is None:
        return RemoteError(code, message)
    try:
        return cls(**data) if data else cls(message)
    except (TypeError, ValueError):  # a peer of another release may send other arguments
        return RemoteError(code, message)


def abridged(value: object, limit: int = 64) -> str:
    """Return `repr(value)` cut to `limit` characters, to echo user input in an error."""
    # Slice before repr(), because clients may send megabytes.
    text = repr(value[: limit + 1]) if isinstance(value, str | bytes) else repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Return text to append to "unknown <name>": the likeliest intended name, or all allowed ones.

    >>> nearest("max_token", ["max_tokens", "model"])
    "; did you mean 'max_tokens'?"
    >>> nearest("zzz", ["b", "a"])
    '; allowed: a, b'
    """
    choices = sorted(allowed)
    return closest(name, choices) or f"; allowed: {', '.join(choices)}"


def closest(name: str, allowed: Iterable[str]) -> str:
    """Return what `nearest` does if an allowed name is alike, otherwise nothing."""
    # difflib is quadratic in the length of the name, which a client chooses.
    close = difflib.get_close_matches(name[:64], sorted(allowed), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
