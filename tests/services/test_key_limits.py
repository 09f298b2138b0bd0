"""Limits of API keys: allowances against a count of everything, and whose settings hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_examples import examples

from csps.protocols.core.errors import ConfigError, RateLimited
from csps.services.requests.request_spec import NO_KEY, ApiKey
from csps.services.router.key_limits import MINUTE_S, Allowance, KeyLimiter
from csps.services.settings.settings import AuthSettings, KeyLimits, Settings

ALICE, BOB = ApiKey("alice", 1, b"a"), ApiKey("bob", 2, b"b")


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@settings(max_examples=examples(200))
@given(
    limit=st.integers(1, 1000),
    steps=st.lists(st.tuples(st.floats(0, 90), st.integers(1, 300)), max_size=60),
)
def test_no_window_has_more_than_its_allowance(limit: int, steps: list[tuple[float, int]]) -> None:
    """Beside a full allowance, and the one request that may overdraw it."""
    allowance, now_s = Allowance(limit, 0.0), 0.0
    taken: list[tuple[float, int]] = []
    for pause_s, wanted in steps:
        now_s += pause_s
        if allowance.wait_s(wanted, now_s) == 0:
            allowance.take(wanted, now_s)
            taken.append((now_s, wanted))
    for first, (since_s, _) in enumerate(taken):
        for last, (until_s, most) in enumerate(taken[first:], first):
            used = sum(wanted for _, wanted in taken[first : last + 1])
            overdrawn = max(0, most - limit)
            assert used <= limit * (1 + (until_s - since_s) / MINUTE_S) + overdrawn + 1e-6


@settings(max_examples=examples(200))
@given(
    limit=st.integers(1, 1000),
    used=st.lists(st.integers(1, 3000), max_size=5),
    wanted=st.integers(1, 3000),
)
def test_the_wait_is_as_long_as_it_has_to_be(limit: int, used: list[int], wanted: int) -> None:
    allowance = Allowance(limit, 0.0)
    for tokens in used:
        allowance.take(tokens, 0.0)
    wait_s = allowance.wait_s(wanted, 0.0)
    assert allowance.wait_s(wanted, wait_s) == pytest.approx(0, abs=1e-6)
    owed = sum(used) - limit + min(wanted, limit)
    assert wait_s == pytest.approx(max(0.0, owed * MINUTE_S / limit), abs=1e-6)


def test_requests_per_minute() -> None:
    clock = Clock()
    limiter = KeyLimiter(AuthSettings(limits=KeyLimits(requests_per_minute=2)), clock)
    limiter.check_request(ALICE)
    limiter.check_request(ALICE)
    with pytest.raises(RateLimited, match="'alice' on requests per minute") as raised:
        limiter.check_request(ALICE)
    assert raised.value.retry_after_s == pytest.approx(30)
    limiter.check_request(BOB)
    clock.now_s = 30.0
    limiter.check_request(ALICE)


def test_keys_of_one_name_count_together() -> None:
    limiter = KeyLimiter(AuthSettings(limits=KeyLimits(requests_per_minute=1)), Clock())
    limiter.check_request(ALICE)
    with pytest.raises(RateLimited):
        limiter.check_request(ALICE._replace(digest=b"another key of alice"))


def test_tokens_of_prompts_and_answers_count() -> None:
    clock = Clock()
    limiter = KeyLimiter(AuthSettings(limits=KeyLimits(tokens_per_minute=600)), clock)
    limiter.check_prompt(ALICE, 500)
    limiter.begin(ALICE, 500)
    limiter.end(ALICE, 700)
    with pytest.raises(RateLimited, match="tokens per minute") as raised:
        limiter.check_request(ALICE)  # before its body is read
    assert raised.value.retry_after_s == pytest.approx(60.1)


def test_a_prompt_above_the_limit_runs_when_nothing_was_used() -> None:
    clock = Clock()
    limiter = KeyLimiter(AuthSettings(limits=KeyLimits(tokens_per_minute=600)), clock)
    limiter.begin(ALICE, 1)
    with pytest.raises(RateLimited):
        limiter.check_prompt(ALICE, 10_000)
    clock.now_s = 0.2
    limiter.check_prompt(ALICE, 10_000)
    limiter.begin(ALICE, 10_000)
    with pytest.raises(RateLimited) as raised:
        limiter.check_prompt(ALICE, 100)
    assert raised.value.retry_after_s == pytest.approx(950)


def test_requests_at_a_time() -> None:
    limiter = KeyLimiter(AuthSettings(limits=KeyLimits(concurrent_requests=2)), Clock())
    for key in (ALICE, BOB, ALICE):
        limiter.check_request(key)
        limiter.begin(key, 5)
    with pytest.raises(RateLimited, match="concurrent requests, of which it may have 2") as raised:
        limiter.check_request(ALICE)
    assert raised.value.retry_after_s > 0
    limiter.check_request(BOB)
    limiter.end(ALICE, 3)
    limiter.check_request(ALICE)


def test_an_open_server_has_no_limits_unless_they_are_set() -> None:
    limiter = KeyLimiter()
    for _ in range(1000):
        limiter.check_request(NO_KEY)
        limiter.begin(NO_KEY, 1 << 20)
    assert limiter.kv_permille(NO_KEY) == 1000
    bounded = KeyLimiter(AuthSettings(limits=KeyLimits(requests_per_minute=1)), Clock())
    bounded.check_request(NO_KEY)
    with pytest.raises(RateLimited, match="for this server on requests"):
        bounded.check_request(NO_KEY)


def test_overrides_replace_what_they_name() -> None:
    auth = AuthSettings.model_validate(
        {
            "limits": {"requests_per_minute": 5, "tokens_per_minute": 100, "kv_share": 0.5},
            "overrides": {"alice": {"tokens_per_minute": None, "kv_share": 0.125}},
        }
    )
    limits = auth.limits_of("alice")
    assert limits == KeyLimits(requests_per_minute=5, kv_share=0.125)
    assert auth.limits_of("bob") == auth.limits
    limiter = KeyLimiter(auth)
    assert (limiter.kv_permille(ALICE), limiter.kv_permille(BOB)) == (125, 500)


@pytest.mark.parametrize(
    ("auth", "message"),
    [
        ({"limits": {"request_per_minute": 5}}, "did you mean 'requests_per_minute'"),
        ({"limits": {"requests_per_minute": 0}}, "auth.limits.requests_per_minute"),
        ({"limits": {"kv_share": 0}}, "auth.limits.kv_share"),
        ({"overrides": {"alice": {"kv_shares": 1}}}, "did you mean 'kv_share'"),
    ],
)
def test_mistakes_are_named(auth: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.model_validate({"auth": auth})
