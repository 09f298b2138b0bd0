"""Asking for a plan: a request never waits long for advice, and never fails for lack of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from csps.protocols.errors import RequestError
from csps.protocols.gang_client import GangClient
from csps.protocols.plans import Plan, PlanRequest
from csps.services.running import Generation

_log = logging.getLogger(__name__)

Planner = Callable[[PlanRequest], Awaitable[Plan]]
"""The configurator, wherever it runs. It may refuse a request (`RequestError`); exceptions of any
other kind cost only the advice."""


def plan_request(generation: Generation, prefill: GangClient | None) -> PlanRequest:
    """What to ask the configurator; `prefill` is the gang that there is now."""
    return PlanRequest(
        prompt_tokens=generation.prompt.size,
        objective=generation.objective,
        attention=generation.attention,
        csa=generation.csa,
        locations=prefill.locations if prefill is not None else (),
        tp=prefill.tp if prefill is not None else 1,
    )


async def plan_or_exact(planner: Planner, request: PlanRequest, *, deadline_s: float) -> Plan:
    """The planner's answer, or exact attention, with the reason, if there is none in time.

    Raises:
        RequestError: the planner refuses the request.
    """
    try:
        async with asyncio.timeout(deadline_s):
            return await planner(request)
    except RequestError:
        raise
    except TimeoutError:
        return _exact(f"the configurator did not answer within {deadline_s:g} s")
    except Exception as exc:  # it may run elsewhere and fail in any way
        return _exact("the configurator failed", exc)


def _exact(reason: str, error: Exception | None = None) -> Plan:
    """Clients read the reason (`explain`); the error, which may name addresses, goes to the log."""
    _log.warning("planning exact attention because %s", reason, exc_info=error)
    return Plan(attention="exact", reason=reason)
