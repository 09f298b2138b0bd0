"""Piggybacked requests, as a router sends them."""

from __future__ import annotations

import asyncio

import msgspec
from gang_driver import Cell, Request

from csps.protocols.rpc.schema import pack


async def reserve_piggybacked(cell: Cell, request: Request) -> None:
    """Reserve a sequence, with the prompt for its master's ranks only."""
    message = request.reserve(cell.epoch)
    tokens = msgspec.structs.replace(message, prompt=request.prompt.astype("<i4").tobytes())
    master = range(request.master * cell.decode.tp, (request.master + 1) * cell.decode.tp)
    await asyncio.gather(
        *(
            cell.decode.call(rank, "reserve", pack(tokens if rank in master else message))
            for rank in range(cell.decode.world_size)
        )
    )


def piggyback(cell: Cell, request: Request, budget: int) -> None:
    """Let a request's prompt be computed from the next iteration on."""
    cell.notify_join(request, None, budget)
