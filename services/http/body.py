"""What comes in with a request: its body, within bounds, and the client's leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from csps.services.http.errors import BodyTooSlow, PayloadTooLarge
from csps.services.launch.settings import HttpSettings

T = TypeVar("T")


async def read_body(
    request: Request,
    limit: int,
    *,
    grown: Callable[[int], None] = lambda size: None,
    deadlines: HttpSettings,
) -> bytes:
    """The whole body.

    Args:
        grown: told its length as it comes; what it raises ends the reading.

    Raises:
        PayloadTooLarge: it is longer than `limit` bytes; the rest is not read.
        BodyTooSlow: it, or a part of it, did not come in time.
    """
    whole_s, part_s = deadlines.body_deadline_s, deadlines.body_silence_s
    try:
        async with asyncio.timeout(whole_s), asyncio.timeout(part_s) as part:
            return await _read(request, limit, grown, heard=partial(_put_off, part, part_s))
    except TimeoutError:
        rule = (
            f"Nothing of the request body came for {part_s:g} s."
            if part.expired()
            else f"The request body did not arrive within {whole_s:g} s."
        )
        raise BodyTooSlow(rule) from None


async def _read(
    request: Request, limit: int, grown: Callable[[int], None], heard: Callable[[], None]
) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise _too_large(limit)
        grown(len(body))
        heard()
    return bytes(body)


def _put_off(timeout: asyncio.Timeout, seconds: float) -> None:
    timeout.reschedule(asyncio.get_running_loop().time() + seconds)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away.

    The body must have been read before: what `receive` still brings is the client's leaving.

    Raises:
        ClientDisconnect: nobody waits for the answer any more.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        await _end(task, watcher)


async def _disconnected(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, Exception):
            await task


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The request body is larger than this server's limit of {limit} bytes.")
