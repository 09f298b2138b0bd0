"""Orders of waiting requests, which the simulator compares with the product's.

They replace the rule by which requests are due (`promises.Ordering`). Client priorities and the
bound on being passed stay, so that only the rule differs. In first-come order the scheduler is told
neither objectives nor priorities.
"""

from __future__ import annotations

from collections.abc import Mapping

from csps.services.scheduling.core.promises import LEAST_SLACK, Ordering
from csps.services.scheduling.state.state import Request


def relative_slack(request: Request, now_ns: int) -> int | None:
    """Return Medha's length-aware relative slack: the time left before the latest start, as a share
    of the prompt's own time.

    A long prompt's slack shrinks more slowly than a short one's, so that short prompts pass long
    ones until these are in danger, too. Slack may be negative: what is late comes first.
    """
    latest_ns = request.latest_start_ns
    if latest_ns is None:
        return None
    slack = (latest_ns - now_ns) / max(1, request.predicted_ns)
    return now_ns + round(slack * SLACK_UNIT_NS)


SLACK_UNIT_NS = 1_000
"""Time for which a relative slack of 1 counts: so little that all requests with an objective are
due about now, before those without."""

FIRST_COME = "first_come"
ORDERS: Mapping[str, Ordering] = {
    "least_slack": LEAST_SLACK,
    "relative_slack": Ordering(relative_slack, varies=True),
    FIRST_COME: LEAST_SLACK,
}
