"""Context Parallelism's three rules against its Table 4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paper_tables import MEMBERS, MODEL, SPEEDS, TABLE_4

from csps.protocols.attention.ring_choice import (
    EmpiricalRule,
    FittedRule,
    RingRules,
    RingSpeeds,
    algorithm_5,
    hiding_tokens,
    miss_rate,
    parse_rules,
)
from csps.protocols.core.errors import ConfigError
from csps.protocols.core.topology import GroupShape

PAPER = {"model": MODEL, "speeds": SPEEDS, "members": MEMBERS}
PRINTED = EmpiricalRule(alpha=-1.059, beta=1.145, gamma=12.112)
MENDED = EmpiricalRule(alpha=-1.059, beta=1.145, gamma=12.68)


def right(choices: list[str]) -> int:
    return sum(
        choice == ("ring_kv" if point.kv_s < point.q_s else "ring_q")
        for choice, point in zip(choices, TABLE_4, strict=True)
    )


def algorithm_1(new: int, history: int) -> str:
    """Alg. 1, which leaves out what pass-Q sends in the end."""
    hides = new >= hiding_tokens(MODEL, SPEEDS, MEMBERS)
    return "ring_kv" if hides or miss_rate(new, history) >= 2 * MODEL.ratio else "ring_q"


def test_table_4() -> None:
    assert round(hiding_tokens(MODEL, SPEEDS, MEMBERS)) == 4933
    assert right([algorithm_1(point.new, point.history) for point in TABLE_4]) == 13
    assert right([algorithm_5(point.new, point.history, **PAPER) for point in TABLE_4]) == 12
    assert (
        right([MENDED.choose(point.new, point.history) for point in TABLE_4]) == len(TABLE_4) == 14
    )
    assert {PRINTED.choose(point.new, point.history) for point in TABLE_4} == {"ring_q"}


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_algorithm_5_equals_the_printed_one(new: int, history: int) -> None:
    """The printed rule has its first clause, and the bandwidth in the second."""
    per_token = 4 * SPEEDS.bytes_per_s / (MEMBERS * SPEEDS.flops * MODEL.element_bytes)
    printed = (
        new >= hiding_tokens(MODEL, SPEEDS, MEMBERS)
        or miss_rate(new, history) >= 2 * MODEL.ratio - new * per_token
    )
    assert (algorithm_5(new, history, **PAPER) == "ring_kv") == printed


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_algorithm_5_takes_pass_q_less_often_than_algorithm_1(new: int, history: int) -> None:
    if algorithm_1(new, history) == "ring_kv":
        assert algorithm_5(new, history, **PAPER) == "ring_kv"
    assert algorithm_1(new, 0) == "ring_kv", "few KV heads and no history"


def rules(*fitted: FittedRule) -> RingRules:
    slow = RingSpeeds(flops=SPEEDS.flops, bytes_per_s=SPEEDS.bytes_per_s / 100)
    return RingRules(model=MODEL, inside=SPEEDS, between=slow, fitted=fitted)


def test_the_fitted_rule_of_a_groups_size_comes_first() -> None:
    always = EmpiricalRule(alpha=0, beta=0, gamma=-1)
    made = rules(FittedRule(sp=4, tp=8, rule=always))
    assert made.choose(GroupShape((4,), 8), 10**6, 0) == "ring_q"
    assert made.choose(GroupShape((2, 2), 8), 10**6, 0) == "ring_q"
    assert made.choose(GroupShape((4,), 4), 10**6, 0) == "ring_kv"


def test_without_one_the_link_between_servers_counts() -> None:
    assert rules().choose(GroupShape((4,)), 6400, 121600) == "ring_kv"
    assert rules().choose(GroupShape((2, 2)), 6400, 121600) == "ring_q"


def test_rules_are_read_as_they_were_written() -> None:
    made = rules(FittedRule(sp=2, tp=1, rule=MENDED))
    assert parse_rules(made.canonical) == made
    assert parse_rules(made.canonical).digest == made.digest != rules().digest
    for broken in (b"", b"{}", b"[1]", made.canonical.replace(b"alpha", b"gamma")):
        with pytest.raises(ConfigError, match="invalid ring rules"):
            parse_rules(broken)
