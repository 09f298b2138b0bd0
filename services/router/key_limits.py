"""Limits of API keys: requests and tokens per minute, and requests at a time.

Keys of one name count together. The share of KV slots is the scheduler's business, because it knows
the slots (`scheduling/core/requests.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from csps.protocols.core.errors import RateLimited
from csps.services.requests.request_spec import ApiKey
from csps.services.scheduling.events.events import TenantId
from csps.services.settings.settings import AuthSettings, KeyLimits

_log = logging.getLogger(__name__)

MINUTE_S = 60.0
BUSY_RETRY_S = 1.0
"""Pause that a client is told whose requests at a time are too many: when one ends is unknown."""


class Allowance:
    """An allowance per minute, which comes back evenly.

    It may be overdrawn, by a prompt above the limit or by tokens that are known only at the end.
    Then it has to be paid back before anything else is allowed.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._left, self._at_s = float(per_minute), now_s

    def wait_s(self, wanted: int, now_s: float) -> float:
        """Return the seconds until so much is allowed: at most the whole allowance has to be there;
        0: now."""
        self._refill(now_s)
        missing = min(wanted, self._per_minute) - self._left
        return max(0.0, missing * MINUTE_S / self._per_minute)

    def take(self, used: int, now_s: float) -> None:
        """Use some of the allowance."""
        self._refill(now_s)
        self._left -= used

    def _refill(self, now_s: float) -> None:
        back = (now_s - self._at_s) * self._per_minute / MINUTE_S
        self._left, self._at_s = min(self._per_minute, self._left + back), now_s


class _Usage:
    """What one name uses."""

    def __init__(self, limits: KeyLimits, now_s: float) -> None:
        self.limits = limits
        per_minute = limits.requests_per_minute, limits.tokens_per_minute
        self.requests, self.tokens = (
            None if limit is None else Allowance(limit, now_s) for limit in per_minute
        )
        self.running = 0


class KeyLimiter:
    """Refuses requests of API keys that have reached a limit.

    Args:
        auth: limits by name; None: no limits.
        clock: in seconds; only differences matter.
    """

    def __init__(
        self, auth: AuthSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._auth, self._clock = auth or AuthSettings(), clock
        self._usage: dict[TenantId, _Usage] = {}

    def check_request(self, key: ApiKey) -> None:
        """Count a request whose headers were read.

        Raises:
            RateLimited: it exceeds a limit, whatever its prompt.
        """
        usage, now_s = self._of(key), self._clock()
        if usage.requests is not None:
            self._check(key, usage.requests.wait_s(1, now_s), "requests per minute")
            usage.requests.take(1, now_s)
        self.check_prompt(key, 1)

    def check_prompt(self, key: ApiKey, tokens: int) -> None:
        """Check that a request with a prompt of so many tokens may run.

        Raises:
            RateLimited: it exceeds a limit.
        """
        usage = self._of(key)
        if usage.tokens is not None:
            self._check(key, usage.tokens.wait_s(tokens, self._clock()), "tokens per minute")
        most = usage.limits.concurrent_requests
        if most is not None and usage.running >= most:
            self._refuse(key, BUSY_RETRY_S, f"concurrent requests, of which it may have {most}")

    def begin(self, key: ApiKey, prompt_tokens: int) -> None:
        """Count a request that was admitted."""
        usage = self._of(key)
        usage.running += 1
        if usage.tokens is not None:
            usage.tokens.take(prompt_tokens, self._clock())

    def end(self, key: ApiKey, generated_tokens: int) -> None:
        """Count the end of a request."""
        usage = self._of(key)
        usage.running -= 1
        if usage.tokens is not None:
            usage.tokens.take(generated_tokens, self._clock())

    def kv_permille(self, key: ApiKey) -> int:
        """Return the share of KV slots of a name, in thousandths."""
        share = self._of(key).limits.kv_share
        return 1000 if share is None else int(1000 * share)

    def _of(self, key: ApiKey) -> _Usage:
        usage = self._usage.get(key.tenant)
        if usage is None:
            limits = self._auth.limits_of(key.name)
            usage = self._usage[key.tenant] = _Usage(limits, self._clock())
        return usage

    def _check(self, key: ApiKey, wait_s: float, what: str) -> None:
        if wait_s > 0:
            self._refuse(key, wait_s, what)

    @staticmethod
    def _refuse(key: ApiKey, wait_s: float, what: str) -> None:
        _log.debug("refused a request of %s: %s", key.name or "a client", what)
        whose = f"API key '{key.name}'" if key.name else "this server"
        raise RateLimited(
            f"Rate limit reached for {whose} on {what}. Please try again in {wait_s:.3g} s.",
            retry_after_s=wait_s,
        )
