"""Asking for a plan: a request never waits long for advice, and never fails for lack of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from csps.protocols.plans import Plan, PlanRequest

_log = logging.getLogger(__name__)

Planner = Callable[[PlanRequest], Awaitable[Plan]]
"""The configurator, wherever it runs. Its exceptions, of any kind, cost only the advice."""


async def plan_or_exact(planner: Planner, request: PlanRequest, *, deadline_s: float) -> Plan:
    """The planner's answer, or exact attention, with the reason, if there is none in time."""
    try:
        async with asyncio.timeout(deadline_s):
            return await planner(request)
    except TimeoutError:
        return _exact(f"the configurator did not answer within {deadline_s:g} s")
    except Exception as exc:  # it may run elsewhere and fail in any way
        return _exact(f"the configurator failed: {type(exc).__name__}: {exc}")


def _exact(reason: str) -> Plan:
    _log.warning("planning exact attention because %s", reason)
    return Plan(attention="exact", reason=reason)
